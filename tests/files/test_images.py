"""Image files are opened and found in one way, by the data modules and by the report."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from fewshot_callbacks.files.images import image_size, list_images, read_image
from tests.messages import refused


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_greys_of_16_bits_become_8_bits(mode: str, tmp_path: Path) -> None:
    """Against the definition: the nearest of 256 levels."""
    values = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    picture = Image.frombytes(mode, (16, 16), values.astype(">u2" if mode == "I;16B" else "<u2").tobytes())
    picture.save(tmp_path / "1.tif")
    image = read_image(tmp_path / "1.tif")
    assert image.mode == "L"
    assert np.asarray(image).flatten().tolist() == list(range(256))
    assert image_size(tmp_path / "1.tif").upright == (16, 16)


def test_a_tiff_of_12_bits_is_scaled_by_its_12_bits(tmp_path: Path) -> None:
    """Two pixels of 12 bits in three bytes: white, and half of it."""
    tags = ImageFileDirectory_v2()
    for tag, value in ((256, 2), (257, 1), (258, (12,)), (259, 1), (262, 1), (273, 0), (277, 1), (278, 1), (279, 3)):
        tags[tag] = value
    (tmp_path / "1.tif").write_bytes(b"II*\x00\x08\x00\x00\x00" + tags.tobytes(8) + bytes([0xFF, 0xF8, 0x00]))
    assert np.asarray(read_image(tmp_path / "1.tif")).tolist() == [[255, 128]]


def test_whatever_cannot_be_read_is_one_kind_of_error(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(tmp_path / "1.png")
    whole = (tmp_path / "1.png").read_bytes()
    for length in range(0, len(whole) - 20, 97):
        (tmp_path / "2.png").write_bytes(whole[:length])
        with refused(ValueError):
            read_image(tmp_path / "2.png")
    for path, reason in ((tmp_path, "regular"), (tmp_path / "nothing.png", "No such file")):
        with refused(ValueError, reason):
            read_image(path)


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an empty class, as `os.walk` makes of it; by a stand-in, since root may read everything."""

    def scandir(folder: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.scandir", scandir)
    with refused(PermissionError, tmp_path / "owl"):
        list_images([tmp_path / "owl"])
