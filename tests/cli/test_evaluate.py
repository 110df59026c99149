"""`fewshot evaluate`: files of embeddings, settings, tables, JSON, and comparisons of two files."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch

from fewshot_callbacks.cli.main import main
from fewshot_callbacks.functional import compression_costs
from fewshot_callbacks.functional.discriminant_ratio import discriminant_ratio
from fewshot_callbacks.functional.retrieval import Relevance, evaluate_retrieval
from tests.cli.slurm_steps import SLURM
from tests.messages import missing_facts


@pytest.fixture
def stored(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 25
    embeddings = (rng.normal(size=(25, 16))[labels] + 0.7 * rng.normal(size=(200, 16))).astype(np.float32)
    path = tmp_path / "embeddings.npz"
    np.savez(path, embeddings=embeddings, labels=labels)
    return path, embeddings, labels


def evaluated(capsys, *words):
    """What the command prints as JSON."""
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    """Return the one-line message for arguments that the command refuses."""
    assert main(["evaluate", *map(str, words)]) == 1
    out, said = capsys.readouterr()
    assert (out, said.count("\n"), said[:18]) == ("", 1, "fewshot evaluate: ")
    return said


def test_the_table_has_the_range_that_ties_leave_where_digits_show_it(tmp_path, capsys):
    codes = np.random.default_rng(0).integers(0, 2, (40, 4)).astype(np.float32)
    labels = np.arange(40) % 8
    path = tmp_path / "codes.npz"
    np.savez(path, embeddings=codes, labels=labels)
    words = ("evaluate", str(path), "--similarity", "hamming", "--metrics", "mAP", "pair_f1", "J")
    assert main(list(words)) == 0
    table = " ".join(capsys.readouterr().out.split())
    ends = evaluate_retrieval(codes, labels, similarity="hamming", metrics="mAP").tie_ranges["mAP"]
    assert "order of ties" in table
    assert all(f"{end:.4f}" in table for end in ends)
    assert evaluated(capsys, *words[1:])["tie_ranges"] == {"mAP": list(ends)}


METRICS_OF_A_USER = """
from fewshot_callbacks import Metric, relevant_ranks

def first_rank(ranks, ties="expected"):
    return relevant_ranks(ranks, ties).nan_to_num(2.0**60).amin(dim=1)

def within(ranks, k, ties="expected"):
    return (relevant_ranks(ranks, ties) <= k).sum(dim=1)

