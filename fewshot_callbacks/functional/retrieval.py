"""`evaluate_retrieval`: every metric of a set of embeddings from one pass over its pairs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.functional._checks import check_sets, exclusion_codes
from fewshot_callbacks.functional._precision import full_precision
from fewshot_callbacks.functional.candidates import find_candidates
from fewshot_callbacks.functional.grouped_recall import GroupedRecall, grouped_recall
from fewshot_callbacks.functional.intervals import Interval, clustered_mean_interval, exact_mean, normal_quantile
from fewshot_callbacks.functional.operating_points import OperatingPoint, PooledCounts, PooledRequest, decide
from fewshot_callbacks.functional.ranking import (
    Ties,
    average_precision,
    check_ties,
    depends_on_ties,
    hits_within,
    recall_at_k,
)
from fewshot_callbacks.functional.ranks import SHARE_OF_KEYS, Progress, RankBlock, RankingPass
from fewshot_callbacks.functional.similarity import ScoreTiles, Similarity, check_similarity

_CALL = "evaluate_retrieval"


@dataclass(frozen=True)
class RetrievalReport:
    """What `evaluate_retrieval` found. Means are over the queries that have a match; pooled values over all pairs."""

    mAP: float
    """mean average precision: for each query the mean precision at the ranks of its relevant items"""
    map_at_r: float
    """MAP@R: the same, cut at rank R, the number of relevant items, and divided by R"""
    r_precision: float
    """share of relevant items among the first R"""
    recall_at: dict[int, float]
    """K -> share of queries with at least one relevant item among the first K (also CMC@K)"""
    decision: OperatingPoint
    """pooled precision, recall and F1 at the threshold of the best F1, or at the threshold that was asked for"""
    at_precision: dict[float, OperatingPoint]
    """precision -> the pooled point of the smallest threshold that reaches it"""
    grouped: GroupedRecall | None
    """Grouped Recall@K; None where there are fewer labels than one group needs"""
    intervals: dict[str, Interval]
    """metric -> 95 % interval (or what was asked for) of its mean, robust to the dependence of queries of one class"""
    queries: int
    gallery: int
    classes: int
    """distinct labels of the queries"""
    queries_without_match: int
    """queries that have no relevant candidate: left out of every mean"""
    queries_with_ties: int
    """queries with a relevant item that ties with an irrelevant one: where the rule for ties decides"""
    similarity: Similarity
    ties: Ties
    notes: tuple[str, ...]
    """what a reader of the numbers should know"""
    seconds: float = field(compare=False)
    """how long the evaluation took"""

    @property
    def recall_at_precision(self) -> dict[float, float]:
        """Precision -> R@P, the pooled recall at the smallest threshold that reaches it; 0.0 where none does."""
        return {precision: point.recall for precision, point in self.at_precision.items()}

    @property
    def grouped_recall_at(self) -> dict[int, float]:
        """K -> Grouped Recall@K; empty where there were too few labels."""
        return dict(self.grouped.at) if self.grouped is not None else {}

    @property
    def precision(self) -> float:
        """Pooled precision of the decision point."""
        return self.decision.precision

    @property
    def recall(self) -> float:
        """Pooled recall of the decision point."""
        return self.decision.recall

    @property
    def f1(self) -> float:
        """Pooled F1 of the decision point."""
        return self.decision.f1

    @property
    def threshold(self) -> float:
        """Score from which a pair is accepted at the decision point."""
        return self.decision.threshold

    def metrics(self) -> dict[str, float]:
        """All values under the names they are logged with, the primary one first."""
        values = {"mAP": self.mAP, "map@r": self.map_at_r, "r_precision": self.r_precision}
        values |= {f"recall@{k}": value for k, value in self.recall_at.items()}
        values |= {f"grouped_recall@{k}": value for k, value in self.grouped_recall_at.items()}
        values |= {"precision": self.precision, "recall": self.recall, "f1": self.f1, "threshold": self.threshold}
        values |= {f"recall@precision{precision:g}": value for precision, value in self.recall_at_precision.items()}
        return values

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, strings, lists and dictionaries that JSON can hold (NaN becomes None)."""

        def plain(value: float) -> float | None:
            return None if math.isnan(value) else value

        return {
            "metrics": {name: plain(value) for name, value in self.metrics().items()},
            "intervals": {name: [plain(end) for end in interval] for name, interval in self.intervals.items()},
            "thresholds_at_precision": {f"{p:g}": plain(point.threshold) for p, point in self.at_precision.items()},
            "grouped": None
            if self.grouped is None
            else {
                "group_size": self.grouped.group_size,
                "groups": self.grouped.groups,
                "dropped_labels": self.grouped.dropped_labels,
            },
            "queries": self.queries,
            "gallery": self.gallery,
            "classes": self.classes,
            "queries_without_match": self.queries_without_match,
            "queries_with_ties": self.queries_with_ties,
            "similarity": self.similarity,
            "ties": self.ties,
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
        }


