"""Figures of one evaluation: score histograms, curves with operating points, recall@k, weak and confused classes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from matplotlib.typing import LineStyleType
from scipy.special import ndtri

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.retrieval import PairCounts, RetrievalReport
from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.fitted_text import readable, shorten, shorten_readable, width_of
from fewshot_callbacks.plots.panels import score_text
from fewshot_callbacks.plots.style import in_house_style, new_figure
from fewshot_callbacks.system.words import counted, verb

HEIGHT = 3.6  # inches, without the legend
LEGEND_LINE = 0.18  # inches
# Largest width of the label below bars, in inches. The names to the left of the bars, or the numbers to their right, shift
# the label from the middle of the figure by less than a tenth of the figure's width.
BAR_LABEL_WIDTH = 0.8 * style.WIDTH
MAX_TICKS = 9  # four-digit numbers do not touch each other on a five-inch axis
# Diameters in points. A lone value has no line, so its larger point makes it visible among curves.
CURVE_POINT = 5
LONE_POINT = 9
MAX_BINS = 100  # a bin is five pixels wide in a figure of 600 pixels
# Room above the highest and below the lowest density, as a factor on the logarithmic axis.
DENSITY_MARGIN = 2
# The lowest density on a logarithmic axis, relative to the highest density.
LOWEST_DENSITY = 1e-7
# Colours and dashes of operating points, in order.
MARK_STYLES: tuple[tuple[str, LineStyleType], ...] = (
    (style.BLACK, "--"),
    (style.ORANGE, ":"),
    (style.SKY_BLUE, "-."),
    (style.PURPLE, (0, (5, 1, 1, 1, 1, 1))),
)
# Possible ticks on an axis of error rates.
RATES = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99, 0.999)


@dataclass(frozen=True)
class Mark:
    """An operating point in a figure; the position in the list of marks determines its colour and marker.

    Attributes:
        name: A name such as "best F1" or "precision 0.95".
        threshold: Lowest score of accepted pairs; a threshold that is NaN or infinite is not drawn.
        x: The recall, or the false match rate.
        y: The precision, or the false non-match rate.
    """

    name: str
    threshold: float
    x: float = math.nan
    y: float = math.nan


@dataclass(frozen=True)
class ClassScore:
    """A class, the mean of a metric over its queries, and the number of its queries."""

    name: str
    value: float
    queries: int


@dataclass(frozen=True)
class Confusion:
    """A query class, another class that was retrieved for its queries, and the number of items retrieved from it."""

    query: str
    retrieved: str
    count: int


@in_house_style
def score_histograms(counts: PairCounts, marks: Sequence[Mark] = (), title: str = "", *, log: bool = True) -> Figure:
    """Return a figure of the score distributions of relevant and irrelevant pairs, each with area 1; 6 inches wide.

    Args:
        counts: Pairs per bin of scores; neighbouring bins are merged to at most about 100 bins.
        marks: Thresholds, drawn as vertical lines.
        title: Title of the figure.
        log: Whether the density axis is logarithmic, so that the tails are visible.

    Raises:
        ValueError: There are no pairs, the number of edges does not match the bins, or the edges do not ascend.

    Examples:
        >>> counts = PairCounts(np.array([0.5]), np.array([3]), np.array([2]), 4, 20,
        ...                     np.array([0.0, 0.5, 1.0]), np.array([1, 3]), np.array([18, 2]))
        >>> float(score_histograms(counts, [Mark("best F1", 0.5)]).get_figwidth())
        6.0
    """
    histograms = _merged_bins(counts)
    figure, axes = _new_plot(title, "pair score", "density", 2 + len(marks))
    irrelevant_label = f"irrelevant pairs ({counts.irrelevant:,})"
    _draw_density(axes, histograms.irrelevant, histograms.edges, irrelevant_label, style.IRRELEVANT, "--")
    relevant_label = f"relevant pairs ({counts.relevant:,})"
    _draw_density(axes, histograms.relevant, histograms.edges, relevant_label, style.RELEVANT, "-")
    if log:
        axes.set_yscale("log", nonpositive="clip")
        axes.set_ylim(*_density_limits(histograms))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(histograms.edges[0], histograms.edges[-1])
    for number, mark in enumerate(marks):
        _draw_threshold(axes, mark, number)
    _draw_legend(figure)
    return figure


@in_house_style
def precision_recall_curve(
    recall: Float[np.ndarray, "thresholds"],
    precision: Float[np.ndarray, "thresholds"],
    marks: Sequence[Mark] = (),
    title: str = "",
    *,
    area: float | None = None,
    chance: float | None = None,
) -> Figure:
    """Return a figure of the precision-recall curve over all pairs, with operating points; 6 inches wide.

    Args:
        recall: Recall at each threshold, in any order.
        precision: Precision at the same thresholds; NaN is left out.
        marks: Operating points; x is the recall and y is the precision.
        title: Title of the figure.
        area: The area under the curve, for the legend.
        chance: Fraction of relevant pairs, which is the precision of a random ranking; drawn as a line.

    Raises:
        ValueError: No threshold has a precision and a recall.

    Examples:
        >>> figure = precision_recall_curve(np.array([0.5, 1.0]), np.array([1.0, 0.8]), [Mark("best F1", 0.4, 1.0, 0.8)])
        >>> float(figure.get_figwidth())
        6.0
    """
    finite = np.isfinite(recall) & np.isfinite(precision)
    if not finite.any():
        raise InputError(
            "precision_recall_curve: there is no threshold to draw. Pass at least one finite precision and recall."
        )
    recall = recall[finite]
    precision = precision[finite]
    # Points with the same recall are sorted by precision, so that the line does not go up and down.
    order = np.lexsort((-precision, recall))
    legend_entries = 1 + len(marks)
    if chance is not None:
        legend_entries += 1
    figure, axes = _new_plot(title, "recall over all pairs", "precision over all pairs", legend_entries)
    label = "all thresholds" if area is None else f"all thresholds, area under the curve {area:.4f}"
    axes.plot(recall[order], precision[order], color=style.BLUE, label=label)
    if chance is not None:
        axes.axhline(chance, color=style.GREY, linestyle=":", linewidth=1.0, label=f"random ranking: {chance:.3g}")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.04))
    for number, mark in enumerate(marks):
        _draw_point(axes, mark, number, (mark.x, mark.y), "recall {x:.3g}, precision {y:.3g}")
    _draw_legend(figure)
    return figure


@in_house_style
def error_tradeoff_curve(
    false_match_rate: Float[np.ndarray, "thresholds"],
    false_non_match_rate: Float[np.ndarray, "thresholds"],
    marks: Sequence[Mark] = (),
    title: str = "",
) -> Figure:
    """Return a figure of the detection error trade-off (DET) curve on normal deviate axes, 6 inches wide.

    The curve shows the false non-match rate against the false match rate. If the scores of both kinds of pairs are normally
    distributed, it is a straight line. Rates of 0 and 1 are infinitely far away on these axes, so they are left out (Martin
    et al., The DET curve in assessment of detection task performance, 1997).

    Args:
        false_match_rate: Fraction of irrelevant pairs that are accepted at each threshold, in any order.
        false_non_match_rate: Fraction of relevant pairs that are rejected at the same thresholds.
        marks: Operating points; x is the false match rate and y is the false non-match rate.
        title: Title of the figure.

    Raises:
        ValueError: There are no thresholds.

    Examples:
        >>> figure = error_tradeoff_curve(np.array([0.001, 0.01, 0.1]), np.array([0.4, 0.2, 0.05]))
        >>> float(figure.get_figwidth())
        6.0
    """
    if not len(false_match_rate):
        raise InputError(
            "error_tradeoff_curve: there is no threshold to draw. Pass the error rates of at least one threshold."
        )
    has_match_deviate = (false_match_rate > 0) & (false_match_rate < 1)
    has_non_match_deviate = (false_non_match_rate > 0) & (false_non_match_rate < 1)
    drawable = has_match_deviate & has_non_match_deviate
    false_match_rate = false_match_rate[drawable]
    false_non_match_rate = false_non_match_rate[drawable]
    order = np.lexsort((-false_non_match_rate, false_match_rate))
    figure, axes = _new_plot(
        title,
        "false match rate (accepted irrelevant pairs)",
        "false non-match rate\n(rejected relevant pairs)",
        2 + len(marks),
    )
    x = ndtri(false_match_rate[order])
    y = ndtri(false_non_match_rate[order])
    axes.plot(x, y, color=style.BLUE, label="all thresholds")
    if not drawable.any():
        axes.text(0.5, 0.5, "no threshold has both kinds of errors", ha="center", transform=axes.transAxes)
    x_scale = _deviate_scale(false_match_rate)
    axes.set_xlim(x_scale.low, x_scale.high)
    axes.set_xticks(x_scale.ticks, x_scale.names)
    y_scale = _deviate_scale(false_non_match_rate)
    axes.set_ylim(y_scale.low, y_scale.high)
    axes.set_yticks(y_scale.ticks, y_scale.names)
    _draw_equal_rates(axes, x_scale, y_scale)
    for number, mark in enumerate(marks):
        deviates = (float(ndtri(mark.x)), float(ndtri(mark.y)))
        _draw_point(axes, mark, number, deviates, "FMR {x:.3g}, FNMR {y:.3g}")
    _draw_legend(figure)
    return figure


@in_house_style
def recall_at_k_curve(series: Mapping[str, Mapping[int, float]], title: str = "") -> Figure:
    """Return a figure of recall@k against k, 6 inches wide; the k axis is logarithmic if k grows more than tenfold.

    A single value is drawn as a large point. If no series has two values, the axis label explains how to get a curve.

    Args:
        series: Name of a curve -> k -> recall@k, such as {"recall@k": report.at("recall@{k}")}; NaN is left out.
        title: Title of the figure.

    Raises:
        ValueError: There are no finite values.

    Examples:
        >>> float(recall_at_k_curve({"recall@k": {1: 0.6, 5: 0.8, 10: 0.9}}).get_figwidth())
        6.0
    """
    curves = _finite_values(series)
    if not curves:
        raise InputError("recall_at_k_curve: there are no values to draw. Pass at least one finite recall@k.")
    x_label = "k (number of nearest neighbours)"
    if all(len(recalls) == 1 for recalls in curves.values()):
        x_label += "\nFor a curve, pass several k: metrics=('recall@1', 'recall@5', 'recall@10')."
    figure, axes = _new_plot(title, x_label, "recall@k", len(curves))
    all_ks = sorted({k for recalls in curves.values() for k in recalls})
    if all_ks[-1] > 10 * all_ks[0]:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(all_ks, nbins=MAX_TICKS))
    axes.xaxis.set_major_formatter(lambda k, _: f"{k:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    for number, (name, recalls) in enumerate(curves.items()):
        _draw_recalls(axes, name, recalls, number)
    lowest = min(min(recalls.values()) for recalls in curves.values())
    # If all values are high, the axis begins a little below the lowest value, so that differences are visible.
    bottom = lowest - 0.1 * (1.05 - lowest) if lowest >= 0.5 else -0.02
    axes.set_ylim(bottom, 1.02)
    _draw_legend(figure)
    return figure


@in_house_style
def weakest_classes(
    classes: Sequence[ClassScore],
    title: str = "",
    *,
    metric: str = "mean AP",
    overall: float | None = None,
    most: int = 15,
) -> Figure:
    """Return a bar chart of the classes with the lowest values, the lowest at the top; 6 inches wide.

    Args:
        classes: All classes, in any order; classes with the value NaN are left out.
        title: Title of the figure.
        metric: Name of the values, which are in [0, 1]; it is shortened if the axis label is too long.
        overall: The mean over all queries, drawn as a line.
        most: Largest number of bars.

    Raises:
        ValueError: No class has a finite value.

    Examples:
        >>> figure = weakest_classes([ClassScore("owl", 0.9, 12), ClassScore("heron", 0.3, 8)], overall=0.66)
        >>> float(figure.get_figwidth())
        6.0
    """
    with_value = [score for score in classes if math.isfinite(score.value)]
    if not with_value:
        raise InputError("weakest_classes: there are no values to draw. Pass at least one class with a finite value.")
    weakest = sorted(with_value, key=lambda score: (score.value, score.name))[:most]
    names = [shorten(score.name, 0.3 * style.WIDTH, style.SMALL) for score in weakest]
    values = [score.value for score in weakest]
    descriptions = [
        f"{score.value:.2f}, {score.queries:,} {'query' if score.queries == 1 else 'queries'}" for score in weakest
    ]
    counts = f", lowest {len(weakest)} of {len(with_value)} classes"
    metric_width = BAR_LABEL_WIDTH - width_of(counts, style.TEXT)
    x_label = shorten(metric, metric_width, style.TEXT) + counts
    figure, axes = _draw_bars(names, values, descriptions, title, x_label)
    if overall is not None and math.isfinite(overall):
        axes.set_xlim(0, _axis_end(max(overall, values[-1])))
        label = f"all queries: {overall:.3f}"
        axes.axvline(overall, color=style.GREY, linestyle=":", linewidth=1.2, label=label, zorder=0)
        _draw_legend(figure)
    return figure


@in_house_style
def confused_classes(confusions: Sequence[Confusion], title: str = "", *, most: int = 15) -> Figure:
    """Return a bar chart of the most frequently confused pairs of classes, the most frequent at the top; 6 inches wide.

    Args:
        confusions: Pairs of classes, in any order.
        title: Title of the figure.
        most: Largest number of bars.

    Raises:
        ValueError: There are no pairs.

    Examples:
        >>> float(confused_classes([Confusion("owl", "heron", 5), Confusion("heron", "owl", 2)]).get_figwidth())
        6.0
    """
    if not confusions:
        raise InputError("confused_classes: there is no pair of classes to draw. Pass at least one.")
    most_frequent = sorted(confusions, key=lambda pair: (-pair.count, pair.query, pair.retrieved))[:most]
    name_width = 0.19 * style.WIDTH
    names = [
        f"{shorten(pair.query, name_width, style.SMALL)} → {shorten(pair.retrieved, name_width, style.SMALL)}"
        for pair in most_frequent
    ]
    counts = [pair.count for pair in most_frequent]
    descriptions = [f"{count:,}" for count in counts]
    figure, axes = _draw_bars(names, counts, descriptions, title, "retrieved irrelevant items")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    figure.supxlabel(
        "query class → class of the retrieved item", x=0.02, ha="left", fontsize=style.SMALL, color=style.GREY
    )
    return figure


def operating_marks(report: RetrievalReport) -> tuple[list[Mark], list[Mark]]:
    """Return a report's operating points for `precision_recall_curve`, and the same points for `error_tradeoff_curve`."""
    counts = report.pair_counts
    pooled = {f"decision, F1 {report.decision.f1:.3g}": report.decision}
    for precision, point in report.at_precision.items():
        pooled[f"precision {precision:g}"] = point
    by_precision = []
    by_error_rates = []
    for name, point in pooled.items():
        false_match_rate = point.false_positives / (counts.irrelevant or math.nan)
        by_precision.append(Mark(name, point.threshold, point.recall, point.precision))
        by_error_rates.append(Mark(name, point.threshold, false_match_rate, 1 - point.recall))
    for rate, error_point in report.at_false_match_rate.items():
        name = f"FMR {rate:g}"
        recall = 1 - error_point.false_non_match_rate
        true_positives = recall * counts.relevant
        accepted = true_positives + error_point.false_match_rate * counts.irrelevant
        precision = true_positives / accepted if accepted else math.nan
        by_precision.append(Mark(name, error_point.threshold, recall, precision))
        by_error_rates.append(
            Mark(name, error_point.threshold, error_point.false_match_rate, error_point.false_non_match_rate)
        )
    return by_precision, by_error_rates


