"""Curves of several seeds as one line: their mean, with its interval as a band."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from fewshot_callbacks.functional.statistics.intervals import student_interval
from fewshot_callbacks.plots.style import MethodStyle

# What a legend calls the band.
BAND = "95 % interval of the mean of {seeds} seeds"


def draw_band(
    axes: Axes,
    steps: Sequence[float],
    runs: Float[np.ndarray, "seeds points"],
    style: MethodStyle,
    *,
    marked: bool,
    logarithmic: bool = False,
) -> Line2D:
    """Draw the mean over seeds, with its 95 % interval around it where there are two seeds or more.

    Args:
        axes: Where to draw.
        steps: The place of each point.
        runs: A curve for each seed.
        style: Of the method.
        marked: Whether each point has a marker.
        logarithmic: Whether mean and interval are those of the logarithms, for a logarithmic axis: a geometric mean.

    Returns:
        The line of the mean, for a legend.
    """
    values = np.log(runs) if logarithmic else runs
    curves = (values.mean(axis=0), *(student_interval(values) if len(runs) > 1 else ()))
    mean, *ends = (np.exp(curve) if logarithmic else curve for curve in curves)
    if ends:
        axes.fill_between(steps, *ends, color=style.colour, alpha=0.2, linewidth=0)
    marker = style.marker if marked else ""
    (line,) = axes.plot(
        steps, mean, color=style.colour, linestyle=style.dashes, marker=marker, markersize=4, markeredgecolor="white",
        markeredgewidth=0.6,
    )  # fmt: skip
    return line
