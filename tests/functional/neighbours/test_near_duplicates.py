"""`near_duplicates` lists the pairs that comparing the exact scores of all pairs finds, on every road of the engine."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewshot_callbacks import near_duplicates
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
    min_score = float(vectors.to_user(np.quantile(scores, quantile, method="higher", keepdims=True)).item())
    first, second = pairs[:, scores[pairs[0], pairs[1]] >= vectors.from_user(min_score)]
    order = np.lexsort((second, first, -scores[first, second]))[:most]
    with engine_options(**road):
        found = near_duplicates(
            *(case["queries"], case.get("gallery")), min_score=min_score, similarity=case["similarity"], most=most,
            memory_mb=memory_mb,
        )  # fmt: skip
    assert (found.total, found.left_out) == (len(first), max(0, len(first) - most))
    assert np.array_equal(found.first, first[order])
    assert np.array_equal(found.second, second[order])
    assert np.array_equal(found.scores, vectors.to_user(scores[first[order], second[order]]))


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
