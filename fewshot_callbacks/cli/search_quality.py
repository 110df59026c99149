"""`fewshot search-quality`: compares the results of an approximate index with exact search."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.cli.evaluate import FAILED
from fewshot_callbacks.cli.options import Columns, SearchQualityOptions, in_shell
from fewshot_callbacks.cli.processes import joined_processes
from fewshot_callbacks.cli.stored_sets import StoredSets, read_sets
from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import path_text
from fewshot_callbacks.files.remote_cache import local_copy
from fewshot_callbacks.functional.items import Share
from fewshot_callbacks.functional.retrieval.gate import SIGNS, Requirement, read_requirement
from fewshot_callbacks.functional.search_quality import SearchQuality, search_quality
from fewshot_callbacks.storage.arrays import FileArrays, naming_file
from fewshot_callbacks.storage.formats import FORMATS
from fewshot_callbacks.system.terminal import printable
from fewshot_callbacks.system.words import counted

# The names of the result lists in files with several arrays.
NAMES = ("found", "indices")


def run(options: SearchQualityOptions) -> int:
    """Compare and print, and return the exit status: `FAILED` if a requirement is not met, else 0."""
    requirements = [_readable(text) for text in options.require or ()]
    processes = joined_processes()
    with processes.together():
        arguments = _sets_of(options, processes)
        found = _lists_of_process(options.found, len(arguments["queries"]), processes)
    quality = search_quality(
        found=found,
        **arguments,
        share=Share(processes),
        k=options.k,
        within=options.within,
        similarity=options.similarity,
        memory_mb=options.memory_mb,
    )
    if processes.rank > 0:  # the first process prints
        return 0
    print(json.dumps(quality.to_dict(), indent=2) if options.json else in_shell(str(quality), "search-quality"))
    failures = [failure for requirement in requirements if (failure := _failure(requirement, quality))]
    for failure in failures:
        print(f"fewshot search-quality: {printable(failure)}", file=sys.stderr)
    return FAILED if failures else 0


def read_found_lists(file: Path) -> NDArray[Any]:
    """Return (queries, columns) the result lists in a file."""
    path = local_copy(file)
    if not path.is_file():
        raise InputError(
            f"{path_text(file)} does not exist, or is not a file. Pass a .npy, .npz, .parquet or .ivecs file."
        )
    suffix = path.suffix.lower()
    if suffix == ".ivecs":
        return _read_ivecs(path)
    if suffix not in FORMATS:
        raise InputError(
            f"{path_text(file)} is not a .npy, .npz, .parquet or .ivecs file. Write the lists with numpy.save."
        )
    with naming_file(path):
        arrays = FORMATS[suffix](path)
        array = arrays[_name_of_lists(path, arrays)]
        return np.asarray(array[0 : array.shape[0]])


def _name_of_lists(file: Path, arrays: FileArrays) -> str:
    """Return the name of the array with the lists."""
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    named = [name for name in NAMES if name in matrices] or matrices
    if len(named) != 1 and not set(named) & set(NAMES):
        raise InputError(
            f"{file} has the arrays {', '.join(map(repr, arrays))}, and {len(matrices)} of them have two axes. Name the "
            "array with the lists 'found'."
        )
    return named[0]


def _read_ivecs(file: Path) -> NDArray[np.int32]:
    """Return the rows of an .ivecs file. In the file, each row begins with its length."""
    numbers = np.fromfile(file, "<i4")
    width = int(numbers[0]) + 1 if len(numbers) else 0
    if width < 2 or len(numbers) % width or (numbers[::width] != width - 1).any():
        raise InputError(
            f"{file} is not an .ivecs file with lists of equal length. Write each row as its length and then its items, as "
            "integers of 4 bytes."
        )
    rows: NDArray[np.int32] = numbers.reshape(-1, width)[:, 1:]
    return rows


def _lists_of_process(file: Path, queries: int, processes: Processes) -> NDArray[Any]:
    """Return the result lists of the queries of this process. *Collective*."""
    found = read_found_lists(file)
    if processes.count == 1:
        return found
    by_process: list[int] = processes.gather(queries)
    if len(found) != sum(by_process):
        raise InputError(
            f"{path_text(file)} has {len(found):,} lists for {counted(sum(by_process), 'query')}. Write one list per query, "
            "in the order of the queries."
        )
    first = sum(by_process[: processes.rank])
    return found[first : first + queries]


def _sets_of(options: SearchQualityOptions, processes: Processes) -> dict[str, Any]:
    """Return this process's rows of queries, gallery and stored rows, as arguments of `search_quality`. *Collective*."""

    def read(file: Path, columns: Columns) -> StoredSets:
        return read_sets(file, columns, (), processes=processes)

    sets = read(options.queries, options.columns)
    names = [f"{side}_{kind}" for kind in ("labels", "ids", "groups") for side in ("query", "gallery")]
    arguments = {name: sets.rows_of_process(name, processes) for name in ("queries", "gallery", *names)}
    if options.gallery is not None:
        if sets.gallery is not None:
            raise InputError(f"{path_text(options.queries)} already contains a gallery. Leave out --gallery.")
        gallery = read(options.gallery, options.columns)
        if gallery.gallery is not None:
            raise InputError(f"{path_text(options.gallery)} contains queries and a gallery. Pass a file with one set.")
        arguments["gallery"] = gallery.rows_of_process("queries", processes)
        for name in names:
            if name.startswith("gallery"):
                arguments[name] = gallery.rows_of_process(name.replace("gallery", "query"), processes)
        _leave_out_lone(arguments)
    for name, file in (("stored", options.stored), ("stored_queries", options.stored_queries)):
        if file is not None:
            arguments[name] = read(file, Columns()).rows_of_process("queries", processes)
    return arguments


def _leave_out_lone(arguments: dict[str, Any]) -> None:
    """Remove labels that only one of two files has."""
    pair = ("query_labels", "gallery_labels")
    if any(arguments[name] is None for name in pair):
        arguments.update(dict.fromkeys(pair))


def _readable(text: str) -> Requirement:
    """Return a requirement; slices and gains are refused, since only evaluations have them."""
    requirement = read_requirement("search_quality", text)
    if requirement.attribute is not None or requirement.is_gain:
        raise InputError(
            f"{text!r} cannot be checked, since search-quality has no slices and no gains. Write, for example, "
            "'search_recall@10 >= 0.95'."
        )
    return requirement


def _failure(requirement: Requirement, quality: SearchQuality) -> str | None:
    """Return a sentence if a requirement does not hold; None if it does."""
    values = quality.metrics()
    ends = {f"search_recall@{k}": interval for k, interval in quality.intervals.items()}
    known: Sequence[str] = list(values) if requirement.end is None else list(ends)
    if requirement.metric not in known:
        raise InputError(
            f"{requirement.text!r} cannot be checked: {requirement.metric!r} is not one of {', '.join(known)}."
        )
    value = values[requirement.metric]
    if requirement.end is not None:
        value = getattr(ends[requirement.metric], requirement.end)
    if SIGNS[requirement.sign](value, requirement.limit):
        return None
    return f"{requirement.text} is required, but it is {'unknown' if math.isnan(value) else f'{value:.4f}'}."
