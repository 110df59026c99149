"""Confidence intervals of mean metrics and of their differences, with the stated coverage.

A metric is between 0 and 1, and its values are skewed near 1: most classes are perfect, and a few are not. An interval of
mean ± 1.96 standard errors then covers the true value too rarely, and its width is 0 if every class is perfect. All
reports use these intervals instead:

- The standard error comes from the jackknife over the independent units: classes, groups of classes or episodes. (For
  clusters, this is CR3 of MacKinnon and White, 1985, and Bell and McCaffrey, 2002.) The jackknife also accounts for the
  different weights of units of different size.
- The degrees of freedom are Satterthwaite's (1946), from the fourth moment of the contributions of the units. If three of
  a hundred classes are imperfect, the variance is only known as well as three values allow. The degrees of freedom are at
  most the effective number of units (Kish, 1965) minus one.
- The interval of a mean in [0, 1] is a t interval on the logit scale. It cannot leave [0, 1], and it is skewed like the
  estimate.
- If all units have the same value, the variance cannot be estimated. The interval is then Gaffke's (2005) for values
  between 0 and 1. If all units are perfect, it equals the interval of Clopper and Pearson (1934).
- The interval of a paired difference is a t interval corrected for skewness (Hall, 1992). With eight or more units, the
  correction may move an end beyond the differences of all units and beyond the plain t interval. The plain t interval is
  used then. The interval of the difference of two independent means is combined from their intervals (Zou and Donner,
  2008).
- The interval of a mean of values without bounds, such as a loss over seeds, is Student's t interval.

Units count as independent of each other. `benchmarks/interval_coverage.py` measures how often each interval covers the true
value, and docs/research/measurements.md has the results. The interval of a mean over queries covers the true value too
rarely if few classes contain most of the queries and differ from the other classes. With class sizes of 5 to 1,000 queries
(Pareto, 1.1) that decide how difficult a class is, 95 % intervals cover the true mean in 71 to 86 % of the sets with 10
classes, and in 81 to 88 % with 40 classes (`--long-tailed`). Intervals of the mean over classes do so in 95 to 96 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._jackknife import (
    corrected_ends,
    jackknife,
    t_quantile,
    within_range,
)
from fewshot_callbacks.functional._labels import check_labels
from fewshot_callbacks.functional._reading import as_tensor
from fewshot_callbacks.functional.means import class_means, exact_mean

# The jackknife over classes needs this many classes more than an episode has. With eight classes and 5-way episodes,
# intervals covered the true value in 95 % of the sets (`benchmarks/episode_coverage.py`).
SPARE_CLASSES = 3


class Interval(NamedTuple):
    """The two ends of a confidence interval. The estimate is not necessarily in the middle.

    Examples:
        >>> low, high = interval = Interval(0.25, 0.75)
        >>> interval.half_width
        0.25
    """

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the distance between the two ends."""
        return (self.high - self.low) / 2


UNKNOWN = Interval(math.nan, math.nan)
# The interval of a difference if both evaluations have the same values.
EQUAL = Interval(0.0, 0.0)


@equal_with_nan
@dataclass(frozen=True)
class Difference:
    """The values of one metric for two sets, or two evaluations of one set, with the interval of their difference.

    Attributes:
        first: The first value.
        second: The second value.
        interval: Interval of first minus second; NaN if it is unknown.

    Examples:
        >>> change = Difference(0.75, 0.5, Interval(0.125, 0.375))
        >>> change.value, change.is_beyond_chance
        (0.25, True)
    """

    first: float
    second: float
    interval: Interval

    @property
    def value(self) -> float:
        """First minus second."""
        return self.first - self.second

    @property
    def is_equal(self) -> bool:
        """Whether both have the same value for each item, as for a model against itself. The interval is then 0 to 0."""
        return self.interval == EQUAL

    @property
    def is_beyond_chance(self) -> bool:
        """Whether the interval of the difference excludes zero; False if the interval is NaN."""
        return self.interval.low > 0 or self.interval.high < 0

    def __str__(self) -> str:
        """Return both values and their difference, first minus second, with its interval."""
        first, second, value, interval, _ = self.in_words()
        words = f"{first} - {second} = {value}"
        if interval:
            chance = "significant" if self.is_beyond_chance else "not significant"
            words += f" ({interval})" if self.is_equal else f" ({interval}), {chance}"
        return words

    def to_dict(self) -> dict[str, Any]:
        """Return the difference, its interval and whether it is significant, for JSON; NaN becomes None.

        Examples:
            >>> Difference(0.75, 0.5, Interval(0.125, 0.375)).to_dict()
            {'value': 0.25, 'interval': [0.125, 0.375], 'is_beyond_chance': True}
        """
        return {
            "value": None if math.isnan(self.value) else self.value,
            "interval": [None if math.isnan(end) else end for end in self.interval],
            "is_beyond_chance": None if math.isnan(self.interval.low) else self.is_beyond_chance,
        }

    def in_words(self) -> tuple[str, str, str, str, str]:
        """Return the table cells: both values, their difference, its interval and whether it is significant.

        The last two are empty if the interval is unknown, as for a pooled metric. If both have the same value for each item,
        the interval is replaced by a sentence.

        Examples:
            >>> Difference(0.75, 0.5, Interval(0.125, 0.375)).in_words()
            ('0.7500', '0.5000', '+0.2500', '+0.1250 to +0.3750', 'yes')
        """
        low, high = self.interval
        values = (f"{self.first:.4f}", f"{self.second:.4f}", f"{self.value:+.4f}")
        if math.isnan(low):
            return (*values, "", "")
        if self.is_equal:
            return (*values, "all values are equal", "no")
        return (*values, f"{low:+.4f} to {high:+.4f}", "yes" if self.is_beyond_chance else "no")