def metric_names(
    recall_k: Sequence[int], precisions: Sequence[float], grouped_k: Sequence[int], group_size: int | None
) -> tuple[str, ...]:
    """The keys of `RetrievalReport.metrics` for these settings, also where nothing could be computed."""
    grouped = [f"grouped_recall@{k}" for k in grouped_k] if group_size is not None else []
    return (
        *("mAP", "map@r", "r_precision"),
        *(f"recall@{k}" for k in recall_k),
        *grouped,
        *("precision", "recall", "f1", "threshold"),
        *(f"recall@precision{precision:g}" for precision in precisions),
    )


def evaluate_retrieval(
    embeddings: Any,
    labels: Any,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    similarity: Similarity = "cosine",
    recall_k: Sequence[int] = (1, 5, 10),
    precisions: Sequence[float] = (0.95,),
    threshold: float | None = None,
    threshold_bounds: tuple[float, float] | None = None,
    grouped_k: Sequence[int] = (1,),
    group_size: int | None = 10,
    group_seed: int = 0,
    ties: Ties = "expected",
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    confidence: float = 0.95,
    memory_mb: float = 512,
    progress: Progress | None = None,
) -> RetrievalReport:
    """Exact retrieval metrics over all pairs of queries and gallery, in bounded memory.

    With one set, each item is a query against all others (leave-one-out; the item itself is never a candidate). With
    two sets, the queries search the gallery. Relevant is what has the query's label. Nothing is truncated and no matrix
    of all similarities is made; the result does not depend on the order of the data, the number of threads or the
    memory budget.

    Args:
        embeddings: (queries, dim) floating-point tensor or array, finite.
        labels: (queries,) integer labels of any value.
        gallery: (gallery, dim) items to retrieve from; by default the queries themselves, leave-one-out.
        gallery_labels: (gallery,) their labels. An item whose label no query has is a distractor: it takes ranks.
        similarity: `"cosine"`, `"dot"` or `"euclidean"` (minus the distance).
        recall_k: the K of Recall@K, the share of queries with a relevant item among the first K.
        precisions: for each, the pooled recall at the smallest threshold that reaches this precision.
        threshold: score from which a pair is accepted, for pooled precision, recall and F1; by default the one of the
            best F1.
        threshold_bounds: smallest and largest threshold that may be chosen for recall at fixed precision; by default
            (0, 1) for cosine and anything otherwise.
        grouped_k: the K of Grouped Recall@K.
        group_size: labels in a group for Grouped Recall; None leaves it out.
        group_seed: of the split into groups, the same split for the same labels.
        ties: what equal scores count as: `"expected"` (mean over all orders), `"optimistic"` or `"pessimistic"`.
        query_ids: (queries,) identity of each query; with `gallery_ids`, the same item in both sets is no candidate.
        gallery_ids: (gallery,) identity of each gallery item.
        query_groups: (queries,) for instance the video of each frame: candidates of the query's own group are neither
            hit nor miss.
        gallery_groups: (gallery,) group of each gallery item; with one set, `query_groups` serves for both.
        confidence: of the intervals.
        memory_mb: bound on the memory used beyond the embeddings, in MB.
        progress: called with the pairs done and the pairs to do.

    Returns:
        A frozen report. Queries without a match are left out of every mean and counted in it.

    Raises:
        ValueError: if shapes or types do not fit, embeddings hold NaN or Inf, a set is empty, or no query has a match.

    Examples:
        >>> import torch
        >>> labels = torch.arange(100) % 20
        >>> embeddings = torch.nn.functional.one_hot(labels).float() + 0.05 * torch.randn(100, 20)
        >>> report = evaluate_retrieval(embeddings, labels)
        >>> 0.9 < report.mAP <= 1.0, report.queries_without_match
        (True, 0)
    """
    started = time.perf_counter()
    check_settings(
        _CALL,
        similarity=similarity,
        recall_k=recall_k,
        precisions=precisions,
        threshold=threshold,
        grouped_k=grouped_k,
        group_size=group_size,
        group_seed=group_seed,
        ties=ties,
        memory_mb=memory_mb,
    )
    normal_quantile(confidence)  # refuses what is no probability, before the work is done
    same_set = gallery is None
    queries, query_labels, items, item_labels = check_sets(_CALL, embeddings, labels, gallery, gallery_labels)
    codes = exclusion_codes(
        _CALL, same_set, len(queries), len(items), query_ids, gallery_ids, query_groups, gallery_groups
    )
    any_code = any(code is not None for code in codes.values())
    if threshold_bounds is None:
        threshold_bounds = (0.0, 1.0) if similarity == "cosine" else (-math.inf, math.inf)

    with full_precision():
        tiles = ScoreTiles(queries, items, similarity)
        candidates = find_candidates(query_labels, item_labels, same_set=same_set, **codes)
        walk = RankingPass(tiles, candidates, int(memory_mb * 10**6), progress)
        request = PooledRequest(precisions, threshold_bounds, () if threshold is None else (threshold,))
        first = PooledCounts(walk, request, max(10_000, int(walk.memory_bytes * SHARE_OF_KEYS / 8)))
        per_query = _PerQuery(len(queries), recall_k, ties)
        for ranks in walk.run(first):
            per_query.add(ranks)
        matched = per_query.relevant > 0
        if not bool(matched.any()):
            raise ValueError(_no_match(len(queries), query_labels, item_labels, same_set, any_code=any_code))
        pooled = decide(first)
        grouped, notes = None, _notes(walk, per_query, matched)
        distinct = len(query_labels.unique())
        if group_size is not None and distinct < 2 * group_size:
            notes.append(
                f"Grouped Recall is left out: two groups of group_size={group_size} labels need {2 * group_size}, and the "
                f"queries have {distinct}. "
                + (f"Use group_size <= {distinct // 2}." if distinct >= 4 else "Pass group_size=None.")
            )
        if group_size is not None and distinct >= 2 * group_size:
            try:
                grouped = grouped_recall(
                    queries,
                    query_labels,
                    None if same_set else items,
                    None if same_set else item_labels,
                    k=tuple(grouped_k),
                    group_size=group_size,
                    seed=group_seed,
                    similarity=similarity,
                    ties=ties,
                    query_ids=codes["query_ids"],
                    gallery_ids=codes["gallery_ids"],
                    query_groups=codes["query_groups"],
                    gallery_groups=codes["gallery_groups"],
                    confidence=confidence,
                    memory_mb=memory_mb,
                )
            except ValueError as error:  # a group without a match: the other metrics stand
                notes.append(str(error))
    means = {name: exact_mean(values[matched]) for name, values in per_query.values.items()}
    intervals = {
        name: clustered_mean_interval(values[matched], query_labels[matched], confidence)
        for name, values in per_query.values.items()
    }
    if grouped is not None:
        intervals |= {f"grouped_recall@{k}": interval for k, interval in grouped.intervals.items()}
    return RetrievalReport(
        mAP=means["mAP"],
        map_at_r=means["map@r"],
        r_precision=means["r_precision"],
        recall_at={k: means[f"recall@{k}"] for k in recall_k},
        decision=pooled.best_f1 if threshold is None else pooled.at_threshold[threshold],
        at_precision=pooled.at_precision,
        grouped=grouped,
        intervals=intervals,
        queries=len(queries),
        gallery=len(items),
        classes=distinct,
        queries_without_match=int((~matched).sum()),
        queries_with_ties=int(per_query.tied.sum()),
        similarity=similarity,
        ties=ties,
        notes=tuple(notes),
        seconds=time.perf_counter() - started,
    )


