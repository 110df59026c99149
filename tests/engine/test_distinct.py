"""Equal rows are compared once, and every count is as if all pairs were compared."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine import distinct
from fewshot_callbacks.engine.counted_values import CountedValues
from fewshot_callbacks.engine.distinct import DistinctRows
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.relevance import Lists, PairRelevance
from fewshot_callbacks.engine.twins import TwinGroups, UnitedLists
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.storage.stored_rows import StoredRows
from tests.cases import examples, sampled_product
from tests.engine.cases import SIMILARITIES, cases, engines
from tests.engine.oracles import Truth, counted, evaluated, prepared, scores_of, truth_of
from tests.engine.parts import assert_like_one, spread
from tests.engine.pooled_checks import ROADS, check_decisions, reaching, request_for
from tests.reports import assert_same


def with_twins(case, seed, rows=9):
    """The case with few different rows, which all classes share; those of the gallery are among those of the queries."""
    rng = np.random.default_rng(seed)
    chosen = case["queries"][torch.from_numpy(rng.integers(0, min(rows, len(case["queries"])), len(case["queries"])))]
    case = case | {"queries": chosen}
    if "gallery" in case:
        case["gallery"] = chosen[torch.from_numpy(rng.integers(0, len(chosen), len(case["gallery"])))].clone()
    return case


def heavy_tailed(items=260, dim=6, seed=0, similarity="cosine"):
    """Classes of 1 to 60 items; a third of the items are copies of 12 rows, in classes at random."""
    rng = np.random.default_rng(seed)
    labels = np.minimum(rng.zipf(1.6, items), 60)
    rows = rng.normal(size=(61, dim))[labels] + 0.8 * rng.normal(size=(items, dim))
    copied = rng.random(items) < 0.35
    rows[copied] = rng.normal(size=(12, dim))[np.minimum(rng.zipf(1.4, copied.sum()), 12) - 1]
    queries = torch.from_numpy(rows.astype(np.float32))
    return {"queries": queries, "query_labels": torch.from_numpy(labels), "similarity": similarity}


def distinct_rows(case, memory=1e8):
    """The distinct rows of a case; None if all rows are compared."""
    with computing():
        return DistinctRows.where_they_pay(*prepared(case), memory)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), engines(), st.integers(0, 2**16))
def test_counts_are_those_of_the_true_scores(case, road, seed):
    case = with_twins(case, seed)
    assert counted(case, **road) == truth_of(case).counts()


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), engines())
def test_counts_are_the_same_where_hardly_a_row_is_repeated(case, road):
    """Whether it pays decides about time alone: here distinct rows are compared in any case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distinct, "MOST_PAIRS", 2.0)
        assert distinct_rows(case) is not None
        assert counted(case, **road) == truth_of(case).counts()


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("road", range(len(ROADS)))
def test_counts_of_all_pairs(similarity, road):
    """Bounds at any score enclose the truth, and closing them gives it."""
    case = heavy_tailed(similarity=similarity)
    assert distinct_rows(case, 10**5) is not None
    truth = scores_of(case)
    every = np.unique([*truth.positives, *truth.negatives, -1.5, 1.5])
    every = np.unique([np.nextafter(every, -9), every, np.nextafter(every, 9)])
    exact = reaching(truth.negatives, every)
    with evaluated(case, request_for(case), **ROADS[road]) as (result, _):
        negatives = result.pooled.negatives
        assert (negatives.total, result.pooled.grid.total) == (len(truth.negatives), len(truth.positives))
        fewest, most = negatives.bounds(every)
        assert (fewest <= exact).all()
        assert (exact <= most).all()
        negatives.close(every)
        assert np.array_equal(negatives.bounds(every), [exact, exact])
        assert np.array_equal(result.pooled.relevant_reaching(every), reaching(truth.positives, every))
        assert np.array_equal(negatives.estimate(every), exact)
        low, high = negatives.span(truth.positives[[0, -1]])
        assert low <= truth.positives[0]
        assert high >= max(truth.positives[-1], truth.negatives[-1])


