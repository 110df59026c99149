"""What an index found against exact search, compared with slow loops over fractions that follow the definition."""

from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
import torch

from fewshot_callbacks import (
    InputError,
    Shards,
    Share,
    compare_reports,
    compression_costs,
    evaluate_retrieval,
    nearest,
    search_quality,
)
from tests.messages import refused
from tests.thread_processes import in_threads

pytestmark = pytest.mark.filterwarnings("error")


# ------------------------------------------------------------------------------------------------------- the definition


def dot(first, second):
    return sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(first, second, strict=True))


def squared_distance(first, second):
    return -sum((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(first, second, strict=True))


SCORES = {"dot": dot, "euclidean": squared_distance, "hamming": squared_distance}


def slow_list(entries, is_candidate):
    """What a list has found, entry by entry: an item, or None for what counts as not found."""
    kept = []
    for entry in entries:
        if not 0 <= entry < len(is_candidate):
            kept.append(None)
        elif is_candidate[entry]:
            kept.append(None if entry in kept else entry)
    return kept


def slow_recall(entries, scores, is_candidate, k, within=0):
    """Recall@k of a query: exact scores of all items, and which of them are candidates."""
    order = sorted((score for score, counts in zip(scores, is_candidate, strict=True) if counts), reverse=True)
    if not order:
        return None
    size = min(k, len(order))
    lowest = order[size - 1] - within * abs(order[size - 1])
    hits = [item for item in slow_list(entries, is_candidate)[:k] if item is not None and scores[item] >= lowest]
    return Fraction(len(hits), size)


def average_precision(relevant, number, k):
    hits, total = 0, Fraction(0)
    for rank, is_relevant in enumerate(relevant[:k], 1):
        hits += is_relevant
        total += Fraction(hits, rank) if is_relevant else 0
    return total / min(number, k)


def slow_metrics(entries, scores, is_candidate, is_relevant, k):
    """recall@1 and AP@k of a list, as means over all orders of neighbours in the list that have equal scores."""
    kept = slow_list(entries, is_candidate)
    groups = []
    for item in kept:
        if groups and item is not None and groups[-1][0] is not None and scores[groups[-1][0]] == scores[item]:
            groups[-1].append(item)
        else:
            groups.append([item])
    number = sum(a and b for a, b in zip(is_candidate, is_relevant, strict=True))
    if not number:
        return None, None
    values = []
    for parts in product(*(list(permutations(group)) for group in groups)):
        relevant = [item is not None and bool(is_relevant[item]) for part in parts for item in part]
        values.append((Fraction(int(relevant[0])), average_precision(relevant, number, k)))
    return tuple(sum(column) / len(values) for column in zip(*values, strict=True))


def quantile(values, percent):
    """The smallest value that at least so many of 100 values do not exceed."""
    return min(value for value in values if 100 * sum(other <= value for other in values) >= percent * len(values))


def planted(seed, *, queries=40, gallery=60, dim=3, columns=8, codes=False):
    """Rows of small whole numbers, of which many tie, and lists with every fault."""
    generator = np.random.default_rng(seed)
    low, high = (0, 2) if codes else (-2, 3)
    rows = [generator.integers(low, high, (items, dim)).astype(np.float32) for items in (queries, gallery)]
    labels = [generator.integers(0, 5, items) for items in (queries, gallery)]
    groups = [generator.integers(0, 6, items) for items in (queries, gallery)]
    found = generator.integers(-1, gallery + 2, (queries, columns))
    return rows, labels, groups, found


def agree(values, expected):
    """Every value is the float that is nearest to a fraction; NaN for None."""
    for value, fraction in zip(values.tolist(), expected, strict=True):
        assert np.isnan(value) if fraction is None else value == pytest.approx(float(fraction), abs=1e-14)


@pytest.mark.parametrize("similarity", SCORES)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_recall_and_metrics_are_those_of_the_definition(similarity, grouped, seed):
    (queries, gallery), labels, groups, found = planted(seed, codes=similarity == "hamming")
    options = {"query_groups": groups[0], "gallery_groups": groups[1]} if grouped else {}
    quality = search_quality(
        found,
        queries,
        gallery,
        query_labels=labels[0],
        gallery_labels=labels[1],
        k=(3, 8),
        within=0.25,
        similarity=similarity,
        **options,
    )
    scores = [[SCORES[similarity](query, item) for item in gallery] for query in queries]
    is_candidate = [[not grouped or group != other for other in groups[1]] for group in groups[0]]
    is_relevant = [[label == other for other in labels[1]] for label in labels[0]]
    for k in (3, 8):
        expected = [slow_recall(*rest, k) for rest in zip(found, scores, is_candidate, strict=True)]
        agree(quality.per_query[f"search_recall@{k}"], expected)
        assert quality.recall[k] == pytest.approx(float(sum(expected) / len(expected)))
        assert quality.percentile_5[k] == float(quantile(expected, 5))
        assert quality.percentile_1[k] == float(quantile(expected, 1))
        if similarity == "dot":
            near = [slow_recall(*rest, k, Fraction(1, 4)) for rest in zip(found, scores, is_candidate, strict=True)]
            assert quality.recall_within[k] == pytest.approx(float(sum(near) / len(near)))
            assert quality.recall_within[k] > quality.recall[k]
        metrics = [slow_metrics(*rest, k) for rest in zip(found, scores, is_candidate, is_relevant, strict=True)]
        agree(quality.per_query["recall@1"], [first for first, _ in metrics])
        agree(quality.per_query[f"map@{k}_min"], [second for _, second in metrics])


@pytest.mark.parametrize("seed", range(3))
def test_one_set_leaves_the_query_out_and_what_follows_moves_up(seed):
    (_, items), _, _, found = planted(seed, gallery=50)
    found = np.random.default_rng(seed).integers(0, 50, (50, 6))
    found[:, 0] = np.arange(50)
    quality = search_quality(found, items, similarity="dot")
    expected = [
        slow_recall(found[row], [dot(items[row], item) for item in items], np.arange(50) != row, 5) for row in range(50)
    ]
    assert list(quality.recall) == [5]
    agree(quality.per_query["search_recall@5"], expected)
    assert quality.faults["excluded"] == sum(list(row).count(number) for number, row in enumerate(found))


def test_ids_name_the_items_and_the_first_of_each_counts():
    rows = np.array([[0.0], [1.0], [1.0], [2.0], [5.0]], np.float32)
    ids = ["a", "b", "b", "c", "d"]
    found = [["b", "nowhere"], ["d", "c"]]
    options = {"similarity": "euclidean", "query_ids": ["q", "c"], "gallery_ids": ids}
    quality = search_quality(found, np.array([[0.9], [2.0]], np.float32), rows, **options)
    # Nearest to 0.9 are b and a; c is the second query itself, to which b and a are nearest.
    assert quality.per_query["search_recall@2"].tolist() == [0.5, 0.0]
    assert quality.gallery == 4
    assert quality.faults == {"missing": 0, "unknown": 1, "repeated": 0, "excluded": 1}


def test_fewer_candidates_than_k_are_all_that_can_be_found():
    rows = np.array([[0.0], [1.0], [2.0]], np.float32)
    quality = search_quality([[2, 0, -1, -1]], np.ones((1, 1), np.float32), rows, similarity="dot")
    assert quality.recall == {4: pytest.approx(2 / 3)}
    assert quality.faults["missing"] == 2


def test_the_tolerance_lowers_a_score_below_zero():
    items = np.array([[-4.0], [-5.0], [-6.0]], np.float32)
    for item, near in ((1, 1.0), (2, 0.0)):
        quality = search_quality([[item]], np.ones((1, 1), np.float32), items, similarity="dot", within=0.25)
        assert (quality.recall, quality.recall_within) == ({1: 0.0}, {1: near})


@pytest.mark.parametrize(("missed", "percentile"), [(0, 1.0), (1, 0.0), (2, 0.0)])
def test_a_twentieth_of_the_queries_does_not_exceed_the_percentile(missed, percentile):
    rows = np.eye(20, dtype=np.float32)
    found = np.arange(20)[:, None]
    found[:missed] = -1
    quality = search_quality(found, rows, rows)
    assert quality.percentile_5 == {1: percentile}
    assert quality.percentile_1 == {1: float(missed == 0)}


def test_queries_without_candidates_have_no_value_and_a_set_of_them_is_refused():
    rows = np.eye(3, dtype=np.float32)
    groups = {"gallery_groups": [1, 1, 1]}
    quality = search_quality([[0], [1]], rows[:2], rows, query_groups=[1, 2], **groups)
    assert quality.per_query["search_recall@1"].isnan().tolist() == [True, False]
    assert quality.recall == {1: 1.0}
    with refused(InputError, "search_quality", 2, "candidate"):
        search_quality([[0], [1]], rows[:2], rows, query_groups=[1, 1], **groups)


# ----------------------------------------------------------------------------------------------------- parts of the loss


def clustered(seed=0, classes=40, queries=300, gallery=1500, dim=16):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, queries + gallery)
    rows = generator.standard_normal((classes, dim))[labels] + generator.standard_normal((len(labels), dim))
    rows = rows.astype(np.float32)
    return rows[:queries], labels[:queries], rows[queries:], labels[queries:]


