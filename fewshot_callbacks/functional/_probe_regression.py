"""The linear probe as a regression: R2 and rank correlation on queries, and R2 on left-out gallery items."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._notes import ReportFields
from fewshot_callbacks.functional._probe_inputs import CALL, notes_on_items, whole_groups
from fewshot_callbacks.functional._ridge import (
    LeaveGroupOut,
    LeaveOneOut,
    NumberTargets,
    Ridge,
    TrainingItems,
    blocks_of,
    summed,
)
from fewshot_callbacks.functional.items import Items, ItemSets

# Sentences that `ProbeMonitor` replaces, because its arguments have other names.
ONE_ITEM_REMEDY = "Pass a larger gallery."
INTEGERS_REMEDY = "If they are classes, pass integers: gallery_labels.long()."

R2_LEAVE_ONE_OUT = "probe_r2_leave_one_out"
R2_LEAVE_GROUP_OUT = "probe_r2_leave_group_out"


@dataclass(frozen=True, eq=False)
class Regression:
    """Queries and gallery of this process, with targets."""

    queries: Items
    query_targets: Float[Tensor, "queries targets"]
    items: TrainingItems
    """gallery items; if there are groups, whole groups"""
    groups: Int[Tensor, "items"] | None
    notes: list[str]

    @classmethod
    def of(cls, sets: ItemSets, targets: Mapping[str, Float[Tensor, "rows targets"]]) -> Regression:
        """Return the data of a regression, given the targets of all rows of this process. *Collective*."""
        queries, gallery = sets.queries, sets.gallery
        if gallery.length < 2:
            raise InputError(f"{CALL}: the gallery has a single item, but a regression needs two. {ONE_ITEM_REMEDY}")
        query_targets = targets["query_labels"][queries.of_rows("rows")]
        gallery_targets = targets["gallery_labels"][gallery.of_rows("rows")]
        notes = notes_on_items(sets)
        is_whole = torch.equal(gallery_targets, gallery_targets.round())
        if gallery_targets.shape[1] == 1 and all(sets.processes.gather(is_whole)):
            notes.append(
                "The labels are floats, so this is a regression, but all gallery labels are whole numbers. "
                f"{INTEGERS_REMEDY}"
            )
        rows, gallery_targets, groups = whole_groups(sets, gallery_targets)
        return cls(queries, query_targets, TrainingItems(rows, NumberTargets(gallery_targets)), groups, notes)

    def measure(self, ridge: Ridge, penalty: float, processes: Processes) -> ReportFields:
        """Return R2 and rank correlation on queries, and R2 on left-out gallery items. *Collective*."""
        rows = self.queries.rows
        width = max(rows.shape[1], self.items.targets.columns)
        blocks = [ridge.predictions(rows[block], penalty) for block in blocks_of(len(rows), width)]
        predictions = torch.cat([self.query_targets[:0], *blocks])
        all_targets = self.queries.of_all(processes, self.query_targets.T)
        all_predictions = self.queries.of_all(processes, predictions.T)
        pairs = list(zip(all_targets, all_predictions, strict=True))
        per_target = {
            "probe_r2": tuple(_r2(targets, predicted) for targets, predicted in pairs),
            "probe_spearman": tuple(_rank_correlation(targets, predicted) for targets, predicted in pairs),
            R2_LEAVE_ONE_OUT: self._r2_of_gallery(LeaveOneOut(ridge, self.items), ridge, penalty, processes),
        }
        if self.groups is not None:
            way = LeaveGroupOut(ridge, self.items, self.groups)
            per_target[R2_LEAVE_GROUP_OUT] = self._r2_of_gallery(way, ridge, penalty, processes)
        fields = {
            "values": {key: _mean_of_defined(values) for key, values in per_target.items()},
            "intervals": {},
            "queries": self.queries.length,
            "queries_without_match": 0,
            "gallery_not_counted": 0,
            "classes": None,
            "per_target": per_target,
            "per_query": {},
        }
        return ReportFields(fields, [*self.notes, *_notes_on_undefined(per_target)])

    def _r2_of_gallery(
        self, way: LeaveOneOut | LeaveGroupOut, ridge: Ridge, penalty: float, processes: Processes
    ) -> tuple[float, ...]:
        """Return R2 on left-out gallery items for each target; NaN if a target is constant. *Collective*."""
        everything = slice(None)
        centred = self.items.targets.centred(everything, ridge.target_mean)
        targets = centred + ridge.target_mean
        squares = torch.zeros_like(ridge.target_mean)
        for items, predictions in way.predictions(penalty):
            squares += (targets[items] - predictions).square().sum(dim=0)
        squares, total = summed([squares, centred.square().sum(dim=0)], processes)
        lowest, highest = _range_over_processes(targets, processes)
        r2 = (1 - squares / total).masked_fill(lowest == highest, math.nan)
        return tuple(r2.tolist())


def _range_over_processes(
    targets: Float[Tensor, "items columns"], processes: Processes
) -> tuple[Float[Tensor, "columns"], Float[Tensor, "columns"]]:
    """Return the minimum and the maximum of each column over all processes. *Collective*."""
    range_of_process = [targets.amin(dim=0), targets.amax(dim=0)] if len(targets) else None
    ranges = [of_process for of_process in processes.gather(range_of_process) if of_process is not None]
    lowest = torch.stack([low for low, _ in ranges]).amin(dim=0)
    highest = torch.stack([high for _, high in ranges]).amax(dim=0)
    return lowest, highest


def _r2(targets: Float[Tensor, "queries"], predictions: Float[Tensor, "queries"]) -> float:
    """Return 1 minus the ratio of the squared error to the squared error of the mean target; NaN for constant targets."""
    if targets.min() == targets.max():
        return math.nan
    return 1 - float((targets - predictions).square().sum() / (targets - targets.mean()).square().sum())


def _rank_correlation(targets: Float[Tensor, "queries"], predictions: Float[Tensor, "queries"]) -> float:
    """Return Spearman's correlation, with mean ranks for ties; NaN if targets or predictions are constant."""
    from scipy.stats import rankdata  # noqa: PLC0415 - a classification needs no SciPy here

    ranks = [rankdata(numbers.numpy()) for numbers in (targets, predictions)]
    first, second = (of_each - of_each.mean() for of_each in ranks)
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / scale if scale else math.nan


def _mean_of_defined(values: Sequence[float]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan


def _notes_on_undefined(per_target: dict[str, tuple[float, ...]]) -> list[str]:
    """Return one note per number of undefined targets, with its metrics."""
    keys_of_count: dict[int, list[str]] = {}
    for key, values in per_target.items():
        keys_of_count.setdefault(sum(map(math.isnan, values)), []).append(key)
    targets = len(next(iter(per_target.values())))
    return [
        f"{', '.join(keys)}: NaN for {count:,} of {targets:,} targets, because these targets or their predictions are "
        "constant. "
        + ("Pass targets that differ." if count == targets else "The value is the mean of the other targets.")
        for count, keys in keys_of_count.items()
        if count
    ]
