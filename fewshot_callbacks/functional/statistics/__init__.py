"""Means over classes, and confidence intervals."""

from fewshot_callbacks.functional.statistics.class_means import class_means, exact_mean, macro_mean
from fewshot_callbacks.functional.statistics.intervals import (
    UNKNOWN,
    Difference,
    Interval,
    clustered_mean_interval,
    independent_difference_interval,
    macro_mean_interval,
    mean_interval,
    normal_quantile,
    paired_difference_interval,
    student_interval,
)

__all__ = [
    "UNKNOWN",
    "Difference",
    "Interval",
    "class_means",
    "clustered_mean_interval",
    "exact_mean",
    "independent_difference_interval",
    "macro_mean",
    "macro_mean_interval",
    "mean_interval",
    "normal_quantile",
    "paired_difference_interval",
    "student_interval",
]