def test_what_exact_search_finds_loses_nothing_at_all():
    queries, labels, gallery, gallery_labels = clustered()
    found = nearest(queries, gallery=gallery, k=10).indices
    quality = search_quality(found, queries, gallery, query_labels=labels, gallery_labels=gallery_labels, k=(1, 10))
    assert quality.recall == quality.recall_within == quality.percentile_1 == {1: 1.0, 10: 1.0}
    assert list(quality.differences) == ["search_recall@1", "search_recall@10", "recall@1", "map@1_min", "map@10_min"]
    assert all(difference.is_equal for difference in quality.differences.values())
    report = evaluate_retrieval(queries, labels, gallery, gallery_labels, metrics=("recall@1", "map@10_min"))
    assert {key: quality.differences[key].second for key in report.values} == report.values
    assert quality.notes == ()


def int8_by_hand(rows, gallery):
    """A byte for each dimension: whole steps from the lowest number of the gallery, of 255 to the highest."""
    low, high = gallery.min(axis=0), gallery.max(axis=0)
    return np.clip(np.floor((rows - low) / ((high - low) / np.float32(255))), 0, 255) - 128


def bits_by_hand(rows, gallery):
    return np.where(rows > 0, 1.0, -1.0)


@pytest.mark.parametrize(("code", "by_hand"), [("int8", int8_by_hand), ("binary", bits_by_hand)])
def test_the_loss_by_quantisation_is_that_of_compression_costs(code, by_hand):
    queries, labels, gallery, gallery_labels = clustered()
    codes = [by_hand(rows, gallery).astype(np.float32) for rows in (queries, gallery)]
    found = nearest(codes[0], gallery=codes[1], k=12).indices
    found[::3, 4] = -1
    named = {"query_labels": labels, "gallery_labels": gallery_labels}
    quality = search_quality(found, queries, gallery, **named, k=10, stored=codes[1], stored_queries=codes[0])
    metrics = ("recall@1", "map@10_min")
    costs = compression_costs(queries, labels, gallery, gallery_labels, codes=code, metrics=metrics)
    for key in metrics:
        assert quality.quantisation[key] == costs.variants[code].differences[key]
    for key, change in quality.differences.items():
        parts = quality.quantisation[key].value + quality.index[key].value
        assert change.value == pytest.approx(parts, abs=1e-12)
    assert quality.quantisation["search_recall@10"].value < 0
    assert quality.index["map@10_min"].value < 0
    assert (quality.queries_with_ties > 200) == (code == "binary")


