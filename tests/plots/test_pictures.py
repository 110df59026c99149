"""Images of every kind as pictures."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from fewshot_callbacks.plots.panels import to_picture


def test_bytes_of_a_tensor_and_of_an_array_are_the_same_picture():
    image = torch.randint(256, (3, 5, 7), dtype=torch.uint8)
    picture = to_picture(image)
    assert picture.shape == (5, 7, 3)
    assert picture.dtype == np.float32
    np.testing.assert_allclose(picture, image.permute(1, 2, 0).numpy() / 255, atol=1e-6)
    for same in (image.permute(1, 2, 0).numpy(), image.numpy(), Image.fromarray(image.permute(1, 2, 0).numpy())):
        np.testing.assert_array_equal(to_picture(same), picture)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_fractions_stay_as_they_are(dtype):
    image = torch.tensor([[[0.25, 0.5], [0.5, 0.75]]], dtype=dtype, requires_grad=True)
    np.testing.assert_allclose(to_picture(image)[..., 0], [[0.25, 0.5], [0.5, 0.75]])


@pytest.mark.parametrize(("channels", "shown"), [(1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (12, 3)])
def test_any_number_of_channels_gives_one_or_three(channels, shown):
    image = torch.rand(channels, 6, 6)
    assert to_picture(image).shape == (6, 6, shown)
    if channels == 2:
        np.testing.assert_allclose(to_picture(image)[..., 0], image.mean(0), atol=1e-6)
    if channels > 4:
        np.testing.assert_allclose(to_picture(image), image[:3].permute(1, 2, 0), atol=1e-6)


def test_alpha_lies_on_white():
    image = torch.tensor([0.2, 0.4, 0.6, 0.5])[:, None, None]
    np.testing.assert_allclose(to_picture(image)[0, 0], [0.6, 0.7, 0.8], atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 255.0])
def test_a_normalisation_is_undone(scale):
    image, mean, std = torch.rand(3, 4, 4) * scale, torch.tensor([0.4, 0.5, 0.6]) * scale, [0.2 * scale, 0.3, 0.1]
    normalised = (image - mean[:, None, None]) / torch.tensor(std)[:, None, None]
    np.testing.assert_allclose(to_picture(normalised, mean, std), image.permute(1, 2, 0) / scale, atol=1e-5)
    one = to_picture((image[:1] - 0.5) / 0.25, mean=0.5, std=0.25) if scale == 1 else None
    assert one is None or np.allclose(one[..., 0], image[0], atol=1e-5)


def test_values_beyond_fractions_are_stretched():
    picture = to_picture(np.array([[-1.0, 0.0], [1.0, 3.0]]))
    np.testing.assert_allclose(picture[..., 0], [[0, 0.25], [0.5, 1]])
    np.testing.assert_allclose(to_picture(np.array([[0, 4095]], dtype=np.uint16))[..., 0], [[0, 1]])


@pytest.mark.parametrize(("value", "shown"), [(0.3, 0.3), (-7.0, 0.5), (40.0, 0.5), (np.nan, 0.5), (np.inf, 0.5)])
def test_constant_images(value, shown):
    np.testing.assert_allclose(to_picture(np.full((3, 3), value)), shown, atol=1e-6)


def test_nan_and_infinity_leave_the_other_pixels_alone():
    picture = to_picture(np.array([[0.1, np.nan], [np.inf, 0.9]]))
    np.testing.assert_allclose(picture[..., 0], [[0.1, 0.5], [0.5, 0.9]], atol=1e-6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "F", "I;16", "HSV"])
def test_every_mode_of_pillow(mode):
    picture = to_picture(Image.new(mode, (5, 3)))
    assert picture.shape[:2] == (3, 5)
    assert picture.shape[2] in (1, 3)


def test_a_large_image_becomes_small_by_means():
    image = np.zeros((1000, 400))
    image[::2] = 1
    picture = to_picture(image)
    assert picture.shape == (250, 100, 1)
    np.testing.assert_allclose(picture, 0.5)


@given(
    arrays.arrays(
        st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]),
        arrays.array_shapes(min_dims=2, max_dims=3, max_side=6),
    )
)
def test_the_picture_of_anything_is_between_black_and_white(image):
    picture = to_picture(image)
    assert picture.ndim == 3
    assert picture.shape[-1] in (1, 3)
    assert picture.min() >= 0
    assert picture.max() <= 1


@pytest.mark.parametrize("image", [torch.rand(3), torch.rand(2, 3, 4, 4), torch.rand(3, 0, 4), torch.rand(2, 2) + 1j])
def test_what_is_no_image_is_refused(image):
    with pytest.raises(ValueError, match="axes height and width"):
        to_picture(image)


def test_a_normalisation_of_other_channels_is_refused():
    with pytest.raises(ValueError, match="mean has 3 values for an image of 1 channels"):
        to_picture(torch.rand(1, 4, 4), mean=(0.5, 0.5, 0.5))
