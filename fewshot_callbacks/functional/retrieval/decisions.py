"""Decisions over all pairs: each query-candidate pair is accepted if its score reaches a threshold.

`decide` finds the thresholds of a report (`OperatingPoint`, `ErrorRatePoint`). Most of them are the scores of relevant pairs
that the searches in `engine/pooled/questions.py` find, such as `BestF1`. There are two exceptions: a fixed threshold, and
the largest allowed threshold if only scores above it reach a precision (`_OperatingPoints.at_precision`).

The metrics `pair_f1`, `pair_precision`, `pair_recall` and `pair_threshold` read `PooledDecisions.decision`: the point of
`BestF1`, unless a threshold was fixed. Pairs with equal scores are accepted together, so no rule for ties is needed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fewshot_callbacks.engine.evaluation import PooledPairs
from fewshot_callbacks.engine.pooled.areas import PooledAreas
from fewshot_callbacks.engine.pooled.questions import (
    BestF1,
    LowestScore,
    Question,
    at_false_match_rate,
    at_precision,
    rates_cross,
)
from fewshot_callbacks.engine.pooled.search import Accepted, ThresholdSearch
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional.retrieval.operating_points import (
    Enclosure,
    ErrorRatePoint,
    OperatingPoint,
    equal_error_rate,
)
from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts, count_pairs, first_with_at_most, to_user

CURVE_POINTS = 200
# A warning announces this many passes over all pairs (the other work is then negligible) if they score at least
# `MANY_SCORED` pairs, which takes a second or more.
MANY_PASSES = 20
MANY_SCORED = 2**27


@equal_with_nan
@dataclass(frozen=True)
class PooledDecisions:
    """The decisions over all pairs of one evaluation: operating points, areas and curves.

    Attributes:
        best_f1: Point with the best F1.
        at_precision: Requested precision -> point of the smallest relevant score that reaches it.
        at_threshold: Fixed threshold -> point at this threshold.
        at_false_match_rate: Requested false match rate -> point of the smallest relevant score that keeps it.
        equal_error_rate: Rate at which false matches and false non-matches are equally frequent; None if not requested.
        auc_pr: Bounds on the area under the pooled precision-recall curve, the sum of precision times the step in recall.
        curve: (threshold, precision, recall) by ascending recall, thinned. Precision is within the enclosure of its bin.
        pair_counts: Numbers of pairs at a few hundred thresholds, including the thresholds of the points.
        passes: How often all pairs were scored.
        auroc: Probability that a relevant pair scores higher than an irrelevant pair, with ties as one half; None if not
            requested.
    """

    best_f1: OperatingPoint
    at_precision: dict[float, OperatingPoint]
    at_threshold: dict[float, OperatingPoint]
    at_false_match_rate: dict[float, ErrorRatePoint]
    equal_error_rate: float | None
    auc_pr: Enclosure = field(compare=False)
    curve: tuple[tuple[float, float, float], ...] = field(compare=False, repr=False)
    pair_counts: PairCounts = field(compare=False, repr=False)
    passes: int = field(compare=False, repr=False)
    auroc: float | None = None

    @property
    def decision(self) -> OperatingPoint:
        """The point at the first fixed threshold; without a fixed threshold, the point with the best F1."""
        return next(iter(self.at_threshold.values()), self.best_f1)

    def __str__(self) -> str:
        """Return one point per line."""
        lines = [f"best F1: {self.best_f1}"]
        lines += [f"given threshold: {point}" for point in self.at_threshold.values()]
        lines += [f"precision of at least {precision:g}: {point}" for precision, point in self.at_precision.items()]
        lines += [f"false match rate of at most {rate:g}: {point}" for rate, point in self.at_false_match_rate.items()]
        if self.equal_error_rate is not None:
            lines.append(f"equal error rate: {self.equal_error_rate:.4f}")
        if self.auroc is not None:
            lines.append(f"area under the ROC curve: {self.auroc:.4f}")
        return "\n".join([*lines, f"area under the precision-recall curve: {self.auc_pr.value:.4f}"])

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class PooledRequest:
    """The requested pooled metrics, with their settings in the units of the data."""

    precisions: Sequence[float] = ()
    allowed_thresholds: tuple[float, float] = (-math.inf, math.inf)
    """the smallest and the largest allowed threshold for recall at a fixed precision"""
    thresholds: Sequence[float] = ()
    """fixed thresholds at which precision, recall and F1 are requested"""
    false_match_rates: Sequence[float] = ()
    equal_error_rate: bool = False
    average_precision: bool = False
    """whether the exact area under the precision-recall curve is requested; without it there are bounds"""
    auroc: bool = False
    """whether the area under the ROC curve is requested"""

    def questions(self, low: float = -math.inf, high: float = math.inf) -> list[Question]:
        """Return the searches among relevant scores: best F1, precisions, false match rates, equal error rate.

        `low` and `high` are the range of exact scores that may be the threshold of a precision.
        """
        questions: list[Question] = [BestF1()]
        questions += [at_precision(precision, low, high) for precision in self.precisions]
        questions += [at_false_match_rate(rate) for rate in self.false_match_rates]
        if self.equal_error_rate:
            questions.append(LowestScore(rates_cross, counts_above=True))
        return questions


class _OperatingPoints:
    """The operating points of an evaluation, in the units of the data. All methods are *Collective*."""

    def __init__(self, search: ThresholdSearch) -> None:
        self._search = search
        self._vectors = search.vectors
        self._grid = search.grid
        self._negatives = search.negatives

    def best_f1(self, answer: Accepted | None) -> OperatingPoint:
        """Return the point with the best F1, given the answer to `BestF1`; NaN if there are no relevant pairs."""
        return self._no_point() if answer is None else self._point_of(answer)

    def at_threshold(self, threshold: float) -> OperatingPoint:
        """Return the point at a threshold in the units of the data."""
        accepted = self._search.accepted(float(self._vectors.scale.from_user(threshold)))
        return self._point(threshold, accepted)

    def at_precision(
        self, answer: Accepted | None, precision: float, allowed_thresholds: tuple[float, float]
    ) -> OperatingPoint:
        """Return the point of the smallest relevant score with a precision, or of the largest threshold; else NaN.

        `answer` is this score; None if there is none. `allowed_thresholds` is a range in the units of the data.
        """
        if answer is not None:
            return self._point_of(answer)
        # Among thresholds between two relevant scores, the highest accepts the fewest negatives.
        _, largest = allowed_thresholds
        accepted = self._search.accepted(float(self._vectors.scale.from_user(largest)))
        pairs = accepted.true_positives + accepted.false_positives
        if math.isfinite(largest) and pairs > 0 and accepted.true_positives / pairs >= precision:
            return self._point(largest, accepted)
        return self._no_point()

    def _point_of(self, answer: Accepted) -> OperatingPoint:
        """Return the point at a relevant score."""
        return self._point(to_user(self._vectors, answer.score), answer)

    def _point(self, threshold: float, accepted: Accepted) -> OperatingPoint:
        """Return the point at a threshold in the units of the data, given the accepted pairs."""
        rejected = self._grid.total - accepted.true_positives
        return OperatingPoint(threshold, accepted.true_positives, accepted.false_positives, rejected)

    def _no_point(self) -> OperatingPoint:
        """Return the point for a request that no threshold meets."""
        return self._point(math.nan, Accepted(math.nan, 0, 0))

    def at_rate(self, answer: Accepted | None) -> ErrorRatePoint:
        """Return the point at a false match rate, given the smallest relevant score that keeps it."""
        if not self._negatives.total:
            return ErrorRatePoint(math.nan, math.nan, math.nan)
        if answer is None:
            return ErrorRatePoint(math.nan, 0.0, 1.0)
        return ErrorRatePoint(
            threshold=to_user(self._vectors, answer.score),
            false_match_rate=answer.false_positives / self._negatives.total,
            false_non_match_rate=1 - answer.true_positives / self._grid.total,
        )

    def equal_error_rate(self, answer: Accepted | None) -> float:
        """Return the rate at which FNMR and FMR cross, at this relevant score or just above; NaN if they do not cross."""
        if answer is None or not self._negatives.total:
            return math.nan
        relevant = self._grid.total
        negatives = self._negatives.total
        above = int(self._grid.above[self._grid.scores == answer.score][0])
        fnmr = (relevant - answer.true_positives) / relevant
        fmr = answer.false_positives / negatives
        fnmr_above = fnmr + (answer.true_positives - above) / relevant
        fmr_above = self._search.negatives_reaching(float(np.nextafter(answer.score, np.inf))) / negatives
        return equal_error_rate(fnmr, fmr, fnmr_above, fmr_above)

    def curve(self) -> tuple[tuple[float, float, float], ...]:
        """Return threshold, precision and recall at relevant scores that are about evenly spaced in recall."""
        grid = self._grid
        if not grid.total:
            return ()
        recall = grid.reaching / grid.total
        positions = np.unique(first_with_at_most(recall, np.linspace(1, 0, CURVE_POINTS)))
        fewest, most = self._negatives.bounds(grid.scores[positions])
        precision = grid.reaching[positions] / (grid.reaching[positions] + (fewest + most) / 2)
        thresholds = self._vectors.scale.to_user(grid.scores[positions])
        # from the highest threshold down, so by ascending recall
        columns = (thresholds[::-1].tolist(), precision[::-1].tolist(), recall[positions][::-1].tolist())
        return tuple(zip(*columns, strict=True))


def decide(pooled: PooledPairs, request: PooledRequest) -> PooledDecisions:
    """Return the exact operating points of an evaluation, and proved bounds on the area. *Collective*."""
    search = ThresholdSearch(pooled)
    low, high = (float(score) for score in pooled.vectors.scale.from_user(request.allowed_thresholds))
    # in the order of `PooledRequest.questions`
    answers = iter(search.answers(request.questions(low, high)))
    points = _OperatingPoints(search)
    best_f1 = points.best_f1(next(answers))
    at_precision = {
        precision: points.at_precision(next(answers), precision, request.allowed_thresholds)
        for precision in request.precisions
    }
    at_rate = {rate: points.at_rate(next(answers)) for rate in request.false_match_rates}
    equal_error = points.equal_error_rate(next(answers)) if request.equal_error_rate else None
    at_threshold = {threshold: points.at_threshold(threshold) for threshold in request.thresholds}
    area, auroc = _areas(pooled, search, request)
    return PooledDecisions(
        best_f1=best_f1,
        at_precision=at_precision,
        at_threshold=at_threshold,
        at_false_match_rate=at_rate,
        equal_error_rate=equal_error,
        auc_pr=area,
        auroc=auroc,
        curve=points.curve(),
        pair_counts=count_pairs(pooled, [best_f1, *at_precision.values(), *at_threshold.values()]),
        passes=pooled.negatives.passes,
    )


def _areas(pooled: PooledPairs, search: ThresholdSearch, request: PooledRequest) -> tuple[Enclosure, float | None]:
    """Return the areas under the precision-recall curve and, if requested, under the ROC curve. *Collective*."""
    areas = PooledAreas(pooled, search.grid)
    # Codes have few distinct scores, so the exact area is cheap.
    is_exact = request.average_precision or pooled.vectors.scale.similarity == "hamming"
    if is_exact or request.auroc:
        _announce_passes(pooled, areas.expected_passes())
    if is_exact:
        area = areas.under_precision_recall()
        enclosure = Enclosure(area, area)
    else:
        enclosure = Enclosure(*areas.bounds_under_precision_recall())
    return enclosure, areas.under_roc() if request.auroc else None


def _announce_passes(pooled: PooledPairs, passes: int) -> None:
    """Warn if the areas need many passes over all pairs."""
    relevant = pooled.grid.total
    is_long = passes >= MANY_PASSES and passes * (relevant + pooled.negatives.total) >= MANY_SCORED
    if is_long and pooled.vectors.processes.rank == 0:
        warnings.warn(
            f"evaluate_retrieval: auc_pr and pair_auroc need up to {passes} more passes over all pairs, because the scores "
            f"of {relevant:,} relevant pairs exceed the budget. Pass a larger memory_mb (twice as much needs at most half "
            "as many passes), or leave these metrics out.",
            stacklevel=3,
        )
