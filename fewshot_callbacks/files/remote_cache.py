"""Copies of remote files on the disk of this machine: each version of a file is fetched once."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from filelock import FileLock
from fsspec.callbacks import Callback
from tqdm import tqdm

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import filesystem_of, is_address, naming_address, path_text
from fewshot_callbacks.system.extras import required_extra
from fewshot_callbacks.system.terminal import print_notes

CACHE_VARIABLE = "FEWSHOT_CALLBACKS_CACHE"
# Entries by which stores identify the content of a file. Other entries differ between a listing and a single file.
_CONTENT_ENTRIES = ("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "Digest", "blob_id", "generation")
_TIME_ENTRIES = ("LastModified", "Last-Modified", "last_modified", "mtime", "modified", "updated", "created", "modify")
# Number of bytes from which a note reports what is fetched and where it is copied to. They take seconds on most networks.
_NOTICE_BYTES = 2**26
# Seconds before a bar appears on a terminal.
_BAR_AFTER = 1.0
# Largest number of characters of a component of a path. Most disks allow 255 bytes.
_LONGEST_COMPONENT = 80


@dataclass(frozen=True)
class RemoteFile:
    """A file of a remote store, as it is now.

    Attributes:
        size: Number of bytes; None if the store does not report it.
        version: A text that changes when the content changes.
    """

    filesystem: Any
    path: str
    address: str
    size: int | None
    version: str

    @property
    def name(self) -> str:
        """The name of the file, without the folders and the query of its address."""
        return _components(self.address)[-1]

    @property
    def suffix(self) -> str:
        """The ending of the name."""
        return PurePosixPath(self.name).suffix

    @property
    def copy(self) -> Path | None:
        """The path of the copy on this machine; None if there is none."""
        place = _place_of(self)
        return place if place.exists() else None

    def __str__(self) -> str:
        return self.address


class RemoteListing(NamedTuple):
    """The files at an address."""

    # in any order
    files: tuple[RemoteFile, ...]
    # what the address names
    kind: Literal["file", "folder", "pattern"]


def list_remote(address: str) -> RemoteListing:
    """Return the files at the address of a file, a folder or a pattern.

    Raises:
        ValueError: There are none, or the store cannot be reached.
        PermissionError: They may not be listed.
        ModuleNotFoundError: The package that reads the protocol is not installed.
    """
    files, path = filesystem_of(address)
    is_pattern = _has_wildcards(path, address)
    try:
        with naming_address(address):
            # Listings are cached, and a file may have changed since the last listing.
            files.invalidate_cache()
            # A file that exists may have brackets in its name.
            if is_pattern and "[" in path:
                is_pattern = not files.isfile(path)
            entries = _match(files, path) if is_pattern else _file_or_folder(files, path)
            files_only = [entry for entry in entries.values() if entry.get("type") != "directory"]
            found = tuple(_remote_file(files, entry, address) for entry in files_only)
    except FileNotFoundError as error:
        raise InputError(str(error)) from error
    if not found:
        raise InputError(f"{address} is not a file, and as a glob it matches no file. Pass a file, a folder or a glob.")
    if is_pattern:
        return RemoteListing(found, "pattern")
    return RemoteListing(found, "file" if entries.keys() == {path} else "folder")


def local_copies(files: Sequence[RemoteFile]) -> list[Path]:
    """Return the paths of local copies of remote files, in their order, fetching missing copies.

    They are in `FEWSHOT_CALLBACKS_CACHE`, or by default the user's cache folder, below folders that name the store and
    the version of the file. One process fetches a file while others wait. An interrupted process leaves no incomplete
    file under the final name.

    Raises:
        ValueError: The disk is too small, or a file changed while it was fetched.
        OSError: The store or the disk cannot be read or written.
    """
    copies = [_place_of(file) for file in files]
    absent = [(file, copy) for file, copy in zip(files, copies, strict=True) if not copy.exists()]
    if not absent:
        return copies
    needed_bytes = sum(file.size or 0 for file, _ in absent)
    _refuse_full_disk(needed_bytes, [file for file, _ in absent])
    with _progress([file for file, _ in absent], needed_bytes) as callback:
        for file, copy in absent:
            _fetch(file, copy, callback)
    return copies


def local_copy(path: str | os.PathLike[str]) -> Path:
    """Return a path as it is; for an address, return the path of a local copy of its file.

    Examples:
        >>> local_copy("embeddings.npz").name
        'embeddings.npz'
    """
    text = path_text(path)
    if not is_address(text):
        return Path(text)
    listing = list_remote(text)
    if listing.kind != "file":
        raise InputError(
            f"{text} is a {listing.kind} of {len(listing.files)} files, but one file is needed. Pass its address."
        )
    return local_copies(listing.files)[0]


def cache_folder() -> Path:
    """Return the folder of the copies.

    Raises:
        ModuleNotFoundError: The environment variable is not set, and the package that finds the user's cache folder is not
            installed.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named) / "remote"
    with required_extra("files", f"the cache folder of remote files, which {CACHE_VARIABLE} may name,"):
        platformdirs = import_module("platformdirs")
    return Path(platformdirs.user_cache_dir("fewshot_callbacks")) / "remote"


