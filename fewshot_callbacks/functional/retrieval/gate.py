"""Requirements on a report, such as "mAP >= 0.70" or "worst(camera) recall@1.high >= 0.6", and the ones it fails."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.retrieval.compare import ReportSource, as_report, compare_reports
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.retrieval.slice_gains import compare_slices
from fewshot_callbacks.functional.statistics import UNKNOWN, Interval
from fewshot_callbacks.settings import Metric, RequestedMetric

CALL = "failed_requirements"
SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_REQUIREMENT = re.compile(
    r"(?:worst\((?P<attribute>[^()]+)\)\s*)?"
    r"(?:gain\((?P<gain>[^()<>=\s]+)\)|(?P<metric>[^()<>=\s]+?))"
    r"(?:\.(?P<end>low|high))?\s*(?P<sign>>=|<=|>|<)\s*(?P<limit>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
)


@dataclass(frozen=True)
class Requirement:
    """A bound on the value of a metric, over all queries or in every slice.

    Args:
        text: The requirement as it was written.
        metric: Key of the metric.
        attribute: Every slice of this attribute must meet the requirement; None for all queries together.
        is_gain: Whether the value is the metric minus its value in another report.
        end: `low` or `high` for an end of the interval; None for the value.
        sign: `>=`, `<=`, `>` or `<`.
        limit: The number on the right.
    """

    text: str
    metric: str
    attribute: str | None
    is_gain: bool
    end: str | None
    sign: str
    limit: float

    def refuse_missing(
        self, call: str, metrics: Mapping[str, RequestedMetric], attributes: Sequence[str], *, has_other: bool
    ) -> None:
        """Raise an error if an evaluation does not have what the requirement names.

        `metrics` has all metrics of the evaluation by key. `has_other` tells whether there is another evaluation for
        gains.
        """
        fact = ""
        if self.metric not in metrics:
            fact = f"{self.metric!r} is not one of the metrics {', '.join(metrics)}. Add it to metrics=."
        elif self.attribute is not None and self.attribute not in attributes:
            known = ", ".join(map(repr, attributes)) or "none"
            fact = f"{self.attribute!r} is not one of the attributes with slices, {known}. Add it to slices=."
        elif self.is_gain and not has_other:
            fact = "there is no other evaluation to compare with. Pass against=."
        elif self.attribute is not None and not metrics[self.metric].metric.is_of_queries:
            fact = (
                f"{self.metric!r} has no value for each query, so slices have none. Choose another metric, such as mAP."
            )
        elif self.end is not None and not _has_interval(metrics[self.metric].metric):
            fact = f"{self.metric!r} has no interval. Leave out .{self.end}."
        if fact:
            raise InputError(f"{call}: {self.text!r} cannot be checked: {fact}")

    def failure(self, report: RetrievalReport, against: RetrievalReport | None) -> str | None:
        """Return a sentence if a report fails the requirement; None if the report meets it.

        `against` is the other report, for a requirement on a gain.
        """
        values = self._values(report, against)
        failing = {name: value for name, value in values.items() if not SIGNS[self.sign](value, self.limit)}
        if not failing:
            return None
        # Report an unknown value first, then the value that is farthest from the limit.
        name = max(
            failing, key=lambda slice_name: (math.isnan(failing[slice_name]), abs(failing[slice_name] - self.limit))
        )
        found = "unknown" if math.isnan(failing[name]) else f"{failing[name]:.4f}"
        where = f" ({self.attribute} {name})" if self.attribute is not None else ""
        return f"{self.text} is required, but it is {found}{where}."

    def _values(self, report: RetrievalReport, against: RetrievalReport | None) -> dict[Any, float]:
        """Return slice -> value, or the end of its interval. The key is None for all queries together."""
        if self.attribute is None:
            return {None: self._of_all(report, against)}
        if against is None:
            slices = report.of_slices(self.attribute, self.metric)
            return {name: self._chosen(found.value, found.interval) for name, found in slices.items()}
        gains = compare_slices(report, against, self.attribute, self.metric, report.confidence)
        return {name: self._chosen(gain.difference.value, gain.difference.interval) for name, gain in gains.items()}

    def _of_all(self, report: RetrievalReport, against: RetrievalReport | None) -> float:
        """Return the value over all queries, or the end of its interval; NaN if the metric was left out."""
        if against is None:
            interval = report.intervals.get(self.metric, UNKNOWN)
            return self._chosen(report.values.get(self.metric, math.nan), interval)
        difference = compare_reports(report, against, report.confidence).get(self.metric)
        return math.nan if difference is None else self._chosen(difference.value, difference.interval)

    def _chosen(self, value: float, interval: Interval) -> float:
        return {None: value, "low": interval.low, "high": interval.high}[self.end]


def _has_interval(metric: Metric) -> bool:
    return metric.is_of_queries or metric.input == "groups"


def read_requirement(call: str, text: str) -> Requirement:
    """Return the requirement that a text describes.

    The text is `[worst(ATTRIBUTE)] METRIC[.low|.high] >= NUMBER`. `<=`, `>`, `<` and `gain(METRIC)` are possible, too.

    Examples:
        >>> requirement = read_requirement("example", "worst(camera) recall@1.high >= 0.6")
        >>> requirement.attribute, requirement.metric, requirement.end, requirement.limit
        ('camera', 'recall@1', 'high', 0.6)
    """
    match = _REQUIREMENT.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"{call}: the requirement {text!r} cannot be read. Write, for instance, 'mAP >= 0.70', "
            "'worst(camera) recall@1.high >= 0.6' or 'gain(mAP).low >= 0'."
        )
    is_gain = match["gain"] is not None
    return Requirement(
        text.strip(),
        match["gain"] if is_gain else match["metric"],
        match["attribute"],
        is_gain,
        match["end"],
        match["sign"],
        float(match["limit"]),
    )


def failed_requirements(
    requirements: Sequence[str], report: ReportSource, against: ReportSource | None = None
) -> list[str]:
    """Return a sentence for each requirement that a report fails; an empty list if the report meets all requirements.

    A requirement consists of a value, one of the signs `>=`, `<=`, `>` and `<`, and a number. The value can be:

    - `mAP`: a metric of the report.
    - `gain(mAP)`: the metric minus its value in `against`.
    - `worst(camera) mAP`, `worst(camera) gain(mAP)`: the same in every slice of an attribute. All slices must meet the
      requirement.
    - `.low` or `.high` after any of these: an end of its interval. The confidence level applies to the intervals of all
      slices together.

    A value of NaN fails. The worst of several slices looks worse than it is, partly by chance. So put the limit on the upper
    end of its interval, as in `worst(camera) recall@1.high >= 0.6`. It fails only if the slice is significantly too low.

    Args:
        requirements: The requirements, such as `["mAP >= 0.70"]`.
        report: A report, or the path or address of a file that `RetrievalReport.save` has written.
        against: Report, path or address of another evaluation of the same queries, for gains.

    Raises:
        ValueError: If a requirement cannot be read, or names something that the report does not have.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> report = evaluate_retrieval(embeddings, [0, 0, 1, 0])
        >>> failed_requirements(["mAP >= 0.9", "recall@1 >= 0.6"], report)
        ['mAP >= 0.9 is required, but it is 0.8611.']
    """
    report = as_report(report)
    against = None if against is None else as_report(against)
    metrics = {key: report.requested(key) for key in report.values}
    found = []
    for requirement in [read_requirement(CALL, text) for text in requirements]:
        requirement.refuse_missing(CALL, metrics, tuple(report.slices), has_other=against is not None)
        failure = requirement.failure(report, against if requirement.is_gain else None)
        if failure is not None:
            found.append(failure)
    return found
