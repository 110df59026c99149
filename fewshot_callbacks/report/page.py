"""Functions that write a report as one self-contained HTML file: texts for the template, and data for the script."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks import __version__
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.outputs import WRITER, target_of, write_whole
from fewshot_callbacks.functional.leaks import Leakage
from fewshot_callbacks.functional.means import class_means
from fewshot_callbacks.functional.retrieval import PairCounts, RetrievalReport, SliceGains, Slices, compare_reports
from fewshot_callbacks.functional.retrieval.slice_gains import compare_all_slices
from fewshot_callbacks.functional.retrieval.values import Values
from fewshot_callbacks.report.findings import (
    CONFUSION_K,
    SUSPECT_K,
    WORST_OF_A_CLASS,
    Duplicates,
    Model,
    ReportFindings,
    Retrieved,
    find,
)
from fewshot_callbacks.report.items import MAX_TEXT, Key, ReportItems, Thumbnails, name_of
from fewshot_callbacks.report.settings import ReportSettings
from fewshot_callbacks.system.words import counted

# The metrics at the top, followed by Grouped Recall@1 and the recalls at a precision.
HEADLINES = ("mAP", "recall@1", "r_precision", "pair_f1")
# Largest number of listed slices per attribute.
LISTED_SLICES = 50


@dataclass(frozen=True)
class MetricText:
    """The texts of a metric."""

    name: str
    value: str
    interval: str
    meaning: str


def metric_texts(report: Values) -> list[MetricText]:
    """Return the texts of all metrics of a report."""
    texts = []
    for name, value in report.metrics().items():
        value_text = "n/a" if math.isnan(value) else f"{value:.4f}"
        meaning = report.meaning(name)
        if isinstance(report, RetrievalReport) and report.ties_in_words(name):
            meaning = f"{meaning} Ties: {report.ties_in_words(name)}."
        texts.append(MetricText(name, value_text, _interval_text(report, name), meaning))
    return texts


def _interval_text(report: Values, metric: str) -> str:
    interval = report.intervals.get(metric)
    if interval is None or math.isnan(interval.low):
        return ""
    return f"{interval.low:.4f} to {interval.high:.4f}"


def headline(report: RetrievalReport) -> list[MetricText]:
    """Return the metrics at the top of the page."""
    by_name = {metric.name: metric for metric in metric_texts(report)}
    further_names = [name for name in by_name if name.startswith(("recall@precision", "grouped_recall@1"))]
    return [by_name[name] for name in (*HEADLINES, *further_names) if name in by_name]


def pair_counts(report: RetrievalReport) -> dict[str, Any] | None:
    """Return the counts at each threshold, and the operating points; None if no pairs were counted."""
    if report.pooled is None:
        return None
    counts = report.pair_counts
    return {
        "t": np.asarray(counts.thresholds, np.float64).tolist(),
        "tp": np.asarray(counts.true_positives).tolist(),
        "fp": np.asarray(counts.false_positives).tolist(),
        "relevant": counts.relevant,
        "irrelevant": counts.irrelevant,
        "edges": np.asarray(counts.edges).tolist(),
        "ofRelevant": np.asarray(counts.relevant_counts).tolist(),
        "ofIrrelevant": np.asarray(counts.irrelevant_counts).tolist(),
        "sampledBelow": counts.sampled_below if math.isfinite(counts.sampled_below) else None,
        "points": _operating_points(report),
    }


def _operating_points(report: RetrievalReport) -> list[dict[str, Any]]:
    """Return the name of each operating point, and the index of the nearest counted threshold."""
    counts = report.pair_counts
    has_best_f1 = report.decision.f1 == _best_f1(counts)
    points = [("best F1" if has_best_f1 else "decision", report.decision.threshold)]
    points += [(f"precision {precision:g}", point.threshold) for precision, point in report.at_precision.items()]
    points += [(f"FMR {rate:g}", point.threshold) for rate, point in report.at_false_match_rate.items()]
    thresholds = np.asarray(counts.thresholds, np.float64)
    return [
        {"name": name, "index": int(np.abs(thresholds - threshold).argmin())}
        for name, threshold in points
        if math.isfinite(threshold)
    ]


def _best_f1(counts: PairCounts) -> float:
    accepted = np.asarray(counts.true_positives) + np.asarray(counts.false_positives)
    f1 = 2 * np.asarray(counts.true_positives) / np.maximum(accepted + counts.relevant, 1)
    return float(f1.max())


def class_table(model: Model, other: Model | None, findings: ReportFindings) -> list[list[Any]]:
    """Return a row per class.

    A row has the class name, the number of queries, mAP, recall@1, the class with which it is most often confused, and
    the fraction of that class among the neighbours; with a second model, also its mAP. Unknown values are None. Without
    a confusion, the confused class is "" and the fraction is 0.
    """
    report = model.report
    average_precision = _class_means(report.per_query["mAP"], report.query_labels)
    recall: dict[int, float] = {}
    if "recall@1" in report.per_query:
        recall = _class_means(report.per_query["recall@1"], report.query_labels)
    codes, sizes = report.query_labels.unique(return_counts=True)
    rows = []
    for code, size in zip(codes.tolist(), sizes.tolist(), strict=True):
        label = code if report.label_names is None else report.label_names[code]
        confused_name = ""
        share = 0.0
        if label in findings.confused:
            confused_label, share = findings.confused[label]
            confused_name = model.queries.label(confused_label)
        row = [
            model.queries.label(label),
            size,
            _rounded(average_precision.get(code)),
            _rounded(recall.get(code)),
            confused_name,
            _rounded(share),
        ]
        rows.append(row)
    if other is not None:
        other_precision = _class_means(other.report.per_query["mAP"], report.query_labels)
        for code, row in zip(codes.tolist(), rows, strict=True):
            row.append(_rounded(other_precision.get(code)))
    return rows


def _class_means(values: Float[Tensor, "queries"], labels: Int[Tensor, "queries"]) -> dict[int, float]:
    """Return class -> mean over its queries, for classes that have a query with a match."""
    codes, means, _ = class_means(values, labels)
    return dict(zip(codes.tolist(), means.tolist(), strict=True))


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """Return a rounded number, for the page; None for NaN and for None."""
    if value is None or math.isnan(value):
        return None
    return round(float(value), digits)


class SliceTable(NamedTuple):
    """The texts of a table of slices, or of the gains in slices.

    Attributes:
        is_gain: Whether the rows compare two models.
        slices: The number of all slices.
    """

    attribute: str
    metric: str
    is_gain: bool
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    slices: int
    explanation: str


def slice_tables(report: RetrievalReport, other: RetrievalReport | None) -> list[SliceTable]:
    """Return a table per attribute, each followed by a table of gains if there is a second report."""
    gains_by_attribute: dict[str, SliceGains] = {}
    if other is not None:
        gains_by_attribute = {gains.attribute: gains for gains in compare_all_slices(report, other)}
    tables = []
    for attribute in report.slices:
        tables.append(_slice_table(report.of_slices(attribute)))
        if attribute in gains_by_attribute:
            tables.append(_slice_table(gains_by_attribute[attribute]))
    return tables


def _slice_table(slices: Slices | SliceGains) -> SliceTable:
    _, *numbers = slices.columns
    attribute = _cut(slices.attribute)
    rows = [(_cut(name), *cells) for name, *cells in slices.rows()[:LISTED_SLICES]]
    is_gain = isinstance(slices, SliceGains)
    return SliceTable(attribute, slices.metric, is_gain, (attribute, *numbers), rows, len(slices), slices.explanation)


def _cut(name: str) -> str:
    """Return a name, cut to `MAX_TEXT` characters."""
    return name if len(name) <= MAX_TEXT else f"{name[: MAX_TEXT - 1]}…"


@dataclass
class PageWriter:
    """Writer of the parts of a page that contain items; it collects these items.

    Attributes:
        sets: The queries, the gallery if there is one, and the training items if there are any.
        items: Name of an item in the page -> its label, its set and index, and its file.
        requested: The items, in the order of the calls of `item`.
    """

    sets: Sequence[ReportItems]
    model: Model
    items: dict[str, list[Any]] = field(default_factory=dict)
    requested: list[Key] = field(default_factory=list)

    @property
    def searched_set(self) -> int:
        """The index of the searched set."""
        return 0 if self.model.gallery is None else 1

    def item(self, key: Key) -> str:
        """Return an item's name in the page, and collect it. Earlier items get thumbnails first."""
        set_number, index = key
        name = name_of(key)
        if name not in self.items:
            items = self.sets[set_number]
            file = "" if items.files is None else str(items.files[index])
            self.items[name] = [items.label(items.labels[index]), f"{items.name} {index}", file]
        self.requested.append(key)
        return name

    def panel(self, query: int, retrieved: Retrieved, report: RetrievalReport, note: str = "") -> dict[str, Any]:
        """Return a query with its neighbours, for the script."""
        return {
            "query": self.item((0, query)),
            "ap": _rounded(float(report.per_query["mAP"][query]), 3),
            "note": note,
            "found": [
                [self.item((self.searched_set, neighbour.item)), _rounded(neighbour.score, 6), neighbour.relevant]
                for neighbour in retrieved
            ],
        }


