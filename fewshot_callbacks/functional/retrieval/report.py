"""`RetrievalReport`: the metrics of an evaluation, their intervals, and notes for their reader."""

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

# What JSON holds as it is, of Grouped Recall and of the report.
_OF_GROUPS = ("group_size", "groups", "are_given", "dropped_labels", "unmatched")
_PLAIN = (
    *("queries", "gallery", "classes", "queries_without_match", "queries_with_ties", "queries_with_copies"),
    *("is_estimate", "similarity", "ties"),
)


class TieRange(NamedTuple):
    """What a metric is with the two extreme orders of equal scores, where its mean over all orders lies between both.

    A protocol for embeddings of low precision, whose scores tie often, asks for both ends beside the mean (Yang, Jang, Jang,
    Choi, Augenstein and Lim, "Reliable Evaluation Protocol for Low-Precision Retrieval", ACL 2026, arXiv 2508.03306).

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
    """the value where relevant items come last among equal scores (`ties="pessimistic"`); first, if lower is better"""
    highest: float
    """the value where they come first (`ties="optimistic"`); last, if lower is better"""

    @property
    def width(self) -> float:
        """How far apart both ends are."""
        return self.highest - self.lowest


class Points(dict[float, T]):
    """Operating points by the requested rate; the error for another rate names those that there are."""

    def __init__(self, points: Mapping[float, T], pattern: str, kind: str) -> None:
        super().__init__(points)
        self._pattern = pattern
        self._kind = kind

    def __missing__(self, rate: float) -> T:
        known = ", ".join(map(str, self)) if self else "none"
        raise LookupError(
            f"this report has no operating point at a {self._kind} of {rate}; it has {known}. Ask for it when you evaluate, "
            f"with metrics=({self._pattern.format(p=rate)!r}, ...)."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Points, (dict(self), self._pattern, self._kind)


def with_known_points(pooled: PooledDecisions) -> PooledDecisions:
    """Return operating points whose error for another precision or rate names those that there are."""
    return replace(
        pooled,
        at_precision=Points(pooled.at_precision, "recall@precision{p}", "precision"),
        at_false_match_rate=Points(pooled.at_false_match_rate, "fnmr@fmr{p}", "false match rate"),
    )


@equal_with_nan
@dataclass(frozen=True)
class RetrievalReport(Values):
    """The result of `evaluate_retrieval`.

    Means are over the queries that have a relevant candidate; pooled values are over all query-candidate pairs. All
    metrics lie in [0, 1], except thresholds, which are scores. NaN stands for a value that does not exist.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> report = evaluate_retrieval(embeddings, [0, 0, 1, 1])
        >>> report.mAP, report["recall@1"], report.queries, report.queries_without_match
        (1.0, 1.0, 4, 0)
        >>> print(report)  # doctest: +ELLIPSIS
        4 queries, 4 gallery items, 2 classes
        mAP                       1.0000...
    """

    values: dict[str, float]
    """metric -> value, in the order of `metrics`; Grouped Recall is missing where it could not be computed (see
    `grouped`)"""
    pooled: PooledDecisions | None
    """what is known of all pairs together, which the fields from `decision` to `pair_counts` read; None if neither a metric
    of them nor a threshold was requested"""
    consistency: dict[float, ThresholdConsistency] = field(compare=False, repr=False)
    """false match rate -> utility of each class at the thresholds of a tenth of it to the rate, and the classes that want
    another threshold; for the metrics `opis@fmr0.1` and `opis_gap@fmr0.1`"""
    grouped: GroupedRecall | None
    """Grouped Recall@K, with the `group_size` that was taken; None if not requested, or if there are fewer labels than two
    groups need (a note says so, unless both `metrics` and `label_groups` are the default)"""
    intervals: dict[str, Interval]
    """metric -> confidence interval of its mean, robust to the dependence of queries of one class"""
    tie_ranges: dict[str, TieRange]
    """metric of ranks -> its values with the two extreme orders of equal scores; empty where no relevant item ties with an
    irrelevant one. `map@k_found` has none, since other orders may give more or less"""
    confidence: float
    """confidence level of the intervals"""
    queries: int
    """number of queries that were evaluated: all, or those drawn (`max_queries`)"""
    gallery: int
    """number of gallery items"""
    classes: int
    """distinct labels of the queries; 0 where relevance is no single label"""
    queries_without_match: int
    """queries that have no relevant candidate: left out of every mean"""
    queries_with_ties: int
    """queries with a relevant item that ties with an irrelevant one: where the rule for ties decides"""
    queries_with_copies: int
    """queries with a candidate of their label whose embedding is equal bit for bit: an item that comes twice, or one that
    the embedding does not tell from it; 0 where relevance was given"""
    is_estimate: bool
    """whether only a sample of the queries was evaluated (`max_queries`)"""
    similarity: Similarity
    """how embeddings were compared"""
    ties: Ties
    """how equal scores were counted"""
    notes: tuple[str, ...]
    """what a reader of the numbers should know"""
    memory_note: str | None = field(compare=False)
    """a sentence on a memory budget that could not be kept, which changes no number; None if it was kept"""
    per_query: dict[str, Float[Tensor, "queries"]] = field(compare=False, repr=False)
    """metric -> its value for each query; NaN for a query without a match. `mAP` and `mrr` are always among them"""
    query_labels: Int[Tensor, "queries"] = field(compare=False, repr=False)
    """label of each query, in the same order; its index in `label_names` where labels were strings"""
    drawn: Int[Tensor, "queries"] | None = field(compare=False, repr=False)
    """index of each drawn query among all queries, ascending (`max_queries`); None if all were evaluated"""
    counted: Int[Tensor, "counted"] | None = field(compare=False, repr=False)
    """index of each counted query among those that were passed, ascending, where ids left out others: of these queries are
    `per_query`, `query_labels` and `drawn`; None if all were counted"""
    label_names: tuple[str, ...] | None = field(compare=False, repr=False)
    """where labels were strings: each string once, sorted; None where they were integers"""
    slices: Mapping[str, Attribute] = field(compare=False, repr=False)
    """attribute -> the slice of each query; empty if no `slices` were passed"""
    query_ids_digest: str | None = field(compare=False, repr=False)
    """digest of the ids of the evaluated queries in their order, which tells two sets of queries apart; None without ids"""
    gallery_digest: str = field(compare=False, repr=False)
    """digest of the labels of the gallery items in any order, or of the relevance that was passed"""
    gallery_ids_digest: str | None = field(compare=False, repr=False)
    """digest of the ids of the gallery items in any order, with their labels; None without ids"""
    users_metrics: Mapping[str, RequestedMetric] = field(compare=False, repr=False)
    """key -> the metric of a user that was requested by it, without its function"""
    seconds: float = field(compare=False)
    """duration of the evaluation, in seconds"""
    gain: Gain | None = field(default=None, compare=False, repr=False)
    """the first metric minus its value in a reference, where a `RetrievalMonitor` with `compare` has made the report"""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report into a file, from which `load` returns it to the bit. It holds no embeddings and no pickles.

        The file is an .npz file of a few bytes per query and metric. Functions of metrics of your own are not saved; what
        they have computed is.

        Args:
            path: Path or address, such as `june.report.npz`. A file of this name is replaced.

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
        """Return the report that `save` has written into a file.

        Args:
            path: Path or address of the file.

        Raises:
            ValueError: If the file is damaged, holds something else, or was saved by a newer version in another format.
            FileNotFoundError: If there is no such file.
        """
        report: RetrievalReport = load("RetrievalReport.load", path, cls, _SAVED_CLASSES)
        return report

    def to_bytes(self) -> bytes:
        """Return the content of the file that `save` writes."""
        return to_bytes(self, _SAVED_CLASSES)

    @classmethod
    def from_bytes(cls, content: bytes) -> RetrievalReport:
        """Return the report that `to_bytes` has made.

        Raises:
            ValueError: If the content is damaged, or was made by a newer version in another format.
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
        """Why there is no Grouped Recall: the note on it, or that `label_groups="auto"` gives none; empty otherwise."""
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
        """Pooled precision, recall and F1 at the threshold of the best F1, or at the threshold that was requested."""
        return self._of_pairs().decision

    @property
    def at_precision(self) -> dict[float, OperatingPoint]:
        """Return, for each precision, the pooled operating point at the smallest score of a relevant pair that has it.

        It lies within the bounds on thresholds.
        """
        return with_known_points(self._of_pairs()).at_precision

    @property
    def at_false_match_rate(self) -> dict[float, ErrorRatePoint]:
        """Return, for each false match rate, the pooled operating point at the smallest relevant score that keeps it."""
        return with_known_points(self._of_pairs()).at_false_match_rate

    @property
    def auc_pr(self) -> Enclosure:
        """Area under the pooled precision-recall curve, the sum of precision times the step in recall.

        A single pass over all pairs gives proved bounds, which depend on the machine; the metric `auc_pr` makes it exact.
        """
        return self._of_pairs().auc_pr

    @property
    def curve(self) -> tuple[tuple[float, float, float], ...]:
        """The same curve, thinned for a plot: (threshold, precision, recall), precise to a pixel."""
        return self._of_pairs().curve

    @property
    def pair_counts(self) -> PairCounts:
        """Relevant and irrelevant pairs at a few hundred thresholds and in bins of their score, for plots."""
        return self._of_pairs().pair_counts

    def _of_pairs(self) -> PooledDecisions:
        """Return the counts of all pairs, if there are any."""
        if self.pooled is None:
            raise LookupError(
                f"this report has counted no pairs, since none of {', '.join(self.values)} is of all pairs together. Ask "
                "for one that is when you evaluate, with metrics=('pair_f1', ...), or pass a threshold."
            )
        return self.pooled

    def per_class(self) -> dict[str, dict[int | str, float]]:
        """Return the mean of each metric over the queries of each class: metric -> label, as it was given -> mean.

        Classes without a query that has a match are left out.

        Raises:
            ValueError: If relevance is no single label, so that there are no classes.
        """
        if not self.classes:
            raise InputError(
                "RetrievalReport.per_class: relevance was given, or items have several labels each: there are no classes. "
                "per_query holds the values of each query."
            )
        tables = {}
        for name, values in self.per_query.items():
            present, means, _ = class_means(values, self.query_labels)
            labels = present.tolist()
            keys = labels if self.label_names is None else [self.label_names[label] for label in labels]
            tables[name] = dict(zip(keys, means.tolist(), strict=True))
        return tables

    def of_slices(self, attribute: str, metric: str | None = None) -> Slices:
        """Return a metric of each slice: of the queries that have one value of an attribute.

        The intervals of all slices together have the confidence of the report, so each of them is wider than an interval of
        its own would be (Bonferroni).

        Args:
            attribute: A key of the `slices` that were passed to `evaluate_retrieval`.
            metric: A metric with a value for each query; by default the first of this report.

        Returns:
            Slice -> value, interval and number of queries. `print` shows a table, the worst first.

        Raises:
            ValueError: If the report has no such attribute, or no such metric with a value for each query.

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
            All intervals together have 95 % confidence. The worst of several slices looks worse than it is...
        """
        requested = self.sliced_metric("RetrievalReport.of_slices", metric)
        values = self.per_query[requested.of_queries]
        of_queries = self.attribute("RetrievalReport.of_slices", attribute)
        return slices_of(attribute, of_queries, requested, values, self.query_labels, self.confidence)

    def attribute(self, call: str, name: str) -> Attribute:
        """Return the slice of each query by an attribute.

        Args:
            call: The public function, for messages.
            name: The attribute.

        Raises:
            ValueError: If the report has no such attribute.
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
            ValueError: If the report has no such metric for each query.
        """
        sliced = self.sliced_metrics()
        if key is None and sliced:
            key = sliced[0]
        if key not in sliced:
            raise InputError(
                f"{call}: slices need a metric with a value for each query, and the report has {', '.join(sliced) or 'none'}"
                f"{'' if key is None else f', not {key!r}'}. Evaluate with another of metrics, such as 'mAP'."
            )
        return self.requested(key)

    def sliced_metrics(self) -> list[str]:
        """Return the keys of the metrics that slices have: those with a value for each query."""
        return [name for name in self.values if self.requested(name).of_queries in self.per_query]

    def meaning(self, key: str) -> str:
        """Return a sentence on what a value of this report is; of Grouped Recall also among how many classes it searched."""
        meaning = super().meaning(key)
        if self.requested(key).metric.input == "groups" and self.grouped is not None:
            return f"{meaning} {self.grouped.in_words()}."
        return meaning

    def lines(self) -> list[str]:
        """Return each value as a line: with its interval, the range that ties leave, and the groups of Grouped Recall."""
        lines = super().lines()
        for position, name in enumerate(self.values):
            if self.grouped is not None and self.requested(name).metric.input == "groups":
                lines[position] += f"  {self.grouped.in_words()}"
            if self.ties_in_words(name):
                lines[position] += f"  ties: {self.ties_in_words(name)}"
        return lines

    def ties_in_words(self, key: str) -> str:
        """Return the range that ties leave to a value, such as "0.4167 to 1.0000"; nothing if no digit shows it."""
        lowest, highest = (f"{end:.4f}" for end in self.tie_ranges.get(key, (0.0, 0.0)))
        return "" if lowest == highest else f"{lowest} to {highest}"

    def __str__(self) -> str:
        """Return the values of `metrics`, one in a line with its interval where there is one, and the messages."""
        classes = f", {self.classes:,} classes" if self.classes else ""
        head = f"{counted(self.queries, 'query')}, {counted(self.gallery, 'gallery item')}{classes}"
        return "\n".join([head, *self.lines(), *self._gain_in_words(), *self.messages])

    def __repr__(self) -> str:
        return str(self)

    def _gain_in_words(self) -> list[str]:
        return [] if self.gain is None else [self.gain.in_words()]

    @property
    def messages(self) -> tuple[str, ...]:
        """The notes, and a note on the memory budget if it could not be kept."""
        return self.notes if self.memory_note is None else (*self.notes, self.memory_note)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dictionaries for JSON (NaN becomes None)."""
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


# What a saved report is made of. If the fields of one of these classes change, `saved_reports.FORMAT` must be raised.
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
    """Return the thresholds and the precision-recall curve of all pairs, for JSON."""
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
