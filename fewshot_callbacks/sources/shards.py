"""Embeddings in files that are larger than memory: `Shards` reads the rows that are asked for, and no others."""

from __future__ import annotations

import math
import os
import struct
import weakref
import zipfile
import zlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.files.names import composed_form
from fewshot_callbacks.sources.shard_files import ENDINGS, file_stamp, find_shards
from fewshot_callbacks.sources.stored_rows import DTYPES
from fewshot_callbacks.system.extras import required_extra

# Rows of Parquet that are decoded at once: 4 MB of 256 float32, enough for the calls around them to cost little.
_BATCH = 4096
# Pages of Parquet are compressed in about a megabyte, and are read in pieces of that.
_BUFFER = 1 << 20
# Files that are kept open: those in which two threads read, and the next one of each. Thousands would exceed what a
# process may open.
_KEPT_OPEN = 4


# The arrays and columns of a file by their names: each has `ndim`, and the three members of a source.
_Arrays = dict[str, Any]


class Shards:
    """Embeddings in one or many files, with the columns beside them, as one set of rows. Vectors are never read as a whole.

    | file | what is read |
    | --- | --- |
    | `.npy` | One array, memory-mapped. |
    | `.npz` | An array by its name: memory-mapped as `numpy.savez` writes it, unpacked on the way if it is compressed. |
    | `.parquet` | A list column, decoded a few thousand rows at a time: no row twice, as long as slices go forward. |
    | `.arrow`, `.feather` | A list column of a file or a stream, memory-mapped; one batch at a time if it is compressed. |
    | `.safetensors` | A tensor by its name, memory-mapped. |

    Parquet and Arrow are read by pyarrow, safetensors by its own package: `pip install 'fewshot-callbacks[files]'`. Pickles
    can run any code, and are never loaded. Files must stay as they are while they are read: one that was replaced meanwhile
    is noticed when it is opened again. Several threads may read at once; one at a time is served.

    Args:
        paths: A file, a folder, a glob such as `embeddings/*.parquet` (`**` for folders in folders), or a list of these.
            A list keeps its order; the files of a glob or a folder are read in the order of the numbers in their names:
            `part-2` comes before `part-10`. A folder may hold other files, but shards of one kind alone; names that begin
            with a dot or an underscore, and those that systems make, are passed over. So is what the package datasets
            keeps beside the files that its `state.json` lists. A file that links make appear twice is read once.
        embeddings: Name of the array or column of the vectors, (rows, dim); by default `embeddings`, or the only one with
            two axes.
        labels: The label of each row: the name of an array or column in the same files; a `.npy` file of all rows, or a
            glob of several; or an array or list.
        ids: The identity of each row, in the same forms.
        groups: The group of each row, in the same forms.
        queries: Whether each row is a query, in the same forms: booleans, or zeros and ones.
        scale: Of integers that stand for other numbers: what is read is `(number - offset) * scale` in float32.
        offset: The number that stands for 0.

    Attributes:
        files: The files, in the order of their rows.
        shape: (rows, dim) of all files together.
        dtype: The type of the numbers as they are stored: NumPy's float16, float32, float64, int8 or uint8, or
            `torch.bfloat16`, which safetensors alone hold. With a scale or an offset NumPy's float32.
        notes: Sentences about what was passed over, and about the order of the files where it matters.
        labels: (rows,) Labels of all rows, read when the files are opened; None if not given. So are `ids`, `groups` and
            `queries`, the last as booleans.

    Raises:
        ValueError: A path leads to no file, or to one of another format; a link leads nowhere; a file is listed twice,
            damaged or cut off; it holds Python objects; it lacks a column; its vectors have another dim or type than those
            of the first; or there are more or fewer labels than rows. The message names the file. Damage beyond the head of
            a file shows when it is read: of an array in an `.npz` file at its last row, once all rows before were read.
        ModuleNotFoundError: The package that reads a format is not installed.

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
        >>> shards[99:102][:, 0]  # across two files
        array([0., 1., 1.], dtype=float16)
        >>> shards.where(250).endswith("part-2.npz")
        True
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        embeddings: str | None = None,
        labels: Any | None = None,
        ids: Any | None = None,
        groups: Any | None = None,
        queries: Any | None = None,
        scale: float = 1.0,
        offset: float = 0.0,
    ) -> None:
        found = find_shards(paths)
        self.files = tuple(found.files)
        self._stats = [file_stamp(file) for file in self.files]
        self._lock = Lock()
        self._opened = lru_cache(_KEPT_OPEN)(self._open)
        given = {"labels": labels, "ids": ids, "groups": groups, "queries": queries}
        inside = {name: column for name, column in given.items() if isinstance(column, str) and not _is_npy(column)}
        parts: dict[str, list[NDArray[Any]]] = defaultdict(list)
        lengths: list[int] = []
        self._name, first = embeddings, None
        for index, file in enumerate(self.files):
            with _reading(file):
                arrays = self._opened(index)
                self._name = self._name or _only_matrix(arrays)
                rows = _named(arrays, self._name, "embeddings")
                lengths.append(rows.shape[0])
                if not lengths[-1]:  # as distributed jobs write them; a list column without rows has no dim
                    continue
                form = _form(rows, self._name)
                first = first or (form, file)
                if form != first[0]:
                    raise _ShardError(
                        f"holds vectors of {form[0]} {form[1]}, and {first[1]} of {first[0][0]} {first[0][1]}. Pass files "
                        "of one model that were saved with one dtype."
                    )
                for name, column in inside.items():
                    parts[name].append(_copied(_named(arrays, column, name)))
                    if len(parts[name][-1]) != lengths[-1]:
                        raise _ShardError(
                            f"has {len(parts[name][-1])} {name} for {lengths[-1]} rows. Write one for each row."
                        )
        if first is None:
            raise ValueError(f"{self.files[0]} and the files after it hold no rows. Pass files that hold embeddings.")
        self._starts = [0, *accumulate(lengths)]
        self.shape, self.dtype = (self._starts[-1], first[0][0]), first[0][1]
        self._scaled = _scaled(scale, offset, self.dtype, first[1])
        if self._scaled is not None:
            self.dtype = np.dtype(np.float32)
        self.labels, self.ids, self.groups, self.queries = (
            None if value is None else self._column(name, value, parts[name]) for name, value in given.items()
        )
        # Columns in several files of their own are in the order of these, as the vectors are.
        outside = [name for name in given if given[name] is not None and name not in inside and len(parts[name]) < 2]
        order = found.of_order(outside)
        self.notes = (*found.passed_over, *([order] if order else []))

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
            ValueError: A file is damaged, or was changed after it was opened first.
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
            begin, end = self._starts[index : index + 2]
            if begin == end:
                continue
            with _reading(self.files[index]), self._lock:
                part = self._opened(index)[str(self._name)][max(start - begin, 0) : min(stop, end) - begin]
            if self._scaled is not None:
                part = (part.astype(np.float32) - self._scaled[1]) * self._scaled[0]
            if len(part) == len(joined):
                return part.astype(self.dtype, copy=False) if isinstance(part, np.ndarray) else part
            joined[max(begin - start, 0) :][: len(part)] = part
        return joined

    def where(self, row: int) -> str:
        """Say in which row of which file a row lies, both counted from 0: "row 17 of embeddings/part-2.npy".

        Raises:
            IndexError: There is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(
                f"There is no row {row} in shards of {len(self)} rows. Pass one from 0 to {len(self) - 1}."
            )
        index = bisect_right(self._starts, row) - 1
        return f"row {row - self._starts[index]} of {self.files[index]}"

    def _open(self, index: int) -> _Arrays:
        """Return the arrays of a file by their names.

        Raises:
            _ShardError: It is not the file that was opened before.
        """
        file = self.files[index]
        if file_stamp(file) != self._stats[index]:
            raise _ShardError(
                "was changed after it had been opened. Open the shards again, once nobody writes to them."
            )
        return _FORMATS[file.suffix.lower()](file)

    def _column(self, name: str, value: Any, parts: list[NDArray[Any]]) -> NDArray[Any]:
        """Return a column that is an array, or lies in files of its own; or join the parts that lay beside the vectors.

        Raises:
            ValueError: It has not one entry for each row, or parts are of different kinds or shapes.
        """
        for file in find_shards(value).files if _is_npy(value) else ():
            with _reading(file):
                parts.append(_copied(_named(_npy(file), "embeddings", name)))
        if len({(part.dtype.kind == "U", part.shape[1:]) for part in parts}) > 1:  # NumPy joins words and numbers
            kinds = sorted({f"{part.dtype.name} of {part.ndim} axes" for part in parts})
            raise ValueError(f"{name} are {' and '.join(kinds)} in different files. Write them alike.")
        read = np.concatenate(parts) if parts else np.asarray(value)
        if not read.ndim or len(read) != len(self):
            raise ValueError(
                f"{name} has {len(read) if read.ndim else 'no'} entries for the {len(self)} rows of {len(self.files)} files "
                f"({self.files[0]} is the first). Pass one for each row, in the order of the files."
            )
        if name != "queries":
            _refuse_two_spellings(name, read)
            return read
        if read.ndim != 1 or not np.isin(read, (0, 1)).all():
            raise ValueError(f"queries are {read.dtype} other than 0 and 1. Pass one boolean for each row.")
        return read.astype(bool)


