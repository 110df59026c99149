"""`classes_needed`: how many classes a test set needs to show a difference between two models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._jackknife import jackknife
from fewshot_callbacks.functional.retrieval.compare import (
    ReportSource,
    as_report,
    paired_differences,
    refuse_other_queries,
)
from fewshot_callbacks.functional.retrieval.ranking import common_metric
from fewshot_callbacks.functional.statistics import normal_quantile, units_of
from fewshot_callbacks.system.words import counted

# The careful number uses an upper bound of the standard error, which suffices for this share of pilots.
CAREFUL = 0.8
# With 20 classes, one estimate in five is off by a factor of 1.7 or more; with 50, by 1.5 (`studies/better_or_noise.py`).
FEW_CLASSES = 50


@equal_with_nan
@dataclass(frozen=True)
class ClassesNeeded:
    """The result of `classes_needed`. `print` shows it in words.

    Attributes:
        metric: Key of the metric.
        difference: The difference to detect.
        power: Share of test sets in which the difference is significant.
        classes: Estimated number of classes.
        careful: Larger number of classes, which is too low for only one of five pairs of reports.
        pilot_classes: Number of classes in the two reports.

    Examples:
        >>> print(ClassesNeeded("mAP", 0.01, 0.8, classes=182, careful=215, pilot_classes=100))
        A difference of 0.01 in mAP is significant in 80 % of test sets with about 182 classes.
        To be safe, use 215 (estimated from 100 classes).
    """

    metric: str
    difference: float
    power: float
    classes: int
    careful: int
    pilot_classes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers and the key for JSON."""
        return {
            "metric": self.metric,
            "difference": self.difference,
            "power": self.power,
            "classes": self.classes,
            "careful": self.careful,
            "pilot_classes": self.pilot_classes,
        }

    def __str__(self) -> str:
        sentence = (
            f"A difference of {self.difference:g} in {self.metric} is significant in {100 * self.power:g} % of test sets "
            f"with about {counted(self.classes, 'class')}.\nTo be safe, use {self.careful:,} (estimated from "
            f"{self.pilot_classes:,} classes)."
        )
        if self.pilot_classes < FEW_CLASSES:
            sentence += f"\nAn estimate from fewer than {FEW_CLASSES} classes gives only the order of magnitude."
        return sentence


def classes_needed(
    first: ReportSource,
    second: ReportSource,
    difference: float,
    metric: str = "mAP",
    power: float = 0.8,
    confidence: float = 0.95,
) -> ClassesNeeded:
    """Return how many classes a test set needs to show a difference between two models, estimated from two reports.

    A difference is significant if its interval, as computed by `compare_reports`, does not contain 0. The two reports show
    how much the difference between two such models varies from class to class. You can use two epochs of the same run, or
    last month's model and the current one.

    The number is N (s / d)² (z + z')² + 2, where N is the number of classes in the reports, s the standard error of their
    difference, d the difference to detect, and z and z' are the normal quantiles of the confidence and the power. The
    careful number replaces s by an upper bound, which is too low for only one of five pairs of reports.

    The estimate assumes that other classes are like the present classes, with the same number of items each, and that the
    gallery has the same size.

    Args:
        first: Report of one evaluation, or the path or address of a file that `RetrievalReport.save` has written.
        second: Report, path or address of another evaluation of the same queries.
        difference: The difference to detect, for instance 0.01; above 0.
        metric: A metric that both reports have for each query, such as `mAP` or `recall@1`. `macro_` before the key uses
            the mean over classes.
        power: Share of test sets in which the difference should be significant, in (0, 1).
        confidence: Confidence level of the interval, in (0, 1).

    Raises:
        ValueError: If the reports have different queries, a report does not have the metric, the reports differ by the same
            amount in every class, there are fewer than two classes, or a number is out of range.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> labels = torch.arange(600) % 60
        >>> classes = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))[labels]
        >>> noise = torch.randn(600, 16, generator=torch.Generator().manual_seed(1))
        >>> new, old = (evaluate_retrieval(classes + scale * noise, labels) for scale in (1.0, 1.05))
        >>> print(classes_needed(new, old, 0.005))
        A difference of 0.005 in mAP is significant in 80 % of test sets with about 103 classes.
        To be safe, use 132 (estimated from 60 classes).
    """
    from scipy.special import chdtri, ndtri  # noqa: PLC0415 - the import of this module needs no SciPy

    quantile = normal_quantile(confidence)
    if not 0 < power < 1:
        raise InputError(f"classes_needed: power is {power!r}, but must be between 0 and 1. Pass, for instance, 0.8.")
    if not 0 < difference < math.inf:
        raise InputError(
            f"classes_needed: difference is {difference!r}, but must be above 0. Pass, for instance, 0.01."
        )
    first = as_report(first)
    second = as_report(second)
    refuse_other_queries("classes_needed", {"the first report": first, "the second report": second})
    requested = common_metric("classes_needed", {"first": first, "second": second}, metric)
    means, sizes = units_of(*paired_differences(first, second, requested), "classes_needed")
    estimate = jackknife(means, sizes) if len(means) > 1 else None
    if estimate is None or not estimate.error:
        raise InputError(
            f"classes_needed: the difference in {metric} does not vary over the {counted(len(means), 'class')} of the "
            "reports, so nothing can be estimated. Pass reports of models that differ more, or reports with more classes."
        )
    factor = (quantile + float(ndtri(power))) ** 2 * len(means) / difference**2
    variance = estimate.error**2
    upper_variance = variance * estimate.freedom / float(chdtri(estimate.freedom, CAREFUL))
    # Two more, because the future interval also has to estimate its standard error.
    classes, careful = (math.ceil(factor * part) + 2 for part in (variance, upper_variance))
    return ClassesNeeded(metric, difference, power, classes, careful, len(means))
