"""`.npz` archives: arrays are memory-mapped with a check of their checksum, or decompressed while they are read."""

from __future__ import annotations

import math
import os
import struct
import weakref
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.storage.arrays import PICKLE, FileArray, FileArrays, FileError, LazyArray
from fewshot_callbacks.storage.npy import Stream, map_array, read_head

# Offset, in the header of a zip member, of the lengths of the name and of the extra field, two bytes each.
_LENGTHS_AT = 26


def open_npz(file: Path) -> FileArrays:
    """Return the arrays of an archive of .npy files."""
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        return {
            member.filename.removesuffix(".npy"): (
                _open_stored(stream, member)
                if member.compress_type == zipfile.ZIP_STORED
                else _CompressedArray(file, member)
            )
            for member in archive.infolist()
        }


def _open_stored(stream: Stream, member: zipfile.ZipInfo) -> FileArray:
    """Return an array that is not compressed."""
    stream.seek(member.header_offset + _LENGTHS_AT)
    # The content begins after the name and the extra field.
    stream.seek(sum(struct.unpack("<2H", stream.read(4))), os.SEEK_CUR)
    begin = stream.tell()
    array = map_array(stream, member.file_size)
    if array.ndim == 0 or array.nbytes == 0 or array.dtype.hasobject:
        return array
    stream.seek(begin)
    head = stream.read(member.file_size - array.nbytes)
    return _CheckedArray(array, zlib.crc32(head), member.CRC)


class _CheckedArray(LazyArray):
    """A memory-mapped array of an archive, with a check of its checksum.

    Only rows that are read in order are checked.

    Args:
        checksum: The expected checksum of header and rows.
    """

    def __init__(self, array: NDArray[Any], head_checksum: int, checksum: int) -> None:
        self.ndim = array.ndim
        self._array = array
        self._expected = checksum
        # the checksum of the header and the first rows
        self._checksum = head_checksum
        self._rows_summed = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._array.dtype

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(len(self._array))
        if start <= self._rows_summed < stop:
            self._sum_up_to(stop)
        if self._rows_summed == len(self._array) and self._checksum != self._expected:
            raise InputError("its checksum is wrong")
        return self._array[rows]

    def _sum_up_to(self, stop: int) -> None:
        """Add the rows before `stop` to the checksum.

        In Fortran order the bytes of a slice are not contiguous, so all rows are added.
        """
        if self._array.flags.c_contiguous:
            in_order = self._array[self._rows_summed : stop]
        else:
            stop = len(self._array)
            in_order = self._array[self._rows_summed :].T
        self._checksum = zlib.crc32(np.ascontiguousarray(in_order).view(np.uint8).data, self._checksum)
        self._rows_summed = stop


class _CompressedArray(LazyArray):
    """A compressed array of an archive, decompressed while it is read. Going back decompresses it from the beginning."""

    def __init__(self, file: Path, member: zipfile.ZipInfo) -> None:
        # zipfile closes the file together with the last stream.
        with zipfile.ZipFile(file) as archive, ExitStack() as stack:
            stream = stack.enter_context(archive.open(member))
            head = read_head(stream)
            if head.by_columns:
                raise FileError(
                    "is compressed in Fortran's order. Save numpy.ascontiguousarray(array), or do not compress."
                )
            weakref.finalize(self, stack.pop_all().close)
        self.ndim = len(head.shape)
        self._shape = head.shape
        self._dtype = head.dtype
        self._stream = stream
        self._first_byte = stream.tell()
        self._row_bytes = head.dtype.itemsize * math.prod(head.shape[1:])

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        if self._dtype.hasobject:
            raise FileError(PICKLE)
        return self._dtype

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(self._shape[0])
        dtype = self.dtype
        self._stream.seek(self._first_byte + start * self._row_bytes)
        content = self._stream.read((stop - start) * self._row_bytes)
        return np.frombuffer(content, dtype).reshape(stop - start, *self._shape[1:])
