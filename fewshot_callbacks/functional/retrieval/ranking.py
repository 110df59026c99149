"""`rank_reports`: a ranking of several evaluations of the same queries, with an interval for each rank.

Each pair of models is compared query by query, and the p values are corrected for the number of pairs (Holm, 1979). Two
models differ significantly if the corrected p value is small enough. The rank of a model is at least 1 plus the number of
significantly better models, and at most the number of models minus the number of significantly worse models (Mogstad,
Romano, Shaikh and Wilhelm, "Inference for Ranks", Review of Economic Studies, 2024). Letters show which models differ
(Piepho, 2004).
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
    """The confidence interval of a model's rank; 1 is the best rank.

    Examples:
        >>> print(RankInterval(1, 2))
        1 to 2
    """

    best: int
    worst: int

    def __str__(self) -> str:
        return f"{self.best}" if self.best == self.worst else f"{self.best} to {self.worst}"


@equal_with_nan
@dataclass(frozen=True)
class Ranking:
    """The result of `rank_reports`. `print` shows a table, the best model first.

    Attributes:
        metric: Key of the metric.
        values: Name -> value, the best model first.
        differences: (better, worse) -> the difference between the two models. The confidence level applies to each
            interval separately.
        p_values: (better, worse) -> p value of the hypothesis of no difference, corrected for the number of pairs; NaN if
            the variance cannot be estimated.
        confidence: Confidence level of all rank intervals together.

    Examples:
        >>> from fewshot_callbacks.functional import Interval
        >>> gain = Difference(0.75, 0.5, Interval(0.125, 0.375))
        >>> ranking = Ranking("mAP", {"new": 0.75, "old": 0.5}, {("new", "old"): gain}, {("new", "old"): 0.01}, 0.95)
        >>> ranking.groups, ranking.ranks["old"]
        ((('new',), ('old',)), RankInterval(best=2, worst=2))
    """

    metric: str
    values: dict[str, float]
    differences: dict[tuple[str, str], Difference]
    p_values: dict[tuple[str, str], float]
    confidence: float

    @property
    def ranks(self) -> dict[str, RankInterval]:
        """Name -> interval of the model's rank. The confidence level applies to all intervals together."""
        intervals = {}
        for name in self.values:
            better = sum(worse == name for _, worse in self._differing)
            worse = sum(better == name for better, _ in self._differing)
            intervals[name] = RankInterval(1 + better, len(self.values) - worse)
        return intervals

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The largest groups in which no two models differ significantly. Two models differ if no group contains both."""
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
        """Pairs that differ significantly. A p value of NaN is not significant."""
        return [pair for pair, p in self.p_values.items() if p < 1 - self.confidence]

    def to_dict(self) -> dict[str, Any]:
        """Return the ranking as plain values for JSON (NaN becomes None)."""
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
        """Return the letter of each group that contains the model; numbers if there are more groups than letters."""
        groups = self.groups
        letters = string.ascii_lowercase if len(groups) <= 26 else [str(number + 1) for number in range(len(groups))]
        return [letter for letter, group in zip(letters, groups, strict=False) if name in group]

    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """Return the cells of each model for a table: name, value, value minus the best, p, ranks and letters."""
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
        """The two lines below the table."""
        pairs = len(self.p_values)
        return (
            "Models that share a letter do not differ significantly. The confidence level of all rank intervals together is "
            f"{100 * self.confidence:g} %.",
            f"p tests the difference from the best model, corrected for {counted(pairs, 'pair')} (Holm).",
        )

    def __str__(self) -> str:
        """Return a table with one model per line, the best model first."""
        rows = [(printable(name), *cells) for name, *cells in self.rows()]
        return "\n".join([*table(self.columns, rows), *self.explanation])

    def __repr__(self) -> str:
        return str(self)


def rank_reports(reports: Mapping[str, ReportSource], metric: str = "mAP", confidence: float = 0.95) -> Ranking:
    """Return a ranking of several models by a metric on the same queries, with a confidence interval for each rank.

    Each pair of models is compared query by query, as in `compare_reports`, with a p value. Holm's correction accounts for
    the number of pairs, so comparing many equal models does not produce a winner by luck. Among n models, the interval of a
    rank is

        1 + (number of significantly better models)  to  n - (number of significantly worse models)

    Models that share a letter do not differ significantly. Significance refers to other classes and queries of the same
    kind, not to another training seed.

    Args:
        reports: Name -> report, or the path or address of a file that `RetrievalReport.save` has written; two or more.
        metric: A metric with a value for each query, such as `mAP` or `recall@1`. `macro_` before the key compares means
            over classes.
        confidence: Confidence level of all rank intervals together, in (0, 1). Two models differ significantly if their
            corrected p value is below `1 - confidence`.

    Returns:
        A frozen result, the best model first. A p value is NaN if the variance of the difference cannot be estimated.

    Raises:
        ValueError: If there are fewer than two reports, the reports have different queries, a file is not a saved report,
            or the metric is missing from a report, NaN, without a better direction or without a value for each query.

    References:
        Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scandinavian Journal of Statistics, 1979;
        Mogstad, Romano, Shaikh, Wilhelm, "Inference for Ranks", Review of Economic Studies, 2024; Piepho, "An Algorithm
        for a Letter-Based Representation of All-Pairwise Comparisons", Journal of Computational and Graphical Statistics,
        2004.

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
        Models that share a letter do not differ significantly. The confidence level of all rank intervals together is 95 %.
        p tests the difference from the best model, corrected for 3 pairs (Holm).
    """
    normal_quantile(confidence)
    if len(reports) < 2:
        raise InputError(
            f"rank_reports: cannot rank {counted(len(reports), 'report')}. Pass two or more, as name -> report."
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
    """Return the metric, if every report has it for each query and one direction is better."""
    first, *others = reports.values()
    requested = first.requested(metric)
    rankable = [key for key in first.values if _is_rankable(first, key)]
    fix = f"Choose another metric; the first report has {', '.join(rankable) or 'none'}."
    if not _is_rankable(first, metric) and metric in first.values:
        raise InputError(f"{call}: {metric!r} has no per-query values, or neither direction is better. {fix}")
    for name, report in reports.items():
        if metric not in report.values:
            raise InputError(
                f"{call}: the report {name!r} has no {metric!r}. Evaluate with it, or choose another metric."
            )
        if math.isnan(report[metric]):
            raise InputError(f"{call}: {metric!r} of {name!r} is NaN. {fix}")
    if any(report.requested(metric) != requested for report in others):
        raise InputError(f"{call}: {metric!r} is a different user-defined metric in each report. {fix}")
    return requested


def _is_rankable(report: RetrievalReport, key: str) -> bool:
    """Return whether a metric of a report has per-query values and a better direction."""
    requested = report.requested(key)
    return requested.of_queries in report.per_query and requested.metric.better is not None


def _largest(groups: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return each group once, without groups that are contained in another group."""
    distinct: Sequence[tuple[str, ...]] = list(dict.fromkeys(groups))
    return [group for group in distinct if not any(set(group) < set(other) for other in distinct)]


def p_in_words(p_value: float) -> str:
    """Return a p value with four digits; "unknown" for NaN."""
    if math.isnan(p_value):
        return "unknown"
    return "< 0.0001" if p_value < 1e-4 else f"{p_value:.4f}"
