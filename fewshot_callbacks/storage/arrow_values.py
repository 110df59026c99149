"""Arrow arrays as NumPy arrays: vectors and single values, of a batch of a file or of a column in memory."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from numpy.typing import NDArray


class MissingValueError(ValueError):
    """An Arrow array has a null.

    Attributes:
        row: Number of the first row with a null.
        component: Place of the first null in the vector of this row; None if the row itself is null.
    """

    def __init__(self, row: int, component: int | None) -> None:
        super().__init__(f"row {row} has a null")
        self.row = row
        self.component = component


class UnequalLengthsError(ValueError):
    """The lists of an Arrow array have different lengths.

    Attributes:
        row: Number of the first row whose length differs from `dim`.
        length: Length of the list in this row.
        dim: Length of the lists before.
    """

    def __init__(self, row: int, length: int, dim: int) -> None:
        super().__init__(f"row {row} has {length} numbers in place of {dim}")
        self.row = row
        self.length = length
        self.dim = dim


def vectors_of(array: Any, first_row: int = 0, dim: int | None = None) -> NDArray[Any]:
    """Return (rows, dim) the lists of an Arrow array; the numbers are not copied.

    Args:
        array: Plain values (see `plain_values`) of a type that `is_list` knows.
        first_row: Number of the first row, for errors.
        dim: Length that all lists must have; None for the length of the first.

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
    """Refuse an Arrow array with null rows.

    Raises:
        MissingValueError: A row is null.
    """
    if array.null_count:
        raise MissingValueError(first_row + array.is_null().index(True).as_py(), None)


def number_type(kind: Any) -> Any | None:
    """Return the type of the numbers of a type of vectors; None for other types. A list of words is not a vector."""
    kind = storage_type(kind)
    return kind.value_type if is_list(kind) and import_module("pyarrow.types").is_primitive(kind.value_type) else None


def storage_type(kind: Any) -> Any:
    """Return the type in which values are stored: a tensor of a fixed shape is stored as a list."""
    return getattr(kind, "storage_type", kind)


def plain_type(kind: Any) -> Any:
    """Return the type of the `plain_values` of an array of a type, but for views of strings."""
    types = import_module("pyarrow.types")
    kind = storage_type(kind)
    return kind.value_type if types.is_dictionary(kind) or types.is_run_end_encoded(kind) else kind


def is_list(kind: Any) -> bool:
    """Return whether an Arrow type is one of the types of lists."""
    types = import_module("pyarrow.types")
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def plain_values(array: Any) -> Any:
    """Return an Arrow array as plain values: extension types, dictionaries, runs and views hide missing values."""
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