def _has_wildcards(path: str, address: str) -> bool:
    """Return whether a path is a pattern. In a web address a question mark begins the query."""
    if address.startswith(("http://", "https://")):
        return glob.has_magic(path.replace("?", ""))
    return glob.has_magic(path)


def _match(files: Any, pattern: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the entries that a pattern matches, by their paths; {} if it matches nothing.

    Raises:
        FileNotFoundError: The folder before the first wildcard does not exist.
    """
    entries: Mapping[str, Mapping[str, Any]] = files.glob(pattern, detail=True)
    if not entries:
        # `glob` ignores folders that do not exist or may not be listed. `ls` raises an error with the reason.
        components = pattern.split("/")
        first_wildcard = next(number for number, component in enumerate(components) if glob.has_magic(component))
        fixed_part = "/".join(components[:first_wildcard])
        if fixed_part:
            files.ls(fixed_part, detail=False)
    return entries


def _file_or_folder(files: Any, path: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the entry of a file, or the entries of the files in a folder, by their paths."""
    entry = files.info(path)
    if entry["type"] != "directory":
        return {path: entry}
    return {inside["name"]: inside for inside in files.ls(path, detail=True)}


def _remote_file(files: Any, entry: Mapping[str, Any], address: str) -> RemoteFile:
    """Return a file, given its entry in a listing. The address that led to the file may be a pattern.

    If the listing does not distinguish versions, the entry is looked up.
    """
    path = entry["name"]
    known = _known_entries(entry)
    if not known:
        entry = files.info(path)
        known = _known_entries(entry)
    size = entry.get("size")
    version = f"{size} {known[0]}" if known else files.ukey(path)
    return RemoteFile(files, path, _address_of(files, path, address), size, version)


def _known_entries(entry: Mapping[str, Any]) -> list[str]:
    """Return the values of an entry that identify the content of a file, then its times, each with the best first."""
    values = [entry[name] for name in (*_CONTENT_ENTRIES, *_TIME_ENTRIES) if entry.get(name)]
    # A listing and a single file may give the same time in different forms.
    return [str(value.timestamp() if isinstance(value, datetime) else value) for value in values]


def _address_of(files: Any, path: str, address: str) -> str:
    """Return the address of a file that another address led to."""
    protocol, _, rest = str(files.unstrip_protocol(path)).partition("://")
    host = files.storage_options.get("host")
    if isinstance(host, str):  # the path in the file system lacks it
        rest = f"{host}/{rest.lstrip('/')}"
    # The address of a file in an archive also names the archive.
    chain = address.partition("::")[2]
    return f"{protocol}://{rest.lstrip('/')}" + (f"::{chain}" if chain else "")


def _components(address: str) -> list[str]:
    """Return the folders and the file of an address, without a password and without a query."""
    protocol, _, path = address.partition("::")[0].partition("://")
    if protocol in ("http", "https"):
        path = re.split(r"[?#]", path)[0]
    host, slash, rest = path.partition("/")
    host_without_password = host.rpartition("@")[2]
    return [protocol, *PurePosixPath(host_without_password + slash + rest).parts]


def _place_of(file: RemoteFile) -> Path:
    """Return the path of the local copy of a version of a file."""
    *folders, name = (_disk_name(component) for component in _components(file.address))
    fingerprint = hashlib.sha256(f"{file.address}\n{file.version}".encode()).hexdigest()[:16]
    return cache_folder().joinpath(*folders, fingerprint, name)


def _disk_name(component: str) -> str:
    """Return a component of an address as a name that any disk allows, with a fingerprint."""
    plain = re.sub(r"[^\w .+=@-]", "_", component)[-_LONGEST_COMPONENT:]
    return plain if plain.strip(".") else "_"


def _refuse_full_disk(needed_bytes: int, files: Sequence[RemoteFile]) -> None:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise InputError(
            f"copies of {_described(files, needed_bytes)} do not fit into {folder}, where {free_bytes / 1e6:,.1f} MB are "
            f"free. Make room there, or set {CACHE_VARIABLE} to another folder."
        )


def _described(files: Sequence[RemoteFile], total_bytes: int) -> str:
    size = f"{total_bytes / 1e6:,.1f} MB"
    if len(files) == 1:
        return f"{files[0].address} ({size})"
    return f"{len(files):,} files ({size}) such as {files[0].address}"


def _fetch(file: RemoteFile, copy: Path, callback: Callback) -> None:
    """Copy a file to its place, unless another process has done so meanwhile."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(f"{copy}.lock")
        lock.acquire()
    except NotImplementedError as error:
        raise InputError(
            f"files in {cache_folder()} cannot be locked, so two processes could write the same file. Set {CACHE_VARIABLE} "
            "to a folder on another disk."
        ) from error
    # Only one process at a time writes a file of this name. A file that a killed process has left is overwritten.
    incomplete = copy.with_name(f"{copy.name}.part")
    try:
        if copy.exists():
            return
        with naming_address(file.address):
            file.filesystem.get_file(file.path, str(incomplete), callback=callback)
            file.filesystem.invalidate_cache()
            fetched = _remote_file(file.filesystem, file.filesystem.info(file.path), file.address)
        has_size = file.size is None or incomplete.stat().st_size == file.size
        if not has_size or fetched.version != file.version:
            raise InputError(f"{file.address} changed or was cut off while it was fetched. Try again.")
        incomplete.replace(copy)
    finally:
        incomplete.unlink(missing_ok=True)
        lock.release()


@contextmanager
def _progress(files: Sequence[RemoteFile], total_bytes: int) -> Iterator[Callback]:
    """Report what is fetched if it may take long. On a terminal, a bar shows the bytes."""
    is_first_process = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    if total_bytes >= _NOTICE_BYTES and is_first_process:
        verb = "is" if len(files) == 1 else "are"
        print_notes(
            [f"{_described(files, total_bytes)} {verb} being copied to {cache_folder()}; {CACHE_VARIABLE} changes it"]
        )
    is_hidden = not is_first_process or sys.stderr is None or not sys.stderr.isatty()
    with tqdm(
        total=total_bytes or None,
        desc="fetching",
        unit="B",
        unit_scale=True,
        delay=_BAR_AFTER,
        leave=False,
        disable=is_hidden,
    ) as bar:
        yield _BarCallback(bar)


class _BarCallback(Callback):  # type: ignore[misc] # fsspec has no types
    """Moves a bar by the bytes that fsspec reports."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self._bar = bar

    def relative_update(self, inc: int = 1) -> None:
        """Move the bar."""
        self._bar.update(inc)
