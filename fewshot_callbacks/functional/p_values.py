"""p-values of paired differences, and their correction for multiple comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._jackknife import (
    SAME,
    Estimate,
    corrected_ends,
    inverse_hall,
    jackknife,
    within_range,
)
from fewshot_callbacks.functional.statistics import low_and_width, units_of


def paired_difference_p_value(
    differences: Any, clusters: Any | None = None, bounds: tuple[float, float] | None = (0.0, 1.0)
) -> float:
    """Return the two-sided p-value of a mean difference of 0.

    It is 1 minus the lowest confidence at which the interval of `paired_difference_interval` contains 0. So p is below 0.05
    if the 95 % interval excludes 0. The two only disagree in rare sets, if the corrected interval contains 0 and the plain
    interval at a higher confidence does not.

    Args:
        differences: (items,) first value minus second value. NaN is left out.
        clusters: The class of each difference, integers or strings, if differences are dependent within classes.
        bounds: The smallest and the largest value that is subtracted. With None or an infinite bound, p is the p-value of
            Student's t test.

    Returns:
        p in [0, 1]; 1 if all differences are 0. NaN for fewer than two differences or clusters and, without bounds, if all
        differences are equal and not 0.

    Raises:
        ValueError: If a difference is larger than the bounds allow.

    Examples:
        >>> import torch
        >>> round(paired_difference_p_value(torch.tensor([0.1, 0.2, -0.05, 0.1, 0.2])), 3)
        0.145
    """
    from scipy.special import stdtr  # noqa: PLC0415 - what is never evaluated needs no SciPy

    means, sizes = units_of(differences, clusters, "paired_difference_p_value")
    if len(means) < 2:
        return math.nan
    is_bounded = bounds is not None and not math.isinf(bounds[1] - bounds[0])
    if is_bounded:
        width = low_and_width(bounds)[1]
        means = within_range([mean / width for mean in means], -1)
    estimate = jackknife(means, sizes)
    if not estimate.error:
        if abs(estimate.mean) <= SAME:
            return 1.0
        # Gaffke's interval ends at 0 where (1 + |mean|) (p / 2)^(1 / units) is 1.
        return min(1.0, 2 * (1 + abs(estimate.mean)) ** -len(means)) if is_bounded else math.nan
    quantile = abs(estimate.mean) / estimate.error
    if is_bounded:
        quantile = _quantile_at_zero(means, estimate)
    return float(2 * stdtr(estimate.freedom, -quantile))


def _quantile_at_zero(means: Sequence[float], estimate: Estimate) -> float:
    """Return the half-width, in standard errors, of the plain t interval at the lowest confidence at which it contains 0."""
    plain = abs(estimate.mean) / estimate.error
    corrected = abs(inverse_hall(estimate.mean / estimate.error, estimate.skewness))
    if corrected_ends(means, estimate, corrected) is not None:
        return corrected
    if corrected_ends(means, estimate, plain) is None:
        return plain
    # Between the two, the plain interval contains 0 and replaces the corrected interval, which does not.
    for _ in range(60):
        middle = (plain + corrected) / 2
        if corrected_ends(means, estimate, middle) is None:
            corrected = middle
        else:
            plain = middle
    return plain


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for multiple comparisons (Holm, 1979), in the same order; NaN stays NaN.

    If you call every corrected p-value below 0.05 a difference, the probability of at least one false difference is at most
    5 %. NaN does not count as a comparison.

    Args:
        p_values: p-values in [0, 1].

    Raises:
        ValueError: If a p-value is not in [0, 1].

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    outside = [p for p in p_values if p < 0 or p > 1]
    if outside:
        raise InputError(f"holm: {outside[0]:g} is not between 0 and 1. Pass p-values.")
    present = [index for index, p in enumerate(p_values) if not math.isnan(p)]
    corrected = [math.nan] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(present, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(present) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
