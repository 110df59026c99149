"""Each of two processes opens and fetches its own files, and the report equals a one-process report to the last bit."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewshot_callbacks import Relevance, evaluate_retrieval, nearest, search_quality
from fewshot_callbacks.cli.evaluate import inputs_of
from fewshot_callbacks.cli.options import Columns
from fewshot_callbacks.cli.processes import read_in_all
from fewshot_callbacks.cli.stored_sets import read_sets
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional import read_neighbours
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments
from fewshot_callbacks.storage.shard_files import list_shards
from tests.cli.own_files_jobs import COLUMNS, FOUND, LABELS, ROWS, VECTORS
from tests.gloo_processes import answers
from tests.messages import missing_facts
from tests.thread_processes import in_threads

METRICS = ("mAP", "recall@1", "pair_f1")
QUERIES = ~COLUMNS["is_gallery"]


@pytest.fixture(scope="module")
def found(gloo_folder):
    """What two processes print and read."""
    return answers(gloo_folder, "tests.cli.own_files_jobs", 2)


def files_read(found, name):
    """The names of the files that each process fetches; each is fetched once, and opened."""
    by_process = []
    for _, _, _, reads, opened in (of_process[name] for of_process in found):
        names = [os.path.basename(path) for path, _ in reads]
        assert len(names) == len(set(names))
        assert set(opened) - {"found.npy"} == set(names)
        by_process.append(set(names))
    return by_process


def printed(found, name):
    """What the first process prints; the other one prints nothing."""
    (status, out, err, *_), (other_status, other_out, *_) = (of_process[name] for of_process in found)
    assert (status, other_status, other_out) == (0, 0, ""), err
    return json.loads(out)


def ids_and_groups(mask, prefix="query"):
    return {f"{prefix}_{name}": COLUMNS[name][mask] for name in ("ids", "groups")}


ALL = np.ones(ROWS, bool)
IN_MEMORY = {
    "one set": lambda: evaluate_retrieval(VECTORS, LABELS, **ids_and_groups(ALL), metrics=METRICS),
    "queries and gallery": lambda: evaluate_retrieval(
        VECTORS[QUERIES],
        LABELS[QUERIES],
        VECTORS[~QUERIES],
        LABELS[~QUERIES],
        **ids_and_groups(QUERIES),
        **ids_and_groups(~QUERIES, "gallery"),
        slices={"camera": COLUMNS["camera"][QUERIES]},
        metrics=METRICS,
    ),
    "labels in a file": lambda: evaluate_retrieval(VECTORS, LABELS, metrics=METRICS),
    "judgements": lambda: evaluate_retrieval(
        VECTORS,
        relevance=Relevance.from_lists([[(query + 12) % ROWS] for query in range(ROWS)]),
        query_groups=COLUMNS["groups"],
        metrics="mAP",
    ),
}


@pytest.mark.parametrize("name", IN_MEMORY)
def test_each_process_reads_its_own_files_and_the_report_is_that_of_arrays_in_memory(found, name):
    expected = json.loads(json.dumps(IN_MEMORY[name]().to_dict()))
    report = printed(found, name)
    assert {key: report[key] for key in ("metrics", "intervals", "slices") if key in expected} == {
        key: expected[key] for key in ("metrics", "intervals", "slices") if key in expected
    }
    ending = ".npy" if name == "labels in a file" else ".npz"
    assert files_read(found, name) == [{f"{part}{ending}" for part in own} for own in ((0, 1, 2), (3, 4, 5))]


def test_two_models_are_compared_though_their_rows_are_divided_in_other_places(found):
    for name, counts in (("set", [3, 3]), ("other", [2, 4])):
        reads = [[path for path, _ in of_process["two models"][3] if path.startswith(name)] for of_process in found]
        assert [len(paths) for paths in reads] == counts
        assert len({*reads[0], *reads[1]}) == 6
    assert printed(found, "two models")["first"]["metrics"] == printed(found, "one set")["metrics"]
    assert printed(found, "two models")["differences"]["mAP"]["value"] != 0


OF_SET = {"query_ids": COLUMNS["ids"], "query_groups": COLUMNS["groups"]}


@pytest.mark.parametrize(
    ("name", "file"),
    [("neighbours", "truth"), ("drawn neighbours", "drawn"), ("neighbours in a gallery", "gallery")],
)
def test_each_process_searches_its_own_files_for_neighbours(found, gloo_folder, name, file):
    assert [of_process[name][0] for of_process in found] == [0, 0], found[0][name]
    first, second = files_read(found, name)
    assert not first & second
    assert len(first | second) == 6
    [path] = gloo_folder.rglob(f"{file}.parquet")
    written = read_neighbours(path)
    if name == "neighbours in a gallery":
        columns = {**ids_and_groups(QUERIES), **ids_and_groups(~QUERIES, "gallery")}
        expected = nearest(VECTORS[QUERIES], gallery=VECTORS[~QUERIES], k=3, **columns)
    else:
        asked = written.query_indices if name == "drawn neighbours" else None
        assert len(written) == (20 if name == "drawn neighbours" else ROWS)
        expected = nearest(VECTORS, k=5, query_indices=asked, **OF_SET)
    for field in ("query_indices", "indices", "scores", "tied", "unlisted_ties"):
        assert torch.equal(getattr(written, field), getattr(expected, field))


def test_each_process_compares_the_lists_of_its_own_files(found):
    lists = COLUMNS["ids"][FOUND]
    columns = {"query_labels": LABELS, **OF_SET}
    expected = search_quality(lists, VECTORS, k=5, stored=VECTORS, **columns)
    report = printed(found, "search quality")
    assert report == json.loads(json.dumps(expected.to_dict()))
    assert files_read(found, "search quality") == [
        {f"{part}{ending}" for part in own for ending in (".npz", ".npy")} for own in ((0, 1, 2), (3, 4, 5))
    ]


def test_the_first_process_reads_all_rows_for_j(found):
    moments = ClassMoments.of(torch.from_numpy(VECTORS), LABELS)
    assert printed(found, "J")["J"] == pytest.approx(float(moments.discriminant_ratio()), rel=1e-12)
    assert list(printed(found, "J")["compression"]["variants"]) == ["dims4"]
    assert [len(names) for names in files_read(found, "J")] == [6, 3]


@pytest.mark.parametrize("name", ["one file", "gallery in one file", "one has no rows"])
def test_all_files_are_read_where_a_division_would_leave_a_process_idle(found, name):
    read = files_read(found, name)
    assert read[0] == read[1]
    assert printed(found, name)["metrics"]["mAP"] > 0
    if name == "one file":
        assert printed(found, name)["metrics"] == printed(found, "one set")["metrics"]


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("damaged", ("1.npz", "damaged")),
        ("other dimension", ("3.npz", "4 float32", "0.npz", "8 float32")),
        ("two spellings", ("labels", "'\u00e9clair'", "Unicode")),
        ("nothing there", ("counted://nothing/*.npz",)),
    ],
)
def test_an_error_about_a_file_is_the_same_in_every_process(found, name, facts):
    (status, _, said, *_), (other_status, _, other_said, *_) = (of_process[name] for of_process in found)
    assert (status, other_status) == (1, 1)
    assert said == other_said
    assert missing_facts(said, facts) == []


def test_a_state_that_two_processes_wrote_is_resumed_by_two(found):
    assert [of_process["killed"] for of_process in found] == [130, 130]
    (status, out, err), (other_status, *_) = (of_process["resumed"] for of_process in found)
    assert (status, other_status) == (0, 0)
    assert "from the state" in err
    assert json.loads(out)["metrics"] == printed(found, "queries and gallery")["metrics"]
    assert not any(of_process["state"] for of_process in found)


# -------------------------------------------------------------------------------------------- processes that are threads


@pytest.fixture(params=[0, 1])
def files(request, tmp_path):
    """Files of uneven lengths, one of them empty, and labels in files of other lengths."""
    rng = np.random.default_rng(request.param)
    borders = np.sort(np.append(rng.choice(np.arange(1, ROWS), 7, replace=False), 0))
    borders[3] = borders[2]
    for part, rows in enumerate(np.split(np.arange(ROWS), borders[1:])):
        columns = {name: COLUMNS[name][rows] for name in ("ids", "groups", "camera")}
        np.savez(tmp_path / f"{part}.npz", embeddings=VECTORS[rows], **columns)
    np.save(tmp_path / "labels.npy", LABELS)
    np.save(tmp_path / "is_gallery.npy", COLUMNS["is_gallery"])
    return tmp_path


@pytest.mark.parametrize("count", [1, 2, 5, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 8, 9))])
@pytest.mark.parametrize("has_gallery", [False, True])
def test_the_report_is_the_same_for_any_number_of_processes(files, count, has_gallery):
    columns = Columns(labels=str(files / "labels.npy"))
    queries = ALL
    sets = (VECTORS, LABELS)
    exclusions = ids_and_groups(ALL)
    if has_gallery:
        columns = replace(columns, is_gallery=str(files / "is_gallery.npy"))
        queries = QUERIES
        sets = (VECTORS[QUERIES], LABELS[QUERIES], VECTORS[~QUERIES], LABELS[~QUERIES])
        exclusions = ids_and_groups(QUERIES) | ids_and_groups(~QUERIES, "gallery")
    expected = evaluate_retrieval(*sets, **exclusions, slices={"camera": COLUMNS["camera"][queries]}, metrics=METRICS)

    def work(process):
        read = read_sets(files / "*.npz", columns, ("labels",), ("camera",), process)
        rows, arguments = inputs_of(read, None, process)
        return evaluate_retrieval(rows, **arguments, metrics=METRICS, memory_mb=0.02)

    for report in in_threads(count, work):
        assert report.values == expected.values
        assert report.of_slices("camera") == expected.of_slices("camera")
        for key in METRICS[:2]:
            assert np.array_equal(report.per_query[key], expected.per_query[key], equal_nan=True)


def test_processes_that_find_other_files_are_refused(tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        for part in range(3 + rank):
            np.savez(tmp_path / str(rank) / f"{part}.npz", embeddings=VECTORS, labels=LABELS)

    errors = in_threads(2, lambda process: read_sets(tmp_path / f"{process.rank}/*.npz", Columns(), (), (), process))
    assert {type(error) for error in errors} == {InputError}
    assert missing_facts(str(errors[0]), ("3 files", "4 files", "process 1")) == []
    assert [str(error).partition("*.npz")[2] for error in errors] == [str(errors[0]).partition("*.npz")[2]] * 2


def test_an_error_of_the_disk_in_one_process_is_raised_in_all(tmp_path):
    def work(process):
        def read():
            if process.rank:
                raise PermissionError(f"process {process.rank} may not read")

        read_in_all(process, read)

    errors = in_threads(3, work)
    assert [(type(error), str(error)) for error in errors] == [(InputError, "process 1 may not read")] * 3


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), data=st.data())
def test_files_are_divided_by_their_bytes(sizes, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    for number, size in enumerate(sizes):
        (folder / f"{number}.npy").write_bytes(bytes(size))
    count = data.draw(st.integers(1, len(sizes)))
    listed = list_shards(folder)
    parts = [listed.part(rank, count).files for rank in range(count)]
    assert sum(parts, ()) == listed.files
    assert all(parts)
    largest = max(sum(file.stat().st_size for file in part) for part in parts)
    assert largest <= sum(sizes) / count + max(sizes)
