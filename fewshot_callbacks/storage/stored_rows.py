"""Rows of embeddings that are stored in a file or in a smaller type, and are read in chunks."""

from __future__ import annotations

import math
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from mmap import mmap
from typing import IO, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.utils.dlpack
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.system.words import with_article

T = TypeVar("T")

# Types of stored numbers that an evaluation supports. NumPy has no bfloat16.
DTYPES = ("float16", "torch.bfloat16", "float32", "float64", "int8", "uint8")
_DTYPE_NAMES = {name.removeprefix("torch.") for name in DTYPES}
# Types that are converted before rows are compared.
_CONVERTED = _DTYPE_NAMES - {"float32", "float64"}

# Fraction of the budget for rows that stay in memory.
RESIDENT_SHARE = 0.2
# Fraction of the budget for reading. It has room for `CHUNKS_READ` float32 chunks: the current chunk, the next one, an
# operand of a product, and a chunk in its stored type.
READ_SHARE = 0.3
CHUNKS_READ = 4
# With fewer rows per chunk, the calls cost more than the reading.
LEAST_CHUNK_ROWS = 64


class StoredRows:
    """Contiguous rows of an array, which are read when they are needed.

    Args:
        array: (rows, dim) Floating-point numbers or small integers, with `shape`, `dtype` and slicing.
        stop: The row after the last; None for the end of the array.

    Attributes:
        shape: (rows, dim).
        dtype: The type in which rows are compared: float64 for float64, otherwise float32, which represents each number
            of the smaller types exactly.
        resident_rows: Number of rows that may stay in memory.
        chunk_rows: Number of rows that are read at a time.
        remaining_share: Fraction of the budget for everything else.
    """

    def __init__(self, array: Any, memory: float, start: int = 0, stop: int | None = None) -> None:
        self.array = array
        self.start = start
        self.stop = int(array.shape[0]) if stop is None else stop
        self.dim = int(array.shape[1])
        self.ndim = 2
        self.shape = (self.stop - self.start, self.dim)
        is_double = str(array.dtype).endswith("float64")
        self.dtype = torch.float64 if is_double else torch.float32
        row_bytes = 4 * self.dim
        finite_memory = min(memory, 2.0**60)
        self.resident_rows = min(len(self), int(RESIDENT_SHARE * finite_memory / row_bytes))
        self.chunk_rows = max(LEAST_CHUNK_ROWS, int(READ_SHARE * finite_memory / (CHUNKS_READ * row_bytes)))
        self.remaining_share = 1 - RESIDENT_SHARE - READ_SHARE
        self._blocks = _Blocks()

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """Return the rows of indices, a mask or a slice."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            return self.read(slice(start, stop))
        indices = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        return self.take(indices.numpy())

    def read(self, rows: slice, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of the rows of a slice, by default in the type in which rows are compared."""
        tensor = rows_of(self.array, slice(self.start + rows.start, self.start + rows.stop))
        dtype = dtype or self.dtype
        if tensor.numel() and len(tensor) <= self.chunk_rows:
            return self._blocks.empty(tensor.shape, dtype).copy_(tensor)
        return tensor.to(dtype).contiguous()

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice, rows) for all rows in order, chunk by chunk."""
        return read_ahead(even_slices(0, len(self), self.chunk_rows), self.read)

    def take(self, indices: NDArray[Any]) -> Tensor:
        """Return (indices, dim) the rows of these indices. All rows are read once, in order."""
        result = torch.empty(len(indices), self.dim, dtype=self.dtype)
        for chunk, values in self.chunks():
            in_chunk = np.flatnonzero((indices >= chunk.start) & (indices < chunk.stop))
            result[torch.from_numpy(in_chunk)] = values[torch.from_numpy(indices[in_chunk] - chunk.start)]
        return result

    def memory_mapped(self) -> Tensor:
        """Return (rows, dim) all rows as a memory-mapped tensor.

        It maps the file of the array, or a temporary copy that is deleted with the tensor. A tensor in memory of the
        right type is returned without a copy.
        """
        if isinstance(self.array, Tensor) and self.array.dtype == self.dtype:
            return self.array[self.start : self.stop].contiguous()
        if _is_mapped(self.array):
            values = self.array[self.start : self.stop]
            if values.dtype in (np.float32, np.float64) and values.flags.c_contiguous:
                return read_only_tensor(values)
        dtype = np.float64 if self.dtype == torch.float64 else np.float32
        # No buffer: after a failed write, closing the file would flush the buffer and fail again.
        with tempfile.TemporaryFile(buffering=0) as file:
            self._write(file)
            return torch.from_numpy(np.memmap(file, dtype, "r+", shape=self.shape))

    def _write(self, file: IO[bytes]) -> None:
        """Write all rows to a file before it is mapped, because a full disk under a mapped file kills the process."""
        for _, rows in self.chunks():
            unwritten = rows.numpy().data.cast("B")
            try:
                while unwritten:  # a disk that becomes full may write only a part
                    unwritten = unwritten[file.write(unwritten) :]
            except OSError as error:
                megabytes = len(self) * self.dim * self.dtype.itemsize / 1e6
                raise InputError(
                    f"a copy of {len(self):,} {self.dim}-dimensional vectors could not be written to "
                    f"{tempfile.gettempdir()} ({error.strerror or error}). Free {megabytes:,.1f} MB, set TMPDIR to another "
                    "folder, or pass max_queries, which needs no copy."
                ) from error


class _Blocks:
    """Memory for chunks. A block is reused when no tensor refers to it any more.

    Otherwise the C allocator would place small arrays in a freed chunk, and the process would grow by nearly the size
    of the file.
    """

    def __init__(self) -> None:
        # Unused blocks. Appending to a list and popping from it are thread-safe.
        self._free: list[mmap] = []

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor with at least one element, in a block of its own."""
        size = math.prod(shape) * dtype.itemsize
        block = self._take(size)
        # The tensor and all its views keep this array alive.
        values = np.frombuffer(block, np.uint8, size)
        weakref.finalize(values, self._free.append, block).atexit = False
        return torch.from_numpy(values).view(dtype).view(shape)

    def _take(self, size: int) -> mmap:
        """Return a free block of at least `size` bytes. Smaller blocks are freed."""
        while self._free:
            with suppress(IndexError):  # another thread has taken the last block
                block = self._free.pop()
                if len(block) >= size:
                    return block
        return mmap(-1, size)


