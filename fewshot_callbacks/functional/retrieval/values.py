"""The values of a report by their keys, which all reports have in common."""

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
    """The values of a report, each under the key with which it is logged."""

    _known: ClassVar[Sequence[Metric]] = METRICS
    values: dict[str, float]
    intervals: dict[str, Interval]
    users_metrics: Mapping[str, RequestedMetric] = MappingProxyType({})

    def __getitem__(self, key: str) -> float:
        """Return the value of a metric.

        Raises:
            ValueError: If there is no such metric.
            LookupError: If it is not in this report, with what to ask for.
        """
        if key not in self.values:
            self.requested(key)
            raise LookupError(
                f"this report has no {key!r}, but {', '.join(self.values)}. Ask for it when you evaluate, with "
                f"metrics=({key!r}, ...); if you did, {self._why_left_out(key)}"
            )
        return self.values[key]

    def _why_left_out(self, key: str) -> str:
        """Return why a value that was asked for may be missing."""
        return "the notes say why it is left out."

    def __contains__(self, key: object) -> bool:
        """Return whether the value of a metric is in this report."""
        return key in self.values

    @property
    def mAP(self) -> float:  # noqa: N802 - the field writes it so
        """Mean average precision: for each query the mean precision at the ranks of its relevant items."""
        return self["mAP"]

    def at(self, pattern: str) -> dict[Any, float]:
        """Return the values of a metric at all ranks, or rates, that were asked for.

        Args:
            pattern: A key with one number left open, `{k}` for a rank and `{p}` for a rate, such as `recall@{k}`,
                `macro_recall@{k}`, `map@{k}_min` or `recall@precision{p}`.

        Returns:
            The number that was left open -> value; empty if the metric was not asked for.

        Raises:
            ValueError: If it is no pattern of a metric, with the patterns of this report.
        """
        by_pattern: dict[str, dict[Any, float]] = {}
        for key, value in self.values.items():
            for key_pattern, number in self.requested(key).patterns.items():
                by_pattern.setdefault(key_pattern, {})[number] = value
        if pattern not in by_pattern and not is_pattern(pattern, self._all_known()):
            known = f"the patterns {', '.join(by_pattern)}" if by_pattern else "no value with a number in its key"
            raise InputError(
                f"there is no pattern {pattern!r}; this report has {known}. A pattern is a key with one number left "
                "open, {k} for a rank or {p} for a rate, such as 'recall@{k}'."
            )
        return by_pattern.get(pattern, {})

    def meaning(self, key: str) -> str:
        """Return a sentence on what a value of this report is."""
        return self.requested(key).meaning

    def requested(self, key: str) -> RequestedMetric:
        """Return the metric of a key: one of this package, or one that a user has brought to this report.

        Raises:
            ValueError: If there is no such metric.
        """
        return requested_metric(key, self._all_known())

    def _all_known(self) -> tuple[Metric, ...]:
        """Return all metrics that a key of this report may name."""
        return *self._known, *(requested.metric for requested in self.users_metrics.values())

    def lines(self) -> list[str]:
        """Return each value with its interval, where there is one, as a line."""
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
        """Return all values under the names with which they are logged, in the order in which they were asked for."""
        return dict(self.values)


def or_none(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON cannot hold, and other numbers as they are."""
    return value if math.isfinite(value) else None
