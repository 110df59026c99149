"""`RetrievalReport`: the metrics of an evaluation, their intervals, and notes for their reader."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.vectors import Similarity
from fewshot_callbacks.functional.retrieval.grouped_recall import GroupedRecall
from fewshot_callbacks.functional.retrieval.operating_points import Enclosure, ErrorRatePoint, OperatingPoint
from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts
from fewshot_callbacks.functional.retrieval.rank_metrics import Ties
from fewshot_callbacks.functional.statistics.intervals import Interval


class QueryMeans:
    """Names of the means over queries that every retrieval report has."""

    mean: dict[str, float]

    @property
    def mAP(self) -> float:  # noqa: N802 - the field writes it so
        """Mean average precision: for each query the mean precision at the ranks of its relevant items."""
        return self.mean["mAP"]

    @property
    def map_at_r(self) -> float:
        """MAP@R: the mean over queries of the precisions at relevant ranks up to R, summed and divided by R.

        R is the query's number of relevant items.
        """
        return self.mean["map@r"]

    @property
    def r_precision(self) -> float:
        """R-precision: share of relevant items among the first R, where R is the query's number of relevant items."""
        return self.mean["r_precision"]

    @property
    def mrr(self) -> float:
        """Mean reciprocal rank of the first relevant item."""
        return self.mean["mrr"]

    @property
    def recall_at(self) -> dict[int, float]:
        """K -> share of queries with at least one relevant item among the first K (also CMC@K)."""
        return self._at("recall@")

    @property
    def ir_recall_at(self) -> dict[int, float]:
        """K -> share of a query's relevant items that are among the first K: information retrieval's Recall@K."""
        return self._at("ir_recall@")

    @property
    def precision_at(self) -> dict[int, float]:
        """K -> Precision@K: share of relevant items among the first K."""
        return self._at("precision@")

    @property
    def ndcg_at(self) -> dict[int, float]:
        """K -> nDCG@K: normalised discounted cumulative gain of the first K."""
        return self._at("ndcg@")

    def _at(self, start: str) -> dict[int, float]:
        return {
            int(name.removeprefix(start).partition("_")[0]): value
            for name, value in self.mean.items()
            if name.startswith(start)
        }


def notes_on(*, queries: int, without_match: int, tied: int, zero_vectors: int, collapsed: bool) -> list[str]:
    """Write the notes on what a reader of the means should know.

    Args:
        queries: Number of queries.
        without_match: Queries that have no relevant candidate.
        tied: Queries with a relevant item that ties with an irrelevant one.
        zero_vectors: Embeddings of length zero, where the similarity is cosine.
        collapsed: All embeddings are the same vector.
    """
    notes = []
    if without_match:
        notes.append(f"{without_match} of {queries} queries have no match and are left out of every mean.")
    if collapsed and queries > 1:
        notes.append("The embeddings have collapsed: all are the same vector, and every ranking is at chance level.")
    if zero_vectors:
        notes.append(f"{zero_vectors} embeddings have length zero: their cosine similarity to everything is 0.")
    if tied > 0.01 * queries and not collapsed:
        notes.append(f"{tied} of {queries} queries have relevant items that tie with irrelevant ones.")
    return notes


def or_none(value: float) -> float | None:
    """Replace NaN, which JSON cannot hold, by None."""
    return None if math.isnan(value) else value


