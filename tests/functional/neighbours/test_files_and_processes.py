"""What functions of neighbours return for files, and on several processes, is what one process returns in memory."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch

from fewshot_callbacks import (
    Shards,
    Share,
    evaluate_identification,
    grouped_recall,
    knn_accuracy,
    near_duplicates,
    nearest,
    suspects,
)
from tests.engine.parts import spread
from tests.thread_processes import in_threads

QUERIES, GALLERY, DIM = 60, 150, 5
TINY = 0.004
"""Megabytes of which a quarter holds a third of the gallery, so that most rows stay in their files."""


def duplicates(query_labels=None, gallery_labels=None, similarity="cosine", **arguments):
    min_score = {"cosine": 0.8, "dot": 5.0, "euclidean": -2.0, "hamming": -1.0}[similarity]
    found = near_duplicates(similarity=similarity, min_score=min_score, **arguments)
    assert found.total > 40
    return found


FUNCTIONS = {
    "nearest": lambda **arguments: nearest(k=7, **arguments),
    "knn_accuracy": lambda **arguments: knn_accuracy(k=(1, 4, 20), **arguments),
    "grouped_recall": lambda **arguments: grouped_recall(label_groups=3, repeats=2, **arguments),
    "near_duplicates": duplicates,
    "near_duplicates, the first": lambda **arguments: duplicates(most=20, **arguments),
    "evaluate_identification": lambda **arguments: evaluate_identification(
        metrics=("tpir@fpir0.4", "tpir@fpir0.2_rank3", "recall@5"), **arguments
    ),
    "suspects": lambda queries, **arguments: suspects(
        queries,
        **{name.removeprefix("query_"): value for name, value in arguments.items()},
        k=4,
        min_probability=0,
    ),
}
OF_ONE_SET = ("suspects",)
CASES = [(name, two) for name in FUNCTIONS for two in (False, True) if not (two and name in OF_ONE_SET)]
FORMS = [(), ("ids",), ("groups",), ("ids", "groups")]


def side(prefix, rows, items, seed, dtype):
    """Arguments of one set; rows are whole numbers, of which many are equal and have equal scores."""
    generator = np.random.default_rng(seed)
    return {
        rows: generator.integers(-2, 3, (items, DIM)).astype(dtype),
        f"{prefix}_labels": generator.integers(0, 9, items),
        f"{prefix}_ids": generator.integers(0, items, items),
        f"{prefix}_groups": generator.integers(0, 4, items),
    }


def arguments_of(form, *, two, dtype="float32", seed=0):
    sets = side("query", "queries", QUERIES, seed, dtype)
    if two:
        sets |= side("gallery", "gallery", GALLERY, seed + 1, dtype)
        sets["gallery"][:10] = sets["queries"][:10]
    else:  # one set that is as large as the gallery
        sets = side("query", "queries", GALLERY, seed, dtype)
    return {name: values for name, values in sets.items() if name.partition("_")[2] in ("", "labels", *form)}


def computable(sets):
    """The same vectors as tensors of a type that is compared in memory."""
    return {
        name: torch.from_numpy(values.astype(np.float64 if values.dtype == np.float64 else np.float32))
        if name in ("queries", "gallery")
        else values
        for name, values in sets.items()
    }


def stored(folder, sets, name="set"):
    """The same sets as files with columns."""
    arguments = {}
    for prefix, rows in (("query", "queries"), ("gallery", "gallery")):
        if rows not in sets:
            continue
        columns = {kind: sets[f"{prefix}_{kind}"] for kind in ("labels", "ids", "groups") if f"{prefix}_{kind}" in sets}
        path = folder / f"{name}-{rows}"
        path.mkdir()
        for number, part in enumerate(np.array_split(np.arange(len(sets[rows])), 3)):
            columns_of_part = {kind: values[part] for kind, values in columns.items()}
            np.savez(path / f"{number}.npz", embeddings=sets[rows][part], **columns_of_part)
        arguments[rows] = Shards(path, **{kind: kind for kind in columns})
    return arguments


def called(name, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FUNCTIONS[name](**arguments)


def assert_same(one, other):
    assert not isinstance(other, BaseException), other
    if type(one).__eq__ is not object.__eq__:
        assert one == other
    for field in dataclasses.fields(one):
        value, found = getattr(one, field.name), getattr(other, field.name)
        holds_tensors = isinstance(value, dict) and all(isinstance(entry, torch.Tensor) for entry in value.values())
        if isinstance(value, torch.Tensor) or holds_tensors:
            torch.testing.assert_close(value, found, rtol=0, atol=0, equal_nan=True)
        elif type(one).__eq__ is object.__eq__:
            assert value == found, field.name


@pytest.mark.parametrize(("name", "two"), CASES)
@pytest.mark.parametrize(
    ("form", "dtype", "similarity"),
    [
        ((), "float16", "cosine"),
        (("ids",), "float32", "euclidean"),
        (("groups",), "float64", "dot"),
        (("ids", "groups"), "float16", "cosine"),
    ],
)
def test_files_give_what_memory_gives(tmp_path, name, two, form, dtype, similarity):
    sets = arguments_of(form, two=two, dtype=dtype)
    known = called(name, **computable(sets), similarity=similarity)
    files = stored(tmp_path, sets)
    for memory in (512, TINY):
        assert_same(known, called(name, **files, query_labels=None, similarity=similarity, memory_mb=memory))
    if two:  # queries in memory
        arguments = computable(sets) | {"gallery": files["gallery"]}
        assert_same(known, called(name, **arguments, similarity=similarity, memory_mb=TINY))


@pytest.mark.parametrize(("name", "two"), CASES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("count", "shuffled", "files"), [(2, True, False), (2, False, True), (3, True, True), (3, False, False)]
)
def test_processes_give_what_one_gives(tmp_path, name, two, form, count, shuffled, files):
    """Shares are uneven, and may be empty; places may be in no order."""
    sets = arguments_of(form, two=two, seed=count)
    known = called(name, **computable(sets))
    parts = {
        "query": spread(len(sets["queries"]), count, 3),
        "gallery": spread(len(sets.get("gallery", ())), count, 4),
    }
    if not shuffled:
        parts = {
            prefix: torch.cat(of_ranks).sort().values.split([*map(len, of_ranks)]) for prefix, of_ranks in parts.items()
        }

    def work(processes):
        mine = {prefix: of_ranks[processes.rank].numpy() for prefix, of_ranks in parts.items()}
        arguments = {
            argument: values[mine["gallery" if argument.startswith("gallery") else "query"]]
            for argument, values in sets.items()
        }
        share = Share(processes)
        if shuffled:
            share = Share(processes, mine["query"], mine["gallery"] if two else None)
        if files and all(len(places) for prefix, places in mine.items() if prefix == "query" or two):
            arguments = stored(tmp_path, arguments, f"rank{processes.rank}") | {"query_labels": None}
        else:
            arguments = computable(arguments)
        return called(name, **arguments, share=share, memory_mb=TINY if files else None)

    for found in in_threads(count, work):
        assert_same(known, found)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("form", [(), ("ids", "groups")])
def test_chosen_queries_keep_their_order_in_files_and_processes(tmp_path, two, form):
    sets = arguments_of(form, two=two)
    chosen = [17, 3, 3, 40]
    known = called("nearest", **computable(sets), query_indices=chosen)
    assert known.query_indices.tolist() == chosen
    files = stored(tmp_path, sets)
    assert_same(known, called("nearest", **files, query_indices=chosen, memory_mb=TINY))
    parts = spread(len(sets["queries"]), 3, 5), spread(len(sets.get("gallery", ())), 3, 6)

    def work(processes):
        mine, theirs = (of_ranks[processes.rank].numpy() for of_ranks in parts)
        arguments = {
            argument: values[theirs if argument.startswith("gallery") else mine] for argument, values in sets.items()
        }
        share = Share(processes, mine, theirs if two else None)
        return called("nearest", **computable(arguments), query_indices=chosen, share=share)

    for found in in_threads(3, work):
        assert_same(known, found)


def test_files_that_hold_queries_and_gallery_are_divided(tmp_path):
    sets = arguments_of(("ids", "groups"), two=False)
    is_gallery = np.arange(GALLERY) % 3 > 0
    columns = {kind: sets[f"query_{kind}"] for kind in ("labels", "ids", "groups")}
    np.savez(tmp_path / "all.npz", embeddings=sets["queries"], is_gallery=is_gallery, **columns)
    shards = Shards(tmp_path / "all.npz", is_gallery="is_gallery", **{kind: kind for kind in columns})
    divided = {name: values[~is_gallery] for name, values in sets.items()}
    divided |= {
        name.replace("query", "gallery").replace("queries", "gallery"): values[is_gallery]
        for name, values in sets.items()
    }
    for name in FUNCTIONS.keys() - set(OF_ONE_SET):
        known = called(name, **computable(divided))
        for memory in (512, TINY):
            assert_same(known, called(name, queries=shards, query_labels=None, memory_mb=memory))


@pytest.mark.parametrize("similarity", ["cosine", "hamming"])
def test_codes_and_collapsed_rows_on_processes(similarity):
    """Equal rows in several processes stay several rows; more of them tie with the last than are listed."""
    rows = np.ones((GALLERY, DIM), np.float32)
    rows[::7, 0] = -1
    labels = np.random.default_rng(0).integers(0, 9, GALLERY)
    for name in FUNCTIONS:
        known = called(name, queries=torch.from_numpy(rows), query_labels=labels, similarity=similarity)
        parts = spread(GALLERY, 3, 7)

        def work(processes, name=name, parts=parts):
            mine = parts[processes.rank].numpy()
            share = Share(processes, mine)
            return called(name, queries=rows[mine], query_labels=labels[mine], similarity=similarity, share=share)

        for found in in_threads(3, work):
            assert_same(known, found)
