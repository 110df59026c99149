"""Reads queries and gallery from files of embeddings. docs/evaluate/files.md lists the names of the arrays."""

from __future__ import annotations

import glob
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.cli.options import COLUMNS, Columns
from fewshot_callbacks.cli.processes import files_of_process, list_in_all, open_shards, own_rows, read_in_all
from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import is_address, path_text
from fewshot_callbacks.files.remote_cache import local_copy
from fewshot_callbacks.functional.item_reader import with_stored_arrays
from fewshot_callbacks.storage import RowSubset, Shards
from fewshot_callbacks.storage.columns import as_booleans
from fewshot_callbacks.storage.heads import array_axes
from fewshot_callbacks.system.terminal import print_notes
from fewshot_callbacks.system.words import counted

# Array of a file with one set -> its name in a file with two sets, which is an argument of `evaluate_retrieval`. Only
# reports read the paths.
QUERY_NAMES = {
    "embeddings": "queries",
    "labels": "query_labels",
    "ids": "query_ids",
    "groups": "query_groups",
    "paths": "query_paths",
}
GALLERY_NAMES = {
    "embeddings": "gallery",
    "labels": "gallery_labels",
    "ids": "gallery_ids",
    "groups": "gallery_groups",
    "paths": "gallery_paths",
}
# The array that marks gallery items in a file with one set.
IS_GALLERY = "is_gallery"
ONE_SET = (*QUERY_NAMES, IS_GALLERY)
TWO_SETS = (*QUERY_NAMES.values(), *GALLERY_NAMES.values())
# The array with the names of labels 0, 1, 2, ..., in files of both kinds.
LABEL_NAMES = "label_names"
# Name that is not read -> the fix.
LOOKALIKES = {
    "query_embeddings": "rename it to 'queries'",
    "gallery_embeddings": "rename it to 'gallery'",
    "is_query": "write its opposite as 'is_gallery'",
}
# Names at least this similar count as misspellings: `id` and `ids` have 0.8.
ALIKE = 0.8


@dataclass(frozen=True)
class StoredSets:
    """The queries and the gallery of a file of embeddings; only queries if it has one set.

    Args:
        arrays: Argument of `evaluate_retrieval` -> a NumPy array, (items,) or (items, labels), never a list. Paths are
            called `query_paths` and `gallery_paths`. Missing arrays are not keys. Vectors, (items, dim), may be rows on
            disk.
        has_names_of_two: Whether the names in the file are the names for two sets.
        label_names: (labels,) the name of each label 0, 1, 2, ...; None if the file has no names.
        slices: Attribute -> (queries,) its value for each query.
        paths: The files that this process reads; local copies of remote files.
        whole: Function that returns the sets with all rows; None if these are already all rows.
    """

    file: Path
    arrays: Mapping[str, Any]
    has_names_of_two: bool
    label_names: NDArray[Any] | None = None
    slices: Mapping[str, Any] = field(default_factory=dict)
    paths: Sequence[Path] = ()
    whole: Callable[[], StoredSets] | None = None

    @property
    def is_part(self) -> bool:
        """Whether these are only the rows of this process."""
        return self.whole is not None

    @property
    def queries(self) -> Any:
        """(queries, dim) The vectors of the queries."""
        return self.arrays["queries"]

    @property
    def gallery(self) -> Any:
        """(items, dim) The vectors of the gallery; None for one set."""
        return self.arrays.get("gallery")

    def get(self, name: str) -> Any:
        """Return the array of an argument; None if the file does not have it."""
        return self.arrays.get(name)

    def name_in_file(self, name: str) -> str:
        """Return the default name of the array of an argument in this kind of file."""
        if self.has_names_of_two:
            return name
        names_of_one = {other: usual for names in (QUERY_NAMES, GALLERY_NAMES) for usual, other in names.items()}
        return names_of_one[name]

    def rows_of_process(self, name: str, processes: Processes) -> Any:
        """Return this process's rows of an argument's array; None without it."""
        values = self.arrays.get(name)
        if values is None or self.is_part or processes.count == 1:
            return values
        return own_rows(values, processes)

    def column_of_all(self, name: str, processes: Processes) -> NDArray[Any]:
        """Return all rows of an argument's column; empty without it. *Collective*."""
        values = np.asarray(self.arrays.get(name, ()))
        return processes.joined(values) if self.is_part else values

    def missing(self, kind: str) -> list[str]:
        """Return the names of the missing arrays for something that each item needs, such as "labels"."""
        needed = [QUERY_NAMES[kind]]
        if self.gallery is not None:
            needed.append(GALLERY_NAMES[kind])
        return list(dict.fromkeys(self.name_in_file(name) for name in needed if name not in self.arrays))

    def have_several_labels(self) -> bool:
        """Return whether the labels are (items, labels) zeros and ones, for several labels per item."""
        shape = np.shape(self.arrays.get("query_labels", ()))
        return len(shape) == 2 and shape[1] > 1


