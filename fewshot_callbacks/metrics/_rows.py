"""Rows that are appended batch by batch and copied out at the end, in memory or in a file.

Both classes have the methods `append`, `batches` and `kept`.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._repeated import sketches

# Bytes per block of rows. glibc maps a block above 32 MiB separately, and returns it to the system when it is freed.
# Unused pages of the last block take no memory. A list of batches would leave holes in the heap.
BLOCK_BYTES = 2**26


class RowsInMemory:
    """Rows in blocks. Rows of another type begin a new block."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        # number of rows in each block
        self._counts: list[int] = []

    def append(self, rows: Tensor) -> None:
        """Append a copy of rows, from any device."""
        has_block = bool(self._blocks) and self._blocks[-1].dtype == rows.dtype
        if not has_block or len(self._blocks[-1]) - self._counts[-1] < len(rows):
            row_bytes = max(rows.shape[1] * rows.itemsize, 1)
            length = max(BLOCK_BYTES // row_bytes, len(rows))
            # A block made in inference mode cannot be written to outside it.
            with torch.inference_mode(False):
                self._blocks.append(torch.empty(length, rows.shape[1], dtype=rows.dtype, device="cpu"))
            self._counts.append(0)
        start = self._counts[-1]
        self._counts[-1] = start + len(rows)
        self._blocks[-1][start : self._counts[-1]] = rows

    def batches(self) -> list[Tensor]:
        """Return all rows, as views of the blocks."""
        return [block[:count] for block, count in zip(self._blocks, self._counts, strict=True)]

    def kept(self, is_kept: Bool[Tensor, "items"], *, clear: bool = False) -> Tensor:
        """Return a copy of the rows that a mask selects.

        With `clear`, each block is freed as soon as its rows are copied.
        """
        filled = self.batches()
        if clear:
            self._blocks = []
            self._counts = []
        return join_rows(filled, is_kept)


class RowsInFile:
    """Rows in a nameless file, in the first batch's type, freed with this object."""

    def __init__(self, folder: str | os.PathLike[str], call: str) -> None:
        self._folder = folder
        self._call = call
        self._count = 0
        self._dim = 0
        self._dtype = torch.float32
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is open as long as the rows are needed
        except OSError as error:
            raise InputError(
                f"{call}: spill_to={os.fspath(folder)!r} cannot be written to: {error.strerror}. Pass a folder on a disk "
                "with enough space for the embeddings of a validation."
            ) from error
        weakref.finalize(self, self._file.close)

    def append(self, rows: Tensor) -> None:
        """Append rows to the file."""
        if not self._count:
            self._dtype = rows.dtype
        self._count += len(rows)
        self._dim = rows.shape[1]
        try:
            self._file.write(rows.cpu().to(self._dtype).contiguous().view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            raise InputError(
                f"{self._call}: the embeddings could not be written to spill_to={os.fspath(self._folder)!r}: "
                f"{error.strerror}. Free some space, or pass a folder on another disk."
            ) from error

    def batches(self) -> list[Tensor]:
        """Return all rows as one batch."""
        return [self.rows()]

    def kept(self, is_kept: Bool[Tensor, "items"], *, clear: bool = False) -> Tensor:
        """Return the rows that a mask selects, mapped into memory; from another file unless all are kept."""
        return self.rows() if bool(is_kept.all()) else rows_in_file(self.rows(), is_kept, self._folder, self._call)

    def rows(self) -> Tensor:
        """Return all rows, mapped into memory.

        The map stays valid after the file is closed.
        """
        # An empty file cannot be mapped.
        if not self._count * self._dim:
            return torch.empty(self._count, self._dim, dtype=self._dtype, device="cpu")
        file_bytes = np.memmap(self._file, np.uint8, "r+", shape=(self._count * self._dim * self._dtype.itemsize,))
        return torch.from_numpy(file_bytes).view(self._dtype).view(self._count, self._dim)


def rows_in_file(rows: Tensor, is_kept: Bool[Tensor, "items"], folder: str | os.PathLike[str], call: str) -> Tensor:
    """Return the rows that a mask selects, copied to a file in a folder and mapped into memory."""
    copy = RowsInFile(folder, call)
    for block, is_kept_in_block in zip(rows.split(4096), is_kept.split(4096), strict=True):
        copy.append(block[is_kept_in_block])
    return copy.rows()


def join_rows(batches: list[Tensor], is_kept: Bool[Tensor, "items"]) -> Tensor:
    """Return a copy of the rows that a mask selects, in the widest of their types.

    `batches` are (items, dim). The list is emptied, so that a batch without other references is freed once it is
    copied.
    """
    if not batches:
        return torch.empty(0, 0, device="cpu")
    dtype = reduce(torch.promote_types, (rows.dtype for rows in batches))
    joined = batches[0].new_empty(int(is_kept.sum()), batches[0].shape[1], dtype=dtype)
    # Joining all batches first, and then dropping rows, would need another copy of the set.
    start = 0
    stop = 0
    while batches:
        rows = batches.pop(0)
        is_kept_here = is_kept[stop : stop + len(rows)]
        stop += len(rows)
        if not bool(is_kept_here.all()):
            rows = rows[is_kept_here.to(rows.device)]
        joined[start : start + len(rows)] = rows
        start += len(rows)
    return joined


def sketches_of(batches: Sequence[Tensor]) -> Float[Tensor, "items numbers"]:
    """Return a sketch of each row of all batches (see `sketches`)."""
    return torch.cat([sketches(rows.cpu()) for rows in batches or [torch.empty(0, 0, device="cpu")]])
