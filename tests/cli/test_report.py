"""`fewshot report`: files in, one HTML file out, and what it answers to input that cannot be used."""

import base64
import io
import json
import os
import re
import sys
import unicodedata

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.cli import main
from tests.messages import missing_facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embeddings")
    drawn = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 6)
    rows = np.eye(12)[labels] + 0.3 * drawn.normal(size=(72, 12))
    for place, label in enumerate(labels):
        (folder / f"images/{label:02}").mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), int(3 * place)).save(folder / f"images/{label:02}/{place:02}.png")
    paths = np.array([f"images/{label:02}/{place:02}.png" for place, label in enumerate(labels)])
    np.savez(folder / "one.npz", embeddings=rows, labels=labels, label_names=[f"kind {n}" for n in range(12)])
    np.savez(folder / "paths.npz", embeddings=rows, labels=labels, paths=paths)
    np.savez(folder / "two.npz", embeddings=rows + drawn.normal(size=rows.shape), labels=labels)
    np.savez(folder / "fewer.npz", embeddings=rows[:60], labels=labels[:60])
    np.savez(folder / "narrow.npz", embeddings=rows[:, :5], labels=labels)
    np.savez(folder / "tags.npz", embeddings=rows, labels=np.eye(12)[labels])
    np.savez(folder / "uneven.npz", embeddings=rows, labels=labels, ids=np.arange(72), _camera=labels[:71])
    np.savez(folder / "split.npz", query_ids=np.arange(24), gallery_ids=np.arange(72), queries=rows[::3],
             query_labels=labels[::3], gallery=rows, gallery_labels=labels)  # fmt: skip
    return folder


def report(folder, *words, output="out.html"):
    """The page, and the data in it."""
    assert main(["report", str(folder / words[0]), "-o", str(folder / output), *map(str, words[1:])]) == 0
    html = (folder / output).read_bytes().decode("utf-8")
    return html, json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


