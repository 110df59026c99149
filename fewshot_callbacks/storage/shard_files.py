"""Finds the files of shards in folders, globs, lists and addresses, puts them in order, and skips other files."""

from __future__ import annotations

import glob
import json
import os
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import is_address, path_text
from fewshot_callbacks.files.names import describe_system_names, is_system_name, natural_sort_key
from fewshot_callbacks.files.remote_cache import RemoteFile, RemoteListing, list_remote, local_copies
from fewshot_callbacks.storage.formats import FORMATS

File = TypeVar("File", bound=Path | RemoteFile)

_ENDINGS = ", ".join(FORMATS)
# The package datasets caches results of `map` in the data folder, in files with such names.
_CACHE_NAME = re.compile(r"cache-[0-9a-f]{16}.*\.arrow")
# Files with these prefixes are skipped in folders. For example, Spark writes _SUCCESS and hidden checksums.
_HIDDEN_PREFIXES = (".", "_")


class ListedShards(NamedTuple):
    """The files of shards: local files, and remote files that are not fetched yet."""

    files: tuple[Path | RemoteFile, ...]
    # a sentence for each kind of skipped file
    notes: tuple[str, ...] = ()
    # a pair of files that has another order if names are sorted as text; None if there is no such pair
    reordered: tuple[Path | RemoteFile, Path | RemoteFile] | None = None

    def note_on_order(self, columns: Sequence[str]) -> str:
        """Return a sentence about the order of the files; empty if sorting as text gives the same order.

        `columns` are the columns that are not in the files. The sentence is also empty if there are none.
        """
        if self.reordered is None or not columns:
            return ""
        first, second = self.reordered
        return (
            f"the files are read in numerical order, {first.name} before {second.name}, and not in alphabetical order. "
            f"{' and '.join(columns)} must have the same order. To choose another order, pass a list of files"
        )

    def fetched(self) -> tuple[Path, ...]:
        """Return local paths. Remote files are copied to this machine.

        Raises:
            ValueError: The disk is too small, or a file changed while it was fetched.
            OSError: An address cannot be read, or a copy cannot be written.
        """
        remote = [file for file in self.files if isinstance(file, RemoteFile)]
        copies = iter(local_copies(remote))
        return tuple(next(copies) if isinstance(file, RemoteFile) else file for file in self.files)

    def with_copies(self) -> ListedShards:
        """Return the files, with existing local copies instead of remote files. Nothing is fetched."""
        files = (file.copy or file if isinstance(file, RemoteFile) else file for file in self.files)
        return self._replace(files=tuple(files))

    def sizes(self) -> list[int | None]:
        """Return the size of each file in bytes; None if a remote store does not report it."""
        return [file.size if isinstance(file, RemoteFile) else file.stat().st_size for file in self.files]

    def part(self, rank: int, count: int) -> ListedShards:
        """Return the consecutive files of process `rank`. Processes get about equally many bytes.

        `count`, the number of processes, is at most the number of files. The notes are not divided.
        """
        sizes = [size for size in self.sizes() if size is not None]
        if len(sizes) < len(self.files):
            sizes = [1] * len(self.files)
        # A file goes to the process with its middle byte. Doubled positions keep all numbers integers.
        middles = [2 * end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        borders = [0]
        for number in range(1, count):
            nearest = bisect_left(middles, 2 * sum(sizes) * number / count)
            borders.append(min(max(nearest, borders[-1] + 1), len(sizes) - count + number))
        borders.append(len(sizes))
        return self._replace(files=self.files[borders[rank] : borders[rank + 1]])


def list_shards(paths: Any) -> ListedShards:
    """Return the files of a path, a folder, a glob, an address or several of these. Nothing is opened or fetched.

    Raises:
        ValueError: There are no files, or a file has an unknown format, is a broken link, or is listed twice.
        OSError: An address cannot be read.
        ModuleNotFoundError: The package that reads an address is not installed.
    """
    if isinstance(paths, ListedShards):
        return paths
    by_path = [_find_one(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else list(paths))]
    files = tuple(file for listed in by_path for file in listed.files)
    if not files:
        raise InputError("there are no files in an empty list. Pass a file, a folder or a glob.")
    for file in files:
        if isinstance(file, Path):
            _refuse_broken_link(file)
        _refuse_unknown_format(file)
    _refuse_twice(files)
    notes = tuple(note for listed in by_path for note in listed.notes)
    reordered = [listed.reordered for listed in by_path if listed.reordered is not None]
    return ListedShards(files, notes, reordered[-1] if reordered else None)


def file_stamp(file: Path) -> tuple[int, int]:
    """Return the size and the modification time of a file, which usually change when it is written again."""
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _find_one(path: str | os.PathLike[str]) -> ListedShards:
    """Return the files of one path, folder, glob or address."""
    text = path_text(path)
    if is_address(text):
        return _find_at_address(text)
    name = os.path.expanduser(text)  # a shell does not expand ~ in quotes
    if os.path.isdir(name):
        return _find_in_folder(Path(name))
    if os.path.lexists(name):  # a file that exists may have brackets in its name
        return ListedShards((Path(name),))
    return _find_by_glob(name)


def _find_in_folder(folder: Path) -> ListedShards:
    """Return the shards of a folder in numerical order, or the files that its `state.json` lists."""
    paths = [folder / name for name in os.listdir(folder) if Path(name).suffix.lower() in FORMATS]
    shards = [path for path in paths if path.is_symlink() or path.is_file()]
    of_datasets = _listed_by_datasets(folder)
    if of_datasets:
        absent = [file for file in of_datasets if not file.is_file()]
        if absent:
            raise InputError(
                f"{folder / 'state.json'} lists {absent[0].name}, which does not exist. Copy the whole folder."
            )
        return ListedShards(tuple(of_datasets), _note_on_caches(_without(shards, of_datasets)))
    hidden = Counter(file.name for file in shards if file.name.startswith(_HIDDEN_PREFIXES))
    listed = _in_order([file for file in shards if file.name not in hidden], wants_caches=False)
    kinds = sorted({file.suffix.lower() for file in listed.files})
    if len(kinds) != 1:
        holds = f"contains {' and '.join(kinds)} files" if kinds else f"contains no {_ENDINGS} file"
        raise InputError(f"{folder} {holds}. Pass a glob for the files to read, such as '{folder / '*.npy'}'.")
    return listed._replace(notes=(*_note_on_system_names(folder, hidden), *listed.notes))


def _find_by_glob(pattern: str) -> ListedShards:
    """Return the files of a glob in numerical order."""
    components = Path(pattern).parts
    with_wildcards = (number for number, component in enumerate(components) if glob.has_magic(component))
    first_wildcard = next(with_wildcards, len(components))
    # A pattern such as `.part-*` or `__MACOSX` requests these names.
    wanted_prefixes = {component[:1] for component in components[first_wildcard:]}
    files = []
    system_names = Counter[str]()
    for match in glob.glob(pattern, recursive=True):
        file = Path(match)
        if file.is_dir() or not (file.is_symlink() or file.is_file()):
            continue
        matched_names = file.parts[first_wildcard:]
        unwanted = [name for name in matched_names if is_system_name(name) and name[:1] not in wanted_prefixes]
        if unwanted:
            system_names[unwanted[0]] += 1
        else:
            files.append(file)
    if not files:
        raise InputError(
            f"{pattern} does not exist, and as a glob it matches no file. Pass a file, a folder or a glob."
        )
    listed = _in_order(files, wants_caches=components[-1].startswith("cache"))
    return listed._replace(notes=(*_note_on_system_names(pattern, system_names), *listed.notes))


def _find_at_address(address: str) -> ListedShards:
    """Return the files at the address of a file, a folder or a glob, in numerical order."""
    chosen, system_names = _chosen_remotely(list_remote(address), address)
    shards, caches = _split_caches(chosen, wants_caches=PurePosixPath(address).name.startswith("cache"))
    notes = _note_on_system_names(address, system_names)
    if caches:
        notes += _note_on_caches([file.address for file in caches])
    return ListedShards(tuple(shards), notes, _first_reordered(shards))


def _chosen_remotely(listing: RemoteListing, address: str) -> tuple[list[RemoteFile], Counter[str]]:
    """Return the files to read in numerical order, and the skipped names."""
    by_numbers = sorted(listing.files, key=lambda file: natural_sort_key(file.address))
    if listing.kind == "file":
        return by_numbers, Counter()
    if listing.kind == "folder":
        by_numbers = [file for file in by_numbers if PurePosixPath(file.name).suffix.lower() in FORMATS]
        system_names = [file.name for file in by_numbers if file.name.startswith(_HIDDEN_PREFIXES)]
    else:
        wanted_prefix = PurePosixPath(address).name[:1]
        names = [file.name for file in by_numbers]
        system_names = [name for name in names if is_system_name(name) and name[:1] != wanted_prefix]
    unwanted = Counter(system_names)
    chosen = [file for file in by_numbers if file.name not in unwanted]
    kinds = sorted({PurePosixPath(file.name).suffix.lower() for file in chosen})
    if not chosen or (listing.kind == "folder" and len(kinds) != 1):
        holds = f"contains {' and '.join(kinds)} files" if kinds else f"contains no {_ENDINGS} file"
        raise InputError(
            f"{address} {holds}. Pass a glob for the files to read, such as '{address.rstrip('/')}/*.npy'."
        )
    return chosen, unwanted


def _split_caches(files: Sequence[RemoteFile], *, wants_caches: bool) -> tuple[list[RemoteFile], list[RemoteFile]]:
    """Return the data files, and the caches of the package datasets. If there are only caches, they are the data files."""
    caches = [file for file in files if _CACHE_NAME.fullmatch(file.name)]
    if wants_caches or len(caches) == len(files):
        return list(files), []
    return [file for file in files if not _CACHE_NAME.fullmatch(file.name)], caches


def _in_order(files: Sequence[Path], *, wants_caches: bool) -> ListedShards:
    """Return files in numerical order, each once, and skip caches of the package datasets unless they are wanted."""
    by_numbers = sorted(files, key=lambda file: natural_sort_key(str(file)))
    for file in by_numbers:
        _refuse_broken_link(file)
    data_files = by_numbers if wants_caches else _without_caches(by_numbers)
    unique_files = _without_second_links(data_files)
    notes = _note_on_caches(_without(by_numbers, data_files))
    links = _without(data_files, unique_files)
    if links:
        notes += (
            f"{_counted(links, 'link')} to files that are already read, such as {links[0]}, "
            f"{'is' if len(links) == 1 else 'are'} skipped",
        )
    return ListedShards(tuple(unique_files), notes, _first_reordered(unique_files))


def _first_reordered(files: Sequence[File]) -> tuple[File, File] | None:
    """Return the first file that has another position in alphabetical order, and the file that would be there."""
    pairs = zip(files, sorted(files, key=str), strict=True)
    return next(((by_number, by_letter) for by_number, by_letter in pairs if by_number != by_letter), None)


def _without_caches(files: Sequence[Path]) -> list[Path]:
    """Return the files without caches of the package datasets, in the same order; all files if a folder has only caches."""
    by_folder: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        by_folder[file.parent].append(file)
    data_files: set[Path] = set()
    for folder, in_folder in by_folder.items():
        listed = set(_listed_by_datasets(folder)).intersection(in_folder)
        no_caches = {file for file in in_folder if not _CACHE_NAME.fullmatch(file.name)}
        data_files |= listed or no_caches or set(in_folder)
    return [file for file in files if file in data_files]


def _without_second_links(files: Sequence[Path]) -> list[Path]:
    """Return one path per file, in the same order: the path without links if there is one, or else the first path."""
    by_target: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        by_target[os.path.realpath(file)].append(file)
    unique_files = {
        next((path for path in paths if os.path.abspath(path) == target), paths[0])
        for target, paths in by_target.items()
    }
    return [file for file in files if file in unique_files]


def _listed_by_datasets(folder: Path) -> list[Path]:
    """Return the files of a data set that the package datasets has saved in a folder; empty if there is no data set."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing, or written by another program
        return []


def _without(files: Sequence[Path], excluded: Sequence[Path]) -> list[Path]:
    """Return the files that are not excluded, in the same order."""
    excluded_set = set(excluded)
    return [file for file in files if file not in excluded_set]


def _note_on_caches(files: Sequence[Path | str]) -> tuple[str, ...]:
    if not files:
        return ()
    return (
        f"{_counted(files, 'cache file')} of the package datasets, such as {files[0]}, "
        f"{'is' if len(files) == 1 else 'are'} skipped",
    )


def _note_on_system_names(place: object, names: Counter[str]) -> tuple[str, ...]:
    return (f"{place}: {describe_system_names(names)}",) if names else ()


def _counted(files: Sequence[Path | str], noun: str) -> str:
    return f"{len(files):,} {noun}{'' if len(files) == 1 else 's'}"


def _refuse_unknown_format(file: Path | RemoteFile) -> None:
    if file.suffix.lower() not in FORMATS:
        raise InputError(
            f"{file} is not a file of a supported format ({_ENDINGS}). Save it in one of these. A pickle, such as a "
            ".pkl or .pt file, can run any code and is never loaded."
        )


def _refuse_broken_link(file: Path) -> None:
    target = os.path.realpath(file)  # the system rejects a path of more than 40 links, even if the target exists
    if file.is_symlink() and not os.path.exists(target):
        raise InputError(f"{file} is a link to {target}, which does not exist. Restore the file, or remove the link.")


def _refuse_twice(files: Sequence[Path | RemoteFile]) -> None:
    """Raise an error if a file is listed twice; the message contains both paths."""
    by_target: dict[str, Path | RemoteFile] = {}
    for file in files:
        target = os.path.realpath(file) if isinstance(file, Path) else file.address
        if target in by_target:
            first = by_target[target]
            alias = "" if first == file else f" ({first} is the same file)"
            raise InputError(f"{file} is listed twice, so its rows would count twice{alias}. Pass each file once.")
        by_target[target] = file
