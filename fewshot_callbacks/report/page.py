"""Writes a report as one self-contained HTML file: sentences for its template, plain data for its script."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks import __version__
from fewshot_callbacks._own_files import WRITER
from fewshot_callbacks.functional.retrieval import PairCounts, RetrievalReport, compare_reports
from fewshot_callbacks.functional.retrieval.report import Values
from fewshot_callbacks.functional.statistics import class_means
from fewshot_callbacks.report.findings import Findings, Model, Retrieved, find
from fewshot_callbacks.report.items import Items, Key, Thumbnails, name_of
from fewshot_callbacks.settings import ReportSettings

# The metrics that are shown first, with those of Grouped Recall and of recall at a precision.
HEADLINES = ("mAP", "recall@1", "r_precision", "f1")


@dataclass(frozen=True)
class Figure:
    """A metric as it is written.

    Attributes:
        name: Of the metric.
        value: As a text.
        interval: Its confidence interval as a text, or nothing.
        meaning: One sentence.
    """

    name: str
    value: str
    interval: str
    meaning: str


def figures(report: Values) -> list[Figure]:
    """Write all metrics of a report."""
    written = []
    for name, value in report.metrics().items():
        interval = report.intervals.get(name)
        span = "" if interval is None or math.isnan(interval.low) else f"{interval.low:.4f} to {interval.high:.4f}"
        written.append(Figure(name, "n/a" if math.isnan(value) else f"{value:.4f}", span, report.meaning(name)))
    return written


def headline(report: RetrievalReport) -> list[Figure]:
    """Choose the metrics that are shown first."""
    names = [
        *HEADLINES,
        *(name for name in report.metrics() if name.startswith(("recall@precision", "grouped_recall@1"))),
    ]
    known = {figure.name: figure for figure in figures(report)}
    return [known[name] for name in names if name in known]


def pair_counts(report: RetrievalReport) -> dict[str, Any] | None:
    """Write the counts at each threshold, and the operating points among them; None if no pairs were counted."""
    if report.pooled is None:
        return None
    counts = report.pair_counts
    thresholds = np.asarray(counts.thresholds, np.float64)
    named = [("best F1" if report.decision.f1 == _best_f1(counts) else "decision", report.decision.threshold)]
    named += [(f"precision {asked:g}", point.threshold) for asked, point in report.at_precision.items()]
    named += [(f"FMR {rate:g}", at.threshold) for rate, at in report.at_false_match_rate.items()]
    return {
        "t": thresholds.tolist(),
        "tp": np.asarray(counts.true_positives).tolist(),
        "fp": np.asarray(counts.false_positives).tolist(),
        "relevant": counts.relevant,
        "irrelevant": counts.irrelevant,
        "edges": np.asarray(counts.edges).tolist(),
        "ofRelevant": np.asarray(counts.relevant_counts).tolist(),
        "ofIrrelevant": np.asarray(counts.irrelevant_counts).tolist(),
        "sampledBelow": counts.sampled_below if math.isfinite(counts.sampled_below) else None,
        "points": [
            {"name": name, "index": int(np.abs(thresholds - threshold).argmin())}
            for name, threshold in named
            if math.isfinite(threshold)
        ],
    }


def _best_f1(counts: PairCounts) -> float:
    accepted = np.asarray(counts.true_positives) + np.asarray(counts.false_positives)
    f1 = 2 * np.asarray(counts.true_positives) / np.maximum(accepted + counts.relevant, 1)
    return float(f1.max())


def class_table(model: Model, other: Model | None, findings: Findings) -> list[list[Any]]:
    """Write a row for each class: its name, number of queries, mAP, recall@1, the class it is most confused with."""
    report, items = model.report, model.queries
    labels, sizes = report.query_labels.unique(return_counts=True)
    columns = [report.per_query["mAP"], report.per_query.get("recall@1")]
    columns += [None if other is None else other.report.per_query["mAP"]]
    means = [None if column is None else _means(column, report.query_labels) for column in columns]
    rows = []
    for code, size in zip(labels.tolist(), sizes.tolist(), strict=True):
        label = code if report.label_names is None else report.label_names[code]
        most, share = findings.confused.get(label, (None, 0.0))
        rows.append(
            [
                items.label(label),
                size,
                *(None if mean is None else _short(mean.get(code)) for mean in means[:2]),
                "" if most is None else items.label(most),
                _short(share),
                *([] if means[2] is None else [_short(means[2].get(code))]),
            ]
        )
    return rows


def _means(values: Float[Tensor, "queries"], labels: Int[Tensor, "queries"]) -> dict[int, float]:
    """Average over the queries of each class that has one with a match."""
    present, means, _ = class_means(values, labels)
    return dict(zip(present.tolist(), means.tolist(), strict=True))


def _short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None or math.isnan(value) else round(float(value), digits)


@dataclass
class PageData:
    """Collects what the script of the page shows, and the items that have to be seen for it.

    Attributes:
        sets: Queries, gallery if there is one, training items if there are some.
        model: The evaluation.
        items: Label, name and file of each item, by its name in the page.
        wanted: The items, in the order in which they were asked for.
    """

    sets: Sequence[Items]
    model: Model
    items: dict[str, list[Any]] = field(default_factory=dict)
    wanted: list[Key] = field(default_factory=list)

    def item(self, key: Key) -> str:
        """Return the name of an item in the page."""
        name = name_of(key)
        if name not in self.items:
            items = self.sets[key[0]]
            file = "" if items.files is None else str(items.files[key[1]])
            self.items[name] = [items.label(items.labels[key[1]]), f"{items.name} {key[1]}", file]
        self.wanted.append(key)
        return name

    def panel(self, query: int, found: Retrieved, report: RetrievalReport, note: str = "") -> dict[str, Any]:
        """Write a query with its neighbours."""
        searched = 0 if self.model.gallery is None else 1
        return {
            "query": self.item((0, query)),
            "ap": _short(float(report.per_query["mAP"][query]), 3),
            "note": note,
            "found": [
                [self.item((searched, index)), _short(score, 6), relevant] for index, score, relevant, _ in found
            ],
        }


def page_data(
    model: Model, other: Model | None, findings: Findings, sets: Sequence[Items], settings: ReportSettings
) -> tuple[dict[str, Any], list[Key]]:
    """Write everything that the script of the page shows, but the pictures, and list the items; important ones first."""
    data = PageData(sets, model)
    panels = {query: data.panel(query, findings.neighbours[query], model.report) for query in findings.worst}
    suspected = list(_suspects(data, findings, settings))
    duplicates = [
        {
            "kind": found.kind,
            "total": found.total,
            "pairs": [[data.item(one), data.item(other), _short(score, 6)] for one, other, score in found.pairs],
        }
        for found in findings.duplicates
    ]
    both = [] if other is None else [(model, findings.neighbours), (other, findings.others)]
    changed = [
        [[data.panel(query, found[query], one.report, one.name) for one, found in both] for query in queries]
        for queries in (findings.changed if both else ())
    ]
    for query in findings.searchable:
        if query not in panels:
            panels[query] = data.panel(query, findings.neighbours[query], model.report)
    content = {
        "counts": pair_counts(model.report),
        "classes": class_table(model, other, findings),
        "models": [model.name] + ([] if other is None else [other.name]),
        "panels": list(panels.values()),
        "worst": len(findings.worst),
        "suspects": suspected,
        "duplicates": duplicates,
        "changed": changed,
        "items": data.items,
    }
    return content, data.wanted


def _suspects(data: PageData, findings: Findings, settings: ReportSettings) -> Iterable[dict[str, Any]]:
    found = findings.suspects
    if found is None:
        return
    for row in range(min(len(found), settings.suspects)):
        place = findings.places[int(found.index[row])]
        suggested: Any = int(found.suggested[row])
        label = suggested if found.label_names is None else found.label_names[suggested]
        evidence = [findings.places[index] for index in found.neighbours[row].tolist() if index >= 0]
        votes = [number for number in found.votes[row].tolist() if number >= 0]
        yield {
            "item": data.item(place),
            "suggested": data.sets[0].label(label),
            "probability": _short(float(found.probability[row]), 3),
            "agree": [votes.count(suggested), votes.count(int(found.given[row])), len(votes)],
            "found": [
                [data.item(key), None, number == suggested]
                for key, number in zip(evidence[: settings.neighbours], votes, strict=False)
            ],
        }


TEMPLATES = Path(__file__).parent / "templates"
# Placeholder in the template for the size of the file.
SIZE = "@SIZE@"
# How Python holds the bytes of a file name that are no UTF-8; they cannot be written.
_UNPAIRED = re.compile("[\ud800-\udfff]")
# Largest number of failed pictures that are named; of further ones, only the number is given.
NAMED_FAILURES = 10


@dataclass(frozen=True)
class WrittenReport:
    """A report that was written.

    Attributes:
        path: Path of the file.
        size: Size of the file in bytes.
        left_out: A sentence on each part that the report does not show; empty if nothing was left out.
    """

    path: Path
    size: int
    left_out: tuple[str, ...]


def write_report(
    path: str | Path,
    report: RetrievalReport,
    queries: Items,
    gallery: Items | None = None,
    *,
    train: Items | None = None,
    other: Model | None = None,
    title: str = "Retrieval report",
    name: str = "embeddings",
    settings: ReportSettings | None = None,
) -> WrittenReport:
    """Write an HTML file with the metrics, an adjustable threshold, failures, suspects and near duplicates.

    The file is self-contained: pictures are inside it, and a browser loads nothing else. A file of this name is replaced,
    whoever has written it, but only when the new one is complete.

    Args:
        path: Path of the file.
        report: The result of `evaluate_retrieval` for all of these queries.
        queries: The queries.
        gallery: The gallery; by default each query was searched among all others.
        train: Another split, which is searched for near duplicates of queries and gallery items.
        other: An evaluation of the same queries with a second model, to compare with.
        title: Title of the page.
        name: Name of the model or of its file.
        settings: Size and content of the report; see `ReportSettings`.

    Returns:
        The path and the size of the file, and what was left out.

    Raises:
        ValueError: If the report is not of these queries.
        OSError: If the file cannot be written.
    """
    settings = settings or ReportSettings()
    check_writable(path)
    if len(report.query_labels) != len(queries):
        raise ValueError(
            f"The evaluation has {len(report.query_labels):,} queries, and {len(queries):,} items are to be shown. A "
            f"report needs an evaluation of all items: leave out max_queries."
        )
    model = Model(report, queries, gallery, name)
    sets = [items for items in (queries, gallery, train) if items is not None]
    findings = find(model, other, train, settings, sets)
    shown, wanted = page_data(model, other, findings, sets, settings)
    bare = len(_json(shown))
    most = int(min(settings.max_mb * 1e6, 2**62))  # infinity is no bound
    # The page without data and pictures is less than 120 kB: its style, script and template are 39 kB.
    thumbnails = Thumbnails(sets, settings.thumbnail, most - bare - 120_000, settings.background)
    thumbnails.add(wanted)
    shown |= {"images": thumbnails.images, "texts": thumbnails.texts}
    left_out = _left_out(model, findings, thumbnails, settings)
    page = _render(model, other, findings, shown, left_out, title, settings)
    if len(page) > most:
        left_out.append(
            f"The file takes {len(page) / 1e6:.1f} MB, more than the {settings.max_mb:g} MB allowed, even without "
            f"pictures. Choose fewer queries."
        )
    write_whole(path, page)
    return WrittenReport(Path(path), len(page), tuple(left_out))


def check_writable(path: str | Path) -> None:
    """Check that a file can be written, before its content is computed.

    Args:
        path: Path of the file.

    Raises:
        OSError: If its folder is missing or may not be written to, or the path is a folder, a device or a pipe.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Pass the name of a file, such as {path / 'report.html'}.")
    if not _can_be_replaced(path):
        raise OSError(
            f"{path} is no regular file but a device, a pipe or the like, which a report would replace. Pass the name of a "
            "file, such as report.html."
        )
    folder = _target(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {folder}. Make it, or pass another path."
        )
    try:
        # By trying: permissions say nothing of a read-only file system.
        descriptor, trial = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
    except OSError as error:
        raise PermissionError(
            f"{path} cannot be written: {error.strerror} in {folder}. Pass another path, or change its permissions."
        ) from error
    os.close(descriptor)
    os.unlink(trial)