def refused(capsys, *words):
    """What is said in one line."""
    assert main(["report", *map(str, words)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_images_of_a_folder_and_names_of_labels_are_shown(folder, capsys):
    other = folder / "images/00/notes.avif"
    other.write_text("?")
    html, data = report(folder, "one.npz", "--images", folder / "images", "--title", "Kinds")
    assert "<title>Kinds</title>" in html
    assert data["items"]["0-7"] == ["kind 1", "items 7", "01/07.png"]
    assert len(data["images"]) == 72
    said = capsys.readouterr()
    assert re.search(r"^72 queries, \d+ classes, mAP [01]\.\d{4}: \S*out\.html, ", said.out)
    assert missing_facts(said.err, (folder / "images", "1 file", ".avif 1")) == []
    other.unlink()


def test_paths_in_the_file_start_from_its_folder(folder):
    _, data = report(folder, "paths.npz", "--worst", 3, "--searchable", 5, "--memory_mb", 64)
    assert len(data["panels"]) <= 8
    assert data["items"][data["panels"][0]["query"]][2].startswith("images/")
    assert data["images"]


def test_two_models_are_compared_and_copies_in_another_split_found(folder):
    html, data = report(folder, "one.npz", "--against", folder / "two.npz", "--train", folder / "two.npz")
    assert data["models"] == ["one", "two"]
    assert "Two models" in html
    assert [group["kind"] for group in data["duplicates"]] == ["between items and training items", "inside items"]


def slices_of(html):
    """Slice -> its value and its number of queries, in the tables of slices."""
    section = html.partition('id="slices"')[2].partition("</section>")[0]
    rows = re.findall(r'<th scope="row"><bdi>(\w+)</bdi></th><td[^>]*>([^<]*)<.*?="queries">(\d+)<', section)
    return {name: (float(value), int(queries)) for name, value, queries in rows}


@pytest.mark.parametrize("form", ["one set", "ids", "two sets", "is_gallery"])
def test_slices_are_those_of_a_column(form, folder, tmp_path):
    with np.load(folder / "one.npz") as archive:
        rows, labels = archive["embeddings"], archive["labels"]
    cameras = np.array(["roof", "door", "yard"])[np.arange(72) % 3]
    is_gallery = np.arange(72) % 2 == 0
    sets = {"embeddings": rows, "labels": labels, "camera": cameras}
    arguments = [rows, labels]
    if form == "ids":
        twice = np.concatenate([np.arange(72), np.arange(9)])
        sets = {name: values[twice] for name, values in sets.items()} | {"ids": twice}
    elif form != "one set":
        arguments = [rows[~is_gallery], labels[~is_gallery], rows[is_gallery], labels[is_gallery]]
        cameras = cameras[~is_gallery]
    if form == "two sets":
        sets = dict(zip(("queries", "query_labels", "gallery", "gallery_labels"), arguments, strict=True))
        sets["camera"] = cameras
    if form == "is_gallery":
        sets["is_gallery"] = is_gallery
    np.savez(tmp_path / "file.npz", **sets)
    precision = evaluate_retrieval(*arguments).per_query["mAP"]
    html, _ = report(tmp_path, "file.npz", "--slices", "camera")
    found = slices_of(html)
    assert set(found) == {"roof", "door", "yard"}
    for name, (value, queries) in found.items():
        chosen = torch.as_tensor(cameras == name)
        assert value == pytest.approx(float(precision[chosen].mean()), abs=6e-5)
        assert queries == int(chosen.sum())
    assert 'id="slices"' not in report(tmp_path, "file.npz")[0]


def test_gains_in_slices_are_those_against_the_other_file(folder, tmp_path):
    with np.load(folder / "one.npz") as archive:
        arrays = {"embeddings": archive["embeddings"], "labels": archive["labels"]}
    np.savez(tmp_path / "file.npz", **arrays, camera=np.arange(72) % 2)
    html, _ = report(tmp_path, "file.npz", "--slices", "camera", "--against", folder / "two.npz")
    assert html.count("Holm") == 1
    assert len(re.findall('data-name="first - second"', html)) == 2


def test_the_queries_that_leak_from_training_are_counted_with_their_price(folder, capsys):
    with np.load(folder / "one.npz") as one:
        rows, labels = one["embeddings"], one["labels"]
    train = np.concatenate([rows[:9], np.random.default_rng(1).normal(size=(20, 12))])
    np.savez(folder / "train.npz", embeddings=train, labels=np.zeros(29, int), ids=np.arange(1000, 1029))
    html, _ = report(folder, "one.npz", "--train", folder / "train.npz")
    [sentence] = re.findall(r'<p id="leakage">(.*)</p>', html)
    values = evaluate_retrieval(rows, labels).per_query["mAP"]
    facts = ("12.5 %", "9 of 72", f"{values[9:].mean():.4f}", f"{values.mean():.4f}")
    assert missing_facts(sentence, facts) == []
    assert html.index(sentence) < html.index('id="duplicate-list"')
    assert sentence in capsys.readouterr().out
    for words in (["--train", folder / "train.npz", "--duplicates", 0], []):
        html, _ = report(folder, "one.npz", *words)
        assert 'id="leakage"' not in html


def test_items_of_both_splits_by_their_ids_are_counted_and_listed(folder):
    with np.load(folder / "one.npz") as one:
        rows, labels = one["embeddings"], one["labels"]
    np.savez(folder / "with_ids.npz", embeddings=rows, labels=labels, ids=np.arange(72))
    np.savez(folder / "same_ids.npz", embeddings=rows[:9], labels=labels[:9], ids=np.arange(9))
    html, data = report(folder, "with_ids.npz", "--train", folder / "same_ids.npz")
    assert missing_facts(html, ("9 of 72; 9 by id",)) == []
    between = next(group for group in data["duplicates"] if "training items" in group["kind"])
    assert {(pair[0], pair[1]) for pair in between["pairs"]} >= {(f"0-{n}", f"1-{n}") for n in range(9)}


def test_queries_and_gallery_are_reported_without_images(folder):
    _, data = report(folder, "split.npz", "--similarity", "euclidean")
    assert {group["kind"] for group in data["duplicates"]} == {"between queries and gallery", "inside gallery"}
    assert not data["images"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["one.npz", "--against", "fewer.npz"], (60, 72)),
        (["one.npz", "--train", "narrow.npz"], ("12 components", 5)),
        (["tags.npz"], ("labels", "(72, 12)", "fewshot evaluate")),
        (["one.npz", "--slices", "_camera"], ("'_camera'", "'labels'", "--slices")),
        (["uneven.npz", "--slices", "_camera"], ("72", "71", "ids")),
        (["paths.npz", "--images", "missing"], ("missing", "folder")),
        (["one.npz", "--images", "images/00"], ("6 images", 72)),
        (["one.npz", "--worst", "-1"], ("worst", -1)),
        (["missing.npz"], ("missing.npz", "numpy.savez(path, embeddings=..., labels=...)")),
        (["one.npz", "-o", "missing/report.html"], ("missing", "folder")),
        (["one.npz", "-o", "."], ("folder", "report.html")),
    ],
)
def test_input_that_cannot_be_used_takes_one_line(folder, words, facts, capsys):
    said = refused(capsys, *(folder / word if word[:1].isalpha() or word == "." else word for word in words))
    assert missing_facts(said, facts) == []


