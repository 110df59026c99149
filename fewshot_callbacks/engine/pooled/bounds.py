"""Between which bounds the counts of all pairs at each score lie, after a pass."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.pooled.bins import ScoreGrid, ScoreHistogram
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
    """lower bound on the negatives that reach each score in the bin"""
    most: Ints
    """upper bound on them"""

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
    sampled: Ints | None = None
    """negatives of a sample of the pairs, by their bins"""

    def histogram(self) -> ScoreHistogram:
        """Return all pairs by their scores; negatives below the floor are spread as those of the sample are."""
        grid, negatives, floor = self.grid, self.negatives.copy(), self.floor
        negatives[0] = 0
        missing = self.negative_pairs - int(negatives.sum())
        below = max(2, int(grid.bin_of(np.array([floor]))[0])) if floor < math.inf else 2
        pattern = np.zeros(below) if self.sampled is None else self.sampled[:below].astype(np.float64)
        pattern[1] += not pattern.any()
        negatives[:below] += np.diff(np.rint(np.cumsum(pattern) * (missing / pattern.sum())), prepend=0).astype(
            np.int64
        )
        return ScoreHistogram(
            grid.edge(1) + np.arange(-1, grid.bins) / grid.scale,
            self.positives,
            negatives,
            self.error + 2 * grid.blur / grid.scale,
            floor if floor < math.inf and missing else -math.inf,
        )

    @property
    def complete_from(self) -> int:
        """The first bin from which on all negatives have been collected; the number of bins if there is none."""
        if not math.isfinite(self.highest.cut):
            return self.grid.bins
        return int(self.grid.bin_of(np.array([self.highest.exact_above]))[0]) + 1

    @property
    def _away(self) -> int:
        """Largest distance in bins between the exact score of a negative and its estimate."""
        return math.ceil(self.error * self.grid.scale + 5 * self.grid.blur)

    def of_bins(self) -> BinBounds:
        """Return the bounds of each bin; collective."""
        grid = self.grid
        edges = grid.edge(1) + (np.arange(grid.bins) - 1) / grid.scale
        low, high = edges - grid.blur / grid.scale, edges + (1 + grid.blur) / grid.scale
        low[0] = min(low[0], self.score_range[0])
        high[-1] = max(high[-1], self.score_range[1])
        return BinBounds(low, high, self.at(high)[0], self.at(low)[1])

    def at(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return how many negatives at least, and at most, reach each of these scores, by the histogram; collective."""
        grid, accepted = self.grid, np.append(from_above(self.negatives), 0)
        position, away = (scores - grid.origin) * grid.scale + 1, self.error * grid.scale + grid.blur
        # the scores in the first bin have no lower bound, those in the last no upper bound
        fewest = accepted[np.ceil(position + away).clip(1, grid.bins).astype(np.int64)]
        most = accepted[np.floor(position - away).clip(0, grid.bins - 1).astype(np.int64)]
        if self.floor > -math.inf:
            most = np.where(scores - 1 / grid.scale <= self.floor, self.negative_pairs, most)
        if math.isfinite(self.highest.cut):
            reaching, _ = self.reaching(np.array([self.highest.exact_above]))
            fewest = np.where(scores <= self.highest.exact_above, np.maximum(fewest, reaching), fewest)
        return fewest, most

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
