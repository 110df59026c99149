"""The inputs that every function on embeddings refuses, and the words in which it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def as_tensor(value: Any, name: str, call: str) -> Tensor:
    """`value` as a detached tensor: a tensor, a NumPy array or a list of numbers; refuse masked values."""
    if isinstance(value, Tensor):
        return value.detach()
    _refuse_masked(value, name, call)
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        # torch takes no negative strides, no foreign byte order, and warns of arrays that cannot be written to
        native = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("="))
        value = native if native.flags.writeable else native.copy()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{call}: {name} is a {type(value).__name__} that no tensor can be made of ({error}). "
            "Pass a tensor or a NumPy array."
        ) from error


def _refuse_masked(value: Any, name: str, call: str) -> None:
    """Refuse a masked array, or a list of them, of which something is masked: a tensor would hold what lies below."""
    parts = value if isinstance(value, list | tuple) else [value]
    masked = sum(int(np.ma.getmaskarray(part).sum()) for part in parts if isinstance(part, np.ma.MaskedArray))
    if masked:
        raise ValueError(
            f"{call}: {name} is a masked array with {masked} masked values, which a tensor would take for valid ones. Drop "
            f"the items with a masked value from all arguments, keep = ~np.ma.getmaskarray({name}).reshape(len({name}), "
            f"-1).any(axis=1), then {name}.data[keep]; or choose what stands in their place, {name}.filled(0)."
        )


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


def rows_at_once(embeddings: Tensor) -> int:
    """How many rows hold 2**16 numbers, 0.5 MB in float64: what is made of so many at a time takes little memory."""
    return max(1, 2**16 // max(1, embeddings.shape[1]))


def non_finite_rows(embeddings: Tensor) -> Tensor:
    """Indices of the rows with a NaN or an Inf, found in slices so that no second copy of the matrix is made."""
    slices = [~part.isfinite().all(dim=1) for part in embeddings.split(rows_at_once(embeddings))]
    return torch.cat(slices).nonzero().flatten()


def check_labels(labels: Tensor, items: int, name: str, of: str, call: str) -> Tensor:
    """Labels as int64 on the CPU; refuse floats, wrong shapes and wrong lengths."""
    if labels.dtype in UNSIGNED:
        raise ValueError(f"{call}: {name} are {labels.dtype}, which torch can hardly compute with. Pass them as int64.")
    if labels.dtype not in LABEL_DTYPES:
        raise ValueError(
            f"{call} needs integer {name}; got {labels.dtype}. Floating-point labels lose identities above 2**24: "
            f"pass {name}.long(), or number the classes with torch.unique({name}, return_inverse=True)."
        )
    if labels.ndim != 1:
        hint = (
            f"Pass {name}.argmax(dim=1) if they are one-hot; for items with several labels there is evaluate_multilabel."
            if labels.ndim == 2
            else f"Pass {name}.flatten()."
        )
        raise ValueError(f"{call} needs one label for each item; {name} has shape {tuple(labels.shape)}. {hint}")
    if len(labels) != items:
        raise ValueError(
            f"{call}: {items} {of}, but {len(labels)} {name}. Both must come from the same items in the same order."
        )
    return labels.to(device="cpu", dtype=torch.int64).contiguous()


def check_sets(
    call: str, embeddings: Any, labels: Any, gallery: Any, gallery_labels: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checked queries, labels, gallery and labels, on the CPU and in a dtype that the pass computes with.

    With one set the gallery is the very tensor of the queries.
    """
    queries = as_tensor(embeddings, "embeddings", call).cpu()
    check_embeddings(queries, "embeddings", call)
    query_labels = check_labels(as_tensor(labels, "labels", call), len(queries), "labels", "embeddings", call)
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
    item_labels = as_tensor(gallery_labels, "gallery_labels", call)
    item_labels = check_labels(item_labels, len(items), "gallery_labels", "gallery items", call)
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
        for side, code, length in (("query", of_queries, queries), ("gallery", of_items, items)):
            name = f"{side}_{kind}"
            codes[name] = (
                None if code is None else check_labels(as_tensor(code, name, call), length, name, f"{side} items", call)
            )
    return codes
