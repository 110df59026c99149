"""`search_quality`: the recall of an approximate search index, compared with exact search."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.nearest import NearestItems
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.scored_pairs import scores_of_pairs
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._reading import default_mode, named
from fewshot_callbacks.functional._table import table
from fewshot_callbacks.functional.found_lists import FAULTS, FoundLists, rank_blocks, read_found
from fewshot_callbacks.functional.item_reader import TAKES, read_items, with_stored_arrays
from fewshot_callbacks.functional.items import EVERYTHING, ItemSets, Rules, Share
from fewshot_callbacks.functional.means import exact_mean
from fewshot_callbacks.functional.neighbours import positive_number, positive_whole, scores_of, search
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.registry import requested_metric
from fewshot_callbacks.functional.retrieval.settings import memory_bytes, several
from fewshot_callbacks.functional.statistics import (
    EQUAL,
    Difference,
    Interval,
    are_all_zero,
    clustered_mean_interval,
    mean_interval,
    paired_difference_interval,
)
from fewshot_callbacks.settings import Similarity
from fewshot_callbacks.system.words import counted, none_has, verb

_CALL = "search_quality"
# Key -> value of each query.
Values = dict[str, Float[Tensor, "queries"]]


@equal_with_nan
@dataclass(frozen=True)
class SearchQuality:
    """The result of `search_quality`: an approximate index compared with exact search; `print` shows tables.

    Attributes:
        recall: k -> mean recall@k over the queries, in [0, 1]: the share of the k nearest items that the index found.
        intervals: k -> 95 % interval of this mean.
        recall_within: k -> the same mean, if an item also counts when its score is at most `within` below the score of
            the k-th nearest.
        percentile_1: k -> recall@k that the worst 1 % of the queries do not exceed.
        percentile_5: k -> recall@k that the worst 5 % of the queries do not exceed.
        within: Tolerance of `recall_within`, relative to the score of the k-th nearest.
        differences: Key -> value of the index, value of exact search, and the interval of their difference. The keys
            are `search_recall@10` and so on and, with labels, `recall@1` and `map@10_min` and so on.
        quantisation: Key -> exact search of the stored rows minus exact search; empty without `stored`.
        index: Key -> the index minus exact search of the stored rows; empty without `stored`.
        queries: Number of queries.
        gallery: Number of gallery items.
        faults: Number of entries that are `missing` (-1), `unknown`, `repeated`, or `excluded` (the query itself, or an
            item that its id or group excludes).
        queries_with_ties: Number of queries for which more candidates have the score of the last neighbour of exact
            search (of the stored rows, if you passed some), so that any of them may be found.
        notes: What you should know when you read the values.
        per_query: Key -> value of the index for each query; NaN if a query has no value.

    Examples:
        >>> import torch
        >>> gallery = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> quality = search_quality([[0, 2]], torch.tensor([[1.0, 0.05]]), gallery)
        >>> quality.recall, quality.queries
        ({2: 0.5}, 1)
    """

    recall: dict[int, float]
    intervals: dict[int, Interval]
    recall_within: dict[int, float]
    percentile_1: dict[int, float]
    percentile_5: dict[int, float]
    within: float
    differences: dict[str, Difference]
    quantisation: dict[str, Difference]
    index: dict[str, Difference]
    queries: int
    gallery: int
    faults: dict[str, int]
    queries_with_ties: int
    notes: tuple[str, ...]
    per_query: dict[str, Float[Tensor, "queries"]] = field(compare=False, repr=False)

    def metrics(self) -> dict[str, float]:
        """Return the values of the index, by the names that are logged."""
        values = {}
        for k, recall in self.recall.items():
            key = _key_of(k)
            values[key] = recall
            values[f"{key}_within"] = self.recall_within[k]
            values[f"{key}_percentile_5"] = self.percentile_5[k]
            values[f"{key}_percentile_1"] = self.percentile_1[k]
        return values | {key: change.first for key, change in self.differences.items() if key not in values}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; NaN becomes None."""
        parts = {"differences": self.differences, "quantisation": self.quantisation, "index": self.index}
        return {
            "values": {key: None if math.isnan(value) else value for key, value in self.metrics().items()},
            "intervals": {
                _key_of(k): [None if math.isnan(end) else end for end in interval]
                for k, interval in self.intervals.items()
            },
            "exact_search": {key: change.second for key, change in self.differences.items()},
            **{name: {key: change.to_dict() for key, change in part.items()} for name, part in parts.items()},
            "within": self.within,
            "queries": self.queries,
            "gallery": self.gallery,
            "faults": dict(self.faults),
            "queries_with_ties": self.queries_with_ties,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """Return a table of recall, a table of losses if there are labels or stored rows, and the notes."""
        head = f"Found by the index, compared with exact search: {counted(self.queries, 'query')}, "
        head += counted(self.gallery, "gallery item")
        parts = ["\n".join([head, *table(*self._recall_table())])]
        if self.quantisation or len(self.differences) > len(self.recall):
            parts.append("\n".join(table(*self._loss_table())))
        return "\n\n".join([*parts, *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _recall_table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the column heads and the rows of the recall table."""
        columns = ("k", "recall@k", "interval", f"within {self.within:.3g}", "5 % of queries", "1 % of queries")
        rows = []
        for k, recall in self.recall.items():
            low, high = self.intervals[k]
            interval = "" if math.isnan(low) else f"{low:.4f} to {high:.4f}"
            percentiles = (f"at most {self.percentile_5[k]:.4f}", f"at most {self.percentile_1[k]:.4f}")
            rows.append((str(k), f"{recall:.4f}", interval, f"{self.recall_within[k]:.4f}", *percentiles))
        return columns, rows

    def _loss_table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Return the column heads and the rows of the table of losses."""
        columns = ["", "exact search", "found", "found - exact", "interval"]
        if self.quantisation:
            columns += ["by quantisation", "by the index"]
        rows = []
        for key, change in self.differences.items():
            found, exact, difference, interval, _ = change.in_words()
            row = [key, exact, found, difference, interval]
            if self.quantisation:
                row += [f"{part[key].value:+.4f}" for part in (self.quantisation, self.index)]
            rows.append(row)
        return columns, rows


@default_mode()
def search_quality(
    found: Any,
    queries: Any,
    gallery: Any | None = None,
    *,
    query_labels: Any | None = None,
    gallery_labels: Any | None = None,
    k: int | Sequence[int] | None = None,
    within: float = 0.01,
    stored: Any | None = None,
    stored_queries: Any | None = None,
    similarity: Similarity = "cosine",
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    memory_mb: float | None = None,
    share: Share = EVERYTHING,
) -> SearchQuality:
    """Return the recall of an approximate search index, compared with exact search. *Collective*.

    The index may come from any library, such as faiss, usearch, hnswlib or a vector database. You only pass the lists that
    it returned.

    Recall@k of a query is the number of found items that are among its k nearest, divided by k (or by the number of its
    candidates, if it has fewer). A found item is among the k nearest if its exact score is at least the score of the k-th.
    So it does not matter which of several equal items the index returns. The first k entries of each list count. Entries
    that are -1, unknown or repeated count as not found. The query itself, and items that ids or groups exclude, are
    removed first, and later entries move up.

    With labels, the metrics of evaluation are compared, too: `recall@1`, and `map@k_min`, the average precision of the first
    k. A relevant item that was not found counts as never retrieved.

    With the rows that the index has stored, such as decoded codes, the loss is split into two parts: the loss of exact
    search on the stored rows (`quantisation`), and the additional loss of the graph or the lists of the index (`index`).

    Args:
        found: (queries, columns) indices of gallery items in the order of the index; -1 if it found nothing. If the gallery
            has ids, `found` contains ids (integers or strings) instead.
        queries: (queries, dim) finite floating-point rows, as for `nearest`.
        gallery: (gallery, dim) the original items, before the index stored them; by default the queries themselves.
        query_labels: (queries,) integers or strings.
        gallery_labels: (gallery,) label of each gallery item.
        k: One or several numbers of nearest items, each at most the number of columns. The default is the number of
            columns. Without a gallery it is one less, because an index also returns the query itself.
        within: Tolerance of `recall_within`. An item counts if its score is at least s - within * |s|, where s is the score
            of the k-th nearest.
        stored: (gallery, stored dim) the gallery rows as the index compares them, such as
            `index.reconstruct_n(0, index.ntotal)` in faiss.
        stored_queries: (queries, stored dim) the queries as the index compares them, if it encodes the queries, too; by
            default the queries.
        similarity: Similarity that the index uses: `cosine`, `dot`, `euclidean` or `hamming`.
        query_ids: (queries,) id of each query, as for `nearest`.
        gallery_ids: (gallery,) id of each gallery item.
        query_groups: (queries,) group of each query.
        gallery_groups: (gallery,) group of each gallery item.
        memory_mb: Memory limit in MB, in addition to the embeddings, `found` and the result; None is 512.
        share: The part of the queries (with their rows of `found`) and of the gallery that this process has.

    Returns:
        A frozen result, the same in every process.

    Raises:
        ValueError: As `nearest`. Also if `found` is not a matrix of integers or ids with one row per query, if none of its
            entries is a gallery item, if `k` exceeds its columns, or if there is not one stored row per gallery item.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import nearest
        >>> items = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
        >>> found = nearest(items[:100], gallery=items, k=10).indices
        >>> search_quality(found, items[:100], items).recall
        {10: 1.0}
        >>> found[:, 9] = -1
        >>> search_quality(found, items[:100], items).recall
        {10: 0.9}
    """
    with share.processes.together(), named(_CALL, "evaluate_retrieval"):
        given = _SearchedSets(
            queries,
            gallery,
            {
                "query_labels": query_labels,
                "gallery_labels": gallery_labels,
                "query_ids": query_ids,
                "gallery_ids": gallery_ids,
                "query_groups": query_groups,
                "gallery_groups": gallery_groups,
            },
            similarity,
            memory_mb,
            share,
        )
        within = positive_number(_CALL, "within", within, "Pass a share of the k-th score, such as 0.01.")
        settings = {"k": k, "within": within, "similarity": similarity, "memory_mb": memory_mb}
        settings |= {"stored": stored is not None, "stored_queries": stored_queries is not None}
        share.refuse_other_settings(_CALL, settings)
        if stored_queries is not None and stored is None:
            raise InputError(
                f"{_CALL}: stored_queries without stored. Pass stored=, the rows that the index has stored, too."
            )
        sets = given.read()
        lists = read_found(_CALL, found, given.gallery_ids(sets), share, sets)
        ks = _checked_ranks(k, lists.places.shape[1], sets)
        return _compared(given, sets, lists, ks, within, given.stored(sets, stored, stored_queries))


class _SearchedSets(NamedTuple):
    """Queries and gallery as the caller passed them."""

    queries: Any
    gallery: Any | None
    columns: Mapping[str, Any]
    similarity: Similarity
    memory_mb: float | None
    share: Share

    def read(self) -> ItemSets:
        """Return the checked sets. *Collective*."""
        return read_items(
            _CALL,
            self.queries,
            self.gallery,
            self.columns,
            share=self.share,
            similarity=self.similarity,
            memory=memory_bytes(_CALL, self.memory_mb),
        )

    def report_values(self, metrics: Sequence[str]) -> Values:
        """Return the value of each query by exact search, by metric. *Collective*."""
        report = evaluate_retrieval(
            self.queries,
            gallery=self.gallery,
            **self.columns,
            metrics=tuple(metrics),
            similarity=self.similarity,
            memory_mb=self.memory_mb,
            share=self.share,
        )
        return {key: report.per_query[key] for key in metrics}

    def all_columns(self) -> tuple[Any, dict[str, Any]]:
        """Return the query rows, and labels, ids and groups, including the ones in files."""
        queries, _, columns = with_stored_arrays(
            _CALL, self.queries, self.gallery, self.columns, labelled=True, takes=TAKES[_CALL]
        )
        return queries, columns

    def gallery_ids(self, sets: ItemSets) -> Any | None:
        """Return the ids of the gallery items of this process; None if they have none."""
        _, columns = self.all_columns()
        return columns.get("query_ids" if sets.same_set else "gallery_ids")

    def stored(self, sets: ItemSets, stored: Any | None, stored_queries: Any | None) -> _SearchedSets | None:
        """Return the stored rows as two sets; None if there are none. *Collective*."""
        if stored is None:
            return None
        queries, columns = self.all_columns()
        share = self.share
        length = sum(share.processes.gather(_length(stored)))
        if length != sets.gallery.given:
            raise InputError(
                f"{_CALL}: stored has {counted(length, 'row')}, but the gallery has {sets.gallery.given:,}. Pass one "
                "row per gallery item."
            )
        if sets.same_set:
            rows = _length(stored)
            first = sum(share.processes.gather(rows)[: share.processes.rank])
            places = np.arange(first, first + rows) if share.query_places is None else share.query_places
            columns = {"query_ids": places, **columns}  # without ids, the place of an item is its id
            columns |= {name.replace("query_", "gallery_"): values for name, values in columns.items()}
            share = replace(share, gallery_places=share.query_places)
        return self._replace(
            queries=queries if stored_queries is None else stored_queries,
            gallery=stored,
            columns=columns,
            share=share,
        )


def _length(rows: Any) -> int:
    return int(rows.shape[0]) if hasattr(rows, "shape") else len(rows)


def _checked_ranks(k: Any, columns: int, sets: ItemSets) -> list[int]:
    """Return the requested numbers of nearest items, ascending."""
    most = columns - 1 if sets.same_set and k is None else columns
    fix = f"found has {counted(columns, 'column')}. Ask the index for more items, or pass a smaller k."
    values = several(most if k is None else k)
    return sorted({positive_whole(_CALL, "k", value, fix, most=most) for value in values})


# -------------------------------------------------------------------------------------------------------------- comparison


class _ExactSearch(NamedTuple):
    """Exact search of the original rows or of the stored rows, for the queries of this process."""

    vectors: Vectors
    rules: Rules
    nearest: NearestItems
    memory: float

    @classmethod
    def of(cls, sets: ItemSets, k: int) -> _ExactSearch:
        """Return the search for the k nearest candidates. *Collective*."""
        with computing() as threads:
            vectors = sets.vectors(threads)
            rules = sets.rules()
            return cls(vectors, rules, search(vectors, rules, k, sets.memory), sets.memory)

    def scores(self, places: Int[np.ndarray, "queries columns"]) -> Float[np.ndarray, "queries columns"]:
        """Return the exact score of each listed item, in the units of the data; NaN if there is none. *Collective*."""
        number_of_place = np.empty(len(self.rules.places), np.int64)
        number_of_place[self.rules.places] = np.arange(len(number_of_place))
        query, column = np.nonzero(places >= 0)
        scores = np.full(places.shape, np.nan)
        items = number_of_place[places[query, column]]
        with computing():
            scores[query, column] = scores_of(self.vectors, scores_of_pairs(self.vectors, query, items, self.memory))
        return scores

    def recalls(
        self, scores: Float[np.ndarray, "queries columns"], k: int, within: float = 0.0
    ) -> Float[np.ndarray, "queries"]:
        """Return recall@k of each query, given the scores of its list; NaN for a query without candidates."""
        candidates = np.minimum((self.nearest.items >= 0).sum(axis=1), k)
        last = self.nearest.scores[np.arange(len(candidates)), np.maximum(candidates, 1) - 1]
        lowest = last - within * np.abs(last)
        with np.errstate(invalid="ignore"):
            hits = (scores[:, :k] >= lowest[:, None]).sum(axis=1)
            return np.where(candidates > 0, hits / candidates, np.nan)


def _compared(
    given: _SearchedSets,
    sets: ItemSets,
    lists: FoundLists,
    ks: Sequence[int],
    within: float,
    stored_sets: _SearchedSets | None,
) -> SearchQuality:
    """Return the quality of found lists. *Collective*."""
    exact = _ExactSearch.of(sets, ks[-1])
    scores = exact.scores(lists.places)
    own = {_key_of(k): exact.recalls(scores, k) for k in ks}
    own |= {f"{_key_of(k)}_within": exact.recalls(scores, k, within) for k in ks}
    metrics = ["recall@1", *(f"map@{k}_min" for k in ks)] if "labels" in sets.queries.columns else []
    searched = exact
    if stored_sets is not None:
        searched = _ExactSearch.of(stored_sets.read(), ks[-1])
        stored_scores = exact.scores(searched.nearest.items)
        own |= {f"{_key_of(k)}_stored": exact.recalls(stored_scores, k) for k in ks}
    if metrics:
        of_index = scores if searched is exact else searched.scores(lists.places)
        own |= _metrics_of_lists(sets, lists, of_index, metrics)
    columns = torch.stack([torch.from_numpy(np.asarray(values, np.float64)) for values in own.values()])
    found = dict(zip(own, sets.queries.of_all(sets.processes, columns), strict=True))
    recalls = {_key_of(k): found.pop(_key_of(k)) for k in ks}
    recalls_within = {k: found.pop(f"{_key_of(k)}_within") for k in ks}
    of_stored = {_key_of(k): found.pop(f"{_key_of(k)}_stored") for k in ks} if stored_sets is not None else {}
    if all(bool(values.isnan().all()) for values in recalls.values()):
        raise InputError(
            f"{_CALL}: {none_has(sets.queries.length, 'query')} a candidate. Ids or groups exclude the whole gallery."
        )
    found = recalls | found
    of_exact = {key: torch.where(values.isnan(), math.nan, 1.0) for key, values in recalls.items()}
    if metrics:
        of_exact |= given.report_values(metrics)
        of_stored |= {} if stored_sets is None else stored_sets.report_values(metrics)
    labels = sets.queries.columns.get("labels")
    return _summarised(sets, lists, searched, recalls_within, within, labels, found, of_exact, of_stored)


def _metrics_of_lists(
    sets: ItemSets, lists: FoundLists, scores: Float[np.ndarray, "queries columns"], metrics: Sequence[str]
) -> dict[str, Float[np.ndarray, "queries"]]:
    """Return the label metrics of the found lists of this process."""
    own = sets.queries.places
    labels = sets.gallery.labels.numpy()
    is_relevant = (lists.places >= 0) & (labels[lists.places] == sets.queries.of_rows("labels").numpy()[:, None])
    relevant = torch.from_numpy(sets.count_candidates_with("labels"))[own]
    values = {key: np.full(len(own), np.nan) for key in metrics}
    for span, ranks in rank_blocks(is_relevant, scores, relevant):
        for key in metrics:
            requested = requested_metric(key)
            assert requested.metric.value is not None
            values[key][span] = requested.metric.value(ranks, ties="expected", **requested.parameters).numpy()
    return values


def _summarised(
    sets: ItemSets,
    lists: FoundLists,
    searched: _ExactSearch,
    recalls_within: Mapping[int, Float[Tensor, "queries"]],
    within: float,
    labels: Int[Tensor, "queries"] | None,
    found: Values,
    of_exact: Values,
    of_stored: Values,
) -> SearchQuality:
    """Return the means over the queries, their differences and the notes. *Collective*."""
    own_counts = [
        *lists.faults,
        (searched.nearest.unlisted_ties > 0).sum(),
        (lists.lengths < max(recalls_within)).sum(),
    ]
    *faults, ties, short = sets.processes.summed(np.array(own_counts)).tolist()
    present = {k: found[_key_of(k)][~found[_key_of(k)].isnan()] for k in recalls_within}
    clusters = None if labels is None else labels[~found[_key_of(min(present))].isnan()]
    return SearchQuality(
        recall={k: exact_mean(values) for k, values in present.items()},
        intervals={k: _interval(values, clusters) for k, values in present.items()},
        recall_within={k: exact_mean(values[~values.isnan()]) for k, values in recalls_within.items()},
        percentile_1={k: _percentile(values, 1) for k, values in present.items()},
        percentile_5={k: _percentile(values, 5) for k, values in present.items()},
        within=within,
        differences=_differences(found, of_exact, labels),
        quantisation=_differences(of_stored, of_exact, labels) if of_stored else {},
        index=_differences(found, of_stored, labels) if of_stored else {},
        queries=sets.queries.length,
        gallery=sets.gallery.length,
        faults=dict(zip(FAULTS, faults, strict=True)),
        queries_with_ties=ties,
        notes=tuple(_notes(dict(zip(FAULTS, faults, strict=True)), ties, short, max(recalls_within))),
        per_query=found,
    )


def _key_of(k: int) -> str:
    """Return the key of the search recall; `recall@k` is another metric, for labels."""
    return f"search_recall@{k}"


def _interval(values: Float[Tensor, "queries"], clusters: Int[Tensor, "queries"] | None) -> Interval:
    return mean_interval(values) if clusters is None else clustered_mean_interval(values, clusters)


def _percentile(values: Float[Tensor, "queries"], percent: int) -> float:
    """Return the smallest value that at least this percentage of the queries does not exceed."""
    return float(values.sort().values[-(-len(values) * percent // 100) - 1])


def _differences(first: Values, second: Values, labels: Int[Tensor, "queries"] | None) -> dict[str, Difference]:
    """Return key -> difference of the means, with a paired interval."""
    result = {}
    for key, values in first.items():
        differences = values - second[key]
        interval = EQUAL if are_all_zero(differences) else paired_difference_interval(differences, labels)
        first_mean, second_mean = (exact_mean(of_set[~of_set.isnan()]) for of_set in (values, second[key]))
        result[key] = Difference(first_mean, second_mean, interval)
    return result


def _notes(faults: Mapping[str, int], ties: int, short: int, k: int) -> list[str]:
    """Return notes on entries that count as not found, on lists that are too short, and on ties."""
    meanings = {
        "missing": "-1, because the index returned fewer items than requested",
        "unknown": "not in the gallery",
        "repeated": "a repetition of an earlier item",
    }
    notes = [
        f"{counted(faults[kind], 'entry')} of found {verb(faults[kind], 'is', 'are')} {meaning}. They count as not found."
        for kind, meaning in meanings.items()
        if faults[kind]
    ]
    if short:
        notes.append(
            f"{counted(short, 'query')} {verb(short, 'has', 'have')} fewer than {k} entries after the query itself and "
            "items of its id or group are removed. Request more items from the index, and pass k."
        )
    if ties:
        notes.append(
            f"{counted(ties, 'query')} {verb(ties, 'has', 'have')} more candidates with the score of the last of the {k} "
            "nearest. Recall counts any of them as found. Label metrics depend on which of them the index returned."
        )
    return notes
