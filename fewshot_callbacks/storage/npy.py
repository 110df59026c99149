"""Arrays in NumPy's format, `.npy`, memory-mapped."""

from __future__ import annotations

import math
import threading
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.storage.arrays import PICKLE, FileArrays, FileError

# A file, or a member of an archive, which is not an `IO` for Python.
Stream = IO[bytes] | BufferedIOBase
# NumPy parses a header as a Python literal, and Python 3.11 sometimes fails if two threads parse at the same time.
PARSING = threading.Lock()


class ArrayHead(NamedTuple):
    """The header of an array in NumPy's format."""

    shape: tuple[int, ...]
    # Fortran order: the numbers of a column are contiguous
    by_columns: bool
    dtype: np.dtype[Any]


def open_npy(file: Path) -> FileArrays:
    """Return the memory-mapped array of a file, under the name `embeddings`."""
    with file.open("rb") as stream:
        return {"embeddings": map_array(stream)}


def map_array(stream: Stream, size: float = math.inf) -> NDArray[Any]:
    """Return a memory-mapped array in NumPy's format.

    `size` is the bytes of the array with its header. The stream is at the beginning of the array.
    """
    begin = stream.tell()
    shape, by_columns, dtype = read_head(stream)
    if dtype.hasobject:  # reading it raises an error later
        return np.broadcast_to(np.empty((), dtype), shape)
    needed = stream.tell() - begin + dtype.itemsize * math.prod(shape)
    if needed > size:  # the bytes after `size` belong to another array
        raise InputError(f"an array of shape {shape} needs {needed:,} bytes, but there are only {size:,}")
    if math.prod(shape) == 0:  # an empty array cannot be mapped
        return np.broadcast_to(np.empty((), dtype), shape)
    return np.asarray(np.memmap(stream, dtype, "r", stream.tell(), shape, "F" if by_columns else "C"))


def read_head(stream: Stream) -> ArrayHead:
    """Return the header of an array in NumPy's format, and leave the stream at the first number."""
    begin = stream.tell()
    if stream.read(1) == b"\x80":  # the first byte of every pickle since Python 2.3
        raise FileError(PICKLE)
    stream.seek(begin)
    # Version 3 differs from version 2 only in field names, which embeddings do not have.
    with PARSING:
        if np.lib.format.read_magic(stream) == (1, 0):
            return ArrayHead(*np.lib.format.read_array_header_1_0(stream))
        return ArrayHead(*np.lib.format.read_array_header_2_0(stream))
