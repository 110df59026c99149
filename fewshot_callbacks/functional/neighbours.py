"""The first candidates of each query, and all pairs whose similarity reaches a threshold, by exact scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.nearest import nearest_items, pairs_from
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.vectors import Floats, Vectors, check_similarity
from fewshot_callbacks.functional._labels import (
    Labels,
    encode,
    exclusion_codes,
    read_labels,
)
from fewshot_callbacks.functional._reading import (
    as_tensor,
    check_embeddings,
    computable,
    default_mode,
    signs,
    tensor_code,
)
from fewshot_callbacks.functional._repeated import first_of_each
from fewshot_callbacks.functional._table import SHOWN_ROWS, table
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.settings import LARGEST_RANK, Similarity

# Neighbours of a query that `print` shows.
SHOWN_NEIGHBOURS = 5
# The public function, for messages.
_CALL = "nearest"


@dataclass(frozen=True, eq=False)
class Neighbours:
    """The k nearest candidates of each query, the closest first; candidates with equal scores are ordered by index.

    Examples:
        >>> import torch
        >>> found = nearest(torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 1.0]]), ["owl", "owl", "heron"], k=1)
        >>> found.indices.flatten(), found.first_relevant
        (tensor([1, 0, 0]), tensor([1, 1, 0]))
    """

    query_indices: Int[Tensor, "queries"]
    """index of each query among all queries"""
    indices: Int[Tensor, "queries k"]
    """index of each neighbour in the gallery; -1 where a query has fewer than k candidates"""
    scores: Float[Tensor, "queries k"]
    """exact similarity of each neighbour, in the units of the data: for `euclidean` minus the distance; NaN where there
    is no neighbour"""
    tied: Bool[Tensor, "queries k"]
    """whether another candidate of the query, listed or not, has the same score, so that their order is arbitrary"""
    left_out: Int[Tensor, "queries"]
    """number of candidates that have the same score as the last neighbour and are not listed only because of their
    index"""
    relevant: Bool[Tensor, "queries k"] | None = None
    """whether each neighbour has the query's label, False where there is no neighbour; None without labels"""

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.query_indices)

    def __str__(self) -> str:
        """Return a table of the first queries with their neighbours, the closest first, and the score of each."""
        k = self.indices.shape[1]
        columns = min(k, SHOWN_NEIGHBOURS)
        rows = []
        for row, query in enumerate(self.query_indices.tolist()[:SHOWN_ROWS]):
            rows.append((str(query), *(self._cell(row, rank) for rank in range(columns))))
        head = f"{len(self):,} queries with {k:,} neighbours each, and the score of each in brackets"
        if k > SHOWN_NEIGHBOURS:
            head += f"; the first {SHOWN_NEIGHBOURS} are shown"
        if self.relevant is not None:
            head += "; * has the query's label"
        ranks = [str(rank) for rank in range(1, 1 + columns)]
        return "\n".join([head, *table(("query", *ranks), rows, len(self))])

    def _cell(self, row: int, rank: int) -> str:
        """Return a neighbour with its score, as it stands in a table."""
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
        """Number of neighbours of each query: k, or fewer if it has fewer candidates."""
        return (self.indices >= 0).sum(dim=1)

    @property
    def first_relevant(self) -> Int[Tensor, "queries"]:
        """Rank of the first relevant neighbour, from 1; 0 where none of the k is relevant.

        Raises:
            ValueError: If the neighbours were searched without labels.
        """
        if self.relevant is None:
            raise ValueError("Neighbours.first_relevant needs labels. Pass them to nearest.")
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
) -> Neighbours:
    """Find the k most similar candidates of each query, exactly and in bounded memory.

    Candidates and their exact scores are those of `evaluate_retrieval` (docs/exactness.md): with one set, all other
    items; with a gallery, its items; in both cases without those that ids and groups exclude. Fast products with a
    proved error bound only rule out candidates that cannot be among the first k; exact scores order the rest. Equal
    scores are ordered by index and marked as tied.

    Args:
        queries: (queries, dim) finite floating-point rows of any scale; for `hamming` codes of -1 and +1, or 0 and 1.
        query_labels: (queries,) integers or strings; without them, `relevant` is None.
        gallery: (gallery, dim) items to search; by default the queries themselves.
        gallery_labels: (gallery,) labels of the gallery items; needed if both `query_labels` and `gallery` are given.
        query_indices: Indices of the queries that are searched for, in any order, or a mask; by default all.
        k: Number of neighbours, at least 1.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.
        query_ids: (queries,) identity of each query, where some come several times: by default the first of each id is a
            query. With one set, the first of each id is a candidate, and no query finds an item of its own id. With
            `gallery_ids`, a query's own copy in the gallery is not a candidate.
        gallery_ids: (gallery,) identity of each gallery item. The first item of each id is a candidate.
        query_groups: (queries,) group of each query; candidates of the query's own group are left out.
        gallery_groups: (gallery,) group of each gallery item; with one set, `query_groups` is used for both.
        memory_mb: Bound on the memory beyond embeddings and result, in MB; None is 512. Binary codes take 4 bytes more
            per bit.

    Returns:
        A frozen result on the CPU; -1 and NaN where a query has fewer than k candidates.

    Raises:
        ValueError: If shapes or types do not fit, embeddings hold NaN or Inf, k < 1, an index is out of range,
            `gallery_ids` are given without a gallery, or no query has a candidate.

    Examples:
        >>> import torch
        >>> embeddings = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
        >>> found = nearest(embeddings, ["owl", "owl", "heron", "heron"], query_indices=[0, 3], k=2)
        >>> found.indices
        tensor([[1, 2],
                [2, 0]])
        >>> found.relevant
        tensor([[ True, False],
                [ True, False]])
        >>> found.left_out  # 1 is as far from 3 as 0 is
        tensor([0, 1])
    """
    k = positive_whole(_CALL, "k", k, "Pass the number of neighbours, such as 10.")
    memory = memory_bytes(_CALL, memory_mb)
    rows, gallery_rows = compared_sets(_CALL, queries, gallery, similarity)
    sizes = (len(rows), len(rows) if gallery_rows is None else len(gallery_rows))
    exclusions = {"query_ids": query_ids, "gallery_ids": gallery_ids}
    exclusions |= {"query_groups": query_groups, "gallery_groups": gallery_groups}
    rules = _read_rules(exclusions, sizes, one_set=gallery is None)
    index = rules.chosen_queries(query_indices, len(rows))
    labels = _read_labels(query_labels, gallery, gallery_labels, sizes)
    indices, scores, unlisted_ties = _search_candidates(rows, gallery_rows, similarity, rules, index, k, memory)
    return Neighbours(
        query_indices=index,
        indices=indices,
        scores=scores,
        tied=_tied(scores, unlisted_ties),
        left_out=unlisted_ties,
        relevant=None if labels is None else labels.are_equal(index, indices),
    )


