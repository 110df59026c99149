"""Training, report and panels see one picture of a file: turned upright, and over white where it is transparent."""

import base64
import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot_callbacks.data import ImageFolder, LogoDet3K
from fewshot_callbacks.data.logodet3k import LogoTransform
from fewshot_callbacks.plots.panels import to_picture
from fewshot_callbacks.report import ReportSettings, pictures_of_files
from fewshot_callbacks.report.items import data_uri
from tests.data.trees import PLAIN
from tests.messages import refused

SIDE = 16
ORIENTATION = 0x0112
STORED = {
    1: lambda upright: upright,
    2: np.fliplr,
    3: lambda upright: np.rot90(upright, 2),
    4: np.flipud,
    5: lambda upright: np.swapaxes(upright, 0, 1),
    6: np.rot90,
    7: lambda upright: np.rot90(np.swapaxes(upright, 0, 1), 2),
    8: lambda upright: np.rot90(upright, -1),
}
"""Orientation -> the stored rows and columns of an upright picture, by the drawings of the Exif standard."""


def upright_picture(height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Blocks of different colours: no turn and no mirror leaves them as they are."""
    blocks = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return blocks.repeat(8, axis=0).repeat(8, axis=1)


def turned(file: Path, upright: np.ndarray, orientation: int) -> None:
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    Image.fromarray(np.ascontiguousarray(STORED[orientation](upright))).save(file, exif=tags, quality=100)


def of_training(file: Path, **settings: str) -> np.ndarray:
    folder = file.parent / f"set-{file.stem}"
    (folder / "class").mkdir(parents=True)
    shutil.copy(file, folder / "class")
    transform = replace(PLAIN, image_size=SIDE, resize=SIDE)
    pixels, _ = ImageFolder(folder, split=None, transform=transform, **settings)[0]
    return np.asarray(pixels.movedim(0, 2) * 255)


def of_report(file: Path, **settings: str) -> np.ndarray:
    shown = data_uri(pictures_of_files([file], SIDE, **settings)(0), SIDE)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))).convert("RGB"), np.float64)


def of_a_report_of_pictures(file: Path, **settings: str) -> np.ndarray:
    with Image.open(file) as picture:
        shown = data_uri(picture, SIDE, **settings)
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))).convert("RGB"), np.float64)


def of_panels(file: Path) -> np.ndarray:
    with Image.open(file) as picture:
        shown = 255 * to_picture(picture)
    return np.broadcast_to(shown, (*shown.shape[:2], 3))


OPENERS = [of_training, of_report, of_a_report_of_pictures, of_panels]


@pytest.mark.parametrize("opened", OPENERS)
@pytest.mark.parametrize("kind", ["jpg", "png", "tif", "webp"])
def test_every_orientation_is_turned_upright(opened, kind: str, tmp_path: Path) -> None:
    upright = upright_picture()
    for orientation in STORED:
        file = tmp_path / f"{orientation}.{kind}"
        turned(file, upright, orientation)
        assert np.abs(opened(file) - upright.astype(float)).mean() < 16, orientation  # a JPEG is not exact


def drawing(mode: str) -> Image.Image:
    """A black disc on nothing: an opener that drops the alpha sees a black square."""
    rows, columns = np.mgrid[:SIDE, :SIDE] - SIDE / 2 + 0.5
    alpha = np.where(np.hypot(rows, columns) < 5, 255, 0).astype(np.uint8)
    if mode in ("RGBA", "LA"):
        black = np.zeros((SIDE, SIDE, len(mode) - 1), np.uint8)
        return Image.fromarray(np.dstack([black, alpha]), mode)
    grey = Image.fromarray(255 - alpha)
    if mode == "P":
        palette = Image.fromarray((alpha == 0).astype(np.uint8), "P")
        palette.putpalette([0, 0, 0, 0, 0, 0])
        palette.info["transparency"] = 1
        return palette
    if mode == "I;16":
        return Image.fromarray(np.where(alpha, 0, 7).astype(np.uint16))
    return Image.merge("RGB", [grey.point(lambda level: level // 255)] * 3) if mode == "RGB" else grey.convert("L")


TRANSPARENT = {"RGBA": {}, "LA": {}, "P": {"transparency": 1}, "RGB": {"transparency": (1, 1, 1)}}


@pytest.mark.parametrize("opened", OPENERS)
@pytest.mark.parametrize("mode", TRANSPARENT)
def test_what_is_transparent_lies_on_white_or_on_the_colour_of_the_setting(opened, mode: str, tmp_path: Path) -> None:
    drawing(mode).save(tmp_path / "logo.png", **TRANSPARENT[mode])
    with Image.open(tmp_path / "logo.png") as logo:
        assert logo.mode == mode
    seen = opened(tmp_path / "logo.png")
    black = np.asarray(drawing("L"), np.float64)[..., None] * np.ones(3)
    assert np.abs(seen - black).max() <= 1
    if opened is of_panels:  # it shows what the data set serves
        return
    shutil.rmtree(tmp_path / "set-logo", ignore_errors=True)
    on_green = opened(tmp_path / "logo.png", background="#00ff00")
    assert np.abs(on_green - black * [0, 1, 0]).max() <= 1


def test_the_transparent_grey_of_16_bits_is_white(tmp_path: Path) -> None:
    drawing("I;16").save(tmp_path / "scan.png", transparency=7)
    seen, expected = of_training(tmp_path / "scan.png"), np.asarray(drawing("L"), np.float64)[..., None]
    assert np.abs(seen - expected).max() <= 1


def test_a_colour_that_is_none_is_refused_with_the_forms(tmp_path: Path) -> None:
    drawing("RGBA").save(tmp_path / "logo.png")
    facts = ("background", "'whit'", "'white'", "'#rrggbb'")
    with refused(ValueError, *facts):
        of_training(tmp_path / "logo.png", background="whit")
    with refused(ValueError, *facts):
        ReportSettings(background="whit")


def test_tags_that_are_damaged_turn_nothing(tmp_path: Path) -> None:
    upright = upright_picture()
    Image.fromarray(upright).save(tmp_path / "photo.png", exif=b"Exif\0\0MM\0*\0\0\0\xff\0\0")
    assert np.array_equal(of_training(tmp_path / "photo.png"), upright)


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("said", ["upright", "stored", "nothing"])
def test_boxes_lie_where_the_annotation_saw_them(orientation: int, said: str, tmp_path: Path) -> None:
    """The size in an annotation tells whether its tool had turned the picture."""
    upright = np.zeros((32, 48, 3), np.uint8)
    box = np.zeros((32, 48), bool)
    box[4:12, 16:40] = True
    upright[box] = (255, 0, 0)
    folder = tmp_path / "LogoDet-3K" / "Food" / "Oreo"
    folder.mkdir(parents=True)
    turned(folder / "1.jpg", upright, orientation)
    # no size tells a half turn or a mirror, which annotations are taken to have seen
    seen = STORED[orientation](box) if said == "stored" and orientation > 4 else box
    (top, *_, bottom), (left, *_, right) = (np.flatnonzero(seen.any(axis=axis)) for axis in (1, 0))
    sides = {"xmin": left, "ymin": top, "xmax": right + 1, "ymax": bottom + 1}
    inner = "".join(f"<{side}>{value}</{side}>" for side, value in sides.items())
    size = "" if said == "nothing" else f"<size><width>{seen.shape[1]}</width><height>{seen.shape[0]}</height></size>"
    things = "".join(f"<object><name>{name}</name><bndbox>{inner}</bndbox></object>" for name in "abcdefghijkl")
    (folder / "1.xml").write_text(f"<annotation>{size}{things}</annotation>")
    transform = LogoTransform(image_size=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    logos = LogoDet3K(tmp_path, transform=transform, min_boxes=1, val_share=0.3, test_share=0.3, partial=True)
    assert logos.boxes[0].tolist() == [16, 4, 40, 12]
    assert (logos[0][0].mean(dim=(1, 2)) - torch.tensor([1.0, 0.0, 0.0])).abs().max() < 0.1  # a JPEG is not exact
