"""Relevance as it is given: one road for labels, judgements, grades, ignored items and several labels an item."""

import math

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional import Relevance, Share, evaluate_retrieval
from tests.thread_processes import in_threads

METRICS = (
    *("mAP", "map@r", "r_precision", "mrr", "mrr@3", "recall@1", "recall@5", "ir_recall@4", "map@5_found", "minp"),
    *("precision@3", "ndcg@4", "ap_trapezoid", "precision", "recall", "f1", "threshold", "recall@precision0.3", "eer"),
    "auc_pr",
)


def dcg(gains, k):
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:k]))


def assert_equal(one, other):
    for name in ("values", "intervals", "queries_without_match", "queries_with_ties", "decision", "at_precision"):
        assert repr(getattr(one, name)) == repr(getattr(other, name)), name  # NaN is NaN
    for name, values in one.per_query.items():
        assert torch.equal(values.nan_to_num(-1), other.per_query[name].nan_to_num(-1)), name


def a_set(seed, n=60, dim=4, classes=7):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.rint(2 * rng.normal(size=(n, dim))).astype(np.float32)), rng.integers(0, classes, n)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([None, 15]), st.booleans(), st.integers(1, 3))
def test_lists_of_classes_are_labels(seed, two, max_queries, groups, count):
    """Every value, interval and operating point to the last bit, whichever process holds what."""
    embeddings, labels = a_set(seed)
    gallery, gallery_labels = a_set(seed + 1, 50)
    others, rng = (gallery_labels if two else labels), np.random.default_rng(seed)
    lists = [np.flatnonzero(others == label).tolist() for label in labels]
    relevance = Relevance.from_lists(lists, gallery=50 if two else None, clusters=labels)
    sets = {"embeddings": embeddings} | ({"gallery": gallery} if two else {})
    if groups:
        sets["query_groups"] = torch.arange(60) % 20
        sets |= {"gallery_groups": torch.arange(50) % 20} if two else {}
    named = {"labels": labels} | ({"gallery_labels": gallery_labels} if two else {})
    options = {"metrics": METRICS, "max_queries": max_queries}
    truth = evaluate_retrieval(**sets, **named, **options)
    assert_equal(truth, evaluate_retrieval(**sets, relevance=relevance, **options))
    own, held = (rng.integers(0, count, size) for size in (60, 50))

    def work(processes):
        mine, theirs = np.flatnonzero(own == processes.rank), np.flatnonzero(held == processes.rank)
        rows = {name: rows[theirs if name.startswith("gallery") else mine] for name, rows in sets.items()}
        share = Share(processes, mine, theirs if two else None)
        return evaluate_retrieval(**rows, relevance=relevance, share=share, **options)

    for report in in_threads(count, work):
        assert_equal(truth, report)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6), st.booleans(), st.sampled_from(["expected", "optimistic", "pessimistic"]),
    st.sampled_from(["cosine", "hamming"]), st.booleans(),
)  # fmt: skip
def test_label_sets_in_any_form_are_the_same(seed, two, ties, similarity, groups):
    rng = np.random.default_rng(seed)
    embeddings, gallery = (torch.from_numpy(rng.integers(0, 2, (n, 5)) * 2.0 - 1) for n in (40, 30))
    targets, others = (torch.from_numpy((rng.random((n, 6)) < 0.3).astype(np.int64)) for n in (40, 30))
    more = (gallery, others) if two else (None, None)
    metrics = ("mAP", "map@r", "recall@1", "precision@3", "ndcg@3", "ndcg@20", "ndcg@100", "ndcg@3_linear")
    options = {"metrics": metrics, "ties": ties, "similarity": similarity}
    if groups:
        options |= {"query_groups": torch.arange(40) % 9} | ({"gallery_groups": torch.arange(30) % 9} if two else {})
    truth = evaluate_retrieval(embeddings, targets, *more, **options)
    sparse = [None if side is None else scipy.sparse.csr_matrix(side.numpy()) for side in (targets, more[1])]
    lists = [
        None if side is None else [row.nonzero().flatten().tolist() for row in side] for side in (targets, more[1])
    ]
    for sides in ((targets, more[1]), sparse, lists):
        report = evaluate_retrieval(embeddings, gallery=more[0], relevance=Relevance.from_label_sets(*sides), **options)
        assert dict(report.values) == dict(truth.values)
        for name in metrics:
            assert torch.equal(report.per_query[name].nan_to_num(-1), truth.per_query[name].nan_to_num(-1))
        assert report.intervals == truth.intervals


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([1, 2]))
def test_judgements_are_those_of_loops_over_all_documents(seed, k, at_least):
    rng = np.random.default_rng(seed)
    queries, documents = rng.normal(size=(6, 3)), rng.normal(size=(15, 3))
    names, ids = [f"q{n}" for n in range(6)], [*range(100, 115)]
    judged = {
        name: {ids[item]: int(rng.integers(0, 4)) for item in rng.choice(15, 6, replace=False)} for name in names[1:]
    }
    relevance = Relevance.from_judgements(judged, names, ids, at_least=at_least)
    metrics = ("mAP", "mrr", f"ndcg@{k}", f"ndcg@{k}_linear", f"ir_recall@{k}")
    report = evaluate_retrieval(queries, gallery=documents, relevance=relevance, similarity="dot", metrics=metrics)
    for row, name in enumerate(names):
        order = np.argsort(-(documents @ queries[row]))
        grades = [judged.get(name, {}).get(ids[item], 0) for item in order]
        grades = [grade if grade >= at_least else 0 for grade in grades]
        hits = [rank for rank, grade in enumerate(grades, 1) if grade]
        values = {key: float(report.per_query[key][row]) for key in metrics}
        if not hits:
            assert all(map(math.isnan, values.values()))
            continue
        wanted = {
            "mAP": sum(n / rank for n, rank in enumerate(hits, 1)) / len(hits),
            "mrr": 1 / hits[0],
            f"ir_recall@{k}": sum(rank <= k for rank in hits) / len(hits),
        }
        for key, gain in ((f"ndcg@{k}", lambda grade: 2**grade - 1), (f"ndcg@{k}_linear", lambda grade: grade)):
            gains = [*map(gain, grades)]
            wanted[key] = dcg(gains, k) / dcg(sorted(gains, reverse=True), k)
        assert values == pytest.approx(wanted, abs=1e-12)
    assert report.queries_without_match >= 1


