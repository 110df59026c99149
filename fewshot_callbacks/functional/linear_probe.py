"""`linear_probe`: how well a linear classifier, or a linear regression, on frozen embeddings does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._notes import ReportFields, notes_on_largest_class
from fewshot_callbacks.functional._probe_inputs import CALL, read_targets
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional._repeated import hashes_of
from fewshot_callbacks.functional._ridge import (
    ClassTargets,
    LeaveGroupOut,
    LeaveOneOut,
    NumberTargets,
    Ridge,
    Selection,
    TrainingItems,
    blocks_of,
    bring_groups_together,
    fit_ridge,
    summed,
)
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import EVERYTHING, Items, ItemSets, Share
from fewshot_callbacks.functional.means import exact_mean
from fewshot_callbacks.functional.neighbours import positive_number
from fewshot_callbacks.functional.retrieval.report import Values, or_none
from fewshot_callbacks.functional.retrieval.settings import memory_bytes, several
from fewshot_callbacks.functional.statistics import Interval, clustered_mean_interval, normal_quantile
from fewshot_callbacks.settings import Metric
from fewshot_callbacks.storage.stored_rows import StoredRows, as_one_tensor
from fewshot_callbacks.system.words import counted, none_has, verb

# Strengths that are tried by default: from hardly any penalty to a classifier that sees little but the class means.
DEFAULT_STRENGTHS = tuple(10.0**exponent for exponent in range(-6, 3))
# Weaker ones are lost in the rounding of the eigenvalues, and stronger ones leave no prediction but the mean.
WEAKEST, STRONGEST = 1e-9, 1e9
# Suffix of a metric, and among how many classes with the highest scores the right one has to be.
PLACES = {"": 1, "_top5": 5}
# Scores that differ by less are equal. Targets are 1 and -1, and rounding is far below it.
SAME_SCORE = 1e-9
# Mean squared errors that differ by less than this share are equal.
SAME_ERROR = 1e-12
# A note says that an end of the strengths is the best if its error is lower than that of its neighbour by this share. On a
# plateau of equal errors a strength beyond the end is no better.
NOTED_GAIN = 1e-3

_ONE = "probe_leave_one_out"
_GROUP = "probe_leave_group_out"
_R2_ONE = "probe_r2_leave_one_out"
_R2_GROUP = "probe_r2_leave_group_out"
PROBE_METRICS = (
    Metric("probe", "pairs", None, "Queries whose class a linear classifier on the gallery scores highest."),
    Metric("probe_top5", "pairs", None, "Queries whose class is among the five that it scores highest."),
    Metric(_ONE, "pairs", None, "Gallery items whose class is scored highest by a classifier fitted without the item."),
    Metric(_GROUP, "pairs", None, "Gallery items whose class is scored highest by a classifier without their group."),
    Metric("probe_r2", "pairs", None, "Share of the variance of the targets that a linear regression explains.", None),
    Metric("probe_spearman", "pairs", None, "Rank correlation of targets and predictions.", (-1.0, 1.0)),
    Metric(_R2_ONE, "pairs", None, "probe_r2 of the gallery, each item predicted by a fit without it.", None),
    Metric(_R2_GROUP, "pairs", None, "probe_r2 of the gallery, each item predicted by a fit without its group.", None),
)
"""What `linear_probe` reports."""


@equal_with_nan
@dataclass(frozen=True)
class ProbeReport(Values):
    """The result of `linear_probe`."""

    _known: ClassVar = PROBE_METRICS

    values: dict[str, float]
    """metric -> value: for classes `probe`, `probe_top5` (of more than five classes) and `probe_leave_one_out`, which
    falls to 0 for features that know nothing of balanced classes, since without an item its class is the smallest; for a
    regression `probe_r2`, `probe_spearman` and `probe_r2_leave_one_out`, means over the targets; with `gallery_groups` also
    `probe_leave_group_out` or `probe_r2_leave_group_out`. NaN where it is undefined, with a note"""
    intervals: dict[str, Interval]
    """metric -> confidence interval of an accuracy over other queries and classes, or groups, of queries, with this gallery;
    a regression has none"""
    confidence: float
    """confidence level of the intervals"""
    strength: float
    """strength of the penalty that was chosen, in units of the mean of those eigenvalues of the gallery's scatter matrix
    (centred, a sum over items) that are not zero; of equal errors the first that was passed"""
    alpha: float
    """the same penalty as `alpha` of scikit-learn's `Ridge` and `RidgeClassifier`"""
    errors: dict[float, float]
    """strength -> mean squared error of the predictions of left-out gallery items, or groups, by which it was chosen; of all
    items, also of those in `gallery_not_counted`"""
    queries: int
    """queries that the values are of"""
    queries_without_match: int
    """queries that are left out, since no gallery item has their label"""
    gallery: int
    """items that the probe was fitted on"""
    gallery_not_counted: int
    """gallery items that are not counted in the accuracy of left-out items, or groups, since no other one has their label"""
    classes: int | None
    """classes of the gallery; None for a regression"""
    per_target: dict[str, tuple[float, ...]]
    """metric -> value of each target of a regression; empty for classes"""
    notes: tuple[str, ...]
    """what a reader of the numbers should know"""
    per_query: dict[str, Float[Tensor, "all_queries"]] = field(compare=False, repr=False)
    """metric -> value of each query, 0, 1, or a share between them where classes tie; NaN for those left out; empty for a
    regression"""

    def __str__(self) -> str:
        """Return the values, one in a line with its interval, and the notes."""
        sizes = f"{counted(self.queries, 'query')}, {counted(self.gallery, 'gallery item')}"
        if self.classes is not None:
            sizes += f" of {counted(self.classes, 'class')}"
        tried = f", the best of {len(self.errors)} that were tried" if len(self.errors) > 1 else ""
        penalty = f"strength {self.strength:g}{tried}; it is alpha {self.alpha:.4g} of scikit-learn"
        return "\n".join([sizes, penalty, *self.lines(), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    @property
    def messages(self) -> tuple[str, ...]:
        """The notes, as of a `RetrievalReport`."""
        return self.notes

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dictionaries for JSON (what is not finite becomes None)."""
        plain = ("queries", "queries_without_match", "gallery", "gallery_not_counted", "classes")
        penalty = {
            "strength": self.strength,
            "alpha": or_none(self.alpha),
            "errors": {f"{strength:g}": or_none(error) for strength, error in self.errors.items()},
        }
        per_target = {key: [or_none(value) for value in values] for key, values in self.per_target.items()}
        rest = {"confidence": or_none(self.confidence), "per_target": per_target, "notes": list(self.notes)}
        return self.tables() | penalty | {name: getattr(self, name) for name in plain} | rest


@default_mode()
def linear_probe(
    queries: Any,
    query_labels: Any | None = None,
    gallery: Any | None = None,
    gallery_labels: Any | None = None,
    *,
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    query_groups: Any | None = None,
    gallery_groups: Any | None = None,
    strengths: Any = DEFAULT_STRENGTHS,
    confidence: float = 0.95,
    memory_mb: float | None = None,
    share: Share = EVERYTHING,
) -> ProbeReport:
    """Fit a linear classifier, or a linear regression, on a gallery, and evaluate it on the queries.

    It is ridge regression in closed form: on targets of 1 for the class of an item and -1 for all others, as scikit-learn's
    `RidgeClassifierCV`, or on numbers, as `RidgeCV`. Of some strengths of its penalty, the one with the least squared error
    of exact leave-one-out predictions of the gallery is chosen, as these choose among their `alphas`. Nothing is drawn at
    random, no step is iterated, and neither the scale nor a rotation of the embeddings matters.

    Items of one group, such as a patient or a video, resemble each other. Leave-one-out then predicts an item from its
    near copies, and promises too much. With `gallery_groups`, the strength is chosen by exact predictions of each group by
    the fit without it.

    Args:
        queries: (queries, dim) finite floating-point rows. `Shards` bring their labels, ids and groups; with `is_gallery`
            they are divided into queries and gallery.
        query_labels: (queries,) integers or strings, the classes; or floats, (queries,) or (queries, targets), for a
            regression. A query whose class the gallery does not have is left out and counted. Labels in files are classes.
        gallery: (gallery, dim) items that the probe is fitted on.
        gallery_labels: Classes or targets of the gallery, in the same form.
        query_ids: (queries,) identity of each query, where some come several times: the first of each id is counted. A note
            says so if some queries have the id of a gallery item.
        gallery_ids: (gallery,) identity of each gallery item: the probe is fitted on the first of each id.
        query_groups: (queries,) integers or strings; the queries of one group are taken to be dependent, in place of those
            of one class, and intervals are over other groups.
        gallery_groups: (gallery,) integers or strings; the items of one group are left out together. A group is in
            memory at once, in float64.
        strengths: Strengths of the penalty that are tried, or one, from 1e-9 to 1e9, in units of the mean of those
            eigenvalues of the gallery's scatter matrix that are not zero; by default nine from 1e-6 to 100. A note says so
            if an end of them is clearly the best.
        confidence: Confidence level of the intervals, in (0, 1).
        memory_mb: `Shards` whose vectors take more than a quarter of it, in MB, stay in their files, which are then read up
            to eight times; None is 512. With `gallery_groups` they are mapped, or copied to a temporary file.
        share: Which of the queries and of the gallery this process holds, where several make the call together. They
            exchange sums: dim x dim and dim x classes numbers; items are only sent if groups are, to have each group in one
            process. A process without items passes empty tensors, and empty groups and places where others pass them. All
            return the report of one process but for rounding: the same strength and accuracy.

    Returns:
        A frozen report on the CPU. An accuracy lies in [0, 1]; R2 is 1 at best, and below 0 if the mean of the targets
        predicts the queries better.

    Raises:
        ValueError: If shapes or types do not fit, embeddings or targets hold NaN or Inf, the gallery is missing, or has a
            single class, group or item, no query has a class of the gallery, a strength is out of range, or processes that
            make the call together make it in different ways; the same in every process.

    Examples:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> labels = torch.arange(90) % 3
        >>> embeddings = torch.eye(8)[labels] + 0.4 * torch.randn(90, 8, generator=generator)
        >>> report = linear_probe(embeddings[:30], labels[:30], embeddings[30:], labels[30:])
        >>> round(report["probe"], 3), report.strength
        (0.967, 0.1)
        >>> ages = embeddings @ torch.arange(8.0)
        >>> round(linear_probe(embeddings[:30], ages[:30], embeddings[30:], ages[30:])["probe_r2"], 3)
        1.0
    """
    processes = share.processes
    with processes.together():
        strengths = _checked_strengths(strengths)
        normal_quantile(confidence)
        memory = memory_bytes(CALL, memory_mb)
        settings = {"strengths": strengths, "confidence": confidence, "memory_mb": memory_mb}
        share.refuse_other_settings(CALL, settings)
        columns = {"query_labels": query_labels, "gallery_labels": gallery_labels}
        targets = read_targets(columns, processes)
        if targets is not None:
            # Targets are no codes. Those of an item are found by their row, also after items were left out.
            columns = {name: hashes_of(of_side, torch.float64) for name, of_side in targets.items()}
            rows = {"query_rows": "query_labels", "gallery_rows": "gallery_labels"}
            columns |= {name: torch.arange(len(targets[labels])) for name, labels in rows.items()}
        columns |= {"query_ids": query_ids, "gallery_ids": gallery_ids}
        columns |= {"query_groups": query_groups, "gallery_groups": gallery_groups}
        sets = read_items(CALL, queries, gallery, columns, share=share, memory=memory)
        if targets is None:
            probe: _Classification | _Regression = _Classification.of(sets, confidence)
        else:
            probe = _Regression.of(sets, targets)
        return _report(probe, strengths, confidence, processes)


def _checked_strengths(strengths: Any) -> list[float]:
    """Return the strengths that are tried, each once."""
    fix = f"Pass numbers from {WEAKEST:g} to {STRONGEST:g}, such as (0.001, 0.1, 10)."
    numbers = [positive_number(CALL, "strengths", strength, fix) for strength in several(strengths)]
    if not numbers:
        raise InputError(f"{CALL}: strengths is empty. {fix}")
    for number in numbers:
        if not WEAKEST <= number <= STRONGEST:
            raise InputError(f"{CALL}: strengths holds {number:g}. {fix}")
    return list(dict.fromkeys(numbers))


# ------------------------------------------------------------------------------------------------------- classification


class _GalleryAccuracy(NamedTuple):
    """Accuracy of left-out gallery items."""

    value: float
    interval: Interval
    not_counted: int
    """items whose class does not remain in the gallery"""
    note: str | None


@dataclass(frozen=True, eq=False)
class _Classification:
    """Queries and gallery of this process, with classes that are numbered from 0 on."""

    queries: Items
    classes_of_queries: Int[Tensor, "queries"]
    """of all processes; -1 for a class that the gallery does not have"""
    items: TrainingItems
    """gallery items; with groups, whole groups"""
    item_classes: Int[Tensor, "items"]
    groups: Int[Tensor, "items"] | None
    classes: int
    confidence: float
    notes: list[str]

    @classmethod
    def of(cls, sets: ItemSets, confidence: float) -> _Classification:
        """Return the sets of a classification. *Collective*.

        Raises:
            ValueError: If the gallery has a single class, or no query has one of its classes; in every process.
        """
        queries, gallery = sets.queries, sets.gallery
        present = gallery.labels.unique()
        if len(present) < 2:
            label = present[0].item() if sets.label_names is None else sets.label_names[int(present[0])]
            raise InputError(
                f"{CALL}: all {gallery.length:,} gallery items have the label {label!r}, and a classifier needs two "
                "classes. Pass a gallery of several classes."
            )
        query_classes = _index_in(present, queries.labels)
        if not bool((query_classes >= 0).any()):
            raise InputError(
                f"{CALL}: {none_has(queries.length, 'query')} a label of the gallery, so no prediction "
                "can be right. Pass a gallery with labels of the queries, or query_labels of the same kind."
            )
        notes = [*_notes_on_items(sets), *_note_on_copies(sets)]
        classes = _index_in(present, gallery.of_rows("labels"))
        rows, classes, groups = _whole_groups(sets, classes)
        items = TrainingItems(rows, ClassTargets(classes, len(present)))
        return cls(queries, query_classes, items, classes, groups, len(present), confidence, notes)

    def measure(self, ridge: Ridge, penalty: float, processes: Processes) -> ReportFields:
        """Return the accuracy of queries and of left-out gallery items at a penalty. *Collective*."""
        fields, notes = self._accuracy_of_queries(ridge, penalty, processes)
        one_out = LeaveOneOut(ridge, self.items).predictions(penalty)
        of_gallery = {_ONE: self._accuracy_of_gallery(_ONE, one_out, None, processes)}
        if self.groups is not None:
            group_out = LeaveGroupOut(ridge, self.items, self.groups).predictions(penalty)
            of_gallery[_GROUP] = self._accuracy_of_gallery(_GROUP, group_out, self.groups, processes)
        fields["values"] |= {key: accuracy.value for key, accuracy in of_gallery.items()}
        fields["intervals"] |= {key: accuracy.interval for key, accuracy in of_gallery.items()}
        fields["gallery_not_counted"] = max(accuracy.not_counted for accuracy in of_gallery.values())
        notes += [accuracy.note for accuracy in of_gallery.values() if accuracy.note is not None]
        return ReportFields(fields, notes)

    def _accuracy_of_queries(self, ridge: Ridge, penalty: float, processes: Processes) -> ReportFields:
        """Return the accuracy of the queries whose class the gallery has. *Collective*."""
        queries = self.queries
        width = max(queries.rows.shape[1], self.classes)
        blocks = blocks_of(len(queries.rows), width)
        predictions = ((block, ridge.predictions(queries.rows[block], penalty)) for block in blocks)
        hits = _hits(predictions, self.classes_of_queries[queries.places].clamp(min=0))
        if self.classes <= PLACES["_top5"]:
            del hits["_top5"]
        is_known = self.classes_of_queries >= 0
        units = queries.columns.get("groups", queries.labels)  # whatever is independent of others
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
                f"{without_match:,} of {len(is_known):,} queries are left out: no gallery item has their label."
            )
        if math.isnan(intervals["probe"].low):
            kind = "group" if "groups" in queries.columns else "class"
            notes.append(
                f"The interval of probe is NaN: the {counted(known, 'query')} {verb(known, 'is', 'are')} of one {kind}, and "
                "it needs two."
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
        """Return the accuracy of left-out gallery items, over those whose class remains. *Collective*.

        Args:
            key: Name of the metric, for the note.
            predictions: Items of this process, and their predictions by fits without them.
            groups: The groups that are left out; None for single items.
            processes: All that hold items.
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
        """Return whether the class of each item remains in the gallery without the item, or its group. *Collective*."""
        sizes_of_process = torch.bincount(self.item_classes, minlength=self.classes)
        sizes = torch.from_numpy(processes.summed(sizes_of_process.numpy()))
        together = torch.ones_like(self.item_classes)  # items of a class that are left out with an item of it
        if groups is not None:
            pairs = groups.unique(return_inverse=True)[1] * self.classes + self.item_classes
            _, number, size_of_pair = pairs.unique(return_inverse=True, return_counts=True)
            together = size_of_pair[number]
        remains: Tensor = sizes[self.item_classes] > together
        return remains


def _index_in(present: Int[Tensor, "classes"], codes: Int[Tensor, "items"]) -> Int[Tensor, "items"]:
    """Return the index of each code among ascending ones; -1 for a code that is not among them."""
    index = torch.searchsorted(present, codes).clamp(max=len(present) - 1)
    return torch.where(present[index] == codes, index, -1)


def _whole_groups(sets: ItemSets, labels: Tensor) -> tuple[Tensor | StoredRows, Tensor, Int[Tensor, "items"] | None]:
    """Return rows, labels and groups of gallery items; if there are groups, whole groups. *Collective*.

    Args:
        sets: Queries and gallery.
        labels: Class or targets of each gallery item of this process.
    """
    rows = sets.gallery.rows
    if "groups" not in sets.gallery.columns:
        return rows, labels, None
    groups = sets.gallery.of_rows("groups")
    columns = [as_one_tensor(rows), labels]
    (whole_rows, whole_labels), groups = bring_groups_together(columns, groups, sets.processes)
    return whole_rows, whole_labels, groups


def _notes_on_items(sets: ItemSets) -> list[str]:
    """Return notes on ids and groups, and on those that both sets have.

    Raises:
        ValueError: If the gallery has a single group.
    """
    notes = [*sets.notes_on_ids]
    if len(sets.gallery.columns.get("groups", torch.arange(2)).unique()) < 2:
        raise InputError(
            f"{CALL}: all gallery items are of one group, and a fit without it has no items. Pass gallery_groups of "
            "several groups, or none to leave out single items."
        )
    for of_queries, of_gallery in sets.exclusions("ids"):
        shared = int(np.isin(of_queries, of_gallery).sum())
        if shared:
            notes.append(
                f"{shared:,} of {len(of_queries):,} queries have the id of a gallery item: the probe was fitted on them. "
                "Leave them out of the gallery to measure on new items, or give different items different ids."
            )
    for of_queries, of_gallery in sets.exclusions("groups"):
        distinct = np.unique(of_queries)
        shared = int(np.isin(distinct, of_gallery).sum())
        if shared:
            notes.append(
                f"{shared:,} of {len(distinct):,} groups of the queries are in the gallery, too: the probe was fitted on "
                "items that resemble these queries. Divide the data by groups to measure on new ones, or give different "
                "groups different names."
            )
    return notes


def _note_on_copies(sets: ItemSets) -> list[str]:
    """Return a note on queries that are gallery items, if there are many. *Collective*."""
    queries, gallery = (items.without("ids", "groups") for items in (sets.queries, sets.gallery))
    copies = replace(sets, queries=queries, gallery=gallery).hashed().copies()
    if not copies.is_noted:
        return []
    cure = "leave out the queries from the gallery"
    return [copies.note("The probe was fitted on them with the right label", cure)]


def _hits(
    predictions: Iterable[tuple[Selection, Float[Tensor, "chosen classes"]]], classes: Int[Tensor, "items"]
) -> dict[str, Float[Tensor, "items"]]:
    """Return the share of the orders of ties in which the class of each item is among the first, by suffix of the metric."""
    hits = {suffix: torch.zeros(len(classes), dtype=torch.float64) for suffix in PLACES}
    for items, scores in predictions:
        score = scores.gather(1, classes[items][:, None])
        higher = (scores > score + SAME_SCORE).sum(dim=1)
        equal = ((scores - score).abs() <= SAME_SCORE).sum(dim=1)
        for suffix, places in PLACES.items():
            hits[suffix][items] = ((places - higher).double() / equal).clamp(0, 1)
    return hits


# ----------------------------------------------------------------------------------------------------------- regression


@dataclass(frozen=True, eq=False)
class _Regression:
    """Queries and gallery of this process, with targets."""

    queries: Items
    query_targets: Float[Tensor, "queries targets"]
    items: TrainingItems
    """gallery items; with groups, whole groups"""
    groups: Int[Tensor, "items"] | None
    notes: list[str]

    @classmethod
    def of(cls, sets: ItemSets, targets: Mapping[str, Float[Tensor, "rows targets"]]) -> _Regression:
        """Return the sets of a regression, given the targets of all rows of this process. *Collective*.

        Raises:
            ValueError: If the gallery has a single item.
        """
        queries, gallery = sets.queries, sets.gallery
        if gallery.length < 2:
            raise InputError(
                f"{CALL}: the gallery has a single item, and a regression needs two. Pass a larger gallery."
            )
        query_targets = targets["query_labels"][queries.of_rows("rows")]
        gallery_targets = targets["gallery_labels"][gallery.of_rows("rows")]
        notes = _notes_on_items(sets)
        is_whole = torch.equal(gallery_targets, gallery_targets.round())
        if gallery_targets.shape[1] == 1 and all(sets.processes.gather(is_whole)):
            notes.append(
                "The labels are floats, so that this is a regression, and all of the gallery are whole numbers. If they are "
                "classes, pass integers: gallery_labels.long()."
            )
        rows, gallery_targets, groups = _whole_groups(sets, gallery_targets)
        return cls(queries, query_targets, TrainingItems(rows, NumberTargets(gallery_targets)), groups, notes)

    def measure(self, ridge: Ridge, penalty: float, processes: Processes) -> ReportFields:
        """Return R2 and the rank correlation of queries, and R2 of left-out gallery items. *Collective*."""
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
            _R2_ONE: self._r2_of_gallery(LeaveOneOut(ridge, self.items), ridge, penalty, processes),
        }
        if self.groups is not None:
            way = LeaveGroupOut(ridge, self.items, self.groups)
            per_target[_R2_GROUP] = self._r2_of_gallery(way, ridge, penalty, processes)
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
        """Return R2 of left-out gallery items for each target; NaN for one that is constant. *Collective*."""
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
    """Return the smallest and the largest number of each column over all processes. *Collective*."""
    range_of_process = [targets.amin(dim=0), targets.amax(dim=0)] if len(targets) else None
    ranges = [of_process for of_process in processes.gather(range_of_process) if of_process is not None]
    lowest = torch.stack([low for low, _ in ranges]).amin(dim=0)
    highest = torch.stack([high for _, high in ranges]).amax(dim=0)
    return lowest, highest


def _r2(targets: Float[Tensor, "queries"], predictions: Float[Tensor, "queries"]) -> float:
    """Return 1 minus the squared error over that of the mean of the targets; NaN if these are constant."""
    if targets.min() == targets.max():
        return math.nan
    return 1 - float((targets - predictions).square().sum() / (targets - targets.mean()).square().sum())


def _rank_correlation(targets: Float[Tensor, "queries"], predictions: Float[Tensor, "queries"]) -> float:
    """Return Spearman's correlation, in which equal numbers have their mean rank; NaN if one of both is constant."""
    from scipy.stats import rankdata  # noqa: PLC0415 - a classification needs no SciPy here

    ranks = [rankdata(numbers.numpy()) for numbers in (targets, predictions)]
    first, second = (of_each - of_each.mean() for of_each in ranks)
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / scale if scale else math.nan


def _mean_of_defined(values: Sequence[float]) -> float:
    """Return the mean of the numbers that are not NaN; NaN if there are none."""
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan


def _notes_on_undefined(per_target: dict[str, tuple[float, ...]]) -> list[str]:
    """Return a note for each number of undefined targets, with the metrics that it is of."""
    keys_of_count: dict[int, list[str]] = {}
    for key, values in per_target.items():
        keys_of_count.setdefault(sum(map(math.isnan, values)), []).append(key)
    targets = len(next(iter(per_target.values())))
    return [
        f"{', '.join(keys)}: NaN for {count:,} of {targets:,} targets, for which targets or predictions are constant. "
        + ("Pass targets that differ." if count == targets else "The value is the mean of the others.")
        for count, keys in keys_of_count.items()
        if count
    ]


# ------------------------------------------------------------------------------------------------------------ the report


def _report(
    probe: _Classification | _Regression, strengths: Sequence[float], confidence: float, processes: Processes
) -> ProbeReport:
    """Fit the probe, choose the strength of its penalty, and return what it measures. *Collective*."""
    ridge = fit_ridge(probe.items, processes)
    scale = ridge.mean_eigenvalue
    way: LeaveOneOut | LeaveGroupOut = LeaveOneOut(ridge, probe.items)
    if probe.groups is not None:
        way = LeaveGroupOut(ridge, probe.items, probe.groups)
    [squares] = summed([way.squared_errors([strength * scale for strength in strengths])], processes)
    of_strengths = (squares / (ridge.items * probe.items.targets.columns)).tolist()
    errors = dict(zip(strengths, of_strengths, strict=True))
    strength = _best(errors)
    findings = probe.measure(ridge, strength * scale, processes)
    return ProbeReport(
        confidence=confidence,
        strength=strength,
        alpha=strength * scale * ridge.scale * ridge.scale,
        errors=errors,
        gallery=ridge.items,
        notes=(*findings.notes, *_notes_on_fit(ridge, errors, strength)),
        **findings.fields,
    )


def _best(errors: dict[float, float]) -> float:
    """Return the first strength with the least error, but for rounding."""
    least = min(errors.values())
    return next(strength for strength, error in errors.items() if error <= least * (1 + SAME_ERROR))


def _notes_on_fit(ridge: Ridge, errors: dict[float, float], strength: float) -> list[str]:
    """Return notes on a gallery without directions, or on a strength at an end of those that were tried."""
    if not ridge.rank:
        return [
            f"All {ridge.items:,} gallery items have the same embedding: the embedding has collapsed, and the probe "
            "predicts the same for every query."
        ]
    ordered = sorted(errors)
    if len(ordered) == 1 or strength not in (ordered[0], ordered[-1]):
        return []
    is_weakest = strength == ordered[0]
    neighbour = ordered[1] if is_weakest else ordered[-2]
    beyond = strength / 100 if is_weakest else strength * 100
    gains = errors[strength] < (1 - NOTED_GAIN) * errors[neighbour]
    if not gains or not WEAKEST <= beyond <= STRONGEST:
        return []
    end = "weakest" if is_weakest else "strongest"
    return [
        f"The strength with the least error, {strength:g}, is the {end} that was tried, and another one may be better. "
        f"Pass strengths beyond it, such as {beyond:g}."
    ]
