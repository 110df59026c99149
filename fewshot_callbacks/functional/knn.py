"""`knn_accuracy`: how often the nearest items of a bank vote for the label of a query."""

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
from fewshot_callbacks.functional._reading import (
    Labels,
    as_tensor,
    check_labels,
    default_mode,
    merged_books,
    read_labels,
    refuse_words_beside_integers,
)
from fewshot_callbacks.functional._repeated import (
    Copies,
    Side,
    first_of_each,
    hashes_of,
    note_on_ids,
    sketches,
)
from fewshot_callbacks.functional.neighbours import compared_sets, positive_number, positive_whole, search
from fewshot_callbacks.functional.retrieval.inputs import EVERYTHING, Share, check_places, refuse_other_dims
from fewshot_callbacks.functional.retrieval.registry import Metric
from fewshot_callbacks.functional.retrieval.report import Values, or_none
from fewshot_callbacks.functional.retrieval.settings import memory_bytes, several
from fewshot_callbacks.functional.statistics import SAME, Interval, clustered_mean_interval, exact_mean, normal_quantile
from fewshot_callbacks.settings import Similarity

_CALL = "knn_accuracy"
# Of the classes with the most votes, among which the right one may be.
PLACES = {"": 1, "_top5": 5}
# Neighbours that vote at once, which takes some 150 bytes for each.
VOTES_AT_ONCE = 2**20

KNN_METRICS = (
    Metric("knn@{k}", "pairs", None, "Queries whose label has the most votes of the {k} nearest items of a bank."),
    Metric("knn@{k}_top5", "pairs", None, "Queries whose label is among the five with the most votes of these."),
)
"""What `knn_accuracy` reports."""


