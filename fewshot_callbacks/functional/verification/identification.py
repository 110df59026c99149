"""`evaluate_identification`: open-set (1:N) identification. Is a query in the gallery, and who is it?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.evaluation import best_matches
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import EVERYTHING, ItemSets, Share
from fewshot_callbacks.functional.means import exact_mean
from fewshot_callbacks.functional.neighbours import search
from fewshot_callbacks.functional.retrieval.evaluation_notes import note_of_rates
from fewshot_callbacks.functional.retrieval.registry import requested_metrics
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.functional.retrieval.values import Values, or_none
from fewshot_callbacks.functional.statistics import Interval, clustered_mean_interval
from fewshot_callbacks.settings import Metric, RequestedMetric, Similarity
from fewshot_callbacks.system.words import counted, none_has

_CALL = "evaluate_identification"
_NO_NON_MATED = (
    "No query is non-mated, so no threshold has a false positive rate. Values at a false positive rate are NaN.",
)


class _QueryScores(NamedTuple):
    """Scores of the queries against the gallery."""

    best_match: Float[Tensor, "mated"]
    """best score with an item of the query's label"""
    equal_matches: Int[Tensor, "mated"]
    """number of items of the query's label with this score"""
    nearest: Float[Tensor, "mated k"]
    """scores of the nearest items of any label; NaN if there are fewer than k"""
    unlisted_ties: Int[Tensor, "mated"]
    """number of items that tie with the last of these and are not listed"""
    non_mated: Float[Tensor, "non_mated"]
    """best score of each non-mated query, ascending; -inf if it has no candidate"""

    @classmethod
    def of(cls, sets: ItemSets, is_mated: Bool[Tensor, "queries"], k: int) -> _QueryScores:
        """Return the scores of the queries of all processes. *Collective*."""
        rules = sets.rules()
        with computing() as threads:
            vectors = sets.vectors(threads)
            found = search(vectors, rules, k, sets.memory)
            best = best_matches(vectors, sets.relevance_of_labels(rules), sets.memory).best

        def of_all(values: NDArray[Any]) -> Tensor:
            return sets.queries.of_all(sets.processes, torch.from_numpy(values))

        scores = of_all(found.scores.T).T
        best_of_non_mated = scores[~is_mated, 0]
        return cls(
            best_match=of_all(vectors.scale.to_user(best.scores))[is_mated],
            equal_matches=of_all(best.tied)[is_mated],
            nearest=scores[is_mated],
            unlisted_ties=of_all(found.unlisted_ties)[is_mated],
            non_mated=torch.where(best_of_non_mated.isnan(), -math.inf, best_of_non_mated).sort().values,
        )

    def recall(self, k: int) -> Float[Tensor, "mated"]:
        """Return the probability that an item of the label is among the first k, if equal scores are ordered at random."""
        above = (self.nearest > self.best_match[:, None]).sum(1)
        tied = (self.nearest == self.best_match[:, None]).sum(1)
        tied += torch.where(self.best_match == self.nearest[:, -1], self.unlisted_ties, 0)
        chance_of_none = torch.ones(len(self.best_match), dtype=torch.float64)
        free_ranks = (k - above).clamp(min=0)
        # Probability that an item of another label takes each of these ranks: the hypergeometric distribution.
        for taken_ranks in range(k):
            remaining = tied - taken_ranks
            of_other_labels = (remaining - self.equal_matches).clamp(min=0).double()  # integers divide to float32
            chance = of_other_labels / remaining.clamp(min=1)
            chance_of_none = torch.where(taken_ranks < free_ranks, chance_of_none * chance, chance_of_none)
        return 1 - chance_of_none

    def threshold(self, rate: float) -> float:
        """Return the lowest best score of any query at which the false positive rate is at most `rate`; else infinity."""
        scores = torch.cat([self.best_match, self.non_mated]).unique()
        accepted = len(self.non_mated) - torch.searchsorted(self.non_mated, scores)
        keeping = scores[accepted.double() / len(self.non_mated) <= rate]
        return float(keeping[0]) if len(keeping) else math.inf

    def value(self, requested: RequestedMetric, gallery: int) -> tuple[Float[Tensor, "mated"], float | None]:
        """Return the value of a metric for each mated query, and its threshold; None for a metric without one.

        `gallery` is the number of gallery items.
        """
        recall = self.recall(min(requested.parameters.get("k", 1), gallery))
        if "p" not in requested.parameters:
            return recall, None
        if not len(self.non_mated):
            return torch.full_like(recall, math.nan), math.nan
        threshold = self.threshold(requested.parameters["p"])
        return recall * (self.best_match >= threshold), threshold