def rows_of(array: Any, rows: slice) -> Tensor:
    """Return the rows of a slice on the CPU, in the type of the array.

    `array` is (rows, dim), and `is_read_by_slices` is true for it.
    """
    values = array[rows]
    tensor = tensor_of_other_library(values)
    if tensor is None:
        tensor = torch.from_numpy(np.array(values))
    expected = (rows.stop - rows.start, int(array.shape[1]))
    if tensor.shape != expected:
        shape = tuple(int(size) for size in array.shape)
        raise InputError(
            f"{with_article(type(array).__name__)} has the shape {shape}, but its rows {rows.start} to {rows.stop} have the "
            f"shape {tuple(tensor.shape)} instead of {expected}. Correct its shape or its slicing."
        )
    return tensor.detach().cpu().resolve_neg()


def is_of_other_library(array: Any) -> bool:
    """Return whether an array comes from another library with DLPack, such as JAX or CuPy."""
    return hasattr(array, "__dlpack__") and not isinstance(array, Tensor | np.ndarray)


def tensor_of_other_library(array: Any) -> Tensor | None:
    """Return an array as a tensor that shares its memory; None for an array that NumPy can read.

    Tensors are returned unchanged. NumPy arrays of the bfloat16 and 8-bit float types of `ml_dtypes` are converted, since
    `torch.from_numpy` does not support them.
    """
    if isinstance(array, Tensor):
        return array
    if isinstance(array, np.ndarray) and array.dtype.name.startswith(("bfloat16", "float8")):
        # PyTorch rejects negative strides, and warns about read-only arrays.
        bits = np.array(array, copy=None if array.flags.writeable else True, order="C")
        bits = bits.view(f"i{array.dtype.itemsize}")
        return torch.from_numpy(bits).view(getattr(torch, array.dtype.name))
    if not is_of_other_library(array):
        return None
    try:
        return torch.utils.dlpack.from_dlpack(array)
    except (
        Exception
    ) as error:  # each library has its own errors, for arrays that are read-only, on several devices, and so on
        try:
            values = np.asarray(array)
        except Exception:
            kind = f"{type(array).__module__.partition('.')[0]} array"
            raise InputError(
                f"a {kind} cannot be shared with PyTorch ({' '.join(str(error).split())}). Copy it to main memory: "
                "cupy.asnumpy(array), or numpy.asarray(array)."
            ) from error
        return tensor_of_other_library(values)


def as_one_tensor(rows: Tensor | StoredRows) -> Tensor:
    """Return rows as one tensor. Stored rows are memory-mapped."""
    return rows.memory_mapped() if isinstance(rows, StoredRows) else rows


def is_read_by_slices(rows: Any) -> bool:
    """Return whether an array is read slice by slice.

    False for float32 and float64 tensors and arrays in memory, and for arrays of other libraries, which are used directly.
    """
    try:
        axes = 0 if isinstance(rows, Tensor) and rows.is_nested else len(rows.shape)  # a nested tensor has no shape
        dtype = str(rows.dtype).removeprefix("torch.")
    except (AttributeError, TypeError):
        return False
    if axes != 2 or not hasattr(rows, "__getitem__") or dtype not in _DTYPE_NAMES or is_of_other_library(rows):
        return False
    if isinstance(rows, Tensor):
        return dtype in _CONVERTED and rows.layout == torch.strided and not rows.is_meta
    if isinstance(rows, np.memmap):
        return True
    if isinstance(rows, np.ndarray):
        # A masked array is another class, and is refused elsewhere.
        return type(rows) is np.ndarray and dtype in _CONVERTED
    return True


def even_slices(start: int, stop: int, max_rows: int) -> list[slice]:
    """Return slices of about equal size and at most `max_rows` rows that cover a range; empty for an empty range.

    Examples:
        >>> even_slices(0, 10, 4)
        [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """
    if stop <= start:
        return []
    count = max(1, math.ceil((stop - start) / max_rows))
    bounds = [start + (stop - start) * number // count for number in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]


class _Reading(NamedTuple, Generic[T]):
    """A slice of rows, and the future of its values."""

    rows: slice
    values: Future[T]


def read_ahead(slices: Iterable[slice], read: Callable[[slice], T]) -> Iterator[tuple[slice, T]]:
    """Yield each slice with its values, while a thread reads the next slice."""
    with ThreadPoolExecutor(1) as thread:
        readings = (_Reading(rows, thread.submit(read, rows)) for rows in slices)
        current = next(readings, None)
        while current is not None:
            following = next(readings, None)
            yield current.rows, current.values.result()
            # The values are dropped before the next reading starts. If the caller also drops them at its next step, at most
            # three slices are in memory.
            current = following


def _is_mapped(array: Any) -> bool:
    """Return whether an array is a single memory-mapped file."""
    if len(getattr(array, "files", ["one file"])) != 1:
        return False
    base = array[0:1]
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap)


def read_only_tensor(values: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the memory of a read-only array, without PyTorch's warning. Do not write to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(values)
