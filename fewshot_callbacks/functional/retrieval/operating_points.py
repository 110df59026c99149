"""Pooled operating points: every query-candidate pair is one decision, accepted if its score reaches a threshold.

Precision, recall and F1 at a threshold, the threshold of the best F1, recall at a fixed precision, the false non-match
rate at a fixed false match rate and the equal error rate: each is decided by how many negatives reach the score of some
relevant pair. All pairs are never held. While they pass for the ranks, a histogram of the whole range is made, and the
highest negatives are noted, as many as a sample of the pairs says will be needed. What these leave undecided is proved to
lie in a narrow interval. There the pairs are counted against the relevant ones exactly: those that were noted, or, where
the interval reaches below them, all, in one more scan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fewshot_callbacks.engine import (
    FirstCounts,
    HammingCounts,
    Located,
    OpenQuestions,
    Recount,
    ThresholdBins,
    count_exactly,
    plan_recount,
)
from fewshot_callbacks.functional.retrieval import threshold_rules as rules
from fewshot_callbacks.functional.retrieval.threshold_rules import (
    Bools,
    Enclosure,
    Ints,
    PooledRequest,
    most_false_positives,
)

__all__ = ["Enclosure", "ErrorRatePoint", "OperatingPoint", "PooledDecisions", "PooledRequest", "decide"]

CURVE_POINTS = 200
EARLY_RANKS = 2**14
"""Negatives whose keys are asked for early, since one of them will matter; more cost more than another scan may."""


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
    """thinned: threshold, precision and recall, by ascending recall; precision within the enclosure of its cell"""
    walks: int
    """how often all pairs had to be looked at"""


def decide(first: FirstCounts | HammingCounts, request: PooledRequest) -> PooledDecisions:
    """Find the operating points after a pass.

    Args:
        first: what is known of all pairs.
        request: what is asked of them.

    Returns:
        The points; each is exact. The area under the curve is enclosed by proved bounds.
    """
    search = _Search(first, request)
    while search.open and isinstance(first, FirstCounts):  # of codes everything is known
        recount = plan_recount(first, search.questions())
        search.forget()
        search.walks += count_exactly(first, recount)
        search.take(recount, recount.cells())
    return search.decisions()


@dataclass
class _Start:
    """The smallest relevant score that reaches a precision, or the upper bound of thresholds if that reaches it."""

    point: OperatingPoint
    most: int
    """false positives that the true positives of this point allow"""
    rank: int
    """the negative of this rank, in descending order of the scores, is the last that may be accepted"""
    above_low: bool
    """whether the lower bound of thresholds accepts more than may be"""


class _Search:
    """What has been decided so far, and what is still open.

    Args:
        first: what is known of all pairs after a pass.
        request: what is asked of them.
    """

    def __init__(self, first: FirstCounts | HammingCounts, request: PooledRequest) -> None:
        self.first, self.request, self.scores = first, request, first.scores
        self.low, self.high = (self.scores.to_exact_score(bound) for bound in self.request.bounds)
        self.best_f1: OperatingPoint | None = None
        self.starts: dict[float, _Start] = {}
        self.located: dict[int, tuple[float, float]] = {}
        """rank of a negative -> keys between which it lies"""
        self.at_precision: dict[float, OperatingPoint] = {}
        self.at_threshold: dict[float, OperatingPoint] = {}
        self.at_rate: dict[float, ErrorRatePoint] = {}
        self.crossing: float | None = None
        self.area: Enclosure | None = None
        self.walks = 1
        self.initial = first.cells()
        self.take(first, self.initial)

    @property
    def open(self) -> bool:
        """Whether another look is needed."""
        return bool(self.decisive.any() or self.wanted or self.sought)

    def questions(self) -> OpenQuestions:
        """Return what is still open, for a recount."""
        likely = rules.likely_best_f1(self.cells, np.flatnonzero(self.decisive))
        return OpenQuestions(self.cells, self.decisive, likely, self.wanted, sorted(self.sought), sorted(self.early))

    def take(self, look: FirstCounts | Recount | HammingCounts, cells: ThresholdBins) -> None:
        """Decide what a look allows to decide."""
        self.look, self.cells = look, cells
        self.decisive = np.zeros(len(cells.low), bool)
        self.wanted: list[float] = []
        self.sought: set[tuple[float, float]] = set()
        self.early: set[tuple[float, float]] = set()
        if self.best_f1 is None and (chosen := self._settled(rules.best_f1(cells))) is not None:
            self.best_f1 = self._point_of(int(chosen[-1]))
        for precision in self.request.precisions:
            if precision not in self.at_precision and precision not in self.starts:
                self._find_precision(precision)
            if precision in self.starts and (lowest := self._lowest(self.starts[precision])) is not None:
                self.at_precision[precision] = lowest
                del self.starts[precision]
        for threshold in self.request.thresholds:
            if threshold not in self.at_threshold:
                self._find_threshold(threshold)
        for rate in self.request.false_match_rates:
            if (
                rate not in self.at_rate
                and (chosen := self._settled(rules.at_false_match_rate(cells, rate))) is not None
            ):
                self.at_rate[rate] = self._rates_of(chosen)
        if self.request.equal_error_rate and self.crossing is None:
            chosen = self._settled(rules.equal_error_rate(cells))
            if chosen is not None:
                self.crossing = rules.crossing(cells, int(chosen[0])) if len(chosen) else math.nan
        if self.request.average_precision and self.area is None:
            self._find_area()

    def forget(self) -> None:
        """Let go of what the last look has told: the next one needs the memory."""
        self.look, self.cells = self.first, self.initial
        self.decisive = np.zeros(0, bool)

    def decisions(self) -> PooledDecisions:
        """All that was asked for."""
        assert self.best_f1 is not None
        return PooledDecisions(
            best_f1=self.best_f1,
            at_precision={precision: self.at_precision[precision] for precision in self.request.precisions},
            at_threshold=self.at_threshold,
            at_false_match_rate={rate: self.at_rate[rate] for rate in self.request.false_match_rates},
            equal_error_rate=self.crossing,
            average_precision=self.area or rules.average_precision(self.initial),
            curve=rules.curve(self.initial, self.scores.to_user_score, CURVE_POINTS),
            walks=self.walks,
        )

    def _settled(self, decisive: Bools) -> Ints | None:
        """The decisive cells, if each is a single key; else they have to be looked at again."""
        if bool(self.cells.single[decisive].all()):
            return np.flatnonzero(decisive)
        self.decisive |= decisive
        return None

    def _point(self, threshold: float, tp: int, fp: int) -> OperatingPoint:
        return OperatingPoint(threshold, tp, fp, self.initial.relevant - tp)

    def _point_of(self, cell: int) -> OperatingPoint:
        cells = self.cells
        threshold = self.scores.to_user_score(float(cells.low[cell]))
        return self._point(threshold, int(cells.tp[cell]), int(cells.fewest_fp[cell]))

    def _find_precision(self, precision: float) -> None:
        """Find the smallest relevant key, or else the upper bound, at which a precision is reached.

        Only precision matters there: between two relevant keys no threshold has more true positives or fewer false ones
        than the upper key.
        """
        possible = rules.at_precision(self.cells, precision, self.low, self.high)
        chosen = self._settled(possible)
        if chosen is None:
            self._foresee(precision, possible)
            return
        if len(chosen):
            self._start(precision, self._point_of(int(chosen[0])))
            return
        at_bound = self.look.accepted(self.high) if math.isfinite(self.high) else (0, 0)
        if at_bound is None:
            self.wanted.append(self.high)
        elif (point := self._point(self.request.bounds[1], *at_bound)).precision >= precision:
            self._start(precision, point)
        else:
            self.at_precision[precision] = self._point(math.nan, 0, 0)

    def _foresee(self, precision: float, possible: Bools) -> None:
        """Note between which keys the negative lies that will be sought from a start in one of some cells."""
        cells = self.cells.of(possible)
        fewest = cells.tp - np.where(cells.single, 0, cells.positives - 1)
        ranks = [
            min(most_false_positives(int(tp), precision), cells.negatives) for tp in (fewest.min(), cells.tp.max())
        ]
        if ranks[0] > 0 and ranks[1] - ranks[0] <= EARLY_RANKS:
            self.early.add((self._locate(ranks[1]).low, self._locate(ranks[0]).high))

    def _start(self, precision: float, point: OperatingPoint) -> None:
        most = min(most_false_positives(point.true_positives, precision), self.initial.negatives)
        self.starts[precision] = _Start(point, most, most, above_low=not math.isfinite(self.low))

    def _lowest(self, start: _Start) -> OperatingPoint | None:
        """The point of the smallest threshold that accepts no more negatives than it may; None if that is still open.

        No relevant key lies between this threshold and the start's: a lower relevant key in bounds accepts more negatives
        than even its own true positives allow, or it would be the start.
        """
        tp = start.point.true_positives
        if not start.above_low:
            fewer = start.most == self.initial.negatives
            beyond = Located(-math.inf, -math.inf) if fewer else self._locate(start.most + 1)
            start.above_low = beyond.low >= self.low
            counts = None if start.above_low or beyond.high >= self.low else self.look.accepted(self.low)
            if counts is not None:
                return self._point(self.request.bounds[0], *counts)
            if not start.above_low:
                self.wanted.append(self.low)
                return None
        while start.rank > start.point.false_positives:
            place = self._locate(start.rank)
            if place.reached is None:
                self.sought.add((place.low, place.high))
                return None
            if place.reached <= start.most:
                return self._point(self.scores.to_user_score(place.low), tp, place.reached)
            start.rank = place.above  # the next ones have the same key, and are too many
        return start.point

    def _locate(self, rank: int) -> Located:
        """Where the negative of a rank lies, by all that is known."""
        low, high = self.located.get(rank, (-math.inf, math.inf))
        for look in (self.first, self.look):
            place = look.locate(rank)
            if place.reached is not None:
                return place
            low, high = max(low, place.low), min(high, place.high)
        self.located[rank] = low, high
        return Located(low, high)

    def _find_threshold(self, threshold: float) -> None:
        key = self.scores.to_exact_score(threshold)
        counts = self.look.accepted(key)
        if counts is None:
            self.wanted.append(key)
        else:
            self.at_threshold[threshold] = self._point(threshold, *counts)

    def _rates_of(self, chosen: Ints) -> ErrorRatePoint:
        cells = self.cells
        if not cells.negatives:
            return ErrorRatePoint(math.nan, math.nan, math.nan)
        if not len(chosen):
            return ErrorRatePoint(math.nan, 0.0, 1.0)
        cell = int(chosen[0])
        return ErrorRatePoint(
            self.scores.to_user_score(float(cells.low[cell])),
            float(cells.fewest_fp[cell] / cells.negatives),
            float(1 - cells.tp[cell] / cells.relevant),
        )

    def _find_area(self) -> None:
        cells = self.cells
        if self.look is self.first and not bool(cells.single.all()):
            self.decisive |= ~cells.single
            return
        self.area = rules.average_precision(cells)
        if self.look is not self.first:  # what the first look knew of single keys, and the rest from this one
            singles = self.initial.of(self.initial.single)
            known = rules.average_precision(singles)
            rest = rules.average_precision(cells.of(~(np.isin(cells.low, singles.low) & cells.single)))
            self.area = Enclosure(known.low + rest.low, known.high + rest.high)
