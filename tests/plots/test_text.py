"""Text that fits, in characters that the fonts hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.plots.style import ELLIPSIS, encode, house_style, new_figure, readable, shorten, width_of, wrap


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        ("plain", "plain"),
        (" two \n\t lines ", "two lines"),
        ("zero\u200bwidth\x07", "zerowidth"),
        ("$x^2$", r"\$x^2\$"),
        ("Ελληνικά кириллица עברית", "Ελληνικά кириллица עברית"),
        ("cat \U00013000 dog", "cat □ dog"),
        ("\U00013000\U00013001", "U+13000 U+13001"),
        ("\ud800", ""),
        ("", ""),
        (7, "7"),
    ],
)
def test_every_text_is_made_readable(given_text, expected):
    assert readable(given_text) == expected


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=12))
def test_any_text_is_drawn_without_a_warning(text):
    figure = new_figure(1)
    with house_style():
        figure.text(0.1, 0.5, readable(text))
        figure.text(0.1, 0.1, shorten(text, 0.4, 8))
        encode(figure, resolution=50)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=80), st.floats(0.3, 2))
def test_what_is_shortened_fits(text, width):
    short = shorten(text, width, 8)
    assert width_of(short, 8) <= width
    whole = readable(text)
    assert (short == whole) == (width_of(whole, 8) <= width)


def test_names_that_differ_at_their_ends_still_differ():
    names = [f"a_long_common_beginning_of_names_{number:03}" for number in range(20)]
    assert len({shorten(name, 1.0, 8) for name in names}) == 20


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200), st.integers(1, 5))
def test_wrapped_lines_fit_and_lose_nothing_without_an_ellipsis(text, most):
    lines = wrap(text, 1.0, most, 8)
    assert len(lines) <= most
    assert all(width_of(line, 8) <= 1.0 for line in lines)
    if not (lines and lines[-1].endswith(ELLIPSIS)):
        assert "".join(lines).replace(" ", "") == readable(text).replace(" ", "")


def test_words_are_broken_only_where_they_are_longer_than_a_line():
    assert wrap("one two three", 10, 3, 8) == ["one two three"]
    assert wrap("one two three", width_of("one two", 8), 3, 8) == ["one two", "three"]
    assert len(wrap("Donaudampfschifffahrtsgesellschaft", 0.8, 9, 8)) > 1
