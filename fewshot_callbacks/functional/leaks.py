"""`leakage`: test queries that have a copy in the training set, and the metrics without these queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.scale import check_similarity
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional._table import table
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import EVERYTHING, EXCLUDING, ItemSets, Share
from fewshot_callbacks.functional.means import class_means
from fewshot_callbacks.functional.neighbours import score_threshold, search_of_all
from fewshot_callbacks.functional.retrieval.compare import ReportSource, as_report
from fewshot_callbacks.functional.retrieval.query_means import mean_of_queries
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.functional.retrieval.values import or_none
from fewshot_callbacks.functional.statistics import UNKNOWN, Difference, Interval, subset_difference_interval
from fewshot_callbacks.settings import RequestedMetric, Similarity
from fewshot_callbacks.storage import RowSubset, Shards
from fewshot_callbacks.system.words import counted

_CALL = "leakage"


@dataclass(frozen=True, eq=False)
class Leakage:
    """The result of `leakage`: the queries with a copy in the training set, and each metric without these queries.

    Attributes:
        query_indices: Index of each evaluated query among the queries that were passed, ascending.
        scores: Exact similarity of each query and its most similar training item.
        train_indices: Index of this training item; the lowest if several have the same score.
        shares_id: Whether a training item has the id of the query; None unless both sets have ids.
        differences: Metric -> its value without the queries that have a copy, its value for all queries, and the
            interval of the difference.
        min_score: The lowest score of a copy.
        similarity: The similarity of queries and training items.
        confidence: Confidence level of the intervals.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> train, test = torch.eye(4), torch.tensor([[2.0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 2]])
        >>> leaks = leakage(evaluate_retrieval(test, [0, 0, 1, 1]), test, train)
        >>> leaks.query_indices[leaks.has_copy], leaks.copies, leaks.train_indices[leaks.has_copy]
        (tensor([0]), 1, tensor([0]))
    """

    query_indices: Int[Tensor, "queries"]
    scores: Float[Tensor, "queries"]
    train_indices: Int[Tensor, "queries"]
    shares_id: Bool[Tensor, "queries"] | None
    differences: dict[str, Difference]
    min_score: float
    similarity: Similarity
    confidence: float

    @property
    def by_score(self) -> Bool[Tensor, "queries"]:
        """Whether each query has a score of at least `min_score` with a training item."""
        return self.scores >= self.min_score

    @property
    def has_copy(self) -> Bool[Tensor, "queries"]:
        """Whether each query has a copy in the training set, by its score or its id."""
        return self.by_score if self.shares_id is None else self.by_score | self.shares_id

    @property
    def queries(self) -> int:
        """Number of evaluated queries."""
        return len(self.query_indices)

    @property
    def copies(self) -> int:
        """Number of queries that have a copy in the training set."""
        return int(self.has_copy.sum())

    def in_words(self) -> str:
        """Return a sentence with the number of queries that have a copy, and the first metric without these queries.

        Examples:
            >>> import torch
            >>> from fewshot_callbacks import evaluate_retrieval
            >>> test = torch.eye(4)
            >>> leakage(evaluate_retrieval(test, [0, 0, 1, 1]), test, -test).in_words()
            'None of the 4 test queries has a copy in training (a cosine of at least 0.98).'
        """
        queries = counted(self.queries, "test query")
        if not self.copies:
            return (
                f"None of the {queries} has a copy in training (a {self._score_name} of at least {self.min_score:g})."
            )
        share = 100 * self.copies / self.queries
        shown_share = "Less than 0.1 %" if share < 0.05 else f"{share:.1f} %"
        by_id = "" if self.shares_id is None else f"; {int(self.shares_id.sum()):,} by id"
        fact = f"{shown_share} of the test queries have a copy in training ({self.copies:,} of {self.queries:,}{by_id})"
        key, difference = next(iter(self.differences.items()))
        if math.isnan(difference.first):
            return f"{fact}; no other query has a value of {key}."
        low, high = difference.interval
        interval = f", {100 * self.confidence:g} % interval {low:+.4f} to {high:+.4f}"
        if math.isnan(low):
            interval = (
                "; no interval, because the queries with a copy, or the queries without one, are in a single class"
            )
        return (
            f"{fact}; without them {key} is {difference.first:.4f} instead of {difference.second:.4f} "
            f"({difference.value:+.4f}{interval})."
        )

    @property
    def _score_name(self) -> str:
        return "cosine" if self.similarity == "cosine" else "score"

    def __str__(self) -> str:
        """Return the sentence and, if some queries have a copy and some do not, a table with one line per metric."""
        if self.copies in (0, self.queries):
            return self.in_words()
        columns = ("metric", "without copies", "all queries", "difference", "interval", "significant")
        rows = [(key, *difference.in_words()) for key, difference in self.differences.items()]
        return "\n".join([self.in_words(), *table(columns, rows)])

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and metrics as plain values for JSON; NaN becomes None."""
        return {
            "queries": self.queries,
            "copies": self.copies,
            "copies_by_score": int(self.by_score.sum()),
            "copies_by_id": None if self.shares_id is None else int(self.shares_id.sum()),
            "min_score": self.min_score,
            "similarity": self.similarity,
            "metrics": {
                key: {
                    "without_copies": or_none(difference.first),
                    "all_queries": or_none(difference.second),
                    **difference.to_dict(),
                }
                for key, difference in self.differences.items()
            },
        }


