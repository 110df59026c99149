"""Exact scores of relevant pairs against all pairs of equal labels; layouts that keep to the budget."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine import relevant_scores as relevant_keys
from fewshot_callbacks.engine.budget import choose_layout
from fewshot_callbacks.engine.pooled.intervals import inside_any, merged
from fewshot_callbacks.engine.relevant_scores import RelevantScores
from tests.engine.cases import KINDS, LABELS, labels_of, prepared, vectors

SIMILARITIES = ("cosine", "dot", "euclidean")


def all_keys(tiles, candidates, same_set):
    """The obvious way: the keys of all pairs of equal labels."""
    rows, columns = candidates.query_order, candidates.gallery_order
    keys = tiles.exact_scores(rows, columns)
    relevant = candidates.query_class[:, None] == candidates.gallery_class
    if same_set:
        relevant &= rows[:, None] != columns
    return np.sort(keys[relevant].numpy())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_keys_in_some_stretches_are_exact_and_the_others_lie_in_their_gaps(data):
    n, dim = data.draw(st.integers(2, 70)), data.draw(st.sampled_from([1, 3, 140]))
    kind, similarity = data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(SIMILARITIES))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    labels = torch.from_numpy(labels_of(data.draw(st.sampled_from(LABELS)), n))
    case = {"queries": torch.from_numpy(vectors(kind, n, dim).astype(dtype)), "query_labels": labels}
    same_set = data.draw(st.booleans())
    if not same_set:
        case |= {
            "gallery": torch.from_numpy(vectors(kind, n, dim, gallery=True).astype(dtype)),
            "gallery_labels": labels.flip(0),
        }
    tiles, candidates = prepared(case | {"similarity": similarity})
    keys = all_keys(tiles, candidates, same_set)
    at = st.sampled_from(keys.tolist()) if len(keys) else st.just(0.0)
    ends = data.draw(st.lists(st.tuples(at, st.sampled_from([0.0, 1e-12, 1e-6, 0.1])), min_size=1, max_size=5))
    low = np.sort(np.array([end for end, _ in ends]))
    intervals = merged(low, low + np.array([width for _, width in ends]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relevant_keys, "SCREENED_ROWS", data.draw(st.sampled_from([3, 128])))
        patch.setattr(relevant_keys, "SCREENED_COLUMNS", data.draw(st.sampled_from([5, 4096])))
        some = RelevantScores(tiles, candidates, 10**8, data.draw(st.integers(1, 3)), repeats=False)
        assert some.compiled
        parts = list(some.near(intervals))
    found = np.concatenate([part[0].numpy() for part in parts])
    weights = np.concatenate([part[1].numpy() for part in parts])
    inside = inside_any(found, intervals)
    wanted = inside_any(keys, intervals)
    assert np.sort(found[inside]).tolist() == keys[wanted].tolist()
    assert (weights[inside] == 1).all()

    def in_gaps(values, amounts):
        return np.bincount(np.searchsorted(intervals[:, 0], values), amounts, len(intervals) + 1).tolist()

    assert in_gaps(found[~inside], weights[~inside]) == in_gaps(keys[~wanted], np.ones((~wanted).sum()))


@pytest.mark.parametrize("many", [0.0, 1.0])
def test_where_most_are_near_all_keys_are_made(many):
    queries, labels = torch.randn(600, 8), torch.arange(600) % 2
    tiles, candidates = prepared({"queries": queries, "query_labels": labels, "similarity": "cosine"})
    keys = all_keys(tiles, candidates, same_set=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relevant_keys, "MANY_NEAR", many)
        parts = list(RelevantScores(tiles, candidates, 10**8, 2, repeats=False).near(np.array([[-0.5, 0.5]])))
    found = np.concatenate([part[0].numpy() for part in parts])
    weights = np.concatenate([part[1].numpy() for part in parts])
    assert weights.sum() == len(keys)
    inside = np.abs(found) <= 0.5
    assert np.sort(found[inside]).tolist() == keys[np.abs(keys) <= 0.5].tolist()
    assert (len(found) > inside.sum() + 2) == (many == 0)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_many_relevant_items_leave_room_for_many_queries(threads):
    layout = choose_layout(512 * 10**6, 60_000, 60_000, 512, 6000, threads=threads)
    assert layout.batch >= 1000
    assert layout.columns >= 4 * layout.rows or threads == 16
    assert layout.bytes <= 512 * 10**6


@pytest.mark.parametrize("memory_mb", [64, 512])
@pytest.mark.parametrize("relevant", [50, 6000])
def test_whole_tiles_fit_the_budget_too(memory_mb, relevant):
    layout = choose_layout(memory_mb * 10**6, 60_000, 60_000, 512, relevant, whole_tiles=True)
    assert 48 * layout.rows * layout.columns <= memory_mb * 10**6 / 4
