"""The colours of a batch of photographs: flipped and jittered as Pillow does it to each image, normalised."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from fewshot_callbacks.data import PhotoTransform
from fewshot_callbacks.data.image_set import jitter_colours

SIDE = 8
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "image_size": SIDE, "resize": SIDE, "min_area": 1.0}
STILL = {**PLAIN, "flip": 0.0, "jitter": 0.0}


def photographs(number: int, size: tuple[int, int] = (7, 5), seed: int = 0) -> list[Image.Image]:
    random = np.random.default_rng(seed)
    return [Image.fromarray(random.integers(256, size=(*size, 3), dtype=np.uint8)) for _ in range(number)]


def values(images: list[Image.Image]) -> torch.Tensor:
    return torch.stack([torch.tensor(np.asarray(image)).permute(2, 0, 1) / 255 for image in images])


@given(strength=st.floats(0, 1.5), seed=st.integers(0, 99))
def test_the_jitter_is_that_of_pillow_with_the_same_factors(strength: float, seed: int) -> None:
    images = photographs(4, seed=seed)
    jittered = values(images)
    torch.manual_seed(seed)
    jitter_colours(jittered, strength)
    torch.manual_seed(seed)
    low = max(0.0, 1 - strength)
    factors = (low + (1 + strength - low) * torch.rand(3, 4)).tolist()
    for kind, each in zip((ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color), factors, strict=True):
        images = [kind(image).enhance(factor) for image, factor in zip(images, each, strict=True)]
    # Pillow rounds to bytes after each of three steps, and the next may scale that by up to 2.5
    assert (jittered - values(images)).abs().max() <= (1 + 2.5 + 2.5**2) / 255


def test_flips_have_the_probability_that_is_asked_for_and_are_flips() -> None:
    images = [images.resize((SIDE, SIDE)) for images in photographs(300, (SIDE, SIDE))]
    plain = values(images)
    torch.manual_seed(0)
    flipped = PhotoTransform(**{**STILL, "flip": 0.25})(images, True)
    mirrored = torch.tensor([torch.equal(one, other.flip(2)) for one, other in zip(flipped, plain, strict=True)])
    assert 50 < mirrored.sum() < 100  # 75 are expected; 3.3 standard deviations to either side


def test_each_channel_is_normalised_by_its_own_numbers() -> None:
    images = photographs(2, (SIDE, SIDE))
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    expected = (values(images) - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(PhotoTransform(SIDE, SIDE, mean=mean, std=std)(images), expected)


@pytest.mark.parametrize("name", ["flip", "jitter"])
def test_random_changes_follow_the_seed(name: str) -> None:
    transform = PhotoTransform(**{**STILL, name: 0.5})
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(transform(photographs(8), True))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_evaluation_images_are_not_augmented() -> None:
    images = photographs(3, (11, 17))
    transform = PhotoTransform(SIDE)
    assert torch.equal(transform(images), transform(images))
    assert not torch.equal(transform(images, True), transform(images, True))


@pytest.mark.parametrize(("height", "width"), [(12, 12), (10, 14)])
def test_evaluation_images_may_be_resized_to_a_square_or_another_fixed_size(height: int, width: int) -> None:
    """Against Pillow alone: resize to the pair, whatever the shape of the image, then cut the centre out."""
    (image,) = photographs(1, (30, 21))
    top, left = (height - SIDE) // 2, (width - SIDE) // 2
    fitted = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + SIDE, top + SIDE))
    torch.testing.assert_close(PhotoTransform(**{**PLAIN, "resize": (height, width)})([image]), values([fitted]))
