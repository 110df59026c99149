"""`compare_slices`: in which slices one evaluation is better than another of the same queries.

The intervals of all slices hold together (Bonferroni), and the p values are corrected for the number of slices (Holm, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jaxtyping import Bool
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._table import table
from fewshot_callbacks.functional.p_values import holm, paired_difference_p_value
from fewshot_callbacks.functional.retrieval.compare import (
    ReportSource,
    as_report,
    paired_differences,
    paired_interval,
    refuse_other_queries,
)
from fewshot_callbacks.functional.retrieval.query_means import mean_of_queries
from fewshot_callbacks.functional.retrieval.ranking import p_in_words
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.retrieval.slices import Attribute, confidence_of_each
from fewshot_callbacks.functional.retrieval.values import or_none
from fewshot_callbacks.functional.statistics import Difference, normal_quantile
from fewshot_callbacks.settings import RequestedMetric
from fewshot_callbacks.system.terminal import printable
from fewshot_callbacks.system.words import counted


class SliceGain(NamedTuple):
    """The difference of a metric of two evaluations in a slice.

    Examples:
        >>> from fewshot_callbacks.functional import Interval
        >>> gain = SliceGain(Difference(0.75, 0.5, Interval(0.125, 0.375)), 0.01, 40)
        >>> gain.difference.value, gain.p_value
        (0.25, 0.01)
    """

    difference: Difference
    """the value of both, and the interval of first minus second; those of all slices hold together"""
    p_value: float
    """p value of no difference, corrected for the number of slices (Holm); NaN where there is no variance to judge by"""
    queries: int
    """number of queries that have a value in both"""


class SliceGains(dict[int | str, SliceGain]):
    """Slice -> the difference of a metric of two evaluations; `print` shows a table, the least gain first.

    Args:
        gains: Slice -> the difference in it.
        attribute: The attribute that has the slices as its values.
        requested: The metric.
        confidence: Confidence of all intervals together.

    Examples:
        >>> from fewshot_callbacks.functional import Interval, requested_metric
        >>> roof = SliceGain(Difference(0.75, 0.5, Interval(0.125, 0.375)), 0.01, 40)
        >>> print(SliceGains({"roof": roof}, "camera", requested_metric("mAP"), 0.95)["roof"].difference)
        0.7500 - 0.5000 = +0.2500 (+0.1250 to +0.3750), beyond chance
    """

    def __init__(
        self, gains: Mapping[int | str, SliceGain], attribute: str, requested: RequestedMetric, confidence: float
    ) -> None:
        super().__init__(gains)
        self.attribute = attribute
        self.metric = requested.key
        self.confidence = confidence
        self._sign = -1 if requested.metric.better == "lower" else 1

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of `rows`."""
        return self.attribute, "first", "second", "first - second", "interval", "p", "queries"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of each slice, the least gain first, for tables."""
        gains = sorted(self.items(), key=lambda item: self._order(item[1].difference.value))
        return [
            (str(name), *difference.in_words()[:4], p_in_words(p_value), f"{queries:,}")
            for name, (difference, p_value, queries) in gains
        ]

    @property
    def explanation(self) -> str:
        """A sentence on the table."""
        return (
            f"{self.metric}: all intervals together have {100 * self.confidence:g} % confidence, and p is corrected for "
            f"{counted(len(self), 'slice')} (Holm)."
        )

    def __str__(self) -> str:
        """Return a table with one slice in a line, the least gain first."""
        columns = [printable(column) for column in self.columns]
        rows = [(printable(name), *cells) for name, *cells in self.rows()]
        return "\n".join([*table(columns, rows), self.explanation])

    def _order(self, value: float) -> tuple[bool, float]:
        return math.isnan(value), self._sign * value

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the gains as numbers, strings and dictionaries for JSON (NaN becomes None)."""
        return {
            str(name): {
                **difference.to_dict(),
                "p": or_none(p_value),
                "queries": queries,
            }
            for name, (difference, p_value, queries) in self.items()
        }


