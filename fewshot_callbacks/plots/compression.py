"""The value of a metric over the bytes of an item, for an embedding and its truncated and quantised forms."""

import math
from collections.abc import Sequence
from typing import NamedTuple

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
# Room for labels on the left and on the right of the points, as a factor of the bytes on the logarithmic axis.
LEFT_MARGIN = 1.8
RIGHT_MARGIN = 3.0
# Share of the height of the axis that is free above the highest point and below the lowest one.
VALUE_MARGIN = 0.12
# How far the axis extends beyond the bounds of a metric, so that a point there is completely visible.
BEYOND_BOUNDS = 0.02
# Distances of a label from its point to the side and in height, in points.
LABEL_GAP = 6
LABEL_RISE = 3
# Half of the width of a bar with its caps, and half of the height of a marker, in points.
BAR_HALF_WIDTH = 3.0
# A white outline keeps a label legible on a line.
OUTLINE = (withStroke(linewidth=2.5, foreground="white"),)


class _Place(NamedTuple):
    """The position of a label relative to its point: 1 is right and above, -1 is left and below."""

    direction: int
    rise: int


# Values usually rise with the bytes, so that the upper left and the lower right of a point are free of its line.
LOWER_RIGHT, UPPER_LEFT, UPPER_RIGHT, LOWER_LEFT = _Place(1, -1), _Place(-1, 1), _Place(1, 1), _Place(-1, -1)


class _Family(NamedTuple):
    """How the forms with one code are drawn."""

    name: str
    colour: str
    marker: str
    dashes: str
    # positions of the labels of its points, the best first
    places: tuple[_Place, ...]


# Uncompressed numbers, int8 and binary.
FAMILIES = {
    None: _Family("float", style.BLUE, "o", "-", (LOWER_RIGHT, UPPER_LEFT)),
    "int8": _Family("int8", style.VERMILION, "s", "--", (UPPER_LEFT, LOWER_RIGHT)),
    "binary": _Family("binary", style.GREEN, "^", ":", (LOWER_RIGHT, UPPER_LEFT)),
}


class _Point(NamedTuple):
    """A form of the embedding in the figure."""

    size: int
    dims: int
    value: float
    low: float
    high: float


@in_house_style
def compression_curve(report: CompressionReport, metric: str | None = None, title: str = "") -> Figure:
    """Draw the values of a metric over the bytes of an item, on a logarithmic axis.

    A line joins the forms with one code; the number at a point is its number of dimensions. A bar is the interval of the
    difference to the whole embedding, around the value of the form: a bar that does not reach the grey line is a loss, or a
    gain, beyond chance.

    Args:
        report: What `compression_costs` returns.
        metric: Key of the metric; by default the first that was compared.
        title: A line above the figure.

    Raises:
        ValueError: If the metric was not compared.

    Returns:
        A figure of 6 inches in width.

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
            f"compression_curve: metric={key!r} was not compared, but {', '.join(compared)}. Pass one of these, or ask for "
            f"it with compression_costs(metrics=({key!r}, ...))."
        )
    whole = report.whole[key]
    figure = new_figure(HEIGHT)
    style.entitle(figure, title)
    axes = figure.add_subplot()
    axes.set(xlabel="bytes of an item", ylabel=key)
    axes.set_xscale("log", base=2)
    axes.axhline(whole, color=style.GREY, linestyle=(0, (1.2, 1.2)), linewidth=1.0, zorder=0)
    points_of = {family: _points(report, key, code) for code, family in FAMILIES.items()}
    for family, points in points_of.items():
        _draw_line(axes, family, points)
    all_points = [point for points in points_of.values() for point in points]
    _set_limits(axes, all_points, report.whole.requested(key).metric.range)
    level = f"{100 * report.whole.confidence:g} %"
    figure.supxlabel(
        f"Beside a point: its dimensions. Bars: {level} interval of the difference to the whole embedding.",
        x=0.02,
        ha="left",
        fontsize=style.SMALL,
        color=style.GREY,
    )
    # Boxes are only known once the axes have their position.
    figure.draw_without_rendering()
    labels = _PointLabels(axes, all_points)
    for family, points in points_of.items():
        if points:
            labels.write(family.name, points[-1], family.colour, (UPPER_RIGHT, LOWER_RIGHT, LOWER_LEFT), style.TEXT)
    for family, points in points_of.items():
        for point in points:
            labels.write(f"{point.dims:,}", point, family.colour, family.places, style.SMALL)
    return figure


def _points(report: CompressionReport, key: str, code: str | None) -> list[_Point]:
    """Return the forms with a code that have a value, by their bytes; the whole embedding counts as uncompressed numbers."""
    points = []
    if code is None and math.isfinite(report.whole[key]):
        whole = report.whole[key]
        points.append(_Point(report.bytes_per_item, report.dims, whole, whole, whole))
    for variant in report.variants.values():
        difference = variant.differences.get(key)
        if variant.code != code or difference is None or not math.isfinite(difference.first):
            continue
        low, high = (difference.second + end for end in difference.interval)
        if math.isnan(low):
            low = high = difference.first
        points.append(_Point(variant.bytes_per_item, variant.dims, difference.first, low, high))
    # Truncation to all dimensions does not change a form.
    by_size = {point.size: point for point in points}
    return [by_size[size] for size in sorted(by_size)]


def _draw_line(axes: Axes, family: _Family, points: Sequence[_Point]) -> None:
    """Draw the line of a code with its bars, if it has points."""
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
    """Writes labels next to points, where they cover neither a bar nor an earlier label.

    The axes must have their final position and limits.
    """

    def __init__(self, axes: Axes, points: Sequence[_Point]) -> None:
        self._axes = axes
        self._taken = [self._bar(point) for point in points]

    def write(self, text: str, point: _Point, colour: str, places: Sequence[_Place], size: float) -> None:
        """Write a label at the first free place; it is left out if none is free."""
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
        """Return the box of the bar and the marker of a point, in pixels."""
        half = BAR_HALF_WIDTH * self._axes.figure.dpi / 72
        ends = self._axes.transData.transform([(point.size, point.low), (point.size, point.high)])
        return Bbox([ends[0] - half, ends[1] + half])


def _set_limits(axes: Axes, points: Sequence[_Point], bounds: tuple[float, float] | None) -> None:
    """Choose the ends of both axes, and a tick at each power of two; bars may end beyond the bounds of a metric."""
    smallest = min(point.size for point in points)
    largest = max(point.size for point in points)
    axes.set_xlim(smallest / LEFT_MARGIN, largest * RIGHT_MARGIN)
    lowest = min(point.low for point in points)
    highest = max(point.high for point in points)
    room = VALUE_MARGIN * ((highest - lowest) or 1.0)
    low, high = (-math.inf, math.inf) if bounds is None else bounds
    axes.set_ylim(max(lowest - room, low - BEYOND_BOUNDS), min(highest + room, high + BEYOND_BOUNDS))
    exponents = range(math.floor(math.log2(smallest)), math.ceil(math.log2(largest)) + 1)
    axes.xaxis.set_major_locator(FixedLocator([2.0**exponent for exponent in exponents], nbins=9))
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
