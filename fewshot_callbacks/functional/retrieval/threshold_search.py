"""The search for the operating points: at which relevant score something holds, given how many negatives reach it.

Bounds of the counts leave a question one answer, or some scores at which it may lie; these are closed, and it is
asked again. Where not all relevant scores fit the memory, it is first found out between which of those that are held
the answer may lie.

A relevant score is enough: of all thresholds between two of them, which accept the same relevant pairs, the upper one
accepts the fewest others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.evaluation import Evaluation
from fewshot_callbacks.engine.pooled import Positives, Wanted
from fewshot_callbacks.functional.retrieval.operating_points import (
    Enclosure,
    ErrorRatePoint,
    OperatingPoint,
    PooledDecisions,
    equal_error_rate,
    thinned,
)

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = Ints | Floats
"""Exact numbers of pairs, or a sample's estimates of them."""
Holds = Callable[[Ints, Counts, int, float], Bools]
"""Whether something holds, given how many relevant pairs and how many negatives are accepted, and how many there are
of each; fewer negatives never hurt."""

CURVE_POINTS = 200
# Of the open scores of a question the most likely ones are closed first, and a few spaced ones: as a rule these settle
# all. With 2**16 random labels of 31,730 items took a third pass; each costs a product in float64.
CLOSED, SPACED = 2**19, 2**8
# Of the relevant scores: what so few of them accept is collected, where there is room, for a pass would cost more.
HIGHEST = 4

# A rate is compared with the requested one as the correctly rounded quotient of two counts: the number that a report
# shows, and so 14 of 25 reaches 0.56, though this float64 number is a little more than 14/25. Float64 division rounds
# correctly, and counts below 2**53 are float64 numbers. Rounding is monotone, so fewer false positives never do worse.


def precision_of(tp: Ints, fp: Counts) -> Floats:
    """Share of the accepted pairs that are relevant; 0 where none is accepted."""
    values: Floats = tp / np.maximum(tp + fp, 1)
    return values


def false_match_rate(fp: Counts, negatives: float) -> Floats:
    """Share of the negatives that are accepted; 0 where there are none."""
    values: Floats = fp / max(negatives, 1)
    return values


@dataclass(frozen=True)
class PooledRequest:
    """The pooled metrics that are requested, with their settings in the units of the data."""

    precisions: Sequence[float] = ()
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """the smallest and the largest threshold that may be chosen for recall at a fixed precision"""
    thresholds: Sequence[float] = ()
    """fixed thresholds at which precision, recall and F1 are requested"""
    false_match_rates: Sequence[float] = ()
    equal_error_rate: bool = False
    average_precision: bool = False
    """whether the area under the precision-recall curve is wanted exactly; bounds are always reported"""

    def questions(self, low: float = -math.inf, high: float = math.inf) -> list[Question]:
        """Return what is asked of relevant scores; the bounds are exact scores."""
        asked = [Question(), *(_at_precision(precision, low, high) for precision in self.precisions)]
        asked += map(_at_false_match_rate, self.false_match_rates)
        return asked + ([Question(_equal_error, above=True)] if self.equal_error_rate else [])

    def foresee(self, positives: Positives, fp: Floats, negatives: float) -> list[Wanted]:
        """Estimate, by a sample, how many negatives each question will need."""
        wanted = [question.wanted(positives, fp, negatives) for question in self.questions()]
        # where F1 is highest among the highest scores, a sample cannot say
        return [*wanted, Wanted(float(fp[-min(HIGHEST, len(fp))]), 0.0)]