def _scaled(scale: float, offset: float, dtype: Any, file: Path) -> tuple[np.float32, np.float32] | None:
    """Return by what numbers are scaled and where their 0 is; None where they are what they stand for.

    Raises:
        ValueError: They are no integers.
    """
    if (scale, offset) == (1.0, 0.0):
        return None
    if str(dtype) not in ("int8", "uint8"):
        raise ValueError(
            f"scale={scale} and offset={offset} are of integers, and {file} holds {dtype}. Leave them out."
        )
    return np.float32(scale), np.float32(offset)


def _refuse_two_spellings(name: str, words: NDArray[Any]) -> None:
    """Refuse words that look alike and are not: their letters with an accent are one character here, and two there.

    Raises:
        ValueError: There are such words; names one.
    """
    if words.dtype.kind != "U":
        return
    spellings: dict[str, str] = {}
    for word in np.unique(words).tolist():
        other = spellings.setdefault(composed_form(word), word)
        if other != word:
            raise ValueError(
                f"{name} hold {composed_form(word)!r} in two forms of Unicode, {other!a} and {word!a}, which would be two "
                "values. Write one of them, such as unicodedata.normalize('NFC', word)."
            )


class ChosenRows:
    """Some rows of shards as a source, with their columns.

    Args:
        shards: All rows.
        mask: (rows,) Which of them.
    """

    def __init__(self, shards: Shards | ChosenRows, mask: NDArray[np.bool_]) -> None:
        self._shards: Any = shards
        self._rows = np.flatnonzero(mask)
        self.shape: tuple[int, int] = (len(self._rows), shards.shape[1])
        self.dtype: Any = shards.dtype
        self.notes: tuple[str, ...] = shards.notes
        columns: tuple[NDArray[Any] | None, ...] = tuple(getattr(shards, name) for name in ("labels", "ids", "groups"))
        self.labels, self.ids, self.groups = (None if column is None else column[mask] for column in columns)

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, row: int) -> str:
        """Say in which row of which file a row lies."""
        return str(self._shards.where(int(self._rows[row])))

    def __getitem__(self, rows: slice) -> Any:
        """Read neighbouring rows, and pass over those between them."""
        wanted = self._rows[rows]
        first, last = (wanted[0], wanted[-1]) if len(wanted) else (0, -1)
        return self._shards[first : last + 1][wanted - first]


