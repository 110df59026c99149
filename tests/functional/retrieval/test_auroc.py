"""AUROC of each query and of all pairs, against scikit-learn's and against loops over pairs; ties count one half."""

import math
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fewshot_callbacks import Relevance, evaluate_retrieval
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.relevance import Lists, PairRelevance
from fewshot_callbacks.functional import Share, plan_evaluation
from tests.cases import clustered_items, examples
from tests.functional.brute_force import BruteForce
from tests.messages import warned
from tests.thread_processes import in_threads

KEYS = ("auroc", "pair_auroc")
LITTLE_ROOM = {"grid_size": 2, "buffer_pairs": 2}
OPTIONS = [{}, {"as_on_device": True}, LITTLE_ROOM, {"precision": "int8", **LITTLE_ROOM}]


def by_scikit_learn(slow: BruteForce) -> tuple[list[float], float]:
    """AUROC of each query, NaN where one kind is missing, and of all pairs."""
    of_queries = [
        roc_auc_score(relevant, scores) if relevant.any() and not relevant.all() else math.nan
        for relevant, scores in zip(slow.relevance, slow.scores, strict=True)
    ]
    return of_queries, roc_auc_score(np.concatenate(slow.relevance), np.concatenate(slow.scores))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("similarity", "case"),
    [
        *[(similarity, "one set") for similarity in ("cosine", "dot", "euclidean", "hamming")],
        *[("dot", case) for case in ("a gallery", "ids", "groups", "ids and groups", "groups of one set")],
    ],
)
def test_it_is_that_of_scikit_learn(options, similarity, case):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 40)
    rows = rng.integers(0, 2, (40, 5)).astype(np.float64)
    arguments = {"queries": rows, "query_labels": labels}
    if case not in ("one set", "groups of one set"):
        arguments |= {
            "gallery": rng.integers(0, 2, (50, 5)).astype(np.float64),
            "gallery_labels": rng.integers(0, 6, 50),
        }
    if "ids" in case:
        arguments |= {"query_ids": np.arange(40), "gallery_ids": np.arange(20, 70)}
    if "groups" in case:
        arguments["query_groups"] = rng.integers(0, 4, 40)
    if "groups" in case and "gallery" in arguments:
        arguments["gallery_groups"] = rng.integers(0, 4, 50)
    expected, pooled = by_scikit_learn(BruteForce(**arguments, similarity=similarity))
    with engine_options(**options):
        report = evaluate_retrieval(**arguments, similarity=similarity, metrics=KEYS, label_groups=None)
    assert report.per_query["auroc"].tolist() == pytest.approx(expected, abs=1e-15, nan_ok=True)
    assert report["auroc"] == pytest.approx(np.nanmean(expected), abs=1e-15)
    assert report["pair_auroc"] == report.pooled.auroc == pytest.approx(pooled, abs=1e-15)
    assert report["auroc"] != report["pair_auroc"]


@settings(max_examples=examples(50), deadline=None)
@given(seed=st.integers(0, 10**6), kinds=st.integers(0, 3), items=st.integers(1, 8), queries=st.integers(0, 5))
def test_candidates_are_those_that_nothing_excludes(seed, kinds, items, queries):
    rng = np.random.default_rng(seed)
    codes = [(rng.integers(0, 3, queries), rng.integers(0, 3, items)) for _ in range(kinds)]
    ignored = [np.flatnonzero(rng.random(items) < 0.4).tolist() for _ in range(queries)]
    self_match = rng.integers(-1, items, queries)
    relevance = PairRelevance(
        Lists.none(queries), self_match.astype(np.int32), codes, Lists.of(ignored) if queries else Lists.none(0)
    )
    expected = [
        sum(
            j != self_match[i]
            and j not in ignored[i]
            and all(of_queries[i] != of_items[j] for of_queries, of_items in codes)
            for j in range(items)
        )
        for i in range(queries)
    ]
    assert relevance.candidates(items).tolist() == expected


PAIRS = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30).filter(
    lambda pairs: any(hit for _, hit in pairs)
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=PAIRS)
def test_it_is_the_share_of_pairs_in_the_right_order(options, pairs):
    positives = [score for score, hit in pairs if hit]
    negatives = [score for score, hit in pairs if not hit]
    right = sum((p > n) + (p == n) / 2 for p in positives for n in negatives)
    items = torch.tensor([[float(score)] for score, _ in pairs]).double()
    labels = [int(hit) for _, hit in pairs]
    with engine_options(**options):
        report = evaluate_retrieval(
            torch.ones(1, 1).double(), [1], items, labels, similarity="dot", metrics=KEYS, label_groups=None
        )
    expected = right / (len(positives) * len(negatives)) if negatives else math.nan
    assert [report["auroc"], report["pair_auroc"]] == pytest.approx([expected, expected], abs=1e-15, nan_ok=True)


@pytest.mark.parametrize(("ties", "expected"), [("expected", 0.5), ("optimistic", 1.0), ("pessimistic", 0.0)])
def test_a_collapsed_embedding_knows_nothing(ties, expected):
    report = evaluate_retrieval(torch.ones(12, 3), torch.arange(12) % 3, metrics=KEYS, ties=ties, label_groups=None)
    assert (report["auroc"], report["pair_auroc"]) == (expected, 0.5)


