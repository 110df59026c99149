"""What `linear_probe` is given: queries and gallery of this process, their classes or targets, and their groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.functional._labels import Labels, check_labels, encode_ids, no_labels, read_labels
from fewshot_callbacks.functional._reading import (
    as_tensor,
    check_matrix,
    computable,
    non_finite_rows,
    refuse_masked,
    refuse_non_finite,
    tensor_code,
)
from fewshot_callbacks.functional.items import check_places, refuse_other_dims
from fewshot_callbacks.system.words import verb

CALL = "linear_probe"
# Squares of larger targets may overflow.
LARGEST_TARGET = 1e100


class ProbeSide(NamedTuple):
    """The queries, or the gallery, of this process."""

    name: str
    labels_name: str
    groups_name: str
    rows: Float[Tensor, "items dim"]
    labels: Labels | Tensor
    """classes, or targets of a regression: (items, targets) in float64"""
    groups: Labels | None
    places: Int[Tensor, "items"]
    """index of each item among those of all processes"""
    length: int
    """number of items of all processes"""


def read_side(
    processes: Processes, name: str, prefix: str, rows: Any, labels: Any, groups: Any, places: Any
) -> ProbeSide:
    """Return what this process was given of the queries or of the gallery. *Collective*.

    Args:
        processes: All that hold items.
        name: Name of the vectors, for messages.
        prefix: Beginning of the names of labels and groups, for messages.
        rows: Vectors of this process.
        labels: Their classes or targets.
        groups: Their groups; None if none were given, in any process.
        places: Their indices among all; None if those of a process follow those of the one before.
    """
    vectors = as_tensor(rows, name, CALL).cpu()
    items = len(vectors) if vectors.ndim else 0
    code = tensor_code(name, rows)
    if items or processes.count == 1:  # one of several processes may hold nothing
        check_matrix(vectors, name, CALL, code)
    labels_name = f"{prefix}_labels"
    groups_name = f"{prefix}_groups"
    read = _read_labels(labels, items, labels_name, name)
    read_groups = None if groups is None else read_labels(groups, items, groups_name, name, CALL)
    shapes = processes.gather((items, vectors.shape[-1] if items else 0))
    sizes = [size for size, _ in shapes]
    dims = {rank: dim for rank, (size, dim) in enumerate(shapes) if size}
    if not dims:
        raise ValueError(
            f"{CALL}: {name} is empty (shape {tuple(vectors.shape)}) in every process. Pass at least one item."
        )
    refuse_other_dims(CALL, name, dims)
    if places is None:
        first = sum(sizes[: processes.rank])
        places = torch.arange(first, first + items)
    places = check_labels(places, items, "places", name, CALL)
    check_places(CALL, name, torch.cat(processes.gather(places)))
    dim = next(iter(dims.values()))
    vectors = computable(vectors) if items else torch.empty(0, dim)
    non_finite = torch.cat(processes.gather(places[non_finite_rows(vectors)])).sort().values
    refuse_non_finite(non_finite, sum(sizes), name, CALL, code=code)
    return ProbeSide(name, labels_name, groups_name, vectors, read, read_groups, places, sum(sizes))


def _read_labels(labels: Any, items: int, name: str, of: str) -> Labels | Tensor:
    """Return classes, or the targets of a regression: (items, targets) in float64."""
    if not items and _is_empty(labels):
        return no_labels()  # other processes know whether these are classes or targets
    if _are_floats(labels):
        return _read_targets(labels, items, name, of)
    return read_labels(labels, items, name, of, CALL)


def _is_empty(labels: Any) -> bool:
    if isinstance(labels, Tensor):
        return labels.numel() == 0
    return hasattr(labels, "__len__") and len(labels) == 0


def _are_floats(labels: Any) -> bool:
    """Return whether labels are floats, the targets of a regression."""
    if isinstance(labels, Labels):
        return False
    if isinstance(labels, Tensor):
        return labels.is_floating_point()
    try:
        array = np.asarray(labels)
    except (TypeError, ValueError, RuntimeError):  # rows of different lengths, or tensors of another device
        return False
    if array.dtype.kind == "O":
        return all(isinstance(entry, float | np.floating) for entry in array.flat)
    return array.dtype.kind == "f"


def _read_targets(value: Any, items: int, name: str, of: str) -> Float[Tensor, "items targets"]:
    """Return the targets of a regression in float64.

    Raises:
        ValueError: If they are not one or more finite numbers for each item.
    """
    refuse_masked(value, name, CALL)
    if not isinstance(value, Tensor):
        value = np.asarray(value, np.float64)  # a list would be rounded to float32
    targets = as_tensor(value, name, CALL).cpu().double()
    if targets.ndim == 1:
        targets = targets[:, None]
    if targets.ndim != 2 or not targets.shape[1]:
        raise ValueError(
            f"{CALL}: {name} have shape {tuple(targets.shape)}. Pass floats of shape (items,) or (items, targets) for a "
            "regression, with at least one target."
        )
    if len(targets) != items:
        raise ValueError(
            f"{CALL}: {items} {of}, but {len(targets)} {name}. Both must come from the same items in the same order."
        )
    is_bad = ~(targets.abs() <= LARGEST_TARGET).all(dim=1)
    bad = int(is_bad.sum())
    if bad:
        raise ValueError(
            f"{CALL}: {bad} of {items} {name} {verb(bad, 'is', 'are')} NaN, infinite or beyond {LARGEST_TARGET:g}, the "
            f"first at index {int(is_bad.nonzero()[0])}. Drop these items from all arguments."
        )
    return targets


def refuse_other_dims_of_sides(sides: Sequence[ProbeSide]) -> None:
    """Refuse queries of another dimension than the gallery."""
    queries, gallery = sides
    if queries.rows.shape[1] != gallery.rows.shape[1]:
        raise ValueError(
            f"{CALL}: queries have dimension {queries.rows.shape[1]}, the gallery has {gallery.rows.shape[1]}. Both must "
            "come from the same model."
        )


class ProbeGroups(NamedTuple):
    """Codes of the groups of queries and gallery items of this process; None where there are none."""

    queries: Int[Tensor, "queries"] | None
    gallery: Int[Tensor, "gallery"] | None
    notes: list[str]


def read_groups(sides: Sequence[ProbeSide], processes: Processes) -> ProbeGroups:
    """Return the groups of both sides, if the gallery has two, and a note on those that both have. *Collective*."""
    groups = {side.groups_name: side.groups for side in sides if side.groups is not None}
    if not groups:
        return ProbeGroups(None, None, [])
    codes = dict(zip(groups, encode_ids(CALL, groups, processes), strict=True))
    distinct = {name: torch.cat(processes.gather(of_side.unique())).unique() for name, of_side in codes.items()}
    queries, gallery = sides
    of_gallery = distinct.get(gallery.groups_name)
    of_queries = distinct.get(queries.groups_name)
    notes = []
    if of_gallery is not None and len(of_gallery) < 2:
        raise ValueError(
            f"{CALL}: all gallery items are of one group, and a fit without it has no items. Pass gallery_groups of "
            "several groups, or none to leave out single items."
        )
    if of_gallery is not None and of_queries is not None:
        shared = int(torch.isin(of_queries, of_gallery).sum())
        if shared:
            notes.append(
                f"{shared:,} of {len(of_queries):,} groups of the queries are in the gallery, too: the probe was fitted on "
                "items that resemble these queries. Divide the data by groups to measure on new ones, or give different "
                "groups different names."
            )
    return ProbeGroups(codes.get(queries.groups_name), codes.get(gallery.groups_name), notes)


def target_columns(sides: Sequence[ProbeSide], processes: Processes) -> int | None:
    """Return the number of targets of a regression; None for classes. *Collective*.

    Raises:
        ValueError: If some labels are classes and others are targets, or numbers of targets differ; in every process.
    """
    columns_of_process = {side.labels_name: _columns_of(side.labels) for side in sides if len(side.labels)}
    columns: dict[str, int | None] = {}
    for rank, of_process in enumerate(processes.gather(columns_of_process)):
        where = f" in process {rank}" if processes.count > 1 else ""
        columns |= {f"{name}{where}": number for name, number in of_process.items()}
    floats = [name for name, number in columns.items() if number is not None]
    classes = [name for name, number in columns.items() if number is None]
    if floats and classes:
        raise ValueError(
            f"{CALL}: {floats[0]} are floats, {classes[0]} are classes. Pass floats everywhere for a regression, or "
            f"integers or strings everywhere for classes, such as {floats[0].split()[0]}.long()."
        )
    if len(set(columns.values())) > 1:
        shapes = " and ".join(f"{number} in {name}" for name, number in columns.items())
        raise ValueError(f"{CALL}: numbers of targets differ: {shapes}. Pass the same targets in the same order.")
    return next(iter(columns.values()))


def _columns_of(labels: Labels | Tensor) -> int | None:
    return labels.shape[1] if isinstance(labels, Tensor) else None
