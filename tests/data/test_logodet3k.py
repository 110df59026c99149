"""LogoDet-3K: boxes are items, classes are drawn by name, and everything that is left out is counted."""

import hashlib
import pickle
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from PIL import Image

from fewshot_callbacks.data import LogoCounts, LogoDet3KDataModule
from fewshot_callbacks.data.logodet3k import CATEGORIES, logo_split
from tests.data.trees import PLAIN, SMALL

BRANDS = [f"{name}-{i}" for name in ("Alfa", "Beta", "Gamma", "Delta", "Eta", "Iota", "Kappa") for i in (1, 2)]
SHARES = {"val_share": 0.3, "test_share": 0.3}
TINY = {**SMALL, **SHARES, "min_boxes": 2}
SPLITS = ("train", "val", "test")


def annotate(file: Path, *objects: tuple[str, tuple], size: tuple[int, int] = (20, 10)) -> None:
    """An annotation as LabelImg writes it."""
    boxes = "".join(
        f"<object><name>{name}</name><pose>Unspecified</pose><bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin>"
        f"<xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"
        for name, box in objects
    )
    width, height = size
    file.write_text(
        f"<annotation><folder>x</folder><filename>x.jpg</filename><size><width>{width}</width><height>{height}</height>"
        f"<depth>3</depth></size>{boxes}</annotation>"
    )


def add(root: Path, category: str, brand: str, number: int, *objects: tuple[str, tuple], image=None) -> Path:
    folder = root / "LogoDet-3K" / category / brand
    folder.mkdir(parents=True, exist_ok=True)
    (image or Image.new("RGB", (20, 10))).save(folder / f"{number}.jpg", quality=95)
    annotate(folder / f"{number}.xml", *objects)
    return folder / f"{number}.xml"


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


def test_the_draw_is_that_of_the_documentation(logos: Path) -> None:
    for seed in (0, 1):
        data = LogoDet3KDataModule(logos, **TINY, split_seed=seed)
        drawn = {split: set(data.images(split).class_names) for split in SPLITS}
        assert drawn == {s: {b for b in BRANDS if reference(b, 0.3, 0.3, seed) == s} for s in SPLITS}
        assert sum(map(len, drawn.values())) == len(set().union(*drawn.values())) == len(BRANDS)
        assert all(any({f"{brand}-1", f"{brand}-2"} <= of for of in drawn.values()) for brand in ("Alfa", "Kappa"))
    assert logo_split("Alfa-1", val_share=0.3, test_share=0.3, seed=0) == logo_split(
        "alfa", val_share=0.3, test_share=0.3, seed=0
    )
    shares = [logo_split(f"brand {i}", val_share=0.1, test_share=0.3, seed=0) for i in range(4000)]
    assert abs(shares.count("test") - 1200) < 120  # four standard deviations
    assert abs(shares.count("val") - 400) < 80


def test_nothing_depends_on_the_order_of_the_listing(logos: Path) -> None:
    data = LogoDet3KDataModule(logos, **TINY)
    iterdir = Path.iterdir
    with patch.object(Path, "iterdir", lambda self: iter(sorted(iterdir(self), reverse=True))):
        other = LogoDet3KDataModule(logos, **TINY)
        other.setup("fit")
    for split in SPLITS:
        assert other.images(split).files == data.images(split).files
        assert other.images(split).class_names == data.images(split).class_names
        assert torch.equal(other.images(split).boxes, data.images(split).boxes)


def test_a_class_keeps_its_split_in_a_part_of_the_set(logos: Path) -> None:
    whole = LogoDet3KDataModule(logos, **TINY)
    names = {split: set(whole.images(split).class_names) for split in SPLITS}
    larger = BRANDS[::2]
    for brand in larger:
        add(logos, "Food", brand, 7, (brand, (0, 0, 5, 5)))
    part = LogoDet3KDataModule(logos, **{**TINY, "min_boxes": 3})
    assert {split: set(part.images(split).class_names) for split in SPLITS} == {s: names[s] & {*larger} for s in SPLITS}


def two_colours() -> Image.Image:
    """Red on the left, blue on the right, on black."""
    image = Image.new("RGB", (60, 40))
    image.paste((200, 0, 0), (10, 10, 30, 20))
    image.paste((0, 0, 200), (30, 10, 50, 20))
    return image


