"""The jackknife of a mean over units of unequal sizes, and its skewness-corrected t interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fewshot_callbacks.errors import InputError

# Means that differ by less are equal. Rounding is about 1e-16, and one query in a million moves a mean by 1e-6.
SAME = 1e-12


# With at least this many units, ends outside the range of the units show that the correction went too far. With fewer
# units, the true mean is often outside, and the t interval covers no better (`benchmarks/interval_coverage.py`).
UNITS_WITH_RANGE = 8


# How far rounding may carry a float32 metric outside its range.
OUTSIDE = 1e-6


class Estimate(NamedTuple):
    """A mean with its uncertainty."""

    mean: float
    # standard error of the mean; 0 if all units have the same value
    error: float
    # degrees of freedom of the standard error
    freedom: float
    # skewness of the mean: the skewness of the units over the square root of their number
    skewness: float


def jackknife(means: Sequence[float], sizes: Sequence[int]) -> Estimate:
    """Return the mean over all queries, with its leave-one-unit-out standard error.

    Every sum is rounded once, so the order of the units does not change a bit.
    """
    units = len(means)
    queries = sum(sizes)
    shares = [size / queries for size in sizes]
    mean = math.fsum(size * value for size, value in zip(sizes, means, strict=True)) / queries
    if max(abs(value - mean) for value in means) <= SAME:
        return Estimate(mean, 0.0, 1.0, 0.0)
    # the mean without each unit is lower by: mean - mean without it = share (value - mean) / (1 - share)
    moves = [share * (value - mean) / (1 - share) for share, value in zip(shares, means, strict=True)]
    largest = max(abs(move) for move in moves)
    scaled = [move / largest for move in moves]  # otherwise fourth powers underflow
    second, third, fourth = (math.fsum(move**power for move in scaled) for power in (2, 3, 4))
    effective_units = 1 / math.fsum(share * share for share in shares)
    # A variance with f degrees of freedom has a relative variance of 2 / f. The relative variance of sum x^2 is at most
    # about sum x^4 / (sum x^2)^2, as for a few large moves among many small ones: f = 2 for one large move, 4 for two.
    freedom = max(1.0, min(effective_units - 1, 2 * second * second / fourth))
    error = largest * math.sqrt((units - 1) / units * second)
    return Estimate(mean, error, freedom, third / second**1.5)


def corrected_ends(means: Sequence[float], estimate: Estimate, quantile: float) -> tuple[float, float] | None:
    """Return the ends of the skewness-corrected t interval; None if the plain t interval should be used.

    `quantile` is the half-width of the plain t interval in standard errors.
    """
    mean, error, _, skewness = estimate
    low = mean - error * hall(quantile, skewness)
    high = mean - error * hall(-quantile, skewness)
    # Beyond all differences the cubic transformation no longer corrects a t statistic.
    is_outside = low < min(*means, mean - quantile * error) or high > max(*means, mean + quantile * error)
    return None if is_outside and len(means) >= UNITS_WITH_RANGE else (low, high)


def hall(quantile: float, skewness: float) -> float:
    """Return a quantile of the corrected t statistic in standard errors, by the inverse of Hall's cubic transformation."""
    if abs(skewness) < 1e-6:  # nothing to correct, and the formula would lose all digits
        return quantile
    return 3 / skewness * (math.cbrt(1 + skewness * (quantile - skewness / 6)) - 1)


def inverse_hall(corrected: float, skewness: float) -> float:
    """Return the quantile that `hall` corrects to this one."""
    if abs(skewness) < 1e-6:
        return corrected
    return float(((1 + skewness * corrected / 3) ** 3 - 1) / skewness + skewness / 6)


def t_quantile(confidence: float, freedom: float) -> float:
    """Return the half-width of a t interval of this confidence, in standard errors."""
    from scipy.special import stdtrit  # noqa: PLC0415 - what is never evaluated needs no SciPy

    upper = (1 + confidence) / 2
    return float(stdtrit(freedom, upper) if upper < 1 else -stdtrit(freedom, (1 - confidence) / 2))


def within_range(values: Sequence[float], lowest: int) -> list[float]:
    """Return values clipped to [lowest, 1]. Only rounding may carry them outside."""
    if not all(lowest - OUTSIDE <= value <= 1 + OUTSIDE for value in values):
        fact = "Metrics lie in [0, 1]" if lowest == 0 else "Differences of metrics lie in [-1, 1]"
        raise InputError(
            f"{fact}; found {min(values):g} to {max(values):g}. Scale them, or use paired_difference_interval for "
            "differences."
        )
    return [min(max(value, lowest), 1.0) for value in values]