def page_data(
    model: Model, other: Model | None, findings: ReportFindings, sets: Sequence[ReportItems], settings: ReportSettings
) -> tuple[dict[str, Any], list[Key]]:
    """Return the script's data, and the items that need a thumbnail, by priority.

    The order is: worst queries, suspects, near duplicates, differences between two models, other queries.
    """
    writer = PageWriter(sets, model)
    # The order of these calls is the priority of the thumbnails: the file may have no room for the last ones.
    panels = {query: writer.panel(query, findings.retrieved[query], model.report) for query in findings.worst}
    suspected = _suspects_data(writer, findings, settings)
    duplicates = [_duplicates_data(writer, group) for group in findings.duplicates]
    changed = [] if other is None else _comparison_data(writer, model, other, findings)
    for query in findings.searchable:
        if query not in panels:
            panels[query] = writer.panel(query, findings.retrieved[query], model.report)
    content = {
        "counts": pair_counts(model.report),
        "classes": class_table(model, other, findings),
        "models": [model.name] if other is None else [model.name, other.name],
        "panels": list(panels.values()),
        "worst": len(findings.worst),
        "suspects": suspected,
        "duplicates": duplicates,
        "changed": changed,
        "items": writer.items,
    }
    return content, writer.requested


def _suspects_data(writer: PageWriter, findings: ReportFindings, settings: ReportSettings) -> list[dict[str, Any]]:
    """Return the most suspicious items, each with the neighbours that voted on its label."""
    suspects = findings.suspects
    if suspects is None:
        return []
    rows = []
    for number in range(min(len(suspects), settings.suspects)):
        suggested: Any = int(suspects.suggested[number])
        suggested_label = suggested if suspects.label_names is None else suspects.label_names[suggested]
        neighbour_keys = [findings.suspect_keys[index] for index in suspects.neighbours[number].tolist() if index >= 0]
        votes = [vote for vote in suspects.votes[number].tolist() if vote >= 0]
        rows.append(
            {
                "item": writer.item(findings.suspect_keys[int(suspects.index[number])]),
                "suggested": writer.sets[0].label(suggested_label),
                "probability": _rounded(float(suspects.probability[number]), 3),
                "agree": [votes.count(suggested), votes.count(int(suspects.given[number])), len(votes)],
                "found": [
                    [writer.item(key), None, vote == suggested]
                    for key, vote in zip(neighbour_keys[: settings.neighbours], votes, strict=False)
                ],
            }
        )
    return rows