@dataclass(frozen=True)
class KnnReport(Values):
    """The result of `knn_accuracy`."""

    known: ClassVar = KNN_METRICS

    values: dict[str, float]
    """metric -> mean over queries, `knn@10`, `knn@10_top5` and so on; NaN where k is larger than the bank"""
    intervals: dict[str, Interval]
    """metric -> confidence interval of its mean over other queries and classes of queries, with this bank"""
    confidence: float
    """confidence level of the intervals"""
    queries: int
    """queries that the means are of"""
    left_out: int
    """queries that are left out, since no candidate has their label"""
    bank: int
    """items that may vote for a query"""
    notes: tuple[str, ...]
    """what a reader of the numbers should know"""
    per_query: dict[str, Float[Tensor, "all_queries"]] = field(compare=False, repr=False)
    """metric -> value of each query, 0, 1, or a share between them where classes tie; NaN for those left out"""

    def __str__(self) -> str:
        """Return the values, one in a line with its interval, and the notes."""
        return "\n".join([f"{self.queries:,} queries, {self.bank:,} items that vote", *self.lines(), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dictionaries for JSON (what is not finite becomes None)."""
        sizes = {"queries": self.queries, "left_out": self.left_out, "bank": self.bank, "notes": list(self.notes)}
        return self.tables() | {"confidence": or_none(self.confidence)} | sizes


class Votes(NamedTuple):
    """Neighbours of some queries, those of each together, the nearest first, and all that are as near as the last."""

    query: Int[np.ndarray, "votes"]
    row: Int[np.ndarray, "votes"]
    """number of each neighbour's row among the distinct ones"""
    voted: Int[np.ndarray, "votes"]
    """class of each neighbour"""
    score: Float[np.ndarray, "votes"]
    items: Int[np.ndarray, "votes"]
    """items of the bank that are this neighbour: equal rows of one class, without the query itself"""

    @property
    def begins(self) -> Bool[np.ndarray, "votes"]:
        """Whether a neighbour is the nearest of its query."""
        return np.append(True, self.query[1:] != self.query[:-1])

    def portions(self, ks: Sequence[int]) -> Iterator[Float[np.ndarray, "votes"]]:
        """Yield, for each k, the share of a place that each item gets: 1, or less where it is as near as the last of k."""
        begins = self.begins
        is_new = begins | np.append(True, self.score[1:] != self.score[:-1])
        level = np.cumsum(is_new) - 1  # of equal scores
        size = np.bincount(level, self.items)
        before = np.cumsum(size) - size
        before -= before[level[begins]][self.query[is_new]]
        for k in ks:
            yield np.clip((k - before) / np.maximum(size, 1), 0, 1)[level]


@default_mode()
def knn_accuracy(
    embeddings: Any,
    labels: Any,
    bank: Any | None = None,
    bank_labels: Any | None = None,
    *,
    ids: Any | None = None,
    bank_ids: Any | None = None,
    k: Any = (10, 20, 100, 200),
    temperature: Any | None = 0.07,
    similarity: Similarity = "cosine",
    confidence: float = 0.95,
    memory_mb: float | None = None,
    share: Share = EVERYTHING,
) -> KnnReport:
    """Classify each query by a vote of its k nearest items of a bank, and count how often its label wins.

    Each of the k items votes for its label with the weight exp(score / temperature), or with equal weights (Wu et al.,
    "Unsupervised feature learning via non-parametric instance discrimination", CVPR 2018; Caron et al., "Emerging
    properties in self-supervised vision transformers", ICCV 2021, and the evaluation of DINOv2). All values of k come
    from one exact search. Nothing depends on the order of the data: items that tie for the last of the k places share
    those that are left, and classes that tie in votes share the hit. A class without a vote is never among the first.

    Args:
        embeddings: (queries, dim) finite floating-point rows; for `hamming` codes of -1 and +1, or 0 and 1.
        labels: (queries,) integers or strings. A query whose label no candidate has is left out and counted.
        bank: (bank, dim) items that vote; by default the embeddings, each query without itself (leave-one-out).
        bank_labels: (bank,) labels of the bank.
        ids: (queries,) identity of each query, where some items come several times: the first of each id is counted.
        bank_ids: (bank,) identity of each item of the bank: the first of each id may vote, but not for the query that it is.
        k: Number of neighbours that vote, or several. The value of one that is larger than the bank is NaN.
        temperature: In units of the score; None for equal weights. 0.07 is usual for cosines.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.
        confidence: Confidence level of the intervals, in (0, 1). Queries of one class are taken to be dependent.
        memory_mb: Bound on the memory of the search beyond the embeddings, in MB; None is 512. Neighbours take
            additional memory, about 60 bytes for each: 0.6 GB for 50,000 queries and k = 200.
        share: Which of the queries and of the bank this process holds, where several make the call together. Each of
            them then holds the whole bank for the time of the search, and all return the report of one.

    Returns:
        A frozen report on the CPU, with values in [0, 1] under the keys `knn@10`, `knn@10_top5` and so on.

    Raises:
        ValueError: If shapes or types do not fit, embeddings hold NaN or Inf, there is no k or one below 1, the temperature
            is not positive, one of `bank` and `bank_labels` is missing, no query has a candidate of its label, or processes
            that make the call together make it in different ways; the same in every process.

    Examples:
        >>> import torch
        >>> bank = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> queries = torch.tensor([[1.0, 0.2], [0.2, 1.0], [1.0, 0.0]])
        >>> report = knn_accuracy(queries, ["owl", "heron", "heron"], bank, ["owl", "owl", "heron", "heron"], k=2)
        >>> report.per_query["knn@2"]
        tensor([1., 1., 0.], dtype=torch.float64)
    """
    with share.processes.together():
        return _accuracy(
            embeddings,
            labels,
            bank,
            bank_labels,
            ids=ids,
            bank_ids=bank_ids,
            k=k,
            temperature=temperature,
            similarity=similarity,
            confidence=confidence,
            memory_mb=memory_mb,
            share=share,
        )


def _accuracy(
    embeddings: Any,
    labels: Any,
    bank: Any | None,
    bank_labels: Any | None,
    *,
    ids: Any | None,
    bank_ids: Any | None,
    k: Any,
    temperature: Any | None,
    similarity: Similarity,
    confidence: float,
    memory_mb: float | None,
    share: Share,
) -> KnnReport:
    """Compute what `knn_accuracy` returns. Collective."""
    ks, temperature = _checked(k, temperature, confidence, memory_mb)
    settings: dict[str, object] = {"k": ks, "temperature": temperature, "similarity": similarity}
    settings |= {"confidence": confidence, "memory_mb": memory_mb}
    arrays = {"bank": bank, "ids": ids, "bank_ids": bank_ids}
    arrays |= {"query_places": share.query_places, "gallery_places": share.gallery_places}
    given = {name: presence(array) for name, array in arrays.items()}
    share.processes.refuse_other_calls(_CALL, settings | given)
    _check_sides(bank, bank_labels, ids, bank_ids)
    queries, notes = _counted(
        _whole(share.processes, "embeddings", "labels", embeddings, labels, share.query_places, ids)
    )
    rows, own_labels = queries.rows, queries.labels
    others, other_labels, itself = rows, own_labels, torch.arange(len(rows))
    if bank is not None:
        of_bank, notes_on_bank = _counted(
            _whole(share.processes, "bank", "bank_labels", bank, bank_labels, share.gallery_places, bank_ids)
        )
        notes += notes_on_bank
        others, other_labels = of_bank.rows, of_bank.labels
        itself = _places_of(queries.ids, of_bank.ids, len(rows))
    refuse_words_beside_integers(_CALL, {"labels": own_labels, "bank_labels": other_labels})
    compared = compared_sets(_CALL, ("embeddings", "bank"), rows, None if bank is None else others, similarity)
    classes, of_others = (
        torch.cat([own_labels.codes, other_labels.codes]).unique(return_inverse=True)[1].split([len(rows), len(others)])
    )
    is_own = (itself >= 0) & (of_others[itself] == classes)
    same = torch.bincount(of_others, minlength=int(classes.max()) + 1)[classes] - is_own.long()
    if not bool((same > 0).any()):
        raise ValueError(
            f"{_CALL}: none of the {len(rows)} queries has a candidate of its label, so no vote can be right. Pass a bank "
            "with labels of the queries, or none for leave-one-out."
        )
    candidates = len(others) - int(bool((itself >= 0).any()))
    voters = NeighbourSearch(
        *compared, classes.numpy(), of_others.numpy(), itself.numpy(), similarity, memory_bytes(_CALL, memory_mb)
    )
    copies = voters.copies()
    if copies.is_noted:
        notes.append(copies.note("A copy is the nearest of all, and votes for the right label", _cure(bank)))
    kept = same > 0
    per_query = _values_of_all(voters, ks, candidates, temperature, share.processes)
    per_query = {key: values.masked_fill(~kept, math.nan) for key, values in per_query.items()}
    return _report(per_query, classes, kept, candidates, confidence, notes)


def _values_of_all(
    voters: NeighbourSearch, ks: Sequence[int], candidates: int, temperature: float | None, processes: Processes
) -> dict[str, Float[Tensor, "queries"]]:
    """Return the value of each query, by metric; NaN where k is larger than the bank. Each process searches for its share.

    Collective.
    """
    queries = len(voters.rows)
    own = np.arange(processes.rank, queries, processes.count)
    hits = voters.hits(own, [each for each in ks if each <= candidates], temperature)
    places = torch.cat([torch.from_numpy(each) for each in processes.gather(own)])
    per_query = {}
    for each in dict.fromkeys(ks):
        for name in PLACES:
            key, whole = f"knn@{each}{name}", torch.full((queries,), math.nan, dtype=torch.float64)
            if each <= candidates:
                whole[places] = torch.from_numpy(np.concatenate(processes.gather(hits[key])))
            per_query[key] = whole
    return per_query


def _check_sides(bank: Any, bank_labels: Any, ids: Any, bank_ids: Any) -> None:
    """Refuse what belongs together, and is not there together."""
    if (bank is None) != (bank_labels is None):
        raise ValueError(f"{_CALL}: bank and bank_labels belong together. Pass both, or neither for leave-one-out.")
    if bank_ids is not None and (bank is None or ids is None):
        missing = "bank" if bank is None else "ids"
        raise ValueError(f"{_CALL}: bank_ids without {missing}. Pass ids= alone for one set, and both for a bank.")


def _checked(
    k: Any, temperature: Any | None, confidence: float, memory_mb: float | None
) -> tuple[list[int], float | None]:
    """Return the numbers of neighbours and the temperature, if all settings are right."""
    ks = [positive_whole(_CALL, "k", each, "Pass numbers of neighbours, such as (10, 20).") for each in several(k)]
    if not ks:
        raise ValueError(f"{_CALL}: k is empty. Pass at least one number of neighbours, such as (10, 20).")
    memory_bytes(_CALL, memory_mb)
    normal_quantile(confidence)
    if temperature is None:
        return ks, None
    return ks, positive_number(_CALL, "temperature", temperature, "Pass 0.07, or None for equal weights.")


def _report(
    per_query: dict[str, Float[Tensor, "queries"]],
    classes: Int[Tensor, "queries"],
    kept: Tensor,
    candidates: int,
    confidence: float,
    notes: list[str],
) -> KnnReport:
    """Average over the queries that are kept."""
    left_out = int((~kept).sum())
    too_large = [key.removeprefix("knn@") for key, of in per_query.items() if of.isnan().all() and "_" not in key]
    if left_out:
        notes.append(f"{left_out} of {len(kept)} queries are left out: no candidate has their label.")
    if too_large:
        notes.append(
            f"Only {candidates} items can vote, so that the values of k = {', '.join(too_large)} are NaN: pass a larger "
            f"bank, or k of at most {candidates}."
        )
    return KnnReport(
        values={key: exact_mean(of[kept]) for key, of in per_query.items()},
        intervals={key: clustered_mean_interval(of, classes, confidence) for key, of in per_query.items()},
        confidence=confidence,
        queries=int(kept.sum()),
        left_out=left_out,
        bank=candidates,
        notes=tuple(notes),
        per_query=per_query,
    )


def _whole(processes: Processes, name: str, labels_name: str, rows: Any, labels: Any, places: Any, ids: Any) -> _Items:
    """Return the items of all processes, in the order of their places. Collective.

    Args:
        processes: Those that make the call together.
        name: Name of the vectors, for messages.
        labels_name: Name of the labels, for messages.
        rows: Vectors of this process.
        labels: Their labels.
        places: Their indices among all; None if those of a process follow those of the one before.
        ids: Their ids; None if none were given, in any process.
    """
    vectors = as_tensor(rows, name, _CALL).cpu()
    items = len(vectors) if vectors.ndim else 0
    read = read_labels(labels, items, labels_name, name, _CALL)
    id_name = "ids" if name == "embeddings" else "bank_ids"
    codes = None if ids is None else check_labels(ids, items, id_name, name, _CALL)
    if processes.count == 1 and places is None:
        return _Items(vectors, read, codes)
    place = None if places is None else check_labels(places, items, "places", name, _CALL)
    if items and vectors.ndim != 2:
        raise ValueError(f"{_CALL} needs {name} of shape (items, dim); got shape {tuple(vectors.shape)}.")
    parts = processes.gather((vectors, read, codes, place))
    refuse_words_beside_integers(
        _CALL, {f"{labels_name} of process {rank}": part for rank, (_, part, *_) in enumerate(parts)}
    )
    filled = {rank: part for rank, (part, *_) in enumerate(parts) if len(part)}
    if not filled:
        raise ValueError(f"{_CALL}: {name} is empty (shape (0, 0)) in every process. Pass at least one item.")
    refuse_other_dims(_CALL, name, {rank: part.shape[1] for rank, part in filled.items()})
    label_codes = torch.cat([part.codes for _, part, *_ in parts])
    words = merged_books((part.words for _, part, *_ in parts), _CALL)
    whole = _Items(
        torch.cat([*filled.values()]),
        Labels(label_codes, words),
        None if codes is None else torch.cat([of_part for *_, of_part, _ in parts if of_part is not None]),
    )
    given = [of_part for *_, of_part in parts if of_part is not None]
    if not given:
        return whole
    joined = torch.cat(given)
    check_places(_CALL, name, joined)
    return whole.only(joined.argsort())


class _Items(NamedTuple):
    """The queries, or the bank, of all processes."""

    rows: Tensor
    labels: Labels
    ids: Tensor | None

    def only(self, index: Int[Tensor, "chosen"]) -> _Items:
        """Return the items with these indices, in their order."""
        return _Items(self.rows[index], self.labels[index], None if self.ids is None else self.ids[index])


def _counted(items: _Items) -> tuple[_Items, list[str]]:
    """Return the first item of each id, and notes where an id is that of several items."""
    if items.ids is None or items.rows.ndim != 2:  # `compared_sets` refuses another shape
        return items, []
    first = first_of_each(items.ids)
    if len(first) == len(items.ids):
        return items, []
    note = note_on_ids(items.ids, items.labels.codes, sketches(items.rows))
    return items.only(first), [] if note is None else [note]


def _places_of(ids: Tensor | None, others: Tensor | None, number: int) -> Int[Tensor, "queries"]:
    """Return the place of each id among others; -1 where it is not there, or none are given."""
    if ids is None or others is None:
        return torch.full((number,), -1)
    ordered, order = others.sort()
    at = torch.searchsorted(ordered, ids).clamp(max=len(others) - 1)
    return torch.where(ordered[at] == ids, order[at], -1)


def _cure(bank: Any) -> str:
    if bank is None:
        return "pass ids=, which names each item, and the first of each is counted"
    return "leave out the bank if it holds the queries, or pass ids= and bank_ids=, so that no item votes for itself"


@dataclass(frozen=True)
class NeighbourSearch:
    """Finds who votes for whom.

    Attributes:
        rows: (queries, dim).
        bank: (bank, dim) items; None for the queries themselves.
        classes: Of the queries, numbered from 0 on with those of the bank.
        of_bank: Classes of the bank.
        itself: Index of the item of the bank that each query is, and that does not vote for it; -1 for none.
        similarity: How they are compared.
        memory: Budget of a search, in bytes.
    """

    rows: Tensor
    bank: Tensor | None
    classes: Int[np.ndarray, "queries"]
    of_bank: Int[np.ndarray, "bank"]
    itself: Int[np.ndarray, "queries"]
    similarity: Similarity
    memory: float

    def copies(self) -> Copies:
        """Return the copies of each query in the bank."""
        bank = self.rows if self.bank is None else self.bank
        places = np.arange(len(bank))
        dtype = torch.promote_types(self.rows.dtype, bank.dtype)
        queries = Side(hashes_of(self.rows, dtype), self.classes)
        own, as_codes = (bank, places), self.similarity == "hamming"
        if self.bank is None:
            return Copies.among(queries, queries, self.itself, [], own, ALONE, as_codes=as_codes)
        items = Side(hashes_of(bank, dtype), self.of_bank)
        return Copies.among(queries, items, None, [(self.itself, places)], own, ALONE, as_codes=as_codes)

    def hits(
        self, queries: Int[np.ndarray, "queries"], ks: list[int], temperature: float | None
    ) -> dict[str, Float[np.ndarray, "queries"]]:
        """Return the value of each of some queries, by metric."""
        out = {f"knn@{k}{name}": np.zeros(len(queries)) for k in ks for name in PLACES}
        if not out or not len(queries):
            return out
        with computing() as threads:
            vectors = Vectors(self.rows, self.bank, self.similarity, threads=threads)
            # equal rows of one class have equal values: a model that has collapsed is not searched for each of its items
            alike = vectors.pairs.query_first_duplicate[queries] * (self.classes.max() + 1) + self.classes[queries]
            if self.bank is not None:  # what does not vote for one of them may vote for another
                alike = alike * (len(self.of_bank) + 1) + self.itself[queries] + 1
            _, first, back = np.unique(alike, return_index=True, return_inverse=True)
            for some, votes in self.votes(vectors, queries[first], max(ks)):
                for key, of_some in _hits(votes, self.classes[queries[first][some]], ks, temperature).items():
                    out[key][some] = of_some
        return {key: values[back] for key, values in out.items()}

    def votes(
        self, vectors: Vectors, queries: Int[np.ndarray, "queries"], k: int
    ) -> Iterator[tuple[Int[np.ndarray, "some"], Votes]]:
        """Yield some of the queries, by index, and their neighbours, with all that are as near as the k-th.

        Equal rows of the bank are searched once. Where more than k rows tie, a second search has room for all of them.
        """
        distinct, row = np.unique(vectors.pairs.gallery_first_duplicate, return_inverse=True)
        places = slice(None) if len(distinct) == len(row) else distinct
        names = int(self.of_bank.max()) + 1
        pairs, count = np.unique(row * names + self.of_bank, return_counts=True)
        of_row, voted = np.divmod(pairs, names)
        start = np.searchsorted(of_row, np.arange(len(distinct) + 1))
        alone, most = np.bincount(row) == 1, int(np.diff(start).max())
        item = self.itself[queries]
        own = np.where((item >= 0) & alone[row[item]], row[item], -1)
        todo, room, step = np.arange(len(queries)), k, len(queries)
        while len(todo):
            beyond = np.zeros(len(queries), np.int64)
            for part in _split(todo, step):
                found, scores, beyond[part] = search(
                    vectors, queries[part], places, own[part], [], min(room, len(distinct)), self.memory
                )
                for some in _split(np.flatnonzero(beyond[part] == 0), VOTES_AT_ONCE // min(len(pairs), room * most)):
                    there = found[some] >= 0
                    query, near = np.nonzero(there)[0], found[some][there]
                    length = np.diff(start)[near]
                    at = np.repeat(start[near] - np.cumsum(length) + length, length) + np.arange(length.sum())
                    query, items = np.repeat(query, length), count[at]
                    itself = item[part[some]][query]
                    is_own = (of_row[at] == row[itself]) & (voted[at] == self.of_bank[itself])
                    items = items - (is_own & (itself >= 0))
                    score = np.repeat(scores.numpy()[some][there], length)
                    yield part[some], Votes(query, of_row[at], voted[at], score, items)
            todo, room = np.flatnonzero(beyond), room + int(beyond.max())
            step = VOTES_AT_ONCE // room


def _split(index: Int[np.ndarray, "queries"], step: int) -> list[Int[np.ndarray, "_"]]:
    """Split queries into parts."""
    step = max(1, step)
    return [index[first : first + step] for first in range(0, len(index), step)]


def _hits(
    votes: Votes, own: Int[np.ndarray, "queries"], ks: list[int], temperature: float | None
) -> dict[str, Float[np.ndarray, "queries"]]:
    """Return of each query with votes the share of the orders of ties in which its own class is among the first."""
    query, score, weight = votes.query, votes.score, np.ones(len(votes.query))
    if temperature is not None:
        weight = np.exp((score - score[votes.begins][query]) / temperature)  # at most 1: nothing overflows
    classes = int(max(own.max(), votes.voted.max())) + 1
    named, ballot = np.unique(query * classes + votes.voted, return_inverse=True)
    voter = named // classes
    wanted = np.arange(len(own)) * classes + own
    place = np.minimum(np.searchsorted(named, wanted), len(named) - 1)
    has = named[place] == wanted
    found = {}
    for k, portion in zip(ks, votes.portions(ks), strict=True):
        total = np.bincount(ballot, portion * votes.items * weight)
        mine = np.where(has, total[place], 0.0)
        more = np.bincount(voter, total > mine[voter] * (1 + SAME), len(own))
        equal = np.bincount(voter, np.abs(total - mine[voter]) <= mine[voter] * SAME, len(own))
        for name, first in PLACES.items():
            found[f"knn@{k}{name}"] = np.where(mine > 0, np.clip((first - more) / np.maximum(equal, 1), 0, 1), 0.0)
    return found
