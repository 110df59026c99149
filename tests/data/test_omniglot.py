"""Omniglot: the published sets, whole alphabets to validate on, ink high; what is missing is named."""

import hashlib
import os
import shutil
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from PIL import Image
from torchvision import datasets

from fewshot_callbacks.data import Omniglot, omniglot
from tests.data.trees import SPLITS, everything

SIZES = {"images_background": (964, 30), "images_evaluation": (659, 20)}
FEW = ("Korean",)


def write_tree(root: Path, sizes: dict[str, tuple[int, int]], drawings: int = 2) -> Path:
    """Characters dealt to alphabets in turn; the last alphabets of the background set bear published names."""
    root.mkdir(parents=True, exist_ok=True)
    Image.new("1", (105, 105), 1).save(root / "drawing.png")
    for name, (characters, alphabets) in sizes.items():
        names = [f"{name[7:10]}{i:02}" for i in range(alphabets)]
        if name == "images_background":
            names[-len(omniglot.VALIDATION_ALPHABETS) :] = omniglot.VALIDATION_ALPHABETS[-alphabets:]
        for i in reversed(range(characters)):
            folder = root / "omniglot-py" / name / names[i % alphabets] / f"character{i // alphabets + 1:02}"
            folder.mkdir(parents=True)
            for j in range(drawings):
                os.link(root / "drawing.png", folder / f"{i:04}_{j + 1:02}.png")
    return root


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("published"), SIZES)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path):
    """A folder and its address."""
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Five characters of two alphabets to train and validate on, two to test on."""
    root = write_tree(tmp_path / "few", {"images_evaluation": (2, 1)})
    for i, place in enumerate(("Greek/character02", "Greek/character01", "Korean/character01", "Korean/character02")):
        folder = root / "omniglot-py" / "images_background" / place
        folder.mkdir(parents=True)
        for j in range(2):
            image = Image.new("1", (105, 105), 1)
            image.paste(0, (0, 0, 105, 15 * (i + 1)))  # rows of ink
            image.save(folder / f"{i:04}_{j + 1:02}.png")
    return root


def test_the_published_sets_and_whole_alphabets_to_validate_on(published: Path, monkeypatch) -> None:
    monkeypatch.setattr(omniglot, "DRAWINGS", 2)
    data = Omniglot(published)
    names = {split: data.with_split(split).class_names for split in SPLITS}
    alphabets = {split: {name.split("/")[0] for name in of} for split, of in names.items()}
    assert (len(names["train"]) + len(names["val"]), len(names["test"])) == (964, 659)
    assert alphabets["val"] == {"Armenian", "Korean", "N_Ko", "Tagalog", "Tifinagh"}
    assert (len(alphabets["train"]), len(alphabets["test"])) == (25, 20)
    assert not alphabets["train"] & alphabets["val"]
    assert not set(names["train"]) & set(names["test"])
    assert names["test"] == tuple(sorted(names["test"]))
    assert data.labels.bincount().tolist() == [2] * len(names["train"])


def test_incomplete_sets_are_refused_with_counts(published: Path, few: Path) -> None:
    with pytest.raises(ValueError, match=r"964 classes \('Armenian/character01'.* 20 drawings; the first has 2\. Unp"):
        Omniglot(published)
    with pytest.raises(ValueError, match=r"images_background holds 4 characters; published are 964\. Unpack .* par"):
        Omniglot(few)
    shutil.rmtree(few / "omniglot-py" / "images_evaluation")
    words = r"few/omniglot-py holds no 'images_evaluation'\. Unpack images_background\.zip and .* or pass download=True"
    with pytest.raises(FileNotFoundError, match=words):
        Omniglot(few, val_alphabets=FEW, partial=True)


def test_ink_is_high_and_images_are_resized(few: Path) -> None:
    images = Omniglot(few, image_size=7, val_alphabets=FEW, partial=True)
    assert images.class_names == ("Greek/character01", "Greek/character02")
    pixels, labels = everything(images)
    assert labels.tolist() == [0, 0, 1, 1]
    assert pixels.shape == (4, 1, 7, 7)
    rows = torch.tensor([2, 2, 1, 1])  # character01 was drawn second; a row of 7 is 15 of 105
    expected = (torch.arange(7) < rows[:, None]).float()[:, None, :, None].expand(-1, -1, -1, 7)
    assert torch.allclose(pixels, expected, atol=0.3)  # the edge is smoothed
    assert torch.equal(pixels, everything(images.augmented())[0])
    assert Omniglot(few, "test", val_alphabets=FEW, partial=True)[0][0].shape == (1, 28, 28)


def test_nothing_depends_on_the_order_of_the_listing(few: Path) -> None:
    files = Omniglot(few, val_alphabets=FEW, partial=True).files
    iterdir, glob = Path.iterdir, Path.glob
    with (
        patch.object(Path, "iterdir", lambda self: iter(sorted(iterdir(self), reverse=True))),
        patch.object(Path, "glob", lambda self, pattern: iter(sorted(glob(self, pattern), reverse=True))),
    ):
        assert Omniglot(few, val_alphabets=FEW, partial=True).files == files


def test_alphabets_are_chosen_by_name(few: Path) -> None:
    with pytest.raises(ValueError, match=r"has 'Armenian', which is not an alpha.* Choose among Greek, Korean\."):
        Omniglot(few, partial=True)
    with pytest.raises(ValueError, match=r"leaves train without a class\. Hold out fewer alphabets"):
        Omniglot(few, val_alphabets=("Greek", "Korean"), partial=True)
    data = Omniglot(few, val_alphabets=(), partial=True)
    assert (len(data.class_names), data.splits) == (4, ("train", "test"))
    with pytest.raises(ValueError, match=r"There is no validation split: val_alphabets is empty\. Name alpha"):
        data.with_split("val")


def test_archives_are_fetched_checked_and_unpacked(few: Path, tmp_path: Path, served, monkeypatch) -> None:
    (folder, address), root = served, tmp_path / "new"
    sums = {}
    for name in SIZES:
        with zipfile.ZipFile(folder / f"{name}.zip", "w") as archive:
            for file in sorted((few / "omniglot-py" / name).rglob("*.png")):
                archive.write(file, file.relative_to(few / "omniglot-py"))
        sums[name] = hashlib.md5((folder / f"{name}.zip").read_bytes()).hexdigest()
    monkeypatch.setattr(datasets.Omniglot, "download_url_prefix", address)
    monkeypatch.setattr(datasets.Omniglot, "zips_md5", {**sums, "images_evaluation": "0" * 32})
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    settings = {"val_alphabets": FEW, "partial": True, "download": True}
    with pytest.raises(RuntimeError, match="corrupted"):
        Omniglot(root, **settings)
    monkeypatch.setattr(datasets.Omniglot, "zips_md5", sums)
    data = Omniglot(root, **settings)
    assert (len(data.class_names), *(len(data.with_split(split)) for split in SPLITS)) == (2, 4, 4, 4)
    for name in SIZES:
        (folder / f"{name}.zip").unlink()
        (root / "omniglot-py" / f"{name}.zip").unlink()
    Omniglot(root, **settings)  # the folders are there: nothing is fetched
