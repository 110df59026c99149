"""`RetrievalReport`: the metrics of an evaluation, their intervals, and notes for their reader."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional.means import class_means
from fewshot_callbacks.functional.retrieval.decisions import PooledDecisions
from fewshot_callbacks.functional.retrieval.gain import Gain
from fewshot_callbacks.functional.retrieval.grouped_recall import GroupedRecall
from fewshot_callbacks.functional.retrieval.operating_points import Enclosure, ErrorRatePoint, OperatingPoint
from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts
from fewshot_callbacks.functional.retrieval.registry import METRICS, is_pattern, requested_metric
from fewshot_callbacks.functional.retrieval.saved_reports import from_file, load, save, to_bytes
from fewshot_callbacks.functional.retrieval.settings import AUTO_GROUP_SIZE
from fewshot_callbacks.functional.retrieval.threshold_consistency import ThresholdConsistency
from fewshot_callbacks.functional.statistics import Interval
from fewshot_callbacks.settings import Metric, RequestedMetric, Similarity, Ties
from fewshot_callbacks.system.words import counted

T = TypeVar("T")

# Ratio to the median length from which a note names the longest embedding.
LONGEST_RATIO = 1000.0
# What JSON holds as it is, of Grouped Recall and of the report.
_OF_GROUPS = ("group_size", "groups", "are_given", "dropped_labels", "unmatched")
_PLAIN = (
    *("queries", "gallery", "classes", "queries_without_match", "queries_with_ties", "queries_with_copies"),
    *("is_estimate", "similarity", "ties"),
)


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


# How the note on queries without a match describes them.
WITHOUT_MATCH = "have no match and are left out of every mean"
# Beginning of the note that there is no Grouped Recall.
LEFT_OUT = "Grouped Recall is left out"


def notes_on(
    vectors: Vectors, places: Int[Tensor, "own"], relevant: Int[Tensor, "queries"], tied: Bool[Tensor, "queries"]
) -> list[str]:
    """Return notes that a reader of the means should know. Collective.

    Args:
        vectors: Queries and gallery.
        places: Index of each gallery item of this process among all.
        relevant: Number of relevant candidates of each query.
        tied: Whether a relevant item of each query ties with a negative.
    """
    queries = len(relevant)
    without_match = int((relevant == 0).sum())
    ties = int(tied.sum())
    zero = _zero_vectors(vectors)
    collapsed = _have_collapsed(vectors)
    notes = []
    if without_match:
        notes.append(f"{without_match} of {queries} queries {WITHOUT_MATCH}.")
    if collapsed and queries > 1:
        notes.append("The embeddings have collapsed: all are the same vector, and every ranking is at chance level.")
    if _are_packed(vectors):
        notes.append(
            "The embeddings look like bytes that hold 8 bits of a code each, and are compared as numbers, which says "
            "nothing of codes. Unpack these, np.unpackbits(np.asarray(queries).astype(np.uint8), axis=1), or of int8 "
            "np.unpackbits(np.asarray(queries).astype(np.int8).view(np.uint8) ^ 128, axis=1), and pass "
            "similarity='hamming'."
        )
    if zero:
        notes.append(f"{zero} embeddings have length zero: their cosine similarity to everything is 0.")
    if ties > 0.01 * queries and not collapsed:
        notes.append(f"{ties} of {queries} queries have relevant items that tie with irrelevant ones.")
    return notes + _note_of_longest(vectors, places)


def _zero_vectors(vectors: Vectors) -> int:
    """Return how many queries, or items if these are more, are zero, so that their cosine is taken for 0. Collective."""
    if vectors.scale.similarity != "cosine":
        return 0
    sides = [vectors.query_rows]
    if not vectors.are_read:  # items in files are not looked at all at once
        sides.append(vectors.item_rows)
    return int(vectors.processes.summed(np.array([(side.norms == 0).sum() for side in sides])).max())


# Rows that are searched for bytes of packed bits, and the fewest bytes that are judged.
PACKED_ROWS = 1024
LEAST_BYTES = 1024
# A quarter of the bytes of random bits lie in the outer quarter of their range; of numbers that were quantised to int8 by
# their range a hundredth do, and of pixels most.
PACKED_SHARE = 0.15, 0.4


def _are_packed(vectors: Vectors) -> bool:
    """Return whether the rows of all processes look like bytes of 8 bits each. Collective."""
    rows = vectors.pairs.queries[:PACKED_ROWS]
    looks = False
    if vectors.scale.similarity != "hamming" and rows.size >= LEAST_BYTES and bool((rows == np.rint(rows)).all()):
        lowest = float(rows.min())
        highest = float(rows.max())
        middle = -0.5 if lowest < 0 else 127.5
        is_byte = middle - 127.5 <= lowest and highest <= middle + 127.5
        share = float((np.abs(rows - middle) > 96).mean())
        looks = is_byte and PACKED_SHARE[0] < share < PACKED_SHARE[1]
    has_other = len(rows) > 0 and not looks
    any_looks, any_other = vectors.processes.largest([float(looks), float(has_other)])
    return bool(any_looks) and not any_other


def _have_collapsed(vectors: Vectors) -> bool:
    """Return whether all queries are equal, and all items, and there are several of either. Collective."""
    pairs = vectors.pairs
    sides = ((pairs.queries, pairs.query_first_duplicate), (pairs.gallery, pairs.gallery_first_duplicate))
    summaries = [_RowSummary(len(rows), bool((first == first[:1]).all()), rows[:1].tobytes()) for rows, first in sides]
    by_side = zip(*vectors.processes.gather(summaries), strict=True)
    if vectors.are_read:
        return False
    has_several = False
    for summaries_of_side in by_side:
        filled = [summary for summary in summaries_of_side if summary.rows]
        if not all(summary.are_equal for summary in filled) or len({summary.first_row for summary in filled}) != 1:
            return False
        has_several |= sum(summary.rows for summary in filled) > 1
    return has_several


class _RowSummary(NamedTuple):
    """What tells whether the rows of all processes are equal, from one process."""

    rows: int
    """number of rows"""
    are_equal: bool
    """whether all of them are equal"""
    first_row: bytes


def _note_of_longest(vectors: Vectors, places: Int[Tensor, "own"]) -> list[str]:
    """Return a note on an embedding far longer than the others, which is seldom intended and slow. Collective.

    Args:
        vectors: Queries and gallery.
        places: Index of each gallery item of this process among all.
    """
    if vectors.scale.similarity not in ("dot", "euclidean"):
        return []
    # The norms of items on disk are not known.
    own_norms = np.empty(0) if vectors.are_read else vectors.item_rows.norms
    shares = vectors.processes.gather((own_norms, places.numpy()[: len(own_norms)]))
    norms = np.concatenate([norms for norms, _ in shares])
    if not len(norms):
        return []
    indices = np.concatenate([indices for _, indices in shares])
    median = float(np.sort(norms)[(len(norms) - 1) // 2])
    longest = float(norms.max())
    if median == 0.0 or longest < LONGEST_RATIO * median:
        return []
    row = int(indices[norms == longest].min())
    return [
        f"Gallery row {row} is {longest / median:.2g} times as long as the median embedding. The metrics are exact, but the "
        'evaluation is slow with it. Look for a diverged batch, drop the row, or use similarity="cosine".'
    ]


def note_of_rates(kind: str, rates: Sequence[float], count: int, what: str) -> tuple[str, ...]:
    """Return a note on rates below that of a single mistake, which only more data can show.

    Args:
        kind: What a mistake is called, such as "match".
        rates: The rates that are asked for.
        count: How many pairs, trials or probes can be mistaken.
        what: What they are called, such as "irrelevant pairs".
    """
    smaller = ", ".join(f"{rate:g}" for rate in rates if count and rate < 1 / count)
    if not smaller:
        return ()
    return (
        f"A false {kind} rate below {1 / count:.3g} (1 / {count:,}) cannot be measured with {count:,} {what}: at {smaller} "
        "the threshold only excludes all of these, and new data may exceed the rate.",
    )


def or_none(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON cannot hold, and other numbers as they are."""
    return value if math.isfinite(value) else None


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
