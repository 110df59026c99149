"""The batch samplers: episodes and class-balanced batches, the same for any workers and ranks, fresh at each epoch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.data import ClassBalancedBatchSampler, EpisodicBatchSampler
from fewshot_callbacks.functional.episodes import sample_episodes
from tests.cases import examples
from tests.data.trees import pretend_to_be_rank
from tests.messages import refused

LABELS = torch.tensor([3, 1, 4, 1, 5]).repeat(12)  # 12 images of 3, 4, 5 and 24 of 1
WORDS = ["owl", "heron", "owl", "wren", "heron", "owl", "wren", "heron", "wren"] * 4
SIZES = {"ways": 3, "shots": 2, "queries": 4}
ITEMS = TensorDataset(torch.arange(60))


def episodes(number: int = 5, **settings) -> EpisodicBatchSampler:
    return EpisodicBatchSampler(LABELS, **{**SIZES, "episodes": number, **settings})


def balanced(classes: int = 2, items: int = 3, labels=WORDS, **settings) -> ClassBalancedBatchSampler:
    return ClassBalancedBatchSampler(labels, classes_per_batch=classes, items_per_class=items, **settings)


@pytest.mark.parametrize("make", [episodes, balanced])
def test_training_batches_are_fresh_at_each_epoch_and_a_function_of_seed_and_epoch_for_any_workers(make) -> None:
    one, same = make(), make()
    epochs = [list(one) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    torch.manual_seed(99)
    workers = DataLoader(ITEMS, batch_sampler=same, num_workers=1)
    assert [[batch.tolist() for (batch,) in workers] for _ in range(2)] == epochs[:2]
    assert list(make(seed=1)) != epochs[0]
    one.set_epoch(1)
    assert [list(one), list(one), list(make(epoch=2))] == [epochs[1], epochs[2], epochs[2]]


def test_fixed_batches_are_class_major_with_support_first_in_every_epoch() -> None:
    sampler = episodes(fixed=True, seed=7)
    expected = sample_episodes(LABELS, **SIZES, episodes=5, seed=7)
    batches = [episode.flatten().tolist() for episode in expected.indices]
    assert [list(sampler), list(sampler)] == [batches, batches]
    assert sampler.hash == sampler.episode_list.hash == expected.hash
    labels = LABELS[torch.tensor(batches)].unflatten(1, (3, 6))
    assert (labels == labels[:, :, :1]).all()


@pytest.mark.parametrize("fixed", [True, False])
def test_several_episodes_in_a_batch_are_those_of_the_list(fixed: bool) -> None:
    sampler = episodes(7, fixed=fixed, episodes_per_batch=3)
    listed = sampler.episode_list.indices.flatten(1)
    assert len(sampler) == 2  # the seventh is left out
    assert list(sampler) == [listed[:3].flatten().tolist(), listed[3:6].flatten().tolist()]
    for number, facts in ((8, (7, "episodes >= 8")), (0, (0, "episodes_per_batch >= 1"))):
        with refused(ValueError, *facts):
            episodes(7, fixed=fixed, episodes_per_batch=number)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("fixed", [True, False])
def test_each_rank_takes_its_part_of_the_episodes(
    monkeypatch: pytest.MonkeyPatch, world_size: int, fixed: bool
) -> None:
    lengths = []
    for rank in range(world_size):
        pretend_to_be_rank(monkeypatch, rank, world_size)
        sampler = episodes(7, fixed=fixed)
        all_episodes = sampler.episode_list.indices.flatten(1).tolist()
        share = list(sampler)
        assert share == all_episodes[rank::world_size][: len(share)]
        assert len(sampler) == len(share)
        lengths.append(len(share))
    assert lengths == [len(range(rank, 7, world_size)) if fixed else 7 // world_size for rank in range(world_size)]


@pytest.mark.parametrize(
    ("make", "processes", "facts"),
    [
        (lambda: episodes(7), 8, (7, "8 processes", "episodes >= 8")),
        (lambda: episodes(12, episodes_per_batch=2), 8, (12, "8 processes", 2, "episodes >= 16")),
        (balanced, 3, ("ClassBalancedBatchSampler", 2, "3 processes", "classes_per_batch >= 3")),
    ],
)
def test_training_is_refused_if_a_process_would_have_no_episode_or_class(
    monkeypatch: pytest.MonkeyPatch, make, processes, facts
) -> None:
    pretend_to_be_rank(monkeypatch, 0, processes)
    with refused(ValueError, *facts):
        next(iter(make()))


@st.composite
def labelled(draw):
    """Labels of classes of 2 to 6 items in any order, and sizes of a batch that they can make."""
    counts = draw(st.lists(st.integers(2, 6), min_size=1, max_size=6))
    labels = draw(st.permutations([3 * c - 4 for c, count in enumerate(counts) for _ in range(count)]))
    return labels, draw(st.integers(1, len(counts))), draw(st.integers(2, min(counts)))


@settings(max_examples=examples(40), deadline=None)
@given(labelled(), st.integers(1, 4), st.integers(0, 2**20), st.integers(0, 3), st.sampled_from([list, np.array]))
def test_processes_share_each_batch_of_one_process(given_labels, world_size, seed, epoch, form):
    """Which holds P classes of K different items, whatever the labels come in."""
    labels, classes, items = given_labels
    world_size = min(world_size, classes)

    def drawn(form, rank: int = 0, world_size: int = 1) -> list[list[int]]:
        with pytest.MonkeyPatch.context() as patch:
            pretend_to_be_rank(patch, rank, world_size)
            sampler = balanced(classes, items, form(labels), batches=2, seed=seed, epoch=epoch)
            assert len(sampler) == 2
            return list(sampler)

    shares = [drawn(form, rank, world_size) for rank in range(world_size)]
    for batch, *parts in zip(drawn(torch.tensor), *shares, strict=True):
        assert sorted(index for part in parts for index in part) == sorted(set(batch))
        found, counts = torch.tensor(labels)[batch].unique(return_counts=True)
        assert (len(found), counts.tolist()) == (classes, [items] * classes)
        assert max(map(len, parts)) - min(map(len, parts)) in (0, items)  # whole classes


@pytest.mark.parametrize(
    ("sizes", "labels", "facts"),
    [
        ((4, 2), WORDS, ("classes_per_batch=4", "3 classes", "classes_per_batch <= 3")),
        ((2, 13), WORDS, ("items_per_class=13", "heron", "12 items", "3 classes", "items_per_class <= 12")),
        (("2", 2), WORDS, ("classes_per_batch='2'", 1)),
        ((1, 2), [0, 0, 1], ("items_per_class=2", "class", "owl", "1 item")),
        ((1, 2), [], ("classes_per_batch=1", "0 classes", "labels")),
        ((2, 2, 0), WORDS, ("batches=0", "batches >= 1")),
    ],
)
def test_sizes_and_labels_of_which_nothing_can_be_drawn_are_refused(as_users_run_it, sizes, labels, facts) -> None:
    assert len(balanced()) == 36 // 6  # by default as many batches as the items fill
    classes, items, *batches = sizes
    with refused(ValueError, *facts):
        balanced(classes, items, labels, batches=(*batches, None)[0], class_names=("wren", "owl"))
