"""Curves of J and mAP over a training, from the CSV logs of several runs."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

PANELS = (
    ("train/J", "J of every training batch"),
    ("val/J", "J of the validation set"),
    ("val/mAP", "mAP of the validation set"),
    ("val/recall@1", "Recall@1 of the validation set"),
)
SMOOTHING = 0.9


def read_metric(log: str | Path, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric of a CSVLogger's file; empty where it was never logged."""
    with Path(log).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get(name)]
    return [int(row["step"]) for row in rows], [float(row[name]) for row in rows]


def draw_curves(logs: Mapping[str, Path], picture: Path) -> None:
    """Write a PNG with a panel for each of `PANELS` and a line for each run.

    What is logged at every batch is drawn thin, with its exponential mean over it.

    Args:
        logs: name of a run -> its `metrics.csv`.
        picture: the file to write.
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        for run, log in logs.items():
            steps, values = read_metric(log, name)
            if name.startswith("train/"):
                (line,) = axes.plot(steps, values, linewidth=0.6, alpha=0.35)
                axes.plot(steps, smooth(values), color=line.get_color(), linewidth=1.8, label=run)
            else:
                axes.plot(steps, values, marker="o", markersize=4, linewidth=1.8, label=run)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("training step", fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "fewshot"}):
        figure.savefig(picture, dpi=110, metadata={"Software": None})


def smooth(values: list[float]) -> list[float]:
    """Exponential mean, corrected for its start; NaN is passed over."""
    mean = weight = 0.0
    result = []
    for value in values:
        if not math.isnan(value):
            mean = SMOOTHING * mean + (1 - SMOOTHING) * value
            weight = SMOOTHING * weight + (1 - SMOOTHING)
        result.append(mean / weight if weight else math.nan)
    return result
