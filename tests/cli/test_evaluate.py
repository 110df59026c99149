"""`fewshot evaluate`: files of embeddings, settings, tables, JSON, and comparisons of two files."""

import json
import math

import numpy as np
import pytest
import torch

from fewshot_callbacks.cli.main import main
from fewshot_callbacks.functional.discriminant_ratio import discriminant_ratio
from fewshot_callbacks.functional.retrieval import evaluate_retrieval


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


def test_settings_that_are_off_by_default(stored, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path, embeddings, labels = stored
    labels[0] = 99
    np.savez(path, embeddings=embeddings, labels=labels)
    words = ["evaluate", str(path), "--ir_recall_k", "[3]"]
    words += ["--label_groups", "[[0, 1, 99], [2, 3, 4, 5]]", "--grouped_unmatched", "miss"]
    assert main([*words, "--json"]) == 0
    groups = [[0, 1, 99], [2, 3, 4, 5]]
    report = evaluate_retrieval(embeddings, labels, ir_recall_k=(3,), label_groups=groups, grouped_unmatched="miss")
    printed = json.loads(capsys.readouterr().out)
    assert printed["metrics"]["ir_recall@3"] == report.ir_recall_at[3]
    assert printed["metrics"]["grouped_recall@1"] == report.grouped_recall_at[1]
    assert printed["grouped"]["unmatched"] == "miss"
    assert main(words) == 0
    screen = capsys.readouterr().out
    assert "share of a query's relevant items that are among the first 3" in screen
    assert "recall inside 2 groups of several classes" in screen


def test_classes_are_tables_of_whole_columns(stored, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path, embeddings, labels = stored
    ks = (1, 5, 10, 20, 50)
    assert main(["evaluate", str(path), "--per_class", "--recall_k", ",".join(map(str, ks))]) == 0
    lines = capsys.readouterr().out.split("means of 25 classes", 1)[1].splitlines()
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    report = evaluate_retrieval(embeddings, labels, per_class=True, recall_k=ks)
    heads = [line.split()[1:] for line in lines if line.split()[:1] == ["class"]]
    assert [name for head in heads for name in head] == list(report.per_class)
    rows = [line.split()[1:] for line in lines if line.split()[:1] == ["7"]]
    assert [cell for row in rows for cell in row] == [f"{values[7]:.4f}" for values in report.per_class.values()]


@pytest.mark.parametrize(("option", "word", "setting"), [("recall_k", "5", [5]), ("precisions", ".9", [0.9])])
def test_one_number_is_a_list(option, word, setting, stored, capsys):
    path, embeddings, labels = stored
    assert main(["evaluate", str(path), f"--{option}", word, "--json"]) == 0
    expected = evaluate_retrieval(embeddings, labels, **{option: setting})
    assert json.loads(capsys.readouterr().out)["metrics"] == pytest.approx(expected.metrics())


def test_gallery_and_options(tmp_path, capsys):
    rng = np.random.default_rng(1)
    arrays = {
        "embeddings": rng.normal(size=(20, 8)),
        "labels": np.arange(20) % 4,
        "gallery": rng.normal(size=(50, 8)),
        "gallery_labels": np.arange(50) % 5,
    }
    np.savez(tmp_path / "two.npz", **arrays)
    words = [
        "--json",
        "--similarity",
        "euclidean",
        "--recall_k",
        "[1, 3]",
        "--precisions",
        "[0.5]",
        "--threshold_bounds",
        "[-3, -2.5]",
        "--group_size",
        "2",
    ]
    assert main(["evaluate", str(tmp_path / "two.npz"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    settings = {"recall_k": (1, 3), "precisions": (0.5,), "group_size": 2}
    report = evaluate_retrieval(*arrays.values(), similarity="euclidean", threshold_bounds=(-3, -2.5), **settings)
    unbounded = evaluate_retrieval(*arrays.values(), similarity="euclidean", **settings)
    assert report.recall_at_precision[0.5] != unbounded.recall_at_precision[0.5]
    assert {k: v for k, v in printed["metrics"].items() if v is not None} == pytest.approx(
        {k: v for k, v in report.metrics().items() if not math.isnan(v)}
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist. Write one with numpy.savez"),
        (lambda path: path.write_text("hello"), "is not an .npz file of plain arrays"),
        (lambda path: path.write_bytes(b""), "is not an .npz file of plain arrays"),
        (lambda path: np.savez(path, x=np.zeros(3), labels=np.zeros(3)), "holds 'x', 'labels', but not 'embeddings'"),
        (
            lambda path: np.savez(path, embeddings=np.full((4, 2), np.nan), labels=np.zeros(4, int)),
            "4 of 4 rows of embeddings hold NaN or Inf",
        ),
        (lambda path: np.savez(path, embeddings=np.zeros((4, 2)), labels=np.zeros(4)), "integer labels"),
        (lambda path: np.savez(path, embeddings=np.array([None]), labels=np.zeros(1, int)), "plain arrays"),
    ],
)
def test_bad_files_end_with_a_sentence_and_status_1(make, words, tmp_path, capsys):
    path = tmp_path / "file.npz"
    make(path)
    assert main(["evaluate", str(path)]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


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
    assert printed["J"] == pytest.approx(
        float(discriminant_ratio(torch.as_tensor(embeddings), torch.as_tensor(labels)))
    )
    assert "class 07" in printed["per_class"]["mAP"]


def test_names_of_classes_are_neither_markup_nor_commands_to_the_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    names = np.array(["[/]", "[x]", ":owl:", "bell\x07", "\x1b[2Jclear", "\u202eback"])
    labels = np.repeat(names, 4)
    np.savez("[red]file.npz", embeddings=np.random.default_rng(0).normal(size=(24, 4)), labels=labels)
    assert main(["evaluate", "[red]file.npz", "--per_class", "--group_size", "none"]) == 0
    screen = capsys.readouterr().out
    for word in ("[/]", "[x]", ":owl:", r"bell\x07", r"\x1b[2Jclear", r"\u202eback", "[red]file.npz"):
        assert word in screen
    assert not {"\x07", "\x1b", "\u202e"} & set(screen)
    assert main(["evaluate", "[red]file.npz", "--against", "[red]file.npz", "--group_size", "none"]) == 0
    assert "[red]file.npz against [red]file.npz" in capsys.readouterr().out


def test_an_error_that_names_a_class_does_not_steer_the_terminal(tmp_path, capsys):
    np.savez(tmp_path / "\x1b[2J.npz", wrong=np.zeros(3))
    assert main(["evaluate", str(tmp_path / "\x1b[2J.npz")]) == 1
    said = capsys.readouterr().err
    assert r"\x1b[2J.npz holds 'wrong'" in said
    assert "\x1b" not in said
