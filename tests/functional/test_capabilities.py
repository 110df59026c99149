"""Every function that compares a set takes the same arguments, apart from the exceptions in the table `TAKES`."""

import threading
from pathlib import Path

import numpy as np
import pytest

from fewshot_callbacks import InputError, Shards, functional
from fewshot_callbacks.functional.item_reader import TAKES
from fewshot_callbacks.functional.items import Share
from tests.functional.calls_of_sets import (
    GALLERY,
    QUERIES,
    arguments,
    call,
    columns_of,
    comparable,
    found_lists,
    parameters,
)
from tests.messages import refused
from tests.thread_processes import in_threads

PAGE = Path(__file__).parents[2] / "docs/evaluate/files.md"


def in_files(folder, given, name="rows"):
    """The same set as `Shards` of two files."""
    folder.mkdir(exist_ok=True)
    half = len(given["rows"]) // 2
    for number, part in enumerate((slice(0, half), slice(half, None))):
        np.savez(folder / f"{name}{number}.npz", **{kind: values[part] for kind, values in given.items()})
    kinds = {kind: kind for kind in given if kind != "rows"}
    return Shards(folder / f"{name}*.npz", embeddings="rows", **kinds)


def has(*wanted):
    """The functions of which the table says so."""
    return [name for name, takes in TAKES.items() if all(getattr(takes, field) == value for field, value in wanted)]


ONE_SET = has(("needs_gallery", False))
TWO_SETS = has(("one_set", False))
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ONE_SET)
def test_files_of_one_set_bring_their_labels_ids_and_groups(name, tmp_path):
    known = call(name, arguments(name, QUERIES))
    shards = in_files(tmp_path / "one", QUERIES)
    for options in ({}, {"memory_mb": 0.0005} if "memory_mb" in parameters(name) else {}):
        files = {TAKES[name].argument("queries"): shards, **found_lists(name, QUERIES)}
        found = call(name, files, **options)
        assert comparable(found) == comparable(known)


@pytest.mark.parametrize("name", TWO_SETS)
def test_files_of_two_sets_bring_their_labels_ids_and_groups(name, tmp_path):
    known = call(name, arguments(name, QUERIES, GALLERY))
    second = TAKES[name].argument("gallery")
    lists = found_lists(name, QUERIES, GALLERY)
    sets = {
        "queries": in_files(tmp_path / "queries", QUERIES),
        second: in_files(tmp_path / "gallery", GALLERY),
        **lists,
    }
    assert comparable(call(name, sets, memory_mb=0.0005)) == comparable(known)
    both = {kind: np.concatenate([QUERIES[kind], GALLERY[kind]]) for kind in QUERIES}
    flags = np.arange(len(both["rows"])) >= len(QUERIES["rows"])
    together = in_files(tmp_path / "both", both | {"is_gallery": flags})
    # A training set is not the gallery of the queries, so it is passed even then.
    others = {} if second == "gallery" else {second: sets[second]}
    assert comparable(call(name, {"queries": together, **others, **lists})) == comparable(known)


@pytest.mark.parametrize("name", TAKES)
def test_processes_give_what_one_gives(name):
    gallery = None if name in has(("one_set", True)) else GALLERY
    known = comparable(call(name, arguments(name, QUERIES, gallery)))

    def part(given, processes):
        mine = slice(processes.rank, None, processes.count)
        return {kind: values[mine] for kind, values in given.items()}

    def work(processes):
        places = [np.arange(len(given["rows"]))[processes.rank :: 2] for given in (QUERIES, GALLERY)]
        share = Share(processes, places[0], None if gallery is None else places[1])
        sets = [part(given, processes) for given in (QUERIES, gallery) if given is not None]
        return comparable(call(name, arguments(name, *sets), share=share))

    assert in_threads(2, work) == [known, known]


