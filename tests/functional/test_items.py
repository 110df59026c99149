"""The one reader of queries and gallery: places, columns, one set or two, and what excludes."""

import dataclasses

import numpy as np
import pytest
import torch

from fewshot_callbacks import Shards, nearest
from fewshot_callbacks.engine.duplicates import row_hashes
from fewshot_callbacks.functional import _repeated
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import Share, first_equal_rows
from fewshot_callbacks.storage.stored_rows import StoredRows
from tests.engine.parts import spread
from tests.messages import refused
from tests.thread_processes import in_threads

ITEMS, GALLERY, DIM = 30, 50, 4
TINY = 500.0
"""Bytes of a budget of which a quarter holds few rows, so that most stay in their files."""


def rows_of(items, seed):
    return torch.randn(items, DIM, generator=torch.Generator().manual_seed(seed))


def numbers(items, most, seed):
    return np.random.default_rng(seed).integers(0, most, items)


SETS = {
    "queries": rows_of(ITEMS, 0),
    "query_labels": [f"c{label}" for label in numbers(ITEMS, 4, 1)],
    "query_ids": numbers(ITEMS, 20, 2),
    "query_groups": numbers(ITEMS, 5, 3),
}
GALLERY_SETS = {
    "gallery": rows_of(GALLERY, 4),
    "gallery_labels": [f"c{label}" for label in numbers(GALLERY, 6, 5)],
    "gallery_ids": numbers(GALLERY, 40, 6),
    "gallery_groups": numbers(GALLERY, 5, 7),
}


def read(call="evaluate_retrieval", two=False, **changes):
    arguments = SETS | (GALLERY_SETS if two else {}) | changes
    options = {name: arguments.pop(name) for name in ("share", "memory", "choose") if name in arguments}
    queries = arguments.pop("queries")
    gallery = arguments.pop("gallery", None)
    return read_items(call, queries, gallery, arguments, **options)


def first_places(ids):
    return np.sort(np.unique(ids, return_index=True)[1])


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("shuffled", [False, True])
def test_places_and_columns_are_those_of_all_items(count, two, shuffled):
    alone = read(two=two)
    parts = {"query": spread(ITEMS, count, 8), "gallery": spread(GALLERY, count, 9)}
    if not shuffled:
        parts = {
            "query": torch.arange(ITEMS).tensor_split(count),
            "gallery": torch.arange(GALLERY).tensor_split(count),
        }

    def work(processes):
        arguments = {}
        for name, values in (SETS | (GALLERY_SETS if two else {})).items():
            mine = parts["gallery" if name.startswith("gallery") else "query"][processes.rank]
            arguments[name] = [values[n] for n in mine] if isinstance(values, list) else values[mine]
        places = [of_process[processes.rank] if shuffled else None for of_process in parts.values()]
        return read(two=two, **arguments, share=Share(processes, places[0], places[1] if two else None))

    found = in_threads(count, work)
    for side in ("queries", "gallery"):
        expected = getattr(alone, side)
        items_of_ranks = [getattr(sets, side) for sets in found]
        places = torch.cat([items.places for items in items_of_ranks])
        assert places.sort().values.tolist() == list(range(expected.length))
        for items in items_of_ranks:
            assert len(items.rows) == len(items.places)
            assert torch.equal(items.rows, expected.rows[items.places])
            assert (items.length, items.given) == (expected.length, expected.given)
            assert items.columns.keys() == expected.columns.keys()
            for name, codes in items.columns.items():
                # Codes of ids and groups are any numbers: equal where the values are.
                numbered = [np.unique(of, return_inverse=True)[1] for of in (codes, expected.columns[name])]
                assert np.array_equal(*numbered), name
            assert items.origins.tolist() == expected.origins.tolist()


