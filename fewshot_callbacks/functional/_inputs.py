"""Checks that every function on embeddings shares, and their messages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewshot_callbacks.functional._labels import read_labels, refuse_words_beside_integers


def check_embeddings(embeddings: Tensor, name: str, call: str) -> None:
    """Refuse anything but a finite, non-empty, floating-point (items, dim) matrix."""
    check_matrix(embeddings, name, call)
    refuse_non_finite(non_finite_rows(embeddings), len(embeddings), name, call)


def check_matrix(embeddings: Tensor, name: str, call: str) -> None:
    """Refuse anything but a non-empty, floating-point (items, dim) matrix; its values may be NaN."""
    if embeddings.ndim != 2:
        hint = (
            f"For a single item pass {name}[None]; for items of one number each {name}[:, None]."
            if embeddings.ndim == 1
            else f"Flatten what belongs to one item: {name}.flatten(1)."
            if embeddings.ndim > 2
            else "Pass a matrix."
        )
        raise ValueError(f"{call} needs {name} of shape (items, dim); got shape {tuple(embeddings.shape)}. {hint}")
    if not embeddings.is_floating_point():
        raise ValueError(f"{call} needs floating-point {name}; got {embeddings.dtype}. Pass {name}.float().")
    if embeddings.shape[0] == 0:
        raise ValueError(f"{call}: {name} is empty (shape {tuple(embeddings.shape)}). Pass at least one item.")
    if embeddings.shape[1] == 0:
        raise ValueError(f"{call}: {name} has no dimensions (shape {tuple(embeddings.shape)}).")


def check_seed(call: str, name: str, seed: Any) -> int:
    """Return a seed that PyTorch's generators take, which have 64 bits.

    Raises:
        ValueError: With the range.
    """
    whole = seed.__index__() if hasattr(seed, "__index__") and not isinstance(seed, bool) else None
    if whole is None or not -(2**63) <= whole < 2**64:
        raise ValueError(f"{call}: {name}={seed!r} must be a whole number, such as 0, from -2**63 to 2**64 - 1.")
    return int(whole)


def refuse_non_finite(bad: Tensor, items: int, name: str, call: str) -> None:
    """Refuse a matrix with non-finite rows.

    Args:
        bad: Indices of the non-finite rows, ascending.
        items: Number of all rows.
        name: Name of the argument, for messages.
        call: The public function, for messages.
    """
    if len(bad):
        raise ValueError(
            f"{call}: {len(bad)} of {items} rows of {name} hold NaN or Inf, the first at index "
            f"{int(bad[0])}. Find the step that made them (a diverged loss, a division by a zero norm, float16 "
            f"overflow), or drop them: keep = {name}.isfinite().all(dim=1)."
        )


def non_finite_rows(embeddings: Tensor) -> Tensor:
    """Find the indices of rows with NaN or Inf, in slices: one mask of the whole matrix would take a quarter of it."""
    if embeddings.dtype in (torch.float32, torch.float64) and bool(embeddings.sum().isfinite()):
        return torch.empty(0, dtype=torch.int64, device=embeddings.device)  # the sum of all, a third of the time
    rows = max(1, 2**16 // max(1, embeddings.shape[1]))  # 0.5 MB in float64
    slices = [~part.isfinite().all(dim=1) for part in embeddings.split(rows)]
    return torch.cat(slices).nonzero().flatten()


def computable(vectors: Tensor) -> Tensor:
    """Make the rows contiguous in memory, and half precision float32, which holds each of its values."""
    return (vectors if vectors.dtype in (torch.float32, torch.float64) else vectors.float()).contiguous()


def exclusion_codes(
    call: str,
    same_set: bool,
    queries: int,
    items: int,
    query_ids: Any = None,
    gallery_ids: Any = None,
    query_groups: Any = None,
    gallery_groups: Any = None,
) -> dict[str, Tensor | None]:
    """Check ids and groups of both sides.

    Returns:
        `int64` codes by the name of the argument; None for what was not given.
    """
    if same_set and (query_ids is not None or gallery_ids is not None):
        raise ValueError(f"{call}: ids are for two sets; with one set an item is never its own candidate.")
    if same_set and gallery_groups is None:
        gallery_groups = query_groups
    codes: dict[str, Tensor | None] = {}
    pairs = {"ids": (query_ids, gallery_ids), "groups": (query_groups, gallery_groups)}
    for kind, (of_queries, of_items) in pairs.items():
        if (of_queries is None) != (of_items is None):
            raise ValueError(f"{call}: query_{kind} and gallery_{kind} belong together. Pass both, or neither.")
        sides = {f"query_{kind}": (of_queries, queries), f"gallery_{kind}": (of_items, items)}
        read = {
            name: read_labels(code, length, name, f"{name.partition('_')[0]} items", call)
            for name, (code, length) in sides.items()
            if code is not None
        }
        refuse_words_beside_integers(call, read)
        codes |= {name: read[name].codes if name in read else None for name in sides}
    return codes
