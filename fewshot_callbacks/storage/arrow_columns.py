"""Columns that Arrow gives in batches, of a Parquet file or of a file or stream of Arrow's own.

`pyarrow.dataset` is not used. It reads no streams, it fills a column that a file lacks with missing values, and its scanner
decodes batches of several files ahead, beyond the budget of an evaluation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.storage.arrays import FileError, LazyArray


class ArrowColumn(LazyArray):
    """A column that is read forward, batch by batch; a step back begins anew at the group of batches with the row.

    Args:
        field: Name and type of the column.
        group_starts: The first row of each group of batches; the last entry is the number of all rows.
        batches_from: Yields the batches of a group and of all groups after it, with only this column.
    """

    def __init__(self, field: Any, group_starts: list[int], batches_from: Callable[[int], Iterator[Any]]) -> None:
        types = import_module("pyarrow.types")
        self._name = field.name
        self._group_starts = group_starts
        self._batches_from = batches_from
        kind = getattr(field.type, "storage_type", field.type)  # a tensor of a fixed shape is stored as a list
        self._is_view = types.is_list_view(kind) or types.is_large_list_view(kind)
        self._is_list = _are_lists(kind)
        self.ndim = 1 if list_type(field) is None else 2
        # length of each list; None before the first list
        self._dim: int | None = None
        self._go_to_group(0)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the numbers, from the first row."""
        return self[:1].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows,) or (rows, dim), from the first row."""
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
        """The row after the batch that was decoded last."""
        return self._first_row + len(self._decoded)

    def _go_to_group(self, group: int) -> None:
        self._batches = self._batches_from(group)
        # the batch that was decoded last, and its first row
        self._decoded: NDArray[Any] = np.empty(0)
        self._first_row = self._group_starts[group]

    def _decode_next_batch(self) -> None:
        first_row = self._end_row
        # If decoding fails, this row is after every requested row, so that the next read begins again.
        self._first_row = self._group_starts[-1]
        # The previous batch is freed before the next one is decoded.
        self._decoded = np.empty(0)
        self._decoded = self._to_array(next(self._batches).column(0), first_row)
        self._first_row = first_row

    def _to_array(self, column: Any, first_row: int) -> NDArray[Any]:
        """Return a batch as an array; numbers are not copied.

        Raises:
            FileError: A row has no value, or lists differ in length.
        """
        column = _plain_values(getattr(column, "storage", column))
        self._refuse_nulls(column, 1, first_row)
        if not self._is_list:
            array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
            return array.astype(str) if array.dtype.hasobject else array
        dims = (column.sizes if self._is_view else column.value_lengths()).to_numpy()
        if self._dim is None and len(dims):
            self._dim = int(dims[0])
        dim = self._dim or 0
        differs = dims != self._dim
        if differs.any():
            row = int(differs.argmax())
            raise FileError(
                f"holds lists of {dim} numbers in {self._name!r}, and in row {first_row + row} one of {dims[row]}. Write "
                "vectors of one length."
            )
        values = column.flatten()
        self._refuse_nulls(values, dim, first_row)
        vectors: NDArray[Any] = values.to_numpy(zero_copy_only=False).reshape(len(dims), dim)
        return vectors

    def _refuse_nulls(self, values: Any, row_length: int, first_row: int) -> None:
        """Refuse missing values, given `row_length` values for each row of a batch.

        Raises:
            FileError: A value is missing; the message names the row.
        """
        if values.null_count:
            row = first_row + values.is_null().index(True).as_py() // row_length
            raise FileError(f"has no value of {self._name!r} in row {row}. Leave rows without one out.")


def list_type(field: Any) -> Any | None:
    """Return the type of the numbers of a column of vectors; None for other columns. A list of words is not a vector."""
    types = import_module("pyarrow.types")
    kind = getattr(field.type, "storage_type", field.type)  # a tensor of a fixed shape is stored as a list
    return kind.value_type if _are_lists(kind) and types.is_primitive(kind.value_type) else None


def _are_lists(kind: Any) -> bool:
    types = import_module("pyarrow.types")
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _plain_values(column: Any) -> Any:
    """Return a batch as plain values: dictionaries, runs and views hide missing values."""
    types = import_module("pyarrow.types")
    if types.is_dictionary(column.type):
        return column.dictionary_decode()
    if types.is_run_end_encoded(column.type):
        return import_module("pyarrow.compute").run_end_decode(column)
    if types.is_string_view(column.type):  # some versions of pyarrow cannot convert them to arrays
        return import_module("pyarrow").array(column.to_pylist(), "string")
    return column
