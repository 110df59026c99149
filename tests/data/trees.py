"""What the tests of the data share: tiny images, what a model sees of them, and processes that are not there."""

from pathlib import Path

import pytest
from PIL import Image

from fewshot_callbacks.data import FewShotDataset, PhotoTransform
from fewshot_callbacks.data.dataset import Batch

SPLITS = ("train", "val", "test")
PLAIN = PhotoTransform(image_size=8, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def pretend_to_be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    """Let torch.distributed say that this is one of several processes."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: world_size)


def all_items(images: FewShotDataset) -> Batch:
    """Return all items of a split as one batch."""
    return images.batch(range(len(images)))


def names_of(data: FewShotDataset) -> dict[str, set[str]]:
    """Return the classes of each split."""
    return {split: set(data.with_split(split).class_names) for split in SPLITS}


def save_image(file: Path, colour: tuple[int, int, int] = (0, 0, 0), size: tuple[int, int] = (12, 10)) -> None:
    """Write an image of one colour, and the folders above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)


CLASSES = [f"{i + 1:03}.Bird_{(i * 77) % 200:03}" for i in range(200)]


def write_tree(root: Path) -> Path:
    """Write CUB-200-2011 with two images of each class, in lists that are not sorted.

    The number of the class, from 0, is the red of its first image and the green of its second.
    """
    folder = root / "CUB_200_2011"
    paths = []
    labels = []
    for i in reversed(range(200)):
        for j in range(2):
            save_image(folder / "images" / CLASSES[i] / f"Bird_{j}.jpg", (i, 0, 0) if j == 0 else (0, i, 0))
            paths.append(f"{len(paths) + 1} {CLASSES[i]}/Bird_{j}.jpg")
            labels.append(f"{len(paths)} {i + 1}")
    write_lists(folder, paths, labels)
    return root


def write_lists(folder: Path, paths: list[str], labels: list[str]) -> None:
    """Write the three lists of CUB-200-2011."""
    (folder / "classes.txt").write_text("".join(f"{i + 1} {name}\n" for i, name in enumerate(CLASSES)))
    (folder / "images.txt").write_text("\n".join(paths) + "\n")
    (folder / "image_class_labels.txt").write_text("\n".join(reversed(labels)) + "\n")


CLASSES_OF_FOLDERS = {"train": ("ant", "bee", "cat"), "val": ("dog", "eel"), "test": ("fox", "gnu")}


def write_folders(root: Path) -> Path:
    """Write a folder of each split, with four images of each class.

    The red of an image is its number, from 1, in the order of splits and classes.
    """
    places = [(split, name, i) for split, classes in CLASSES_OF_FOLDERS.items() for name in classes for i in range(4)]
    for colour, (split, name, i) in enumerate(places, start=1):
        save_image(root / split / name / f"{i}.png", (colour, 2 * colour, 255 - colour), (20, 10))
    return root
