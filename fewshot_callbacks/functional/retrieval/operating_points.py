"""Operating points: the pairs or trials that a threshold accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fewshot_callbacks.functional._equality import equal_with_nan


@equal_with_nan
@dataclass(frozen=True)
class OperatingPoint:
    """Decisions over all query-candidate pairs at one threshold.

    A pair is accepted if its score is at least `threshold`. The threshold is the requested one, or the result of a search:

    - For the best F1, it is the score of a relevant pair. If several thresholds have the best F1, it is the highest.
    - For a precision, it is the smallest score of a relevant pair within `threshold_bounds` that reaches the precision. A
      smaller threshold may also reach it, but does not accept more relevant pairs. If no such score reaches the precision
      but the upper bound does, the threshold is the upper bound.

    A score is the similarity of a pair, rounded once to float64, as `nearest` and `trial_scores` return it. The threshold
    from a search is the score of its pair, so `score >= threshold` accepts this pair and all other counted pairs. There is
    one exception: inner products that overflow or underflow in float64 round to the same number, and the threshold accepts
    all of them. A similarity that you compute in another way, such as in float32, may fall on the other side of a close
    threshold.

    Precision is compared as the float64 quotient that `precision` returns: 14 of 25 is 0.56. If no pair is accepted,
    precision is NaN. If no threshold meets the request, the threshold is NaN, and recall and F1 are 0.0.

    Attributes:
        threshold: The smallest accepted score.
        true_positives: Number of relevant pairs that are accepted.
        false_positives: Number of irrelevant pairs that are accepted.
        false_negatives: Number of relevant pairs that are rejected.

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
        """Share of relevant pairs among the accepted pairs, in [0, 1]; NaN if no pair is accepted."""
        accepted = self.true_positives + self.false_positives
        return self.true_positives / accepted if accepted else math.nan

    @property
    def recall(self) -> float:
        """Share of accepted pairs among the relevant pairs, in [0, 1]; NaN if there are no relevant pairs."""
        relevant = self.true_positives + self.false_negatives
        return self.true_positives / relevant if relevant else math.nan

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, 2 TP / (2 TP + FP + FN), in [0, 1]."""
        return 2 * self.true_positives / (2 * self.true_positives + self.false_positives + self.false_negatives)

    def __str__(self) -> str:
        """Return the threshold, precision, recall, F1 and the counts in one line."""
        rates = f"precision {self.precision:.4f}, recall {self.recall:.4f}, F1 {self.f1:.4f}"
        relevant = self.true_positives + self.false_negatives
        return (
            f"threshold {self.threshold:.4f}: {rates} ({self.true_positives:,} of {relevant:,} relevant pairs and "
            f"{self.false_positives:,} others are accepted)"
        )


@equal_with_nan
@dataclass(frozen=True)
class ErrorRatePoint:
    """Verification at a bounded false match rate.

    All fields are NaN if there is only one class, since there are then no pairs of different classes.

    Attributes:
        threshold: Smallest score of a relevant pair at which the false match rate, as a float64 quotient, does not exceed
            the requested rate. A smaller threshold may also keep the rate, but does not accept more relevant pairs. NaN if
            the rate is exceeded even at the highest score of a relevant pair.
        false_match_rate: Share of the pairs of different classes that are accepted, in [0, 1].
        false_non_match_rate: Share of the relevant pairs that are rejected, in [0, 1].

    Examples:
        >>> print(ErrorRatePoint(threshold=0.7, false_match_rate=0.001, false_non_match_rate=0.25))
        threshold 0.7000: false match rate 0.0010, false non-match rate 0.2500
    """

    threshold: float
    false_match_rate: float
    false_non_match_rate: float

    def __str__(self) -> str:
        """Return the threshold and both rates in one line."""
        rates = f"false match rate {self.false_match_rate:.4f}, false non-match rate {self.false_non_match_rate:.4f}"
        return f"threshold {self.threshold:.4f}: {rates}"


def equal_error_rate(fnmr: float, fmr: float, fnmr_above: float, fmr_above: float) -> float:
    """Return the rate at which FNMR and FMR cross, interpolated linearly where both jump.

    Rates are at a score and just above it. `fnmr_above` is at least `fmr_above`.
    """
    if fnmr >= fmr:
        return fnmr
    step = (fmr - fnmr) / ((fmr - fnmr) + (fnmr_above - fmr_above))
    return fnmr + step * (fnmr_above - fnmr)


@equal_with_nan
@dataclass(frozen=True)
class Enclosure:
    """A value between two proved bounds.

    Examples:
        >>> area = Enclosure(low=0.75, high=0.875)
        >>> area.value, area.error
        (0.8125, 0.0625)
    """

    low: float
    high: float

    @property
    def value(self) -> float:
        """Middle of the bounds, the best estimate of the value."""
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """Half the distance of the bounds, the largest possible error of `value`."""
        return (self.high - self.low) / 2
