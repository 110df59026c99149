"""How the gallery travels between processes, chunk by chunk.

Each process keeps its queries, and the gallery travels: every part visits every other process, in chunks, so that none
ever holds more than its own part and one chunk. The exact score of a pair depends on its two vectors alone, and so the
counts are exactly those of one process, however the items are distributed. With one process no chunk visits.

A part visits twice: once for the scores of relevant pairs, which are the thresholds of the queries, and once to be counted.
With one set the score of a pair serves both its items: a visiting chunk then brings its own thresholds and takes its
counters back, and each pair of parts is shared fairly between the two processes. One scores half of its rows with all of
the visitor, the other all of its rows with the other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.candidates import Candidates, starts_of
from fewshot_callbacks.engine.duplicates import DistinctItems, row_numbers
from fewshot_callbacks.engine.matrix import EXCHANGE_CHUNKS, ScoreMatrix
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.scores.products import ScoreTiles


class Visit(NamedTuple):
    """One step of an exchange, in which every process visits one and is visited by one."""

    position: int
    """sequence number; 0 is the local part"""
    chunk: int
    destination: int
    """process that is visited"""
    source: int
    """process whose chunk comes here meanwhile"""


class Visitors(NamedTuple):
    """A chunk of the gallery of another process."""

    scores: ScoreTiles
    """of the local queries with the visiting items"""
    candidates: Candidates
    tables: list[Tensor]
    """what was sent along"""


class Exchange:
    """Lets chunks of the gallery visit the other processes; every call is collective.

    Args:
        matrix: The pairs.
    """

    def __init__(self, matrix: ScoreMatrix) -> None:
        self.matrix, self.processes = matrix, matrix.processes
        exclusions = matrix.candidates.exclusions
        # a visiting item is never the query itself, so the self-exclusion is dropped
        self.exclusions = exclusions[1:] if matrix.same_set else exclusions

    def visits(self) -> Iterator[Visit]:
        """Yield the steps in which every process meets all chunks of all others."""
        rank, count = self.processes.rank, self.processes.count
        for step in range(1, count):
            for chunk in range(EXCHANGE_CHUNKS):
                position = (step - 1) * EXCHANGE_CHUNKS + chunk + 1
                yield Visit(position, chunk, (rank - step) % count, (rank + step) % count)

    def visitors(
        self, visit: Visit, index: Int[Tensor, "items"], classes: Int[Tensor, "items"], tables: Sequence[Tensor] = ()
    ) -> Visitors | None:
        """Send some items of the gallery to the visited process, and receive those of another one; None if it sends none.

        Args:
            visit: This step.
            index: The items.
            classes: Their classes, ascending.
            tables: What goes along, a row for each item.
        """
        gallery, mine = self.matrix.scores.gallery, None
        if len(index):
            codes = [of_item[index].cpu() for _, of_item in self.exclusions]
            vectors = gallery[index.to(gallery.device)].cpu()
            mine = [vectors, classes.cpu(), *codes, *(table.cpu() for table in tables)]
        theirs = self.processes.exchange(mine, to=visit.destination, source=visit.source)
        if theirs is None:
            return None
        scores = self.matrix.scores.with_gallery(theirs.pop(0).to(gallery.device))
        classes, *rest = (table.to(self.matrix.scores.device) for table in theirs)
        codes, rest = rest[: len(self.exclusions)], rest[len(self.exclusions) :]
        own = self.matrix.candidates
        candidates = replace(
            own,
            gallery_order=torch.arange(len(classes), device=classes.device),
            gallery_class=classes,
            gallery_start=starts_of(classes, own.classes),
            exclusions=tuple(
                (of_query, of_item) for (of_query, _), of_item in zip(self.exclusions, codes, strict=True)
            ),
        )
        return Visitors(scores, candidates, rest)

    def galleries(self) -> Iterator[Visitors]:
        """Yield all chunks of the galleries of the other processes."""
        order, classes = self.matrix.candidates.gallery_order, self.matrix.candidates.gallery_class
        for visit in self.visits():
            some = _chunk(range(len(order)), visit.chunk)
            visitors = self.visitors(visit, order[some], classes[some])
            if visitors is not None:
                yield visitors
            del visitors  # free the visiting vectors before the next exchange, to keep the memory bound

    def rectangles(self, blocks: Sequence[Block], *, counting: bool) -> Iterator[ScoreRectangle]:
        """Yield the rectangles of local queries with visiting items; counters of visitors travel back.

        Args:
            blocks: Of queries.
            counting: Ranks are counted; else pairs are scanned.
        """
        symmetric = self.matrix.symmetric_ranks if counting else self.matrix.symmetric
        items = self.matrix.duplicates.items
        for visit in self.visits():
            mine = self._leaving(visit, symmetric=symmetric)
            tables = [items.weight[mine]]
            if symmetric and counting:
                tables.append(_thresholds_within(blocks, mine))
            visitors = self.visitors(visit, items.index[mine], items.classes[mine], tables)
            counted = None
            if visitors is not None:
                rectangle = self._rectangle(visit, blocks, visitors, symmetric=symmetric, counting=counting)
                del visitors
                yield rectangle
                if symmetric and counting:
                    counted = [_joined_counters(rectangle.columns, "hits"), _joined_counters(rectangle.columns, "ties")]
                del rectangle  # free the visiting vectors before the next exchange, to keep the memory bound
            if symmetric and counting:
                returned = self.processes.exchange(counted, to=visit.source, source=visit.destination)
                if returned is not None:
                    _add_counters(blocks, mine, *returned)

    def revisit(self) -> Iterator[tuple[int, ScoreTiles]]:
        """Yield the scores of each visit of the rectangles in which ranks were counted, with its position."""
        items = self.matrix.duplicates.items
        for visit in self.visits():
            mine = self._leaving(visit, symmetric=self.matrix.symmetric_ranks)
            visitors = self.visitors(visit, items.index[mine], items.classes[mine])
            if visitors is not None:
                yield visit.position, visitors.scores
            del visitors  # free the visiting vectors before the next exchange, to keep the memory bound

    def _leaving(self, visit: Visit, *, symmetric: bool) -> slice:
        """Return which distinct items visit that process."""
        items = range(len(self.matrix.duplicates.items))
        if symmetric and visit.destination > self.processes.rank:  # it meets the others as our visitor
            items = items[self.matrix.half :]
        return _chunk(items, visit.chunk)

    def _rectangle(
        self, visit: Visit, blocks: Sequence[Block], visitors: Visitors, *, symmetric: bool, counting: bool
    ) -> ScoreRectangle:
        matrix = self.matrix
        weight, *rest = visitors.tables
        thresholds = rest[0] if rest else None
        order, classes = visitors.candidates.gallery_order, visitors.candidates.gallery_class
        layout = matrix.budget.layout
        size = layout.rows if symmetric and counting else layout.columns
        columns = []
        for block in DistinctItems(order, classes, weight).blocks(range(len(order)), size, matrix.candidates.part):
            some = slice(block.first, block.first + len(block))
            counts = None if thresholds is None else Counts.zeros(thresholds[some], torch.int32)
            # offset, so that positions of visiting blocks never collide with local ones
            columns.append(replace(block, first=len(matrix.duplicates.queries) + block.first, counts=counts))
        rows = blocks
        if symmetric and self.processes.rank < visit.source:
            rows = [block for block in blocks if block.first < matrix.half]
        numbers = matrix.duplicates.numbers
        if matrix.repeats:
            numbers = numbers[0], row_numbers(visitors.scores.gallery).to(classes.device)
        return ScoreRectangle(
            visitors.scores, visitors.candidates, rows, columns, symmetric, matrix.repeats, numbers, visit.position
        )


def _chunk(items: range, number: int) -> slice:
    """Return one of the chunks of a run of items."""
    start, stop = (items.start + len(items) * end // EXCHANGE_CHUNKS for end in (number, number + 1))
    return slice(start, stop)


def _overlaps(blocks: Sequence[Block], items: slice) -> Iterator[tuple[Block, slice, slice]]:
    """Yield the blocks that overlap with a run of items: which of their rows do, and where these are in the run."""
    for block in blocks:
        start, stop = max(block.first, items.start), min(block.first + len(block), items.stop)
        if start < stop:
            yield (
                block,
                slice(start - block.first, stop - block.first),
                slice(start - items.start, stop - items.start),
            )


def _thresholds_within(blocks: Sequence[Block], items: slice) -> Float[Tensor, "items columns"]:
    """Return the thresholds of a run of items, padded with +inf."""
    parts = [(block.counts.thresholds[rows], where) for block, rows, where in _overlaps(blocks, items) if block.counts]
    width = max((part.shape[1] for part, _ in parts), default=0)
    device = parts[0][0].device if parts else None
    table = torch.full((items.stop - items.start, width), torch.inf, dtype=torch.float64, device=device)
    for part, where in parts:
        table[where, : part.shape[1]] = part
    return table


def _joined_counters(blocks: Sequence[Block], name: str) -> Int[Tensor, "items columns"]:
    return torch.cat([getattr(block.counts, name) for block in blocks]).cpu()


def _add_counters(blocks: Sequence[Block], items: slice, hits: Tensor, ties: Tensor) -> None:
    """Add what was counted for a run of items in another process."""
    for block, rows, where in _overlaps(blocks, items):
        if block.counts is not None:
            for own, more in ((block.counts.hits, hits), (block.counts.ties, ties)):
                own[rows] += more[where, : own.shape[1]].to(own.device)
