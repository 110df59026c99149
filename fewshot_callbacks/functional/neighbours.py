"""The first candidates of each query, and all pairs whose similarity reaches a threshold, by exact scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.nearest import nearest_items, pairs_from
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.vectors import Floats, Vectors, check_similarity
from fewshot_callbacks.functional._reading import (
    Labels,
    as_tensor,
    check_embeddings,
    check_labels,
    computable,
    default_mode,
    exclusion_codes,
    numbered,
    read_labels,
    refuse_ids_of_two_sets,
    signs,
)
from fewshot_callbacks.functional._repeated import first_of_each
from fewshot_callbacks.functional._table import SHOWN_ROWS, table
from fewshot_callbacks.functional.retrieval.registry import LARGEST_RANK
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.settings import Similarity

# Neighbours of a query that `print` shows.
SHOWN_NEIGHBOURS = 5


def compared_sets(
    call: str, names: tuple[str, str], a: Any, b: Any, similarity: Similarity
) -> tuple[Tensor, Tensor | None]:
    """Check two sets of vectors, or codes; None for b stays None.

    Args:
        call: The public function, for messages.
        names: Of the two arguments.
        a: (items, dim) vectors or binary codes.
        b: Others; None to compare a with itself.
        similarity: How they will be compared.

    Raises:
        ValueError: If they are not finite matrices of equal dimension.
    """
    check_similarity(similarity)
    left = _vectors(call, names[0], a, similarity)
    if b is None:
        return left, None
    right = _vectors(call, names[1], b, similarity)
    if left.shape[1] != right.shape[1]:
        raise ValueError(
            f"{call}: {names[0]} have dimension {left.shape[1]}, {names[1]} {right.shape[1]}. Both must come from the same "
            "model."
        )
    return left, right


def scores_of(vectors: Vectors, scores: Floats) -> Float[Tensor, "*shape"]:
    """Return scores as a user reads them; NaN for -inf."""
    return torch.from_numpy(np.where(np.isinf(scores), np.nan, vectors.to_user(scores)))


def search(
    vectors: Vectors, queries: Ints, items: Any, own: Ints, exclusions: Any, k: int, memory: float
) -> tuple[Ints, Float[Tensor, "queries k"], Ints]:
    """Return the first k of some items for some queries, their scores, and how many more tie with the last.

    Args:
        vectors: Of all queries and items.
        queries: Index of each.
        items: Their indices, or a slice of all, which are not copied.
        own: Which of the items each query is; -1 for none.
        exclusions: As in `engine.nearest.nearest_items`.
        k: How many.
        memory: Budget in bytes.
    """
    if not (isinstance(items, slice) and np.array_equal(queries, np.arange(len(vectors.pairs.queries)))):
        vectors = vectors.take(queries, items)
        vectors.one_set = False  # `own` says who is no candidate: a row that stands for several items is one
    found, scores, left_out = nearest_items(vectors, own.astype(np.int32), exclusions, k, memory)
    return found, scores_of(vectors, scores), left_out


def positive_whole(
    call: str, name: str, value: Any, fix: str, *, least: int = 1, most: int | None = LARGEST_RANK
) -> int:
    """Return a whole number of any library.

    Raises:
        ValueError: If it is none, below `least` or above `most`.
    """
    whole = value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else None
    if whole is None or whole < least:
        raise ValueError(f"{call}: {name}={value!r} must be a whole number of at least {least}. {fix}")
    if most is not None and whole > most:
        raise ValueError(f"{call}: {name}={value!r} must be at most {most}. {fix}")
    return int(whole)


def positive_number(call: str, name: str, value: Any, fix: str) -> float:
    """Return a positive, finite number of any library.

    Raises:
        ValueError: If it is none.
    """
    number = value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
    if isinstance(number, bool) or not (isinstance(number, int | float) and 0 < number < math.inf):
        raise ValueError(f"{call}: {name}={value!r} must be a positive number. {fix}")
    return float(number)


def chosen(call: str, queries: Any, items: int, name: str = "queries") -> Int[Tensor, "queries"]:
    """Return the indices of chosen queries, which are an argument of this name; None chooses all.

    Raises:
        ValueError: If they are not indices, or out of range.
    """
    if queries is None:
        return torch.arange(items)
    index = as_tensor(queries, name, call).cpu()
    if not index.numel():
        raise ValueError(f"{call}: {name} is empty. Pass the index of at least one of the {items} embeddings.")
    if index.ndim == 1 and index.dtype == torch.bool and len(index) == items:
        index = index.nonzero().flatten()
    if index.ndim != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(
            f"{call}: {name} must be indices of embeddings, one-dimensional integers, or a mask of all {items}; got shape "
            f"{tuple(index.shape)} of {index.dtype}. Pass a list of indices, such as [0, 5]."
        )
    index = index.long()
    wrong = index[(index < 0) | (index >= items)]
    if len(wrong):
        raise ValueError(
            f"{call}: {name} holds {int(wrong[0])}, but embeddings has {items} items. Pass indices from 0 to {items - 1}."
        )
    if not len(index):
        raise ValueError(f"{call}: {name} chooses none of the {items} embeddings. Pass at least one index.")
    return index


def _vectors(call: str, name: str, value: Any, similarity: Similarity) -> Tensor:
    """Return vectors, or codes of -1 and +1, that can be compared."""
    vectors = as_tensor(value, name, call).cpu()
    if similarity == "hamming":
        return signs(vectors, name, call)
    check_embeddings(vectors, name, call)
    return computable(vectors)


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

    queries: Int[Tensor, "queries"]
    """index of each query among the embeddings"""
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
        return len(self.queries)

    def __str__(self) -> str:
        """Return a table of the first queries with their neighbours, the closest first, and the score of each."""
        most = self.indices.shape[1]
        columns = ("query", *map(str, range(1, 1 + min(most, SHOWN_NEIGHBOURS))))
        rows = []
        for place, query in enumerate(self.queries.tolist()[:SHOWN_ROWS]):
            cells = []
            for column in range(len(columns) - 1):
                item, score = int(self.indices[place, column]), float(self.scores[place, column])
                mark = "*" if self.relevant is not None and bool(self.relevant[place, column]) else ""
                cells.append("-" if item < 0 else f"{item}{mark} ({score:.4f})")
            rows.append((str(query), *cells))
        head = f"{len(self):,} queries with {most:,} neighbours each, and the score of each in brackets"
        if most > SHOWN_NEIGHBOURS:
            head += f"; the first {SHOWN_NEIGHBOURS} are shown"
        if self.relevant is not None:
            head += "; * has the query's label"
        return "\n".join([head, *table(columns, rows, len(self))])

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
    embeddings: Any,
    labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    queries: Any | None = None,
    k: int = 10,
    similarity: Similarity = "cosine",
    ids: Any | None = None,
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
        embeddings: (items, dim) finite floating-point rows of any scale; for `hamming` codes of -1 and +1, or 0 and 1.
        labels: (items,) integers or strings; without them, `relevant` is None.
        gallery: (gallery, dim) items to search; by default the embeddings themselves.
        gallery_labels: (gallery,) labels of the gallery items; needed if both `labels` and `gallery` are given.
        queries: Indices of the embeddings that are queries, in any order, or a mask; by default all.
        k: Number of neighbours, at least 1.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.
        ids: (items,) identity of each item of one set, where some come several times: the first of each id is a candidate,
            and by default a query, and no query finds an item of its own id.
        query_ids: (items,) identity of each embedding; with `gallery_ids`, a query's own copy in the gallery is not a
            candidate. By default the first of each id is a query.
        gallery_ids: (gallery,) identity of each gallery item. The first item of each id is a candidate.
        query_groups: (items,) group of each embedding; candidates of the query's own group are left out.
        gallery_groups: (gallery,) group of each gallery item; with one set, `query_groups` is used for both.
        memory_mb: Bound on the memory beyond embeddings and result, in MB; None is 512. Binary codes take 4 bytes more
            per bit.

    Returns:
        A frozen result on the CPU; -1 and NaN where a query has fewer than k candidates.

    Raises:
        ValueError: If shapes or types do not fit, embeddings hold NaN or Inf, k < 1, a query is out of range, or no query
            has a candidate.

    Examples:
        >>> import torch
        >>> embeddings = torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
        >>> found = nearest(embeddings, ["owl", "owl", "heron", "heron"], queries=[0, 3], k=2)
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
    rows, gallery_rows = compared_sets(_CALL, ("embeddings", "gallery"), embeddings, gallery, similarity)
    items = len(rows)
    others = items if gallery_rows is None else len(gallery_rows)
    refuse_ids_of_two_sets(_CALL, ids, one_set=gallery is None)
    codes_of_ids = None if ids is None else check_labels(ids, items, "ids", "embeddings", _CALL)
    names = ("query_ids", "gallery_ids", "query_groups", "gallery_groups")
    given = dict(zip(names, (query_ids, gallery_ids, query_groups, gallery_groups), strict=True))
    codes = exclusion_codes(_CALL, gallery is None, items, others, **given)
    own_ids, item_ids = (codes_of_ids if gallery is None else codes[name] for name in ("query_ids", "gallery_ids"))
    first = None if item_ids is None else first_of_each(item_ids)
    index = first_of_each(own_ids) if queries is None and own_ids is not None else chosen(_CALL, queries, items)
    exclusions = [
        (of_query.numpy()[index.numpy()], of_item.numpy())
        for kind in ("ids", "groups")
        if (of_query := codes[f"query_{kind}"]) is not None and (of_item := codes[f"gallery_{kind}"]) is not None
    ]
    of_queries, of_items = _labels(labels, gallery, gallery_labels, items, others)
    own = some = index.numpy()
    searched: Any = slice(None)
    if first is not None:
        searched = first.numpy()
        exclusions = [(of_query, of_item[searched]) for of_query, of_item in exclusions]
    if codes_of_ids is not None and first is not None:
        own = _places_among(codes_of_ids[index], codes_of_ids[first])
    if gallery_rows is not None:
        rows, some, own = rows[index], np.arange(len(index)), np.full(len(index), -1)
    with computing() as threads:
        vectors = Vectors(rows, gallery_rows, similarity, threads=threads)
        found, read, left_out = search(vectors, some, searched, own, exclusions, k, memory)
    if not bool((found >= 0).any()):
        raise ValueError(
            f"{_CALL}: none of the {len(index)} queries has a candidate. "
            + ("Pass a second item, or a gallery." if not exclusions else "Ids or groups exclude the whole gallery.")
        )
    indices = torch.from_numpy(found).long()
    if first is not None:
        indices = torch.where(indices >= 0, first[indices], -1)
    relevant = None
    if of_queries is not None and of_items is not None:
        relevant = (indices >= 0) & (of_items[indices] == of_queries[index][:, None])
    beyond = torch.from_numpy(left_out)
    return Neighbours(index, indices, read, _tied(read, beyond), beyond, relevant)


def _places_among(ids: Int[Tensor, "queries"], distinct: Int[Tensor, "items"]) -> Int[np.ndarray, "queries"]:
    """Return the place of each id among distinct ones, which hold them all."""
    order = distinct.argsort()
    places: Int[np.ndarray, "queries"] = order[torch.searchsorted(distinct[order], ids)].numpy()
    return places


def _tied(scores: Float[Tensor, "queries k"], left_out: Int[Tensor, "queries"]) -> Bool[Tensor, "queries k"]:
    """Return which of descending scores are not the only ones."""
    same = scores.diff(dim=1) == 0
    nothing = torch.zeros(len(scores), 1, dtype=torch.bool)
    tied = torch.cat([same, nothing], dim=1) | torch.cat([nothing, same], dim=1)
    return tied | ((scores == scores[:, -1:]) & (left_out > 0)[:, None])


def _labels(
    labels: Any, gallery: Any, gallery_labels: Any, items: int, others: int
) -> tuple[Int[Tensor, "items"] | None, Int[Tensor, "gallery"] | None]:
    """Return the labels of both sides as numbers; None without labels."""
    if (gallery_labels is not None) != (labels is not None and gallery is not None):
        raise ValueError(
            f"{_CALL}: labels, gallery and gallery_labels do not fit together. With a gallery, pass both labels and "
            "gallery_labels, or neither. Without a gallery, pass labels alone."
        )
    if labels is None:
        return None, None
    of_queries: Labels = read_labels(labels, items, "labels", "embeddings", _CALL)
    if gallery is None:
        return of_queries.codes, of_queries.codes
    of_items = read_labels(gallery_labels, others, "gallery_labels", "gallery items", _CALL)
    (left, right), _ = numbered(_CALL, {"labels": of_queries, "gallery_labels": of_items})
    return left, right


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
    """index of the item of the first set; within one set the smaller index of the pair"""
    second: Int[Tensor, "pairs"]
    """index of the item of the second set; within one set the larger index"""
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
        columns = (self.first, self.second, self.scores)
        shown = zip(*(column[:SHOWN_ROWS].tolist() for column in columns), strict=True)
        rows = [(str(first), str(second), f"{score:.4f}") for first, second, score in shown]
        head = f"{self.total:,} pairs with a score of at least {self.min_score:g}"
        head += f", of which {len(self):,} are listed" if self.left_out else ""
        return "\n".join([head, *(table(("first", "second", "score"), rows, len(self)) if rows else ())])

    def __repr__(self) -> str:
        return str(self)

    @property
    def left_out(self) -> int:
        """Number of pairs that reach the threshold but are not listed; none of them scores higher than a listed pair."""
        return self.total - len(self)


@default_mode()
def near_duplicates(
    a: Any,
    b: Any | None = None,
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
        a: (items, dim) finite floating-point rows of any scale; for `hamming` codes of -1 and +1, or 0 and 1.
        b: (others, dim) a second set; by default the pairs within `a`.
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
    left, right = compared_sets(call, ("a", "b"), a, b, similarity)
    threshold = _threshold(min_score, similarity)
    if right is None and len(left) == 1:
        raise ValueError(
            "near_duplicates: a holds a single item, which has no pair. Pass a second set as b, or more items."
        )
    with computing() as threads:
        vectors = Vectors(left, right, similarity, threads=threads)
        (rows, columns, scores), total = pairs_from(vectors, float(vectors.from_user(threshold)), most, memory)
    first, second = torch.from_numpy(rows), torch.from_numpy(columns)
    return NearDuplicates(first, second, scores_of(vectors, scores), total, threshold)


def _threshold(min_score: Any, similarity: Similarity) -> float:
    """Return the threshold as a float, if some score can reach it and another cannot."""
    low, high, fix = _RANGES[similarity]
    try:
        threshold = float(min_score)
    except (TypeError, ValueError):
        threshold = math.nan
    if not (low <= threshold <= high and math.isfinite(threshold)):
        raise ValueError(f"near_duplicates: no {similarity} score is compared with min_score={min_score!r}. {fix}")
    return threshold