@pytest.mark.parametrize(
    ("seed", "similarity", "road"), sampled_product(range(4), SIMILARITIES, range(len(ROADS)), count=16)
)
def test_operating_points(seed, similarity, road):
    case = heavy_tailed(seed=seed, similarity=similarity)
    check_decisions(case, request_for(case), **ROADS[road])


@pytest.mark.parametrize(
    "road", [{}, {"batch_counters": 30}, {"as_on_device": True}, {"precision": "int8", "height": 16}]
)
@pytest.mark.parametrize("one_set", [True, False])
def test_any_lists_of_relevant_and_of_ignored_items(road, one_set):
    """Lists differ from query to query, so that queries with one row have relevant items of their own."""
    rng = np.random.default_rng(3)
    rows = torch.from_numpy(rng.normal(size=(14, 5))[rng.integers(0, 14, 90)].astype(np.float32))
    case = {"queries": rows, "query_labels": torch.zeros(90), "similarity": "cosine"}
    if not one_set:
        case |= {"gallery": rows.flip(0).clone(), "gallery_labels": torch.zeros(90)}
    relevant = rng.random((90, 90)) < 0.1
    ignored = rng.random((90, 90)) < 0.02
    ignored[::3] = False
    cameras = rng.integers(0, 5, (2, 90))
    candidate = (cameras[0][:, None] != cameras[1][None, :]) & ~ignored
    self_match = np.full(90, -1, np.int32)
    if one_set:
        self_match[:60] = np.arange(60)
        candidate[np.arange(60), np.arange(60)] = False
    lists, ignored_lists = (Lists.of([np.flatnonzero(row).tolist() for row in mask]) for mask in (relevant, ignored))
    relevance = PairRelevance(lists, self_match, [(cameras[0], cameras[1])], ignored_lists)
    truth = Truth(scores_of(case).scores, relevant, candidate)
    with evaluated(case, request_for(case), relevance=relevance, **road) as (result, found):
        assert found == truth.counts()
        every = np.unique([*truth.positives, *truth.negatives])
        result.pooled.negatives.close(every)
        assert np.array_equal(result.pooled.negatives.bounds(every)[0], reaching(truth.negatives, every))


@pytest.mark.parametrize("places_of", ["one set", "two sets"])
def test_places_in_the_lists_of_all_queries(places_of):
    case = heavy_tailed()
    if places_of == "two sets":
        case |= {"gallery": case["queries"][:200].clone(), "gallery_labels": case["query_labels"][:200]}
    gallery_labels = case.get("gallery_labels", case["query_labels"])
    scores = scores_of(case).scores
    with evaluated(case, placed=True) as (_, found):
        for query, places in found.items():
            relevant = np.flatnonzero(gallery_labels == case["query_labels"][query])
            of_places = scores[query][relevant[places]]
            assert len(set(places)) == len(places) == len(relevant) - (places_of == "one set")
            assert (np.diff(of_places) >= 0).all()
            assert places_of == "two sets" or query not in relevant[places]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("form", ["one set", "two sets", "groups"])
def test_several_processes_have_the_report_of_one(count, form):
    """Twins of different processes are not known as such: each process compares its own distinct rows."""
    case = heavy_tailed()
    similarity = case.pop("similarity")
    parts = spread(len(case["queries"]), count, 5)
    gallery_parts = ()
    if form == "two sets":
        case |= {"gallery": case["queries"].flip(0).clone(), "gallery_labels": case["query_labels"].flip(0)}
        gallery_parts = spread(len(case["gallery"]), count, 6)
    if form == "groups":
        case["query_groups"] = torch.arange(len(case["queries"])) % 4
    metrics = ("mAP", "recall@5", "pair_f1", "eer", "fnmr@fmr0.01", "recall@precision0.5")
    for memory_mb in (512, 0.5):
        report = assert_like_one(
            parts, case, gallery_parts, similarity=similarity, metrics=metrics, memory_mb=memory_mb
        )
        assert math.isfinite(report["pair_f1"])


