"""Names of arrays and columns in files: the names for one set, the names for two sets, and messages for all others."""

import json
from pathlib import Path

import numpy as np
import pytest

from fewshot_callbacks.cli.main import main
from fewshot_callbacks.functional.retrieval import evaluate_retrieval
from tests.messages import missing_facts

RNG = np.random.default_rng(0)
LABELS = np.arange(90) % 7
VECTORS = (RNG.normal(size=(7, 8))[LABELS] + RNG.normal(size=(90, 8))).astype(np.float32)
IDS = np.arange(90) // 2
GROUPS = np.arange(90) % 5
IN_GALLERY = np.arange(90) % 3 > 0
ONE_SET = {"embeddings": VECTORS, "labels": LABELS}
TWO_SETS = {
    "queries": VECTORS[~IN_GALLERY], "query_labels": LABELS[~IN_GALLERY],
    "gallery": VECTORS[IN_GALLERY], "gallery_labels": LABELS[IN_GALLERY],
}  # fmt: skip
OF_QUERIES = {"query_ids": IDS[~IN_GALLERY], "query_groups": GROUPS[~IN_GALLERY]}
OF_GALLERY = {"gallery_ids": IDS[IN_GALLERY], "gallery_groups": GROUPS[IN_GALLERY]}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def evaluated(capsys, *words):
    """Return the report as JSON, and the messages."""
    assert main(["evaluate", *words, "--json"]) == 0
    out, said = capsys.readouterr()
    return json.loads(out) | {"seconds": 0}, said


def refused(capsys, *words):
    """Return the one-line message of a command that refuses its input."""
    assert main(list(words)) == 1
    out, said = capsys.readouterr()
    assert (out, said.count("\n")) == ("", 1)
    return said


def test_two_sets_have_the_names_of_the_arguments_of_the_function(capsys):
    arguments = TWO_SETS | OF_QUERIES | OF_GALLERY
    np.savez("e.npz", **arguments)
    report, said = evaluated(capsys, "e.npz")
    assert said == ""
    queries = arguments.pop("queries")
    assert report["metrics"] == pytest.approx(evaluate_retrieval(queries, **arguments).metrics())
    np.savez("e.npz", **TWO_SETS)  # ids and groups were used
    assert evaluated(capsys, "e.npz")[0]["metrics"] != report["metrics"]


def test_one_set_that_says_what_is_in_the_gallery_is_two_sets(capsys):
    np.savez("two.npz", **TWO_SETS, **OF_QUERIES, **OF_GALLERY)
    known = evaluated(capsys, "two.npz")[0]
    for flags in (IN_GALLERY, IN_GALLERY.astype(np.uint8)):
        np.savez("one.npz", **ONE_SET, ids=IDS, groups=GROUPS, is_gallery=flags)
        assert evaluated(capsys, "one.npz") == (known, "")
    np.savez("one.npz", **ONE_SET, i=IDS, groups=GROUPS, flag=IN_GALLERY)
    assert evaluated(capsys, "one.npz", "--ids", "i", "--is_gallery", "flag")[0] == known
    np.savez("one.npz", **ONE_SET, is_gallery=np.arange(90))
    assert missing_facts(refused(capsys, "evaluate", "one.npz"), ("is_gallery", "int64", 0, 1)) == []
    np.savez("one.npz", **ONE_SET, is_gallery=IN_GALLERY[:80])
    facts = ("one.npz", "90 embeddings", 80, "'is_gallery'")
    assert missing_facts(refused(capsys, "evaluate", "one.npz"), facts) == []


@pytest.mark.parametrize("option", [["--ids", "id"], ["--groups", "group"], ["--labels", "labels"]])
def test_an_option_for_one_array_leaves_the_usual_names_of_the_others(option, capsys):
    np.savez("e.npz", **ONE_SET, id=IDS, group=GROUPS)
    names = {"--ids": {"query_ids": IDS}, "--groups": {"query_groups": GROUPS}}
    expected = evaluate_retrieval(VECTORS, LABELS, **names.get(option[0], {}))
    assert evaluated(capsys, "e.npz", *option)[0]["metrics"] == pytest.approx(expected.metrics())


@pytest.mark.parametrize("pattern", ["part-?.npz", "part-[01].npz", "part-*.npz"])
def test_several_files_of_the_usual_names_need_no_option(pattern, capsys):
    for part in range(2):
        arrays = {"embeddings": VECTORS, "labels": LABELS, "ids": IDS, "groups": GROUPS, "is_gallery": IN_GALLERY}
        np.savez(f"part-{part}.npz", **{name: values[45 * part :][:45] for name, values in arrays.items()})
    np.savez("whole.npz", **arrays)
    assert evaluated(capsys, pattern) == evaluated(capsys, "whole.npz")