@pytest.mark.parametrize("options", [(), ("--against", "two.npz")])
def test_no_file_that_is_read_is_replaced(folder, options, capsys):
    before = (folder / "one.npz").read_bytes()
    words = [folder / word if word.endswith("npz") else word for word in options]
    assert "-o" in refused(capsys, folder / "one.npz", *words, "-o", folder / "one.npz")
    assert (folder / "one.npz").read_bytes() == before


# ------------------------------------------------------------------------------------- files that somebody else has made


def with_paths(folder, paths, start=""):
    """The embeddings of `one.npz` with these paths for its first items, those of its own images for the others."""
    stored = dict(np.load(folder / "paths.npz"))
    stored["paths"] = np.array([*paths, *(path.removeprefix(start) for path in stored["paths"].tolist()[len(paths) :])])
    np.savez(folder / "foreign.npz", **stored)
    return folder / "foreign.npz"


@pytest.mark.parametrize("path", ["/etc/passwd", "images/../../outside.png", "out.png", "linked/00.png", "", "a\0b"])
def test_paths_that_leave_the_folder_are_refused(path, folder, tmp_path, capsys):
    outside = tmp_path / "outside.png"
    Image.new("L", (4, 4)).save(outside)
    Image.new("L", (4, 4)).save(folder.parent / "outside.png")
    for name, target in (("out.png", outside), ("linked", tmp_path)):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
    output = tmp_path / "out.html"
    said = refused(capsys, with_paths(folder, ["images/00/00.png", path]), "-o", output)
    assert missing_facts(said, ("foreign.npz", repr(path), folder)) == []
    assert not output.exists()


def test_paths_inside_the_folder_may_be_absolute_or_come_through_a_linked_folder(folder, tmp_path):
    link = tmp_path / "elsewhere"
    link.symlink_to(folder)
    file = with_paths(folder, [str(folder / "images/00/00.png"), "00/../00/01.png"], "images/")
    assert len(report(folder, file, "--images", link / "images")[1]["images"]) == 72


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_is_no_utf_8_costs_nothing(folder, capsys):
    name = b"images/00/bird\xe9.png"
    (folder / os.fsdecode(name)).write_bytes((folder / "images/00/00.png").read_bytes())
    for path in (os.fsdecode(name), os.fsdecode(name).replace("00", "01")):  # a picture, and one that is missing
        assert "bird\ufffd.png" in report(folder, with_paths(folder, [path]))[0]
    assert r"bird\udce9.png" in capsys.readouterr().out
    (folder / os.fsdecode(name)).unlink()


def test_names_of_classes_and_files_do_not_steer_the_terminal(folder, capsys):
    report(
        folder, with_paths(folder, [f"images/{start}gone.png" for start in ("\x1b[2J", "[/]")]), output="[x] out.html"
    )
    out = capsys.readouterr().out
    for words in ("[x] out.html", r"images/\x1b[2Jgone.png", "images/[/]gone.png"):
        assert words in out
    assert "\x1b" not in out


