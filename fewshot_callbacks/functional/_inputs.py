"""The inputs that every function on embeddings refuses, and the words in which it does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewshot_callbacks.engine.budget import rows_at_once
from fewshot_callbacks.functional._labels import Labels, read_labels, refuse_words_beside_integers
from fewshot_callbacks.functional._tensors import as_tensor


def check_embeddings(embeddings: Tensor, name: str, call: str) -> None:
    """Refuse what is no finite, non-empty, floating (items, dim) matrix; say what is wrong with it and what to do."""
    check_matrix(embeddings, name, call)
    refuse_non_finite(non_finite_rows(embeddings), len(embeddings), name, call)


def check_matrix(embeddings: Tensor, name: str, call: str) -> None:
    """Refuse what is no non-empty, floating (items, dim) matrix."""
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


def refuse_non_finite(bad: Tensor, items: int, name: str, call: str) -> None:
    """Refuse a matrix of so many rows, of which some, ascending, are not finite."""
    if len(bad):
        raise ValueError(
            f"{call}: {len(bad)} of {items} rows of {name} hold NaN or Inf, the first at index "
            f"{int(bad[0])}. Find the step that made them (a diverged loss, a division by a zero norm, float16 "
            f"overflow), or drop them: keep = {name}.isfinite().all(dim=1)."
        )


def non_finite_rows(embeddings: Tensor) -> Tensor:
    """Indices of the rows with a NaN or an Inf, found in slices so that no second copy of the matrix is made."""
    slices = [~part.isfinite().all(dim=1) for part in embeddings.split(rows_at_once(embeddings))]
    return torch.cat(slices).nonzero().flatten()


def check_sets(
    call: str, embeddings: Any, labels: Any, gallery: Any, gallery_labels: Any
) -> tuple[Tensor, Labels, Tensor, Labels]:
    """Checked queries, labels, gallery and labels, on the CPU and in a dtype that the pass computes with.

    With one set the gallery is the very tensor of the queries.
    """
    queries = as_tensor(embeddings, "embeddings", call).cpu()
    check_embeddings(queries, "embeddings", call)
    query_labels = read_labels(labels, len(queries), "labels", "embeddings", call)
    if gallery is None:
        if gallery_labels is not None:
            raise ValueError(f"{call}: gallery_labels without gallery. Pass both, or neither for leave-one-out.")
        queries = computable(queries)
        return queries, query_labels, queries, query_labels
    if gallery_labels is None:
        raise ValueError(f"{call}: gallery without gallery_labels. Pass the label of each gallery item.")
    items = as_tensor(gallery, "gallery", call).cpu()
    check_embeddings(items, "gallery", call)
    if items.shape[1] != queries.shape[1]:
        raise ValueError(
            f"{call}: embeddings have dimension {queries.shape[1]}, the gallery has {items.shape[1]}. Both must come "
            "from the same model."
        )
    item_labels = read_labels(gallery_labels, len(items), "gallery_labels", "gallery items", call)
    queries, items = computable(queries), computable(items)
    common = torch.promote_types(queries.dtype, items.dtype)
    return queries.to(common), query_labels, items.to(common), item_labels


def computable(vectors: Tensor) -> Tensor:
    """Half precision as float32, which holds each of its values; rows one after the other in memory."""
    return (vectors if vectors.dtype in (torch.float32, torch.float64) else vectors.float()).contiguous()


def exclusion_codes(
    call: str,
    same_set: bool,
    queries: int,
    items: int,
    query_ids: Any,
    gallery_ids: Any,
    query_groups: Any,
    gallery_groups: Any,
) -> dict[str, Tensor | None]:
    """Ids and groups of both sides as checked int64 codes, by the name of the argument; None where none was given."""
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
