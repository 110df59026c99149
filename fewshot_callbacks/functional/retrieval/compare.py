"""Differences between two evaluations, with intervals: for the same queries, or for training and validation classes."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._table import table
from fewshot_callbacks.functional.means import class_means
from fewshot_callbacks.functional.retrieval.grouped_recall import GroupedRecall, over_splits
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.statistics import (
    EQUAL,
    UNKNOWN,
    Difference,
    Interval,
    are_all_zero,
    independent_difference_interval,
    normal_quantile,
    paired_difference_interval,
)
from fewshot_callbacks.settings import RequestedMetric

# A report, or the path or address of a saved one.
ReportSource = RetrievalReport | str | os.PathLike[str]
# A sentence that `GeneralizationGapMonitor` replaces, because its arguments have other names.
NO_GROUPS_REMEDY = (
    "Evaluate both sets with the same label_groups, smaller or with more classes, so that each set has two groups."
)


class Differences(dict[str, Difference]):
    """Metric -> its two values, and the interval of first minus second. `print` shows a table."""

    def __str__(self) -> str:
        """Return a table with one metric per line."""
        columns = ("metric", "first", "second", "first - second", "interval", "significant")
        rows = [(name, *difference.in_words()) for name, difference in self.items()]
        note = "A difference above zero means that the first value is larger. Without an interval, significance is unknown."
        return "\n".join([*table(columns, rows), note])

    def __repr__(self) -> str:
        return str(self)


def compare_reports(first: ReportSource, second: ReportSource, confidence: float = 0.95) -> dict[str, Difference]:
    """Return the difference of every metric between two evaluations of the same queries, with confidence intervals.

    The comparison is paired: each query is compared with itself, so that queries that are hard for both models do not widen
    the interval. A difference is significant if its interval does not contain 0. The interval accounts for the dependence
    between queries of the same class. Grouped Recall is compared group by group. Pooled metrics (`pair_f1`, recall at a
    precision, thresholds) have no interval: both ends are NaN. If both reports have the same value for every query, the
    interval is 0 to 0. If only a few queries differ, the interval depends on these few and is narrow.

    Two reports have the same queries if the labels and ids of the queries are equal. If a report has no ids, only the
    labels and the queries that `max_queries` has drawn are compared, so different items with the same labels are not
    detected. If `relevance` was passed instead of labels, only the number of queries, or their clusters, are compared. You
    get a warning if the galleries differ.

    Args:
        first: Report of one evaluation, or the path or address of a file that `RetrievalReport.save` has written.
        second: Report, path or address of another evaluation of the same queries in the same order, for instance with
            another model.
        confidence: Confidence level of the intervals, in (0, 1).

    Returns:
        A dictionary with the metrics that both reports have; empty if they share none. Each `Difference` has both values
        and the interval of first minus second. `print` shows a table.

    Raises:
        ValueError: If the two reports have different queries, a file is not a saved report, or `confidence` is not in
            (0, 1).

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> labels = torch.arange(200) % 20
        >>> noise = torch.randn(200, 20, generator=torch.Generator().manual_seed(0))
        >>> metrics = ("mAP", "recall@1", "recall@5")
        >>> new, old = (
        ...     evaluate_retrieval(torch.eye(20)[labels] + scale * noise, labels, metrics=metrics) for scale in (0.3, 0.31)
        ... )
        >>> differences = compare_reports(new, old)
        >>> print(differences)
          metric   first  second  first - second            interval  significant
             mAP  0.4591  0.4265         +0.0326  +0.0285 to +0.0362          yes
        recall@1  0.6050  0.5700         +0.0350  +0.0112 to +0.0779          yes
        recall@5  0.9450  0.9100         +0.0350  +0.0112 to +0.0779          yes
        A difference above zero means that the first value is larger. Without an interval, significance is unknown.
        >>> round(differences["mAP"].value, 4), differences["mAP"].is_beyond_chance
        (0.0326, True)
    """
    normal_quantile(confidence)
    first = as_report(first)
    second = as_report(second)
    refuse_other_queries("compare_reports", {"the first report": first, "the second report": second})
    first_values = first.metrics()
    second_values = second.metrics()
    grouped = {}
    if torch.equal(first.query_labels, second.query_labels):  # codes of string labels may differ
        grouped = _grouped_intervals(first.grouped, second.grouped, confidence)
    differences = Differences()
    for name in first_values:
        if name not in second_values:
            continue
        requested = first.requested(name)
        if requested != second.requested(name):
            raise InputError(
                f"compare_reports: {name!r} is a different user-defined metric in each report. Evaluate both with the same "
                "metric, or give one of the metrics another pattern."
            )
        interval = grouped.get(name, UNKNOWN)
        if requested.of_queries in first.per_query:
            interval = paired_interval(first, second, requested, confidence)
        differences[name] = Difference(first_values[name], second_values[name], interval)
    return differences


def as_report(source: ReportSource) -> RetrievalReport:
    """Return the report, read from its file if this is a path or an address."""
    return source if isinstance(source, RetrievalReport) else RetrievalReport.load(source)


def refuse_other_queries(call: str, reports: Mapping[str, RetrievalReport]) -> None:
    """Refuse reports with other queries than the first report; warn if their galleries differ."""
    (first_name, first), *others = reports.items()
    for name, report in others:
        kind = _other_queries(first, report)
        if kind:
            raise InputError(
                f"{call}: {first_name} has {first.queries:,} queries, {name} has {report.queries:,}, and {kind} differ, or "
                "their order does. Evaluate the same items with both models, with the same max_queries and seed."
            )
    other_galleries = [name for name, report in others if _has_other_gallery(first, report)]
    if other_galleries:
        warnings.warn(
            f"{call}: the gallery of {' and of '.join(other_galleries)} differs from the gallery of {first_name} in its "
            "labels, ids or relevance, so a difference may come from the galleries. To compare models, evaluate them with "
            "the same gallery.",
            stacklevel=3,
        )


def _other_queries(first: RetrievalReport, second: RetrievalReport) -> str:
    """Return what differs between the queries of two reports; empty if the reports show no difference."""
    if not _labels_are_equal(first, second):
        return "their labels"
    if first.query_ids_digest is not None and second.query_ids_digest is not None:
        return "" if first.query_ids_digest == second.query_ids_digest else "their ids"
    drawn = (first.drawn, second.drawn)
    if first.drawn is None or second.drawn is None:
        return "" if drawn == (None, None) else "the drawn queries"
    return "" if torch.equal(first.drawn, second.drawn) else "the drawn queries"


def _has_other_gallery(first: RetrievalReport, second: RetrievalReport) -> bool:
    """Return whether the reports show that their galleries differ."""
    ids = (first.gallery_ids_digest, second.gallery_ids_digest)
    return first.gallery_digest != second.gallery_digest or (None not in ids and ids[0] != ids[1])


def _labels_are_equal(first: RetrievalReport, second: RetrievalReport) -> bool:
    """Return whether the queries of two reports have the same labels. A string may have another code in each report."""
    if first.label_names == second.label_names:
        return torch.equal(first.query_labels, second.query_labels)
    if first.label_names is None or second.label_names is None:
        return False
    first_names = [first.label_names[code] for code in first.query_labels.tolist()]
    return first_names == [second.label_names[code] for code in second.query_labels.tolist()]


def paired_differences(
    first: RetrievalReport, second: RetrievalReport, requested: RequestedMetric
) -> tuple[Float[Tensor, "units"], Int[Tensor, "units"] | None]:
    """Return the difference in a metric for each query, and the queries' clusters.

    For a mean over classes, return the difference for each class, and None.
    """
    differences = first.per_query[requested.of_queries] - second.per_query[requested.of_queries]
    if requested.is_macro:
        return class_means(differences, first.query_labels)[1], None
    return differences, first.query_labels


def paired_interval(
    first: RetrievalReport, second: RetrievalReport, requested: RequestedMetric, confidence: float
) -> Interval:
    """Return the interval of the difference in a metric that both reports have for each query."""
    if are_all_zero(first.per_query[requested.of_queries] - second.per_query[requested.of_queries]):
        return EQUAL
    differences, clusters = paired_differences(first, second, requested)
    return paired_difference_interval(differences, clusters, confidence, requested.metric.range)


def _grouped_intervals(
    first: GroupedRecall | None, second: GroupedRecall | None, confidence: float
) -> dict[str, Interval]:
    """Return metric -> interval of the difference in Grouped Recall; empty if the groups differ."""
    if first is None or second is None or (first.labels, first.unmatched) != (second.labels, second.unmatched):
        return {}
    suffix = "_miss" if first.unmatched == "miss" else ""
    intervals = {}
    for k, values in first.per_group.items():
        if k in second.per_group:
            of_splits = values - second.per_group[k]
            name = f"grouped_recall@{k}{suffix}"
            intervals[name] = EQUAL
            if not are_all_zero(of_splits):
                intervals[name] = over_splits(
                    paired_difference_interval(of_groups, confidence=confidence) for of_groups in of_splits
                )
    return intervals


@equal_with_nan
@dataclass(frozen=True)
class GeneralizationGap:
    """Recall on training classes minus recall on validation classes; the result of `generalization_gap`.

    Differences are in [-1, 1]. An interval above zero means overfitting, unless the training classes are easier. In that
    case, an untrained network shows the gap, too.

    Attributes:
        grouped: K -> Grouped Recall@K on training classes and on validation classes, and the interval of the difference.
        recall: K -> the same for plain Recall@K, which also depends on the number of classes.
        group_size: Number of classes in each group of Grouped Recall.
        classes: Number of training classes, and of validation classes.
        items_per_class: Mean number of items per class in training, and in validation.
        confidence: Confidence level of the intervals.

    Examples:
        >>> from fewshot_callbacks.functional import Difference, Interval
        >>> seen, unseen = Difference(0.9, 0.7, Interval(0.1, 0.3)), Difference(0.8, 0.4, Interval(0.3, 0.5))
        >>> gap = GeneralizationGap({1: seen}, {1: unseen}, 10, (100, 50), (20.0, 20.0), 0.95)
        >>> round(gap.grouped[1].value, 4), gap.is_overfitting
        (0.2, True)
    """

    grouped: dict[int, Difference]
    recall: dict[int, Difference]
    group_size: int
    classes: tuple[int, int]
    items_per_class: tuple[float, float]
    confidence: float

    @property
    def is_overfitting(self) -> bool:
        """Whether the interval of the gap in Grouped Recall at the smallest K is above zero."""
        return self.grouped[min(self.grouped)].interval.low > 0

    def metrics(self) -> dict[str, float]:
        """Return logged name -> value, the primary metric first."""
        values: dict[str, float] = {}
        for metric, differences in (("grouped_recall", self.grouped), ("recall", self.recall)):
            for k, difference in differences.items():
                name = f"{metric}@{k}"
                values |= {
                    name: difference.value,
                    f"{name}_low": difference.interval.low,
                    f"{name}_high": difference.interval.high,
                    f"train_{name}": difference.first,
                    f"val_{name}": difference.second,
                }
        return values

    def in_words(self) -> str:
        """Return a summary of the gap in a few sentences."""
        k = min(self.grouped)
        grouped = self.grouped[k]
        plain = self.recall[k]
        gap = f"{grouped.value:+.3f} [{grouped.interval.low:+.3f}, {grouped.interval.high:+.3f}]"
        level = f"{self.confidence:.0%} interval"
        if math.isnan(grouped.interval.low):
            verdict = f"The gap of {grouped.value:+.3f} has no interval and cannot be interpreted"
        elif grouped.interval.low > 0:
            verdict = (
                f"The gap of {gap} is significant ({level}): overfitting, unless an untrained network shows it, too"
            )
        elif grouped.interval.high < 0:
            verdict = f"The gap of {gap} is significantly below zero ({level}): the validation classes are easier"
        else:
            verdict = f"The gap of {gap} is not significant ({self.confidence:.0%} interval)"
        return (
            f"Grouped Recall@{k} among {self.group_size} classes: {grouped.first:.3f} on training classes, "
            f"{grouped.second:.3f} on validation classes. {verdict}. (Plain Recall@{k}: {plain.first:.3f} among "
            f"{self.classes[0]} training classes, {plain.second:.3f} among {self.classes[1]} validation classes.)"
        )


def generalization_gap(training: RetrievalReport, validation: RetrievalReport) -> GeneralizationGap:
    """Return the difference in recall between training classes and validation classes, with confidence intervals.

    Both sets should have about the same number of items per class because recall rises with this number.

    Args:
        training: Report on items of training classes, embedded in evaluation mode and without augmentation.
        validation: Report on items of classes that the model has not seen.

    Returns:
        The differences, in [-1, 1], for each K that both reports have. The intervals treat the two sets as independent.

    Raises:
        ValueError: If a report has no Grouped Recall, or the reports have no K in common.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> labels = torch.arange(100).repeat_interleave(5)
        >>> seen = torch.nn.functional.one_hot(labels).float()
        >>> unseen = torch.randn(500, 20, generator=torch.Generator().manual_seed(0))
        >>> gap = generalization_gap(*(evaluate_retrieval(part, labels) for part in (seen, unseen)))
        >>> gap.grouped[1].first, round(gap.grouped[1].second, 4), gap.is_overfitting
        (1.0, 0.08, True)
    """
    for name, report in (("training", training), ("validation", validation)):
        if report.grouped is None:
            reason = report.fact_of_classes
            others = [note for note in report.notes if note != reason]
            facts = [reason] if reason else []
            if others:
                facts.append(f"Its notes: {' '.join(others)}")
            raise InputError(
                f"generalization_gap: the {name} report has no Grouped Recall. {' '.join([*facts, ''])}{NO_GROUPS_REMEDY}"
            )
    assert training.grouped is not None
    assert validation.grouped is not None
    grouped = training.grouped.minus(validation.grouped)
    assert training.grouped.group_size is not None  # which `minus` refuses
    ks = sorted(k for k in grouped if all(f"recall@{k}" in report.values for report in (training, validation)))
    if not ks:
        raise InputError(
            "generalization_gap: the reports have no K in common for Grouped Recall and recall. They have Grouped Recall at "
            f"{sorted(training.grouped.at)} and {sorted(validation.grouped.at)}, and the metrics "
            f"{', '.join(training.values)} and {', '.join(validation.values)}. Evaluate both with "
            "metrics=('grouped_recall@1', 'recall@1')."
        )
    recall = {}
    for k in ks:
        name = f"recall@{k}"
        interval = independent_difference_interval(
            training[name], training.intervals[name], validation[name], validation.intervals[name]
        )
        recall[k] = Difference(training[name], validation[name], interval)
    return GeneralizationGap(
        grouped={k: grouped[k] for k in ks},
        recall=recall,
        group_size=training.grouped.group_size,
        classes=(training.classes, validation.classes),
        items_per_class=(training.gallery / training.classes, validation.gallery / validation.classes),
        confidence=training.grouped.confidence,
    )
