"""The pass over pairs whose items are spread over several processes.

Each process keeps its queries, and the gallery travels: every part visits every other process, in pieces, so that none
ever holds more than its own part and one piece. The keys of a pair depend on its two vectors alone, and so the counts are
those of one process, to the last one, however the items are spread.

A part visits twice: once for the keys of relevant pairs, which are the thresholds of the queries, and once to be counted.
With one set the score of a pair serves both its items: a guest then brings its own thresholds and takes home its counters,
and each pair of parts is shared fairly between the two processes. One takes half of its rows with all of the guest, the
other all of its rows with the other half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.blocks import Block, ScoreRectangle, largest_class
from fewshot_callbacks.engine.candidates import Candidates, starts_of
from fewshot_callbacks.engine.duplicates import DistinctItems, row_numbers
from fewshot_callbacks.engine.pooled.intervals import ScoreIntervals
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.ranking_pass import Foretold, Look, RankingPass
from fewshot_callbacks.engine.ranks import BestMatches
from fewshot_callbacks.engine.relevant_scores import RelevantScores, without_last_columns
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.threads import Task, run_tasks

EXCHANGE_CHUNKS = 4
"""In so many pieces a part visits another process."""


class ShardIndex(NamedTuple):
    """Which of all items this process holds: their indices among all."""

    queries: Int[Tensor, "queries"]
    gallery: Int[Tensor, "gallery"]


class _Visit(NamedTuple):
    place: int
    piece: int
    host: int
    """who is visited"""
    guest: int
    """who visits this process meanwhile"""


class ShardedPass(RankingPass):
    """See the module; for everything else see `RankingPass`.

    Args:
        tiles: the scores of what this process holds.
        candidates: who may be retrieved, of all queries and the whole gallery.
        memory_bytes: budget of each process beyond its embeddings.
        tile_maker: who makes the tiles.
        processes: the others.
        share: which of all items this process holds.
        **options: of `RankingPass`.
    """

    def __init__(
        self,
        tiles: ScoreTiles,
        candidates: Candidates,
        memory_bytes: int,
        tile_maker: Any,
        *,
        processes: Processes,
        share: ShardIndex,
        **options: Any,
    ) -> None:
        self.processes, self.everyone = processes, candidates
        own = candidates.share(*(index.to(candidates.query_order.device) for index in share))
        # what is free on a device, and how many threads there are, differs; what follows from it must not
        memory_bytes = -int(processes.largest([-memory_bytes])[0])
        super().__init__(tiles, own, memory_bytes, tile_maker, **options)
        self.both = not processes.largest([float(not self.both)])[0]
        # of a guest none is the query itself
        self._exclusions = own.exclusions[1:] if self.same_set else own.exclusions

    def _find_repeats(self, numbers: Int[Tensor, "gallery"]) -> None:
        distinct = int(numbers.max()) + 1 if len(numbers) else 0
        row = self.scores.gallery[0] + 0.0 if distinct == 1 else None
        parts = [part for part in self.processes.gather((distinct, len(numbers), row)) if part[1]]
        self.repeats = any(different <= 0.9 * items for different, items, _ in parts)
        rows = [row for _, _, row in parts if row is not None]
        collapsed = len(rows) == len(parts) and all(torch.equal(row, rows[0]) for row in rows)
        self.distinct_rows = 1 if collapsed else max(2, sum(different for different, _, _ in parts))

    def _count(self) -> None:
        everyone = self.everyone
        self.pairs, self.relevant_pairs = everyone.pairs, everyone.relevant_pairs
        self.queries, self.in_class = len(everyone.query_order), everyone.gallery_start.diff()
        self.most_relevant = largest_class(everyone)
        self._sizes = self.processes.gather((len(self._distinct_queries), len(self._distinct_items)))
        queries, gallery = (max(sizes) for sizes in zip(*self._sizes, strict=True))
        # where both sides of a tile are counted, the counters of a guest are here as well
        self.most_distinct = queries + (math.ceil(queries / EXCHANGE_CHUNKS) if self.same_set else 0), gallery
        self.sampled_share = len(self.candidates.gallery_order) / max(1, len(everyone.gallery_order))

    # ---------------------------------------------------------------------------------------------------------- in step

    def batches(self) -> Iterator[range]:
        """As many for each process; those of one with fewer queries are empty in the end."""
        batches = list(super().batches())
        rounds = int(self.processes.largest([len(batches)])[0])
        yield from [*batches, *[range(0)] * (rounds - len(batches))]

    def _prepare(self, look: Look | None) -> None:
        """Let the process with most pairs choose for all."""
        if self.precision is not None:
            super()._prepare(look)
            return
        busiest = max(range(len(self._sizes)), key=lambda rank: math.prod(self._sizes[rank]))
        foretold = look if isinstance(look, Foretold) else None
        choice = None
        if self.processes.rank == busiest:
            super()._prepare(look)
            choice = self.precision, self.scores.part, None if foretold is None else foretold.expectations
        precision, part, expectations = self.processes.gather(choice)[busiest] or (None, 0, None)
        if self.processes.rank != busiest:
            self.precision, self.scores.part = precision, part
            if foretold is not None and expectations is not None:
                foretold.expecting(expectations)
            super()._prepare(look)

    def _anyone_asks(self, blocks: Sequence[Block]) -> bool:
        return bool(self.processes.largest([float(super()._anyone_asks(blocks))])[0])

    def done(self, pairs: int) -> None:
        """What this process has done stands for as much in each of the others."""
        super().done(pairs * self.processes.count)

    def _visits(self) -> Iterator[_Visit]:
        rank, count = self.processes.rank, self.processes.count
        for step in range(1, count):
            for piece in range(EXCHANGE_CHUNKS):
                place = (step - 1) * EXCHANGE_CHUNKS + piece + 1
                yield _Visit(place, piece, (rank - step) % count, (rank + step) % count)

    # ------------------------------------------------------------------------------------------------------- thresholds

    def _query_blocks(self, batch: range, size: int) -> list[Block]:
        return self._distinct_queries.blocks(batch, size, self.candidates.part, [self._half] if self.turns else [])

    @property
    def _half(self) -> int:
        return math.ceil(len(self._distinct_queries) / 2)

    def _thresholds_of(self, blocks: Sequence[Block]) -> list[Float[Tensor, "queries columns"]]:
        thresholds = super()._thresholds_of(blocks)
        if self.best is not None:
            return thresholds
        parts = [[own] for own in thresholds]
        del thresholds
        for keys in self._guests_keys():

            def fill(number: int, _: None = None, keys: RelevantScores = keys) -> None:
                parts[number].append(keys.of(blocks[number].index, blocks[number].classes))

            tasks = [Task(frozenset(), partial(fill, number), 1) for number in range(len(blocks))]
            if tasks:
                run_tasks(tasks, [None] * (min(self.threads, len(tasks)) if keys.compiled else 1), lambda _: None)
            del keys, fill, tasks  # before the next guest comes
        whole = []
        for number in range(len(parts)):
            whole.append(without_last_columns(torch.cat(parts[number], dim=1).sort(dim=1).values))
            parts[number] = []
        return whole

    def positives(
        self, intervals: ScoreIntervals | None = None
    ) -> Iterator[tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]]:
        """The keys of this process's relevant pairs; every process has to go on to the end."""
        if intervals is not None and self.keys.compiled and self._held is None:
            with self._threads():
                yield from self.keys.near(intervals)
                for keys in self._guests_keys():
                    yield from keys.near(intervals)
                    del keys  # before the next guest comes
            return
        for batch in self.batches():
            for block in self.query_blocks(batch):
                yield from self.positives_of(block)

    def _guests_keys(self) -> Iterator[RelevantScores]:
        """The keys of queries and the items of each piece of a guest."""
        order, classes = self.candidates.gallery_order, self.candidates.gallery_class
        for visit in self._visits():
            some = _piece(range(len(order)), visit.piece)
            theirs = self._exchange(visit, order[some], [classes[some]])
            if theirs is not None:
                guests = self._candidates(theirs[1], theirs[2:])
                scores = self.scores.with_gallery(theirs[0])
                del theirs
                keys = RelevantScores(scores, guests, self.free_bytes, self.threads, repeats=self.repeats)
                del scores
                yield keys
                del keys

    # --------------------------------------------------------------------------------------------------------- rectangles

    def rectangles(self, blocks: Sequence[Block], *, counting: bool = True) -> Iterator[ScoreRectangle]:
        """This process's queries with its own candidates, then with those of each guest."""
        both = self.both if counting else self.turns
        yield self._at_home(blocks, both=both)
        for visit in self._visits():
            mine = self._leaving(visit, both=both)
            entries = self._distinct_items
            tables = [entries.classes[mine], entries.weight[mine]]
            if both and counting:
                tables.append(_thresholds_within(blocks, mine))
            theirs = self._exchange(visit, entries.index[mine], tables)
            counted = None
            if theirs is not None:
                rectangle = self._rectangle(visit, blocks, theirs, both=both, counting=counting)
                del theirs
                yield rectangle
                if both and counting:
                    counted = [_joined_counters(rectangle.columns, "hits"), _joined_counters(rectangle.columns, "ties")]
                del rectangle
            if both and counting:
                taken_home = self.processes.exchange(counted, to=visit.guest, source=visit.host)
                if taken_home is not None:
                    _add_counters(blocks, mine, *taken_home)

    def revisit_tiles(self, asked: bool) -> Iterator[tuple[int, ScoreTiles]]:
        """The scores of each rectangle of `run`, by its place, if any process asks for some."""
        if not self.processes.largest([float(asked)])[0]:
            return
        yield 0, self.scores
        for visit in self._visits():
            theirs = self._exchange(visit, self._distinct_items.index[self._leaving(visit, both=self.both)], [])
            if theirs is not None:
                scores = self.scores.with_gallery(theirs[0])
                del theirs
                yield visit.place, scores
                del scores

    def _leaving(self, visit: _Visit, *, both: bool) -> slice:
        """Which entries visit that process now."""
        entries = range(len(self._distinct_items))
        if both and visit.host > self.processes.rank:  # it meets the others as our guest
            entries = entries[self._half :]
        return _piece(entries, visit.piece)

    def _exchange(self, visit: _Visit, index: Tensor, tables: Sequence[Tensor]) -> list[Tensor] | None:
        """Send some items with what is known of them, and receive a guest's: vectors, tables, codes.

        Tensors come to the device of the scores, vectors stay on the CPU.
        """
        mine = None
        if len(index):
            codes = [of_item[index].cpu() for _, of_item in self._exclusions]
            vectors = self.scores.gallery[index.to(self.scores.gallery.device)].cpu()
            mine = [vectors, *(table.cpu() for table in tables), *codes]
        theirs = self.processes.exchange(mine, to=visit.host, source=visit.guest)
        if theirs is None:
            return None
        device = self.scores.device
        return [theirs[0].to(self.scores.gallery.device), *(table.to(device) for table in theirs[1:])]

    def _candidates(self, classes: Int[Tensor, "guests"], codes: Sequence[Tensor]) -> Candidates:
        own = self.candidates
        return replace(
            own,
            gallery_order=torch.arange(len(classes), device=classes.device),
            gallery_class=classes,
            gallery_start=starts_of(classes, own.classes),
            exclusions=tuple(
                (of_query, of_item) for (of_query, _), of_item in zip(self._exclusions, codes, strict=True)
            ),
        )

    def _rectangle(
        self, visit: _Visit, blocks: Sequence[Block], theirs: list[Tensor], *, both: bool, counting: bool
    ) -> ScoreRectangle:
        vectors, classes, weight, *rest = theirs
        thresholds = rest.pop(0) if both and counting else None
        entries = DistinctItems(torch.arange(len(classes), device=classes.device), classes, weight)
        size = self.layout.rows if both and counting else self.layout.columns
        columns = []
        for block in entries.blocks(range(len(entries)), size, self.candidates.part):
            some = slice(block.first, block.first + len(block))
            counts = None if thresholds is None else Counts.zeros(thresholds[some], torch.int32)
            # no block of ours has such a place
            columns.append(replace(block, first=len(self._distinct_queries) + block.first, counts=counts))
        rows = blocks
        if both and self.processes.rank < visit.guest:
            rows = [block for block in blocks if block.first < self._half]
        numbers = (self.query_numbers, row_numbers(vectors).to(classes.device)) if self.repeats else None
        return ScoreRectangle(
            self.scores.with_gallery(vectors),
            self._candidates(classes, rest),
            rows,
            columns,
            both,
            numbers,
            visit.place,
        )


