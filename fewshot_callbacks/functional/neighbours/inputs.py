"""Vectors and labels of a search, checked, and scores in the unit that a user reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.codes import pack_codes
from fewshot_callbacks.engine.scores import ScoreTiles, Similarity, check_similarity
from fewshot_callbacks.functional._inputs import check_embeddings, computable
from fewshot_callbacks.functional._tensors import as_tensor
from fewshot_callbacks.functional.retrieval.settings import LARGEST_RANK, bytes_of, check_memory, memory_or_default


@dataclass(frozen=True, eq=False)
class ComparedSets:
    """Two sets of vectors, or one with itself, whose pairs have exact scores.

    Binary codes are compared as vectors of -1 and +1, whose dot product is the number of bits less twice their distance.
    """

    scores: ScoreTiles
    bits: int | None = None
    """of binary codes"""

    def scores_of(self, exact: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return scores as a user reads them; NaN for -inf."""
        scores = self.scores.to_user_scores(exact)
        if self.bits is not None:
            scores = (scores - self.bits) / 2
        return torch.where(exact.isinf(), torch.nan, scores + 0.0)

    def exact_score_of(self, score: float) -> float:
        """Return the exact score, in the engine's unit, that a user writes as this."""
        return self.scores.to_exact_score(score if self.bits is None else self.bits + 2 * score)


def compared_sets(call: str, names: tuple[str, str], a: Any, b: Any, similarity: Similarity) -> ComparedSets:
    """Check two sets of vectors and measure them.

    Args:
        call: The public function, for messages.
        names: Of the two arguments.
        a: (items, dim) vectors or binary codes.
        b: Others; None to compare a with itself.
        similarity: How.

    Raises:
        ValueError: If they are not finite matrices of equal dimension.
    """
    check_similarity(similarity)
    left, dim = _vectors(call, names[0], a, similarity)
    right, other = (left, dim) if b is None else _vectors(call, names[1], b, similarity)
    if dim != other:
        raise ValueError(
            f"{call}: {names[0]} have dimension {dim}, {names[1]} {other}. Both must come from the same model."
        )
    if b is not None:
        common = torch.promote_types(left.dtype, right.dtype)
        left, right = left.to(common), right.to(common)
        if left is right:
            right = left.view_as(left)  # two sets, although they are the same
    codes = similarity == "hamming"
    return ComparedSets(ScoreTiles.from_rows(left, right, "dot" if codes else similarity), dim if codes else None)


def budget(call: str, memory_mb: Any) -> int:
    """Return the budget in bytes; None is the default of `evaluate_retrieval`."""
    memory = memory_or_default(memory_mb)
    check_memory(call, memory)
    return bytes_of(memory)


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


def chosen(call: str, queries: Any, items: int) -> Int[Tensor, "queries"]:
    """Return the indices of chosen queries; None chooses all.

    Raises:
        ValueError: If they are not indices, or out of range.
    """
    if queries is None:
        return torch.arange(items)
    index = as_tensor(queries, "queries", call).cpu()
    if index.ndim == 1 and index.dtype == torch.bool and len(index) == items:
        index = index.nonzero().flatten()
    if index.ndim != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(
            f"{call}: queries must be indices of embeddings, (queries,) integers, or a mask of all {items}; got shape "
            f"{tuple(index.shape)} of {index.dtype}. Pass a list of indices, such as [0, 5]."
        )
    index = index.long()
    wrong = index[(index < 0) | (index >= items)]
    if len(wrong):
        raise ValueError(
            f"{call}: queries holds {int(wrong[0])}, but embeddings has {items} items. Pass indices from 0 to {items - 1}."
        )
    if not len(index):
        raise ValueError(f"{call}: queries is empty. Pass at least one index, or None for all.")
    return index


def _vectors(call: str, name: str, value: Any, similarity: Similarity) -> tuple[Tensor, int]:
    """Return vectors that can be compared, and their dimension."""
    vectors = as_tensor(value, name, call).cpu()
    if similarity == "hamming":
        pack_codes(vectors, name, call)  # refuses anything but codes
        return (vectors == 1).float().mul_(2).sub_(1), vectors.shape[1]
    check_embeddings(vectors, name, call)
    return computable(vectors), vectors.shape[1]