FIRST = Metric("first", "ranks", first_rank, "Mean rank of the first match.", range=None, better="lower")
WITHIN = Metric("within@{k}", "ranks", within, "Matches among the first {k}.", range=None)
SPREAD = Metric("spread", "pairs", lambda pooled: pooled.best_f1.threshold, "The threshold.", range=None)
"""


def test_metrics_of_a_user_are_named_by_their_import_paths(stored, tmp_path, monkeypatch, capsys):
    path, embeddings, labels = stored
    (tmp_path / "first_metrics.py").write_text(METRICS_OF_A_USER)
    monkeypatch.chdir(tmp_path)
    words = (path, "--metrics", "mAP", "first_metrics.FIRST,first_metrics.WITHIN@k=3", "macro_within@3")
    before = sys.path.copy()
    values = evaluated(capsys, *words)["metrics"]
    assert sys.path == before
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("first_metrics")
    metrics = ("mAP", module.FIRST, module.WITHIN.at(k=3), "macro_within@3")
    assert values == evaluate_retrieval(embeddings, labels, metrics=metrics).metrics()
    assert main(["evaluate", *map(str, words)]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert missing_facts(table, ("within@3", "Mean rank")) == []
    assert main(["evaluate", *map(str, words), "first_metrics.SPREAD", "--against", str(path)]) == 0
    assert missing_facts(" ".join(capsys.readouterr().out.split()), ("spread is one value of all pairs",)) == []
    said = refused(capsys, path, "--metrics", "first_metrics.LAST")
    assert missing_facts(said, ("first_metrics", "LAST", "FIRST", "WITHIN", "SPREAD")) == []
    assert missing_facts(refused(capsys, path, "--metrics", "other.FIRST"), ("module", "'other'")) == []


FORMS = {
    "words": lambda rows, labels: {"embeddings": rows, "labels": np.array([f"class {label:02d}" for label in labels])},
    "another byte order": lambda rows, labels: {"embeddings": rows.astype(">f4"), "labels": labels.astype(">i4")},
    "zeros and ones": lambda rows, _: {"embeddings": rows, "labels": np.random.default_rng(0).integers(0, 2, (200, 5))},
    "a gallery": lambda rows, labels: {
        "queries": rows[:40], "query_labels": labels[:40], "gallery": rows[40:], "gallery_labels": labels[40:] % 20,
    },
}  # fmt: skip
SETTINGS = {"similarity": "euclidean", "metrics": ("mAP", "recall@3", "recall@precision0.5")}


@pytest.mark.parametrize("form", FORMS)
def test_json_holds_the_values_of_the_report(stored, form, capsys):
    path, embeddings, labels = stored
    arrays = FORMS[form](embeddings, labels)
    np.savez(path, **arrays)
    native = {name: values for name, values in arrays.items() if name.startswith("gallery")}
    vectors, of_queries = ("queries", "query_labels") if form == "a gallery" else ("embeddings", "labels")
    native |= {"queries": arrays[vectors].astype(np.float32), "query_labels": arrays[of_queries]}
    if form in ("words", "another byte order"):
        native["query_labels"] = labels
    settings = SETTINGS | {"threshold_bounds": (-3, -2.5)} if form == "a gallery" else {}
    words = [f"--{name}={value}" for name, value in settings.items()]
    printed = evaluated(capsys, path, *words, *([] if form == "zeros and ones" else ["--per_class"]))
    expected = evaluate_retrieval(**native, **settings)
    known = {name: value for name, value in expected.metrics().items() if not math.isnan(value)}
    assert {name: value for name, value in printed["metrics"].items() if value is not None} == pytest.approx(known)
    assert printed["intervals"]["mAP"] == pytest.approx(list(expected.intervals["mAP"]))
    assert printed["queries"] == len(native["query_labels"])
    assert "J" not in printed  # it was not asked for
    if form == "zeros and ones":
        return
    name = "class 07" if form == "words" else "7"
    assert printed["per_class"]["mAP"][name] == pytest.approx(expected.per_class()["mAP"][7])
    if settings:  # the bounds change the threshold
        assert expected["recall@precision0.5"] != evaluate_retrieval(**native, **SETTINGS)["recall@precision0.5"]


def j_of(rows, labels):
    """J of these rows by the function."""
    return pytest.approx(float(discriminant_ratio(torch.tensor(rows), torch.tensor(labels))))


def test_j_is_printed_when_it_is_asked_for_of_all_rows(stored, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path, rows, labels = stored
    shifted = rows + 3  # so that J of a part differs from that of all rows
    assert evaluated(capsys, path, "--metrics", "mAP", "J")["J"] == j_of(rows, labels)
    assert list(evaluated(capsys, path, "--metrics", "J,mAP", "recall@1")["metrics"]) == ["mAP", "recall@1"]
    for words in ([], ["--metrics", "mAP"]):
        assert main(["evaluate", str(path), *words]) == 0
        assert not re.search(r"\bJ\b", capsys.readouterr().out)
    assert main(["evaluate", str(path), "--metrics", "mAP", "J"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if re.search(r"\bJ\b", line)]
    assert "200 rows" in row
    # the gallery of which the last 40 items are queries, too
    gallery = np.concatenate([shifted[:120], rows[:40]])
    arrays = {"queries": rows, "query_labels": labels, "query_ids": np.arange(200), "gallery": gallery}
    ids = np.concatenate([np.arange(300, 420), np.arange(40)])
    arrays |= {"gallery_labels": np.concatenate([labels[:120], labels[:40]]), "gallery_ids": ids}
    np.savez(path, **arrays)
    together = np.concatenate([rows, shifted[:120]]), np.concatenate([labels, labels[:120]])
    assert evaluated(capsys, path, "--metrics", "mAP", "J")["J"] == j_of(*together)


def test_j_of_files_is_of_queries_and_gallery(stored, tmp_path, capsys):
    _, rows, labels = stored
    for part in range(2):
        is_gallery = np.arange(100) % 5 > 0
        np.savez(tmp_path / f"half{part}.npz", v=rows[part::2], y=labels[part::2], g=is_gallery)
    order = np.concatenate([np.arange(200)[part::2] for part in range(2)])
    words = [tmp_path / "half*.npz", "--embeddings", "v", "--labels", "y", "--is_gallery", "g"]
    assert evaluated(capsys, *words, "--metrics", "mAP", "J")["J"] == j_of(rows[order], labels[order])
    assert "J" not in evaluated(capsys, *words)


def test_j_of_two_files_is_compared_without_an_interval_and_says_why(stored, other, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    path, rows, labels = stored
    words = [path, "--against", other[0], "--metrics", "mAP", "pair_f1", "J"]
    printed = evaluated(capsys, *words)
    assert [printed[which]["J"] for which in ("first", "second")] == [j_of(rows, labels), j_of(other[1], labels)]
    assert printed["differences"]["J"]["value"] == pytest.approx(printed["first"]["J"] - printed["second"]["J"])
    assert main(["evaluate", *map(str, words)]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "difference: first minus second" in screen
    assert "No interval: pair_f1 is one value of all pairs; J is one value of all rows." in screen


def test_j_without_one_label_a_row_is_refused(judged, stored, tmp_path, capsys):
    several = tmp_path / "several.npz"
    np.savez(several, embeddings=stored[1], labels=np.arange(400).reshape(200, 2) % 2)
    said = refused(capsys, several, "--metrics", "mAP", "J")
    assert missing_facts(said, ("J", "one label", "'labels'", "--metrics")) == []
    file, arrays, judgements = judged
    words = [file, "--judgements", judgements, "--metrics", "mAP", "J"]
    both = ("J", "one label", "'query_labels'", "'gallery_labels'")
    assert missing_facts(refused(capsys, *words), both) == []
    np.savez(file, **arrays, query_labels=[0, 1, 2])
    assert missing_facts(refused(capsys, *words), both) == ["'query_labels'"]
    np.savez(file, **arrays, query_labels=[0, 1, 2], gallery_labels=np.arange(40) % 3)
    assert evaluated(capsys, *words)["J"] > 0


def test_j_alone_is_refused(stored, capsys):
    said = refused(capsys, stored[0], "--metrics", "J")
    assert missing_facts(said, ("--metrics J", "metric", "--metrics mAP J")) == []


def test_the_table_shows_every_metric_its_meaning_and_the_notes(stored, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    path, embeddings, labels = stored
    labels[0] = 99
    np.savez(path, embeddings=embeddings, labels=labels)
    keys, groups = ("mAP", "ir_recall@3", "grouped_recall@1_miss", "opis@fmr0.1"), [[0, 1, 99], [2, 3, 4, 5]]
    words = [path, "--metrics", "mAP", ",".join(keys[1:]), "--label_groups", str(groups)]
    report = evaluate_retrieval(embeddings, labels, metrics=keys, label_groups=groups)
    printed = evaluated(capsys, *words)
    assert list(printed["metrics"].items()) == list(report.metrics().items())
    assert printed["grouped"]["unmatched"] == "miss"
    assert main(["evaluate", *map(str, words)]) == 0
    screen = capsys.readouterr().out
    for name, value in report.metrics().items():
        assert re.search(rf"{name} .*{value:.4f}", screen)
    wanting = report.consistency[0.1].wanting(1).items()
    for label, (threshold, gain) in wanting:
        assert f"{label} {threshold:.4f} (+{gain:.3f})" in screen
    assert wanting
    assert missing_facts(screen, ("first 3", "2 groups", "1 of 200 queries")) == []


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


@pytest.fixture
def other(stored, tmp_path):
    """Worse embeddings of the same items."""
    _, embeddings, labels = stored
    worse = embeddings + 1.5 * np.random.default_rng(1).normal(size=embeddings.shape).astype(np.float32)
    np.savez(tmp_path / "other.npz", embeddings=worse, labels=labels)
    return tmp_path / "other.npz", worse


def test_against_another_file_json_holds_both_reports_and_their_differences(stored, other, capsys):
    path, embeddings, labels = stored
    words = [path, "--against", other[0], "--per_class"]
    assert missing_facts(refused(capsys, *words), ("--json", "--per_class")) == []
    printed = evaluated(capsys, *words)
    first, second = (evaluate_retrieval(rows, labels) for rows in (embeddings, other[1]))
    assert [printed[which]["metrics"] for which in ("first", "second")] == [first.metrics(), second.metrics()]
    assert "per_class" in printed["first"]
    difference, pooled = printed["differences"]["mAP"], printed["differences"]["pair_f1"]
    assert difference["value"] == pytest.approx(first.mAP - second.mAP)
    assert difference["is_beyond_chance"] is True
    assert (pooled["interval"], pooled["is_beyond_chance"]) == ([None, None], None)


def test_against_another_file_the_table_says_what_is_beyond_chance(stored, other, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path, embeddings, labels = stored
    assert main(["evaluate", str(path), "--against", str(other[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if " mAP " in line)
    assert row.split()[-1] == "yes"
    assert "+0." in row
    names = evaluate_retrieval(embeddings, labels).metrics()
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in names] == list(names)
    assert main(["evaluate", str(path), "--against", str(path)]) == 0
    assert " yes" not in capsys.readouterr().out
    np.savez(other[0], embeddings=embeddings[:-1], labels=labels[:-1])
    assert missing_facts(refused(capsys, path, "--against", other[0]), ("200 labels", 199)) == []


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
    said = refused(capsys, "\x1b[2J.npz")
    assert said.startswith(r"fewshot evaluate: \x1b[2J.npz ")
    assert "'wrong'" in said


def broken_stream(path):
    content = bytearray(path.read_bytes())
    start = content.index(b"embeddings.npy") + 60
    content[start : start + 200] = bytes(byte ^ 0xFF for byte in content[start : start + 200])
    path.write_bytes(content)


def no_array(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("embeddings.npy", b"hello")


DAMAGED = ("damaged", "embeddings", ".npz")
DAMAGES = {
    "a broken stream": (broken_stream, (*DAMAGED, "Error -3 while decompressing")),
    "no array": (no_array, (*DAMAGED, "array")),
    "pickled objects": (lambda path: np.savez(path, embeddings=np.array([{}])), (*DAMAGED, "Object arrays")),
    "nothing": (lambda path: path.unlink(), ("exist",)),
    "a text": (lambda path: path.write_text("hello"), (".npz", "arrays")),
    "other names": (lambda path: np.savez(path, x=[0], labels=[0]), ("'x'", "'labels'", "'embeddings'")),
    "a single value": (lambda path: np.savez(path, embeddings=np.eye(3), labels=3), ("labels", "single value")),
}


@pytest.mark.parametrize(("do", "facts"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_one_line(do, facts, tmp_path, capsys):
    path = tmp_path / "e.npz"
    np.savez_compressed(path, embeddings=np.random.default_rng(0).normal(size=(40, 8)), labels=np.arange(40) % 4)
    do(path)
    assert missing_facts(refused(capsys, path), (path, *facts, "numpy.savez(path, embeddings=..., labels=...)")) == []


JUDGED = "a 0 3 2\na 0 5 1\nb 0 7 1\nc 0 39 0\n"


@pytest.fixture
def judged(tmp_path):
    """A file of embeddings with ids, its arrays, and a file of judgements."""
    queries, gallery = np.split(np.random.default_rng(0).normal(size=(43, 8)).astype(np.float32), [3])
    arrays = {"queries": queries, "gallery": gallery, "query_ids": ["a", "b", "c"], "gallery_ids": np.arange(40)}
    np.savez(tmp_path / "ids.npz", **arrays)
    (tmp_path / "judged").write_text(JUDGED)
    return tmp_path / "ids.npz", arrays, tmp_path / "judged"


def test_judgements_are_who_is_relevant_in_place_of_labels(judged, capsys):
    file, arrays, judgements = judged
    printed = evaluated(capsys, file, "--judgements", judgements)
    relevance = Relevance.from_lists([[3, 5], [7], []], grades=[[2, 1], [1], []], gallery=40)
    expected = evaluate_retrieval(arrays["queries"], gallery=arrays["gallery"], relevance=relevance)
    assert printed["metrics"] == pytest.approx(expected.metrics())
    assert "J" not in printed
    judgements.write_text(JUDGED + "d 0 7 1\n")
    assert missing_facts(refused(capsys, file, "--judgements", judgements), ("query", "ids", "'d'", 1)) == []
    words = [file, "--judgements", judgements, "--unknown", "ignore"]
    left_out = "1 judgement"
    without = evaluated(capsys, *words)
    assert without["metrics"] == printed["metrics"]
    assert any(left_out in note for note in without["notes"])
    assert main(["evaluate", *map(str, words)]) == 0
    assert left_out in " ".join(capsys.readouterr().out.split())
    assert main(["evaluate", *map(str, words), "--against", str(file)]) == 0
    assert " ".join(capsys.readouterr().out.split()).count(left_out) == 2
    judgements.write_text(JUDGED)
    assert evaluated(capsys, *words)["notes"] == printed["notes"]


def test_at_least_sets_the_smallest_relevant_grade_of_judgements(judged, capsys):
    file, arrays, judgements = judged
    relevance = Relevance.from_lists([[3], [], []], grades=[[2], [], []], gallery=40)
    expected = evaluate_retrieval(arrays["queries"], gallery=arrays["gallery"], relevance=relevance)
    printed = evaluated(capsys, file, "--judgements", judgements, "--at_least", "2")
    assert printed["metrics"] == pytest.approx(expected.metrics())
    words = [file, "--judgements", judgements, "--at_least"]
    assert missing_facts(refused(capsys, *words, "0"), ("--at_least 0.0", "positive")) == []


def test_a_judged_item_that_is_not_in_the_gallery_is_never_found(judged, capsys):
    file, _, judgements = judged
    whole = evaluated(capsys, file, "--judgements", judgements, "--metrics", "mAP", "ir_recall@40")
    judgements.write_text(JUDGED + "b 0 999 1\n")
    printed = evaluated(
        capsys, file, "--judgements", judgements, "--unknown", "ignore", "--metrics", "mAP", "ir_recall@40"
    )
    assert (whole["metrics"]["ir_recall@40"], printed["metrics"]["ir_recall@40"]) == (1.0, 0.75)
    assert printed["metrics"]["mAP"] < whole["metrics"]["mAP"]
    assert any(missing_facts(note, ("gallery", 1)) == [] for note in printed["notes"])


def test_judgements_that_do_not_fit_the_file_take_a_line(judged, tmp_path, capsys):
    file, arrays, judgements = judged
    words = [file, "--judgements", judgements]
    assert missing_facts(refused(capsys, *words, "--per_class", "--json"), ("--per_class", "one label")) == []
    assert missing_facts(refused(capsys, file, "--judgements", tmp_path / "none"), (tmp_path / "none", "file")) == []
    assert main(["evaluate", *map(str, words), "--against", str(file)]) == 0
    capsys.readouterr()
    other = tmp_path / "other.npz"
    np.savez(other, **arrays | {"query_ids": ["c", "b", "a"]})
    assert "3 query_ids" in refused(capsys, *words, "--against", other)
    np.savez(other, **{name: array for name, array in arrays.items() if name != "gallery_ids"})
    assert missing_facts(refused(capsys, other, *words[1:]), ("file", "'gallery_ids'")) == []


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
    assert missing_facts(refused(capsys, files), ("--labels", "array", "column")) == []
    facts = ("part0.npz", "'kinds'", "'vectors'", "'label'")
    assert missing_facts(refused(capsys, files, "--labels", "kinds"), facts) == []
    for memory in ("512", "0.01"):
        words = [files, "--labels", "label", "--embeddings", "vectors", "--memory_mb", memory]
        assert evaluated(capsys, *words)["metrics"] == expected.to_dict()["metrics"]


def killed(*words):
    """Begin an evaluation, and end it with Ctrl-C before it has come to its end."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fewshot_callbacks.cli.evaluate.evaluate_retrieval", interrupted)
        assert main(["evaluate", *map(str, words)]) == 130


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture
def columns(tmp_path):
    """Vectors in one file, and a .npy file next to it for each column."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "vectors.npy", rng.normal(size=(60, 8)).astype(np.float32))
    held = {
        "labels": np.arange(60) % 6, "ids": np.arange(60), "groups": np.arange(60) % 4, "is_gallery": np.arange(60) > 20,
    }  # fmt: skip
    for name, values in held.items():
        np.save(tmp_path / f"{name}.npy", values)
    words = [tmp_path / "vectors.npy", *(word for name in held for word in (f"--{name}", tmp_path / f"{name}.npy"))]
    return [*words, "--resume", tmp_path / "state"]


@pytest.mark.parametrize("name", ["labels", "ids", "groups", "is_gallery"])
def test_a_column_that_was_written_anew_is_not_gone_on_with(columns, tmp_path, capsys, name):
    killed(*columns)
    capsys.readouterr()
    file = tmp_path / f"{name}.npy"
    times = file.stat()
    np.save(file, np.load(file)[::-1])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # of the same size and time
    said = refused(capsys, *columns)
    assert missing_facts(said, (tmp_path / "state", "another evaluation", f"content of --{name}", "folder")) == []
    before, now = re.search(r"\((\w+), now (\w+)\)", said).groups()
    assert before != now
    np.save(file, np.load(file)[::-1])
    evaluated(capsys, *columns)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("name", ["labels", "ids", "groups", "embeddings"])
@pytest.mark.parametrize("against", [False, True])
def test_an_array_of_a_file_that_was_written_anew_is_not_gone_on_with(tmp_path, capsys, name, against):
    arrays = {"labels": np.arange(60) % 6, "ids": np.arange(60), "groups": np.arange(60) % 4}
    arrays["embeddings"] = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    for file in (one, two):
        np.savez(file, **arrays)
    words = [one, "--against", two, "--resume", tmp_path / "state"]
    killed(*words)
    capsys.readouterr()
    for file in (one, two) if name == "labels" else (two,) if against else (one,):
        np.savez(file, **arrays | {name: arrays[name][::-1]})
    assert missing_facts(refused(capsys, *words), (tmp_path / "state", "another evaluation", "content")) == []


def test_the_state_of_another_evaluation_is_told_by_the_files_and_not_by_a_hash(stored, other, tmp_path, capsys):
    path, *_ = stored
    state = tmp_path / "state"
    killed(path, "--resume", state)
    capsys.readouterr()
    said = refused(capsys, other[0], "--resume", state)
    facts = (state, "another evaluation", f"({path}, now {other[0]})", f"content of {path}")
    assert missing_facts(said, facts) == []
    size = path.stat().st_size
    os.utime(path, (0, 1_700_000_000))
    said = refused(capsys, path, "--resume", state)
    before, _, now = said.partition(", now ")
    assert missing_facts(before, (f"content of {path}", "1 file", f"{size:,} bytes")) == []
    assert missing_facts(now, ("1 file", f"{size:,} bytes", "2023-11-14 22:13:20 UTC")) == []


def test_an_array_with_the_name_of_a_check_replaces_none(tmp_path, capsys):
    file = tmp_path / "items.npz"
    arrays = {name: np.arange(60) for name in ("settings", "version", "files", "processes")}
    vectors = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    np.savez(file, embeddings=vectors, labels=np.arange(60) % 6, **arrays)
    killed(file, "--resume", tmp_path / "state")
    capsys.readouterr()
    said = refused(capsys, file, "--resume", tmp_path / "state", "--similarity", "dot")
    assert missing_facts(said, (tmp_path / "state", "another evaluation", "--similarity (cosine, now dot)")) == []


def test_judgements_that_were_written_anew_are_not_gone_on_with(judged, tmp_path, capsys):
    file, _, judgements = judged
    words = [file, "--judgements", judgements, "--resume", tmp_path / "state"]
    killed(*words)
    capsys.readouterr()
    before, times = judgements.read_text(), judgements.stat()
    judgements.write_text("\n".join(reversed(before.splitlines())) + "\n")
    os.utime(judgements, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert missing_facts(refused(capsys, *words), (tmp_path / "state", "another evaluation", "judgements")) == []
    judgements.write_text(before)
    assert evaluated(capsys, *words)["metrics"] == evaluated(capsys, file, "--judgements", judgements)["metrics"]


def test_a_state_is_never_written_beside_the_embeddings(parts, tmp_path, capsys):
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    words = [parts[0], "--labels", "label", "--embeddings", "vectors"]
    said = refused(capsys, *words, "--resume", tmp_path)
    assert missing_facts(said, (tmp_path, "embeddings.npz", "state of an evaluation")) == []
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="torch is imported once, and then forked")
def test_a_killed_process_is_named_and_the_same_command_goes_on(parts, tmp_path, capsys):
    words = [parts[0], "--labels", "label", "--embeddings", "vectors", "--memory_mb", "0.05"]
    words += ["--metrics", "mAP", "pair_f1", "J"]
    known = evaluated(capsys, *words)
    command = [sys.executable, "-c", SLURM, "evaluate", *words, "--json", "--resume", "state"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == ["1 -9", "1", "0 0"], done.stderr
    killed, ended = (float((tmp_path / name).read_text()) for name in ("killed", "ended"))
    assert ended - killed < 30
    said = [(tmp_path / f"{step}.0.err").read_text() for step in range(2)]
    assert missing_facts(said[0].splitlines()[-1], ("fewshot evaluate", "process 1 of 2")) == []
    assert missing_facts(said[1], ("another evaluation", "processes (2, now 1)")) == []
    again = json.loads((tmp_path / "2.0.out").read_text())  # printed by one of them
    assert (tmp_path / "2.1.out").read_text() == ""
    for name in ("metrics", "intervals", "J"):
        assert again[name] == known[name]
    assert not (tmp_path / "state").exists()


TWICE = np.concatenate([np.arange(200), np.arange(0, 200, 3)])


def test_items_that_come_twice_are_noted_and_ids_leave_them_out(stored, capsys, tmp_path):
    path, embeddings, labels = stored
    with_j = ("--metrics", "mAP", "recall@1", "J")
    right, j = evaluated(capsys, path), evaluated(capsys, path, *with_j)["J"]
    np.savez(path, embeddings=embeddings[TWICE], labels=labels[TWICE])
    found = evaluated(capsys, path)
    assert found["queries_with_copies"] == 2 * 67
    assert any(missing_facts(note, ("134 of 267 queries", "ids")) == [] for note in found["notes"])
    np.savez(path, embeddings=embeddings[TWICE], labels=labels[TWICE], ids=TWICE.astype(str))
    cured = evaluated(capsys, path)
    assert cured | {"seconds": 0} == right | {"seconds": 0}
    assert evaluated(capsys, path, *with_j)["J"] == pytest.approx(j, rel=1e-12)
    for key, values in (("rows", embeddings[TWICE]), ("label", labels[TWICE]), ("path", TWICE)):
        np.save(tmp_path / f"{key}.npy", values)
    shards = tmp_path / "shards"
    shards.mkdir()
    np.save(shards / "rows.npy", embeddings[TWICE])
    words = ("--labels", tmp_path / "label.npy", "--ids", tmp_path / "path.npy")
    assert evaluated(capsys, shards, *words)["metrics"] == right["metrics"]


def test_an_ending_in_upper_case_is_an_ending(stored, capsys):
    path, *_ = stored
    plain = evaluated(capsys, path)["metrics"]
    assert evaluated(capsys, path.rename(path.with_suffix(".NPZ")))["metrics"] == plain


def test_what_is_passed_over_and_the_order_of_shards_are_said_once(stored, tmp_path, capsys):
    _, embeddings, labels = stored
    folder = tmp_path / "shards"
    folder.mkdir()
    for part in range(20):
        np.save(folder / f"part-{part}.npy", embeddings[10 * part : 10 * part + 10])
    np.save(tmp_path / "labels.npy", labels)
    (folder / "._part-0.npy").write_bytes(b"\0")
    assert main(["evaluate", str(folder), "--labels", str(tmp_path / "labels.npy"), "--json"]) == 0
    out, said = capsys.readouterr()
    expected = evaluate_retrieval(embeddings, labels)
    assert json.loads(out)["metrics"]["mAP"] == pytest.approx(expected.mAP)
    first, second = (line for line in said.splitlines() if line.startswith("note: "))
    assert missing_facts(first, ("skipped", "._part-0.npy 1")) == []
    assert missing_facts(second, ("order", "part-2.npy", "part-10.npy", "labels")) == []


def test_what_compression_costs_is_printed_and_stored(stored, capsys):
    path, embeddings, labels = stored
    words = (path, "--dims", "4", "8", "--codes", "int8", "binary", "--metrics", "mAP", "mrr", "recall@1")
    report = compression_costs(embeddings, labels, dims=(4, 8))
    found = evaluated(capsys, *words)
    assert list(found["metrics"]) == ["mAP", "mrr", "recall@1"]
    assert found["compression"] == json.loads(json.dumps(report.to_dict()))
    assert main(["evaluate", *map(str, words)]) == 0
    table = capsys.readouterr().out
    assert "mAP of compressed embeddings of 16 dimensions" in table
    [row] = [line.split() for line in table.splitlines() if line.split()[:1] == ["dims4_int8"]][:1]
    loss = report.variants["dims4_int8"].differences["mAP"]
    assert row[1:4] == ["4", f"{loss.first:.4f}", f"{loss.value:+.4f}"]
    assert "compression" not in evaluated(capsys, path)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (("--dims", "17"), ("dims", 17, "16 dimensions")),
        (("--dims", "eight"), ("dims", "'eight'", "whole number", 1)),
        (("--dims", "0"), ("dims", 0, "whole number", 1)),
        (("--codes", "int"), ("codes", "'int'", "'int8'")),
        (("--codes", "int8", "--similarity", "hamming"), ("--similarity hamming", "binary codes")),
        (("--codes", "int8", "--against", "other.npz"), ("--dims", "--codes", "--against")),
    ],
)
def test_forms_that_cannot_be_compared_are_refused(stored, capsys, words, facts):
    assert missing_facts(refused(capsys, stored[0], *words), facts) == []


@pytest.mark.parametrize(
    ("option", "value"), [("at_least", "2"), ("at_least", "1"), ("unknown", "ignore"), ("unknown", "error")]
)
def test_options_of_judgements_without_judgements_are_refused(option, value, tmp_path, capsys):
    np.savez(tmp_path / "one.npz", embeddings=np.eye(6), labels=np.arange(6) % 2)
    assert main(["evaluate", str(tmp_path / "one.npz"), f"--{option}", value]) == 1
    assert missing_facts(capsys.readouterr().err, (f"--{option}", "--judgements")) == []


def test_files_whose_names_are_no_utf8_are_read_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"l\xff.npz")
    rows = np.random.default_rng(0).normal(size=(24, 4))
    with open(name, "wb") as file:
        np.savez(file, embeddings=rows, labels=np.arange(24) % 4, ids=np.arange(24).astype(str))
    np.savez("plain.npz", embeddings=rows, labels=np.arange(24) % 4)
    printed = {}
    for file in (name, "plain.npz"):
        assert main(["evaluate", file, "--metrics", "mAP", "--json"]) == 0
        printed[file] = json.loads(capsys.readouterr().out)["metrics"]
    assert printed[name] == printed["plain.npz"]
    assert main(["evaluate", name, "--against", "plain.npz"]) == 0
    page = os.fsdecode(b"r\xfe.html")
    assert main(["report", name, f"--output={page}"]) == 0
    assert os.path.exists(b"r\xfe.html")
    with open(b"t\xfd.txt", "wb") as file:
        file.write(b"1 0 4\n0 0 1\n1 2 6\n0 2 3\n")
    assert main(["trials", os.fsdecode(b"t\xfd.txt"), "--embeddings", name]) == 0
    assert main(["plan", "--files", name]) == 0
    capsys.readouterr()
    assert main(["evaluate", os.fsdecode(b"m\xff.npz")]) == 1
    assert "m\\udcff.npz" in capsys.readouterr().err


def test_the_help_begins_with_two_examples(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    lines = capsys.readouterr().out.partition("positional arguments")[0].splitlines()
    assert len([line for line in lines if line.split()[:2] == ["fewshot", "evaluate"]]) == 2


def test_an_evaluation_that_goes_on_says_so(tmp_path, monkeypatch, capsys):
    np.savez(tmp_path / "one.npz", embeddings=np.random.default_rng(0).normal(size=(30, 4)), labels=np.arange(30) % 3)
    words = ["evaluate", str(tmp_path / "one.npz"), "--metrics", "mAP", "--json", "--resume", str(tmp_path / "state")]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fewshot_callbacks.cli.evaluate.evaluate_retrieval", interrupted)
        assert main(words) == 130
    assert f"state in {tmp_path / 'state'}" not in capsys.readouterr().err
    assert main(words) == 0
    said = capsys.readouterr()
    assert f"state in {tmp_path / 'state'}" in said.err
    assert "metrics" in json.loads(said.out)