def compare_slices(
    first: ReportSource,
    second: ReportSource,
    attribute: str,
    metric: str | None = None,
    confidence: float = 0.95,
) -> SliceGains:
    """Return the difference of a metric in each slice of two evaluations of the same queries, with interval and p value.

    Each query is compared with itself, as `compare_reports` does.

    Args:
        first: Report of one evaluation with `slices`, or the path or address of a file that `RetrievalReport.save` has
            written.
        second: The same of another evaluation of the same queries. It needs no `slices`.
        attribute: A key of `slices`.
        metric: A metric that both have for each query; by default the first of the first report.
        confidence: Confidence of all intervals together, in (0, 1).

    Returns:
        Slice -> difference, interval of first minus second, and p value. `print` shows a table, the least gain first.

    Raises:
        ValueError: If the reports are not of the same queries, their slices differ, the first has no such attribute, or one
            of them lacks the metric.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> labels = torch.arange(200) % 40
        >>> noise = torch.randn(200, 40, generator=torch.Generator().manual_seed(0))
        >>> cameras = ["roof", "door"] * 100
        >>> good, bad = (
        ...     evaluate_retrieval(torch.eye(40)[labels] + scale * noise, labels, slices={"camera": cameras})
        ...     for scale in (0.2, 0.5)
        ... )
        >>> print(compare_slices(good, bad, "camera", "recall@1"))
        camera   first  second  first - second            interval         p  queries
          door  0.8900  0.0900         +0.8000  +0.6715 to +0.9008  < 0.0001      100
          roof  0.8700  0.0600         +0.8100  +0.5862 to +0.9082  < 0.0001      100
        recall@1: all intervals together have 95 % confidence, and p is corrected for 2 slices (Holm).
    """
    normal_quantile(confidence)
    first = as_report(first)
    second = as_report(second)
    refuse_other_queries("compare_slices", {"the first report": first, "the second report": second})
    slices = first.attribute("compare_slices", attribute)
    _refuse_other_slices(slices, second, attribute)
    requested = _common_metric(first, second, metric)
    of_queries = requested.of_queries
    has_value = ~(first.per_query[of_queries] - second.per_query[of_queries]).isnan()
    level = confidence_of_each(confidence, len(slices.codes[has_value].unique()))
    gains = {}
    for code, name in enumerate(slices.names):
        inside = has_value & (slices.codes == code)
        of_slice = [_only_queries(report, requested, inside) for report in (first, second)]
        gains[name] = _gain(of_slice[0], of_slice[1], requested, level)
    corrected = holm([gain.p_value for gain in gains.values()])
    with_corrected = {
        name: gain._replace(p_value=p_value) for (name, gain), p_value in zip(gains.items(), corrected, strict=True)
    }
    return SliceGains(with_corrected, attribute, requested, confidence)


def compare_all_slices(first: RetrievalReport, second: RetrievalReport) -> list[SliceGains]:
    """Return the gains in the slices of each attribute of the first report.

    They are of the first metric that both reports have for each query. The list is empty if there is no such metric.
    """
    common = [key for key in first.sliced_metrics() if key in second.sliced_metrics()]
    if not common:
        return []
    return [compare_slices(first, second, attribute, common[0], first.confidence) for attribute in first.slices]


def _refuse_other_slices(slices: Attribute, second: RetrievalReport, attribute: str) -> None:
    """Refuse a second report in which a query has another value of the attribute."""
    if attribute in second.slices and second.slices[attribute].values() != slices.values():
        raise InputError(
            f"compare_slices: {attribute!r} of a query is not the same in both reports. Evaluate both with the same slices, "
            "or the second one without."
        )


def _common_metric(first: RetrievalReport, second: RetrievalReport, key: str | None) -> RequestedMetric:
    """Return a metric that both reports have for each query.

    Raises:
        ValueError: If one of them lacks it, or it is not the same metric in both.
    """
    requested = first.sliced_metric("compare_slices", key)
    if second.sliced_metric("compare_slices", requested.key) != requested:
        raise InputError(
            f"compare_slices: {requested.key!r} is a metric of a user, and another one in each evaluation. Evaluate both "
            "with the same metric, or give one of the two another pattern."
        )
    return requested


def _only_queries(
    report: RetrievalReport, requested: RequestedMetric, inside: Bool[Tensor, "queries"]
) -> RetrievalReport:
    """Return what a comparison by a metric needs of some queries of a report."""
    values = report.per_query[requested.of_queries][inside]
    return replace(
        report,
        per_query={requested.of_queries: values},
        query_labels=report.query_labels[inside],
        drawn=None,
        slices={},
    )


def _gain(first: RetrievalReport, second: RetrievalReport, requested: RequestedMetric, confidence: float) -> SliceGain:
    """Return the difference of a metric of the queries of a slice, with a p value that is not yet corrected."""
    pair = (first, second)
    values = [
        mean_of_queries(requested, report.per_query[requested.of_queries], report.query_labels) for report in pair
    ]
    difference = Difference(values[0], values[1], paired_interval(*pair, requested, confidence))
    p_value = paired_difference_p_value(*paired_differences(*pair, requested), requested.metric.range)
    return SliceGain(difference, p_value, len(first.query_labels))
