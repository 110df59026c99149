"""Numbers of pairs at a few hundred thresholds, for plots of curves and distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Shaped

from fewshot_callbacks.engine.evaluation import PooledPairs
from fewshot_callbacks.engine.pooled.questions import Counts
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.scale import Floats
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional._table import SHOWN_ROWS, table
from fewshot_callbacks.functional.retrieval.operating_points import OperatingPoint

# Number of evenly spaced thresholds, which are also the edges of the bins.
BINS = 240
# Number of further thresholds: evenly spaced in recall, and geometrically in the number of accepted negatives.
RECALL_STEPS = 100
MATCH_STEPS = 60
# The further thresholds are chosen from this number of relevant, of sampled and of collected scores.
SCORES_TO_TRY = 2**12


@dataclass(frozen=True, eq=False)
class PairCounts:
    """Numbers of relevant and irrelevant pairs at thresholds and in score bins.

    Attributes:
        thresholds: Thresholds in any order. A pair is accepted if its score is at least the threshold.
        true_positives: Number of relevant pairs that each threshold accepts.
        false_positives: Number of irrelevant pairs that each threshold accepts.
        relevant: Number of relevant pairs.
        irrelevant: Number of irrelevant pairs.
        edges: Edges of the bins, ascending.
        relevant_counts: Number of relevant pairs in each bin.
        irrelevant_counts: Number of irrelevant pairs in each bin.
        tolerance: Each count is exact for a threshold that differs from the listed threshold by at most this much.
        sampled_below: Below this score, false positives and bins are estimated from a sample of the irrelevant pairs; -inf
            if all pairs were counted.

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
        """Share of relevant pairs among the accepted pairs, in [0, 1]; NaN if no pair is accepted."""
        accepted = self.true_positives + self.false_positives
        return np.where(accepted > 0, self.true_positives / np.maximum(accepted, 1), math.nan)

    @property
    def recall(self) -> Float[np.ndarray, "thresholds"]:
        """Share of relevant pairs that are accepted, in [0, 1]; NaN if there are no relevant pairs."""
        return self.true_positives / (self.relevant or math.nan)

    @property
    def false_match_rate(self) -> Float[np.ndarray, "thresholds"]:
        """Share of irrelevant pairs that are accepted, in [0, 1]; NaN if there are no irrelevant pairs."""
        return self.false_positives / (self.irrelevant or math.nan)

    @property
    def false_non_match_rate(self) -> Float[np.ndarray, "thresholds"]:
        """Share of relevant pairs that are rejected, in [0, 1]; NaN if there are no relevant pairs."""
        return 1 - self.recall

    def at(self, threshold: float) -> tuple[float, float, float]:
        """Return recall, precision and false match rate at the nearest listed threshold; NaN if there is none."""
        if not len(self.thresholds) or not math.isfinite(threshold):
            return math.nan, math.nan, math.nan
        nearest = int(np.abs(self.thresholds - threshold).argmin())
        return float(self.recall[nearest]), float(self.precision[nearest]), float(self.false_match_rate[nearest])

    def __str__(self) -> str:
        """Return a table of the rates at a few thresholds, from the lowest to the highest."""
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


def count_pairs(pooled: PooledPairs, points: Sequence[OperatingPoint] = ()) -> PairCounts:
    """Return the numbers of pairs at a few hundred thresholds and in score bins. *Collective*.

    Thresholds are evenly spaced in the score, evenly spaced in recall, and geometrically spaced in the number of false
    positives.

    Finite thresholds of `points` are included.
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
    recall_positions = first_with_at_most(true_positives, recall_steps)
    match_positions = first_with_at_most(false_positives, match_steps)
    positions = np.unique(np.concatenate([edge_positions, recall_positions, match_positions]))
    finite_points = [point for point in points if math.isfinite(point.threshold)]
    thresholds = np.concatenate(
        [vectors.scale.to_user(scores[positions]), [point.threshold for point in finite_points]]
    )
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
        sampled_below=to_user(vectors, negatives.cutoff) if math.isfinite(negatives.cutoff) else -math.inf,
    )


def _bin_edges(pooled: PooledPairs) -> tuple[Floats, Floats]:
    """Return ascending edges of bins that contain all pairs, in the units of the data and as exact scores. *Collective*."""
    vectors = pooled.vectors
    scores = pooled.grid.scores[[0, -1]]
    sample = pooled.negatives.sample
    if len(sample.estimates):
        scores = np.concatenate([sample.estimates[[0, -1]], scores])
    lowest, highest = pooled.negatives.span(scores)
    low, high = vectors.scale.to_user(np.array([lowest, highest]))
    if vectors.pairs.exact_estimates:
        edges = _edges_of_distances(low, high)
    else:
        above_all = high + 1e-6 * max(high - low, abs(high), 1e-30)
        edges = np.unique(np.linspace(low, above_all, BINS + 1))
    # Exact scores end at 1. An edge above all distances is not the score of any pair, and would be infinite.
    edge_scores = np.minimum(vectors.scale.from_user(edges), 2.0)
    # `lowest` may have changed in the conversion to the units of the data and back.
    edge_scores[0] = min(edge_scores[0], lowest)
    return edges, edge_scores


def _edges_of_distances(low: float, high: float) -> Floats:
    """Return edges with a bin for one or several whole distances. The last edge is above all distances."""
    step = math.ceil((high - low + 1) / BINS)
    return np.arange(low, high + step + 0.5, step)


def _scores_to_try(pooled: PooledPairs, edge_scores: Floats) -> Floats:
    """Return ascending scores that may become thresholds: bin edges, and thousands of pair scores. *Collective*."""
    highest = pooled.negatives.highest_values()
    scores = [edge_scores]
    for values in (pooled.grid.scores, pooled.negatives.sample.estimates, highest):
        step = max(1, len(values) // SCORES_TO_TRY)
        scores.append(values[::step])
    if len(highest):
        # Geometrically spaced in rank, because plots show false match rates on a logarithmic axis.
        ranks = np.unique(np.geomspace(1, len(highest), SCORES_TO_TRY).astype(np.int64))
        scores.append(highest[len(highest) - ranks])
    return np.unique(np.concatenate(scores))


def first_with_at_most(counts: Counts, limits: Floats) -> Ints:
    """Return, for each limit, the position of the first descending count that is at most the limit; else the last."""
    positions: Ints = np.searchsorted(-counts, -limits).clip(max=len(counts) - 1)
    return positions


def _with_points(counts: Ints, of_points: Sequence[int]) -> Ints:
    """Return the counts at thresholds, followed by the counts at operating points."""
    return np.concatenate([counts, np.array(of_points, np.int64)])


def _tolerance(vectors: Vectors, scores: Floats, error: float) -> float:
    """Return the largest width, in the units of the data, of an exact score's interval plus or minus the error."""
    if not error:
        return 0.0
    widths = vectors.scale.to_user(scores + error) - vectors.scale.to_user(scores - error)
    return float(widths.max())


def to_user(vectors: Vectors, score: float) -> float:
    """Return an exact score in the units of the data."""
    return float(vectors.scale.to_user(np.array([score]))[0])