@dataclass(frozen=True)
class Question:
    """The threshold that is sought: the lowest relevant score at which something holds, or that of the best F1."""

    holds: Holds | None = None
    low: float = -math.inf
    high: float = math.inf
    """between which it may lie"""
    above: bool = False
    """what lies above the threshold is counted, not what reaches it; then fewer relevant pairs do not hurt either"""

    def answer(self, positives: Positives, fewest: Ints, most: Ints, negatives: int) -> int | Ints | None:
        """Return the position of the score, None if there is none, or the positions that are open, the likely ones first.

        Args:
            positives: Relevant scores.
            fewest: Of negatives that are accepted at each.
            most: The same.
            negatives: How many there are.
        """
        if self.holds is None:
            low, high = (_f1(positives.reach, fp, positives.total) for fp in (most, fewest))
            possible = np.flatnonzero(high >= low.max())
            unsure = possible[fewest[possible] < most[possible]]
            return unsure[np.argsort(-(low + high)[unsure], kind="stable")] if len(unsure) else int(possible[-1])
        tp = positives.above if self.above else positives.reach
        allowed = (positives.scores >= self.low) & (positives.scores <= self.high)
        possible, certain = (
            np.flatnonzero(allowed & self.holds(tp, fp, positives.total, negatives)) for fp in (fewest, most)
        )
        if len(possible) == 0:
            return None
        if len(certain) and certain[0] == possible[0]:
            return int(certain[0])
        return possible[: np.searchsorted(possible, certain[0])] if len(certain) else possible

    def cells(self, positives: Positives, fewest: Ints, most: Ints, negatives: int) -> Bools:
        """Find between which of the scores that are held the answer may lie."""
        tp, fp = np.append(positives.reach, 0) if self.above else positives.most, np.append(fewest, 0)
        if self.holds is None:
            best = _f1(positives.reach, most, positives.total).max(initial=0.0)
            possible = _f1(tp, fp, positives.total) >= best
        else:
            possible = self.holds(tp, fp, positives.total, negatives)
            possible &= np.append(positives.scores, np.inf) >= self.low
            possible &= np.append(-np.inf, positives.scores) <= self.high
            held = positives.above if self.above else positives.reach
            allowed = (positives.scores >= self.low) & (positives.scores <= self.high)
            certain = np.flatnonzero(allowed & self.holds(held, most, positives.total, negatives))
            possible[certain[0] + 1 if len(certain) else len(tp) :] = False
        may_hold: Bools = possible & (positives.between > 0)
        return may_hold

    def wanted(self, positives: Positives, fp: Floats, negatives: float) -> Wanted:
        """Return how many negatives will matter, by a sample, and how many prove that no lower score is the answer."""
        tp, total = positives.reach, positives.total
        if self.holds is None:  # near its maximum F1 is flat: the lowest of all scores that come close
            f1 = 2 * tp / (tp + fp + total)
            return Wanted(float(fp[np.argmax(f1 >= 0.95 * f1.max())]), 2 * total * (1 / f1.max() - 1))
        reached = np.flatnonzero(self.holds(positives.above if self.above else tp, fp, total, negatives))
        needed = float(fp[reached[0]]) if len(reached) else 0.0
        if self.above:
            return Wanted(needed, needed)
        none_below = np.flatnonzero(~self.holds(np.full(len(tp), total), fp, total, negatives))
        return Wanted(needed, float(fp[none_below[-1]]) if len(none_below) else 0.0)


def _f1(tp: Ints, fp: Ints, relevant: int) -> Floats:
    values: Floats = 2 * tp / np.maximum(tp + fp + relevant, 1)
    return values


def _at_precision(precision: float, low: float, high: float) -> Question:
    """Ask for the lowest relevant score in bounds at which at least this share of the accepted pairs is relevant."""
    return Question(lambda tp, fp, *_: (tp > 0) & (precision_of(tp, fp) >= precision), low, high)


def _at_false_match_rate(rate: float) -> Question:
    """Ask for the lowest relevant score that accepts at most this share of the negatives."""
    return Question(lambda tp, fp, relevant, negatives: false_match_rate(fp, negatives) <= rate)


def _equal_error(tp: Ints, fp: Counts, relevant: int, negatives: float) -> Bools:
    """Find where no smaller share of the relevant pairs is rejected than of the others accepted."""
    held: Bools = (relevant - tp) / max(relevant, 1) >= fp / max(negatives, 1)
    return held


