"""LogoDet-3K: boxes are items, classes are drawn by name, and everything that is left out is counted."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot_callbacks.data import LogoCounts, LogoDet3K, LogoTransform
from fewshot_callbacks.data.logodet3k import CATEGORIES
from tests.data.trees import SPLITS, names_of
from tests.messages import missing_facts, refused

BRANDS = [f"{name}-{i}" for name in ("Alfa", "Beta", "Gamma", "Delta", "Eta", "Iota", "Kappa") for i in (1, 2)]
SHARES = {"val_share": 0.3, "test_share": 0.3}
TINY = {**SHARES, "min_boxes": 2}
PLAIN = LogoTransform(image_size=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def annotate(file: Path, *objects: tuple[str, tuple]) -> None:
    """An annotation as LabelImg writes it."""
    things = [
        f"<object><name>{name}</name><pose>Unspecified</pose><bndbox><xmin>{left}</xmin><ymin>{top}</ymin>"
        f"<xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
        for name, (left, top, right, bottom) in objects
    ]
    file.write_text(f"<annotation><size><width>99</width></size>{''.join(things)}</annotation>")


def add(root: Path, category: str, brand: str, number: int, *objects: tuple[str, tuple], image=None) -> None:
    folder = root / "LogoDet-3K" / category / brand
    folder.mkdir(parents=True, exist_ok=True)
    (image or Image.new("RGB", (20, 10))).save(folder / f"{number}.jpg", quality=95)
    annotate(folder / f"{number}.xml", *objects)


@pytest.fixture
def logos(tmp_path: Path) -> Path:
    """Each brand has an image of two boxes, over nine categories."""
    root = tmp_path / "logos"
    for category in CATEGORIES:
        (root / "LogoDet-3K" / category).mkdir(parents=True)
    for i, brand in enumerate(BRANDS):
        add(root, CATEGORIES[i % 9], brand, 1, (brand, (1, 1, 9, 9)), (brand, (11, 1, 19, 9)))
    return root


def reference(name: str, val: float, test: float, seed: int) -> str:
    """The draw in hexadecimal digits and whole numbers."""
    brand = re.fullmatch(r"(.*?)(-[0-9]+)?", name.lower()).group(1)
    digits = int(hashlib.sha256(f"{seed} {brand}".encode()).hexdigest()[:16], 16)
    if digits < test * 16**16:
        return "test"
    return "val" if digits < (test + val) * 16**16 else "train"


def test_classes_are_drawn_into_splits_as_documented(logos: Path) -> None:
    for seed in (0, 1):
        drawn = names_of(LogoDet3K(logos, **TINY, split_seed=seed))
        assert drawn == {s: {b for b in BRANDS if reference(b, 0.3, 0.3, seed) == s} for s in SPLITS}
        assert sum(map(len, drawn.values())) == len(BRANDS)


def only(logos: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of one class, as they are evaluated, and their boxes."""
    data = LogoDet3K(logos, **TINY, transform=PLAIN)
    (images,) = (data.with_split(split) for split, names in names_of(data).items() if name in names)
    chosen = (images.labels == images.class_names.index(name)).nonzero().flatten()
    return images.batch(chosen.tolist())[0], images.boxes[chosen]


def test_a_box_is_cut_out_and_squeezed_whole(logos: Path) -> None:
    wide, image = ("Wide", (10, 10, 50, 20)), Image.new("RGB", (60, 40))
    image.paste((200, 0, 0), (10, 10, 30, 20))
    image.paste((0, 0, 200), (30, 10, 50, 20))
    add(logos, "Food", "Wide", 1, wide, wide, image=image)
    pixels, _ = only(logos, "Wide")
    assert pixels.shape == (2, 3, 8, 8)
    assert pixels[0, 0, :, :3].min() > 0.6  # all of the left is red
    assert pixels[0, 2, :, 5:].min() > 0.6  # all of the right is blue
    assert pixels[0, 1].max() < 0.2


