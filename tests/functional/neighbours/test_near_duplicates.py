"""`near_duplicates` lists the pairs that comparing the exact scores of all pairs finds, on every road of the engine."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewshot_callbacks import Share, near_duplicates
from fewshot_callbacks.engine.options import engine_options
from tests.cases import clustered_items, examples, sampled_product
from tests.engine.cases import PRECISIONS, SIMILARITIES, cases, engines
from tests.engine.oracles import prepared, scores_of


def check(case, quantile, most, memory_mb=None, **road):
    """Compare with all pairs from a score on, the highest first, of equal ones the lower row and column."""
    (vectors, _), scores = prepared(case), scores_of(case).scores
    pairs = np.indices(scores.shape).reshape(2, -1)
    if "gallery" not in case:
        pairs = pairs[:, pairs[0] < pairs[1]]
    min_score = float(vectors.scale.to_user(np.quantile(scores, quantile, method="higher", keepdims=True)).item())
    first, second = pairs[:, scores[pairs[0], pairs[1]] >= vectors.scale.from_user(min_score)]
    order = np.lexsort((second, first, -scores[first, second]))[:most]
    with engine_options(**road):
        found = near_duplicates(
            *(case["queries"], case.get("gallery")), min_score=min_score, similarity=case["similarity"], most=most,
            memory_mb=memory_mb,
        )  # fmt: skip
    assert (found.total, found.unlisted_pairs) == (len(first), max(0, len(first) - most))
    assert np.array_equal(found.first, first[order])
    assert np.array_equal(found.second, second[order])
    assert np.array_equal(found.scores, vectors.scale.to_user(scores[first[order], second[order]]))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), engines(), st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]), st.sampled_from([0, 1, 10, 100, 10**5]))
def test_pairs_from_a_score_on_are_those_of_comparing_all(case, road, quantile, most):
    check(case, quantile, most, **road)


@pytest.mark.parametrize(("similarity", "precision"), sampled_product(SIMILARITIES, [None, *PRECISIONS], count=6))
def test_many_items_in_a_small_budget(similarity, precision):
    rows, labels = clustered_items(300, 20, 16)
    case = {"queries": rows, "query_labels": labels, "similarity": similarity}
    for most in (300, 10**5):
        check(case, 0.97, most, memory_mb=0.1, precision=precision, threads=2)


@pytest.mark.parametrize(("kind", "most"), [("distinct", 50), ("few", 3000), ("equal", 0), ("equal", 50)])
def test_more_pairs_than_are_held_at_once(kind, most):
    """Beside the listed ones 2**16 are held; then the lowest are dropped. Collapsed rows all have the highest score."""
    rows = {"distinct": torch.randn(520, 3), "few": torch.randn(520, 2).round(), "equal": torch.full((520, 3), 0.3)}
    case = {"queries": rows[kind], "query_labels": torch.arange(520), "similarity": "cosine"}
    check(case, 0.0, most, height=64, threads=2)


def test_the_same_tensor_as_both_sets_is_two_sets():
    a = torch.eye(3)
    assert near_duplicates(a, a).first.tolist() == [0, 1, 2]


@pytest.mark.parametrize("two", [False, True])
def test_items_of_one_id_or_group_are_no_pair(two):
    rows = torch.randint(-2, 3, (60, 4)).double()
    sets = {"query": rows, "gallery": torch.randint(-2, 3, (50, 4)).double()} if two else {"query": rows}
    columns = {
        f"{prefix}_{kind}": torch.randint(0, number, (len(of_set),))
        for prefix, of_set in sets.items()
        for kind, number in (("ids", 40), ("groups", 5))
    }
    found = near_duplicates(*sets.values(), min_score=4.0, similarity="dot", **columns)
    first = {
        prefix: [i for i, name in enumerate(ids) if name not in ids[:i]]
        for prefix in sets
        for ids in [columns[f"{prefix}_ids"].tolist()]
    }
    other = "gallery" if two else "query"
    expected = [
        (i, j)
        for i in first["query"]
        for j in first[other]
        if (two or i < j)
        and columns["query_ids"][i] != columns[f"{other}_ids"][j]
        and columns["query_groups"][i] != columns[f"{other}_groups"][j]
        and float(rows[i] @ sets[other][j]) >= 4.0
    ]
    assert sorted(zip(found.first.tolist(), found.second.tolist(), strict=True)) == expected
    assert found.total == len(expected) > 50


def test_a_pair_of_excluded_items_has_no_score_below_all_thresholds():
    found = near_duplicates(torch.eye(3), query_groups=[0, 0, 1], min_score=-1e300, similarity="dot")
    assert (found.first.tolist(), found.second.tolist(), found.total) == ([0, 1], [2, 2], 2)


def test_shuffled_places_in_one_process_name_the_pairs():
    """Collapsed rows, of which more pairs tie at the highest score than are listed."""
    places = torch.randperm(300)
    found = near_duplicates(torch.full((300, 3), 0.3), most=500, share=Share(query_places=places))
    pairs = [(i, j) for i in range(300) for j in range(i + 1, 300)][:500]
    assert list(zip(found.first.tolist(), found.second.tolist(), strict=True)) == pairs