def moved(
    scores: ScoreTiles,
    share: ShardIndex,
    processes: Processes,
    owners: tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]],
    best: BestMatches | None,
) -> tuple[ScoreTiles, ShardIndex, BestMatches | None]:
    """Bring each item to the process that shall hold it.

    Args:
        scores: of what this process holds.
        share: which of all items these are.
        processes: the others.
        owners: the rank of each of all queries and of each of all items of the gallery; -1 for nobody's.
        best: what is known of the queries of this process.

    Returns:
        The same of what it holds then.
    """

    def side(owner: Tensor, places: Tensor, *tensors: Tensor) -> list[Tensor]:
        parts = [[tensor[owner[places] == processes.rank] for tensor in (places, *tensors)]]
        for step in range(1, processes.count):
            to, source = ((processes.rank + step * way) % processes.count for way in (1, -1))
            leaving = owner[places] == to
            parts.append(processes.exchange([tensor[leaving] for tensor in (places, *tensors)], to, source) or [])
        return [torch.cat(columns) for columns in zip(*parts, strict=True)]

    device = scores.device
    known = () if best is None else (best.keys.cpu(), best.tied.cpu())
    queries, vectors, *known_of = side(owners[0], share.queries, scores.queries.cpu(), *known)
    vectors = vectors.to(scores.queries.device)
    here, items = ShardIndex(queries, queries), vectors
    if scores.gallery is not scores.queries:
        gallery, items = side(owners[1], share.gallery, scores.gallery.cpu())
        here, items = ShardIndex(queries, gallery), items.to(scores.gallery.device)
    found = BestMatches(known_of[0].to(device), known_of[1].to(device)) if known_of else None
    return scores.with_vectors(vectors, items), here, found


