"""Pooled decisions: every query-candidate pair is one, accepted if its score reaches a threshold; points and counts.

The search asks at which relevant score something holds, given how many negatives reach it. Bounds of the counts leave a
question one answer, or some scores at which it may lie; these are closed, and it is asked again. Where not all relevant
scores fit the memory, it is first found out between which of those that are held the answer may lie.

A relevant score is enough: of all thresholds between two of them, which accept the same relevant pairs, the upper one
accepts the fewest others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Shaped
from numpy.typing import NDArray

from fewshot_callbacks.engine.evaluation import PooledPairs
from fewshot_callbacks.engine.pooled import Positives, Wanted
from fewshot_callbacks.functional._table import SHOWN_ROWS, table

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = Ints | Floats
"""Exact numbers of pairs, or a sample's estimates of them."""
Holds = Callable[[Ints, Counts, int, float], Bools]
"""Whether something holds, given how many relevant pairs and how many negatives are accepted, and how many there are
of each; fewer negatives never hurt."""

# Number of evenly spaced thresholds, which are also the edges of the bins.
BINS = 240
# Further thresholds: evenly spaced in recall, and geometrically in the number of irrelevant pairs accepted.
RECALL_STEPS, MATCH_STEPS = 100, 60
# Scores of relevant, sampled and collected pairs that are tried for these, each.
DENSE = 2**12
CURVE_POINTS = 200
# Of the open scores of a question the most likely ones are closed first, and a few spaced ones: as a rule these settle
# all. With 2**16 random labels of 31,730 items took a third pass, and 2**19 take a tenth longer.
CLOSED, SPACED = 2**18, 2**8


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

    def __str__(self) -> str:
        """Return the rates at a few thresholds, from the lowest to the highest, as a table."""
        order = np.argsort(self.thresholds, kind="stable")
        shown = order[np.linspace(0, len(order) - 1, min(SHOWN_ROWS, len(order))).round().astype(np.int64)]
        columns = ("threshold", "recall", "precision", "false match rate")
        rates = (self.thresholds, self.recall, self.precision, self.false_match_rate)
        rows = [[f"{values[at]:.4f}" for values in rates] for at in shown]
        head = f"{self.relevant:,} relevant and {self.irrelevant:,} irrelevant pairs"
        return "\n".join([head, *(table(columns, rows, len(order)) if rows else ())])

    def __repr__(self) -> str:
        return str(self)


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

    def __str__(self) -> str:
        """Return the threshold, what it gives, and the counts, in a line."""
        rates = f"precision {self.precision:.4f}, recall {self.recall:.4f}, F1 {self.f1:.4f}"
        relevant = self.true_positives + self.false_negatives
        return (
            f"threshold {self.threshold:.4f}: {rates} ({self.true_positives:,} of {relevant:,} relevant pairs and "
            f"{self.false_positives:,} others are accepted)"
        )


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
    """for each asked precision, the point of the smallest relevant score that has at least this precision"""
    at_threshold: dict[float, OperatingPoint]
    at_false_match_rate: dict[float, ErrorRatePoint]
    equal_error_rate: float | None
    """None if it was not requested"""
    auc_pr: Enclosure = field(compare=False)
    """area under the pooled precision-recall curve, as the sum of precision times the step in recall"""
    curve: tuple[tuple[float, float, float], ...] = field(compare=False, repr=False)
    """thinned: threshold, precision and recall, by ascending recall; precision within the enclosure of its bin"""
    pair_counts: PairCounts = field(compare=False, repr=False)
    """the pairs at a few hundred thresholds, those of the points above among them"""
    passes: int = field(compare=False, repr=False)
    """how often all pairs had to be scored"""

    @property
    def decision(self) -> OperatingPoint:
        """The point at the threshold that was given, or that of the best F1."""
        return next(iter(self.at_threshold.values()), self.best_f1)

    def __str__(self) -> str:
        """Return the points, one in a line."""
        lines = [f"best F1: {self.best_f1}"]
        lines += [f"given threshold: {point}" for point in self.at_threshold.values()]
        lines += [f"precision of at least {bound:g}: {point}" for bound, point in self.at_precision.items()]
        lines += [
            f"false match rate of at most {bound:g}: {point}" for bound, point in self.at_false_match_rate.items()
        ]
        if self.equal_error_rate is not None:
            lines.append(f"equal error rate: {self.equal_error_rate:.4f}")
        return "\n".join([*lines, f"area under the precision-recall curve: {self.auc_pr.value:.4f}"])

    def __repr__(self) -> str:
        return str(self)