def _duplicates_data(writer: PageWriter, duplicates: Duplicates) -> dict[str, Any]:
    """Return near duplicates, for the script."""
    return {
        "kind": duplicates.kind,
        "total": duplicates.total,
        "pairs": [
            [writer.item(first), writer.item(second), _rounded(score, 6)] for first, second, score in duplicates.pairs
        ],
    }


def _comparison_data(writer: PageWriter, model: Model, other: Model, findings: ReportFindings) -> list[list[Any]]:
    """Return the queries that the first model ranks better and worse, with panels of both models."""
    comparison = findings.comparison
    if comparison is None:
        return []
    return [
        [
            [
                writer.panel(query, findings.retrieved[query], model.report, model.name),
                writer.panel(query, comparison.retrieved[query], other.report, other.name),
            ]
            for query in queries
        ]
        for queries in (comparison.better, comparison.worse)
    ]


TEMPLATES = Path(__file__).parent / "templates"
# Largest size in bytes of a page without data and thumbnails: the style, script and template are 39 kB.
PAGE_BYTES = 120_000
# Largest size in bytes of a slice in a table: a name of `MAX_TEXT` characters with five bytes each, and its numbers.
SLICE_BYTES = 1500
# The page contains this text until its size is known.
SIZE = "@SIZE@"
# Python's characters for bytes of a file name that are not UTF-8; they cannot be written.
_UNPAIRED = re.compile("[\ud800-\udfff]")
# Largest number of unreadable images that are named; others are only counted.
NAMED_FAILURES = 10


