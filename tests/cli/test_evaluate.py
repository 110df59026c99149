"""`fewshot evaluate`: files of embeddings, settings, tables, JSON, and comparisons of two files."""

import io
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from fewshot_callbacks.cli.main import main
from fewshot_callbacks.functional.discriminant_ratio import discriminant_ratio
from fewshot_callbacks.functional.retrieval import Relevance, evaluate_retrieval


@pytest.fixture
def stored(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 25
    embeddings = (rng.normal(size=(25, 16))[labels] + 0.7 * rng.normal(size=(200, 16))).astype(np.float32)
    path = tmp_path / "embeddings.npz"
    np.savez(path, embeddings=embeddings, labels=labels)
    return path, embeddings, labels


def test_json_is_the_report(stored, capsys):
    path, embeddings, labels = stored
    assert main(["evaluate", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = evaluate_retrieval(embeddings, labels)
    assert printed["metrics"] == pytest.approx(expected.metrics())
    assert printed["intervals"]["mAP"] == pytest.approx(list(expected.intervals["mAP"]))
    assert printed["queries"] == 200
    assert printed["J"] > 0


def test_table_shows_every_metric_and_the_notes(stored, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path, embeddings, labels = stored
    labels[0] = 99
    np.savez(path, embeddings=embeddings, labels=labels)
    assert main(["evaluate", str(path)]) == 0
    screen = capsys.readouterr().out
    report = evaluate_retrieval(embeddings, labels)
    for name, value in report.metrics().items():
        assert name in screen
        assert f"{value:.4f}" in screen
    assert "1 of 200 queries have no match" in screen


def test_classes_that_want_another_threshold_are_named(stored, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    path, embeddings, labels = stored
    assert main(["evaluate", str(path), "--metrics", "opis@fmr0.1"]) == 0
    found = evaluate_retrieval(embeddings, labels, metrics="opis@fmr0.1").consistency[0.1].wanting(1)
    [(label, (threshold, gain))] = found.items()
    assert f"Classes that want another threshold: {label} {threshold:.4f} (+{gain:.3f})" in capsys.readouterr().out


def test_settings_that_are_off_by_default(stored, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path, embeddings, labels = stored
    labels[0] = 99
    np.savez(path, embeddings=embeddings, labels=labels)
    words = ["evaluate", str(path), "--metrics", "mAP", "ir_recall@3,grouped_recall@1_miss"]
    words += ["--label_groups", "[[0, 1, 99], [2, 3, 4, 5]]"]
    assert main([*words, "--json"]) == 0
    keys, groups = ("mAP", "ir_recall@3", "grouped_recall@1_miss"), [[0, 1, 99], [2, 3, 4, 5]]
    report = evaluate_retrieval(embeddings, labels, metrics=keys, label_groups=groups)
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["metrics"].items()) == list(report.metrics().items())
    assert printed["grouped"]["unmatched"] == "miss"
    assert main(words) == 0
    screen = capsys.readouterr().out
    assert "Share of the relevant items among the first 3." in screen
    assert "2 groups of several classes." in " ".join(screen.split())


def test_classes_are_tables_of_whole_columns(stored, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path, embeddings, labels = stored
    keys = ("mAP", "mrr", *(f"recall@{k}" for k in (1, 5, 10, 20, 50)))
    assert main(["evaluate", str(path), "--per_class", "--metrics", *keys]) == 0
    lines = capsys.readouterr().out.split("means of 25 classes", 1)[1].splitlines()
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    means = evaluate_retrieval(embeddings, labels, metrics=keys).per_class()
    heads = [line.split()[1:] for line in lines if line.split()[:1] == ["class"]]
    assert [name for head in heads for name in head] == list(means)
    rows = [line.split()[1:] for line in lines if line.split()[:1] == ["7"]]
    assert [cell for row in rows for cell in row] == [f"{values[7]:.4f}" for values in means.values()]


def test_gallery_and_options(tmp_path, capsys):
    rng = np.random.default_rng(1)
    arrays = {
        "embeddings": rng.normal(size=(20, 8)),
        "labels": np.arange(20) % 4,
        "gallery": rng.normal(size=(50, 8)),
        "gallery_labels": np.arange(50) % 5,
    }
    np.savez(tmp_path / "two.npz", **arrays)
    keys = ("mAP", "recall@1", "recall@3", "recall@precision0.5")
    words = ["--json", "--similarity", "euclidean", "--metrics", *keys, "--threshold_bounds", "[-3, -2.5]"]
    assert main(["evaluate", str(tmp_path / "two.npz"), *words, "--label_groups", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    settings = {"metrics": keys, "label_groups": 2}
    report = evaluate_retrieval(*arrays.values(), similarity="euclidean", threshold_bounds=(-3, -2.5), **settings)
    unbounded = evaluate_retrieval(*arrays.values(), similarity="euclidean", **settings)
    assert report["recall@precision0.5"] != unbounded["recall@precision0.5"]
    assert {k: v for k, v in printed["metrics"].items() if v is not None} == pytest.approx(
        {k: v for k, v in report.metrics().items() if not math.isnan(v)}
    )


class TestAgainst:
    @pytest.fixture
    def other(self, stored, tmp_path):
        _, embeddings, labels = stored
        path = tmp_path / "other.npz"
        worse = embeddings + 1.5 * np.random.default_rng(1).normal(size=embeddings.shape).astype(np.float32)
        np.savez(path, embeddings=worse, labels=labels)
        return path, worse

    def test_json_holds_both_reports_and_their_differences(self, stored, other, capsys):
        path, embeddings, labels = stored
        assert main(["evaluate", str(path), "--against", str(other[0]), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        first, second = evaluate_retrieval(embeddings, labels), evaluate_retrieval(other[1], labels)
        assert printed["first"]["metrics"] == pytest.approx(first.metrics())
        assert printed["second"]["metrics"] == pytest.approx(second.metrics())
        mean_average_precision = printed["differences"]["mAP"]
        assert mean_average_precision["value"] == pytest.approx(first.mAP - second.mAP)
        assert mean_average_precision["is_beyond_chance"] is True
        assert printed["differences"]["f1"]["interval"] == [None, None]
        assert printed["differences"]["f1"]["is_beyond_chance"] is None

    def test_the_table_says_what_is_beyond_chance(self, stored, other, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["evaluate", str(stored[0]), "--against", str(other[0])]) == 0
        lines = capsys.readouterr().out.splitlines()
        row = next(line for line in lines if " mAP " in line)
        assert row.split()[-1] == "yes"
        assert "+0." in row
        names = evaluate_retrieval(*stored[1:]).metrics()
        assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in names] == list(names)
        assert main(["evaluate", str(stored[0]), "--against", str(stored[0])]) == 0
        assert " yes" not in capsys.readouterr().out

    def test_classes_are_printed_as_json_alone(self, stored, other, capsys):
        words = ["evaluate", str(stored[0]), "--against", str(other[0]), "--per_class"]
        assert main(words) == 1
        assert "Add --json, or leave out --per_class." in capsys.readouterr().err
        assert main([*words, "--json"]) == 0
        assert "per_class" in json.loads(capsys.readouterr().out)["first"]

    def test_other_labels_are_refused(self, stored, tmp_path, capsys):
        path, embeddings, labels = stored
        other = tmp_path / "other.npz"
        np.savez(other, embeddings=embeddings[:-1], labels=labels[:-1])
        assert main(["evaluate", str(path), "--against", str(other)]) == 1
        assert "holds 200 labels, " in " ".join(capsys.readouterr().err.split())


def test_labels_may_be_words(stored, capsys):
    path, embeddings, labels = stored
    words = np.array([f"class {label:02d}" for label in labels])
    np.savez(path, embeddings=embeddings, labels=words)
    assert main(["evaluate", str(path), "--json", "--per_class"]) == 0
    printed = json.loads(capsys.readouterr().out)
    report = evaluate_retrieval(embeddings, labels)
    assert printed["metrics"] == pytest.approx(report.metrics())
    assert printed["J"] == pytest.approx(float(discriminant_ratio(torch.tensor(embeddings), torch.tensor(labels))))
    assert "class 07" in printed["per_class"]["mAP"]


def test_names_of_classes_are_neither_markup_nor_commands_to_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    names = np.array(["[/]", "[x]", ":owl:", "bell\x07", "\x1b[2Jclear", "\u202eback"])
    labels = np.repeat(names, 4)
    np.savez("[red]file.npz", embeddings=np.random.default_rng(0).normal(size=(24, 4)), labels=labels)
    assert main(["evaluate", "[red]file.npz", "--per_class", "--label_groups", "none"]) == 0
    screen = capsys.readouterr().out
    for word in ("[/]", "[x]", ":owl:", r"bell\x07", r"\x1b[2Jclear", r"\u202eback", "[red]file.npz"):
        assert word in screen
    assert not {"\x07", "\x1b", "\u202e"} & set(screen)
    assert main(["evaluate", "[red]file.npz", "--against", "[red]file.npz", "--label_groups", "none"]) == 0
    assert "[red]file.npz against [red]file.npz" in capsys.readouterr().out
    np.savez("\x1b[2J.npz", wrong=np.zeros(3))
    assert main(["evaluate", "\x1b[2J.npz"]) == 1
    assert capsys.readouterr().err.startswith(r"fewshot evaluate: \x1b[2J.npz holds 'wrong'")
    assert main(["evaluate", "[red]file.npz", "--metrics", "recal@5"]) == 1
    assert "there is no metric 'recal@5'; did you mean 'recall@5'?" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- damaged files


def head_of_array(words: str) -> bytes:
    """An array of 64 zero bytes behind any head."""
    head = words.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + b"\0" * 64


def described(shape: str, kind: str = "'<f8'") -> bytes:
    return head_of_array(f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}}}")


def with_member(path, embeddings: bytes) -> None:
    labels = io.BytesIO()
    np.save(labels, np.arange(20) % 4)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("embeddings.npy", embeddings)
        archive.writestr("labels.npy", labels.getvalue())


def broken_stream(path) -> None:
    content = bytearray(path.read_bytes())
    start = content.index(b"embeddings.npy") + 60
    content[start : start + 200] = bytes(byte ^ 0xFF for byte in content[start : start + 200])
    path.write_bytes(content)


DAMAGED, HOW = (
    "is damaged, or not an .npz file of plain arrays (",
    " Write one with numpy.savez(path, embeddings=..., labels",
)
DAMAGES = {
    "a broken stream": (broken_stream, [DAMAGED, "embeddings: Error -3 while decompressing", HOW]),
    "petabytes": (lambda path: with_member(path, described("(1000000000000, 1000)")),
                  [DAMAGED, "embeddings: Unable to allocate", HOW]),
    "an unknown type": (lambda path: with_member(path, described("(3,)", "'zz'")), [DAMAGED, "not a valid dtype", HOW]),
    "no array": (lambda path: with_member(path, b"hello"), [DAMAGED, "embeddings is no array", HOW]),
    "pickled objects": (lambda path: with_member(path, described("(3,)", "'|O'")),
                        [DAMAGED, "embeddings: Object arrays cannot", HOW]),
    "nothing": (lambda path: path.unlink(), ["does not exist.", HOW]),
    "a text": (lambda path: path.write_text("hello"), ["is not an .npz file of plain arrays.", HOW]),
    "an empty file": (lambda path: path.write_bytes(b""), ["is not an .npz file of plain arrays.", HOW]),
    "other names": (lambda path: np.savez(path, x=[0], labels=[0]), ["holds 'x', 'labels', but not 'embeddings'.", HOW]),
    "NaN": (lambda path: np.savez(path, embeddings=[[np.nan]] * 4, labels=[0] * 4), ["4 of 4 rows of embeddings hold"]),
    "fractions": (lambda path: np.savez(path, embeddings=[[0.0]] * 4, labels=np.zeros(4)), ["integer labels"]),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_one_line(as_users_run_it, damage, tmp_path, capsys):
    path = tmp_path / "e.npz"
    rng = np.random.default_rng(0)
    np.savez_compressed(path, embeddings=rng.normal(size=(40, 8)), labels=np.arange(40) % 4)
    do, words = DAMAGES[damage]
    do(path)
    for command in (["evaluate", str(path)], ["report", str(path), "-o", str(tmp_path / "e.html")]):
        assert main(command) == 1
        out, said = capsys.readouterr()
        assert said.startswith(f"fewshot {command[0]}: ")
        assert all(each in said for each in words), said
        assert (out, said.count("\n")) == ("", 1)


@pytest.mark.parametrize("name", ["embeddings", "labels"])
def test_a_single_value_is_no_array_of_items(name, stored, tmp_path, capsys):
    _, embeddings, labels = stored
    np.savez(tmp_path / "one.npz", **({"embeddings": embeddings, "labels": labels} | {name: np.array(3)}))
    for words in (["report", "one.npz"], ["evaluate", "embeddings.npz", "--against", "one.npz"]):
        assert main([str(tmp_path / word) if word.endswith(".npz") else word for word in words]) == 1
        assert f"'{name}' of {tmp_path / 'one.npz'} is a single value" in capsys.readouterr().err


def test_arrays_of_the_other_byte_order_are_read(stored, tmp_path, capsys):
    path, embeddings, labels = stored
    other = tmp_path / "other.npz"
    np.savez(other, embeddings=embeddings.astype(embeddings.dtype.newbyteorder()), labels=labels.astype(">i4"))
    results = []
    for file in (path, other):
        assert main(["evaluate", str(file), "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
        del results[-1]["seconds"]
    assert results[0] == results[1]


JUDGED = {
    "trec": "a 0 3 2\na 0 5 1\nb 0 7 1\nc 0 39 0\n",
    "tsv": "query-id\tcorpus-id\tscore\na\t3\t2\na\t5\t1\nb\t7\t1\nc\t39\t0\n",
}


@pytest.fixture
def judged(tmp_path):
    """A file of embeddings with ids, and where to write judgements."""
    queries, gallery = np.split(np.random.default_rng(0).normal(size=(43, 8)).astype(np.float32), [3])
    arrays = {
        "embeddings": queries,
        "gallery": gallery,
        "query_ids": np.array(["a", "b", "c"]),
        "gallery_ids": np.arange(40),
    }
    np.savez(tmp_path / "ids.npz", **arrays)
    return tmp_path, arrays


@pytest.mark.parametrize("form", JUDGED)
def test_judgements_of_trec_and_beir(judged, form, capsys):
    folder, arrays = judged
    (folder / form).write_text(JUDGED[form])
    assert main(["evaluate", str(folder / "ids.npz"), "--judgements", str(folder / form), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    relevance = Relevance.from_lists([[3, 5], [7], []], grades=[[2, 1], [1], []], gallery=40)
    expected = evaluate_retrieval(arrays["embeddings"], gallery=arrays["gallery"], relevance=relevance)
    assert printed["metrics"] == pytest.approx(expected.metrics())
    assert printed["J"] is None
    assert "ndcg@10" in printed["metrics"]


@pytest.mark.parametrize(
    ("words", "text", "missing", "said"),
    [
        ([], "a 0 3 2\nb 0 7\n", (), r"line 2 of .*judged has 3 columns: 'b 0 7'"),
        ([], "a 0 3 2\nd 0 7 1\n", (), r"no query has the ids 'd' \(1 in all\) of the judgements"),
        ([], "a 0 3 two\n", (), "the grade 'two' is no number"),
        ([], JUDGED["trec"], ("gallery_ids",), "judgements name items by their ids, and the file has no 'gallery_ids'"),
        (["--unknown", "skip"], JUDGED["trec"], (), "there is no unknown='skip'. Pass 'error' or 'ignore'"),
        (["--per_class"], JUDGED["trec"], (), "relevance was given, or items have several labels each"),
    ],
)  # fmt: skip
def test_judgements_that_cannot_be_read_take_a_line(judged, words, text, missing, said, capsys):
    folder, arrays = judged
    (folder / "judged").write_text(text)
    np.savez(folder / "some.npz", **{name: array for name, array in arrays.items() if name not in missing})
    assert main(["evaluate", str(folder / "some.npz"), "--judgements", str(folder / "judged"), *words]) == 1
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_judgements_of_unknown_ids_can_be_left_out(judged, capsys):
    folder, _ = judged
    (folder / "judged").write_text(JUDGED["trec"] + "d 0 7 1\n")
    words = ["--judgements", str(folder / "judged"), "--unknown", "ignore"]
    assert main(["evaluate", str(folder / "ids.npz"), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["queries"] == 3
    assert main(["evaluate", str(folder / "ids.npz"), "--judgements", str(folder / "none")]) == 1
    assert "does not exist, or is no file" in capsys.readouterr().err


def test_labels_of_zeros_and_ones(tmp_path, capsys):
    rng = np.random.default_rng(0)
    embeddings, labels = rng.normal(size=(30, 4)), (rng.random((30, 5)) < 0.3).astype(int)
    np.savez(tmp_path / "tags.npz", embeddings=embeddings, labels=labels)
    assert main(["evaluate", str(tmp_path / "tags.npz"), "--json"]) == 0
    expected = evaluate_retrieval(embeddings, labels)
    assert json.loads(capsys.readouterr().out)["metrics"] == pytest.approx(expected.metrics())


def test_two_files_with_judgements_hold_the_same_ids(judged, capsys):
    folder, arrays = judged
    (folder / "judged").write_text(JUDGED["trec"])
    np.savez(folder / "other.npz", **arrays | {"query_ids": arrays["query_ids"][::-1]})
    files = ["evaluate", str(folder / "ids.npz"), "--judgements", str(folder / "judged"), "--against"]
    assert main([*files, str(folder / "ids.npz")]) == 0
    assert main([*files, str(folder / "other.npz")]) == 1
    assert "3 query_ids" in capsys.readouterr().err


@pytest.fixture
def parts(stored, tmp_path):
    """The same embeddings in three files of float16, and the report of float32 copies of these."""
    _, embeddings, labels = stored
    halves = embeddings.astype(np.float16)
    for part in range(3):
        np.savez(tmp_path / f"part{part}.npz", vectors=halves[part::3], label=labels[part::3])
    order = np.concatenate([np.arange(200)[part::3] for part in range(3)])
    return f"{tmp_path}/part*.npz", evaluate_retrieval(halves[order].astype(np.float32), labels[order])


def test_files_larger_than_the_budget_are_read_piece_by_piece(parts, capsys):
    files, expected = parts
    for memory in ("512", "0.01"):
        words = ["evaluate", files, "--labels", "label", "--embeddings", "vectors", "--memory_mb", memory, "--json"]
        assert main(words) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["metrics"] == expected.to_dict()["metrics"]
        assert printed["J"] > 0


def test_files_without_names_of_their_labels(parts, capsys):
    files, _ = parts
    assert main(["evaluate", files]) == 1
    assert "Pass --labels with the name of an array or column" in capsys.readouterr().err
    assert main(["evaluate", files, "--labels", "kinds"]) == 1
    assert "part0.npz has no 'kinds', but 'vectors', 'label'" in capsys.readouterr().err


def test_several_processes_evaluate_files_together(parts):
    files, expected = parts
    several = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fewshot_callbacks"]
    words = [*several, "evaluate", files, "--labels", "label", "--json"]
    ran = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(ran.stdout)["metrics"] == expected.to_dict()["metrics"]  # printed by one of them


KILLED = """
import os, sys
from fewshot_callbacks.cli.main import main
from fewshot_callbacks import journal

journal.EVERY = journal.RARELY = 0
write, left = journal.Record.write, [int(sys.argv.pop(1))]
def killed(record, arrays):
    write(record, arrays)
    left[0] -= 1
    if left[0] == 0 and os.environ["SLURM_PROCID"] == "1":
        os.kill(os.getpid(), 9)
journal.Record.write = killed
sys.exit(main())
"""


def test_a_killed_process_is_named_and_the_same_command_goes_on(parts, tmp_path, capsys):
    words = ["evaluate", parts[0], "--labels", "label", "--embeddings", "vectors", "--memory_mb", "0.05", "--json"]
    assert main(words) == 0
    known = json.loads(capsys.readouterr().out)
    words += ["--resume", str(tmp_path / "state")]
    numbers = {"JOB_ID": 17, "STEP_ID": 0, "NTASKS": 2, "NTASKS_PER_NODE": 2, "NODEID": 0, "NODELIST": "127.0.0.1"}
    job = {f"SLURM_{name}": str(number) for name, number in numbers.items()}

    def srun(writings):
        code = [sys.executable, "-c", KILLED, str(writings), *words]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            job["MASTER_PORT"] = str(free.getsockname()[1])
        tasks = [job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        begun = [subprocess.Popen(code, env=os.environ | task, stdout=-1, stderr=-1, text=True) for task in tasks]
        return [(*each.communicate(timeout=200), each.returncode) for each in begun]

    (_, said, status), (_, _, killed) = srun(3)
    assert (status, killed) == (1, -9)
    assert "fewshot evaluate: process 1 of 2, counted from 0, has ended in the middle" in said.splitlines()[-1]
    assert (tmp_path / "state" / "1.1.npz").exists()
    assert main(words) == 1
    assert "another evaluation, by its processes (2, now 1)" in capsys.readouterr().err
    (printed, said, status), (nothing, _, _) = srun(0)
    assert (status, nothing) == (0, ""), said
    again = json.loads(printed)
    for name in ("metrics", "intervals", "J"):
        assert again[name] == known[name]
    assert not (tmp_path / "state").exists()