def thinned(pooled: PooledPairs, known: Sequence[tuple[float, int, int]] = ()) -> PairCounts:
    """Count pairs at a few hundred thresholds: evenly spaced ones, and more where recall or false matches change.

    Args:
        pooled: Counts of all pairs.
        known: Thresholds that a user reads, with their true and false positives, which are among those counted.
    """
    vectors, negatives, sample, relevant = pooled.vectors, pooled.negatives, pooled.sample, pooled.positives
    low, high = negatives.span(
        np.concatenate([sample.estimates[[0, -1]] if sample.weight else [], relevant.scores[[0, -1]]])
    )
    user_low, user_high = vectors.to_user(np.array([low, high]))
    beyond = user_high + 1e-6 * max(user_high - user_low, abs(user_high), 1e-30)  # an edge above all
    edges = np.unique(np.linspace(user_low, beyond, BINS + 1))
    if vectors.pairs.exact_estimates:  # a bin for each distance, or for several; the last edge lies above all
        step = math.ceil((user_high - user_low + 1) / BINS)
        edges = np.arange(user_low, user_high + step + 0.5, step)
    even = np.minimum(
        vectors.from_user(edges), 2.0
    )  # scores end at 1; an edge above all distances is none, and infinite
    even[0] = min(even[0], low)  # reading a score and writing it again may move it
    highest = negatives.highest_values()
    dense = [values[:: max(1, len(values) // DENSE)] for values in (relevant.scores, sample.estimates, highest)]
    if len(highest):  # by their rank, since false match rates are read on a logarithmic axis
        dense.append(highest[len(highest) - np.unique(np.geomspace(1, len(highest), DENSE).astype(np.int64))])
    fine = np.unique(np.concatenate([even, *dense]))
    tp, fp = pooled.relevant_reaching(fine), negatives.estimate(fine, sample)
    fp[0] = negatives.total
    asked = np.linspace(0, relevant.total, RECALL_STEPS + 1)
    matches = np.geomspace(1, max(negatives.total, 1), MATCH_STEPS)
    more = [
        np.searchsorted(-counts, -wanted).clip(max=len(fine) - 1) for counts, wanted in ((tp, asked), (fp, matches))
    ]
    bins = np.searchsorted(fine, even)
    chosen = np.unique(np.concatenate([bins, *more]))
    counted = np.array([vectors.to_user(fine[chosen]), tp[chosen], fp[chosen]])
    counted = np.concatenate([counted, np.array(known).reshape(-1, 3).T], axis=1)
    thresholds, accepted, matched = counted[:, np.argsort(counted[0], kind="stable")]
    reach = vectors.to_user(fine[chosen] + negatives.error_bound) - vectors.to_user(
        fine[chosen] - negatives.error_bound
    )
    return PairCounts(
        thresholds,
        accepted.astype(np.int64),
        matched.astype(np.int64),
        relevant.total,
        negatives.total,
        edges,
        -np.diff(tp[bins]),
        -np.diff(fp[bins]),
        float(reach.max()) if negatives.error_bound else 0.0,
        float(vectors.to_user(np.array([negatives.cutoff]))[0]) if math.isfinite(negatives.cutoff) else -math.inf,
    )


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
    """whether the area under the precision-recall curve is wanted exactly; bounds are always known"""

    def questions(self, low: float = -math.inf, high: float = math.inf) -> list[Question]:
        """Return what is asked of relevant scores; the bounds are exact scores."""
        asked = [Question(), *(_at_precision(precision, low, high) for precision in self.precisions)]
        asked += map(_at_false_match_rate, self.false_match_rates)
        return asked + ([Question(_equal_error, above=True)] if self.equal_error_rate else [])

    def foresee(self, positives: Positives, fp: Floats, negatives: float) -> list[Wanted]:
        """Estimate, by a sample, how many negatives each question will need."""
        return [question.wanted(positives, fp, negatives) for question in self.questions()]


@dataclass(frozen=True)
class Question:
    """The threshold that is sought: the lowest relevant score at which something holds, or that of the best F1."""

    holds: Holds | None = None
    low: float = -math.inf
    high: float = math.inf
    """between which it may lie"""
    above: bool = False
    """what lies above the threshold is counted, not what reaches it; then fewer relevant pairs do not hurt either"""

    def answer(self, positives: Positives, fewest: Ints, most: Ints, negatives: int) -> tuple[int | Ints | None, Bools]:
        """Return where the answer lies among the scores that are held, and between which of them it may lie instead.

        Args:
            positives: Relevant scores.
            fewest: Of negatives that are accepted at each.
            most: The same.
            negatives: How many there are.

        Returns:
            The position of the score, None if there is none, or the positions that are open, the likely ones first; and
            whether it may lie below each score, and above all.
        """
        total, at_least = positives.total, np.append(fewest, 0)
        answer: int | Ints | None
        if self.holds is None:
            low, high = (_f1(positives.reach, fp, total) for fp in (most, fewest))
            between = _f1(positives.most, at_least, total) >= low.max(initial=0.0)
            possible = np.flatnonzero(high >= low.max(initial=0.0))
            unsure = possible[fewest[possible] < most[possible]]
            answer = unsure[np.argsort(-(low + high)[unsure], kind="stable")] if len(unsure) else int(possible[-1])
        else:
            tp, upper = positives.reach, positives.most
            if self.above:
                tp, upper = positives.above, np.append(positives.reach, 0)
            allowed = (positives.scores >= self.low) & (positives.scores <= self.high)
            possible, certain = (
                np.flatnonzero(allowed & self.holds(tp, fp, total, negatives)) for fp in (fewest, most)
            )
            between = self.holds(upper, at_least, total, negatives)
            between &= np.append(positives.scores, np.inf) >= self.low
            between &= np.append(-np.inf, positives.scores) <= self.high
            if len(certain):  # no higher score is the lowest
                between[certain[0] + 1 :] = False
                possible = possible[: np.searchsorted(possible, certain[0])]
            answer = possible
            if not len(possible):
                answer = int(certain[0]) if len(certain) else None
        return answer, between & (positives.between > 0)

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
        pooled: Counts of all pairs.
    """

    def __init__(self, pooled: PooledPairs) -> None:
        self.pooled, self.negatives, self.positives = pooled, pooled.negatives, pooled.positives
        self.vectors, self.processes, self.room = pooled.vectors, pooled.vectors.processes, pooled.grid_size

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
                at, some = question.answer(positives, fewest, most, total)
                inside = int(positives.between[some].sum())
                sure = not isinstance(at, np.ndarray) and (at is None or fewest[at] == most[at])
                if sure and inside == 0:
                    if at is not None:
                        score = float(positives.scores[at])
                        found[number] = score, *self.accepted(score)
                    continue
                left.append(number)
                if sure or 0 < inside <= self.room:
                    cells |= some
                else:
                    likely = np.atleast_1d(np.asarray(at))
                    spaced = likely[np.linspace(0, len(likely) - 1, min(len(likely), SPACED)).astype(np.int64)]
                    unsure.append(scores[question.above][np.append(spaced, likely[: min(CLOSED, self.room)])])
            if cells.any():  # it takes no pass over the pairs, and then all can be closed by one
                self.positives = positives.refined(cells, self.pooled.relevant.ascending, self.room, self.processes)
            elif unsure:
                self.negatives.close(np.unique(np.concatenate(unsure)))
            waiting = left
        return found

    def reached(self, score: float) -> int:
        """Count the negatives that reach a score."""
        asked = np.array([score])
        self.negatives.close(asked)
        return int(self.negatives.bounds(asked)[0][0])

    def accepted(self, score: float) -> tuple[int, int]:
        """Count the relevant pairs and the negatives that reach a score."""
        if math.isinf(score):
            return (0, 0) if score > 0 else (self.positives.total, self.negatives.total)
        held, asked = self.positives, np.array([score])
        reach = held.reach[held.scores == score] if score in held.scores else self.pooled.relevant_reaching(asked)
        return int(reach[0]), self.reached(score)

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
        total, negatives = self.positives.total, self.negatives.total
        before = (total - tp) / total
        after = before + (tp - int(self.positives.above[self.positives.scores == score][0])) / total
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
            opened = knots.refined(cells, self.pooled.relevant.ascending, pairs, self.processes) if pairs else knots
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


def decide(pooled: PooledPairs, request: PooledRequest) -> PooledDecisions:
    """Find the operating points after an evaluation; each is exact, and the area is enclosed by proved bounds.

    Args:
        pooled: Counts of all pairs.
        request: The requested operating points.
    """
    search = ThresholdSearch(pooled)
    low, high = (float(bound) for bound in pooled.vectors.from_user(request.bounds))
    answers = search.answers(request.questions(low, high))
    rest = iter(answers)
    best, nothing = next(rest), (math.nan, 0, 0)
    score, tp, fp = best or nothing
    best_f1 = search.point(search.user(score), tp, fp)
    at_precision = {asked: search.at_precision(next(rest), asked, request.bounds) for asked in request.precisions}
    at_rate = {asked: search.at_rate(next(rest)) for asked in request.false_match_rates}
    equal_error = search.equal_error_rate(next(rest)) if request.equal_error_rate else None
    at_threshold = {
        asked: search.point(asked, *search.accepted(float(pooled.vectors.from_user(asked))))
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
        auc_pr=search.area(exact=request.average_precision or pooled.vectors.similarity == "hamming"),
        curve=search.curve(),
        pair_counts=thinned(pooled, [point for point in known if math.isfinite(point[0])]),
        passes=pooled.negatives.passes,
    )
