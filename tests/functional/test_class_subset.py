"""A seeded part of the classes and of their items."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewshot_callbacks.functional import class_subset

labels_of_items = st.lists(st.sampled_from([-(2**62), -3, 0, 7, 8, 2**62]), max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.int64)
)
numbers = st.none() | st.integers(1, 8)


@given(labels_of_items, numbers, numbers, st.integers(0, 3))
def test_so_many_classes_and_so_many_items_of_each(labels, classes, items, seed):
    chosen = class_subset(labels, classes, items, seed)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    before, after = Counter(labels.tolist()), Counter(labels[chosen].tolist())
    assert len(after) == min(len(before), classes or 10**9)
    assert all(count == min(before[label], items or 10**9) for label, count in after.items())


@given(labels_of_items, st.integers(1, 5), st.integers(1, 5), st.integers(0, 3))
def test_more_hold_what_fewer_hold(labels, classes, items, seed):
    few = class_subset(labels, classes, items, seed).tolist()
    assert set(few) <= set(class_subset(labels, classes + 1, items, seed).tolist())
    assert set(few) <= set(class_subset(labels, classes, items + 2, seed).tolist())
    assert set(few) <= set(class_subset(labels, None, items, seed).tolist())


@given(labels_of_items, st.integers(1, 5), st.integers(0, 3), st.randoms())
def test_which_classes_are_drawn_depends_on_the_set_of_labels_alone(labels, classes, seed, random):
    drawn = set(labels[class_subset(labels, classes, seed=seed)].tolist())
    moved = labels.tolist() * 2
    random.shuffle(moved)
    again = torch.tensor(moved, dtype=torch.int64)
    assert set(again[class_subset(again, classes, seed=seed)].tolist()) == drawn


def test_items_and_classes_are_drawn_at_random():
    labels = torch.arange(10).repeat(8)
    seen = torch.stack([torch.bincount(class_subset(labels, 5, 4, seed), minlength=80) for seed in range(400)]).sum(0)
    assert 60 <= int(seen.min()) <= int(seen.max()) <= 140  # 100 each, give or take four standard deviations


@pytest.mark.parametrize("name", ["classes", "items_per_class"])
def test_none_of_something_is_refused(name):
    with pytest.raises(ValueError, match=rf"class_subset: {name}=0 must be at least 1"):
        class_subset(torch.arange(3), **{name: 0})
