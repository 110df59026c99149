"""Differences of two evaluations, with intervals: of the same queries, or of training and validation classes."""

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
    """Metric -> its two values and the interval of the first minus the second; `print` shows a table."""

    def __str__(self) -> str:
        """Return a table with one metric in a line."""
        columns = ("metric", "first", "second", "first - second", "interval", "beyond chance")
        rows = [(name, *difference.in_words()) for name, difference in self.items()]
        note = "A difference above zero means that the first value is larger. Without an interval, chance is not known."
        return "\n".join([*table(columns, rows), note])

    def __repr__(self) -> str:
        return str(self)


def compare_reports(first: ReportSource, second: ReportSource, confidence: float = 0.95) -> dict[str, Difference]:
    """Return the difference of every metric of two evaluations of the same queries, with its interval.

    Each query is compared with itself, so that what makes a query easy or hard for both models does not add to the
    uncertainty. The interval is that of the mean of the differences, robust to the dependence of queries of one class.
    Grouped Recall is compared group by group. Pooled values (F1, recall at a precision, thresholds) have no interval:
    both ends are NaN. Where both have the same value of each query, as a model against itself has, the interval is 0 to 0:
    these values are equal. Where all but a few do, the interval rests on those few, and is narrow.

    The queries are the same if their labels are, and their ids. If one of the reports has no ids, only labels and the
    queries that `max_queries` has drawn are compared: different items with the same labels are not noticed. Where
    relevance was passed in place of labels, only the number of queries is compared, or their clusters. A warning says
    that the galleries differ.

    Args:
        first: Report of one evaluation, or the path or address of a file that `RetrievalReport.save` has written.
        second: The same of another evaluation of the same queries in the same order, for instance with another model.
        confidence: Confidence level of the intervals, in (0, 1).

    Returns:
        A dictionary, which `print` shows as a table. For each metric that both reports have: its two values, and the
        interval of first minus second, so that a difference above zero means that the first is larger. Empty if they
        share no metric.

    Raises:
        ValueError: If the two reports are not of the same queries, a file is not a saved report, or `confidence` is not in
            (0, 1).

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> labels = torch.arange(200) % 20
        >>> clean = torch.nn.functional.one_hot(labels).float()
        >>> good, bad = (evaluate_retrieval(clean + noise * torch.randn(200, 20), labels) for noise in (0.2, 1.0))
        >>> compare_reports(good, bad)["mAP"].is_beyond_chance
        True
    """
    normal_quantile(confidence)
    first = as_report(first)
    second = as_report(second)
    refuse_other_queries("compare_reports", {"the first report": first, "the second report": second})
    first_values = first.metrics()
    second_values = second.metrics()
    grouped = {}
    if torch.equal(first.query_labels, second.query_labels):  # groups of strings are named by codes, which may differ
        grouped = _grouped_intervals(first.grouped, second.grouped, confidence)
    differences = Differences()
    for name in first_values:
        if name not in second_values:
            continue
        requested = first.requested(name)
        if requested != second.requested(name):
            raise InputError(
                f"compare_reports: {name!r} is a metric of a user, and another one in each evaluation. Evaluate both with "
                "the same metric, or give one of the two another pattern."
            )
        interval = grouped.get(name, UNKNOWN)
        if requested.of_queries in first.per_query:
            interval = paired_interval(first, second, requested, confidence)
        differences[name] = Difference(first_values[name], second_values[name], interval)
    return differences


def as_report(source: ReportSource) -> RetrievalReport:
    """Return a report as it is, or load it from its file."""
    return source if isinstance(source, RetrievalReport) else RetrievalReport.load(source)


def refuse_other_queries(call: str, reports: Mapping[str, RetrievalReport]) -> None:
    """Refuse reports whose queries are not those of the first report; warn if a gallery is another one.

    Args:
        call: The public function, for messages.
        reports: The name of each report in messages, and the report.

    Raises:
        ValueError: If the labels, ids or drawn queries of two reports differ.
    """
    (first_name, first), *others = reports.items()
    for name, report in others:
        kind = _other_queries(first, report)
        if kind:
            raise InputError(
                f"{call}: {first_name} has {first.queries:,} queries, {name} has {report.queries:,}, and {kind} are not the "
                "same in the same order. Evaluate the same items with both models, with the same max_queries and seed."
            )
    other_galleries = [name for name, report in others if _has_other_gallery(first, report)]
    if other_galleries:
        warnings.warn(
            f"{call}: the gallery of {' and of '.join(other_galleries)} is not that of {first_name} (other labels, ids or "
            "relevance), so a difference may come from the galleries. Evaluate with the same gallery to compare models.",
            stacklevel=3,
        )


def _other_queries(first: RetrievalReport, second: RetrievalReport) -> str:
    """Return what of the queries of two reports differs; empty if they are the same, as far as the reports tell."""
    if not _labels_are_equal(first, second):
        return "their labels"
    if first.query_ids_digest is not None and second.query_ids_digest is not None:
        return "" if first.query_ids_digest == second.query_ids_digest else "their ids"
    drawn = (first.drawn, second.drawn)
    if first.drawn is None or second.drawn is None:
        return "" if drawn == (None, None) else "the drawn queries"
    return "" if torch.equal(first.drawn, second.drawn) else "the drawn queries"


def _has_other_gallery(first: RetrievalReport, second: RetrievalReport) -> bool:
    """Return whether the galleries of two reports differ, as far as the reports tell."""
    ids = (first.gallery_ids_digest, second.gallery_ids_digest)
    return first.gallery_digest != second.gallery_digest or (None not in ids and ids[0] != ids[1])


