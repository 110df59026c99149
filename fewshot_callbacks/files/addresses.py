"""Files at addresses that fsspec reads, such as s3://bucket/run/config.yaml, and how they differ from paths."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import Any

from fsspec.core import strip_protocol, url_to_fs

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.outputs import write_whole

# A protocol has at least two letters, since C:/ is a drive. `Path` keeps only one of the two slashes. Protocols may be
# chained by ::.
_PROTOCOL = re.compile(r"(?P<protocol>(?:^|::)[a-z][a-z0-9+.-]+):/+(?=[^/]|$)")
_LOCAL_PROTOCOL = re.compile(r"(?:file|local):/+")

# A path of this machine, or an address as text.
Location = Path | str


def is_address(path: object) -> bool:
    """Return whether this is an address, and not a path on this machine.

    Examples:
        >>> is_address("s3://bucket/run"), is_address(Path("s3://bucket/run")), is_address("runs/version_0")
        (True, True, False)
    """
    if not isinstance(path, str | PurePath):
        return False
    return re.match(r"[a-z][a-z0-9+.-]+:(/|:[a-z])", _with_slashes(path)) is not None


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path as text: an address with both slashes, file:// as a plain path.

    Examples:
        >>> path_text(Path("s3://bucket/run")), path_text("file:///data/run"), path_text(Path("runs"))
        ('s3://bucket/run', '/data/run', 'runs')
    """
    if not isinstance(path, str | PurePath) or not is_address(path):
        return os.fspath(path)
    text = _with_slashes(path)
    if _LOCAL_PROTOCOL.match(text):
        return str(strip_protocol(_LOCAL_PROTOCOL.sub("file:///", text)))
    return _PROTOCOL.sub(r"\g<protocol>://", text)


def as_location(path: str | os.PathLike[str]) -> Location:
    """Return an address as text, and anything else as a path.

    Examples:
        >>> as_location(Path("s3://bucket/run")), as_location("runs").name
        ('s3://bucket/run', 'runs')
    """
    text = path_text(path)
    return text if is_address(text) else Path(text)


def join_location(folder: str | os.PathLike[str], name: str) -> Location:
    """Return the location of a file in a folder.

    Examples:
        >>> join_location("s3://bucket/run/", "config.yaml")
        's3://bucket/run/config.yaml'
    """
    location = as_location(folder)
    return posixpath.join(location, name) if isinstance(location, str) else location / name


def filesystem_of(address: str | os.PathLike[str]) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it.

    Raises:
        ValueError: fsspec knows no such protocol.
        ModuleNotFoundError: The package that reads the protocol is not installed.
    """
    text = path_text(address)
    with naming_address(text):
        files, path = url_to_fs(text)
    return files, path


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a small file, by its path or its address.

    Raises:
        FileNotFoundError: The file does not exist.
        PermissionError: The file may not be read.
    """
    if not is_address(path):
        return Path(path).read_bytes()
    files, path_in_store = filesystem_of(path)
    with naming_address(path_text(path)):
        files.invalidate_cache()
        content: bytes = files.cat_file(path_in_store)
    return content


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a small file, by its path or its address; its folder is created if necessary."""
    if not is_address(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
        return
    files, path_in_store = filesystem_of(path)
    with naming_address(path_text(path)):
        files.makedirs(posixpath.dirname(path_in_store), exist_ok=True)
        files.pipe_file(path_in_store, content)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a path or an address leads to a file."""
    if not is_address(path):
        return Path(path).is_file()
    files, path_in_store = filesystem_of(path)
    with naming_address(path_text(path)):
        files.invalidate_cache()
        return bool(files.isfile(path_in_store))


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path or an address leads to a folder."""
    if not is_address(path):
        return Path(path).is_dir()
    files, path_in_store = filesystem_of(path)
    with naming_address(path_text(path)):
        files.invalidate_cache()
        return bool(files.isdir(path_in_store))


def folder_of(location: Location) -> Location:
    """Return the folder of a file.

    Examples:
        >>> folder_of("s3://bucket/run/config.yaml")
        's3://bucket/run'
    """
    return posixpath.dirname(location) if isinstance(location, str) else location.parent


def times_at_address(pattern: str) -> dict[Location, Any]:
    """Return the time of the last change of each file that a pattern matches, by the address of the file."""
    files, pattern_in_store = filesystem_of(pattern)
    with naming_address(pattern):
        files.invalidate_cache()
        protocol = pattern.partition("://")[0]
        return {f"{protocol}://{path.lstrip('/')}": files.modified(path) for path in files.glob(pattern_in_store)}


def upload(file: Path, address: str, is_replaceable: Callable[[Path], bool]) -> None:
    """Copy a file to an address, unless a file that must not be replaced is already there.

    `is_replaceable` is called with a copy of the file at the address.

    Raises:
        FileExistsError: If the file at the address must not be replaced.
    """
    files, path = filesystem_of(address)
    if files.exists(path):
        with TemporaryDirectory() as folder:
            present = Path(folder) / file.name
            files.get(path, str(present))
            if not is_replaceable(present):
                raise FileExistsError(f"{address} is a file that this package did not write in this run")
    files.makedirs(posixpath.dirname(path), exist_ok=True)
    files.put(str(file), path)


@contextmanager
def naming_address(address: str) -> Iterator[None]:
    """Raise errors that name the address if it cannot be read or written inside the block.

    Raises:
        FileNotFoundError: There is nothing at the address.
        PermissionError: It may not be read or written.
        ModuleNotFoundError: The package that reads the protocol is not installed; the message names it.
        ValueError: Any other error, in the words of the package that reads the protocol.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"nothing exists at {address}{_cause_in_brackets(error, address)}. Check the names of the bucket, the folder "
            "and the file."
        ) from error
    except PermissionError as error:
        raise PermissionError(
            f"access to {address} is denied{_cause_in_brackets(error, address)}. Check the keys that this machine uses and "
            "their permissions."
        ) from error
    except ImportError as error:
        missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        package = (missing.name or "").partition(".")[0] or str(error)
        raise ModuleNotFoundError(
            f"{address} needs {package}, which is not installed. Run pip install {package}.", name=package
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # each package that reads a protocol has its own errors
        if isinstance(error, OSError) and error.errno is not None and error.filename:  # an error of this machine's disk
            raise
        if str(error).startswith("Protocol not known"):
            raise InputError(
                f"{address} begins with a protocol that fsspec does not know. Check its spelling: "
                "fsspec.available_protocols() lists all protocols."
            ) from error
        raise InputError(
            f"{address} cannot be reached{_cause_in_brackets(error, address)}. Check the address, the network, and the keys "
            "that this machine uses."
        ) from error


def _with_slashes(path: str | PurePath) -> str:
    return path.as_posix() if isinstance(path, PurePath) else path


def _cause_in_brackets(error: BaseException, address: str) -> str:
    """Return the text of a package's error in brackets; empty if it only repeats the address."""
    for said in (error, error.__cause__):
        words = " ".join(str(said or "").split()).rstrip(".")
        if words and words.strip("/'") not in address:
            return f" ({words})"
    return ""