class _ShardError(ValueError):
    """What is wrong with a file, as the end of a sentence that begins with its name."""


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Name the file in whatever goes wrong while it is read.

    Raises:
        ValueError: With the file, the fact and the fix.
    """
    try:
        yield
    except (MemoryError, ModuleNotFoundError):
        raise
    except _ShardError as fact:
        raise ValueError(f"{file} {fact}") from None
    except Exception as error:  # zipfile, NumPy, Arrow and safetensors promise no class of error for a damaged file
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of what is on it
            raise
        what = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{file} is damaged or cut off, or no {file.suffix} file ({what}). Write it again.") from error


def _is_npy(value: Any) -> bool:
    """Whether a column is given as files of its own."""
    return isinstance(value, str | os.PathLike) and os.fspath(value).lower().endswith(".npy")


def _only_matrix(arrays: _Arrays) -> str:
    """Choose the array of embeddings, if no name was given."""
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    if "embeddings" in arrays:
        return "embeddings"
    if len(matrices) != 1:
        which = ", ".join(map(repr, matrices)) or "none"
        raise _ShardError(f"has no 'embeddings', and {which} with two axes. Pass embeddings= with the name of one.")
    return matrices[0]


def _named(arrays: _Arrays, name: str, argument: str) -> Any:
    if name not in arrays:
        there = ", ".join(map(repr, arrays)) or "nothing"
        raise _ShardError(f"has no {name!r}, but {there}. Pass {argument}= with one of these, or an array of all rows.")
    array = arrays[name]
    if isinstance(array, np.ndarray) and array.dtype.hasobject:
        raise _ShardError(_PICKLE)
    return array


def _form(rows: Any, name: str) -> tuple[int, Any]:
    """Return the dim of vectors and the type of their numbers, in the byte order of this machine: PyTorch takes no other."""
    if len(rows.shape) != 2 or not rows.shape[1]:
        raise _ShardError(
            f"holds {name!r} of shape {tuple(rows.shape)}, and embeddings are (rows, dim). Pass embeddings= with their name."
        )
    dtype = rows.dtype.newbyteorder("=") if isinstance(rows.dtype, np.dtype) else rows.dtype
    if str(dtype) not in DTYPES:
        raise _ShardError(f"holds {name!r} as {dtype}. Save {', '.join(DTYPES)} (bfloat16 in safetensors).")
    return int(rows.shape[1]), dtype


def _copied(column: Any) -> NDArray[Any]:
    """Read a column; a view into a memory map would keep the map, and its file open."""
    return np.array(column[:])


_PICKLE = (
    "holds Python objects, which are pickles: these can run any code and are never loaded. Save numbers, or words with "
    "array.astype(str)."
)


def _head(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the shape, whether columns are stored one after another, and the type of an array in NumPy's format."""
    begin = stream.tell()
    if stream.read(1) == b"\x80":  # of every pickle since Python 2.3
        raise _ShardError(_PICKLE)
    stream.seek(begin)
    # Version 3 differs from 2 in names of fields, which embeddings have not.
    is_old = np.lib.format.read_magic(stream) == (1, 0)
    return np.lib.format.read_array_header_1_0(stream) if is_old else np.lib.format.read_array_header_2_0(stream)


