"""Compressed embeddings: their first dimensions, and codes with one byte or one bit per dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.settings import Code
from fewshot_callbacks.storage.stored_rows import even_slices, is_read_by_slices, rows_of

# An int8 code has 256 values, so the range of a dimension has 255 steps.
STEPS = 255
LOWEST_CODE = -128
# How many numbers are coded at a time: 8 MB in float64, plus a few copies.
NUMBERS_AT_ONCE = 2**20


class Ranges(NamedTuple):
    """The range of each dimension over all gallery items of all processes."""

    low: Float[np.ndarray, "dim"]
    high: Float[np.ndarray, "dim"]

    def constant_dims(self) -> int:
        """Return the number of dimensions that have the same value in all gallery items."""
        return int((self.low == self.high).sum())

    def untold_dims(self) -> int:
        """Return the number of float64 dimensions with a range too narrow for 255 steps in float32."""
        spacing = np.spacing(np.maximum(np.abs(self.low), np.abs(self.high)).astype(np.float32)).astype(np.float64)
        is_float32 = (self.low.astype(np.float32) == self.low) & (self.high.astype(np.float32) == self.high)
        return int(((self.high > self.low) & (spacing > (self.high - self.low) / STEPS) & ~is_float32).sum())

    def constant_bits(self) -> int:
        """Return the number of dimensions whose bit is the same in all gallery items."""
        return int(((self.low > 0) | (self.high <= 0)).sum())


@dataclass(frozen=True)
class StorageFormat:
    """A format in which embeddings are stored.

    The format has the first `dims` dimensions. A `code` of None stores the numbers unchanged. If `is_whole`, these are
    all dimensions, and the name leaves out their number.
    """

    dims: int
    code: Code | None
    is_whole: bool

    @property
    def name(self) -> str:
        """The name in tables and keys: `dims64`, `int8` or `dims64_int8`."""
        parts = []
        if not self.is_whole:
            parts.append(f"dims{self.dims}")
        if self.code is not None:
            parts.append(self.code)
        return "_".join(parts)

    def bytes_per_item(self, bytes_per_number: int) -> int:
        """Return the bytes per item, for numbers with this many bytes each before they are coded."""
        if self.code == "int8":
            return self.dims
        if self.code == "binary":
            return -(-self.dims // 8)  # rounded up
        return self.dims * bytes_per_number

    def of(self, rows: Any, ranges: Ranges | None) -> Tensor | _CodedRows:
        """Return rows in this format: a tensor for a tensor, and an array that is read by slices for another array.

        `rows` is a tensor on the CPU, or another array that is read by slices. `ranges` are for int8 codes. The result
        has numbers in their own dtype, int8 codes, or one byte, 0 or 1, for each bit.
        """
        if isinstance(rows, Tensor):
            return self.of_tensor(rows, ranges)
        return _CodedRows(rows, self, ranges)

    def of_tensor(self, rows: Tensor, ranges: Ranges | None) -> Tensor:
        """Return the rows of a tensor in this format."""
        first_dims = rows[:, : self.dims]
        if self.code is None:
            return first_dims
        codes = torch.empty(first_dims.shape, dtype=torch.int8)
        for span in _spans(len(rows), self.dims):
            if self.code == "int8":
                assert ranges is not None
                codes[span] = int8_codes(first_dims[span], ranges)
            else:
                codes[span] = first_dims[span] > 0
        return codes


def storage_formats(dim: int, dims: Sequence[int], codes: Sequence[Code]) -> list[StorageFormat]:
    """Return the formats: the first dimensions, codes of all dimensions, and codes of the first dimensions.

    Examples:
        >>> [storage.name for storage in storage_formats(8, [4], ["int8", "binary"])]
        ['dims4', 'int8', 'binary', 'dims4_int8', 'dims4_binary']
    """
    truncated = [StorageFormat(number, None, False) for number in dims]
    coded = [StorageFormat(dim, code, True) for code in codes]
    both = [StorageFormat(number, code, False) for number in dims for code in codes]
    return truncated + coded + both


def int8_codes(rows: Float[Tensor, "items dims"], ranges: Ranges) -> Int[Tensor, "items dims"]:
    """Return the int8 codes of rows, from -128 for the lowest value of a dimension to 127 for its highest value.

    The codes are equal to the codes of `sentence_transformers.util.quantize_embeddings` (version 6.2) with these ranges.

    `ranges` are of all dimensions.
    """
    dims = rows.shape[1]
    low = ranges.low[:dims].astype(np.float32)
    steps = (ranges.high[:dims].astype(np.float32) - low) / STEPS
    steps[steps == 0] = 1  # all items have the same value, with the lowest code
    numbers = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    levels = torch.floor((numbers - torch.from_numpy(low)) / torch.from_numpy(steps)).clamp(0, STEPS)
    return (levels + LOWEST_CODE).to(torch.int8)


def find_ranges(gallery: Any, dim: int, processes: Processes) -> Ranges:
    """Return the ranges of all dimensions. *Collective*.

    `gallery` has the finite gallery items of this process. `dim` is passed because a process without items cannot read
    it from its array.
    """
    low = np.full(dim, np.inf)
    high = np.full(dim, -np.inf)
    for span in _spans(int(gallery.shape[0]), dim):
        rows = (gallery[span] if isinstance(gallery, Tensor) else rows_of(gallery, span)).double().numpy()
        low = np.minimum(low, rows.min(axis=0))
        high = np.maximum(high, rows.max(axis=0))
    by_process = processes.gather(Ranges(low, high))
    lows = [ranges.low for ranges in by_process]
    highs = [ranges.high for ranges in by_process]
    return Ranges(np.min(lows, axis=0), np.max(highs, axis=0))


def refuse_wide_ranges(call: str, ranges: Ranges) -> None:
    """Refuse ranges that exceed float32, in which int8 codes are computed."""
    sizes = np.maximum(np.abs(ranges.low), np.abs(ranges.high))
    too_wide = np.flatnonzero(np.maximum(sizes, ranges.high - ranges.low) > np.finfo(np.float32).max)
    if len(too_wide):
        first = int(too_wide[0])
        raise InputError(
            f"{call}: dimension {first} of the gallery ranges from {ranges.low[first]:.3g} to {ranges.high[first]:.3g}. "
            "This exceeds float32, in which int8 codes are computed. Divide the embeddings by a number, or leave 'int8' out "
            "of codes."
        )


class _CodedRows:
    """An array whose slices are read from another array and coded on access."""

    def __init__(self, rows: Any, storage: StorageFormat, ranges: Ranges | None) -> None:
        self._rows = rows
        self._storage = storage
        self._ranges = ranges
        self.shape = (int(rows.shape[0]), storage.dims)
        self.dtype = rows.dtype if storage.code is None else torch.int8

    def __getitem__(self, span: slice) -> Tensor:
        """Return consecutive rows in the format. Only a few rows at a time are in memory with all dimensions."""
        start, stop, _ = span.indices(self.shape[0])
        pieces = [
            self._storage.of_tensor(rows_of(self._rows, piece), self._ranges)
            for piece in even_slices(start, stop, _rows_at_once(int(self._rows.shape[1])))
        ]
        if not pieces:
            return self._storage.of_tensor(rows_of(self._rows, slice(0, 0)), self._ranges)
        return torch.cat(pieces)


def is_read(rows: Any) -> bool:
    """Return whether rows are an array that is read by slices, and not a tensor in memory."""
    return is_read_by_slices(rows) and not isinstance(rows, Tensor)


def _spans(items: int, dim: int) -> list[slice]:
    return even_slices(0, items, _rows_at_once(dim))


def _rows_at_once(dim: int) -> int:
    return max(1, NUMBERS_AT_ONCE // max(1, dim))
