"""Embeddings in files that are larger than memory: `Shards` reads the rows that are asked for, and no others."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.remote_cache import RemoteFile
from fewshot_callbacks.storage.arrays import EmptyFilesError, FileArray, FileArrays, FileError, array_named, naming_file
from fewshot_callbacks.storage.columns import (
    has_own_files,
    is_beside_vectors,
    join_column,
    read_beside_vectors,
    read_own_files,
)
from fewshot_callbacks.storage.formats import FORMATS
from fewshot_callbacks.storage.heads import open_heads
from fewshot_callbacks.storage.shard_files import ListedShards, file_stamp, list_shards
from fewshot_callbacks.storage.stored_rows import DTYPES

# Files that are kept open: the files in which two threads read, and the next file of each. Thousands would exceed the
# limit of a process.
_OPEN_FILES = 4


class Shards:
    """Embeddings and columns in one or many files, as one set of rows. Vectors are never read as a whole.

    | file | what is read |
    | --- | --- |
    | `.npy` | One array, memory-mapped. |
    | `.npz` | An array by its name: memory-mapped as `numpy.savez` writes it, unpacked on the way if it is compressed. |
    | `.parquet` | A list column, decoded a few thousand rows at a time: no row twice, as long as slices go forward. |
    | `.arrow`, `.feather` | A list column of a file or a stream, memory-mapped; one batch at a time if it is compressed. |
    | `.safetensors` | A tensor by its name, memory-mapped. |

    Parquet and Arrow are read by pyarrow, safetensors by its own package: `pip install pyarrow safetensors`. Pickles
    can run any code, and are never loaded. Files must stay as they are while they are read: one that was replaced meanwhile
    is noticed when it is opened again. Several threads may read at once; one at a time is served.

    Args:
        paths: A file, a folder, a glob such as `embeddings/*.parquet` (`**` for folders in folders), or a list of these.
            A list keeps its order; the files of a glob or a folder are read in the order of the numbers in their names:
            `part-2` comes before `part-10`. A folder may contain other files, but only shards of one kind. Names that
            begin with a dot or an underscore, and files that systems make, are skipped. So are files that the package
            datasets caches in addition to the files that its `state.json` lists. A file that links make appear twice is
            read once. All of these may be addresses, such as `s3://bucket/embeddings/*.parquet`, `gs://`, `https://` or
            whatever else fsspec
            knows: the files are copied once to the folder that `FEWSHOT_CALLBACKS_CACHE` names, or else to the cache folder
            of the user, and are read from there.
        embeddings: Name of the array or column of the vectors, (rows, dim); by default `embeddings`, or the only one with
            two axes.
        labels: The label of each row: the name of an array or column in the same files; a `.npy` file of all rows, or a
            glob of several; or an array or list.
        ids: The identity of each row, in the same forms.
        groups: The group of each row, in the same forms.
        is_gallery: Whether each row belongs to the gallery, in the same forms: booleans, or zeros and ones. The others are
            queries. By default each row is both.
        scale: Factor of integers that represent other numbers: rows are read as `(number - offset) * scale` in float32.
        offset: The integer that represents 0.

    Attributes:
        files: The files, in the order of their rows; of addresses their copies.
        shape: (rows, dim) of all files together.
        dtype: The type of the numbers as they are stored: NumPy's float16, float32, float64, int8 or uint8, or
            `torch.bfloat16`, which only safetensors can store. With a scale or an offset NumPy's float32.
        notes: Sentences about skipped files, and about the order of the files where it matters.
        labels: (rows,) Labels of all rows, read when the files are opened; None if not given. So are `ids`, `groups` and
            `is_gallery`, the last as booleans.

    Raises:
        ValueError: A path leads to no file, or to one of another format; a link leads nowhere; a file is listed twice,
            damaged or cut off; it contains Python objects; it lacks a column; its vectors have another dim or type than
            the first file's; or there are more or fewer labels than rows. The message names the file. Damage beyond the
            head of a file shows when it is read: of an array in an `.npz` file at its last row, once all rows before
            were read.
        ModuleNotFoundError: The package that reads a format or an address is not installed.
        PermissionError: An address may not be read.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> for part in range(3):
        ...     vectors = np.full((100, 8), part, dtype=np.float16)
        ...     np.savez(f"{folder}/part-{part}.npz", embeddings=vectors, label=np.arange(100) % 7)
        >>> shards = Shards(f"{folder}/part-*.npz", labels="label")
        >>> shards.shape, shards.dtype, shards.labels.shape
        ((300, 8), dtype('float16'), (300,))
        >>> shards[50:250][::50, 0]  # across three files
        array([0., 1., 1., 2.], dtype=float16)
        >>> shards.where(250).endswith("part-2.npz")
        True
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | ListedShards,
        *,
        embeddings: str | None = None,
        labels: Any | None = None,
        ids: Any | None = None,
        groups: Any | None = None,
        is_gallery: Any | None = None,
        scale: float = 1.0,
        offset: float = 0.0,
    ) -> None:
        listed = list_shards(paths)
        self.files = listed.fetched()
        self._stamps = [file_stamp(file) for file in self.files]
        self._lock = Lock()
        # The cache and this object refer to each other, so files close when Python collects the cycle. They are only read.
        self._opened = lru_cache(_OPEN_FILES)(self._open)

        arguments: dict[str, Any] = {"labels": labels, "ids": ids, "groups": groups, "is_gallery": is_gallery}
        column_arguments = {argument: column for argument, column in arguments.items() if column is not None}
        names = {argument: column for argument, column in column_arguments.items() if is_beside_vectors(column)}
        content = _inspect(self.files, self._opened, embeddings, names)
        self._name = content.name
        self._starts = [0, *accumulate(content.lengths)]
        self.shape = (self._starts[-1], content.vector_type.dim)
        self._scaling = _Scaling.of(scale, offset, content)
        self.dtype = content.vector_type.dtype if self._scaling is None else np.dtype(np.float32)

        by_file = {
            argument: _column_by_file(argument, column, content) for argument, column in column_arguments.items()
        }
        columns = {
            argument: join_column(arrays, argument, self.files, len(self)) for argument, arrays in by_file.items()
        }
        self.labels: NDArray[Any] | None = columns.get("labels")
        self.ids: NDArray[Any] | None = columns.get("ids")
        self.groups: NDArray[Any] | None = columns.get("groups")
        self.is_gallery: NDArray[Any] | None = columns.get("is_gallery")

        # A column in several files of its own has the order of its files, as the vectors have the order of theirs.
        single_arrays = [argument for argument in by_file if argument not in names and len(by_file[argument]) == 1]
        order = listed.note_on_order(single_arrays)
        self.notes = (*listed.notes, *([order] if order else []))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, rows: Any) -> Any:
        """Read neighbouring rows.

        Args:
            rows: A slice without a step, such as `shards[1000:2000]`.

        Returns:
            (stop - start, dim) An array of NumPy, or a tensor of PyTorch for bfloat16; `torch.as_tensor` takes both. Rows of
            one memory-mapped file are not copied: leave them as they are.

        Raises:
            TypeError: For a single number, a step or a list of rows.
            ValueError: A file is damaged, or has another size or time than when the shards were made.
        """
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError("Shards are read by slices of neighbouring rows: shards[5:6] in place of shards[5].")
        start, stop, _ = rows.indices(len(self))
        stop = max(start, stop)
        empty: Any = np.empty if isinstance(self.dtype, np.dtype) else torch.empty
        joined = empty((stop - start, self.shape[1]), dtype=self.dtype)
        if start == stop:  # a list column without rows has no dim
            return joined
        for index in range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop)):
            file_start, file_stop = self._starts[index : index + 2]
            if file_start == file_stop:
                continue
            from_file = self._read(index, slice(max(start - file_start, 0), min(stop, file_stop) - file_start))
            if len(from_file) == len(joined):  # all rows are in this file: no copy
                return from_file.astype(self.dtype, copy=False) if isinstance(from_file, np.ndarray) else from_file
            first = max(file_start - start, 0)
            joined[first : first + len(from_file)] = from_file
        return joined

    def where(self, row: int) -> str:
        """Return a description of the file and the row in it, counted from 0: "row 17 of embeddings/part-2.npy".

        Raises:
            IndexError: The row does not exist.
        """
        if not 0 <= row < len(self):
            raise IndexError(
                f"There is no row {row} in shards of {len(self)} rows. Pass one from 0 to {len(self) - 1}."
            )
        index = bisect_right(self._starts, row) - 1
        return f"row {row - self._starts[index]} of {self.files[index]}"

    def _read(self, index: int, rows: slice) -> Any:
        """Return neighbouring rows of one file."""
        with naming_file(self.files[index]), self._lock:
            numbers = self._opened(index)[self._name][rows]
        return numbers if self._scaling is None else self._scaling.scaled(numbers)

    def _open(self, index: int) -> FileArrays:
        """Return the arrays of a file by their names.

        Raises:
            FileError: The file is not the one that was opened before.
        """
        file = self.files[index]
        if file_stamp(file) != self._stamps[index]:
            raise FileError(
                "has another size or time than when these shards were made: it was written or copied since. Make the shards "
                "again, once that has ended."
            )
        return FORMATS[file.suffix.lower()](file)


