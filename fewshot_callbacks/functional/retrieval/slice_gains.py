"""`compare_slices`: the slices in which one of two evaluations of the same queries is better.

The confidence level applies to all intervals together (Bonferroni). The p values are corrected for the number of slices
(Holm, 1979).
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
    """The difference in a metric between two evaluations, in one slice.

    Attributes:
        difference: Both values, and the interval of first minus second. The confidence level applies to the intervals of
            all slices together.
        p_value: p value of the hypothesis of no difference, corrected for the number of slices (Holm); NaN if the variance
            cannot be estimated.
        queries: Number of queries that have a value in both evaluations.

    Examples:
        >>> from fewshot_callbacks.functional import Interval
        >>> gain = SliceGain(Difference(0.75, 0.5, Interval(0.125, 0.375)), 0.01, 40)
        >>> gain.difference.value, gain.p_value
        (0.25, 0.01)
    """

    difference: Difference
    p_value: float
    queries: int


class SliceGains(dict[int | str, SliceGain]):
    """Slice -> the difference in a metric between two evaluations. `print` shows a table, the smallest gain first.

    Args:
        gains: Slice -> the difference in it.
        attribute: The attribute that the slices are values of.
        requested: The metric.
        confidence: Confidence level of all intervals together.

    Examples:
        >>> from fewshot_callbacks.functional import Interval, requested_metric
        >>> roof = SliceGain(Difference(0.75, 0.5, Interval(0.125, 0.375)), 0.01, 40)
        >>> print(SliceGains({"roof": roof}, "camera", requested_metric("mAP"), 0.95)["roof"].difference)
        0.7500 - 0.5000 = +0.2500 (+0.1250 to +0.3750), significant
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
        """Return the cells of each slice for a table, the smallest gain first."""
        gains = sorted(self.items(), key=lambda item: self._order(item[1].difference.value))
        return [
            (str(name), *difference.in_words()[:4], p_in_words(p_value), f"{queries:,}")
            for name, (difference, p_value, queries) in gains
        ]

    @property
    def explanation(self) -> str:
        """The sentence below the table."""
        return (
            f"{self.metric}: the confidence level of all intervals together is {100 * self.confidence:g} %. p is corrected "
            f"for {counted(len(self), 'slice')} (Holm)."
        )

    def __str__(self) -> str:
        """Return a table with one slice per line, the smallest gain first."""
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
    """Return the difference in a metric for each slice, between two evaluations of the same queries.

    Each query is compared with itself, as in `compare_reports`.

    Args:
        first: Report of one evaluation with `slices`, or the path or address of a file that `RetrievalReport.save` has
            written.
        second: Report, path or address of another evaluation of the same queries. It may have no `slices`.
        attribute: A key of the `slices` that were passed to `evaluate_retrieval`.
        metric: A metric that both reports have for each query; by default the first metric of the first report.
        confidence: Confidence level of all intervals together, in (0, 1).

    Returns:
        Slice -> difference with the interval of first minus second, and p value. `print` shows a table, the smallest gain
        first.

    Raises:
        ValueError: If the reports have different queries or different slices, the first report does not have the attribute,
            or a report does not have the metric.

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
        recall@1: the confidence level of all intervals together is 95 %. p is corrected for 2 slices (Holm).
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
    """Return, for each attribute of the first report, the gains in its slices.

    The metric is the first that both reports have for each query. The list is empty if there is no such metric.
    """
    common = [key for key in first.sliced_metrics() if key in second.sliced_metrics()]
    if not common:
        return []
    return [compare_slices(first, second, attribute, common[0], first.confidence) for attribute in first.slices]


def _refuse_other_slices(slices: Attribute, second: RetrievalReport, attribute: str) -> None:
    """Refuse a second report in which a query is in another slice."""
    if attribute in second.slices and second.slices[attribute].values() != slices.values():
        raise InputError(
            f"compare_slices: {attribute!r} of a query is not the same in both reports. Evaluate both with the same slices, "
            "or the second one without slices."
        )


def _common_metric(first: RetrievalReport, second: RetrievalReport, key: str | None) -> RequestedMetric:
    """Return a metric that both reports have for each query."""
    requested = first.sliced_metric("compare_slices", key)
    if second.sliced_metric("compare_slices", requested.key) != requested:
        raise InputError(
            f"compare_slices: {requested.key!r} is a different user-defined metric in each report. Evaluate both with the "
            "same metric, or give one of the metrics another pattern."
        )
    return requested


def _only_queries(
    report: RetrievalReport, requested: RequestedMetric, inside: Bool[Tensor, "queries"]
) -> RetrievalReport:
    """Return a report with only these queries, and only what a comparison by this metric needs."""
    values = report.per_query[requested.of_queries][inside]
    return replace(
        report,
        per_query={requested.of_queries: values},
        query_labels=report.query_labels[inside],
        drawn=None,
        slices={},
    )


def _gain(first: RetrievalReport, second: RetrievalReport, requested: RequestedMetric, confidence: float) -> SliceGain:
    """Return the difference in a metric for the queries of one slice. The p value is not yet corrected."""
    pair = (first, second)
    values = [
        mean_of_queries(requested, report.per_query[requested.of_queries], report.query_labels) for report in pair
    ]
    difference = Difference(values[0], values[1], paired_interval(*pair, requested, confidence))
    p_value = paired_difference_p_value(*paired_differences(*pair, requested), requested.metric.range)
    return SliceGain(difference, p_value, len(first.query_labels))