def _piece(entries: range, number: int) -> slice:
    """One of the pieces of a run of entries."""
    start, stop = (entries.start + len(entries) * end // EXCHANGE_CHUNKS for end in (number, number + 1))
    return slice(start, stop)


def _overlaps(blocks: Sequence[Block], entries: slice) -> Iterator[tuple[Block, slice, slice]]:
    """Panels with entries of a run, in turn: which of the block's rows, and where these are in the run."""
    for block in blocks:
        start, stop = max(block.first, entries.start), min(block.first + len(block), entries.stop)
        if start < stop:
            yield (
                block,
                slice(start - block.first, stop - block.first),
                slice(start - entries.start, stop - entries.start),
            )


def _thresholds_within(blocks: Sequence[Block], entries: slice) -> Float[Tensor, "entries columns"]:
    """The thresholds of a run of entries, +inf behind the last of each."""
    parts = [
        (block.counts.thresholds[rows], place) for block, rows, place in _overlaps(blocks, entries) if block.counts
    ]
    width = max((part.shape[1] for part, _ in parts), default=0)
    device = parts[0][0].device if parts else None
    table = torch.full((entries.stop - entries.start, width), torch.inf, dtype=torch.float64, device=device)
    for part, place in parts:
        table[place, : part.shape[1]] = part
    return table


def _joined_counters(blocks: Sequence[Block], name: str) -> Int[Tensor, "entries columns"]:
    return torch.cat([getattr(block.counts, name) for block in blocks]).cpu()


def _add_counters(blocks: Sequence[Block], entries: slice, hits: Tensor, ties: Tensor) -> None:
    """What was counted for a run of entries in another process."""
    for block, rows, place in _overlaps(blocks, entries):
        if block.counts is not None:
            for own, more in ((block.counts.hits, hits), (block.counts.ties, ties)):
                own[rows] += more[place, : own.shape[1]].to(own.device)
