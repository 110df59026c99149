"""mini-ImageNet: the published lists decide, and what is missing is named."""

import shutil
from pathlib import Path

import pytest
import torch

from fewshot_callbacks.data import MiniImageNet
from tests.data.trees import PLAIN, draw, everything

SIZES = {"train": 64, "val": 16, "test": 20}
LABELS = [f"n{(i * 7919) % 100 + 1500000:08}" for i in range(100)]  # in no order
PUBLISHED = {"train": LABELS[:64], "val": LABELS[64:80], "test": LABELS[80:]}


def write_tree(root: Path, images_per_class: int = 2) -> Path:
    """100 classes; the red of an image is its class, the green its number. The lists go around the classes."""
    for split, labels in PUBLISHED.items():
        rows = [(f"{label}{i + 1:08}.jpg", label) for i in range(images_per_class) for label in labels]
        for file, label in rows:
            draw(root / "images" / file, (2 * LABELS.index(label), int(file[9:17]) * 40, 0))
        write_list(root, split, rows)
    return root


def write_list(root: Path, split: str, rows: list[tuple[str, str]]) -> None:
    (root / f"{split}.csv").write_text("filename,label\n" + "".join(f"{file},{label}\n" for file, label in rows))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("images"))


@pytest.fixture
def broken(images: Path, tmp_path: Path) -> Path:
    shutil.copytree(images, tmp_path / "broken")
    return tmp_path / "broken"


@pytest.mark.parametrize("split", SIZES)
def test_the_lists_decide(images: Path, split: str) -> None:
    served = MiniImageNet(images, split, transform=PLAIN)
    assert served.class_names == tuple(sorted(PUBLISHED[split]))
    assert len(served.class_names) == SIZES[split]
    pixels, labels = everything(served)
    drawn = (pixels.amax(dim=(2, 3)) * 255).round().int()  # (items, 3)
    expected = [(2 * LABELS.index(label), 40 * number) for number in (1, 2) for label in PUBLISHED[split]]
    assert (drawn[:, :2] - torch.tensor(expected)).abs().max() <= 3  # a JPEG is not exact; the order is the list's
    assert [served.class_names[label] for label in labels.tolist()] == PUBLISHED[split] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((f"{split}.csv", r"Put train\.csv, val\.csv and test") for split in SIZES),
        ("images", r"Put the images of ILSVRC-2012"),
    ],
)
def test_missing_lists_and_folders_are_named(broken: Path, name: str, words: str) -> None:
    (broken / name).rename(broken / "away")
    with pytest.raises(FileNotFoundError, match=rf"broken holds no '{name}'\. {words}"):
        MiniImageNet(broken)


def test_what_is_incomplete_is_counted_and_partial_goes_on(broken: Path) -> None:
    first = PUBLISHED["val"][5]
    (broken / "images" / f"{first}00000001.jpg").unlink()
    words = (
        rf"1 of the 200 images of the lists are not in .*images; the first is '{first}00000001\.jpg'\. .* partial=Tr"
    )
    with pytest.raises(FileNotFoundError, match=words):
        MiniImageNet(broken)
    assert len(MiniImageNet(broken, "val", partial=True)) == 31
    write_list(broken, "val", [(f"{label}00000002.jpg", label) for label in PUBLISHED["val"][:15]])
    words = r"train has 64 of 64; val has 15 of 16; test has 20 of 20\. Put train\.csv, .* or pass partial=True"
    with pytest.raises(ValueError, match=words):
        MiniImageNet(broken)


@pytest.mark.parametrize("partial", [False, True])
def test_a_class_in_two_lists_is_refused(broken: Path, partial: bool) -> None:
    write_list(broken, "val", [(f"{label}00000001.jpg", label) for label in LABELS[60:80]])
    with pytest.raises(ValueError, match=r"train\.csv and val\.csv share 4 classes \('n.*Use train\.csv, val\.csv and"):
        MiniImageNet(broken, partial=partial)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("n01.jpg,n01532829\n", r"test\.csv begins with \['n01\.jpg', .*, not with filename,label"),
        ("", r"test\.csv begins with \[\], not with filename,label"),
        ("filename,label\nn01.jpg\n", r"Line 2 of .*test\.csv is \['n01\.jpg'\], not a file name and"),
    ],
)
def test_files_that_are_no_lists_are_refused(broken: Path, content: str, words: str) -> None:
    (broken / "test.csv").write_text(content)
    with pytest.raises(ValueError, match=words):
        MiniImageNet(broken)
