"""The colours of a batch of photographs: flipped and jittered as Pillow does it to each image, normalised."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from fewshot_callbacks.data import PhotoTransform
from fewshot_callbacks.data.image_set import jitter_colours
from tests.cases import examples

SIDE = 8
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "image_size": SIDE, "resize": SIDE, "min_area": 1.0}
STILL = {**PLAIN, "flip": 0.0, "jitter": 0.0}


def photographs(number: int, size: tuple[int, int] = (SIDE, SIDE), seed: int = 0) -> list[Image.Image]:
    random = np.random.default_rng(seed)
    return [Image.fromarray(random.integers(256, size=(*size, 3), dtype=np.uint8)) for _ in range(number)]


def values(images: list[Image.Image]) -> torch.Tensor:
    return torch.stack([torch.tensor(np.asarray(image)).permute(2, 0, 1) / 255 for image in images])


@settings(max_examples=examples(30))
@given(strength=st.floats(0, 1.5), seed=st.integers(0, 99))
def test_the_jitter_is_that_of_pillow_with_the_same_factors(strength: float, seed: int) -> None:
    images = photographs(4, (7, 5), seed)
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
    images = photographs(300)
    flipped = PhotoTransform(**{**STILL, "flip": 0.25})(images, True)
    mirrored = torch.tensor([torch.equal(a, b.flip(2)) for a, b in zip(flipped, values(images), strict=True)])
    assert 50 < mirrored.sum() < 100  # 75 are expected; 3.3 standard deviations to either side


@pytest.mark.parametrize("name", ["flip", "jitter"])
def test_random_changes_follow_the_seed_and_are_for_training_alone(name: str) -> None:
    def changed(seed: int, augment: bool = True) -> torch.Tensor:
        torch.manual_seed(seed)
        return PhotoTransform(**{**STILL, name: 0.5})(photographs(8), augment)

    assert torch.equal(changed(0), changed(0))
    assert not torch.equal(changed(0), changed(1))
    torch.testing.assert_close(changed(0, augment=False), values(photographs(8)))


@pytest.mark.parametrize(("height", "width"), [(12, 12), (10, 14)])
def test_evaluation_images_may_be_resized_to_a_fixed_size_and_are_normalised(height: int, width: int) -> None:
    """Against Pillow alone: resize to the pair, whatever the shape of the image, then cut the centre out."""
    (image,), mean, std = photographs(1, (30, 21)), (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    top, left = (height - SIDE) // 2, (width - SIDE) // 2
    fitted = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + SIDE, top + SIDE))
    expected = (values([fitted]) - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(PhotoTransform(SIDE, (height, width), mean=mean, std=std)([image]), expected)