def test_the_loss_of_the_graph_is_measured_against_the_stored_rows():
    queries, _, gallery, _ = clustered()
    stored = np.round(gallery)
    found = nearest(queries, gallery=stored, k=10).indices
    quality = search_quality(found, queries, gallery, stored=stored)
    assert quality.index["search_recall@10"].is_equal
    assert quality.differences == quality.quantisation
    assert 0.5 < quality.recall[10] < 1.0


def test_items_whose_stored_rows_tie_have_no_order():
    sides = {"query_labels": [0], "gallery_labels": [1, 0]}
    rows = {
        "queries": np.ones((1, 1), np.float32),
        "gallery": np.array([[3.0], [2.0]], np.float32),
        "similarity": "dot",
    }
    assert search_quality([[0, 1]], **rows, **sides).per_query["recall@1"].tolist() == [0.0]
    quality = search_quality([[0, 1]], **rows, **sides, stored=np.ones((2, 1), np.float32))
    assert quality.per_query["recall@1"].tolist() == [0.5]
    assert quality.index["recall@1"].is_equal


def test_stored_rows_of_one_set_leave_the_query_out():
    _, _, items, labels = clustered(gallery=300)
    stored = np.round(items)
    places = np.arange(300)
    found = nearest(items, gallery=stored, k=6, query_ids=places, gallery_ids=places).indices
    quality = search_quality(found, items, query_labels=labels, k=5, stored=stored)
    assert quality.index["search_recall@5"].is_equal
    assert quality.index["map@5_min"].is_equal
    assert (
        quality.quantisation["map@5_min"].second == evaluate_retrieval(items, labels, metrics="map@5_min")["map@5_min"]
    )


