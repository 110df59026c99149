"""`knn_accuracy`: how often the nearest items of a gallery vote for the label of a query."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.options import Progress, computing
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._jackknife import SAME
from fewshot_callbacks.functional._notes import notes_on_largest_class
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import EVERYTHING, GROUPING, ItemSets, Share, first_equal_rows
from fewshot_callbacks.functional.means import exact_mean
from fewshot_callbacks.functional.neighbours import found_in_batches, positive_number, positive_whole
from fewshot_callbacks.functional.retrieval.settings import memory_bytes, several
from fewshot_callbacks.functional.retrieval.values import Values, or_none
from fewshot_callbacks.functional.statistics import Interval, clustered_mean_interval, normal_quantile
from fewshot_callbacks.settings import Metric, Similarity
from fewshot_callbacks.system.words import counted, none_has, verb

_CALL = "knn_accuracy"
# Sentences that `KnnMonitor` replaces, because its arguments have other names.
NO_MATCH_REMEDY = "Pass a gallery with the labels of the queries, or no gallery for leave-one-out."
FEW_VOTERS_REMEDY = "Pass a larger gallery, or k of at most"
# Suffix of a metric -> worst rank of the right class, by votes, that counts as a hit.
LAST_RANKS = {"": 1, "_top5": 5}
# Bytes per vote while votes are counted.
VOTE_BYTES = 150
# Share of the memory budget for votes, and the largest number of votes at a time.
VOTES_SHARE = 0.25
MOST_VOTES = 2**20

KNN_METRICS = (
    Metric(
        "knn@{k}", "pairs", None, "Share of queries whose label gets the most votes of their {k} nearest gallery items."
    ),
    Metric("knn@{k}_top5", "pairs", None, "Share of queries whose label is among the five labels with the most votes."),
)
"""The metrics that `knn_accuracy` reports."""


@equal_with_nan
@dataclass(frozen=True)
class KnnReport(Values):
    """The result of `knn_accuracy`; `print` shows the values with their intervals.

    Attributes:
        values: Metric -> mean over queries, such as `knn@10` and `knn@10_top5`. NaN if k exceeds the number of
            candidates.
        intervals: Metric -> confidence interval of the mean for new queries and new query classes, with this gallery.
        confidence: Confidence level of the intervals.
        queries: Number of queries in the means.
        queries_without_match: Number of queries left out because no candidate has their label.
        gallery: Number of items that may vote for a query.
        notes: What you should know when you read the values.
        per_query: Metric -> value of each query: 0, 1, or a fraction if classes tie. NaN for a query that is left out.
    """

    _known: ClassVar = KNN_METRICS

    values: dict[str, float]
    intervals: dict[str, Interval]
    confidence: float
    queries: int
    queries_without_match: int
    gallery: int
    notes: tuple[str, ...]
    per_query: dict[str, Float[Tensor, "all_queries"]] = field(compare=False, repr=False)

    def __str__(self) -> str:
        """Return one line per value with its interval, and the notes."""
        return "\n".join(
            [f"{counted(self.queries, 'query')}, {self.gallery:,} items that vote", *self.lines(), *self.notes]
        )

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dictionaries for JSON (what is not finite becomes None)."""
        return self.tables() | {
            "confidence": or_none(self.confidence),
            "queries": self.queries,
            "queries_without_match": self.queries_without_match,
            "gallery": self.gallery,
            "notes": list(self.notes),
        }


class Votes(NamedTuple):
    """The votes for a block of queries, sorted by query and then from the nearest neighbour to the farthest.

    One entry is the vote of one distinct gallery row for one class. All rows that tie with the last neighbour vote.
    """

    query: Int[np.ndarray, "votes"]
    """position of the query in the block, ascending from 0 without gaps, because each query has a vote"""
    row: Int[np.ndarray, "votes"]
    """index of the neighbour among the distinct gallery rows"""
    voted: Int[np.ndarray, "votes"]
    """class that gets the vote"""
    score: Float[np.ndarray, "votes"]
    """similarity of query and neighbour"""
    items: Int[np.ndarray, "votes"]
    """number of gallery items with this class and this row, without the query itself"""

    @property
    def begins(self) -> Bool[np.ndarray, "votes"]:
        """Whether each vote is the first vote for its query."""
        return np.append(True, self.query[1:] != self.query[:-1])

    def portions(self, ks: Sequence[int]) -> Iterator[Float[np.ndarray, "votes"]]:
        """Yield, for each k, the weight of each item in a vote of k neighbours, in [0, 1].

        The weight is 1 for the nearest items. Items that tie for the last slots share these slots. All other items have
        weight 0.
        """
        is_first_of_query = self.begins
        # Scores are exact, so equal distances have bit-identical scores.
        is_first_of_level = is_first_of_query | np.append(True, self.score[1:] != self.score[:-1])
        # Votes of one query with equal scores form a level. Query 0 with scores 0.9, 0.9 and 0.8 and query 1 with score 0.7
        # have the levels 0, 0, 1 and 2.
        level_of_vote = np.cumsum(is_first_of_level) - 1
        query_of_level = self.query[is_first_of_level]
        first_level_of_query = level_of_vote[is_first_of_query]
        items_of_level = np.bincount(level_of_vote, self.items)
        items_before_level = np.cumsum(items_of_level) - items_of_level  # of all queries
        nearer_items = items_before_level - items_before_level[first_level_of_query][query_of_level]
        for k in ks:
            yield np.clip((k - nearer_items) / np.maximum(items_of_level, 1), 0, 1)[level_of_vote]


