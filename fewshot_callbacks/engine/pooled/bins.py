"""Bins of scores, and what is known of all pairs in them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fewshot_callbacks.engine.pooled.intervals import Bools, Floats, Ints


class ScoreGrid(NamedTuple):
    """Bins of equal width; the first and the last hold what lies beyond, too."""

    origin: float
    scale: float
    """one over the width of a bin"""
    bins: int
    blur: float = 0.01
    """a score lies in its bin or less than this many bin widths outside, since `bin_of` rounds to float32"""

    @classmethod
    def of_range(cls, low: float, high: float, error: float, most: int, errors: float = 2.5) -> ScoreGrid:
        """Cut a range of scores into at most `most` bins, each at least `errors` errors of an estimate wide."""
        bins = max(4, min(most, int((high - low) / (errors * error)) if error else most))
        # spare bins at either end, so that what matters is in none that has no neighbour
        width = max((high - low) / bins, 1.2 * errors * error, 1e-300)
        return cls(low - 3 * width, 1 / width, bins + 8)

    def bin_of(self, scores: Floats) -> Ints:
        """Return the bin of each score by the kernel's own arithmetic, which is monotone in the score."""
        with np.errstate(over="ignore"):  # infinity is clipped, as in the kernel
            position = ((scores - self.origin) * self.scale).astype(np.float32)
        return (np.clip(position, np.float32(-1), np.float32(self.bins - 2)) + np.float32(1)).astype(np.int64)

    def edge(self, number: int) -> float:
        """Return where a bin begins."""
        return self.origin + (max(number, 1) - 1) / self.scale


class ScoreHistogram(NamedTuple):
    """All pairs by their exact score, in bins that touch each other."""

    edges: Floats
    """of the bins, ascending; each bin holds its lower edge"""
    positives: Ints
    """relevant pairs"""
    negatives: Ints
    """all other pairs"""
    error: float = 0.0
    """a pair whose score is no further than this from an edge may be counted on the other side of it"""
    sampled_below: float = -math.inf
    """below this score the number of negatives is known, and how they are spread comes from a sample"""


class ThresholdBins(NamedTuple):
    """Runs of scores in ascending order that hold relevant pairs, and what a threshold at one of these accepts."""

    low: Floats
    high: Floats
    single: Bools
    """one score, of which everything is known"""
    positives: Ints
    """relevant pairs inside"""
    tp: Ints
    """true positives at the lowest threshold; at the others there are fewer"""
    fewest_fp: Ints
    """lower bound on the false positives at each threshold"""
    most_fp: Ints
    """upper bound on them"""
    tied: Ints
    """of a single score: negatives with this very score"""
    relevant: int
    """number of all relevant pairs"""
    negatives: int
    """number of all other pairs"""

    def of(self, chosen: Bools) -> ThresholdBins:
        """Return some of the bins."""
        return self._replace(**{name: getattr(self, name)[chosen] for name in self._fields[:-2]})
