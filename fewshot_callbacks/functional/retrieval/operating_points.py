"""Pooled operating points: every query-candidate pair is one decision, accepted if its score reaches a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts


@dataclass(frozen=True)
class OperatingPoint:
    """Decisions over all query-candidate pairs at one threshold.

    A pair is accepted if its score is not below `threshold`; `true_positives`, `false_positives` and `false_negatives`
    count pairs. The threshold is the requested one, or one that was searched for:

    - For the best F1, it is the score of a relevant pair; if several thresholds have the best F1, the highest of them.
    - For a precision, it is the smallest that reaches the precision, among the scores of all pairs and the finite bounds
      on thresholds (between two neighbouring ones of these, all thresholds accept the same pairs). It can therefore be
      the score of an irrelevant pair, below the score of the last relevant pair that is accepted. It is the lower bound
      if the lower bound itself reaches the precision.

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


@dataclass(frozen=True)
class PooledDecisions:
    """The operating points of one evaluation."""

    best_f1: OperatingPoint
    at_precision: dict[float, OperatingPoint]
    """for each asked precision, the point of the smallest threshold that has at least this precision"""
    at_threshold: dict[float, OperatingPoint]
    at_false_match_rate: dict[float, ErrorRatePoint]
    equal_error_rate: float | None
    """None if it was not requested"""
    average_precision: Enclosure
    """area under the pooled precision-recall curve, as the sum of precision times the step in recall"""
    curve: tuple[tuple[float, float, float], ...]
    """thinned: threshold, precision and recall, by ascending recall; precision within the enclosure of its bin"""
    pair_counts: PairCounts
    """the pairs at a few hundred thresholds, those of the points above among them"""
    passes: int
    """how often all pairs had to be scored"""

    @property
    def decision(self) -> OperatingPoint:
        """The point at the threshold that was given, or that of the best F1."""
        return next(iter(self.at_threshold.values()), self.best_f1)
