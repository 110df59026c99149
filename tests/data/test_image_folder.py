"""Folders of images: what is served, what is refused, and in which words."""

import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fewshot_callbacks.data import FewShotDataModule, ImageFolder
from fewshot_callbacks.data.image_set import DecodedImages
from tests.data.trees import CLASSES_OF_FOLDERS as CLASSES
from tests.data.trees import PLAIN, SPLITS, everything, write_folders


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folders(tmp_path)


def all_of(folder: Path) -> ImageFolder:
    return ImageFolder(folder, split=None)


def test_the_class_of_an_image_is_its_folder(root: Path) -> None:
    colour = 0
    for split in SPLITS:
        images = ImageFolder(root, split, transform=PLAIN)
        pixels, labels = everything(images)
        assert images.class_names == CLASSES[split]
        assert labels.tolist() == [label for label in range(len(CLASSES[split])) for _ in range(4)]
        expected = torch.arange(colour + 1.0, colour + len(labels) + 1)
        raw = torch.stack([expected, 2 * expected, 255 - expected], dim=1) / 255
        assert torch.allclose(pixels, raw[:, :, None, None].expand_as(pixels), atol=1e-5)
        colour += len(labels)


def test_without_validation_there_is_no_such_split(root: Path) -> None:
    images = ImageFolder(root, val_folder=None)
    assert images.splits == ("train", "test")
    with pytest.raises(ValueError, match="There is no validation split: val_folder is None"):
        images.with_split("val")
    assert ImageFolder(root, "val", val_folder="test").class_names == CLASSES["test"]