def _search_candidates(
    rows: Tensor,
    gallery_rows: Tensor | None,
    similarity: Similarity,
    rules: _Rules,
    index: Int[Tensor, "queries"],
    k: int,
    memory: float,
) -> tuple[Int[Tensor, "queries k"], Float[Tensor, "queries k"], Int[Tensor, "queries"]]:
    """Return the gallery indices of the first k candidates of some queries, their scores, and how many more tie.

    Args:
        rows: (all queries, dim).
        gallery_rows: (gallery, dim); None for one set.
        similarity: How they are compared.
        rules: Which items are candidates.
        index: Index of each query that is searched for.
        k: Number of candidates.
        memory: Budget in bytes.
    """
    if gallery_rows is None:
        query_rows = index.numpy()
        self_match = rules.self_matches(index)
    else:
        rows = rows[index]
        query_rows = np.arange(len(index))
        self_match = np.full(len(index), -1)
    exclusions = rules.exclusions_of(index)
    with computing() as threads:
        vectors = Vectors(rows, gallery_rows, similarity, threads=threads)
        positions, scores, unlisted_ties = search(
            vectors, query_rows, rules.candidates(), self_match, exclusions, k, memory
        )
    if not bool((positions >= 0).any()):
        fix = "Ids or groups exclude the whole gallery." if exclusions else "Pass a second item, or a gallery."
        raise ValueError(f"{_CALL}: none of the {len(index)} queries has a candidate. {fix}")
    indices = rules.gallery_indices(torch.from_numpy(positions).long())
    return indices, scores, torch.from_numpy(unlisted_ties)


