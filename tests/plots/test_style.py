"""One style whatever the user's is, off-screen, files that are the same each time, and the band around a mean over seeds."""

import io
import math

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.style import (
    METHODS,
    draw_band,
    encode,
    house_style,
    in_house_style,
    new_figure,
    pixels,
    save,
)
from tests.plots.legible import assert_legible, drawn_texts


@in_house_style
def line(label: str = "steps"):
    figure = new_figure(3)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1])
    axes.set_xlabel(label)
    return figure


def test_a_figure_of_six_inches_has_600_pixels_on_a_screen_and_1200_in_a_file():
    assert pixels(line()).shape == (300, 600, 3)
    assert imread(io.BytesIO(encode(line()))).shape[:2] == (600, 1200)
    assert imread(io.BytesIO(encode(line(), resolution=100))).shape[:2] == (300, 600)


@pytest.mark.parametrize("file_format", ["png", "svg"])
def test_the_same_figure_gives_the_same_bytes(file_format):
    assert encode(line(), file_format) == encode(line(), file_format)


def test_the_users_settings_change_nothing_and_are_left_alone():
    expected = encode(line(), "svg")
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "axes.grid": False, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        assert encode(line(), "svg") == expected
        assert dict(matplotlib.rcParams) == before


def test_a_logger_that_draws_without_the_style_draws_the_same():
    figure = line()
    figure.canvas.draw()
    with house_style():
        other = line()
        other.canvas.draw()
    assert np.array_equal(figure.canvas.buffer_rgba(), other.canvas.buffer_rgba())


@pytest.mark.parametrize(("name", "start"), [("figure.png", b"\x89PNG"), ("figure.SVG", b"<?xml")])
def test_the_name_of_the_file_chooses_the_format(tmp_path, name, start):
    save(line(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_an_unknown_format_is_refused(as_users_run_it):
    with pytest.raises(ValueError, match="png or svg, not as 'pdf'"):
        encode(line(), "pdf")


def test_colours_that_mean_something_are_not_shared():
    meanings = [style.RELEVANT, style.IRRELEVANT, *(method.colour for method in style.METHODS.values())]
    assert len(set(meanings)) == len(meanings)
    assert len(set(style.CYCLE)) == len(style.CYCLE)
    assert len(set(style.MARKERS)) == len(style.MARKERS) == 12


VISION = {  # what is left of linear red, green and blue: Machado, Oliveira and Fernandes 2009, severity 1; grey: Rec. 709
    "full": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "grey": np.array([[0.2126, 0.7152, 0.0722]] * 3),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, vision: np.ndarray) -> np.ndarray:
    """CIELAB of a colour as it is seen."""
    value = np.array(to_rgb(colour))
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    ratios = TO_XYZ @ (vision @ linear).clip(0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(ratios > (6 / 29) ** 3, np.cbrt(ratios), ratios / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", VISION)
def test_methods_can_be_told_apart(sight):
    """By their colours with any sight, by these or by markers and dashes in grey."""
    methods = list(style.METHODS.values())
    for place, one in enumerate(methods):
        assert lab(one.colour, VISION[sight])[0] < 75  # dark enough for a line on white
        for other in methods[:place]:
            distance = np.linalg.norm(lab(one.colour, VISION[sight]) - lab(other.colour, VISION[sight]))
            assert distance > (15 if sight != "grey" else 5)
            assert one.marker != other.marker
            assert one.dashes != other.dashes


def test_the_check_of_legibility_can_fail():
    figure = line()
    assert_legible(figure)
    figure.text(0.5, 0.5, "one")
    figure.text(0.5, 0.5, "over the other")
    with pytest.raises(AssertionError, match="covers"):
        assert_legible(figure)
    figure = line()
    figure.text(0.95, 0.5, "far too long for the room on the right")
    with pytest.raises(AssertionError, match="clipped"):
        assert_legible(figure)
    assert "steps" in [text for text, _ in drawn_texts(line())]


RUNS = np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
REACH = 4.302652729911275 / math.sqrt(3)  # Student's t of 2 degrees of freedom at 0.975, standard deviation 1


@pytest.mark.parametrize(("seeds", "logarithmic"), [(1, False), (3, False), (3, True)])
def test_the_band_reaches_as_far_as_the_interval(seeds, logarithmic):
    """On a logarithmic axis that of the logarithms."""
    axes, scale = new_figure(2).add_subplot(), np.exp if logarithmic else np.positive
    line = draw_band(axes, [10, 20], scale(RUNS[:seeds]), METHODS["dr"], marked=True, logarithmic=logarithmic)
    assert line.get_color() == METHODS["dr"].colour
    assert line.get_ydata() == pytest.approx(scale(RUNS[:seeds].mean(axis=0)))
    bands = [one for one in axes.collections if isinstance(one, PolyCollection)]
    assert len(bands) == (seeds > 1)
    for band in bands:
        (corners,) = (path.vertices for path in band.get_paths())
        at_10 = corners[corners[:, 0] == 10, 1]
        assert (at_10.min(), at_10.max()) == pytest.approx((scale(2 - REACH), scale(2 + REACH)))
