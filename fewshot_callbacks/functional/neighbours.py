"""The nearest candidates of each query, and all pairs whose similarity reaches a threshold, by exact scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.nearest import NearestItems, nearest_items, pairs_from, queries_at_once
from fewshot_callbacks.engine.options import Progress, computing, part_of_progress
from fewshot_callbacks.engine.scale import Floats, check_similarity
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.journal import recorded_result
from fewshot_callbacks.functional._reading import (
    as_tensor,
    check_embeddings,
    computable,
    default_mode,
    signs,
    tensor_code,
)
from fewshot_callbacks.functional._table import SHOWN_ROWS, table
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import EVERYTHING, ItemSets, Rules, Share
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.settings import LARGEST_RANK, Similarity
from fewshot_callbacks.system.words import counted, none_has

# Number of neighbours per query that `print` shows.
SHOWN_NEIGHBOURS = 5
# Bytes per query outside the current batch: its norm, its place and its first duplicate.
UNSEARCHED_BYTES = 40
# The public function, for messages.
_CALL = "nearest"


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The result of `nearest`: the k nearest candidates of each query, nearest first.

    `print` shows a table. Candidates with equal scores are ordered by index.

    Attributes:
        query_indices: (queries,) index of each query among all queries.
        indices: (queries, k) gallery index of each neighbour; -1 if a query has fewer than k candidates.
        scores: (queries, k) exact similarity of each neighbour, in the units of the data; minus the distance for
            `euclidean`. NaN if there is no neighbour.
        tied: (queries, k) whether another candidate of the query, listed or not, has the same score, so that the order
            of the two is arbitrary.
        unlisted_ties: (queries,) number of candidates that tie with the last neighbour and are not listed, only because
            their index is higher.
        relevant: (queries, k) whether the neighbour has the label of the query; False if there is no neighbour. None
            without labels.

    Examples:
        >>> import torch
        >>> found = nearest(torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 1.0]]), ["owl", "owl", "heron"], k=1)
        >>> print(found)
        3 queries with 1 neighbour each, and the score of each in brackets; * has the query's label
        query            1
            0  1* (1.0000)
            1  0* (1.0000)
            2   0 (0.7071)
        >>> found.first_relevant
        tensor([1, 1, 0])
    """

    query_indices: Int[Tensor, "queries"]
    indices: Int[Tensor, "queries k"]
    scores: Float[Tensor, "queries k"]
    tied: Bool[Tensor, "queries k"]
    unlisted_ties: Int[Tensor, "queries"]
    relevant: Bool[Tensor, "queries k"] | None = None

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.query_indices)

    def __str__(self) -> str:
        """Return a table of the first queries, with their nearest neighbours and scores."""
        k = self.indices.shape[1]
        columns = min(k, SHOWN_NEIGHBOURS)
        rows = []
        for row, query in enumerate(self.query_indices.tolist()[:SHOWN_ROWS]):
            rows.append((str(query), *(self._cell(row, rank) for rank in range(columns))))
        head = f"{counted(len(self), 'query')} with {counted(k, 'neighbour')} each, and the score of each in brackets"
        if k > SHOWN_NEIGHBOURS:
            head += f"; the first {SHOWN_NEIGHBOURS} are shown"
        if self.relevant is not None:
            head += "; * has the query's label"
        ranks = [str(rank) for rank in range(1, 1 + columns)]
        return "\n".join([head, *table(("query", *ranks), rows, len(self))])

    def _cell(self, row: int, rank: int) -> str:
        """Return the table cell of a neighbour, with its score."""
        item = int(self.indices[row, rank])
        if item < 0:
            return "-"
        is_relevant = self.relevant is not None and bool(self.relevant[row, rank])
        mark = "*" if is_relevant else ""
        return f"{item}{mark} ({float(self.scores[row, rank]):.4f})"

    def __repr__(self) -> str:
        return str(self)

    @property
    def found(self) -> Int[Tensor, "queries"]:
        """(queries,) number of neighbours of each query: k, or the number of its candidates if it has fewer."""
        return (self.indices >= 0).sum(dim=1)

    @property
    def first_relevant(self) -> Int[Tensor, "queries"]:
        """(queries,) rank of the first relevant neighbour, from 1; 0 if none of the k neighbours is relevant.

        Raises:
            ValueError: If `nearest` was called without labels.
        """
        if self.relevant is None:
            raise InputError(
                "Neighbours.first_relevant needs labels. Pass query_labels= to nearest, and gallery_labels= if there "
                "is a gallery."
            )
        rank = self.relevant.long().argmax(dim=1) + 1
        return torch.where(self.relevant.any(dim=1), rank, 0)