class _PerQuery:
    """The metrics of each query, filled block by block."""

    def __init__(self, queries: int, recall_k: Sequence[int], ties: Ties) -> None:
        self.recall_k, self.ties = recall_k, ties
        names = ["mAP", "map@r", "r_precision", *(f"recall@{k}" for k in recall_k)]
        self.values: dict[str, Float[Tensor, "queries"]] = {
            name: torch.full((queries,), torch.nan, dtype=torch.float64) for name in names
        }
        self.relevant: Int[Tensor, "queries"] = torch.zeros(queries, dtype=torch.int64)
        self.tied = torch.zeros(queries, dtype=torch.bool)

    def add(self, ranks: RankBlock) -> None:
        relevant = ranks.relevant
        block = {
            "mAP": average_precision(ranks, self.ties),
            "map@r": average_precision(ranks, self.ties, cut=relevant),
            "r_precision": hits_within(ranks, relevant, self.ties) / relevant,  # 0 / 0 = NaN without a match
        }
        block |= {f"recall@{k}": recall_at_k(ranks, k, self.ties) for k in self.recall_k}
        index = ranks.queries.cpu()
        for name, values in block.items():
            self.values[name][index] = values.cpu()
        self.relevant[index] = relevant.cpu()
        self.tied[index] = depends_on_ties(ranks).cpu()


