"""The pass: for each relevant item of each query, how many candidates come before it, in bounded memory.

A rank is a count, so nothing is sorted and no row of scores is kept. The exact scores of a query's relevant items are its
thresholds; tiles of estimates stream past and are compared with them. Where an estimate lies closer to a threshold than its
proved error, a more exact score decides (see `scores`). The counts therefore depend on the vectors alone: not on the size
of the tiles, the threads, the device, the number of processes or the order of the data.

With one set the score of a pair serves both its items, so that each tile is made once for two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.budget import (
    COUNTER_BYTES,
    LEAST_ROWS,
    RANK_BYTES,
    SHARE_OF_BLOCKS,
    SHARE_OF_RANKS,
    block_bytes,
    least_ranked,
)
from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.duplicates import DistinctItems
from fewshot_callbacks.engine.exchange import Exchange
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.options import Progress
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.pooled.intervals import ScoreIntervals
from fewshot_callbacks.engine.pooled.recount import Recount
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.ranks import BestMatches, RankBlock, ranks_from_counters
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.thresholds import Thresholds
from fewshot_callbacks.engine.tile_maker import TileMaker


class RankingPass:
    """Ranks the relevant items of every query in one pass over all query-gallery pairs; every call is collective.

    Args:
        matrix: the pairs.
        tile_maker: makes and counts the tiles.
        best: if given, only each query's best match is ranked; these are their known scores.
        precision: of the first products; by default the fastest on a sample.
        progress: called now and then with the pairs that are done and the pairs that there are.
    """

    def __init__(
        self,
        matrix: ScoreMatrix,
        tile_maker: TileMaker,
        best: BestMatches | None = None,
        precision: Precision | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.matrix, self.tile_maker, self.precision = matrix, tile_maker, precision
        self.exchange = Exchange(matrix)
        self.thresholds = Thresholds(matrix, self.exchange, best)
        self._done = _PairProgress(matrix.everyone.pairs, matrix.processes.count, progress)
        self._held: list[Block] | None = None
        self._best = _BestMatchesFound(len(matrix.candidates.query_order), matrix.scores.device)

    @property
    def scores(self) -> ScoreTiles:
        """The scores of the vectors that this process holds."""
        return self.matrix.scores

    @property
    def candidates(self) -> Candidates:
        """Who may be retrieved, of what this process holds."""
        return self.matrix.candidates

    @property
    def memory_bytes(self) -> int:
        """The budget that is kept to: what was granted, or the least possible."""
        return self.matrix.budget.memory_bytes

    @property
    def distinct_rows(self) -> int:
        """Different rows of the gallery; 1 if all are equal, else at most this many."""
        return self.matrix.duplicates.distinct_rows

    # --------------------------------------------------------------------------------------------------------- counting

    def run(self, pooled: PooledCounts | None = None) -> Iterator[RankBlock]:
        """Pass over all pairs once and yield the ranks, some queries at a time.

        Args:
            pooled: sees all pairs, regardless of the query.
        """
        self._choose(pooled)
        for batch in self._batches():
            yield from self._ranks_of(batch, pooled)

    def scan(self, recount: Recount) -> None:
        """Pass over all pairs once more, for an observer of the negatives alone; no ranks are counted."""
        self._done.extend(self.matrix.everyone.pairs)
        blocks = self._held
        if blocks is None:
            everything = range(len(self.matrix.duplicates.queries))
            blocks = self._cut_queries(everything, self.matrix.budget.layout.columns)

        def visit(rectangle: ScoreRectangle) -> None:
            assert self.precision is not None
            self.tile_maker.recount(rectangle, self.precision, recount, self._done.add)

        self._visit_rectangles(blocks, visit, counting=False)

    def revisit_tiles(self, asked: bool) -> Iterator[tuple[int, ScoreTiles]]:
        """Yield the scores of each rectangle of `run`, with its position, if any process asks for some."""
        if self.matrix.processes.largest([float(asked)])[0]:
            yield 0, self.matrix.scores
            yield from self.exchange.revisit()

    def relevant_scores(
        self, intervals: ScoreIntervals
    ) -> Iterator[tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]]:
        """Yield the exact scores of the relevant pairs of this process's queries, in chunks.

        Args:
            intervals: inside which all are needed; between these, one may stand for others that lie in the same gap.

        Yields:
            Scores, and how many pairs each stands for (None: one).
        """
        if self.thresholds.local.compiled and self._held is None:
            yield from self.thresholds.within(intervals)
            return
        for batch in self._batches():
            for block in self._query_blocks(batch):
                yield from self._scores_of(block)

    def best_matches(self) -> BestMatches:
        """Return what `run` found: the highest exact score of a relevant candidate of each query."""
        return self._best.found

    def release(self) -> None:
        """Release the counters; relevant scores that are asked for later are made anew."""
        self._held = None

    # ------------------------------------------------------------------------------------------------------ first choice

    def _choose(self, pooled: PooledCounts | None) -> None:
        """Let the process with most pairs choose the first precision for all."""
        sizes, processes = self.matrix.duplicates.sizes, self.matrix.processes
        busiest = max(range(len(sizes)), key=lambda rank: math.prod(sizes[rank]))
        if self.precision is None:
            own = self.tile_maker.choose(self.matrix, self._sample, pooled) if processes.rank == busiest else None
            choice = processes.gather(own)[busiest]
            assert choice is not None
            self.precision = choice.precision
            self.matrix = replace(self.matrix, scores=self.matrix.scores.with_chunk(choice.chunk))
            forecast = choice.forecast
        else:
            forecast = None
        if pooled is not None:
            pooled.begin(self.matrix.scores, self.precision, forecast)

    def _sample(self, queries: int, gallery: int, seed: int = 0) -> tuple[Block, Block]:
        """Draw queries with thresholds, and gallery items: no more than fit the budget."""
        relevant, matrix = self.thresholds.most, self.matrix

        def taken() -> float:  # several copies of the thresholds are made on the way
            tiles = block_bytes(queries, matrix.scores.dim, relevant, whole_tiles=False, columns=gallery)
            return tiles + queries * 4 * COUNTER_BYTES * (relevant + 1)

        while taken() > matrix.free_bytes * SHARE_OF_BLOCKS and (queries > LEAST_ROWS // 4 or gallery > LEAST_ROWS):
            if queries > LEAST_ROWS // 4 and queries * (relevant + 1) > gallery:
                queries //= 2
            elif gallery > LEAST_ROWS:
                gallery //= 2
            else:
                queries //= 2
        generator = torch.Generator().manual_seed(seed)

        def drawn(items: DistinctItems, count: int) -> Block:
            chosen = torch.randperm(len(items), generator=generator)[:count].sort().values.to(items.index.device)
            return Block(-1, items.index[chosen], items.classes[chosen], items.weight[chosen])

        block = drawn(matrix.duplicates.queries, queries)
        counts = Counts.zeros(self.thresholds.of_block(block), torch.int32)
        return replace(block, counts=counts), drawn(matrix.duplicates.items, gallery)

    # ------------------------------------------------------------------------------------------------------------ blocks

    def _batches(self) -> Iterator[range]:
        """Yield runs of queries whose counters are held at once; as many in each process, the last ones perhaps empty."""
        layout, queries = self.matrix.budget.layout, len(self.matrix.duplicates.queries)
        batches, start = [], 0
        while start < queries:
            # classes are ordered by size: the last query of a batch has the most relevant items
            stop = min(start + layout.batch, queries)
            while stop - start > (fitting := self._queries_that_fit(stop - 1)):
                stop = start + max(fitting, (stop - start) // 2)
            if self.matrix.symmetric_ranks:
                stop = queries
            batches.append(range(start, stop))
            start = stop
        rounds = int(self.matrix.processes.largest([len(batches)])[0])
        yield from [*batches, *[range(0)] * (rounds - len(batches))]

    def _queries_that_fit(self, position: int) -> int:
        in_class = self.matrix.everyone.gallery_start.diff()
        relevant = int(in_class[self.matrix.duplicates.queries.classes[position]])
        return self.matrix.budget.layout_for(relevant).batch

    def _query_blocks(self, batch: range) -> list[Block]:
        """Return the blocks of a batch of queries, with thresholds and empty counters."""
        if self._held is not None:
            return self._held
        size, threads = self.matrix.budget.layout.rows, self.matrix.threads
        if not self.matrix.symmetric_ranks:  # at least one block for each thread
            rounds = max(1, math.ceil(len(batch) / size / threads))
            size = max(16, math.ceil(len(batch) / rounds / threads))
        bare = self._cut_queries(batch, size)
        blocks = [
            replace(block, counts=Counts.zeros(scores, torch.int32))
            for block, scores in zip(bare, self.thresholds.of_blocks(bare), strict=True)
        ]
        if self.matrix.symmetric_ranks:
            self._held = blocks
        return blocks

    def _cut_queries(self, entries: range, size: int) -> list[Block]:
        matrix = self.matrix
        borders = [matrix.half] if matrix.symmetric and matrix.processes.count > 1 else []
        return matrix.duplicates.queries.blocks(entries, size, matrix.candidates.part, borders)

    def _ranks_of(self, batch: range, pooled: PooledCounts | None) -> Iterator[RankBlock]:
        blocks = self._query_blocks(batch)
        if pooled is not None:
            for block in blocks:
                for scores, weights in self._scores_of(block):
                    pooled.relevant(scores, weights)
        asks = float(any(block.asks for block in blocks))
        if pooled is not None or self.matrix.processes.largest([asks])[0]:

            def visit(rectangle: ScoreRectangle) -> None:
                assert self.precision is not None
                self.precision = self.tile_maker.count(rectangle, self.precision, pooled, self._done.add)

            self._visit_rectangles(blocks, visit, counting=True)
        else:  # no query of this batch has a match, and nothing else is asked of its pairs
            pairs = self.matrix.everyone.pairs
            self._done.add(len(batch) * pairs // max(1, len(self.matrix.duplicates.queries)))
        for block in blocks:
            yield from self._rank_blocks(block)

    def _visit_rectangles(
        self, blocks: Sequence[Block], visit: Callable[[ScoreRectangle], None], *, counting: bool
    ) -> None:
        """Meet the local gallery, then the chunks of the other processes."""
        matrix = self.matrix
        symmetric = matrix.symmetric_ranks if counting else matrix.symmetric
        columns = blocks
        if not symmetric:
            items = matrix.duplicates.items
            columns = items.blocks(range(len(items)), matrix.budget.layout.columns, matrix.candidates.part)
        numbers = matrix.duplicates.numbers
        try:
            local = matrix.scores, matrix.candidates, blocks, columns, symmetric, matrix.repeats, numbers
            visit(ScoreRectangle(*local))
            for rectangle in self.exchange.rectangles(blocks, counting=counting):
                visit(rectangle)
                del rectangle  # free the visiting vectors before the next exchange, to keep the memory bound
        finally:
            self.tile_maker.forget()

    def _scores_of(self, block: Block) -> Iterator[tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]]:
        return block.relevant_score_chunks(self.matrix.free_bytes, weighted=self.matrix.repeats)

    # ------------------------------------------------------------------------------------------------------------- ranks

    def _rank_blocks(self, block: Block) -> Iterator[RankBlock]:
        assert block.counts is not None
        width = block.counts.thresholds.shape[1]
        fitting = int(self.matrix.free_bytes * SHARE_OF_RANKS) // (RANK_BYTES * (width + 1))
        rows = max(least_ranked(width), min(fitting, 2**21 // (width + 1)))
        for start in range(0, len(block), rows):
            some = slice(start, start + rows)
            counts = Counts(*(table[some] for table in (block.counts.thresholds, block.counts.hits, block.counts.ties)))
            ranks = ranks_from_counters(block.index[some], counts)
            scores = counts.thresholds
            members, row = self.matrix.duplicates.queries.copies(block.first + start, len(ranks.queries))
            if members is not None and row is not None:  # the same ranks for every query that an entry stands for
                ranks = RankBlock(members, *(getattr(ranks, field.name)[row] for field in fields(ranks)[1:]))
                scores = scores[row]
            self._best.note(ranks, scores)
            yield ranks


class _BestMatchesFound:
    """Notes the best match of each query as its ranks are made."""

    def __init__(self, queries: int, device: torch.device) -> None:
        self.found = BestMatches(
            torch.full((queries,), -torch.inf, dtype=torch.float64, device=device),
            torch.zeros(queries, dtype=torch.int64, device=device),
        )

    def note(self, ranks: RankBlock, scores: Float[Tensor, "queries columns"]) -> None:
        """Take the last of the ascending relevant scores of each query."""
        some = (ranks.relevant > 0).nonzero().flatten()
        last = ranks.relevant[some, None] - 1
        self.found.keys[ranks.queries[some]] = scores[some].gather(1, last).flatten()
        self.found.tied[ranks.queries[some]] = ranks.relevant_tied[some].gather(1, last).flatten()


class _PairProgress:
    """Counts the pairs that are done; every process is assumed to be as far as this one."""

    def __init__(self, pairs: int, processes: int, report: Progress | None) -> None:
        self.done, self.total, self.processes, self.report = 0, pairs, processes, report

    def extend(self, pairs: int) -> None:
        """Expect more pairs."""
        self.total += pairs

    def add(self, pairs: int) -> None:
        """Note pairs as done."""
        self.done += pairs * self.processes
        if self.report is not None:
            self.report(min(self.done, self.total), self.total)
