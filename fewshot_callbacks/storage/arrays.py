"""What the formats of files have in common: arrays that are read by slices, and the words of what is wrong with a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.remote_cache import RemoteFile


class LazyArray(ABC):
    """An array or a column of a file. Slices are read on request.

    Slices usually move forward, one at a time. A slice may take no more memory than its rows and a block of fixed size.
    `shape` and `dtype` may read the first row. An array of Python objects raises `FileError` with `PICKLE` when
    its dtype or its rows are read.

    Attributes:
        ndim: Number of axes, known without reading a row.
    """

    ndim: int

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(rows, ...)."""

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """Type of the numbers, of NumPy or PyTorch."""

    @abstractmethod
    def __getitem__(self, rows: slice) -> Any:
        """Return neighbouring rows as an array of NumPy, or as a tensor of bfloat16."""


# A mapped NumPy array can already be read by slices.
FileArray = LazyArray | NDArray[Any]
FileArrays = dict[str, FileArray]


class FileError(ValueError):
    """What is wrong with a file, as the end of a sentence that begins with its name."""


class EmptyFilesError(InputError):
    """Files hold no rows."""


PICKLE = (
    "holds Python objects, which are pickles: these can run any code and are never loaded. Save numbers, or words with "
    "array.astype(str)."
)


@contextmanager
def naming_file(file: Path | RemoteFile) -> Iterator[None]:
    """Name the file in whatever goes wrong while it is read.

    Raises:
        ValueError: Reading failed; the message has the file, the fact and the fix.
    """
    try:
        yield
    except (MemoryError, ModuleNotFoundError):
        raise
    except FileError as fact:
        raise InputError(f"{file} {fact}") from None
    except Exception as error:  # zipfile, NumPy, Arrow and safetensors document no error class for a damaged file
        if isinstance(error, OSError) and error.errno is not None:  # from the disk, not from the content
            error.filename = error.filename or str(file)
            raise
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{file} is damaged or cut off, or no {file.suffix} file ({cause}). Write it again."
        ) from error


def array_named(arrays: FileArrays, name: str, argument: str) -> FileArray:
    """Return an array of a file.

    Args:
        arrays: All arrays of the file.
        name: The name of the array.
        argument: The argument that gave the name.

    Raises:
        FileError: The array does not exist, or it contains Python objects.
    """
    if name not in arrays:
        names = ", ".join(map(repr, arrays)) or "nothing"
        raise FileError(f"has no {name!r}, but {names}. Pass {argument}= with one of these, or an array of all rows.")
    array = arrays[name]
    # A `LazyArray` refuses Python objects itself.
    if isinstance(array, np.ndarray) and array.dtype.hasobject:
        raise FileError(PICKLE)
    return array
