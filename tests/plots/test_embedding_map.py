"""The embedding as a map."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fewshot_callbacks.plots.embedding_map import Projection, embedding_map, project
from fewshot_callbacks.plots.style import LIGHT_GREY
from tests.plots.legible import assert_legible, drawn_texts

LONG = "a name that is far too long for its room, whatever room that may be " * 4
NAMES = ["cat", LONG, "日本語", "Ελληνικά", "$x$", "tab\tand\nline", "עברית", "dog", "", "wolf", "hare", "owl", "newt"]


def blobs(classes: int, spread: float = 0.3, items: int = 120) -> Projection:
    drawn = np.random.default_rng(0)
    labels = np.arange(items) % classes
    angles = 2 * np.pi * labels / classes
    return project(10 * np.stack([np.cos(angles), np.sin(angles)], 1) + spread * drawn.normal(size=(items, 2)), labels)


@pytest.mark.parametrize(("classes", "spread"), [(1, 0.0), (2, 20.0), (5, 0.3), (12, 0.0), (13, 20.0), (100, 0.3)])
def test_all_text_can_be_read(classes, spread):
    assert_legible(embedding_map(blobs(classes, spread), dict(enumerate(NAMES)), LONG))


def test_every_item_is_drawn_and_every_named_class_looks_different():
    figure = embedding_map(blobs(100, items=1000))
    *named, rest = figure.axes[0].collections
    assert len(named) == 12
    assert sum(len(each.get_offsets()) for each in (rest, *named)) == 1000
    assert to_hex(rest.get_facecolor()[0]) == LIGHT_GREY.lower()
    looks = {(to_hex(each.get_facecolor()[0]), each.get_paths()[0].vertices.tobytes()) for each in named}
    assert len(looks) == 12
    assert "88 other classes" in [text for text, _ in drawn_texts(figure)]


def test_the_largest_classes_are_named_or_those_that_are_asked_for():
    labels = np.repeat(["a", "b", "c"], [3, 20, 10])
    map_ = project(np.random.default_rng(0).normal(size=(33, 4)), labels)
    named = {text for text, _ in drawn_texts(embedding_map(map_, most=2))}
    assert {"b", "c", "1 other class"} <= named
    assert "a" not in named
    named = {text for text, _ in drawn_texts(embedding_map(map_, {"a": "ant"}, highlighted=["a"]))}
    assert {"ant", "2 other classes"} <= named
    assert "b" not in named
    assert_legible(embedding_map(map_, highlighted=["nowhere", "a", "a"]))


@pytest.mark.parametrize("items", [1, 2, 3])
def test_few_items(items):
    assert_legible(embedding_map(project(np.eye(3)[:items], np.arange(items))))


@pytest.mark.parametrize("value", [0.0, 7.0, np.nan])
def test_embeddings_that_are_one_vector_or_none(value):
    figure = embedding_map(project(np.full((9, 4), value), np.arange(9) % 2), title="epoch 1")
    assert_legible(figure)
    told = " ".join(text for text, _ in drawn_texts(figure))
    assert ("not finite" if np.isnan(value) else "same vector") in told


def test_notes_and_axes_are_written():
    first = blobs(4)
    second = project(np.random.default_rng(1).normal(size=(9, 3)), np.arange(9) + 50, first, ids=np.arange(9) + 500)
    figure = embedding_map(second)
    assert_legible(figure)
    told = " ".join(text for text, _ in drawn_texts(figure))
    assert "not aligned" in told
    assert "% of the variance" in told


def test_tsne_shows_no_numbers():
    figure = embedding_map(project(np.random.default_rng(0).normal(size=(30, 4)), np.zeros(30, int), method="tsne"))
    texts = {text for text, _ in drawn_texts(figure)}
    assert texts == {"first axis of t-SNE, without unit", "second axis of t-SNE, without unit", "0"}


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="no item to draw"):
        embedding_map(Projection(np.zeros((0, 2)), np.zeros(0), np.zeros(0)))
    for most in (0, 13):
        with pytest.raises(ValueError, match=f"most is {most}"):
            embedding_map(blobs(2), most=most)
