"""The matrix of all scores: who may be retrieved for whom, equal rows, and how it is cut up. Nothing of it changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fewshot_callbacks.distributed.processes import ALONE, Processes, ShardIndex
from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.budget import Budget, least_bytes
from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.duplicates import Duplicates, find_duplicates
from fewshot_callbacks.engine.options import EngineOptions
from fewshot_callbacks.engine.scores.products import ScoreTiles

EXCHANGE_CHUNKS = 4
"""Chunks in which the gallery of a process visits another one, so that none ever holds more than its own and one chunk."""


@dataclass(frozen=True)
class ScoreMatrix:
    """All pairs of queries and gallery, over all processes; see the module."""

    scores: ScoreTiles
    """of the vectors that this process holds"""
    everyone: Candidates
    """all queries and the whole gallery"""
    candidates: Candidates
    """queries and gallery items of this process; indices are those of `scores`"""
    duplicates: Duplicates
    budget: Budget
    processes: Processes
    options: EngineOptions
    symmetric: bool
    """each pair is scored once for both its items: one set, and what one excludes excludes it"""
    symmetric_ranks: bool
    """so it is while ranks are counted, as the counters of all queries fit the budget"""

    @property
    def same_set(self) -> bool:
        """Whether the gallery is the queries."""
        return self.scores.queries is self.scores.gallery

    @property
    def repeats(self) -> bool:
        """Whether a row or column may stand for several equal items."""
        return self.duplicates.repeats

    @property
    def threads(self) -> int:
        """How many threads make and count tiles."""
        return self.budget.threads

    @property
    def free_bytes(self) -> int:
        """The budget beside what is held for each query and item."""
        return self.budget.free_bytes

    @property
    def half(self) -> int:
        """Where the second half of the distinct queries of this process begins."""
        return math.ceil(len(self.duplicates.queries) / 2)

    def batches(self) -> Iterator[range]:
        """Yield runs of queries whose counters are held at once; as many in each process, the last ones perhaps empty."""
        queries = self.duplicates.queries
        in_class, batches, start = self.everyone.gallery_start.diff(), [], 0
        while start < len(queries):
            stop = min(start + self.budget.layout.batch, len(queries))
            # classes are ordered by size: the last query of a batch has the most relevant items
            while stop - start > (fitting := self.budget.layout_for(int(in_class[queries.classes[stop - 1]])).batch):
                stop = start + max(fitting, (stop - start) // 2)
            if self.symmetric_ranks:
                stop = len(queries)
            batches.append(range(start, stop))
            start = stop
        rounds = int(self.processes.largest([len(batches)])[0])
        yield from [*batches, *[range(0)] * (rounds - len(batches))]

    def query_blocks(self, batch: range | None = None) -> list[Block]:
        """Return the blocks of a batch of queries in which ranks are counted, or of all queries to be scanned."""
        size, borders = self.budget.layout.columns, []
        if self.symmetric and self.processes.count > 1:
            borders.append(self.half)
        if batch is not None:
            size = self.budget.layout.rows
            if not self.symmetric_ranks:  # at least one block for each thread
                rounds = max(1, math.ceil(len(batch) / size / self.threads))
                size = max(16, math.ceil(len(batch) / rounds / self.threads))
        queries = self.duplicates.queries
        return queries.blocks(range(len(queries)) if batch is None else batch, size, self.candidates.part, borders)

    def item_blocks(self) -> list[Block]:
        """Return the blocks of the gallery of this process."""
        items = self.duplicates.items
        return items.blocks(range(len(items)), self.budget.layout.columns, self.candidates.part)

    def rectangle(self, rows: Sequence[Block], columns: Sequence[Block], *, symmetric: bool) -> ScoreRectangle:
        """Return some blocks of queries with some of the gallery, both of this process."""
        numbers = self.duplicates.numbers
        return ScoreRectangle(self.scores, self.candidates, rows, columns, symmetric, self.repeats, numbers)


def score_matrix(
    scores: ScoreTiles,
    candidates: Candidates,
    memory_bytes: int,
    options: EngineOptions,
    *,
    processes: Processes = ALONE,
    share: ShardIndex | None = None,
    best: bool = False,
) -> ScoreMatrix:
    """Plan a pass over all pairs; collective.

    Args:
        scores: Of the vectors that this process holds.
        candidates: Who may be retrieved, of all queries and the whole gallery.
        memory_bytes: Budget of each process for everything beyond its embeddings; the least possible if it is smaller.
        options: Of the engine.
        processes: Who holds the rest.
        share: Which of all items this process holds; by default all.
        best: Only the best match of each query is ranked.
    """
    own = candidates
    if share is not None:
        own = candidates.share(*(index.to(candidates.query_order.device) for index in share))
    duplicates = find_duplicates(scores, own, processes)
    same_set = scores.queries is scores.gallery
    queries, items = (max(sizes) for sizes in zip(*duplicates.sizes, strict=True))
    if (
        same_set and processes.count > 1
    ):  # where both sides of a tile are counted, a visitor's counters are here as well
        queries += math.ceil(queries / EXCHANGE_CHUNKS)
    compiled = scores.compiled is not None
    threads = (options.threads or torch.get_num_threads()) if compiled else 1
    most = 1.0 if best else candidates.most_relevant
    least = least_bytes(queries, items, scores.dim, most, threads=threads, whole_tiles=not compiled)
    # what is free on a device, and how many threads there are, differs; what follows from it must not
    most_needed, granted = processes.largest([least, -memory_bytes])
    budget = Budget(
        int(max(-granted, most_needed)),
        queries,
        items,
        scores.dim,
        threads,
        not compiled,
        1.0 if best else candidates.relevant_pairs / max(1, len(candidates.query_order)),
        options.layout,
    )
    symmetric = same_set and all(torch.equal(*codes) for codes in candidates.exclusions)
    fits = symmetric and budget.layout.batch >= queries and budget.layout.square
    everywhere = not processes.largest([float(not fits)])[0]
    return ScoreMatrix(scores, candidates, own, duplicates, budget, processes, options, symmetric, everywhere)
