"""Embeddings in files that are larger than memory: `Shards` reads only the requested rows."""

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

# Number of open files: the files that two threads read, and the next file of each. A process cannot open thousands.
_OPEN_FILES = 4


class Shards:
    """Embeddings in one or many files, with their labels and other columns, as one array that can be larger than memory.

    | file | how it is read |
    | --- | --- |
    | `.npy` | One array, memory-mapped. |
    | `.npz` | One of its arrays. Memory-mapped, or decompressed while it is read. |
    | `.parquet` | A list column, decoded a few thousand rows at a time. Slices in ascending order decode no row twice. |
    | `.arrow`, `.feather` | A list column of a file or a stream. Memory-mapped, or read batch by batch if compressed. |
    | `.safetensors` | One of its tensors, memory-mapped. |

    For Parquet, Arrow and safetensors, run `pip install pyarrow safetensors`. Pickles can run any code and are never loaded.
    Do not change files while they are in use. A replaced file is an error when it is opened again. Threads can share an
    object; one thread reads at a time.

    Args:
        paths: A file, a folder, a glob such as `embeddings/*.parquet` (`**` for nested folders), an address, or a list of
            these. A list keeps its order. Files of a folder or a glob are sorted by the numbers in their names: `part-2`
            comes before `part-10`. A folder may contain shards in only one format, and any other files. The following are
            skipped: names that begin with a dot or an underscore, files that operating systems create, caches of the
            package datasets, and second links to a file. Files at an address, such as `s3://bucket/embeddings/*.parquet`,
            `gs://` or `https://` (any file system of fsspec), are copied once to the folder in `FEWSHOT_CALLBACKS_CACHE`,
            or else to your cache folder.
        embeddings: Name of the array or column with the vectors, (rows, dim); by default `embeddings`, or the only array
            with two axes.
        labels: The label of each row: the name of an array or column in the same files, a `.npy` file (or a glob of them)
            that covers all rows, or an array or list.
        ids: The identity of each row, in the same forms.
        groups: The group of each row, in the same forms.
        is_gallery: Whether each row belongs to the gallery, in the same forms: booleans, or zeros and ones. Other rows are
            queries. By default each row is both.
        scale: Factor of quantised vectors: int8 and uint8 rows are read as `(number - offset) * scale` in float32.
        offset: The integer that represents 0.

    Attributes:
        files: The files, in the order of their rows; local copies of remote files.
        shape: (rows, dim) of all files together.
        dtype: The stored type: NumPy's float16, float32, float64, int8 or uint8, or `torch.bfloat16`, which only safetensors
            can store. With a scale or an offset, NumPy's float32.
        notes: Sentences about skipped files, and about the order of the files if it matters.
        labels: (rows,) Labels, read when the object is created; None if not passed.
        ids: (rows,) Ids; None if not passed.
        groups: (rows,) Groups; None if not passed.
        is_gallery: (rows,) Booleans; None if not passed.

    Raises:
        ValueError: A path matches no file, is a broken link, or has an unsupported format; a file is listed twice, damaged
            or truncated, contains Python objects, or lacks a column; its vectors have another dim or type than in the first
            file; or the number of labels is not the number of rows. The message names the file. Damage after the header of
            a file is noticed when the rows are read; in an `.npz` file, when its last row is read after all others.
        ModuleNotFoundError: The package for a format or an address is not installed.
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
        >>> shards.where(250).replace(folder, "folder")
        'row 50 of folder/part-2.npz'
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
        # The cache and this object form a cycle, so files are closed when Python collects it.
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

        # Labels in several files follow the order of those files; only a single array needs the note.
        single_arrays = [argument for argument in by_file if argument not in names and len(by_file[argument]) == 1]
        order = listed.note_on_order(single_arrays)
        self.notes = (*listed.notes, *([order] if order else []))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, rows: Any) -> Any:
        """Return (rows, dim) the rows of a slice without a step, such as `shards[1000:2000]`.

        The result is a NumPy array, or a PyTorch tensor for bfloat16. Rows of one memory-mapped file are not copied, so do
        not change them.

        Raises:
            TypeError: For an integer, a step or a list of rows.
            ValueError: A file is damaged, or its size or modification time has changed since the shards were created.
        """
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError("Shards only support slices without a step. Write shards[5:6] instead of shards[5].")
        start, stop, _ = rows.indices(len(self))
        stop = max(start, stop)
        empty: Any = np.empty if isinstance(self.dtype, np.dtype) else torch.empty
        joined = empty((stop - start, self.shape[1]), dtype=self.dtype)
        if start == stop:
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
        """Return the file of a row, and its index in this file, such as "row 17 of embeddings/part-2.npy".

        Raises:
            IndexError: The row does not exist.
        """
        if not 0 <= row < len(self):
            raise IndexError(
                f"row {row} does not exist in shards with {len(self)} rows. Pass a row from 0 to {len(self) - 1}."
            )
        index = bisect_right(self._starts, row) - 1
        return f"row {row - self._starts[index]} of {self.files[index]}"

    def _read(self, index: int, rows: slice) -> Any:
        """Return contiguous rows of one file."""
        with naming_file(self.files[index]), self._lock:
            numbers = self._opened(index)[self._name][rows]
        return numbers if self._scaling is None else self._scaling.scaled(numbers)

    def _open(self, index: int) -> FileArrays:
        """Return the arrays of a file by name."""
        file = self.files[index]
        if file_stamp(file) != self._stamps[index]:
            raise FileError(
                "has changed its size or modification time since these shards were created. Create the shards again when "
                "the file is complete."
            )
        return FORMATS[file.suffix.lower()](file)


class VectorHeads(NamedTuple):
    """The number, dim and type of the vectors in files."""

    rows: int
    dim: int
    # a NumPy type, or torch.bfloat16
    dtype: Any


def read_vector_heads(listed: ListedShards, embeddings: str | None = None) -> VectorHeads:
    """Return the number, dim and type of the vectors, from the headers and footers of the files.

    Remote files are not fetched. `embeddings` is by default the array `embeddings`, or the only array with two axes.
    """
    content = _inspect(listed.files, lambda index: open_heads(listed.files[index]), embeddings, {})
    return VectorHeads(sum(content.lengths), *content.vector_type)


class _VectorType(NamedTuple):
    """The dim and the type of the vectors, which are equal in all files."""

    dim: int
    # a NumPy type in native byte order, or torch.bfloat16
    dtype: Any

    def __str__(self) -> str:
        return f"{self.dim} {self.dtype}"


class _Content(NamedTuple):
    """The content of the files, without the vectors."""

    name: str
    lengths: list[int]
    vector_type: _VectorType
    first_file: Path | RemoteFile
    # argument -> its column in each file that has rows
    columns: dict[str, list[NDArray[Any]]]


def _inspect(
    files: Sequence[Path | RemoteFile],
    opened: Callable[[int], FileArrays],
    name: str | None,
    column_names: Mapping[str, str],
) -> _Content:
    """Return the content of all files. Each file is opened once.

    `opened` returns the arrays of a file by its index. `name` is None to find the array with the vectors.
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
                    f"has vectors of {type_of_file}, but {first_file} has {vector_type}. Pass files from one model that "
                    "were saved with one dtype."
                )
            for argument, column in column_names.items():
                columns[argument].append(read_beside_vectors(arrays, column, argument, rows))
    if name is None or vector_type is None:
        raise EmptyFilesError(f"{files[0]} and the files after it contain no rows. Pass files with embeddings.")
    return _Content(name, lengths, vector_type, first_file, columns)