class _LabelCodes(NamedTuple):
    """The labels of queries and gallery items as numbers."""

    queries: Int[Tensor, "queries"]
    gallery: Int[Tensor, "gallery"]

    def are_equal(
        self, index: Int[Tensor, "queries"], neighbours: Int[Tensor, "queries k"]
    ) -> Bool[Tensor, "queries k"]:
        """Return whether each neighbour has the label of its query; False for -1, no neighbour.

        Args:
            index: Index of each query among all.
            neighbours: Gallery index of each neighbour.
        """
        return (neighbours >= 0) & (self.gallery[neighbours] == self.queries[index][:, None])


def _read_labels(query_labels: Any, gallery: Any, gallery_labels: Any, sizes: tuple[int, int]) -> _LabelCodes | None:
    """Return the labels of queries and gallery items as numbers; None without labels.

    Args:
        query_labels: Labels of the queries.
        gallery: None for one set.
        gallery_labels: Labels of the gallery items.
        sizes: Number of queries and of gallery items.
    """
    if (gallery_labels is not None) != (query_labels is not None and gallery is not None):
        raise ValueError(
            f"{_CALL}: query_labels, gallery and gallery_labels do not fit together. With a gallery, pass both query_labels "
            "and gallery_labels, or neither. Without a gallery, pass query_labels alone."
        )
    if query_labels is None:
        return None
    of_queries: Labels = read_labels(query_labels, sizes[0], "query_labels", "queries", _CALL)
    if gallery is None:
        codes = of_queries.codes
        return _LabelCodes(codes, codes)
    of_items = read_labels(gallery_labels, sizes[1], "gallery_labels", "gallery items", _CALL)
    [query_codes, item_codes], _ = encode(_CALL, {"query_labels": of_queries, "gallery_labels": of_items})
    return _LabelCodes(query_codes, item_codes)


class _Rules(NamedTuple):
    """Ids and groups: which items are candidates, and for whom they are not."""

    query_ids: Int[Tensor, "queries"] | None
    # (gallery,) index of the first gallery item of each id, the only one that is a candidate; None without ids
    first_items: Int[Tensor, "candidates"] | None
    # ids and groups of queries and gallery, by the name of the argument
    codes: dict[str, Tensor | None]
    # queries and gallery are one set
    one_set: bool

    def chosen_queries(self, query_indices: Any, queries: int) -> Int[Tensor, "chosen"]:
        """Return the indices of the queries that are searched for: those that a user chooses, or the first of each id."""
        if query_indices is None and self.query_ids is not None:
            return first_of_each(self.query_ids)
        return chosen_indices(_CALL, "query_indices", query_indices, queries, "queries")

    def candidates(self) -> Ints | slice:
        """Return the indices of the gallery items that may be candidates, or a slice of all."""
        return slice(None) if self.first_items is None else self.first_items.numpy()

    def gallery_indices(self, positions: Int[Tensor, "queries k"]) -> Int[Tensor, "queries k"]:
        """Return the gallery indices of items, given their positions among the candidates; -1 stays -1."""
        if self.first_items is None:
            return positions
        return torch.where(positions >= 0, self.first_items[positions], -1)

    def self_matches(self, index: Int[Tensor, "queries"]) -> Int[np.ndarray, "queries"]:
        """Return the position among the candidates of the item that each query is, in one set."""
        if not self.one_set or self.query_ids is None or self.first_items is None:
            return index.numpy()
        return _positions(self.query_ids[index], self.query_ids[self.first_items])

    def exclusions_of(self, index: Int[Tensor, "queries"]) -> list[tuple[Ints, Ints]]:
        """Return the codes of some queries and of all candidates, for ids and for groups; none without these."""
        exclusions = []
        for kind in ("ids", "groups"):
            of_queries = self.codes[f"query_{kind}"]
            of_items = self.codes[f"gallery_{kind}"]
            if of_queries is not None and of_items is not None:
                exclusions.append((of_queries.numpy()[index.numpy()], of_items.numpy()[self.candidates()]))
        return exclusions


def _read_rules(exclusions: dict[str, Any], sizes: tuple[int, int], *, one_set: bool) -> _Rules:
    """Return the rules that ids and groups make.

    Args:
        exclusions: Ids and groups of queries and gallery, by the name of the argument; None where there are none.
        sizes: Number of queries and of gallery items.
        one_set: Whether the queries are the gallery.
    """
    codes = exclusion_codes(_CALL, exclusions, *sizes, same_set=one_set)
    query_ids = codes["query_ids"]
    item_ids = query_ids if one_set else codes["gallery_ids"]
    first_items = None if item_ids is None else first_of_each(item_ids)
    return _Rules(query_ids, first_items, codes, one_set)


