"""Reports and pictures that this package writes, and how they are told from other files.

Files without the mark are replaced only where the user names them. docs/files.md lists what is written where.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path

# Stands as `Software` in the pictures, and begins `generator` in the reports.
WRITER = "fewshot_callbacks"
# Bytes that are searched: the marks stand in the first lines of a page, and before the pixels of a picture.
SEARCHED_BYTES = 4096
_REPORT_MARK = f'<meta name="generator" content="{WRITER} '.encode()
_PICTURE_MARK = f"tEXtSoftware\0{WRITER}".encode()


def is_report(path: Path) -> bool:
    """Return whether a file is an HTML report of this package."""
    return _REPORT_MARK in _beginning(path)


def is_picture(path: Path) -> bool:
    """Return whether a file is a PNG picture of this package."""
    return is_picture_content(_beginning(path))


def is_picture_content(beginning: bytes) -> bool:
    """Return whether a file that begins with these bytes is a PNG picture of this package."""
    return _PICTURE_MARK in beginning[:SEARCHED_BYTES]


def free_path(path: Path, is_replaceable: Callable[[Path], bool]) -> Path:
    """Return the first of `name`, `name-2`, `name-3`, ... that is no file, or one that may be replaced.

    Args:
        path: The first of these names.
        is_replaceable: Returns whether an existing file may be replaced.
    """
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    candidates = itertools.chain([path], numbered)
    return next(candidate for candidate in candidates if not os.path.exists(candidate) or is_replaceable(candidate))


def refuse_input(output: Path, option: str, inputs: Iterable[Path | None]) -> None:
    """Refuse to write to a file that is read.

    Args:
        output: Where a command writes.
        option: The option that names it.
        inputs: The files that the command reads; None for those that it was not given.

    Raises:
        ValueError: The output is one of them.
    """
    for path in inputs:
        if path is not None and output.exists() and path.exists() and output.samefile(path):
            raise ValueError(
                f"{option} {output} is a file that this command reads, and would be replaced. Name another."
            )


def _beginning(path: Path) -> bytes:
    """Return the first bytes of a regular file; b"" if it is none, or cannot be read."""
    # Reading a pipe would wait for a writer.
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(SEARCHED_BYTES)
    except OSError:
        return b""
