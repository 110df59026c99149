"""Pooled decisions: every query-candidate pair is one, accepted if its score reaches a threshold; points and counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Shaped

from fewshot_callbacks.engine.evaluation import Evaluation

# Number of evenly spaced thresholds, which are also the edges of the bins.
BINS = 240
# Further thresholds: evenly spaced in recall, and geometrically in the number of irrelevant pairs accepted.
RECALL_STEPS, MATCH_STEPS = 100, 60
# Scores of relevant, sampled and collected pairs that are tried for these, each.
DENSE = 2**12


@dataclass(frozen=True, eq=False)
class PairCounts:
    """Numbers of relevant and irrelevant pairs at thresholds and in bins of their score.

    Attributes:
        thresholds: A pair is accepted if its score is at least the threshold; in any order.
        true_positives: Relevant pairs with at least the score of each threshold.
        false_positives: Irrelevant pairs with at least the score of each threshold.
        relevant: Number of relevant pairs.
        irrelevant: Number of irrelevant pairs.
        edges: Edges of the bins, ascending.
        relevant_counts: Relevant pairs of each bin.
        irrelevant_counts: Irrelevant pairs of each bin.
        tolerance: Each count is exact for a threshold that differs from the given one by at most this much.
        sampled_below: The false positives at thresholds below this score, and the bins below it, are estimated from a
            sample of the irrelevant pairs; -inf where all pairs were counted.

    Examples:
        >>> counts = PairCounts(np.array([0.2, 0.8]), np.array([4, 2]), np.array([6, 1]), 4, 20,
        ...                     np.array([0.0, 0.5, 1.0]), np.array([1, 3]), np.array([18, 2]))
        >>> counts.recall, counts.precision.round(2), counts.false_match_rate
        (array([1. , 0.5]), array([0.4 , 0.67]), array([0.3 , 0.05]))
    """

    thresholds: Shaped[np.ndarray, "thresholds"]
    true_positives: Shaped[np.ndarray, "thresholds"]
    false_positives: Shaped[np.ndarray, "thresholds"]
    relevant: int
    irrelevant: int
    edges: Shaped[np.ndarray, "edges"]
    relevant_counts: Shaped[np.ndarray, "bins"]
    irrelevant_counts: Shaped[np.ndarray, "bins"]
    tolerance: float = 0.0
    sampled_below: float = -math.inf

    @property
    def precision(self) -> Float[np.ndarray, "thresholds"]:
        """Share of relevant pairs among the accepted pairs, in [0, 1]; NaN where no pair is accepted."""
        accepted = self.true_positives + self.false_positives
        return np.where(accepted > 0, self.true_positives / np.maximum(accepted, 1), math.nan)

    @property
    def recall(self) -> Float[np.ndarray, "thresholds"]:
        """Share of relevant pairs that are accepted, in [0, 1]; NaN where there are none."""
        return self.true_positives / (self.relevant or math.nan)

    @property
    def false_match_rate(self) -> Float[np.ndarray, "thresholds"]:
        """Share of irrelevant pairs that are accepted, in [0, 1]; NaN where there are none."""
        return self.false_positives / (self.irrelevant or math.nan)

    @property
    def false_non_match_rate(self) -> Float[np.ndarray, "thresholds"]:
        """Share of relevant pairs that are rejected, in [0, 1]; NaN where there are none."""
        return 1 - self.recall

    def at(self, threshold: float) -> tuple[float, float, float]:
        """Return recall, precision and false match rate at the nearest counted threshold; NaN if there is none."""
        if not len(self.thresholds) or not math.isfinite(threshold):
            return math.nan, math.nan, math.nan
        nearest = int(np.abs(self.thresholds - threshold).argmin())
        return float(self.recall[nearest]), float(self.precision[nearest]), float(self.false_match_rate[nearest])


def thinned(done: Evaluation, known: Sequence[tuple[float, int, int]] = ()) -> PairCounts:
    """Count pairs at a few hundred thresholds: evenly spaced ones, and more where recall or false matches change.

    Args:
        done: An evaluation that has run.
        known: Thresholds that a user reads, with their true and false positives, which are among those counted.
    """
    vectors, negatives, sample, relevant = done.vectors, done.negatives, done.sample, done.positives
    low, high = negatives.span(
        np.concatenate([sample.estimates[[0, -1]] if sample.each else [], relevant.scores[[0, -1]]])
    )
    user_low, user_high = vectors.to_user(np.array([low, high]))
    beyond = user_high + 1e-6 * max(user_high - user_low, abs(user_high), 1e-30)  # an edge above all
    edges = np.unique(np.linspace(user_low, beyond, BINS + 1))
    if vectors.pairs.whole:  # a bin for each distance, or for several; the last edge lies above all
        step = math.ceil((user_high - user_low + 1) / BINS)
        edges = np.arange(user_low, user_high + step + 0.5, step)
    even = np.minimum(
        vectors.from_user(edges), 2.0
    )  # scores end at 1; an edge above all distances is none, and infinite
    even[0] = min(even[0], low)  # reading a score and writing it again may move it
    highest = negatives.highest
    dense = [values[:: max(1, len(values) // DENSE)] for values in (relevant.scores, sample.estimates, highest)]
    if len(highest):  # by their rank, since false match rates are read on a logarithmic axis
        dense.append(highest[len(highest) - np.unique(np.geomspace(1, len(highest), DENSE).astype(np.int64))])
    fine = np.unique(np.concatenate([even, *dense]))
    tp, fp = done.relevant_reaching(fine), negatives.estimate(fine, sample)
    fp[0] = negatives.total
    asked = np.linspace(0, relevant.total, RECALL_STEPS + 1)
    matches = np.geomspace(1, max(negatives.total, 1), MATCH_STEPS)
    more = [
        np.searchsorted(-counts, -wanted).clip(max=len(fine) - 1) for counts, wanted in ((tp, asked), (fp, matches))
    ]
    bins = np.searchsorted(fine, even)
    chosen = np.unique(np.concatenate([bins, *more]))
    points = np.array(known, dtype=np.float64).reshape(-1, 3)
    thresholds = np.concatenate([vectors.to_user(fine[chosen]), points[:, 0]])
    order = np.argsort(thresholds, kind="stable")

    def in_order(counts: Shaped[np.ndarray, "scores"], given: Shaped[np.ndarray, "points"]) -> np.ndarray:
        return np.concatenate([counts[chosen], given.astype(np.int64)])[order]

    reach = vectors.to_user(fine[chosen] + negatives.error) - vectors.to_user(fine[chosen] - negatives.error)
    return PairCounts(
        thresholds[order],
        in_order(tp, points[:, 1]),
        in_order(fp, points[:, 2]),
        relevant.total,
        negatives.total,
        edges,
        -np.diff(tp[bins]),
        -np.diff(fp[bins]),
        float(reach.max()) if negatives.error else 0.0,
        float(vectors.to_user(np.array([negatives.cut]))[0]) if math.isfinite(negatives.cut) else -math.inf,
    )


@dataclass(frozen=True)
class OperatingPoint:
    """Decisions over all query-candidate pairs at one threshold.

    A pair is accepted if its score is not below `threshold`; `true_positives`, `false_positives` and `false_negatives`
    count pairs. The threshold is the requested one, or one that was searched for:

    - For the best F1, it is the score of a relevant pair; if several thresholds have the best F1, the highest of them.
    - For a precision, it is the smallest score of a relevant pair, within the bounds on thresholds, that reaches it. A
      smaller threshold may reach it, too, but accepts no more relevant pairs. Where only pairs above the bounds reach it,
      it is the upper bound.

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


def equal_error_rate(before: float, match_before: float, after: float, match_after: float) -> float:
    """Return the rate at which FNMR and FMR cross, by a straight line where both jump.

    Args:
        before: FNMR at a score.
        match_before: FMR there.
        after: FNMR just above it, not below FMR.
        match_after: FMR there.
    """
    if before >= match_before:
        return before
    step = (match_before - before) / ((match_before - before) + (after - match_after))
    return before + step * (after - before)


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