def test_a_link_is_written_through(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "latest.html"
    link.symlink_to("elsewhere/new.html")
    for _ in range(2):  # where nothing is yet, and over a file
        assert report(folder, "one.npz", output=link)[0].startswith("<!DOCTYPE html>")
        assert link.is_symlink()
    assert [file.name for file in (tmp_path / "elsewhere").iterdir()] == ["new.html"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_what_is_no_regular_file_is_not_replaced(folder, tmp_path, capsys):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for output in (pipe, link):
        said = refused(capsys, folder / "one.npz", "-o", output)
        assert missing_facts(said, (output, "regular", "report.html")) == []
    assert pipe.is_fifo()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_first_item_of_each_id_is_reported(folder):
    with np.load(folder / "one.npz") as archive:
        arrays = dict(archive)
    twice = np.concatenate([np.arange(72), np.arange(9)])
    arrays |= {name: arrays[name][twice] for name in ("embeddings", "labels")} | {"ids": twice}
    np.savez(folder / "twice.npz", **arrays)
    once, cured = (report(folder, f"{name}.npz")[1] for name in ("one", "twice"))
    assert cured["items"] == once["items"]


def test_pictures_are_found_however_a_list_spells_them(folder, tmp_path):
    """The disk has a letter with its accent apart, and an ending in upper case."""
    arrays = dict(np.load(folder / "one.npz"))
    names = [f"é/{place}.png" for place in range(72)]
    (tmp_path / unicodedata.normalize("NFD", "é")).mkdir()
    for place in range(72):
        Image.new("L", (16, 16), place).save(tmp_path / unicodedata.normalize("NFD", f"é/{place}.PNG"), "png")
    np.savez(tmp_path / "spelt.npz", **arrays, paths=names)
    html, data = report(tmp_path, "spelt.npz", "--worst", 3)
    assert data["images"]
    assert "could not be shown" not in html
    os.remove(tmp_path / unicodedata.normalize("NFD", "é/0.PNG"))
    (tmp_path / unicodedata.normalize("NFD", "é/0.PNG")).symlink_to(folder / "images/00/00.png")
    _, data = report(tmp_path, "spelt.npz")
    assert "0-0" not in data["images"]  # a link out of the folder, under another spelling


def test_transparent_pictures_lie_on_the_background_that_is_asked_for(folder, tmp_path):
    arrays = dict(np.load(folder / "one.npz"))
    (tmp_path / "images").mkdir()
    for place in range(72):
        Image.new("RGBA", (16, 16), (0, 0, 0, 0)).save(tmp_path / f"images/{place:02}.png")
    np.savez(tmp_path / "clear.npz", **arrays)
    for words, colour in (((), (255, 255, 255)), (("--background", "#00ff00"), (0, 255, 0))):
        html, data = report(tmp_path, "clear.npz", "--images", tmp_path / "images", *words)
        shown = base64.b64decode(next(iter(data["images"].values())).partition(",")[2])
        assert Image.open(io.BytesIO(shown)).convert("RGB").getpixel((3, 3)) == colour
        assert f"transparent pixels are <bdi>{words[1] if words else 'white'}</bdi>" in html


# --------------------------------------------------------------------------------------- what lies where a report is to go


def in_folder(folder, monkeypatch, *words):
    monkeypatch.chdir(folder)
    assert main(["report", *map(str, words)]) == 0


@pytest.mark.parametrize("foreign", ["<!DOCTYPE html>\n<title>Of the user</title>", "", "folder"])
def test_without_a_name_a_file_that_is_no_report_is_left_and_the_next_name_is_taken(
    foreign, folder, tmp_path, monkeypatch, capsys
):
    """Its own reports are replaced, under either name."""
    if foreign == "folder":
        (tmp_path / "report.html").mkdir()
    else:
        (tmp_path / "report.html").write_text(foreign)
    for _ in range(2):
        in_folder(tmp_path, monkeypatch, folder / "one.npz")
        said = capsys.readouterr().out
        assert "report-2.html, 0." in said
        assert missing_facts(" ".join(said.split()), ("report.html", "-o report.html")) == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report-2.html", "report.html"]
    if foreign != "folder":
        assert (tmp_path / "report.html").read_text() == foreign
        in_folder(tmp_path, monkeypatch, folder / "one.npz", "-o", "report.html")  # named, it is replaced
        assert (tmp_path / "report.html").read_text() != foreign


def test_without_a_name_an_earlier_report_is_replaced(folder, tmp_path, monkeypatch, capsys):
    for title in ("First", "Second"):
        in_folder(tmp_path, monkeypatch, folder / "one.npz", "--title", title)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert "<title>Second</title>" in (tmp_path / "report.html").read_text()
    assert "-o report.html" not in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_without_a_name_a_pipe_is_neither_read_nor_replaced(folder, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "report.html")
    in_folder(tmp_path, monkeypatch, folder / "one.npz")
    assert (tmp_path / "report.html").is_fifo()
    assert (tmp_path / "report-2.html").is_file()


@pytest.mark.parametrize("way", ["itself", "link", "hard link", "link to the folder", "named in the file", "training"])
def test_a_report_replaces_no_image_that_it_reads(way, folder, tmp_path, capsys):
    images = folder / "images"
    photo = images / "03/19.png"
    before = photo.read_bytes()
    words = [folder / "one.npz", "--images", images]
    output = photo
    if way == "link":
        output = tmp_path / "out.html"
        output.symlink_to(photo)
    elif way == "hard link":
        output = tmp_path / "out.html"
        os.link(photo, output)
    elif way == "link to the folder":
        (tmp_path / "photos").symlink_to(images)
        output = tmp_path / "photos/03/19.png"
    elif way == "named in the file":
        words = [folder / "paths.npz"]
    elif way == "training":
        words = [folder / "two.npz", "--train", folder / "one.npz", "--train_images", images]
    assert missing_facts(refused(capsys, *words, "-o", output), (output, "file")) == []
    assert photo.read_bytes() == before


def test_a_report_beside_the_images_is_written_and_replaced(folder):
    for _ in range(2):
        report(folder, "one.npz", "--images", folder / "images/../images", output="images/00/page.html")
    (folder / "images/00/page.html").unlink()