def read_sets(
    file: Path, columns: Columns, needed: Sequence[str], slices: Sequence[str] = (), processes: Processes = ALONE
) -> StoredSets:
    """Return the sets of a file. Only the vectors of an .npz file are read into memory. *Collective*.

    If there are enough files, each process reads its own files. Otherwise every process reads all files. `needed` is
    what each item needs in addition to its vector, such as "labels". `slices` are the arrays or columns of attributes.
    """
    passed = columns.passed()
    is_glob = glob.has_magic(str(file)) and (is_address(file) or not file.is_file())
    if file.suffix.lower() == ".npz" and not passed and not is_glob:
        return read_in_all(processes, lambda: load_sets(file, needed, slices, has_options=True))
    return _read_columns(file, passed, needed, slices, processes)


def _read_columns(
    file: Path, columns: Mapping[str, str], needed: Sequence[str], slices: Sequence[str], processes: Processes
) -> StoredSets:
    """Return the sets of files with one set, without reading the vectors into memory. *Collective*.

    `columns` is option -> name, for the options that are passed. The other arguments are as in `read_sets`.
    """
    listed = list_in_all(file, processes)
    axes = read_in_all(
        processes,
        # All processes use the names in the first file.
        lambda: array_axes(files_of_process(listed, processes).fetched()[0]) if processes.rank == 0 else {},
    )
    axes = processes.gather(axes)[0]
    if file.suffix.lower() == ".npz":
        _refuse_two_sets(file, list(axes), columns)
    arguments: dict[str, Any] = {name: name for name in COLUMNS if name in axes}
    arguments |= columns
    matrices = [name for name, count in axes.items() if count == 2]
    if "embeddings" not in arguments and len(matrices) == 1:
        arguments["embeddings"] = matrices[0]
    for name in slices:
        _refuse_missing_attribute(file, axes, name)
    vectors = {name: value for name, value in arguments.items() if name == "embeddings"}
    requests = [arguments, *({**vectors, "labels": name} for name in slices)]
    opened = open_shards(listed, requests, processes)
    shards = opened.shards[0]
    if "labels" in needed and shards.labels is None:
        raise InputError(
            f"{path_text(file)} has no array or column named 'labels'. Pass the name of the labels to --labels, or pass "
            "--judgements."
        )
    unread = [name for name in axes if name not in (*columns.values(), *slices)]
    _print_on_first_process([*shards.notes, *_notes_on_unread(file, unread, ONE_SET, has_options=True)])
    sets = _sets_of_shards(file, shards)
    attributes = {}
    for name, of_attribute in zip(slices, opened.shards[1:], strict=True):
        values = np.asarray(of_attribute.labels)
        attributes[name] = values if shards.is_gallery is None else values[~shards.is_gallery]
    whole = (lambda: _sets_of_shards(file, Shards(listed, **arguments))) if opened.is_part else None
    return replace(sets, slices=attributes, whole=whole)


def _sets_of_shards(file: Path, shards: Shards) -> StoredSets:
    """Return the queries, the gallery and their columns."""
    queries, gallery, arrays = with_stored_arrays("evaluate_retrieval", shards, None, {}, labelled=True)
    arrays |= {"queries": queries, "gallery": gallery}
    stored = {name: values for name, values in arrays.items() if values is not None}
    return StoredSets(file, stored, has_names_of_two=False, paths=shards.files)


def load_sets(
    file: Path, needed: Sequence[str] = ("labels",), slices: Sequence[str] = (), *, has_options: bool = False
) -> StoredSets:
    """Return the sets of an .npz file.

    `needed` is what each item needs in addition to its vector, such as "labels". `has_options` is true if the command
    has options for the names of arrays, such as `--labels NAME`.
    """
    file = local_copy(file)
    how = f"Write one with numpy.savez(path, {', '.join(f'{name}=...' for name in ('embeddings', *needed))})."
    held = _load_npz(file, how)
    _refuse_mixed_names(file, held)
    has_names_of_two = any(name in TWO_SETS for name in held)
    known_names = TWO_SETS if has_names_of_two else ONE_SET
    _refuse_missing(file, held, _needed_names(needed, has_names_of_two=has_names_of_two), how, has_options=has_options)
    single_values = [name for name in (*known_names, LABEL_NAMES) if name in held and held[name].ndim == 0]
    if single_values:
        raise InputError(
            f"{' and '.join(map(repr, single_values))} in {file} is a single value, not one value per item. {how}"
        )
    unread = [name for name in held if name not in slices]
    _print_on_first_process(_notes_on_unread(file, unread, known_names, has_options=has_options))
    attributes = {}
    for name in slices:
        _refuse_missing_attribute(file, held, name)
        attributes[name] = held[name]
    if has_names_of_two:
        arrays = {name: held[name] for name in TWO_SETS if name in held}
    elif IS_GALLERY in held:
        arrays = _divided(file, held)
        is_gallery = as_booleans(held[IS_GALLERY])
        attributes = {name: _where(file, name, values, ~is_gallery, IS_GALLERY) for name, values in attributes.items()}
    else:
        arrays = {QUERY_NAMES[name]: held[name] for name in QUERY_NAMES if name in held}
    return StoredSets(file, arrays, has_names_of_two, held.get(LABEL_NAMES), attributes, paths=[file])


