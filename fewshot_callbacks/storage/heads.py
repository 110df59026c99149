"""Shapes and types of the arrays in files. Only the header or footer of a remote file is read, with range requests."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewshot_callbacks.files.addresses import naming_address
from fewshot_callbacks.files.remote_cache import RemoteFile, local_copies
from fewshot_callbacks.storage.arrays import PICKLE, FileArrays, FileError, LazyArray, naming_file
from fewshot_callbacks.storage.arrow import arrow_arrays, is_arrow_file
from fewshot_callbacks.storage.arrow_values import number_type
from fewshot_callbacks.storage.formats import FORMATS
from fewshot_callbacks.storage.npy import read_head
from fewshot_callbacks.system.extras import required_extra

# Bytes per request. A longer footer needs one further request.
_BLOCK_BYTES = 2**14
_SAFETENSORS_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": torch.bfloat16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
# Represents all types that vectors cannot have.
_OTHER = np.dtype("U1")


def open_heads(file: Path | RemoteFile) -> FileArrays:
    """Return the arrays of a file by name. The arrays of a remote file have shapes and types, but no content.

    A remote Arrow stream is fetched completely, because it has no index. For a remote Arrow file, the first batch
    is read, because only it contains the dim of a list column.
    """
    if isinstance(file, Path):
        return FORMATS[file.suffix.lower()](file)
    with naming_address(file.address):
        stream = file.filesystem.open(file.path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead")
    ending = file.suffix.lower()
    if ending in _HEADS:
        return _HEADS[ending](stream)
    with required_extra("files", f"a {ending} file"):
        arrow = import_module("pyarrow")
    if is_arrow_file(stream.read(_BLOCK_BYTES)):
        return arrow_arrays(lambda: arrow.PythonFile(stream, mode="r"), is_stream=False)
    return FORMATS[ending](local_copies([file])[0])


def array_axes(file: Path | RemoteFile) -> dict[str, int]:
    """Return name -> number of axes, for each array or column of a file."""
    with naming_file(file):
        return {name: array.ndim for name, array in open_heads(file).items()}


class _Head(LazyArray):
    """The shape and the type of an array. Its rows cannot be read."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.ndim = len(shape)
        self._shape = shape
        self._dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> Any:
        if isinstance(self._dtype, np.dtype) and self._dtype.hasobject:
            raise FileError(PICKLE)
        return self._dtype

    def __getitem__(self, rows: slice) -> Any:
        raise NotImplementedError("Only the header of this file was read.")


def _head_of_array(stream: Any) -> _Head:
    head = read_head(stream)
    return _Head(head.shape, head.dtype)


def _heads_of_npy(stream: Any) -> FileArrays:
    return {"embeddings": _head_of_array(BufferedReader(stream))}


def _heads_of_npz(stream: Any) -> FileArrays:
    heads: FileArrays = {}
    with zipfile.ZipFile(stream) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                heads[name.removesuffix(".npy")] = _head_of_array(member)
    return heads


def _heads_of_parquet(stream: Any) -> FileArrays:
    with required_extra("files", "a .parquet file"):
        metadata = import_module("pyarrow.parquet").read_metadata(stream)
    # The footer contains the number of values of each column, which determines the length of its lists.
    values = Counter[str]()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for column in (group.column(index) for index in range(group.num_columns)):
            values[column.path_in_schema.partition(".")[0]] += column.num_values
    rows = metadata.num_rows
    heads: FileArrays = {}
    for field in metadata.schema.to_arrow_schema():
        numbers = number_type(field.type)
        if numbers is None:
            heads[field.name] = _Head((rows,), _OTHER)
        else:
            shape = (rows, values[field.name] // max(rows, 1))
            heads[field.name] = _Head(shape, np.dtype(numbers.to_pandas_dtype()))
    return heads


def _heads_of_safetensors(stream: Any) -> FileArrays:
    size = int.from_bytes(stream.read(8), "little")
    tensors = json.loads(stream.read(size))
    return {
        name: _Head(tuple(tensor["shape"]), _SAFETENSORS_DTYPES.get(tensor["dtype"], _OTHER))
        for name, tensor in tensors.items()
        if name != "__metadata__" and tensor["shape"]  # a scalar has no rows
    }


_HEADS: dict[str, Callable[[Any], FileArrays]] = {
    ".npy": _heads_of_npy,
    ".npz": _heads_of_npz,
    ".parquet": _heads_of_parquet,
    ".safetensors": _heads_of_safetensors,
}
"""Extension in lower case -> function that reads the header or footer of an open file."""
