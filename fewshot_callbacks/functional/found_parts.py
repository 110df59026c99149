"""Writes the neighbours that several processes find to one file, without gathering all of them in one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.engine.options import Progress, computing
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import ItemSets, Share
from fewshot_callbacks.functional.neighbour_files import UserIds, check_name, write_batches
from fewshot_callbacks.functional.neighbours import Neighbours, are_tied, found_in_batches, without_candidates
from fewshot_callbacks.settings import Similarity

_CALL = "nearest"


@dataclass(frozen=True)
class WrittenNeighbours:
    """The numbers of queries, neighbours and ties in a file of neighbours.

    Attributes:
        queries: Number of queries.
        k: Number of neighbours per query.
        gallery: Number of gallery items, each id once.
        queries_with_ties: Number of queries with unlisted items that tie with the last neighbour.
        queries_with_fewer: Number of queries with fewer than k candidates.
    """

    queries: int
    k: int
    gallery: int
    queries_with_ties: int
    queries_with_fewer: int


def write_nearest(
    path: str | os.PathLike[str],
    queries: Any,
    gallery: Any | None,
    columns: Mapping[str, Any],
    *,
    k: int,
    similarity: Similarity,
    memory: float,
    share: Share,
    choose: Callable[[int], Int[Tensor, "chosen"]] | None = None,
    ids: UserIds | None = None,
    about: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> WrittenNeighbours:
    """Write what `nearest` finds to one file, in query order. The first process writes. *Collective*.

    Each process first writes its batches to `TMPDIR`. The first process then collects them, one at a time, so that memory
    stays within the budget.

    Arguments are for this process. `columns` are ids and groups by argument name; `choose` is as in
    `read_items`; `ids` are the ids of all items, which are written; `about` is recorded in the file; `progress` gets
    the pairs done and all pairs.
    """
    check_name(path)
    with share.processes.together():
        sets = read_items(
            _CALL, queries, gallery, columns, share=share, similarity=similarity, memory=memory, choose=choose
        )
        with tempfile.TemporaryDirectory() as folder:
            parts = _Parts(Path(folder), sets)
            _search(parts, sets, k, progress)
            summary = parts.summary(k)
            batches = parts.of_all()
            if share.processes.rank == 0:
                write_batches(path, batches, ids or UserIds(), about or {})
            for _ in batches:  # the other processes send
                pass
    return summary


def _search(parts: _Parts, sets: ItemSets, k: int, progress: Progress | None) -> None:
    """Write the neighbours of this process's queries, batch by batch. *Collective*."""
    with computing() as threads:
        vectors = sets.vectors(threads)
        rules = sets.rules()
        own = np.arange(len(rules.self_match))
        for batch, found in found_in_batches(vectors, rules, own, k, sets.memory, progress=progress):
            parts.add(batch, *found)
            del found  # before the next batch is searched


class _Parts:
    """The batches of this process, in files."""

    def __init__(self, folder: Path, sets: ItemSets) -> None:
        self._folder = folder
        self._sets = sets
        self._number = 0
        self._with_ties = 0
        self._with_fewer = 0
        self._has_candidates = False

    def add(self, batch: Any, items: Any, scores: Any, unlisted_ties: Any) -> None:
        """Write the neighbours of one batch."""
        if not len(batch):
            return
        sets = self._sets
        rows = sets.queries.to_origins(sets.queries.places[torch.from_numpy(batch)]).numpy()
        indices = sets.gallery.to_origins(torch.from_numpy(items)).numpy()
        self._with_ties += int((unlisted_ties > 0).sum())
        self._with_fewer += int((items[:, -1] < 0).sum())
        self._has_candidates = self._has_candidates or bool((items[:, 0] >= 0).any())
        with self._file(self._number).open("wb") as file:
            for array in (rows, indices, scores, unlisted_ties):
                np.save(file, array)
        self._number += 1

    def summary(self, k: int) -> WrittenNeighbours:
        """Return the totals over all processes. *Collective*."""
        sets = self._sets
        processes = sets.processes
        numbers = np.array([self._with_ties, self._with_fewer, self._has_candidates])
        with_ties, with_fewer, has_candidates = processes.summed(numbers).tolist()
        if not has_candidates:
            raise without_candidates(_CALL, sets)
        return WrittenNeighbours(sets.queries.length, k, sets.gallery.length, with_ties, with_fewer)

    def of_all(self) -> Iterator[Neighbours]:
        """Yield all batches in rank order, on the first process; other processes only send. *Collective*."""
        processes = self._sets.processes
        numbers = processes.gather(self._number)
        for rank, number in enumerate(numbers):
            for part in range(number):
                arrays = self._read(part) if rank == processes.rank else None
                if rank > 0:
                    arrays = processes.exchange(arrays, 0, rank if processes.rank == 0 else 0)
                if processes.rank == 0:
                    assert arrays is not None
                    rows, indices, scores, unlisted_ties = arrays
                    yield Neighbours(rows, indices, scores, are_tied(scores, unlisted_ties), unlisted_ties)

    def _read(self, part: int) -> list[Tensor]:
        """Return the arrays of a batch, and delete its file."""
        with self._file(part).open("rb") as file:
            arrays = [torch.from_numpy(np.load(file)) for _ in range(4)]
        with suppress(OSError):  # Windows, if another program has the file open
            self._file(part).unlink()
        return arrays

    def _file(self, part: int) -> Path:
        return self._folder / f"{part}.npy"
