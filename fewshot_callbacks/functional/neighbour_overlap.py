"""`neighbour_overlap`: the share of nearest neighbours that two embeddings have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._reading import default_mode, named
from fewshot_callbacks.functional.means import exact_mean
from fewshot_callbacks.functional.neighbours import compared_vectors, nearest, positive_whole
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.settings import Similarity
from fewshot_callbacks.system.words import counted, verb

_CALL = "neighbour_overlap"


@equal_with_nan
@dataclass(frozen=True)
class NeighbourOverlap:
    """The result of `neighbour_overlap`; `print` shows it next to the overlap of independent embeddings.

    Attributes:
        overlap: Mean over the items of the share of their k nearest neighbours that both embeddings have in common, in
            [0, 1].
        expected: Expected `overlap` of two independent embeddings: k over the number of candidates per item.
        k: Number of neighbours.
        items: Number of items.
        items_with_ties: Number of items for which, in either embedding, more candidates have the score of the k-th
            neighbour. Only the index decides which of these candidates are neighbours.
        per_item: The share of each item, in float64.
    """

    overlap: float
    expected: float
    k: int
    items: int
    items_with_ties: int
    per_item: Float[Tensor, "items"] = field(compare=False, repr=False)

    def __str__(self) -> str:
        """Return the overlap, and a note on ties."""
        head = f"{counted(self.items, 'item')} with {counted(self.k, 'neighbour')} each: overlap {self.overlap:.4f}"
        lines = [f"{head} ({self.expected:.4f} for independent embeddings)"]
        if self.items_with_ties:
            lines.append(
                f"{counted(self.items_with_ties, 'item')} {verb(self.items_with_ties, 'has', 'have')} more candidates with "
                "the score of the last neighbour. The index decides which of them count."
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


@default_mode()
def neighbour_overlap(
    first: Any,
    second: Any,
    *,
    first_gallery: Any | None = None,
    second_gallery: Any | None = None,
    k: int = 10,
    similarity: Similarity = "cosine",
    memory_mb: float | None = None,
) -> NeighbourOverlap:
    """Return the share of the k nearest neighbours of each item that are the same in two embeddings of the same items.

    The overlap tells you, without labels, how much your search results change if you replace a model. The two embeddings
    may have different dimensions, because items are only compared within one embedding. Rotations and a common scale do
    not change the overlap. It is 1 if both embeddings have the same neighbours, in any order. For two independent
    embeddings of n items its expected value is k / (n - 1), or k / n with a gallery of n items.

    The neighbours are the exact ones that `nearest` returns. In both embeddings, candidates with equal scores are ordered
    by index, so the overlap of an embedding with itself is 1. The overlap of two collapsed embeddings is 1, too: look at
    `items_with_ties`.

    Args:
        first: (items, dim) finite floating-point rows. For `hamming`, codes of -1 and +1, or of 0 and 1.
        second: (items, other dim) embeddings of the same items in the same order, from another model.
        first_gallery: (gallery, dim) items to search, from the first model; by default the items themselves, each without
            itself.
        second_gallery: (gallery, other dim) the same gallery items in the same order, from the second model.
        k: Number of neighbours, at most the number of candidates per item.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.
        memory_mb: Memory limit in MB, in addition to the embeddings and the neighbours; None is 512.

    Returns:
        The mean overlap, its expected value for independent embeddings, and the overlap of each item.

    Raises:
        ValueError: If the numbers of items differ, only one gallery is given, there are fewer than k candidates, or rows
            contain NaN or Inf.

    Examples:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> old, other = torch.randn(2, 500, 8, generator=generator)
        >>> rotation, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator))
        >>> round(neighbour_overlap(old, old @ rotation).overlap, 2)
        1.0
        >>> print(neighbour_overlap(old, other))
        500 items with 10 neighbours each: overlap 0.0220 (0.0200 for independent embeddings)
    """
    k = positive_whole(_CALL, "k", k, "Pass the number of neighbours, such as 10.")
    memory_bytes(_CALL, memory_mb)
    items = _of_both(("first", first), ("second", second), similarity)
    galleries = _galleries(first_gallery, second_gallery, items, similarity)
    candidates = len(items[0]) - 1 if galleries is None else len(galleries[0])
    if k > candidates:
        raise InputError(
            f"{_CALL}: k={k}, but each item has {counted(candidates, 'candidate')}. Pass a smaller k, or more items."
        )
    options: dict[str, Any] = {"k": k, "similarity": similarity, "memory_mb": memory_mb}
    with named(_CALL, "nearest"):
        one = nearest(items[0], gallery=None if galleries is None else galleries[0], **options)
        other = nearest(items[1], gallery=None if galleries is None else galleries[1], **options)
    per_item = _in_common(one.indices, other.indices).double() / k
    has_ties = (one.unlisted_ties > 0) | (other.unlisted_ties > 0)
    return NeighbourOverlap(exact_mean(per_item), k / candidates, k, len(per_item), int(has_ties.sum()), per_item)


def _of_both(first: tuple[str, Any], second: tuple[str, Any], similarity: Similarity) -> tuple[Tensor, Tensor]:
    """Return the rows from both models, given the name and the value of each argument."""
    rows, other_rows = (compared_vectors(_CALL, name, value, similarity) for name, value in (first, second))
    if len(rows) != len(other_rows):
        raise InputError(
            f"{_CALL}: {first[0]} has {counted(len(rows), 'row')}, {second[0]} {len(other_rows)}. Pass the same items in "
            "the same order."
        )
    return rows, other_rows


def _galleries(
    first: Any | None, second: Any | None, items: tuple[Tensor, Tensor], similarity: Similarity
) -> tuple[Tensor, Tensor] | None:
    """Return the gallery rows from both models; None without a gallery."""
    if first is None and second is None:
        return None
    if first is None or second is None:
        given, missing = ("first", "second") if second is None else ("second", "first")
        raise InputError(
            f"{_CALL}: {given}_gallery without {missing}_gallery. Pass the same gallery items from both models, or no "
            "gallery."
        )
    galleries = _of_both(("first_gallery", first), ("second_gallery", second), similarity)
    for name, rows, gallery in zip(("first", "second"), items, galleries, strict=True):
        if rows.shape[1] != gallery.shape[1]:
            raise InputError(
                f"{_CALL}: {name} has dimension {rows.shape[1]}, {name}_gallery {gallery.shape[1]}. Both must come from the "
                "same model."
            )
    return galleries


def _in_common(one: Int[Tensor, "items k"], other: Int[Tensor, "items k"]) -> Int[Tensor, "items"]:
    """Return, per item, the number of neighbours in both lists. No list contains an item twice."""
    # After sorting both lists together, a common item is next to itself.
    both = torch.cat([one, other], dim=1).sort(dim=1).values
    return (both[:, 1:] == both[:, :-1]).sum(dim=1)
