"""Rows of embeddings that stay where they are, in a file or a smaller type: a thread reads some of them ahead."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import mmap
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

T = TypeVar("T")

# What an evaluation can compute with as it is stored; PyTorch's bfloat16 has no counterpart in NumPy.
DTYPES = ("float16", "torch.bfloat16", "float32", "float64", "int8", "uint8")
_NAMES = {name.removeprefix("torch.") for name in DTYPES}
# Those that are converted before they are compared.
_SMALL = _NAMES - {"float32", "float64"}
# Share of the budget for rows that stay in memory, and for those that are read: two pieces, their operand, and one in the
# type in which it is stored. The rest is for everything else.
RESIDENT_SHARE, READ_SHARE, PIECES = 0.2, 0.3, 4
# Rows of a piece at least: less takes longer to begin than to read.
LEAST_ROWS = 64


class StoredRows:
    """Some neighbouring rows of a source: of what has `shape`, `dtype` and slices.

    Args:
        source: (rows, dim) of floating-point numbers or small integers.
        memory: Budget in bytes of an evaluation.
        start: The first row.
        stop: The row after the last; None for all.
    """

    def __init__(self, source: Any, memory: float, start: int = 0, stop: int | None = None) -> None:
        self.source, self.start = source, start
        self.stop = int(source.shape[0]) if stop is None else stop
        self.dim, memory = int(source.shape[1]), min(memory, 2.0**60)
        self.shape, self.ndim = (self.stop - self.start, self.dim), 2
        # small integers and halves are compared as float32, which holds each of them
        self.dtype = torch.float64 if str(source.dtype).endswith("float64") else torch.float32
        self.resident = min(len(self), int(RESIDENT_SHARE * memory / (4 * self.dim)))
        self.piece = max(LEAST_ROWS, int(READ_SHARE * memory / (PIECES * 4 * self.dim)))
        self.share = 1 - RESIDENT_SHARE - READ_SHARE

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self, some: slice, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of some rows in the type in which they are compared."""
        values = self.source[self.start + some.start : self.start + some.stop]
        rows = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
        return rows.detach().cpu().to(dtype or self.dtype).contiguous()

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows in their order, some at a time."""
        return ahead(spans(0, len(self), self.piece), self.read)

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return the rows of some indices, or of a mask."""
        return self.pick((rows.nonzero().flatten() if rows.dtype == torch.bool else rows).numpy())

    def pick(self, rows: NDArray[Any]) -> Tensor:
        """Return some rows in the given order, from one reading in theirs."""
        out = torch.empty(len(rows), self.dim, dtype=self.dtype)
        for some, values in self.pieces():
            here = np.flatnonzero((rows >= some.start) & (rows < some.stop))
            out[torch.from_numpy(here)] = values[torch.from_numpy(rows[here] - some.start)]
        return out

    def mapped(self) -> Tensor:
        """Return all rows, mapped from a file: the source's own, or a copy that vanishes with the tensor.

        Raises:
            ValueError: There is no room for the copy.
        """
        values = self.source[self.start : self.stop] if _is_mapped(self.source) else None
        if values is not None and values.dtype in (np.float32, np.float64) and values.flags.c_contiguous:
            with warnings.catch_warnings():  # of PyTorch, that they may not be written to: nothing does
                warnings.simplefilter("ignore", UserWarning)
                return torch.from_numpy(values)
        kind = np.float64 if self.dtype == torch.float64 else np.float32
        # no buffer, whose rest would be written, and would fail, once more when the file is closed
        with tempfile.TemporaryFile(buffering=0) as file:
            self._write(file)
            return torch.from_numpy(np.memmap(file, kind, "r+", shape=self.shape))

    def _write(self, file: IO[bytes]) -> None:
        """Write all rows to a file, before it is mapped: a write to a map that has no room ends the process by a signal.

        Raises:
            ValueError: There is no room.
        """
        for _, rows in self.pieces():
            left = rows.numpy().data.cast("B")
            try:
                while left:  # a disk that becomes full takes a part
                    left = left[file.write(left) :]
            except OSError as error:
                megabytes = len(self) * self.dim * self.dtype.itemsize / 1e6
                raise ValueError(
                    f"a copy of {len(self):,} vectors of {self.dim} components could not be written to "
                    f"{tempfile.gettempdir()} ({error.strerror or error}). Make room for {megabytes:,.1f} MB, name another "
                    "folder in TMPDIR, or pass max_queries, with which there is no copy."
                ) from error


def is_source(rows: Any) -> bool:
    """Find out whether these are rows that are read by slices, and no tensor or array that can be compared as it is."""
    try:
        axes, dtype = len(rows.shape), str(rows.dtype).removeprefix("torch.")
    except (AttributeError, TypeError):
        return False
    if axes != 2 or not hasattr(rows, "__getitem__") or dtype not in _NAMES:
        return False
    if isinstance(rows, Tensor):
        return dtype in _SMALL and rows.layout == torch.strided and not rows.is_meta
    if isinstance(rows, np.ndarray):  # masked arrays are read, and refused, elsewhere
        return isinstance(rows, np.memmap) or (type(rows) is np.ndarray and dtype in _SMALL)
    return True


def _is_mapped(source: Any) -> bool:
    """Find out whether the rows of a source are those of one mapped file, so that a slice of all reads none."""
    rows = source[0:1] if len(getattr(source, "files", ("one",))) == 1 else None
    while isinstance(rows, np.ndarray):
        rows = rows.base
    return isinstance(rows, mmap)


def in_memory(rows: Tensor | StoredRows) -> Tensor:
    """Return rows as a tensor, which a file may hold."""
    return rows.mapped() if isinstance(rows, StoredRows) else rows


def spans(start: int, stop: int, rows: int) -> list[slice]:
    """Return slices of about equal size that cover a range, each of at most so many rows."""
    pieces = max(1, math.ceil((stop - start) / rows))
    ends = [start + (stop - start) * piece // pieces for piece in range(pieces + 1)]
    return [slice(*ends[piece : piece + 2]) for piece in range(pieces)] if stop > start else []


def ahead(wanted: Iterable[slice], read: Callable[[slice], T]) -> Iterator[tuple[slice, T]]:
    """Yield what is read of each slice, while a thread reads the next one."""
    with ThreadPoolExecutor(1) as reader:
        coming: tuple[slice, Future[T]] | None = None
        for some in (*wanted, None):
            following = None if some is None else (some, reader.submit(read, some))
            if coming is not None:
                yield coming[0], coming[1].result()
            coming = following
