"""The pass: for each relevant item of each query, how many candidates come before it, in bounded memory.

A rank is a count, so nothing is sorted and no row of scores is kept. The relevant keys of a query are its thresholds;
tiles of estimates stream past and are compared with them. Where an estimate lies closer to a threshold than its proved
error, a more exact precision decides (see `similarity`). The counts therefore depend on the vectors alone: not on the size
of the tiles, the threads, the device or the order of the data.

With one set the score of a pair serves both its items, so that each tile is made once for two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.blocks import Block, ScoreRectangle, block_positives, largest_class
from fewshot_callbacks.engine.budget import (
    COUNTER_BYTES,
    LEAST_ROWS,
    POSITIVE_BYTES,
    RANK_BYTES,
    SHARE_OF_BLOCKS,
    SHARE_OF_RANKS,
    Layout,
    _block_bytes,
    choose_layout,
    item_bytes,
    least_bytes,
    least_ranked,
)
from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.duplicates import DistinctItems, distinct_items, row_numbers
from fewshot_callbacks.engine.options import Progress
from fewshot_callbacks.engine.pooled.intervals import ScoreIntervals
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.ranks import BestMatches, RankBlock, _rank_block
from fewshot_callbacks.engine.relevant_scores import RelevantScores
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.threads import Task, available_threads, own_threads, run_tasks


@runtime_checkable
class Look(Protocol):
    """Something that looks at all pairs as they pass, whatever their query."""

    def relevant(self, keys: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None) -> None:
        """See the keys of relevant pairs, each of which stands for `weights` pairs (one by default)."""


class RankingPass:
    """One way through all pairs of queries and gallery.

    Args:
        tiles: the scores.
        candidates: who may be retrieved.
        memory_bytes: budget for everything beyond the embeddings themselves; the least that is possible where it is smaller.
        tile_maker: who makes the tiles; see `walkers`.
        progress: called now and then with the pairs that are done and the pairs that there are.
        best: rank the best matches of each query alone, which are these.
        precision: the first precision; by default the one that is fastest.
    """

    processes: Processes = ALONE
    """who else walks over a part of all pairs"""

    def __init__(
        self,
        tiles: ScoreTiles,
        candidates: Candidates,
        memory_bytes: int,
        tile_maker: TileMaker,
        progress: Progress | None = None,
        best: BestMatches | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.scores, self.candidates = tiles, candidates
        self.tile_maker, self.progress, self.best, self.precision = tile_maker, progress, best, precision
        self.same_set = tiles.queries is tiles.gallery
        self.threads = available_threads() if tiles.compiled is not None else 1
        self._find_distinct()
        self._count()
        relevant = 1.0 if best is not None else self.relevant_pairs / max(1, self.queries)
        most = 1.0 if best is not None else self.most_relevant
        self.memory_bytes = max(memory_bytes, least_bytes(*self._shape(most), **self._options))
        self.free_bytes = self.memory_bytes - item_bytes(*self.most_distinct)
        self.layout = self._layout(relevant)
        # one tile serves both of its items, where nobody is excluded by a code; of ranks, where all counters are held
        self.turns = self.same_set and not candidates.across_classes
        self.both = self.turns and self.layout.batch >= self.most_distinct[0] and self.layout.square
        self.pairs_done, self.pairs_total = 0, self.pairs
        self._held: list[Block] | None = None
        self.keys = RelevantScores(tiles, candidates, self.free_bytes, self.threads, repeats=self.repeats)

    def _find_distinct(self) -> None:
        """Let one entry stand for all equal items of a class, where there are enough of them to matter."""
        candidates, device = self.candidates, self.scores.device
        numbers = row_numbers(self.scores.gallery)
        self._find_repeats(numbers)
        query_numbers = numbers if self.same_set or not self.repeats else row_numbers(self.scores.queries)
        self.gallery_numbers, self.query_numbers = numbers.to(device), query_numbers.to(device)
        merge = self.repeats and not candidates.across_classes
        self._distinct_items = distinct_items(
            candidates.gallery_order, candidates.gallery_class, numbers if merge else None, device
        )
        self._distinct_queries = (
            self._distinct_items
            if self.same_set
            else distinct_items(
                candidates.query_order, candidates.query_class, query_numbers if merge else None, device
            )
        )

    def _find_repeats(self, numbers: Int[Tensor, "gallery"]) -> None:
        self.distinct_rows = int(numbers.max()) + 1 if len(numbers) else 0
        self.repeats = 0 < self.distinct_rows <= 0.9 * len(numbers)

    def _count(self) -> None:
        """What there is in all: pairs, relevant ones, queries, gallery items of each class, entries to be held at once."""
        candidates = self.candidates
        self.pairs, self.relevant_pairs = candidates.pairs, candidates.relevant_pairs
        self.queries, self.in_class = len(candidates.query_order), candidates.gallery_start.diff()
        self.most_relevant = largest_class(candidates)
        self.most_distinct = len(self._distinct_queries), len(self._distinct_items)
        self.sampled_share = 1.0

    def _layout(self, relevant: float) -> Layout:
        return choose_layout(self.memory_bytes, *self._shape(relevant), **self._options)

    def _shape(self, relevant: float) -> tuple[int, int, int, float]:
        return *self.most_distinct, self.scores.dim, relevant

    @property
    def _options(self) -> dict[str, Any]:
        return {"threads": self.threads, "whole_tiles": self.scores.compiled is None}

    # ---------------------------------------------------------------------------------------------------------- blocks

    @property
    def distinct_pairs(self) -> int:
        """Pairs of entries; fewer than pairs of items where items repeat."""
        return len(self._distinct_queries) * len(self._distinct_items)

    def batches(self) -> Iterator[range]:
        """Runs of query entries whose counters are held at once, together all of them."""
        start, queries = 0, len(self._distinct_queries)
        while start < queries:
            # classes are ordered by size: the last query of a batch has the most relevant items
            stop = min(start + self.layout.batch, queries)
            while stop - start > (fitting := self._queries_that_fit(stop - 1)):
                stop = start + max(fitting, (stop - start) // 2)
            if self.both:
                stop = queries
            yield range(start, stop)
            start = stop

    def _queries_that_fit(self, entry: int) -> int:
        return self._layout(int(self.in_class[self._distinct_queries.classes[entry]])).batch

    def query_blocks(self, batch: range) -> list[Block]:
        """The blocks of a batch of queries, with thresholds and empty counters."""
        if self._held is not None:
            return self._held
        size = self.layout.rows
        if not self.both:  # at least one block for each thread
            rounds = max(1, math.ceil(len(batch) / size / self.threads))
            size = max(16, math.ceil(len(batch) / rounds / self.threads))
        bare = self._query_blocks(batch, size)
        thresholds = self._thresholds_of(bare)
        blocks = [
            replace(block, counts=Counts.zeros(keys, torch.int32)) for block, keys in zip(bare, thresholds, strict=True)
        ]
        if self.both:
            self._held = blocks
        return blocks

    def _query_blocks(self, batch: range, size: int) -> list[Block]:
        return self._distinct_queries.blocks(batch, size, self.candidates.part)

    def _thresholds_of(self, blocks: Sequence[Block]) -> list[Float[Tensor, "queries columns"]]:
        """What the candidates of the queries of each block are compared with."""
        thresholds: list[Tensor] = [torch.empty(0)] * len(blocks)

        def fill(number: int, _: None = None) -> None:
            thresholds[number] = self._thresholds(blocks[number])

        if self.keys.compiled and self.best is None and blocks:
            tasks = [Task(frozenset(), partial(fill, number), 1) for number in range(len(blocks))]
            run_tasks(tasks, [None] * min(self.threads, len(blocks)), lambda _: None)
        else:
            for number in range(len(blocks)):
                fill(number)
        return thresholds

    def gallery_blocks(self) -> list[Block]:
        """The blocks of the gallery."""
        entries = self._distinct_items
        return entries.blocks(range(len(entries)), self.layout.columns, self.candidates.part)

    def sample(self, queries: int, gallery: int, seed: int = 0) -> tuple[Block, Block]:
        """Some queries with thresholds, and some gallery entries, drawn at random: no more than fit the budget."""
        relevant = self.most_relevant if self.best is None else 1.0

        def taken() -> float:  # several copies of the thresholds are made on the way
            tiles = _block_bytes(queries, self.scores.dim, relevant, whole_tiles=False, columns=gallery)
            return tiles + queries * 4 * COUNTER_BYTES * (relevant + 1)

        while taken() > self.free_bytes * SHARE_OF_BLOCKS and (queries > LEAST_ROWS // 4 or gallery > LEAST_ROWS):
            if queries > LEAST_ROWS // 4 and queries * (relevant + 1) > gallery:
                queries //= 2
            elif gallery > LEAST_ROWS:
                gallery //= 2
            else:
                queries //= 2
        generator = torch.Generator().manual_seed(seed)

        def drawn(entries: DistinctItems, count: int) -> Block:
            chosen = torch.randperm(len(entries), generator=generator)[:count].sort().values.to(entries.index.device)
            return Block(0, entries.index[chosen], entries.classes[chosen], entries.weight[chosen])

        block = drawn(self._distinct_queries, queries)
        thresholds = self._thresholds(replace(block, first=-1))
        return replace(block, counts=Counts.zeros(thresholds, torch.int32)), drawn(self._distinct_items, gallery)

    def positives(
        self, intervals: ScoreIntervals | None = None
    ) -> Iterator[tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]]:
        """The keys of all relevant pairs, and how many pairs each stands for (None: one), in pieces.

        Args:
            intervals: where the keys have to be exact; between these, one may stand for others that lie in the same gap.
        """
        if intervals is not None and self.keys.compiled and self._held is None:
            with self._threads():
                yield from self.keys.near(intervals)
            return
        for batch in self.batches():
            for block in self.query_blocks(batch):
                yield from self.positives_of(block)

    def positives_of(self, block: Block) -> Iterator[tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]]:
        """`block_positives` in pieces, since each key is copied several times on the way."""
        assert block.counts is not None
        rows = max(1, int(self.free_bytes // POSITIVE_BYTES) // (block.counts.thresholds.shape[1] + 1))
        for part in torch.arange(len(block)).split(rows):
            yield block_positives(block, weighted=self.repeats, rows=slice(int(part[0]), int(part[-1]) + 1))

    # ------------------------------------------------------------------------------------------------------- thresholds

    def _thresholds(self, block: Block) -> Float[Tensor, "queries columns"]:
        """The keys that candidates are compared with; a block whose entries do not follow each other begins at -1."""
        if self.best is None:
            return self.keys.of(block.index, block.classes, block.first if block.first >= 0 else None)
        keys, tied = self.best.keys[block.index], self.best.tied[block.index]
        column = torch.arange(int(tied.max()) if len(tied) else 0, device=keys.device)
        return torch.where(column < tied[:, None], keys[:, None], torch.inf)

    # --------------------------------------------------------------------------------------------------------- counting

    def run(self, look: Look | None = None) -> Iterator[RankBlock]:
        """Walk over all pairs once and yield the ranks, some queries at a time."""
        queries, device = len(self.candidates.query_order), self.scores.device
        self._found = BestMatches(
            torch.full((queries,), -torch.inf, dtype=torch.float64, device=device),
            torch.zeros(queries, dtype=torch.int64, device=device),
        )
        with self._threads():
            self._prepare(look)
        for batch in self.batches():
            yield from self._ranks_of(batch, look)

    def _ranks_of(self, batch: range, look: Look | None) -> Iterator[RankBlock]:
        blocks = self.query_blocks(batch)
        if look is not None:
            for block in blocks:
                for keys, weights in self.positives_of(block):
                    look.relevant(keys, weights)
        if look is not None or self._anyone_asks(blocks):
            self._walk(blocks, look, counting=True)
        else:  # no query of this batch has a match, and nobody else looks at its pairs
            self.done(len(batch) * self.pairs // max(1, len(self._distinct_queries)))
        for block in blocks:
            yield from self._rank_blocks(block)

    def _prepare(self, look: Look | None) -> None:
        self.tile_maker.prepare(self, look)

    def _anyone_asks(self, blocks: Sequence[Block]) -> bool:
        return any(block.counts.thresholds.shape[1] for block in blocks if block.counts)

    def rectangles(self, blocks: Sequence[Block], *, counting: bool = True) -> Iterator[ScoreRectangle]:
        """The queries of some blocks with all that they are compared with, one after the other."""
        both = self.both if counting else self.turns
        yield self._at_home(blocks, both=both)

    def _at_home(self, blocks: Sequence[Block], *, both: bool) -> ScoreRectangle:
        columns = blocks if both else self.gallery_blocks()
        numbers = (self.query_numbers, self.gallery_numbers) if self.repeats else None
        return ScoreRectangle(self.scores, self.candidates, blocks, columns, both, numbers)

    def scan(self, look: Look) -> None:
        """Walk over all pairs once more, for a look at the negatives alone."""
        self.pairs_total += self.pairs
        blocks = self._held
        if blocks is None:
            blocks = self._query_blocks(range(len(self._distinct_queries)), self.layout.columns)
        self._walk(blocks, look, counting=False)

    def _walk(self, blocks: Sequence[Block], look: Look | None, *, counting: bool) -> None:
        try:
            with self._threads():
                for rectangle in self.rectangles(blocks, counting=counting):
                    self.tile_maker.walk(self, rectangle, look, counting=counting)
                    del rectangle  # before the next guest comes
        finally:
            self.tile_maker.forget()

    def revisit_tiles(self, asked: bool) -> Iterator[tuple[int, ScoreTiles]]:
        """The scores of each rectangle of `run`, by its place, if any process asks for some."""
        if asked:
            yield 0, self.scores

    def release(self) -> None:
        """Let go of the counters; whoever asks for the positives once more has them made anew."""
        self._held = None

    def _threads(self) -> AbstractContextManager[None]:
        return own_threads() if self.scores.compiled is not None else nullcontext()

    def done(self, pairs: int) -> None:
        """Note pairs of items as done, and tell whoever wants to know."""
        self.pairs_done += pairs
        if self.progress is not None:
            self.progress(min(self.pairs_done, self.pairs_total), self.pairs_total)

    def _rank_blocks(self, block: Block) -> Iterator[RankBlock]:
        assert block.counts is not None
        width = block.counts.thresholds.shape[1]
        fitting = int(self.free_bytes * SHARE_OF_RANKS) // (RANK_BYTES * (width + 1))
        rows = max(least_ranked(width), min(fitting, 2**21 // (width + 1)))
        for start in range(0, len(block), rows):
            part = slice(start, start + rows)
            counts = Counts(*(table[part] for table in (block.counts.thresholds, block.counts.hits, block.counts.ties)))
            batch = _rank_block(block.index[part], counts)
            members, row = self._copies(block.first + start, len(batch.queries))
            if members is not None and row is not None:  # the same ranks for every query that an entry stands for
                batch = RankBlock(members, *(getattr(batch, field.name)[row] for field in fields(batch)[1:]))
            self._note_best(batch, counts.thresholds if row is None else counts.thresholds[row])
            yield batch

    def _copies(self, first: int, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """The queries for which some entries stand, and the place of the entry of each; None where each is its own."""
        entries = self._distinct_queries
        if entries.by_distinct is None or entries.start is None:
            return None, None
        members = entries.by_distinct[entries.start[first] : entries.start[first + rows]]
        return members, torch.arange(rows, device=members.device).repeat_interleave(
            entries.weight[first : first + rows]
        )

    def _note_best(self, batch: RankBlock, keys: Tensor) -> None:
        some = (batch.relevant > 0).nonzero().flatten()
        last = batch.relevant[some, None] - 1
        self._found.keys[batch.queries[some]] = keys[some].gather(1, last).flatten()
        self._found.tied[batch.queries[some]] = batch.relevant_tied[some].gather(1, last).flatten()

    def best_matches(self) -> BestMatches:
        """What `run` found: the highest key that a relevant candidate of each query has."""
        return self._found


@runtime_checkable
class Foretold(Protocol):
    """A `Look` that learns from a sample what to look out for, and can pass that on to other processes."""

    @property
    def expectations(self) -> tuple[Any, ...]:
        """What a sample has foretold."""

    def expecting(self, expectations: tuple[Any, ...]) -> None:
        """Look out for what a sample has foretold to another process."""


@runtime_checkable
class TileMaker(Protocol):
    """What makes the tiles and counts them."""

    def prepare(self, walk: RankingPass, look: Look | None) -> None:
        """Called once, before the first batch."""

    def walk(self, walk: RankingPass, rectangle: ScoreRectangle, look: Look | None, *, counting: bool = True) -> None:
        """Take the queries of a rectangle past its candidates."""

    def forget(self) -> None:
        """All rectangles of these queries are over."""
