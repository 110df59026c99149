"""Image files of items, in an order that can be told."""

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

from fewshot_callbacks.report.items import Items, image_files, pictures_of_files


def draw(path, colour=0, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, colour).save(path)


def test_folders_of_classes_are_read_as_torchvision_reads_them(tmp_path):
    for name in ("b/2.png", "b/10.jpg", "a/z.png", "a/deep/y.png", "a/deep.png", "C/x.jpeg"):
        draw(tmp_path / name)
    (tmp_path / "a/notes.txt").write_text("no image")
    assert [str(path) for path in image_files(tmp_path)] == [path for path, _ in ImageFolder(str(tmp_path)).samples]


def test_a_folder_of_images_is_sorted_by_name(tmp_path):
    for name in ("b.png", "a.png", "10.png"):
        draw(tmp_path / name)
    assert [path.name for path in image_files(tmp_path)] == ["10.png", "a.png", "b.png"]


@pytest.mark.parametrize("folder", ["", "missing"])
def test_a_folder_without_images_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="Pass the folder that holds"):
        image_files(tmp_path / folder)


def test_a_large_photograph_is_decoded_small(tmp_path):
    draw(tmp_path / "photo.jpg", 90, (1600, 1200))
    image = pictures_of_files([tmp_path / "photo.jpg"], 96)(0)
    assert max(image.size) < 800
    assert image.convert("L").getpixel((0, 0)) == pytest.approx(90, abs=2)


def test_labels_may_have_names():
    items = Items(None, [0, 1], label_names={0: "owl"})
    assert (items.label(0), items.label(1), len(items)) == ("owl", "1", 2)


def test_16_bit_greys_keep_their_greys(tmp_path):
    Image.fromarray(np.full((8, 8), 65535 // 2, np.uint16)).save(tmp_path / "xray.png")
    image = pictures_of_files([tmp_path / "xray.png"], 96)(0)
    assert image.convert("RGB").getpixel((0, 0)) == (127, 127, 127)


def test_numbers_without_a_known_range_are_refused(tmp_path):
    Image.new("F", (4, 4), 300).save(tmp_path / "depth.tif")
    with pytest.raises(ValueError, match="it holds fractions, whose black and white are unknown"):
        pictures_of_files([tmp_path / "depth.tif"], 96)(0)


@pytest.mark.parametrize("target", ["..", "../b"])
def test_a_link_to_a_folder_that_is_read_already_is_refused(target, tmp_path):
    for name in ("a/1.png", "b/1.png"):
        draw(tmp_path / name)
    (tmp_path / "a" / "loop").symlink_to(target, target_is_directory=True)
    with pytest.raises(ValueError, match=r"leads to .*, which is read as .* already"):
        image_files(tmp_path)


def test_only_the_formats_of_images_are_opened(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "1.eps")
    (tmp_path / "1.eps").rename(tmp_path / "1.jpg")
    with pytest.raises(ValueError, match="cannot identify"):
        pictures_of_files([tmp_path / "1.jpg"], 96)(0)
    Image.new("P", (4, 4), 3).save(tmp_path / "1.gif")
    assert pictures_of_files([tmp_path / "1.gif"], 96)(0).size == (4, 4)
