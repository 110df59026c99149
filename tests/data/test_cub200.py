"""CUB-200-2011: the lists are read, the split is that of the paper, and what is missing is named."""

import shutil
from pathlib import Path

import pytest
import torch

from fewshot_callbacks.data import CUB200
from fewshot_callbacks.data.cub200 import cub_split
from tests.data.trees import CLASSES, PLAIN, SPLITS, everything, write_lists, write_tree


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("birds"))


@pytest.fixture
def broken(birds: Path, tmp_path: Path) -> Path:
    shutil.copytree(birds, tmp_path / "broken")
    return tmp_path / "broken"


def reference(split: str) -> list[str]:
    """The rule in the words of the paper's program: even, 1 of 4, 3 of 4."""
    kept = []
    for i, name in enumerate(CLASSES):
        base, val, novel = i % 2 == 0, i % 4 == 1, i % 4 == 3
        if {"train": base, "val": val, "test": novel}[split]:
            kept.append(name)
    return kept


def test_the_split_is_that_of_the_paper(birds: Path) -> None:
    names = {split: CUB200(birds, split).class_names for split in SPLITS}
    assert names == {split: tuple(reference(split)) for split in SPLITS}
    assert [len(names[split]) for split in SPLITS] == [100, 50, 50]
    assert len(set().union(*names.values())) == 200
    with pytest.raises(ValueError, match="class_id is 0; the classes of CUB-200-2011 are counted from 1"):
        cub_split(0)


@pytest.mark.parametrize("split", SPLITS)
def test_each_image_has_the_label_of_its_class(birds: Path, split: str) -> None:
    names = reference(split)
    pixels, labels = everything(CUB200(birds, split, transform=PLAIN))
    assert pixels.shape == (2 * len(names), 3, 8, 8)
    drawn = (pixels[:, :2].amax(dim=(1, 2, 3)) * 255).round().int()
    expected = torch.tensor([CLASSES.index(names[label]) for label in labels.tolist()])
    assert (drawn - expected).abs().max() <= 2  # a JPEG is not exact
    assert labels.bincount().tolist() == [2] * len(names)


@pytest.mark.parametrize("name", ["images", "classes.txt", "images.txt", "image_class_labels.txt"])
def test_what_is_missing_is_named_with_the_archive(broken: Path, name: str) -> None:
    (broken / "CUB_200_2011" / name).rename(broken / "away")
    with pytest.raises(
        FileNotFoundError, match=rf"CUB_200_2011 holds no '{name}'\. Unpack CUB_200_2011\.tgz from the Cal"
    ):
        CUB200(broken)


def test_missing_images_are_counted_and_partial_goes_on(broken: Path) -> None:
    folder = broken / "CUB_200_2011" / "images"
    shutil.rmtree(folder / CLASSES[4])
    first = f"{CLASSES[199]}/Bird_1.jpg"  # the lists begin with the last class
    (folder / first).unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"3 of the 400 images .*; the first is '{first}'\. Unpack .* partial="
    ):
        CUB200(broken)
    assert CUB200(broken, partial=True).class_names == tuple(n for n in reference("train") if n != CLASSES[4])
    assert len(CUB200(broken, "test", partial=True)) == 99


@pytest.mark.parametrize(
    ("classes", "partial", "words"),
    [
        (195, False, r"train has 98 of 100; val has 49 of 50; test has 48 of 50\. Unpack .*, or pass partial=True"),
        (3, True, r"leaves test without a class\. Unpack CUB_200_2011\.tgz from"),
    ],
)
def test_other_numbers_of_classes_are_refused(broken: Path, classes: int, partial: bool, words: str) -> None:
    paths = [f"{i + 1} {CLASSES[i]}/Bird_0.jpg" for i in range(classes)]
    write_lists(broken / "CUB_200_2011", paths, [f"{i + 1} {i + 1}" for i in range(classes)])
    with pytest.raises(ValueError, match=words):
        CUB200(broken, partial=partial)


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        ((0, 1), ["1 1"], r"has 2 images and image_class_labels\.txt 1, .*; image 2 is in only one"),
        ((0,), ["1 201"], r"has the class 201, which classes\.txt does not name"),
        ((0, None), ["1 1"], r"Line 2 of .*images\.txt is 'two', not a number and a name\. Unpack CUB"),
    ],
)
def test_lists_that_do_not_fit_are_refused(broken: Path, images: tuple, labels: list[str], words: str) -> None:
    paths = ["two" if i is None else f"{n} {CLASSES[i]}/Bird_0.jpg" for n, i in enumerate(images, start=1)]
    write_lists(broken / "CUB_200_2011", paths, labels)
    with pytest.raises(ValueError, match=words):
        CUB200(broken)
