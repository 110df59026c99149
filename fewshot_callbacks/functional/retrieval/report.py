"""`RetrievalReport`: the metrics of an evaluation, their intervals, and notes for the reader."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional.means import class_means
from fewshot_callbacks.functional.retrieval.decisions import PooledDecisions
from fewshot_callbacks.functional.retrieval.evaluation_notes import LEFT_OUT
from fewshot_callbacks.functional.retrieval.gain import Gain
from fewshot_callbacks.functional.retrieval.grouped_recall import GroupedRecall
from fewshot_callbacks.functional.retrieval.operating_points import Enclosure, ErrorRatePoint, OperatingPoint
from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts
from fewshot_callbacks.functional.retrieval.saved_reports import from_file, load, save, to_bytes
from fewshot_callbacks.functional.retrieval.settings import AUTO_GROUP_SIZE
from fewshot_callbacks.functional.retrieval.slices import Attribute, Slices, slices_of
from fewshot_callbacks.functional.retrieval.threshold_consistency import ThresholdConsistency
from fewshot_callbacks.functional.retrieval.values import Values, or_none
from fewshot_callbacks.functional.statistics import Interval
from fewshot_callbacks.settings import Metric, RequestedMetric, Similarity, Ties
from fewshot_callbacks.system.words import counted

T = TypeVar("T")

# Fields of Grouped Recall and of the report that JSON stores unchanged.
_OF_GROUPS = ("group_size", "groups", "are_given", "dropped_labels", "unmatched")
_PLAIN = (
    *("queries", "gallery", "classes", "queries_without_match", "queries_with_ties", "queries_with_copies"),
    *("is_estimate", "similarity", "ties"),
)


class TieRange(NamedTuple):
    """The smallest and the largest value of a metric over all orders of equal scores.

    The mean over all orders is between the two. Low-precision embeddings often have equal scores; an evaluation protocol for
    them reports both ends in addition to the mean (Yang, Jang, Jang, Choi, Augenstein and Lim, "Reliable Evaluation Protocol
    for Low-Precision Retrieval", ACL 2026, arXiv 2508.03306).

    Attributes:
        lowest: Value with relevant items last among equal scores (`ties="pessimistic"`); first, if lower is better.
        highest: Value with relevant items first (`ties="optimistic"`); last, if lower is better.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> query, items = torch.ones(1, 2), torch.ones(4, 2)
        >>> report = evaluate_retrieval(query, [1], items, [0, 0, 1, 1], metrics=("mAP", "recall@1"))
        >>> lowest, highest = report.tie_ranges["mAP"]
        >>> round(lowest, 2), round(report.mAP, 2), round(highest, 2)
        (0.42, 0.68, 1.0)
        >>> report.tie_ranges["recall@1"].width
        1.0
    """

    lowest: float
    highest: float

    @property
    def width(self) -> float:
        """Highest minus lowest."""
        return self.highest - self.lowest


class Points(dict[float, T]):
    """Operating points by the requested rate. The error for another rate lists the rates that were requested."""

    def __init__(self, points: Mapping[float, T], pattern: str, kind: str) -> None:
        super().__init__(points)
        self._pattern = pattern
        self._kind = kind

    def __missing__(self, rate: float) -> T:
        known = ", ".join(map(str, self)) if self else "none"
        raise LookupError(
            f"this report has no operating point at a {self._kind} of {rate}; it has {known}. Request it when you evaluate, "
            f"with metrics=({self._pattern.format(p=rate)!r}, ...)."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Points, (dict(self), self._pattern, self._kind)


def with_known_points(pooled: PooledDecisions) -> PooledDecisions:
    """Return the decisions with operating points whose error for another rate lists the requested rates."""
    return replace(
        pooled,
        at_precision=Points(pooled.at_precision, "recall@precision{p}", "precision"),
        at_false_match_rate=Points(pooled.at_false_match_rate, "fnmr@fmr{p}", "false match rate"),
    )


@equal_with_nan
@dataclass(frozen=True)
class RetrievalReport(Values):
    """The result of `evaluate_retrieval`.

    Read a value by its key: `report["recall@1"]`. Means are over the queries that have a relevant candidate. Pooled values
    (such as `pair_f1`) are over all query-candidate pairs. All metrics are in [0, 1], except thresholds, which are scores.
    A value that is not defined is NaN.

    Attributes:
        values: Metric -> value, in the order of `metrics`. Grouped Recall is missing if it could not be computed.
        pooled: Decisions over all pairs, which the properties from `decision` to `pair_counts` read; None if neither a
            pooled metric nor a threshold was requested.
        consistency: False match rate p -> how differently one threshold serves the classes at rates from p / 10 to p, for
            the metrics `opis@fmr{p}` and `opis_gap@fmr{p}`.
        grouped: Grouped Recall@K with its `group_size`; None if it was not requested, or if there are too few labels for two
            groups. A note reports too few labels, unless both `metrics` and `label_groups` have their defaults.
        intervals: Metric -> confidence interval of its mean, robust to the dependence of queries of the same class.
        tie_ranges: Metric of ranks -> its smallest and largest value over the orders of equal scores; empty if no relevant
            item ties with an irrelevant one. `map@k_found` has no range because its extremes may be at other orders.
        confidence: Confidence level of the intervals.
        queries: Number of evaluated queries: all, or the sample that `max_queries` draws.
        gallery: Number of gallery items.
        classes: Number of distinct labels of the queries; 0 if items do not have exactly one label each.
        queries_without_match: Number of queries without a relevant candidate. They are left out of every mean.
        queries_with_ties: Number of queries with a relevant item that ties with an irrelevant one, so that the rule for ties
            matters.
        queries_with_copies: Number of queries with a candidate of the same label and a bit-identical embedding: a repeated
            item, or an item that the embedding cannot distinguish from the query; 0 if `relevance` was passed.
        is_estimate: Whether only a sample of the queries was evaluated (`max_queries`).
        similarity: Similarity that compared the embeddings.
        ties: Rule for equal scores.
        notes: What you should know when you read the numbers.
        memory_note: A sentence about a memory budget that was too small, which affects no number; None if it was kept.
        per_query: Metric -> (queries,) its value for each query; NaN for a query without a match. `mAP` and `mrr` are
            always included.
        query_labels: (queries,) label of each query. If labels were strings: index of the label in `label_names`.
        drawn: (queries,) index of each drawn query among all queries, ascending (`max_queries`); None if all were evaluated.
        counted: Index of each counted query among the queries that were passed, ascending. `per_query`, `query_labels` and
            `drawn` refer to these queries. None if all were counted, that is, if no query repeats an id.
        label_names: Sorted distinct labels if labels were strings; None for integers.
        slices: Attribute -> the slice of each query; empty if no `slices` were passed.
        query_ids_digest: Digest of the ids of the evaluated queries in their order, to recognise the same queries; None
            without ids.
        gallery_digest: Digest of the labels of the gallery items, in any order, or of the `relevance` that was passed.
        gallery_ids_digest: Digest of the ids and labels of the gallery items, in any order; None without ids.
        users_metrics: Key -> custom metric, without its function.
        seconds: Duration of the evaluation in seconds.
        gain: The first metric minus its value in a reference, if the report is from a `RetrievalMonitor` with `compare`.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> report = evaluate_retrieval(embeddings, [0, 0, 1, 0], metrics=("mAP", "recall@1", "pair_f1"))
        >>> round(report.mAP, 4), round(report["recall@1"], 4), report.queries_without_match
        (0.8611, 0.6667, 1)
        >>> print(report)
        4 queries, 4 gallery items, 2 classes
        mAP                       0.8611
        recall@1                  0.6667
        pair_f1                   0.7500
        1 of 4 queries have no match and are left out of every mean.
    """

    values: dict[str, float]
    pooled: PooledDecisions | None
    consistency: dict[float, ThresholdConsistency] = field(compare=False, repr=False)
    grouped: GroupedRecall | None
    intervals: dict[str, Interval]
    tie_ranges: dict[str, TieRange]
    confidence: float
    queries: int
    gallery: int
    classes: int
    queries_without_match: int
    queries_with_ties: int
    queries_with_copies: int
    is_estimate: bool
    similarity: Similarity
    ties: Ties
    notes: tuple[str, ...]
    memory_note: str | None = field(compare=False)
    per_query: dict[str, Float[Tensor, "queries"]] = field(compare=False, repr=False)
    query_labels: Int[Tensor, "queries"] = field(compare=False, repr=False)
    drawn: Int[Tensor, "queries"] | None = field(compare=False, repr=False)
    counted: Int[Tensor, "counted"] | None = field(compare=False, repr=False)
    label_names: tuple[str, ...] | None = field(compare=False, repr=False)
    slices: Mapping[str, Attribute] = field(compare=False, repr=False)
    query_ids_digest: str | None = field(compare=False, repr=False)
    gallery_digest: str = field(compare=False, repr=False)
    gallery_ids_digest: str | None = field(compare=False, repr=False)
    users_metrics: Mapping[str, RequestedMetric] = field(compare=False, repr=False)
    seconds: float = field(compare=False)
    gain: Gain | None = field(default=None, compare=False, repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file. `load` returns it bit for bit.

        The file is an .npz file with a few bytes per query and metric. It contains no embeddings and no pickles. The values
        of your own metrics are saved, but not their functions.

        Args:
            path: Path or address, such as `june.report.npz`. An existing file is overwritten.

        Examples:
            >>> import tempfile
            >>> from fewshot_callbacks import evaluate_retrieval
            >>> report = evaluate_retrieval([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]], [0, 0, 1, 0])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     report.save(f"{folder}/june.report.npz")
            ...     loaded = RetrievalReport.load(f"{folder}/june.report.npz")
            >>> round(loaded.mAP, 4), loaded == report
            (0.8611, True)
        """
        save(path, self, _SAVED_CLASSES)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RetrievalReport:
        """Return the report in a file that `save` has written.

        Args:
            path: Path or address of the file.

        Raises:
            ValueError: If the file is damaged, is not a saved report, or was saved by a newer version in another format.
            FileNotFoundError: If there is no such file.
        """
        report: RetrievalReport = load("RetrievalReport.load", path, cls, _SAVED_CLASSES)
        return report

    def to_bytes(self) -> bytes:
        """Return the content of the file that `save` writes."""
        return to_bytes(self, _SAVED_CLASSES)

    @classmethod
    def from_bytes(cls, content: bytes) -> RetrievalReport:
        """Return the report from the result of `to_bytes`.

        Raises:
            ValueError: If the content is damaged, or is from a newer version in another format.
        """
        file = io.BytesIO(content)
        report: RetrievalReport = from_file("RetrievalReport.from_bytes", "the content", file, cls, _SAVED_CLASSES)
        return report

    def _why_left_out(self, key: str) -> str:
        words = super()._why_left_out(key)
        is_grouped = self.requested(key).metric.input == "groups"
        return f"{words} {self.fact_of_classes}".rstrip() if is_grouped else words

    @property
    def fact_of_classes(self) -> str:
        """Why there is no Grouped Recall: the note on it, or that `label_groups="auto"` needs more labels; else empty."""
        notes = [note for note in self.notes if note.startswith(LEFT_OUT)]
        if notes:
            return notes[0]
        if not 0 < self.classes < 2 * AUTO_GROUP_SIZE:
            return ""
        return (
            f"With label_groups='auto', two groups of {AUTO_GROUP_SIZE} labels need {2 * AUTO_GROUP_SIZE}; the queries have "
            f"{self.classes}."
        )

    @property
    def decision(self) -> OperatingPoint:
        """Pooled precision, recall and F1 at the threshold with the best F1, or at the requested threshold."""
        return self._of_pairs().decision

    @property
    def at_precision(self) -> dict[float, OperatingPoint]:
        """Precision -> pooled operating point at the smallest score of a relevant pair that reaches this precision.

        The threshold is within `threshold_bounds`.
        """
        return with_known_points(self._of_pairs()).at_precision

    @property
    def at_false_match_rate(self) -> dict[float, ErrorRatePoint]:
        """False match rate -> pooled operating point at the smallest score of a relevant pair that keeps this rate."""
        return with_known_points(self._of_pairs()).at_false_match_rate

    @property
    def auc_pr(self) -> Enclosure:
        """Area under the pooled precision-recall curve: the sum of precision times the step in recall.

        If the metric `auc_pr` was not requested, the area is only known between proved bounds, which depend on the machine.
        """
        return self._of_pairs().auc_pr

    @property
    def curve(self) -> tuple[tuple[float, float, float], ...]:
        """The pooled precision-recall curve for plots: (threshold, precision, recall), thinned and precise to a pixel."""
        return self._of_pairs().curve

    @property
    def pair_counts(self) -> PairCounts:
        """Numbers of relevant and irrelevant pairs at a few hundred thresholds and in score bins, for plots."""
        return self._of_pairs().pair_counts

    def _of_pairs(self) -> PooledDecisions:
        """Return the decisions over all pairs, if there are any."""
        if self.pooled is None:
            raise LookupError(
                f"this report has no pooled values, because none of its metrics ({', '.join(self.values)}) is over all "
                "pairs. Request such a metric when you evaluate, with metrics=('pair_f1', ...), or pass a threshold."
            )
        return self.pooled

    def per_class(self) -> dict[str, dict[int | str, float]]:
        """Return metric -> label -> mean over the queries of this class. Labels have the form in which you passed them.

        Classes in which no query has a match are left out.

        Raises:
            ValueError: If there are no classes, because `relevance` was passed or items have several labels.

        Examples:
            >>> from fewshot_callbacks import evaluate_retrieval
            >>> embeddings = [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [0.2, 1.0]]
            >>> report = evaluate_retrieval(embeddings, ["owl", "owl", "crow", "crow", "owl"], metrics=("mAP",))
            >>> {label: round(mean, 4) for label, mean in report.per_class()["mAP"].items()}
            {'crow': 0.75, 'owl': 0.8056}
        """
        if not self.classes:
            raise InputError(
                "RetrievalReport.per_class: there are no classes, because relevance was passed or items have several "
                "labels. Use per_query, which has the values of each query."
            )
        tables = {}
        for name, values in self.per_query.items():
            present, means, _ = class_means(values, self.query_labels)
            labels = present.tolist()
            keys = labels if self.label_names is None else [self.label_names[label] for label in labels]
            tables[name] = dict(zip(keys, means.tolist(), strict=True))
        return tables

    def of_slices(self, attribute: str, metric: str | None = None) -> Slices:
        """Return a metric for each slice, that is, for the queries with the same value of an attribute.

        The confidence level of the report applies to all intervals together (Bonferroni). Therefore each interval is wider
        than the interval of a single slice would be.

        Args:
            attribute: A key of the `slices` that were passed to `evaluate_retrieval`.
            metric: A metric with a value for each query; by default the first such metric of this report.

        Returns:
            Slice -> value, interval, number of queries and classes, and share of the queries. `print` shows a table, the
            worst slice first.

        Raises:
            ValueError: If the report does not have the attribute, or does not have the metric for each query.

        Examples:
            >>> import torch
            >>> from fewshot_callbacks import evaluate_retrieval
            >>> labels = torch.arange(200) % 40
            >>> points = torch.randn(200, 16, generator=torch.Generator().manual_seed(0))
            >>> points = torch.eye(40)[labels] @ points[:40] + points
            >>> cameras = ["roof", "door"] * 100
            >>> report = evaluate_retrieval(points, labels, slices={"camera": cameras}, metrics=("mAP", "recall@1"))
            >>> print(report.of_slices("camera", "recall@1"))  # doctest: +ELLIPSIS
            camera  recall@1          interval  queries  classes   share
              roof    0.6500  0.4855 to 0.7852      100       20  50.0 %
              door    0.8000  0.6346 to 0.9021      100       20  50.0 %
            The confidence level of all intervals together is 95 %. The worst slice looks worse than it is, so judge it...
        """
        requested = self.sliced_metric("RetrievalReport.of_slices", metric)
        values = self.per_query[requested.of_queries]
        of_queries = self.attribute("RetrievalReport.of_slices", attribute)
        return slices_of(attribute, of_queries, requested, values, self.query_labels, self.confidence)

    def attribute(self, call: str, name: str) -> Attribute:
        """Return the slice of each query for an attribute.

        Args:
            call: The public function, for messages.
            name: The attribute.

        Raises:
            ValueError: If the report does not have the attribute.
        """
        if name not in self.slices:
            known = ", ".join(map(repr, self.slices)) or "none"
            raise InputError(
                f"{call}: the report has no attribute {name!r}; it has {known}. Evaluate with slices={{{name!r}: values}}."
            )
        return self.slices[name]

    def sliced_metric(self, call: str, key: str | None) -> RequestedMetric:
        """Return a metric that the report has for each query, by default the first.

        Args:
            call: The public function, for messages.
            key: Key of the metric.

        Raises:
            ValueError: If the report does not have the metric for each query.
        """
        sliced = self.sliced_metrics()
        if key is None and sliced:
            key = sliced[0]
        if key not in sliced:
            raise InputError(
                f"{call}: slices need a metric with a value for each query; the report has {', '.join(sliced) or 'none'}"
                f"{'' if key is None else f', not {key!r}'}. Request such a metric when you evaluate, such as 'mAP'."
            )
        return self.requested(key)

    def sliced_metrics(self) -> list[str]:
        """Return the keys of the metrics that slices have: the metrics with a value for each query."""
        return [name for name in self.values if self.requested(name).of_queries in self.per_query]

    def meaning(self, key: str) -> str:
        """Return a sentence that explains a value of this report. For Grouped Recall it includes the group size."""
        meaning = super().meaning(key)
        if self.requested(key).metric.input == "groups" and self.grouped is not None:
            return f"{meaning} {self.grouped.in_words()}."
        return meaning

    def lines(self) -> list[str]:
        """Return one line for each value, with its interval, its range under ties, and the groups of Grouped Recall."""
        lines = super().lines()
        for position, name in enumerate(self.values):
            if self.grouped is not None and self.requested(name).metric.input == "groups":
                lines[position] += f"  {self.grouped.in_words()}"
            if self.ties_in_words(name):
                lines[position] += f"  ties: {self.ties_in_words(name)}"
        return lines

    def ties_in_words(self, key: str) -> str:
        """Return the range of a value under ties, such as "0.4167 to 1.0000"; empty if both ends print the same."""
        lowest, highest = (f"{end:.4f}" for end in self.tie_ranges.get(key, (0.0, 0.0)))
        return "" if lowest == highest else f"{lowest} to {highest}"

    def __str__(self) -> str:
        """Return the sizes, the values of `metrics` with their intervals, one per line, and the messages."""
        classes = f", {self.classes:,} classes" if self.classes else ""
        head = f"{counted(self.queries, 'query')}, {counted(self.gallery, 'gallery item')}{classes}"
        return "\n".join([head, *self.lines(), *self._gain_in_words(), *self.messages])

    def __repr__(self) -> str:
        return str(self)

    def _gain_in_words(self) -> list[str]:
        return [] if self.gain is None else [self.gain.in_words()]

    @property
    def messages(self) -> tuple[str, ...]:
        """The notes, including the note on a memory budget that was too small."""
        return self.notes if self.memory_note is None else (*self.notes, self.memory_note)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON (NaN becomes None)."""
        stored = self.tables()
        stored["tie_ranges"] = {name: [or_none(end) for end in ends] for name, ends in self.tie_ranges.items()}
        if self.pooled is not None:
            stored |= _stored_decisions(self.pooled)
        stored["classes_wanting_another_threshold"] = {
            f"{rate:g}": {str(label): list(pair) for label, pair in of_rate.wanting().items()}
            for rate, of_rate in self.consistency.items()
        }
        stored["slices"] = {
            attribute: {metric: self.of_slices(attribute, metric).to_dict() for metric in self.sliced_metrics()}
            for attribute in self.slices
        }
        stored["label_names"] = None if self.label_names is None else list(self.label_names)
        stored["grouped"] = self.grouped and {name: getattr(self.grouped, name) for name in _OF_GROUPS}
        stored |= {name: getattr(self, name) for name in _PLAIN}
        stored["notes"] = [*self._gain_in_words(), *self.messages]
        stored["seconds"] = round(self.seconds, 3)
        return stored


# Classes in a saved report. If you change the fields of one of them, raise `saved_reports.FORMAT`.
_SAVED_CLASSES: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(
            Attribute,
            Enclosure,
            ErrorRatePoint,
            Gain,
            GroupedRecall,
            Interval,
            Metric,
            OperatingPoint,
            PairCounts,
            PooledDecisions,
        ),
        *(RequestedMetric, RetrievalReport, ThresholdConsistency, TieRange),
    )
}


def _stored_decisions(pooled: PooledDecisions) -> dict[str, Any]:
    """Return the pooled thresholds and the pooled precision-recall curve for JSON."""
    return {
        "thresholds_at_precision": {
            f"{precision:g}": or_none(point.threshold) for precision, point in pooled.at_precision.items()
        },
        "thresholds_at_false_match_rate": {
            f"{rate:g}": or_none(point.threshold) for rate, point in pooled.at_false_match_rate.items()
        },
        "auc_pr_bounds": [pooled.auc_pr.low, pooled.auc_pr.high],
        "curve": [[or_none(value) for value in point] for point in pooled.curve],
    }
