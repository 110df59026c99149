"""Panels of queries and neighbours."""

from itertools import product

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from fewshot_callbacks.plots.panels import Item, Neighbour, PanelRow, retrieval_panels, score_text
from fewshot_callbacks.plots.style import IRRELEVANT, RELEVANT, pixels
from tests.plots.legible import assert_legible, drawn_texts

LONG = "a name that is far too long for the room below a picture, and for the line above the row as well " * 3
NAMES = ["cat", LONG, "日本語", "Ελληνικά", "$x$", "", "tab\tand\nline", "עברית"]


def item(number: int = 0, label: str = "cat") -> Item:
    kinds = [np.full((8, 8, 3), 0.5), np.full((4, 16, 1), 0.2), "a text " * (5 * number), None, np.zeros((300, 90, 3))]
    return Item(kinds[number % len(kinds)], label)


def row(count: int, names=NAMES, caption: str = "AP 0.31, first hit at rank 4") -> PanelRow:
    neighbours = [
        Neighbour(item(number, names[number % len(names)]), 1 / (1 + number), relevant=number % 3 == 0)
        for number in range(count)
    ]
    return PanelRow(item(0, names[count % len(names)]), neighbours, caption)


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, 6), (2, 7), (1, 20), (2, 0)])
def test_all_text_can_be_read(rows, count):
    figure = retrieval_panels([row(count) for _ in range(rows)], "val, epoch 3")
    assert_legible(figure)
    assert_legible(retrieval_panels([row(count, [LONG], LONG)], LONG))
    width, height = figure.get_size_inches()
    assert width == 6
    for frame in figure.axes[0].patches:
        box = frame.get_extents().transformed(figure.dpi_scale_trans.inverted())
        assert 0 <= box.x0 <= box.x1 <= width
        assert 0 <= box.y0 <= box.y1 <= height
    with pytest.raises(ValueError, match="no query to show"):
        retrieval_panels([])


def test_frames_tell_relevance_by_colour_by_dashes_and_by_mark():
    neighbours = [Neighbour(item(3), 0.9, relevant=True), Neighbour(item(3), 0.8, relevant=False)]
    figure = retrieval_panels([PanelRow(item(), neighbours)])
    frames = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle) and not patch.get_fill()]
    assert [to_rgb(frame.get_edgecolor()) for frame in frames[1:]] == [to_rgb(RELEVANT), to_rgb(IRRELEVANT)]
    assert frames[1].get_linestyle() == "-" != frames[2].get_linestyle()
    texts = [text for text, _ in drawn_texts(figure)]
    assert {"1 ✓", "2 ✕", "0.900", "0.800", "no image"} <= set(texts)
    shown = pixels(figure).reshape(-1, 3)
    for colour in (RELEVANT, IRRELEVANT):
        assert (np.abs(shown - 255 * np.array(to_rgb(colour))).max(1) < 1).any()


@pytest.mark.parametrize(("scores", "tied"), [((0.5, 0.5, 0.4), (1, 1, 0)), ((0.5, 0.4, 0.3), (0, 0, 0))])
def test_ties_are_told(scores, tied):
    neighbours = [Neighbour(item(3), score, relevant=False) for score in scores]
    neighbours.append(Neighbour(item(3), 0.25, relevant=False, tied=True))  # with one that is not shown
    texts = [text for text, _ in drawn_texts(retrieval_panels([PanelRow(item(), neighbours)]))]
    for score, is_tied in zip((*scores, 0.25), (*tied, 1), strict=True):
        assert (f"{score:.3f} tie" if is_tied else f"{score:.3f}") in texts


def test_pictures_keep_their_proportions():
    wide, tall = Item(np.zeros((10, 40, 3)), "wide"), Item(np.zeros((40, 10, 1)), "tall")
    figure = retrieval_panels([PanelRow(wide, [Neighbour(tall, 1.0, relevant=True)])])
    for image, ratio in zip(figure.axes[0].images, (4, 0.25), strict=True):
        box = image.get_window_extent()
        assert box.width / box.height == pytest.approx(ratio)


def test_the_first_row_of_a_picture_is_at_the_top():
    picture = np.ones((8, 8, 3))
    picture[:4] = (1, 0, 0)
    figure = retrieval_panels([PanelRow(Item(picture, "flag"), [])])
    box = figure.axes[0].images[0].get_window_extent()
    shown, top = pixels(figure), figure.get_size_inches()[1] * 100
    middle = int((box.x0 + box.x1) / 2)
    assert shown[int(top - box.y1 + 0.25 * box.height), middle].tolist() == [255, 0, 0]
    assert shown[int(top - box.y1 + 0.75 * box.height), middle].tolist() == [255, 255, 255]


@pytest.mark.parametrize(
    ("score", "sign"), product([0.0, 0.123456, 9.9999, 12.34, 9999.9, 1e5, 1e300, np.inf], [1, -1])
)
def test_scores_are_short(score, sign):
    assert len(score_text(sign * score)) <= 9
