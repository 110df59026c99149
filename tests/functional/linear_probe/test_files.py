"""`linear_probe` of files, and with ids, equals one process in memory in which each item appears once."""

import dataclasses

import numpy as np
import pytest
import torch

from fewshot_callbacks import Shards, Share, linear_probe
from tests.functional.linear_probe.refitted import clusters
from tests.messages import missing_facts
from tests.thread_processes import in_threads

QUERIES, GALLERY, DIM = 50, 130, 9
ROWS, LABELS = clusters(QUERIES + GALLERY, DIM, 6, offset=3)
ROWS = ROWS.float()
TARGETS = ROWS[:, :2].double()
GROUPS = torch.arange(QUERIES + GALLERY) ** 2 % 23
SETS = {"query": torch.arange(QUERIES), "gallery": torch.arange(QUERIES, QUERIES + GALLERY)}
KINDS = {
    "classes": (),
    "groups": ("query_groups", "gallery_groups"),
    "groups of queries": ("query_groups",),
    "groups of the gallery": ("gallery_groups",),
}
TINY = 0.001
"""Megabytes of which a quarter holds a twentieth of the gallery."""


def arguments_of(parts, columns=(), labels=LABELS):
    arguments = {}
    for (prefix, index), rows in zip(parts.items(), ("queries", "gallery"), strict=True):
        arguments |= {rows: ROWS[index], f"{prefix}_labels": labels[index]}
        arguments |= {f"{prefix}_groups": GROUPS[index] for name in columns if name == f"{prefix}_groups"}
        arguments |= {f"{prefix}_ids": index for name in columns if name == f"{prefix}_ids"}
    return arguments


def stored(folder, arguments):
    """The same sets as files with columns, three of each."""
    shards = {}
    for prefix, rows in (("query", "queries"), ("gallery", "gallery")):
        names = [name for name in arguments if name.startswith(f"{prefix}_")]
        columns = {name.partition("_")[2]: np.asarray(arguments[name]) for name in names}
        path = folder / rows
        path.mkdir(parents=True)
        for number, part in enumerate(np.array_split(np.arange(len(arguments[rows])), 3)):
            of_part = {kind: values[part] for kind, values in columns.items()}
            np.savez(path / f"{number}.npz", embeddings=arguments[rows].numpy()[part], **of_part)
        shards[rows] = Shards(path, **{kind: kind for kind in columns})
    return shards


def assert_same(found, expected):
    assert found == expected
    for key, values in expected.per_query.items():
        assert torch.equal(found.per_query[key].nan_to_num(2), values.nan_to_num(2))


def twice(index):
    """Every third item once more, in between."""
    return torch.cat([index[:20], index[::3][:6], index[20:], index[::3][6:]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory_mb", [512, TINY])
def test_files_give_what_memory_gives(tmp_path, kind, memory_mb):
    arguments = arguments_of(SETS, KINDS[kind])
    expected = linear_probe(**arguments)
    files = stored(tmp_path, arguments)
    assert_same(linear_probe(**files, memory_mb=memory_mb), expected)
    assert_same(linear_probe(**arguments | {"gallery": files["gallery"]}, memory_mb=memory_mb), expected)


@pytest.mark.parametrize("memory_mb", [512, TINY])
def test_targets_of_files_are_passed(tmp_path, memory_mb):
    arguments = arguments_of(SETS, KINDS["groups"], TARGETS)
    classes = arguments_of(SETS, KINDS["groups"])
    files = stored(tmp_path, classes)
    targets = {name: arguments[name] for name in ("query_labels", "gallery_labels")}
    assert_same(linear_probe(**files, **targets, memory_mb=memory_mb), linear_probe(**arguments))


def test_files_that_hold_queries_and_gallery_are_divided(tmp_path):
    is_gallery = np.arange(QUERIES + GALLERY) % 5 > 1
    path = tmp_path / "all.npz"
    np.savez(path, embeddings=ROWS.numpy(), labels=LABELS.numpy(), groups=GROUPS.numpy(), is_gallery=is_gallery)
    shards = Shards(path, labels="labels", groups="groups", is_gallery="is_gallery")
    parts = {"query": np.flatnonzero(~is_gallery), "gallery": np.flatnonzero(is_gallery)}
    expected = linear_probe(**arguments_of(parts, KINDS["groups"]))
    for memory_mb in (512, TINY):
        assert_same(linear_probe(shards, memory_mb=memory_mb), expected)


@pytest.mark.parametrize("labels", [LABELS, TARGETS], ids=["classes", "targets"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_item_of_each_id_is_counted(kind, labels):
    expected = linear_probe(**arguments_of(SETS, KINDS[kind], labels))
    repeated = {prefix: twice(index) for prefix, index in SETS.items()}
    ids = ("query_ids", "gallery_ids")
    assert_same(linear_probe(**arguments_of(repeated, (*KINDS[kind], *ids), labels)), expected)
    parts = {"query": repeated["query"], "gallery": SETS["gallery"]}
    assert_same(linear_probe(**arguments_of(parts, (*KINDS[kind], "query_ids"), labels)), expected)


def test_ids_that_are_in_both_sets_are_noted():
    arguments = arguments_of(SETS) | {"query_ids": [*range(QUERIES)], "gallery_ids": [*range(40, 40 + GALLERY)]}
    noted = set(linear_probe(**arguments).notes) - set(linear_probe(**arguments_of(SETS)).notes)
    facts = (10, "50 queries", "id", "gallery item", "fitted")
    assert not all(missing_facts(note, facts) for note in noted), noted


@pytest.mark.parametrize("labels", [LABELS, TARGETS], ids=["classes", "targets"])
@pytest.mark.parametrize("kind", ["classes", "groups"])
@pytest.mark.parametrize("files", [False, True])
def test_processes_with_files_and_ids_give_what_one_gives(tmp_path, kind, labels, files):
    columns = (*KINDS[kind], "query_ids", "gallery_ids")
    repeated = {prefix: twice(index) for prefix, index in SETS.items()}
    expected = linear_probe(**arguments_of(SETS, KINDS[kind], labels))

    places = [{prefix: torch.arange(len(index))[rank::3] for prefix, index in repeated.items()} for rank in range(3)]
    given = []
    for rank, of_rank in enumerate(places):
        mine = {prefix: index[of_rank[prefix]] for prefix, index in repeated.items()}
        given.append(arguments_of(mine, columns, labels))
        if files:  # opened here, since Python 3.11 cannot parse the heads of files in several threads at once
            targets = {name: given[rank][name] for name in ("query_labels", "gallery_labels") if labels is TARGETS}
            given[rank] = stored(tmp_path / str(rank), arguments_of(mine, columns)) | targets

    def work(processes):
        share = Share(processes, *places[processes.rank].values())
        return linear_probe(**given[processes.rank], share=share, memory_mb=TINY)

    outcomes = in_threads(3, work)
    for found in outcomes:
        assert not isinstance(found, BaseException), found
        assert found == outcomes[0]
        assert found.errors == pytest.approx(expected.errors, rel=1e-10)
        assert found.values == (expected.values if labels is LABELS else pytest.approx(expected.values, abs=1e-10))
        rounded = {name: getattr(expected, name) for name in ("values", "errors", "alpha", "per_target")}
        assert dataclasses.replace(found, **rounded) == expected