def test_differences_are_those_of_reports_of_the_same_queries():
    queries, labels, gallery, gallery_labels = clustered()
    stored = np.round(gallery)
    metrics = ("recall@1", "map@10_min")
    named = {"query_labels": labels, "gallery_labels": gallery_labels}
    reports = [evaluate_retrieval(queries, labels, rows, gallery_labels, metrics=metrics) for rows in (stored, gallery)]
    found = nearest(queries, gallery=stored, k=10).indices
    quality = search_quality(found, queries, gallery, **named, stored=stored)
    known = compare_reports(*reports)
    assert {key: quality.quantisation[key] for key in metrics} == dict(known)


# ------------------------------------------------------------------------------------------------------ files, processes


@pytest.mark.parametrize("memory_mb", [None, 0.004])
@pytest.mark.parametrize("kinds", [(), ("groups",), ("ids", "groups")])
def test_files_and_processes_give_what_one_call_in_memory_gives(kinds, memory_mb, tmp_path):
    rows, labels, groups, found = planted(5, gallery=90)
    ids = [np.arange(40) + 500, np.arange(90) // 2 + 100]
    if "ids" in kinds:
        found = found + 100
    sides = [
        dict(zip(("labels", "groups", "ids"), side, strict=True)) for side in zip(labels, groups, ids, strict=True)
    ]
    columns = {
        f"{prefix}_{kind}": side[kind]
        for prefix, side in zip(("query", "gallery"), sides, strict=True)
        for kind in ("labels", *kinds)
    }
    stored = np.round(rows[1] / 2).astype(np.float32)
    options = {"k": (2, 8), "similarity": "euclidean"}
    known = search_quality(found, *rows, **columns, stored=stored, **options)
    assert 0 < known.recall[8] < 1
    np.save(tmp_path / "gallery.npy", rows[1])
    np.save(tmp_path / "stored.npy", stored)
    of_files = search_quality(
        found,
        rows[0],
        Shards(tmp_path / "gallery.npy"),
        **columns,
        stored=Shards(tmp_path / "stored.npy"),
        memory_mb=memory_mb,
        **options,
    )
    assert of_files == known

    def work(processes):
        parts = [slice(processes.rank, None, processes.count), slice(processes.rank, None, processes.count)]
        places = [np.arange(size)[part] for size, part in zip((40, 90), parts, strict=True)]
        own = {name: values[parts[name.startswith("gallery")]] for name, values in columns.items()}
        share = Share(processes, *places)
        return search_quality(
            found[parts[0]],
            rows[0][parts[0]],
            rows[1][parts[1]],
            **own,
            stored=stored[parts[1]],
            memory_mb=memory_mb,
            share=share,
            **options,
        )

    for count in (2, 3):
        assert in_threads(count, work) == [known] * count


def test_files_bring_labels_and_ids(tmp_path):
    queries, labels, gallery, gallery_labels = clustered()
    ids = np.arange(len(gallery)) + 7
    np.savez(tmp_path / "queries.npz", embeddings=queries, labels=labels, ids=np.arange(len(queries)) + 10_000)
    np.savez(tmp_path / "gallery.npz", embeddings=gallery, labels=gallery_labels, ids=ids)
    found = nearest(queries, gallery=gallery, k=5).indices.numpy()
    sets = [Shards(tmp_path / name, labels="labels", ids="ids") for name in ("queries.npz", "gallery.npz")]
    quality = search_quality(ids[found], *sets)
    assert quality.recall == {5: 1.0}
    assert "map@5_min" in quality.differences


# -------------------------------------------------------------------------------------------------------------- refusals


EYE = np.eye(4, dtype=np.float32)
LISTS = np.array([[0, 1], [1, 2]])


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"found": (np.ones((2, 2)), LISTS)}, ("found", "found[1]")),
        ({"found": LISTS.astype(np.float32)}, ("found", "float32", "indices")),
        ({"found": LISTS[0]}, ("found", "(2,)")),
        ({"found": LISTS[:1]}, ("found", "1 row", "2 queries")),
        ({"found": LISTS + 50}, ("found", 50, "4 items")),
        ({"found": [["a", "b"], ["c", "d"]]}, ("found", "'a'", "gallery_ids=")),
        ({"k": 3}, ("k=3", 2)),
        ({"k": 0}, ("k=0", 1)),
        ({"within": -1.0}, ("within=-1.0", 0.01)),
        ({"stored": EYE[:3]}, ("stored", 3, 4)),
        ({"stored_queries": EYE[:2]}, ("stored_queries", "stored")),
        ({"query_labels": [1, 2]}, ("gallery_labels",)),
        ({"query_ids": [7, 8], "gallery_ids": list("abcd"), "found": LISTS}, ("integers", "strings")),
    ],
)
def test_what_cannot_be_compared_is_refused(changes, facts):
    with refused(InputError, "search_quality", *facts):
        search_quality(**({"found": LISTS, "queries": EYE[:2], "gallery": EYE} | changes))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_integers_of_every_library_are_taken(dtype):
    lists = np.array([[0, -1]]).astype(dtype) if np.dtype(dtype).kind == "i" else np.array([[0, 1]], dtype)
    quality = search_quality(lists, EYE[:1], EYE)
    assert quality.per_query["search_recall@2"].tolist() == [0.5 if np.dtype(dtype).kind == "i" else 1.0]
    if dtype == np.uint64:  # what hnswlib and usearch return for nothing
        nothing = search_quality(np.array([[0, 2**64 - 1]], np.uint64), EYE[:1], EYE)
        assert nothing.faults["missing"] == 1