def normal_quantile(confidence: float) -> float:
    """Return the half-width of a normal interval in standard errors, such as 1.96 for a confidence of 0.95."""
    if not 0 < confidence < 1:
        raise InputError(f"confidence={confidence} is not between 0 and 1. Pass a confidence level such as 0.95.")
    upper = (1 + confidence) / 2
    # Near a confidence of 1, the upper share is rounded to 1, but the lower tail is not rounded to 0.
    return NormalDist().inv_cdf(upper) if upper < 1 else -NormalDist().inv_cdf((1 - confidence) / 2)


def mean_interval(values: Any, confidence: float = 0.95, parts: int = 1) -> Interval:
    """Return the interval of the mean of independent values between 0 and 1: a t interval on the logit scale.

    The module docstring has the method and its sources. The result does not depend on the order of the values.

    Args:
        values: Independent values in [0, 1], such as the recall of each group.
        confidence: Confidence level, in (0, 1): the share of such intervals that contain the true mean.
        parts: Number of independent parts in each value, such as the number of classes per group. It only matters if all
            values are 0 or all are 1, because then every part has this value, too. Otherwise the variance is estimated
            from the values.

    Returns:
        Both ends, in [0, 1]; NaN for fewer than two values.

    Raises:
        ValueError: If a value is not in [0, 1], or `confidence` is not in (0, 1).

    Examples:
        >>> import torch
        >>> low, high = mean_interval(torch.tensor([0.5, 0.7, 0.6, 0.8]))
        >>> round(low, 3), round(high, 3)
        (0.429, 0.821)
        >>> low, high = mean_interval(torch.ones(10))
        >>> round(low, 3), round(high, 3)
        (0.692, 1.0)
        >>> low, high = mean_interval(torch.ones(10), parts=10)
        >>> round(low, 3), round(high, 3)
        (0.964, 1.0)
    """
    values = _doubles(values, "values", "mean_interval")
    return _of_metric(values.tolist(), [1] * len(values), confidence, parts)


def clustered_mean_interval(
    values: Any, clusters: Any, confidence: float = 0.95, bounds: tuple[float, float] | None = (0.0, 1.0)
) -> Interval:
    """Return the interval of a mean of values that are dependent within clusters, such as the queries of a class.

    The module docstring has the method and its sources. The result depends neither on the order of the values nor on the
    names of the clusters. The interval is too narrow if few clusters contain most of the values and differ from the other
    clusters, because the largest clusters of another sample may be very different. The interval of the mean over clusters
    (`mean_interval` of their means) does not have this problem.

    Args:
        values: One value per query, within the bounds. Queries with NaN are left out.
        clusters: The class of each query, integers or strings.
        confidence: Confidence level, in (0, 1): the share of such intervals that contain the true mean.
        bounds: The smallest and the largest possible value. With None, or an infinite bound, the interval is a t interval.

    Returns:
        Both ends, within the bounds. NaN for fewer than two clusters and, without bounds, if all clusters have the same
        mean.

    Raises:
        ValueError: If a value is outside the bounds, or `confidence` is not in (0, 1).

    Examples:
        >>> import torch
        >>> values, classes = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1, 2, 2])
        >>> low, high = clustered_mean_interval(values, classes)
        >>> round(low, 3), round(high, 3)
        (0.007, 0.993)
    """
    call = "clustered_mean_interval"
    values = _doubles(values, "values", call)
    clusters = check_labels(clusters, len(values), "clusters", "values", call)
    low, width = low_and_width(bounds)
    _, means, sizes = class_means((values - low) / width, clusters)
    if bounds is None or math.isinf(bounds[1] - bounds[0]):
        return _t_interval(means.tolist(), sizes.tolist(), confidence)
    interval = _of_metric(means.tolist(), sizes.tolist(), confidence)
    return Interval(low + width * interval.low, low + width * interval.high)


