"""Making and counting tiles on a GPU, as many as fit a list of open pairs at once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle, by_partition
from fewshot_callbacks.engine.budget import SHARE_OF_KEPT
from fewshot_callbacks.engine.cuda.counter import Histogram, PartCounter
from fewshot_callbacks.engine.cuda.sides import Side
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pooled.histogram import Forecast, PooledCounts
from fewshot_callbacks.engine.pooled.recount import Recount
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.pytorch.tiles import TorchTiles
from fewshot_callbacks.engine.thresholds import Thresholds
from fewshot_callbacks.engine.tile_maker import Choice, Done, TileMaker

STRIPE = 16
"""Tiles along the rows that are begun for one column of tiles after the other, so that their operands stay in the cache."""
SAMPLE_ROWS, SAMPLE_COLUMNS = 128, 2048
"""The sample on which the precision is chosen and the kernels are compared with plain PyTorch."""
OPEN_SHARE = 0.03
"""Share of pairs that estimates leave open from which a more exact product of all pairs is cheaper; by calculation, see
benchmarks/README.md."""
PASSING_SHARE = 0.05
"""Share of pairs that reach the lowest threshold of their query, up to which no negative below a floor is recorded, as it
is on the CPU."""


class TritonTiles(TileMaker):
    """See the module. Float64 products, and counts of all pairs at given thresholds, are left to plain PyTorch.

    Args:
        matrix: The pairs.
        kernels: `cuda.count_kernels`.
    """

    def __init__(self, matrix: ScoreMatrix, kernels: ModuleType) -> None:
        self.budget, self.kernels = matrix.budget, kernels
        self.plain = TorchTiles(fixed=matrix.options.first_precision is not None)
        self.tile = max(
            16, min(_largest_tile(matrix.scores.device), 2 ** int(math.log2(max(1, matrix.options.tile_rows))))
        )
        self.trusted: bool | None = None
        """whether the kernels run here and gave the counts of plain PyTorch; None if that has not been tried"""

    def choose(self, matrix: ScoreMatrix, thresholds: Thresholds, pooled: PooledCounts | None) -> Choice:
        """Choose the least exact product that leaves few pairs of a sample open."""
        chosen, forecast = matrix.options.first_precision, None
        if pooled is not None:
            forecast = pooled.forecast._replace(floor=-math.inf)
        if chosen is None and len(matrix.duplicates.queries) * len(matrix.duplicates.items):
            sample = _draw(matrix, thresholds)
            histogram = (
                None if pooled is None else Histogram.empty(pooled.forecast.grid, -math.inf, matrix.scores.device)
            )
            chosen, (still, passing) = Precision.HALF, self._try(sample, Precision.HALF, histogram)
            if still > OPEN_SHARE:
                chosen, (still, _) = Precision.FLOAT32, self._try(sample, Precision.FLOAT32)
                chosen = Precision.FLOAT64 if still > OPEN_SHARE else chosen
            elif self.trusted and passing < PASSING_SHARE and not matrix.candidates.across_classes:
                forecast = _forecast(pooled, sample, histogram)
        return Choice(
            Precision.HALF if chosen is None else max(chosen, Precision.HALF), matrix.scores.dim + 2, forecast
        )

    def count(
        self, rectangle: ScoreRectangle, precision: Precision, pooled: PooledCounts | None, done: Done
    ) -> Precision:
        """Count the candidates of a rectangle for its queries, and all its pairs for `pooled`."""
        if self.trusted is None and rectangle.pairs and precision <= Precision.FLOAT32:
            self._try(_corner(rectangle), precision)
        if precision > Precision.FLOAT32 or not self.trusted:
            return self.plain.count(rectangle, precision, pooled, done)
        histogram = None
        if pooled is not None:
            (grid, floor, *_), error = pooled.forecast, pooled.matrix.scores.largest_error(precision)
            # what is recorded of scores above the floor is complete, wherever their estimates lie
            floor = floor - 2 * (error + 1 / grid.scale) if precision == Precision.HALF else -math.inf
            histogram = Histogram.empty(grid, floor, rectangle.scores.device)
        for rows, columns, both in self._parts(rectangle, precision):
            self._count_part(rectangle, precision, rows, columns, both, histogram, done)
        if pooled is not None and histogram is not None:
            pooled.add(histogram.total(), precision)
        return precision

    def recount(self, rectangle: ScoreRectangle, precision: Precision, recount: Recount, done: Done) -> None:
        """Count all pairs of a rectangle against the thresholds of `recount`, in plain PyTorch."""
        self.plain.recount(rectangle, max(precision, Precision.FLOAT32), recount, done)

    def _count_part(
        self,
        rectangle: ScoreRectangle,
        precision: Precision,
        rows: Side,
        columns: Side,
        both: bool,
        histogram: Histogram | None,
        done: Done,
    ) -> int:
        """Count some rows with some columns, stripe after stripe; return how many float64 products that took."""
        capacity = self.budget.layout.rows * self.budget.layout.columns
        counter = PartCounter(self.kernels, rectangle, precision, rows, columns, self.tile, capacity, histogram)
        square = rows.blocks is columns.blocks
        above, beside = ([0, *side.weight.cumsum(0).tolist()] for side in (rows, columns))
        for start in range(0, len(rows), STRIPE * self.tile):
            stop = min(start + STRIPE * self.tile, len(rows))
            tiles = _tiles(start, stop, start if square else 0, len(columns), self.tile, rows.index.device)
            twice = torch.full_like(tiles[:, 0], int(both))
            if square:  # a tile below the diagonal is counted as the one above it
                tiles = tiles[tiles[:, 0] <= tiles[:, 1]]
                twice = (tiles[:, 0] < tiles[:, 1]).int()
            counter.count(tiles, twice)
            height, after = above[stop] - above[start], beside[-1] - (beside[stop] if square else 0)
            done(height * after * (2 if both else 1) + (height**2 if square else 0))
        return counter.products

    def _parts(self, rectangle: ScoreRectangle, precision: Precision) -> Iterator[tuple[Side, Side, bool]]:
        """Yield rows and columns whose operands fit the budget, and whether both are counted.

        Rows and columns that are the same blocks are to be counted as a square.
        """
        one_operand = rectangle.scores.similarity != "euclidean"
        most = int(self.budget.free_bytes * SHARE_OF_KEPT / 2 / (8 * rectangle.scores.dim + 100))
        for some, others in by_partition(rectangle.rows, rectangle.columns):
            groups, other_groups = _grouped(some, most), _grouped(others, most)
            for number, group in enumerate(groups):
                rows = Side.of(rectangle, group, precision, of_query=True)
                if rectangle.is_square:
                    columns = rows if one_operand else Side.of(rectangle, group, precision, of_query=False)
                    yield rows, columns, True
                for other in other_groups[number + 1 :] if rectangle.is_square else other_groups:
                    yield rows, Side.of(rectangle, other, precision, of_query=False), rectangle.symmetric

    def _try(
        self, sample: ScoreRectangle, precision: Precision, histogram: Histogram | None = None
    ) -> tuple[float, float]:
        """Count a sample, and stop trusting kernels that do not count as plain PyTorch does.

        Returns:
            Which share of the pairs estimates leave open, and which reaches the lowest threshold of the query.
        """
        (rows,), (columns,) = sample.rows, sample.columns
        assert rows.counts is not None
        ours, theirs = (replace(rows, counts=Counts.zeros(rows.counts.thresholds, torch.int32)) for _ in range(2))
        problem, products = "", 0
        try:
            side, other = (
                Side.of(sample, [block], precision, of_query=of_query)
                for block, of_query in ((ours, True), (columns, False))
            )
            products = self._count_part(sample, precision, side, other, False, histogram, lambda _: None)
        except Exception as error:  # what a new GPU, driver or version of Triton does is not known
            problem = f"{type(error).__name__}: {error}"
        self.plain.count(replace(sample, rows=[theirs]), Precision.FLOAT32, None, lambda _: None)
        found, expected = ([c.better(), c.better_or_tied()] for c in (ours.counts, theirs.counts) if c is not None)
        if not problem and not all(map(torch.equal, found, expected)):
            problem = "they do not count as PyTorch does"
        if problem and self.trusted is not False:
            warnings.warn(
                f"The counting kernels for CUDA are not used: on a sample, {problem}. Evaluation falls back to "
                "plain PyTorch, with the same results and more slowly. Please report it with the version of triton.",
                stacklevel=2,
            )
        self.trusted = self.trusted is not False and not problem
        pairs = len(rows) * len(columns)
        return products / pairs, float(expected[1][:, :1].sum()) / pairs


def _largest_tile(device: torch.device) -> int:
    """Return how many rows and columns a tile may have: 128 of each take 128 KB of shared memory, 64 take half of that."""
    if device.type != "cuda":
        return 128
    properties: Any = torch.cuda.get_device_properties(device)  # some releases' type stubs lack the field
    return 128 if properties.shared_memory_per_block_optin > 2**17 else 64


def _draw(matrix: ScoreMatrix, thresholds: Thresholds) -> ScoreRectangle:
    """Draw queries, with thresholds, and gallery items."""
    generator, blocks = torch.Generator().manual_seed(0), []
    for items, most in ((matrix.duplicates.queries, SAMPLE_ROWS), (matrix.duplicates.items, SAMPLE_COLUMNS)):
        chosen = torch.randperm(len(items), generator=generator)[:most].sort().values.to(items.index.device)
        blocks.append(Block(-1, items.index[chosen], items.classes[chosen], items.weight[chosen]))
    rows, columns = blocks
    rows = replace(rows, counts=Counts.zeros(thresholds.of_block(rows), torch.int32))
    scores = matrix.scores.with_chunk(matrix.scores.dim + 2)
    return replace(matrix, scores=scores).rectangle([rows], [columns], symmetric=False)


def _corner(rectangle: ScoreRectangle) -> ScoreRectangle:
    """Return a piece of a rectangle as a sample."""
    rows, columns = next(by_partition(rectangle.rows, rectangle.columns))
    row, column = (
        replace(block, first=-1, index=block.index[:most], classes=block.classes[:most], weight=block.weight[:most])
        for block, most in ((rows[-1], SAMPLE_ROWS), (columns[0], SAMPLE_COLUMNS))
    )
    counts = rows[-1].counts
    assert counts is not None
    row = replace(row, counts=Counts.zeros(counts.thresholds[:SAMPLE_ROWS], torch.int32))
    return replace(rectangle, rows=[row], columns=[replace(column, counts=None)], symmetric=False)


def _forecast(pooled: PooledCounts | None, sample: ScoreRectangle, histogram: Histogram | None) -> Forecast | None:
    """Return from which score on the pool has to record negatives, as a sample foretells it."""
    if pooled is None or histogram is None:
        return None
    record = pooled.new_record(1)
    record.histogram[:] = histogram.total().cpu().numpy()
    pooled.expect(record, sample.rows[0], sample.columns[0])
    return pooled.forecast


def _grouped(blocks: Sequence[Block], most: int) -> list[list[Block]]:
    """Return runs of blocks with at most so many items, or of one block."""
    groups: list[list[Block]] = []
    room = 0
    for block in blocks:
        if len(block) > room or not groups:
            groups.append([])
            room = most
        groups[-1].append(block)
        room -= len(block)
    return groups


def _tiles(
    start: int, stop: int, column_start: int, column_stop: int, size: int, device: torch.device
) -> Int[Tensor, "tiles two"]:
    """Return the tiles of some rows and columns in units of their size, column after column."""
    rows, columns = (
        torch.arange(low // size, -(-high // size), dtype=torch.int32, device=device)
        for low, high in ((start, stop), (column_start, column_stop))
    )
    return torch.cartesian_prod(columns, rows).flip(1).contiguous()
