"""Choosing the precision of the first products: what is fastest on a sample, on this data and processor."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter

import torch

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.budget import COUNTER_BYTES, LEAST_ROWS, SHARE_OF_BLOCKS, block_bytes
from fewshot_callbacks.engine.cpu.byte_kernels import upper_bounds
from fewshot_callbacks.engine.cpu.counter import Kept, Space, TileCounter
from fewshot_callbacks.engine.cpu.products import ProductSpace, bytes_possible
from fewshot_callbacks.engine.duplicates import DistinctItems
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.pooled.record import PairRecord
from fewshot_callbacks.engine.pooled.recount import Recount
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.thresholds import Thresholds
from fewshot_callbacks.engine.tile_maker import Choice

PILOT_ROWS, PILOT_COLUMNS = 128, 2048
"""The sample: a piece of the matrix of all pairs."""
MANY_PAIRS = 2**25
"""Pairs below which a quarter of that piece has to do."""
EXACT_PRICE = 30.0
"""What the exact score of one pair costs, in float32 products of a pair."""
CLOSE_PRICE = 6.0
"""What its float64 product of float32 operands costs."""
OPEN_SHARE_FOR_FLOAT64 = 0.05
"""Share of open pairs from which float64 products may pay."""
SURVIVING_SHARE = 0.05
"""Share of pairs that a screen lets pass, from which on it does not pay."""
OPEN_SHARE_FOR_CHUNKS = 0.01
"""Share of open pairs from which an estimate with a larger error does not pay."""
PRODUCT_PRICE = {Precision.HALF: 0.45, Precision.FLOAT32: 1.0, Precision.FLOAT64: 2.0}
"""What a product costs, in float32 products."""

_timed: set[tuple[object, ...]] = set()
"""Shapes of the samples that have been timed in this process: the first time may compile, also in the product library."""


class Pilot:
    """Tries a sample of all pairs at several precisions.

    Args:
        matrix: The pairs.
        thresholds: Of the queries.
        pooled: What will be asked of all pairs; takes from the sample from where on negatives will be wanted.
    """

    def __init__(self, matrix: ScoreMatrix, thresholds: Thresholds, pooled: PooledCounts | None) -> None:
        self.matrix, self.thresholds, self.pooled = matrix, thresholds, pooled

    def choose(self) -> Choice:
        """Return the fastest precision, unless the options name one."""
        matrix, scores = self.matrix, self.matrix.scores
        named, pairs = matrix.options.first_precision, matrix.everyone.pairs
        if named == Precision.BYTES and not bytes_possible(scores):
            named = Precision.HALF
        queries, items = matrix.duplicates.queries, matrix.duplicates.items
        nothing_here = not len(queries) * len(items)  # queries in one process, and the gallery in another
        if pairs < matrix.options.pilot_pairs or nothing_here or (named is not None and self.pooled is None):
            return Choice(Precision.FLOAT32 if named is None else named, scores.chunk)
        smaller = 2 if pairs < MANY_PAIRS else 1
        rows, columns = draw_sample(matrix, self.thresholds, PILOT_ROWS // smaller, PILOT_COLUMNS // smaller)
        cost, record = self._try(scores, Precision.FLOAT32, rows, columns)
        if self.pooled is not None:
            self.pooled.expect(record, rows, columns)
        if named == Precision.FLOAT64:
            self._zoom(scores, rows, columns)
        if named is None:
            scores, named = self._fastest(rows, columns, cost, int(record.filled[1]))
        if self.pooled is not None and named == Precision.FLOAT32:
            self.pooled.refine(scores)
        return Choice(named, scores.chunk, None if self.pooled is None else self.pooled.forecast)

    def _fastest(self, rows: Block, columns: Block, cost: float, opened: int) -> tuple[ScoreTiles, Precision]:
        """Return the scores with the better chunks, and the precision that took the least time.

        Args:
            rows: Queries of the sample.
            columns: Its gallery items.
            cost: Seconds that it takes in float32.
            opened: Pairs that float32 leaves open.
        """
        scores, costs, pairs = self.matrix.scores, {Precision.FLOAT32: cost}, len(rows) * len(columns)
        # many small products leave fewer pairs open than one large
        whole = scores.with_chunk(scores.dim + 2)
        exact_bins = self.pooled is not None and self.pooled.forecast.beyond_budget
        few_open = opened <= OPEN_SHARE_FOR_CHUNKS * pairs and not exact_bins
        if few_open and self._try(whole, Precision.FLOAT32, rows, columns)[0] <= cost:
            scores = whole
        if opened > OPEN_SHARE_FOR_FLOAT64 * pairs:
            costs[Precision.FLOAT64], _ = self._try(scores, Precision.FLOAT64, rows, columns)
        else:
            for screen in (Precision.BYTES, Precision.HALF):
                possible = screen == Precision.HALF or bytes_possible(scores)
                if possible and self._surviving(scores, screen, rows, columns) < SURVIVING_SHARE:
                    costs[screen], _ = self._try(scores, screen, rows, columns)
                    if costs[screen] < costs[Precision.FLOAT32]:
                        break
        fastest = min(costs, key=lambda precision: costs[precision])
        if fastest == Precision.FLOAT64:
            self._zoom(scores, rows, columns)
        return scores, fastest

    def _rectangle(self, scores: ScoreTiles, rows: Block, columns: Block) -> ScoreRectangle:
        return replace(self.matrix, scores=scores).rectangle([rows], [columns], symmetric=False)

    def _try(self, scores: ScoreTiles, precision: Precision, rows: Block, columns: Block) -> tuple[float, PairRecord]:
        """Return the seconds that a sample takes at a precision, and what was recorded."""
        assert rows.counts is not None
        shape = (precision, scores.similarity, scores.chunk, len(rows), len(columns), scores.dim)
        for _ in range(1 if shape in _timed else 2):
            empty = replace(rows, counts=Counts.zeros(rows.counts.thresholds, torch.int32))
            rectangle = self._rectangle(scores, empty, columns)
            counter = TileCounter(rectangle, precision, Kept(), self.matrix.options.tile_rows)
            space = Space(PairRecord.nothing() if self.pooled is None else self.pooled.new_record(1))
            for block, of_query in ((empty, True), (columns, False)):
                # not timed: a pass makes the operands of a block once, for hundreds of tiles of this size
                counter.products.operands(block, space.products, of_query=of_query)
            started = time.perf_counter()
            counter.count(empty, columns, False, space)
            seconds = time.perf_counter() - started
        _timed.add(shape)
        directions = 2 if self.matrix.symmetric_ranks else 1
        product = space.products.seconds
        return product + directions * (seconds - product), space.record

    def _zoom(self, scores: ScoreTiles, rows: Block, columns: Block) -> None:
        """Where float64 products are made, let the histogram see as finely as they tell pairs apart."""
        if self.pooled is None:
            return
        assert rows.counts is not None
        estimates, _ = scores.tile(rows.index, columns.index, Precision.FLOAT64)
        relevant = rows.counts.thresholds
        some = torch.cat([estimates[rows.classes[:, None] != columns.classes], relevant[relevant.isfinite()]])
        if len(some):
            self.pooled.zoom(float(some.min()), float(some.max()))
            self.pooled.expect(self._try(scores, Precision.FLOAT64, rows, columns)[1], rows, columns)

    def _surviving(self, scores: ScoreTiles, screen: Precision, rows: Block, columns: Block) -> float:
        """Return the share of a sample that a screen lets pass."""
        counter, space = TileCounter(self._rectangle(scores, rows, columns), screen, Kept(), 0), ProductSpace()
        left, right = (
            counter.products.operands(block, space, of_query=of_query)
            for block, of_query in ((rows, True), (columns, False))
        )
        estimates = counter.products.make(left, right, space)[0]
        if left.bytes is not None and right.bytes is not None:
            estimates = upper_bounds(estimates, left.bytes, right.bytes)
        record = PairRecord.nothing() if self.pooled is None else self.pooled.new_record(1)
        passing = torch.from_numpy(estimates >= counter.lowest(rows, record, of_query=True)[:, None])
        passing &= rows.classes[:, None] != columns.classes
        return float(passing.count_nonzero()) / passing.numel()


def draw_sample(matrix: ScoreMatrix, thresholds: Thresholds, queries: int, gallery: int) -> tuple[Block, Block]:
    """Draw queries with thresholds, and gallery items: at most the requested number, within the budget."""
    relevant = thresholds.most

    def taken() -> float:  # several copies of the thresholds are made on the way
        tiles = block_bytes(queries, matrix.scores.dim, relevant, whole_tiles=False, columns=gallery)
        return tiles + queries * 4 * COUNTER_BYTES * (relevant + 1)

    while taken() > matrix.free_bytes * SHARE_OF_BLOCKS and (queries > LEAST_ROWS // 4 or gallery > LEAST_ROWS):
        # halve the side that takes more memory, as long as it is not at its least
        if queries > LEAST_ROWS // 4 and (queries * (relevant + 1) > gallery or gallery <= LEAST_ROWS):
            queries //= 2
        else:
            gallery //= 2
    generator = torch.Generator().manual_seed(0)

    def drawn(items: DistinctItems, count: int) -> Block:
        chosen = torch.randperm(len(items), generator=generator)[:count].sort().values.to(items.index.device)
        return Block(-1, items.index[chosen], items.classes[chosen], items.weight[chosen])

    block = drawn(matrix.duplicates.queries, queries)
    counts = Counts.zeros(thresholds.of_block(block), torch.int32)
    return replace(block, counts=counts), drawn(matrix.duplicates.items, gallery)


def precision_for_recount(
    rectangle: ScoreRectangle, precision: Precision, named: Precision | None, recount: Recount
) -> Precision:
    """Return what should be fastest for a recount, where the pairs near its thresholds need exact scores.

    Args:
        rectangle: The pairs.
        precision: In which they were counted. If not in half precision, its products are timed where these may pay.
        named: What the options ask for.
        recount: The thresholds.
    """
    if named is not None:
        return max(named, Precision.HALF)

    def near(precision: Precision) -> float:
        return recount.share_near(rectangle.scores.largest_error(precision))

    exact = (Precision.FLOAT32, Precision.FLOAT64)
    fastest, cost = min(
        ((choice, PRODUCT_PRICE[choice] + EXACT_PRICE * near(choice)) for choice in exact), key=itemgetter(1)
    )
    after_half = CLOSE_PRICE * near(Precision.HALF) + EXACT_PRICE * near(Precision.FLOAT64_OF_FLOAT32)
    price = PRODUCT_PRICE[Precision.HALF]
    if after_half + price < cost and precision != Precision.HALF:
        price = half_price(rectangle.scores.dim, rectangle.scores.half) if rectangle.pairs >= MANY_PAIRS else math.inf
    if after_half + price < cost:
        return Precision.HALF
    return fastest


@lru_cache
def half_price(dim: int, half: torch.dtype) -> float:
    """Return what a product in half precision costs here, in float32 products: much where the processor has none."""
    times = []
    for dtype in (half, torch.float32):
        left, right = torch.ones(64, dim, dtype=dtype), torch.ones(1024, dim, dtype=dtype)
        best = math.inf
        for _ in range(3):  # the first one may compile
            started = time.perf_counter()
            torch.mm(left, right.T)
            best = min(best, time.perf_counter() - started)
        times.append(best)
    return times[0] / times[1]
