"""Converts Arrow arrays of vectors or single values to NumPy arrays."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from numpy.typing import NDArray


class MissingValueError(ValueError):
    """Raised if an Arrow array contains a null.

    Attributes:
        row: Index of the first row with a null.
        component: Index of the first null in the vector of this row; None if the row itself is null.
    """

    def __init__(self, row: int, component: int | None) -> None:
        super().__init__(f"row {row} has a null")
        self.row = row
        self.component = component


class UnequalLengthsError(ValueError):
    """Raised if the lists of an Arrow array have different lengths.

    Attributes:
        row: Index of the first row with a length other than `dim`.
        dim: Length of the earlier lists.
    """

    def __init__(self, row: int, length: int, dim: int) -> None:
        super().__init__(f"row {row} has {length} numbers instead of {dim}")
        self.row = row
        self.length = length
        self.dim = dim


def vectors_of(array: Any, first_row: int = 0, dim: int | None = None) -> NDArray[Any]:
    """Return (rows, dim) the lists of an Arrow array, without copying numbers.

    Args:
        array: Plain values (see `plain_values`) of a list type.
        first_row: Index of the first row, for errors.
        dim: Required length of all lists; None for the length of the first list.

    Raises:
        MissingValueError: A row or a number is null.
        UnequalLengthsError: A list has another length.
    """
    refuse_null_rows(array, first_row)
    types = import_module("pyarrow.types")
    is_view = types.is_list_view(array.type) or types.is_large_list_view(array.type)
    lengths = (array.sizes if is_view else array.value_lengths()).to_numpy()
    if dim is None:
        dim = int(lengths[0]) if len(lengths) else max(0, getattr(array.type, "list_size", 0))
    differs = lengths != dim
    if differs.any():
        row = int(differs.argmax())
        raise UnequalLengthsError(first_row + row, int(lengths[row]), dim)
    numbers = array.flatten()
    if numbers.null_count:
        row, component = divmod(numbers.is_null().index(True).as_py(), dim)
        raise MissingValueError(first_row + row, component)
    vectors: NDArray[Any] = numbers.to_numpy(zero_copy_only=False).reshape(len(lengths), dim)
    return vectors


def refuse_null_rows(array: Any, first_row: int = 0) -> None:
    """Raise `MissingValueError` if a row of an Arrow array is null."""
    if array.null_count:
        raise MissingValueError(first_row + array.is_null().index(True).as_py(), None)


def number_type(kind: Any) -> Any | None:
    """Return the number type of a type of vectors; None for other types, also for lists of words."""
    kind = storage_type(kind)
    return kind.value_type if is_list(kind) and import_module("pyarrow.types").is_primitive(kind.value_type) else None


def storage_type(kind: Any) -> Any:
    """Return the type in which values are stored. A fixed-shape tensor is stored as a list."""
    return getattr(kind, "storage_type", kind)


def plain_type(kind: Any) -> Any:
    """Return the type of the `plain_values` of an array of a type, except for views of strings."""
    types = import_module("pyarrow.types")
    kind = storage_type(kind)
    return kind.value_type if types.is_dictionary(kind) or types.is_run_end_encoded(kind) else kind


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is a list type."""
    types = import_module("pyarrow.types")
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def plain_values(array: Any) -> Any:
    """Return an Arrow array without extension types, dictionaries, runs and views, which hide missing values."""
    types = import_module("pyarrow.types")
    array = getattr(array, "storage", array)
    if types.is_dictionary(array.type):
        words = plain_values(array.dictionary)
        return import_module("pyarrow").DictionaryArray.from_arrays(array.indices, words).dictionary_decode()
    if types.is_run_end_encoded(array.type):
        return import_module("pyarrow.compute").run_end_decode(array)
    if types.is_string_view(array.type):  # some versions of pyarrow cannot convert them to arrays
        return import_module("pyarrow").array(array.to_pylist(), "string")
    return array
