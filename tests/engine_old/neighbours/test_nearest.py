"""The first candidates of each query are those of sorting the exact scores of all pairs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.neighbours import nearest_items
from fewshot_callbacks.engine.options import computing_on
from tests.cases import made
from tests.engine.cases import cases, engine, engines, prepared
from tests.engine.oracles import pair_keys


def exclusions_of(case):
    pairs = [
        (case["query_ids"], case["gallery_ids"]) if "query_ids" in case else None,
        (case["query_groups"], case.get("gallery_groups", case["query_groups"])) if "query_groups" in case else None,
    ]
    return tuple(pair for pair in pairs if pair is not None)


def sorted_lists(case, queries, k, positions=None):
    """Items, scores and what was left out, by sorting all candidates of each query."""
    keys, _, wanted = pair_keys(case)
    positions = np.arange(keys.shape[1]) if positions is None else positions.numpy()
    items, found, left_out = [], [], []
    for query in queries.tolist():
        allowed = np.flatnonzero(wanted[query])
        order = allowed[np.lexsort((positions[allowed], -keys[query, allowed]))]
        first = order[:k]
        missing = k - len(first)
        items.append(np.append(first, [-1] * missing))
        found.append(np.append(keys[query, first], [-np.inf] * missing))
        left_out.append(0 if missing else int((keys[query, order[k:]] == keys[query, first[-1]]).sum()))
    return np.array(items), np.array(found), np.array(left_out)


def check(case, queries, k, positions=None, memory=10**8):
    tiles, _ = prepared(case)
    with computing_on(torch.device("cpu")):
        got = nearest_items(tiles, queries, k, memory, exclusions=exclusions_of(case), positions=positions)
    items, keys, left_out = sorted_lists(case, queries, k, positions)
    np.testing.assert_array_equal(got.items.numpy(), items)
    np.testing.assert_array_equal(got.exact.numpy(), keys)
    np.testing.assert_array_equal(got.left_out.numpy(), left_out)


@settings(max_examples=20, deadline=None)
@given(
    case=cases(),
    road=engines(),
    kernel=st.sampled_from(["compiled", "compiled", "pytorch"]),
    k=st.sampled_from([1, 2, 5, 40, 200]),
    seed=st.integers(0, 1000),
    shuffled=st.booleans(),
)
def test_agrees_with_sorting_all_exact_scores(case, road, kernel, k, seed, shuffled):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(len(case["queries"]), (7,), generator=generator)
    positions = torch.randperm(2 * len(case.get("gallery", case["queries"])), generator=generator)
    positions = positions[: len(positions) // 2] if shuffled else None
    with engine(kernel, **road):
        check(case, queries, k, positions)


@pytest.mark.parametrize("precision", [None, "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
def test_many_items_in_a_small_budget(similarity, precision):
    vectors, labels = made(300, 20, 16)
    case = {"queries": vectors, "query_labels": labels, "similarity": similarity}
    with engine(precision=precision, threads=2):
        check(case, torch.arange(300), 3, memory=10**5)
