"""`near_duplicates`: all pairs whose exact similarity reaches a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.nearest import pairs_from
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.vectors import Similarity, Vectors
from fewshot_callbacks.functional._torch_mode import default_mode
from fewshot_callbacks.functional.neighbours.inputs import budget, compared_sets, positive_whole, scores_of

_CALL = "near_duplicates"

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

    The result is exact in the sense of docs/exactness.md, and no matrix of all similarities is made: products in half
    precision rule out most pairs, and exact scores decide the rest. Within one set, each pair is multiplied once.

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
    most = positive_whole(_CALL, "most", most, "Pass 0 to only count pairs.", least=0, most=None)
    memory = budget(_CALL, memory_mb)
    left, right = compared_sets(_CALL, ("a", "b"), a, b, similarity)
    threshold = _threshold(min_score, similarity)
    if right is None and len(left) == 1:
        raise ValueError(f"{_CALL}: a holds a single item, which has no pair. Pass a second set as b, or more items.")
    with computing() as threads:
        vectors = Vectors(left, right, similarity, threads=threads)
        rows, columns, scores, total = pairs_from(vectors, float(vectors.from_user(threshold)), most, memory)
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
        raise ValueError(f"{_CALL}: no {similarity} score is compared with min_score={min_score!r}. {fix}")
    return threshold
