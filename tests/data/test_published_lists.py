"""CUB-200-2011 and mini-ImageNet: the published lists and splits decide, and what is missing is named."""

import shutil
from pathlib import Path

import pytest
import torch

from fewshot_callbacks.data import CUB200, MiniImageNet
from fewshot_callbacks.data.cub200 import cub_split
from tests.data.trees import CLASSES, PLAIN, SPLITS, all_items, save_image, write_lists, write_tree
from tests.messages import refused

BIRDS = {  # the rule in the words of the paper's program: even, 1 of 4, 3 of 4
    "train": [name for i, name in enumerate(CLASSES) if i % 2 == 0],
    "val": [name for i, name in enumerate(CLASSES) if i % 4 == 1],
    "test": [name for i, name in enumerate(CLASSES) if i % 4 == 3],
}
LABELS = [f"n{(i * 7919) % 100 + 1500000:08}" for i in range(100)]  # in no order
ARCHIVE = ("CUB_200_2011.tgz", "https://www.vision.caltech.edu/datasets/cub_200_2011/")
LISTS = ("train.csv", "val.csv", "test.csv", "https://github.com/twitter-research/meta-learning-lstm")
PUBLISHED = {"train": LABELS[:64], "val": LABELS[64:80], "test": LABELS[80:]}


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("birds"))


@pytest.fixture
def broken(birds: Path, tmp_path: Path) -> Path:
    return shutil.copytree(birds, tmp_path / "broken")


@pytest.mark.parametrize("split", SPLITS)
def test_the_split_is_that_of_the_paper_and_each_image_has_the_label_of_its_class(birds: Path, split: str) -> None:
    data, names = CUB200(birds, split, transform=PLAIN), BIRDS[split]
    assert data.class_names == tuple(names)
    assert len(names) == (100 if split == "train" else 50)
    pixels, labels = all_items(data)
    drawn = (pixels[:, :2].amax(dim=(1, 2, 3)) * 255).round().int()
    expected = torch.tensor([CLASSES.index(names[label]) for label in labels.tolist()])
    assert (drawn - expected).abs().max() <= 2  # a JPEG is not exact
    assert labels.bincount().tolist() == [2] * len(names)
    with refused(ValueError, "class_id", 0, 1):
        cub_split(0)


def test_missing_images_are_counted_and_partial_leaves_them_out(broken: Path) -> None:
    folder = broken / "CUB_200_2011" / "images"
    shutil.rmtree(folder / CLASSES[4])
    first = f"{CLASSES[199]}/Bird_1.jpg"  # the lists begin with the last class
    (folder / first).unlink()
    with refused(FileNotFoundError, 3, "400 images", "images.txt", first, *ARCHIVE, "partial=True"):
        CUB200(broken)
    data = CUB200(broken, partial=True)
    assert data.class_names == tuple(name for name in BIRDS["train"] if name != CLASSES[4])
    assert len(data.with_split("test")) == 99
    (broken / "CUB_200_2011" / "images.txt").unlink()
    with refused(FileNotFoundError, "CUB_200_2011", "'images.txt'", *ARCHIVE):
        CUB200(broken, partial=True)


@pytest.mark.parametrize(
    ("images", "labels", "partial", "facts"),
    [
        (range(195), range(195), False, (*SPLITS, 98, 100, 49, 48, 50, "partial=True")),
        (range(3), range(3), True, ("test", "class")),
        ((0, 1), (0,), False, ("images.txt", "2 images", "image_class_labels.txt", 1, "image 2")),
        ((0,), (200,), False, ("image_class_labels.txt", 201, "classes.txt")),
        ((0, None), (0,), False, (2, "images.txt", "'two'")),
    ],
    ids=["few", "no test", "no label", "no class", "no list"],
)
def test_lists_that_do_not_fit_are_refused(broken: Path, images, labels, partial: bool, facts: tuple) -> None:
    paths = ["two" if i is None else f"{n} {CLASSES[i]}/Bird_0.jpg" for n, i in enumerate(images, start=1)]
    write_lists(broken / "CUB_200_2011", paths, [f"{n} {i + 1}" for n, i in enumerate(labels, start=1)])
    with refused(ValueError, *facts, *ARCHIVE):
        CUB200(broken, partial=partial)


def write_mini(root: Path, published: dict[str, list[str]] = PUBLISHED) -> Path:
    """Two images of each class, the lists going around the classes; red is the class, green the number of an image."""
    for split, labels in published.items():
        rows = [(f"{label}{number:08}.jpg", label, number) for number in (1, 2) for label in labels]
        for file, label, number in rows:
            save_image(root / "images" / file, (2 * LABELS.index(label), 40 * number, 0))
        lines = [f"{file},{label}" for file, label, _ in rows]
        (root / f"{split}.csv").write_text("\n".join(["filename,label", *lines]))
    return root


@pytest.mark.parametrize("split", PUBLISHED)
def test_the_split_of_mini_imagenet_is_that_of_its_lists(tmp_path: Path, split: str) -> None:
    served = MiniImageNet(write_mini(tmp_path), split, transform=PLAIN)
    assert served.class_names == tuple(sorted(PUBLISHED[split]))
    pixels, labels = all_items(served)
    drawn = (pixels.amax(dim=(2, 3)) * 255).round().int()  # (items, 3)
    expected = [(2 * LABELS.index(label), 40 * number) for number in (1, 2) for label in PUBLISHED[split]]
    assert (drawn[:, :2] - torch.tensor(expected)).abs().max() <= 3  # the order is the list's
    assert [served.class_names[label] for label in labels.tolist()] == PUBLISHED[split] * 2


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ("n01.jpg,n01532829\n", ("val.csv", "n01.jpg", "n01532829", "filename,label")),
        ("", ("val.csv", "[]", "filename,label")),
        ("filename,label\nn01.jpg\n", (2, "val.csv", "n01.jpg")),
        (LABELS[3:4], ("1 class", LABELS[3])),
        (LABELS[64:65], (*SPLITS, 5, 64, 1, 16, 4, 20, "partial=True")),
        (None, ("'val.csv'",)),
    ],
    ids=["no header", "empty", "no row", "shared", "few", "missing"],
)
def test_lists_of_mini_imagenet_that_are_missing_or_changed_are_refused(tmp_path: Path, content, facts) -> None:
    write_mini(tmp_path, {"train": LABELS[:5], "test": LABELS[80:84]})
    if isinstance(content, str):
        (tmp_path / "val.csv").write_text(content)
    elif content is not None:
        write_mini(tmp_path, {"val": content})
    with refused(FileNotFoundError if content is None else ValueError, *facts, *LISTS):
        MiniImageNet(tmp_path)