def _refuse_missing_attribute(file: Path, names: Iterable[str], attribute: str) -> None:
    """Raise an error if a file does not have the array or column of an attribute."""
    if attribute not in names:
        known = ", ".join(map(repr, names))
        raise InputError(
            f"{path_text(file)} contains {known}, but not {attribute!r}. Pass one of these names to --slices."
        )


def _where(file: Path, name: str, values: NDArray[Any], mask: NDArray[np.bool_], other: str) -> NDArray[Any]:
    """Return the values of an attribute where `mask` is true. `mask` belongs to the array `other`."""
    if len(values) != len(mask):
        raise InputError(
            f"{file} has {len(values):,} entries of {name} and {len(mask):,} of {other!r}. Save one entry per item."
        )
    chosen: NDArray[Any] = values[mask]
    return chosen


def load_one_set(file: Path, needed: Sequence[str] = ("labels",), slices: Sequence[str] = ()) -> StoredSets:
    """Return the set of an .npz file. The arguments are as in `load_sets`."""
    sets = load_sets(file, needed, slices)
    if sets.gallery is not None:
        raise InputError(
            f"{file} contains queries and a gallery, but one set is needed. Write it with "
            f"numpy.savez(path, {', '.join(f'{name}=...' for name in ('embeddings', *needed))})."
        )
    return sets


def first_of_each_id(sets: StoredSets) -> StoredSets:
    """Return one set with the first item of each id; two sets unchanged."""
    ids = sets.get("query_ids")
    if ids is None or sets.gallery is not None:
        return sets
    if len(ids) != len(sets.queries):
        raise InputError(
            f"the file has {counted(len(ids), 'id')} for {counted(len(sets.queries), 'embedding')}. Write one id per item."
        )
    mask = are_first(ids)
    arrays = {name: take_where(values, mask) for name, values in sets.arrays.items()}
    slices = {name: _where(sets.file, name, values, mask, "ids") for name, values in sets.slices.items()}
    return StoredSets(sets.file, arrays, sets.has_names_of_two, sets.label_names, slices)


def are_first(ids: Any) -> NDArray[np.bool_]:
    """Return (items,) whether each item is the first with its id."""
    mask = np.zeros(len(ids), bool)
    mask[np.unique(ids, return_index=True)[1]] = True
    return mask


def take_where(values: Any, mask: NDArray[np.bool_]) -> Any:
    """Return the rows where `mask` is true. Rows on disk are not read."""
    if isinstance(values, Shards | RowSubset):
        return RowSubset(values, mask)
    return values[mask]


def _print_on_first_process(notes: Sequence[str]) -> None:
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print_notes(notes)


def _needed_names(needed: Sequence[str], *, has_names_of_two: bool) -> list[str]:
    """Return the names of the arrays that a file must have."""
    kinds = ("embeddings", *needed)
    if not has_names_of_two:
        return list(kinds)
    return [names[kind] for names in (QUERY_NAMES, GALLERY_NAMES) for kind in kinds]


def _refuse_missing(file: Path, held: Iterable[str], needed: Sequence[str], how: str, *, has_options: bool) -> None:
    """Raise an error if a file lacks an array."""
    missing = [name for name in needed if name not in held]
    if not missing:
        return
    if "gallery" in needed:
        fix = "Use these names when you save the file. A file with one set has embeddings and labels."
    elif has_options:
        options = " and ".join(f"--{name}" for name in needed)
        fix = (
            f"Pass their names to {options}, or use these names when you save the file. If queries and gallery are in two "
            f"files, write one file with queries, query_labels, gallery and gallery_labels. {how}"
        )
    else:
        fix = f"Use these names when you save the file. {how}"
    names = ", ".join(map(repr, held)) or "nothing"
    raise InputError(f"{file} contains {names}, but not {' and '.join(map(repr, missing))}. {fix}")


