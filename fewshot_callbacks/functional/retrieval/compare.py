"""Compares two evaluations of the same queries, query by query, with intervals of the differences."""

from __future__ import annotations

import torch

from fewshot_callbacks.functional.retrieval.grouped_recall import GroupedRecall, over_splits
from fewshot_callbacks.functional.retrieval.registry import asked_metric
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.statistics.class_means import class_means
from fewshot_callbacks.functional.statistics.intervals import (
    UNKNOWN,
    Difference,
    Interval,
    normal_quantile,
    paired_difference_interval,
)


def compare_reports(first: RetrievalReport, second: RetrievalReport, confidence: float = 0.95) -> dict[str, Difference]:
    """Compute the difference of every metric of two evaluations of the same queries, with its interval.

    Each query is compared with itself, so that what makes a query easy or hard for both models does not add to the
    uncertainty. The interval is that of the mean of the differences, robust to the dependence of queries of one class.
    Grouped Recall is compared group by group. Pooled values (F1, recall at a precision, thresholds) have no interval:
    both ends are NaN.

    Args:
        first: Report of one evaluation.
        second: Report of another evaluation of the same queries in the same order, for instance with another model.
        confidence: Confidence level of the intervals, in (0, 1).

    Returns:
        For each metric that both reports have: its two values, and the interval of first minus second. Empty if they
        share no metric.

    Raises:
        ValueError: If the two reports are not of the same queries, or `confidence` is not in (0, 1).

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
    labels = first.query_labels
    if not torch.equal(labels, second.query_labels) or first.label_names != second.label_names:
        raise ValueError(
            f"compare_reports: the first evaluation has {len(labels)} queries, the second {len(second.query_labels)}, "
            "and their labels are not the same in the same order. Evaluate the same items with both models."
        )
    values, others = first.metrics(), second.metrics()
    grouped = _grouped(first.grouped, second.grouped, confidence)
    differences = {}
    for name in (name for name in values if name in others):
        interval = UNKNOWN
        asked = asked_metric(name)
        if asked.of_queries in first.per_query:
            differing = first.per_query[asked.of_queries] - second.per_query[asked.of_queries]
            if asked.is_macro:
                interval = paired_difference_interval(class_means(differing, labels)[1], confidence=confidence)
            else:
                interval = paired_difference_interval(differing, labels, confidence)
        elif name in grouped:
            interval = grouped[name]
        differences[name] = Difference(values[name], others[name], interval)
    return differences


def _grouped(first: GroupedRecall | None, second: GroupedRecall | None, confidence: float) -> dict[str, Interval]:
    if first is None or second is None or first.per_group.keys() != second.per_group.keys():
        return {}
    intervals = {}
    for k, values in first.per_group.items():
        others = second.per_group[k]
        if first.labels == second.labels and first.unmatched == second.unmatched:  # the same groups
            splits = (paired_difference_interval(split, confidence=confidence) for split in values - others)
            intervals[f"grouped_recall@{k}{'_miss' if first.unmatched == 'miss' else ''}"] = over_splits(splits)
    return intervals
