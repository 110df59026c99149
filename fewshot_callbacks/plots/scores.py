"""Figures of one evaluation: pair scores, curves with operating points, recall@k, and the weakest classes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from matplotlib.typing import LineStyleType
from scipy.special import ndtri

from fewshot_callbacks.functional.retrieval import PairCounts, RetrievalReport
from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.panels import score_text
from fewshot_callbacks.plots.style import in_house_style, new_figure, readable, shorten

HEIGHT = 3.6  # inches of a figure without its legend
LEGEND_LINE = 0.18  # inches
MOST_TICKS = 9  # numbers of four digits do not touch each other on an axis of five inches
# Points: a value that no line leads to must be seen between curves.
LONE_POINT = 9
MOST_BINS = 100  # a bin is five pixels wide in a figure of 600
MARK_STYLES: tuple[tuple[str, LineStyleType], ...] = (
    (style.BLACK, "--"),
    (style.ORANGE, ":"),
    (style.SKY_BLUE, "-."),
    (style.PURPLE, (0, (5, 1, 1, 1, 1, 1))),
)
RATES = (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99, 0.999)


@dataclass(frozen=True)
class Mark:
    """An operating point on a figure; the same index in the list has the same colour and mark in every figure.

    Attributes:
        name: A name such as "best F1" or "precision 0.95".
        threshold: Lowest score at which a pair is accepted; not drawn if it is NaN or infinite.
        x: Its recall, or its false match rate.
        y: Its precision, or its false non-match rate.
    """

    name: str
    threshold: float
    x: float = math.nan
    y: float = math.nan


@dataclass(frozen=True)
class ClassScore:
    """A class and the mean of a metric over its queries."""

    name: str
    value: float
    queries: int


@dataclass(frozen=True)
class Confusion:
    """The number of items of another class that were retrieved for the queries of a class."""

    query: str
    retrieved: str
    count: int


@in_house_style
def score_histograms(counts: PairCounts, marks: Sequence[Mark] = (), title: str = "", *, log: bool = True) -> Figure:
    """Draw the distributions of the scores of relevant and of irrelevant pairs, each with an area of one.

    Args:
        counts: The bins; neighbouring ones are merged where there are more than a hundred.
        marks: Thresholds, as vertical lines.
        title: A line above the figure.
        log: Whether densities are on a logarithmic scale, on which tails can be seen.

    Raises:
        ValueError: If there is no pair, or the edges do not fit the bins or do not ascend.

    Returns:
        A figure of 6 inches in width.

    Examples:
        >>> counts = PairCounts(np.array([0.5]), np.array([3]), np.array([2]), 4, 20,
        ...                     np.array([0.0, 0.5, 1.0]), np.array([1, 3]), np.array([18, 2]))
        >>> float(score_histograms(counts, [Mark("best F1", 0.5)]).get_figwidth())
        6.0
    """
    edges, relevant, irrelevant = _merged(counts)
    figure, axes = _one_plot(title, "score of a pair", "density", 2 + len(marks))
    for name, each, total, colour, dashes in (
        ("irrelevant pairs", irrelevant, counts.irrelevant, style.IRRELEVANT, "--"),
        ("relevant pairs", relevant, counts.relevant, style.RELEVANT, "-"),
    ):
        density = each / max(each.sum(), 1) / np.diff(edges)
        label = f"{name} ({total:,})"
        axes.stairs(density, edges, color=colour, alpha=0.18, fill=True, linewidth=0)
        axes.stairs(density, edges, color=colour, linestyle=dashes, linewidth=1.5, label=label, baseline=None)
    if log:
        axes.set_yscale("log", nonpositive="clip")
        present = [each[each > 0] / each.sum() for each in (relevant, irrelevant) if each.sum()]
        least, most = min(each.min() for each in present), max(each.max() for each in present)
        width = float(np.diff(edges).mean())
        axes.set_ylim(max(least, 1e-7 * most) / width / 2, most / width * 2)
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlim(edges[0], edges[-1])
    for number, mark in enumerate(marks):
        # A mark outside of the axes is drawn at NaN, which shows nothing but keeps its line of the legend.
        colour, line = MARK_STYLES[number % len(MARK_STYLES)]
        inside = bool(edges[0] <= mark.threshold <= edges[-1])
        level = mark.threshold if inside else math.nan
        label = _mark_name(mark, inside=inside)
        axes.axvline(level, color=colour, linestyle=line, linewidth=1.3, label=label)
        axes.plot(
            level, 0.96, style.MARKERS[number % len(style.MARKERS)], color=colour, transform=axes.get_xaxis_transform()
        )
    _legend(figure)
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
    """Draw pooled precision over pooled recall, with the operating points that were chosen.

    Args:
        recall: Recall at each threshold, in any order.
        precision: Precision at the same thresholds; NaN is left out.
        marks: Operating points, x is recall and y precision.
        title: A line above the figure.
        area: The area under the curve, shown in the legend.
        chance: The share of relevant pairs among all, the precision of a random order, drawn as a line.

    Raises:
        ValueError: If there is no threshold.

    Returns:
        A figure of 6 inches in width.

    Examples:
        >>> figure = precision_recall_curve(np.array([0.5, 1.0]), np.array([1.0, 0.8]), [Mark("best F1", 0.4, 1.0, 0.8)])
        >>> float(figure.get_figwidth())
        6.0
    """
    keep = np.isfinite(recall) & np.isfinite(precision)
    if not keep.any():
        raise ValueError("There is no threshold with a precision and a recall to draw.")
    recall, precision = recall[keep], precision[keep]
    # Of one recall the highest precision first, or the line would go up and down in place.
    order = np.lexsort((-precision, recall))
    figure, axes = _one_plot(
        title, "recall of all pairs", "precision of all pairs", 1 + len(marks) + (chance is not None)
    )
    name = "all thresholds" if area is None else f"all thresholds, area {area:.4f}"
    axes.plot(recall[order], precision[order], color=style.BLUE, label=name)
    if chance is not None:
        axes.axhline(chance, color=style.GREY, linestyle=":", linewidth=1.0, label=f"random order: {chance:.3g}")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.04))
    _draw_marks(axes, marks, "recall {x:.3g}, precision {y:.3g}")
    _legend(figure)
    return figure


@in_house_style
def error_tradeoff_curve(
    false_match_rate: Float[np.ndarray, "thresholds"],
    false_non_match_rate: Float[np.ndarray, "thresholds"],
    marks: Sequence[Mark] = (),
    title: str = "",
) -> Figure:
    """Draw the detection error trade-off: rejected relevant pairs over accepted irrelevant ones, on normal deviates.

    Where the scores of both kinds of pairs are normally distributed, the curve is a straight line. Rates of 0 and 1 are
    infinitely far away and are left out (Martin et al., The DET curve in assessment of detection task performance, 1997).

    Args:
        false_match_rate: Accepted share of the irrelevant pairs at each threshold; any order.
        false_non_match_rate: Rejected share of the relevant pairs at the same thresholds.
        marks: Operating points, x is the false match rate and y the false non-match rate.
        title: A line above the figure.

    Raises:
        ValueError: If there is no threshold.

    Returns:
        A figure of 6 inches in width.

    Examples:
        >>> figure = error_tradeoff_curve(np.array([0.001, 0.01, 0.1]), np.array([0.4, 0.2, 0.05]))
        >>> float(figure.get_figwidth())
        6.0
    """
    if not len(false_match_rate):
        raise ValueError("There is no threshold with error rates to draw.")
    drawn = (false_match_rate > 0) & (false_match_rate < 1) & (false_non_match_rate > 0) & (false_non_match_rate < 1)
    matches, rejections = false_match_rate[drawn], false_non_match_rate[drawn]
    order = np.lexsort((-rejections, matches))
    figure, axes = _one_plot(
        title,
        "false match rate: accepted irrelevant pairs",
        "false non-match rate:\nrejected relevant pairs",
        2 + len(marks),
    )
    axes.plot(ndtri(matches[order]), ndtri(rejections[order]), color=style.BLUE, label="all thresholds")
    if not drawn.any():
        axes.text(0.5, 0.5, "no threshold has both kinds of errors", ha="center", transform=axes.transAxes)
    _deviate_axis(axes, "x", matches)
    _deviate_axis(axes, "y", rejections)
    ends = (max(axes.get_xlim()[0], axes.get_ylim()[0]), min(axes.get_xlim()[1], axes.get_ylim()[1]))
    if ends[0] < ends[1]:
        axes.plot(ends, ends, color=style.GREY, linestyle=":", linewidth=1.0, label="both rates equal")
    _draw_marks(axes, marks, "FMR {x:.3g}, FNMR {y:.3g}", deviates=True)
    _legend(figure)
    return figure


@in_house_style
def recall_at_k_curve(series: Mapping[str, Mapping[int, float]], title: str = "") -> Figure:
    """Draw recall@k over k, on a logarithmic scale where k grows more than tenfold.

    A single value is a large point. Where no name has two values, a line below says how to get a curve.

    Args:
        series: Name of a curve -> k -> recall@k, such as {"recall@k": report.at("recall@{k}")}; NaN is left out.
        title: A line above the figure.

    Raises:
        ValueError: If there is no value.

    Returns:
        A figure of 6 inches in width.

    Examples:
        >>> float(recall_at_k_curve({"recall@k": {1: 0.6, 5: 0.8, 10: 0.9}}).get_figwidth())
        6.0
    """
    known = {name: {k: v for k, v in values.items() if math.isfinite(v)} for name, values in series.items()}
    known = {name: values for name, values in known.items() if values}
    if not known:
        raise ValueError("There is no recall@k to draw.")
    axis = "k, the number of neighbours looked at"
    if all(len(values) == 1 for values in known.values()):
        axis += "\nA curve needs several k: metrics=('recall@1', 'recall@5', 'recall@10')."
    figure, axes = _one_plot(title, axis, "recall@k", len(known))
    places = sorted({k for values in known.values() for k in values})
    log = places[-1] > 10 * places[0]
    if log:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(places, nbins=MOST_TICKS))
    axes.xaxis.set_major_formatter(lambda k, _: f"{k:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    for number, (name, values) in enumerate(known.items()):
        ks = sorted(values)
        last = f": {values[ks[0]]:.3f} at {ks[0]}" + (f", {values[ks[-1]]:.3f} at {ks[-1]}" if len(ks) > 1 else "")
        colour, marker = style.CYCLE[number % len(style.CYCLE)], style.MARKERS[number % len(style.MARKERS)]
        label = _legend_name(readable(name) + last)
        size = 5 if len(ks) > 1 else LONE_POINT
        axes.plot(ks, [values[k] for k in ks], color=colour, marker=marker, markersize=size, label=label)
    least = min(min(values.values()) for values in known.values())
    axes.set_ylim(-0.02 if least < 0.5 else max(-0.02, least - 0.1 * (1.05 - least)), 1.02)
    _legend(figure)
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
    """Draw the classes with the lowest values as horizontal bars, the weakest at the top.

    Args:
        classes: All classes, in any order; those whose value is NaN are left out.
        title: A line above the figure.
        metric: Name of the values, which lie in [0, 1].
        overall: The mean over all classes, drawn as a line.
        most: Largest number of bars.

    Raises:
        ValueError: If no class has a value.

    Returns:
        A figure of 6 inches in width.

    Examples:
        >>> figure = weakest_classes([ClassScore("owl", 0.9, 12), ClassScore("heron", 0.3, 8)], overall=0.66)
        >>> float(figure.get_figwidth())
        6.0
    """
    known = sorted((each for each in classes if math.isfinite(each.value)), key=lambda each: (each.value, each.name))
    if not known:
        raise ValueError("There is no class with a value to draw.")
    shown = known[:most]
    described = [f"{each.value:.2f}, {each.queries:,} {'query' if each.queries == 1 else 'queries'}" for each in shown]
    names = [shorten(each.name, 0.3 * style.WIDTH, style.SMALL) for each in shown]
    axis = f"{readable(metric)} of the {len(shown)} weakest of {len(known)} classes"
    figure, axes = _bars(names, [each.value for each in shown], described, title, axis)
    if overall is not None and math.isfinite(overall):
        axes.set_xlim(0, 1.05 * max(overall, shown[-1].value) or 1.0)
        axes.axvline(
            overall, color=style.GREY, linestyle=":", linewidth=1.2, label=f"all queries: {overall:.3f}", zorder=0
        )
        _legend(figure)
    return figure


@in_house_style
def confused_classes(confusions: Sequence[Confusion], title: str = "", *, most: int = 15) -> Figure:
    """Draw the pairs of classes that are confused most often as horizontal bars, the most frequent at the top.

    Args:
        confusions: Pairs in any order.
        title: A line above the figure.
        most: Largest number of bars.

    Raises:
        ValueError: If there is no pair.

    Returns:
        A figure of 6 inches in width.

    Examples:
        >>> float(confused_classes([Confusion("owl", "heron", 5), Confusion("heron", "owl", 2)]).get_figwidth())
        6.0
    """
    if not confusions:
        raise ValueError("There is no confused pair of classes to draw.")
    shown = sorted(confusions, key=lambda each: (-each.count, each.query, each.retrieved))[:most]
    names = [
        " → ".join(shorten(name, 0.19 * style.WIDTH, style.SMALL) for name in (each.query, each.retrieved))
        for each in shown
    ]
    counts = [each.count for each in shown]
    figure, axes = _bars(names, counts, [f"{count:,}" for count in counts], title, "irrelevant items retrieved")
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
    figure.supxlabel(
        "class of the query → class of the item retrieved", x=0.02, ha="left", fontsize=style.SMALL, color=style.GREY
    )
    return figure


def operating_marks(report: RetrievalReport) -> tuple[list[Mark], list[Mark]]:
    """List the operating points of a report: by recall and precision, and by false match and false non-match rate."""
    counts = report.pair_counts
    pooled = {f"decision, F1 {report.decision.f1:.3g}": report.decision}
    pooled |= {f"precision {precision:g}": point for precision, point in report.at_precision.items()}
    marks = [Mark(name, point.threshold, point.recall, point.precision) for name, point in pooled.items()]
    errors = [
        Mark(name, point.threshold, point.false_positives / (counts.irrelevant or math.nan), 1 - point.recall)
        for name, point in pooled.items()
    ]
    for rate, at in report.at_false_match_rate.items():
        accepted, wrong = (1 - at.false_non_match_rate) * counts.relevant, at.false_match_rate * counts.irrelevant
        precision = accepted / (accepted + wrong) if accepted + wrong else math.nan
        marks.append(Mark(f"FMR {rate:g}", at.threshold, 1 - at.false_non_match_rate, precision))
        errors.append(Mark(f"FMR {rate:g}", at.threshold, at.false_match_rate, at.false_non_match_rate))
    return marks, errors


def _one_plot(title: str, x: str, y: str, entries: int) -> tuple[Figure, Axes]:
    figure = new_figure(HEIGHT + LEGEND_LINE * entries)
    style.entitle(figure, title)
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    return figure, axes


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside lower left", handlelength=2.6)


def _legend_name(words: str) -> str:
    return shorten(words.replace(r"\$", "$"), style.WIDTH - 0.8, style.SMALL)


def _mark_name(mark: Mark, told: str = "", *, inside: bool) -> str:
    threshold = f"threshold {score_text(mark.threshold)}" if math.isfinite(mark.threshold) else "no threshold"
    return _legend_name(f"{readable(mark.name)}: {threshold}{told}{'' if inside else ', outside'}")


def _draw_marks(axes: Axes, marks: Sequence[Mark], words: str, *, deviates: bool = False) -> None:
    for number, mark in enumerate(marks):
        place = (float(ndtri(mark.x)), float(ndtri(mark.y))) if deviates else (mark.x, mark.y)
        inside = all(
            low <= value <= high for value, (low, high) in zip(place, (axes.get_xlim(), axes.get_ylim()), strict=True)
        )
        told = f", {words.format(x=mark.x, y=mark.y)}" if math.isfinite(mark.x + mark.y) else ""
        axes.plot(
            *(place if inside else (math.nan, math.nan)),
            linestyle="none",
            marker=style.MARKERS[number % len(style.MARKERS)],
            markersize=8,
            markeredgecolor="white",
            color=MARK_STYLES[number % len(MARK_STYLES)][0],
            label=_mark_name(mark, told, inside=inside),
            zorder=3,
        )


def _deviate_axis(axes: Axes, name: str, rates: Float[np.ndarray, "thresholds"]) -> None:
    """Scale an axis to the rates, with ticks at round shares that are far enough from each other."""
    low, high = (rates.min(), rates.max()) if len(rates) else (0.01, 0.5)
    below = max((rate for rate in RATES if rate <= low), default=RATES[0])
    above = min((rate for rate in RATES if rate >= high), default=RATES[-1])
    if below == above:
        below, above = below / 2, (1 + above) / 2
    ends = float(ndtri(below)), float(ndtri(above))
    ticks: list[float] = []
    for rate in reversed(RATES):
        place = float(ndtri(rate))
        if ends[0] <= place <= ends[1] and (not ticks or ndtri(ticks[-1]) - place > 0.1 * (ends[1] - ends[0])):
            ticks.append(rate)
    (axes.set_xlim if name == "x" else axes.set_ylim)(*ends)
    (axes.set_xticks if name == "x" else axes.set_yticks)(
        [float(ndtri(rate)) for rate in ticks], [_share(rate) for rate in ticks]
    )


def _share(rate: float) -> str:
    return f"{rate:g}" if rate >= 1e-3 else "10⁻" + "⁰¹²³⁴⁵⁶⁷⁸⁹"[round(-math.log10(rate))]


def _merged(counts: PairCounts) -> tuple[Float[np.ndarray, "edges"], Int[np.ndarray, "bins"], Int[np.ndarray, "bins"]]:
    """Edges and counts without the empty bins at the ends and in at most a hundred bins or so."""
    edges = np.asarray(counts.edges, dtype=np.float64)
    both = np.stack([counts.relevant_counts, counts.irrelevant_counts]).astype(np.int64)
    if both.shape[1] != len(edges) - 1 or not (np.diff(edges) > 0).all():
        raise ValueError(f"{both.shape[1]} bins need {both.shape[1] + 1} ascending edges; there are {len(edges)}.")
    finite = np.isfinite(edges[:-1]) & np.isfinite(edges[1:])
    used = np.flatnonzero(both.any(0) & finite)
    if not len(used):
        raise ValueError("There is no pair in any bin of finite width.")
    first, last = used[0], used[-1] + 1
    both, edges = both[:, first:last], edges[first : last + 1]
    starts = np.arange(0, both.shape[1], -(-both.shape[1] // MOST_BINS))
    merged = np.add.reduceat(both, starts, axis=1)
    return np.append(edges[starts], edges[-1]), merged[0], merged[1]


def _bars(
    names: list[str], values: Sequence[float], described: list[str], title: str, axis: str
) -> tuple[Figure, Axes]:
    """Draw horizontal bars from above, each with a name on its left and a description on the right of all."""
    figure, axes = _one_plot(title, axis, "", 0)
    figure.set_figheight(1.2 + 0.22 * len(names))
    places = range(len(names))
    axes.barh(places, values, height=0.66, color=style.BLUE)
    axes.set_yticks(places, names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.05 * max(values) or 1.0)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for place, text in zip(places, described, strict=True):
        axes.text(
            1.02,
            place,
            text,
            transform=axes.get_yaxis_transform(),
            fontsize=style.SMALL,
            color=style.GREY,
            va="center_baseline",
        )
    return figure, axes