def _positions(ids: Int[Tensor, "queries"], distinct: Int[Tensor, "items"]) -> Int[np.ndarray, "queries"]:
    """Return the position of each id among distinct ids, which hold them all."""
    order = distinct.argsort()
    positions: Int[np.ndarray, "queries"] = order[torch.searchsorted(distinct[order], ids)].numpy()
    return positions


def _tied(scores: Float[Tensor, "queries k"], unlisted_ties: Int[Tensor, "queries"]) -> Bool[Tensor, "queries k"]:
    """Return whether another candidate has the same score.

    Args:
        scores: Descending for each query.
        unlisted_ties: Number of candidates that are not listed and have the last score.
    """
    equals_next = scores.diff(dim=1) == 0
    no_neighbour = torch.zeros(len(scores), 1, dtype=torch.bool)
    tied = torch.cat([equals_next, no_neighbour], dim=1) | torch.cat([no_neighbour, equals_next], dim=1)
    return tied | ((scores == scores[:, -1:]) & (unlisted_ties > 0)[:, None])


# Lowest and highest threshold of each similarity, and advice for another one.
_RANGES = {
    "cosine": (-1.0, 1.0, "Cosines lie in [-1, 1]: pass one such as 0.98."),
    "dot": (-math.inf, math.inf, "Pass a finite dot product."),
    "euclidean": (-math.inf, 0.0, "Scores are minus the distance: pass -0.1 for pairs at most 0.1 apart."),
    "hamming": (-math.inf, 0.0, "Scores are minus the number of bits that differ: pass -2 for at most two bits."),
}


@dataclass(frozen=True, eq=False)
class NearDuplicates:
    """Pairs whose exact score reaches a threshold, the highest first; those of equal scores by their indices.

    Examples:
        >>> import torch
        >>> pairs = near_duplicates(torch.tensor([[1.0, 0.0], [1.0, 0.01], [1.0, 0.02]]), most=1)
        >>> len(pairs), pairs.total, pairs.left_out
        (1, 3, 2)
    """

    first: Int[Tensor, "pairs"]
    """index of the query; within one set the smaller index of the pair"""
    second: Int[Tensor, "pairs"]
    """index of the gallery item; within one set the larger index of the pair"""
    scores: Float[Tensor, "pairs"]
    """exact similarity of each pair, in the units of the data: for `euclidean` minus the distance"""
    total: int
    """number of pairs that reach the threshold, counted exactly, whether they are listed or not"""
    min_score: float
    """the threshold"""

    def __len__(self) -> int:
        """Return the number of listed pairs."""
        return len(self.first)

    def __str__(self) -> str:
        """Return a table of the pairs with the highest scores."""
        head = f"{self.total:,} pairs with a score of at least {self.min_score:g}"
        if self.left_out:
            head += f", of which {len(self):,} are listed"
        if not len(self):
            return head
        first_rows = slice(SHOWN_ROWS)
        columns = (self.first[first_rows].tolist(), self.second[first_rows].tolist(), self.scores[first_rows].tolist())
        rows = [(str(first), str(second), f"{score:.4f}") for first, second, score in zip(*columns, strict=True)]
        return "\n".join([head, *table(("first", "second", "score"), rows, len(self))])

    def __repr__(self) -> str:
        return str(self)

    @property
    def left_out(self) -> int:
        """Number of pairs that reach the threshold but are not listed; none of them scores higher than a listed pair."""
        return self.total - len(self)


