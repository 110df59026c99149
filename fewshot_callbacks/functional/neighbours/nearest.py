"""`nearest`: the first candidates of each query, by exact scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.nearest import nearest_items
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.vectors import Similarity, Vectors
from fewshot_callbacks.functional._inputs import exclusion_codes
from fewshot_callbacks.functional._labels import Labels, numbered, read_labels
from fewshot_callbacks.functional._torch_mode import default_mode
from fewshot_callbacks.functional.neighbours.inputs import budget, chosen, compared_sets, positive_whole, scores_of

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
        labels: (items,) integers or words; without them, `relevant` is None.
        gallery: (gallery, dim) items to search; by default the embeddings themselves.
        gallery_labels: (gallery,) labels of the gallery items; needed if both `labels` and `gallery` are given.
        queries: Indices of the embeddings that are queries, in any order, or a mask; by default all.
        k: Number of neighbours, at least 1.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.
        query_ids: (items,) identity of each embedding; with `gallery_ids`, a query's own copy in the gallery is not a
            candidate.
        gallery_ids: (gallery,) identity of each gallery item.
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
    memory = budget(_CALL, memory_mb)
    rows, gallery_rows = compared_sets(_CALL, ("embeddings", "gallery"), embeddings, gallery, similarity)
    items = len(rows)
    others = items if gallery_rows is None else len(gallery_rows)
    index = chosen(_CALL, queries, items)
    codes = exclusion_codes(_CALL, gallery is None, items, others, query_ids, gallery_ids, query_groups, gallery_groups)
    exclusions = [
        (of_query.numpy()[index.numpy()], of_item.numpy())
        for kind in ("ids", "groups")
        if (of_query := codes[f"query_{kind}"]) is not None and (of_item := codes[f"gallery_{kind}"]) is not None
    ]
    of_queries, of_items = _labels(labels, gallery, gallery_labels, items, others)
    every = len(index) == items and bool((index == torch.arange(items)).all())
    own = index.numpy().astype(np.int32) if gallery_rows is None else np.full(len(index), -1, np.int32)
    if not every:  # some of one set are compared with all of it
        rows, gallery_rows = rows[index], rows if gallery_rows is None else gallery_rows
    with computing() as threads:
        vectors = Vectors(rows, gallery_rows, similarity, threads=threads)
        found, scores, left_out = nearest_items(vectors, own, exclusions, k, memory)
    if not bool((found >= 0).any()):
        raise ValueError(
            f"{_CALL}: none of the {len(index)} queries has a candidate. "
            + ("Pass a second item, or a gallery." if not exclusions else "Ids or groups exclude the whole gallery.")
        )
    indices = torch.from_numpy(found).long()
    relevant = None
    if of_queries is not None and of_items is not None:
        relevant = (indices >= 0) & (of_items[indices] == of_queries[index][:, None])
    beyond, read = torch.from_numpy(left_out), scores_of(vectors, scores)
    return Neighbours(index, indices, read, _tied(read, beyond), beyond, relevant)


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