def _only_matrix(arrays: FileArrays) -> str:
    """Return the name of the array with the vectors: `embeddings`, or the only array with two axes."""
    if "embeddings" in arrays:
        return "embeddings"
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    if len(matrices) != 1:
        names = ", ".join(map(repr, matrices)) or "none"
        raise FileError(f"has no 'embeddings', and {names} with two axes. Pass the name of the vectors to embeddings=.")
    return matrices[0]


def _refuse_other_axes(vectors: FileArray, name: str) -> None:
    """Raise an error unless the array is a matrix."""
    if vectors.ndim != 2:
        raise _other_shape(vectors, name)


def _other_shape(vectors: FileArray, name: str) -> FileError:
    shape = tuple(vectors.shape)
    return FileError(
        f"has {name!r} of shape {shape}, but embeddings are (rows, dim). Pass the name of the vectors to embeddings=."
    )


def _vector_type_of(vectors: FileArray, name: str) -> _VectorType:
    """Return the dim and the type of vectors, in native byte order, since PyTorch supports no other."""
    shape = tuple(vectors.shape)
    if shape[1] == 0:
        raise _other_shape(vectors, name)
    stored = vectors.dtype
    dtype = stored.newbyteorder("=") if isinstance(stored, np.dtype) else stored
    if str(dtype) not in DTYPES:
        raise FileError(f"has {name!r} as {dtype}. Save one of {', '.join(DTYPES)} (bfloat16 in safetensors).")
    return _VectorType(int(shape[1]), dtype)


def _column_by_file(argument: str, column: Any, content: _Content) -> list[NDArray[Any]]:
    """Return the entries of a column in each file, or one array if the column was passed as an array."""
    if argument in content.columns:
        return content.columns[argument]
    if has_own_files(column):
        return read_own_files(column, argument)
    return [np.asarray(column)]


class _Scaling(NamedTuple):
    """The scale of quantised vectors, and the integer that represents 0."""

    scale: np.float32
    offset: np.float32

    @classmethod
    def of(cls, scale: float, offset: float, content: _Content) -> _Scaling | None:
        """Return the scaling; None if the numbers are not scaled."""
        if (scale, offset) == (1.0, 0.0):
            return None
        dtype = str(content.vector_type.dtype)
        if dtype not in ("int8", "uint8"):
            raise InputError(
                f"scale={scale} and offset={offset} apply to int8 and uint8 files, but {content.first_file} contains "
                f"{dtype}. Leave them out."
            )
        return cls(np.float32(scale), np.float32(offset))

    def scaled(self, numbers: NDArray[Any]) -> NDArray[np.float32]:
        """Return the float32 numbers that integers represent."""
        return (numbers.astype(np.float32) - self.offset) * self.scale
