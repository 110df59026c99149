"""`knn_accuracy`: how often the nearest items of a gallery vote for the label of a query."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes, presence
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._labels import Labels, check_labels, encode, encode_ids, read_labels
from fewshot_callbacks.functional._reading import as_tensor, default_mode, tensor_code
from fewshot_callbacks.functional._repeated import (
    Copies,
    Side,
    first_of_each,
    hashes_of,
    note_on_ids,
    sketches,
)
from fewshot_callbacks.functional.items import EVERYTHING, Share, check_places, refuse_other_dims
from fewshot_callbacks.functional.neighbours import compared_sets, positive_number, positive_whole, search
from fewshot_callbacks.functional.retrieval.report import Values, or_none
from fewshot_callbacks.functional.retrieval.settings import memory_bytes, several
from fewshot_callbacks.functional.statistics import (
    SAME,
    Interval,
    clustered_mean_interval,
    exact_mean,
    normal_quantile,
    notes_on_largest_class,
)
from fewshot_callbacks.settings import Metric, Similarity

_CALL = "knn_accuracy"
# Suffix of a metric, and the last rank of the right class, by its votes, that is a hit.
LAST_RANKS = {"": 1, "_top5": 5}
# Votes that are in memory at the same time, with some 150 bytes each.
VOTES_AT_ONCE = 2**20

KNN_METRICS = (
    Metric("knn@{k}", "pairs", None, "Queries whose label has the most votes of the {k} nearest items of a gallery."),
    Metric("knn@{k}_top5", "pairs", None, "Queries whose label is among the five with the most votes of these."),
)
"""What `knn_accuracy` reports."""


@equal_with_nan
@dataclass(frozen=True)
class KnnReport(Values):
    """The result of `knn_accuracy`."""

    _known: ClassVar = KNN_METRICS

    values: dict[str, float]
    """metric -> mean over queries, `knn@10`, `knn@10_top5` and so on; NaN where k is larger than the gallery"""
    intervals: dict[str, Interval]
    """metric -> confidence interval of its mean over other queries and classes of queries, with this gallery"""
    confidence: float
    """confidence level of the intervals"""
    queries: int
    """queries that the means are of"""
    queries_without_match: int
    """queries that are left out, since no candidate has their label"""
    gallery: int
    """items that may vote for a query"""
    notes: tuple[str, ...]
    """what a reader of the numbers should know"""
    per_query: dict[str, Float[Tensor, "all_queries"]] = field(compare=False, repr=False)
    """metric -> value of each query, 0, 1, or a share between them where classes tie; NaN for those left out"""

    def __str__(self) -> str:
        """Return the values, one in a line with its interval, and the notes."""
        return "\n".join([f"{self.queries:,} queries, {self.gallery:,} items that vote", *self.lines(), *self.notes])

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
    """The votes of the neighbours of some queries: those of one query together, the nearest first.

    A vote is that of a row of the gallery for one class. All rows that are as near as the last neighbour have votes.
    """

    query: Int[np.ndarray, "votes"]
    row: Int[np.ndarray, "votes"]
    """number of the neighbour's row among the distinct rows of the gallery"""
    voted: Int[np.ndarray, "votes"]
    """class that is voted for"""
    score: Float[np.ndarray, "votes"]
    """similarity of query and neighbour"""
    items: Int[np.ndarray, "votes"]
    """number of gallery items that cast this vote: those of the class with this row, without the query itself"""

    @property
    def begins(self) -> Bool[np.ndarray, "votes"]:
        """Whether a vote is the first of its query."""
        return np.append(True, self.query[1:] != self.query[:-1])

    def portions(self, ks: Sequence[int]) -> Iterator[Float[np.ndarray, "votes"]]:
        """Yield, for each k, the share of one of the k slots of a query that each item fills.

        It is 1 for the nearest items. Items that tie for the last slots share these, and all others fill none.
        """
        begins = self.begins
        is_new_score = begins | np.append(True, self.score[1:] != self.score[:-1])
        # A level holds the votes of one query with equal scores.
        level = np.cumsum(is_new_score) - 1
        items = np.bincount(level, self.items)
        nearer = np.cumsum(items) - items
        nearer -= nearer[level[begins]][self.query[is_new_score]]
        for k in ks:
            yield np.clip((k - nearer) / np.maximum(items, 1), 0, 1)[level]