def check_settings(
    call: str,
    *,
    similarity: Similarity,
    recall_k: Sequence[int],
    precisions: Sequence[float],
    threshold: float | None,
    grouped_k: Sequence[int],
    group_size: int | None,
    group_seed: int,
    ties: Ties,
    memory_mb: float,
) -> None:
    """Refuse settings of `evaluate_retrieval` that no data could make sense of.

    Args:
        call: who was given them, for the message.
        similarity: see `evaluate_retrieval`, as all others.
        recall_k: positive whole numbers.
        precisions: in (0, 1].
        threshold: a finite score or None.
        grouped_k: positive whole numbers.
        group_size: at least 2, or None.
        group_seed: any whole number.
        ties: one of `Ties`.
        memory_mb: positive.
    """
    check_similarity(similarity)
    check_ties(ties)
    for name, ks in (("recall_k", recall_k), ("grouped_k", grouped_k)):
        if any(not isinstance(k, int) or k < 1 for k in ks):
            raise ValueError(f"{call}: {name}={tuple(ks)} must hold positive whole numbers, such as (1, 5, 10).")
    if any(not 0 < precision <= 1 for precision in precisions):
        raise ValueError(f"{call}: precisions={tuple(precisions)} must lie in (0, 1], such as (0.95,).")
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"{call}: threshold={threshold} must be a finite score; None takes that of the best F1.")
    if group_size is not None and group_size < 2:
        raise ValueError(f"{call}: group_size={group_size} must be at least 2 labels; None leaves Grouped Recall out.")
    if not memory_mb > 0:
        raise ValueError(f"{call}: memory_mb={memory_mb} must be positive; the default is 512.")


def _no_match(queries: int, query_labels: Tensor, item_labels: Tensor, same_set: bool, *, any_code: bool) -> str:
    where = "another item of its class" if same_set else "an item of its class in the gallery"
    labels, shared = query_labels.unique(), len(torch.isin(query_labels.unique(), item_labels).nonzero())
    fact = (
        f"each of the {len(labels)} labels occurs once"
        if same_set and len(labels) == queries
        else f"{shared} of the queries' {len(labels)} labels occur in the gallery"
    )
    if any_code and (shared if not same_set else len(labels) < queries):
        return (
            f"{_CALL}: none of the {queries} queries has {where} that ids or groups do not exclude, so nothing can be "
            "retrieved. Check that a group is not a whole class, and an id not shared by different items."
        )
    return (
        f"{_CALL}: none of the {queries} queries has {where} ({fact}), so nothing can be retrieved. Check that labels "
        "name classes, not items, and that the set holds at least two items of some class."
    )


def _notes(walk: RankingPass, per_query: _PerQuery, matched: Tensor) -> list[str]:
    notes = []
    left_out = int((~matched).sum())
    if left_out:
        notes.append(f"{left_out} of {len(matched)} queries have no match and are left out of every mean.")
    if walk.distinct_rows == 1 and len(matched) > 1:
        notes.append("The embeddings have collapsed: all are the same vector, and every ranking is at chance level.")
    zero_queries, zero_items = walk.scores.zero_vectors
    if zero_queries or zero_items:
        notes.append(
            f"{max(zero_queries, zero_items)} embeddings have length zero: their cosine similarity to everything is 0."
        )
    tied = int(per_query.tied.sum())
    if tied > 0.01 * len(matched) and walk.distinct_rows != 1:
        notes.append(f"{tied} of {len(matched)} queries have relevant items that tie with irrelevant ones.")
    return notes
