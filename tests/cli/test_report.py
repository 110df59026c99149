"""`fewshot report`: files in, one HTML file out, and what it answers to input that cannot be used."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from fewshot_callbacks.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeddings")
    drawn = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 6)
    rows = np.eye(12)[labels] + 0.3 * drawn.normal(size=(72, 12))
    for place, label in enumerate(labels):
        (folder / f"images/{label:02}").mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), int(3 * place)).save(folder / f"images/{label:02}/{place:02}.png")
    names = np.array([f"kind {number}" for number in range(12)])
    paths = np.array([f"images/{label:02}/{place:02}.png" for place, label in enumerate(labels)])
    np.savez(folder / "one.npz", embeddings=rows, labels=labels, label_names=names)
    np.savez(folder / "paths.npz", embeddings=rows, labels=labels, paths=paths)
    np.savez(folder / "two.npz", embeddings=rows + drawn.normal(size=rows.shape), labels=labels)
    np.savez(folder / "fewer.npz", embeddings=rows[:60], labels=labels[:60])
    np.savez(folder / "narrow.npz", embeddings=rows[:, :5], labels=labels)
    np.savez(folder / "split.npz", query_ids=np.arange(24), gallery_ids=np.arange(72), embeddings=rows[::3],
             labels=labels[::3], gallery=rows, gallery_labels=labels)  # fmt: skip
    return folder


def report(folder, *words):
    code = main(["report", str(folder / words[0]), "-o", str(folder / "out.html"), *map(str, words[1:])])
    assert code == 0
    html = (folder / "out.html").read_text(encoding="utf-8")
    return html, json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


def test_images_of_a_folder_and_names_of_labels(folder, capsys):
    html, data = report(folder, "one.npz", "--images", folder / "images", "--title", "Kinds")
    assert "<title>Kinds</title>" in html
    assert data["items"]["0-7"] == ["kind 1", "items 7", "01/07.png"]
    assert len(data["images"]) == 72
    out = capsys.readouterr().out
    assert "out.html" in out
    assert "mAP" in out


def test_paths_in_the_file_start_from_its_folder(folder):
    _, data = report(folder, "paths.npz", "--worst", 3, "--searchable", 5, "--memory_mb", 64)
    assert len(data["panels"]) <= 8
    assert data["items"][data["panels"][0]["query"]][2].startswith("images/")
    assert data["images"]


def test_a_folder_that_is_missing_is_refused_also_beside_paths(folder, capsys):
    assert main(["report", str(folder / "paths.npz"), "--images", str(folder / "missing")]) == 1
    assert "is not a folder" in capsys.readouterr().err


def test_two_models_and_another_split(folder):
    html, data = report(folder, "one.npz", "--against", folder / "two.npz", "--train", folder / "two.npz")
    assert data["models"] == ["one", "two"]
    assert "Two models" in html
    assert [group["kind"] for group in data["duplicates"]] == ["between items and training items", "inside items"]


def test_queries_and_gallery(folder):
    _, data = report(folder, "split.npz", "--similarity", "euclidean")
    assert {group["kind"] for group in data["duplicates"]} == {"between queries and gallery", "inside gallery"}
    assert not data["images"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--against", "fewer.npz"], "60"),
        (["--train", "narrow.npz"], "12 components"),
        (["--images", "missing"], "is not a folder"),
        (["--images", "images/00"], "holds 6 images"),
        (["--worst", "-1"], "worst is -1"),
        (["-o", "missing/report.html"], "there is no folder"),
        (["-o", "."], "is a folder"),
    ],
)
def test_input_that_cannot_be_used_takes_one_line(folder, words, said, capsys):
    words = [str(folder / word) if word[:1].isalpha() or word == "." else word for word in words]
    assert main(["report", str(folder / "one.npz"), *words]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_help_tells_each_option(capsys):
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    for words in ("--against FILE", "--train FILE", "Largest size of the file in MB", "ImageFolder", "--similarity"):
        assert words in out