def test_columns_of_both_sets_share_their_codes_and_repeated_ids_are_dropped():
    sets = read(two=True)
    queries = first_places(SETS["query_ids"])
    gallery = first_places(GALLERY_SETS["gallery_ids"])
    assert sets.queries.origins.tolist() == queries.tolist()
    assert sets.gallery.origins.tolist() == gallery.tolist()
    for kind in ("labels", "ids", "groups"):
        of_queries = np.array(SETS[f"query_{kind}"])[queries]
        of_items = np.array(GALLERY_SETS[f"gallery_{kind}"])[gallery]
        codes = sets.queries.columns[kind].numpy(), sets.gallery.columns[kind].numpy()
        assert np.array_equal(codes[0][:, None] == codes[1], of_queries[:, None] == of_items)
    assert [sets.label_names[code] for code in sets.queries.labels] == [SETS["query_labels"][n] for n in queries]
    assert sets.gallery.to_origins(torch.tensor([[0, -1, 1]])).tolist() == [[gallery[0], -1, gallery[1]]]


def test_one_set_shares_its_rows_and_needs_no_ids():
    sets = read()
    assert sets.queries.rows is sets.gallery.rows
    assert sets.self_match.tolist() == list(range(sets.queries.length))
    assert "ids" not in sets.queries.columns.keys() | sets.gallery.columns.keys()
    assert len(sets.exclusions()) == 1  # groups
    assert sets.is_one_set
    assert sets.vectors(1).one_set
    two = read(two=True)
    assert two.self_match is None
    assert not two.is_one_set
    assert len(two.exclusions()) == 2
    same = dataclasses.replace(sets, queries=dataclasses.replace(sets.queries, rows=sets.queries.rows.clone()))
    assert not same.is_one_set  # a copy of the rows loses the symmetry, never the result


def test_chosen_queries_of_one_set_are_items_of_its_gallery():
    sets = read("nearest", choose=lambda queries: torch.tensor([queries - 1, 3, 3]))
    assert sets.queries.origins.tolist() == [3, ITEMS - 1]
    ids = SETS["query_ids"]
    found = sets.gallery.to_origins(sets.self_match)
    assert ids[found].tolist() == ids[[3, ITEMS - 1]].tolist()
    assert not sets.is_one_set


def test_a_column_that_does_not_exclude_is_placed_and_cut_like_the_others():
    cameras = [f"camera {n % 3}" for n in range(ITEMS)]
    sets = read(two=True, query_camera=cameras)
    assert "camera" not in sets.gallery.columns
    assert len(sets.exclusions()) == 2
    of_items = np.array(cameras)[sets.queries.origins]
    codes = sets.queries.columns["camera"].numpy()
    assert np.array_equal(codes[:, None] == codes, of_items[:, None] == of_items)
    taken = sets.queries.take(torch.tensor([1, 4]), None)
    assert taken.columns["camera"].tolist() == codes[[1, 4]].tolist()


def test_nothing_is_written_to():
    sets = read(two=True).hashed()
    before = {name: codes.clone() for name, codes in sets.queries.columns.items()}
    taken = sets.queries.take(torch.tensor([0, 2]), None)
    more = sets.queries.with_columns(labels=torch.zeros(sets.queries.length, dtype=torch.int64))
    assert (taken.length, taken.places.tolist(), taken.given) == (2, [0, 1], ITEMS)
    assert taken.hashes.tolist() == sets.queries.hashes[[0, 2]].tolist()
    assert not more.labels.any()
    assert sets.queries.without("labels").columns.keys() == before.keys() - {"labels"}
    assert all(torch.equal(codes, before[name]) for name, codes in sets.queries.columns.items())
    with pytest.raises(dataclasses.FrozenInstanceError):
        sets.queries.length = 3


