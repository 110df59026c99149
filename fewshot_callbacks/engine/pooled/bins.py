"""Bins of scores, and what is known of all pairs in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fewshot_callbacks.engine.pooled.intervals import Bools, Floats, Ints


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
            position = ((scores - self.origin) * self.scale).astype(np.float32)
        return (np.clip(position, np.float32(-1), np.float32(self.bins - 2)) + np.float32(1)).astype(np.int64)

    def edge(self, number: int) -> float:
        """Return where a bin begins."""
        return self.origin + (max(number, 1) - 1) / self.scale


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
    """at least so many false positives at each threshold"""
    most_fp: Ints
    """at most so many"""
    tied: Ints
    """of a single score: negatives with this very score"""
    relevant: int
    """number of all relevant pairs"""
    negatives: int
    """number of all other pairs"""

    def of(self, chosen: Bools) -> ThresholdBins:
        """Return some of the bins."""
        return self._replace(**{name: getattr(self, name)[chosen] for name in self._fields[:-2]})
