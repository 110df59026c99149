"""The inputs of `linear_probe`: classes or regression targets, whole groups, and notes on ids and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._arrow import without_arrow
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional._reading import as_tensor, refuse_masked
from fewshot_callbacks.functional._ridge import bring_groups_together
from fewshot_callbacks.functional.items import ItemSets
from fewshot_callbacks.storage.stored_rows import StoredRows, as_one_tensor
from fewshot_callbacks.system.words import verb

CALL = "linear_probe"
# A sentence that `ProbeMonitor` replaces, because its arguments have other names.
ONE_GROUP_REMEDY = "Pass gallery_groups with several groups, or no groups, which leaves out single items."
# Squares of larger targets may overflow.
LARGEST_TARGET = 1e100


def read_targets(labels: Mapping[str, Any], processes: Processes) -> dict[str, Float[Tensor, "items targets"]] | None:
    """Return regression targets in float64, by the name of the argument; None for classes. *Collective*.

    Labels are None for labels in files, which are classes. If labels are empty, the other processes decide what they
    are.
    """
    targets = {name: _targets_of(value, name) for name, value in labels.items() if not _is_empty(value)}
    columns_of_process = {name: None if value is None else value.shape[1] for name, value in targets.items()}
    columns: dict[str, int | None] = {}
    for rank, of_process in enumerate(processes.gather(columns_of_process)):
        where = f" in process {rank}" if processes.count > 1 else ""
        columns |= {f"{name}{where}": number for name, number in of_process.items()}
    floats = [name for name, number in columns.items() if number is not None]
    classes = [name for name, number in columns.items() if number is None]
    if floats and classes:
        raise InputError(
            f"{CALL}: {floats[0]} are floats, {classes[0]} are classes. Pass floats everywhere for a regression, or "
            f"integers or strings everywhere for classes, such as {floats[0].split()[0]}.long()."
        )
    if len(set(columns.values())) > 1:
        shapes = " and ".join(f"{number} in {name}" for name, number in columns.items())
        raise InputError(f"{CALL}: the numbers of targets differ: {shapes}. Pass the same targets in the same order.")
    number_of_targets = next(iter(columns.values()), None)
    if number_of_targets is None:
        return None
    nothing = torch.zeros(0, number_of_targets, dtype=torch.float64)
    read = {name: targets.get(name) for name in labels}
    return {name: nothing if value is None else value for name, value in read.items()}


def _is_empty(labels: Any) -> bool:
    if isinstance(labels, Tensor):
        return labels.ndim > 0 and not len(labels)
    return hasattr(labels, "__len__") and len(labels) == 0


def _are_floats(labels: Any) -> bool:
    """Return whether labels are floats, which are regression targets."""
    if isinstance(labels, Labels):
        return False
    if isinstance(labels, Tensor):
        return labels.is_floating_point()
    try:
        array = np.asarray(labels)
    except (TypeError, ValueError, RuntimeError):  # rows of different lengths, or tensors on an accelerator
        return False
    if array.dtype.kind == "O":
        return all(isinstance(entry, float | np.floating) for entry in array.flat)
    return array.dtype.kind == "f"


def _targets_of(value: Any, name: str) -> Float[Tensor, "items targets"] | None:
    """Return regression targets; None for classes."""
    value = without_arrow(value, name, CALL)
    if not _are_floats(value):
        return None
    refuse_masked(value, name, CALL)
    if not isinstance(value, Tensor):
        value = np.asarray(value, np.float64)  # a list would be rounded to float32
    targets = as_tensor(value, name, CALL).cpu().double()
    if targets.ndim == 1:
        targets = targets[:, None]
    if targets.ndim != 2 or not targets.shape[1]:
        raise InputError(
            f"{CALL}: {name} have shape {tuple(targets.shape)}. Pass floats of shape (items,) or (items, targets) for a "
            "regression, with at least one target."
        )
    is_bad = ~(targets.abs() <= LARGEST_TARGET).all(dim=1)
    bad = int(is_bad.sum())
    if bad:
        raise InputError(
            f"{CALL}: {bad} of {len(targets)} {name} {verb(bad, 'is', 'are')} NaN, infinite or beyond {LARGEST_TARGET:g}, "
            f"the first at index {int(is_bad.nonzero()[0])}. Drop these items from all arguments."
        )
    return targets


def whole_groups(sets: ItemSets, labels: Tensor) -> tuple[Tensor | StoredRows, Tensor, Int[Tensor, "items"] | None]:
    """Return rows, classes or targets, and groups of gallery items. Each group is in one process. *Collective*."""
    rows = sets.gallery.rows
    if "groups" not in sets.gallery.columns:
        return rows, labels, None
    groups = sets.gallery.of_rows("groups")
    columns = [as_one_tensor(rows), labels]
    (whole_rows, whole_labels), groups = bring_groups_together(columns, groups, sets.processes)
    return whole_rows, whole_labels, groups


def notes_on_items(sets: ItemSets) -> list[str]:
    """Return notes on ids and groups, and on ids and groups that both sets have."""
    notes = [*sets.notes_on_ids]
    if len(sets.gallery.columns.get("groups", torch.arange(2)).unique()) < 2:
        raise InputError(
            f"{CALL}: all gallery items are in one group, so a fit without this group has no items. {ONE_GROUP_REMEDY}"
        )
    for of_queries, of_gallery in sets.exclusions("ids"):
        shared = int(np.isin(of_queries, of_gallery).sum())
        if shared:
            notes.append(
                f"{shared:,} of {len(of_queries):,} queries have the id of a gallery item, so the probe was fitted on them. "
                "Remove them from the gallery to measure new items, or give different items different ids."
            )
    for of_queries, of_gallery in sets.exclusions("groups"):
        distinct = np.unique(of_queries)
        shared = int(np.isin(distinct, of_gallery).sum())
        if shared:
            notes.append(
                f"{shared:,} of {len(distinct):,} groups of the queries are in the gallery, too, so the probe was fitted on "
                "items that resemble these queries. Split the data by group to measure new groups, or give different "
                "groups different names."
            )
    return notes