@default_mode()
def nearest(
    queries: Any,
    query_labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    query_indices: Any | None = None,
    k: int = 10,
    similarity: Similarity = "cosine",
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    memory_mb: float | None = None,
    progress: Progress | None = None,
    share: Share = EVERYTHING,
) -> Neighbours:
    """Return the k most similar candidates of each query, exactly and within a memory limit. *Collective*.

    The candidates and their exact scores are the same as in `evaluate_retrieval` (docs/research/exactness.md). Without a
    gallery, all other items are candidates; with a gallery, its items are. Ids and groups exclude some of them. Fast
    products with a proven error bound rule out candidates that cannot be among the first k, and exact scores order the
    remaining candidates. Equal scores are ordered by index and marked as tied.

    Args:
        queries: (queries, dim) finite floating-point rows of any scale. For `hamming`, codes of -1 and +1, or of 0 and 1.
            `Shards` bring their own labels, ids and groups.
        query_labels: (queries,) integers or strings. Without labels, `relevant` of the result is None.
        gallery: (gallery, dim) items to search; by default the queries themselves.
        gallery_labels: (gallery,) label of each gallery item; required if you pass both `query_labels` and `gallery`.
        query_indices: Indices of the queries to search for, in any order, or a mask; by default all queries.
        k: Number of neighbours, at least 1.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.
        query_ids: (queries,) id of each query, if some queries are repeated. By default, only the first query of each id is
            searched for. Without a gallery, only the first item of each id is a candidate, and no query finds its own id.
            With `gallery_ids`, a query does not find its own copy in the gallery.
        gallery_ids: (gallery,) id of each gallery item. Only the first item of each id is a candidate.
        query_groups: (queries,) group of each query. Items of its own group are not candidates of a query.
        gallery_groups: (gallery,) group of each gallery item. Without a gallery, `query_groups` is used for both.
        memory_mb: Memory limit in MB, in addition to the embeddings and the result; None is 512. Binary codes take 4 extra
            bytes per bit. A gallery in files (`Shards`) is read in chunks, and queries are searched in batches, that fit
            into this limit.
        progress: Function of (pairs done, all pairs).
        share: The part of the queries and of the gallery that this process has, if several processes make the call
            together. The gallery is exchanged in chunks, and every process returns the neighbours of all queries.

    Returns:
        A frozen result on the CPU. If a query has fewer than k candidates, the missing indices are -1 and the missing
        scores are NaN.

    Raises:
        ValueError: If shapes or types do not fit, embeddings contain NaN or Inf, k < 1, an index is out of range,
            `gallery_ids` or `gallery_groups` are passed without a gallery, no query has a candidate, or the processes pass
            different arguments. Every process raises the same error.

    Examples:
        >>> import torch
        >>> embeddings = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
        >>> found = nearest(embeddings, ["owl", "owl", "heron", "heron"], query_indices=[0, 3], k=2)
        >>> found.indices
        tensor([[1, 2],
                [2, 0]])
        >>> found.scores.float()
        tensor([[1.0000, 0.7071],
                [0.7071, 0.0000]])
        >>> found.unlisted_ties  # item 1 is as far from item 3 as item 0
        tensor([0, 1])
    """
    with share.processes.together():
        k = positive_whole(_CALL, "k", k, "Pass the number of neighbours, such as 10.")
        memory = memory_bytes(_CALL, memory_mb)
        columns = {"query_labels": query_labels, "gallery_labels": gallery_labels}
        columns |= {"query_ids": query_ids, "gallery_ids": gallery_ids}
        columns |= {"query_groups": query_groups, "gallery_groups": gallery_groups}
        arguments: dict[str, object] = {"k": k, "similarity": similarity, "memory_mb": memory_mb, "query_indices": None}
        if share.processes.count > 1 and query_indices is not None:
            arguments["query_indices"] = as_tensor(query_indices, "query_indices", _CALL).tolist()
        share.refuse_other_settings(_CALL, arguments)
        choose = partial(chosen_indices, _CALL, "query_indices", query_indices, of="queries")
        sets = read_items(
            _CALL,
            queries,
            gallery,
            columns,
            share=share,
            similarity=similarity,
            memory=memory,
            choose=None if query_indices is None else choose,
        )
        found = search_of_all(_CALL, sets, k, progress)
    return as_neighbours(sets, found, None if query_indices is None else choose(sets.queries.given))