@default_mode()
def leakage(
    report: ReportSource,
    queries: Any,
    train: Any,
    *,
    query_ids: Any | None = None,
    train_ids: Any | None = None,
    min_score: float = 0.98,
    similarity: Similarity | None = None,
    memory_mb: float | None = None,
    share: Share = EVERYTHING,
) -> Leakage:
    """Return the test queries that have a copy in the training set, and each metric without them. *Collective*.

    A query has a copy if its exact similarity to a training item is at least `min_score`, or if a training item has its id.
    The means then leave out this query. The gallery stays the same, so the other queries keep their ranks. The interval of
    the difference pairs each query with itself, and is robust to the dependence of queries of one class. Pooled metrics and
    Grouped Recall are left out, because they have no value per query.

    Args:
        report: Report of the test queries, or the path or URL of a file that `RetrievalReport.save` wrote.
        queries: (queries, dim) the evaluated queries, in the same order. `Shards` bring their own ids, and `Shards` with
            `is_gallery` are divided as in `evaluate_retrieval`.
        train: (items, dim) embeddings of the training set from the same model. `Shards` bring their own ids.
        query_ids: (queries,) id of each query, such as the path of its file.
        train_ids: (items,) id of each training item.
        min_score: The lowest score of a copy, in the units of the data. The score of a copy depends on the embedding, so
            look at some pairs around it (`near_duplicates`).
        similarity: Similarity of queries and training items. The default is `hamming` for a report of `hamming`, else
            `cosine`. For `hamming` and `euclidean`, pass a `min_score` of at most 0 (see `near_duplicates`).
        memory_mb: Memory limit in MB, in addition to the embeddings; None is 512.
        share: The part of the queries and of the training items (`gallery_places`) that this process has, if several
            processes make the call together.

    Returns:
        A frozen result on the CPU; `print` shows a sentence and a table. The value of a metric without copies is NaN if no
        other query has a value. The interval is NaN unless the queries with a copy are in at least two classes, and the
        queries without one, too.

    Raises:
        ValueError: If a shape or type does not fit, embeddings contain NaN or Inf, `min_score` is outside the range of the
            similarity, the report is about other queries, or the processes pass different arguments.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> labels = torch.arange(400) % 40
        >>> classes = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))[labels]
        >>> noise = torch.randn(2, 400, 16, generator=torch.Generator().manual_seed(1))
        >>> test, train = classes + noise[0], classes + noise[1]
        >>> train[:30] = test[:30]
        >>> print(leakage(evaluate_retrieval(test, labels, metrics="mAP"), test, train).in_words())  # doctest: +ELLIPSIS
        7.5 % of the test queries have a copy in training (30 of 400); without them mAP is 0.4657 instead of 0.4626 (+0...).
    """
    with share.processes.together():
        report = as_report(report)
        memory = memory_bytes(_CALL, memory_mb)
        similarity = similarity or ("hamming" if report.similarity == "hamming" else "cosine")
        check_similarity(similarity)
        threshold = score_threshold(_CALL, min_score, similarity)
        arguments = {"min_score": threshold, "similarity": similarity, "memory_mb": memory_mb}
        share.refuse_other_settings(_CALL, arguments | {"report": f"{report.queries} queries, {report.values}"})
        if train is None:
            raise InputError(f"{_CALL}: train is None. Pass the embeddings of the training set.")
        if isinstance(queries, Shards) and queries.is_gallery is not None:
            queries = RowSubset(queries, ~queries.is_gallery)
        sets = read_items(
            _CALL,
            queries,
            train,
            {"query_ids": query_ids, "gallery_ids": train_ids},
            share=share,
            similarity=similarity,
            memory=memory,
            labelled=False,
            choose=_choice_of_drawn(report),
        )
        rows = _rows_of_report(report, sets)
        shares_id = _shares_id(sets)
        # Neither ids nor groups exclude a training item here.
        without_exclusions = replace(
            sets, queries=sets.queries.without(*EXCLUDING), gallery=sets.gallery.without(*EXCLUDING)
        )
        found = search_of_all(_CALL, without_exclusions, 1)
    leaks = Leakage(
        query_indices=sets.queries.to_origins(rows),
        scores=torch.from_numpy(found.scores[:, 0])[rows],
        train_indices=sets.gallery.to_origins(torch.from_numpy(found.items[:, 0]).long())[rows],
        shares_id=None if shares_id is None else shares_id[rows],
        differences={},
        min_score=threshold,
        similarity=similarity,
        confidence=report.confidence,
    )
    return replace(leaks, differences=_differences(report, leaks.has_copy))


