"""`classes_needed`: how many classes a test set needs until a difference of two models shows."""

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

# Share of pilots whose standard error is not below the bound from which the careful number is computed.
CAREFUL = 0.8
# From 20 classes, one estimate in five is off by a factor of 1.7 or more, from 50 by 1.5 (`studies/better_or_noise.py`).
FEW_CLASSES = 50


@equal_with_nan
@dataclass(frozen=True)
class ClassesNeeded:
    """The result of `classes_needed`; `print` shows it as a sentence.

    Examples:
        >>> print(ClassesNeeded("mAP", 0.01, 0.8, classes=182, careful=215, pilot_classes=100))
        A difference of 0.01 in mAP shows in 80 % of test sets of about 182 classes, to be safe 215 (estimated from 100).
    """

    metric: str
    """key of the metric"""
    difference: float
    """the difference that is to show"""
    power: float
    """the share of test sets in which it shows"""
    classes: int
    """estimated number of classes"""
    careful: int
    """number of classes that suffices according to four of five pilots"""
    pilot_classes: int
    """number of classes of the two reports"""

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
            f"A difference of {self.difference:g} in {self.metric} shows in {100 * self.power:g} % of test sets of about "
            f"{counted(self.classes, 'class')}, to be safe {self.careful:,} (estimated from {self.pilot_classes:,})."
        )
        if self.pilot_classes < FEW_CLASSES:
            sentence += f"\nAn estimate from fewer than {FEW_CLASSES} classes only gives the order of magnitude."
        return sentence


def classes_needed(
    first: ReportSource,
    second: ReportSource,
    difference: float,
    metric: str = "mAP",
    power: float = 0.8,
    confidence: float = 0.95,
) -> ClassesNeeded:
    """Return how many classes a test set needs until a difference of two models shows, estimated from two reports.

    A difference shows if its interval, as `compare_reports` computes it, does not contain 0. The two reports tell how much
    the difference of two such models varies from class to class. Two epochs of one training will do, or last month's
    model and this one.

    The number is N (s / d)² (z + z')² + 2, where N is the number of classes of the reports, s the standard error of their
    difference, d the difference that is to show, and z and z' are the normal quantiles of the confidence and the power.
    The careful number takes an upper bound of s instead, which is too low for one of five pairs of reports.

    The other classes are taken to be like the present ones, with as many items each, in as large a gallery.

    Args:
        first: Report of one evaluation, or the path or address of a file that `RetrievalReport.save` has written.
        second: The same of another evaluation of the same queries.
        difference: The difference that is to show, for instance 0.01; above 0.
        metric: A metric that both have for each query, such as `recall@1`, or `macro_` before its key.
        power: The share of test sets in which the difference is to show, in (0, 1).
        confidence: Confidence level of the interval, in (0, 1).

    Raises:
        ValueError: If the reports are not of the same queries, one of them lacks the metric, they differ by the same amount
            in every class, there are fewer than two classes, or a number is out of its range.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> labels = torch.arange(600) % 60
        >>> classes = torch.randn(60, 16, generator=torch.Generator().manual_seed(0))[labels]
        >>> noise = torch.randn(600, 16, generator=torch.Generator().manual_seed(1))
        >>> new, old = (evaluate_retrieval(classes + scale * noise, labels) for scale in (1.0, 1.05))
        >>> print(classes_needed(new, old, 0.005))
        A difference of 0.005 in mAP shows in 80 % of test sets of about 103 classes, to be safe 132 (estimated from 60).
    """
    from scipy.special import chdtri, ndtri  # noqa: PLC0415 - what is never evaluated needs no SciPy

    quantile = normal_quantile(confidence)
    if not 0 < power < 1:
        raise InputError(f"classes_needed: power is {power!r}, and must be between 0 and 1. Pass for instance 0.8.")
    if not 0 < difference < math.inf:
        raise InputError(f"classes_needed: difference is {difference!r}, and must be above 0. Pass for instance 0.01.")
    first = as_report(first)
    second = as_report(second)
    refuse_other_queries("classes_needed", {"the first report": first, "the second report": second})
    requested = common_metric("classes_needed", {"first": first, "second": second}, metric)
    means, sizes = units_of(*paired_differences(first, second, requested), "classes_needed")
    estimate = jackknife(means, sizes) if len(means) > 1 else None
    if estimate is None or not estimate.error:
        raise InputError(
            f"classes_needed: the difference in {metric} does not vary over the {counted(len(means), 'class')} of the "
            "reports, so that nothing can be estimated. Pass reports of two models that differ, of more classes."
        )
    factor = (quantile + float(ndtri(power))) ** 2 * len(means) / difference**2
    variance = estimate.error**2
    upper_variance = variance * estimate.freedom / float(chdtri(estimate.freedom, CAREFUL))
    # Two more, since the interval of so many classes estimates its standard error, too.
    classes, careful = (math.ceil(factor * part) + 2 for part in (variance, upper_variance))
    return ClassesNeeded(metric, difference, power, classes, careful, len(means))
