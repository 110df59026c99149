"""Access to the values of a report by their keys. All reports share it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.retrieval.registry import METRICS, is_pattern, requested_metric
from fewshot_callbacks.functional.statistics import Interval
from fewshot_callbacks.settings import Metric, RequestedMetric


class Values:
    """The values of a report, each under the key that it is logged with."""

    _known: ClassVar[Sequence[Metric]] = METRICS
    values: dict[str, float]
    intervals: dict[str, Interval]
    users_metrics: Mapping[str, RequestedMetric] = MappingProxyType({})

    def __getitem__(self, key: str) -> float:
        """Return the value of a metric."""
        if key not in self.values:
            self.requested(key)
            raise LookupError(
                f"this report has no {key!r}; it has {', '.join(self.values)}. Request it when you evaluate, with "
                f"metrics=({key!r}, ...). If you did, {self._why_left_out(key)}"
            )
        return self.values[key]

    def _why_left_out(self, key: str) -> str:
        """Return why a requested value may be missing."""
        return "the report's notes give the reason."

    def __contains__(self, key: object) -> bool:
        """Return whether this report has a value for this metric."""
        return key in self.values

    @property
    def mAP(self) -> float:  # noqa: N802 - the field writes it so
        """Mean average precision: the mean over queries of the mean precision at the ranks of the relevant items."""
        return self["mAP"]

    def at(self, pattern: str) -> dict[Any, float]:
        """Return the values of a metric at all requested ranks or rates.

        Args:
            pattern: A key with `{k}` in place of a rank or `{p}` in place of a rate, such as `recall@{k}`,
                `macro_recall@{k}`, `map@{k}_min` or `recall@precision{p}`.

        Returns:
            Rank or rate -> value, such as {1: 0.75, 5: 0.9}; empty if the metric was not requested.
        """
        by_pattern: dict[str, dict[Any, float]] = {}
        for key, value in self.values.items():
            for key_pattern, number in self.requested(key).patterns.items():
                by_pattern.setdefault(key_pattern, {})[number] = value
        if pattern not in by_pattern and not is_pattern(pattern, self._all_known()):
            known = f"the patterns {', '.join(by_pattern)}" if by_pattern else "no value with a number in its key"
            raise InputError(
                f"there is no pattern {pattern!r}; this report has {known}. Pass a key with "
                "{k} in place of a rank or {p} in place of a rate, such as 'recall@{k}'."
            )
        return by_pattern.get(pattern, {})

    def meaning(self, key: str) -> str:
        """Return a sentence that explains a value of this report."""
        return self.requested(key).meaning

    def requested(self, key: str) -> RequestedMetric:
        """Return the metric with this key: a metric of this package, or a custom metric of this report."""
        return requested_metric(key, self._all_known())

    def _all_known(self) -> tuple[Metric, ...]:
        """Return all metrics that a key of this report may name."""
        return *self._known, *(requested.metric for requested in self.users_metrics.values())

    def lines(self) -> list[str]:
        """Return one line for each value, with its interval if it has one."""
        lines = []
        for name, value in self.values.items():
            low, high = self.intervals.get(name, (math.nan, math.nan))
            interval = "" if math.isnan(low) else f"  ({low:.4f} to {high:.4f})"
            lines.append(f"{name:<24}{value:>8.4f}{interval}")
        return lines

    def tables(self) -> dict[str, Any]:
        """Return values and intervals for JSON."""
        return {
            "metrics": {name: or_none(value) for name, value in self.values.items()},
            "intervals": {name: [or_none(end) for end in interval] for name, interval in self.intervals.items()},
        }

    def metrics(self) -> dict[str, float]:
        """Return logged key -> value, in the order in which the metrics were requested."""
        return dict(self.values)


def or_none(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON cannot represent, and other numbers unchanged."""
    return value if math.isfinite(value) else None