def only(logos: Path, name: str, **settings) -> tuple[torch.Tensor, LogoDet3KDataModule]:
    """The images of one class, as they are evaluated."""
    data = LogoDet3KDataModule(logos, **{**TINY, **PLAIN, **settings})
    for split in SPLITS:
        images = data.images(split)
        if name in images.class_names:
            label = images.class_names.index(name)
            return images.__getitems__((images.labels == label).nonzero().flatten().tolist())[0], data
    raise AssertionError(name)


def test_a_box_is_cut_out_and_squeezed_whole(logos: Path) -> None:
    wide = ("Wide", (10, 10, 50, 20))
    add(logos, "Food", "Wide", 1, wide, wide, image=two_colours())
    pixels, _ = only(logos, "Wide")
    assert pixels.shape == (2, 3, 8, 8)
    assert pixels[0, 0, :, :3].min() > 0.6  # all of the left is red
    assert pixels[0, 2, :, 5:].min() > 0.6  # all of the right is blue
    assert pixels[0, 1].max() < 0.2


def test_a_margin_is_a_part_of_each_side_and_ends_at_the_border(logos: Path) -> None:
    for number, box in enumerate([(10, 10, 50, 20), (10, 10, 50, 20)]):
        add(logos, "Food", "Wide", number, ("Wide", box), image=two_colours())
    pixels, _ = only(logos, "Wide", margin=0.5, image_size=40)  # 80 x 20, of which 60 x 20 are in the image
    bright = pixels[0].amax(dim=0) > 0.4
    assert bright.any(dim=1).nonzero().flatten()[[0, -1]].tolist() == pytest.approx([10, 29], abs=1)  # rows 5 to 15
    assert bright.any(dim=0).nonzero().flatten()[[0, -1]].tolist() == pytest.approx([7, 33], abs=1)  # columns 10 to 50


def test_training_crops_are_augmented_from_the_whole_box(logos: Path) -> None:
    data = LogoDet3KDataModule(logos, **TINY, flip=0.5)
    one, other = (data.images("train")[0][0] for _ in range(2))
    assert one.shape == (3, 8, 8)
    plain = next(iter(data.training_data_for_evaluation()))[0]
    assert torch.equal(plain[0], LogoDet3KDataModule(logos, **TINY, augment=False).images("train")[0][0])
    transform = data.images("train").batch_transform
    assert [type(step).__name__ for step in transform.to_size.transforms] == ["Resize", "RandomResizedCrop"]
    assert transform.to_size.transforms[0].size == (9, 9)
    assert (transform.flip, transform.jitter) == (0.5, 0.4)
    assert other.shape == one.shape


def test_broken_boxes_and_small_classes_are_counted(logos: Path, caplog) -> None:
    good = ("Alfa-1", (0, 0, 5, 5))
    broken = [
        (5, 1, 5, 9),
        (9, 1, 5, 9),
        (20, 1, 25, 9),
        (-9, 1, 0, 9),
        (1, "x", 5, 9),
        (1, "", 5, 9),
        (1, "nan", 5, 9),
    ]
    add(logos, "Food", "Alfa-1", 2, good, *[("Alfa-1", box) for box in broken], ("", (0, 0, 5, 5)))
    add(logos, "Food", "Rare", 1, ("Rare", (0, 0, 5, 5)))
    add(logos, "Food", "Rare", 2, ("Gone", (3, 3, 3, 5)))
    data = LogoDet3KDataModule(logos, **TINY)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        assert data.counts == LogoCounts(14, 29, 9, 1, 1, 0, 0)
    assert "29 boxes of 14 classes; left out are 9 broken boxes and 1 small class with 1 box." in caplog.text
    assert sum(len(data.images(split)) for split in SPLITS) == 29


def test_boxes_are_cut_to_the_image_and_names_are_the_objects(logos: Path) -> None:
    for number in (1, 2):
        add(logos, "Food", "folder", number, (" Iota  Two ", (-3, 5, 90, 90)))
    _, data = only(logos, "Iota Two")
    (images,) = (data.images(s) for s in SPLITS if "Iota Two" in data.images(s).class_names)
    boxes = images.boxes[images.labels == images.class_names.index("Iota Two")]
    assert boxes.tolist() == [[0, 5, 20, 10]] * 2  # the image is 20 x 10, whatever the annotation says


