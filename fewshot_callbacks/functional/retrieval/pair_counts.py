"""Numbers of relevant and irrelevant pairs at each threshold and in each bin of scores, thinned for a plot."""

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