def test_ignored_items_take_up_no_rank():
    embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [1.0, 0.3]])
    gallery = embeddings[1:]
    junk = Relevance.from_lists([[1]], ignored=[[0]], gallery=3)
    assert evaluate_retrieval(embeddings[:1], gallery=gallery, relevance=junk, metrics="mrr").values["mrr"] == 1.0
    alone = Relevance.from_lists([[1]], gallery=3)
    assert evaluate_retrieval(embeddings[:1], gallery=gallery, relevance=alone, metrics="mrr").values["mrr"] == 0.5


def test_what_is_there_of_it():
    judged = (["a", "a", "b", "z"], [1, 2, 1, 1], [1, 0, 3, 1])
    relevance = Relevance.from_judgements(judged, ["b", "a"], [2, 1], unknown="ignore")
    assert repr(relevance) == "Relevance(2 queries, 2 gallery items, 2 relevant pairs, 0 ignored)"
    assert relevance.unknown == 1
    assert (relevance.relevant.items.tolist(), relevance.grades.tolist()) == ([1, 1], [3.0, 1.0])
    assert (
        repr(Relevance.from_label_sets([{"a"}, {"a"}]))
        == "Relevance(2 queries in one set, 2 relevant pairs, 0 ignored)"
    )
    report = evaluate_retrieval(torch.eye(3), relevance=Relevance.from_lists([[1], [0], []]))
    assert str(report).startswith("3 queries, 3 gallery items\nmAP")
    assert "1 of 3 queries have no match" in report.notes[0]


