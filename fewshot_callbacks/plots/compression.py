"""A metric against bytes per item, for an embedding and its truncated and quantised forms."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import Bbox

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.retrieval import CompressionReport
from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.style import in_house_style, new_figure

HEIGHT = 4.0  # inches
# Room for labels to the left and right of the points, as a factor of the bytes on the logarithmic axis.
LEFT_MARGIN = 1.8
RIGHT_MARGIN = 3.0
# Free space above the highest and below the lowest point, as a fraction of the range of values.
VALUE_MARGIN = 0.12
# The axis extends beyond the bounds of a metric, so that a point or the cap of a bar at a bound is completely visible.
BEYOND_BOUNDS = 0.02
# Horizontal and vertical distance of a label from its point, in points.
LABEL_GAP = 6
LABEL_RISE = 3
# Half the width of a bar with its caps, and half the height of a marker, in points.
BAR_HALF_WIDTH = 3.0
# A white outline keeps a label legible on a line.
OUTLINE = (withStroke(linewidth=2.5, foreground="white"),)


class _Place(NamedTuple):
    """The position of a label relative to its point: 1 means right or above, -1 means left or below."""

    direction: int
    rise: int


# Values usually increase with the bytes, so the line does not cross the upper left and the lower right of a point.
LOWER_RIGHT, UPPER_LEFT, UPPER_RIGHT, LOWER_LEFT = _Place(1, -1), _Place(-1, 1), _Place(1, 1), _Place(-1, -1)


class _Family(NamedTuple):
    """The style of all forms with the same code."""

    name: str
    colour: str
    marker: str
    dashes: str
    # preferred positions of the labels, the best first
    places: tuple[_Place, ...]


# None is the code of uncompressed numbers.
FAMILIES = {
    None: _Family("float", style.BLUE, "o", "-", (LOWER_RIGHT, UPPER_LEFT)),
    "int8": _Family("int8", style.VERMILION, "s", "--", (UPPER_LEFT, LOWER_RIGHT)),
    "binary": _Family("binary", style.GREEN, "^", ":", (LOWER_RIGHT, UPPER_LEFT)),
}


class _Point(NamedTuple):
    """A form of the embedding: bytes per item, dimensions, and the metric with its interval."""

    size: int
    dims: int
    value: float
    low: float
    high: float


@in_house_style
def compression_curve(report: CompressionReport, metric: str | None = None, title: str = "") -> Figure:
    """Return a figure of a metric against bytes per item, on a logarithmic axis, 6 inches wide.

    Each code (float, int8, binary) has a line. The label of a point is its number of dimensions. The bar of a point is the
    interval of the difference from the full embedding, drawn around the point and cut at the bounds of the metric. If the
    bar does not touch the grey line, the loss or gain is statistically significant.

    Args:
        report: The result of `compression_costs`.
        metric: Key of the metric; by default the first compared metric.
        title: Title of the figure.

    Raises:
        ValueError: The metric was not compared.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import compression_costs
        >>> labels = torch.arange(100) % 20
        >>> embeddings = torch.nn.functional.one_hot(labels).float() + 0.3 * torch.randn(100, 20)
        >>> figure = compression_curve(compression_costs(embeddings, labels, dims=(5, 10)))
        >>> float(figure.get_figwidth())
        6.0
    """
    compared = report.compared()
    key = compared[0] if metric is None else metric
    if key not in compared:
        raise InputError(
            f"compression_curve: the report does not contain metric={key!r}; it contains {', '.join(compared)}. Pass one of "
            f"these, or use compression_costs(metrics=({key!r}, ...))."
        )
    whole = report.whole[key]
    figure = new_figure(HEIGHT)
    style.entitle(figure, title)
    axes = figure.add_subplot()
    axes.set(xlabel="bytes per item", ylabel=key)
    axes.set_xscale("log", base=2)
    axes.axhline(whole, color=style.GREY, linestyle=(0, (1.2, 1.2)), linewidth=1.0, zorder=0)
    bounds = report.whole.requested(key).metric.range or (-math.inf, math.inf)
    points_of = {family: _points(report, key, code, bounds) for code, family in FAMILIES.items()}
    for family, points in points_of.items():
        _draw_line(axes, family, points)
    all_points = [point for points in points_of.values() for point in points]
    _set_limits(axes, all_points, bounds)
    level = f"{100 * report.whole.confidence:g} %"
    figure.supxlabel(
        f"Labels: number of dimensions. Bars: {level} interval of the difference from the full embedding.",
        x=0.02,
        ha="left",
        fontsize=style.SMALL,
        color=style.GREY,
    )
    # The boxes of labels are known once the axes have their position.
    figure.draw_without_rendering()
    labels = _PointLabels(axes, all_points)
    for family, points in points_of.items():
        if points:
            labels.write(family.name, points[-1], family.colour, (UPPER_RIGHT, LOWER_RIGHT, LOWER_LEFT), style.TEXT)
    for family, points in points_of.items():
        for point in points:
            labels.write(f"{point.dims:,}", point, family.colour, family.places, style.SMALL)
    return figure


def _points(report: CompressionReport, key: str, code: str | None, bounds: tuple[float, float]) -> list[_Point]:
    """Return the forms with a code and a finite value, sorted by bytes; the full embedding has the code None.

    The ends of a bar are within the bounds of the metric.
    """
    points = []
    if code is None and math.isfinite(report.whole[key]):
        whole = report.whole[key]
        points.append(_Point(report.bytes_per_item, report.dims, whole, whole, whole))
    for variant in report.variants.values():
        difference = variant.differences.get(key)
        if variant.code != code or difference is None or not math.isfinite(difference.first):
            continue
        low, high = np.clip([difference.second + end for end in difference.interval], *bounds).tolist()
        if math.isnan(low):
            low = high = difference.first
        points.append(_Point(variant.bytes_per_item, variant.dims, difference.first, low, high))
    # Truncation to all dimensions gives the same form again.
    by_size = {point.size: point for point in points}
    return [by_size[size] for size in sorted(by_size)]


def _draw_line(axes: Axes, family: _Family, points: Sequence[_Point]) -> None:
    """Draw the line of a code with its bars."""
    axes.errorbar(
        [point.size for point in points],
        [point.value for point in points],
        yerr=[[point.value - point.low for point in points], [point.high - point.value for point in points]],
        color=family.colour,
        marker=family.marker,
        linestyle=family.dashes,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        elinewidth=1.2,
        capsize=2.5,
    )


class _PointLabels:
    """Labels next to points that overlap neither a bar nor an earlier label.

    The axes must have their final position and limits.
    """

    def __init__(self, axes: Axes, points: Sequence[_Point]) -> None:
        self._axes = axes
        self._taken = [self._bar(point) for point in points]

    def write(self, text: str, point: _Point, colour: str, places: Sequence[_Place], size: float) -> None:
        """Write a label at the first free place; without a free place, write nothing."""
        for place in places:
            label = self._axes.annotate(
                text,
                (point.size, point.value),
                xytext=(place.direction * LABEL_GAP, place.rise * LABEL_RISE),
                textcoords="offset points",
                ha="left" if place.direction > 0 else "right",
                va="bottom" if place.rise > 0 else "top",
                fontsize=size,
                color=colour,
                path_effects=OUTLINE,
                in_layout=False,
            )
            box = label.get_window_extent()
            if not any(box.overlaps(taken) for taken in self._taken):
                self._taken.append(box)
                return
            label.remove()

    def _bar(self, point: _Point) -> Bbox:
        """Return the box around a point's bar and marker, in pixels."""
        half = BAR_HALF_WIDTH * self._axes.figure.dpi / 72
        ends = self._axes.transData.transform([(point.size, point.low), (point.size, point.high)])
        return Bbox([ends[0] - half, ends[1] + half])


def _set_limits(axes: Axes, points: Sequence[_Point], bounds: tuple[float, float]) -> None:
    """Set the limits of both axes, close to the bounds of the metric, and a tick at each power of two."""
    smallest = min(point.size for point in points)
    largest = max(point.size for point in points)
    axes.set_xlim(smallest / LEFT_MARGIN, largest * RIGHT_MARGIN)
    lowest = min(point.low for point in points)
    highest = max(point.high for point in points)
    room = VALUE_MARGIN * ((highest - lowest) or 1.0)
    low, high = bounds
    axes.set_ylim(max(lowest - room, low - BEYOND_BOUNDS), min(highest + room, high + BEYOND_BOUNDS))
    exponents = range(math.floor(math.log2(smallest)), math.ceil(math.log2(largest)) + 1)
    axes.xaxis.set_major_locator(FixedLocator([2.0**exponent for exponent in exponents], nbins=9))
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
