"""One style whatever the user's is, text that fits, files that are the same each time, and the band over seeds."""

import io
import math

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.image import imread

from fewshot_callbacks.plots import style
from fewshot_callbacks.plots.style import (
    ELLIPSIS,
    METHODS,
    draw_band,
    encode,
    house_style,
    in_house_style,
    new_figure,
    pixels,
    readable,
    save,
    shorten,
    width_of,
    wrap,
)


@in_house_style
def line():
    figure = new_figure(3)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1])
    axes.set_xlabel("steps")
    return figure


def test_a_figure_of_six_inches_has_600_pixels_on_a_screen_and_1200_in_a_file():
    assert pixels(line()).shape == (300, 600, 3)
    assert imread(io.BytesIO(encode(line()))).shape[:2] == (600, 1200)


@pytest.mark.parametrize("file_format", ["png", "svg"])
def test_the_same_figure_gives_the_same_bytes_whatever_the_users_settings_which_are_left_alone(file_format):
    expected = encode(line(), file_format, 50)
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "axes.grid": False, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        assert encode(line(), file_format, 50) == expected
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
    save(line(), tmp_path / name, 50)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_an_unknown_format_is_refused(as_users_run_it):
    with pytest.raises(ValueError, match="png or svg, not as 'pdf'"):
        encode(line(), "pdf")


def test_colours_and_markers_that_mean_something_are_not_shared():
    colours, markers, dashes = zip(*METHODS.values(), strict=True)
    for looks in ((style.RELEVANT, style.IRRELEVANT, *colours), markers, dashes, style.CYCLE, style.MARKERS):
        assert len(set(looks)) == len(looks)
    assert len(style.MARKERS) == 12


@pytest.mark.parametrize(("seeds", "logarithmic"), [(1, False), (3, False), (3, True)])
def test_the_band_reaches_as_far_as_the_interval(seeds, logarithmic):
    """On a logarithmic axis that of the logarithms."""
    runs = np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])[:seeds]
    reach = 4.302652729911275 / math.sqrt(3)  # Student's t of 2 degrees of freedom at 0.975, standard deviation 1
    axes, scale = new_figure(2).add_subplot(), np.exp if logarithmic else np.positive
    line = draw_band(axes, [10, 20], scale(runs), METHODS["dr"], marked=True, logarithmic=logarithmic)
    assert line.get_color() == METHODS["dr"].colour
    assert line.get_ydata() == pytest.approx(scale(runs.mean(axis=0)))
    bands = [one for one in axes.collections if isinstance(one, PolyCollection)]
    assert len(bands) == (seeds > 1)
    for band in bands:
        (corners,) = (path.vertices for path in band.get_paths())
        at_10 = corners[corners[:, 0] == 10, 1]
        assert (at_10.min(), at_10.max()) == pytest.approx((scale(2 - reach), scale(2 + reach)))


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        (" two \n\t lines ", "two lines"),
        ("zero\u200bwidth\x07", "zerowidth"),
        ("Ελληνικά кириллица עברית", "Ελληνικά кириллица עברית"),
        ("\U00013000\U00013001", "U+13000 U+13001"),
        ("\ud800", ""),
        (7, "7"),
    ],
)
def test_every_text_is_made_readable(given_text, expected):
    assert readable(given_text) == expected


@settings(max_examples=15, deadline=None)
@given(st.text(max_size=12))
def test_any_text_is_drawn_without_a_warning(text):
    figure = new_figure(1)
    with house_style():
        figure.text(0.1, 0.5, readable(text))
        figure.text(0.1, 0.1, shorten(text, 0.4, 8))
        encode(figure, resolution=20)


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=80), st.floats(0.3, 2))
def test_what_is_shortened_fits(text, width):
    short = shorten(text, width, 8)
    assert width_of(short, 8) <= width
    whole = readable(text)
    assert (short == whole) == (width_of(whole, 8) <= width)


def test_names_that_differ_at_their_ends_still_differ():
    names = [f"a_long_common_beginning_of_names_{number:03}" for number in range(20)]
    assert len({shorten(name, 1.0, 8) for name in names}) == 20


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=200), st.integers(1, 5))
def test_wrapped_lines_fit_and_lose_nothing_without_an_ellipsis(text, most):
    lines = wrap(text, 1.0, most, 8)
    assert len(lines) <= most
    assert all(width_of(line, 8) <= 1.0 for line in lines)
    if not (lines and lines[-1].endswith(ELLIPSIS)):
        assert "".join(lines).replace(" ", "") == readable(text).replace(" ", "")


def test_a_file_that_the_user_names_is_replaced(tmp_path):
    (tmp_path / "mine.png").write_text("of the user")
    save(new_figure(1), tmp_path / "mine.png")
    assert (tmp_path / "mine.png").read_bytes()[1:4] == b"PNG"