@default_mode()
def knn_accuracy(
    queries: Any,
    query_labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    k: Any = (10, 20, 100, 200),
    temperature: Any | None = 0.07,
    similarity: Similarity = "cosine",
    confidence: float = 0.95,
    memory_mb: float | None = None,
    progress: Progress | None = None,
    share: Share = EVERYTHING,
) -> KnnReport:
    """Return the kNN accuracy: how often the k nearest gallery items of a query vote for its label. *Collective*.

    Each of the k items votes for its label with the weight exp(score / temperature), or with equal weights (Wu et al.,
    "Unsupervised feature learning via non-parametric instance discrimination", CVPR 2018; Caron et al., "Emerging
    properties in self-supervised vision transformers", ICCV 2021; the evaluation of DINOv2). One exact search serves all
    values of k. The result does not depend on the order of the data: items that tie for the last of the k places share
    the remaining votes, and classes with equal votes share the hit. A class without votes never counts as a hit.

    Args:
        queries: (queries, dim) finite floating-point rows. For `hamming`, codes of -1 and +1, or of 0 and 1. `Shards`
            bring their own labels, ids and groups.
        query_labels: (queries,) integers or strings. A query is left out and counted if no candidate has its label.
        gallery: (gallery, dim) items that vote. By default the queries vote, each without itself (leave-one-out).
        gallery_labels: (gallery,) label of each gallery item.
        query_ids: (queries,) id of each query, if some queries are repeated. Only the first query of each id counts.
        gallery_ids: (gallery,) id of each gallery item. Only the first item of each id votes, and it does not vote for a
            query with its own id.
        query_groups: (queries,) group of each query. Items of its own group do not vote for a query. If fewer than k
            candidates remain, all of them vote.
        gallery_groups: (gallery,) group of each gallery item. Without a gallery, `query_groups` is used for both.
        k: One or several numbers of neighbours. The value is NaN for a k that exceeds the number of candidates.
        temperature: Temperature in units of the score, or None for equal weights. 0.07 is usual for cosines.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.
        confidence: Confidence level of the intervals, in (0, 1). Queries of one class count as dependent.
        memory_mb: Memory limit of the search in MB, in addition to the embeddings; None is 512. Queries are searched in
            batches that fit into this limit.
        progress: Function of (pairs done, all pairs). Extra searches for tied items are not counted.
        share: The part of the queries and of the gallery that this process has, if several processes make the call
            together. The gallery is exchanged in chunks, and every process returns the single-process report.

    Returns:
        A frozen report on the CPU. Its values are in [0, 1], under keys such as `knn@10` and `knn@10_top5`.

    Raises:
        ValueError: If shapes or types do not fit, embeddings contain NaN or Inf, `k` is empty or below 1, the temperature
            is not positive, only one of `gallery` and `gallery_labels` is passed, `gallery_ids` or `gallery_groups` are
            passed without a gallery, no query has a candidate of its label, or the processes pass different arguments.
            Every process raises the same error.

    Examples:
        >>> import torch
        >>> gallery = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> queries = torch.tensor([[1.0, 0.2], [0.2, 1.0], [1.0, 0.0]])
        >>> report = knn_accuracy(queries, ["owl", "heron", "heron"], gallery, ["owl", "owl", "heron", "heron"], k=2)
        >>> round(report["knn@2"], 4)
        0.6667
        >>> report.per_query["knn@2"]
        tensor([1., 1., 0.], dtype=torch.float64)
    """
    with share.processes.together():
        ks, temperature = _checked(k, temperature, confidence, memory_mb)
        memory = memory_bytes(_CALL, memory_mb)
        columns = {"query_labels": query_labels, "gallery_labels": gallery_labels}
        columns |= {"query_ids": query_ids, "gallery_ids": gallery_ids}
        columns |= {"query_groups": query_groups, "gallery_groups": gallery_groups}
        arguments: dict[str, object] = {
            "k": ks,
            "temperature": temperature,
            "similarity": similarity,
            "confidence": confidence,
            "memory_mb": memory_mb,
        }
        share.refuse_other_settings(_CALL, arguments)
        sets = read_items(_CALL, queries, gallery, columns, share=share, similarity=similarity, memory=memory).hashed()
        has_match = sets.count_candidates_with("labels") > 0
        if not has_match.any():
            raise InputError(
                f"{_CALL}: {none_has(len(has_match), 'query')} a candidate of its label, so no vote can be right. "
                f"{NO_MATCH_REMEDY}"
            )
        effect = "A copy is the nearest of all, and votes for the right label"
        notes = sets.notes_on_copies(sets.copies(), effect)
        neighbours = NeighbourSearch.of(sets)
        per_query = _values_of_all(neighbours, has_match, ks, temperature, progress)
        return _report(per_query, neighbours, torch.from_numpy(has_match), confidence, notes)


