"""The columns other than the vectors: labels, ids, groups, and whether a row belongs to the gallery."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.names import composed_form
from fewshot_callbacks.storage.arrays import FileArray, FileArrays, FileError, array_named, naming_file
from fewshot_callbacks.storage.npy import open_npy
from fewshot_callbacks.storage.shard_files import list_shards


def has_own_files(column: Any) -> bool:
    """Return whether a column is in its own `.npy` files."""
    return isinstance(column, str | os.PathLike) and os.fspath(column).lower().endswith(".npy")


def is_beside_vectors(column: Any) -> bool:
    """Return whether a column is an array in the files of the vectors."""
    return isinstance(column, str) and not has_own_files(column)


def read_beside_vectors(arrays: FileArrays, name: str, argument: str, rows: int) -> NDArray[Any]:
    """Return the column `name` of one file of vectors, which the user passed as `argument`."""
    column = _copied(array_named(arrays, name, argument))
    if len(column) != rows:
        raise FileError(f"has {len(column)} {argument} for {rows} rows. Write one per row.")
    return column


def read_own_files(paths: Any, argument: str) -> list[NDArray[Any]]:
    """Return the array in each `.npy` file of a column, in the order of the files."""
    by_file = []
    for file in list_shards(paths).fetched():
        with naming_file(file):
            by_file.append(_copied(array_named(open_npy(file), "embeddings", argument)))
    return by_file


def join_column(by_file: Sequence[NDArray[Any]], argument: str, files: Sequence[Any], rows: int) -> NDArray[Any]:
    """Return a column for all rows; `is_gallery` as booleans.

    `by_file` has the entries of each file, or a single array for all rows.
    """
    if len({(array.dtype.kind == "U", array.shape[1:]) for array in by_file}) > 1:  # NumPy would make numbers words
        kinds = sorted({f"{array.dtype.name} with {array.ndim} axes" for array in by_file})
        raise InputError(f"{argument} are {' and '.join(kinds)} in different files. Write all files in the same form.")
    column = by_file[0] if len(by_file) == 1 else np.concatenate(by_file)
    if column.ndim == 0 or len(column) != rows:
        raise InputError(
            f"{argument} has {len(column) if column.ndim else 'no'} entries for the {rows} rows of {len(files)} files "
            f"({files[0]} is the first). Pass one entry per row, in the order of the files."
        )
    if argument == "is_gallery":
        return as_booleans(column)
    _refuse_two_spellings(argument, column)
    return column


def _copied(column: FileArray) -> NDArray[Any]:
    """Return a copy of a column, since a view would keep a mapped file open."""
    return np.array(column[:])


def as_booleans(is_gallery: NDArray[Any]) -> NDArray[np.bool_]:
    """Return (rows,) whether each row belongs to the gallery."""
    if is_gallery.ndim != 1 or not np.isin(is_gallery, (0, 1)).all():
        raise InputError(f"is_gallery contains {is_gallery.dtype} values other than 0 and 1. Pass one boolean per row.")
    return is_gallery.astype(bool)


def _refuse_two_spellings(argument: str, words: NDArray[Any]) -> None:
    """Raise an error if a word appears in two Unicode forms, such as an accented letter as one and as two characters."""
    if words.dtype.kind != "U":
        return
    spellings: dict[str, str] = {}
    for word in np.unique(words).tolist():
        first_spelling = spellings.setdefault(composed_form(word), word)
        if first_spelling != word:
            raise InputError(
                f"{argument} contain {composed_form(word)!r} in two Unicode forms, {first_spelling!a} and {word!a}, which "
                "would count as two values. Use one form, such as unicodedata.normalize('NFC', word)."
            )
