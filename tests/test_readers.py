"""Every reader of every format takes the same oddities: of editors, spreadsheets, archives and systems."""

import os
import re
import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fewshot_callbacks import Shards, read_trials
from fewshot_callbacks.data import CUB200, FewShotDataset, ImageFolder, LogoDet3K, MiniImageNet, Omniglot
from fewshot_callbacks.data.logodet3k import LogoTransform
from fewshot_callbacks.functional import Relevance, evaluate_retrieval
from fewshot_callbacks.report import image_files, pictures_of_files
from tests.data.trees import PLAIN, save_image
from tests.messages import missing_facts, refused

LOGO = LogoTransform(image_size=8)


@dataclass(frozen=True)
class Reader:
    """A reader, with a small set that it reads."""

    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    """returns values that can be compared"""
    lists: tuple[str, ...] = ()
    """names of its text files"""
    separator: str = ""
    """what stands between the words of a line"""
    data: str = ""
    """pattern of the files that the folder itself, and no list, names"""


def compared(data: FewShotDataset) -> list[Any]:
    """Classes, labels and pixels of all splits."""
    found = []
    for split in data.splits:
        one = data.with_split(split)
        pixels, labels = one.batch(range(len(one)))
        found += [one.class_names, labels.tolist(), pixels.tolist()]
    return found


def text(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def written(lines: tuple[str, ...]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "list.txt").write_text(text(*lines), encoding="utf-8")

    return write


def found_trials(folder: Path) -> list[Any]:
    trials = read_trials(folder / "list.txt")
    ids = ["Ann_0001", "Ann_0002", "Zoé_0001", "Zoé_0002", "é1/a.wav", "é1/b.wav", "é2/c.wav"]
    rows = [side.tolist() for side in trials.rows(ids)] if trials.items else []
    return [trials.same, trials.first, trials.second, trials.folds, trials.scores, rows]


def judged(folder: Path) -> list[Any]:
    relevance = Relevance.from_judgements(folder / "list.txt", ["q1", "é"], ["d1", "ü", "d3"])
    rows = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    report = evaluate_retrieval(rows[:2], gallery=rows, relevance=relevance, metrics=("mAP", "ndcg@3"))
    return [str(relevance), report.values]


def write_birds(root: Path) -> None:
    folder, birds = root / "CUB_200_2011", ["001.Café", "002.Auklet", "003.Grebe", "004.Gull"]
    for number, bird in enumerate(birds):
        save_image(folder / "images" / bird / "é_1.jpg", (40 * number, 0, 0))
    (folder / "classes.txt").write_text(text(*(f"{n} {bird}" for n, bird in enumerate(birds, 1))), encoding="utf-8")
    lines = [f"{n} {bird}/é_1.jpg" for n, bird in enumerate(birds, 1)]
    (folder / "images.txt").write_text(text(*lines), encoding="utf-8")
    (folder / "image_class_labels.txt").write_text(text(*(f"{n} {n}" for n in range(1, 5))), encoding="utf-8")


def write_lists_of_images(root: Path) -> None:
    for split, label in (("train", "café"), ("val", "n2"), ("test", "n3")):
        save_image(root / "images" / f"{label}.jpg", (len(label), 60, 0))
        (root / f"{split}.csv").write_text(text("filename,label", f"{label}.jpg,{label}"), encoding="utf-8")


def write_folder(root: Path) -> None:
    for number, name in enumerate(("train/café", "train/owl", "val/heron", "test/gull")):
        for item in range(2):
            save_image(root / name / f"é{item}.png", (60 * number, 100 * item, 0))


def write_drawings(root: Path) -> None:
    for number, name in enumerate(("images_background/Café", "images_background/Grec", "images_evaluation/Thé")):
        for item in range(2):
            save_image(root / "omniglot-py" / name / "caractère" / f"{item}.png", (60 * number, 100 * item, 0))


def write_logos(root: Path) -> None:
    box = "<bndbox><xmin>2</xmin><ymin>2</ymin><xmax>9</xmax><ymax>6</ymax></bndbox>"
    for number, brand in enumerate(("Café", "Oreo", "Twix", "Dole")):
        folder = root / "LogoDet-3K" / "Food" / brand
        save_image(folder / "1.jpg", (60 * number, 0, 0))
        lines = ("<annotation>", f"<object><name>{brand}</name>{box}</object>", "</annotation>")
        (folder / "1.xml").write_text(text(*lines), encoding="utf-8")


def pictures(folder: Path) -> list[Any]:
    files = image_files(folder / "train")
    opened = pictures_of_files(files, 8)
    return [np.asarray(opened(index)).tolist() for index in range(len(files))]


ROWS = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
LABELS = np.array([3, 1, 2, 3, 1, 2])


def table(rows: np.ndarray, labels: np.ndarray) -> pa.Table:
    return pa.table({"embeddings": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), 3), "labels": labels})