@default_mode()
def near_duplicates(
    queries: Any,
    gallery: Any | None = None,
    *,
    min_score: float = 0.98,
    similarity: Similarity = "cosine",
    most: int = 100_000,
    memory_mb: float | None = None,
) -> NearDuplicates:
    """Find all pairs whose exact similarity is at least a threshold, within one set or between two, such as two splits.

    The result is exact in the sense of docs/exactness.md, and no matrix of all similarities is made: products of low
    precision (bytes on a processor, float16 on a GPU) rule out most pairs, and exact scores decide the rest. Within one
    set, each pair is multiplied once.

    Args:
        queries: (queries, dim) finite floating-point rows of any scale; for `hamming` codes of -1 and +1, or 0 and 1.
        gallery: (gallery, dim) a second set; by default the pairs within the queries are searched.
        min_score: The lowest score of a pair, in the units of the data. Which score means a duplicate depends on the
            embedding: look at some pairs around the threshold.
        similarity: `cosine`, `dot`, `euclidean` (minus the distance) or `hamming` (minus the number of bits that differ).
        most: Largest number of pairs that are listed, those with the highest scores; all pairs are counted. A listed
            pair takes 24 bytes, and a few times as much during the search.
        memory_mb: Bound on the memory beyond embeddings and pairs, in MB; None is 512.

    Returns:
        A frozen result on the CPU; if no pair reaches the threshold, its tensors are empty.

    Raises:
        ValueError: If shapes or types do not fit, a row holds NaN or Inf, `min_score` is outside the similarity's range,
            `most` < 0, or a single set has a single item.

    Examples:
        >>> import torch
        >>> train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.05]])
        >>> pairs = near_duplicates(train)
        >>> pairs.first, pairs.second, pairs.total
        (tensor([0]), tensor([2]), 1)
        >>> near_duplicates(train, torch.tensor([[0.0, 2.0]]), min_score=1.0).first
        tensor([1])
    """
    call = "near_duplicates"
    most = positive_whole(call, "most", most, "Pass 0 to only count pairs.", least=0, most=None)
    memory = memory_bytes(call, memory_mb)
    query_rows, gallery_rows = compared_sets(call, queries, gallery, similarity)
    threshold = _threshold(min_score, similarity)
    if gallery_rows is None and len(query_rows) == 1:
        raise ValueError(
            f"{call}: queries hold a single item, which has no pair. Pass a second set as gallery, or more items."
        )
    with computing() as threads:
        vectors = Vectors(query_rows, gallery_rows, similarity, threads=threads)
        (rows, columns, scores), total = pairs_from(vectors, float(vectors.from_user(threshold)), most, memory)
    return NearDuplicates(
        first=torch.from_numpy(rows),
        second=torch.from_numpy(columns),
        scores=scores_of(vectors, scores),
        total=total,
        min_score=threshold,
    )


def _threshold(min_score: Any, similarity: Similarity) -> float:
    """Return the threshold as a float, if some score can reach it and another cannot."""
    low, high, fix = _RANGES[similarity]
    try:
        threshold = float(min_score)
    except (TypeError, ValueError):
        threshold = math.nan  # refused below
    if not (low <= threshold <= high and math.isfinite(threshold)):
        raise ValueError(f"near_duplicates: no {similarity} score is compared with min_score={min_score!r}. {fix}")
    return threshold


# ------------------------------------------------------------------------------- shared with other functions on neighbours


def compared_sets(
    call: str, queries: Any, gallery: Any, similarity: Similarity, codes: Sequence[str | None] = (None, None)
) -> tuple[Tensor, Tensor | None]:
    """Return queries and gallery as vectors, or codes of -1 and +1, that can be compared; no gallery stays None.

    Args:
        call: The public function, for messages.
        queries: (queries, dim) vectors or binary codes.
        gallery: (gallery, dim) vectors or binary codes; None to compare the queries with each other.
        similarity: How they will be compared.
        codes: What the caller writes for a tensor of each (see `tensor_code`), where they are tensors already.

    Raises:
        ValueError: If they are not finite matrices of equal dimension.
    """
    query_vectors = compared_vectors(call, "queries", queries, similarity, codes[0])
    if gallery is None:
        return query_vectors, None
    gallery_vectors = compared_vectors(call, "gallery", gallery, similarity, codes[-1])
    if query_vectors.shape[1] != gallery_vectors.shape[1]:
        raise ValueError(
            f"{call}: queries have dimension {query_vectors.shape[1]}, the gallery has {gallery_vectors.shape[1]}. Both "
            "must come from the same model."
        )
    return query_vectors, gallery_vectors


def compared_vectors(call: str, name: str, value: Any, similarity: Similarity, code: str | None = None) -> Tensor:
    """Return the vectors of an argument, or its codes of -1 and +1, as they are compared.

    Raises:
        ValueError: If it is no finite matrix, or the similarity is unknown.
    """
    check_similarity(similarity)
    vectors = as_tensor(value, name, call).cpu()
    code = code or tensor_code(name, value)
    if similarity == "hamming":
        return signs(vectors, name, call, name if hasattr(value, "__array__") else code)
    check_embeddings(vectors, name, call, code)
    return computable(vectors)


