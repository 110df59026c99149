"""Between which bounds the counts of all pairs at each score lie, after a pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.pooled.bins import ScoreGrid
from fewshot_callbacks.engine.pooled.highest import TopNegatives
from fewshot_callbacks.engine.pooled.intervals import Floats, Ints, ScoreIntervals, from_above
from fewshot_callbacks.engine.pooled.tally import Located


class BinBounds(NamedTuple):
    """What each bin holds."""

    low: Floats
    """no score in the bin is lower"""
    high: Floats
    """and none is higher"""
    fewest: Ints
    """at least so many negatives reach each score in the bin"""
    most: Ints
    """at most so many"""

    def locate(self, rank: int) -> Located:
        """Return between which scores the negative lies that `rank - 1` others follow from above."""
        possible = np.flatnonzero((self.fewest < rank) & (self.most >= rank))
        return Located(float(self.low[possible[0]]), float(self.high[possible[-1]]))


@dataclass(frozen=True)
class CountBounds:
    """A histogram of the scores of all pairs, over all processes, and the negatives with the highest estimates."""

    grid: ScoreGrid
    positives: Ints
    """relevant pairs by the bin of their exact score"""
    negatives: Ints
    """other pairs by the bin of their estimate; those of the first bin are perhaps no candidates"""
    highest: TopNegatives
    negative_pairs: int
    """all pairs that are neither relevant nor excluded"""
    error: float
    """no estimate lies further from its exact score"""
    floor: float
    """negatives below this score have not been recorded"""
    score_range: tuple[float, float]
    processes: Processes

    @property
    def complete_from(self) -> int:
        """The first bin from which on all negatives have been collected; the number of bins if there is none."""
        if not math.isfinite(self.highest.cut):
            return self.grid.bins
        return int(self.grid.bin_of(np.array([self.highest.exact_above]))[0]) + 1

    @property
    def _away(self) -> int:
        """The exact score of a negative lies at most so many bins away from its estimate."""
        return math.ceil(self.error * self.grid.scale + 0.05)

    def of_bins(self) -> BinBounds:
        """Return the bounds of each bin; collective."""
        away, width, bins = self._away, 1 / self.grid.scale, np.arange(self.grid.bins)
        accepted = from_above(self.negatives)
        padded = np.pad(accepted, (away, away + 1))
        padded[:away] = accepted[0]
        fewest, most = padded[2 * away + 1 :], padded[: -2 * away - 1]
        # the arithmetic of `bin_of` rounds to float32, by less than a hundredth of a bin
        edges = self.grid.edge(1) + (bins - 1) / self.grid.scale
        low, high = edges - 0.01 / self.grid.scale, edges + 1.01 / self.grid.scale
        low[0] = min(low[0], self.score_range[0])
        high[-1] = max(high[-1], self.score_range[1])
        if self.floor > -math.inf:
            most = np.where(low - width <= self.floor, self.negative_pairs, most)
        if math.isfinite(self.highest.cut):
            reaching, _ = self.reaching(np.array([self.highest.exact_above]))
            fewest = np.where(bins < self.complete_from - 1, np.maximum(fewest, reaching), fewest)
        return BinBounds(low, high, fewest, most)

    def reaching(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return how many negatives at least, and at most, reach each of these scores, none below `highest.exact_above`."""
        fewest, most = self.processes.summed(self.highest.bounds(scores))
        return fewest, most

    def accepted(self, score: float) -> int | None:
        """Return how many negatives reach a score; None if that is not known."""
        if self.highest.exact_above <= score:
            fewest, most = (int(count[0]) for count in self.reaching(np.array([score])))
            return fewest if fewest == most else None
        # else only where no negative lies as high, which the histogram tells above the floor
        lowest = max(0, int(self.grid.bin_of(np.array([score]))[0]) - self._away)
        is_recorded = score > self.floor + 2 / self.grid.scale
        return 0 if is_recorded and not self.negatives[lowest:].any() else None

    def share_within(self, intervals: ScoreIntervals) -> float:
        """Estimate which share of the negatives lies inside some intervals."""
        below = np.append(0, np.cumsum(self.negatives))
        low, high = self.grid.bin_of(intervals).T
        total = max(1, int(below[-1] - below[1]))
        return min(1.0, float((below[high + 1] - below[low]).sum() / total))