def _new_plot(title: str, x_label: str, y_label: str, legend_entries: int) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, and with room below for a legend of `legend_entries` lines."""
    figure = new_figure(HEIGHT + LEGEND_LINE * legend_entries)
    style.entitle(figure, title)
    axes = figure.add_subplot()
    axes.set(xlabel=x_label, ylabel=y_label)
    return figure, axes


def _draw_legend(figure: Figure) -> None:
    figure.legend(loc="outside lower left", handlelength=2.6)


class _Histograms(NamedTuple):
    """Numbers of relevant and irrelevant pairs in the same bins."""

    edges: Float[np.ndarray, "edges"]
    relevant: Int[np.ndarray, "bins"]
    irrelevant: Int[np.ndarray, "bins"]


def _merged_bins(counts: PairCounts) -> _Histograms:
    """Return histograms without empty or infinite end bins, merged to about `MAX_BINS` bins."""
    edges = np.asarray(counts.edges, dtype=np.float64)
    pairs = np.stack([counts.relevant_counts, counts.irrelevant_counts]).astype(np.int64)  # (kinds, bins)
    bins = pairs.shape[1]
    if bins != len(edges) - 1 or not (np.diff(edges) > 0).all():
        raise InputError(
            f"score_histograms: {counted(bins, 'bin')} {verb(bins, 'needs', 'need')} {bins + 1} ascending edges, but there "
            f"{verb(len(edges), 'is', 'are')} {len(edges)}, or they do not ascend. Pass the PairCounts of a report."
        )
    is_finite = np.isfinite(edges[:-1]) & np.isfinite(edges[1:])
    filled = np.flatnonzero(pairs.any(0) & is_finite)
    if not len(filled):
        raise InputError("score_histograms: no bin of finite width contains a pair. Pass counts of at least one pair.")
    first = filled[0]
    last = filled[-1]
    pairs = pairs[:, first : last + 1]
    edges = edges[first : last + 2]
    bins_to_merge = -(-pairs.shape[1] // MAX_BINS)  # rounded up
    starts = np.arange(0, pairs.shape[1], bins_to_merge)
    relevant, irrelevant = np.add.reduceat(pairs, starts, axis=1)
    return _Histograms(np.append(edges[starts], edges[-1]), relevant, irrelevant)


def _draw_density(
    axes: Axes,
    pairs: Int[np.ndarray, "bins"],
    edges: Float[np.ndarray, "edges"],
    label: str,
    colour: str,
    dashes: LineStyleType,
) -> None:
    """Draw a histogram with area 1, as an outline and a pale fill."""
    density = pairs / max(pairs.sum(), 1) / np.diff(edges)
    axes.stairs(density, edges, color=colour, alpha=0.18, fill=True, linewidth=0)
    axes.stairs(density, edges, color=colour, linestyle=dashes, linewidth=1.5, label=label, baseline=None)


def _density_limits(histograms: _Histograms) -> tuple[float, float]:
    """Return the limits of a logarithmic density axis."""
    shares = [pairs[pairs > 0] / pairs.sum() for pairs in (histograms.relevant, histograms.irrelevant) if pairs.sum()]
    lowest = min(share.min() for share in shares)
    highest = max(share.max() for share in shares)
    bin_width = float(np.diff(histograms.edges).mean())
    bottom = max(lowest, LOWEST_DENSITY * highest) / bin_width / DENSITY_MARGIN
    return bottom, highest / bin_width * DENSITY_MARGIN


def _draw_threshold(axes: Axes, mark: Mark, number: int) -> None:
    """Draw the threshold of an operating point as a vertical line, with its marker near the top."""
    colour, dashes = MARK_STYLES[number % len(MARK_STYLES)]
    low, high = axes.get_xlim()
    is_inside = bool(low <= mark.threshold <= high)
    # A line at NaN is invisible, but it has an entry in the legend.
    x = mark.threshold if is_inside else math.nan
    axes.axvline(x, color=colour, linestyle=dashes, linewidth=1.3, label=_mark_label(mark, "", is_inside=is_inside))
    axes.plot(x, 0.96, style.MARKERS[number % len(style.MARKERS)], color=colour, transform=axes.get_xaxis_transform())


def _draw_point(axes: Axes, mark: Mark, number: int, point: tuple[float, float], words: str) -> None:
    """Draw an operating point on a curve.

    The axes must have their final limits. `words` is a format string of `x` and `y` for the legend.
    """
    x, y = point
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    is_inside = bool(left <= x <= right and bottom <= y <= top)
    if not is_inside:
        # A point at NaN is invisible, but it has an entry in the legend.
        x = y = math.nan
    coordinates = f", {words.format(x=mark.x, y=mark.y)}" if math.isfinite(mark.x + mark.y) else ""
    colour, _ = MARK_STYLES[number % len(MARK_STYLES)]
    axes.plot(
        x,
        y,
        linestyle="none",
        marker=style.MARKERS[number % len(style.MARKERS)],
        markersize=8,
        markeredgecolor="white",
        color=colour,
        label=_mark_label(mark, coordinates, is_inside=is_inside),
        zorder=3,
    )


def _mark_label(mark: Mark, coordinates: str, *, is_inside: bool) -> str:
    threshold = f"threshold {score_text(mark.threshold)}" if math.isfinite(mark.threshold) else "no threshold"
    place = "" if is_inside else ", outside the figure"
    return _legend_label(f"{readable(mark.name)}: {threshold}{coordinates}{place}")


def _legend_label(line: str) -> str:
    """Return a readable line, shortened to the width of the legend."""
    return shorten_readable(line, style.WIDTH - 0.8, style.SMALL)


def _finite_values(series: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    """Return the finite values of each curve; curves without a finite value are left out."""
    curves = {}
    for name, recalls in series.items():
        finite = {k: recall for k, recall in recalls.items() if math.isfinite(recall)}
        if finite:
            curves[name] = finite
    return curves


def _draw_recalls(axes: Axes, name: str, recalls: Mapping[int, float], number: int) -> None:
    """Draw one curve of recall@k; its legend contains the first and the last value."""
    ks = sorted(recalls)
    label = f"{readable(name)}: {recalls[ks[0]]:.3f} at {ks[0]}"
    if len(ks) > 1:
        label += f", {recalls[ks[-1]]:.3f} at {ks[-1]}"
    axes.plot(
        ks,
        [recalls[k] for k in ks],
        color=style.CYCLE[number % len(style.CYCLE)],
        marker=style.MARKERS[number % len(style.MARKERS)],
        markersize=CURVE_POINT if len(ks) > 1 else LONE_POINT,
        label=_legend_label(label),
    )


class _DeviateScale(NamedTuple):
    """An axis of normal deviates, with rates as tick labels."""

    low: float
    high: float
    ticks: list[float]
    names: list[str]


def _deviate_scale(rates: Float[np.ndarray, "thresholds"]) -> _DeviateScale:
    """Return an axis for rates in (0, 1), with ticks at round rates that do not overlap."""
    lowest = rates.min() if len(rates) else 0.01
    highest = rates.max() if len(rates) else 0.5
    below = max((rate for rate in RATES if rate <= lowest), default=RATES[0])
    above = min((rate for rate in RATES if rate >= highest), default=RATES[-1])
    if below == above:
        below = below / 2
        above = (1 + above) / 2
    low = float(ndtri(below))
    high = float(ndtri(above))
    ticks: list[float] = []
    names: list[str] = []
    for rate in reversed(RATES):
        tick = float(ndtri(rate))
        if low <= tick <= high and (not ticks or ticks[-1] - tick > 0.1 * (high - low)):
            ticks.append(tick)
            names.append(_rate_text(rate))
    return _DeviateScale(low, high, ticks, names)


def _rate_text(rate: float) -> str:
    """Return one of `RATES` as a number or as a power of ten."""
    if rate >= 1e-3:
        return f"{rate:g}"
    return "10⁻" + "⁰¹²³⁴⁵⁶⁷⁸⁹"[round(-math.log10(rate))]


def _draw_equal_rates(axes: Axes, x_scale: _DeviateScale, y_scale: _DeviateScale) -> None:
    """Draw the diagonal of equal error rates, if it is inside the axes."""
    low = max(x_scale.low, y_scale.low)
    high = min(x_scale.high, y_scale.high)
    if low < high:
        axes.plot([low, high], [low, high], color=style.GREY, linestyle=":", linewidth=1.0, label="equal error rates")


def _draw_bars(
    names: Sequence[str], values: Sequence[float], descriptions: Sequence[str], title: str, x_label: str
) -> tuple[Figure, Axes]:
    """Return a figure of horizontal bars, with names on the left and descriptions on the right."""
    figure, axes = _new_plot(title, x_label, "", 0)
    figure.set_figheight(1.2 + 0.22 * len(names))
    rows = range(len(names))
    axes.barh(rows, values, height=0.66, color=style.BLUE)
    axes.set_yticks(rows, names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, _axis_end(max(values)))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for row, description in zip(rows, descriptions, strict=True):
        axes.text(
            1.02,
            row,
            description,
            transform=axes.get_yaxis_transform(),
            fontsize=style.SMALL,
            color=style.GREY,
            va="center_baseline",
        )
    return figure, axes


def _axis_end(largest: float) -> float:
    """Return the end of an axis from 0, above the largest value; 1 if all are 0."""
    return 1.05 * largest or 1.0