@default_mode()
def knn_accuracy(
    queries: Any,
    query_labels: Any,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    k: Any = (10, 20, 100, 200),
    temperature: Any | None = 0.07,
    similarity: Similarity = "cosine",
    confidence: float = 0.95,
    memory_mb: float | None = None,
    share: Share = EVERYTHING,
) -> KnnReport:
    """Classify each query by a vote of its k nearest items of a gallery, and count how often its label wins.

    Each of the k items votes for its label with the weight exp(score / temperature), or with equal weights (Wu et al.,
    "Unsupervised feature learning via non-parametric instance discrimination", CVPR 2018; Caron et al., "Emerging
    properties in self-supervised vision transformers", ICCV 2021, and the evaluation of DINOv2). All values of k come
    from one exact search. Nothing depends on the order of the data: items that tie as the last of the k share the votes
    that remain, and classes that tie in votes share the hit. A class without a vote is never among the first.

    Args:
        queries: (queries, dim) finite floating-point rows; for `hamming` codes of -1 and +1, or 0 and 1.
        query_labels: (queries,) integers or strings. A query whose label no candidate has is left out and counted.
        gallery: (gallery, dim) items that vote; by default the queries, each without itself (leave-one-out).
        gallery_labels: (gallery,) labels of the gallery.
        query_ids: (queries,) identity of each query, where some come several times: the first of each id is counted.
        gallery_ids: (gallery,) identity of each gallery item: the first of each id may vote, but not for the query that it
            is.
        k: Number of neighbours that vote, or several. The value of one that is larger than the gallery is NaN.
        temperature: In units of the score; None for equal weights. 0.07 is usual for cosines.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.
        confidence: Confidence level of the intervals, in (0, 1). Queries of one class are taken to be dependent.
        memory_mb: Bound on the memory of the search beyond the embeddings, in MB; None is 512. Neighbours take
            additional memory, about 60 bytes for each: 0.6 GB for 50,000 queries and k = 200.
        share: Which of the queries and of the gallery this process holds, where several make the call together. Each of
            them then holds the whole gallery for the time of the search, and all return the report of one.

    Returns:
        A frozen report on the CPU, with values in [0, 1] under the keys `knn@10`, `knn@10_top5` and so on.

    Raises:
        ValueError: If shapes or types do not fit, embeddings hold NaN or Inf, there is no k or one below 1, the temperature
            is not positive, one of `gallery` and `gallery_labels` is missing, `gallery_ids` are given without a gallery, no
            query has a candidate of its label, or processes that make the call together make it in different ways; the
            same in every process.

    Examples:
        >>> import torch
        >>> gallery = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> queries = torch.tensor([[1.0, 0.2], [0.2, 1.0], [1.0, 0.0]])
        >>> report = knn_accuracy(queries, ["owl", "heron", "heron"], gallery, ["owl", "owl", "heron", "heron"], k=2)
        >>> report.per_query["knn@2"]
        tensor([1., 1., 0.], dtype=torch.float64)
    """
    with share.processes.together():
        ks, temperature = _checked(k, temperature, confidence, memory_mb)
        arguments: dict[str, object] = {
            "k": ks,
            "temperature": temperature,
            "similarity": similarity,
            "confidence": confidence,
            "memory_mb": memory_mb,
            "gallery": presence(gallery),
            "query_ids": presence(query_ids),
            "gallery_ids": presence(gallery_ids),
            "query_places": presence(share.query_places),
            "gallery_places": presence(share.gallery_places),
        }
        share.processes.refuse_other_calls(_CALL, arguments)
        _check_gallery(gallery, gallery_labels, query_ids, gallery_ids)
        sides = [_read("queries", "query", queries, query_labels, query_ids, share.query_places)]
        if gallery is not None:
            sides.append(_read("gallery", "gallery", gallery, gallery_labels, gallery_ids, share.gallery_places))
        sets, notes = _counted_sets(share.processes, sides)
        neighbours = _neighbour_search(sets, similarity, memory_bytes(_CALL, memory_mb))
        has_match = neighbours.candidates_of_own_class() > 0
        if not has_match.any():
            raise ValueError(
                f"{_CALL}: none of the {len(neighbours.rows)} queries has a candidate of its label, so no vote can be "
                "right. Pass a gallery with labels of the queries, or none for leave-one-out."
            )
        copies = neighbours.copies()
        if copies.is_noted:
            notes.append(copies.note("A copy is the nearest of all, and votes for the right label", _cure(gallery)))
        per_query = _values_of_all(neighbours, ks, temperature, share.processes)
        return _report(per_query, neighbours, torch.from_numpy(has_match), confidence, notes)


