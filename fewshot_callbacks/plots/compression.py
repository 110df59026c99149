"""The value of a metric over the bytes of an item, for an embedding and its truncated and quantised forms."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from fewshot_callbacks.functional.retrieval import CompressionReport
from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.style import in_house_style, new_figure

HEIGHT = 4.0  # inches
# Room on the left and right of the points on the logarithmic axis, for their labels, as a factor of the bytes.
MARGIN = 2.0
# Share of the height of the axis that is free above the highest point and below the lowest one.
VALUE_MARGIN = 0.12
# Distance of a label from its point, in points.
LABEL_GAP = 6


class _Family(NamedTuple):
    """How the forms with one code are drawn."""

    name: str
    colour: str
    marker: str
    dashes: str
    # whether the labels of its points stand above them
    is_above: bool


# Numbers as they are, int8 and binary.
FAMILIES = {
    None: _Family("numbers", style.BLUE, "o", "-", True),
    "int8": _Family("int8", style.VERMILION, "s", "--", True),
    "binary": _Family("binary", style.GREEN, "^", ":", False),
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
        raise ValueError(
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
    all_points: list[_Point] = []
    for code, family in FAMILIES.items():
        points = _points(report, key, code)
        if points:
            _draw_family(axes, family, points)
            all_points += points
    _set_limits(axes, all_points)
    level = f"{report.whole.confidence:.0%}"
    figure.supxlabel(
        f"Numbers: dimensions. Bars: {level} interval of the difference to the whole embedding ({whole:.3f}).",
        x=0.02,
        ha="left",
        fontsize=style.SMALL,
        color=style.GREY,
    )
    return figure


def _points(report: CompressionReport, key: str, code: str | None) -> list[_Point]:
    """Return the forms with a code that have a value, by their bytes; the whole embedding is one of numbers."""
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
    # A truncation to all dimensions is the embedding itself.
    by_size = {point.size: point for point in points}
    return [by_size[size] for size in sorted(by_size)]


def _draw_family(axes: Axes, family: _Family, points: Sequence[_Point]) -> None:
    """Draw the line of a code with its bars, and write the dimensions at its points and its name at the last one."""
    sizes = [point.size for point in points]
    values = [point.value for point in points]
    below = [point.value - point.low for point in points]
    above = [point.high - point.value for point in points]
    axes.errorbar(
        sizes,
        values,
        yerr=[below, above],
        color=family.colour,
        marker=family.marker,
        linestyle=family.dashes,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        elinewidth=1.2,
        capsize=2.5,
    )
    for point in points:
        end = point.high if family.is_above else point.low
        axes.annotate(
            f"{point.dims:,}",
            (point.size, end),
            xytext=(0, LABEL_GAP if family.is_above else -LABEL_GAP),
            textcoords="offset points",
            ha="center",
            va="bottom" if family.is_above else "top",
            fontsize=style.SMALL,
            color=family.colour,
        )
    last = points[-1]
    axes.annotate(
        family.name,
        (last.size, last.value),
        xytext=(LABEL_GAP + 2, 0),
        textcoords="offset points",
        va="center",
        fontsize=style.TEXT,
        color=family.colour,
    )


def _set_limits(axes: Axes, points: Sequence[_Point]) -> None:
    """Choose the ends of both axes, and a tick at each power of two."""
    smallest = min(point.size for point in points)
    largest = max(point.size for point in points)
    axes.set_xlim(smallest / MARGIN, largest * MARGIN)
    lowest = min(point.low for point in points)
    highest = max(point.high for point in points)
    room = VALUE_MARGIN * ((highest - lowest) or 1.0)
    axes.set_ylim(lowest - room, highest + room)
    exponents = range(math.floor(math.log2(smallest)), math.ceil(math.log2(largest)) + 1)
    axes.xaxis.set_major_locator(FixedLocator([2.0**exponent for exponent in exponents], nbins=9))
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:,.0f}")
    axes.xaxis.set_minor_locator(NullLocator())
