"""The band that is drawn around a mean over seeds."""

import math

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from fewshot_callbacks.plots.style import METHODS, draw_band, new_figure

RUNS = np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
REACH = 4.302652729911275 / math.sqrt(3)  # Student's t of 2 degrees of freedom at 0.975, standard deviation 1


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_band_reaches_as_far_as_the_interval(seeds):
    axes = new_figure(2).add_subplot()
    line = draw_band(axes, [10, 20], RUNS[:seeds], METHODS["dr"], marked=True)
    bands = [one for one in axes.collections if isinstance(one, PolyCollection)]
    assert line.get_color() == METHODS["dr"].colour
    assert line.get_ydata().tolist() == RUNS[:seeds].mean(axis=0).tolist()
    if seeds == 1:
        assert not bands
    else:
        (corners,) = (path.vertices for path in bands[0].get_paths())
        at_10 = corners[corners[:, 0] == 10, 1]
        assert (at_10.min(), at_10.max()) == pytest.approx((2 - REACH, 2 + REACH))


def test_a_band_on_a_logarithmic_axis_is_that_of_the_logarithms():
    axes = new_figure(2).add_subplot()
    line = draw_band(axes, [10, 20], np.exp(RUNS), METHODS["dr"], marked=True, logarithmic=True)
    assert line.get_ydata() == pytest.approx(np.exp([2.0, 5.0]))
    (band,) = [one for one in axes.collections if isinstance(one, PolyCollection)]
    (corners,) = (path.vertices for path in band.get_paths())
    at_10 = corners[corners[:, 0] == 10, 1]
    assert (at_10.min(), at_10.max()) == pytest.approx((math.exp(2 - REACH), math.exp(2 + REACH)))