def _refuse_mixed_names(file: Path, names: Iterable[str]) -> None:
    """Raise an error if a file mixes names for one set and for two sets."""
    of_one = [name for name in names if name in ONE_SET]
    of_two = [name for name in names if name in TWO_SETS]
    if not of_one or not of_two:
        return
    if any(name in GALLERY_NAMES.values() for name in of_two):
        fix = _renames({name: QUERY_NAMES.get(name) for name in of_one}, held=names)
    else:
        names_of_one = {other: usual for usual, other in QUERY_NAMES.items()}
        fix = _renames({name: names_of_one[name] for name in of_two}, held=names)
    raise InputError(
        f"{file} mixes names for one set ({', '.join(map(repr, of_one))}) and names for two sets "
        f"({', '.join(map(repr, of_two))}). {fix}"
    )


def _renames(new_names: Mapping[str, str | None], held: Iterable[str]) -> str:
    """Return sentences that list which arrays to rename and which to leave out.

    `new_names` is name -> the new name, or None if there is none. A new name in `held` is already taken.
    """
    renames = []
    superfluous = []
    for name, new_name in new_names.items():
        if new_name is None or new_name in held:
            superfluous.append(repr(name))
        else:
            renames.append(f"{name!r} to {new_name!r}")
    sentences = []
    if renames:
        sentences.append(f"Rename {' and '.join(renames)}.")
    if superfluous:
        sentences.append(f"Leave out {' and '.join(superfluous)}.")
    return " ".join(sentences)


def _refuse_two_sets(file: Path, names: Sequence[str], columns: Mapping[str, str]) -> None:
    """Raise an error if an .npz file with two sets is read as one set.

    `columns` is option -> the name of an array, for the options that are passed.
    """
    of_two = [name for name in names if name in TWO_SETS and name not in columns.values()]
    if not of_two or "embeddings" in columns:
        return
    if columns:
        fix = f"Leave out {' and '.join(f'--{name}' for name in columns)}, and use the names in --help."
    else:
        fix = f"Save one set, with {IS_GALLERY!r} true for the items of the gallery."
    raise InputError(
        f"{file} contains {', '.join(map(repr, of_two))}, so it has two sets. Such a file cannot be combined with other "
        f"files or with options for array names. {fix}"
    )


def _notes_on_unread(file: Path, names: Iterable[str], known: Sequence[str], *, has_options: bool) -> list[str]:
    """Return a note for each unread array whose name is similar to a known name."""
    notes = []
    for name in names:
        if name in (*known, LABEL_NAMES):
            continue
        similar = get_close_matches(name.lower(), (*known, *ONE_SET, *TWO_SETS, LABEL_NAMES), n=1, cutoff=ALIKE)
        if name in LOOKALIKES:
            fix = LOOKALIKES[name]
        elif not similar:
            continue
        elif has_options and similar[0] in COLUMNS and known == ONE_SET:
            fix = f"pass --{similar[0]} {name}"
        else:
            fix = f"rename it to {similar[0]!r}"
        notes.append(f"{file} contains {name!r}, which is not read; {fix} to read it")
    return notes


def _divided(file: Path, held: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of one set, divided into queries and gallery by `is_gallery`."""
    is_gallery = as_booleans(held[IS_GALLERY])
    arrays: dict[str, NDArray[Any]] = {}
    for name, query_name in QUERY_NAMES.items():
        if name not in held:
            continue
        if len(held[name]) != len(is_gallery):
            raise InputError(
                f"{file} has {len(held[name]):,} {name} and {len(is_gallery):,} entries of {IS_GALLERY!r}. Save one entry "
                "per item."
            )
        arrays[query_name] = held[name][~is_gallery]
        arrays[GALLERY_NAMES[name]] = held[name][is_gallery]
    return arrays


def _load_npz(file: Path, how: str) -> dict[str, NDArray[Any]]:
    """Return all arrays of an .npz file. Messages end with `how`."""
    if not file.exists():
        raise InputError(f"{file} does not exist. {how}")
    # `np.load` would also open a single array, and its message for other files suggests pickles.
    if not file.is_file() or not zipfile.is_zipfile(file):
        raise InputError(f"{file} is not an .npz file of plain arrays. {how}")
    arrays: dict[str, NDArray[Any]] = {}
    try:
        # A pickle can run any code, and people share files of embeddings.
        with np.load(file, allow_pickle=False) as archive:
            for name in archive.files:
                arrays[name] = _plain_array(archive, name)
    except OSError:  # an error of the disk, not of the content
        raise
    except Exception as error:  # zipfile, zlib and NumPy document no error class for a damaged file
        cause = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{file} is damaged, or not an .npz file of plain arrays ({cause}). {how}") from error
    return arrays


def _plain_array(archive: Any, name: str) -> NDArray[Any]:
    """Return an array in the byte order of this machine."""
    try:
        array = archive[name]
    except Exception as error:
        raise InputError(f"{name}: {error}") from error
    if not isinstance(array, np.ndarray):  # NumPy returns bytes if the header of an array is missing
        raise InputError(f"{name} is not an array")
    # PyTorch does not support other byte orders.
    native: NDArray[Any] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return native
