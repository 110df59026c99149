"""Pooled operating points: every query-candidate pair is one decision, accepted if its score reaches a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class OperatingPoint:
    """Decisions over all query-candidate pairs at one threshold.

    A pair is accepted if its score is not below `threshold`; `true_positives`, `false_positives` and `false_negatives`
    count pairs. The threshold is the one that was asked for, or one that was found:

    - Of the best F1, the score of a relevant pair; where several have it, the highest.
    - Of a precision, the smallest that has it, of the scores of all pairs and the finite bounds of thresholds. Between two
      neighbours of these all thresholds accept the same pairs. So it can be the score of an irrelevant pair, below that
      of the last relevant pair that is accepted, and it is the lower bound where that has the precision itself.

    Precision is compared as the float64 quotient that `precision` returns: 14 of 25 has 0.56. Where no pair is accepted,
    precision is NaN; where no threshold fulfils what was asked, the threshold is NaN, recall and F1 are 0.0.
    """

    threshold: float
    true_positives: int
    false_positives: int
    false_negatives: int

    @property
    def precision(self) -> float:
        """Share of the accepted pairs that are relevant; NaN if none was accepted."""
        accepted = self.true_positives + self.false_positives
        return self.true_positives / accepted if accepted else math.nan

    @property
    def recall(self) -> float:
        """Share of the relevant pairs that are accepted."""
        relevant = self.true_positives + self.false_negatives
        return self.true_positives / relevant if relevant else math.nan

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, 2 TP / (2 TP + FP + FN)."""
        return 2 * self.true_positives / (2 * self.true_positives + self.false_positives + self.false_negatives)


@dataclass(frozen=True)
class ErrorRatePoint:
    """Verification at a fixed false match rate: a pair of different classes is accepted at most so often.

    `threshold` is the smallest score of a relevant pair at which the false match rate, as the float64 quotient below, is
    not larger than the rate asked for. A smaller threshold may keep that rate too, but accepts no more relevant pairs. NaN
    where not even the highest such score may be accepted. All is NaN where there is a single class, and so no pair to be
    falsely matched.
    """

    threshold: float
    false_match_rate: float
    """share of the pairs of different classes that are accepted"""
    false_non_match_rate: float
    """share of the relevant pairs that are rejected"""


@dataclass(frozen=True)
class Enclosure:
    """A value known up to a proved bound."""

    low: float
    high: float

    @property
    def value(self) -> float:
        """The middle."""
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """Half the width: the value is off by no more."""
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
    """None where it was not asked for"""
    average_precision: Enclosure
    """area under the pooled precision-recall curve, as the sum of precision times the step in recall"""
    curve: tuple[tuple[float, float, float], ...]
    """thinned: threshold, precision and recall, by ascending recall; precision within the enclosure of its bin"""
    passes: int
    """how often all pairs had to be scored"""