def as_neighbours(sets: ItemSets, found: NearestItems, asked: Int[Tensor, "chosen"] | None) -> Neighbours:
    """Return the neighbours of all queries, with indices among the items that the caller passed.

    `found` has the places of the candidates of all queries. `asked` has the queries that the caller chose, in this
    order; None for all.
    """
    items = sets.queries
    places, scores, unlisted_ties = map(torch.from_numpy, found)
    relevant = None
    if "labels" in items.columns:
        relevant = (places >= 0) & (sets.gallery.labels[places] == items.labels[:, None])
    of_query: Any = slice(None)  # without a copy
    index = items.to_origins(torch.arange(items.length))
    if asked is not None:
        of_query = torch.searchsorted(index, asked)
        index = asked
    return Neighbours(
        query_indices=index,
        indices=sets.gallery.to_origins(places)[of_query],
        scores=scores[of_query],
        tied=are_tied(scores, unlisted_ties)[of_query],
        unlisted_ties=unlisted_ties[of_query],
        relevant=None if relevant is None else relevant[of_query],
    )


def are_tied(scores: Float[Tensor, "queries k"], unlisted_ties: Int[Tensor, "queries"]) -> Bool[Tensor, "queries k"]:
    """Return whether another candidate has the same score.

    Scores are descending for each query. `unlisted_ties` is the number of unlisted candidates with the last score.
    """
    equals_next = scores[:, 1:] == scores[:, :-1]
    no_neighbour = torch.zeros(len(scores), 1, dtype=torch.bool)
    tied = torch.cat([equals_next, no_neighbour], dim=1) | torch.cat([no_neighbour, equals_next], dim=1)
    return tied | ((scores == scores[:, -1:]) & (unlisted_ties > 0)[:, None])


# Similarity -> lowest and highest threshold, and what to pass instead of another threshold.
_RANGES = {
    "cosine": (-1.0, 1.0, "Pass a cosine in [-1, 1], such as 0.98."),
    "dot": (-math.inf, math.inf, "Pass a finite dot product."),
    "euclidean": (-math.inf, 0.0, "Scores are minus the distance. For pairs at most 0.1 apart, pass -0.1."),
    "hamming": (-math.inf, 0.0, "Scores are minus the number of differing bits. For at most two bits, pass -2."),
}


@dataclass(frozen=True, eq=False)
class NearDuplicates:
    """The result of `near_duplicates`: pairs with a score of at least `min_score`, the highest first, then by index.

    Attributes:
        first: (pairs,) index of the query; within one set, the smaller index of the pair.
        second: (pairs,) index of the gallery item; within one set, the larger index of the pair.
        scores: (pairs,) exact similarity of each pair, in the units of the data; minus the distance for `euclidean`.
        total: Exact number of pairs that reach the threshold, listed or not.
        min_score: The threshold.

    Examples:
        >>> import torch
        >>> pairs = near_duplicates(torch.tensor([[1.0, 0.0], [1.0, 0.01], [1.0, 0.02]]), most=1)
        >>> print(pairs)
        3 pairs with a score of at least 0.98 (1 listed)
        first  second   score
            1       2  1.0000
        >>> pairs.unlisted_pairs
        2
    """

    first: Int[Tensor, "pairs"]
    second: Int[Tensor, "pairs"]
    scores: Float[Tensor, "pairs"]
    total: int
    min_score: float

    def __len__(self) -> int:
        """Return the number of listed pairs."""
        return len(self.first)

    def __str__(self) -> str:
        """Return a table of the pairs with the highest scores, and the number of all pairs."""
        head = f"{counted(self.total, 'pair')} with a score of at least {self.min_score:g}"
        if self.unlisted_pairs:
            head += f" ({len(self):,} listed)"
        if not len(self):
            return head
        first_rows = slice(SHOWN_ROWS)
        columns = (self.first[first_rows].tolist(), self.second[first_rows].tolist(), self.scores[first_rows].tolist())
        rows = [(str(first), str(second), f"{score:.4f}") for first, second, score in zip(*columns, strict=True)]
        return "\n".join([head, *table(("first", "second", "score"), rows, len(self))])

    def __repr__(self) -> str:
        return str(self)

    @property
    def unlisted_pairs(self) -> int:
        """Number of pairs that reach the threshold but are not listed. None of them scores higher than a listed pair."""
        return self.total - len(self)


