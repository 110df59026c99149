"""The search for the operating points, each of which is decided by how many negatives reach the score of some relevant pair.

All pairs are never held. During the pass for the ranks a histogram of the whole range is made, and the highest negatives are
collected, as many as a sample of the pairs says will be needed. What these leave open is proved to lie in a narrow interval.
There the pairs are counted against the relevant ones exactly: those that were collected, or, where the interval reaches
below them, all, in one more pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fewshot_callbacks.engine import PairCounts
from fewshot_callbacks.engine.pooled import Located, OpenQuestions, Recount, ThresholdBins
from fewshot_callbacks.functional.retrieval import threshold_rules as rules
from fewshot_callbacks.functional.retrieval.operating_points import (
    Enclosure,
    ErrorRatePoint,
    OperatingPoint,
    PooledDecisions,
)
from fewshot_callbacks.functional.retrieval.pair_counts import thinned
from fewshot_callbacks.functional.retrieval.threshold_rules import Bools, Ints, PooledRequest, most_false_positives

CURVE_POINTS = 200
EARLY_RANKS = 2**14
"""Negatives whose scores are asked for early, since one of them will matter; more cost more than another pass may."""

MOST_RECOUNTS = 1000
"""Recounts after which the search gives up, instead of going on for ever: one or two are the rule."""


@dataclass(frozen=True)
class Open:
    """What one question leaves open; see `OpenQuestions`."""

    decisive: Bools | None = None
    wanted: tuple[float, ...] = ()
    sought: tuple[tuple[float, float], ...] = ()
    early: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Known:
    """What has been counted: during the pass, and last."""

    first: PairCounts
    first_bins: ThresholdBins
    counts: PairCounts | Recount
    bins: ThresholdBins

    def settled(self, decisive: Bools) -> Ints | Open:
        """Return the decisive bins if each is a single score; else they are open."""
        return np.flatnonzero(decisive) if bool(self.bins.single[decisive].all()) else Open(decisive)

    def point(self, threshold: float, tp: int, fp: int) -> OperatingPoint:
        """Return the point of a threshold with these true and false positives."""
        return OperatingPoint(threshold, tp, fp, self.first_bins.relevant - tp)

    def point_of(self, index: int) -> OperatingPoint:
        """Return the point of a bin that is a single score."""
        bins = self.bins
        threshold = self.first.scores.to_user_score(float(bins.low[index]))
        return self.point(threshold, int(bins.tp[index]), int(bins.fewest_fp[index]))


def decide(first: PairCounts, request: PooledRequest) -> PooledDecisions:
    """Find the operating points after a pass.

    Args:
        first: What is known of all pairs.
        request: The requested operating points.

    Returns:
        The points; each is exact. The area under the curve is enclosed by proved bounds.
    """
    bins, answers, passes = first.bins(), dict[Hashable, Any](), 1
    questions: dict[Hashable, Callable[[Known], Any]] = {
        "f1": _best_f1,
        **{("precision", asked): _AtPrecision(asked, request.bounds) for asked in request.precisions},
        **{("threshold", asked): partial(_at_threshold, threshold=asked) for asked in request.thresholds},
        **{("rate", asked): partial(_at_false_match_rate, rate=asked) for asked in request.false_match_rates},
    }
    if request.equal_error_rate:
        questions["eer"] = _equal_error_rate
    if request.average_precision:
        questions["area"] = _area
    asked = _ask(Known(first, bins, first, bins), questions, answers)
    coarse = asked.decisive & (bins.low < bins.high) if asked is not None else np.zeros(0, bool)
    if coarse.any() and not request.average_precision:  # each relevant score in a bin leaves less open than the bin
        asked = _ask(Known(first, bins, first, first.bins(bins.of(coarse))), questions, answers)
    recounts = 0
    while asked is not None:
        recounts += 1
        if recounts > MOST_RECOUNTS:
            raise RuntimeError(
                f"evaluate_retrieval: {MOST_RECOUNTS} recounts of the pairs have not settled the thresholds. Does something "
                "flush denormal numbers to zero while it runs, such as torch.set_flush_denormal(True) in a callback? If "
                "not, please report this error."
            )
        counts, scanned = first.count_exactly(asked)
        passes += scanned
        asked = _ask(Known(first, bins, counts, counts.bins()), questions, answers)
        del counts  # the next ones need the memory
    return PooledDecisions(
        best_f1=answers["f1"],
        at_precision={precision: answers["precision", precision] for precision in request.precisions},
        at_threshold={threshold: answers["threshold", threshold] for threshold in request.thresholds},
        at_false_match_rate={rate: answers["rate", rate] for rate in request.false_match_rates},
        equal_error_rate=answers.get("eer"),
        average_precision=answers.get("area") or rules.average_precision(bins),
        curve=rules.curve(bins, first.scores.to_user_scores, CURVE_POINTS),
        pair_counts=thinned(first.histogram(), first.scores.to_user_scores, _points(answers)),
        passes=passes,
    )


def _points(answers: dict[Hashable, Any]) -> Iterator[tuple[float, int, int]]:
    """Yield the thresholds that were found, with their true and false positives."""
    for answer in answers.values():
        if isinstance(answer, OperatingPoint) and math.isfinite(answer.threshold):
            yield answer.threshold, answer.true_positives, answer.false_positives


def _ask(
    known: Known, questions: dict[Hashable, Callable[[Known], Any]], answers: dict[Hashable, Any]
) -> OpenQuestions | None:
    """Add the answers that can be given; return what the others need, None if there are none."""
    opened = []
    for name in [name for name in questions if name not in answers]:
        answer = questions[name](known)
        if isinstance(answer, Open):
            opened.append(answer)
        else:
            answers[name] = answer
    if not opened:
        return None
    decisive = np.zeros(len(known.bins.low), bool)
    for part in opened:
        if part.decisive is not None:
            decisive |= part.decisive
    return OpenQuestions(
        known.bins,
        decisive,
        rules.likely_best_f1(known.bins, np.flatnonzero(decisive)),
        [threshold for part in opened for threshold in part.wanted],
        sorted({interval for part in opened for interval in part.sought}),
        sorted({interval for part in opened for interval in part.early}),
    )


def _best_f1(known: Known) -> OperatingPoint | Open:
    """The highest threshold with the best F1."""
    chosen = known.settled(rules.best_f1(known.bins))
    return chosen if isinstance(chosen, Open) else known.point_of(int(chosen[-1]))


def _at_threshold(known: Known, threshold: float) -> OperatingPoint | Open:
    score = known.first.scores.to_exact_score(threshold)
    accepted = known.counts.accepted(score)
    return Open(wanted=(score,)) if accepted is None else known.point(threshold, *accepted)


def _at_false_match_rate(known: Known, rate: float) -> ErrorRatePoint | Open:
    bins, chosen = known.bins, known.settled(rules.at_false_match_rate(known.bins, rate))
    if isinstance(chosen, Open):
        return chosen
    if not bins.negatives:
        return ErrorRatePoint(math.nan, math.nan, math.nan)
    if not len(chosen):
        return ErrorRatePoint(math.nan, 0.0, 1.0)
    point = known.point_of(int(chosen[0]))
    return ErrorRatePoint(
        point.threshold, point.false_positives / bins.negatives, 1 - point.true_positives / bins.relevant
    )


def _equal_error_rate(known: Known) -> float | Open:
    chosen = known.settled(rules.equal_error_rate(known.bins))
    if isinstance(chosen, Open):
        return chosen
    return rules.crossing(known.bins, int(chosen[0])) if len(chosen) else math.nan


def _area(known: Known) -> Enclosure | Open:
    """The area under the precision-recall curve: what the pass knew of single scores, and the rest from exact counts."""
    bins, singles = known.bins, known.first_bins.of(known.first_bins.single)
    if known.counts is known.first:
        return rules.average_precision(bins) if bool(bins.single.all()) else Open(~bins.single)
    before = rules.average_precision(singles)
    rest = rules.average_precision(bins.of(~(np.isin(bins.low, singles.low) & bins.single)))
    return Enclosure(before.low + rest.low, before.high + rest.high)


class _AtPrecision:
    """The search for the smallest threshold with a precision.

    It begins at the smallest relevant score that reaches the precision, or the upper bound of thresholds if that reaches
    it, and goes down as many negatives as may be accepted there.

    Args:
        precision: At least this.
        bounds: Of the thresholds.
    """

    def __init__(self, precision: float, bounds: tuple[float, float]) -> None:
        self.precision, self.bounds = precision, bounds
        self.start: OperatingPoint | None = None
        self.rank = 0
        """the negative of this rank, in descending order of the scores, is the last that may be accepted"""
        self.is_above_low = False
        """whether the lower bound of thresholds accepts more than may be"""
        self.located: dict[int, tuple[float, float]] = {}
        """rank of a negative -> scores between which it lies"""

    def __call__(self, known: Known) -> OperatingPoint | Open:
        """Return the point of that threshold; NaN if no threshold has the precision."""
        if self.start is None:
            start = self._find_start(known)
            if isinstance(start, Open) or math.isnan(start.threshold):
                return start
            self.start, self.rank = start, self._most(known, start)
            self.is_above_low = not math.isfinite(known.first.scores.to_exact_score(self.bounds[0]))
        return self._lowest(known, self.start)

    def _most(self, known: Known, start: OperatingPoint) -> int:
        """Return how many false positives the true positives of the start allow."""
        return min(most_false_positives(start.true_positives, self.precision), known.first_bins.negatives)

    def _find_start(self, known: Known) -> OperatingPoint | Open:
        """Find where the search begins.

        Only precision matters there: between two relevant scores no threshold has more true positives or fewer false ones
        than the upper score.
        """
        low, high = (known.first.scores.to_exact_score(bound) for bound in self.bounds)
        possible = rules.at_precision(known.bins, self.precision, low, high)
        chosen = known.settled(possible)
        if isinstance(chosen, Open):
            return Open(possible, early=self._foreseen(known, possible))
        if len(chosen):
            return known.point_of(int(chosen[0]))
        accepted = known.counts.accepted(high) if math.isfinite(high) else (0, 0)
        if accepted is None:
            return Open(wanted=(high,))
        point = known.point(self.bounds[1], *accepted)
        return point if point.precision >= self.precision else known.point(math.nan, 0, 0)

    def _foreseen(self, known: Known, possible: Bools) -> tuple[tuple[float, float], ...]:
        """Return between which scores the negative lies that will be sought from a start in one of some bins."""
        bins = known.bins.of(possible)
        fewest = bins.tp - np.where(bins.single, 0, bins.positives - 1)
        first, last = (
            min(most_false_positives(int(tp), self.precision), bins.negatives) for tp in (fewest.min(), bins.tp.max())
        )
        if first <= 0 or last - first > EARLY_RANKS:
            return ()
        return ((self._locate(known, last).low, self._locate(known, first).high),)

    def _lowest(self, known: Known, start: OperatingPoint) -> OperatingPoint | Open:
        """Return the point of the smallest threshold that accepts no more negatives than it may.

        No relevant score lies between this threshold and the start's: a lower relevant score in bounds accepts more
        negatives than even its own true positives allow, or it would be the start.
        """
        most, low = self._most(known, start), known.first.scores.to_exact_score(self.bounds[0])
        if not self.is_above_low:
            all_fit = most == known.first_bins.negatives
            beyond = Located(-math.inf, -math.inf) if all_fit else self._locate(known, most + 1)
            self.is_above_low = beyond.low >= low
            accepted = None if self.is_above_low or beyond.high >= low else known.counts.accepted(low)
            if accepted is not None:
                return known.point(self.bounds[0], *accepted)
            if not self.is_above_low:
                return Open(wanted=(low,))
        while self.rank > start.false_positives:
            found = self._locate(known, self.rank)
            if found.reached is None:
                return Open(sought=((found.low, found.high),))
            if found.reached <= most:
                return known.point(known.first.scores.to_user_score(found.low), start.true_positives, found.reached)
            self.rank = found.above  # the next ones have the same score, and are too many
        return start

    def _locate(self, known: Known, rank: int) -> Located:
        """Return where the negative of a rank lies, by all that is known."""
        low, high = self.located.get(rank, (-math.inf, math.inf))
        for counts in (known.first, known.counts):
            found = counts.locate(rank)
            if found.reached is not None:
                return found
            low, high = max(low, found.low), min(high, found.high)
        self.located[rank] = low, high
        return Located(low, high)
