"""On every path through the engine, ranks are as if the true scores of all pairs were compared."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from fewshot_callbacks.engine.distinct import DistinctRows
from fewshot_callbacks.engine.layout import plan_layout
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.ranks import PairCounter, recount
from fewshot_callbacks.engine.relevance import Lists, PairRelevance
from fewshot_callbacks.engine.thresholds import sorted_thresholds
from fewshot_callbacks.engine.tiles import Estimates
from fewshot_callbacks.functional.retrieval.decisions import PooledRequest
from tests.cases import examples, sampled_product
from tests.engine.cases import PRECISIONS, SIMILARITIES, cases, engines, labels_of, vectors
from tests.engine.oracles import Truth, counted, evaluated, prepared, scores_of, true_scores, truth_of

ROADS = (
    {"precision": "int8", "height": 16, "threads": 3},
    {"precision": "int8", "height": 20, "width": 40, "batch_counters": 45},
    {"precision": "float32", "height": 5, "threads": 2, "batch_counters": 1},
    {"precision": "float64", "height": 32, "threads": 2, "memory": 10**5},
    {"precision": "float32", "memory": 10**4},
    {"precision": "float32", "as_on_device": True, "height": 16, "width": 48},
    {"precision": "float64", "as_on_device": True, "batch_counters": 30},
    {"precision": "float16", "as_on_device": True, "height": 24, "width": 17},
    {"request": PooledRequest((0.5,)), "buffer_pairs": 4, "threads": 2},
)


def one_set(kind, n, dim, similarity="cosine", labels="uneven", dtype=np.float32):
    """A set as a case."""
    queries = torch.from_numpy(vectors(kind, n, dim).astype(dtype))
    return {"queries": queries, "query_labels": torch.from_numpy(labels_of(labels, n)), "similarity": similarity}


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), engines())
def test_counts_are_those_of_the_true_scores(case, road):
    assert counted(case, **road) == truth_of(case).counts()


@pytest.mark.parametrize("kind", ["real", "grid"])
def test_borders_of_runs_of_estimates_are_crossed(kind):
    """Rows of a tile are counted 256 estimates at a time."""
    case = one_set(kind, 620, 3, "dot")
    truth = truth_of(case).counts()
    for precision in PRECISIONS:
        assert counted(case, precision=precision, height=300, width=600) == truth
        assert counted(case, precision=precision, batch_counters=600, threads=2) == truth


@pytest.mark.parametrize("relevant", [64, 127, 257])
def test_many_relevant_items(relevant):
    """Tables hold numbers of thresholds in 8 bits where they can, and are coarser from 64 thresholds on."""
    labels = torch.arange(2 * relevant + 2) % 2
    queries = torch.randn(len(labels), 4) + 0.3 * labels[:, None]
    case = {"queries": queries, "query_labels": labels, "similarity": "dot"}
    truth = truth_of(case).counts()
    for precision in PRECISIONS:
        assert counted(case, precision=precision, height=100) == truth
    assert counted(case, as_on_device=True) == truth


@pytest.mark.exhaustive
def test_more_relevant_items_than_16_bits_hold():
    """A query with 33,000 relevant items, by sorting: its scores are those of one coordinate."""
    values = np.random.default_rng(0).permutation(66_001).astype(np.float32)
    labels = (np.arange(66_001) < 33_000).astype(np.int64)
    case = {
        "queries": torch.ones(2, 1), "query_labels": torch.tensor([1, 0]), "similarity": "dot",
        "gallery": torch.from_numpy(values[:, None]), "gallery_labels": torch.from_numpy(labels),
    }  # fmt: skip
    found = counted(case)
    for query, label in enumerate((1, 0)):
        own, others = np.sort(values[labels == label]), np.sort(values[labels != label])
        assert found[query][0] == (len(others) - np.searchsorted(others, own)).tolist()
        assert found[query][2] == list(range(len(own) - 1, -1, -1))


@pytest.mark.parametrize(("similarity", "road"), sampled_product(SIMILARITIES, range(len(ROADS)), count=12))
def test_lists_of_any_items_with_ignored_ones_and_cameras(similarity, road):
    rng = np.random.default_rng(SIMILARITIES.index(similarity))
    queries, items = 40, 130
    case = {"queries": np.rint(2 * rng.normal(size=(queries, 6))), "gallery": np.rint(2 * rng.normal(size=(items, 6)))}
    case = {name: torch.from_numpy(rows.astype(np.float32)) for name, rows in case.items()} | {"similarity": similarity}
    case |= {"query_labels": torch.zeros(queries), "gallery_labels": torch.zeros(items)}  # lists say who is relevant
    tables = np.zeros((2, queries, items), bool)
    for table, most in zip(tables, (20, 30), strict=True):
        for row in table:
            row[rng.choice(items, rng.integers(0, most), replace=False)] = True
    cameras, own = (rng.integers(0, 5, queries), rng.integers(0, 5, items)), rng.integers(-1, items, queries)
    relevant, ignored = (Lists.of([rng.permutation(row.nonzero()[0]).tolist() for row in table]) for table in tables)
    candidate = ~tables[1] & (cameras[0][:, None] != cameras[1]) & (own[:, None] != np.arange(items))
    truth = Truth(true_scores(case["queries"], case["gallery"], similarity), tables[0], candidate)
    relevance = PairRelevance(relevant, own.astype(np.int32), [cameras], ignored)
    assert counted(case, relevance=relevance, **ROADS[road]) == truth.counts()


@pytest.mark.parametrize("road", ROADS)
def test_blocks_say_which_entry_of_the_list_each_item_is(road):
    """Ascending by scores, of equal ones in the order of the list; some entries are no candidates."""
    case, rng = one_set("grid", 60, 4), np.random.default_rng(1)
    table = np.triu(rng.random((60, 60)) < 0.2, 1)
    table |= table.T
    groups, scores = rng.integers(0, 20, 60), true_scores(case["queries"].numpy(), case["queries"].numpy(), "cosine")
    lists = [np.flatnonzero(row) for row in table]
    relevance = PairRelevance(
        Lists.of([row.tolist() for row in lists]), np.arange(60, dtype=np.int32), [(groups, groups)], symmetric=True
    )
    with evaluated(case, relevance=relevance, placed=True, **road) as (_, places):
        for query, some in enumerate(lists):
            order = np.argsort(scores[query, some], kind="stable")
            assert places[query] == [n for n in order.tolist() if groups[some[n]] != groups[query]]


@pytest.mark.parametrize("road", ROADS)
def test_mutual_lists_that_are_no_classes(road):
    """Several labels: who shares one is relevant, and a may be to b, and b to c, but a not to c."""
    case, rng = one_set("grid", 90, 5), np.random.default_rng(0)
    tables = np.triu(rng.random((2, 90, 90)) < [[[0.1]], [[0.05]]], 1)
    relevant, ignored = (table | table.T for table in tables)
    lists = [Lists.of([row.nonzero()[0].tolist() for row in table]) for table in (relevant, ignored)]
    relevance = PairRelevance(lists[0], np.arange(90, dtype=np.int32), (), lists[1], symmetric=True)
    scores = true_scores(case["queries"].numpy(), case["queries"].numpy(), "cosine")
    truth = Truth(scores, relevant, ~ignored & ~np.eye(90, dtype=bool))
    assert counted(case, relevance=relevance, **road) == truth.counts()


@pytest.mark.parametrize("scale", [5e-324 * 2**40, 1e300])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_the_ends_of_float64(scale, similarity):
    case = one_set("real", 40, 8, similarity, "few", np.float64)
    case["queries"] = case["queries"] * scale
    nearer = np.ldexp(case["queries"].numpy(), 1000 if scale < 1 else -1000)  # where products are float64 numbers
    truth = truth_of(case, true_scores(nearer, nearer, similarity)).counts()
    for precision in PRECISIONS:
        assert counted(case, precision=precision, height=16) == truth


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_thresholds_as_far_away_as_an_estimate_can_be_off(precision, similarity):
    """Candidates at the error of the precision from the one threshold, a little nearer and a little further."""
    of_halves = {"int8": 2.0**-7, "float16": 2.0**-11}
    roundoff = (of_halves | {"float32": 2.0**-24, "float64": 2.0**-53})[precision]
    step = np.array([0.0, 1e-9, 0.25, 0.5, 0.99, 1.0, 1.01, 1.5, 2.0, 2.1, 3.1, 4.0, 8.0, 15.0, 20.0])
    value = np.concatenate([[0.5, 0.5, 0.125], 0.5 + roundoff * np.concatenate([-step, step])])
    gallery = np.stack([value, np.sqrt((1 - value * value).clip(0)), 0 * value], 1)
    case = {
        "queries": torch.tensor([[1.0, 0.0, 0.0]] * 4, dtype=torch.float64), "similarity": similarity,
        "query_labels": torch.tensor([0, 0, 0, 1]), "gallery": torch.from_numpy(gallery),
        "gallery_labels": torch.cat([torch.tensor([0, 1, 0]), torch.full((2 * len(step),), 2)]),
    }  # fmt: skip
    for dtype in (torch.float64, torch.float32):
        case |= {"queries": case["queries"].to(dtype), "gallery": case["gallery"].to(dtype)}
        truth = truth_of(case).counts()
        for as_on_device in (False, True):
            assert counted(case, precision=precision, as_on_device=as_on_device) == truth


def test_few_distinct_rows_whose_scores_do_not_fit_are_counted_one_by_one():
    rows, labels = torch.randn(32, 6).repeat(10, 1), torch.arange(320) % 11
    case = {"queries": rows, "query_labels": labels, "similarity": "cosine"}
    assert DistinctRows.where_they_pay(*prepared(case), 10**7) is not None
    assert counted(case, memory=10**4) == counted(case, batch_counters=500) == truth_of(case).counts()


@pytest.mark.parametrize(("noise", "dtype"), [(1e-4, np.float32), (1e-7, np.float32), (1e-15, np.float64)])
@pytest.mark.parametrize("precision", [None, "int8", "float64"])
def test_rows_that_are_all_but_equal(noise, dtype, precision):
    """So many that a sample chooses the precision: most estimates are too close to thresholds."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy((rng.normal(size=(1, 5)) + noise * rng.normal(size=(530, 5))).astype(dtype))
    case = {"queries": rows, "query_labels": torch.arange(530) % 90, "similarity": "cosine"}
    truth = scores_of(case).counts()
    assert counted(case, precision=precision) == truth
    assert precision is not None or counted(case, request=PooledRequest((0.5,))) == truth