def _checked(
    k: Any, temperature: Any | None, confidence: float, memory_mb: float | None
) -> tuple[list[int], float | None]:
    """Return the numbers of neighbours and the temperature, if all settings are valid."""
    fix = "Pass numbers of neighbours, such as (10, 20)."
    ks = [positive_whole(_CALL, "k", number, fix) for number in several(k)]
    if not ks:
        raise ValueError(f"{_CALL}: k is empty. Pass at least one number of neighbours, such as (10, 20).")
    memory_bytes(_CALL, memory_mb)
    normal_quantile(confidence)
    if temperature is None:
        return ks, None
    return ks, positive_number(_CALL, "temperature", temperature, "Pass 0.07, or None for equal weights.")


def _check_gallery(gallery: Any, gallery_labels: Any, query_ids: Any, gallery_ids: Any) -> None:
    """Refuse arguments without those that belong to them."""
    if (gallery is None) != (gallery_labels is None):
        raise ValueError(
            f"{_CALL}: gallery and gallery_labels belong together. Pass both, or neither for leave-one-out."
        )
    if gallery_ids is not None and gallery is None:
        raise ValueError(
            f"{_CALL}: gallery_ids without a gallery. Pass query_ids= alone, which names the items of one set, or pass the "
            "gallery, too."
        )
    if gallery_ids is not None and query_ids is None:
        raise ValueError(f"{_CALL}: gallery_ids without query_ids. Pass both, so that no item votes for itself.")


class _Side(NamedTuple):
    """The queries, or the gallery, of this process."""

    name: str
    labels_name: str
    ids_name: str
    code: str
    """what the caller writes for a tensor of the vectors"""
    rows: Tensor
    labels: Labels
    ids: Labels | None
    places: Int[Tensor, "items"] | None


class _Items(NamedTuple):
    """The queries, or the gallery, of all processes."""

    rows: Tensor
    labels: Int[Tensor, "items"]
    """codes that queries and gallery share"""
    ids: Int[Tensor, "items"] | None
    """codes that queries and gallery share"""
    code: str
    """what the caller writes for a tensor of the rows"""

    def only(self, index: Int[Tensor, "items"]) -> _Items:
        """Return the items with these indices, in their order."""
        ids = None if self.ids is None else self.ids[index]
        return _Items(self.rows[index], self.labels[index], ids, self.code)


def _read(name: str, prefix: str, rows: Any, labels: Any, ids: Any, places: Any) -> _Side:
    """Return the queries, or the gallery items, of this process.

    Args:
        name: Name of the vectors, for messages.
        prefix: Beginning of the names of labels and ids, for messages.
        rows: Vectors of this process.
        labels: Their labels.
        ids: Their ids; None if none were given, in any process.
        places: Their indices among all; None if those of a process follow those of the one before.
    """
    vectors = as_tensor(rows, name, _CALL).cpu()
    items = len(vectors) if vectors.ndim else 0
    labels_name = f"{prefix}_labels"
    ids_name = f"{prefix}_ids"
    return _Side(
        name,
        labels_name,
        ids_name,
        tensor_code(name, rows),
        vectors,
        read_labels(labels, items, labels_name, name, _CALL),
        None if ids is None else read_labels(ids, items, ids_name, name, _CALL),
        None if places is None else check_labels(places, items, "places", name, _CALL),
    )


def _counted_sets(processes: Processes, sides: Sequence[_Side]) -> tuple[list[_Items], list[str]]:
    """Return the items of all processes that are counted, for each side, and notes on their ids. Collective."""
    codes, _ = encode(_CALL, {side.labels_name: side.labels for side in sides}, processes)
    ids = {side.ids_name: side.ids for side in sides if side.ids is not None}
    id_codes = dict(zip(ids, encode_ids(_CALL, ids, processes), strict=True)) if ids else {}
    items_of_sides = [
        _joined(processes, side, labels, id_codes.get(side.ids_name)) for side, labels in zip(sides, codes, strict=True)
    ]
    sets: list[_Items] = []
    notes: list[str] = []
    for items in items_of_sides:
        counted, notes_on_ids = _counted(items)
        sets.append(counted)
        notes += notes_on_ids
    return sets, notes


