"""The gain of an evaluation over a reference, with its interval, and the choice of the reference.

The value of the best of many epochs is partly luck. The next epoch is compared with it on the same queries, so an equally
good epoch looks worse the more epochs there were. Therefore an epoch becomes the reference only if it is significantly
better than the previous reference. For the confidence level c, the k-th epoch that is compared with the same reference has
an interval at the level 1 - (1 - c) / k (Bonferroni).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fewshot_callbacks.functional.retrieval.compare import paired_interval, refuse_other_queries
from fewshot_callbacks.functional.retrieval.gain import Gain
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.functional.statistics import EQUAL

Against = Literal["best", "first"]
"""The validation that later validations of a run are compared with."""


@dataclass
class GainReference:
    """The evaluation that other evaluations are compared with.

    With `against="best"`, an evaluation that is significantly better becomes the reference. With `first`, the reference
    stays. A report of None takes the first report. `tries` is the number of compared evaluations.
    """

    metric: str
    against: Against = "best"
    confidence: float = 0.95
    report: RetrievalReport | None = field(default=None, repr=False)
    tries: int = 0

    def compare(self, report: RetrievalReport) -> Gain:
        """Return the gain of an evaluation, which may become the reference."""
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
    """Return a report with only what a comparison by one metric needs: its per-query values, and the queries' identity."""
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
