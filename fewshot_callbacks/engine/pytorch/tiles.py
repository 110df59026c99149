"""Making and counting tiles in plain PyTorch, on any device."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle, by_partition, pairs_of
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.pooled.recount import Recount
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.count import Counts, count_pairs, count_tile
from fewshot_callbacks.engine.pytorch.tile import Tile
from fewshot_callbacks.engine.thresholds import Thresholds
from fewshot_callbacks.engine.tile_maker import Choice, Done, TileMaker

OPEN_SHARE_FOR_FLOAT64 = 0.002
"""Share of a tile's pairs from which a float64 product of the whole tile is cheaper than exact scores one by one."""
OPEN_SHARE_FOR_NEXT = 0.5
"""Share of open pairs from which the next tile begins one step more exact, since it is likely to be as close."""


class TorchTiles(TileMaker):
    """See the module.

    Args:
        fixed: Always keep the first precision.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        self.fixed = fixed

    def choose(self, matrix: ScoreMatrix, thresholds: Thresholds, pooled: PooledCounts | None) -> Choice:
        """Begin in half precision on a GPU, else in float32."""
        del thresholds
        # the histogram holds all pairs: there is no floor
        forecast = None if pooled is None else pooled.forecast._replace(floor=-math.inf)
        default = Precision.HALF if matrix.scores.device.type == "cuda" else Precision.FLOAT32
        first = matrix.options.first_precision
        return Choice(default if first is None else max(first, Precision.HALF), matrix.scores.chunk, forecast)

    def count(
        self, rectangle: ScoreRectangle, precision: Precision, pooled: PooledCounts | None, done: Done
    ) -> Precision:
        """Count the candidates of a rectangle for its queries, and all its pairs for `pooled`."""
        precision = max(precision, Precision.HALF)  # another process may have chosen bytes
        for rows, columns in _pairs_of_blocks(rectangle):
            tile = Tile.make(rectangle, rows, columns, precision)
            if pooled is not None:
                pooled.tile(tile)
            if _count(tile) > OPEN_SHARE_FOR_NEXT and not rectangle.repeats and not self.fixed:
                precision = Precision(min(precision + 1, Precision.EXACT))
            done((2 if tile.both else 1) * pairs_of(rows, columns))
        return precision

    def recount(self, rectangle: ScoreRectangle, precision: Precision, recount: Recount, done: Done) -> None:
        """Count all pairs of a rectangle against the thresholds of `recount`."""
        precision = max(precision, Precision.HALF)
        for rows, columns in _pairs_of_blocks(rectangle):
            tile = Tile.make(rectangle, rows, columns, precision)
            recount.tile(tile)
            done((2 if tile.both else 1) * pairs_of(rows, columns))


def _pairs_of_blocks(rectangle: ScoreRectangle) -> Iterator[tuple[Block, Block]]:
    for some, others in by_partition(rectangle.rows, rectangle.columns):
        for rows in some:
            for columns in others:
                if not (rectangle.is_square and columns.first < rows.first):
                    yield rows, columns


def _count(tile: Tile) -> float:
    """Count a tile for its rows, and for its columns if both ask; return the largest share that stayed open."""
    repeats, rows, columns = tile.rectangle.repeats, tile.rows, tile.columns
    open_share = 0.0
    if rows.counts is not None and rows.asks:
        weights = columns.weight if repeats else None
        open_share = _count_side(tile, rows.counts, tile.estimates, tile.error, weights)
    if tile.both and columns.counts is not None and columns.asks:
        turned, weights = tile.estimates.T.contiguous(), rows.weight if repeats else None
        share = _count_side(tile, columns.counts, turned, tile.column_error, weights, turned=True)
        open_share = max(open_share, share)
    return open_share


def _count_side(
    tile: Tile, counts: Counts, estimates: Tensor, error: Tensor, weights: Tensor | None, *, turned: bool = False
) -> float:
    """Count the candidates of a tile for the queries along one side; return the share that its estimates left open."""
    scores = tile.rectangle.scores
    rows, columns = count_tile(counts, estimates, error, weights)
    open_share = len(rows) / estimates.numel()
    for precision in (Precision.FLOAT32, Precision.FLOAT64):
        if tile.precision < precision and len(rows) > OPEN_SHARE_FOR_FLOAT64 * estimates.numel():
            closer, error = scores.tile(tile.rows.index, tile.columns.index, precision)
            if turned:
                closer, error = closer.T, scores.error(tile.columns.index, precision, of_query=False)
            of_pairs = None if weights is None else weights[columns]
            still = count_pairs(counts, rows, closer[rows, columns], error, of_pairs)
            rows, columns = rows[still], columns[still]
    if len(rows):
        pair = (columns, rows) if turned else (rows, columns)
        counts.add_scores(rows, tile.exact_scores(*pair), None if weights is None else weights[columns])
    return open_share
