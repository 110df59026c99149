"""Converts columns of pyarrow, Polars, pandas and other exporters of Arrow's C interface to NumPy arrays."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.storage.arrow_values import (
    MissingValueError,
    UnequalLengthsError,
    is_list,
    number_type,
    plain_type,
    plain_values,
    storage_type,
    vectors_of,
)
from fewshot_callbacks.system.extras import required_extra


def without_arrow(value: Any, name: str, call: str) -> Any:
    """Return an Arrow column as a NumPy array, and any other value unchanged.

    A column of equally long lists of numbers becomes (rows, dim), without a copy if it has one chunk. A column of single
    values becomes (rows,) if NumPy cannot read it.
    """
    if not is_arrow(value):
        return value
    source = value if _is_exporter(value) else value.source.with_format("arrow")[value.column_name]
    column = _imported(source, name, call)
    if column is None:
        return value
    kind = plain_type(column.type)
    if is_list(kind) and number_type(kind) is None:
        raise InputError(
            f"{call}: {name} is a column of {kind}, and only lists of numbers are vectors. Pass one list of numbers for "
            "each item."
        )
    if is_list(kind):
        return _vectors(column, name, call)
    if hasattr(source, "__array__"):
        return source
    if import_module("pyarrow.types").is_struct(kind):
        names = ", ".join(repr(field.name) for field in kind)
        raise InputError(f"{call}: {name} is a table with the columns {names}. Pass one of them.")
    return np.concatenate([plain_values(chunk).to_numpy(zero_copy_only=False) for chunk in _chunks(column)])


def is_arrow(value: Any) -> bool:
    """Return whether a value is a column that exports Arrow's C interface, except arrays with a NumPy number type."""
    if isinstance(value, Tensor | np.ndarray | list | tuple):
        return False
    if not _is_exporter(value):
        return _is_of_data_set(value)
    dtype = getattr(value, "dtype", None)
    return not isinstance(dtype, np.dtype) or dtype.hasobject


def _is_exporter(value: Any) -> bool:
    return hasattr(value, "__arrow_c_stream__") or hasattr(value, "__arrow_c_array__")


def _is_of_data_set(value: Any) -> bool:
    """Return whether a value is a column of a Hugging Face data set without a transform, which would change its values."""
    source: Any = getattr(value, "source", None)
    return hasattr(source, "with_format") and hasattr(value, "column_name") and source.format["type"] != "custom"


def _imported(source: Any, name: str, call: str) -> Any | None:
    """Return a pyarrow ChunkedArray; None if NumPy can read the column and Arrow cannot."""
    try:
        with required_extra("files", f"{call}: {name}, a column of vectors,"):
            arrow = import_module("pyarrow")
    except ModuleNotFoundError:
        if hasattr(source, "__array__") and not _has_rows(np.asarray(source)):
            return None
        raise
    try:
        return arrow.chunked_array(source)
    except (arrow.ArrowException, TypeError, ValueError):  # such as Python objects of several types
        if hasattr(source, "__array__"):
            return None
        raise


def _has_rows(array: NDArray[Any]) -> bool:
    """Return whether an array contains rows as Python objects."""
    first = array[0] if array.dtype.hasobject and array.ndim == 1 and len(array) else None
    return hasattr(first, "__len__") and not isinstance(first, str | bytes)


def _chunks(column: Any) -> list[Any]:
    """Return the non-empty chunks; one empty chunk if there are none."""
    without_rows = import_module("pyarrow").nulls(0, storage_type(column.type))
    return [chunk for chunk in column.chunks if len(chunk)] or [without_rows]


def _vectors(column: Any, name: str, call: str) -> NDArray[Any]:
    """Return the vectors of a column, (rows, dim). A single chunk is not copied."""
    parts: list[NDArray[Any]] = []
    first_row = 0
    try:
        for chunk in _chunks(column):
            dim = parts[0].shape[1] if parts else None
            parts.append(vectors_of(plain_values(chunk), first_row, dim))
            first_row += len(chunk)
    except MissingValueError as fact:
        row = f"row {fact.row} of {name}"
        null = f"{row} is null" if fact.component is None else f"{row} has a null at index {fact.component}"
        raise InputError(f"{call}: {null}. Drop rows with nulls from all arguments.") from None
    except UnequalLengthsError as fact:
        raise InputError(
            f"{call}: the lists in {name} have {fact.dim} numbers, and the list in row {fact.row} has {fact.length}. Pass "
            "vectors of one length."
        ) from None
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