def _mapped(stream: Any, size: float = math.inf) -> NDArray[Any]:
    """Map an array of NumPy's format, which begins where an open file stands.

    Args:
        stream: The open file.
        size: Bytes that the array and its head may take.

    Raises:
        ValueError: The head names more numbers than there are.
    """
    begin = stream.tell()
    shape, by_columns, dtype = _head(stream)
    needed = stream.tell() - begin + dtype.itemsize * math.prod(shape)
    if needed > size and not dtype.hasobject:  # what follows is another array
        raise ValueError(f"an array of shape {shape} needs {needed:,} bytes, and there are {size:,}")
    if dtype.hasobject or not math.prod(shape):  # what is refused if it is asked for, and what cannot be mapped
        return np.broadcast_to(np.empty((), dtype), shape)
    return np.asarray(np.memmap(stream, dtype, "r", stream.tell(), shape, "F" if by_columns else "C"))


class _Rows:
    """An array of a file, of which a function reads the rows from one to another."""

    def __init__(self, shape: Sequence[int], read: Callable[[int, int], Any]) -> None:
        self.shape, self.ndim, self._read = tuple(shape), len(shape), read

    @property
    def dtype(self) -> Any:
        return self[:0].dtype

    def __getitem__(self, rows: slice) -> Any:
        start, stop, _ = rows.indices(self.shape[0])
        return self._read(start, stop)


def _inflated(file: Path, member: zipfile.ZipInfo) -> _Rows:
    """Open a compressed array of an .npz archive: it is unpacked as far as it is read, and anew for a step back."""
    with zipfile.ZipFile(file) as archive, ExitStack() as opened:  # the archive is closed after the last of its streams
        stream = opened.enter_context(archive.open(member))
        shape, by_columns, dtype = _head(stream)
        if by_columns:
            raise _ShardError(
                "is compressed in Fortran's order. Save numpy.ascontiguousarray(array), or do not compress."
            )
        left_open = opened.pop_all()
    begin, bytes_of_row = stream.tell(), dtype.itemsize * math.prod(shape[1:])

    def read(start: int, stop: int) -> NDArray[Any]:
        if dtype.hasobject:
            raise _ShardError(_PICKLE)
        stream.seek(begin + start * bytes_of_row)
        return np.frombuffer(stream.read((stop - start) * bytes_of_row), dtype).reshape(stop - start, *shape[1:])

    rows = _Rows(shape, read)
    weakref.finalize(rows, left_open.close)
    return rows