@default_mode()
def near_duplicates(
    queries: Any,
    gallery: Any | None = None,
    *,
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    min_score: float = 0.98,
    similarity: Similarity = "cosine",
    most: int = 100_000,
    memory_mb: float | None = None,
    progress: Progress | None = None,
    share: Share = EVERYTHING,
) -> NearDuplicates:
    """Return all pairs with a similarity of at least `min_score`, within one set or between two. *Collective*.

    The two sets may be two splits, such as training and test. The result is exact in the sense of
    docs/research/exactness.md, and no matrix of all similarities is computed. Low-precision products (bytes on a CPU,
    float16 on a GPU) rule out most pairs, and exact scores decide the remaining pairs. Within one set, each pair is
    computed once.

    Args:
        queries: (queries, dim) finite floating-point rows of any scale. For `hamming`, codes of -1 and +1, or of 0 and 1.
            `Shards` bring their own ids and groups.
        gallery: (gallery, dim) a second set; by default, pairs within the queries are searched.
        query_ids: (queries,) id of each query, if some queries are repeated. Only the first query of each id is compared.
        gallery_ids: (gallery,) id of each gallery item, likewise. A query and a gallery item with the same id are not
            a pair.
        query_groups: (queries,) group of each query, such as its video. Two items of one group are not a pair.
        gallery_groups: (gallery,) group of each gallery item. Without a gallery, `query_groups` is used for both.
        min_score: The lowest score of a pair, in the units of the data. The score of a duplicate depends on the embedding,
            so look at some pairs around the threshold.
        similarity: `cosine`, `dot`, `euclidean` (minus the distance) or `hamming` (minus the number of differing bits).
        most: Largest number of listed pairs. The pairs with the highest scores are listed, and all pairs are counted. A
            listed pair takes 24 bytes, and a few times as much during the search.
        memory_mb: Memory limit in MB, in addition to the embeddings and the pairs; None is 512.
        progress: Function of (pairs done, all pairs).
        share: The part of the queries and of the gallery that this process has, if several processes make the call
            together. A process lists at most `most` pairs of its own queries, and returns the pairs of all processes.

    Returns:
        A frozen result on the CPU. Its tensors are empty if no pair reaches the threshold.

    Raises:
        ValueError: If shapes or types do not fit, a row contains NaN or Inf, `min_score` is outside the range of the
            similarity, `most` < 0, there is no gallery and only one item, `gallery_ids` or `gallery_groups` are passed
            without a gallery, or the processes pass different arguments. Every process raises the same error.

    Examples:
        >>> import torch
        >>> train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.05]])
        >>> pairs = near_duplicates(train)
        >>> pairs.first, pairs.second, round(pairs.scores.item(), 4)
        (tensor([0]), tensor([2]), 0.9988)
        >>> near_duplicates(train, torch.tensor([[0.0, 2.0]]), min_score=1.0).first
        tensor([1])
    """
    call = "near_duplicates"
    with share.processes.together():
        most = positive_whole(call, "most", most, "Pass 0 to only count pairs.", least=0, most=None)
        memory = memory_bytes(call, memory_mb)
        check_similarity(similarity)
        threshold = score_threshold(call, min_score, similarity)
        arguments = {"min_score": threshold, "similarity": similarity, "most": most, "memory_mb": memory_mb}
        share.refuse_other_settings(call, arguments)
        columns = {"query_ids": query_ids, "gallery_ids": gallery_ids}
        columns |= {"query_groups": query_groups, "gallery_groups": gallery_groups}
        sets = read_items(
            call, queries, gallery, columns, share=share, similarity=similarity, memory=memory, labelled=False
        )
        if sets.same_set and sets.queries.length == 1:
            raise InputError(
                f"{call}: a single item has no pair. Pass more items as queries, or a second set as gallery."
            )
        rules = sets.rules()
        with computing() as threads:
            vectors = sets.vectors(threads)
            pairs, total = pairs_from(
                vectors,
                rules.self_match,
                rules.codes,
                float(vectors.scale.from_user(threshold)),
                most,
                memory,
                (sets.queries.places.numpy(), rules.places),
                same_set=sets.same_set,
                progress=progress,
            )
    return NearDuplicates(
        first=sets.queries.to_origins(torch.from_numpy(pairs.queries)),
        second=sets.gallery.to_origins(torch.from_numpy(pairs.items)),
        scores=scores_of(vectors, pairs.scores),
        total=total,
        min_score=threshold,
    )