@dataclass(frozen=True)
class WrittenReport:
    """The result of `write_report`.

    Attributes:
        path: Path of the file.
        size: Size of the file in bytes.
        omissions: A sentence on each part that was left out; empty if nothing was left out.
        leakage: The queries that have a copy among the training items, and the metrics without these queries; None without
            training items.
    """

    path: Path
    size: int
    omissions: tuple[str, ...]
    leakage: Leakage | None = None


def write_report(
    path: str | Path,
    report: RetrievalReport,
    queries: ReportItems,
    gallery: ReportItems | None = None,
    *,
    train: ReportItems | None = None,
    other: Model | None = None,
    title: str = "Retrieval report",
    name: str = "embeddings",
    settings: ReportSettings | None = None,
) -> WrittenReport:
    """Write an HTML file with the metrics, an adjustable threshold, failures, suspects and near duplicates.

    The file is self-contained: it contains all images, and a browser loads nothing else. An existing file is replaced
    once the new file is complete, even if another program wrote the existing file.

    Args:
        path: Path of the file.
        report: The result of `evaluate_retrieval` for all of these queries.
        queries: The queries.
        gallery: The gallery; by default each query was searched among all other queries.
        train: Another split, such as the training set, in which near duplicates of queries and gallery items are
            searched. The page reports how many queries have one, and the first metric without these queries.
        other: An evaluation of the same queries with a second model, for a comparison.
        title: Title of the page.
        name: Name of the model or of its file.
        settings: Size and content of the report; see `ReportSettings`.

    Returns:
        The path and the size of the file, and a sentence on each part that was left out.

    Raises:
        ValueError: The numbers of queries in the report and in `queries` differ.
        OSError: The file cannot be written.
    """
    settings = settings or ReportSettings()
    check_writable(path)
    if len(report.query_labels) != len(queries):
        raise InputError(
            f"write_report: the evaluation has {counted(len(report.query_labels), 'query')}, but queries contains "
            f"{counted(len(queries), 'item')}. Evaluate all items: leave out max_queries."
        )
    model = Model(report, queries, gallery, name)
    sets = [items for items in (queries, gallery, train) if items is not None]
    findings = find(model, other, train, settings, sets)
    content, requested = page_data(model, other, findings, sets, settings)
    slices = slice_tables(report, None if other is None else other.report)
    max_bytes = int(min(settings.max_mb * 1e6, 2**62))  # infinity has no integer
    slice_bytes = SLICE_BYTES * sum(len(table.rows) for table in slices)
    picture_bytes = max_bytes - len(_json(content)) - slice_bytes - PAGE_BYTES
    thumbnails = Thumbnails(sets, settings.thumbnail, picture_bytes, settings.background)
    thumbnails.add(requested)
    content |= {"images": thumbnails.images, "texts": thumbnails.texts}
    omissions = _omissions(model, findings, thumbnails, slices, settings)
    page = _render(model, other, findings, content, slices, omissions, title, settings)
    if len(page) > max_bytes:
        omissions.append(
            f"The file takes {len(page) / 1e6:.1f} MB even without images, more than the allowed {settings.max_mb:g} MB. "
            f"Choose fewer queries."
        )
    write_whole(path, page)
    return WrittenReport(Path(path), len(page), tuple(omissions), findings.leakage)


def check_writable(path: str | Path) -> None:
    """Raise an error if a file cannot be written; call it before its content is computed.

    Args:
        path: Path of the file.

    Raises:
        OSError: The folder is missing or not writable, or the path is a folder, a device or a pipe.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Pass a file name, such as {path / 'report.html'}.")
    if not _can_be_replaced(path):
        raise OSError(
            f"{path} is a device, a pipe or another special file, and a report would replace it. Pass the name of a regular "
            "file, such as report.html."
        )
    folder = target_of(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {folder}. Create it, or pass another path."
        )
    try:
        # Create and delete a file, because permissions do not show that a file system is read-only.
        descriptor, trial = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
    except OSError as error:
        raise PermissionError(
            f"{path} cannot be written: {error.strerror} in {folder}. Pass another path, or change the permissions."
        ) from error
    os.close(descriptor)
    os.unlink(trial)


def _can_be_replaced(path: Path) -> bool:
    """Return whether a path does not exist or is a regular file; a link to itself is neither."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True