WRITERS: dict[str, Callable[[Path, np.ndarray, np.ndarray], None]] = {
    "npy": lambda file, rows, _: np.save(file, rows),
    "npz": lambda file, rows, labels: np.savez(file, embeddings=rows, labels=labels),
    "parquet": lambda file, rows, labels: pa.parquet.write_table(table(rows, labels), file),
    "arrow": lambda file, rows, labels: pa.feather.write_feather(table(rows, labels), file, compression="uncompressed"),
    "feather": lambda file, rows, labels: pa.feather.write_feather(table(rows, labels), file),
    "safetensors": lambda file, rows, labels: save_file(
        {"embeddings": torch.tensor(rows), "labels": torch.tensor(labels)}, file
    ),
}


def write_shards(kind: str, folder: Path) -> None:
    for part in range(3):
        some = slice(2 * part, 2 * part + 2)
        WRITERS[kind](folder / f"é-{9 + part}.{kind}", ROWS[some], LABELS[some])


def read_shards(kind: str, folder: Path) -> list[Any]:
    labels = LABELS if kind == "npy" else "labels"
    some = [Shards(paths, labels=labels) for paths in (folder, f"{folder}/*-*", f"{folder}/**/*-*")]
    assert len({(one[:].tobytes(), *one.labels.tolist()) for one in some}) == 1
    return [some[0][:].tolist(), some[0].labels.tolist()]


SPLIT = {"partial": True, "transform": PLAIN}
READERS = {
    "pairs of LFW": Reader(
        written(("1 2", "Ann 1 2", "Zoé 1 2", "Ann 1 Zoé 1", "Zoé 2 Ann 2")), found_trials, ("list.txt",), " "
    ),
    "pairs of LFW without a first line": Reader(
        written(("Ann 1 2", "Zoé 1 2", "Ann 1 Zoé 1", "Zoé 2 Ann 2")), found_trials, ("list.txt",), " "
    ),
    "VoxCeleb": Reader(written(("1 é1/a.wav é1/b.wav", "0 é1/a.wav é2/c.wav")), found_trials, ("list.txt",), " "),
    "scores": Reader(
        written(("score,same,first,second", "0.5,1,é,é", "-0.5,0,é,Ann")), found_trials, ("list.txt",), ","
    ),
    "scores with tabs": Reader(written(("score\tsame", "0.5\t1", "-0.5\t0")), found_trials, ("list.txt",), "\t"),
    "TREC": Reader(written(("q1 0 d1 2", "q1 0 ü 1", "é 0 d3 1", "é 0 d1 0")), judged, ("list.txt",), " "),
    "BEIR": Reader(
        written(("query-id\tcorpus-id\tscore", "q1\td1\t2", "q1\tü\t1", "é\td3\t1")), judged, ("list.txt",), "\t"
    ),
    "CUB-200-2011": Reader(
        write_birds,
        lambda root: compared(CUB200(root, **SPLIT)),
        tuple(f"CUB_200_2011/{name}.txt" for name in ("classes", "images", "image_class_labels")),
        " ",
        "CUB_200_2011/images/*/*",
    ),
    "mini-ImageNet": Reader(
        write_lists_of_images,
        lambda root: compared(MiniImageNet(root, **SPLIT)),
        ("train.csv", "val.csv", "test.csv"),
        ",",
        "images/*",
    ),
    "folders": Reader(write_folder, lambda root: compared(ImageFolder(root, transform=PLAIN)), data="*/*/*"),
    "one folder": Reader(
        write_folder, lambda root: compared(ImageFolder(root / "train", split=None, transform=PLAIN)), data="train/*/*"
    ),
    "drawings": Reader(
        write_drawings,
        lambda root: compared(Omniglot(root, val_alphabets=("Café",), partial=True)),
        data="omniglot-py/*/*/*/*",
    ),
    "logos": Reader(
        write_logos,
        lambda root: compared(LogoDet3K(root, transform=LOGO, min_boxes=1, val_share=0, test_share=0.3, partial=True)),
        tuple(f"LogoDet-3K/Food/{brand}/1.xml" for brand in ("Café", "Oreo", "Twix", "Dole")),
        data="LogoDet-3K/*/*/*",
    ),
    "pictures of a report": Reader(write_folder, pictures, data="train/*/*"),
    **{f".{kind}": Reader(partial(write_shards, kind), partial(read_shards, kind), data="*") for kind in WRITERS},
}


# ------------------------------------------------------------------------------------------------------ oddities of lists


def each_line(change: Callable[[str], str]) -> Callable[[str, str], str]:
    return lambda content, _: text(*map(change, content.splitlines()))


