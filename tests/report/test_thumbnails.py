"""Thumbnails within a number of bytes."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot_callbacks.report.items import LONGEST_TEXT, Items, Thumbnails, data_uri


def decoded(uri):
    assert uri.startswith("data:image/webp;base64,")
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")


@pytest.mark.parametrize(
    "image",
    [
        Image.new("L", (30, 20), 200),
        Image.new("RGBA", (30, 20), (200, 200, 200, 255)),
        Image.new("P", (30, 20), 200).convert("L").point(lambda _: 200),
        torch.full((1, 20, 30), 200, dtype=torch.uint8),
        np.full((20, 30, 3), 200, np.uint8),
    ],
)
def test_small_images_are_kept_to_the_pixel(image):
    picture = decoded(data_uri(image, 96))
    assert picture.size == (30, 20)
    assert picture.getpixel((3, 3)) == (200, 200, 200)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_images_of_more_than_8_bits_keep_their_greys(kind):
    levels = np.linspace(0, 65535, num=64).reshape(8, 8).astype(kind)
    picture = np.asarray(decoded(data_uri(Image.fromarray(levels), 96)))[..., 0]
    assert np.abs(picture - levels / 257).max() <= 1


def test_large_images_keep_their_shape():
    assert decoded(data_uri(Image.new("RGB", (1000, 500)), 96)).size == (96, 48)


def test_transparent_images_lie_on_white():
    assert decoded(data_uri(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), 96)).getpixel((0, 0)) == (255, 255, 255)


def test_each_item_is_kept_once_and_the_first_find_room():
    drawn = np.random.default_rng(0).integers(0, 255, (50, 40, 40), dtype=np.uint8)
    items = Items(None, [0] * 50, picture=lambda index: drawn[index])
    thumbnails = Thumbnails([items], 96, 20_000)
    thumbnails.add([(0, 3), (0, 3), *((0, index) for index in range(50))])
    assert list(thumbnails.images)[:2] == ["0-3", "0-0"]
    assert len(thumbnails.images) + thumbnails.left_out == 50
    assert sum(map(len, thumbnails.images.values())) <= 20_000


def test_texts_are_shortened_and_failures_named():
    def shown(index):
        if index == 1:
            raise OSError("gone")
        return "word " * 100

    thumbnails = Thumbnails([Items(None, [0, 0], "queries", shown, ["a.txt", "b.txt"])], 96, 10_000)
    thumbnails.add([(0, 0), (0, 1)])
    assert len(thumbnails.texts["0-0"]) == LONGEST_TEXT
    assert thumbnails.failures == ["queries 1 (\u2068b.txt\u2069): OSError: gone"]  # its own direction
