"""Vectors and labels of a search, checked, and scores in the unit that a user reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.vectors import Floats, Similarity, Vectors, check_similarity
from fewshot_callbacks.functional._codes import signs
from fewshot_callbacks.functional._inputs import check_embeddings, computable
from fewshot_callbacks.functional._tensors import as_tensor
from fewshot_callbacks.functional.retrieval.registry import LARGEST_RANK
from fewshot_callbacks.functional.retrieval.settings import bytes_of, check_memory, memory_or_default


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


def _vectors(call: str, name: str, value: Any, similarity: Similarity) -> Tensor:
    """Return vectors, or codes of -1 and +1, that can be compared."""
    vectors = as_tensor(value, name, call).cpu()
    if similarity == "hamming":
        return signs(vectors, name, call)
    check_embeddings(vectors, name, call)
    return computable(vectors)
