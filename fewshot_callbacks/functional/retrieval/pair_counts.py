"""Numbers of relevant and irrelevant pairs at each threshold and in each bin of scores, thinned for a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fewshot_callbacks.engine.pooled import ScoreHistogram

BINS = 240
"""Number of evenly spaced thresholds, which are also the edges of the bins."""
RECALL_STEPS, MATCH_STEPS = 100, 60
"""Further thresholds: evenly spaced in recall, and geometrically in the number of irrelevant pairs accepted."""


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


def thinned(
    histogram: ScoreHistogram,
    to_scores: Callable[[Float[Tensor, "scores"]], Float[Tensor, "scores"]],
    known: Iterable[tuple[float, int, int]] = (),
) -> PairCounts:
    """Count pairs at a few hundred thresholds: evenly spaced ones, and more where recall or false matches change.

    Args:
        histogram: All pairs by their exact score, in fine bins.
        to_scores: Returns the scores that a user reads for exact scores.
        known: Thresholds that a user reads, with their true and false positives, which are among those counted.
    """
    positives, negatives = histogram.positives, histogram.negatives
    tp, fp = (np.append(np.cumsum(counts[::-1])[::-1], 0) for counts in (positives, negatives))
    used = np.flatnonzero((positives > 0) | (negatives > 0))
    first, last = int(used[0]), int(used[-1]) + 1
    scores = to_scores(torch.from_numpy(np.ascontiguousarray(histogram.edges[first : last + 1]))).numpy()
    even = np.searchsorted(scores, np.linspace(scores[0], scores[-1], BINS + 1)).clip(max=len(scores) - 1)
    even = np.unique(np.concatenate([[0], even, [len(scores) - 1]]))
    asked = np.linspace(0, tp[0], RECALL_STEPS + 1)
    matches = np.geomspace(1, max(int(fp[0]), 1), MATCH_STEPS)
    more = [np.searchsorted(-counts[first : last + 1], -wanted) for counts, wanted in ((tp, asked), (fp, matches))]
    chosen = np.unique(np.concatenate([even, *more]).clip(max=len(scores) - 1))
    points = np.array([point for point in known if math.isfinite(point[0])], dtype=np.float64).reshape(-1, 3)
    thresholds = np.concatenate([scores[chosen], points[:, 0]])
    order = np.argsort(thresholds, kind="stable")
    bins = even + first

    def in_order(counts: Shaped[np.ndarray, "edges"], given: Shaped[np.ndarray, "points"]) -> np.ndarray:
        return np.concatenate([counts[chosen + first], given.astype(np.int64)])[order]

    return PairCounts(
        thresholds[order],
        in_order(tp, points[:, 1]),
        in_order(fp, points[:, 2]),
        int(tp[0]),
        int(fp[0]),
        scores[even],
        -np.diff(tp[bins]),
        -np.diff(fp[bins]),
        _tolerance(histogram, to_scores, chosen + first),
        _user_score(to_scores, histogram.sampled_below),
    )


def _tolerance(
    histogram: ScoreHistogram,
    to_scores: Callable[[Float[Tensor, "scores"]], Float[Tensor, "scores"]],
    chosen: Shaped[np.ndarray, "thresholds"],
) -> float:
    """Return the largest error of an edge in the unit that a user reads."""
    if not histogram.error:
        return 0.0
    edges = torch.from_numpy(histogram.edges[chosen])
    reach = to_scores(edges + histogram.error) - to_scores(edges - histogram.error)
    return float(reach.nan_to_num(0.0).max())


def _user_score(to_scores: Callable[[Float[Tensor, "scores"]], Float[Tensor, "scores"]], score: float) -> float:
    return float(to_scores(torch.tensor([score], dtype=torch.float64))[0]) if math.isfinite(score) else -math.inf