IDENTIFICATION_METRICS = (
    Metric(
        "tpir@fpir{p}",
        "pairs",
        None,
        "Share of mated queries whose first candidate is right and accepted, at a false positive rate of at most {p}.",
    ),
    Metric(
        "tpir@fpir{p}_rank{k}",
        "pairs",
        None,
        "Share of mated queries with a right, accepted candidate among the first {k}, at the same rate.",
    ),
    Metric(
        "recall@{k}",
        "pairs",
        None,
        "Share of mated queries with an item of their label among the first {k}, at any score.",
    ),
)
"""The metrics that `evaluate_identification` can report."""

DEFAULT_IDENTIFICATION_METRICS = ("tpir@fpir0.1", "tpir@fpir0.01", "recall@1")
"""The metrics that `evaluate_identification` reports by default."""


@equal_with_nan
@dataclass(frozen=True)
class IdentificationReport(Values):
    """The result of `evaluate_identification`; `print` shows the values with their intervals.

    Attributes:
        values: Metric -> value, in the order of `metrics`. NaN if no query is non-mated; a note tells you.
        thresholds: Metric -> lowest score at which the best candidate is accepted; infinite if none may be accepted.
        intervals: Metric -> confidence interval of the mean over mated queries, robust to the dependence of queries of
            one identity. Threshold and gallery count as fixed.
        confidence: Confidence level of the intervals.
        mated: Number of queries with an item of their label in the gallery.
        non_mated: Number of queries without one.
        gallery: Number of gallery items.
        identities: Number of distinct labels in the gallery.
        notes: What you should know when you read the values.
        per_query: Metric -> value of each query; NaN for a non-mated query.
    """

    _known: ClassVar = IDENTIFICATION_METRICS

    values: dict[str, float]
    thresholds: dict[str, float]
    intervals: dict[str, Interval]
    confidence: float
    mated: int
    non_mated: int
    gallery: int
    identities: int
    notes: tuple[str, ...]
    per_query: dict[str, Float[Tensor, "queries"]] = field(compare=False, repr=False)

    def __str__(self) -> str:
        """Return one line per value with its interval, and the notes."""
        queries = f"{self.mated:,} mated and {self.non_mated:,} non-mated queries"
        head = f"{queries}, {counted(self.gallery, 'gallery item')} of {counted(self.identities, 'identity')}"
        return "\n".join([head, *self.lines(), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dictionaries for JSON (what is not finite becomes None)."""
        return self.tables() | {
            "thresholds": {name: or_none(value) for name, value in self.thresholds.items()},
            **{name: getattr(self, name) for name in ("mated", "non_mated", "gallery", "identities")},
            "notes": list(self.notes),
        }


@default_mode()
def evaluate_identification(
    queries: Any,
    query_labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    metrics: Sequence[str] = DEFAULT_IDENTIFICATION_METRICS,
    similarity: Similarity = "cosine",
    confidence: float = 0.95,
    memory_mb: float | None = None,
    share: Share = EVERYTHING,
) -> IdentificationReport:
    """Return the metrics of open-set identification: is a query in the gallery, and who is it? *Collective*.

    A query is mated if the gallery has an item of its label. FPIR(t) is the share of non-mated queries whose best candidate
    has a score of at least t. TPIR(t, r) is the share of mated queries with an item of their label among the first r
    candidates and a score of at least t (ISO/IEC 19795-1; the 1:N tests of NIST's FRVT). All scores are exact, and no score
    matrix is computed.

    - `tpir@fpir0.01`: TPIR at rank 1, at the lowest threshold whose FPIR is at most 0.01.
    - `tpir@fpir0.01_rank20`: the same metric within the first 20.
    - `recall@20`: TPIR within the first 20 without a threshold.

    Args:
        queries: (queries, dim) finite floating-point rows. `Shards` bring their own labels, ids and groups.
        query_labels: (queries,) identity of each query, integers or strings.
        gallery: (gallery, dim) enrolled items, one or several per identity. By default each query is compared with all other
            queries.
        gallery_labels: (gallery,) identity of each gallery item.
        query_ids: (queries,) id of each row, such as its file, if some rows are repeated. Only the first row of each id
            counts.
        gallery_ids: (gallery,) id of each gallery item. An item is not a candidate for a query with its own id.
        query_groups: (queries,) group of each query, such as its session. Items of its own group are not candidates.
        gallery_groups: (gallery,) group of each gallery item. Without a gallery, `query_groups` is used for both.
        metrics: Keys of the metrics to report.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.
        confidence: Confidence level of the intervals, in (0, 1).
        memory_mb: Memory limit of the search in MB; None is 512.
        share: The part of the queries and of the gallery that this process has, if several processes make the call
            together. Every process returns the single-process report.

    Returns:
        A frozen report, with values in [0, 1]. For equal scores, values are means over all orders.

    Raises:
        ValueError: If shapes or types do not fit, embeddings contain NaN or Inf, only one of `gallery` and `gallery_labels`
            is passed, no query is mated, a metric does not exist, or the processes pass different arguments. Every process
            raises the same error.

    Examples:
        >>> import torch
        >>> gallery = torch.eye(4)
        >>> queries = torch.tensor([[1.0, 0.1, 0, 0], [0, 1, 0.8, 0], [0, 0.9, 0.8, 0], [0, 0, 0.5, 1]])
        >>> report = evaluate_identification(queries, ["a", "b", "c", "x"], gallery, ["a", "b", "c", "d"])
        >>> round(report["recall@1"], 4), round(report["tpir@fpir0.1"], 4), report.non_mated
        (0.6667, 0.3333, 1)
    """
    with share.processes.together():
        requested = requested_metrics(_CALL, metrics, IDENTIFICATION_METRICS)
        memory = memory_bytes(_CALL, memory_mb)
        arguments = {"metrics": metrics, "similarity": similarity, "confidence": confidence, "memory_mb": memory_mb}
        share.refuse_other_settings(_CALL, arguments)
        columns = {"query_labels": query_labels, "gallery_labels": gallery_labels}
        columns |= {"query_ids": query_ids, "gallery_ids": gallery_ids}
        columns |= {"query_groups": query_groups, "gallery_groups": gallery_groups}
        sets = read_items(_CALL, queries, gallery, columns, share=share, similarity=similarity, memory=memory)
        is_mated = torch.from_numpy(sets.count_candidates_with("labels") > 0)
        if not bool(is_mated.any()):
            raise InputError(
                f"{_CALL}: {none_has(len(is_mated), 'query')} an item of its label in the gallery, so no query can be "
                "identified. Pass labels of both sets in the same form, and a gallery with labels of the queries."
            )
        k = min(max(request.parameters.get("k", 1) for request in requested), sets.gallery.length)
        scores = _QueryScores.of(sets, is_mated, k)
        return _report(requested, scores, is_mated, sets, confidence)


def _report(
    requested: Sequence[RequestedMetric],
    scores: _QueryScores,
    is_mated: Bool[Tensor, "queries"],
    sets: ItemSets,
    confidence: float,
) -> IdentificationReport:
    """Return the report.

    `is_mated` tells whether each query has a candidate of its label.
    """
    query_labels = sets.queries.labels
    items = sets.gallery.length
    values: dict[str, float] = {}
    thresholds: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    per_query: dict[str, Float[Tensor, "queries"]] = {}
    for request in requested:
        values_of_mated, threshold = scores.value(request, items)
        if threshold is not None:
            thresholds[request.key] = threshold
        values[request.key] = exact_mean(values_of_mated)
        intervals[request.key] = clustered_mean_interval(values_of_mated, query_labels[is_mated], confidence)
        undefined = torch.full((len(query_labels),), math.nan, dtype=torch.float64)
        per_query[request.key] = undefined.masked_scatter(is_mated, values_of_mated)
    return IdentificationReport(
        values=values,
        thresholds=thresholds,
        intervals=intervals,
        confidence=confidence,
        mated=len(scores.best_match),
        non_mated=len(scores.non_mated),
        gallery=items,
        identities=len(sets.gallery.labels.unique()),
        notes=(*sets.notes_on_ids, *_notes(requested, len(scores.non_mated))),
        per_query=per_query,
    )


def _notes(requested: Sequence[RequestedMetric], non_mated: int) -> tuple[str, ...]:
    """Return notes on false positive rates that this number of non-mated queries is too small for."""
    rates = [request.parameters["p"] for request in requested if "p" in request.parameters]
    if rates and not non_mated:
        return _NO_NON_MATED
    return note_of_rates("positive", rates, non_mated, "non-mated queries")
