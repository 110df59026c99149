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
from dataclasses import replace

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.exchange import Exchange
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.options import Progress
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.pooled.recount import Recount
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.ranks import BestMatches, RankBlock, rank_blocks
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.thresholds import Thresholds
from fewshot_callbacks.engine.tile_maker import TileMaker


class RankingPass:
    """Ranks the relevant items of every query in one pass over all query-gallery pairs; every call is collective.

    Args:
        matrix: The pairs.
        tile_maker: Makes and counts the tiles.
        best: If given, only each query's best match is ranked; these are their known scores.
        precision: Of the first products; by default the fastest on a sample.
        progress: Called now and then with the pairs that are done and the pairs that there are.
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
        self._best = BestMatches.unknown(len(matrix.candidates.query_order), matrix.scores.device)

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

    def run(self, pooled: PooledCounts | None = None) -> Iterator[RankBlock]:
        """Pass over all pairs once and yield the ranks, some queries at a time.

        Args:
            pooled: Sees all pairs, regardless of the query.
        """
        self._choose(pooled)
        batches = [*self.matrix.batches()]
        for batch in batches:  # the thresholds of a single one fit the budget, and are asked for again
            yield from self._ranks_of(batch, pooled, hold=len(batches) == 1 and pooled is not None)

    def scan(self, recount: Recount) -> None:
        """Pass over all pairs once more, for an observer of the negatives alone; no ranks are counted."""
        self._done.begin_another()
        held = self.thresholds.held if self.matrix.symmetric_ranks else None
        blocks = held or self.matrix.query_blocks()

        def visit(rectangle: ScoreRectangle) -> None:
            assert self.precision is not None
            self.tile_maker.recount(rectangle, self.precision, recount, self._done.add)

        self._visit_rectangles(blocks, visit, counting=False)

    def revisit_tiles(self, asked: bool) -> Iterator[tuple[int, ScoreTiles]]:
        """Yield the scores of each rectangle of `run`, with its position, if any process asks for some."""
        if self.matrix.processes.largest([float(asked)])[0]:
            yield 0, self.matrix.scores
            yield from self.exchange.revisit()

    def best_matches(self) -> BestMatches:
        """Return what `run` found: the highest exact score of a relevant candidate of each query."""
        return self._best

    def release(self) -> None:
        """Release the counters; relevant scores that are needed later are computed again."""
        self.thresholds.release()
        self._done.finish()

    def expect_scans(self) -> None:
        """Leave a part of the progress for `scan`; `release` reports the end. Call it before `run`."""
        self._done.begin_another()

    def _choose(self, pooled: PooledCounts | None) -> None:
        """Let the process with most pairs choose the first precision for all."""
        forecast, processes = None, self.matrix.processes
        if self.precision is None:
            pairs = [math.prod(sizes) for sizes in self.matrix.duplicates.sizes]
            busiest = pairs.index(max(pairs))
            chosen = None
            if processes.rank == busiest:
                chosen = self.tile_maker.choose(self.matrix, self.thresholds, pooled)
            chosen = processes.gather(chosen)[busiest]
            assert chosen is not None
            self.precision, chunk, forecast = chosen
            self.matrix = replace(self.matrix, scores=self.matrix.scores.with_chunk(chunk))
        if pooled is not None:
            pooled.begin(self.matrix.scores, self.precision, forecast)

    def _ranks_of(self, batch: range, pooled: PooledCounts | None, *, hold: bool) -> Iterator[RankBlock]:
        blocks, matrix = self.thresholds.query_blocks(batch, hold=hold), self.matrix
        if pooled is not None:
            for block in blocks:
                for scores, weights in block.relevant_score_chunks(matrix.free_bytes, weighted=matrix.repeats):
                    pooled.relevant(scores, weights)
        asks = float(any(block.asks for block in blocks))
        if pooled is not None or matrix.processes.largest([asks])[0]:

            def visit(rectangle: ScoreRectangle) -> None:
                assert self.precision is not None
                self.precision = self.tile_maker.count(rectangle, self.precision, pooled, self._done.add)

            self._visit_rectangles(blocks, visit, counting=True)
        else:  # no query of this batch has a match, and nothing else is computed from its pairs
            self._done.add(len(batch) * matrix.everyone.pairs // max(1, len(matrix.duplicates.queries)))
        for block in blocks:
            for ranks, relevant_scores in rank_blocks(block, matrix):
                self._best.note(ranks, relevant_scores)
                yield ranks

    def _visit_rectangles(
        self, blocks: Sequence[Block], visit: Callable[[ScoreRectangle], None], *, counting: bool
    ) -> None:
        """Meet the local gallery, then the chunks of the other processes."""
        matrix = self.matrix
        symmetric = matrix.symmetric_ranks if counting else matrix.symmetric
        columns = blocks if symmetric else matrix.item_blocks()
        try:
            visit(matrix.rectangle(blocks, columns, symmetric=symmetric))
            for rectangle in self.exchange.rectangles(blocks, counting=counting):
                visit(rectangle)
                del rectangle  # free the visiting vectors before the next exchange, to keep the memory bound
        finally:
            self.tile_maker.forget()


class _PairProgress:
    """Counts the pairs that are done; every process is assumed to be as far as this one.

    How many passes there will be is not known before they are over. What is reported never goes back: a pass that others
    may follow takes nine tenths of the way to the end.
    """

    def __init__(self, pairs: int, processes: int, report: Progress | None) -> None:
        self.pairs, self.processes, self.report = pairs, processes, report
        self.done, self._start, self._end = 0, 0, pairs

    def begin_another(self) -> None:
        """Begin a pass over all pairs that others may follow."""
        self._start = self._reached
        self._end, self.done = self.pairs - (self.pairs - self._start) // 10, 0

    @property
    def _reached(self) -> int:
        return self._start + min(self.done, self.pairs) * (self._end - self._start) // max(1, self.pairs)

    def add(self, pairs: int) -> None:
        """Note pairs as done."""
        self.done += pairs * self.processes
        if self.report is not None:
            self.report(self._reached, self.pairs)

    def finish(self) -> None:
        """Report that no pass follows, if that was not certain."""
        if self.report is not None and self._reached < self.pairs:
            self._start = self._end = self.pairs
            self.report(self.pairs, self.pairs)
