"""Class-balanced batches: P classes of K items, the same for any workers and processes, which share each batch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.data import ClassBalancedBatchSampler, EpisodicBatchSampler
from tests.data.trees import pretend

WORDS = ["owl", "heron", "owl", "wren", "heron", "owl", "wren", "heron", "wren"] * 4


@st.composite
def labelled(draw):
    """Labels of classes of 2 to 6 items in any order, and sizes of a batch that they can make."""
    counts = draw(st.lists(st.integers(2, 6), min_size=1, max_size=6))
    labels = draw(st.permutations([3 * c - 4 for c, count in enumerate(counts) for _ in range(count)]))
    return labels, draw(st.integers(1, len(counts))), draw(st.integers(2, min(counts)))


@settings(max_examples=60, deadline=None)
@given(labelled(), st.integers(0, 2**20), st.integers(0, 3))
def test_a_batch_holds_p_classes_of_k_different_items(given_labels, seed, epoch):
    labels, classes, items = given_labels
    made = [
        ClassBalancedBatchSampler(
            form, classes_per_batch=classes, items_per_class=items, batches=3, seed=seed, epoch=epoch
        )
        for form in (labels, torch.tensor(labels), np.array(labels, dtype=np.int32))
    ]
    drawn = [list(sampler) for sampler in made]
    assert drawn[0] == drawn[1] == drawn[2]
    assert len(drawn[0]) == len(made[0]) == 3
    for batch in drawn[0]:
        assert len(set(batch)) == len(batch) == classes * items
        found, counts = torch.tensor(labels)[batch].unique(return_counts=True)
        assert (len(found), counts.tolist()) == (classes, [items] * classes)


@settings(max_examples=40, deadline=None)
@given(labelled(), st.integers(1, 4))
def test_processes_share_each_batch_of_one_process(given_labels, world_size):
    labels, classes, items = given_labels
    world_size = min(world_size, classes)
    sizes = {"classes_per_batch": classes, "items_per_class": items, "batches": 2, "seed": 5}
    whole = list(ClassBalancedBatchSampler(labels, **sizes))
    with pytest.MonkeyPatch.context() as patch:
        shares = []
        for rank in range(world_size):
            pretend(patch, rank, world_size)
            sampler = ClassBalancedBatchSampler(labels, **sizes)
            shares.append(list(sampler))
            assert len(shares[-1]) == len(sampler) == 2
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert sorted(index for part in parts for index in part) == sorted(batch)
        assert max(map(len, parts)) - min(map(len, parts)) in (0, items)  # whole classes


def test_each_epoch_is_new_and_a_function_of_seed_and_epoch_for_any_workers() -> None:
    def make(**settings: int) -> ClassBalancedBatchSampler:
        return ClassBalancedBatchSampler(WORDS, classes_per_batch=2, items_per_class=3, **settings)

    one, same = make(), make()
    epochs = [list(one) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    torch.manual_seed(9)
    loader = DataLoader(TensorDataset(torch.arange(36)), batch_sampler=same, num_workers=2)
    assert [[batch.tolist() for (batch,) in loader] for _ in range(3)] == epochs
    one.set_epoch(1)
    assert list(one) == epochs[1]
    assert list(make(epoch=2)) == epochs[2]
    assert list(make(seed=1)) != epochs[0]
    assert len(one) == 36 // 6  # as many items as there are


def test_more_processes_than_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 0, 3)
    sampler = ClassBalancedBatchSampler(WORDS, classes_per_batch=2, items_per_class=2)
    with pytest.raises(ValueError, match=r"2 classes .* 3 processes .*classes_per_batch >= 3"):
        next(iter(sampler))


@pytest.mark.parametrize(
    ("labels", "sizes", "words"),
    [
        (WORDS, (2, 1), r"items_per_class=1: an item alone in its class has no relevant item.*items_per_class >= 2"),
        (WORDS, (0, 2), r"classes_per_batch=0.*classes_per_batch >= 1"),
        (WORDS, (4, 2), r"classes_per_batch=4, but the labels hold 3 classes.*classes_per_batch <= 3"),
        (WORDS, (2, 13), r"items_per_class=13, but class 'heron' has 12 items, the smallest of 3 .*_class <= 12"),
        (WORDS, (2, 2, 0), r"batches=0.*batches >= 1"),
        (WORDS, ("2", 2), "classes_per_batch='2' must be a whole number"),
        ([0.5, 1.5], (1, 2), "ClassBalancedBatchSampler"),
        ([0, 0, 1], (1, 2), r"class 'owl' has 1 item.*[Dd]rop"),
        ([], (1, 2), "Pass the labels of the data set"),
    ],
)
def test_what_cannot_be_drawn_is_said(as_users_run_it, labels, sizes, words) -> None:
    given_sizes = dict(zip(("classes_per_batch", "items_per_class", "batches"), sizes, strict=False))
    with pytest.raises(ValueError, match=words):
        ClassBalancedBatchSampler(labels, **given_sizes, class_names=("wren", "owl") if labels != WORDS else None)


def test_sizes_of_episodes_that_are_no_whole_numbers_are_refused(as_users_run_it):
    with pytest.raises(ValueError, match=r"shots is 2.5; expected a whole number"):
        EpisodicBatchSampler(WORDS, ways=2, shots=2.5, queries=1, episodes=4)