class ThresholdSearch:
    """Finds the operating points of an evaluation that has run; collective.

    Args:
        done: The evaluation.
    """

    def __init__(self, done: Evaluation) -> None:
        self.done, self.negatives, self.positives = done, done.negatives, done.positives
        self.vectors, self.processes, self.room = done.vectors, done.vectors.processes, done.layout.knots

    def answers(self, questions: Sequence[Question]) -> list[tuple[float, int, int] | None]:
        """Return the score of each answer, and the relevant pairs and the negatives that reach it; None if there is none."""
        found: list[tuple[float, int, int] | None] = [None] * len(questions)
        waiting = list(range(len(questions))) if self.positives.total else []
        before: tuple[int, ...] = ()
        while waiting:
            positives, total = self.positives, self.negatives.total
            scores = {False: positives.scores, True: np.nextafter(positives.scores, np.inf)}
            bounds = {above: self.negatives.bounds(scores[above]) for above in {questions[n].above for n in waiting}}
            known = len(waiting), len(positives.scores), *(int((most - low).sum()) for low, most in bounds.values())
            if known == before or not len(positives.scores):  # each round settles a question, or learns something
                raise RuntimeError(
                    "evaluate_retrieval: the thresholds cannot be settled, since neighbouring scores are no longer told "
                    "apart: something flushes denormal numbers to zero meanwhile. Do not call torch.set_flush_denormal "
                    "in a callback."
                )
            before = known
            left, unsure, cells = [], [], np.zeros(len(positives.scores) + 1, bool)
            for number in waiting:
                question = questions[number]
                fewest, most = bounds[question.above]
                at = question.answer(positives, fewest, most, total)
                some = question.cells(positives, fewest, most, total)
                inside = int(positives.between[some].sum())
                sure = not isinstance(at, np.ndarray) and (at is None or fewest[at] == most[at])
                if sure and inside == 0:
                    if at is not None:
                        found[number] = self._point(float(positives.scores[at]))
                    continue
                left.append(number)
                if sure or 0 < inside <= self.room:
                    cells |= some
                else:
                    likely = np.atleast_1d(np.asarray(at))
                    spaced = likely[np.linspace(0, len(likely) - 1, min(len(likely), SPACED)).astype(np.int64)]
                    unsure.append(scores[question.above][np.append(spaced, likely[: min(CLOSED, self.room)])])
            if cells.any():  # it takes no pass over the pairs, and then all can be closed by one
                self.positives = positives.opened(cells, self.done.parts, self.room, self.processes)
            elif unsure:
                self.negatives.close(np.unique(np.concatenate(unsure)))
            waiting = left
        return found

    def _point(self, score: float) -> tuple[float, int, int]:
        """Return a relevant score that is held, and the relevant pairs and the negatives that reach it."""
        at = int(np.searchsorted(self.positives.scores, score))
        return score, int(self.positives.reach[at]), self.reached(score)

    def reached(self, score: float) -> int:
        """Count the negatives that reach a score."""
        asked = np.array([score])
        self.negatives.close(asked)
        return int(self.negatives.bounds(asked)[0][0])

    def accepted(self, score: float) -> tuple[int, int]:
        """Count the relevant pairs and the negatives that reach a score."""
        if math.isinf(score):
            return (0, 0) if score > 0 else (self.positives.total, self.negatives.total)
        return int(self.done.relevant_reaching(np.array([score]))[0]), self.reached(score)

    def point(self, threshold: float, tp: int, fp: int) -> OperatingPoint:
        """Return the point of a threshold with these true and false positives."""
        return OperatingPoint(threshold, tp, fp, self.positives.total - tp)

    def user(self, score: float) -> float:
        """Return a score in the units of the data."""
        return float(self.vectors.to_user(np.array([score]))[0])

    def at_precision(
        self, found: tuple[float, int, int] | None, precision: float, bounds: tuple[float, float]
    ) -> OperatingPoint:
        """Return the point of the smallest relevant score with a precision, or of the upper bound; NaN if neither has it.

        Args:
            found: The smallest relevant score with this precision, with what it accepts.
            precision: At least this.
            bounds: Of thresholds.
        """
        if found is not None:
            score, tp, fp = found
            return self.point(self.user(score), tp, fp)
        # of thresholds between two relevant scores none accepts fewer others than the highest
        tp, fp = self.accepted(float(self.vectors.from_user(bounds)[1]))
        reaches = math.isfinite(bounds[1]) and tp + fp > 0 and tp / (tp + fp) >= precision
        return self.point(bounds[1], tp, fp) if reaches else self.point(math.nan, 0, 0)

    def at_rate(self, found: tuple[float, int, int] | None) -> ErrorRatePoint:
        """Return verification at a false match rate, given the smallest relevant score that keeps it."""
        if not self.negatives.total:
            return ErrorRatePoint(math.nan, math.nan, math.nan)
        if found is None:
            return ErrorRatePoint(math.nan, 0.0, 1.0)
        score, tp, fp = found
        return ErrorRatePoint(self.user(score), fp / self.negatives.total, 1 - tp / self.positives.total)

    def equal_error_rate(self, found: tuple[float, int, int] | None) -> float:
        """Return the rate at which FNMR and FMR cross, at this relevant score or just before it."""
        if found is None or not self.negatives.total:
            return math.nan
        score, tp, fp = found
        at, total, negatives = (
            int(np.searchsorted(self.positives.scores, score)),
            self.positives.total,
            self.negatives.total,
        )
        before = (total - tp) / total
        after = before + (tp - int(self.positives.above[at])) / total
        match_before, match_after = fp / negatives, self.reached(float(np.nextafter(score, np.inf))) / negatives
        return equal_error_rate(before, match_before, after, match_after)

    def area(self, *, exact: bool) -> Enclosure:
        """Return the area under the precision-recall curve, the mean of the precisions at the relevant pairs."""
        knots, negatives = self.positives, self.negatives
        if not exact:
            return _area(knots, *negatives.bounds(knots.scores), negatives.total)
        fewest, most = negatives.bounds(knots.scores)
        free = int(np.searchsorted(-np.append(negatives.total, most), 0))  # from here on no negative scores as high
        low = high = float(np.append(knots.most, 0)[free])
        # groups of cells, between two knots or above all, each with about as many relevant pairs as there is room for
        groups = (np.append(knots.total - knots.reach, knots.total) // max(1, self.room))[:free]
        for group in np.unique(groups):
            some = np.flatnonzero(groups == group)
            cells = np.isin(np.arange(len(knots.between)), some) & (knots.between > 0)
            pairs = int(knots.between[cells].sum())
            opened = knots.opened(cells, self.done.parts, pairs, self.processes) if pairs else knots
            ends = np.concatenate([[-np.inf], knots.scores, [np.inf]])[[some[0], some[-1] + 1]]
            inside = (opened.scores > ends[0]) & (opened.scores <= ends[1])
            negatives.close(opened.scores[inside])
            fewest, most = negatives.bounds(opened.scores[inside])
            reach, tied = opened.reach[inside], (opened.reach - opened.above)[inside]
            low += float((tied * reach / (reach + most)).sum())
            high += float((tied * reach / (reach + fewest)).sum())
        return Enclosure(low / max(1, knots.total), high / max(1, knots.total))

    def curve(self) -> tuple[tuple[float, float, float], ...]:
        """Return thresholds, precisions and recalls at relevant scores that are about evenly spaced in recall."""
        knots = self.positives
        if not knots.total:
            return ()
        recall = knots.reach / knots.total
        wanted = np.searchsorted(-recall, -np.linspace(1, 0, CURVE_POINTS)).clip(max=len(recall) - 1)
        chosen = np.unique(wanted)[::-1]
        fewest, most = (counts[::-1] for counts in self.negatives.bounds(knots.scores[chosen[::-1]]))
        precision = knots.reach[chosen] / (knots.reach[chosen] + (fewest + most) / 2)
        thresholds = self.vectors.to_user(knots.scores[chosen])
        return tuple(zip(thresholds.tolist(), precision.tolist(), recall[chosen].tolist(), strict=True))


def _area(knots: Positives, fewest: Ints, most: Ints, negatives: int) -> Enclosure:
    """Return bounds of the area.

    What lies between two scores accepts no fewer pairs than the upper one, and no more than the lower.
    """
    pairs, between = knots.reach - knots.above, knots.between
    low = (pairs * knots.reach / np.maximum(knots.reach + most, 1)).sum()
    high = (pairs * knots.reach / np.maximum(knots.reach + fewest, 1)).sum()
    least, beyond = np.append(knots.reach, 0) + 1, np.append(negatives, most)
    low += (between * least / (least + beyond)).sum()
    high += (between * knots.most / np.maximum(knots.most + np.append(fewest, 0), 1)).sum()
    return Enclosure(float(low) / max(1, knots.total), float(high) / max(1, knots.total))


def decide(done: Evaluation, request: PooledRequest) -> PooledDecisions:
    """Find the operating points after an evaluation; each is exact, and the area is enclosed by proved bounds.

    Args:
        done: The evaluation, which has run.
        request: The requested operating points.
    """
    search = ThresholdSearch(done)
    low, high = (float(bound) for bound in done.vectors.from_user(request.bounds))
    answers = search.answers(request.questions(low, high))
    rest = iter(answers)
    best, nothing = next(rest), (math.nan, 0, 0)
    score, tp, fp = best or nothing
    best_f1 = search.point(search.user(score), tp, fp)
    at_precision = {asked: search.at_precision(next(rest), asked, request.bounds) for asked in request.precisions}
    at_rate = {asked: search.at_rate(next(rest)) for asked in request.false_match_rates}
    equal_error = search.equal_error_rate(next(rest)) if request.equal_error_rate else None
    at_threshold = {
        asked: search.point(asked, *search.accepted(float(done.vectors.from_user(asked))))
        for asked in request.thresholds
    }
    points = [best_f1, *at_precision.values(), *at_threshold.values()]
    known = [(point.threshold, point.true_positives, point.false_positives) for point in points]
    return PooledDecisions(
        best_f1=best_f1,
        at_precision=at_precision,
        at_threshold=at_threshold,
        at_false_match_rate=at_rate,
        equal_error_rate=equal_error,
        # codes have few distinct scores, all of which can be closed
        average_precision=search.area(exact=request.average_precision or done.vectors.similarity == "hamming"),
        curve=search.curve(),
        pair_counts=thinned(done, [point for point in known if math.isfinite(point[0])]),
        passes=done.negatives.passes,
    )
