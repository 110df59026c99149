"""Intervals of means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Interval(NamedTuple):
    """Both ends of a confidence interval."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance between the ends."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Difference:
    """One metric of two sets, or of two evaluations of one set."""

    first: float
    second: float
    interval: Interval
    """of first minus second; NaN where nothing is known of it"""

    @property
    def value(self) -> float:
        """First minus second."""
        return self.first - self.second

    @property
    def is_beyond_chance(self) -> bool:
        """Whether the interval of the difference leaves out zero."""
        return self.interval.low > 0 or self.interval.high < 0


def normal_quantile(confidence: float) -> float:
    """How many standard errors an interval of this confidence reaches to either side: 1.96 for 0.95."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} is no probability between 0 and 1. Pass for instance 0.95.")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def exact_mean(values: Float[Tensor, "n"]) -> float:
    """The mean, rounded once: the same bits in whatever order the values come. NaN for no values.

    Examples:
        >>> import torch
        >>> exact_mean(torch.tensor([1e16, 1.0, -1e16, 1.0], dtype=torch.float64))
        0.5
    """
    return math.fsum(values.tolist()) / len(values) if len(values) else math.nan


def mean_interval(values: Float[Tensor, "n"], confidence: float = 0.95) -> Interval:
    """Interval of the mean of independent values, by the central limit theorem: mean ± z s / sqrt(n).

    Args:
        values: independent values; s is their sample standard deviation.
        confidence: share of such intervals that hold the true mean.

    Returns:
        Both ends; NaN for fewer than two values.

    Examples:
        >>> import torch
        >>> low, high = mean_interval(torch.tensor([0.5, 0.7, 0.6, 0.8]))
        >>> round(low, 3), round(high, 3)
        (0.523, 0.777)
    """
    n, quantile = len(values), normal_quantile(confidence)
    if n < 2:
        return Interval(math.nan, math.nan)
    values = values.double()
    centre = float(values.mean())
    half = quantile * float(values.std()) / math.sqrt(n)
    return Interval(centre - half, centre + half)


def clustered_mean_interval(
    values: Float[Tensor, "n"], clusters: Int[Tensor, "n"], confidence: float = 0.95
) -> Interval:
    """Interval of a mean whose values are dependent inside clusters (the queries of one class).

    The mean is a ratio of two sums over clusters; its variance is that of the linearised ratio, the cluster-robust
    (sandwich) estimator: C / (C - 1) * sum over clusters of (sum of deviations)^2 / n^2 (Liang and Zeger, 1986).

    Args:
        values: one value for each query.
        clusters: the class of each query, any integers.
        confidence: share of such intervals that hold the true mean.

    Returns:
        Both ends; NaN where there are fewer than two clusters.

    Examples:
        >>> import torch
        >>> values, classes = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1])
        >>> clustered_mean_interval(values, classes).half_width > mean_interval(values).half_width
        True
    """
    quantile = normal_quantile(confidence)
    number = clusters.unique(return_inverse=True)[1]
    count = int(number.max()) + 1 if len(number) else 0
    if count < 2:
        return Interval(math.nan, math.nan)
    values = values.double()
    centre = values.mean()
    sums = torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, number, values - centre)
    variance = count / (count - 1) * float(sums.square().sum()) / len(values) ** 2
    half = quantile * math.sqrt(variance)
    return Interval(float(centre) - half, float(centre) + half)
