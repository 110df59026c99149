"""Whether all text that a figure draws is inside it and apart from all other text."""

from itertools import combinations
from unittest import mock

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

TOUCH = 1.0  # pixels by which the boxes of two texts may overlap, of which the letters fill less


def drawn_texts(figure: Figure, resolution: float = 100) -> list[tuple[str, Bbox]]:
    """The texts that a figure really draws, each with its box in pixels; the ticks out of sight are none of them."""
    found = []
    draw, before = Text.draw, figure.dpi

    def recorded(self, renderer, *args, **kwargs):
        if self.get_visible() and self.get_text().strip():
            found.append((self.get_text(), self.get_window_extent(renderer)))
        return draw(self, renderer, *args, **kwargs)

    figure.set_dpi(resolution)
    try:
        with mock.patch.object(Text, "draw", recorded):
            figure.draw_without_rendering()
    finally:
        figure.set_dpi(before)
    return found


def assert_legible(figure: Figure) -> None:
    """At the resolution of a screen and in print, no text is clipped or covers another."""
    for resolution in (100, 200):
        width, height = figure.get_size_inches() * resolution
        texts = drawn_texts(figure, resolution)
        assert texts
        for text, box in texts:
            assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, f"{text!r} is clipped"
        for (text, box), (other, against) in combinations(texts, 2):
            across = min(box.x1, against.x1) - max(box.x0, against.x0)
            up = min(box.y1, against.y1) - max(box.y0, against.y0)
            assert min(across, up) <= TOUCH, f"{text!r} covers {other!r}"
