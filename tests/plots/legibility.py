"""Checks that all text of a figure can be read: it is inside the figure, and no text covers another."""

from itertools import combinations
from unittest import mock

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

ALLOWED_OVERLAP = 1.0  # pixels; the letters of a text fill less than its box


def drawn_texts(figure: Figure, resolution: float = 100) -> list[tuple[str, Bbox]]:
    """Return the texts that a figure really draws, each with its box in pixels; ticks out of sight are not among them."""
    texts = []
    draw = Text.draw
    original_resolution = figure.dpi

    def record_and_draw(self, renderer, *args, **kwargs):
        if self.get_visible() and self.get_text().strip():
            texts.append((self.get_text(), self.get_window_extent(renderer)))
        return draw(self, renderer, *args, **kwargs)

    figure.set_dpi(resolution)
    try:
        with mock.patch.object(Text, "draw", record_and_draw):
            figure.draw_without_rendering()
    finally:
        figure.set_dpi(original_resolution)
    return texts


def assert_legible(figure: Figure) -> None:
    """Assert that no text is clipped or covers another, at the resolution of a screen and in print."""
    for resolution in (100, 200):
        width, height = figure.get_size_inches() * resolution
        texts = drawn_texts(figure, resolution)
        assert texts
        for text, box in texts:
            assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, f"{text!r} is clipped"
        for (text, box), (other_text, other_box) in combinations(texts, 2):
            horizontal = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
            vertical = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
            assert min(horizontal, vertical) <= ALLOWED_OVERLAP, f"{text!r} covers {other_text!r}"
