"""The gain of an evaluation: a metric minus its value in a reference evaluation, with its interval."""

from __future__ import annotations

from typing import NamedTuple

from fewshot_callbacks.functional.statistics import Interval


class Gain(NamedTuple):
    """The value of a metric minus its value in a reference evaluation.

    Attributes:
        metric: Key of the metric.
        value: The difference.
        interval: Interval of the difference; 0 to 0 for the first evaluation, which is its own reference.
        reference: Value of the reference from now on. An evaluation that is significantly better becomes the reference.
        is_better: Whether this evaluation is significantly better than the reference.
        confidence: Confidence level of the interval.
        is_first: Whether this evaluation is the first, and therefore its own reference.
    """

    metric: str
    value: float
    interval: Interval
    reference: float
    is_better: bool
    confidence: float
    is_first: bool = False

    def in_words(self) -> str:
        """Return the gain as a sentence.

        Examples:
            >>> gain = Gain("mAP", 0.064, Interval(0.05, 0.077), 0.311, is_better=True, confidence=0.95)
            >>> gain.in_words()
            'mAP is better than the reference by 0.064 (0.050 to 0.077 at 95%).'
        """
        if self.is_first:
            return f"{self.metric} is {self.reference:.3f}. This is the reference for the next validations."
        low, high = self.interval
        level = f"at {100 * self.confidence:.4g}%"
        if low <= 0.0 <= high:
            difference = f"{self.value:+.3f} ({low:+.3f} to {high:+.3f} {level})"
            return f"{self.metric} minus the reference is {difference}: not significant."
        verdict = "better" if self.is_better else "worse"
        nearest, farthest = sorted((abs(low), abs(high)))
        difference = f"{abs(self.value):.3f} ({nearest:.3f} to {farthest:.3f} {level})"
        return f"{self.metric} is {verdict} than the reference by {difference}."
