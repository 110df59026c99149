"""`rank_reports`: the order of several evaluations of the same queries, and what chance leaves open of it.

Each two are compared query by query, and their p values are corrected for the number of pairs (Holm, 1979). Two differ if
the corrected p value is small enough. The rank of a model is at least 1 plus the number of models that are better and
differ from it, and at most the number of models minus those that are worse and differ (Mogstad, Romano, Shaikh and
Wilhelm, "Inference for Ranks", Review of Economic Studies, 2024). Letters show which differ (Piepho, 2004).
"""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._table import table
from fewshot_callbacks.functional.p_values import holm, paired_difference_p_value
from fewshot_callbacks.functional.retrieval.compare import (
    ReportSource,
    as_report,
    paired_differences,
    paired_interval,
    refuse_other_queries,
)
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.statistics import Difference, normal_quantile
from fewshot_callbacks.settings import RequestedMetric
from fewshot_callbacks.system.terminal import printable
from fewshot_callbacks.system.words import counted


class RankInterval(NamedTuple):
    """The ranks that chance leaves open for a model; 1 is the best.

    Examples:
        >>> RankInterval(1, 2).best
        1
    """

    best: int
    worst: int

    def __str__(self) -> str:
        return f"{self.best}" if self.best == self.worst else f"{self.best} to {self.worst}"