def write_whole(path: str | Path, text: bytes) -> None:
    """Write a file that replaces an older one at once when it is complete; of a link, the file that it leads to."""
    path = _target(Path(path))
    # In the same folder, as a file can replace another one only on the same file system.
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        # mkstemp lets only the owner read the file. The mask of other new files can be read only by setting it.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(partial, 0o666 & ~mask)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _can_be_replaced(path: Path) -> bool:
    """Whether a path is free, or that of a regular file; a link in a circle is neither."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True


def _left_out(model: Model, findings: Findings, thumbnails: Thumbnails, settings: ReportSettings) -> list[str]:
    """Say in a sentence each what the report does not show."""
    report, said = model.report, list(findings.notes)
    if len(findings.searchable) < report.queries:
        said.append(
            f"Panels are in the file for {len(findings.searchable):,} of {report.queries:,} queries: the worst, and a "
            "seeded sample from all classes."
        )
    if findings.confusions_of < report.queries:
        said.append(f"Confusions are counted for a seeded sample of {findings.confusions_of:,} queries.")
    if thumbnails.left_out:
        said.append(
            f"{thumbnails.left_out:,} pictures did not fit into {settings.max_mb:g} MB; those of the worst queries "
            f"were added first."
        )
    if thumbnails.failures:
        named = thumbnails.failures[:NAMED_FAILURES]
        more = len(thumbnails.failures) - len(named)
        said.append(
            f"{len(thumbnails.failures):,} pictures could not be read: {'; '.join(named)}"
            + (f"; and {more:,} more." if more else ".")
        )
    found = findings.suspects
    if found is not None and len(found) > settings.suspects:
        said.append(f"{settings.suspects:,} of {len(found):,} suspects are listed, the most suspicious first.")
    said += [
        f"{len(each.pairs):,} of {each.total:,} near duplicates {each.kind} are listed, the most similar first."
        for each in findings.duplicates
        if each.total > len(each.pairs)
    ]
    return said


def _json(data: dict[str, Any]) -> str:
    """Write data that stands in a script element: no character in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _render(
    model: Model,
    other: Model | None,
    findings: Findings,
    data: dict[str, Any],
    left_out: Sequence[str],
    title: str,
    settings: ReportSettings,
) -> bytes:
    report = model.report
    differences = {} if other is None else compare_reports(report, other.report)
    return fill(
        "report.html.jinja",
        (TEMPLATES / "report.js").read_text(encoding="utf-8"),
        title=title,
        report=report,
        name=model.name,
        other=None if other is None else other.name,
        headline=headline(report),
        figures=figures(report),
        confidence=f"{100 * report.confidence:g} %",
        comparison=[(name, *difference.in_words()) for name, difference in differences.items()],
        suspects=findings.suspects,
        duplicates=findings.duplicates,
        worst=len(findings.worst),
        searchable=len(findings.searchable),
        left_out=left_out,
        background=settings.background if data["images"] else None,
        has_recall=report.per_query.get("recall@1") is not None,
        data=_json(data),
    )


def fill(template: str, script: str, **words: Any) -> bytes:
    """Fill a template, with the style of all pages and a script.

    Args:
        template: Name of its file.
        script: What the page runs; it may be empty.
        **words: What the template asks for; a word that it asks for in vain is an error.
    """
    # Names are escaped, as they may come from anyone.
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    # The page allows no other style and script than these, whatever a label or a file name holds.
    digests = {"style_digest": _digest(style), "script_digest": _digest(script)}
    fixed = {"version": __version__, "writer": WRITER, "style": style, "script": script} | digests
    text = templates.get_template(template).render(**fixed, **words)
    text = _UNPAIRED.sub("\ufffd", text)
    size = len(text.encode())
    return text.replace(SIZE, f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB", 1).encode()
