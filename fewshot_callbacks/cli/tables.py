"""Tables of evaluations for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fewshot_callbacks.functional.retrieval import (
    CompressionReport,
    Ranking,
    RequestedMetric,
    RetrievalReport,
    SliceGains,
    Slices,
    requested_metric,
)
from fewshot_callbacks.functional.statistics import Difference
from fewshot_callbacks.functional.verification import SliceRates, TrialSlices
from fewshot_callbacks.system.terminal import as_text
from fewshot_callbacks.system.words import counted

# The key of a metric that uses all rows and no ranking.
DISCRIMINANT_RATIO = "J"
# Accuracy over episodes -> why the difference of two accuracies may have no interval.
EPISODIC = {
    "accuracy": "of a single episode",
    "accuracy, other classes": "of different episodes, or of too few episodes or classes",
}
# The style of tables that fit into 80 characters.
NARROW: dict[str, Any] = {"title_style": "bold", "box": SIMPLE_HEAD, "collapse_padding": True}


def report_table(report: RetrievalReport, title: str) -> Table:
    """Return the table of a report."""
    table = Table(title=as_text(title), caption=_caption(report), title_style="bold", caption_justify="left")
    table.add_column("metric", overflow="fold")
    table.add_column("value", justify="right", style="bold")
    table.add_column("95 % interval", justify="right")
    has_ties = any(report.ties_in_words(name) for name in report.metrics())
    if has_ties:
        table.add_column("by order of ties", justify="right")
    table.add_column("meaning", style="dim")
    for name, value in report.metrics().items():
        interval = report.intervals.get(name)
        span = "" if interval is None or math.isnan(interval.low) else f"{interval.low:.4f} to {interval.high:.4f}"
        cells = [name, as_number(value), span]
        if has_ties:
            cells.append(report.ties_in_words(name))
        table.add_row(*cells, as_text(_meaning(name, report)))
    return table


def as_number(value: float) -> str:
    """Return a value with four digits; n/a if it is undefined."""
    return "n/a" if math.isnan(value) else f"{value:.4f}"


def class_tables(report: RetrievalReport, width: int) -> list[Table]:
    """Return tables of the means of each class. Each table has as many metrics as fit into the width."""
    per_class = report.per_class()
    classes = sorted({label for means in per_class.values() for label in means})
    label_width = max(as_text(label).cell_len for label in (*classes, "class"))
    # A value such as 0.1234 has six characters, and two characters separate columns.
    column_width = max((max(len(name), 6) + 2 for name in per_class), default=8)
    columns = max(1, (width - label_width - 2) // column_width)
    metrics = list(per_class)
    return [
        _class_table(classes, {name: per_class[name] for name in metrics[start : start + columns]})
        for start in range(0, len(metrics), columns)
    ]


def _class_table(classes: Sequence[Any], means: Mapping[str, Mapping[Any, float]]) -> Table:
    """Return a table with a row per class. `means` is metric -> label -> mean, without the classes that have no value."""
    table = Table(title=f"means of {counted(len(classes), 'class')}", **NARROW)
    for name in ("class", *means):
        table.add_column(name, justify="right", no_wrap=True)
    for label in classes:
        values = [of_classes.get(label, math.nan) for of_classes in means.values()]
        table.add_row(as_text(label), *("" if math.isnan(value) else f"{value:.4f}" for value in values))
    return table


def comparison_table(
    differences: Mapping[str, Difference],
    names: Sequence[str],
    title: str,
    caption: str,
    *,
    earlier_first: bool = False,
    users_metrics: Mapping[str, RequestedMetric] = MappingProxyType({}),
) -> Table:
    """Return the table that compares two evaluations.

    The reasons for missing intervals are appended to the caption. With `earlier_first`, the second evaluation, which is
    subtracted, is to the left of the first.
    """
    reasons = without_interval(differences, users_metrics)
    table = Table(
        title=as_text(title),
        caption=as_text(f"{caption} {reasons}".rstrip()),
        caption_justify="left",
        pad_edge=False,
        **NARROW,
    )
    table.add_column("metric", overflow="fold")
    order = (1, 0) if earlier_first else (0, 1)
    for column in order:
        table.add_column(as_text(names[column]), justify="right", overflow="fold")
    table.add_column("difference", justify="right", style="bold", overflow="fold")
    table.add_column("its 95 % interval", justify="right", overflow="fold")
    table.add_column("signi-\nficant", overflow="fold")
    for name, difference in differences.items():
        *values, gain, interval, is_beyond_chance = difference.in_words()
        cells = [*(values[column] for column in order), gain]
        table.add_row(name, *("n/a" if "nan" in cell else cell for cell in cells), interval, is_beyond_chance)
    return table


def ranking_table(ranking: Ranking) -> Table:
    """Return the table of a ranking, the best first."""
    caption = as_text(" ".join(ranking.explanation))
    table = Table(
        title=f"ranking by {ranking.metric}", caption=caption, caption_justify="left", pad_edge=False, **NARROW
    )
    for column in ranking.columns:
        is_word = column in ("model", "groups")
        table.add_column(column, justify="left" if is_word else "right", overflow="fold")
    for name, *cells in ranking.rows():
        table.add_row(as_text(name), *cells)
    return table


def slices_table(slices: Slices) -> Table:
    """Return the table of a metric in each slice of an attribute, the worst first."""
    return _table_of_slices(slices, f"{slices.metric} by {slices.attribute}", slices.explanation)


def trial_slices_tables(slices: TrialSlices) -> list[Table]:
    """Return the tables of both error rates in each slice of an attribute, the worst first."""
    rejections, acceptances = slices.false_non_match_rate, slices.false_match_rate
    return [
        _table_of_slices(rejections, f"{rejections.rate} by {rejections.attribute}", ""),
        _table_of_slices(
            acceptances,
            f"{acceptances.rate} by {acceptances.attribute}",
            f"{slices.heading} {acceptances.explanation}",
        ),
    ]


def slice_gains_table(gains: SliceGains) -> Table:
    """Return the table of the gains in each slice of an attribute, the smallest gain first."""
    title = f"{gains.metric} by {gains.attribute}: first against second"
    return _table_of_slices(gains, title, gains.explanation)


def _table_of_slices(slices: Slices | SliceGains | SliceRates, title: str, caption: str) -> Table:
    """Return a table with a row per slice. The first column contains words, the others numbers."""
    table = Table(
        title=as_text(title), caption=as_text(caption) or None, caption_justify="left", pad_edge=False, **NARROW
    )
    for number, column in enumerate(slices.columns):
        table.add_column(as_text(column), justify="left" if number == 0 else "right", overflow="fold")
    for name, *cells in slices.rows():
        table.add_row(as_text(name), *cells)
    return table


def compression_tables(compression: CompressionReport) -> list[Table]:
    """Return a table per compared metric, with a row per form of the embedding."""
    return [_compression_table(compression, key) for key in compression.compared()]


def _compression_table(compression: CompressionReport, key: str) -> Table:
    title = f"{key} of compressed embeddings of {counted(compression.dims, 'dimension')}"
    table = Table(title=as_text(title), pad_edge=False, **NARROW)
    table.add_column("form", overflow="fold")
    for heading in ("bytes\nper item", "value", "minus\nwhole", "its 95 % interval"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("signi-\nficant", overflow="fold")
    table.add_row("whole", f"{compression.bytes_per_item:,}", as_number(compression.whole[key]))
    for name, variant in compression.variants.items():
        if key in variant.differences:
            value, _, loss, interval, is_beyond_chance = variant.differences[key].in_words()
            cells = ["n/a" if "nan" in cell else cell for cell in (value, loss)]
            table.add_row(name, f"{variant.bytes_per_item:,}", *cells, interval, is_beyond_chance)
    return table


def without_interval(differences: Mapping[str, Difference], users_metrics: Mapping[str, RequestedMetric]) -> str:
    """Return a sentence on why metrics lack an interval; empty if none does."""
    names_by_reason: dict[str, list[str]] = {}
    for name, difference in differences.items():
        if math.isnan(difference.interval.low):
            reason = _why_without_interval(name, difference, users_metrics)
            names_by_reason.setdefault(reason, []).append(name)
    if not names_by_reason:
        return ""
    parts = []
    for reason, names in names_by_reason.items():
        verb = "are" if len(names) > 1 else "is"
        parts.append(f"{', '.join(names)} {verb} {reason}")
    return f"No interval: {'; '.join(parts)}."


def _why_without_interval(name: str, difference: Difference, users_metrics: Mapping[str, RequestedMetric]) -> str:
    if math.isnan(difference.value):
        return "undefined"
    if name == DISCRIMINANT_RATIO:
        return "one value of all rows"
    if name in EPISODIC:
        return EPISODIC[name]
    requested = users_metrics.get(name) or requested_metric(name)
    if requested.metric.input in ("pairs", "classes"):
        return "one value of all pairs"
    return "of too few queries, classes or groups"


def _meaning(name: str, report: RetrievalReport) -> str:
    """Return the meaning of a metric, with its threshold if it has one."""
    requested = report.requested(name)
    threshold_text = ""
    if requested.metric.input == "classes":
        wanting = report.consistency[requested.parameters["p"]].wanting(3).items()
        classes = ", ".join(f"{label} {threshold:.4f} (+{gain:.3f})" for label, (threshold, gain) in wanting)
        if classes:
            threshold_text = f" Classes that need another threshold: {classes}."
    elif "p" in requested.parameters and name not in report.users_metrics:
        points: dict[float, Any] = {**report.at_precision, **report.at_false_match_rate}
        threshold_text = f" Threshold {points[requested.parameters['p']].threshold:.4f}."
    return report.meaning(name) + threshold_text


def _caption(report: RetrievalReport) -> str:
    classes = f" of {counted(report.classes, 'class')}" if report.classes else ""
    return (
        f"{counted(report.queries, 'query')}{classes} against {counted(report.gallery, 'item')}, {report.similarity}; "
        f"{report.queries_without_match:,} without a match, {report.queries_with_ties:,} with ties; "
        f"{report.seconds:.1f} s"
    )