def test_it_goes_into_workers_and_makes_episodes(logos: Path) -> None:
    data = pickle.loads(pickle.dumps(LogoDet3KDataModule(logos, **TINY, num_workers=1)))
    assert (data.in_channels, data.num_classes) == (3, len(data.images("train").class_names))
    for pixels, labels in data.train_dataloader():
        assert pixels.shape == (4, 3, 8, 8)
        assert labels.reshape(2, 2).unique(dim=1).shape == (2, 1)


def test_a_class_too_small_for_the_episodes_is_named(logos: Path) -> None:
    data = LogoDet3KDataModule(logos, **{**TINY, "shots": 4})
    name = data.images("train").class_names[0]
    with pytest.raises(ValueError, match=rf"needs 5 images per class; class '{name}' has 2, the smallest of"):
        data.train_dataloader()


def test_what_is_missing_is_named_with_the_archive(logos: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"holds no 'nowhere/LogoDet-3K'\. Unpack LogoDet-3K\.zip from the page"
    ):
        LogoDet3KDataModule(tmp_path / "nowhere").setup("fit")
    for category in ("Sports", "Food"):
        (logos / "LogoDet-3K" / category).rename(tmp_path / category)
    with pytest.raises(
        FileNotFoundError, match=r"2 of the 9 categories are not in .*; the first is 'Food'\. Unpack .* par"
    ):
        LogoDet3KDataModule(logos).setup("fit")
    assert LogoDet3KDataModule(logos, **TINY, partial=True).counts.classes == len(BRANDS) - 3


def test_annotations_without_image_and_files_that_cannot_be_read(logos: Path) -> None:
    folder = logos / "LogoDet-3K" / CATEGORIES[0] / BRANDS[0]
    (folder / "1.jpg").rename(folder / "2.jpg")
    with pytest.raises(
        FileNotFoundError, match=r"LogoDet-3K holds 1 annotation without its image; the first is .*Alfa-1/1\.xml"
    ):
        LogoDet3KDataModule(logos, **TINY).setup("fit")
    (folder / "1.jpg").write_text("no image")
    with pytest.raises(ValueError, match=r"holds 1 unreadable file; the first is .*Alfa-1/1\.jpg\. Unpack LogoDet-3K"):
        LogoDet3KDataModule(logos, **TINY).setup("fit")
    (folder / "1.xml").write_text("<annotation>")
    with pytest.raises(ValueError, match=r"holds 1 unreadable file; the first is .*Alfa-1/1\.xml\. "):
        LogoDet3KDataModule(logos, **TINY).setup("fit")
    annotate(folder / "3.xml")
    counts = LogoDet3KDataModule(logos, **TINY, partial=True).counts
    assert counts == LogoCounts(13, 26, 0, 0, 0, 1, 1)
    assert counts.in_words().endswith(", 1 missing image and 1 unreadable file.")


def test_a_split_without_classes_is_refused(logos: Path) -> None:
    words = (
        r"leaves train and val and test without a class\. It has 0 classes with at least 3 boxes\. Use a smaller min"
    )
    with pytest.raises(ValueError, match=words):
        LogoDet3KDataModule(logos, **{**TINY, "min_boxes": 3}).setup("fit")
    data = LogoDet3KDataModule(logos, **{**TINY, "val_share": 0.0})
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match=r"no validation split: val_share is 0\. Use a positive share"):
        data.images("val")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"margin": -0.1}, r"margin is -0\.1"),
        ({"min_boxes": 0}, "min_boxes is 0"),
        ({"val_share": 0.8}, r"val_share is 0\.8 and test_share 0\.2; .* a sum below 1"),
        ({"test_share": 0.0}, r"test_share 0\.0"),
        ({"val_share": float("nan")}, "val_share is nan"),
    ],
)
def test_wrong_settings_fail_in_the_constructor(wrong: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LogoDet3KDataModule("anywhere", **wrong)