def quoted(content: str, separator: str) -> str:
    return text(*(separator.join(f'"{cell}"' for cell in line.split(separator)) for line in content.splitlines()))


OF_LISTS: dict[str, Callable[[str, str], str]] = {
    "a mark of byte order": lambda content, _: f"\ufeff{content}",
    "line ends of Windows": lambda content, _: content.replace("\n", "\r\n"),
    "no last line end": lambda content, _: content.rstrip("\n"),
    "empty lines": lambda content, _: "\n" + content.replace("\n", "\n\n \n"),
    "blanks at the ends": each_line(lambda line: f" {line}  "),
    "a tab at the end": each_line(lambda line: f"{line}\t"),
    "accents apart": lambda content, _: unicodedata.normalize("NFD", content),
    "several blanks": lambda content, separator: re.sub(" ", "   ", content) if separator == " " else content,
    "tabs for blanks": lambda content, separator: re.sub(" ", "\t", content) if separator == " " else content,
    "blanks around cells": lambda content, separator: content.replace(",", " , ") if separator == "," else content,
    "quotes": lambda content, separator: (
        quoted(content, separator) if separator in (",", "\t") and separator else content
    ),
}


@pytest.mark.parametrize("oddity", OF_LISTS)
@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.lists])
def test_lists_are_read_whoever_wrote_them(name: str, oddity: str, tmp_path: Path) -> None:
    reader = READERS[name]
    reader.write(tmp_path)
    plain = reader.read(tmp_path)
    for file in reader.lists:
        content = (tmp_path / file).read_text(encoding="utf-8")
        (tmp_path / file).write_bytes(OF_LISTS[oddity](content, reader.separator).encode())
    assert reader.read(tmp_path) == plain


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\x0b", "\x0c", "\x1c", "\u00a0", "\u3000"])
@pytest.mark.parametrize("name", ["VoxCeleb", "scores", "TREC", "BEIR", "pairs of LFW"])
def test_a_name_may_hold_what_breaks_lines_elsewhere(name: str, separator: str, tmp_path: Path) -> None:
    """Against the same list with a plain letter in its place."""
    READERS[name].write(tmp_path)
    content = (tmp_path / "list.txt").read_text(encoding="utf-8")
    letter = "é" if "é" in content else "Ann"
    (tmp_path / "list.txt").write_bytes(content.replace(letter, f"a{separator}b").encode())
    if name in ("TREC", "BEIR"):
        relevance = Relevance.from_judgements(tmp_path / "list.txt", ["q1", f"a{separator}b"], ["d1", "ü", "d3"])
        known = Relevance.from_judgements({"q1": {"d1": 2, "ü": 1}, "é": {"d3": 1}}, ["q1", "é"], ["d1", "ü", "d3"])
        assert str(relevance) == str(known)
        return
    read = read_trials(tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text(content, encoding="utf-8")
    known_trials = read_trials(tmp_path / "list.txt")
    assert read.same == known_trials.same
    assert read.first == tuple(one.replace(letter, f"a{separator}b") for one in known_trials.first)


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.lists and name != "logos"])
def test_a_list_in_another_encoding_is_named_with_its_first_wrong_byte(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    reader.write(tmp_path)
    sizes = {}
    for file in reader.lists:
        content = (tmp_path / file).read_text(encoding="utf-8").encode()
        (tmp_path / file).write_bytes(content + b"\xff\xfe")
        sizes[file] = len(content)
    with pytest.raises(ValueError, match="UTF-8") as raised:
        reader.read(tmp_path)
    message = str(raised.value)
    assert any(missing_facts(message, (tmp_path / file, size)) == [] for file, size in sizes.items())


# ----------------------------------------------------------------------------------------------------- oddities of folders


def with_names_of_systems(folder: Path, reader: Reader) -> None:
    folders = {folder, *(file.parent for file in folder.glob(reader.data))}
    for place in [*folders, *(inner for inner in folder.rglob("*") if inner.is_dir())]:
        files = [file for file in place.iterdir() if file.is_file() and not file.name.startswith(".")]
        for name in (".ipynb_checkpoints", "__MACOSX", "@eaDir", ".Trashes"):
            (place / name).mkdir(exist_ok=True)
            for file in files:
                shutil.copy(file, place / name / f"{file.stem}-checkpoint{file.suffix}")
        for file in files:
            (place / f"._{file.name}").write_bytes(b"\0\5\26\7Mac OS X")
            (place / "__MACOSX" / f"._{file.name}").write_bytes(b"\0\5\26\7Mac OS X")
        for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
            (place / name).write_bytes(b"\0")


def with_upper_case_endings(folder: Path, reader: Reader) -> None:
    for file in folder.glob(reader.data):
        file.rename(file.with_suffix(file.suffix.upper()))


def with_links(folder: Path, reader: Reader) -> None:
    outside = folder.parent / "outside"
    outside.mkdir()
    for number, file in enumerate(sorted(folder.glob(reader.data))):
        target = outside / f"{number}{file.suffix}"
        file.rename(target)
        file.symlink_to(target)


def with_a_link_to_the_folder(folder: Path, reader: Reader) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere", target_is_directory=True)


def with_accents_apart(folder: Path, reader: Reader) -> None:
    for file in sorted(folder.rglob("*"), key=lambda file: len(file.parts), reverse=True):
        file.rename(file.with_name(unicodedata.normalize("NFD", file.name)))


OF_FOLDERS = {
    "names of systems": with_names_of_systems,
    "upper-case endings": with_upper_case_endings,
    "links": with_links,
    "a link to the folder": with_a_link_to_the_folder,
    "accents apart": with_accents_apart,
}
FOLDERS = [name for name, reader in READERS.items() if reader.data]


@pytest.mark.parametrize("oddity", OF_FOLDERS)
@pytest.mark.parametrize("name", FOLDERS)
def test_folders_are_read_whatever_lies_in_them(name: str, oddity: str, tmp_path: Path) -> None:
    reader, folder = READERS[name], tmp_path / "set"
    folder.mkdir()
    reader.write(folder)
    plain = reader.read(folder)
    OF_FOLDERS[oddity](folder, reader)
    assert reader.read(folder) == plain


@pytest.mark.parametrize("name", FOLDERS)
def test_no_file_counts_twice(name: str, tmp_path: Path) -> None:
    """A second name of a file is refused, or makes no difference."""
    reader = READERS[name]
    reader.write(tmp_path)
    plain = reader.read(tmp_path)
    links = [file.with_name(f"zz-{file.name}") for file in sorted(tmp_path.glob(reader.data))]
    for link in links:
        link.symlink_to(link.with_name(link.name.removeprefix("zz-")))
    if name.startswith(".") or (reader.lists and name != "logos"):  # files by numbers, and those that lists name
        assert reader.read(tmp_path) == plain
        return
    with pytest.raises(ValueError, match="zz-") as raised:
        reader.read(tmp_path)
    message = str(raised.value)
    assert any(missing_facts(message, (link, link.resolve(), "twice", "link")) == [] for link in links)


@pytest.mark.parametrize("name", [name for name in FOLDERS if name != "logos"])
def test_a_link_to_nothing_is_an_error(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    reader.write(tmp_path)
    first, *_ = sorted(tmp_path.glob(reader.data))
    first.unlink()
    first.symlink_to(tmp_path / "gone")
    with refused(ValueError, first, tmp_path / "gone" if name.startswith(".") else "No such file"):
        reader.read(tmp_path)


NOTICED = {
    "folders": (ImageFolder, "train"),
    "drawings": (partial(Omniglot, val_alphabets=("Café",), partial=True), "omniglot-py/images_background"),
    "logos": (partial(LogoDet3K, min_boxes=1, val_share=0, test_share=0.3, partial=True), "LogoDet-3K"),
}


@pytest.mark.parametrize("name", NOTICED)
def test_names_of_systems_are_counted_and_said_once(name: str, tmp_path: Path, caplog) -> None:
    read, place = NOTICED[name]
    READERS[name].write(tmp_path)
    folder = next(file for file in sorted((tmp_path / place).rglob("*")) if file.is_file()).parent
    (tmp_path / place / "__MACOSX").mkdir()
    for file in ("._1.png", "._1.jpg", ".DS_Store"):
        (folder / file).write_bytes(b"\0")
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        read(tmp_path)
    (message,) = [record.message for record in caplog.records if "__MACOSX" in record.message]
    counts = (".DS_Store 1", "._1.jpg 1", "._1.png 1", "__MACOSX 1")
    assert missing_facts(message, (tmp_path / place, "4 system files", *counts)) == []


def test_shards_that_are_passed_over_are_counted(tmp_path: Path) -> None:
    write_shards("npz", tmp_path)
    with_names_of_systems(tmp_path, READERS[".npz"])
    (tmp_path / "_metadata.npz").touch()
    assert missing_facts(" ".join(Shards(tmp_path).notes), ("4 system files", "._é-9.npz 1")) == []


def test_a_picture_that_a_system_made_is_no_picture_of_a_report(tmp_path: Path) -> None:
    """Also where images lie in the folder itself, with no folder but that of a notebook."""
    Image.new("RGB", (4, 4)).save(tmp_path / "1.png")
    shutil.copytree(tmp_path, tmp_path / ".ipynb_checkpoints")
    assert image_files(tmp_path) == [tmp_path / "1.png"]
    assert os.listdir(tmp_path / ".ipynb_checkpoints") == ["1.png"]
