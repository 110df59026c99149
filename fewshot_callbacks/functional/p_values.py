"""p values of paired differences, and their correction for several comparisons."""

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
    """Return the p value of a mean difference of 0, two-sided: 1 minus the confidence from which on an interval has 0.

    The interval is that of `paired_difference_interval`, so p is below 0.05 where its 95 % interval excludes 0. The two
    disagree only in rare sets whose corrected interval contains 0 while the plain interval at a higher level does not.

    Args:
        differences: (items,) each a value of the first minus the value of the second; NaN is left out.
        clusters: The class of each difference, any integers or strings, if differences are dependent inside classes.
        bounds: The smallest and the largest value that is subtracted. With None, or an infinite bound, p is that of
            Student's t.

    Returns:
        p in [0, 1]; 1 where all differences are 0. NaN for fewer than two differences or clusters, and without bounds
        where all differences are the same, but not 0.

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
    """Return the half-width in standard errors of the plain t interval at the confidence from which on an end passes 0.

    Args:
        means: The mean of each unit.
        estimate: Their mean, with its uncertainty.
    """
    plain = abs(estimate.mean) / estimate.error
    corrected = abs(inverse_hall(estimate.mean / estimate.error, estimate.skewness))
    if corrected_ends(means, estimate, corrected) is not None:
        return corrected
    if corrected_ends(means, estimate, plain) is None:
        return plain
    # Between the two the plain interval, which contains 0, takes the place of the corrected one, which does not.
    for _ in range(60):
        middle = (plain + corrected) / 2
        if corrected_ends(means, estimate, middle) is None:
            corrected = middle
        else:
            plain = middle
    return plain


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values that are corrected for their number (Holm, 1979), in the same order; NaN stays NaN.

    If those below 0.05 are called differences, the chance that there is any false one among them is 5 % at most. NaN is
    not counted.

    Args:
        p_values: p values in [0, 1].

    Raises:
        ValueError: If one is not in [0, 1].

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    outside = [p for p in p_values if p < 0 or p > 1]
    if outside:
        raise InputError(f"holm: {outside[0]:g} is not between 0 and 1. Pass p values.")
    present = [index for index, p in enumerate(p_values) if not math.isnan(p)]
    corrected = [math.nan] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(present, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(present) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