def _checked(
    k: Any, temperature: Any | None, confidence: float, memory_mb: float | None
) -> tuple[list[int], float | None]:
    """Return the numbers of neighbours and the temperature, if all settings are valid."""
    fix = "Pass numbers of neighbours, such as (10, 20)."
    ks = [positive_whole(_CALL, "k", number, fix) for number in several(k)]
    if not ks:
        raise InputError(f"{_CALL}: k is empty. Pass at least one number of neighbours, such as (10, 20).")
    memory_bytes(_CALL, memory_mb)
    normal_quantile(confidence)
    if temperature is None:
        return ks, None
    return ks, positive_number(_CALL, "temperature", temperature, "Pass 0.07, or None for equal weights.")


def _values_of_all(
    neighbours: NeighbourSearch,
    has_match: Bool[np.ndarray, "queries"],
    ks: Sequence[int],
    temperature: float | None,
    progress: Progress | None,
) -> dict[str, Float[Tensor, "queries"]]:
    """Return the value of each query, by metric. *Collective*.

    A value is NaN if k exceeds the number of candidates, or if no vote can be right. Each process searches for its own
    queries.
    """
    items = neighbours.sets.queries
    searched = np.flatnonzero(has_match[items.places.numpy()])
    hits = neighbours.hits(searched, [k for k in ks if k <= neighbours.candidates], temperature, progress)
    per_query = {}
    for k in dict.fromkeys(ks):
        for suffix in LAST_RANKS:
            key = f"knn@{k}{suffix}"
            values = torch.full((len(items.places),), math.nan, dtype=torch.float64)
            if key in hits:
                values[torch.from_numpy(searched)] = torch.from_numpy(hits[key])
            per_query[key] = items.of_all(neighbours.sets.processes, values)
    return per_query


def _report(
    per_query: dict[str, Float[Tensor, "queries"]],
    neighbours: NeighbourSearch,
    has_match: Bool[Tensor, "queries"],
    confidence: float,
    notes: list[str],
) -> KnnReport:
    """Return the report, with means over the queries that have a candidate of their label.

    `has_match` tells whether a candidate has the label of each query.
    """
    candidates = neighbours.candidates
    classes = torch.from_numpy(neighbours.classes)
    without_match = int((~has_match).sum())
    if without_match:
        notes.append(f"{without_match} of {len(has_match)} queries are left out, because no candidate has their label.")
    undefined = [key for key, values in per_query.items() if values.isnan().all()]
    if undefined:
        notes.append(
            f"{', '.join(undefined)} {verb(len(undefined), 'is', 'are')} NaN, because only "
            f"{counted(candidates, 'item')} can vote. {FEW_VOTERS_REMEDY} {candidates}."
        )
    means = {key: exact_mean(values[has_match]) for key, values in per_query.items()}
    of_first = {key: value for key, value in means.items() if not key.endswith("_top5")}
    notes += notes_on_largest_class(of_first, classes[has_match])
    return KnnReport(
        values=means,
        intervals={key: clustered_mean_interval(values, classes, confidence) for key, values in per_query.items()},
        confidence=confidence,
        queries=int(has_match.sum()),
        queries_without_match=without_match,
        gallery=candidates,
        notes=tuple(notes),
        per_query=per_query,
    )


