"""Columns in addition to the vectors: labels, ids, groups, and which rows belong to the gallery."""

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
    """Return whether a column is given as `.npy` files of its own."""
    return isinstance(column, str | os.PathLike) and os.fspath(column).lower().endswith(".npy")


def is_beside_vectors(column: Any) -> bool:
    """Return whether a column is given as the name of an array in the files of the vectors."""
    return isinstance(column, str) and not has_own_files(column)


def read_beside_vectors(arrays: FileArrays, name: str, argument: str, rows: int) -> NDArray[Any]:
    """Return a column of one file of vectors.

    Args:
        arrays: All arrays of the file.
        name: Name of the column.
        argument: The argument that gave the name, such as `labels`.
        rows: Number of vectors in the file.

    Raises:
        FileError: The column does not exist, or it has another number of entries.
    """
    column = _copied(array_named(arrays, name, argument))
    if len(column) != rows:
        raise FileError(f"has {len(column)} {argument} for {rows} rows. Write one for each row.")
    return column


def read_own_files(paths: Any, argument: str) -> list[NDArray[Any]]:
    """Return the array in each `.npy` file of a column, in the order of the files.

    Raises:
        ValueError: A column does not exist, is damaged, or contains Python objects.
    """
    by_file = []
    for file in list_shards(paths).fetched():
        with naming_file(file):
            by_file.append(_copied(array_named(open_npy(file), "embeddings", argument)))
    return by_file


def join_column(by_file: Sequence[NDArray[Any]], argument: str, files: Sequence[Any], rows: int) -> NDArray[Any]:
    """Return a column of all rows; `is_gallery` as booleans.

    Args:
        by_file: The entries of the column in each file; a single array if all rows are given as one.
        argument: What the column is, such as `labels`.
        files: The files of the vectors, for messages.
        rows: Number of all vectors.

    Raises:
        ValueError: It does not have one entry for each row, its files contain different kinds or shapes, or words are
            spelt in two forms of Unicode.
    """
    if len({(array.dtype.kind == "U", array.shape[1:]) for array in by_file}) > 1:  # NumPy would make numbers words
        kinds = sorted({f"{array.dtype.name} of {array.ndim} axes" for array in by_file})
        raise InputError(f"{argument} are {' and '.join(kinds)} in different files. Write them alike.")
    column = by_file[0] if len(by_file) == 1 else np.concatenate(by_file)
    if column.ndim == 0 or len(column) != rows:
        raise InputError(
            f"{argument} has {len(column) if column.ndim else 'no'} entries for the {rows} rows of {len(files)} files "
            f"({files[0]} is the first). Pass one for each row, in the order of the files."
        )
    if argument == "is_gallery":
        return as_booleans(column)
    _refuse_two_spellings(argument, column)
    return column


def _copied(column: FileArray) -> NDArray[Any]:
    """Return a copy of a column. A view of a mapped file would keep the file open."""
    return np.array(column[:])


def as_booleans(is_gallery: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows belong to the gallery as booleans.

    Raises:
        ValueError: The column contains anything but booleans, or zeros and ones, or has several axes.
    """
    if is_gallery.ndim != 1 or not np.isin(is_gallery, (0, 1)).all():
        raise InputError(f"is_gallery holds {is_gallery.dtype} other than 0 and 1. Pass one boolean for each row.")
    return is_gallery.astype(bool)


def _refuse_two_spellings(argument: str, words: NDArray[Any]) -> None:
    """Refuse words that look alike and differ, such as an accented letter written as one character and as two.

    Raises:
        ValueError: There are such words; the message names one.
    """
    if words.dtype.kind != "U":
        return
    spellings: dict[str, str] = {}
    for word in np.unique(words).tolist():
        first_spelling = spellings.setdefault(composed_form(word), word)
        if first_spelling != word:
            raise InputError(
                f"{argument} hold {composed_form(word)!r} in two forms of Unicode, {first_spelling!a} and {word!a}, which "
                "would be two values. Write one of them, such as unicodedata.normalize('NFC', word)."
            )
