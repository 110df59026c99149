"""Folders of images: what is served, and what is refused with which facts."""

import os
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from fewshot_callbacks.data import FewShotDataset, ImageFolder, ImageItem, ImageSet
from fewshot_callbacks.data.image_set import DecodedImages
from tests.data.trees import CLASSES_OF_FOLDERS as CLASSES
from tests.data.trees import PLAIN, SPLITS, all_items, names_of, save_image, write_folders
from tests.messages import missing_facts, refused

LOG = "lightning.pytorch.utilities.rank_zero"
all_of = partial(ImageFolder, split=None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folders(tmp_path)


def test_the_class_of_an_image_is_its_folder(root: Path) -> None:
    colour = 0
    for split in SPLITS:
        images = ImageFolder(root, split, transform=PLAIN)
        pixels, labels = all_items(images)
        assert images.class_names == CLASSES[split]
        assert labels.tolist() == [label for label in range(len(CLASSES[split])) for _ in range(4)]
        expected = torch.arange(colour + 1.0, colour + len(labels) + 1)
        raw = torch.stack([expected, 2 * expected, 255 - expected], dim=1) / 255
        torch.testing.assert_close(pixels, raw[:, :, None, None].expand_as(pixels))
        colour += len(labels)


class Squares(ImageSet):
    """Grey squares that are no files: the name of an item is its grey."""

    def __init__(self) -> None:
        items = [ImageItem(str(grey), f"class {grey % 2}") for grey in range(6)]
        super().__init__({"train": items}, "train", PLAIN)

    def read_item(self, index: int) -> Image.Image:
        return Image.new("RGB", (8, 8), (int(self.items[index].file),) * 3)


def test_a_subclass_reads_images_that_are_no_files() -> None:
    for workers in (0, 2):
        [(images, labels)] = DataLoader(Squares(), batch_size=6, num_workers=workers)
        torch.testing.assert_close(images[:, 0, 0, 0], torch.arange(6) / 255)
        assert labels.tolist() == [0, 1] * 3


def test_a_data_set_without_a_method_says_what_it_lacks() -> None:
    class Unfinished(FewShotDataset):
        pass

    with refused(NotImplementedError, "Unfinished", "batch(indices)"):
        Unfinished()[0]
    with refused(NotImplementedError, "Unfinished", "with_split(split)"):
        Unfinished().with_split("val")


def test_without_a_validation_folder_there_is_no_validation_split(root: Path) -> None:
    images = ImageFolder(root, val_folder=None)
    assert images.splits == ("train", "test")
    with refused(ValueError, "validation", "val_folder", None):
        images.with_split("val")
    assert ImageFolder(root, "val", val_folder="test").class_names == CLASSES["test"]


@pytest.mark.parametrize(
    ("place", "settings", "error", "facts"),
    [
        ("nowhere", {}, FileNotFoundError, ("'train'", "'val'", "'test'")),
        ("nowhere", {"split": None}, FileNotFoundError, ("folder", "class")),
        ("", {"val_folder": "dev"}, FileNotFoundError, ("'dev'", "val", "val_folder=...", "val_folder=None")),
        ("", {"test_folder": "exam"}, FileNotFoundError, ("'exam'", "test", "test_folder=...")),
        ("train", {}, FileNotFoundError, ("3 folders", "val_share=0.2", "test_share=0.2")),
        ("train/ant", {"split": None}, ValueError, ("class", "folder")),
        ("", {"val_share": 0.2, "test_share": 0.2}, ValueError, ("'train'", "'test'", "val_share", "test_share")),
    ],
)
def test_folders_that_make_no_splits_are_refused_with_the_fix(root: Path, place, settings, error, facts) -> None:
    with refused(error, root / place, *facts):
        ImageFolder(root / place, **settings)


def test_splits_that_share_classes_are_refused(root: Path) -> None:
    (root / "again").symlink_to(root / "train")
    for name in ("train", "again"):
        with refused(ValueError, "train_folder='train'", f"val_folder='{name}'", "one folder", "classes"):
            ImageFolder(root, val_folder=name)
    for split in ("train", "test"):
        (root / split / "yak").mkdir()
        Image.new("RGB", (20, 10)).save(root / split / "yak" / "0.png")
    with refused(ValueError, "'train'", "'test'", "1 class", "'yak'"):
        ImageFolder(root)


def test_classes_without_images_are_named(root: Path) -> None:
    for name in ("x0", "x1", "x2", "x3", "x4", "emu"):
        (root / "val" / name).mkdir()
    (root / "val" / "emu" / "notes.txt").write_text("no image")
    with refused(ValueError, "6 classes", "emu", "x3", "...", 8, root / "val", "image", ".jpg", ".tiff"):
        ImageFolder(root)


def test_16_bit_greys_keep_their_greys(tmp_path: Path) -> None:
    greys = np.linspace(0, 65535, num=100).reshape(10, 10).astype(np.uint16)
    (tmp_path / "xray").mkdir()
    Image.fromarray(greys).save(tmp_path / "xray" / "1.pgm")
    pixels, _ = ImageFolder(tmp_path, split=None, transform=replace(PLAIN, image_size=10, resize=10))[0]
    expected = torch.from_numpy(greys / 65535.0).float().expand(3, 10, 10)
    torch.testing.assert_close(pixels, expected, atol=0.5 / 255 + 1e-6, rtol=0)


@pytest.mark.parametrize(("mode", "kind"), [("I", "32-bit integers"), ("F", "fractions")])
def test_numbers_without_a_known_range_are_refused_with_the_file(mode: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "depth").mkdir()
    Image.new(mode, (4, 4), 300).save(tmp_path / "depth" / "1.tif")
    with refused(ValueError, tmp_path / "depth" / "1.tif", kind, 8, 16):
        all_of(tmp_path)[0]


def test_a_link_to_a_folder_that_is_read_already_is_refused(root: Path) -> None:
    (root / "train" / "ant" / "loop").symlink_to("..", target_is_directory=True)
    with refused(ValueError, root / "train" / "ant" / "loop", root / "train", "twice", "link"):
        all_of(root / "train")


def test_other_links_are_followed_and_a_link_to_nothing_is_an_image_that_is_missing(root: Path) -> None:
    folder = root / "train" / "ant"
    (folder / "more").symlink_to(root / "val" / "dog", target_is_directory=True)
    (folder / "z.png").symlink_to(root / "val" / "eel" / "0.png")
    assert all_of(root / "train").labels.bincount().tolist() == [9, 4, 4]
    (folder / "4.png").symlink_to(root / "gone.png")
    with refused(ValueError, folder / "4.png", "No such file"):
        all_of(root / "train")[4]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_other_files_are_counted_in_one_line_and_a_named_pipe_is_never_waited_for(root: Path, caplog) -> None:
    folder = root / "train"
    with caplog.at_level("INFO", LOG):
        all_of(folder)
        assert not caplog.records
        for name in ("ant/1.gif", "ant/2.GIF", "bee/1.avif", "bee/notes"):
            (folder / name).write_text("?")
        os.mkfifo(folder / "ant" / "pipe.png")
        images = all_of(folder)
    (message,) = [record.message for record in caplog.records]
    counts = ("5 files", ".gif 2", "regular file 1", ".avif 1", "ending 1")
    assert missing_facts(message, (folder, *counts, ".jpg", ".jpeg", ".png")) == []
    (folder / "bee" / "0.png").unlink()
    os.mkfifo(folder / "bee" / "0.png")
    with refused(ValueError, folder / "bee" / "0.png", "regular"):
        images[4]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Ten classes in one folder."""
    for number in range(10):
        save_image(tmp_path / f"bird{number}" / "0.png")
    return tmp_path


def test_a_plain_folder_of_classes_is_split_by_shares_and_a_seed(plain: Path) -> None:
    splits, *others = (
        names_of(ImageFolder(plain, val_share=0.2, test_share=0.3, split_seed=seed)) for seed in (0, 0, 1, 2, 3)
    )
    assert all([len(one[split]) for split in SPLITS] == [5, 2, 3] for one in (splits, *others))
    assert set.union(*splits.values()) == {f"bird{number}" for number in range(10)}
    assert others[0] == splits
    assert any(one != splits for one in others)


def test_every_split_that_is_asked_for_has_a_class(plain: Path) -> None:
    splits = names_of(ImageFolder(plain, val_share=0.01, test_share=0.01))
    assert [len(splits[split]) for split in SPLITS] == [8, 1, 1]
    images = ImageFolder(plain, test_share=0.5)
    assert (len(images.class_names), images.splits) == (5, ("train", "test"))
    with refused(ValueError, "validation", "val_share", 0, "positive"):
        images.with_split("val")


@pytest.mark.parametrize(
    ("val_share", "test_share", "facts"),
    [
        (0.2, 0.0, ("val_share >= 0", "test_share > 0")),
        (0.5, 0.5, ("val_share >= 0", "test_share > 0", "sum", 1)),
        (-0.1, 0.5, ("val_share >= 0", "test_share > 0")),
        (0.49, 0.49, ("10 classes", "val_share", "test_share", "shares")),
    ],
)
def test_shares_that_leave_no_class_to_train_on_are_refused(
    val_share: float, test_share: float, facts: tuple, plain: Path
) -> None:
    with refused(ValueError, val_share, test_share, *facts):
        ImageFolder(plain, val_share=val_share, test_share=test_share)


EACH = 4 * 12 * 10 / 1e6  # MB of an image of `Reader`


class Reader:
    def __init__(self, mode: str = "RGB") -> None:
        self.read: list[int] = []
        self.mode = mode

    def __call__(self, index: int) -> Image.Image:
        self.read.append(index)
        return Image.new(self.mode, (12, 10), (index,) * len(self.mode))


@pytest.mark.parametrize(("memory_mb", "mode", "kept"), [(0, "RGB", 0), (3 * EACH, "RGB", 3), (3 * EACH, "L", 12)])
def test_images_that_fit_are_read_once_and_one_message_says_that_the_cache_is_full(
    memory_mb, mode, kept, caplog
) -> None:
    images, reader = DecodedImages(memory_mb, 20), Reader(mode)
    with caplog.at_level("INFO", LOG):
        for index in [*range(20)] * 2:
            assert images.get(index, reader).getpixel((0, 0)) == (index if mode == "L" else (index,) * 3)
    assert reader.read == [*range(20), *range(kept, 20)]
    facts = (kept, "20 images", "memory_mb", "0.00144")
    assert [missing_facts(record.message, facts) for record in caplog.records] == [[]] * (kept > 0)


def test_a_second_epoch_does_not_need_the_files_but_a_worker_that_is_sent_the_images_does(root: Path) -> None:
    images = ImageFolder(root, transform=PLAIN, memory_mb=float("inf"))
    first, _ = all_items(images)
    for file in (root / "train").rglob("*.png"):
        file.unlink()
    assert torch.equal(all_items(images.with_split("test").with_split("train"))[0], first)
    assert len(images.augmented()[0][0]) == 3  # another transform of the same images
    with refused(ValueError, root / "train" / "ant" / "0.png", "No such file"):
        pickle.loads(pickle.dumps(images))[0]


def kept(images: DecodedImages, _: int) -> int:
    """How many images a process keeps, once it has read all: those that it need not read again."""
    again = Reader()
    for reader in (Reader(), again):
        for number in range(20):
            images.get(number, reader)
    return 20 - len(again.read)


def test_workers_share_the_memory_of_the_cache() -> None:
    images = DecodedImages(6 * EACH, 20)
    loader = DataLoader(range(2), batch_size=None, num_workers=2, collate_fn=partial(kept, images))
    assert list(loader) == [3, 3]


@pytest.mark.parametrize("flip", [None, 1.0])
def test_images_are_mirrored_only_if_flip_is_set(tmp_path: Path, flip: float | None) -> None:
    """A mirrored logo or word is another one. Half of this image is black, half white."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        halves = np.zeros((40, 40, 3), dtype=np.uint8)
        halves[:, 20:] = 255
        Image.fromarray(halves).save(tmp_path / name / "1.png")
    images = all_of(tmp_path)
    if flip is not None:
        images = all_of(tmp_path, transform=replace(images.transform, flip=flip))
    torch.manual_seed(0)
    pixels, _ = images.augmented().batch([0] * 60)
    left, right = pixels[..., :42].mean(dim=(1, 2, 3)), pixels[..., 42:].mean(dim=(1, 2, 3))
    assert ((left <= right) if flip is None else (left >= right)).all()
    assert (left != right).any()


def test_a_folder_that_has_the_name_of_its_split_is_named_once(root: Path) -> None:
    (root / "train").rename(root / "learn")
    with refused(FileNotFoundError, root, "'train'", "train_folder=...") as caught:
        ImageFolder(root)
    assert "for train" not in str(caught.value)