@pytest.mark.parametrize(
    ("arrays", "cures"),
    [
        (ONE_SET | {"gallery": VECTORS, "gallery_labels": LABELS},
         ("'embeddings' to 'queries'", "'labels' to 'query_labels'")),
        (ONE_SET | {"query_ids": IDS, "query_groups": GROUPS}, ("'query_ids' to 'ids'", "'query_groups' to 'groups'")),
        ({"queries": VECTORS, "labels": LABELS}, ("'queries' to 'embeddings'",)),
        (TWO_SETS | {"labels": LABELS}, ("'labels'",)),
        (TWO_SETS | {"is_gallery": LABELS, "ids": IDS}, ("'ids' to 'query_ids'", "'is_gallery'")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_names_of_one_set_beside_those_of_two_are_refused_with_the_names_to_take(command, arrays, cures, capsys):
    np.savez("e.npz", **arrays)
    said = refused(capsys, command, "e.npz")
    assert said.startswith(f"fewshot {command}: e.npz ")
    mixture, fix = said.rsplit("). ", 1)  # the names of one set and of two stand in brackets; what to do follows
    assert missing_facts(mixture, (*(f"'{name}'" for name in arrays),)) == []
    assert missing_facts(fix, cures) == []
    assert (" to " in fix) == any(" to " in cure for cure in cures)


@pytest.mark.parametrize("absent", ["queries", "query_labels", "gallery", "gallery_labels"])
def test_what_two_sets_lack_is_named(absent, capsys):
    np.savez("e.npz", **{name: values for name, values in TWO_SETS.items() if name != absent})
    said = refused(capsys, "evaluate", "e.npz")
    assert missing_facts(said, ("e.npz", f"'{absent}'", "embeddings", "labels")) == []


def test_two_sets_are_not_read_by_options_for_one(capsys):
    np.savez("e.npz", **TWO_SETS, id=IDS)
    said = refused(capsys, "evaluate", "e.npz", "--ids", "id")
    assert missing_facts(said, ("e.npz", "--ids")) == []
    assert missing_facts(refused(capsys, "evaluate", "*.npz"), ("'is_gallery'", "gallery")) == []
    # named, the queries are one set of their own
    words = ["e.npz", "--embeddings", "queries", "--labels", "query_labels"]
    expected = evaluate_retrieval(TWO_SETS["queries"], TWO_SETS["query_labels"])
    assert evaluated(capsys, *words)[0]["metrics"] == pytest.approx(expected.metrics())


@pytest.mark.parametrize(
    ("arrays", "name", "cure", "cure_of_a_report"),
    [
        (ONE_SET | {"group": GROUPS}, "'group'", "--groups group", "'groups'"),
        (ONE_SET | {"is_query": IN_GALLERY}, "'is_query'", "'is_gallery'", "'is_gallery'"),
        (TWO_SETS | {"query_group": GROUPS}, "'query_group'", "'query_groups'", "'query_groups'"),
        (TWO_SETS | {"gallery_id": IDS}, "'gallery_id'", "'gallery_ids'", "'gallery_ids'"),
    ],
)
def test_a_name_with_a_slip_is_noted(arrays, name, cure, cure_of_a_report, capsys):
    np.savez("e.npz", **arrays, scores=IDS, path_of_the_model="best.ckpt")
    (note,) = evaluated(capsys, "e.npz")[1].splitlines()
    assert note.startswith("note: ")
    assert missing_facts(note, ("e.npz", name, cure)) == []
    assert main(["report", "e.npz"]) == 0
    (note, *_) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: ")
    assert missing_facts(note, ("e.npz", name, cure_of_a_report)) == []


def test_a_name_with_a_slip_is_noted_in_files_that_are_read_by_options(capsys):
    np.savez("e.npz", **ONE_SET, id=IDS, group=GROUPS)
    (note,) = evaluated(capsys, "e.npz", "--ids", "id")[1].splitlines()
    assert note.startswith("note: ")
    assert missing_facts(note, ("e.npz", "'group'", "--groups group", "'id'")) == ["'id'"]


def test_reports_trials_and_plans_read_two_sets_or_say_that_they_do_not(capsys):
    np.savez("one.npz", **ONE_SET)
    np.savez("two.npz", **TWO_SETS, **OF_QUERIES, **OF_GALLERY)
    assert main(["report", "two.npz"]) == 0
    assert "30 queries" in capsys.readouterr().out
    said = refused(capsys, "report", "one.npz", "--train", "two.npz")
    facts = ("two.npz", "queries", "gallery", "one set")
    assert missing_facts(said, (*facts, "numpy.savez(path, embeddings=..., labels=...)")) == []
    Path("trials.txt").write_text("1 0 1\n0 2 3\n", encoding="utf-8")  # as VoxCeleb's
    said = refused(capsys, "trials", "trials.txt", "--embeddings", "two.npz")
    assert missing_facts(said, (*facts, "numpy.savez(path, embeddings=..., ids=...)")) == []
    assert main(["plan", "--files", "two.npz", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["queries"], plan["gallery"]) == (30, 60)
    assert main(["plan", "--files", "two.npz", "--embeddings", "queries", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["queries"], plan["gallery"]) == (30, 30)


def test_a_report_shows_the_sets_that_is_gallery_divides(capsys):
    np.savez("one.npz", **ONE_SET, ids=IDS, is_gallery=IN_GALLERY)
    assert main(["report", "one.npz"]) == 0
    assert "30 queries" in capsys.readouterr().out


def test_the_help_has_all_names_and_keeps_the_lines_of_their_table(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["evaluate", "--help"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:3] for line in lines]
    for kind in ("labels", "ids", "groups", "paths"):
        assert [kind, f"query_{kind}", f"gallery_{kind}"] in rows
    assert ["embeddings", "queries", "gallery"] in rows
    assert max(len(line) for line in lines if line.startswith("    ") and "gallery" in line) <= 80