def _npy(file: Path) -> _Arrays:
    with file.open("rb") as stream:
        return {"embeddings": _mapped(stream)}


def _npz(file: Path) -> _Arrays:
    """Open an archive, in whose members lie .npy files: as they are, or compressed."""
    arrays: _Arrays = {}
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if member.compress_type != zipfile.ZIP_STORED:
                arrays[name] = _inflated(file, member)
                continue
            # Two bytes each say how long the name and the extra field are, behind which the content begins.
            stream.seek(member.header_offset + 26)
            stream.seek(sum(struct.unpack("<2H", stream.read(4))), os.SEEK_CUR)
            begin = stream.tell()
            array = _mapped(stream, member.file_size)
            arrays[name] = array
            if array.ndim and array.nbytes and not array.dtype.hasobject:
                stream.seek(begin)
                head = stream.read(member.file_size - array.nbytes)
                arrays[name] = _Checked(array, zlib.crc32(head), member.CRC)
    return arrays


class _Checked:
    """An array of an archive whose bytes are compared with their checksum.

    Rows that are read one after another from the first to the last, as an evaluation does, cost no further reading. Whoever
    jumps into the middle reads what is there.
    """

    def __init__(self, array: NDArray[Any], of_head: int, checksum: int) -> None:
        """Describe an array.

        Args:
            array: Its mapped rows.
            of_head: The checksum of what stands before them.
            checksum: The checksum of all.
        """
        self.shape, self.ndim, self.dtype = array.shape, array.ndim, array.dtype
        self._array, self._sum, self._checksum = array, of_head, checksum
        self._summed = 0

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(len(self._array))
        if start <= self._summed < stop:
            # The rows of an array that is stored by columns do not follow each other.
            stop = stop if self._array.flags.c_contiguous else len(self._array)
            part = self._array[self._summed : stop]
            in_order = part if self._array.flags.c_contiguous else part.T
            self._sum = zlib.crc32(np.ascontiguousarray(in_order).view(np.uint8).data, self._sum)
            self._summed = stop
        if self._summed == len(self._array) and self._sum != self._checksum:
            raise ValueError("its checksum is another one")
        return self._array[rows]


class _ArrowColumn:
    """A column that comes in batches. They are read forward; a step back begins anew at the group that the row lies in."""

    def __init__(self, field: Any, starts: list[int], batches: Callable[[int], Iterator[Any]]) -> None:
        """Describe a column.

        Args:
            field: Its name and type.
            starts: The first row of each group of batches; the last entry is the number of all rows.
            batches: Reads the batches from a group on.
        """
        types = import_module("pyarrow.types")
        self._name, self._starts, self._batches_from = field.name, starts, batches
        kind = getattr(field.type, "storage_type", field.type)  # that of tensors of a fixed shape is a list
        self._is_view = types.is_list_view(kind) or types.is_large_list_view(kind)
        self._is_list = (
            self._is_view or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        )
        # Tags are lists of words, and no vectors.
        self.ndim = 2 if self._is_list and types.is_primitive(kind.value_type) else 1
        self._dim: int | None = None
        self._at, self._held, self._batches = 0, np.empty(0), batches(0)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self[:1].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._starts[-1], *self[:1].shape[1:])

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(self._starts[-1])
        group = bisect_right(self._starts, start, hi=len(self._starts) - 1) - 1
        if start < self._at or self._starts[group] > self._at + len(self._held):
            self._at, self._held, self._batches = self._starts[group], np.empty(0), self._batches_from(group)
        parts = []
        while start < stop:
            begin = start - self._at
            if begin >= len(self._held):
                at, self._at = self._at + len(self._held), self._starts[-1]  # if this fails, the next one begins anew
                self._held = np.empty(0)
                self._held = self._array(next(self._batches).column(0), at)
                self._at = at
                continue
            parts.append(self._held[begin : stop - self._at])
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self._held[:0]])

    def _array(self, column: Any, at: int) -> NDArray[Any]:
        """Turn a batch into an array, without a copy of numbers.

        Raises:
            _ShardError: A row has no value, or lists are not of one length.
        """
        column = _decoded(getattr(column, "storage", column))
        self._refuse_nulls(column, 1, at)
        if not self._is_list:
            array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
            return array.astype(str) if array.dtype.hasobject else array
        dims = (column.sizes if self._is_view else column.value_lengths()).to_numpy()
        if self._dim is None and len(dims):
            self._dim = int(dims[0])
        dim, others = self._dim or 0, dims != self._dim
        if others.any():
            row = int(others.argmax())
            raise _ShardError(
                f"holds lists of {dim} numbers in {self._name!r}, and in row {at + row} one of {dims[row]}. Write "
                "vectors of one length."
            )
        values = column.flatten()
        self._refuse_nulls(values, dim, at)
        vectors: NDArray[Any] = values.to_numpy(zero_copy_only=False).reshape(len(dims), dim)
        return vectors

    def _refuse_nulls(self, values: Any, of_row: int, at: int) -> None:
        if values.null_count:
            row = at + values.is_null().index(True).as_py() // of_row
            raise _ShardError(f"has no value of {self._name!r} in row {row}. Leave rows without one out.")


