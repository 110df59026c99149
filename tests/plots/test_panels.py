"""Images of every kind as pictures, and panels of queries and neighbours."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from PIL import Image

from fewshot_callbacks.plots.panels import Item, Neighbour, PanelRow, retrieval_panels, to_picture
from fewshot_callbacks.plots.style import IRRELEVANT, RELEVANT, pixels
from tests.cases import examples
from tests.messages import refused
from tests.plots.legibility import assert_legible, drawn_texts


def test_bytes_of_a_tensor_and_of_an_array_are_the_same_picture():
    image = torch.randint(256, (3, 5, 7), dtype=torch.uint8)
    last = image.permute(1, 2, 0).numpy()
    picture = to_picture(image)
    assert picture.dtype == np.float32
    np.testing.assert_allclose(picture, last / 255, atol=1e-6)
    for same in (last, image.numpy(), Image.fromarray(last)):
        np.testing.assert_array_equal(to_picture(same), picture)


@pytest.mark.parametrize(
    ("image", "shown"),
    [
        (
            torch.tensor([[0.25, 0.5], [0.5, 0.75]], dtype=torch.bfloat16, requires_grad=True),
            [[0.25, 0.5], [0.5, 0.75]],
        ),
        (np.array([[0.1, np.nan], [np.inf, 0.9]]), [[0.1, 0.5], [0.5, 0.9]]),
        (np.array([[-1.0, 0.0], [1.0, 3.0]]), [[0, 0.25], [0.5, 1]]),
        (np.array([[0, 4095]], dtype=np.uint16), [[0, 1]]),
        *((np.full((2, 2), value), np.full((2, 2), grey)) for value, grey in ((0.3, 0.3), (-7, 0.5), (np.nan, 0.5))),
    ],
    ids=["fractions", "not finite", "stretched", "large whole numbers", "a fraction", "constant", "nothing finite"],
)
def test_fractions_stay_and_other_values_are_stretched_and_values_that_are_not_finite_are_grey(image, shown):
    np.testing.assert_allclose(to_picture(image)[..., 0], shown, atol=1e-6)


def test_two_channels_are_shown_as_grey_and_more_than_four_as_the_first_three():
    image = torch.rand(12, 6, 6)
    np.testing.assert_allclose(to_picture(image[:2]), image[:2].mean(0)[..., None], atol=1e-6)
    np.testing.assert_allclose(to_picture(image), image[:3].permute(1, 2, 0), atol=1e-6)
    np.testing.assert_allclose(to_picture(image[:5]), image[:3].permute(1, 2, 0), atol=1e-6)


def test_transparent_pixels_lie_on_white():
    image = torch.tensor([0.2, 0.4, 0.6, 0.5])[:, None, None]
    np.testing.assert_allclose(to_picture(image)[0, 0], [0.6, 0.7, 0.8], atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_a_normalisation_is_undone(scale):
    image = torch.rand(3, 4, 4) * scale
    mean = torch.tensor([0.4, 0.5, 0.6]) * scale
    std = [0.2 * scale, 0.3, 0.1]
    normalised = (image - mean[:, None, None]) / torch.tensor(std)[:, None, None]
    np.testing.assert_allclose(to_picture(normalised, mean, std), image.permute(1, 2, 0) / scale, atol=1e-5)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16", "HSV"])
def test_images_of_every_mode_of_pillow_are_shown(mode):
    picture = to_picture(Image.new(mode, (5, 3)))
    assert picture.shape in ((3, 5, 1), (3, 5, 3))


def test_a_large_image_is_reduced_by_means_of_pixels():
    image = np.zeros((1000, 400))
    image[::2] = 1
    np.testing.assert_array_equal(to_picture(image), np.full((250, 100, 1), 0.5, np.float32), strict=True)


KINDS = st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_])


@settings(max_examples=examples(50))
@given(arrays.arrays(KINDS, arrays.array_shapes(min_dims=2, max_dims=3, max_side=6)))
def test_every_array_becomes_a_picture_between_black_and_white(image):
    picture = to_picture(image)
    assert picture.ndim == 3
    assert picture.shape[-1] in (1, 3)
    assert 0 <= picture.min() <= picture.max() <= 1


@pytest.mark.parametrize("image", [torch.rand(3), torch.rand(2, 3, 4, 4), torch.rand(3, 0, 4), torch.rand(2, 2) + 1j])
def test_tensors_that_are_no_image_are_refused(image):
    with refused(ValueError, "height", "width", "channels", tuple(image.shape)):
        to_picture(image)


def test_a_normalisation_of_other_channels_is_refused():
    with refused(ValueError, "mean", 3, "1 channels"):
        to_picture(torch.rand(1, 4, 4), mean=(0.5, 0.5, 0.5))


LONG = "a name that is far too long for the room below a picture, and for the line above the row as well " * 3
NAMES = ["cat", LONG, "日本語", "Ελληνικά", "$x$", "", "tab\tand\nline", "עברית"]


def item(number: int = 0, label: str = "cat") -> Item:
    kinds = [np.full((8, 8, 3), 0.5), np.full((4, 16, 1), 0.2), "a text " * (5 * number), None, np.zeros((300, 90, 3))]
    return Item(kinds[number % len(kinds)], label)


def row(count: int, names: list[str], remark: str) -> PanelRow:
    neighbours = [
        Neighbour(item(number, names[number % len(names)]), 1 / (1 + number), relevant=number % 3 == 0)
        for number in range(count)
    ]
    return PanelRow(item(0, names[count % len(names)]), neighbours, remark)


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, 7), (1, 13), (2, 0)])
def test_all_text_of_the_panels_can_be_read(rows, count):
    figure = retrieval_panels(rows * [row(count, NAMES, "AP 0.31, first hit at rank 4")], "val, epoch 3")
    assert_legible(figure)
    assert_legible(retrieval_panels([row(count, [LONG], LONG)], LONG))
    width, height = figure.get_size_inches()
    assert width == 6
    for frame in figure.axes[0].patches:
        box = frame.get_extents().transformed(figure.dpi_scale_trans.inverted())
        assert 0 <= box.x0 <= box.x1 <= width
        assert 0 <= box.y0 <= box.y1 <= height


def test_panels_without_a_row_are_refused():
    with refused(ValueError, "query", "row"):
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


def test_scores_that_are_tied_are_marked():
    neighbours = [Neighbour(item(3), score, relevant=False) for score in (0.5, 0.5, 0.4)]
    neighbours.append(Neighbour(item(3), 0.25, relevant=False, tied=True))  # with one that is not shown
    texts = [text for text, _ in drawn_texts(retrieval_panels([PanelRow(item(), neighbours)]))]
    assert [text for text in texts if text.startswith("0.")] == ["0.500 tie", "0.500 tie", "0.400", "0.250 tie"]


def test_pictures_keep_their_proportions_and_their_first_row_is_at_the_top():
    flag = np.ones((8, 8, 3))
    flag[:4] = (1, 0, 0)
    neighbours = [Neighbour(Item(np.zeros(shape), ""), 1.0, relevant=True) for shape in ((10, 40, 3), (40, 10, 1))]
    figure = retrieval_panels([PanelRow(Item(flag, "flag"), neighbours)])
    boxes = [image.get_window_extent() for image in figure.axes[0].images]
    assert [box.width / box.height for box in boxes] == pytest.approx([1, 4, 0.25])
    shown, top, box = pixels(figure), figure.get_size_inches()[1] * 100, boxes[0]
    middle = int((box.x0 + box.x1) / 2)
    assert shown[int(top - box.y1 + 0.25 * box.height), middle].tolist() == [255, 0, 0]
    assert shown[int(top - box.y1 + 0.75 * box.height), middle].tolist() == [255, 255, 255]
