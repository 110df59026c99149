"""The first candidates of each query, and the highest pairs, are those of sorting the exact scores of all pairs."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.nearest import nearest_items, pairs_from
from fewshot_callbacks.engine.options import computing, engine_options
from tests.cases import made
from tests.engine.cases import PRECISIONS, SIMILARITIES, cases, engines
from tests.engine.oracles import codes_of, prepared, scores_of


def check_nearest(case, k, memory=10**8, own=None, **road):
    """Compare with a list of all candidates of each query, sorted by score and then by the number of the item."""
    truth = scores_of(case)
    with engine_options(**road), computing() as threads:
        vectors, relevance = prepared(case, threads)
        own = relevance.own if own is None else own
        found = nearest_items(vectors, own, codes_of(case), k, memory)
    for query, (items, scores, left_out) in enumerate(zip(*found, strict=True)):
        of_query, allowed = truth.scores[query], truth.candidate[query].copy()
        allowed[own[query]] &= own[query] < 0
        order = np.lexsort((np.arange(len(of_query)), -of_query))
        order = order[allowed[order]]
        missing = [-1] * (k - len(order))
        assert items.tolist() == [*order[:k], *missing]
        assert scores.tolist() == [*of_query[order[:k]], *[-np.inf] * len(missing)]
        assert left_out == (len(order) > k and (of_query[order[k:]] == of_query[order[k - 1]]).sum())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), engines(), st.sampled_from([1, 2, 5, 40, 200]))
def test_the_nearest_are_those_of_sorting_all(case, road, k):
    check_nearest(case, k, **road)


@pytest.mark.parametrize("precision", [None, *PRECISIONS])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_many_items_in_a_small_budget(similarity, precision):
    vectors, labels = made(300, 20, 16)
    case = {"queries": vectors, "query_labels": labels, "similarity": similarity}
    check_nearest(case, 3, memory=10**5, precision=precision, threads=2)
    check_pairs(case, 0.97, 300, memory=10**5, precision=precision, threads=2)
    check_pairs(case, 0.97, 10**5, memory=10**5, precision=precision, threads=2)


@pytest.mark.parametrize("k", [1, 7, 80])
def test_some_queries_of_a_set_are_not_their_own_neighbours(k):
    rows, own = torch.randn(80, 3).round(), np.array([0, 5, 5, 79], np.int32)
    case = {"queries": rows[own], "query_labels": torch.zeros(4), "gallery": rows, "gallery_labels": torch.zeros(80)}
    check_nearest(case | {"similarity": "cosine"}, k, own=own)


def check_pairs(case, quantile, most, memory=10**8, **road):
    """Compare with all pairs from a score on, the highest first, of equal ones the lower row and column."""
    scores = scores_of(case).scores
    pairs = np.indices(scores.shape).reshape(2, -1)
    if "gallery" not in case:
        pairs = pairs[:, pairs[0] < pairs[1]]
    of_pairs = scores[pairs[0], pairs[1]]
    threshold = float(np.quantile(scores, quantile, method="higher"))
    reached = pairs[:, of_pairs >= threshold]
    order = np.lexsort((reached[1], reached[0], -scores[reached[0], reached[1]]))[:most]
    with engine_options(**road), computing() as threads:
        rows, columns, found, total = pairs_from(prepared(case, threads)[0], threshold, most, memory)
    assert total == reached.shape[1]
    assert np.array_equal(rows, reached[0][order])
    assert np.array_equal(columns, reached[1][order])
    assert np.array_equal(found, scores[rows, columns])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), engines(), st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]), st.sampled_from([0, 1, 10, 100, 10**5]))
def test_pairs_from_a_score_on_are_those_of_comparing_all(case, road, quantile, most):
    plain = {name: rows for name, rows in case.items() if "ids" not in name and "groups" not in name}
    check_pairs(plain, quantile, most, **road)


@pytest.mark.parametrize("most", [0, 50, 3000])
@pytest.mark.parametrize("kind", ["distinct", "few", "equal"])
def test_more_pairs_than_are_held_at_once(kind, most):
    """Beside the listed ones 2**16 are held; then the lowest are dropped. Collapsed rows all have the highest score."""
    rows = {"distinct": torch.randn(520, 3), "few": torch.randn(520, 2).round(), "equal": torch.full((520, 3), 0.3)}
    case = {"queries": rows[kind], "query_labels": torch.arange(520), "similarity": "cosine"}
    check_pairs(case, 0.0, most, height=64, threads=2)
