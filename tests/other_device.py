"""A fake device: its tensors compute on the CPU and, like those of CUDA, cannot be mixed with tensors of the CPU.

They say that they are on the `meta` device, since every PyTorch has that one. Unlike tensors there, they hold values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

OTHER = torch.device("meta")

INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
"""Operations in which the index of a tensor on a device may be on the CPU, but not the other way round."""


class _OnOther(Tensor):
    """A tensor on the other device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> _OnOther:
        made: _OnOther = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=OTHER
        )
        made.held = held
        return made

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def tolist(self) -> Any:  # which PyTorch has not for subclasses
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {OTHER} device type tensor to numpy. Use Tensor.cpu() first.")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


class OtherDevice(TorchDispatchMode):
    """Inside the block there is another device: `on_other` moves tensors to it, and so does `to(tensor.device)`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(function, args, kwargs or {})


def on_other(part: Any) -> Any:
    """Return a tensor on the other device, and anything else as it is."""
    return _OnOther(part) if isinstance(part, Tensor) and not isinstance(part, _OnOther) else part


def _computed(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what an operation returns, on the device of its operands or on that which it is told."""
    operands = [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, Tensor)]
    others = [part for part in operands if isinstance(part, _OnOther)]
    name = function.overloadpacket.__name__
    on_cpu = [part for part in operands if not isinstance(part, _OnOther) and part.ndim]
    copies = name in ("copy_", "_to_copy")
    if others and on_cpu and not copies and not (name in INDEXING and isinstance(args[0], _OnOther)):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} got some on cpu, some on {OTHER}."
        )
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
    if device is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    found = function(*tree_map(_held, args), **tree_map(_held, kwargs))
    if name.endswith("_") and not name.startswith("_"):  # in place
        return args[0]
    is_other = bool(others) if device is None else device.type == OTHER.type
    return tree_map(on_other, found) if is_other else found


def _held(part: Any) -> Any:
    return part.held if isinstance(part, _OnOther) else part
