"""Curves of J, mAP and Recall@1 over a training, of one seed or of several."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fewshot_callbacks.plots.style import BAND, GREY, METHODS, draw_band, in_house_style, new_figure

PANELS = (
    ("train/J", "J, training batches"),
    ("val/J", "J, validation set"),
    ("val/mAP", "mAP, validation set"),
    ("val/recall@1", "Recall@1, validation set"),
)
SMOOTHING = 0.9
# Steps and values of a metric.
Curve = Sequence[Sequence[float]]


def read_curves(log: str | Path) -> dict[str, Curve]:
    """Read the metrics of all panels from a CSVLogger's file."""
    return {name: read_metric(log, name) for name, _ in PANELS}


def read_metric(log: str | Path, name: str) -> tuple[list[int], list[float]]:
    """Read steps and values of one metric of a CSVLogger's file; empty where it was never logged."""
    with Path(log).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get(name)]
    return [int(row["step"]) for row in rows], [float(row[name]) for row in rows]


@in_house_style
def training_curves(methods: Mapping[str, Sequence[Mapping[str, Curve]]], titles: Mapping[str, str]) -> Figure:
    """Draw a panel for each of `PANELS`, with a line for each method: the mean over its seeds, in its 95 % interval.

    What is logged at every batch is smoothed seed by seed; with a single seed the batches themselves stand behind it.

    Args:
        methods: Name of a method -> the curves of each of its seeds.
        titles: What the legend calls each method.

    Returns:
        The figure.
    """
    figure = new_figure(4.6)
    panels, lines = figure.subplots(2, 2, sharex=True), {}
    seeds = max(len(runs) for runs in methods.values())
    for axes, (name, title) in zip(panels.flat, PANELS, strict=True):
        for method, runs in methods.items():
            drawn = [run[name] for run in runs if run[name][0]]
            if not drawn:
                continue
            steps, values = drawn[0][0], [one for _, one in drawn]
            smoothed = name.startswith("train/")
            if smoothed and seeds == 1:
                axes.plot(steps, values[0], color=METHODS[method].colour, linewidth=0.5, alpha=0.4)
            means = np.array([smooth(one) for one in values] if smoothed else values)
            lines[titles[method]] = draw_band(axes, steps, means, METHODS[method], marked=not smoothed)
        axes.set_ylabel(title)
    for axes in panels[-1]:
        axes.set_xlabel("training steps")
    note = f"training batches: exponential mean, factor {SMOOTHING:g}"
    handles: list[Artist] = list(lines.values())
    names = list(lines)
    if seeds > 1:
        handles.append(Patch(color=GREY, alpha=0.25, linewidth=0))
        names.append(BAND.format(seeds=seeds))
    else:
        note += "; thin: each batch"
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), title=note, title_fontsize="small")
    return figure


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential mean, corrected for its start; NaN is passed over."""
    mean = weight = 0.0
    result = []
    for value in values:
        if not math.isnan(value):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * value
            weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append(mean / weight if weight else math.nan)
    return result
