"""`fewshot nearest`: finds the exact neighbours of embeddings in files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks import __version__
from fewshot_callbacks.cli.options import Nearest
from fewshot_callbacks.cli.processes import joined_processes
from fewshot_callbacks.cli.progress import progress_bar
from fewshot_callbacks.cli.resume import journal_of_search
from fewshot_callbacks.cli.stored_sets import StoredSets, are_first, read_sets
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import path_text
from fewshot_callbacks.files.journal import journaling
from fewshot_callbacks.files.outputs import refuse_input
from fewshot_callbacks.functional.found_parts import WrittenNeighbours, write_nearest
from fewshot_callbacks.functional.items import Share
from fewshot_callbacks.functional.neighbour_files import UserIds, check_name
from fewshot_callbacks.functional.neighbours import positive_whole
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.system.terminal import printable
from fewshot_callbacks.system.words import counted, verb

# Columns that exclude candidates if both sets have them.
EXCLUDING = ("ids", "groups")


def run(options: Nearest) -> None:
    """Search, write the file, and print a summary."""
    if options.output is None:
        raise InputError("the output file is missing. Pass -o truth.parquet, or -o truth.ivecs.")
    # The search may take hours, so a mistake is reported before it.
    check_name(options.output)
    refuse_input(options.output, "--output", (options.file, options.gallery))
    positive_whole("nearest", "k", options.k, "Pass the number of neighbours, such as 100.")
    memory = memory_bytes("nearest", options.memory_mb)
    processes = joined_processes()
    with processes.together():
        files = [file for file in (options.file, options.gallery) if file is not None]
        all_sets = [read_sets(file, options.columns, (), processes=processes) for file in files]
        arrays = _arrays_of(all_sets)
        query_ids, gallery_ids = (
            None if array is None else array.sets.column_of_all(array.name, processes)
            for array in (arrays["query_ids"], arrays["gallery_ids"])
        )
        own: dict[str, Any] = {
            name: None if array is None else array.sets.rows_of_process(array.name, processes)
            for name, array in arrays.items()
        }
        queries = own.pop("queries")
        all_queries = len(query_ids) if query_ids is not None else int(processes.summed(np.array([len(queries)]))[0])
        chosen = _drawn_queries(options, all_queries, query_ids)
    journal = journal_of_search(options, processes, all_sets)
    if journal is not None and journal.goes_on and processes.rank == 0:
        print(f"Resuming the search from the state in {printable(options.resume)}.", file=sys.stderr)
    user_ids = UserIds(query_ids, query_ids if own["gallery"] is None else gallery_ids)
    arguments = _compared(own)
    about = {"similarity": options.similarity, "k": options.k, "version": __version__}
    with journaling(journal), progress_bar(is_wanted=processes.rank == 0) as progress:
        written = write_nearest(
            options.output,
            queries,
            arguments.pop("gallery"),
            arguments,
            k=options.k,
            similarity=options.similarity,
            memory=memory,
            share=Share(processes),
            choose=chosen,
            ids=user_ids,
            about=about,
            progress=progress,
        )
    if processes.rank == 0:
        print(_summary(options, written))


class StoredArray(NamedTuple):
    """An array of a file of embeddings."""

    sets: StoredSets
    name: str
    """the name of the argument of `evaluate_retrieval`"""


def _arrays_of(all_sets: list[StoredSets]) -> dict[str, StoredArray | None]:
    """Return argument -> array, or None, for queries, gallery, ids and groups."""
    names = ("queries", "gallery", *(f"{prefix}_{kind}" for prefix in ("query", "gallery") for kind in EXCLUDING))
    arrays = {name: StoredArray(all_sets[0], name) for name in names}
    if len(all_sets) == 2:
        for sets in all_sets:
            if sets.gallery is not None:
                raise InputError(
                    f"{path_text(sets.file)} contains queries and a gallery, but --gallery is passed, too. Leave out "
                    "--gallery, or pass files with one set."
                )
        arrays["gallery"] = StoredArray(all_sets[1], "queries")
        arrays |= {f"gallery_{kind}": StoredArray(all_sets[1], f"query_{kind}") for kind in EXCLUDING}
    return {name: None if array.sets.get(array.name) is None else array for name, array in arrays.items()}


def _compared(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the search, without ids that only one of two sets has."""
    has_lone_ids = arrays["gallery"] is not None and (arrays["query_ids"] is None) != (arrays["gallery_ids"] is None)
    return {name: None if has_lone_ids and name.endswith("_ids") else values for name, values in arrays.items()}


def _drawn_queries(options: Nearest, queries: int, ids: Any) -> Callable[[int], Int[Tensor, "drawn"]] | None:
    """Return a function that returns the drawn queries; None if all queries are searched.

    Only the first query of each id can be drawn. `queries` counts the queries of all processes.
    """
    if options.queries is None:
        return None
    number = positive_whole("nearest", "queries", options.queries, "Pass the number of queries, such as 10000.")
    rows = np.arange(queries) if ids is None else np.flatnonzero(are_first(ids))
    if number >= len(rows):
        return None
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed))
    drawn = torch.from_numpy(rows)[order[:number]].sort().values
    return lambda _: drawn


def _summary(options: Nearest, written: WrittenNeighbours) -> str:
    """Return what was written, in a few lines."""
    lines = [
        f"Written: {printable(options.output)}, the {counted(written.k, 'nearest neighbour')} of "
        f"{counted(written.queries, 'query')} among {counted(written.gallery, 'item')}."
    ]
    if written.queries_with_ties:
        number = written.queries_with_ties
        lines.append(
            f"{counted(number, 'query')} {verb(number, 'has', 'have')} further items that are as near as the last "
            "neighbour. The column unlisted_ties counts them."
        )
    if written.queries_with_fewer:
        number = written.queries_with_fewer
        lines.append(
            f"{counted(number, 'query')} {verb(number, 'has', 'have')} fewer candidates. -1 and NaN fill the rest."
        )
    return "\n".join(lines)