def _decoded(column: Any) -> Any:
    """Return a batch as plain values: of a dictionary, of runs and of views, which hide values that are missing."""
    types = import_module("pyarrow.types")
    if types.is_dictionary(column.type):
        return column.dictionary_decode()
    if types.is_run_end_encoded(column.type):
        return import_module("pyarrow.compute").run_end_decode(column)
    if types.is_string_view(column.type):  # not every version of pyarrow turns them into arrays
        return import_module("pyarrow").array(column.to_pylist(), "string")
    return column


def _parquet(file: Path) -> _Arrays:
    with required_extra("files", "a .parquet file"):
        parquet = import_module("pyarrow.parquet")
    opened = parquet.ParquetFile(file, buffer_size=_BUFFER)
    groups = opened.num_row_groups
    starts = [0, *accumulate(opened.metadata.row_group(group).num_rows for group in range(groups))]

    def batches(name: str, group: int) -> Iterator[Any]:
        yield from opened.iter_batches(_BATCH, row_groups=range(group, groups), columns=[name])

    return {field.name: _ArrowColumn(field, starts, partial(batches, field.name)) for field in opened.schema_arrow}


def _arrow(file: Path) -> _Arrays:
    """Open a file of Arrow's, or a stream, which has no index: both are read from their beginning, which skips but heads."""
    with required_extra("files", f"a {file.suffix} file"):
        arrow = import_module("pyarrow")
    with file.open("rb") as stream:
        is_file = stream.read(6) == b"ARROW1"

    def opened(fields: list[int]) -> Any:
        source, options = arrow.memory_map(str(file)), arrow.ipc.IpcReadOptions(included_fields=fields)
        return (
            arrow.ipc.open_file(source, options=options) if is_file else arrow.ipc.open_stream(source, options=options)
        )

    def batches(index: int, group: int = 0) -> Iterator[Any]:
        reader = opened([index])
        yield from map(reader.get_batch, range(group, reader.num_record_batches)) if is_file else reader

    schema = opened([]).schema  # none stands for all
    # A compressed column is unpacked by whoever asks for the length of a batch: the smallest, not the vectors.
    smallest = min(range(len(schema)), key=lambda index: schema.field(index).type.num_fields)
    starts = [0, sum(batch.num_rows for batch in batches(smallest))]
    return {field.name: _ArrowColumn(field, starts, partial(batches, index)) for index, field in enumerate(schema)}


def _safetensors(file: Path) -> _Arrays:
    with required_extra("files", "a .safetensors file"):
        opened = import_module("safetensors").safe_open(file, framework="pt")

    def read(name: str, start: int, stop: int) -> Any:
        tensor = opened.get_slice(name)[start:stop]
        return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()  # which NumPy has not

    shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - it is no dictionary
    return {name: _Rows(shape, partial(read, name)) for name, shape in shapes.items() if shape}


_FORMATS: dict[str, Callable[[Path], _Arrays]] = dict(
    zip(ENDINGS, (_npy, _npz, _parquet, _arrow, _arrow, _safetensors), strict=True)
)
