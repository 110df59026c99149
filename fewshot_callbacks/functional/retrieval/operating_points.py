"""Decisions over all pairs: each query-candidate pair is accepted if its score reaches a threshold.

`decide` finds the thresholds that a report shows (`OperatingPoint`, `ErrorRatePoint`) and counts pairs at a few hundred
more (`PairCounts`). Most thresholds are answers of questions, such as `BestF1`. An answer is a relevant score, that of a
relevant pair: of all thresholds between two relevant scores, which accept the same relevant pairs, the upper score accepts
the fewest negatives. Two thresholds are no answers: one that was fixed, and the largest that is allowed, where a precision
is reached only by scores above it (`ThresholdSearch.at_precision`).
The metrics `pair_f1`, `pair_precision`, `pair_recall` and `pair_threshold` read `PooledDecisions.decision`: the point of
`BestF1`, unless a threshold was fixed. Pairs with equal scores are accepted together, so that no rule for ties is needed.

`ThresholdSearch` knows the relevant pairs at each score of the score grid, and bounds of the number of negatives. From
these, a question finds its answer, or the scores that may be the answer. The counts at such scores are closed, or, if the
grid does not hold all relevant scores, more of them are added to it. Then the question is asked again. The words of the
engine, such as grid, cell and close, are explained in `engine/README.md`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Shaped
from numpy.typing import NDArray

from fewshot_callbacks.engine.evaluation import PooledPairs
from fewshot_callbacks.engine.pooled import SLACK, ScoreGrid, Wanted
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._table import SHOWN_ROWS, table

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = Ints | Floats
"""Exact numbers of pairs, or estimates of them by a sample."""
Holds = Callable[[Ints, Counts, int, float], Bools]
"""Returns whether something holds at some scores, given the numbers of relevant pairs and of negatives that are accepted
at each, and the numbers of all relevant pairs and of all negatives. Fewer accepted negatives never hurt."""

# Number of evenly spaced thresholds, which are also the edges of the bins.
BINS = 240
# Number of further thresholds: evenly spaced in recall, and geometrically in the number of negatives accepted.
RECALL_STEPS = 100
MATCH_STEPS = 60
# Number of relevant, sampled and collected scores, each, among which the further thresholds are chosen.
SCORES_TO_TRY = 2**12
CURVE_POINTS = 200
# Of the open scores of a question the most likely answers are closed first, and a few spaced scores. As a rule these settle
# the question. With 2**16, random labels of 31,730 items took a third pass; 2**19 takes a tenth longer.
LIKELY_CLOSED = 2**18
SPACED_CLOSED = 2**8
# So many passes over all pairs are announced, by which the rest takes a small part of the time, if they score so many pairs,
# which takes a second or more.
MANY_PASSES = 20
MANY_SCORED = 2**27


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
        tolerance: Each count is exact for a threshold that differs from the listed one by at most this much.
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
        head = f"{self.relevant:,} relevant and {self.irrelevant:,} irrelevant pairs"
        number = len(self.thresholds)
        if not number:
            return head
        ascending = np.argsort(self.thresholds, kind="stable")
        positions = ascending[np.linspace(0, number - 1, min(SHOWN_ROWS, number)).round().astype(np.int64)]
        names = ("threshold", "recall", "precision", "false match rate")
        columns = (self.thresholds, self.recall, self.precision, self.false_match_rate)
        rows = [[f"{column[index]:.4f}" for column in columns] for index in positions]
        return "\n".join([head, *table(names, rows, number)])

    def __repr__(self) -> str:
        return str(self)


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


@equal_with_nan
@dataclass(frozen=True)
class PooledDecisions:
    """The operating points of one evaluation."""

    best_f1: OperatingPoint
    at_precision: dict[float, OperatingPoint]
    """for each requested precision, the point of the smallest relevant score that has at least this precision"""
    at_threshold: dict[float, OperatingPoint]
    """for each fixed threshold, the point at it"""
    at_false_match_rate: dict[float, ErrorRatePoint]
    """for each requested rate, the point of the smallest relevant score that does not exceed it"""
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
    auroc: float | None = None
    """share of relevant pairs and negatives, two at a time, in which the relevant one scores higher, where a tie is one
    half; None if it was not requested"""

    @property
    def decision(self) -> OperatingPoint:
        """The point at the first fixed threshold; without fixed thresholds the point of the best F1."""
        return next(iter(self.at_threshold.values()), self.best_f1)

    def __str__(self) -> str:
        """Return the points, one in a line."""
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


def count_pairs(pooled: PooledPairs, points: Sequence[OperatingPoint] = ()) -> PairCounts:
    """Return the numbers of pairs at a few hundred thresholds, and in bins of their scores. Collective.

    Thresholds are evenly spaced in the score, evenly spaced in recall, and geometrically spaced in the number of false
    positives.

    Args:
        pooled: Counts of all pairs.
        points: Points whose thresholds are counted, too, where they are finite.
    """
    vectors = pooled.vectors
    negatives = pooled.negatives
    edges, edge_scores = _bin_edges(pooled)
    scores = _scores_to_try(pooled, edge_scores)
    true_positives = pooled.relevant_reaching(scores)
    false_positives = negatives.estimate(scores)
    false_positives[0] = negatives.total
    recall_steps = np.linspace(0, pooled.grid.total, RECALL_STEPS + 1)
    match_steps = np.geomspace(1, max(negatives.total, 1), MATCH_STEPS)
    edge_positions = np.searchsorted(scores, edge_scores)
    recall_positions = _first_with_at_most(true_positives, recall_steps)
    match_positions = _first_with_at_most(false_positives, match_steps)
    positions = np.unique(np.concatenate([edge_positions, recall_positions, match_positions]))
    finite_points = [point for point in points if math.isfinite(point.threshold)]
    thresholds = np.concatenate([vectors.to_user(scores[positions]), [point.threshold for point in finite_points]])
    order = np.argsort(thresholds, kind="stable")
    return PairCounts(
        thresholds=thresholds[order],
        true_positives=_with_points(true_positives[positions], [point.true_positives for point in finite_points])[
            order
        ],
        false_positives=_with_points(false_positives[positions], [point.false_positives for point in finite_points])[
            order
        ],
        relevant=pooled.grid.total,
        irrelevant=negatives.total,
        edges=edges,
        relevant_counts=-np.diff(true_positives[edge_positions]),
        irrelevant_counts=-np.diff(false_positives[edge_positions]),
        tolerance=_tolerance(vectors, scores[positions], negatives.error_bound),
        sampled_below=_to_user(vectors, negatives.cutoff) if math.isfinite(negatives.cutoff) else -math.inf,
    )


def _bin_edges(pooled: PooledPairs) -> tuple[Floats, Floats]:
    """Return ascending edges of bins that hold all pairs, in the units of the data and as exact scores. Collective."""
    vectors = pooled.vectors
    scores = pooled.grid.scores[[0, -1]]
    sample = pooled.negatives.sample
    if len(sample.estimates):
        scores = np.concatenate([sample.estimates[[0, -1]], scores])
    lowest, highest = pooled.negatives.span(scores)
    low, high = vectors.to_user(np.array([lowest, highest]))
    if vectors.pairs.exact_estimates:
        edges = _edges_of_distances(low, high)
    else:
        above_all = high + 1e-6 * max(high - low, abs(high), 1e-30)
        edges = np.unique(np.linspace(low, above_all, BINS + 1))
    # Exact scores end at 1. An edge above all distances is the score of no pair; it would be infinite.
    edge_scores = np.minimum(vectors.from_user(edges), 2.0)
    # `lowest` is the score of no pair. Converted to the units of the data and back, it may have moved.
    edge_scores[0] = min(edge_scores[0], lowest)
    return edges, edge_scores


def _edges_of_distances(low: float, high: float) -> Floats:
    """Return edges with a bin for each whole distance, or for several; the last edge lies above all distances."""
    step = math.ceil((high - low + 1) / BINS)
    return np.arange(low, high + step + 0.5, step)


def _scores_to_try(pooled: PooledPairs, edge_scores: Floats) -> Floats:
    """Return scores that may become thresholds, ascending: edges of bins, and thousands of scores of pairs. Collective."""
    highest = pooled.negatives.highest_values()
    scores = [edge_scores]
    for values in (pooled.grid.scores, pooled.negatives.sample.estimates, highest):
        step = max(1, len(values) // SCORES_TO_TRY)
        scores.append(values[::step])
    if len(highest):
        # Geometrically spaced in their rank, since false match rates are read on a logarithmic axis.
        ranks = np.unique(np.geomspace(1, len(highest), SCORES_TO_TRY).astype(np.int64))
        scores.append(highest[len(highest) - ranks])
    return np.unique(np.concatenate(scores))


def _first_with_at_most(counts: Counts, limits: Floats) -> Ints:
    """Return, for each limit, the position of the first of some descending counts that is not above it; else the last."""
    positions: Ints = np.searchsorted(-counts, -limits).clip(max=len(counts) - 1)
    return positions


def _with_points(counts: Ints, of_points: Sequence[int]) -> Ints:
    """Return counts at thresholds, followed by those of operating points."""
    return np.concatenate([counts, np.array(of_points, np.int64)])


def _tolerance(vectors: Vectors, scores: Floats, error: float) -> float:
    """Return the largest width, in the units of the data, of the interval that an error leaves for some exact scores."""
    if not error:
        return 0.0
    widths = vectors.to_user(scores + error) - vectors.to_user(scores - error)
    return float(widths.max())


def _to_user(vectors: Vectors, score: float) -> float:
    """Return an exact score in the units of the data."""
    return float(vectors.to_user(np.array([score]))[0])


# A rate is compared with the requested one as the correctly rounded quotient of two counts: the number that a report
# shows, and so 14 of 25 reaches 0.56, though this float64 number is a little more than 14/25. Float64 division rounds
# correctly, and counts below 2**53 are float64 numbers. Rounding is monotone, so fewer false positives never do worse.


def precision_of(true_positives: Ints, false_positives: Counts) -> Floats:
    """Return the share of the accepted pairs that are relevant; 0 where no pair is accepted."""
    values: Floats = true_positives / np.maximum(true_positives + false_positives, 1)
    return values


def false_match_rate(false_positives: Counts, negatives: float) -> Floats:
    """Return the share of the negatives that are accepted; 0 where there are no negatives."""
    values: Floats = false_positives / max(negatives, 1)
    return values


def _f1(true_positives: Ints, false_positives: Counts, relevant: int) -> Floats:
    """Return F1 at some thresholds, 2 TP / (2 TP + FP + FN)."""
    values: Floats = 2 * true_positives / np.maximum(true_positives + false_positives + relevant, 1)
    return values


@dataclass(frozen=True)
class PooledRequest:
    """The pooled metrics that are requested, with their settings in the units of the data."""

    precisions: Sequence[float] = ()
    allowed_thresholds: tuple[float, float] = (-math.inf, math.inf)
    """the smallest and the largest threshold that may be chosen for recall at a fixed precision"""
    thresholds: Sequence[float] = ()
    """fixed thresholds at which precision, recall and F1 are requested"""
    false_match_rates: Sequence[float] = ()
    equal_error_rate: bool = False
    average_precision: bool = False
    """whether the area under the precision-recall curve is requested exactly; it is always enclosed by bounds"""
    auroc: bool = False
    """whether the area under the ROC curve is requested"""

    def questions(self, low: float = -math.inf, high: float = math.inf) -> list[Question]:
        """Return the questions about relevant scores: best F1, precisions, false match rates, equal error rate.

        Args:
            low: The smallest exact score that may be the threshold of a precision.
            high: The largest exact score that may be it.
        """
        questions: list[Question] = [BestF1()]
        questions += [_at_precision(precision, low, high) for precision in self.precisions]
        questions += [_at_false_match_rate(rate) for rate in self.false_match_rates]
        if self.equal_error_rate:
            questions.append(LowestScore(_rates_cross, counts_above=True))
        return questions

    def foresee(self, grid: ScoreGrid, false_positives: Floats, negatives: float) -> list[Wanted]:
        """Estimate, by a sample, how many negatives each question will need."""
        return [question.wanted(grid, false_positives, negatives) for question in self.questions()]


class NegativeBounds(NamedTuple):
    """Bounds of the number of negatives at each score of the score grid."""

    scores: Floats
    """(grid,) scores at which negatives are counted: those of the grid, or the next higher float64 numbers"""
    fewest: Ints  # (grid,)
    most: Ints  # (grid,)
    total: int
    """number of all negatives"""

    @property
    def open(self) -> Ints:
        """Number, at each score, of negatives that may or may not reach it."""
        return self.most - self.fewest


class Findings(NamedTuple):
    """The answer of a question as far as bounds of the negatives give it.

    It is settled once no open position and no cell is left.
    """

    position: int | None
    """position in the grid of the answer, unless another score is it; None if no score of the grid is an answer"""
    open_positions: Ints
    """positions in the grid of scores whose counts may change the answer, likely answers first"""
    cells: Bools
    """(grid + 1,) whether relevant scores inside each cell may be the answer"""


@runtime_checkable
class Question(Protocol):
    """Asks for one relevant score, as a threshold of all pairs."""

    @property
    def counts_above(self) -> bool:
        """Whether negatives are counted that score higher than the threshold, rather than those that reach it."""

    def find(self, grid: ScoreGrid, negatives: NegativeBounds) -> Findings:
        """Return where the answer lies or may lie, given the score grid and bounds of the negatives at its scores."""

    def wanted(self, grid: ScoreGrid, false_positives: Floats, negatives: float) -> Wanted:
        """Estimate how many of the highest negatives find the answer, and how many prove that no lower score is it.

        Args:
            grid: The score grid.
            false_positives: (grid,) number of negatives that reach each of its scores, by a sample.
            negatives: Number of all negatives, by a sample.
        """


@dataclass(frozen=True)
class BestF1:
    """Asks for the score with the best F1, the highest of several."""

    counts_above: bool = False

    def find(self, grid: ScoreGrid, negatives: NegativeBounds) -> Findings:
        """See `Question.find`."""
        lowest_f1 = _f1(grid.reaching, negatives.most, grid.total)
        highest_f1 = _f1(grid.reaching, negatives.fewest, grid.total)
        proved = lowest_f1.max(initial=0.0)
        possible = np.flatnonzero(highest_f1 >= proved)
        open_positions = possible[negatives.open[possible] > 0]
        likely_first = np.argsort(-(lowest_f1 + highest_f1)[open_positions], kind="stable")
        # The F1 of a score inside a cell, if it accepted all relevant pairs of the cell and no negative of it.
        highest_f1_in_cells = _f1(grid.above_cell_starts, np.append(negatives.fewest, 0), grid.total)
        cells = (highest_f1_in_cells >= proved) & (grid.inside_cells > 0)
        # The highest score that may be the best. It is the answer once nothing is open.
        position = int(possible[-1])
        return Findings(position, open_positions[likely_first], cells)

    def wanted(self, grid: ScoreGrid, false_positives: Floats, negatives: float) -> Wanted:
        """See `Question.wanted`."""
        f1 = 2 * grid.reaching / (grid.reaching + false_positives + grid.total)
        best = f1.max()
        # F1 is flat near its maximum: the negatives that reach the lowest of all scores that come close.
        needed = float(false_positives[np.argmax(f1 >= 0.95 * best)])
        # With FP negatives F1 is at most 2 R / (2 R + FP), even if all R relevant pairs are accepted. Of more negatives than
        # 2 R (1 / best - 1) this is less than `best`.
        proving = 2 * grid.total * (1 / best - 1)
        return Wanted(min(needed, proving), proving)


@dataclass(frozen=True)
class LowestScore:
    """Asks for the lowest relevant score from `low` to `high` at which something holds."""

    holds: Holds
    low: float = -math.inf
    high: float = math.inf
    counts_above: bool = False
    """whether pairs above the score are counted; `holds` then is such that fewer relevant pairs never hurt either"""

    def find(self, grid: ScoreGrid, negatives: NegativeBounds) -> Findings:
        """See `Question.find`."""
        counted = self._counted(grid)
        allowed = (grid.scores >= self.low) & (grid.scores <= self.high)
        may_hold = allowed & self.holds(counted, negatives.fewest, grid.total, negatives.total)
        certain = np.flatnonzero(allowed & self.holds(counted, negatives.most, grid.total, negatives.total))
        open_positions = np.flatnonzero(may_hold)
        cells = self._possible_cells(grid, negatives) & (grid.inside_cells > 0)
        if not len(certain):
            return Findings(None, open_positions, cells)
        # No score above one at which it holds is the lowest.
        first = int(certain[0])
        cells[first + 1 :] = False
        open_positions = open_positions[open_positions < first]
        if not len(open_positions) and negatives.open[first]:
            # It holds whatever the count is, but the count is part of the answer.
            open_positions = certain[:1]
        return Findings(first, open_positions, cells)

    def _counted(self, grid: ScoreGrid) -> Ints:
        """Return the number of relevant pairs that are counted at each score of the grid."""
        return grid.above if self.counts_above else grid.reaching

    def _possible_cells(self, grid: ScoreGrid, negatives: NegativeBounds) -> Bools:
        """Return whether it may hold at a score inside each cell, if the cell has a score from `low` to `high`."""
        most_counted = np.append(grid.reaching, 0) if self.counts_above else grid.above_cell_starts
        possible = self.holds(most_counted, np.append(negatives.fewest, 0), grid.total, negatives.total)
        upper_ends = np.append(grid.scores, np.inf)
        lower_ends = np.append(-np.inf, grid.scores)
        return possible & (upper_ends >= self.low) & (lower_ends <= self.high)

    def wanted(self, grid: ScoreGrid, false_positives: Floats, negatives: float) -> Wanted:
        """See `Question.wanted`."""
        holds = self.holds(self._counted(grid), false_positives, grid.total, negatives)
        reached = np.flatnonzero(holds)
        needed = float(false_positives[reached[0]]) if len(reached) else 0.0
        if self.counts_above:
            return Wanted(needed, needed)
        # Where it does not even hold with all relevant pairs, it holds at no lower score.
        all_relevant = np.full(len(grid.reaching), grid.total)
        none_below = np.flatnonzero(~self.holds(all_relevant, false_positives, grid.total, negatives))
        return Wanted(needed, float(false_positives[none_below[-1]]) if len(none_below) else 0.0)


def _at_precision(precision: float, low: float, high: float) -> LowestScore:
    """Ask for the lowest relevant score from `low` to `high` with at least this precision."""

    def holds(true_positives: Ints, false_positives: Counts, _: int, __: float) -> Bools:
        return (true_positives > 0) & (precision_of(true_positives, false_positives) >= precision)

    return LowestScore(holds, low, high)


def _at_false_match_rate(rate: float) -> LowestScore:
    """Ask for the lowest relevant score that accepts at most this share of the negatives."""

    def holds(_: Ints, false_positives: Counts, __: int, negatives: float) -> Bools:
        return false_match_rate(false_positives, negatives) <= rate

    return LowestScore(holds)


def _rates_cross(above: Ints, false_positives: Counts, relevant: int, negatives: float) -> Bools:
    """Return where the share of relevant pairs that are rejected is not below that of negatives that are accepted."""
    crossed: Bools = (relevant - above) / max(relevant, 1) >= false_positives / max(negatives, 1)
    return crossed


class Accepted(NamedTuple):
    """An exact score, and the numbers of pairs that reach it."""

    score: float
    true_positives: int
    false_positives: int


def _standstill() -> RuntimeError:
    """Return the error of a search whose round has changed nothing."""
    return RuntimeError(
        "evaluate_retrieval: the thresholds cannot be settled, since neighbouring scores are no longer told "
        "apart: something flushes denormal numbers to zero meanwhile. Do not call torch.set_flush_denormal "
        "in a callback."
    )


class _RelevantGroup(NamedTuple):
    """Neighbouring relevant scores."""

    scores: Floats  # (scores,) ascending
    reaching: Ints  # (scores,) relevant pairs with this score or a higher one
    pairs: Ints  # (scores,) relevant pairs with this score


class ThresholdSearch:
    """Finds the operating points of an evaluation that has run. The constructor and all methods are collective.

    Args:
        pooled: Counts of all pairs.
    """

    def __init__(self, pooled: PooledPairs) -> None:
        self.pooled = pooled
        self.vectors = pooled.vectors
        self.processes = pooled.vectors.processes
        self.grid_size = pooled.grid_size
        self.negatives = pooled.negatives
        # replaced by a grid with more scores where `answers` needs them
        self.grid = pooled.grid

    def answers(self, questions: Sequence[Question]) -> list[Accepted | None]:
        """Return the answer of each question; None where no relevant score is one.

        Each round looks at all open questions, and then learns what they need: scores inside cells, or else counts.
        """
        answers: list[Accepted | None] = [None] * len(questions)
        waiting = list(range(len(questions))) if self.grid.total else []
        previous: tuple[int, ...] = ()
        while waiting:
            directions = sorted({questions[number].counts_above for number in waiting})
            bounds = {above: self._bounds_at_grid(above=above) for above in directions}
            known = (len(waiting), len(self.grid.scores), *(int(each.open.sum()) for each in bounds.values()))
            # Each round settles a question, or learns something.
            if known == previous or not len(self.grid.scores):
                raise _standstill()
            previous = known
            unsettled = []
            cells = np.zeros(len(self.grid.scores) + 1, bool)
            scores_to_close = []
            for number in waiting:
                question = questions[number]
                at_grid = bounds[question.counts_above]
                findings = question.find(self.grid, at_grid)
                scores_inside = int(self.grid.inside_cells[findings.cells].sum())
                is_closed = not len(findings.open_positions)
                if is_closed and scores_inside == 0:
                    answers[number] = self._accepted_at(findings.position)
                    continue
                unsettled.append(number)
                likely = self._likely(question, at_grid, findings)
                scores_inside = int(self.grid.inside_cells[likely.cells].sum())
                # Scores inside cells come first, if all of them fit: they take no pass over the pairs, and once they are
                # known, one pass can close all counts.
                if not len(likely.open_positions) or 0 < scores_inside <= self.grid_size:
                    cells |= likely.cells
                else:
                    scores_to_close.append(at_grid.scores[self._to_close(likely.open_positions)])
            self._learn(cells, scores_to_close)
            waiting = unsettled
        return answers

    def _bounds_at_grid(self, *, above: bool) -> NegativeBounds:
        """Return bounds of the negatives that reach each score of the grid, or that lie above it."""
        scores = np.nextafter(self.grid.scores, np.inf) if above else self.grid.scores
        fewest, most = self.negatives.bounds(scores)
        return NegativeBounds(scores, fewest, most, self.negatives.total)

    def _accepted_at(self, position: int | None) -> Accepted | None:
        """Return a score of the grid with its counts; None for none."""
        return None if position is None else self.accepted(float(self.grid.scores[position]))

    def _likely(self, question: Question, at_grid: NegativeBounds, findings: Findings) -> Findings:
        """Return where the answer of a question lies if a sample is right, and one score whose count then proves it.

        Without a count below the cut-off of the collected pairs, the answer may lie anywhere below. A pass that counts at
        all of these scores takes several times as long as one that counts at high scores, which few negatives reach.

        Returns:
            The findings, if no sample can say so, or if it says that no lower score is open.
        """
        if not self._can_guess(at_grid, findings):
            return findings
        estimates = self.negatives.estimate(at_grid.scores)
        wanted = question.wanted(self.grid, estimates.astype(np.float64), self.negatives.total)
        enough = math.ceil(SLACK * max(wanted))
        reached = np.flatnonzero(estimates >= enough)
        if not len(reached) or findings.open_positions.min() >= reached[-1]:
            return findings
        proving = int(reached[-1])
        fewest = at_grid.fewest.copy()
        fewest[: proving + 1] = np.maximum(fewest[: proving + 1], enough)
        likely = question.find(self.grid, at_grid._replace(fewest=fewest))
        return likely._replace(open_positions=np.append(likely.open_positions, proving))

    def _can_guess(self, at_grid: NegativeBounds, findings: Findings) -> bool:
        """Return whether a score below the cut-off is open, no pass has counted there yet, and there is a sample."""
        if self.negatives.passes > 1 or not len(self.negatives.sample.estimates) or not len(findings.open_positions):
            return False
        lowest_open = at_grid.scores[findings.open_positions].min()
        return bool(lowest_open < self.negatives.cutoff + self.negatives.error_bound)

    def _to_close(self, open_positions: Ints) -> Ints:
        """Return the positions whose counts are closed first: the most likely answers, and a few spaced ones."""
        number = min(len(open_positions), SPACED_CLOSED)
        spaced = open_positions[np.linspace(0, len(open_positions) - 1, number).astype(np.int64)]
        return np.append(spaced, open_positions[: min(LIKELY_CLOSED, self.grid_size)])

    def _learn(self, cells: Bools, scores_to_close: Sequence[Floats]) -> None:
        """Add the scores inside some cells to the grid, if there are such cells; else close counts of negatives."""
        if cells.any():
            scores_of_relevant = self.pooled.relevant.ascending
            self.grid = self.grid.refined(cells, scores_of_relevant, self.grid_size, self.processes)
        elif scores_to_close:
            self.negatives.close(np.unique(np.concatenate(scores_to_close)))

    # ------------------------------------------------------------------------------------------------------------ counts

    def accepted(self, score: float) -> Accepted:
        """Return the numbers of relevant pairs and of negatives that reach an exact score."""
        if math.isinf(score):
            return Accepted(score, 0, 0) if score > 0 else Accepted(score, self.grid.total, self.negatives.total)
        grid = self.grid
        if score in grid.scores:
            true_positives = grid.reaching[grid.scores == score]
        else:
            true_positives = self.pooled.relevant_reaching(np.array([score]))
        return Accepted(score, int(true_positives[0]), self._negatives_reaching(score))

    def _negatives_reaching(self, score: float) -> int:
        """Return the number of negatives that reach an exact score."""
        scores = np.array([score])
        self.negatives.close(scores)
        fewest, _ = self.negatives.bounds(scores)
        return int(fewest[0])

    # ------------------------------------------------------------------------------------------------------------ points

    def best_f1(self, answer: Accepted | None) -> OperatingPoint:
        """Return the point of the best F1, given the answer of `BestF1`; NaN if there are no relevant pairs."""
        return self._no_point() if answer is None else self._point_of(answer)

    def at_threshold(self, threshold: float) -> OperatingPoint:
        """Return the point at a threshold in the units of the data."""
        accepted = self.accepted(float(self.vectors.from_user(threshold)))
        return self._point(threshold, accepted)

    def at_precision(
        self, answer: Accepted | None, precision: float, allowed_thresholds: tuple[float, float]
    ) -> OperatingPoint:
        """Return the point of the smallest relevant score with a precision, or of the largest threshold; else NaN.

        Args:
            answer: The smallest relevant score with this precision.
            precision: The least precision.
            allowed_thresholds: The smallest and the largest threshold, in the units of the data.
        """
        if answer is not None:
            return self._point_of(answer)
        # Of the thresholds between two relevant scores none accepts fewer negatives than the highest.
        _, largest = allowed_thresholds
        accepted = self.accepted(float(self.vectors.from_user(largest)))
        pairs = accepted.true_positives + accepted.false_positives
        if math.isfinite(largest) and pairs > 0 and accepted.true_positives / pairs >= precision:
            return self._point(largest, accepted)
        return self._no_point()

    def _point_of(self, answer: Accepted) -> OperatingPoint:
        """Return the point at a relevant score."""
        return self._point(_to_user(self.vectors, answer.score), answer)

    def _point(self, threshold: float, accepted: Accepted) -> OperatingPoint:
        """Return the point at a threshold in the units of the data, given what it accepts."""
        rejected = self.grid.total - accepted.true_positives
        return OperatingPoint(threshold, accepted.true_positives, accepted.false_positives, rejected)

    def _no_point(self) -> OperatingPoint:
        """Return the point where no threshold meets the request."""
        return self._point(math.nan, Accepted(math.nan, 0, 0))

    def at_rate(self, answer: Accepted | None) -> ErrorRatePoint:
        """Return verification at a false match rate, given the smallest relevant score that keeps it."""
        if not self.negatives.total:
            return ErrorRatePoint(math.nan, math.nan, math.nan)
        if answer is None:
            return ErrorRatePoint(math.nan, 0.0, 1.0)
        return ErrorRatePoint(
            threshold=_to_user(self.vectors, answer.score),
            false_match_rate=answer.false_positives / self.negatives.total,
            false_non_match_rate=1 - answer.true_positives / self.grid.total,
        )

    def equal_error_rate(self, answer: Accepted | None) -> float:
        """Return the rate at which FNMR and FMR cross, at this relevant score or just above it; NaN if they do not."""
        if answer is None or not self.negatives.total:
            return math.nan
        relevant = self.grid.total
        negatives = self.negatives.total
        above = int(self.grid.above[self.grid.scores == answer.score][0])
        fnmr = (relevant - answer.true_positives) / relevant
        fmr = answer.false_positives / negatives
        fnmr_above = fnmr + (answer.true_positives - above) / relevant
        fmr_above = self._negatives_reaching(float(np.nextafter(answer.score, np.inf))) / negatives
        return equal_error_rate(fnmr, fmr, fnmr_above, fmr_above)

    # ------------------------------------------------------------------------------------------------------------- curve

    def area(self, *, exact: bool) -> Enclosure:
        """Return bounds of the area under the precision-recall curve, the mean of the precisions at the relevant pairs.

        Args:
            exact: Whether both bounds are the area but for rounding, which may take more passes over all pairs.
        """
        if exact:
            area = math.fsum(self._terms_of_area()) / max(1, self.grid.total)
            return Enclosure(area, area)
        fewest, most = self.negatives.bounds(self.grid.scores)
        return _area_between(self.grid, fewest, most, self.negatives.total)

    def _terms_of_area(self) -> Iterator[float]:
        """Yield terms whose sum is the area times the number of relevant pairs, with all counts closed.

        Each is rounded once, and belongs to one relevant score, but for the first, which is whole: so an exact sum of them
        depends neither on the groups nor on the processes.
        """
        first_free = self._first_free_cell()
        # The precision of all relevant pairs above all negatives is 1.
        yield float(np.append(self.grid.above_cell_starts, 0)[first_free])
        for group in self._groups_below(first_free):
            self.negatives.close(group.scores)
            negatives, _ = self.negatives.bounds(group.scores)
            yield from (group.pairs * precision_of(group.reaching, negatives)).tolist()

    def auroc(self) -> float:
        """Return the share of a relevant pair and a negative that are in the right order; NaN if there are none of either.

        A tie counts one half. The count is exact, and rounded once; it may take another pass over all pairs.
        """
        total = 2 * self.grid.total * self.negatives.total
        if not total:
            return math.nan
        # twice the number of those in the wrong order, of which a tie is one half
        wrong = 0
        for group in self._groups_below(self._first_free_cell()):
            just_above = np.nextafter(group.scores, np.inf)
            fewest, most = self.negatives.bounds(group.scores)
            # One pass: to count at a score is to count just above it, too.
            self.negatives.close(np.unique(np.where(fewest < most, group.scores, just_above)))
            self.negatives.close(group.scores)
            self.negatives.close(just_above)
            reaching, _ = self.negatives.bounds(group.scores)
            above, _ = self.negatives.bounds(just_above)
            wrong += _exact_sum_of_products(group.pairs, reaching + above)
        return (total - wrong) / total

    def _first_free_cell(self) -> int:
        """Return the lowest cell of the grid whose lower end no negative reaches."""
        _, most = self.negatives.bounds(self.grid.scores)
        return int(np.searchsorted(-np.append(self.negatives.total, most), 0))

    def _groups_below(self, cell: int) -> Iterator[_RelevantGroup]:
        """Yield all relevant scores in the cells below one, in groups with as many relevant pairs as there is room for.

        The upper end of each cell counts as part of it.
        """
        grid = self.grid
        groups = self._group_of_cells()[:cell]
        ends = np.concatenate([[-np.inf], grid.scores, [np.inf]])
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            first = int(members[0])
            last = int(members[-1])
            cells = np.zeros(len(grid.inside_cells), bool)
            cells[first : last + 1] = grid.inside_cells[first : last + 1] > 0
            inside = int(grid.inside_cells[cells].sum())
            refined = grid
            if inside:
                refined = grid.refined(cells, self.pooled.relevant.ascending, inside, self.processes)
            in_cells = (refined.scores > ends[first]) & (refined.scores <= ends[last + 1])
            reaching = refined.reaching[in_cells]
            yield _RelevantGroup(refined.scores[in_cells], reaching, reaching - refined.above[in_cells])

    def _group_of_cells(self) -> Ints:
        """Return the number of the group to which the scores of each cell of the grid belong."""
        grid = self.grid
        # In one set, both pairs of two items have one score.
        pairs_of_score = 2 if self.pooled.evaluation.relevance.symmetric else 1
        room = pairs_of_score * max(1, self.grid_size)
        groups: Ints = np.append(grid.total - grid.reaching, grid.total) // room
        return groups

    def announce_passes(self) -> None:
        """Warn if the areas take many passes over all pairs: one for each group that the collected pairs leave open."""
        first_free = self._first_free_cell()
        starts = np.append(-np.inf, self.grid.scores)[:first_free]
        passes = len(np.unique(self._group_of_cells()[:first_free][starts < self.negatives.cutoff]))
        is_long = passes >= MANY_PASSES and passes * (self.grid.total + self.negatives.total) >= MANY_SCORED
        if is_long and self.processes.rank == 0:
            warnings.warn(
                f"evaluate_retrieval: auc_pr and pair_auroc take up to {passes} more passes over all pairs, since the "
                f"scores of {self.grid.total:,} relevant pairs exceed the budget. Pass a larger memory_mb: twice as much "
                "takes at most half as many passes. Or leave these metrics out.",
                stacklevel=2,
            )

    def curve(self) -> tuple[tuple[float, float, float], ...]:
        """Return thresholds, precisions and recalls at relevant scores that are about evenly spaced in recall."""
        grid = self.grid
        if not grid.total:
            return ()
        recall = grid.reaching / grid.total
        positions = np.unique(_first_with_at_most(recall, np.linspace(1, 0, CURVE_POINTS)))
        fewest, most = self.negatives.bounds(grid.scores[positions])
        precision = grid.reaching[positions] / (grid.reaching[positions] + (fewest + most) / 2)
        thresholds = self.vectors.to_user(grid.scores[positions])
        # from the highest threshold down, so by ascending recall
        columns = (thresholds[::-1].tolist(), precision[::-1].tolist(), recall[positions][::-1].tolist())
        return tuple(zip(*columns, strict=True))


def _exact_sum_of_products(first: Ints, second: Ints) -> int:
    """Return the sum of the products of two lists of numbers of pairs; each product may have more than 64 bits."""
    # In parts of 21 bits: the sum of up to 2**42 pairs, each times such a part, has 63 bits.
    parts = [int((first * ((second >> shift) & (2**21 - 1))).sum()) << shift for shift in (0, 21, 42)]
    return sum(parts)


def _area_between(grid: ScoreGrid, fewest: Ints, most: Ints, negatives: int) -> Enclosure:
    """Return bounds of the area under the precision-recall curve.

    A relevant score inside a cell accepts no fewer pairs than the upper end of the cell, and no more than the lower.

    Args:
        grid: The score grid.
        fewest: (grid,) negatives that reach each score, at least.
        most: (grid,) negatives that reach each score, at most.
        negatives: Number of all negatives.
    """
    pairs = grid.reaching - grid.above
    low = pairs * precision_of(grid.reaching, most)
    high = pairs * precision_of(grid.reaching, fewest)
    low_inside = grid.inside_cells * precision_of(np.append(grid.reaching, 0) + 1, np.append(negatives, most))
    high_inside = grid.inside_cells * precision_of(grid.above_cell_starts, np.append(fewest, 0))
    # Exact sums, so that bounds which are equal are the exact area, whatever the grid is.
    bounds = (math.fsum(np.concatenate(terms).tolist()) for terms in ((low, low_inside), (high, high_inside)))
    return Enclosure(*(bound / max(1, grid.total) for bound in bounds))


def decide(pooled: PooledPairs, request: PooledRequest) -> PooledDecisions:
    """Return the operating points of an evaluation; each is exact, and the area is enclosed by proved bounds. Collective.

    Args:
        pooled: Counts of all pairs.
        request: The requested operating points.
    """
    search = ThresholdSearch(pooled)
    low, high = (float(score) for score in pooled.vectors.from_user(request.allowed_thresholds))
    # in the order of `PooledRequest.questions`
    answers = iter(search.answers(request.questions(low, high)))
    best_f1 = search.best_f1(next(answers))
    at_precision = {
        precision: search.at_precision(next(answers), precision, request.allowed_thresholds)
        for precision in request.precisions
    }
    at_rate = {rate: search.at_rate(next(answers)) for rate in request.false_match_rates}
    equal_error = search.equal_error_rate(next(answers)) if request.equal_error_rate else None
    at_threshold = {threshold: search.at_threshold(threshold) for threshold in request.thresholds}
    # Codes have few distinct scores, all of which can be closed.
    is_area_exact = request.average_precision or pooled.vectors.similarity == "hamming"
    if is_area_exact or request.auroc:
        search.announce_passes()
    return PooledDecisions(
        best_f1=best_f1,
        at_precision=at_precision,
        at_threshold=at_threshold,
        at_false_match_rate=at_rate,
        equal_error_rate=equal_error,
        auc_pr=search.area(exact=is_area_exact),
        auroc=search.auroc() if request.auroc else None,
        curve=search.curve(),
        pair_counts=count_pairs(pooled, [best_f1, *at_precision.values(), *at_threshold.values()]),
        passes=pooled.negatives.passes,
    )
