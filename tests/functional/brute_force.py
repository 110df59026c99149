"""The slow, obvious reference: float64, loops over queries, sorts nothing that a definition does not ask for."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np

DIGITS = Context(prec=400, Emax=10**6, Emin=-(10**6))


def root(value: Fraction) -> float:
    """The square root to 400 digits, then rounded to float64."""
    numerator, denominator = (Decimal(part) for part in value.as_integer_ratio())
    return float(DIGITS.sqrt(DIGITS.divide(numerator, denominator)))


class TooManyOrdersError(Exception):
    """Tied candidates can be ordered in more ways than are worth enumerating: a property test rejects such an example."""


@dataclass
class BruteForce:
    """All metrics of a small set of embeddings by their definitions."""

    queries: np.ndarray
    query_labels: np.ndarray
    gallery: np.ndarray | None = None
    gallery_labels: np.ndarray | None = None
    similarity: str = "cosine"
    ties: str = "expected"
    query_ids: np.ndarray | None = None
    gallery_ids: np.ndarray | None = None
    query_groups: np.ndarray | None = None
    gallery_groups: np.ndarray | None = None
    scores: list[np.ndarray] = field(default_factory=list)
    relevance: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        same = self.gallery is None
        gallery = self.queries if same else self.gallery
        labels = self.query_labels if same else self.gallery_labels
        groups = self.query_groups if same else self.gallery_groups
        for i, query in enumerate(self.queries):
            keep = [
                j
                for j in range(len(gallery))
                if not (same and i == j)
                and not (self.query_ids is not None and self.query_ids[i] == self.gallery_ids[j])
                and not (self.query_groups is not None and self.query_groups[i] == groups[j])
            ]
            self.scores.append(np.array([self.score(query, gallery[j]) for j in keep]))
            self.relevance.append(np.array([labels[j] == self.query_labels[i] for j in keep], dtype=bool))

    def score(self, a: np.ndarray, b: np.ndarray) -> float:
        a, b = a.astype(np.float64), b.astype(np.float64)
        if self.similarity == "euclidean":
            return -math.sqrt(math.fsum((a - b) ** 2))
        dot = math.fsum(a * b)  # correctly rounded, so that equal sums are equal
        if self.similarity == "dot":
            return dot
        norms = math.sqrt(math.fsum(a * a) * math.fsum(b * b))
        return dot / norms if norms else 0.0

    def orders(self, i: int, cap: int = 5000):
        """Relevance in ranked order: all orders of tied candidates (expected), or the best or the worst."""
        score, relevant = self.scores[i], self.relevance[i]
        groups = [relevant[score == value] for value in sorted(set(score), reverse=True)]
        if self.ties != "expected":
            yield np.concatenate([np.sort(g)[:: -1 if self.ties == "optimistic" else 1] for g in groups])
            return
        choices = [sorted(set(itertools.combinations(range(len(g)), int(g.sum())))) for g in groups]
        if math.prod(len(c) for c in choices) > cap:
            raise TooManyOrdersError
        for places in itertools.product(*choices):
            ranked = []
            for group, place in zip(groups, places, strict=True):
                part = np.zeros(len(group), dtype=bool)
                part[list(place)] = True
                ranked.append(part)
            yield np.concatenate(ranked)

    @property
    def matched(self) -> list[int]:
        return [i for i, relevant in enumerate(self.relevance) if relevant.any()]

    def mean(self, of) -> float:
        return float(np.mean([np.mean([of(order) for order in self.orders(i)]) for i in self.matched]))

    @property
    def mean_average_precision(self) -> float:
        return self.mean(lambda r: np.mean([r[: k + 1].mean() for k in np.flatnonzero(r)]))

    @property
    def map_at_r(self) -> float:
        def of(r):
            total = int(r.sum())
            return sum(r[: k + 1].mean() for k in np.flatnonzero(r) if k < total) / total

        return self.mean(of)

    @property
    def r_precision(self) -> float:
        return self.mean(lambda r: r[: int(r.sum())].mean())

    def recall_at(self, k: int) -> float:
        return self.mean(lambda r: float(r[:k].any()))

    def ir_recall_at(self, k: int) -> float:
        return self.mean(lambda r: ir_recall_at(r, k))

    def precision_at(self, k: int) -> float:
        return self.mean(lambda r: precision_at(r, k))

    def average_precision_at(self, k: int, divisor: str) -> float:
        return self.mean(lambda r: average_precision_at(r, k, divisor))

    @property
    def mean_reciprocal_rank(self) -> float:
        return self.mean(reciprocal_rank)

    def ndcg_at(self, k: int) -> float:
        return self.mean(lambda r: ndcg_at(r, k))

    def pooled(self, threshold: float) -> tuple[int, int, int]:
        scores, relevant = np.concatenate(self.scores), np.concatenate(self.relevance)
        accepted = scores >= threshold
        return int((accepted & relevant).sum()), int((accepted & ~relevant).sum()), int((~accepted & relevant).sum())

    @property
    def thresholds(self) -> np.ndarray:
        """Scores of relevant pairs, ascending."""
        return np.unique(np.concatenate(self.scores)[np.concatenate(self.relevance)])

    @property
    def best_f1(self) -> float:
        return max(2 * tp / (2 * tp + fp + fn) for tp, fp, fn in map(self.pooled, self.thresholds))

    def recall_at_precision(self, precision: float, low: float, high: float) -> float:
        for threshold in [*(bound for bound in (low,) if math.isfinite(bound)), *self.thresholds, high]:
            if not low <= threshold <= high:
                continue
            tp, fp, fn = self.pooled(threshold)
            if tp and tp / (tp + fp) >= precision:
                return tp / (tp + fn)
        return 0.0


# Metrics of one order: whether the first, the second, ... candidate is relevant. At least one is.


def ir_recall_at(order, k: int) -> float:
    return float(Fraction(sum(bool(hit) for hit in order[:k]), sum(bool(hit) for hit in order)))


def precision_at(order, k: int) -> float:
    return sum(bool(hit) for hit in order[:k]) / k


def average_precision_at(order, k: int, divisor: str) -> float:
    order = [bool(hit) for hit in order]
    total, found = 0.0, 0
    for rank, hit in enumerate(order[:k], start=1):
        if hit:
            found += 1
            total += found / rank
    if found == 0:
        return 0.0
    return total / {"min": min(sum(order), k), "relevant": sum(order), "found": found}[divisor]


def reciprocal_rank(order) -> float:
    return 1 / (1 + [bool(hit) for hit in order].index(True))


def ndcg_at(order, k: int) -> float:
    order = [bool(hit) for hit in order]

    def dcg(hits):
        return math.fsum(1 / math.log2(rank + 1) for rank, hit in enumerate(hits[:k], start=1) if hit)

    return dcg(order) / dcg(sorted(order, reverse=True))


def prototype_accuracy(
    queries: np.ndarray,
    query_labels: np.ndarray,
    gallery: np.ndarray | None = None,
    gallery_labels: np.ndarray | None = None,
    similarity: str = "cosine",
) -> list[float]:
    """Nearest-prototype accuracy of each query, one after the other; without a gallery each query is left out of it.

    Means are fractions, rounded to float64; so is each score with such a mean.
    """
    same = gallery is None
    gallery, gallery_labels = (queries, query_labels) if same else (gallery, gallery_labels)

    def averaged(vector):
        vector = vector.astype(np.float64)
        length = math.sqrt(math.fsum(vector * vector))
        return list(map(Fraction, (vector / length if length and similarity == "cosine" else vector).tolist()))

    def mean(members):
        return [Fraction(float(sum(component) / len(members))) for component in zip(*members, strict=True)]

    def score(a, b):
        if similarity == "euclidean":
            return -root(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        if similarity == "dot" or not dot:
            return float(dot)
        return math.copysign(root(dot * dot / (sum(x * x for x in a) * sum(y * y for y in b))), dot)

    items = [averaged(item) for item in gallery]
    members = {label: [j for j in range(len(items)) if gallery_labels[j] == label] for label in gallery_labels.tolist()}
    prototypes = {label: mean([items[j] for j in own]) for label, own in members.items()}
    values = []
    for i, query in enumerate(queries):
        own = int(query_labels[i])
        others = [items[j] for j in members.get(own, []) if not (same and i == j)]
        if not others:
            values.append(math.nan)
            continue
        vector = list(map(Fraction, query.tolist()))
        scores = {label: score(vector, mean(others) if label == own else prototypes[label]) for label in prototypes}
        best = [label for label in scores if scores[label] == max(scores.values())]
        values.append(1 / len(best) if own in best else 0.0)
    return values
