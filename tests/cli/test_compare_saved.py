"""`fewshot evaluate --save`, and `fewshot compare` of the reports that it has written."""

import json
import shutil

import numpy as np
import pytest

from fewshot_callbacks import classes_needed, compare_reports, rank_reports
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.functional import RetrievalReport
from tests.messages import missing_facts
from tests.remote_stores import empty_memory

LABELS = np.arange(120) % 12
METRICS = ("--metrics", "mAP", "recall@1", "pair_f1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three models of the same items: their embeddings, and their reports."""
    folder = tmp_path_factory.mktemp("saved")
    generator = np.random.default_rng(0)
    items = generator.normal(size=(12, 8))[LABELS] + generator.normal(size=(120, 8))
    for name, noise in (("june", 2.0), ("july", 0.3), ("august", 0.31)):
        rows = (items + noise * generator.normal(size=items.shape)).astype(np.float32)
        np.savez(folder / f"{name}.npz", embeddings=rows, labels=LABELS, ids=np.arange(120))
        words = ["evaluate", folder / f"{name}.npz", *METRICS, "--save", folder / f"{name}.report.npz"]
        assert main([str(word) for word in words]) == 0
    return folder


def printed(capsys, *words, status=0):
    capsys.readouterr()
    assert main([*map(str, words)]) == status
    output = capsys.readouterr()
    return output.out if status == 0 else output.err


def reports_in(folder, *names):
    return {name: RetrievalReport.load(folder / f"{name}.report.npz") for name in names}


def files_of(folder, *names):
    return [folder / f"{name}.report.npz" for name in names]


def test_a_saved_report_is_that_which_is_printed(saved, capsys):
    shown = json.loads(printed(capsys, "evaluate", saved / "june.npz", *METRICS, "--json"))
    kept = RetrievalReport.load(saved / "june.report.npz").to_dict()
    assert kept | {"seconds": 0} == shown | {"seconds": 0}


def test_two_have_the_table_of_two_files(saved, capsys):
    words = printed(capsys, "compare", *files_of(saved, "june", "july"))
    of_files = printed(capsys, "evaluate", saved / "june.npz", "--against", saved / "july.npz", *METRICS)
    rows, rows_of_files = (
        [line for line in text.splitlines() if "@" in line or "mAP" in line] for text in (words, of_files)
    )
    assert [row.split() for row in rows] == [row.split() for row in rows_of_files]
    assert missing_facts(" ".join(words.split()), ("june minus july", "june.report.npz against")) == []
    stored = json.loads(printed(capsys, "compare", *files_of(saved, "june", "july"), "--json"))
    expected = compare_reports(*reports_in(saved, "june", "july").values())
    assert stored["differences"] == {name: difference.to_dict() for name, difference in expected.items()}
    assert stored["first"]["metrics"]["mAP"] == expected["mAP"].first


def test_more_are_ranked(saved, capsys):
    names = ("june", "july", "august")
    words = printed(capsys, "compare", *files_of(saved, *names))
    ranking = rank_reports(reports_in(saved, *names))
    table = [line.split() for line in words.splitlines()]
    for row in ranking.rows():
        assert " ".join(row).split() in table
    assert json.loads(printed(capsys, "compare", *files_of(saved, *names), "--json")) == ranking.to_dict()
    by_recall = printed(
        capsys, "compare", *files_of(saved, "june", "july"), "--metric", "recall@1", "--names", "a", "b"
    )
    assert [line.split()[0] for line in by_recall.splitlines() if line[:3] in (" a ", " b ")] == ["b", "a"]


def test_two_tell_how_many_classes_show_a_difference(saved, capsys):
    files = files_of(saved, "june", "july")
    needed = classes_needed(*reports_in(saved, "june", "july").values(), 0.02, "recall@1")
    words = ("compare", *files, "--difference", "0.02", "--metric", "recall@1")
    assert printed(capsys, *words) == f"{needed}\n"
    assert json.loads(printed(capsys, *words, "--json")) == needed.to_dict()
    by_default = json.loads(printed(capsys, "compare", *files, "--difference", "0.02", "--json"))
    assert by_default["metric"] == "mAP"


def test_addresses_are_written_and_read(saved, capsys):
    with empty_memory():
        for name in ("june", "july"):
            printed(capsys, "evaluate", saved / f"{name}.npz", *METRICS, "--save", f"memory://kept/{name}.report.npz")
        words = printed(capsys, "compare", "memory://kept/june.report.npz", "memory://kept/july.report.npz")
    assert missing_facts(words, ("june", "july", "mAP")) == []


def test_the_result_is_printed_where_the_report_cannot_be_kept(saved, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert main(["evaluate", str(saved / "june.npz"), *METRICS, "--save", str(tmp_path / "file" / "a.npz")]) == 1
    output = capsys.readouterr()
    assert "mAP" in output.out
    assert "file" in output.err


def test_files_of_one_name_are_named_by_their_paths(saved, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    [june] = files_of(saved, "june")
    other = shutil.copy(june, tmp_path / "june.report.npz")
    words = printed(capsys, "compare", june, other, "--metric", "mAP")
    assert missing_facts(words, (june, other)) == []


def test_mistakes_are_named_in_one_line(saved, capsys, tmp_path):
    june, july = files_of(saved, "june", "july")
    cases = {
        ("compare", june, saved / "july.npz"): (
            "july.npz",
            "not a saved report",
            "fewshot evaluate FILE --save REPORT",
        ),
        ("compare", june, tmp_path / "nothing"): ("There is no", "nothing", "evaluate --save"),
        ("compare", june, tmp_path): ("june.report.npz", "runs with runs"),
        ("compare", tmp_path, tmp_path, tmp_path): ("saved reports", "runs", "--metric"),
        ("compare", june, july, "--metric", "pair_f1"): ("pair_f1", "mAP, recall@1"),
        ("compare", june, july, "--names", "a"): ("--names", "1", "2"),
        ("compare", june, july, "--names", "a", "a"): ("--names a a",),
        ("compare", tmp_path, tmp_path, "--difference", "0.1"): ("saved reports", "runs", "--difference"),
        ("compare", june, july, june, "--names", "a", "b", "c", "--difference", "0.1"): ("--difference", "two", "3"),
        ("compare", june, july, "--difference", "0"): ("difference", "0.0", "above 0"),
        ("compare", june, july, "--test", "false"): ("--test false", "saved reports"),
        ("evaluate", saved / "june.npz", "--save", saved / "june.npz"): ("--save", "june.npz", "replace"),
        ("evaluate", saved / "june.npz", "--against", saved / "july.npz", "--save", "a.npz"): ("--save", "--against"),
    }
    for words, facts in cases.items():
        message = printed(capsys, *words, status=1)
        assert len(message.splitlines()) == 1, message
        assert missing_facts(message, facts) == [], message
