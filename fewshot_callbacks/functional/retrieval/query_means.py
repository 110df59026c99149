"""The mean of a metric over queries or over classes, and its interval."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.functional.means import exact_mean, macro_mean
from fewshot_callbacks.functional.statistics import Interval, clustered_mean_interval, macro_mean_interval
from fewshot_callbacks.settings import RequestedMetric


def mean_over_queries(
    requested: RequestedMetric, values: Float[Tensor, "queries"], labels: Int[Tensor, "queries"], confidence: float
) -> tuple[float, Interval]:
    """Return the mean over the queries with a value (macro metrics: over class means), and its interval."""
    bounds = requested.metric.range
    mean = mean_of_queries(requested, values, labels)
    if requested.is_macro:
        return mean, macro_mean_interval(values, labels, confidence, bounds)
    present = ~values.isnan()
    return mean, clustered_mean_interval(values[present], labels[present], confidence, bounds)


def mean_of_queries(
    requested: RequestedMetric, values: Float[Tensor, "queries"], labels: Int[Tensor, "queries"]
) -> float:
    """Return the mean over the queries with a value (macro metrics: over class means)."""
    return macro_mean(values, labels) if requested.is_macro else exact_mean(values[~values.isnan()])