JUDGED = {"a": {"x": 1}}
WRONG = [
    (
        lambda: Relevance.from_judgements(JUDGED, ["b"], ["x"]),
        r"no query has the ids 'a' \(1 in all\) of the judgements",
    ),
    (lambda: Relevance.from_judgements(JUDGED, ["a"], ["y"]), r"no item has the ids 'x' .* unknown='ignore'"),
    (lambda: Relevance.from_judgements(JUDGED, ["a", "a"], ["x"]), "query_ids holds 'a' in rows 0 and 1"),
    (lambda: Relevance.from_judgements(JUDGED, ["a"], ["x"], unknown="?"), r"unknown='\?'. Pass 'error' or 'ignore'"),
    (lambda: Relevance.from_judgements({"a": {"x": -1}}, ["a"], ["x"]), "1 grades are wrong: -1 is negative"),
    (lambda: Relevance.from_judgements({"a": {"x": math.inf}}, ["a"], ["x"]), "inf is no finite positive number"),
    (lambda: Relevance.from_judgements({"a": {"x": "much"}}, ["a"], ["x"]), "the grade 'much' is no number"),
    (lambda: Relevance.from_judgements((["a", "a"], ["x", "x"], [1, 2]), ["a"], ["x"]), "judged twice with two grades"),
    (lambda: Relevance.from_judgements((["a"], ["x", "x"]), ["a"], ["x"]), "judgements of lengths 1, 2 must be"),
    (
        lambda: Relevance.from_lists([[0]], [[0]], gallery=2),
        "1 pairs are both relevant and ignored, such as query 0 and item 0",
    ),
    (lambda: Relevance.from_lists([[2]], gallery=2), r"relevant\[0\] holds 2, but there are 2 gallery items"),
    (lambda: Relevance.from_lists([[0.5]], gallery=2), r"relevant\[0\] holds float64. Pass indices"),
    (lambda: Relevance.from_lists([[1, 1]], gallery=2), r"relevant\[0\] holds an item twice"),
    (lambda: Relevance.from_lists([[1]], [], gallery=2), "1 lists of relevant items, but 0 of ignored ones"),
    (lambda: Relevance.from_lists([[1]], gallery=2, grades=[[]]), "grades must have the lengths"),
    (lambda: Relevance.from_lists([[1]], gallery=2, clusters=[0, 1]), r"clusters of shape \(2,\)"),
    (lambda: Relevance.from_label_sets(torch.tensor([[0, 2]])), "1 of 2 entries of targets are neither 0 nor 1"),
    (lambda: Relevance.from_label_sets([[0, 0]]), r"targets\[0\] holds a label twice"),
    (lambda: Relevance.from_label_sets(torch.ones(2, 3), torch.ones(2, 4)), "targets have 3 labels, gallery_targets 4"),
    (lambda: Relevance.from_label_sets(torch.ones(3)), r"targets have shape \(3,\)"),
]


@pytest.mark.parametrize(("make", "words"), WRONG)
def test_what_is_wrong_is_said(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"labels": [0, 0, 1]}, "relevance and labels both say who is relevant"),
        ({"relevance": None}, "labels is a NoneType; expected a list"),
        ({"relevance": Relevance.from_lists([[1], [0]])}, "2 queries in one set.* but there are 3 queries in one set"),
        (
            {"relevance": Relevance.from_lists([[1], [0], []], gallery=3)},
            "3 gallery items.* but there are 3 queries in one",
        ),
        ({"relevance": Relevance.from_lists([[], [], []])}, "none of the 3 queries has a relevant candidate"),
        ({"metrics": ("mAP", "macro_mAP")}, "macro_mAP cannot be computed where .* relevance is given"),
        ({"metrics": "prototype_accuracy"}, "prototype_accuracy cannot be computed"),
    ],
)
def test_what_does_not_fit_an_evaluation_is_said(arguments, words):
    with pytest.raises(ValueError, match=words):
        evaluate_retrieval(torch.eye(3), **{"relevance": Relevance.from_lists([[1], [0], []])} | arguments)
