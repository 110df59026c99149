"""A histogram of the scores of all pairs, regardless of the query, and the negatives with the highest estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, pairs_of
from fewshot_callbacks.engine.budget import SHARE_OF_KEYS
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pooled.highest import TopNegatives
from fewshot_callbacks.engine.pooled.intervals import Floats, Ints, from_above, histogram
from fewshot_callbacks.engine.pooled.record import PairRecord
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.tile import Tile
from fewshot_callbacks.engine.scores.products import ScoreTiles

Wanted = Callable[[Floats, Floats, float], list[float]]
"""Given counts of relevant pairs and of negatives at and above ascending scores, and the number of negatives: how many of
the highest negatives will have to be known, for each question that is asked of all pairs."""

BIN_BYTES = 160
"""What a cell of the histogram takes while the operating points are found: three counters, and all that is known of it."""
SHARE_OF_BINS = 0.25
"""Share of the budget for these."""
SCREENED_SHARE = 0.001
"""A screen looks closer at no more than this share of all pairs for the histogram's sake."""
SLACK = 1.5
"""A sample may be off by this factor in how many negatives will be wanted."""
FEW_COUNTS = 30
"""Fewer pairs of a sample than these tell nothing."""


class ScoreGrid(NamedTuple):
    """Bins of equal width; the first and the last hold what lies beyond, too."""

    origin: float
    scale: float
    """one over the width of a bin"""
    bins: int

    @classmethod
    def of_range(cls, low: float, high: float, error: float, most: int) -> ScoreGrid:
        """Cut a range of scores into at most `most` bins, each at least twice as wide as the error of an estimate."""
        bins = max(4, min(most, int((high - low) / (2.5 * error)) if error else most))
        # spare bins at either end, so that what matters is in none that has no neighbour
        width = max((high - low) / bins, 3 * error, 1e-300)
        return cls(low - 3 * width, 1 / width, bins + 8)

    def bin_of(self, scores: Floats) -> Ints:
        """Return the bin of each score by the kernel's own arithmetic, which is monotone in the score."""
        with np.errstate(over="ignore"):  # infinity is clipped, as in the kernel
            place = ((scores - self.origin) * self.scale).astype(np.float32)
        return (np.clip(place, np.float32(-1), np.float32(self.bins - 2)) + np.float32(1)).astype(np.int64)

    def edge(self, number: int) -> float:
        """Return where a bin begins."""
        return self.origin + (max(number, 1) - 1) / self.scale


class Forecast(NamedTuple):
    """What a sample of the pairs tells of the negatives that will be wanted, in scores."""

    grid: ScoreGrid
    floor: float
    """a screen records no negative below this score"""
    cut: float
    """negatives from here on are collected"""