def _labels_are_equal(first: RetrievalReport, second: RetrievalReport) -> bool:
    """Return whether the queries of two reports have the same labels; strings may have other codes in another gallery."""
    if first.label_names == second.label_names:
        return torch.equal(first.query_labels, second.query_labels)
    if first.label_names is None or second.label_names is None:
        return False
    first_names = [first.label_names[code] for code in first.query_labels.tolist()]
    return first_names == [second.label_names[code] for code in second.query_labels.tolist()]


def paired_differences(
    first: RetrievalReport, second: RetrievalReport, requested: RequestedMetric
) -> tuple[Float[Tensor, "units"], Int[Tensor, "units"] | None]:
    """Return the differences of a metric that both have for each query, and their clusters.

    They are differences of classes, without clusters, for a mean over classes.
    """
    differences = first.per_query[requested.of_queries] - second.per_query[requested.of_queries]
    if requested.is_macro:
        return class_means(differences, first.query_labels)[1], None
    return differences, first.query_labels


def paired_interval(
    first: RetrievalReport, second: RetrievalReport, requested: RequestedMetric, confidence: float
) -> Interval:
    """Return the interval of the difference of a metric that both reports have for each query."""
    if are_all_zero(first.per_query[requested.of_queries] - second.per_query[requested.of_queries]):
        return EQUAL
    differences, clusters = paired_differences(first, second, requested)
    return paired_difference_interval(differences, clusters, confidence, requested.metric.range)


def _grouped_intervals(
    first: GroupedRecall | None, second: GroupedRecall | None, confidence: float
) -> dict[str, Interval]:
    """Return the interval of the difference of Grouped Recall, by metric; empty if the groups are not the same."""
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
    """Recall of training classes minus recall of validation classes.

    Differences lie in [-1, 1]. An interval that lies above zero means overfitting, unless the training classes are easier:
    then an untrained network shows the gap, too.

    Examples:
        >>> from fewshot_callbacks.functional import Difference, Interval
        >>> seen, unseen = Difference(0.9, 0.7, Interval(0.1, 0.3)), Difference(0.8, 0.4, Interval(0.3, 0.5))
        >>> gap = GeneralizationGap({1: seen}, {1: unseen}, 10, (100, 50), (20.0, 20.0), 0.95)
        >>> gap.is_overfitting
        True
    """

    grouped: dict[int, Difference]
    """K -> Grouped Recall@K of training classes, of validation classes, and the interval of the difference"""
    recall: dict[int, Difference]
    """K -> the same for plain Recall@K, which also depends on the number of classes"""
    group_size: int
    """number of classes in a group of Grouped Recall"""
    classes: tuple[int, int]
    """number of training and of validation classes that were measured"""
    items_per_class: tuple[float, float]
    """mean number of items per class, in training and in validation"""
    confidence: float
    """confidence level of the intervals"""

    @property
    def is_overfitting(self) -> bool:
        """Whether the interval of the gap in Grouped Recall at the smallest K lies above zero."""
        return self.grouped[min(self.grouped)].interval.low > 0

    def metrics(self) -> dict[str, float]:
        """Return all values under the names with which they are logged, the primary metric first."""
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
        """Return a sentence or two on the gap."""
        k = min(self.grouped)
        grouped = self.grouped[k]
        plain = self.recall[k]
        gap = f"{grouped.value:+.3f} [{grouped.interval.low:+.3f}, {grouped.interval.high:+.3f}]"
        level = f"{self.confidence:.0%} interval"
        if math.isnan(grouped.interval.low):
            verdict = f"The gap of {grouped.value:+.3f} has no interval, so it cannot be interpreted"
        elif grouped.interval.low > 0:
            verdict = f"The gap of {gap} is beyond its {level}: overfitting, unless an untrained network shows it, too"
        elif grouped.interval.high < 0:
            verdict = f"The gap of {gap} is below zero, beyond its {level}: the validation classes are easier"
        else:
            verdict = f"The gap of {gap} is within chance ({self.confidence:.0%})"
        return (
            f"Grouped Recall@{k} among {self.group_size} classes: {grouped.first:.3f} on training classes, "
            f"{grouped.second:.3f} on validation classes. {verdict}. (Plain Recall@{k}: {plain.first:.3f} among "
            f"{self.classes[0]} training classes, {plain.second:.3f} among {self.classes[1]} validation classes.)"
        )


def generalization_gap(training: RetrievalReport, validation: RetrievalReport) -> GeneralizationGap:
    """Return the difference in recall between a report of training classes and a report of validation classes.

    Both sets should have about the same number of items per class: recall rises with that number.

    Args:
        training: Report of items of training classes, embedded in evaluation mode, without augmentation.
        validation: Report of items of classes that the model has not seen.

    Returns:
        The differences, in [-1, 1], for each K that both reports have; the two sets are taken as independent.

    Raises:
        ValueError: If a report has no Grouped Recall, or the two have no K in common.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> labels = torch.arange(100).repeat_interleave(5)
        >>> seen = torch.nn.functional.one_hot(labels).float()
        >>> unseen = torch.randn(500, 20, generator=torch.Generator().manual_seed(0))
        >>> gap = generalization_gap(*(evaluate_retrieval(part, labels) for part in (seen, unseen)))
        >>> gap.is_overfitting, gap.grouped[1].first
        (True, 1.0)
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
            f"generalization_gap: the reports share no K: Grouped Recall at {sorted(training.grouped.at)} and "
            f"{sorted(validation.grouped.at)}, and {', '.join(training.values)} and {', '.join(validation.values)}. "
            "Evaluate both with metrics=('grouped_recall@1', 'recall@1')."
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