class VectorHeads(NamedTuple):
    """The heads of the vectors in files."""

    rows: int
    dim: int
    # a NumPy type, or torch.bfloat16
    dtype: Any


def read_vector_heads(listed: ListedShards, embeddings: str | None = None) -> VectorHeads:
    """Return the number, dim and type of the vectors in files, from the heads and footers of the files.

    Args:
        listed: The files; remote files are not fetched.
        embeddings: Name of the array or column; by default `embeddings`, or the only one with two axes.

    Raises:
        ValueError: As `Shards` does.
    """
    content = _inspect(listed.files, lambda index: open_heads(listed.files[index]), embeddings, {})
    return VectorHeads(sum(content.lengths), *content.vector_type)


class _VectorType(NamedTuple):
    """The dim and the type of the vectors, the same in all files."""

    dim: int
    # a NumPy type, in the byte order of this machine, or torch.bfloat16
    dtype: Any

    def __str__(self) -> str:
        return f"{self.dim} {self.dtype}"


class _Content(NamedTuple):
    """The content of the files, without the vectors."""

    name: str
    lengths: list[int]
    vector_type: _VectorType
    first_file: Path | RemoteFile
    # argument -> the column in each file with rows
    columns: dict[str, list[NDArray[Any]]]


def _inspect(
    files: Sequence[Path | RemoteFile],
    opened: Callable[[int], FileArrays],
    name: str | None,
    column_names: Mapping[str, str],
) -> _Content:
    """Return the content of all files, with the columns. Each file is opened once.

    Args:
        files: The files.
        opened: Returns the arrays of a file by its index.
        name: Name of the array of the vectors; None to find it.
        column_names: Argument -> name of a column.

    Raises:
        ValueError: A file is damaged, lacks something, or has vectors of another type than the first one with rows.
    """
    lengths: list[int] = []
    columns: dict[str, list[NDArray[Any]]] = {argument: [] for argument in column_names}
    vector_type: _VectorType | None = None
    first_file = files[0]
    for index, file in enumerate(files):
        with naming_file(file):
            arrays = opened(index)
            name = name or _only_matrix(arrays)
            vectors = array_named(arrays, name, "embeddings")
            _refuse_other_axes(vectors, name)
            rows = vectors.shape[0]
            lengths.append(rows)
            if rows == 0:  # distributed jobs write empty files; a list column without rows has no dim
                continue
            type_of_file = _vector_type_of(vectors, name)
            if vector_type is None:
                vector_type = type_of_file
                first_file = file
            if type_of_file != vector_type:
                raise FileError(
                    f"holds vectors of {type_of_file}, and {first_file} of {vector_type}. Pass files of one model that were "
                    "saved with one dtype."
                )
            for argument, column in column_names.items():
                columns[argument].append(read_beside_vectors(arrays, column, argument, rows))
    if name is None or vector_type is None:
        raise EmptyFilesError(f"{files[0]} and the files after it hold no rows. Pass files that hold embeddings.")
    return _Content(name, lengths, vector_type, first_file, columns)