def test_rows_in_files_stay_there_whatever_is_taken(tmp_path):
    np.save(tmp_path / "rows.npy", GALLERY_SETS["gallery"].numpy())
    gallery = Shards(tmp_path / "rows.npy")
    known = read(two=True).hashed()
    sets = read(two=True, gallery=gallery, memory=TINY).hashed()
    assert isinstance(sets.gallery.rows, StoredRows)
    assert torch.equal(sets.gallery.rows.read(slice(0, sets.gallery.length)), known.gallery.rows)
    assert sets.gallery.hashes.tolist() == known.gallery.hashes.tolist()
    loaded = sets.gallery.take(torch.tensor([2, 5]), None)
    assert torch.equal(loaded.rows, known.gallery.rows[[2, 5]])


def test_rows_in_files_with_one_hash_are_told_apart_by_a_second_one(monkeypatch):
    rows = rows_of(GALLERY, 10)
    rows[[7, 20, 21]] = rows[3].clone()

    def colliding(values, threads=1, seed=0):
        return row_hashes(values, threads, seed) if seed else np.zeros(len(values), np.int64)

    monkeypatch.setattr(_repeated, "row_hashes", colliding)
    expected = np.arange(GALLERY)
    expected[[7, 20, 21]] = 3
    sources = rows, rows.numpy().astype(np.float64)
    for gallery in sources:
        sets = read(two=True, gallery=_Rows(gallery), gallery_ids=None, query_ids=None, memory=TINY).hashed()
        assert isinstance(sets.gallery.rows, StoredRows)
        assert not sets.gallery.hashes.any()
        assert first_equal_rows(sets.gallery).tolist() == expected.tolist()


class _Rows:
    """The least that a source is."""

    def __init__(self, values):
        self._values = np.asarray(values)
        self.shape = self._values.shape
        self.dtype = self._values.dtype

    def __getitem__(self, rows):
        return self._values[rows]


@pytest.mark.parametrize("kind", ["labels", "ids", "groups"])
def test_files_of_which_only_one_process_has_a_column_are_refused(tmp_path, kind):
    values = {"labels": np.arange(4), "ids": np.arange(4), "groups": np.arange(4)}
    np.savez(tmp_path / "all.npz", embeddings=rows_of(4, 0).numpy(), **values)
    columns = {name: name for name in values}

    def work(processes):
        held = {name: column for name, column in columns.items() if processes.rank == 0 or name != kind}
        return nearest(Shards(tmp_path / "all.npz", **held), k=1, share=Share(processes))

    outcomes = in_threads(2, work)
    assert len({str(outcome) for outcome in outcomes}) == 1
    with refused(ValueError, "nearest", f"query_{kind}", "given in process 0", "left out in process 1"):
        raise outcomes[0]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"gallery": None}, ("gallery_labels", "gallery")),
        ({"gallery_labels": None}, ("gallery", "gallery_labels")),
        ({"gallery_ids": None}, ("query_ids", "gallery_ids")),
        ({"query_groups": None}, ("query_groups", "gallery_groups")),
        ({"query_labels": None}, ("query_labels",)),
        ({"query_ids": [1]}, (f"{ITEMS} queries", "1 query_ids")),
        ({"gallery_groups": [1]}, (f"{GALLERY} gallery items", "1 gallery_groups")),
        ({"gallery": torch.ones(GALLERY, 3)}, ("queries", 4, "gallery", 3)),
    ],
)
def test_what_does_not_fit_is_refused_with_the_name_of_the_call(change, facts):
    with refused(ValueError, "evaluate_retrieval", *facts):
        read(two=True, **change)


@pytest.mark.parametrize("kind", ["ids", "groups"])
def test_columns_of_a_gallery_that_is_not_there_are_refused(kind):
    with refused(ValueError, "nearest", f"gallery_{kind}", "gallery", f"query_{kind}="):
        read("nearest", **{f"gallery_{kind}": SETS[f"query_{kind}"]})


def test_the_queries_of_knn_accuracy_may_have_ids_alone():
    sets = read("knn_accuracy", two=True, gallery_ids=None, gallery_groups=None, query_groups=None)
    assert sets.queries.origins.tolist() == first_places(SETS["query_ids"]).tolist()
    assert sets.gallery.origins is None
    assert sets.exclusions() == []