def _joined(processes: Processes, side: _Side, labels: Int[Tensor, "own"], ids: Int[Tensor, "own"] | None) -> _Items:
    """Return the items of all processes, in the order of their places. Collective.

    Args:
        processes: All processes.
        side: The items of this process.
        labels: Codes of their labels.
        ids: Codes of their ids; None without ids.
    """
    if processes.count == 1 and side.places is None:
        return _Items(side.rows, labels, ids, side.code)
    if len(labels) and side.rows.ndim != 2:
        raise ValueError(f"{_CALL} needs {side.name} of shape (items, dim); got shape {tuple(side.rows.shape)}.")
    by_rank = processes.gather((side.rows, labels, ids, side.places))
    filled = {rank: rows for rank, (rows, *_) in enumerate(by_rank) if len(rows)}
    if not filled:
        raise ValueError(f"{_CALL}: {side.name} is empty (shape (0, 0)) in every process. Pass at least one item.")
    refuse_other_dims(_CALL, side.name, {rank: rows.shape[1] for rank, rows in filled.items()})
    items = _Items(
        torch.cat([*filled.values()]),
        torch.cat([labels_of_rank for _, labels_of_rank, *_ in by_rank]),
        None if ids is None else torch.cat([ids_of_rank for *_, ids_of_rank, _ in by_rank if ids_of_rank is not None]),
        side.code,
    )
    places_by_rank = [places_of_rank for *_, places_of_rank in by_rank if places_of_rank is not None]
    if not places_by_rank:
        return items
    places = torch.cat(places_by_rank)
    check_places(_CALL, side.name, places)
    return items.only(places.argsort())


def _counted(items: _Items) -> tuple[_Items, list[str]]:
    """Return the first item of each id, and a note if different items share an id."""
    if items.ids is None or items.rows.ndim != 2:  # `compared_sets` refuses another shape
        return items, []
    first = first_of_each(items.ids)
    if len(first) == len(items.ids):
        return items, []
    note = note_on_ids(items.ids, items.labels, sketches(items.rows))
    return items.only(first), [] if note is None else [note]


def _neighbour_search(sets: Sequence[_Items], similarity: Similarity, memory: float) -> NeighbourSearch:
    """Return the search of queries among the items that vote.

    Args:
        sets: The queries and the gallery; the queries alone if they vote themselves.
        similarity: How they are compared.
        memory: Budget of the search, in bytes.
    """
    queries = sets[0]
    gallery = sets[-1]
    is_one_set = len(sets) == 1
    codes = queries.code, gallery.code
    rows, gallery_rows = compared_sets(_CALL, queries.rows, None if is_one_set else gallery.rows, similarity, codes)
    numbers = torch.cat([queries.labels, gallery.labels]).unique(return_inverse=True)[1]
    classes, gallery_classes = numbers.split([len(queries.labels), len(gallery.labels)])
    self_match = torch.arange(len(rows)) if is_one_set else _items_of_ids(queries.ids, gallery.ids, len(rows))
    return NeighbourSearch(
        rows, gallery_rows, classes.numpy(), gallery_classes.numpy(), self_match.numpy(), similarity, memory
    )


def _items_of_ids(query_ids: Tensor | None, gallery_ids: Tensor | None, queries: int) -> Int[Tensor, "queries"]:
    """Return the index of the gallery item with the id of each query; -1 if there is none, or no ids."""
    if query_ids is None or gallery_ids is None:
        return torch.full((queries,), -1)
    ordered, order = gallery_ids.sort()
    position = torch.searchsorted(ordered, query_ids).clamp(max=len(gallery_ids) - 1)
    return torch.where(ordered[position] == query_ids, order[position], -1)


def _cure(gallery: Any) -> str:
    """Return how a user leaves out copies."""
    if gallery is None:
        return "pass query_ids= (ids of monitors), which names each item, and the first of each is counted"
    return (
        "leave out the gallery if it holds the queries, or pass query_ids= and gallery_ids= (ids of monitors), so that "
        "no item votes for itself"
    )


