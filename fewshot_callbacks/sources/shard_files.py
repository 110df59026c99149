"""Files of shards: which of a folder, a glob or a list are read, in which order, and what is passed over."""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fewshot_callbacks.files.names import describe_system_names, is_system_name, natural_sort_key

ENDINGS = (".npy", ".npz", ".parquet", ".arrow", ".feather", ".safetensors")
KINDS = ", ".join(ENDINGS)
# What the package datasets calls the result of a `map` that it keeps beside the data.
_CACHED = re.compile(r"cache-[0-9a-f]{16}.*\.arrow")
# Names that begin with these are passed over in a folder: Spark writes _SUCCESS and hidden checksums beside its files.
_NOT_DATA = (".", "_")


@dataclass
class ShardFiles:
    """The files of shards.

    Attributes:
        files: The files, in the order of their rows.
        passed_over: A sentence for each kind of file that is not read though it looks like a shard.
        numbered: Two neighbouring files whose numbers have another order than their letters; None where there are none.
    """

    files: list[Path] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    numbered: tuple[Path, Path] | None = None

    def of_order(self, columns: Sequence[str]) -> str:
        """Say in which order the files are read, where letters would have another and columns lie elsewhere."""
        if self.numbered is None or not columns:
            return ""
        first, second = self.numbered
        return (
            f"the files are read in the order of their numbers, {first.name} before {second.name}, and not in that of their "
            f"letters. {' and '.join(columns)} must have the same order; a list of files has its own"
        )


def find_shards(paths: Any) -> ShardFiles:
    """List the files of a path, a folder, a glob or several of these.

    Raises:
        ValueError: There are none, one is of an unknown kind, a link that leads nowhere, or listed twice.
    """
    found = ShardFiles()
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        name = os.path.expanduser(path)  # which a shell does not in quotes
        if os.path.isdir(name):
            found.files += _files_of_folder(Path(name), found)
        elif os.path.lexists(name):  # a file that is there may have brackets in its name
            found.files.append(Path(name))
        else:
            found.files += _files_of_glob(name, found)
    if not found.files:
        raise ValueError("there are no files in an empty list. Pass a file, a folder or a glob.")
    for file in found.files:
        _refuse_broken_link(file)
        if file.suffix.lower() not in ENDINGS:
            raise ValueError(
                f"{file} is none of {KINDS}. Save it as one of these; a pickle, as .pkl and .pt files are, can run any "
                "code and is never loaded."
            )
    _refuse_twice(found.files)
    return found


def file_stamp(file: Path) -> tuple[int, int]:
    """Return what changes when a file is written anew."""
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _files_of_folder(folder: Path, found: ShardFiles) -> list[Path]:
    """List the shards of a folder by the numbers in their names.

    Raises:
        ValueError: There are none, or of several kinds.
    """
    shards = [folder / name for name in os.listdir(folder) if Path(name).suffix.lower() in ENDINGS]
    shards = [file for file in shards if file.is_symlink() or file.is_file()]
    listed = _listed_by_datasets(folder)
    if listed:
        absent = [file for file in listed if not file.is_file()]
        if absent:
            raise ValueError(
                f"{folder / 'state.json'} lists {absent[0].name}, which is not there. Copy the whole folder."
            )
        _say_unlisted([file for file in shards if file not in set(listed)], found)
        return listed
    hidden = [file for file in shards if file.name.startswith(_NOT_DATA)]
    if hidden:
        names = Counter(file.name for file in hidden)
        found.passed_over.append(f"{folder}: {describe_system_names(names)}")
    files = _without_repeats([file for file in shards if not file.name.startswith(_NOT_DATA)], found, asked_for="")
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) != 1:
        holds = f"holds {' and '.join(kinds)} files" if kinds else f"holds no {KINDS} file"
        raise ValueError(f"{folder} {holds}. Pass those that you mean as a glob, such as '{folder / '*.npy'}'.")
    return files