class PooledCounts:
    """Observes a pass: a histogram of all pairs, and the negatives with the highest estimates.

    A negative's score lies in the bin of its estimate or in one beside it: a bin is at least twice as wide as the error.

    Args:
        matrix: the pairs.
        wanted: how many of the highest negatives will have to be known.
        thresholds: scores at which the pairs will have to be counted.
        capacity: how many pairs may be held; by default as many as the budget allows.
    """

    def __init__(
        self,
        matrix: ScoreMatrix,
        wanted: Wanted = lambda *_: [],
        thresholds: Sequence[float] = (),
        capacity: int | None = None,
    ) -> None:
        self.matrix, self.scores = matrix, matrix.scores
        self.capacity = max(1000, int(matrix.free_bytes * SHARE_OF_KEYS / 8)) if capacity is None else capacity
        self._wanted, self._thresholds = wanted, thresholds
        self._lay(*matrix.scores.score_range, matrix.scores.largest_error(Precision.FLOAT32))
        self.highest = TopNegatives(matrix.repeats, symmetric=matrix.symmetric_ranks)
        self._floor = self._cut = math.inf
        self._precision: Precision | None = None
        self._coarsest = Precision.FLOAT32

    def begin(self, scores: ScoreTiles, precision: Precision, forecast: Forecast | None) -> None:
        """Take how the pass begins, before it does: its scores, their first precision and what a sample foretold."""
        self.scores, self._precision = scores, precision
        if forecast is not None:
            self._set_grid(forecast.grid)
            self._floor, self._cut = forecast.floor, forecast.cut

    def _lay(self, low: float, high: float, error: float) -> None:
        most = min(self.matrix.options.bins, int(self.matrix.free_bytes * SHARE_OF_BINS / BIN_BYTES))
        self._set_grid(ScoreGrid.of_range(low, high, error, most))

    def _set_grid(self, grid: ScoreGrid) -> None:
        self.grid = grid
        self.positives, self.negatives = np.zeros((2, grid.bins), np.int64)

    def zoom(self, low: float, high: float) -> None:
        """Lay finer bins in this range of scores, estimated from a sample of which float64 products will be made."""
        least, most = self.scores.score_range
        spare = 0.05 * (high - low)
        self._lay(max(least, low - spare), min(most, high + spare), self.scores.largest_error(Precision.FLOAT64))

    # ----------------------------------------------------------------------------------------------------------- looking

    def relevant(self, keys: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None) -> None:
        """Count the keys of relevant pairs."""
        values = keys.cpu().numpy()
        amount = None if weights is None else weights.cpu().numpy()
        self.positives += histogram(self.grid.bin_of(values), amount, self.grid.bins)

    def tile(self, tile: Tile) -> None:
        """Count the estimates of a tile of negatives, made in PyTorch."""
        self._coarsest = min(self._coarsest, Precision(tile.precision))
        place = ((tile.estimates - self.grid.origin) * self.grid.scale).float().clamp_(-1, self.grid.bins - 2) + 1
        # the first bin is for what is no candidate; a coarse estimate of the lowest keys may fall short of the second
        place = place.long().clamp_(min=1).masked_fill_(tile.estimates == -torch.inf, 0)
        if self.matrix.repeats:
            weights = (tile.rows.weight[:, None] * tile.columns.weight[None, :]).view(-1)
            counts = torch.zeros(self.grid.bins, dtype=torch.int64, device=place.device)
            counts.index_add_(0, place.view(-1), weights)
        else:
            counts = torch.bincount(place.view(-1), minlength=self.grid.bins)
        self.negatives += counts.cpu().numpy() * (2 if tile.both else 1)

    def new_record(self, threads: int) -> PairRecord:
        """Return an empty record for one of so many threads."""
        screened = self._precision == Precision.HALF
        capacity = max(1, self.capacity // threads) if math.isfinite(self._cut) else 1
        return PairRecord.empty(
            self.grid.bins,
            self.grid.origin,
            self.grid.scale,
            self._floor if screened or self._precision is None else -math.inf,
            self._cut,
            capacity,
            weighted=self.matrix.repeats,
        )

    def collect(self, record: PairRecord, position: int) -> None:
        """Take what a thread has recorded of a rectangle of the pass.

        Args:
            record: of one thread.
            position: of the rectangle.
        """
        record = record.compacted()
        self.negatives += record.histogram
        screened = self._precision == Precision.HALF
        if self._precision == Precision.FLOAT64:
            self._coarsest = Precision.FLOAT64
        # of what a screen lets pass, the product of the rounded operands is recorded
        precision = Precision.FLOAT64_OF_FLOAT32 if screened else self._coarsest
        self.highest.add(record, position, self.scores.largest_error(precision))
        if len(self.highest) > self.capacity:  # many batches, and a sample that was wrong
            self.highest.discard()
            self._cut = math.inf

    def expect(self, record: PairRecord, rows: Block, columns: Block) -> None:
        """Set from a sample from where on negatives will be wanted, so that they are collected on the way.

        Args:
            record: of the sample.
            rows: its queries, with thresholds.
            columns: its gallery items.
        """
        self._floor = self._cut = math.inf
        matrix, everyone = self.matrix, self.matrix.everyone
        share = pairs_of(rows, columns) / everyone.pairs
        scores, weights = rows.relevant_scores(weighted=matrix.repeats)
        sampled = len(matrix.candidates.gallery_order) / max(1, len(everyone.gallery_order))
        chosen = int(rows.weight.sum()) / len(everyone.query_order) * sampled
        amount = None if weights is None else weights.numpy()
        positives = from_above(histogram(self.grid.bin_of(scores.numpy()), amount, self.grid.bins) / chosen)
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
            self._cut = self.grid.edge(int(np.count_nonzero(accepted >= needed)) - 3)
            for threshold in self._thresholds:
                score = self.scores.to_exact_score(threshold)
                if accepted[int(self.grid.bin_of(np.array([score]))[0])] * SLACK <= budget:
                    self._cut = min(self._cut, score - 2 / self.grid.scale)
        screened = max(SCREENED_SHARE * everyone.pairs, needed)
        self._floor = min(self.grid.edge(int(np.count_nonzero(accepted >= screened))), self._cut)

    @property
    def floor(self) -> float:
        """Negatives below this score have not been recorded."""
        return self._floor if self._precision == Precision.HALF else -math.inf

    @property
    def forecast(self) -> Forecast:
        """What a sample has foretold, for every process."""
        return Forecast(self.grid, self._floor, self._cut)

    def reduce_over_processes(self) -> None:
        """Sum the counts over all processes. Call it once, after the pass."""
        self.positives = self.matrix.processes.summed(self.positives)
        self.negatives = self.matrix.processes.summed(self.negatives)
        self._coarsest = Precision(-int(self.matrix.processes.largest([-self._coarsest])[0]))
        self.highest.reduce_over_processes(self.matrix.processes)
        self.error = self.scores.largest_error(self._coarsest)