def test_training_crops_are_random_parts_of_the_whole_box_squeezed(logos: Path) -> None:
    """Each column of the box has its own red, so a crop shows which columns it holds, and that none is left out."""
    wide = Image.fromarray(np.tile(np.arange(0, 200, 5, dtype=np.uint8)[None, :, None], (10, 1, 3)))
    transform = replace(PLAIN, resize=9, min_area=1.0, jitter=0.0)
    torch.manual_seed(0)
    whole = transform([wide] * 50, True)[:, 0]  # (50, 8, 8); at least the whole square, in another shape
    assert (whole[:, :, 0] < 0.3).all()
    assert (whole[:, :, -1] > 0.45).all()
    small = replace(transform, min_area=0.05)([wide] * 50, True)[:, 0]
    assert not torch.equal(small[0], small[1])
    assert (replace(transform, flip=1.0)([wide], True)[0, 0, :, 0] > 0.45).all()


def test_broken_boxes_and_small_classes_are_counted(logos: Path, caplog) -> None:
    good = ("Alfa-1", (0, 0, 5, 5))
    broken = [(5, 1, 5, 9), (9, 1, 5, 9), (20, 1, 25, 9), (-9, 1, 0, 9), *((1, top, 5, 9) for top in ("x", "", "nan"))]
    add(logos, "Food", "Alfa-1", 2, good, *[("Alfa-1", box) for box in broken], ("", (0, 0, 5, 5)))
    add(logos, "Food", "Rare", 1, ("Rare", (0, 0, 5, 5)))
    add(logos, "Food", "Rare", 2, ("Gone", (3, 3, 3, 5)))
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        data = LogoDet3K(logos, **TINY)
        assert data.counts == LogoCounts(14, 29, 9, 1, 1, 0, 0)
    assert missing_facts(caplog.text, ("29 boxes", "14 classes", "9 broken boxes", "1 small class", "1 box")) == []
    assert sum(len(data.with_split(split)) for split in SPLITS) == 29


def test_boxes_are_cut_to_the_image_and_names_are_the_objects(logos: Path) -> None:
    for number in (1, 2):
        add(logos, "Food", "folder", number, (" Iota  Two ", (-3, 5, 90, 90)))
    _, boxes = only(logos, "Iota Two")
    assert boxes.tolist() == [[0, 5, 20, 10]] * 2  # the image is 20 x 10, whatever the annotation says


def test_the_error_for_missing_logos_names_them_and_the_archive(logos: Path, tmp_path: Path) -> None:
    archive = ("LogoDet-3K.zip", "https://github.com/Wangjing1551/LogoDet-3K-Dataset", "partial=True")
    with refused(FileNotFoundError, "nowhere/LogoDet-3K", *archive):
        LogoDet3K(tmp_path / "nowhere")
    for category in ("Sports", "Food"):
        (logos / "LogoDet-3K" / category).rename(tmp_path / category)
    with refused(FileNotFoundError, 2, 9, "Food", *archive):
        LogoDet3K(logos)
    assert LogoDet3K(logos, **TINY, partial=True).counts.classes == len(BRANDS) - 3
    with refused(ValueError, *SPLITS, "0 classes", "3 boxes", "min_boxes", "split_seed"):
        LogoDet3K(logos, **{**TINY, "min_boxes": 3}, partial=True)
    data = LogoDet3K(logos, **{**TINY, "val_share": 0.0}, partial=True)
    assert data.splits == ("train", "test")
    with refused(ValueError, "val_share", 0, "positive"):
        data.with_split("val")


def test_annotations_without_an_image_and_unreadable_files_are_refused_or_counted(logos: Path) -> None:
    folder = logos / "LogoDet-3K" / CATEGORIES[0] / BRANDS[0]
    (folder / "1.jpg").rename(folder / "2.jpg")
    with refused(FileNotFoundError, 1, "annotation", "image", "Alfa-1/1.xml", "partial=True"):
        LogoDet3K(logos, **TINY)
    (folder / "1.jpg").write_text("no image")
    with refused(ValueError, 1, "unreadable", "Alfa-1/1.jpg", "LogoDet-3K.zip"):
        LogoDet3K(logos, **TINY)
    (folder / "1.xml").write_text("<annotation>")
    with refused(ValueError, 1, "unreadable", "Alfa-1/1.xml", "LogoDet-3K.zip"):
        LogoDet3K(logos, **TINY)
    annotate(folder / "3.xml")
    counts = LogoDet3K(logos, **TINY, partial=True).counts
    assert counts == LogoCounts(13, 26, 0, 0, 0, 1, 1)
    assert missing_facts(counts.in_words(), ("1 missing image", "1 unreadable file")) == []
