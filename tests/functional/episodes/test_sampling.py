"""Episodes are drawn as the labels and the seed say."""

import hashlib
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.episodes import EpisodeList, sample_episodes
from tests.cases import examples
from tests.messages import refused

LABELS = torch.arange(60) % 6


@settings(deadline=None, max_examples=examples(40))
@given(
    st.lists(st.integers(-(2**62), 2**62), min_size=3, max_size=8, unique=True),
    *(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.integers(0, 2**31)),
)
def test_every_episode_is_made_of_whole_distinct_rows(
    values: list[int], ways: int, shots: int, queries: int, extra: int, seed: int
) -> None:
    labels = torch.tensor(values).repeat(shots + queries + extra)
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    drawn = sample_episodes(labels, ways=ways, shots=shots, queries=queries, episodes=7, seed=seed)
    assert tuple(drawn.indices.shape) == (7, ways, shots + queries)
    assert drawn.indices.dtype == torch.int64
    for episode in drawn.indices:
        assert len(set(episode.flatten().tolist())) == ways * (shots + queries)
        classes = [set(labels[row].tolist()) for row in episode]
        assert all(len(of_row) == 1 for of_row in classes)
        assert len(set.union(*classes)) == ways


def test_classes_and_images_and_places_are_equally_likely() -> None:
    labels = torch.tensor([0] * 4 + [1] * 8 + [2] * 4 + [3] * 4)  # class 1 is larger, not likelier
    indices = sample_episodes(labels, ways=2, shots=1, queries=2, episodes=20_000).indices
    of_class = labels[indices[:, :, 0]]
    for way in range(2):
        share = of_class[:, way].bincount(minlength=4) / 20_000
        assert torch.allclose(share, torch.full((4,), 0.25), atol=0.02)
    pairs = (of_class[:, 0] * 4 + of_class[:, 1]).bincount(minlength=16).reshape(4, 4) / 20_000
    assert torch.allclose(pairs, (1 - torch.eye(4)) / 12, atol=0.01)
    for place in range(3):
        inside = indices[:, :, place][of_class == 1] - 4
        share = inside.bincount(minlength=8) / len(inside)
        assert torch.allclose(share, torch.full((8,), 1 / 8), atol=0.02)
    small = (indices[of_class == 0] * torch.tensor([16, 4, 1])).sum(1).bincount(minlength=64) / (of_class == 0).sum()
    orders = [16 * a + 4 * b + c for a in range(4) for b in range(4) for c in range(4) if len({a, b, c}) == 3]
    assert torch.allclose(small[orders], torch.full((24,), 1 / 24), atol=0.01)
    assert small.sum() == pytest.approx(float(small[orders].sum()))


def test_a_class_is_used_up_without_repeats_when_it_is_just_large_enough() -> None:
    episode = sample_episodes(LABELS, ways=6, shots=3, queries=7, episodes=1)[0]
    assert sorted(episode.flatten().tolist()) == list(range(60))


def test_the_result_depends_on_arguments_and_the_order_of_classes_alone() -> None:
    state = torch.get_rng_state()
    one = sample_episodes(LABELS, queries=5, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    far = torch.tensor([-(2**62), -5, 0, 3, 2**24 + 1, 2**62])[LABELS]
    for labels in (LABELS, far, LABELS.to(torch.uint8)):
        other = sample_episodes(labels, queries=5, seed=3)
        assert torch.equal(one.indices, other.indices)
        assert one.hash == other.hash
    assert one.hash != sample_episodes(LABELS, queries=5, seed=4).hash


def test_hash_is_the_start_of_a_sha256_of_sizes_and_positions() -> None:
    episodes = sample_episodes(LABELS, ways=2, shots=1, queries=2, episodes=3)
    numbers = [3, 2, 1, 2, *episodes.indices.flatten().tolist()]
    assert episodes.hash == hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).hexdigest()[:12]
    assert EpisodeList(episodes.indices, 2, 2, 1).hash != episodes.hash  # the same images, another task
    assert episodes.first(2).hash == EpisodeList(episodes.indices[:2].clone(), 2, 1, 2).hash


def test_episode_list_knows_its_sizes() -> None:
    episodes = sample_episodes(LABELS, ways=2, shots=1, queries=2, episodes=3)
    assert len(episodes) == 3
    assert len(list(episodes.first(0).indices)) == 0
    assert torch.equal(episodes[-1], episodes.indices[2])
    with refused(ValueError, "indices", "(2, 3)", "2-way", "2-shot", "2 queries", "(2, 4)"):
        EpisodeList(episodes.indices, 2, 2, 2)
    with refused(ValueError, "first(-1)", "n >= 0"):
        episodes.first(-1)
