"""The contents of a report: sentences for the template, and plain data for the script of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.functional.retrieval import PairCounts, RetrievalReport, asked_metric, compare_reports
from fewshot_callbacks.functional.statistics import class_means
from fewshot_callbacks.report.findings import Findings, Model, ReportSettings, Retrieved
from fewshot_callbacks.report.items import Items, Key, name_of

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


def figures(report: RetrievalReport) -> list[Figure]:
    """Write all metrics of a report."""
    written = []
    for name, value in report.metrics().items():
        interval = report.intervals.get(name)
        span = "" if interval is None or math.isnan(interval.low) else f"{interval.low:.4f} to {interval.high:.4f}"
        written.append(Figure(name, "n/a" if math.isnan(value) else f"{value:.4f}", span, asked_metric(name).meaning))
    return written


def headline(report: RetrievalReport) -> list[Figure]:
    """Choose the metrics that are shown first."""
    names = [
        *HEADLINES,
        *(name for name in report.metrics() if name.startswith(("recall@precision", "grouped_recall@1"))),
    ]
    known = {figure.name: figure for figure in figures(report)}
    return [known[name] for name in names if name in known]


def comparison(first: RetrievalReport, second: RetrievalReport) -> list[tuple[str, ...]]:
    """Write the differences of two models, query by query."""
    return [(name, *difference.in_words()) for name, difference in compare_reports(first, second).items()]


def pair_counts(counts: PairCounts, report: RetrievalReport) -> dict[str, Any]:
    """Write the counts at each threshold, and the operating points among them."""
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
    """

    sets: Sequence[Items]
    model: Model

    def __post_init__(self) -> None:
        """Begin with no item."""
        self.items: dict[str, list[Any]] = {}
        self.wanted: list[Key] = []

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
            "found": [[self.item((searched, index)), _short(score, 6), relevant] for index, score, relevant in found],
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
    changed: list[Any] = []
    if other is not None:
        changed = [
            [
                [
                    data.panel(query, findings.neighbours[query], model.report, model.name),
                    data.panel(query, findings.others[query], other.report, other.name),
                ]
                for query in queries
            ]
            for queries in findings.changed
        ]
    for query in findings.searchable:
        if query not in panels:
            panels[query] = data.panel(query, findings.neighbours[query], model.report)
    content = {
        "counts": pair_counts(model.report.pair_counts, model.report),
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
