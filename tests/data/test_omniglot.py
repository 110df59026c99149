"""Omniglot: the published sets, whole alphabets to validate on, ink high; what is missing is named."""

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from torchvision import datasets

from fewshot_callbacks.data import Omniglot, omniglot
from tests.data.trees import all_items, names_of
from tests.messages import refused

ALPHABETS = ("Armenian", "Korean", "N_Ko", "Tagalog", "Tifinagh")
SETS = ("images_background", "images_evaluation")
ARCHIVES = tuple(f"{name}.zip" for name in SETS)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Two characters to train on, one of each alphabet to validate on, two to test on; each drawn twice."""
    background = ["Greek/character02", "Greek/character01", *(f"{alphabet}/character01" for alphabet in ALPHABETS)]
    places = [*(f"{SETS[0]}/{place}" for place in background), *(f"{SETS[1]}/Tibetan/character0{i}" for i in (1, 2))]
    for i, place in enumerate(places):
        (tmp_path / "few" / "omniglot-py" / place).mkdir(parents=True)
        image = Image.new("1", (105, 105), 1)
        image.paste(0, (0, 0, 105, 15 * (i + 1) % 105))  # rows of ink
        for j in (1, 2):
            image.save(tmp_path / "few" / "omniglot-py" / place / f"{i:04}_{j:02}.png")
    return tmp_path / "few"


def test_whole_alphabets_of_the_published_sets_are_validated_on(few: Path, monkeypatch) -> None:
    monkeypatch.setattr(omniglot, "CHARACTERS", dict(zip(SETS, (7, 2), strict=True)))
    with refused(ValueError, "7 classes", "Armenian/character01", "20 drawings", 2, *ARCHIVES):
        Omniglot(few)
    monkeypatch.setattr(omniglot, "DRAWINGS", 2)
    data = Omniglot(few)
    assert names_of(data) == {
        "train": {"Greek/character01", "Greek/character02"},
        "val": {f"{alphabet}/character01" for alphabet in ALPHABETS},
        "test": {"Tibetan/character01", "Tibetan/character02"},
    }
    assert data.labels.bincount().tolist() == [2, 2]


def test_ink_is_high_and_images_are_resized(few: Path) -> None:
    images = Omniglot(few, image_size=7, partial=True)
    assert images.class_names == ("Greek/character01", "Greek/character02")
    pixels, labels = all_items(images)
    assert labels.tolist() == [0, 0, 1, 1]
    rows = torch.tensor([2, 2, 1, 1])  # character01 was drawn second; a row of 7 is 15 of 105
    expected = (torch.arange(7) < rows[:, None]).float()[:, None, :, None].expand(-1, -1, -1, 7)
    torch.testing.assert_close(pixels, expected, atol=0.3, rtol=0)  # the edge is smoothed
    assert torch.equal(pixels, all_items(images.augmented())[0])
    without = Omniglot(few, val_alphabets=(), partial=True)
    assert (len(without.class_names), without.splits) == (7, ("train", "test"))
    assert Omniglot(few, "test", partial=True)[0][0].shape == (1, 28, 28)


def test_labels_do_not_depend_on_the_order_in_which_folders_are_listed(few: Path) -> None:
    files = Omniglot(few, partial=True).files
    iterdir, glob = Path.iterdir, Path.glob
    with (
        patch.object(Path, "iterdir", lambda self: iter(sorted(iterdir(self), reverse=True))),
        patch.object(Path, "glob", lambda self, pattern: iter(sorted(glob(self, pattern), reverse=True))),
    ):
        assert Omniglot(few, partial=True).files == files


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"partial": False}, (SETS[0], 7, 964, *ARCHIVES, "partial=True")),
        ({"val_alphabets": ("Irish",)}, ("val_alphabets", "Irish", "Greek", *ALPHABETS)),
        ({"val_alphabets": ("Greek", *ALPHABETS)}, ("train", "alphabets")),
        ({"val_alphabets": (), "split": "val"}, ("validation", "val_alphabets")),
    ],
)
def test_an_incomplete_set_and_a_choice_of_alphabets_that_empties_a_split_are_refused(
    few: Path, settings: dict, facts: tuple
) -> None:
    with refused(ValueError, *facts):
        Omniglot(few, **{"partial": True, **settings})


def test_a_missing_set_is_named_with_the_archives(few: Path) -> None:
    shutil.rmtree(few / "omniglot-py" / "images_evaluation")
    with refused(FileNotFoundError, "few/omniglot-py", "'images_evaluation'", *ARCHIVES, "download=True"):
        Omniglot(few, partial=True)


def test_archives_that_are_missing_are_fetched_with_their_checksums(few: Path, tmp_path: Path, monkeypatch) -> None:
    fetched = []

    def fetch(address: str, folder: str, *, filename: str, md5: str) -> None:
        fetched.append((address, filename, md5))
        shutil.copytree(
            few / "omniglot-py" / filename.removesuffix(".zip"), Path(folder, filename.removesuffix(".zip"))
        )

    monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", fetch)
    for _ in range(2):  # the second time the folders are there: nothing is fetched
        data = Omniglot(tmp_path / "new", partial=True, download=True)
        published, sums = datasets.Omniglot.download_url_prefix, datasets.Omniglot.zips_md5
        assert fetched == [(f"{published}/{name}.zip", f"{name}.zip", sums[name]) for name in SETS]
    assert names_of(data) == names_of(Omniglot(few, partial=True))
