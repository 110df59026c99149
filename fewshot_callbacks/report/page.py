"""Writes a report as one self-contained HTML file."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from fewshot_callbacks import __version__
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.functional.retrieval.settings import bytes_of
from fewshot_callbacks.report import content
from fewshot_callbacks.report.findings import Findings, Model, ReportSettings, find
from fewshot_callbacks.report.items import Items, Thumbnails

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

    The file is self-contained: pictures are inside it, and a browser loads nothing else. An existing file is replaced only
    when the new one is complete.

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
    shown, wanted = content.page_data(model, other, findings, sets, settings)
    bare = len(_json(shown))
    most = bytes_of(settings.max_mb)
    # The page without data and pictures is less than 120 kB: its style, script and template are 39 kB.
    thumbnails = Thumbnails(sets, settings.thumbnail, most - bare - 120_000)
    thumbnails.add(wanted)
    shown |= {"images": thumbnails.images, "texts": thumbnails.texts}
    left_out = _left_out(model, findings, thumbnails, settings)
    page = _render(model, other, findings, shown, left_out, title)
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
) -> bytes:
    report = model.report
    # Names are escaped, as they may come from anyone; a word that the template asks for in vain is an error.
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    style, script = ((TEMPLATES / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    counts = report.pair_counts
    text = templates.get_template("report.html.jinja").render(
        title=title,
        report=report,
        name=model.name,
        other=None if other is None else other.name,
        headline=content.headline(report),
        figures=content.figures(report),
        confidence=f"{100 * report.confidence:g} %",
        comparison=[] if other is None else content.comparison(report, other.report),
        suspects=findings.suspects,
        duplicates=findings.duplicates,
        worst=len(findings.worst),
        searchable=len(findings.searchable),
        left_out=left_out,
        tolerance=f"{counts.tolerance:.1g}",
        sampled_below=f"{counts.sampled_below:.4f}" if math.isfinite(counts.sampled_below) else "",
        has_recall=report.per_query.get("recall@1") is not None,
        version=__version__,
        style=style,
        script=script,
        # The page allows no other style and script than these, whatever a label or a file name holds.
        style_digest=_digest(style),
        script_digest=_digest(script),
        data=_json(data),
    )
    text = _UNPAIRED.sub("\ufffd", text)
    size = len(text.encode())
    return text.replace(SIZE, f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.0f} kB", 1).encode()
