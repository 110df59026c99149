"""Any text is drawn with characters of the fonts, and fits its width."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.plots.fitted_text import ELLIPSIS, readable, shorten, width_of, wrap
from fewshot_callbacks.plots.style import encode, house_style, new_figure
from tests.cases import examples


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" two \n\t lines ", "two lines"),
        ("zero\u200bwidth\x07", "zerowidth"),
        ("Ελληνικά кириллица עברית", "Ελληνικά кириллица עברית"),
        ("\U00013000\U00013001", "U+13000 U+13001"),
        ("\ud800", ""),
        (7, "7"),
    ],
)
def test_readable_text_is_one_line_of_characters_that_can_be_seen(text, expected):
    assert readable(text) == expected


@settings(max_examples=examples(15), deadline=None)
@given(st.text(max_size=12))
def test_any_text_is_drawn_without_a_warning(text):
    figure = new_figure(1)
    with house_style():
        figure.text(0.1, 0.5, readable(text))
        figure.text(0.1, 0.1, shorten(text, 0.4, 8))
        encode(figure, resolution=20)


@settings(max_examples=examples(30), deadline=None)
@given(st.text(max_size=80), st.floats(0.3, 2))
def test_shortened_text_fits_and_text_that_fits_is_not_shortened(text, width):
    shortened = shorten(text, width, 8)
    assert width_of(shortened, 8) <= width
    complete = readable(text)
    assert (shortened == complete) == (width_of(complete, 8) <= width)


def test_names_that_differ_at_their_ends_still_differ():
    names = [f"a_long_common_beginning_of_names_{number:03}" for number in range(20)]
    assert len({shorten(name, 1.0, 8) for name in names}) == 20


@settings(max_examples=examples(30), deadline=None)
@given(st.text(max_size=200), st.integers(1, 5))
def test_wrapped_lines_fit_and_lose_nothing_without_an_ellipsis(text, max_lines):
    lines = wrap(text, 1.0, max_lines, 8)
    assert len(lines) <= max_lines
    assert all(width_of(line, 8) <= 1.0 for line in lines)
    if not (lines and lines[-1].endswith(ELLIPSIS)):
        assert "".join(lines).replace(" ", "") == readable(text).replace(" ", "")
