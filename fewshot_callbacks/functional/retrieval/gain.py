"""The gain of an evaluation: a metric minus its value in a reference, with its interval."""

from __future__ import annotations

from typing import NamedTuple

from fewshot_callbacks.functional.statistics import Interval


class Gain(NamedTuple):
    """The value of a metric minus its value in the reference."""

    metric: str
    value: float
    interval: Interval
    """interval of the difference; 0 to 0 for the first evaluation, which is its own reference"""
    reference: float
    """value of the reference, which is this evaluation itself if it is better beyond chance"""
    is_better: bool
    """whether it is better than the reference beyond chance"""
    confidence: float
    """confidence level of the interval"""
    is_first: bool = False
    """whether this evaluation is the first, and so its own reference"""

    def in_words(self) -> str:
        """Return a sentence.

        Examples:
            >>> gain = Gain("mAP", 0.064, Interval(0.05, 0.077), 0.311, is_better=True, confidence=0.95)
            >>> gain.in_words()
            'mAP is better than the reference by 0.064 (0.050 to 0.077 at 95%).'
        """
        if self.is_first:
            return f"{self.metric} is {self.reference:.3f}, the reference of the next validations."
        low, high = self.interval
        level = f"at {100 * self.confidence:.4g}%"
        if low <= 0.0 <= high:
            difference = f"{self.value:+.3f} ({low:+.3f} to {high:+.3f} {level})"
            return f"{self.metric} minus the reference is {difference}, which may be chance."
        verdict = "better" if self.is_better else "worse"
        nearest, farthest = sorted((abs(low), abs(high)))
        difference = f"{abs(self.value):.3f} ({nearest:.3f} to {farthest:.3f} {level})"
        return f"{self.metric} is {verdict} than the reference by {difference}."
