"""Operating points: what a threshold accepts, over all pairs or over trials."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fewshot_callbacks.functional._equality import equal_with_nan


@equal_with_nan
@dataclass(frozen=True)
class OperatingPoint:
    """Decisions over all query-candidate pairs at one threshold.

    A pair is accepted if its score is not below `threshold`; `true_positives`, `false_positives` and `false_negatives`
    count pairs. The threshold is the requested one, or one that was searched for:

    - For the best F1, it is the score of a relevant pair; if several thresholds have the best F1, the highest of them.
    - For a precision, it is the smallest score of a relevant pair, within `threshold_bounds`, that reaches it. A smaller
      threshold may reach it, too, but accepts no more relevant pairs. Where no such score within these bounds reaches it,
      but the upper bound does, it is the upper bound.

    A score is the similarity of a pair, rounded once to float64, as `nearest` and `trial_scores` return it. Among these, a
    threshold that was searched for is the score of its pair, so `score >= threshold` accepts that pair and all others that
    are counted. Inner products that are infinite in float64, or smaller than its normal numbers, are the exception: several
    of them round to one number, and the threshold accepts them all. A similarity that was computed otherwise, such as in
    float32, may lie on the other side of a threshold that it is close to.

    Precision is compared as the float64 quotient that `precision` returns: 14 of 25 is 0.56. Where no pair is accepted,
    precision is NaN. Where no threshold meets the request, the threshold is NaN, and recall and F1 are 0.0.

    Examples:
        >>> point = OperatingPoint(threshold=0.7, true_positives=6, false_positives=2, false_negatives=4)
        >>> point.precision, point.recall, round(point.f1, 3)
        (0.75, 0.6, 0.667)
    """

    threshold: float
    true_positives: int
    false_positives: int
    false_negatives: int

    @property
    def precision(self) -> float:
        """Share of the accepted pairs that are relevant, in [0, 1]; NaN if no pair is accepted."""
        accepted = self.true_positives + self.false_positives
        return self.true_positives / accepted if accepted else math.nan

    @property
    def recall(self) -> float:
        """Share of the relevant pairs that are accepted, in [0, 1]; NaN if there are none."""
        relevant = self.true_positives + self.false_negatives
        return self.true_positives / relevant if relevant else math.nan

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, 2 TP / (2 TP + FP + FN), in [0, 1]."""
        return 2 * self.true_positives / (2 * self.true_positives + self.false_positives + self.false_negatives)

    def __str__(self) -> str:
        """Return the threshold, what it gives, and the counts, in a line."""
        rates = f"precision {self.precision:.4f}, recall {self.recall:.4f}, F1 {self.f1:.4f}"
        relevant = self.true_positives + self.false_negatives
        return (
            f"threshold {self.threshold:.4f}: {rates} ({self.true_positives:,} of {relevant:,} relevant pairs and "
            f"{self.false_positives:,} others are accepted)"
        )


@equal_with_nan
@dataclass(frozen=True)
class ErrorRatePoint:
    """Verification at a fixed false match rate: the share of accepted pairs of different classes is bounded.

    `threshold` is the smallest score of a relevant pair at which the false match rate, as the float64 quotient below,
    does not exceed the requested rate. A smaller threshold may also keep the rate, but accepts no more relevant pairs.
    It is NaN where even the highest score of a relevant pair exceeds the rate. All fields are NaN where there is a
    single class, and so no pair of different classes.

    Examples:
        >>> ErrorRatePoint(threshold=0.7, false_match_rate=0.001, false_non_match_rate=0.25).false_non_match_rate
        0.25
    """

    threshold: float
    false_match_rate: float
    """share of the pairs of different classes that are accepted, in [0, 1]"""
    false_non_match_rate: float
    """share of the relevant pairs that are rejected, in [0, 1]"""

    def __str__(self) -> str:
        """Return the threshold and both rates, in a line."""
        rates = f"false match rate {self.false_match_rate:.4f}, false non-match rate {self.false_non_match_rate:.4f}"
        return f"threshold {self.threshold:.4f}: {rates}"


def equal_error_rate(fnmr: float, fmr: float, fnmr_above: float, fmr_above: float) -> float:
    """Return the rate at which FNMR and FMR cross, by a straight line where both jump.

    Args:
        fnmr: False non-match rate at a score.
        fmr: False match rate at this score.
        fnmr_above: False non-match rate just above the score; at least `fmr_above`.
        fmr_above: False match rate just above the score.
    """
    if fnmr >= fmr:
        return fnmr
    step = (fmr - fnmr) / ((fmr - fnmr) + (fnmr_above - fmr_above))
    return fnmr + step * (fnmr_above - fnmr)


@equal_with_nan
@dataclass(frozen=True)
class Enclosure:
    """A value that is known to lie between two proved bounds.

    Examples:
        >>> area = Enclosure(low=0.75, high=0.875)
        >>> area.value, area.error
        (0.8125, 0.0625)
    """

    low: float
    high: float

    @property
    def value(self) -> float:
        """Middle of the interval, the best estimate of the value."""
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """Half the width of the interval, the largest possible error of `value`."""
        return (self.high - self.low) / 2