@equal_with_nan
@dataclass(frozen=True)
class Ranking:
    """The result of `rank_reports`; `print` shows a table, the best first.

    Examples:
        >>> from fewshot_callbacks.functional import Interval
        >>> gain = Difference(0.75, 0.5, Interval(0.125, 0.375))
        >>> ranking = Ranking("mAP", {"new": 0.75, "old": 0.5}, {("new", "old"): gain}, {("new", "old"): 0.01}, 0.95)
        >>> ranking.groups, ranking.ranks["old"]
        ((('new',), ('old',)), RankInterval(best=2, worst=2))
    """

    metric: str
    """key of the metric"""
    values: dict[str, float]
    """name -> value, the best first"""
    differences: dict[tuple[str, str], Difference]
    """(better, worse) -> the difference of the two, with the interval of this difference alone"""
    p_values: dict[tuple[str, str], float]
    """(better, worse) -> p value of no difference, corrected for the number of pairs; NaN where there is no variance to
    judge by"""
    confidence: float
    """the share of sets in which all ranks lie in their intervals"""

    @property
    def ranks(self) -> dict[str, RankInterval]:
        """Name -> the ranks that chance leaves open. All intervals hold together with the confidence."""
        intervals = {}
        for name in self.values:
            better = sum(worse == name for _, worse in self._differing)
            worse = sum(better == name for better, _ in self._differing)
            intervals[name] = RankInterval(1 + better, len(self.values) - worse)
        return intervals

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The largest groups in which no two models differ. Two models differ if no group has both."""
        groups = [tuple(self.values)]
        for better, worse in self._differing:
            split = []
            for group in groups:
                if better in group and worse in group:
                    split += [tuple(name for name in group if name != absent) for absent in (better, worse)]
                else:
                    split.append(group)
            groups = _largest(split)
        order = list(self.values)
        return tuple(sorted(groups, key=lambda group: [order.index(name) for name in group]))

    @property
    def _differing(self) -> list[tuple[str, str]]:
        """Pairs that differ; NaN is not below any level."""
        return [pair for pair, p in self.p_values.items() if p < 1 - self.confidence]

    def to_dict(self) -> dict[str, Any]:
        """Return the ranking as numbers, strings, lists and dictionaries for JSON (NaN becomes None)."""
        ranks = self.ranks
        return {
            "metric": self.metric,
            "models": [
                {"name": name, "value": value, "ranks": list(ranks[name]), "groups": self._letters(name)}
                for name, value in self.values.items()
            ],
            "pairs": [
                {
                    "better": better,
                    "worse": worse,
                    **difference.to_dict(),
                    "p": None if math.isnan(self.p_values[better, worse]) else self.p_values[better, worse],
                }
                for (better, worse), difference in self.differences.items()
            ],
            "confidence": self.confidence,
        }

    def _letters(self, name: str) -> list[str]:
        """Return the letter of each group that has a model; numbers if there are more groups than letters."""
        groups = self.groups
        letters = string.ascii_lowercase if len(groups) <= 26 else [str(number + 1) for number in range(len(groups))]
        return [letter for letter, group in zip(letters, groups, strict=False) if name in group]

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """Return name, value, value minus the best, p against the best, ranks and letters of each model, for tables."""
        best = next(iter(self.values))
        ranks = self.ranks
        rows = []
        for name, value in self.values.items():
            gap = p_value = ""
            if name != best:
                gap = f"{value - self.values[best]:+.4f}"
                p_value = p_in_words(self.p_values[best, name])
            rows.append((name, f"{value:.4f}", gap, p_value, str(ranks[name]), " ".join(self._letters(name))))
        return rows

    @property
    def columns(self) -> tuple[str, ...]:
        """The headings of `rows`."""
        return "model", self.metric, "minus best", "p", "rank", "groups"

    @property
    def explanation(self) -> tuple[str, str]:
        """Two sentences on the table."""
        pairs = len(self.p_values)
        return (
            "Models that share a letter do not differ beyond chance. All rank intervals together have "
            f"{100 * self.confidence:g} % confidence.",
            f"p is that of the difference to the best, corrected for {counted(pairs, 'pair')} (Holm).",
        )

    def __str__(self) -> str:
        """Return a table with one model in a line, the best first."""
        rows = [(printable(name), *cells) for name, *cells in self.rows()]
        return "\n".join([*table(self.columns, rows), *self.explanation])

    def __repr__(self) -> str:
        return str(self)


def rank_reports(reports: Mapping[str, ReportSource], metric: str = "mAP", confidence: float = 0.95) -> Ranking:
    """Return the order of several evaluations of the same queries by a metric, and what chance leaves open of it.

    Each two evaluations are compared query by query, as `compare_reports` does, with a p value for each pair. Holm's
    correction accounts for the number of pairs, so that many equal models do not make one of them look better. An
    interval of ranks has all ranks that chance leaves open for a model. Models with a letter in common do not differ
    beyond chance. Chance is that of the classes and queries: another training seed is not in it.

    Args:
        reports: Name -> report, or the path or address of a file that `RetrievalReport.save` has written; two or more.
        metric: A metric with a value for each query, such as `recall@1`, or `macro_` before its key.
        confidence: The share of sets in which all ranks lie in their intervals, in (0, 1). Two models differ if their
            corrected p value is below 1 minus this.

    Raises:
        ValueError: If there are fewer than two reports, they are not of the same queries, a file is not a saved report, or
            the metric is missing from one of them, undefined, without a better direction or without a value for each query.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> labels = torch.arange(200) % 20
        >>> clean = torch.nn.functional.one_hot(labels).float()
        >>> noise = torch.randn(200, 20, generator=torch.Generator().manual_seed(0))
        >>> models = {f"noise {scale}": evaluate_retrieval(clean + scale * noise, labels) for scale in (0.5, 0.2, 0.21)}
        >>> print(rank_reports(models, "recall@1"))
             model  recall@1  minus best         p    rank  groups
         noise 0.2    0.9700                        1 to 2       a
        noise 0.21    0.9600     -0.0100    0.1011  1 to 2       a
         noise 0.5    0.2000     -0.7700  < 0.0001       3       b
        Models that share a letter do not differ beyond chance. All rank intervals together have 95 % confidence.
        p is that of the difference to the best, corrected for 3 pairs (Holm).
    """
    normal_quantile(confidence)
    if len(reports) < 2:
        raise InputError(
            f"rank_reports: {counted(len(reports), 'report')} cannot be ranked. Pass two or more, as name -> report."
        )
    loaded = {name: as_report(source) for name, source in reports.items()}
    refuse_other_queries("rank_reports", {repr(name): report for name, report in loaded.items()})
    requested = common_metric("rank_reports", loaded, metric)
    values = {name: report[metric] for name, report in loaded.items()}
    names = sorted(values, key=values.__getitem__, reverse=requested.metric.better == "higher")
    differences = {}
    p_values = []
    for better, worse in combinations(names, 2):
        pair = (loaded[better], loaded[worse])
        interval = paired_interval(*pair, requested, confidence)
        differences[better, worse] = Difference(values[better], values[worse], interval)
        p_values.append(paired_difference_p_value(*paired_differences(*pair, requested), requested.metric.range))
    corrected = dict(zip(differences, holm(p_values), strict=True))
    return Ranking(metric, {name: values[name] for name in names}, differences, corrected, confidence)


def common_metric(call: str, reports: Mapping[str, RetrievalReport], metric: str) -> RequestedMetric:
    """Return a metric that reports can be compared by: each has it for each query, and one direction is better.

    Args:
        call: The public function, for messages.
        reports: The name of each report, and the report.
        metric: Key of the metric.

    Raises:
        ValueError: If one of them lacks it.
    """
    first, *others = reports.values()
    requested = first.requested(metric)
    rankable = [key for key in first.values if _is_rankable(first, key)]
    fix = f"Take another metric: the first report has {', '.join(rankable) or 'none'}."
    if not _is_rankable(first, metric) and metric in first.values:
        raise InputError(f"{call}: {metric!r} has no value for each query, or neither direction is better. {fix}")
    for name, report in reports.items():
        if metric not in report.values:
            raise InputError(
                f"{call}: the report {name!r} has no {metric!r}. Evaluate with it, or take another metric."
            )
        if math.isnan(report[metric]):
            raise InputError(f"{call}: {metric!r} of {name!r} is NaN. {fix}")
    if any(report.requested(metric) != requested for report in others):
        raise InputError(f"{call}: {metric!r} is a metric of a user, and not the same in each report. {fix}")
    return requested


def _is_rankable(report: RetrievalReport, key: str) -> bool:
    """Return whether a metric of a report has a value for each query, and better values."""
    requested = report.requested(key)
    return requested.of_queries in report.per_query and requested.metric.better is not None


def _largest(groups: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return each group once, without those that lie in another group."""
    distinct: Sequence[tuple[str, ...]] = list(dict.fromkeys(groups))
    return [group for group in distinct if not any(set(group) < set(other) for other in distinct)]


def p_in_words(p_value: float) -> str:
    """Return a p value with four digits; NaN is unknown."""
    if math.isnan(p_value):
        return "unknown"
    return "< 0.0001" if p_value < 1e-4 else f"{p_value:.4f}"
