"""Threshold consistency: whether one threshold suits all classes, and which classes need another threshold.

The counts of each class at some thresholds need one more pass over the pairs. The thresholds must not depend on the order of
the data or the number of processes, and the pooled rates that bound their range are known only after the pass. Therefore the
thresholds are multiples of a power of two. A sample suggests where to count, and the exact counts decide which thresholds
are used.

References:
    Zhang et al., "Threshold-Consistent Margin Loss for Open-World Deep Metric Learning", ICLR 2024, arXiv 2307.04047. OPIS
    is an integral over a range of distances, divided by its length. Public implementations differ in the number of
    thresholds. Some estimate the range from a sample, and some compute the spread of a pooled F1 over thresholds instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from fewshot_callbacks.engine.evaluation import PooledPairs
from fewshot_callbacks.engine.pooled.questions import false_match_rate
from fewshot_callbacks.functional._table import SHOWN_ROWS, table
from fewshot_callbacks.system.terminal import printable
from fewshot_callbacks.system.words import counted

# Fewest thresholds in a range; there are fewer than twice as many. OPIS was within 2 % of its value at 700 thresholds.
FEWEST = 16
# Factor by which the sample may misjudge the false match rates at the ends of the range.
SLACK = 1.25
# Smallest distance between thresholds, as a share of the largest threshold: they differ in the ninth digit.
LEAST_STEP = 2.0**-30
# Scores closer to zero than this share of the possible range count as zero.
NEAR_ZERO = 2.0**-30
# A search stops at this width, as a share of its scores, because thresholds in the range would be closer than `LEAST_STEP`:
# `FEWEST` of them would have to fit into a quarter of `FEWEST * LEAST_STEP`.
NARROWEST = FEWEST * LEAST_STEP / 4
# Scores below and above all exact scores, which are in [-1, 1].
BELOW_ALL = -2.0
ABOVE_ALL = 2.0


@dataclass(frozen=True, eq=False)
class ThresholdConsistency:
    """How much the usefulness of one threshold differs between the classes of a set (OPIS).

    The utility of a class at a threshold is the harmonic mean of two shares: the accepted share of the class's pairs, and
    the rejected share of its queries' pairs with items of other classes. It is 0 if either share is 0. There are no
    intervals. The utilities of small classes also differ by chance.

    Attributes:
        thresholds: 16 to 31 ascending multiples of a power of two at which the pooled false match rate is in the range;
            empty if they would only differ in the ninth digit or later.
        labels: Classes with pairs of both kinds, in the form in which you passed them, ascending.
        utility: (classes, thresholds) utility of each class at each threshold, in [0, 1].
        classes_without_pairs: Number of classes without relevant or without irrelevant pairs. They have no utility.

    Examples:
        >>> import numpy as np
        >>> found = ThresholdConsistency(np.array([0.5, 0.6]), ("heron", "owl"), np.array([[0.8, 0.9], [0.8, 0.5]]))
        >>> round(found.opis, 3), round(found.gap(), 3), found.common_threshold
        (0.02, 0.1, 0.5)
        >>> found.wanting()
        {'heron': (0.6, 0.1)}
    """

    thresholds: Float[np.ndarray, "thresholds"]
    labels: tuple[int | str, ...]
    utility: Float[np.ndarray, "classes thresholds"]
    classes_without_pairs: int = 0

    @property
    def opis(self) -> float:
        """Variance of the utility between classes, averaged over the thresholds, in [0, 0.25]; 0 is consistent.

        NaN with fewer than two classes or without thresholds.
        """
        return float(self.utility.var(axis=0).mean()) if self._is_defined else math.nan

    def gap(self, share: float = 0.1) -> float:
        """Return the mean utility of all classes minus the mean utility of the worst classes, in [0, 1]: epsilon-OPIS.

        Args:
            share: Share of the classes that counts as the worst, in (0, 1], rounded up. These are the classes with the
                lowest mean utility over all thresholds, so they are the same at each threshold.
        """
        if not self._is_defined:
            return math.nan
        means = self.utility.mean(axis=1)
        worst = np.sort(means)[: math.ceil(share * len(means))]
        return float(means.mean() - worst.mean())

    @property
    def common_threshold(self) -> float:
        """The threshold with the highest mean utility over classes, the highest one if several tie; NaN if there is none."""
        return float(self.thresholds[self._common_position]) if self._is_defined else math.nan

    def wanting(self, most: int = 10) -> dict[int | str, tuple[float, float]]:
        """Return the classes that gain the most from their own threshold: label -> (threshold, gain in utility).

        The threshold is the best one for the class; if several are best, the one nearest to the common threshold. The
        largest gain comes first.

        Args:
            most: Largest number of classes to return.
        """
        if not self._is_defined:
            return {}
        common = self._common_position
        best = self.utility.max(axis=1)
        gains = best - self.utility[:, common]
        thresholds = len(self.thresholds)
        distances = np.abs(np.arange(thresholds) - common)
        best_position = np.where(self.utility == best[:, None], distances, thresholds).argmin(axis=1)
        wanting = {}
        for number in np.argsort(-gains, kind="stable")[:most]:
            if gains[number] > 0:
                threshold = float(self.thresholds[best_position[number]])
                wanting[self.labels[number]] = (threshold, round(float(gains[number]), 12))
        return wanting

    def notes(self, rate: float) -> tuple[str, ...]:
        """Return a note if the values are NaN, or if classes are left out.

        Args:
            rate: The largest false match rate.
        """
        rates = f"{rate / 10:g} to {rate:g}"
        undefined = f"Threshold consistency at {rates} (opis@fmr{rate:g}, opis_gap@fmr{rate:g}) is NaN:"
        if len(self.labels) < 2:
            return (f"{undefined} it needs two classes with pairs of both kinds.",)
        if not len(self.thresholds):
            return (
                f"{undefined} too many scores tie, or almost tie. It needs {FEWEST} thresholds with such false match "
                "rates that differ before the ninth digit.",
            )
        if not self.classes_without_pairs:
            return ()
        classes = self.classes_without_pairs + len(self.labels)
        return (
            f"Threshold consistency leaves out {self.classes_without_pairs} of {classes} classes without a pair of items.",
        )

    def __str__(self) -> str:
        """Return both values, and a table of the classes that gain the most from their own threshold."""
        sizes = f"{counted(len(self.labels), 'class')} at {counted(len(self.thresholds), 'threshold')}"
        head = f"{sizes}: OPIS {self.opis:.4f}, gap {self.gap():.4f}"
        if self.classes_without_pairs:
            subject = "class without a pair is" if self.classes_without_pairs == 1 else "classes without a pair are"
            head += f"; {self.classes_without_pairs:,} {subject} left out"
        if not self._is_defined:
            return head
        common = f"common threshold {self.common_threshold:.4f}"
        wanting = len(self.wanting(len(self.labels)))
        if not wanting:
            return f"{head}\n{common}; no class gains from its own threshold"
        rows = []
        for label, (threshold, gain) in self.wanting(SHOWN_ROWS).items():
            rows.append((printable(label), f"{threshold:.4f}", f"{gain:.4f}"))
        common += "; classes that gain the most from their own threshold:"
        return "\n".join([head, common, *table(("class", "threshold", "gain"), rows, wanting)])

    def __repr__(self) -> str:
        return str(self)

    @property
    def _is_defined(self) -> bool:
        """Whether there are classes to compare, and thresholds to compare them at."""
        return len(self.labels) > 1 and len(self.thresholds) > 0

    @property
    def _common_position(self) -> int:
        """Position of the common threshold."""
        means = self.utility.mean(axis=0)
        return int(np.flatnonzero(means == means.max())[-1])


def threshold_consistency(
    pooled: PooledPairs,
    labels: Int[np.ndarray, "own"],
    classes: Int[np.ndarray, "classes"],
    names: Sequence[str] | None,
    rate: float,
) -> ThresholdConsistency:
    """Return the threshold consistency at false match rates from a tenth of `rate` to `rate`. *Collective*.

    Relevance is by one label per item. `classes` are the labels of all queries, ascending. `names` is None for integer
    labels.
    """
    class_of_query = np.searchsorted(classes, labels)
    if not pooled.negatives.total:
        return ThresholdConsistency(np.empty(0), (), np.empty((0, 0)), len(classes))
    counts = _counts_around_range(pooled, class_of_query, len(classes), rate)
    used = _used_thresholds(counts, rate, _near_zero(pooled))
    has_pairs = (counts.relevant > 0) & (counts.negatives > 0)
    accepted = counts.relevant_reaching[has_pairs][:, used] / counts.relevant[has_pairs, None]
    rejected = 1 - counts.negatives_reaching[has_pairs][:, used] / counts.negatives[has_pairs, None]
    # `tiny` avoids 0 / 0 if nothing is accepted and nothing is rejected.
    utility = 2 * accepted * rejected / np.maximum(accepted + rejected, np.finfo(np.float64).tiny)
    present = classes[has_pairs].tolist()
    return ThresholdConsistency(
        thresholds=counts.step * counts.multiples[used],
        labels=tuple(present) if names is None else tuple(names[label] for label in present),
        utility=utility,
        classes_without_pairs=int((~has_pairs).sum()),
    )


class _ClassCounts(NamedTuple):
    """Pairs of each class's queries, over all processes: all pairs, and the pairs that reach each threshold.

    The thresholds are `step * multiples`, in the units of the data, ascending.
    """

    step: float
    multiples: Int[np.ndarray, "thresholds"]
    relevant: Int[np.ndarray, "classes"]
    negatives: Int[np.ndarray, "classes"]
    relevant_reaching: Int[np.ndarray, "classes thresholds"]
    negatives_reaching: Int[np.ndarray, "classes thresholds"]

    def false_match_rates(self) -> Float[np.ndarray, "thresholds"]:
        """Return the pooled false match rate at each threshold."""
        return false_match_rate(self.negatives_reaching.sum(axis=0), int(self.negatives.sum()))

    def in_range(self, rate: float) -> Bool[np.ndarray, "thresholds"]:
        """Return whether the false match rate at each threshold is between a tenth of `rate` and `rate`."""
        rates = self.false_match_rates()
        return (rates >= rate / 10) & (rates <= rate)

    def are_enough(self, rate: float) -> bool:
        """Return whether enough thresholds are in the range, and some on both sides of it."""
        rates = self.false_match_rates()
        has_sides = (rates > rate).any() and (rates < rate / 10).any()
        return bool(has_sides and self.in_range(rate).sum() >= FEWEST)


def _counts_around_range(
    pooled: PooledPairs, class_of_query: Int[np.ndarray, "own"], classes: int, rate: float
) -> _ClassCounts:
    """Return counts with enough thresholds in the range, and some on both sides of it. *Collective*.

    The first pass counts where a sample suggests the range. If the range extends beyond, the next pass extends to the lowest
    or the highest possible score. If too few thresholds are in the range, the next pass has finer thresholds. So a wrong
    sample costs passes but does not change the result. There are not enough thresholds if the range is too narrow for
    thresholds that differ by `LEAST_STEP`, or if the range has no end.

    `class_of_query` has the class index of each query of this process.
    """
    low, high = _likely_range(pooled, rate)
    lowest, highest = _ends(pooled)
    near_zero = _near_zero(pooled)
    while True:
        step = 2.0 ** math.floor(math.log2((high - low) / (1.5 * FEWEST)))
        multiples = np.arange(math.floor(low / step), math.ceil(high / step) + 1)
        counts = _counts(pooled, class_of_query, classes, step, multiples)
        rates = counts.false_match_rates()
        below_range = np.flatnonzero(rates > rate)
        above_range = np.flatnonzero(rates < rate / 10)
        is_unbounded = (not len(below_range) and low <= lowest) or (not len(above_range) and high >= highest)
        if counts.are_enough(rate) or is_unbounded:
            return counts
        low = step * multiples[below_range[-1]] if len(below_range) else lowest
        high = step * multiples[above_range[0]] if len(above_range) else highest
        is_narrow = high - low <= NARROWEST * max(abs(low), abs(high), near_zero)
        if is_narrow:
            return counts


def _used_thresholds(counts: _ClassCounts, rate: float, near_zero: float) -> Bool[np.ndarray, "thresholds"]:
    """Return which thresholds in the range are used: the multiples of the largest power of two with enough of them.

    They depend only on the exact counts, and not on which thresholds were counted. No threshold is used if there are too few
    of them, or if they are too close to each other.

    Scores below `near_zero` in size count as zero.
    """
    none = np.zeros(len(counts.multiples), bool)
    if not counts.are_enough(rate):
        return none
    in_range = counts.in_range(rate)
    stride = 1
    while (in_range & (counts.multiples % (2 * stride) == 0)).sum() >= FEWEST:
        stride *= 2
    used: Bool[np.ndarray, "thresholds"] = in_range & (counts.multiples % stride == 0)
    largest = counts.step * np.abs(counts.multiples[used]).max()
    is_too_close = counts.step * stride < LEAST_STEP * max(largest, near_zero)
    return none if is_too_close else used


def _likely_range(pooled: PooledPairs, rate: float) -> tuple[float, float]:
    """Return scores, in the units of the data, that probably enclose the range. *Collective*."""
    sample = pooled.negatives.sample
    if not len(sample.estimates):
        return _ends(pooled)
    ends = [sample.score_reached_by(share * sample.total) for share in (SLACK * rate, rate / 10 / SLACK)]
    low, high = (float(end) for end in pooled.vectors.scale.to_user(np.array(ends)))
    return low, max(high, low + 2.0**-20 * max(abs(low), 2.0**-100))


def _ends(pooled: PooledPairs) -> tuple[float, float]:
    """Return a score below and a score above all possible scores, in the units of the data."""
    highest_score = 0.0 if pooled.vectors.scale.similarity == "euclidean" else 1.0
    low, high = (float(end) for end in pooled.vectors.scale.to_user(np.array([-1.0, highest_score])))
    margin = 2.0**-20 * max(abs(low), abs(high))
    return low - margin, high + margin


def _near_zero(pooled: PooledPairs) -> float:
    """Return the size, in the units of the data, below which scores count as zero."""
    lowest, highest = _ends(pooled)
    return NEAR_ZERO * (highest - lowest)


def _counts(
    pooled: PooledPairs,
    class_of_query: Int[np.ndarray, "own"],
    classes: int,
    step: float,
    multiples: Int[np.ndarray, "thresholds"],
) -> _ClassCounts:
    """Return the counts of each class at the thresholds `step * multiples`, from one more pass. *Collective*.

    `multiples` are ascending; `step` is in the units of the data.
    """
    scores = np.append(BELOW_ALL, np.minimum(pooled.vectors.scale.from_user(step * multiples), ABOVE_ALL))
    # relevant pairs between consecutive scores, and negatives that reach each score
    relevant_between = np.zeros((classes, len(scores)), np.int64)
    negatives = np.zeros((classes, len(scores)), np.int64)
    for batch, reaching in pooled.evaluation.negatives_per_query(scores):
        np.add.at(negatives, class_of_query[batch], reaching)
    for batch, (offsets, relevant_scores, _) in pooled.evaluation.thresholds_per_query():
        highest_reached = np.searchsorted(scores, relevant_scores, side="right") - 1
        class_of_pair = np.repeat(class_of_query[batch], np.diff(offsets))
        np.add.at(relevant_between, (class_of_pair, highest_reached), 1)
    relevant = np.cumsum(relevant_between[:, ::-1], axis=1)[:, ::-1]
    processes = pooled.vectors.processes
    if processes.count > 1:
        relevant, negatives = processes.summed(np.stack([relevant, negatives]))
    return _ClassCounts(step, multiples, relevant[:, 0], negatives[:, 0], relevant[:, 1:], negatives[:, 1:])