@pytest.mark.parametrize("name", TWO_SETS)
@pytest.mark.parametrize("kind", ["ids", "groups"])
def test_a_column_of_one_of_two_sets_is_refused_where_it_would_exclude_nobody(name, kind):
    takes = TAKES[name]
    given = arguments(name, QUERIES, {"rows": GALLERY["rows"], "labels": GALLERY["labels"]})
    other = {"ids": "groups", "groups": "ids"}[kind]
    given.pop(f"query_{other}", None)
    if takes.excludes and not (kind == "ids" and takes.query_ids_alone):
        with refused(InputError, name, f"query_{kind}", f"gallery_{kind}"):
            call(name, given)
    else:
        call(name, given)


@pytest.mark.parametrize("name", TAKES)
def test_labels_are_needed_where_the_table_says_so(name):
    gallery = {"rows": GALLERY["rows"]} if TAKES[name].needs_gallery else None
    given = arguments(name, {"rows": QUERIES["rows"]}, gallery)
    if TAKES[name].labels:
        with refused(InputError, name):
            call(name, given)
    else:
        call(name, given)


@pytest.mark.parametrize("name", [name for name in TAKES if "labels" in columns_of(name)])
def test_several_labels_of_an_item_are_taken_where_the_table_says_so(name):
    sets = np.eye(6, dtype=np.int64)[QUERIES["labels"]]
    sets[:, 0] = 1
    given = arguments(name, QUERIES | {"labels": sets}, GALLERY if TAKES[name].needs_gallery else None)
    if TAKES[name].label_sets:
        getattr(functional, name)(**given)
    elif name != "linear_probe":  # its targets may have several columns
        with refused(InputError, name):
            call(name, given)


@pytest.mark.parametrize("name", has(("needs_gallery", True)))
def test_a_gallery_is_needed_where_the_table_says_so(name):
    second = TAKES[name].argument("gallery")
    with refused(InputError, name, second):
        call(name, arguments(name, QUERIES) | {second: None})


# ------------------------------------------------------------------------------------------------------- the page


def rows_of_the_page():
    """The rows of the page's table, from the table of the module."""
    for name, takes in TAKES.items():
        sets = "one" if takes.one_set else "two" if takes.needs_gallery else "one or two"
        labels = "optional" if "labels" in columns_of(name) else "no"
        labels = "yes" if takes.labels else labels
        several = ", one or several for each item" if takes.label_sets else ""
        effect = "exclude candidates" if takes.excludes else "ids count each item once"
        yield f"| `{name}` | {sets} | {labels}{several} | {effect} |"


def test_the_page_says_what_the_table_says():
    page = PAGE.read_text(encoding="utf-8")
    assert [row for row in rows_of_the_page() if row not in page] == []


WITH_PROGRESS = ("evaluate_retrieval", "grouped_recall", "knn_accuracy", "near_duplicates", "nearest", "suspects")


@pytest.mark.parametrize("name", WITH_PROGRESS)
@pytest.mark.parametrize("memory_mb", [None, 0.01])
def test_progress_never_falls_and_ends_at_all_pairs(name, memory_mb, monkeypatch):
    monkeypatch.setattr("fewshot_callbacks.engine.nearest.LEAST_QUERIES", 3)
    seen = []
    threads = set()

    def progress(done, total):
        threads.add(threading.get_ident())
        seen.append((done, total))

    with_bar = call(name, arguments(name, QUERIES), memory_mb=memory_mb, progress=progress)
    assert comparable(with_bar) == comparable(call(name, arguments(name, QUERIES)))
    totals = {total for _, total in seen}
    done = [done for done, _ in seen]
    assert len(totals) == 1
    assert done == sorted(done)
    assert done[0] >= 0
    assert done[-1] == totals.pop() > 0
    assert threads == {threading.get_ident()}


def test_every_search_of_neighbours_takes_progress():
    assert [name for name in TAKES if "progress" in parameters(name)] == list(WITH_PROGRESS)
