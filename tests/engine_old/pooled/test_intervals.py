"""Intervals of scores and bins of thresholds against loops."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fewshot_callbacks.engine.pooled.bins import ThresholdBins
from fewshot_callbacks.engine.pooled.intervals import distinct, histogram, inside_any, merged
from fewshot_callbacks.functional.retrieval.threshold_rules import likely_best_f1

ENDS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=12)


def ordered(ends):
    low, length = np.array(sorted(ends), dtype=float).reshape(-1, 2).T
    return low, low + length


@given(ENDS)
def test_merged_stretches_hold_the_same_keys_and_do_not_touch(ends):
    low, high = ordered(ends)
    intervals = merged(low, high)
    keys = np.arange(-2, 40, 0.5)
    inside = [bool(((low <= key) & (key <= high)).any()) for key in keys]
    assert inside_any(keys, intervals).tolist() == inside
    assert (intervals[1:, 0] > intervals[:-1, 1]).all()


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 2**40)), max_size=30))
def test_distinct_keys_and_how_many_pairs_have_them(pairs):
    keys, weights = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    found, amount = distinct(keys.astype(float), weights)
    assert found.tolist() == sorted(set(keys.tolist()))
    assert amount.tolist() == [weights[keys == key].sum() for key in found]
    assert distinct(keys.astype(float), None)[1].tolist() == [(keys == key).sum() for key in found]
    assert histogram(keys + 3, weights, 7).tolist() == [weights[keys == key].sum() for key in range(-3, 4)]


def test_the_likely_cells_are_those_around_the_highest_f1():
    positives = np.full(20, 10)
    tp = positives[::-1].cumsum()[::-1]
    fp = np.array([2000 * math.exp(-0.4 * i) for i in range(20)], dtype=np.int64)
    keys = np.arange(20.0)
    cells = ThresholdBins(
        keys, keys + 1, np.zeros(20, bool), positives, tp, fp - fp // 50, fp + fp // 50, fp * 0, 200, 5000
    )
    f1 = 2 * (tp - 5) / (tp - 5 + fp + 200)
    best = int(f1.argmax())
    assert 3 < best < 17
    assert likely_best_f1(cells, np.arange(20)).tolist() == np.argsort(-f1, kind="stable").tolist()
    assert likely_best_f1(cells, np.array([best - 2, best, best + 3]))[0] == best
