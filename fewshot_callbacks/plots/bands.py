"""Curves of several seeds as one line: their mean, with its interval as a band."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from scipy import stats

from fewshot_callbacks.plots.style import MethodStyle

BAND = "95 % interval of the mean of {seeds} seeds"
"""What a legend calls the band."""


def interval_over_seeds(
    runs: Float[np.ndarray, "seeds points"],
) -> tuple[Float[np.ndarray, "points"], Float[np.ndarray, "points"]]:
    """Compute the mean over seeds at each point, and half the width of its 95 % interval by Student's t.

    Args:
        runs: a curve for each seed, without NaN.

    Returns:
        The mean, and what the interval reaches to either side: NaN with a single seed.

    Examples:
        >>> mean, reach = interval_over_seeds(np.array([[1.0, 2.0], [3.0, 2.0]]))
        >>> mean.tolist(), reach.round(2).tolist()
        ([2.0, 2.0], [12.71, 0.0])
    """
    seeds = len(runs)
    if seeds < 2:
        return runs.mean(axis=0), np.full(runs.shape[1], math.nan)
    error = runs.std(axis=0, ddof=1) / math.sqrt(seeds)
    return runs.mean(axis=0), stats.t.ppf(0.975, seeds - 1) * error


def draw_band(
    axes: Axes, steps: Sequence[float], runs: Float[np.ndarray, "seeds points"], style: MethodStyle, *, marked: bool
) -> Line2D:
    """Draw the mean over seeds, with its 95 % interval around it where there are two seeds or more.

    Args:
        axes: where to draw.
        steps: the place of each point.
        runs: a curve for each seed.
        style: of the method.
        marked: whether each point has a marker.

    Returns:
        The line of the mean, for a legend.
    """
    mean, reach = interval_over_seeds(runs)
    if len(runs) > 1:
        axes.fill_between(steps, mean - reach, mean + reach, color=style.colour, alpha=0.2, linewidth=0)
    marker = style.marker if marked else ""
    (line,) = axes.plot(
        steps, mean, color=style.colour, linestyle=style.dashes, marker=marker, markersize=4, markeredgecolor="white",
        markeredgewidth=0.6,
    )  # fmt: skip
    return line
