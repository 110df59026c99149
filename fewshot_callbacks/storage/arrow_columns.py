"""Columns of Parquet files, Arrow files and Arrow streams, which pyarrow reads in batches.

`pyarrow.dataset` is not used, because it cannot read streams, fills missing columns with nulls, and decodes batches of
several files ahead, beyond the memory budget of an evaluation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.storage.arrays import FileError, LazyArray
from fewshot_callbacks.storage.arrow_values import (
    MissingValueError,
    UnequalLengthsError,
    is_list,
    number_type,
    plain_values,
    refuse_null_rows,
    storage_type,
    vectors_of,
)


class ArrowColumn(LazyArray):
    """A column that is read forward, batch by batch. To go back, reading restarts at the group with the requested row.

    Args:
        group_starts: The first row of each group of batches, and finally the number of all rows.
        batches_from: Yields the batches of a group and of all groups after it, with only this column.
    """

    def __init__(self, field: Any, group_starts: list[int], batches_from: Callable[[int], Iterator[Any]]) -> None:
        self._name = field.name
        self._group_starts = group_starts
        self._batches_from = batches_from
        self._is_list = is_list(storage_type(field.type))
        self.ndim = 1 if number_type(field.type) is None else 2
        # length of each list; None before the first list
        self._dim: int | None = None
        self._go_to_group(0)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the numbers, read from the first row."""
        return self[:1].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows,) or (rows, dim), read from the first row."""
        return (self._group_starts[-1], *self[:1].shape[1:])

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(self._group_starts[-1])
        group = bisect_right(self._group_starts, start, hi=len(self._group_starts) - 1) - 1
        if start < self._first_row or self._group_starts[group] > self._end_row:
            self._go_to_group(group)
        slices = []
        while start < stop:
            if start >= self._end_row:
                self._decode_next_batch()
                continue
            batch_slice = self._decoded[start - self._first_row : stop - self._first_row]
            slices.append(batch_slice)
            start += len(batch_slice)
        if not slices:
            return self._decoded[:0]
        return slices[0] if len(slices) == 1 else np.concatenate(slices)

    @property
    def _end_row(self) -> int:
        """The row after the last decoded batch."""
        return self._first_row + len(self._decoded)

    def _go_to_group(self, group: int) -> None:
        self._batches = self._batches_from(group)
        # the last decoded batch, and its first row
        self._decoded: NDArray[Any] = np.empty(0)
        self._first_row = self._group_starts[group]

    def _decode_next_batch(self) -> None:
        first_row = self._end_row
        # If decoding fails, every later request is before this row, so the next read restarts.
        self._first_row = self._group_starts[-1]
        # Free the previous batch before decoding the next one.
        self._decoded = np.empty(0)
        self._decoded = self._to_array(next(self._batches).column(0), first_row)
        self._first_row = first_row

    def _to_array(self, column: Any, first_row: int) -> NDArray[Any]:
        """Return a batch as an array, without copying numbers."""
        column = plain_values(column)
        try:
            if self._is_list:
                vectors = vectors_of(column, first_row, self._dim)
                self._dim = vectors.shape[1] if len(vectors) else self._dim
                return vectors
            refuse_null_rows(column, first_row)
        except MissingValueError as fact:
            raise FileError(
                f"has no value of {self._name!r} in row {fact.row}. Leave out rows without a value."
            ) from None
        except UnequalLengthsError as fact:
            raise FileError(
                f"has lists of {fact.dim} numbers in {self._name!r}, but one of {fact.length} in row {fact.row}. Write "
                "vectors of equal length."
            ) from None
        array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return array.astype(str) if array.dtype.hasobject else array
