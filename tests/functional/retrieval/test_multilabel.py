"""Items with several labels each: against loops, one label each is the usual evaluation, and many are no overflow."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional import evaluate_retrieval
from tests.cases import examples
from tests.functional.brute_force import rank_metrics
from tests.functional.retrieval.cases import check_all_metrics, retrieval_cases
from tests.messages import refused


@settings(max_examples=examples(100), deadline=None)
@given(retrieval_cases(("hamming", "cosine", "dot", "euclidean"), several=True), st.integers(1, 6))
def test_values_are_those_of_all_orders_written_out(case, k):
    check_all_metrics(case, k)


@pytest.mark.parametrize("similarity", ["hamming", "cosine"])
def test_of_one_label_each_it_is_the_ordinary_evaluation(similarity):
    labels, groups, codes = torch.randint(0, 5, (90,)), torch.randint(0, 30, (90,)), torch.randn(90, 16).sign()
    labels[:2] = torch.tensor([5, 6])  # without a match
    settings = {"similarity": similarity, "metrics": tuple(rank_metrics(7))}
    settings |= {"query_groups": groups[:30], "gallery_groups": groups[30:]}
    settings |= {"query_ids": torch.arange(30), "gallery_ids": torch.arange(60)}
    of_labels, of_targets = (
        (codes[:30], y[:30], codes[30:], y[30:]) for y in (labels, torch.nn.functional.one_hot(labels))
    )
    one = evaluate_retrieval(*of_labels, **settings)
    for memory_mb in (512, 0.02):  # many blocks
        several = evaluate_retrieval(*of_targets, memory_mb=memory_mb, **settings)
        assert several.values == pytest.approx(one.values, abs=1e-12)
        for name, interval in several.intervals.items():
            assert interval == pytest.approx(one.intervals[name], abs=1e-12)
        for name in ("queries_without_match", "queries_with_ties", "notes"):
            assert getattr(several, name) == getattr(one, name)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"query_labels": torch.ones(2, 2)}, ("3 queries", "2 query_labels")),
        ({"gallery": torch.ones(1, 2), "gallery_labels": torch.ones(1, 3)},
         ("query_labels", "zeros and ones", "2 labels", "gallery_labels", "3 labels")),
        ({"gallery": torch.ones(1, 2), "gallery_labels": ["owl"]},
         ("query_labels", "zeros and ones", "2 labels", "gallery_labels strings")),
        ({"metrics": ("mAP", "macro_mAP", "grouped_recall@1", "prototype_accuracy")},
         ("macro_mAP, grouped_recall@1, prototype_accuracy", "labels", "relevance")),
        ({"label_groups": [[0, 1], [2, 3]]}, ("label_groups", "labels", "relevance")),
    ],
)  # fmt: skip
def test_labels_that_do_not_fit_and_metrics_of_one_label_are_refused(change, facts, as_users_run_it):
    with refused(ValueError, "evaluate_retrieval", *facts):
        evaluate_retrieval(**({"queries": torch.ones(3, 2), "query_labels": torch.ones(3, 2)} | change))


LABELS = (1, 2, 30, 54, 1022, 1023, 1024, 1074, 2500)


@settings(max_examples=examples(40), deadline=None)
@given(
    grades=st.lists(st.sampled_from([0, *LABELS]) | st.integers(0, max(LABELS)), min_size=1, max_size=6),
    tied=st.booleans(),
    k=st.integers(1, 6),
)
def test_any_number_of_shared_labels_equals_rational_arithmetic(grades, tied, k):
    """The query has all labels, candidate j the first `grades[j]`: j shares so many, and lies further away the larger j."""
    targets = (torch.arange(max(LABELS)) < torch.tensor(grades)[:, None]).long()
    assume(any(grades))
    gallery = torch.ones(len(grades), 1) if tied else torch.arange(len(grades)).float()[:, None]
    queries = torch.zeros(1, 1), torch.ones(1, max(LABELS), dtype=torch.int64)
    report = evaluate_retrieval(*queries, gallery, targets, similarity="euclidean", metrics=f"ndcg@{k}")
    gains = [Fraction(2**grade - 1) for grade in grades]
    discounts = [1 / Fraction(math.log2(rank + 1)) for rank in range(1, min(k, len(grades)) + 1)]
    mean = sum(gains) / len(gains)
    found = sum(d * (mean if tied else gain) for d, gain in zip(discounts, gains, strict=False))
    best = sum(d * gain for d, gain in zip(discounts, sorted(gains, reverse=True), strict=False))
    assert report.per_query[f"ndcg@{k}"].item() == pytest.approx(float(found / best), rel=1e-13, abs=1e-300)