def score_threshold(call: str, min_score: Any, similarity: Similarity) -> float:
    """Return the threshold as a float."""
    low, high, fix = _RANGES[similarity]
    try:
        threshold = float(min_score)
    except (TypeError, ValueError):
        threshold = math.nan  # refused below
    if not (low <= threshold <= high and math.isfinite(threshold)):
        raise InputError(f"{call}: min_score={min_score!r} is outside the range of {similarity} scores. {fix}")
    return threshold


# ------------------------------------------------------------------------------- shared with other functions on neighbours


def compared_vectors(call: str, name: str, value: Any, similarity: Similarity, code: str | None = None) -> Tensor:
    """Return the vectors of an argument, or its codes of -1 and +1, in a type that can be compared."""
    check_similarity(similarity)
    vectors = as_tensor(value, name, call).cpu()
    code = code or tensor_code(name, value)
    if similarity == "hamming":
        return signs(vectors, name, call, name if hasattr(value, "__array__") else code)
    check_embeddings(vectors, name, call, code)
    return computable(vectors)


def scores_of(vectors: Vectors, scores: Floats) -> Float[Tensor, "*shape"]:
    """Return exact scores in the units of the data; NaN for -inf."""
    return torch.from_numpy(np.where(np.isinf(scores), np.nan, vectors.scale.to_user(scores)))


def search(vectors: Vectors, rules: Rules, k: int, memory: float, progress: Progress | None = None) -> NearestItems:
    """Return places and scores of the first k candidates of each query of this process. *Collective*.

    Scores are in the units of the data. A missing candidate has the place -1 and the score NaN. The memory budget does not
    include the result.

    `memory` is in bytes.
    """
    queries = len(rules.self_match)
    found = NearestItems(np.empty((queries, k), np.int64), np.empty((queries, k)), np.empty(queries, np.int64))
    for batch, of_batch in found_in_batches(vectors, rules, np.arange(queries), k, memory, progress=progress):
        if len(batch) == queries:
            found = of_batch
            continue
        for joined, values in zip(found, of_batch, strict=True):
            joined[batch] = values
        del of_batch, values  # frees the memory before the next search
    return found


def found_in_batches(
    vectors: Vectors,
    rules: Rules,
    queries: Int[np.ndarray, "searched"],
    k: int,
    memory: float,
    *,
    most: int | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[Int[np.ndarray, "batch"], NearestItems]]:
    """Yield batches of queries of this process, each with what `search` finds for it. *Collective*.

    A batch has as many queries as the budget allows. All processes have the same number of batches, and some batches may
    be empty. A journal records the result of each batch.

    `memory` is in bytes. `most` is the largest number of queries per batch; None for as many as fit.
    """
    own = len(rules.self_match)
    at_once = queries_at_once(memory, k, vectors.scale.dim * vectors.pairs.queries.itemsize)
    if most is not None:
        at_once = min(at_once, most)
    [searched] = vectors.processes.largest([float(len(queries))])
    batches = np.array_split(queries, max(1, math.ceil(searched / at_once)))
    places = rules.places.astype(np.int32)
    for number, batch in enumerate(batches):
        left = memory - UNSEARCHED_BYTES * (own - len(batch))
        of_batch = part_of_progress(progress, number, len(batches))
        find = partial(_found, vectors, rules, batch, k, left, places, of_batch)
        yield batch, NearestItems(*recorded_result(find))