# ---------------------------------------------------------------------------------------------------- which rows are twins


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_values_do_not_depend_on_which_scores_fit_into_the_budget(similarity, count, monkeypatch):
    cached = set()

    class Watched(distinct.DistinctScores):
        def __init__(self, *arguments, cache, cache_entries):
            cached.add((cache, cache_entries))
            super().__init__(*arguments, cache=cache, cache_entries=cache_entries)

    monkeypatch.setattr("fewshot_callbacks.engine.distinct.DistinctScores", Watched)
    case = heavy_tailed(items=900, similarity=similarity)
    sets = {"queries": case["queries"], "query_labels": case["query_labels"]}
    parts = spread(900, count, 1)
    options = {"similarity": similarity, "metrics": ("mAP", "pair_f1", "recall@precision0.5", "eer")}
    expected = evaluate_retrieval(**sets, **options)
    for memory_mb in (16, 4, 1):
        assert_same(expected, assert_like_one(parts, sets, **options, memory_mb=memory_mb))
    assert cached == {(True, False), (False, True), (False, False)}


def test_tiles_hold_each_row_once():
    rows = torch.randn(32, 6)
    case = {"queries": rows.repeat(10, 1), "query_labels": torch.arange(320) % 11, "similarity": "cosine"}
    vectors = distinct_rows(case).vectors
    assert len(vectors.pairs.queries) == vectors.items == 32
    assert vectors.pairs.gallery_copies.tolist() == [10] * 32


