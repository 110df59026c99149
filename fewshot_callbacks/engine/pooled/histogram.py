"""A histogram of the scores of all pairs, regardless of the query, and the negatives with the highest estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, pairs_of
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pooled.bins import ScoreGrid
from fewshot_callbacks.engine.pooled.bounds import CountBounds
from fewshot_callbacks.engine.pooled.highest import TopNegatives
from fewshot_callbacks.engine.pooled.intervals import Floats, Ints, from_above, histogram
from fewshot_callbacks.engine.pooled.record import PairRecord
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.tile import Tile
from fewshot_callbacks.engine.scores.products import ScoreTiles

Wanted = Callable[[Floats, Floats, float], list[float]]
"""Given counts of relevant pairs and of negatives at and above ascending scores, and the number of negatives: how many of
the highest negatives will have to be known, for each requested operating point."""

BIN_BYTES = 160
"""What a bin of the histogram takes while the operating points are found: three counters, and all that is known of it."""
SHARE_OF_BINS = 0.25
"""Share of the budget for these."""
SHARE_OF_HIGHEST = 0.1
"""Share of the budget for the estimates of the highest negatives."""
SCREENED_SHARE = 0.001
"""Upper bound on the share of pairs that a screen recomputes for the histogram."""
SLACK = 1.5
"""A sample may be off by this factor in how many negatives will be wanted."""
FINER = 4
"""So many times finer are bins that stand in for negatives that cannot be collected."""
SPARE = 0.25
"""So much of the range of a sample they reach beyond it at either end."""
FEW_COUNTS = 30
"""Fewer pairs of a sample than these tell nothing."""


class Forecast(NamedTuple):
    """The bins, and what a sample of the pairs tells of the negatives that will be wanted, in scores."""

    grid: ScoreGrid
    floor: float = math.inf
    """a screen records no negative below this score"""
    cut: float = math.inf
    """negatives from here on are collected"""
    sampled: Ints | None = None
    """negatives of the sample, by their bins"""
    beyond_budget: bool = False
    """more negatives will be wanted than can be collected: finer bins tell most of what these would"""


class PooledCounts:
    """Observes a pass: a histogram of all pairs, and the negatives with the highest estimates.

    A negative's score lies in the bin of its estimate or in one beside it: a bin is at least twice as wide as the error.

    Args:
        matrix: The pairs.
        wanted: How many of the highest negatives will have to be known.
        thresholds: Scores at which the pairs will have to be counted.
        capacity: How many pairs may be held; by default as many as the budget allows.
    """

    def __init__(
        self,
        matrix: ScoreMatrix,
        wanted: Wanted = lambda *_: [],
        thresholds: Sequence[float] = (),
        capacity: int | None = None,
    ) -> None:
        self.matrix = matrix
        self.capacity = max(1000, int(matrix.free_bytes * SHARE_OF_HIGHEST / 8)) if capacity is None else capacity
        self._wanted, self._thresholds = wanted, thresholds
        error = matrix.scores.largest_error(Precision.FLOAT32)
        self._set_forecast(Forecast(self._grid(*matrix.scores.score_range, error)))
        self.highest = TopNegatives(matrix.repeats, symmetric=matrix.symmetric_ranks)
        self._precision: Precision | None = None
        self._coarsest = Precision.FLOAT32

    def begin(self, scores: ScoreTiles, precision: Precision, forecast: Forecast | None) -> None:
        """Prepare for a pass: its scores, their first precision and the estimates from a sample."""
        self.matrix, self._precision = replace(self.matrix, scores=scores), precision
        if forecast is not None:
            self._set_forecast(forecast)

    def _grid(self, low: float, high: float, error: float, finer: int = 1) -> ScoreGrid:
        most = min(finer * self.matrix.options.bins, int(self.matrix.free_bytes * SHARE_OF_BINS / BIN_BYTES))
        return ScoreGrid.of_range(low, high, error, most, 2.5 / finer)

    def _set_forecast(self, forecast: Forecast) -> None:
        self.forecast = forecast
        self.positives, self.negatives = np.zeros((2, forecast.grid.bins), np.int64)

    def zoom(self, low: float, high: float) -> None:
        """Lay finer bins in this range of scores, estimated from a sample of which float64 products will be made."""
        scores = self.matrix.scores
        least, most = scores.score_range
        spare = 0.05 * (high - low)
        grid = self._grid(max(least, low - spare), min(most, high + spare), scores.largest_error(Precision.FLOAT64))
        self._set_forecast(self.forecast._replace(grid=grid))

    def refine(self, scores: ScoreTiles) -> None:
        """Lay finer bins for these float32 products where negatives that cannot be collected will be wanted."""
        grid, sampled = self.forecast.grid, self.forecast.sampled
        if sampled is None or not self.forecast.beyond_budget:
            return
        used = np.flatnonzero(sampled)
        low, high = grid.edge(int(used[0])), grid.edge(int(used[-1]) + 1)
        spare = SPARE * (high - low)  # what lies beyond comes into the outer bins
        least, most = scores.score_range
        low = least if self.matrix.candidates.across_classes else max(least, low - spare)
        error = max(scores.largest_error(Precision.FLOAT32), 2**-17 * max(abs(least), abs(most)))
        # rounding takes 2**-24 of the score in the origin, 0.011 widths, and four times 2**-24 of 2**17 widths in the bin
        fine = self._grid(low, min(most, high + spare), error, FINER)._replace(blur=0.05)
        self._set_forecast(self.forecast._replace(grid=fine, sampled=None))

    def relevant(self, scores: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None) -> None:
        """Count the scores of relevant pairs."""
        grid, amount = self.forecast.grid, None if weights is None else weights.cpu().numpy()
        self.positives += histogram(grid.bin_of(scores.cpu().numpy()), amount, grid.bins)

    def tile(self, tile: Tile) -> None:
        """Count the estimates of a tile of negatives, made in PyTorch."""
        grid = self.forecast.grid
        position = ((tile.estimates - grid.origin) * grid.scale).float().clamp_(-1, grid.bins - 2) + 1
        # the first bin is for what is no candidate; a coarse estimate of the lowest scores may fall short of the second
        position = position.long().clamp_(min=1).masked_fill_(tile.estimates == -torch.inf, 0)
        if self.matrix.repeats:
            weights = (tile.rows.weight[:, None] * tile.columns.weight[None, :]).view(-1)
            counts = torch.zeros(grid.bins, dtype=torch.int64, device=position.device)
            counts.index_add_(0, position.view(-1), weights)
        else:
            counts = torch.bincount(position.view(-1), minlength=grid.bins)
        self.add(counts * (2 if tile.both else 1), tile.precision)

    def add(self, negatives: Int[Tensor, "bins"], precision: Precision) -> None:
        """Take negatives that were counted by the bins of their estimates of some precision."""
        self._coarsest = min(self._coarsest, precision)
        self.negatives += negatives.cpu().numpy()

    def new_record(self, threads: int) -> PairRecord:
        """Return an empty record for one of `threads` threads."""
        grid, floor, cut = self.forecast[:3]
        return PairRecord.empty(
            grid.bins,
            grid.origin,
            grid.scale,
            floor if self._precision is None or self._precision.screens else -math.inf,
            cut,
            max(1, self.capacity // threads) if math.isfinite(cut) else 1,
            weighted=self.matrix.repeats,
        )

    def collect(self, record: PairRecord, position: int) -> None:
        """Take what a thread has recorded of the rectangle at this position of the pass."""
        record = record.compacted()
        self.negatives += record.histogram
        screened = self._precision is not None and self._precision.screens
        if self._precision == Precision.FLOAT64:
            self._coarsest = Precision.FLOAT64
        # of what a screen lets pass, the product of the rounded operands is recorded
        precision = Precision.FLOAT64_OF_FLOAT32 if screened else self._coarsest
        self.highest.add(record, position, self.matrix.scores.largest_error(precision))
        if len(self.highest) > self.capacity:  # many batches, and a sample that was wrong
            self.highest.discard()
            self.forecast = self.forecast._replace(cut=math.inf)

    def expect(self, record: PairRecord, rows: Block, columns: Block) -> None:
        """Set from a sample from where on negatives will be wanted, so that they are collected on the way.

        Args:
            record: Of the sample.
            rows: Its queries, with thresholds.
            columns: Its gallery items.
        """
        matrix, everyone, grid, cut = self.matrix, self.matrix.everyone, self.forecast.grid, math.inf
        share = pairs_of(rows, columns) / everyone.pairs
        scores, weights = rows.relevant_scores(weighted=matrix.repeats)
        sampled = len(matrix.candidates.gallery_order) / max(1, len(everyone.gallery_order))
        chosen = int(rows.weight.sum()) / len(everyone.query_order) * sampled
        amount = None if weights is None else weights.cpu().numpy()
        positives = from_above(histogram(grid.bin_of(scores.cpu().numpy()), amount, grid.bins) / chosen)
        negatives = record.histogram.astype(np.float64)
        negatives[0] = 0
        accepted = from_above(negatives) / share
        wanted = self._wanted(positives, accepted, float(negatives.sum()) / share)
        held = matrix.processes.count * self.capacity / 2 * (2 if matrix.symmetric_ranks else 1)
        budget = min(matrix.options.collected_share * everyone.pairs, held)
        needed = max((SLACK * amount for amount in wanted if SLACK * amount <= budget), default=0.0)
        if needed and everyone.relevant_pairs * 40 <= matrix.free_bytes * matrix.processes.count:
            needed = max(needed, FEW_COUNTS / share)
            # two bins lower, since an estimate may be too low, and so may the score's
            cut = grid.edge(int(np.count_nonzero(accepted >= needed)) - 3)
            for threshold in self._thresholds:
                score = matrix.scores.to_exact_score(threshold)
                if accepted[int(grid.bin_of(np.array([score]))[0])] * SLACK <= budget:
                    cut = min(cut, score - 2 / grid.scale)
        screened = max(SCREENED_SHARE * everyone.pairs, needed)
        floor = min(grid.edge(int(np.count_nonzero(accepted >= screened))), cut)
        beyond_budget = any(SLACK * amount > budget for amount in wanted)
        self.forecast = Forecast(grid, floor, cut, negatives.astype(np.int64), beyond_budget)

    def reduce_over_processes(self) -> CountBounds:
        """Sum the counts over all processes, once, after the pass; return what they prove."""
        matrix, everyone, processes = self.matrix, self.matrix.everyone, self.matrix.processes
        positives, negatives = processes.summed(self.positives), processes.summed(self.negatives)
        coarsest = Precision(-int(processes.largest([-self._coarsest])[0]))
        self.highest.reduce_over_processes(processes)
        return CountBounds(
            self.forecast.grid,
            positives,
            negatives,
            self.highest,
            everyone.negative_pairs,
            matrix.scores.largest_error(coarsest),
            self.forecast.floor if self._precision is not None and self._precision.screens else -math.inf,
            matrix.scores.score_range,
            processes,
            self.forecast.sampled,
        )
