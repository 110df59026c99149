"""The linear probe as a classifier: accuracy on queries and on left-out gallery items."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._notes import ReportFields, notes_on_largest_class
from fewshot_callbacks.functional._probe_inputs import CALL, notes_on_items, whole_groups
from fewshot_callbacks.functional._ridge import (
    ClassTargets,
    LeaveGroupOut,
    LeaveOneOut,
    Ridge,
    Selection,
    TrainingItems,
    blocks_of,
)
from fewshot_callbacks.functional.items import Items, ItemSets
from fewshot_callbacks.functional.means import exact_mean
from fewshot_callbacks.functional.statistics import Interval, clustered_mean_interval
from fewshot_callbacks.system.words import counted, none_has, verb

# Suffix of a metric -> number of classes with the highest scores among which the right class counts as a hit.
PLACES = {"": 1, "_top5": 5}
# Scores that differ by less are equal. Targets are 1 and -1, and rounding errors are far smaller.
SAME_SCORE = 1e-9

# Sentences that `ProbeMonitor` replaces, because its arguments have other names.
ONE_CLASS_REMEDY = "Pass a gallery with several classes."
NO_MATCH_REMEDY = "Pass a gallery with the labels of the queries, or query_labels of the same kind."
COPIES_REMEDY = "remove the queries from the gallery"

LEAVE_ONE_OUT = "probe_leave_one_out"
LEAVE_GROUP_OUT = "probe_leave_group_out"


class _GalleryAccuracy(NamedTuple):
    """Accuracy of left-out gallery items."""

    value: float
    interval: Interval
    not_counted: int
    """number of items without another item of their class in the fit"""
    note: str | None


@dataclass(frozen=True, eq=False)
class Classification:
    """Queries and gallery of this process, with classes numbered from 0."""

    queries: Items
    classes_of_queries: Int[Tensor, "queries"]
    """class of each query of all processes; -1 if the gallery does not have it"""
    items: TrainingItems
    """gallery items; if there are groups, whole groups"""
    item_classes: Int[Tensor, "items"]
    groups: Int[Tensor, "items"] | None
    classes: int
    confidence: float
    notes: list[str]

    @classmethod
    def of(cls, sets: ItemSets, confidence: float) -> Classification:
        """Return the data of a classification. *Collective*."""
        queries, gallery = sets.queries, sets.gallery
        present = gallery.labels.unique()
        if len(present) < 2:
            label = present[0].item() if sets.label_names is None else sets.label_names[int(present[0])]
            raise InputError(
                f"{CALL}: all {gallery.length:,} gallery items have the label {label!r}, but a classifier needs two "
                f"classes. {ONE_CLASS_REMEDY}"
            )
        query_classes = _index_in(present, queries.labels)
        if not bool((query_classes >= 0).any()):
            raise InputError(
                f"{CALL}: {none_has(queries.length, 'query')} a label of the gallery, so no prediction can be right. "
                f"{NO_MATCH_REMEDY}"
            )
        notes = [*notes_on_items(sets), *_note_on_copies(sets)]
        classes = _index_in(present, gallery.of_rows("labels"))
        rows, classes, groups = whole_groups(sets, classes)
        items = TrainingItems(rows, ClassTargets(classes, len(present)))
        return cls(queries, query_classes, items, classes, groups, len(present), confidence, notes)

    def measure(self, ridge: Ridge, penalty: float, processes: Processes) -> ReportFields:
        """Return the accuracy on queries and on left-out gallery items at a penalty. *Collective*."""
        fields, notes = self._accuracy_of_queries(ridge, penalty, processes)
        one_out = LeaveOneOut(ridge, self.items).predictions(penalty)
        of_gallery = {LEAVE_ONE_OUT: self._accuracy_of_gallery(LEAVE_ONE_OUT, one_out, None, processes)}
        if self.groups is not None:
            group_out = LeaveGroupOut(ridge, self.items, self.groups).predictions(penalty)
            of_gallery[LEAVE_GROUP_OUT] = self._accuracy_of_gallery(LEAVE_GROUP_OUT, group_out, self.groups, processes)
        fields["values"] |= {key: accuracy.value for key, accuracy in of_gallery.items()}
        fields["intervals"] |= {key: accuracy.interval for key, accuracy in of_gallery.items()}
        fields["gallery_not_counted"] = max(accuracy.not_counted for accuracy in of_gallery.values())
        notes += [accuracy.note for accuracy in of_gallery.values() if accuracy.note is not None]
        return ReportFields(fields, notes)

    def _accuracy_of_queries(self, ridge: Ridge, penalty: float, processes: Processes) -> ReportFields:
        """Return the accuracy on the queries whose class is in the gallery. *Collective*."""
        queries = self.queries
        width = max(queries.rows.shape[1], self.classes)
        blocks = blocks_of(len(queries.rows), width)
        predictions = ((block, ridge.predictions(queries.rows[block], penalty)) for block in blocks)
        hits = _hits(predictions, self.classes_of_queries[queries.places].clamp(min=0))
        if self.classes <= PLACES["_top5"]:
            del hits["_top5"]
        is_known = self.classes_of_queries >= 0
        units = queries.columns.get("groups", queries.labels)  # independent units of the intervals
        values = {
            f"probe{suffix}": queries.of_all(processes, of_process).masked_fill(~is_known, math.nan)
            for suffix, of_process in hits.items()
        }
        intervals = {key: clustered_mean_interval(of_all, units, self.confidence) for key, of_all in values.items()}
        known = int(is_known.sum())
        without_match = len(is_known) - known
        notes = [*self.notes]
        means = {key: exact_mean(of_all[is_known]) for key, of_all in values.items()}
        notes += notes_on_largest_class({"probe": means["probe"]}, self.classes_of_queries[is_known])
        if without_match:
            notes.append(
                f"{without_match:,} of {len(is_known):,} queries are left out, because no gallery item has their label."
            )
        if math.isnan(intervals["probe"].low):
            kind = "group" if "groups" in queries.columns else "class"
            notes.append(
                f"The interval of probe is NaN: the {counted(known, 'query')} {verb(known, 'is', 'are')} of one {kind}, but "
                "an interval needs two."
            )
        fields = {
            "values": means,
            "intervals": intervals,
            "queries": known,
            "queries_without_match": without_match,
            "classes": self.classes,
            "per_target": {},
            "per_query": values,
        }
        return ReportFields(fields, notes)

    def _accuracy_of_gallery(
        self,
        key: str,
        predictions: Iterable[tuple[Selection, Float[Tensor, "chosen classes"]]],
        groups: Int[Tensor, "items"] | None,
        processes: Processes,
    ) -> _GalleryAccuracy:
        """Return the accuracy on left-out gallery items, over items whose class remains in the fit. *Collective*.

        `predictions` are items of this process, predicted by fits without them. `groups` are the left-out groups; None
        for single items.
        """
        hits_of_process = _hits(predictions, self.item_classes)[""]
        units_of_process = self.item_classes if groups is None else groups
        parts = processes.gather((hits_of_process, units_of_process, self._class_remains(groups, processes)))
        hits, units, remains = (torch.cat(part) for part in zip(*parts, strict=True))
        not_counted = int((~remains).sum())
        note = None
        if not_counted:
            others = "no other item" if groups is None else "no item of another group"
            note = f"{not_counted:,} of {len(hits):,} gallery items are not counted in {key}: {others} has their label."
        if not_counted == len(hits):
            note = f"{key} is NaN. {note}"
        interval = clustered_mean_interval(hits[remains], units[remains], self.confidence)
        return _GalleryAccuracy(exact_mean(hits[remains]), interval, not_counted, note)

    def _class_remains(self, groups: Int[Tensor, "items"] | None, processes: Processes) -> Bool[Tensor, "items"]:
        """Return whether another item of the class remains if the item, or its group, is left out. *Collective*."""
        sizes_of_process = torch.bincount(self.item_classes, minlength=self.classes)
        sizes = torch.from_numpy(processes.summed(sizes_of_process.numpy()))
        together = torch.ones_like(
            self.item_classes
        )  # per item: number of items of its class that are left out with it
        if groups is not None:
            pairs = groups.unique(return_inverse=True)[1] * self.classes + self.item_classes
            _, number, size_of_pair = pairs.unique(return_inverse=True, return_counts=True)
            together = size_of_pair[number]
        remains: Tensor = sizes[self.item_classes] > together
        return remains


def _index_in(present: Int[Tensor, "classes"], codes: Int[Tensor, "items"]) -> Int[Tensor, "items"]:
    """Return the index of each code in the ascending `present`; -1 if it is not there."""
    index = torch.searchsorted(present, codes).clamp(max=len(present) - 1)
    return torch.where(present[index] == codes, index, -1)


def _note_on_copies(sets: ItemSets) -> list[str]:
    """Return a note if many queries are gallery items. *Collective*."""
    queries, gallery = (items.without("ids", "groups") for items in (sets.queries, sets.gallery))
    copies = replace(sets, queries=queries, gallery=gallery).hashed().copies()
    if not copies.is_noted:
        return []
    return [copies.note("The probe was fitted on them with the right label", COPIES_REMEDY)]


def _hits(
    predictions: Iterable[tuple[Selection, Float[Tensor, "chosen classes"]]], classes: Int[Tensor, "items"]
) -> dict[str, Float[Tensor, "items"]]:
    """Return, by suffix of the metric, the probability that the class of each item is among the first in random order."""
    hits = {suffix: torch.zeros(len(classes), dtype=torch.float64) for suffix in PLACES}
    for items, scores in predictions:
        score = scores.gather(1, classes[items][:, None])
        higher = (scores > score + SAME_SCORE).sum(dim=1)
        equal = ((scores - score).abs() <= SAME_SCORE).sum(dim=1)
        for suffix, places in PLACES.items():
            hits[suffix][items] = ((places - higher).double() / equal).clamp(0, 1)
    return hits
