"""Names of the arrays and columns of files: those of one set, those of two, and what is said of any others."""

import json
from pathlib import Path

import numpy as np
import pytest

from fewshot_callbacks.cli.main import main
from fewshot_callbacks.functional.retrieval import evaluate_retrieval

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
    """The report as JSON, and what is said beside it."""
    assert main(["evaluate", *words, "--json"]) == 0
    out, said = capsys.readouterr()
    return json.loads(out) | {"seconds": 0}, said


def refused(capsys, *words):
    """What a command says to what it cannot take: one line."""
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
    assert "is_gallery holds int64 other than 0 and 1." in refused(capsys, "evaluate", "one.npz")
    np.savez("one.npz", **ONE_SET, is_gallery=IN_GALLERY[:80])
    assert "one.npz holds 90 embeddings and 80 entries of 'is_gallery'" in refused(capsys, "evaluate", "one.npz")


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
    ("arrays", "fix"),
    [
        (ONE_SET | {"gallery": VECTORS, "gallery_labels": LABELS},
         "Rename 'embeddings' to 'queries' and 'labels' to 'query_labels'."),
        (ONE_SET | {"query_ids": IDS, "query_groups": GROUPS},
         "Rename 'query_ids' to 'ids' and 'query_groups' to 'groups'."),
        ({"queries": VECTORS, "labels": LABELS}, "Rename 'queries' to 'embeddings'."),
        (TWO_SETS | {"labels": LABELS}, "Leave out 'labels'."),
        (TWO_SETS | {"is_gallery": LABELS, "ids": IDS}, "Rename 'ids' to 'query_ids'. Leave out 'is_gallery'."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_names_of_one_set_beside_those_of_two_are_refused_with_the_names_to_take(command, arrays, fix, capsys):
    np.savez("e.npz", **arrays)
    said = refused(capsys, command, "e.npz")
    assert f"fewshot {command}: e.npz mixes names of a file with one set (" in said
    assert said.endswith(f"). {fix}\n")


@pytest.mark.parametrize("absent", ["queries", "query_labels", "gallery", "gallery_labels"])
def test_what_two_sets_lack_is_named(absent, capsys):
    np.savez("e.npz", **{name: values for name, values in TWO_SETS.items() if name != absent})
    said = refused(capsys, "evaluate", "e.npz")
    assert f"but not '{absent}'. Name the arrays so when saving; a file with one set has embeddings and labels." in said


def test_two_sets_are_not_read_by_options_for_one(capsys):
    np.savez("e.npz", **TWO_SETS, id=IDS)
    said = refused(capsys, "evaluate", "e.npz", "--ids", "id")
    assert "Such a file is read alone, and without options for its arrays. Leave out --ids, and name the arrays" in said
    assert "Save one set, with 'is_gallery' true for the items of the gallery." in refused(capsys, "evaluate", "*.npz")
    # named, the queries are one set of their own
    words = ["e.npz", "--embeddings", "queries", "--labels", "query_labels"]
    expected = evaluate_retrieval(TWO_SETS["queries"], TWO_SETS["query_labels"])
    assert evaluated(capsys, *words)[0]["metrics"] == pytest.approx(expected.metrics())


@pytest.mark.parametrize(
    ("arrays", "note"),
    [
        (ONE_SET | {"group": GROUPS}, "'group', which is not read; pass --groups group if it is to be"),
        (ONE_SET | {"is_query": IN_GALLERY}, "'is_query', which is not read; write its opposite as 'is_gallery' if"),
        (TWO_SETS | {"query_group": GROUPS}, "'query_group', which is not read; rename it to 'query_groups' if it is to be"),
        (TWO_SETS | {"gallery_id": IDS}, "'gallery_id', which is not read; rename it to 'gallery_ids' if it is to be"),
    ],
)  # fmt: skip
def test_a_name_with_a_slip_is_noted(arrays, note, capsys):
    np.savez("e.npz", **arrays, scores=IDS, path_of_the_model="best.ckpt")
    said = evaluated(capsys, "e.npz")[1]
    assert said.startswith(f"note: e.npz holds {note}")
    assert said.count("\n") == 1
    assert main(["report", "e.npz"]) == 0
    expected = note.replace("pass --groups group", "rename it to 'groups'")
    assert capsys.readouterr().err.startswith(f"note: e.npz holds {expected}")


def test_a_name_with_a_slip_is_noted_in_files_that_are_read_by_options(capsys):
    np.savez("e.npz", **ONE_SET, id=IDS, group=GROUPS)
    said = evaluated(capsys, "e.npz", "--ids", "id")[1]
    assert said == "note: e.npz holds 'group', which is not read; pass --groups group if it is to be.\n"


def test_reports_trials_and_plans_read_two_sets_or_say_that_they_do_not(capsys):
    np.savez("one.npz", **ONE_SET)
    np.savez("two.npz", **TWO_SETS, **OF_QUERIES, **OF_GALLERY)
    assert main(["report", "two.npz"]) == 0
    assert "of 30 queries" in capsys.readouterr().out
    said = refused(capsys, "report", "one.npz", "--train", "two.npz")
    refusal = (
        "two.npz holds queries and a gallery, and one set is needed. Write it with numpy.savez(path, embeddings=..., "
    )
    assert f"{refusal}labels=...)" in said
    Path("trials.txt").write_text("1 0 1\n0 2 3\n", encoding="utf-8")  # as VoxCeleb's
    said = refused(capsys, "trials", "trials.txt", "--embeddings", "two.npz")
    assert f"{refusal}ids=...)" in said
    assert main(["plan", "--files", "two.npz", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["queries"], plan["gallery"]) == (30, 60)
    assert main(["plan", "--files", "two.npz", "--embeddings", "queries", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["queries"], plan["gallery"]) == (30, 30)


def test_a_report_shows_the_sets_that_is_gallery_divides(capsys):
    np.savez("one.npz", **ONE_SET, ids=IDS, is_gallery=IN_GALLERY)
    assert main(["report", "one.npz"]) == 0
    assert "of 30 queries" in capsys.readouterr().out


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
