"""Image files of items, in an order that can be told, and their thumbnails within a number of bytes."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from fewshot_callbacks.report.items import MAX_TEXT, ReportItems, Thumbnails, data_uri, image_files, pictures_of_files
from tests.messages import refused


def save_grey_image(path, colour=0, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, colour).save(path)


def test_folders_of_classes_are_read_as_torchvision_reads_them(tmp_path):
    for name in ("b/2.png", "b/10.jpg", "a/z.png", "a/deep/y.png", "a/deep.png", "C/x.jpeg"):
        save_grey_image(tmp_path / name)
    (tmp_path / "a/notes.txt").write_text("no image")
    assert [str(path) for path in image_files(tmp_path)] == [path for path, _ in ImageFolder(str(tmp_path)).samples]


def test_a_folder_of_images_is_sorted_by_name_and_one_without_is_refused(tmp_path):
    for folder, facts in ((tmp_path, ("image", ".jpg", ".gif")), (tmp_path / "missing", ("folder", "images"))):
        with refused(ValueError, folder, *facts):
            image_files(folder)
    for name in ("b.png", "a.png", "10.png"):
        save_grey_image(tmp_path / name)
    assert [path.name for path in image_files(tmp_path)] == ["10.png", "a.png", "b.png"]


def test_a_large_photograph_is_decoded_small(tmp_path):
    save_grey_image(tmp_path / "photo.jpg", 90, (1600, 1200))
    image = pictures_of_files([tmp_path / "photo.jpg"], 96)(0)
    assert max(image.size) < 800
    assert image.convert("L").getpixel((0, 0)) == pytest.approx(90, abs=2)


def test_a_file_of_another_format_with_the_name_of_an_image_is_refused(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "1.eps")
    (tmp_path / "1.eps").rename(tmp_path / "1.jpg")
    with refused(ValueError, tmp_path / "1.jpg"):
        pictures_of_files([tmp_path / "1.jpg"], 96)(0)
    Image.new("P", (4, 4), 3).save(tmp_path / "1.gif")
    assert pictures_of_files([tmp_path / "1.gif"], 96)(0).size == (4, 4)


def decoded(uri):
    assert uri.startswith("data:image/webp;base64,")
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB")


@pytest.mark.parametrize(
    "image",
    [
        Image.new("RGBA", (30, 20), (200, 200, 200, 255)),
        torch.full((1, 20, 30), 200, dtype=torch.uint8),
        np.full((20, 30, 3), 200, np.uint8),
    ],
)
def test_small_images_are_kept_to_the_pixel(image):
    picture = decoded(data_uri(image, 96))
    assert picture.size == (30, 20)
    assert picture.getpixel((3, 3)) == (200, 200, 200)


@pytest.mark.parametrize("kind", [np.uint16, np.float32])
def test_images_of_more_than_8_bits_keep_their_greys(kind):
    levels = np.linspace(0, 65535, num=64).reshape(8, 8).astype(kind)
    picture = np.asarray(decoded(data_uri(Image.fromarray(levels), 96)))[..., 0]
    assert np.abs(picture - levels / 257).max() <= 1


def test_large_images_keep_their_shape_and_transparent_ones_lie_on_white():
    picture = decoded(data_uri(Image.new("RGBA", (1000, 500), (0, 0, 0, 0)), 96))
    assert (picture.size, picture.getpixel((0, 0))) == ((96, 48), (255, 255, 255))


def test_each_item_is_kept_once_and_the_first_items_fit():
    images = np.random.default_rng(0).integers(0, 255, (50, 40, 40), dtype=np.uint8)
    items = ReportItems(None, [0] * 50, picture=lambda index: images[index])
    thumbnails = Thumbnails([items], 96, 20_000)
    thumbnails.add([(0, 3), (0, 3), *((0, index) for index in range(50))])
    assert list(thumbnails.images)[:2] == ["0-3", "0-0"]
    assert len(thumbnails.images) + thumbnails.omitted == 50
    assert sum(map(len, thumbnails.images.values())) <= 20_000


def test_long_texts_are_cut_and_failures_name_the_item_and_its_file():
    def shown(index):
        if index == 1:
            raise OSError("gone")
        return "word " * 100

    thumbnails = Thumbnails([ReportItems(None, [0, 0], "queries", shown, ["a.txt", "b.txt"])], 96, 10_000)
    thumbnails.add([(0, 0), (0, 1)])
    assert len(thumbnails.texts["0-0"]) == MAX_TEXT
    assert thumbnails.failures == ["queries 1 (\u2068b.txt\u2069): OSError: gone"]  # its own direction
