"""Reports and pictures that this package writes, and how they are distinguished from other files.

Files without the mark are only replaced if the user names them. docs/evaluate/files.md lists what is written where.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fewshot_callbacks.errors import InputError

# The value of `Software` in the pictures, and the beginning of `generator` in the reports.
WRITER = "fewshot_callbacks"
# Number of bytes that are searched: the marks are in the first lines of a page, and before the pixels of a picture.
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
    """Return the first of `name`, `name-2`, `name-3`, ... that does not exist or may be replaced."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    candidates = itertools.chain([path], numbered)
    return next(candidate for candidate in candidates if not os.path.exists(candidate) or is_replaceable(candidate))


def refuse_input(output: Path, option: str, inputs: Iterable[Path | None]) -> None:
    """Raise an error if an output is a file that is also read."""
    if not output.exists():
        return
    for path in inputs:
        if path is not None and path.exists() and output.samefile(path):
            raise InputError(f"{option} {output} would replace a file that this command reads. Pass another path.")


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, which replaces an older file, or the target of a link, once it is complete.

    Raises:
        OSError: If it cannot be written, for instance on a full disk. The older file is unchanged.
    """
    with whole_file(path) as file, naming_output(path):
        file.write_bytes(content)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a file to write. It replaces an older file if the block ends without an error, and is deleted otherwise.

    If the path is a link, its target is replaced.

    Raises:
        OSError: If the file cannot be created, or cannot replace the older file.
    """
    target = target_of(Path(path))
    if target.exists() and not target.is_file():  # a device or a pipe, which cannot be replaced
        yield target
        return
    # The partial file is in the same folder, since a file can only replace a file on the same file system.
    with naming_output(path):
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    partial = Path(name)
    try:
        yield partial
        # Only the owner may read a file of `mkstemp`, so it gets the permissions of any other new file. The mask that
        # decides them can only be read by setting it.
        mask = os.umask(0)
        os.umask(mask)
        with naming_output(path):
            os.chmod(partial, 0o666 & ~mask)
            os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def naming_output(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise an error that names the output if it cannot be written inside the block."""
    try:
        yield
    except OSError as error:
        fix = "Make room there, or pass another path."
        raise type(error)(f"{path} cannot be written: {error.strerror or error}. {fix}") from error


def target_of(path: Path) -> Path:
    """Return the file that is written, which for a link is its target."""
    return Path(os.path.realpath(path))


def _beginning(path: Path) -> bytes:
    """Return the first bytes of a regular file; b"" if it is not a regular file, or cannot be read."""
    # Reading from a pipe would wait for a writer.
    if not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(SEARCHED_BYTES)
    except OSError:
        return b""