def _values_of_all(
    neighbours: NeighbourSearch, ks: Sequence[int], temperature: float | None, processes: Processes
) -> dict[str, Float[Tensor, "queries"]]:
    """Return the value of each query, by metric; NaN where k is larger than the gallery. Collective.

    Each process searches the neighbours of its share of the queries.
    """
    queries = len(neighbours.rows)
    queries_here = np.arange(processes.rank, queries, processes.count)
    hits = neighbours.hits(queries_here, [k for k in ks if k <= neighbours.candidates], temperature)
    query_of_value = torch.cat(
        [torch.from_numpy(queries_of_rank) for queries_of_rank in processes.gather(queries_here)]
    )
    per_query = {}
    for k in dict.fromkeys(ks):
        for suffix in LAST_RANKS:
            key = f"knn@{k}{suffix}"
            values = torch.full((queries,), math.nan, dtype=torch.float64)
            if k <= neighbours.candidates:
                values[query_of_value] = torch.from_numpy(np.concatenate(processes.gather(hits[key])))
            per_query[key] = values
    return per_query


def _report(
    per_query: dict[str, Float[Tensor, "queries"]],
    neighbours: NeighbourSearch,
    has_match: Bool[Tensor, "queries"],
    confidence: float,
    notes: list[str],
) -> KnnReport:
    """Return the report of the queries that have a candidate of their label.

    Args:
        per_query: Value of each query, by metric.
        neighbours: Queries and gallery.
        has_match: Whether a candidate has the label of each query.
        confidence: Confidence level of the intervals.
        notes: Notes so far.
    """
    candidates = neighbours.candidates
    classes = torch.from_numpy(neighbours.classes)
    per_query = {key: values.masked_fill(~has_match, math.nan) for key, values in per_query.items()}
    without_match = int((~has_match).sum())
    if without_match:
        notes.append(f"{without_match} of {len(has_match)} queries are left out: no candidate has their label.")
    undefined = [key for key, values in per_query.items() if values.isnan().all()]
    if undefined:
        notes.append(
            f"Only {candidates} items can vote, so that {', '.join(undefined)} are NaN: pass a larger gallery, or k of at "
            f"most {candidates}."
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


@dataclass(frozen=True)
class NeighbourSearch:
    """Finds the nearest items of a gallery for each query, and what they vote for.

    Attributes:
        rows: (queries, dim).
        gallery: (gallery, dim) items; None for the queries themselves.
        classes: Class of each query, numbered from 0 on together with those of the gallery.
        gallery_classes: Class of each gallery item.
        self_match: Index of the gallery item that each query is, and that does not vote for it; -1 for none.
        similarity: How they are compared.
        memory: Budget of a search, in bytes.
    """

    rows: Tensor
    gallery: Tensor | None
    classes: Int[np.ndarray, "queries"]
    gallery_classes: Int[np.ndarray, "gallery"]
    self_match: Int[np.ndarray, "queries"]
    similarity: Similarity
    memory: float

    @property
    def candidates(self) -> int:
        """Number of items that may vote for a query."""
        return len(self.gallery_classes) - int(bool((self.self_match >= 0).any()))

    def candidates_of_own_class(self) -> Int[np.ndarray, "queries"]:
        """Return the number of candidates of each query that have its class."""
        is_own = (self.self_match >= 0) & (self.gallery_classes[self.self_match] == self.classes)
        of_class = np.bincount(self.gallery_classes, minlength=int(self.classes.max()) + 1)
        candidates: Int[np.ndarray, "queries"] = of_class[self.classes] - is_own
        return candidates

    def copies(self) -> Copies:
        """Return the copies of each query in the gallery."""
        gallery = self.rows if self.gallery is None else self.gallery
        indices = np.arange(len(gallery))
        gallery_rows = (gallery, indices)
        as_codes = self.similarity == "hamming"
        dtype = torch.promote_types(self.rows.dtype, gallery.dtype)
        queries = Side(hashes_of(self.rows, dtype), self.classes)
        if self.gallery is None:
            return Copies.among(queries, queries, self.self_match, [], gallery_rows, ALONE, as_codes=as_codes)
        items = Side(hashes_of(gallery, dtype), self.gallery_classes)
        return Copies.among(queries, items, None, [(self.self_match, indices)], gallery_rows, ALONE, as_codes=as_codes)

    def hits(
        self, queries: Int[np.ndarray, "searched"], ks: list[int], temperature: float | None
    ) -> dict[str, Float[np.ndarray, "searched"]]:
        """Return the value of some queries, by metric.

        Args:
            queries: Index of each of them.
            ks: Numbers of neighbours that vote, each at most the number of candidates.
            temperature: Of the weights of the votes; None for equal weights.
        """
        hits = {f"knn@{k}{suffix}": np.zeros(len(queries)) for k in ks for suffix in LAST_RANKS}
        if not hits or not len(queries):
            return hits
        with computing() as threads:
            vectors = Vectors(self.rows, self.gallery, self.similarity, threads=threads)
            kinds = self._kinds(vectors, queries)
            _, first, kind_of_query = np.unique(kinds, return_index=True, return_inverse=True)
            searched = queries[first]
            for positions, votes in self.votes(vectors, searched, max(ks)):
                for key, values in _hits(votes, self.classes[searched[positions]], ks, temperature).items():
                    hits[key][positions] = values
        return {key: values[kind_of_query] for key, values in hits.items()}

    def _kinds(self, vectors: Vectors, queries: Int[np.ndarray, "searched"]) -> Int[np.ndarray, "searched"]:
        """Return a number for each query; queries with equal numbers have equal values, and one of them is searched.

        So the items of a model that has collapsed are searched once, not each on its own.
        """
        duplicates = vectors.pairs.query_first_duplicate[queries]
        kinds: Int[np.ndarray, "searched"] = duplicates * (self.classes.max() + 1) + self.classes[queries]
        if self.gallery is not None:
            # A gallery item that does not vote for one of two equal queries may vote for the other.
            kinds = kinds * (len(self.gallery_classes) + 1) + self.self_match[queries] + 1
        return kinds

    def votes(
        self, vectors: Vectors, queries: Int[np.ndarray, "searched"], k: int
    ) -> Iterator[tuple[Int[np.ndarray, "block"], Votes]]:
        """Yield positions among the queries, and the votes of their k nearest neighbours and of all that tie with the last.

        Equal rows of the gallery are searched once. If more rows tie with the last one than are listed, one more search
        lists all of them.

        Args:
            vectors: Queries and gallery.
            queries: Index of each query.
            k: Number of neighbours.
        """
        distinct = _DistinctRows.of(vectors.pairs.gallery_first_duplicate, self.gallery_classes)
        self_match = self.self_match[queries]
        row_of_self = distinct.self_matches(self_match)
        remaining = np.arange(len(queries))
        listed = k  # rows that are listed for each query
        step = len(queries)
        while len(remaining):
            # number of rows of each query that tie with its last neighbour and are not listed
            unlisted_ties = np.zeros(len(queries), np.int64)
            for batch in _split(remaining, step):
                rows, scores, unlisted_ties[batch] = search(
                    vectors,
                    queries[batch],
                    distinct.searched(),
                    row_of_self[batch],
                    [],
                    min(listed, distinct.number),
                    self.memory,
                )
                complete = np.flatnonzero(unlisted_ties[batch] == 0)
                for block in _split(complete, VOTES_AT_ONCE // distinct.most_votes(listed)):
                    positions = batch[block]
                    yield positions, self._votes_of(distinct, self_match[positions], rows[block], scores.numpy()[block])
            remaining = np.flatnonzero(unlisted_ties)
            listed += int(unlisted_ties.max())
            step = VOTES_AT_ONCE // listed

    def _votes_of(
        self,
        distinct: _DistinctRows,
        self_match: Int[np.ndarray, "block"],
        rows: Int[np.ndarray, "block k"],
        scores: Float[np.ndarray, "block k"],
    ) -> Votes:
        """Return the votes of the neighbours of some queries.

        Args:
            distinct: The distinct rows of the gallery.
            self_match: Gallery item that each query is; -1 for none.
            rows: Neighbours of each query, the nearest first; -1 where there are fewer.
            scores: Similarity of each neighbour.
        """
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


class _DistinctRows(NamedTuple):
    """The distinct rows of a gallery, and one entry for each class among the items with the same row.

    The entries of row n are those from `offsets[n]` to `offsets[n + 1]`.
    """

    first_items: Int[np.ndarray, "rows"]
    """lowest index of an item with each row"""
    row_of_item: Int[np.ndarray, "gallery"]
    offsets: Int[np.ndarray, "offsets"]
    rows: Int[np.ndarray, "entries"]
    classes: Int[np.ndarray, "entries"]
    items: Int[np.ndarray, "entries"]
    """number of items of the class with this row"""

    @classmethod
    def of(
        cls, first_duplicate: Int[np.ndarray, "gallery"], gallery_classes: Int[np.ndarray, "gallery"]
    ) -> _DistinctRows:
        """Return the distinct rows, given the first duplicate of each item, and its class."""
        first_items, row_of_item = np.unique(first_duplicate, return_inverse=True)
        classes = int(gallery_classes.max()) + 1
        pairs, items = np.unique(row_of_item * classes + gallery_classes, return_counts=True)
        row_of_entry, class_of_entry = np.divmod(pairs, classes)
        offsets = np.searchsorted(row_of_entry, np.arange(len(first_items) + 1))
        return cls(first_items, row_of_item, offsets, row_of_entry, class_of_entry, items)

    @property
    def number(self) -> int:
        """Number of distinct rows."""
        return len(self.first_items)

    def searched(self) -> Int[np.ndarray, "rows"] | slice:
        """Return the items that are searched; a slice if these are all, so that no row is copied."""
        return slice(None) if self.number == len(self.row_of_item) else self.first_items

    def most_votes(self, rows: int) -> int:
        """Return the largest number of votes that so many rows can have."""
        return min(len(self.rows), rows * int(np.diff(self.offsets).max()))

    def self_matches(self, items: Int[np.ndarray, "queries"]) -> Int[np.ndarray, "queries"]:
        """Return the row of each item if no other item has it, else -1: a row that others share is a candidate."""
        rows = self.row_of_item[items]
        is_single = np.bincount(self.row_of_item) == 1
        return np.where((items >= 0) & is_single[rows], rows, -1)

    def entries_of(
        self, rows: Int[np.ndarray, "neighbours"]
    ) -> tuple[Int[np.ndarray, "votes"], Int[np.ndarray, "neighbours"]]:
        """Return the entries of some rows, one row after the other, and the number of entries of each."""
        length = np.diff(self.offsets)[rows]
        shift = self.offsets[rows] - np.cumsum(length) + length
        return np.repeat(shift, length) + np.arange(length.sum()), length


def _split(positions: Int[np.ndarray, "queries"], step: int) -> list[Int[np.ndarray, "_"]]:
    """Return positions in parts of some length."""
    step = max(1, step)
    return [positions[first : first + step] for first in range(0, len(positions), step)]


class _Tallies(NamedTuple):
    """The tallies of the votes for some queries. A tally is the sum of the votes for one class in one query."""

    of_vote: Int[np.ndarray, "votes"]
    """number of the tally that each vote counts for"""
    query: Int[np.ndarray, "tallies"]
    """query of each tally"""
    right: Int[np.ndarray, "queries"]
    """number of the tally for the class of each query; any number if it has no vote"""
    has_right: Bool[np.ndarray, "queries"]
    """whether the class of each query has a vote"""

    @classmethod
    def of(cls, votes: Votes, classes: Int[np.ndarray, "queries"]) -> _Tallies:
        """Return the tallies of some votes, given the class of each query."""
        number_of_classes = int(max(classes.max(), votes.voted.max())) + 1
        codes, tally_of_vote = np.unique(votes.query * number_of_classes + votes.voted, return_inverse=True)
        right_codes = np.arange(len(classes)) * number_of_classes + classes
        right = np.minimum(np.searchsorted(codes, right_codes), len(codes) - 1)
        return cls(tally_of_vote, codes // number_of_classes, right, codes[right] == right_codes)


def _hits(
    votes: Votes, classes: Int[np.ndarray, "queries"], ks: list[int], temperature: float | None
) -> dict[str, Float[np.ndarray, "queries"]]:
    """Return the share of the orders of ties in which the class of each query is among the first, by metric.

    Args:
        votes: Votes for these queries, each of which has some.
        classes: Class of each query.
        ks: Numbers of neighbours that vote.
        temperature: Of the weights of the votes; None for equal weights.
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
    # Relative to the nearest neighbour a weight is at most 1, and nothing overflows.
    nearest = votes.score[votes.begins][votes.query]
    weights: Float[np.ndarray, "votes"] = np.exp((votes.score - nearest) / temperature)
    return weights