def _omissions(
    model: Model,
    findings: ReportFindings,
    thumbnails: Thumbnails,
    slices: Sequence[SliceTable],
    settings: ReportSettings,
) -> list[str]:
    """Return a sentence on each part that was left out."""
    queries = model.report.queries
    sentences = list(findings.notes)
    if len(findings.searchable) < queries:
        sentences.append(
            f"The file contains {len(findings.searchable):,} of {queries:,} queries: the worst queries, and a seeded sample "
            "from all classes."
        )
    if findings.confusion_queries < queries:
        sentences.append(
            f"Confusions were counted for a seeded sample of {counted(findings.confusion_queries, 'query')}."
        )
    if thumbnails.omitted:
        sentences.append(
            f"{thumbnails.omitted:,} images did not fit into {settings.max_mb:g} MB; images of the worst queries were added "
            f"first."
        )
    if thumbnails.failures:
        failures = thumbnails.failures[:NAMED_FAILURES]
        unnamed = len(thumbnails.failures) - len(failures)
        end = f"; and {unnamed:,} more." if unnamed else "."
        sentences.append(f"{len(thumbnails.failures):,} images could not be read: {'; '.join(failures)}{end}")
    sentences += [
        f"{len(table.rows):,} of {table.slices:,} slices by {table.attribute} are listed, the lowest values first."
        for table in slices
        if table.slices > len(table.rows) and not table.is_gain
    ]
    suspects = findings.suspects
    if suspects is not None and len(suspects) > settings.suspects:
        sentences.append(f"{settings.suspects:,} of {len(suspects):,} suspects are listed, the most suspicious first.")
    sentences += [
        f"{len(duplicates.pairs):,} of {duplicates.total:,} near duplicates {duplicates.kind} are listed, the most similar "
        "first."
        for duplicates in findings.duplicates
        if duplicates.total > len(duplicates.pairs)
    ]
    return sentences


def _json(content: dict[str, Any]) -> str:
    """Return data as JSON for a script element, without characters that could end the element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(text: str) -> str:
    """Return the digest of a style or a script, for the page's security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class ComparedMetric(NamedTuple):
    """A metric of two models, as it is written.

    Attributes:
        difference: The first value minus the second.
    """

    name: str
    first: str
    second: str
    difference: str
    interval: str
    beyond_chance: str


def _render(
    model: Model,
    other: Model | None,
    findings: ReportFindings,
    content: dict[str, Any],
    slices: Sequence[SliceTable],
    omissions: Sequence[str],
    title: str,
    settings: ReportSettings,
) -> bytes:
    """Return the page."""
    report = model.report
    comparison = []
    if other is not None:
        differences = compare_reports(report, other.report)
        comparison = [ComparedMetric(name, *difference.in_words()) for name, difference in differences.items()]
    return fill(
        "report.html.jinja",
        (TEMPLATES / "report.js").read_text(encoding="utf-8"),
        title=title,
        report=report,
        name=model.name,
        other=None if other is None else other.name,
        headline=headline(report),
        metrics=metric_texts(report),
        confidence=f"{100 * report.confidence:g} %",
        comparison=comparison,
        slices=slices,
        findings=findings,
        confusion_k=CONFUSION_K,
        suspect_k=SUSPECT_K,
        worst_of_a_class=WORST_OF_A_CLASS,
        omissions=omissions,
        background=settings.background if content["images"] else None,
        data=_json(content),
    )


def fill(template: str, script: str, **words: Any) -> bytes:
    """Return a page in UTF-8, from a template, the style of all pages and a script.

    A missing variable is an error.
    """
    # Labels and file names are untrusted, so all text is escaped.
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    # Whatever a label or a file name contains, the page allows only this style and this script.
    page = templates.get_template(template).render(
        version=__version__,
        writer=WRITER,
        style=style,
        script=script,
        style_digest=_digest(style),
        script_digest=_digest(script),
        **words,
    )
    page = _UNPAIRED.sub("\ufffd", page)
    size = len(page.encode())
    size_text = f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB"
    return page.replace(SIZE, size_text, 1).encode()