def test_a_few_pairs_of_a_tile_reach_a_threshold():
    """On a device such pairs are listed, rather than looked up in tables."""
    labels = torch.arange(400) % 40
    rows = torch.eye(40)[labels] + 0.1 * torch.randn(400, 40, generator=torch.Generator().manual_seed(0))
    case = {"queries": rows[torch.arange(400) // 2], "query_labels": labels, "similarity": "cosine"}
    assert distinct_rows(case).vectors.items == 200
    assert counted(case, as_on_device=True) == counted(case) == scores_of(case).counts()


def test_pairs_of_different_groups_are_not_looked_at():
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.normal(size=(12, 5))[rng.integers(0, 12, 120)].astype(np.float32))
    groups = np.arange(120) // 40
    labels = rng.integers(0, 5, 120)
    same_group = groups[:, None] == groups[None, :]
    relevant = (labels[:, None] == labels[None, :]) & same_group
    lists = Lists.of([np.flatnonzero(row).tolist() for row in relevant])
    relevance = PairRelevance(lists, np.arange(120, dtype=np.int32), groups=(groups, groups))
    case = {"queries": rows, "query_labels": torch.from_numpy(labels), "similarity": "cosine"}
    truth = Truth(scores_of(case).scores, relevant, same_group & ~np.eye(120, dtype=bool))
    for road in ({}, {"as_on_device": True}, {"batch_counters": 50}):
        with evaluated(case, relevance=relevance, **road) as (_, found):
            assert found == truth.counts()


def test_rows_that_rules_treat_differently_are_no_twins():
    rows = torch.randn(8, 6).repeat(10, 1)
    case = {"queries": rows, "query_labels": torch.arange(80) % 7, "similarity": "cosine"}
    case["query_groups"] = torch.arange(80) // 40  # of the ten copies of a row, five are in each group
    assert distinct_rows(case).vectors.items == 16
    case["query_groups"] = torch.arange(80)
    assert distinct_rows(case) is None


@pytest.mark.parametrize("kind", ["no twins", "no memory", "read from disk"])
def test_all_rows_are_compared_where_distinct_ones_do_not_pay(kind):
    rows = torch.randn(32, 6) if kind == "no twins" else torch.randn(4, 6).repeat(8, 1)
    case = {"queries": rows, "query_labels": torch.arange(32) % 5, "similarity": "cosine"}
    if kind == "read from disk":
        labels = np.arange(32) % 5
        relevance = PairRelevance(Lists.of_labels(labels, labels), np.full(32, -1, np.int32))
        stored = StoredRows(rows.numpy(), 1000)
        with computing():
            assert DistinctRows.where_they_pay(Vectors.of(rows, stored, "cosine"), relevance, 1e8) is None
        return
    assert distinct_rows(case, memory=100 if kind == "no memory" else 1e8) is None
    assert counted(case, memory=100 if kind == "no memory" else 1e8) == truth_of(case).counts()


def in_two_classes(rows, classes, seed=0):
    """Rows that stand twice, each time in another class."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(classes, (rows,), generator=generator)
    second = (first + torch.randint(1, classes, (rows,), generator=generator)) % classes
    queries = torch.randn(rows, 4, generator=generator).repeat(2, 1)
    return {"queries": queries, "query_labels": torch.cat([first, second]), "similarity": "cosine"}


def test_rows_of_the_same_classes_share_a_list():
    """Each row belongs to two of four classes: six lists, each of about half of the rows."""
    case = in_two_classes(300, classes=4)
    lists = distinct_rows(case).relevance.relevant
    assert len(np.unique(lists.start)) == 6
    assert len(lists.items) == sum(np.unique(np.stack([lists.start, lists.stop]), axis=1)[1] - np.unique(lists.start))
    assert counted(case) == scores_of(case).counts()


def test_lists_of_many_combinations_of_classes_keep_to_the_budget():
    """2,000 rows stand in nearly as many of the 4,950 pairs of 100 classes, with lists of 80 rows each, 4 bytes an entry."""
    case = in_two_classes(2000, classes=100)
    assert distinct_rows(case, memory=7e5) is None
    assert distinct_rows(case, memory=2e6) is not None


@pytest.mark.parametrize("seed", range(8))
def test_the_list_of_a_row_unites_those_of_its_queries(seed):
    """And the queries themselves as items, whether their lists hold them or not."""
    rng = np.random.default_rng(seed)
    queries, items = 60, 40
    rows = TwinGroups.of([rng.integers(0, 15, queries)])
    row_of_item = TwinGroups.of([rng.integers(0, 12, items)]).group_of.astype(np.int32)
    labels = rng.integers(0, 4, queries), rng.integers(0, 4, items)
    self_match = np.where(rng.random(queries) < 0.3, rng.integers(0, items, queries), -1).astype(np.int32)
    relevance = PairRelevance(Lists.of_labels(*labels), self_match)
    united = UnitedLists.of(relevance, rows, row_of_item)
    lists = united.lists(relevance, row_of_item)
    for row in range(len(rows.first)):
        of_row = np.flatnonzero(rows.group_of == row)
        relevant = np.isin(labels[1], labels[0][of_row]) | np.isin(np.arange(items), self_match[of_row])
        assert lists.items[lists.start[row] : lists.stop[row]].tolist() == np.unique(row_of_item[relevant]).tolist()
    assert (united.bytes, united.longest) == (lists.items.nbytes, lists.sizes.max())
    assert len(np.unique(united.list_of_row)) == len(united.first_item) - 1


def test_a_row_that_stands_for_most_items():
    """40,000 equal rows are 1.6 billion pairs, more than half of what an int32 holds; all pairs are more than it holds."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(47_000, 3)).astype(np.float32)
    rows[:40_000] = rows[0]
    labels = np.arange(47_000) % 23_500
    report = evaluate_retrieval(torch.from_numpy(rows), torch.from_numpy(labels), metrics=("mAP", "eer"))
    counts = report.pooled.pair_counts
    assert counts.irrelevant == 47_000 * 46_998
    assert report.queries == 47_000


def test_every_nth_copy():
    values = np.array([0.1, 0.4, 0.9])
    counted_values = CountedValues.of(values, np.array([3, 1, 4]))
    repeated = np.repeat(values, [3, 1, 4])
    for step in range(1, 10):
        assert counted_values.every(step).tolist() == repeated[::step].tolist()
    halves = [CountedValues.of(values[:1], np.array([3])), CountedValues.of(values[1:], np.array([1, 4]))]
    assert CountedValues.joined(halves[::-1]).every(1).tolist() == repeated.tolist()
    some = np.array([0.0, 0.1, 0.2, 0.9, 1.0])
    assert counted_values.count_reaching(some).tolist() == reaching(repeated, some).tolist()
    assert CountedValues(values, weight=2).count_reaching(some).tolist() == (2 * reaching(values, some)).tolist()