def _files_of_glob(pattern: str, found: ShardFiles) -> list[Path]:
    """List the files of a glob by the numbers in their names.

    Raises:
        ValueError: There are none.
    """
    parts = Path(pattern).parts
    literal = next((place for place, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    # Whoever writes `.part-*` or `__MACOSX` means it.
    meant = {part[:1] for part in parts[literal:]}
    files, of_systems = [], Counter[str]()
    for match in glob.glob(pattern, recursive=True):
        file = Path(match)
        if file.is_dir() or not (file.is_symlink() or file.is_file()):
            continue
        names = [part for part in file.parts[literal:] if is_system_name(part) and part[:1] not in meant]
        if names:
            of_systems[names[0]] += 1
        else:
            files.append(file)
    if of_systems:
        found.passed_over.append(f"{pattern}: {describe_system_names(of_systems)}")
    if not files:
        raise ValueError(f"{pattern} is no file, and as a glob it matches none. Pass a file, a folder or a glob.")
    return _without_repeats(files, found, asked_for=parts[-1])


def _without_repeats(files: Iterable[Path], found: ShardFiles, *, asked_for: str) -> list[Path]:
    """Return files in the order of their numbers: each once, and without the copies that the package datasets keeps."""
    files = sorted(files, key=lambda file: natural_sort_key(str(file)))
    for file in files:
        _refuse_broken_link(file)
    files = _without_caches(files, found, asked_for)
    by_target: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        by_target[os.path.realpath(file)].append(file)
    # What is no link itself and lies behind none, else the first.
    own = {
        next((file for file in same if os.path.abspath(file) == target), same[0]) for target, same in by_target.items()
    }
    links = [file for file in files if file not in own]
    if links:
        found.passed_over.append(
            f"{_counted(links, 'link')} to files that are read already, such as {links[0]}, "
            f"{'is' if len(links) == 1 else 'are'} passed over"
        )
    files = [file for file in files if file in own]
    by_letters = sorted(files, key=str)
    if files != by_letters:
        place = next(place for place, (one, other) in enumerate(zip(files, by_letters, strict=True)) if one != other)
        found.numbered = files[place], by_letters[place]
    return files


def _without_caches(files: list[Path], found: ShardFiles, asked_for: str) -> list[Path]:
    """Leave out the results that the package datasets keeps beside its data, unless they alone are asked for."""
    kept: set[Path] = set()
    folders: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        folders[file.parent].append(file)
    for folder, inside in folders.items():
        listed = set(_listed_by_datasets(folder))
        data = [file for file in inside if file in listed] or [
            file for file in inside if not _CACHED.fullmatch(file.name)
        ]
        kept |= set(data if data and not asked_for.startswith("cache") else inside)
    _say_unlisted([file for file in files if file not in kept], found)
    return [file for file in files if file in kept]


def _listed_by_datasets(folder: Path) -> list[Path]:
    """List the files of a data set that the package datasets has saved in a folder; none where it has saved none."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [folder / str(entry["filename"]) for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is another program's
        return []


def _say_unlisted(files: Sequence[Path], found: ShardFiles) -> None:
    if files:
        found.passed_over.append(
            f"{_counted(files, 'file')} that the package datasets keeps beside its data, such as {files[0]}, "
            f"{'is' if len(files) == 1 else 'are'} passed over"
        )


def _counted(files: Sequence[Path], noun: str) -> str:
    return f"{len(files):,} {noun}{'' if len(files) == 1 else 's'}"


def _refuse_broken_link(file: Path) -> None:
    target = os.path.realpath(file)  # the system gives up on a path of more than 40 links, though its end is there
    if file.is_symlink() and not os.path.exists(target):
        raise ValueError(f"{file} is a link to {target}, which is not there. Put the file back, or remove the link.")


def _refuse_twice(files: Sequence[Path]) -> None:
    """Refuse a file that several of the paths name.

    Raises:
        ValueError: There is one; names both ways.
    """
    seen: dict[str, Path] = {}
    for file in files:
        real = os.path.realpath(file)
        if real in seen:
            other = "" if seen[real] == file else f" ({seen[real]} is the same file)"
            raise ValueError(f"{file} is listed twice, and its rows would count twice{other}. Pass each file once.")
        seen[real] = file