# -------------------------------------------------------------------------------------------------------------- printing


def test_print_shows_recall_and_the_parts_of_the_loss():
    queries, labels, gallery, gallery_labels = clustered()
    stored = np.round(gallery)
    found = nearest(queries, gallery=stored, k=10).indices
    found[:40, 0] = -1
    named = {"query_labels": labels, "gallery_labels": gallery_labels}
    quality = search_quality(found, queries, gallery, **named, stored=stored)
    lines = str(quality).splitlines()
    assert "300 queries" in lines[0]
    assert "1,500 gallery items" in lines[0]
    assert f"{quality.recall[10]:.4f}" in lines[2]
    for key, change in quality.differences.items():
        [line] = [line for line in lines if line.split()[:1] == [key]]
        assert line.split()[1:3] == [f"{change.second:.4f}", f"{change.first:.4f}"]
        assert line.split()[-2:] == [f"{part[key].value:+.4f}" for part in (quality.quantisation, quality.index)]
    assert any(line.startswith("40 entries") for line in lines)


def test_values_have_the_names_with_which_they_are_logged():
    queries, labels, gallery, gallery_labels = clustered()
    found = nearest(queries, gallery=gallery, k=10).indices
    quality = search_quality(found, queries, gallery, query_labels=labels, gallery_labels=gallery_labels, k=10)
    names = ["", "_within", "_percentile_5", "_percentile_1"]
    assert list(quality.metrics()) == [*(f"search_recall@10{name}" for name in names), "recall@1", "map@10_min"]
    plain = quality.to_dict()
    assert plain["values"] == quality.metrics()
    assert plain["exact_search"]["map@10_min"] == quality.differences["map@10_min"].second
    assert plain["quantisation"] == {}
    assert torch.equal(quality.per_query["search_recall@10"], torch.ones(300, dtype=torch.float64))