@dataclass(frozen=True, eq=False)
class NeighbourSearch:
    """Searches for the nearest gallery items of each query of this process, and returns their votes.

    Equal rows of a group are searched as one row. Each process has its own distinct rows, because processes do not compare
    their rows.
    """

    sets: ItemSets
    classes: Int[np.ndarray, "queries"]
    """class of each query; query and gallery classes share one numbering from 0"""
    gallery_classes: Int[np.ndarray, "gallery"]
    self_match: Int[np.ndarray, "queries"]
    """place of the gallery item that is the query itself and does not vote; -1 for none"""
    rows: _RowClasses
    """distinct gallery rows"""
    equal_query: Int[np.ndarray, "own_queries"]
    """index of the first query of this process with an equal row"""

    @classmethod
    def of(cls, sets: ItemSets) -> NeighbourSearch:
        """Return the search, given sets with hashes. *Collective*."""
        queries = sets.queries
        gallery = sets.gallery
        numbers = torch.cat([queries.labels, gallery.labels]).unique(return_inverse=True)[1]
        classes, gallery_classes = numbers.split([queries.length, gallery.length])
        equal_item = first_equal_rows(gallery)
        equal_query = equal_item if queries.rows is gallery.rows else first_equal_rows(queries)
        row = gallery.of_all(sets.processes, gallery.places[torch.from_numpy(equal_item)])
        for kind in GROUPING:
            if kind in gallery.columns:
                row = torch.stack([row, gallery.columns[kind]], dim=1).unique(dim=0, return_inverse=True)[1]
        rows = _RowClasses.of(row.numpy(), gallery_classes.numpy())
        self_match = sets.items_of_queries().numpy()
        return cls(sets, classes.numpy(), gallery_classes.numpy(), self_match, rows, equal_query)

    @property
    def candidates(self) -> int:
        """Number of items that may vote for a query, before groups exclude any."""
        return len(self.gallery_classes) - int(bool((self.self_match >= 0).any()))

    def hits(
        self,
        queries: Int[np.ndarray, "searched"],
        ks: list[int],
        temperature: float | None,
        progress: Progress | None = None,
    ) -> dict[str, Float[np.ndarray, "searched"]]:
        """Return the value of each searched query, by metric. *Collective*.

        `queries` are indices among the queries of this process. Each k is at most the number of candidates. A
        temperature of None gives equal weights.
        """
        hits = {f"knn@{k}{suffix}": np.zeros(len(queries)) for k in ks for suffix in LAST_RANKS}
        if not hits:
            return hits
        classes = self.classes[self.sets.queries.places.numpy()]
        kinds = self._kinds(queries)
        _, first, kind_of_query = np.unique(kinds, return_index=True, return_inverse=True)
        searched = queries[first]
        with computing() as threads:
            for positions, votes in self.votes(threads, searched, max(ks), progress):
                for key, values in _hits(votes, classes[searched[positions]], ks, temperature).items():
                    hits[key][positions] = values
        return {key: values[kind_of_query] for key, values in hits.items()}

    def _kinds(self, queries: Int[np.ndarray, "searched"]) -> Int[np.ndarray, "searched"]:
        """Return a number for each query. Queries with equal numbers have equal values, so only one of them is searched.

        A collapsed model therefore needs a single search.
        """
        items = self.sets.queries
        places = items.places.numpy()[queries]
        columns = [self.equal_query[queries], self.classes[places]]
        if not self.sets.same_set:
            # A gallery item that does not vote for one of two equal queries may vote for the other.
            columns.append(self.self_match[places])
        columns += [items.columns[kind].numpy()[places] for kind in GROUPING if kind in items.columns]
        kinds = np.zeros(len(queries), np.int64)
        for column in columns:
            # Renumbering after each column keeps the products small.
            kinds = kinds * (column.max(initial=0) + 2) + column + 1
            kinds = np.unique(kinds, return_inverse=True)[1]
        return kinds

    def votes(
        self, threads: int, queries: Int[np.ndarray, "searched"], k: int, progress: Progress | None = None
    ) -> Iterator[tuple[Int[np.ndarray, "block"], Votes]]:
        """Yield positions in `queries`, and the votes of the k nearest neighbours and all ties with the last. *Collective*.

        If more rows tie with the last neighbour than are listed, one more search lists all of them.

        `queries` are indices among the queries of this process. `progress` only follows the first search.
        """
        sets = self.sets
        distinct = self.rows
        processes = sets.processes
        searched = self._among_distinct_rows()
        vectors = searched.vectors(threads)
        rules = searched.rules()
        self_match = self.self_match[sets.queries.places.numpy()[queries]]
        # per query: number of rows that tie with its last neighbour and are not listed
        unlisted_ties = np.zeros(len(queries), np.int64)
        remaining = np.arange(len(queries))
        listed = k  # listed rows per query
        most = None  # queries per batch
        votes_at_once = _votes_at_once(sets.memory)
        while processes.largest([float(len(remaining))])[0]:
            rows_listed = min(listed, distinct.number)
            position = 0
            for batch, found in found_in_batches(
                vectors, rules, queries[remaining], rows_listed, sets.memory, most=most, progress=progress
            ):
                of_batch = remaining[position : position + len(batch)]
                position += len(batch)
                unlisted_ties[of_batch] = found.unlisted_ties
                complete = np.flatnonzero(found.unlisted_ties == 0)
                for block in _split(complete, votes_at_once // distinct.most_votes(listed)):
                    positions = of_batch[block]
                    yield positions, self._votes_of(self_match[positions], found.items[block], found.scores[block])
                del found  # frees the memory before the next search
            remaining = np.flatnonzero(unlisted_ties)
            listed += int(processes.largest([float(unlisted_ties.max(initial=0))])[0])
            most = max(1, votes_at_once // listed)
            progress = None  # the progress bar is complete

    def _among_distinct_rows(self) -> ItemSets:
        """Return the queries with the distinct gallery rows.

        The row of the query itself is excluded, unless another item has the same row.
        """
        distinct = self.rows
        queries = self.sets.queries
        gallery = self.sets.gallery
        if distinct.number < gallery.length:
            gallery = gallery.take(torch.from_numpy(distinct.first_items), self.sets.memory)
        row_of_self = torch.from_numpy(distinct.self_matches(self.self_match))
        # Other items may have the row of an item that ids exclude. So ids exclude no rows; `_votes_of` leaves out the item.
        return replace(
            self.sets, queries=queries.without("ids"), gallery=gallery.without("ids"), self_match=row_of_self
        )

    def _votes_of(
        self,
        self_match: Int[np.ndarray, "block"],
        rows: Int[np.ndarray, "block k"],
        scores: Float[np.ndarray, "block k"],
    ) -> Votes:
        """Return the votes for a block of queries.

        `self_match` is the gallery item that is the query itself; -1 for none. `rows` are the neighbours, the nearest
        first; -1 if there are fewer.
        """
        distinct = self.rows
        is_neighbour = rows >= 0
        neighbours = rows[is_neighbour]
        entry, length = distinct.entries_of(neighbours)
        query = np.repeat(np.nonzero(is_neighbour)[0], length)
        item_of_query = self_match[query]
        has_row = distinct.rows[entry] == distinct.row_of_item[item_of_query]
        has_class = distinct.classes[entry] == self.gallery_classes[item_of_query]
        items = distinct.items[entry] - (has_row & has_class & (item_of_query >= 0))
        score = np.repeat(scores[is_neighbour], length)
        return Votes(query, distinct.rows[entry], distinct.classes[entry], score, items)


class _RowClasses(NamedTuple):
    """The distinct rows of a gallery, with one entry per row and class.

    The entries of row n are `offsets[n]` to `offsets[n + 1]`.
    """

    first_items: Int[np.ndarray, "rows"]
    """lowest item index of each row"""
    row_of_item: Int[np.ndarray, "gallery"]
    offsets: Int[np.ndarray, "offsets"]
    rows: Int[np.ndarray, "entries"]
    classes: Int[np.ndarray, "entries"]
    items: Int[np.ndarray, "entries"]
    """number of items of the class with this row"""

    @classmethod
    def of(cls, rows: Int[np.ndarray, "gallery"], gallery_classes: Int[np.ndarray, "gallery"]) -> _RowClasses:
        """Return the distinct rows, given the row number and the class of each item."""
        _, first_items, row_of_item = np.unique(rows, return_index=True, return_inverse=True)
        order = np.argsort(first_items)  # rows in the order of their first items
        first_items = first_items[order]
        row_of_item = np.argsort(order)[row_of_item]
        classes = int(gallery_classes.max()) + 1
        pairs, items = np.unique(row_of_item * classes + gallery_classes, return_counts=True)
        row_of_entry, class_of_entry = np.divmod(pairs, classes)
        offsets = np.searchsorted(row_of_entry, np.arange(len(first_items) + 1))
        return cls(first_items, row_of_item, offsets, row_of_entry, class_of_entry, items)

    @property
    def number(self) -> int:
        """Number of distinct rows."""
        return len(self.first_items)

    def most_votes(self, rows: int) -> int:
        """Return the largest number of votes that this number of rows can have."""
        return min(len(self.rows), rows * int(np.diff(self.offsets).max()))

    def self_matches(self, items: Int[np.ndarray, "queries"]) -> Int[np.ndarray, "queries"]:
        """Return the row of each item, or -1 if another item has the same row, because that row stays a candidate."""
        rows = self.row_of_item[items]
        is_single = np.bincount(self.row_of_item) == 1
        return np.where((items >= 0) & is_single[rows], rows, -1)

    def entries_of(
        self, rows: Int[np.ndarray, "neighbours"]
    ) -> tuple[Int[np.ndarray, "votes"], Int[np.ndarray, "neighbours"]]:
        """Return the entries of these rows, one row after the other, and the number of entries per row."""
        length = np.diff(self.offsets)[rows]
        shift = self.offsets[rows] - np.cumsum(length) + length
        return np.repeat(shift, length) + np.arange(length.sum()), length


def _votes_at_once(memory: float) -> int:
    """Return how many votes fit into a memory budget in bytes."""
    return int(min(MOST_VOTES, VOTES_SHARE * memory / VOTE_BYTES))


def _split(positions: Int[np.ndarray, "queries"], step: int) -> list[Int[np.ndarray, "_"]]:
    """Return the positions in parts of at most `step`, and of at least one."""
    step = max(1, step)
    return [positions[first : first + step] for first in range(0, len(positions), step)]


class _Tallies(NamedTuple):
    """The tallies of a block of queries. A tally is the sum of the votes for one class and one query."""

    of_vote: Int[np.ndarray, "votes"]
    """index of the tally of each vote"""
    query: Int[np.ndarray, "tallies"]
    """query of each tally"""
    right: Int[np.ndarray, "queries"]
    """index of the tally for the label of each query; arbitrary if this label has no vote"""
    has_right: Bool[np.ndarray, "queries"]
    """whether the label of each query has a vote"""

    @classmethod
    def of(cls, votes: Votes, classes: Int[np.ndarray, "queries"]) -> _Tallies:
        """Return the tallies, given the class of each query."""
        number_of_classes = int(max(classes.max(), votes.voted.max())) + 1
        codes, tally_of_vote = np.unique(votes.query * number_of_classes + votes.voted, return_inverse=True)
        right_codes = np.arange(len(classes)) * number_of_classes + classes
        right = np.minimum(np.searchsorted(codes, right_codes), len(codes) - 1)
        return cls(tally_of_vote, codes // number_of_classes, right, codes[right] == right_codes)


def _hits(
    votes: Votes, classes: Int[np.ndarray, "queries"], ks: list[int], temperature: float | None
) -> dict[str, Float[np.ndarray, "queries"]]:
    """Return, by metric, the probability that the class of each query is among the first if ties are ordered at random.

    Each query has at least one vote. A temperature of None gives equal weights.
    """
    weights = _weights(votes, temperature)
    tallies = _Tallies.of(votes, classes)
    queries = len(classes)
    hits = {}
    for k, portion in zip(ks, votes.portions(ks), strict=True):
        totals = np.bincount(tallies.of_vote, portion * votes.items * weights)
        right_totals = np.where(tallies.has_right, totals[tallies.right], 0.0)
        compared = right_totals[tallies.query]
        more = np.bincount(tallies.query, totals > compared * (1 + SAME), queries)
        equal = np.bincount(tallies.query, np.abs(totals - compared) <= compared * SAME, queries)
        for suffix, last_rank in LAST_RANKS.items():
            chance = np.clip((last_rank - more) / np.maximum(equal, 1), 0, 1)
            hits[f"knn@{k}{suffix}"] = np.where(right_totals > 0, chance, 0.0)
    return hits


def _weights(votes: Votes, temperature: float | None) -> Float[np.ndarray, "votes"]:
    """Return the weight of each vote; 1 without a temperature."""
    if temperature is None:
        return np.ones(len(votes.query))
    # Relative to the nearest neighbour, each weight is at most 1, so that nothing overflows.
    nearest = votes.score[votes.begins][votes.query]
    weights: Float[np.ndarray, "votes"] = np.exp((votes.score - nearest) / temperature)
    return weights