def low_and_width(bounds: tuple[float, float] | None) -> tuple[float, float]:
    """Return the lower bound and the distance between the bounds; 0 and 1 if there are none, or if one is infinite."""
    if bounds is None or math.isinf(bounds[1] - bounds[0]):
        return 0.0, 1.0
    return bounds[0], bounds[1] - bounds[0]


def _t_interval(means: Sequence[float], sizes: Sequence[int], confidence: float) -> Interval:
    """Return the t interval of the mean of values without bounds, given the mean and the number of queries of each unit.

    It is NaN for fewer than two units, and if all units have the same mean, because their spread is then unknown.
    """
    normal_quantile(confidence)
    if len(means) < 2:
        return UNKNOWN
    mean, error, freedom, _ = jackknife(means, sizes)
    if not error:
        return UNKNOWN
    reach = t_quantile(confidence, freedom) * error
    return Interval(mean - reach, mean + reach)


def macro_mean_interval(
    values: Float[Tensor, "queries"],
    labels: Int[Tensor, "queries"],
    confidence: float = 0.95,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> Interval:
    """Return the interval of the macro mean, with the classes as the independent units (see `mean_interval`).

    Values are within the bounds, or NaN. The interval is NaN if fewer than two classes have a query with a value.
    Bounds of None mean that there are none.
    """
    classes, means, _ = class_means(values, labels)
    return clustered_mean_interval(means, classes, confidence, bounds)


def paired_difference_interval(
    differences: Any,
    clusters: Any | None = None,
    confidence: float = 0.95,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> Interval:
    """Return the interval of the mean of differences of a metric: a t interval, corrected for skewness (Hall, 1992).

    Two good models differ in few queries, and mostly to the advantage of one model, so the differences are skewed. With
    eight or more differences, the correction may exceed all of them. The plain t interval is used then. The module
    docstring has the method and its sources.

    Args:
        differences: (items,) first value minus second value, in [-1, 1] with the default bounds. NaN is left out.
        clusters: The class of each difference, integers or strings, if differences are dependent within classes.
        confidence: Confidence level, in (0, 1): the share of such intervals that contain the true difference.
        bounds: The smallest and the largest value that is subtracted. With None, or an infinite bound, the interval is a
            t interval.

    Returns:
        Both ends, in [-1, 1] with the default bounds. NaN for fewer than two differences or clusters and, without bounds, if
        all of them are equal.

    Raises:
        ValueError: If a difference is larger than the bounds allow, or `confidence` is not in (0, 1).

    Examples:
        >>> import torch
        >>> low, high = paired_difference_interval(torch.tensor([0.1, 0.2, 0.15, 0.1, 0.2]))
        >>> round(low, 3), round(high, 3)
        (0.088, 0.212)
    """
    normal_quantile(confidence)
    means, sizes = units_of(differences, clusters, "paired_difference_interval")
    if len(means) < 2:
        return UNKNOWN
    if bounds is None or math.isinf(bounds[1] - bounds[0]):
        return _t_interval(means, sizes, confidence)
    _, width = low_and_width(bounds)
    interval = _of_differences([mean / width for mean in means], sizes, confidence)
    return Interval(width * interval.low, width * interval.high)


def subset_difference_interval(
    subset: Float[Tensor, "items"],
    values: Float[Tensor, "items"],
    clusters: Int[Tensor, "items"],
    confidence: float = 0.95,
    bounds: tuple[float, float] | None = (0.0, 1.0),
) -> Interval:
    """Return the interval of the mean over a subset minus the mean over all items: a t interval over clusters.

    The two means share their values, so their difference varies much less than either mean. The mean over a subset is a
    ratio of two sums. It is linearised: each item gets a contribution, and the mean of the contributions is the difference.

    Values are NaN for other items, or without a value. Bounds of None mean that there are none. The interval is 0 to 0
    if all contributions are 0, for example if the subset is the whole set. It is NaN if the subset is empty, or for
    fewer than two clusters.

    Examples:
        >>> import torch
        >>> values = torch.tensor([1.0, 0.5, 1.0, 0.25, 0.5, 0.75])
        >>> subset = torch.tensor([torch.nan, 0.5, torch.nan, 0.25, 0.5, 0.75])
        >>> low, high = subset_difference_interval(subset, values, torch.arange(6))
        >>> round(low, 3), round(high, 3)
        (-0.45, 0.117)
    """
    is_kept = ~subset.isnan()
    count = int((~values.isnan()).sum())
    if not bool(is_kept.any()):
        return UNKNOWN
    mean = exact_mean(values[~values.isnan()])
    mean_of_subset = exact_mean(subset[is_kept])
    weight = count / int(is_kept.sum())
    of_subset = torch.where(is_kept, weight * (subset.double() - mean_of_subset), 0.0)
    contributions = of_subset - (values.double() - mean) + (mean_of_subset - mean)
    if are_all_zero(contributions):
        return EQUAL
    interval = paired_difference_interval(contributions, clusters, confidence, bounds=None)
    if bounds is None or math.isnan(interval.low):
        return interval
    width = bounds[1] - bounds[0]
    return Interval(max(-width, interval.low), min(width, interval.high))


def units_of(differences: Any, clusters: Any | None, call: str) -> tuple[list[float], list[int]]:
    """Return the mean and the number of differences of each independent unit: a cluster, or a single difference."""
    differences = _doubles(differences, "differences", call)
    if clusters is None:
        means: list[float] = differences[~differences.isnan()].tolist()
        return means, [1] * len(means)
    clusters = check_labels(clusters, len(differences), "clusters", "differences", call)
    _, means_of_clusters, counts = class_means(differences, clusters)
    return means_of_clusters.tolist(), counts.tolist()


def are_all_zero(differences: Float[Tensor, "*values"]) -> bool:
    """Return whether there are differences and all of them are 0; NaN is left out."""
    present = differences[~differences.isnan()]
    return len(present) > 0 and not bool(present.any())


def _of_differences(means: Sequence[float], sizes: Sequence[int], confidence: float) -> Interval:
    """Return the interval of the mean of differences in [-1, 1], given the mean and the number of values of each unit."""
    means = within_range(means, -1)
    estimate = jackknife(means, sizes)
    if not estimate.error:
        low, high = _of_equal_units((1 + estimate.mean) / 2, len(means), confidence)
        return Interval(2 * low - 1, 2 * high - 1)
    quantile = t_quantile(confidence, estimate.freedom)
    ends = corrected_ends(means, estimate, quantile)
    if ends is None:
        reach = quantile * estimate.error
        ends = estimate.mean - reach, estimate.mean + reach
    return Interval(max(-1.0, ends[0]), min(1.0, ends[1]))


def independent_difference_interval(first: float, interval: Interval, second: float, other: Interval) -> Interval:
    """Return the interval of the difference of two independent means from their intervals: MOVER (Zou and Donner, 2008).

    The interval is for first minus second, and both intervals need the same confidence. It is NaN if one of the two is
    unknown.

    Examples:
        >>> low, high = independent_difference_interval(0.9, Interval(0.8, 0.94), 0.7, Interval(0.67, 0.73))
        >>> round(low, 3), round(high, 3)
        (0.096, 0.25)
    """
    value = first - second
    below = math.hypot(first - interval.low, other.high - second)
    above = math.hypot(interval.high - first, second - other.low)
    return Interval(value - below, value + above)


def interval_over_classes(
    values: Float[Tensor, "episodes"],
    classes: Int[Tensor, "episodes ways"],
    confidence: float = 0.95,
    *,
    of_difference: bool = False,
) -> Interval:
    """Return the interval of a mean over episodes, for other classes and other episodes.

    A mean over all episodes is a U-statistic of the classes. Its jackknife leaves out one class with all episodes that
    contain it (Arvesen, 1969). A finite list of episodes adds noise, which the jackknife counts several times. The noise is
    estimated from the residuals that the classes of an episode do not explain, and it is counted once.

    Values are in [0, 1], or in [-1, 1] if they are differences of a metric. The interval is NaN unless there are at
    least three classes more than an episode has.

    Examples:
        >>> import torch
        >>> classes = torch.combinations(torch.arange(8), 2)
        >>> low, high = interval_over_classes(0.2 + classes.sum(dim=1) / 20, classes)
        >>> round(low, 3), round(high, 3)
        (0.348, 0.737)
    """
    normal_quantile(confidence)
    present, number = classes.unique(return_inverse=True)
    units = len(present)
    episodes, ways = classes.shape
    if units < ways + SPARE_CLASSES:
        return UNKNOWN
    values = values.double()
    total = torch.zeros(units, dtype=torch.float64).index_add(0, number.flatten(), values.repeat_interleave(ways))
    class_mean = total / torch.bincount(number.flatten())  # over the episodes with the class
    _, error, freedom, _ = jackknife(class_mean.tolist(), [1] * units)
    mean = exact_mean(values)
    scale = ways * (units - 1) / (units - ways)
    residuals = values - mean - (class_mean - class_mean.mean())[number].sum(dim=1) * scale / ways
    noise = float(residuals.square().sum()) / max(1, episodes - units) / episodes
    variance_with_noise = (scale * error) ** 2
    variance = max(variance_with_noise - (scale - 1) * noise, float(values.var()) / episodes)
    # The smaller the remaining part of the variance, the less precisely it is known.
    remaining = min(1.0, variance / variance_with_noise) if variance_with_noise else 0.0
    freedom = max(1.0, freedom * remaining)
    if not of_difference:
        return share_interval(mean, math.sqrt(variance), freedom, units, confidence)
    reach = t_quantile(confidence, freedom) * math.sqrt(variance)
    return Interval(max(-1.0, mean - reach), min(1.0, mean + reach))


def student_interval(
    values: Float[np.ndarray, "samples points"], confidence: float = 0.95
) -> tuple[Float[np.ndarray, "points"], Float[np.ndarray, "points"]]:
    """Return Student's t interval of the mean over independent samples, at each point of a curve.

    It is for values without bounds. For a metric in [0, 1], use `mean_interval`.

    Values are without NaN, one row per sample, such as the curve of a seed. Ends are float64; NaN for a single sample.

    Examples:
        >>> low, high = student_interval(np.array([[1.0, 2.0], [3.0, 2.0]]))
        >>> low.round(2).tolist(), high.round(2).tolist()
        ([-10.71, 2.0], [14.71, 2.0])
    """
    normal_quantile(confidence)
    samples, points = values.shape
    if samples < 2:
        return np.full(points, math.nan), np.full(points, math.nan)
    values = values.astype(np.float64)
    mean = values.mean(axis=0)
    error = values.std(axis=0, ddof=1) / math.sqrt(samples)
    reach = t_quantile(confidence, samples - 1) * error
    return mean - reach, mean + reach


def share_interval(mean: float, error: float, freedom: float, units: int, confidence: float) -> Interval:
    """Return the interval of a mean in [0, 1]: a t interval on the logit scale, or Gaffke's if all units have one value.

    `error` is 0 if all units have the same value. `units` is the number of independent values.
    """
    from scipy.special import expit, logit  # noqa: PLC0415 - what is never evaluated needs no SciPy

    if not error or not 0 < mean < 1:
        return _of_equal_units(mean, units, confidence)
    reach = t_quantile(confidence, freedom) * error / (mean * (1 - mean))  # the derivative of logit is 1 / p (1 - p)
    return Interval(float(expit(logit(mean) - reach)), float(expit(logit(mean) + reach)))


def _of_metric(means: Sequence[float], sizes: Sequence[int], confidence: float, parts: int = 1) -> Interval:
    """Return the interval of a metric, given the mean and the number of queries of each unit (see `mean_interval`)."""
    normal_quantile(confidence)
    if len(means) < 2:
        return UNKNOWN
    means = within_range(means, 0)
    mean, error, freedom, _ = jackknife(means, sizes)
    units = len(means) * parts if mean in (0.0, 1.0) else len(means)
    return share_interval(mean, error, freedom, units, confidence)


def _doubles(values: Any, name: str, call: str) -> Float[Tensor, "n"]:
    """Return values in float64 on the CPU. A list is not rounded to float32 first."""
    if not isinstance(values, Tensor):
        values = np.asarray(values, np.float64)
    return as_tensor(values, name, call).double().cpu()


def _of_equal_units(value: float, units: int, confidence: float) -> Interval:
    """Return Gaffke's interval for equal values in [0, 1].

    For each side, one more value at the end of the range is added, and the weights are uniform on the simplex. The total
    weight of the given values is below (alpha / 2)^(1 / units) with a probability of alpha / 2.
    """
    weight = ((1 - confidence) / 2) ** (1 / units)
    return Interval(value * weight, 1 - (1 - value) * weight)
