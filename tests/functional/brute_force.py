"""The slow, obvious reference: float64, loops over queries, sorts nothing that a definition does not ask for."""

from __future__ import annotations

import itertools
import math
from collections import Counter
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


def arrangements(grades):
    """All different orders of some grades, each of which is as likely."""
    if not grades:
        yield []
    for first in sorted(set(grades)):
        rest = list(grades)
        rest.remove(first)
        yield from ([first, *more] for more in arrangements(rest))


def orders(groups, ties: str, cap: int = 5000):
    """Grades in ranked order, given those of each group of tied candidates: all orders (expected), the best or the worst."""
    if ties != "expected":
        yield [grade for group in groups for grade in sorted(group, reverse=ties == "optimistic")]
        return
    factorial = math.factorial
    counts = [factorial(len(g)) // math.prod(map(factorial, Counter(g).values())) for g in groups]
    if math.prod(counts) > cap:
        raise TooManyOrdersError
    for parts in itertools.product(*map(arrangements, groups)):
        yield [grade for part in parts for grade in part]


@dataclass
class BruteForce:
    """All metrics of a small set of embeddings by their definitions; labels may be zeros and ones (items, labels)."""

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
    grades: list[np.ndarray] = field(default_factory=list)
    """1 for the same label, or the number of labels that both have"""

    def __post_init__(self) -> None:
        same = self.gallery is None
        gallery = self.queries if same else self.gallery
        labels = self.query_labels if same else self.gallery_labels
        groups = self.query_groups if same else self.gallery_groups
        for i, (query, mine) in enumerate(zip(self.queries, self.query_labels, strict=True)):
            left_out = np.arange(len(gallery)) == i if same else np.zeros(len(gallery), bool)
            for own, other in ((self.query_ids, self.gallery_ids), (self.query_groups, groups)):
                left_out |= False if own is None else own[i] == other
            keep = np.flatnonzero(~left_out)
            shared = [int((mine & labels[j]).sum()) if mine.ndim else int(mine == labels[j]) for j in keep]
            self.scores.append(np.array([self.score(query, gallery[j]) for j in keep]))
            self.grades.append(np.array(shared, dtype=int))

    def score(self, a: np.ndarray, b: np.ndarray) -> float:
        a, b = a.astype(np.float64), b.astype(np.float64)
        if self.similarity == "euclidean":
            return -math.sqrt(math.fsum((a - b) ** 2))
        if self.similarity == "hamming":
            return -float((a != b).sum())
        dot = math.fsum(a * b)  # correctly rounded, so that equal sums are equal
        if self.similarity == "dot":
            return dot
        norms = math.sqrt(math.fsum(a * a) * math.fsum(b * b))
        return dot / norms if norms else 0.0

    @property
    def relevance(self) -> list[np.ndarray]:
        return [grades > 0 for grades in self.grades]

    @property
    def matched(self) -> list[int]:
        return [i for i, relevant in enumerate(self.relevance) if relevant.any()]

    def values(self, metrics) -> dict[str, list[float]]:
        """Metrics of one order, by name, for each query: the mean over all orders of its candidates; NaN without a match."""
        rows = []
        for score, grades in zip(self.scores, self.grades, strict=True):
            groups = [grades[score == value].tolist() for value in sorted(set(score), reverse=True)]
            every = orders(groups, self.ties) if any(grades) else ()
            values = [[of(order) for of in metrics.values()] for order in every]
            rows.append(np.mean(values, axis=0) if values else [math.nan] * len(metrics))
        return dict(zip(metrics, np.transpose(rows).tolist(), strict=True))

    def mean(self, of) -> float:
        return float(np.nanmean(self.values({"": of})[""]))

    @property
    def mean_average_precision(self) -> float:
        return self.mean(average_precision)

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


# Metrics of one order: the grade of the first, the second, ... candidate. At least one is not 0.


def hits(order) -> list[int]:
    """Ranks of the relevant candidates."""
    return [rank for rank, grade in enumerate(order, start=1) if grade]


def average_precision(order, k: float = math.inf, divisor: str = "relevant") -> float:
    ranks = hits(order)
    found = [number / rank for number, rank in enumerate(ranks, start=1) if rank <= k]
    by = {"min": min(len(ranks), k), "relevant": len(ranks), "found": len(found)}[divisor]
    return sum(found) / by if found else 0.0


def recall_at(order, k: int) -> float:
    return float(any(order[:k]))


def precision_at(order, k: int) -> float:
    return len(hits(order[:k])) / k


def precision_up_to_last(order, k: int) -> float:
    """The authors' program: kq = min(largest rank of a relevant item, k)."""
    return precision_at(order, min(k, hits(order)[-1]))


def trapezoids(order) -> float:
    """The authors' program: old and new recall and precision at each hit."""
    ranks = hits(order)
    before = [(number / (rank - 1) if rank > 1 else 1.0) for number, rank in enumerate(ranks)]
    after = [number / rank for number, rank in enumerate(ranks, start=1)]
    return sum(before + after) / 2 / len(ranks)


def auroc(order) -> float:
    """Share of the pairs of a relevant candidate and a negative in which the relevant one comes first."""
    pairs = [(first, second) for first, second in itertools.combinations(map(bool, order), 2) if first != second]
    return sum(first for first, _ in pairs) / len(pairs) if pairs else math.nan


def ndcg(order, k: int, gain: str = "exponential") -> float:
    def dcg(grades):
        worth = [2**grade - 1 if gain == "exponential" else grade for grade in grades[:k]]
        return math.fsum(value / math.log2(rank + 1) for rank, value in enumerate(worth, start=1))

    return dcg(order) / dcg(sorted(order, reverse=True))


def rank_metrics(k: int):
    """Every metric of ranks, at rank k where it has one: its key, and its value of one order."""
    return {
        "mAP": average_precision,
        "map@r": lambda order: average_precision(order, len(hits(order))),
        "r_precision": lambda order: precision_at(order, len(hits(order))),
        "mrr": lambda order: 1 / hits(order)[0],
        f"mrr@{k}": lambda order: 1 / hits(order)[0] if hits(order)[0] <= k else 0.0,
        "minp": lambda order: len(hits(order)) / hits(order)[-1],
        "ap_trapezoid": trapezoids,
        **{
            f"map@{k}_{by}": lambda order, by=by: average_precision(order, k, by) for by in ("min", "relevant", "found")
        },
        f"recall@{k}": lambda order: recall_at(order, k),
        f"ir_recall@{k}": lambda order: len(hits(order[:k])) / len(hits(order)),
        f"precision@{k}": lambda order: precision_at(order, k),
        f"precision@{k}_last": lambda order: precision_up_to_last(order, k),
        f"ndcg@{k}": lambda order: ndcg(order, k),
        f"ndcg@{k}_linear": lambda order: ndcg(order, k, "linear"),
        "auroc": auroc,
    }


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
    fractions = np.vectorize(Fraction, otypes=[object])

    def mean(members):
        return fractions((members.sum(axis=0) / len(members)).astype(np.float64))

    def score(a, b):
        if similarity == "euclidean":
            return -root(((a - b) ** 2).sum())
        dot = (a * b).sum()
        if similarity == "dot" or not dot:
            return float(dot)
        return math.copysign(root(dot * dot / ((a * a).sum() * (b * b).sum())), dot)

    rows = gallery.astype(np.float64)
    if similarity == "cosine":
        rows = rows / np.array([math.sqrt(math.fsum(row * row)) or 1.0 for row in rows]).reshape(-1, 1)
    items, values = fractions(rows), []
    prototypes = {label: mean(items[gallery_labels == label]) for label in set(gallery_labels.tolist())}
    for i, (query, own) in enumerate(zip(fractions(queries.astype(np.float64)), query_labels.tolist(), strict=True)):
        others = (gallery_labels == own) & ~(same & (np.arange(len(items)) == i))
        if not others.any():
            values.append(math.nan)
            continue
        means = prototypes | {own: mean(items[others])}
        scores = {label: score(query, prototype) for label, prototype in means.items()}
        best = [label for label in scores if scores[label] == max(scores.values())]
        values.append(1 / len(best) if own in best else 0.0)
    return values
