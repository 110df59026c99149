"""Pairs above a score are those of comparing the exact scores of all pairs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fewshot_callbacks.engine.neighbours.pairs_above as module
from fewshot_callbacks.engine.neighbours import find_pairs_above
from fewshot_callbacks.engine.options import computing_on
from tests.cases import made
from tests.engine.cases import cases, engine, engines, prepared
from tests.engine.oracles import pair_keys


def check(case, key, most, memory=10**8):
    keys, _, _ = pair_keys(case)
    above = keys >= key
    if "gallery" not in case:
        above &= np.arange(len(keys))[:, None] < np.arange(len(keys))[None, :]
    rows, columns = above.nonzero()
    order = np.lexsort((columns, rows, -keys[rows, columns]))[:most]
    tiles, _ = prepared(case)
    with computing_on(torch.device("cpu")):
        got = find_pairs_above(tiles, key, most, memory)
    assert got.total == len(rows)
    np.testing.assert_array_equal(got.rows.numpy(), rows[order])
    np.testing.assert_array_equal(got.columns.numpy(), columns[order])
    np.testing.assert_array_equal(got.exact.numpy(), keys[rows, columns][order])


@settings(max_examples=20, deadline=None)
@given(
    case=cases(),
    road=engines(),
    kernel=st.sampled_from(["compiled", "compiled", "pytorch"]),
    quantile=st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]),
    most=st.sampled_from([0, 1, 10, 100, 10**5]),
    buffered=st.sampled_from([0, 7, 2**16]),
)
def test_agrees_with_comparing_all_exact_scores(case, road, kernel, quantile, most, buffered):
    case = {name: value for name, value in case.items() if "ids" not in name and "groups" not in name}
    keys, _, _ = pair_keys(case)
    with pytest.MonkeyPatch.context() as patch, engine(kernel, **road):
        patch.setattr(module, "BUFFERED", buffered)
        check(case, float(np.quantile(keys, quantile, method="higher")), most)


@pytest.mark.parametrize("precision", [None, "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_many_items_in_a_small_budget(monkeypatch, similarity, precision):
    monkeypatch.setattr(module, "BUFFERED", 100)
    vectors, labels = made(300, 20, 16)
    case = {"queries": vectors, "query_labels": labels, "similarity": similarity}
    key = float(np.quantile(pair_keys(case)[0], 0.97))
    with engine(precision=precision, threads=2):
        check(case, key, 300, memory=10**5)
        check(case, key, 10**5, memory=10**5)


def test_a_collapsed_set_is_counted_without_an_exact_score_of_each_pair(monkeypatch):
    made_scores = []
    of = module.ExactPairs.of
    monkeypatch.setattr(
        module.ExactPairs, "of", lambda self, rows, items: (made_scores.append(len(rows)), of(self, rows, items))[1]
    )
    monkeypatch.setattr(module, "BUFFERED", 0)
    case = {"queries": torch.full((600, 3), 0.3), "query_labels": torch.arange(600), "similarity": "cosine"}
    with engine(layout=(64, 64, 10**6)):
        tiles, _ = prepared(case)
        got = find_pairs_above(tiles, 0.5, 10, 10**8)
    assert got.total == 600 * 599 // 2
    assert got.rows.tolist() == [0] * 10
    assert got.columns.tolist() == list(range(1, 11))
    assert sum(made_scores) < got.total / 2
