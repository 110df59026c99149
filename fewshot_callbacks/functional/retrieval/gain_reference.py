"""Whether an evaluation is better than a reference beyond chance: the gain, with its interval.

The best of many epochs owes part of its value to luck, on the same queries on which the next epoch is compared with it. The
more epochs there were, the worse an equally good epoch looks. Therefore an epoch becomes the reference only if it is better
than the reference before beyond chance. The k-th epoch that is compared with one reference has an interval at the
confidence 1 - (1 - c) / k for the confidence c (Bonferroni).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fewshot_callbacks.functional.retrieval.compare import paired_interval, refuse_other_queries
from fewshot_callbacks.functional.retrieval.gain import Gain
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.statistics import EQUAL

Against = Literal["best", "first"]
"""Which validation of a training the others are compared with."""


@dataclass
class GainReference:
    """The evaluation that others are compared with.

    Args:
        metric: Key of a metric that every report has for each query.
        against: `best`: each evaluation that is better beyond chance takes its place. `first`: it stays.
        confidence: Confidence level, in (0, 1).
        report: The reference; None takes the first report.
        tries: Number of evaluations that were compared with it.
    """

    metric: str
    against: Against = "best"
    confidence: float = 0.95
    report: RetrievalReport | None = field(default=None, repr=False)
    tries: int = 0

    def compare(self, report: RetrievalReport) -> Gain:
        """Return the gain of an evaluation, which may become the reference.

        Raises:
            ValueError: If it is of other queries than the reference.
        """
        value = report[self.metric]
        if self.report is None:
            self.report = _only_metric(report, self.metric)
            return Gain(self.metric, 0.0, EQUAL, value, is_better=False, confidence=self.confidence, is_first=True)
        refuse_other_queries("compare", {"the reference": self.report, "this validation": report})
        reference = self.report[self.metric]
        self.tries += 1
        tries = self.tries if self.against == "best" else 1
        confidence = 1 - (1 - self.confidence) / tries
        interval = paired_interval(report, self.report, report.requested(self.metric), confidence)
        is_better = interval.high < 0 if self.lower_is_better(report) else interval.low > 0
        gain = Gain(self.metric, value - reference, interval, reference, is_better, confidence)
        if is_better and self.against == "best":
            self.report = _only_metric(report, self.metric)
            self.tries = 0
            gain = gain._replace(reference=value)
        return gain

    def lower_is_better(self, report: RetrievalReport) -> bool:
        """Return whether lower values of the metric are better."""
        return report.requested(self.metric).metric.better == "lower"


def _only_metric(report: RetrievalReport, metric: str) -> RetrievalReport:
    """Return what a comparison by one metric needs of a report: its value for each query, and what tells the queries."""
    of_queries = report.requested(metric).of_queries
    return replace(
        report,
        values={metric: report[metric]},
        intervals={key: interval for key, interval in report.intervals.items() if key == metric},
        per_query={of_queries: report.per_query[of_queries]},
        pooled=None,
        consistency={},
        grouped=None,
        tie_ranges={},
        notes=(),
        slices={},
        users_metrics={key: users for key, users in report.users_metrics.items() if key == metric},
        gain=None,
    )