def scores_of(vectors: Vectors, scores: Floats) -> Float[Tensor, "*shape"]:
    """Return exact scores in the units of the data; NaN for -inf."""
    return torch.from_numpy(np.where(np.isinf(scores), np.nan, vectors.to_user(scores)))


def search(
    vectors: Vectors,
    queries: Ints,
    items: Ints | slice,
    self_match: Ints,
    exclusions: Sequence[tuple[Ints, Ints]],
    k: int,
    memory: float,
) -> tuple[Ints, Float[Tensor, "queries k"], Ints]:
    """Return positions of the first k candidates of some queries, their scores, and how many more tie with the last.

    Args:
        vectors: All queries and items.
        queries: (queries,) index of each query.
        items: Indices of the items to search, or a slice of all, which are not copied.
        self_match: (queries,) position among the items that each query is; -1 for none.
        exclusions: Codes of the queries and of the items, for each reason to exclude, as in `engine.nearest.nearest_items`.
        k: Number of candidates.
        memory: Budget in bytes.
    """
    is_whole = isinstance(items, slice) and np.array_equal(queries, np.arange(len(vectors.pairs.queries)))
    if not is_whole:
        # Two sets, since only `self_match` excludes: a row that stands for several items is a candidate of itself.
        vectors = vectors.take(queries, items, may_be_one_set=False)
    places = np.arange(len(vectors.pairs.gallery), dtype=np.int32)
    found = nearest_items(vectors, self_match.astype(np.int32), exclusions, k, memory, places)
    positions, scores, unlisted_ties = found
    return positions, scores_of(vectors, scores), unlisted_ties


def positive_whole(
    call: str, name: str, value: Any, fix: str, *, least: int = 1, most: int | None = LARGEST_RANK
) -> int:
    """Return a value of any library as a whole number.

    Args:
        call: The public function, for messages.
        name: Name of the argument.
        value: What the caller passed.
        fix: Advice, for messages.
        least: The smallest allowed number.
        most: The largest allowed number; None for no limit.

    Raises:
        ValueError: If the value is no whole number, or out of range.
    """
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
    number = value.__index__() if is_whole else None
    if number is None or number < least:
        raise ValueError(f"{call}: {name}={value!r} must be a whole number of at least {least}. {fix}")
    if most is not None and number > most:
        raise ValueError(f"{call}: {name}={value!r} must be at most {most}. {fix}")
    return int(number)


def positive_number(call: str, name: str, value: Any, fix: str) -> float:
    """Return a value of any library as a positive, finite number; see `positive_whole` for the arguments.

    Raises:
        ValueError: If the value is no such number.
    """
    is_scalar_array = hasattr(value, "item") and np.ndim(value) == 0
    number = value.item() if is_scalar_array else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not (is_number and 0 < number < math.inf):
        raise ValueError(f"{call}: {name}={value!r} must be a positive number. {fix}")
    return float(number)


def chosen_indices(call: str, name: str, value: Any, items: int, of: str = "embeddings") -> Int[Tensor, "chosen"]:
    """Return the indices of the items that an argument chooses.

    Args:
        call: The public function, for messages.
        name: Name of the argument.
        value: Indices, or a mask of all items; None chooses all.
        items: Number of items.
        of: Name of the argument that holds the items.

    Raises:
        ValueError: If the argument holds no indices, or some out of range.
    """
    if value is None:
        return torch.arange(items)
    index = as_tensor(value, name, call).cpu()
    if not index.numel():
        raise ValueError(f"{call}: {name} is empty. Pass the index of at least one of the {items} {of}.")
    if index.ndim == 1 and index.dtype == torch.bool and len(index) == items:
        index = index.nonzero().flatten()
    if index.ndim != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(
            f"{call}: {name} must be indices of {of}, one-dimensional integers, or a mask of all {items}; got shape "
            f"{tuple(index.shape)} of {index.dtype}. Pass a list of indices, such as [0, 5]."
        )
    index = index.long()
    out_of_range = index[(index < 0) | (index >= items)]
    if len(out_of_range):
        raise ValueError(
            f"{call}: {name} holds {int(out_of_range[0])}, but {of} has {items} items. Pass indices from 0 to {items - 1}."
        )
    if not len(index):
        raise ValueError(f"{call}: {name} chooses none of the {items} {of}. Pass at least one index.")
    return index
