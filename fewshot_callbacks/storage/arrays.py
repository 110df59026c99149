"""What all file formats share: arrays that are read by slices, and messages about damaged files."""

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
    """An array or a column of a file, which is read slice by slice.

    Callers usually read slices in ascending order. Reading must take no more memory than the rows and a block of fixed
    size. `shape` and `dtype` may read the first row. An array of Python objects raises `FileError` with `PICKLE` when
    its dtype or its rows are read.

    Attributes:
        ndim: Number of axes, which is known without reading a row.
    """

    ndim: int

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(rows, ...)."""

    @property
    @abstractmethod
    def dtype(self) -> Any:
        """NumPy or PyTorch type of the numbers."""

    @abstractmethod
    def __getitem__(self, rows: slice) -> Any:
        """Return contiguous rows as a NumPy array, or as a bfloat16 tensor."""


# A memory-mapped NumPy array already supports slices.
FileArray = LazyArray | NDArray[Any]
FileArrays = dict[str, FileArray]


class FileError(ValueError):
    """Raised for a problem with a file. The message continues a sentence that begins with the name of the file."""


class EmptyFilesError(InputError):
    """Raised if files contain no rows."""


PICKLE = (
    "contains Python objects, which are pickles. Pickles can run any code and are never loaded. Save numbers, or save words "
    "with array.astype(str)."
)


@contextmanager
def naming_file(file: Path | RemoteFile) -> Iterator[None]:
    """Add the name of the file to errors that are raised while it is read."""
    try:
        yield
    except (MemoryError, ModuleNotFoundError):
        raise
    except FileError as fact:
        raise InputError(f"{file} {fact}") from None
    except Exception as error:  # zipfile, NumPy, Arrow and safetensors document no error class for a damaged file
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk, not of the content
            error.filename = error.filename or str(file)
            raise
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{file} is damaged, truncated or not a {file.suffix} file ({cause}). Write it again."
        ) from error


def array_named(arrays: FileArrays, name: str, argument: str) -> FileArray:
    """Return the array with a name that the user passed as `argument`."""
    if name not in arrays:
        names = ", ".join(map(repr, arrays)) or "nothing"
        raise FileError(
            f"has no {name!r}, but {names}. Pass one of these to {argument}=, or an array that covers all rows."
        )
    array = arrays[name]
    # A `LazyArray` raises this error itself.
    if isinstance(array, np.ndarray) and array.dtype.hasobject:
        raise FileError(PICKLE)
    return array