def test_missing_folders_are_named_with_the_way_out(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere\. It should hold .* 'train', 'val' and 'test'\."):
        ImageFolder(tmp_path / "nowhere")
    with pytest.raises(
        FileNotFoundError, match=r"no folder 'dev' for val\. Make it, or .* or val_folder=None for no vali"
    ):
        ImageFolder(root, val_folder="dev")
    with pytest.raises(FileNotFoundError, match=r"no folder 'exam' for test\. Make it, or pass test_folder=\.\.\.\."):
        ImageFolder(root, test_folder="exam")
    with pytest.raises(FileNotFoundError, match=r"There is no folder .*nowhere"):
        all_of(tmp_path / "nowhere")


def test_classes_without_images_are_named(root: Path) -> None:
    (root / "val" / "emu").mkdir()
    (root / "val" / "emu" / "notes.txt").write_text("no image")
    with pytest.raises(ValueError, match=r"1 class \('emu'\) of 3 in .*val without an image\. .* remove the folder\."):
        ImageFolder(root)
    for i in range(6):
        (root / "val" / f"x{i}").mkdir()
    with pytest.raises(ValueError, match=r"7 classes \('emu', 'x0', 'x1', 'x2', 'x3', \.\.\.\) of 9 in"):
        ImageFolder(root)


def test_splits_without_classes_and_shared_classes_are_named(root: Path) -> None:
    Image.new("RGB", (4, 4)).save(root / "1.png")
    with pytest.raises(ValueError, match=r"ant holds no class: no folder is in it"):
        ImageFolder(root / "train", train_folder="ant", val_folder=None, test_folder="bee")
    for name in ("ant", "bee"):
        (root / "test" / name).mkdir()
        Image.new("RGB", (4, 4)).save(root / "test" / name / "1.png")
    with pytest.raises(
        ValueError, match=r"'train' and 'test' share 2 classes \('ant', 'bee'\); .* Keep each class in on"
    ):
        ImageFolder(root)
    with pytest.raises(ValueError, match=r"'train' and 'train' share 3 classes"):
        ImageFolder(root, val_folder="train")


# ------------------------------------------------------------------------------------------------- what lies in a folder


def sixteen_bits(shape: tuple[int, int] = (10, 10)) -> np.ndarray:
    return np.linspace(0, 65535, num=shape[0] * shape[1]).reshape(shape).astype(np.uint16)


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_16_bit_greys_keep_their_greys(ending: str, tmp_path: Path) -> None:
    (tmp_path / "xray").mkdir()
    Image.fromarray(sixteen_bits()).save(tmp_path / "xray" / f"1.{ending}")
    transform = replace(PLAIN, image_size=10, resize=10)
    pixels, _ = ImageFolder(tmp_path, split=None, transform=transform)[0]
    expected = torch.from_numpy(sixteen_bits() / 65535.0).float()
    torch.testing.assert_close(pixels, expected.expand(3, 10, 10), atol=0.5 / 255 + 1e-6, rtol=0)


@pytest.mark.parametrize(("mode", "words"), [("I", "32-bit integers"), ("F", "fractions")])
def test_numbers_without_a_known_range_are_refused_with_the_file(mode: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "depth").mkdir()
    Image.new(mode, (4, 4), 300).save(tmp_path / "depth" / "1.tif")
    with pytest.raises(
        ValueError, match=rf"1\.tif cannot be read as an image: it holds {words}, whose black and white"
    ):
        all_of(tmp_path)[0]


@pytest.mark.parametrize("target", ["..", ".", "../bee", "../../train"])
def test_a_link_to_a_folder_that_is_read_already_is_refused(target: str, root: Path) -> None:
    (root / "train" / "ant" / "loop").symlink_to(target, target_is_directory=True)
    with pytest.raises(ValueError, match=r"leads to .*, which is read as .* already: .* Remove the link\."):
        all_of(root / "train")


def test_links_to_other_folders_and_images_are_followed_and_a_link_to_nothing_is_an_image_that_is_missing(
    root: Path,
) -> None:
    (root / "train" / "ant" / "more").symlink_to(root / "val" / "dog", target_is_directory=True)
    (root / "train" / "ant" / "z.png").symlink_to(root / "val" / "eel" / "0.png")
    assert all_of(root / "train").labels.bincount().tolist() == [9, 4, 4]
    (root / "train" / "ant" / "4.png").symlink_to(root / "gone.png")
    with pytest.raises(ValueError, match=r"ant.4\.png cannot be read as an image: .*No such file"):
        all_of(root / "train")[4]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_named_pipe_is_skipped_or_refused_and_never_waited_for(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(root / "train" / "ant" / "pipe.png")
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        images = all_of(root / "train")
    assert len(images) == 12
    assert "1 file skipped: no regular file 1." in caplog.text
    (root / "train" / "bee" / "0.png").unlink()
    os.mkfifo(root / "train" / "bee" / "0.png")
    with pytest.raises(ValueError, match=r"bee.0\.png cannot be read as an image: it is no regular file"):
        images[4]


def test_files_with_other_endings_are_counted_in_one_line(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        all_of(root / "train")
        assert not caplog.records
        for name in ("ant/1.gif", "ant/2.GIF", "bee/1.avif", "bee/notes"):
            (root / "train" / name).write_text("?")
        all_of(root / "train")
    (message,) = [record.message for record in caplog.records]
    assert "train: 4 files skipped: .gif 2, .avif 1, without an ending 1. Images end in .jpg, .jpeg, .png," in message


# ------------------------------------------------------------------------------------------------------ classes by shares


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Ten classes in one folder; the red of an image is the number of its class."""
    for number in range(10):
        for i in range(3):
            (tmp_path / f"bird{number}").mkdir(exist_ok=True)
            Image.new("RGB", (12, 12), (number, i, 0)).save(tmp_path / f"bird{number}" / f"{i}.png")
    return tmp_path


def classes_of(root: Path, **settings: float) -> dict[str, set[str]]:
    data = ImageFolder(root, **settings)
    return {split: set(data.with_split(split).class_names) for split in SPLITS}


def test_a_plain_folder_of_classes_is_split_by_shares_and_a_seed(plain: Path) -> None:
    splits = classes_of(plain, val_share=0.2, test_share=0.3)
    assert [len(splits[split]) for split in SPLITS] == [5, 2, 3]
    assert set.union(*splits.values()) == {f"bird{number}" for number in range(10)}
    assert classes_of(plain, val_share=0.2, test_share=0.3) == splits
    others = [classes_of(plain, val_share=0.2, test_share=0.3, split_seed=seed) for seed in range(1, 6)]
    assert all([len(one[split]) for split in SPLITS] == [5, 2, 3] for one in others)
    assert any(one != splits for one in others)


def test_every_split_that_is_asked_for_has_a_class(plain: Path) -> None:
    splits = classes_of(plain, val_share=0.01, test_share=0.01)
    assert [len(splits[split]) for split in SPLITS] == [8, 1, 1]
    images = ImageFolder(plain, test_share=0.5)
    assert FewShotDataModule(images).val_dataloader() == []
    assert len(images.class_names) == 5
    with pytest.raises(ValueError, match="There is no validation split: val_share is 0"):
        images.with_split("val")


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"val_share": 0.2}, r"val_share is 0\.2 and test_share 0\.0; the rest is trained on"),
        ({"val_share": 0.5, "test_share": 0.5}, "with a sum below 1"),
        ({"val_share": -0.1, "test_share": 0.5}, "val_share >= 0"),
        ({"val_share": 0.49, "test_share": 0.49}, "holds 10 classes; .* leave none to train on"),
    ],
)
def test_shares_that_leave_nothing_are_refused(shares: dict, words: str, plain: Path) -> None:
    with pytest.raises(ValueError, match=words):
        ImageFolder(plain, **shares)


def test_shares_of_what_is_split_already_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"it is split already\. Leave out val_share and test_share"):
        ImageFolder(root, val_share=0.2, test_share=0.2)


def test_a_plain_folder_without_shares_says_how_to_split_it(plain: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"To split the 10 folders in it as classes, pass val_share=0\.2 and"):
        ImageFolder(plain)


# --------------------------------------------------------------------------------------------- decoded images stay in memory

EACH = 4 * 12 * 10 / 1e6  # MB of an image as `draw` draws it


class Reader:
    def __init__(self, mode: str = "RGB") -> None:
        self.read: list[int] = []
        self.mode = mode

    def __call__(self, index: int) -> Image.Image:
        self.read.append(index)
        return Image.new(self.mode, (12, 10), (index,) * len(self.mode))


@pytest.mark.parametrize(("memory_mb", "mode", "kept"), [(0, "RGB", 0), (3 * EACH, "RGB", 3), (3 * EACH, "L", 12)])
def test_images_are_read_once_as_far_as_they_fit_and_a_full_cache_is_said_once(
    memory_mb: float, mode: str, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    images, reader = DecodedImages(memory_mb, 20), Reader(mode)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        for index in [*range(20)] * 2:
            assert images.get(index, reader).getpixel((0, 0)) == (index if mode == "L" else (index,) * 3)
    assert reader.read == [*range(20), *range(kept, 20)]
    said = f"{kept} of 20 images fill memory_mb = 0.00144 once they are decoded; the others are decoded at each access."
    assert [record.message.startswith(said) for record in caplog.records] == [True] * (kept > 0)


def test_a_worker_that_is_sent_the_images_reads_them_itself() -> None:
    images, reader = DecodedImages(20 * EACH, 20), Reader()
    images.get(0, reader)
    sent = pickle.loads(pickle.dumps(images))
    sent.get(0, reader)
    assert reader.read == [0, 0]


@pytest.mark.parametrize(("memory_mb", "again"), [(1, True), (float("inf"), True), (0, False)])
def test_a_second_epoch_does_not_need_the_files(root: Path, memory_mb: float, again: bool) -> None:
    images = ImageFolder(root, transform=PLAIN, val_folder=None, memory_mb=memory_mb)
    first, _ = everything(images)
    for file in (root / "train").rglob("*.png"):
        file.unlink()
    if not again:
        with pytest.raises(ValueError, match="cannot be read as an image"):
            images[0]
        return
    assert torch.equal(everything(images.with_split("test").with_split("train"))[0], first)
    assert len(images.augmented()[0][0]) == 3  # another transform of the same images


class Kept(Dataset[int]):
    """Each item is the number of images that the process keeps once it has read all."""

    def __init__(self, images: DecodedImages) -> None:
        self.images = images

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        for number in range(20):
            self.images.get(number, Reader())
        return len(self.images._images)


def test_workers_share_the_memory() -> None:
    loader = DataLoader(Kept(DecodedImages(6 * EACH, 20)), batch_size=None, num_workers=2)
    assert list(loader) == [3, 3]
