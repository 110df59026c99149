"""`embedding_movement`: the cosine between two embeddings of each item, and CKA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional.neighbours import compared_vectors
from fewshot_callbacks.system.words import counted

_CALL = "embedding_movement"

# Relative change up to which an item counts as unmoved: the rounding of float32.
UNMOVED = 1e-6


@equal_with_nan
@dataclass(frozen=True)
class Movement:
    """The result of `embedding_movement`.

    Attributes:
        cosine: Mean cosine between the two embeddings of each item, in [-1, 1], without items of length 0. NaN if all
            items have length 0, or if the dimensions differ.
        cka: Similarity of the two arrangements of items, at most 1. Rotations, shifts and a common scale do not change
            it. NaN for fewer than four items, or if all items are equal.
        unmoved: Share of the items that did not move beyond rounding, in [0, 1]; 0 if the dimensions differ.
        items: Number of items.
    """

    cosine: float
    cka: float
    unmoved: float
    items: int


@default_mode()
def embedding_movement(before: Any, after: Any) -> Movement:
    """Return how far the embeddings of the same items have moved between two checkpoints or two models.

    The cosine compares each item with itself. It is only meaningful if one model was trained further to get the other. For
    two models that were trained independently it is near 0, however similar they are. CKA compares the arrangements of the
    items, so it is meaningful for any two models.

    CKA is the centred kernel alignment of the inner products (Kornblith, Norouzi, Lee, Hinton, "Similarity of neural network
    representations revisited", ICML 2019). The estimator of Song, Smola, Gretton, Bedo, Borgwardt ("Feature selection via
    dependence maximization", JMLR 13, 2012) makes its mean independent of the number of items. CKA can be slightly negative
    for unrelated arrangements.

    Args:
        before: (items, dim) finite floating-point rows.
        after: (items, other dim) embeddings of the same items in the same order. The cosine needs the same dimension.

    Returns:
        The mean cosine, CKA and the share of unmoved items. The call takes the memory of three items x items matrices,
        216 MB for 3,000 items, so pass a sample of a large set.

    Raises:
        ValueError: If the numbers of rows differ, there are no rows, or rows contain NaN or Inf.

    Examples:
        >>> import torch
        >>> before = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0], [1.0, 4.0], [5.0, 2.0]])
        >>> rotated = torch.stack([-before[:, 1], before[:, 0]], dim=1)
        >>> movement = embedding_movement(before, rotated)
        >>> movement.cosine, round(movement.cka, 6), movement.unmoved
        (0.0, 1.0, 0.0)
    """
    rows_before = compared_vectors(_CALL, "before", before, "dot").double()
    rows_after = compared_vectors(_CALL, "after", after, "dot").double()
    if len(rows_before) != len(rows_after):
        raise InputError(
            f"{_CALL}: before has {counted(len(rows_before), 'row')}, after {len(rows_after)}. Pass the same items in "
            "the same order."
        )
    cosine = math.nan
    unmoved = 0.0
    if rows_before.shape == rows_after.shape:
        lengths = rows_before.norm(dim=1)
        lengths_after = rows_after.norm(dim=1)
        is_long = (lengths > 0) & (lengths_after > 0)
        if bool(is_long.any()):
            products = (rows_before * rows_after).sum(dim=1)[is_long]
            cosine = float((products / (lengths * lengths_after)[is_long]).mean().clamp(-1, 1))
        changes = (rows_after - rows_before).norm(dim=1)
        unmoved = float((changes <= UNMOVED * lengths).double().mean())
    return Movement(cosine, _cka(rows_before, rows_after), unmoved, len(rows_before))


def _cka(before: Float[Tensor, "items dim"], after: Float[Tensor, "items other_dim"]) -> float:
    """Return the centred kernel alignment of two embeddings; NaN if it is undefined."""
    if len(before) < 4:
        return math.nan
    kernel_before = _kernel(before)
    kernel_after = _kernel(after)
    alignment = _dependence(kernel_before, kernel_after)
    norms = _dependence(kernel_before, kernel_before) * _dependence(kernel_after, kernel_after)
    return math.nan if norms <= 0 else min(alignment / math.sqrt(norms), 1.0)


def _kernel(rows: Float[Tensor, "items dim"]) -> Float[Tensor, "items items"]:
    """Return the inner products of all pairs of items, with a zero diagonal."""
    # A shift does not change the alignment, and centred rows lose less to rounding. The scale keeps products in range.
    centred = rows - rows.mean(dim=0)
    largest = centred.abs().max()
    if largest == 0:
        return torch.zeros(len(rows), len(rows), dtype=rows.dtype)
    centred = centred / largest
    return (centred @ centred.T).fill_diagonal_(0)


def _dependence(one: Float[Tensor, "items items"], other: Float[Tensor, "items items"]) -> float:
    """Return the unbiased estimate of the Hilbert-Schmidt independence criterion, for kernels with a zero diagonal."""
    items = len(one)
    row_sums = one.sum(dim=1)
    other_row_sums = other.sum(dim=1)
    trace = (one * other).sum()
    sums = row_sums.sum() * other_row_sums.sum() / ((items - 1) * (items - 2))
    mixed = 2 * (row_sums @ other_row_sums) / (items - 2)
    return float((trace + sums - mixed) / (items * (items - 3)))
