"""What is known of all pairs in runs of scores."""

from __future__ import annotations

from typing import NamedTuple

from fewshot_callbacks.engine.pooled.intervals import Bools, Floats, Ints


class ThresholdBins(NamedTuple):
    """Runs of scores in ascending order that hold relevant pairs, and what a threshold at one of these accepts."""

    low: Floats
    high: Floats
    single: Bools
    """one key, of which everything is known"""
    positives: Ints
    """relevant pairs inside"""
    tp: Ints
    """true positives at the lowest threshold; at the others there are fewer"""
    fewest_fp: Ints
    """at least so many false positives at each threshold"""
    most_fp: Ints
    """at most so many"""
    tied: Ints
    """of a single key: negatives with this very key"""
    relevant: int
    """number of all relevant pairs"""
    negatives: int
    """number of all other pairs"""

    def of(self, chosen: Bools) -> ThresholdBins:
        """Some of the cells."""
        return ThresholdBins(
            self.low[chosen],
            self.high[chosen],
            self.single[chosen],
            self.positives[chosen],
            self.tp[chosen],
            self.fewest_fp[chosen],
            self.most_fp[chosen],
            self.tied[chosen],
            self.relevant,
            self.negatives,
        )