def copy_score(share: float, report: RetrievalReport, dim: int) -> float:
    """Return the `min_score` of `leakage` for a cosine or, with binary codes, for a share of equal bits.

    `share` is the lowest cosine of a copy, or its lowest share of equal bits. `dim` is the number of components or
    bits.
    """
    # The score of two codes is minus the number of differing bits.
    return -float(round((1 - share) * dim)) if report.similarity == "hamming" else share


def _evaluated(report: RetrievalReport) -> Int[Tensor, "evaluated"] | None:
    """Return the index of each evaluated query among the passed queries, ascending; None if all were evaluated."""
    if report.drawn is None:
        return report.counted
    return report.drawn if report.counted is None else report.counted[report.drawn]


def _choice_of_drawn(report: RetrievalReport) -> Callable[[int], Int[Tensor, "chosen"]] | None:
    """Return the function that chooses the drawn queries for the search; None if no queries were drawn."""
    if report.drawn is None:
        return None
    drawn = _evaluated(report)
    assert drawn is not None

    def choose(given: int) -> Int[Tensor, "chosen"]:
        if len(drawn) and int(drawn[-1]) >= given:
            raise _other_queries(report, given)
        return drawn

    return choose


def _rows_of_report(report: RetrievalReport, sets: ItemSets) -> Int[Tensor, "queries"]:
    """Return the place of each query of the report."""
    given = sets.queries.given
    evaluated = _evaluated(report)
    if evaluated is None:
        if given != len(report.query_labels):
            raise _other_queries(report, given)
        evaluated = torch.arange(given)
    origins = sets.queries.to_origins(torch.arange(sets.queries.length))
    if not bool(torch.isin(evaluated, origins).all()):
        raise _other_queries(report, given)
    return torch.searchsorted(origins, evaluated)


def _other_queries(report: RetrievalReport, given: int) -> InputError:
    return InputError(
        f"{_CALL}: the report has {counted(len(report.query_labels), 'query')} that are not among the {given:,} "
        "queries that you passed (each id counts once). Pass the queries that you evaluated, in the same order, with "
        "the same query_ids."
    )


def _shares_id(sets: ItemSets) -> Bool[Tensor, "queries"] | None:
    """Return whether a training item has the id of each query; None unless both sets have ids."""
    if not {"ids"} <= sets.queries.columns.keys() & sets.gallery.columns.keys():
        return None
    return torch.isin(sets.queries.columns["ids"], sets.gallery.columns["ids"])


def _differences(report: RetrievalReport, has_copy: Bool[Tensor, "queries"]) -> dict[str, Difference]:
    """Return, by metric, its value without the queries that have a copy, its value for all queries, and the interval."""
    differences = {}
    for key in report.sliced_metrics() or ["mAP"]:
        requested = report.requested(key)
        values = report.per_query[requested.of_queries]
        others = torch.where(has_copy, math.nan, values)
        labels = report.query_labels
        differences[key] = Difference(
            mean_of_queries(requested, others, labels),
            mean_of_queries(requested, values, labels),
            _interval(requested, others, values, labels, report.confidence),
        )
    return differences


def _interval(
    requested: RequestedMetric,
    others: Float[Tensor, "queries"],
    values: Float[Tensor, "queries"],
    labels: Int[Tensor, "queries"],
    confidence: float,
) -> Interval:
    """Return the interval of the mean over the queries without a copy minus the mean over all queries.

    `others` has the value of each query without a copy, and NaN for queries with a copy.
    """
    is_left_out = others.isnan() & ~values.isnan()
    classes_with_copies = len(labels[is_left_out].unique())
    if classes_with_copies == 1 or len(labels[~others.isnan()].unique()) < 2:
        return UNKNOWN
    if requested.is_macro:
        classes, means, _ = class_means(values, labels)
        classes_of_others, means_of_others, _ = class_means(others, labels)
        values = means
        others = torch.full_like(means, math.nan)
        others[torch.searchsorted(classes, classes_of_others)] = means_of_others
        labels = classes
    return subset_difference_interval(others, values, labels, confidence, requested.metric.range)