def _found(
    vectors: Vectors,
    rules: Rules,
    batch: Int[np.ndarray, "batch"],
    k: int,
    memory: float,
    places: NDArray[np.int32],
    progress: Progress | None,
) -> list[NDArray[Any]]:
    """Return what `search` finds for one batch of queries. *Collective*."""
    vectors, rules = _only(vectors, rules, batch)
    found = nearest_items(vectors, rules.self_match, rules.codes, k, memory, places, progress)
    return [found.items, scores_of(vectors, found.scores).numpy(), found.unlisted_ties]


def _only(vectors: Vectors, rules: Rules, queries: Int[np.ndarray, "batch"]) -> tuple[Vectors, Rules]:
    """Return some queries of this process, with the whole gallery and the rules for them."""
    if np.array_equal(queries, np.arange(len(rules.self_match))):
        return vectors, rules
    codes = [(of_queries[queries], of_items) for of_queries, of_items in rules.codes]
    # Not one set, because only the rules exclude items: a row that several items share is a candidate of itself.
    chosen = vectors.take(queries, slice(None), may_be_one_set=False)
    return chosen, rules._replace(self_match=rules.self_match[queries], codes=codes)


def search_of_all(call: str, sets: ItemSets, k: int, progress: Progress | None = None) -> NearestItems:
    """Return what `search` finds for the queries of all processes. *Collective*."""
    with computing() as threads:
        found = search(sets.vectors(threads), sets.rules(), k, sets.memory, progress)
    items = sets.queries
    of_all = NearestItems(*(items.of_all(sets.processes, torch.from_numpy(values.T)).numpy().T for values in found))
    if not (of_all.items >= 0).any():
        raise without_candidates(call, sets)
    return of_all


def without_candidates(call: str, sets: ItemSets) -> InputError:
    """Return the error for queries without any candidate."""
    fix = "Ids or groups exclude the whole gallery." if sets.exclusions() else "Pass a second item, or a gallery."
    return InputError(f"{call}: {none_has(sets.queries.length, 'query')} a candidate. {fix}")


def positive_whole(
    call: str, name: str, value: Any, fix: str, *, least: int = 1, most: int | None = LARGEST_RANK
) -> int:
    """Return a value of any library as a whole number.

    `fix` says what to pass instead. `least` and `most` are the bounds; None for no upper bound.
    """
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
    number = value.__index__() if is_whole else None
    if number is None or number < least:
        raise InputError(f"{call}: {name}={value!r} must be a whole number of at least {least}. {fix}")
    if most is not None and number > most:
        raise InputError(f"{call}: {name}={value!r} must be at most {most}. {fix}")
    return int(number)


def positive_number(call: str, name: str, value: Any, fix: str) -> float:
    """Return a value of any library as a positive, finite number; see `positive_whole` for the arguments."""
    is_scalar_array = hasattr(value, "item") and np.ndim(value) == 0
    number = value.item() if is_scalar_array else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not (is_number and 0 < number < math.inf):
        raise InputError(f"{call}: {name}={value!r} must be a positive number. {fix}")
    return float(number)


def chosen_indices(call: str, name: str, value: Any, items: int, of: str = "embeddings") -> Int[Tensor, "chosen"]:
    """Return the indices of the items that an argument chooses.

    `value` has indices, or is a mask of all items; None chooses all. `of` is the argument with the items.
    """
    if value is None:
        return torch.arange(items)
    index = as_tensor(value, name, call).cpu()
    if not index.numel():
        raise InputError(f"{call}: {name} is empty. Pass the index of at least one of the {items} {of}.")
    if index.ndim == 1 and index.dtype == torch.bool and len(index) == items:
        index = index.nonzero().flatten()
    if index.ndim != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise InputError(
            f"{call}: {name} must be one-dimensional integers, the indices of {of}, or a mask of all {items} items; got "
            f"{index.dtype} of shape {tuple(index.shape)}. Pass a list of indices, such as [0, 5]."
        )
    index = index.long()
    out_of_range = index[(index < 0) | (index >= items)]
    if len(out_of_range):
        raise InputError(
            f"{call}: {name} contains {int(out_of_range[0])}, but {of} has {items} items. Pass indices from 0 to "
            f"{items - 1}."
        )
    if not len(index):
        raise InputError(f"{call}: {name} chooses none of the {items} {of}. Pass at least one index.")
    return index