def test_ignored_items_are_no_negatives_and_items_that_are_not_in_the_gallery_are_never_found():
    items = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.5, 0.5], [0.0, 1.0]])
    relevance = Relevance.from_lists([[2], [0]], ignored=[[0], [1, 3]], gallery=4)
    report = evaluate_retrieval(items[:2], gallery=items, relevance=relevance, metrics=KEYS)
    assert report.per_query["auroc"].tolist() == [0.5, 1.0]
    judged = Relevance.from_judgements({"q": {"a": 1, "missing": 1}}, ["q"], ["a", "b", "c", "d"], unknown="ignore")
    report = evaluate_retrieval(items[:1], gallery=items, relevance=judged, metrics="auroc")
    assert report["auroc"] == 0.5


@pytest.mark.parametrize("count", [2, 3])
def test_it_is_the_same_in_several_processes_and_with_any_budget(count):
    rows, labels = clustered_items(120, 12, noise=1.5)
    groups = torch.arange(120) % 7
    keys = (*KEYS, "auc_pr", "macro_auroc")
    alone = evaluate_retrieval(rows, labels, query_groups=groups, metrics=keys)
    little = evaluate_retrieval(rows, labels, query_groups=groups, metrics=keys, memory_mb=0.1)
    assert [little[key] for key in keys] == [alone[key] for key in keys]

    def part(processes):
        own = torch.arange(120)[processes.rank :: processes.count]
        share = Share(processes, own)
        return evaluate_retrieval(rows[own], labels[own], query_groups=groups[own], metrics=keys, share=share)

    for report in in_threads(count, part):
        assert [report[key] for key in keys] == [alone[key] for key in keys]


def area_by_definition(scores, is_relevant):
    """The mean precision of the relevant pairs, each at its own score."""
    precisions = []
    for score in scores[is_relevant].tolist():
        accepted = is_relevant[scores >= score]
        precisions.append(int(accepted.sum()) / len(accepted))
    return math.fsum(precisions) / len(precisions)


@pytest.mark.parametrize("similarity", ["cosine", "hamming"])
def test_the_area_under_precision_and_recall_has_the_same_bits_with_any_room(similarity):
    rows, labels = clustered_items(90, 4, noise=2.0)
    rows = rows.sign() if similarity == "hamming" else rows.double()
    slow = BruteForce(rows.numpy(), labels.numpy(), similarity=similarity)
    expected = area_by_definition(np.concatenate(slow.scores), np.concatenate(slow.relevance))
    for options in ({}, *({"grid_size": size, "buffer_pairs": pairs} for size in (2, 7, 50) for pairs in (2, 300))):
        with engine_options(**options):
            settings = {"similarity": similarity, "label_groups": None}
            found = [evaluate_retrieval(rows, labels, metrics=keys, **settings) for keys in ("auc_pr", "pair_f1")]
        assert found[0]["auc_pr"] == expected
        for enclosure in (report.pooled.auc_pr for report in found):
            assert enclosure.low - 1e-12 <= expected <= enclosure.high + 1e-12
            assert enclosure.error > 0 or enclosure.value == expected


def test_a_pass_closes_as_many_scores_as_there_is_room_for_in_either_area():
    rows, labels = clustered_items(400, 2, noise=2.0)
    needed = math.ceil(200 * 199 / 2**12)  # of two classes, both pairs of two items once
    for keys in ("auc_pr", "pair_auroc", ("auc_pr", "pair_auroc")):
        with engine_options(grid_size=2**12, buffer_pairs=2**8):
            report = evaluate_retrieval(rows, labels, metrics=keys)
        assert needed <= report.pooled.passes <= needed + 4


def test_many_passes_are_announced_before_they_begin():
    rows, labels = clustered_items(2000, 2, noise=2.0)
    with engine_options(grid_size=2**14, buffer_pairs=2**8), warned(UserWarning, "passes", "memory_mb") as caught:
        report = evaluate_retrieval(rows, labels, metrics="pair_auroc")
    announced = int(re.search(r"(\d+) more passes", str(caught[0].message))[1])
    assert report.pooled.passes - 4 <= announced <= math.ceil(1000 * 999 / 2**14) + 1


@pytest.mark.parametrize("memory_mb", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_a_plan_foresees_the_passes(memory_mb):
    rows, labels = clustered_items(1000, 2, noise=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = evaluate_retrieval(rows, labels, metrics="auc_pr", memory_mb=memory_mb)
    planned = plan_evaluation(1000, 1000, rows.shape[1], relevant=499, memory_mb=memory_mb).area_passes
    assert planned / 1.5 <= report.pooled.passes <= 1.5 * planned + 3
    assert plan_evaluation(1600, 1600, 8, relevant=10).area_passes == 1


def test_both_areas_of_all_pairs_share_a_pass():
    rows, labels = clustered_items(1200, 100, noise=0.6)
    with engine_options(buffer_pairs=2**14):
        passes = [
            evaluate_retrieval(rows, labels, metrics=keys).pooled.passes
            for keys in (("auc_pr",), ("pair_auroc",), ("auc_pr", "pair_auroc"))
        ]
    assert passes == [2, 2, 2]
