"""One style whatever the user's is, files that are the same each time, and the band over seeds."""

import io
import math

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.image import imread

from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.style import (
    METHODS,
    draw_band,
    encode,
    entitle,
    house_style,
    in_house_style,
    new_figure,
    pixels,
    save,
)
from tests.messages import refused
from tests.plots.legibility import drawn_texts


@in_house_style
def line_plot():
    figure = new_figure(3)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1])
    axes.set_xlabel("steps")
    return figure


def test_a_figure_of_six_inches_has_600_pixels_on_a_screen_and_1200_in_a_file():
    assert pixels(line_plot()).shape == (300, 600, 3)
    assert imread(io.BytesIO(encode(line_plot()))).shape[:2] == (600, 1200)


@pytest.mark.parametrize("file_format", ["png", "svg"])
def test_the_same_figure_gives_the_same_bytes_whatever_the_users_settings_which_are_left_alone(file_format):
    expected = encode(line_plot(), file_format, 50)
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "axes.grid": False, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        assert encode(line_plot(), file_format, 50) == expected
        assert dict(matplotlib.rcParams) == before


def test_a_logger_that_draws_without_the_style_draws_the_same():
    figure = line_plot()
    figure.canvas.draw()
    with house_style():
        other = line_plot()
        other.canvas.draw()
    assert np.array_equal(figure.canvas.buffer_rgba(), other.canvas.buffer_rgba())


@pytest.mark.parametrize(("name", "start"), [("figure.png", b"\x89PNG"), ("figure.SVG", b"<?xml")])
def test_the_name_of_the_file_chooses_the_format(tmp_path, name, start):
    save(line_plot(), tmp_path / name, 50)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_format_other_than_png_and_svg_is_refused(as_users_run_it):
    with refused(ValueError, "png", "svg", "'pdf'"):
        encode(line_plot(), "pdf")


def test_no_two_methods_or_curves_share_a_colour_a_marker_or_dashes():
    colours, markers, dashes = zip(*METHODS.values(), strict=True)
    for looks in ((style.RELEVANT, style.IRRELEVANT, *colours), markers, dashes, style.CYCLE, style.MARKERS):
        assert len(set(looks)) == len(looks)
    assert len(style.MARKERS) == 12


@pytest.mark.parametrize(("seeds", "logarithmic"), [(1, False), (3, False), (3, True)])
def test_the_band_is_the_interval_of_the_values_or_of_their_logarithms(seeds, logarithmic):
    runs = np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])[:seeds]
    reach = 4.302652729911275 / math.sqrt(3)  # Student's t of 2 degrees of freedom at 0.975, standard deviation 1
    axes = new_figure(2).add_subplot()
    scale = np.exp if logarithmic else np.positive
    line = draw_band(axes, [10, 20], scale(runs), METHODS["dr"], marked=True, logarithmic=logarithmic)
    assert line.get_color() == METHODS["dr"].colour
    assert line.get_ydata() == pytest.approx(scale(runs.mean(axis=0)))
    bands = [area for area in axes.collections if isinstance(area, PolyCollection)]
    assert len(bands) == (seeds > 1)
    for band in bands:
        [path] = band.get_paths()
        corners = path.vertices
        at_10 = corners[corners[:, 0] == 10, 1]
        assert (at_10.min(), at_10.max()) == pytest.approx((scale(2 - reach), scale(2 + reach)))


@pytest.mark.parametrize("width", [2.0, 6.0, 9.0])
def test_a_title_fits_its_figure_and_fills_it(width):
    figure = new_figure(1, width)
    with house_style():
        entitle(figure, "a title that is far too long for its figure " * 6)
    [(_, box)] = drawn_texts(figure)
    assert box.x0 >= 0
    assert (width - 0.5) * 100 < box.x1 <= width * 100


def test_save_replaces_an_existing_file(tmp_path):
    (tmp_path / "mine.png").write_text("of the user")
    save(new_figure(1), tmp_path / "mine.png")
    assert (tmp_path / "mine.png").read_bytes()[1:4] == b"PNG"