@dataclass(frozen=True)
class RetrievalReport(QueryMeans):
    """The result of `evaluate_retrieval`.

    Means are over the queries that have a relevant candidate; pooled values are over all query-candidate pairs. All
    metrics lie in [0, 1], except thresholds, which are scores. NaN stands for a value that does not exist.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> report = evaluate_retrieval(embeddings, [0, 0, 1, 1])
        >>> report.mAP, report.recall_at[1], report.queries, report.queries_without_match
        (1.0, 1.0, 4, 0)
        >>> print(report)  # doctest: +ELLIPSIS
        4 queries, 4 gallery items, 2 classes
        mAP                       1.0000...
    """

    mean: dict[str, float]
    """metric of each query -> its mean over the queries: `mAP`, `map@r`, `r_precision`, `mrr`, `recall@1`, ..."""
    macro: dict[str, float]
    """the same metrics, each the mean over classes of the mean over the queries of the class; empty if not requested"""
    per_class: dict[str, dict[int | str, float]]
    """metric -> label, as it was given -> mean over the queries of the class; empty if not requested"""
    decision: OperatingPoint
    """pooled precision, recall and F1 at the threshold of the best F1, or at the threshold that was requested"""
    at_precision: dict[float, OperatingPoint]
    """precision -> the pooled operating point of the smallest threshold with at least this precision, within the bounds
    on thresholds: the lower bound if it reaches the precision, else the score of a pair, relevant or not"""
    at_false_match_rate: dict[float, ErrorRatePoint]
    """false match rate -> the pooled operating point at the smallest score of a relevant pair that, as a threshold,
    does not exceed this rate"""
    equal_error_rate: float | None
    """the rate at which the share of rejected relevant pairs equals the share of accepted irrelevant pairs; None if not
    requested"""
    grouped: GroupedRecall | None
    """Grouped Recall@K; None if not requested, or if there are fewer labels than two groups need (a note says so)"""
    intervals: dict[str, Interval]
    """metric -> confidence interval of its mean, robust to the dependence of queries of one class"""
    confidence: float
    """confidence level of the intervals"""
    queries: int
    """number of queries that were evaluated: all, or those drawn (`max_queries`)"""
    gallery: int
    """number of gallery items"""
    classes: int
    """distinct labels of the queries"""
    queries_without_match: int
    """queries that have no relevant candidate: left out of every mean"""
    queries_with_ties: int
    """queries with a relevant item that ties with an irrelevant one: where the rule for ties decides"""
    is_estimate: bool
    """whether only a sample of the queries was evaluated (`max_queries`)"""
    has_exact_auc_pr: bool
    """whether `auc_pr` was requested, so that its bounds agree up to rounding; only then is it among the metrics"""
    similarity: Similarity
    """how embeddings were compared"""
    ties: Ties
    """how equal scores were counted"""
    notes: tuple[str, ...]
    """what a reader of the numbers should know"""
    memory_note: str | None = field(compare=False)
    """a sentence on a memory budget that could not be kept, which changes no number; None if it was kept"""
    auc_pr: Enclosure = field(compare=False)
    """area under the pooled precision-recall curve, the sum of precision times the step in recall. A single pass over
    all pairs gives proved bounds, which depend on the machine; `auc_pr=True` makes it exact"""
    curve: tuple[tuple[float, float, float], ...] = field(compare=False, repr=False)
    """the same curve, thinned for a plot: (threshold, precision, recall), precise to a pixel"""
    pair_counts: PairCounts = field(compare=False, repr=False)
    """relevant and irrelevant pairs at a few hundred thresholds and in bins of their score, for plots"""
    per_query: dict[str, Float[Tensor, "queries"]] = field(compare=False, repr=False)
    """metric -> its value for each query; NaN for a query without a match"""
    query_labels: Int[Tensor, "queries"] = field(compare=False, repr=False)
    """label of each query, in the same order; its index in `label_names` where labels were words"""
    drawn: Int[Tensor, "queries"] | None = field(compare=False, repr=False)
    """index of each drawn query among all queries, ascending (`max_queries`); None if all were evaluated"""
    label_names: tuple[str, ...] | None = field(compare=False, repr=False)
    """where labels were words: each word once, sorted; None where they were integers"""
    seconds: float = field(compare=False)
    """duration of the evaluation, in seconds"""

    @property
    def recall_at_precision(self) -> dict[float, float]:
        """Precision -> R@P, the pooled recall at the smallest threshold with this precision; 0.0 if none has it."""
        return {precision: point.recall for precision, point in self.at_precision.items()}

    @property
    def grouped_recall_at(self) -> dict[int, float]:
        """K -> Grouped Recall@K; empty where there were too few labels for two groups."""
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
        """Lowest score at which a pair is accepted at the decision point."""
        return self.decision.threshold

    def metrics(self) -> dict[str, float]:
        """Return all values under the names with which they are logged, the primary metric first."""
        values = dict(self.mean)
        values |= {f"macro_{name}": value for name, value in self.macro.items()}
        values |= {f"grouped_recall@{k}": value for k, value in self.grouped_recall_at.items()}
        values |= {"precision": self.precision, "recall": self.recall, "f1": self.f1, "threshold": self.threshold}
        if self.has_exact_auc_pr:
            values["auc_pr"] = self.auc_pr.value
        values |= {f"recall@precision{precision:g}": value for precision, value in self.recall_at_precision.items()}
        values |= {f"fnmr@fmr{rate:g}": at.false_non_match_rate for rate, at in self.at_false_match_rate.items()}
        return values if self.equal_error_rate is None else values | {"eer": self.equal_error_rate}

    def __str__(self) -> str:
        """Return the values of `metrics`, one in a line with its interval where there is one, and the messages."""
        lines = [f"{self.queries:,} queries, {self.gallery:,} gallery items, {self.classes:,} classes"]
        for name, value in self.metrics().items():
            low, high = self.intervals.get(name, (math.nan, math.nan))
            interval = "" if math.isnan(low) else f"  ({low:.4f} to {high:.4f})"
            lines.append(f"{name:<24}{value:>8.4f}{interval}")
        return "\n".join([*lines, *self.messages])

    @property
    def messages(self) -> tuple[str, ...]:
        """The notes, and a note on the memory budget if it could not be kept."""
        return self.notes if self.memory_note is None else (*self.notes, self.memory_note)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dictionaries for JSON (NaN becomes None)."""
        return {
            "metrics": {name: or_none(value) for name, value in self.metrics().items()},
            "intervals": {name: [or_none(end) for end in interval] for name, interval in self.intervals.items()},
            "thresholds_at_precision": {f"{p:g}": or_none(point.threshold) for p, point in self.at_precision.items()},
            "thresholds_at_false_match_rate": {
                f"{rate:g}": or_none(point.threshold) for rate, point in self.at_false_match_rate.items()
            },
            "auc_pr_bounds": [self.auc_pr.low, self.auc_pr.high],
            "curve": [[or_none(value) for value in point] for point in self.curve],
            "per_class": {
                name: {str(label): or_none(value) for label, value in values.items()}
                for name, values in self.per_class.items()
            },
            "label_names": None if self.label_names is None else list(self.label_names),
            "grouped": None
            if self.grouped is None
            else {
                "group_size": self.grouped.group_size,
                "groups": self.grouped.groups,
                "are_given": self.grouped.are_given,
                "dropped_labels": self.grouped.dropped_labels,
                "unmatched": self.grouped.unmatched,
            },
            "queries": self.queries,
            "gallery": self.gallery,
            "classes": self.classes,
            "queries_without_match": self.queries_without_match,
            "queries_with_ties": self.queries_with_ties,
            "is_estimate": self.is_estimate,
            "similarity": self.similarity,
            "ties": self.ties,
            "notes": list(self.messages),
            "seconds": round(self.seconds, 3),
        }
