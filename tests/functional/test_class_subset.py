"""A seeded part of the classes and of their items."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from fewshot_callbacks.functional import class_subset

labels_of_items = st.lists(st.sampled_from([-(2**62), -3, 0, 7, 8, 2**62]), max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.int64)
)
numbers = st.none() | st.integers(1, 8)


@given(labels_of_items, numbers, numbers, st.integers(0, 3), st.randoms(use_true_random=False))
def test_so_many_classes_and_items_of_each_within_what_more_would_hold(labels, classes, items, seed, random):
    chosen = class_subset(labels, classes, items, seed).tolist()
    assert chosen == sorted(set(chosen))
    before, after = Counter(labels.tolist()), Counter(labels[chosen].tolist())
    assert len(after) == min(len(before), classes or 10**9)
    assert all(count == min(before[label], items or 10**9) for label, count in after.items())
    for more in ((classes and classes + 1, items), (classes, items and items + 2), (None, items)):
        assert set(chosen) <= set(class_subset(labels, *more, seed).tolist())
    # which classes are drawn depends on the set of labels alone
    again = torch.tensor(random.sample(labels.tolist() * 2, 2 * len(labels)), dtype=torch.int64)
    assert set(again[class_subset(again, classes, seed=seed)].tolist()) == set(after)


def test_items_and_classes_are_drawn_at_random():
    labels = torch.arange(10).repeat(8)
    seen = torch.stack([torch.bincount(class_subset(labels, 5, 4, seed), minlength=80) for seed in range(400)]).sum(0)
    assert 60 <= int(seen.min()) <= int(seen.max()) <= 140  # 100 each, give or take four standard deviations
