"""Tells the reports and pictures that this package has written from all other files, which it replaces only by request."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

# The value of `Software` in the pictures, and the beginning of `generator` in the reports.
WRITER = "fewshot_callbacks"
# The marks stand in the first lines of a page and before the pixels of a picture.
SEARCHED_BYTES = 4096
_MARK_OF_REPORTS = f'<meta name="generator" content="{WRITER} '.encode()
_MARK_OF_PICTURES = f"tEXtSoftware\0{WRITER}".encode()


def is_report(path: Path) -> bool:
    """Whether a file is an HTML report of this package."""
    return _MARK_OF_REPORTS in _beginning(path)


def is_picture(path: Path) -> bool:
    """Whether a file is a PNG picture of this package."""
    return is_picture_content(_beginning(path))


def is_picture_content(beginning: bytes) -> bool:
    """Whether a file that begins with these bytes is a PNG picture of this package."""
    return _MARK_OF_PICTURES in beginning[:SEARCHED_BYTES]


def free_path(path: Path, is_own: Callable[[Path], bool]) -> Path:
    """Return the first of `name`, `name-2`, `name-3`, ... that is free, or that of an own file.

    Args:
        path: The first of these names.
        is_own: Whether what has a name may be replaced.
    """
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not os.path.exists(name) or is_own(name))


def _beginning(path: Path) -> bytes:
    """Return the first bytes of a regular file; nothing of what is no file, or cannot be read."""
    # A pipe would be waited for.
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(SEARCHED_BYTES)
    except OSError:
        return b""
