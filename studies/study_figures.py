"""The figures of the studies in this folder, drawn from their data in JSON files.

Each study writes its data (figures.json) and its figures, as PNG and as SVG. `python tools/figures.py` redraws the figures
of the documentation without training.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from fewshot_callbacks.plots.style import (
    BAND,
    BLACK,
    GREY,
    METHODS,
    SMALL,
    VERMILION,
    MethodStyle,
    draw_band,
    in_house_style,
    new_figure,
    save,
)

Data = Mapping[str, Any]
HEADS = {"softmax": "softmax", "dr": "DR"}
METRICS = {
    "recall": ("Recall@1", MethodStyle(VERMILION, "s", (0, (4, 1.2)))),
    "grouped": ("Grouped Recall@1", MethodStyle(BLACK, "o", "-")),
}


@in_house_style
def class_count(data: Data) -> Figure:
    """Draw both metrics of a network over the number of classes, and over the checkpoints of a run if the data has them."""
    figure = new_figure(3.4)
    places = figure.subplots(1, 2 if "checkpoints" in data else 1, squeeze=False)[0]
    _over_classes(places[0], data["draws"])
    handles, names = places[0].get_legend_handles_labels()
    names = [f"{name}, 95 % interval" for name in names]
    if any(len(draws["recall"]) > 1 for draws in data["draws"]):
        handles.append(_mark(GREY, ".", 4))
        names.append("other random classes")
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    if "checkpoints" in data:
        _over_checkpoints(figure, places[1], data)
    return figure


def _over_classes(axes: Axes, of_sizes: Sequence[Data]) -> None:
    sizes = [draws["classes"] for draws in of_sizes]
    for (metric, (title, style)), aside in zip(METRICS.items(), (1.05, 1 / 1.05), strict=True):
        _bars(axes, [size * aside for size in sizes], [draws[metric][0] for draws in of_sizes], style, title)
        for size, draws in zip(sizes, of_sizes, strict=True):
            others = [100 * one["value"] for one in draws[metric][1:]]
            axes.plot(
                [size * aside**2.5] * len(others), others, ".", color=style.colour, alpha=0.35, markersize=3, zorder=1
            )
    _ticks_at(axes, sizes, [str(size) for size in sizes])
    axes.set(xlabel="unseen classes (log scale)", ylabel="recall on unseen classes (%)", title="One network")
    axes.set_ylim(top=100.8)


def _over_checkpoints(figure: Figure, axes: Axes, data: Data) -> None:
    recall, grouped = (100 * np.array(data["checkpoints"][metric]) for metric in METRICS)
    steps = np.array(data["checkpoints"]["steps"])
    axes.scatter(recall, grouped, c=steps, cmap="cividis", s=22, edgecolor=BLACK, linewidth=0.4, zorder=2)
    axes.set(xlabel="Recall@1 (%)", ylabel="Grouped Recall@1 (%)", title=f"{len(steps)} checkpoints of one run")
    axes.text(
        0.97, 0.05, f"rank correlation {data['rank_correlation']:.3f}", transform=axes.transAxes, ha="right",
        fontsize=SMALL,
    )  # fmt: skip
    figure.colorbar(
        ScalarMappable(Normalize(0, steps.max()), "cividis"), ax=axes, label="training steps", aspect=30, pad=0.02
    )


@in_house_style
def dropout_gap(data: Data) -> Figure:
    """The gap between training and unseen classes over the dropout, in both metrics."""
    figure = new_figure(4.4)
    panels = figure.subplots(2, 1, sharex=True)
    dropouts = [row["dropout"] for row in data["dropout"]]
    for axes, metric in zip(panels, reversed(METRICS), strict=True):
        title, style = METRICS[metric]
        trained = _bars(axes, dropouts, [row[metric] for row in data["dropout"]], style, "trained")
        before = axes.axhline(
            100 * data["untrained"][metric]["value"], color=GREY, linestyle=(0, (1.2, 1.2)), linewidth=1.2
        )
        axes.set_ylabel(f"gap in {title}\n(percentage points)")
        _from_zero(axes)
        axes.legend([trained, before], ["trained, 95 % interval over classes", "untrained"], loc="upper left", ncols=2)
        axes.set_ylim(top=axes.get_ylim()[1] + 0.22 * np.ptp(axes.get_ylim()))
    panels[-1].set_xticks(dropouts, [f"{dropout:g}" for dropout in dropouts])
    panels[-1].set_xlabel("dropout probability")
    return figure


@in_house_style
def model_size_gap(data: Data) -> Figure:
    """The gap between training and unseen classes over the size of the network, in both metrics."""
    figure = new_figure(3.4)
    panels = figure.subplots(1, 2)
    filters = [row["filters"] for row in data["model_size"]]
    for axes, metric in zip(panels, reversed(METRICS), strict=True):
        title, style = METRICS[metric]
        _bars(axes, filters, [row[metric]["mean"] for row in data["model_size"]], style, "trained")
        for number, row in zip(filters, data["model_size"], strict=True):
            seeds = [100 * value for value in row[metric]["seeds"]]
            axes.plot([number * 1.14] * len(seeds), seeds, ".", color=style.colour, alpha=0.6, markersize=4)
        before = [100 * value for row in data["model_size"] if (value := row[metric]["untrained"]) is not None]
        if before:
            (untrained,) = axes.plot(
                filters,
                before,
                marker="D",
                markersize=4,
                markerfacecolor="white",
                color=GREY,
                linestyle=(0, (1.2, 1.2)),
            )
        _ticks_at(axes, filters, [str(number) for number in filters])
        axes.set(xlabel="filters per layer (log scale)", ylabel=f"gap in {title}\n(percentage points)")
        _from_zero(axes)
    one = Line2D([], [], color=GREY, marker=".", linestyle="")
    names = ["trained, 95 % interval over classes", data.get("dots", "each seed"), "untrained"]
    trained_of_both = Line2D([], [], color=BLACK, marker="o", markersize=4)
    figure.legend([trained_of_both, one, untrained], names, loc="outside lower center", ncols=3)
    return figure


@in_house_style
def average_precision_loss(data: Data) -> Figure:
    """The mAP of each network that a loss has trained, and their mean."""
    titles = data["titles"]
    names = list(titles)
    figure = new_figure(0.9 + 0.21 * len(names))
    panels = figure.subplots(1, len(data["mAP"]), sharey=True, squeeze=False)[0]
    for axes, (of, found) in zip(panels, data["mAP"].items(), strict=True):
        for height, name in enumerate(names):
            kind = "soft_ap" if name.startswith("ap") else name
            style = METHODS.get(kind, METHODS["other"])
            values = found.get(name)
            if values is None:
                continue
            axes.plot(
                values, [height] * len(values), style.marker, color=style.colour, markersize=5, alpha=0.85,
                markeredgewidth=0,
            )  # fmt: skip
            axes.plot([np.mean(values)], [height], "|", color=BLACK, markersize=11, markeredgewidth=1.4)
        axes.set(title=of, xlabel="mAP on unseen classes")
        axes.set_yticks(range(len(names)), [titles[name] for name in names])
        axes.tick_params(axis="y", length=0)
    panels[0].invert_yaxis()
    panels[0].set_ylabel("loss")
    seeds = max(len(values) for found in data["mAP"].values() for values in found.values())
    figure.legend(
        [_mark(GREY, "o"), _mark(BLACK, "|", 10)], [f"one network ({seeds} seeds)" if seeds > 1 else "one network", "mean"],
        loc="outside lower center", ncols=2,
    )  # fmt: skip
    return figure


@in_house_style
def accuracy(data: Data) -> Figure:
    """Loss (geometric mean) and accuracy of training and accuracy of validation, the mean over seeds with its interval."""
    tasks = list(data["tasks"])
    figure = new_figure(5.6)
    panels = figure.subplots(3, len(tasks), sharex=True, squeeze=False)
    lines, seeds = {}, 1
    for column, task in zip(panels.T, tasks, strict=True):
        for head, title in HEADS.items():
            runs = data["tasks"][task][head]
            seeds = len(runs)
            for axes, (kind, value, scale) in zip(
                column, (("train", 1, 1), ("train", 2, 100), ("val", 1, 100)), strict=True
            ):
                steps = [point[0] for point in runs[0][kind]]
                values = scale * np.array([[point[value] for point in run[kind]] for run in runs])
                if kind == "train":
                    steps, values = _thinned(steps, values)
                lines[title] = draw_band(
                    axes, steps, values, METHODS[head], marked=kind == "val", logarithmic=axes is column[0]
                )
        column[0].set_title(task)
        column[0].set_yscale("log")
        column[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        column[0].yaxis.set_major_formatter("{x:g}")
        column[0].yaxis.set_minor_locator(NullLocator())
        for axes in column[1:]:
            axes.set_ylim(top=min(axes.get_ylim()[1], 100.0))
        column[-1].set_xlabel("training episodes")
    for axes, title in zip(
        panels[:, 0], ("training loss\n(nats)", "training\naccuracy (%)", "validation\naccuracy (%)"), strict=True
    ):
        axes.set_ylabel(title)
    figure.align_ylabels(panels[:, 0])
    _legend_of_heads(figure, lines, seeds)
    return figure


@in_house_style
def norm_ratio(data: Data) -> Figure:
    """How the measured steps are distributed over the norm ratio: the share of steps up to each value of 1 - φ."""
    tasks = list(data["tasks"])
    figure = new_figure(2.9)
    panels = figure.subplots(1, len(tasks), sharex=True, sharey=True, squeeze=False)[0]
    lines = {}
    for axes, task in zip(panels, tasks, strict=True):
        for head, title in HEADS.items():
            runs = [1 - np.array(run["norm_ratio"]) for run in data["tasks"][task][head]]
            together = np.maximum(np.concatenate(runs), LEAST)
            style = METHODS[head]
            (lines[title],) = axes.step(
                np.sort(together), 100 * np.arange(1, len(together) + 1) / len(together), where="post",
                color=style.colour, linestyle=style.dashes,
            )  # fmt: skip
        axes.set_title(task)
        axes.set_xscale("log")
        axes.set_xlabel("1 − φ (log scale)")
        axes.xaxis.set_minor_locator(NullLocator())
    panels[0].set_xlim(left=LEAST)
    panels[0].set_ylabel("fraction of measured\nsteps up to 1 − φ (%)")
    panels[0].set_ylim(0, 100)
    _legend_of_heads(figure, lines, 1)
    return figure


RULES = {
    "best": ('the last better one (compare="best")', MethodStyle(BLACK, "o", "-")),
    "first": ("the first one", MethodStyle(GREY, "D", (0, (1.2, 1.2)))),
    "best by value": ("the best value", MethodStyle(VERMILION, "s", (0, (4, 1.2)))),
}
"""Rule -> which validation is the reference, in the legend, and how it is drawn."""


@in_house_style
def better_or_noise(data: Data) -> Figure:
    """How often an interval of the gain contains the true gain, over the number of the validation."""
    figure = new_figure(3.2)
    panels = figure.subplots(1, 2, sharey=True)
    titles = {"as trained": "As trained", "unchanging": "Nothing changes"}
    for axes, (population, title) in zip(panels, titles.items(), strict=True):
        for found in data["gains"]:
            if (found["population"], found["metric"], found["classes"]) != (population, "mAP", 100):
                continue
            name, style = RULES[found["rule"]]
            numbers = [int(number) for number in found["covered"]]
            covered = [100 * share for share in found["covered"].values()]
            axes.plot(
                numbers, covered, color=style.colour, linestyle=style.dashes, marker=style.marker, markersize=4,
                markevery=max(1, len(numbers) // 10), label=name,
            )  # fmt: skip
        axes.axhline(95, color=BLACK, linewidth=0.8, zorder=1)
        axes.set(xlabel="validation", title=title)
    panels[0].set_ylabel("intervals that contain\nthe true gain (%)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, names, title="each validation is compared with", loc="outside lower center", ncols=len(names)
    )
    return figure


LEAST = 1e-5  # smallest 1 - φ; smaller values are drawn there


def _bars(axes: Axes, places: Sequence[float], found: Sequence[Data], style: MethodStyle, label: str) -> Any:
    """Draw values with their intervals, in percent; no recall and no difference of recalls is larger than 1."""
    values = [100 * one["value"] for one in found]
    below = [value - 100 * one["low"] for value, one in zip(values, found, strict=True)]
    above = [100 * min(one["high"], 1.0) - value for value, one in zip(values, found, strict=True)]
    return axes.errorbar(
        places, values, yerr=[below, above], color=style.colour, linestyle=style.dashes, marker=style.marker,
        markersize=5, capsize=3, elinewidth=1.0, linewidth=1.4, label=label,
    )  # fmt: skip


def _thinned(steps: Sequence[int], values: np.ndarray, block: int = 4) -> tuple[list[int], np.ndarray]:
    """Means of neighbouring points."""
    whole = len(steps) - len(steps) % block
    if whole < 3 * block:
        return list(steps), values
    return list(steps[block - 1 : whole : block]), values[:, :whole].reshape(len(values), -1, block).mean(axis=2)


def _ticks_at(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, names)
    axes.xaxis.set_minor_locator(NullLocator())


def _from_zero(axes: Axes) -> None:
    """Draw a line at zero gap."""
    axes.axhline(0, color=BLACK, linewidth=0.8, zorder=1)


def _mark(colour: str, marker: str, size: float = 5) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linestyle="", markersize=size)


def _legend_of_heads(figure: Figure, lines: Mapping[str, Line2D], seeds: int) -> None:
    handles: list[Any] = list(lines.values())
    names = list(lines)
    if seeds > 1:
        handles.append(Patch(color=GREY, alpha=0.25, linewidth=0))
        names.append(BAND.format(seeds=seeds))
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))


FIGURES: Mapping[str, Callable[[Data], Figure]] = {
    "class_count": class_count,
    "dropout_gap": dropout_gap,
    "model_size_gap": model_size_gap,
    "average_precision_loss": average_precision_loss,
    "distance_ratio_accuracy": accuracy,
    "distance_ratio_norm_ratio": norm_ratio,
    "better_or_noise": better_or_noise,
}
"""Name of the figure in the documentation -> how to draw it."""


def write(data: Data, folder: Path, names: Sequence[str]) -> None:
    """Write the data of the figures, and the figures."""
    (folder / "figures.json").write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
    draw(data, folder, names)


def draw(data: Data, folder: Path, names: Sequence[str]) -> None:
    """Draw figures of a study."""
    for name in names:
        save(FIGURES[name](data), folder / f"{name}.png")
