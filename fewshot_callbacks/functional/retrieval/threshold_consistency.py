"""Threshold consistency: does one threshold serve all classes, and which want another?

The counts of each class at a grid of thresholds follow from one more pass over the pairs. The grid must not depend on the
order of the data or the number of processes, and the pooled rates that bound it are only known after the pass. So the
thresholds are multiples of a power of two, a sample says where they are counted, and the exact counts say which are used.

References:
    Zhang et al., "Threshold-Consistent Margin Loss for Open-World Deep Metric Learning", ICLR 2024, arXiv 2307.04047: OPIS
    is an integral over a range of distances, divided by its length. Public programs differ in how many thresholds they
    take for it, some estimate the range from a sample, and some measure the spread of a pooled F1 over thresholds instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from fewshot_callbacks.engine.evaluation import PooledPairs
from fewshot_callbacks.functional._table import SHOWN_ROWS, table
from fewshot_callbacks.functional.retrieval.operating_points import false_match_rate
from fewshot_callbacks.system.terminal import printable

# Thresholds of a range: at least so many, and fewer than twice as many. OPIS was within 2 % of that of 700 thresholds.
FEWEST = 16
# Where the sample says that the range ends, the false match rates may be off by this factor.
SLACK = 1.25
# Passes over the pairs, at most: the first suffices where the sample does, four tell scores apart to the eighth place.
PASSES = 4
# Below all scores, which lie in [-1, 1]; and above them.
BELOW, ABOVE = -2.0, 2.0


@dataclass(frozen=True, eq=False)
class ThresholdConsistency:
    """How differently one threshold serves the classes of a set (OPIS).

    The utility of a class at a threshold is the harmonic mean of two shares: of its pairs that are accepted, and of its
    queries' pairs with items of other classes that are rejected. It is 0 where either is 0. There are no intervals, and
    where classes are small, chance alone spreads their utilities.

    Examples:
        >>> import numpy as np
        >>> found = ThresholdConsistency(np.array([0.5, 0.6]), ("heron", "owl"), np.array([[0.8, 0.9], [0.8, 0.5]]))
        >>> round(found.opis, 3), round(found.gap(), 3), found.common_threshold
        (0.02, 0.1, 0.5)
        >>> found.wanting()
        {'heron': (0.6, 0.1)}
    """

    thresholds: Float[np.ndarray, "thresholds"]
    """16 to 31 multiples of a power of two at which the pooled false match rate lies in the range, ascending; or none"""
    labels: tuple[int | str, ...]
    """classes with pairs of both kinds, as they were given, ascending"""
    utility: Float[np.ndarray, "classes thresholds"]
    """utility of each class at each threshold, in [0, 1]"""
    left_out: int = 0
    """classes without a pair of one kind or the other, which have no utility"""

    @property
    def opis(self) -> float:
        """Variance of the utility between classes, its mean over the thresholds, in [0, 0.25]; 0 is consistent.

        NaN with fewer than two classes, or no threshold.
        """
        return float(self.utility.var(axis=0).mean()) if self._known else math.nan

    def gap(self, share: float = 0.1) -> float:
        """Return how far the mean utility of the worst classes lies below that of all, in [0, 1]: epsilon-OPIS.

        Args:
            share: Of the classes, in (0, 1], rounded up: those with the lowest mean utility over all thresholds, and not at
                each of them, so that the gap is that of some classes.
        """
        if not self._known:
            return math.nan
        means = self.utility.mean(axis=1)
        return float(means.mean() - np.sort(means)[: math.ceil(share * len(means))].mean())

    @property
    def common_threshold(self) -> float:
        """The threshold with the highest mean utility over classes, of several the highest; NaN if there is none."""
        return float(self.thresholds[self._common]) if self._known else math.nan

    def wanting(self, most: int = 10) -> dict[int | str, tuple[float, float]]:
        """Return the classes that gain the most by a threshold of their own: label -> (threshold, gain in utility).

        It is the best for the class, of several the nearest to the common one.

        Args:
            most: So many classes, the largest gain first; others gain less.
        """
        if not self._known:
            return {}
        best = self.utility.max(axis=1)
        gains = best - self.utility[:, self._common]
        away = np.abs(np.arange(len(self.thresholds)) - self._common)
        own = np.where(self.utility == best[:, None], away, len(away)).argmin(axis=1)
        chosen = [at for at in np.argsort(-gains, kind="stable")[:most] if gains[at] > 0]
        return {self.labels[at]: (float(self.thresholds[own[at]]), round(float(gains[at]), 12)) for at in chosen}

    def notes(self, rate: float) -> tuple[str, ...]:
        """Say what is missing.

        Args:
            rate: The largest false match rate.
        """
        if not self._known:
            why = "two classes with pairs of both kinds, and a threshold at which so many other pairs match"
            return (f"Threshold consistency at {rate / 10:g} to {rate:g} is NaN: it needs {why}.",)
        if not self.left_out:
            return ()
        every = self.left_out + len(self.labels)
        return (f"Threshold consistency leaves out {self.left_out} of {every} classes: no two items are a pair.",)

    def __str__(self) -> str:
        """Return what is known of all classes, and those that gain the most by a threshold of their own as a table."""
        sizes = f"{len(self.labels):,} classes at {len(self.thresholds)} thresholds"
        head = f"{sizes}: OPIS {self.opis:.4f}, gap {self.gap():.4f}"
        if self.left_out:
            what = "class without a pair is" if self.left_out == 1 else "classes without a pair are"
            head += f"; {self.left_out:,} {what} left out"
        if not self._known:
            return head
        common = f"common threshold {self.common_threshold:.4f}"
        every = self.wanting(len(self.labels))
        if not every:
            return f"{head}\n{common}; no class gains by one of its own"
        rows = [
            (printable(label), f"{own:.4f}", f"{gain:.4f}") for label, (own, gain) in self.wanting(SHOWN_ROWS).items()
        ]
        common += "; classes that gain the most by one of their own:"
        return "\n".join([head, common, *table(("class", "threshold", "gain"), rows, len(every))])

    def __repr__(self) -> str:
        return str(self)

    @property
    def _known(self) -> bool:
        return len(self.labels) > 1 and len(self.thresholds) > 0

    @property
    def _common(self) -> int:
        means = self.utility.mean(axis=0)
        return int(np.flatnonzero(means == means.max())[-1])


def threshold_consistency(
    pooled: PooledPairs,
    labels: Int[np.ndarray, "own"],
    classes: Int[np.ndarray, "classes"],
    names: Sequence[str] | None,
    rate: float,
) -> ThresholdConsistency:
    """Compare the classes where the pooled false match rate lies between a tenth of a rate and the rate; collective.

    Args:
        pooled: Counts of all pairs, whose relevance is one label for each item.
        labels: Of the queries of this process.
        classes: The labels of all queries, ascending.
        names: The string of each label; None where labels are integers.
        rate: The largest false match rate.
    """
    nothing = ThresholdConsistency(np.empty(0), (), np.empty((0, 0)), len(classes))
    if not pooled.negatives.total:
        return nothing
    (low, high), of = _likely(pooled, rate), np.searchsorted(classes, labels)
    for _ in range(PASSES):
        step, every = 2.0 ** math.floor(math.log2((high - low) / (1.5 * FEWEST))), 1
        numbers = np.arange(math.floor(low / step), math.ceil(high / step) + 1)
        relevant, negatives = _counts(pooled, of, len(classes), step * numbers)
        rates = false_match_rate(negatives[:, 1:].sum(axis=0), int(negatives[:, 0].sum()))
        inside = (rates >= rate / 10) & (rates <= rate)
        lower, higher = np.flatnonzero(rates > rate), np.flatnonzero(rates < rate / 10)
        if len(lower) and len(higher) and inside.sum() >= FEWEST:
            break
        width = high - low
        low = step * numbers[lower[-1]] if len(lower) else low - width
        high = step * numbers[higher[0]] if len(higher) else high + width
    else:
        return nothing
    # the coarsest grid follows from the exact counts alone, and not from where they were made
    while (inside & (numbers % (2 * every) == 0)).sum() >= FEWEST:
        every *= 2
    inside &= numbers % every == 0
    some = (relevant[:, 0] > 0) & (negatives[:, 0] > 0)
    accepted = relevant[some, 1:][:, inside] / relevant[some, :1]
    rejected = 1 - negatives[some, 1:][:, inside] / negatives[some, :1]
    # without a division by zero where nothing is accepted and nothing rejected
    utility = 2 * accepted * rejected / np.maximum(accepted + rejected, np.finfo(np.float64).tiny)
    present = classes[some].tolist()
    words = tuple(present) if names is None else tuple(names[label] for label in present)
    return ThresholdConsistency(step * numbers[inside], words, utility, int((~some).sum()))


def _likely(pooled: PooledPairs, rate: float) -> tuple[float, float]:
    """Return scores, in the units of the data, between which the range probably lies."""
    known, last = pooled.sample.estimates, len(pooled.sample.estimates) - 1
    ends = np.array(pooled.negatives.span(pooled.positives.scores))
    if len(known):
        ends = known[[last - int(min(1.0, share) * last) for share in (SLACK * rate, rate / 10 / SLACK)]]
    low, high = (float(end) for end in pooled.vectors.to_user(ends))
    return low, max(high, low + 2.0**-20 * max(abs(low), 2.0**-100))


def _counts(
    pooled: PooledPairs, of: Int[np.ndarray, "own"], classes: int, thresholds: Float[np.ndarray, "thresholds"]
) -> tuple[np.ndarray, np.ndarray]:
    """Count, for the queries of each class, relevant and other pairs: all of them, and those that reach each threshold.

    Args:
        pooled: Counts of all pairs.
        of: Class of each query of this process, from 0.
        classes: How many there are.
        thresholds: Ascending, in the units of the data.

    Returns:
        Both (classes, 1 + thresholds), of all processes.
    """
    asked = np.append(BELOW, np.minimum(pooled.vectors.from_user(thresholds), ABOVE))
    relevant, negatives = np.zeros((2, classes, len(asked)), np.int64)
    for batch, reaching in pooled.evaluation.negatives_per_query(asked):
        np.add.at(negatives, of[batch], reaching)
    for batch, (offsets, scores, _) in pooled.relevant.by_batch():
        reached = np.searchsorted(asked, scores, side="right") - 1
        np.add.at(relevant, (np.repeat(of[batch], np.diff(offsets)), reached), 1)
    counts = np.stack([np.cumsum(relevant[:, ::-1], axis=1)[:, ::-1], negatives])
    processes = pooled.vectors.processes
    relevant, negatives = processes.summed(counts) if processes.count > 1 else counts
    return relevant, negatives
