"""The slow, obvious reference: float64, loops over queries, sorts nothing that a definition does not ask for."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np


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
        assert math.prod(len(c) for c in choices) <= cap, "too many orders to enumerate"
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
        for threshold in [t for t in self.thresholds if low <= t <= high] + [high]:
            tp, fp, fn = self.pooled(threshold)
            if tp and tp / (tp + fp) >= precision:
                return tp / (tp + fn)
        return 0.0
