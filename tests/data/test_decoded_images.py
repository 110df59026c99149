"""Decoded images: read once where they fit, at each access where not."""

import pickle
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fewshot_callbacks.data import ImageFolder
from fewshot_callbacks.data.image_set import DecodedImages
from tests.data.trees import SMALL, draw, everything

EACH = 4 * 12 * 10 / 1e6  # MB of an image as `draw` draws it


class Reader:
    def __init__(self, mode: str = "RGB") -> None:
        self.read: list[int] = []
        self.mode = mode

    def __call__(self, index: int) -> Image.Image:
        self.read.append(index)
        return Image.new(self.mode, (12, 10), (index,) * len(self.mode))


@pytest.mark.parametrize(("memory_mb", "mode", "kept"), [(0, "RGB", 0), (3 * EACH, "RGB", 3), (3 * EACH, "L", 12)])
def test_images_are_read_once_as_far_as_they_fit(memory_mb: float, mode: str, kept: int) -> None:
    images, reader = DecodedImages(memory_mb, 20), Reader(mode)
    for _ in range(2):
        for index in range(20):
            assert images.get(index, reader).getpixel((0, 0)) == (index if mode == "L" else (index,) * 3)
    assert reader.read == [*range(20), *range(kept, 20)]


def test_a_full_cache_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    images, reader = DecodedImages(2 * EACH, 20), Reader()
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        for index in range(20):
            images.get(index, reader)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("2 of 20 images fill memory_mb = 0.00096 once they are decoded; the others are decoded")


def test_a_worker_that_is_sent_the_images_reads_them_itself() -> None:
    images, reader = DecodedImages(20 * EACH, 20), Reader()
    images.get(0, reader)
    sent = pickle.loads(pickle.dumps(images))
    sent.get(0, reader)
    assert reader.read == [0, 0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split, classes in {"train": ("ant", "bee"), "test": ("cat", "dog")}.items():
        for number, name in enumerate(classes):
            for item in range(2):
                draw(tmp_path / split / name / f"{item}.png", (100 * number, 100 * item, 7))
    return tmp_path


@pytest.mark.parametrize(("memory_mb", "again"), [(1, True), (float("inf"), True), (0, False)])
def test_a_second_epoch_does_not_need_the_files(root: Path, memory_mb: float, again: bool) -> None:
    images = ImageFolder(root, transform=SMALL, val_folder=None, memory_mb=memory_mb)
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


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_memory_that_is_none_is_refused(wrong: float, root: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^memory_mb is .* Use 0 to keep no decoded images, 512 for half a gigabyte\.$"
    ):
        ImageFolder(root, val_folder=None, memory_mb=wrong)