def test_counts_of_all_pairs_of_several_processes_fit_their_counters():
    """The queries of one process meet the items of all: more than 2**31 pairs in all, even where its own pairs are few."""
    case = one_set("real", 20, 8)
    with computing():
        vectors_of_case, relevance = prepared(case)
        estimates = Estimates(vectors_of_case, relevance, "float32", plan_layout(10**7, 20, 20, 8, 20))
        estimates.total_items = 2**31
        counter, _ = PairCounter(estimates, np.array([0.5])).new_workspace()
        assert counter.flush().hits.dtype == np.int64


def test_a_pass_that_counts_for_no_query_needs_each_pair_of_a_set_once():
    """Ranks in several batches need it twice."""
    with computing():
        vectors_of_case, relevance = prepared(one_set("real", 70, 8))
        twice = Estimates(vectors_of_case, relevance, "float32", plan_layout(10**7, 70, 70, 8, 70))
        once = twice.with_pairs_once()
        assert (twice.total_pairs, once.total_pairs) == (70**2, 70**2 // 2)
        scores = np.linspace(-1, 1, 9)
        assert np.array_equal(recount(once, scores), recount(twice, scores))


@pytest.mark.parametrize("values", [3, 10**6])
def test_places_of_equal_thresholds_are_in_the_order_of_the_list(values):
    rng = np.random.default_rng(0)
    lengths = [0, 5, 400, 128, 129, 1000]
    offsets = np.cumsum([0, *lengths])
    entries = rng.integers(0, values, offsets[-1]) / 8
    entries[rng.random(len(entries)) < 0.1] = np.inf
    expected = []
    for start, stop in pairwise(offsets.tolist()):
        order = np.argsort(entries[start:stop], kind="stable")
        expected.append(order[entries[start:stop][order] < np.inf])
    thresholds = sorted_thresholds(entries.copy(), offsets, places=True, threads=2)
    assert np.array_equal(thresholds.places, np.concatenate(expected))
    assert np.array_equal(np.diff(thresholds.offsets), [len(places) for places in expected])
    for n, (start, places) in enumerate(zip(offsets.tolist(), expected, strict=False)):
        of_query = thresholds.scores[thresholds.offsets[n] : thresholds.offsets[n + 1]]
        assert np.array_equal(of_query, entries[start + places])
