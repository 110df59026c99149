"""Memory-mapped tensors of safetensors files, including bfloat16."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fewshot_callbacks.storage.arrays import FileArrays, LazyArray
from fewshot_callbacks.system.extras import required_extra


def open_safetensors(file: Path) -> FileArrays:
    """Return the tensors of a file that have rows."""
    with required_extra("files", "a .safetensors file"):
        opened = import_module("safetensors").safe_open(file, framework="pt")
    tensors = {name: _FileTensor(opened, name) for name in opened.keys()}  # noqa: SIM118 - not a dictionary
    return {name: tensor for name, tensor in tensors.items() if tensor.ndim > 0}  # a scalar has no rows


class _FileTensor(LazyArray):
    """A tensor of an open file."""

    def __init__(self, opened: Any, name: str) -> None:
        self._opened = opened
        self._name = name
        self._shape: tuple[int, ...] = tuple(opened.get_slice(name).get_shape())
        self.ndim = len(self._shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        return self[:0].dtype

    def __getitem__(self, rows: slice) -> Any:
        start, stop, _ = rows.indices(self._shape[0])
        tensor = self._opened.get_slice(self._name)[start:stop]
        if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16
            return tensor
        if tensor.is_floating_point() and tensor.dtype.itemsize == 1:  # NumPy has no 8-bit floats either
            tensor = tensor.float()
        return tensor.numpy()
