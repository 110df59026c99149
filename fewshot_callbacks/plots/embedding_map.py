"""The embedding as a map: a point for each item, a colour and a mark for each class that is named."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fewshot_callbacks.plots.projection import Points, Projection
from fewshot_callbacks.plots.style import (
    CYCLE,
    GREY,
    LIGHT_GREY,
    MARKERS,
    SMALL,
    TEXT,
    WIDTH,
    in_house_style,
    new_figure,
)
from fewshot_callbacks.plots.text import shorten

MOST_CLASSES = 12  # more pairs of a colour and a mark are not told apart
HEIGHT = 4.4  # inches of a figure without its legend
COLUMNS = 3


@in_house_style
def embedding_map(
    projection: Projection,
    names: Mapping[Any, str] | Sequence[str] | None = None,
    title: str = "",
    *,
    highlighted: Sequence[Any] | None = None,
    most: int = MOST_CLASSES,
) -> Figure:
    """Draw a map of items: some classes have a colour and a mark each, all others are grey.

    The names of the classes are written below the map.

    Args:
        projection: What `project` returned.
        names: Names of the classes, as a mapping from labels or a list for labels 0, 1, 2, ...; by default the labels.
        title: A line above the map.
        highlighted: Labels to name, such as those of the weakest classes; by default the largest classes.
        most: Number of classes to name, 1 to 12.

    Returns:
        A figure of 6 inches in width.

    Raises:
        ValueError: If there is no item, or the number of classes to name is not 1 to 12.

    Examples:
        >>> from fewshot_callbacks.plots.projection import project
        >>> figure = embedding_map(project(np.eye(4), ["cat", "cat", "dog", "dog"]), title="epoch 3")
    """
    if not len(projection.points):
        raise ValueError("There is no item to draw.")
    if not 1 <= most <= MOST_CLASSES:
        raise ValueError(f"most is {most}. Use 1 to {MOST_CLASSES}: more colours and marks cannot be told apart.")
    drawn = np.isfinite(projection.points).all(1)
    points, labels = projection.points[drawn], projection.labels[drawn]
    chosen = _largest(labels, most) if highlighted is None else list(dict.fromkeys(highlighted))[:most]
    found = [_name(label, names) for label in chosen]
    place = np.full(len(points), -1)
    for number, label in enumerate(chosen):
        place[labels == label] = number

    others = len(np.unique(labels[place < 0]))
    entries = len(chosen) + (others > 0)
    lines = -(-entries // COLUMNS)
    notes = [shorten(note, WIDTH - 0.3, SMALL) for note in projection.notes]
    figure = new_figure(HEIGHT + 0.1 + 0.18 * lines)
    if title:
        figure.suptitle(shorten(title, WIDTH - 0.2, TEXT + 1), x=0.02, ha="left", fontsize=TEXT + 1)
    axes = figure.add_subplot()
    axes.set_title("\n".join(notes), fontsize=SMALL, color=GREY)
    axes.set(xlabel=projection.axes[0], ylabel=projection.axes[1], aspect="equal", adjustable="datalim")
    axes.locator_params(nbins=5)
    # Their numbers mean nothing: only what is near to what.
    if projection.method != "pca":
        axes.tick_params(length=0, labelleft=False, labelbottom=False)
    _scatter(axes, points, place, found, others)
    return figure


def _largest(labels: np.ndarray, most: int) -> list[Any]:
    kinds, counts = np.unique(labels, return_counts=True)
    order = np.lexsort((np.arange(len(kinds)), -counts))[:most]
    # In the order of the labels: a class keeps its colour when another one becomes larger.
    return [kinds[place] for place in sorted(order)]


def _name(label: Any, names: Mapping[Any, str] | Sequence[str] | None) -> str:
    key = label.item() if isinstance(label, np.generic) else label
    if names is None:
        return str(key)
    if isinstance(names, Mapping):
        return names.get(key, str(key))
    return names[key] if 0 <= key < len(names) else str(key)


def _scatter(axes: Axes, points: Points, place: Int[np.ndarray, "items"], found: Sequence[str], others: int) -> None:
    """Draw the classes that were found, then all others, and name them below."""
    size = 30 if len(points) <= 300 else 14 if len(points) <= 3000 else 7
    x, y = points.T
    drawn = [
        axes.scatter(
            x[place == number],
            y[place == number],
            s=size,
            color=CYCLE[number % len(CYCLE)],
            marker=MARKERS[number],
            edgecolors="white",
            linewidths=0.3,
            zorder=2,
        )
        for number in range(len(found))
    ]
    words = [shorten(name, WIDTH / COLUMNS - 0.45, SMALL) for name in found]
    drawn.append(axes.scatter(x[place < 0], y[place < 0], s=0.5 * size, color=LIGHT_GREY, linewidths=0, zorder=1))
    if others:
        words.append(f"{others:,} other class{'es' if others > 1 else ''}")
    axes.figure.legend(
        drawn[: len(words)],
        words,
        loc="outside lower left",
        ncols=COLUMNS,
        handlelength=1.0,
        columnspacing=1.2,
        markerscale=5 / size**0.5,  # 5 points wide, however many items there are
    )