def _only_matrix(arrays: FileArrays) -> str:
    """Return the name of the array of the vectors: `embeddings`, or the name of the only array with two axes."""
    if "embeddings" in arrays:
        return "embeddings"
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    if len(matrices) != 1:
        names = ", ".join(map(repr, matrices)) or "none"
        raise FileError(f"has no 'embeddings', and {names} with two axes. Pass embeddings= with the name of one.")
    return matrices[0]


def _refuse_other_axes(vectors: FileArray, name: str) -> None:
    """Refuse an array that is not a matrix."""
    if vectors.ndim != 2:
        raise _other_shape(vectors, name)


def _other_shape(vectors: FileArray, name: str) -> FileError:
    shape = tuple(vectors.shape)
    return FileError(
        f"holds {name!r} of shape {shape}, and embeddings are (rows, dim). Pass embeddings= with their name."
    )


def _vector_type_of(vectors: FileArray, name: str) -> _VectorType:
    """Return the dim and the type of vectors; the type is in the byte order of this machine, since PyTorch takes no other.

    Raises:
        FileError: They are not vectors, or their numbers have a type that cannot be compared.
    """
    shape = tuple(vectors.shape)
    if shape[1] == 0:
        raise _other_shape(vectors, name)
    stored = vectors.dtype
    dtype = stored.newbyteorder("=") if isinstance(stored, np.dtype) else stored
    if str(dtype) not in DTYPES:
        raise FileError(f"holds {name!r} as {dtype}. Save {', '.join(DTYPES)} (bfloat16 in safetensors).")
    return _VectorType(int(shape[1]), dtype)


def _column_by_file(argument: str, column: Any, content: _Content) -> list[NDArray[Any]]:
    """Return the entries of a column by file, of the vectors' files or its own; one array if it is given as one."""
    if argument in content.columns:
        return content.columns[argument]
    if has_own_files(column):
        return read_own_files(column, argument)
    return [np.asarray(column)]


class _Scaling(NamedTuple):
    """The factor of integers that represent other numbers, and the integer that represents 0."""

    scale: np.float32
    offset: np.float32

    @classmethod
    def of(cls, scale: float, offset: float, content: _Content) -> _Scaling | None:
        """Return the scaling; None if the numbers are used as they are.

        Raises:
            ValueError: The numbers are not integers.
        """
        if (scale, offset) == (1.0, 0.0):
            return None
        dtype = str(content.vector_type.dtype)
        if dtype not in ("int8", "uint8"):
            raise InputError(
                f"scale={scale} and offset={offset} are of integers, and {content.first_file} holds {dtype}. Leave them out."
            )
        return cls(np.float32(scale), np.float32(offset))

    def scaled(self, numbers: NDArray[Any]) -> NDArray[np.float32]:
        """Return the numbers that integers represent."""
        return (numbers.astype(np.float32) - self.offset) * self.scale
