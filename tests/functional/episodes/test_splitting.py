"""Episodes are cut into support and queries, class by class."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.episodes import sample_episodes, split_episode, split_episodes

LABELS = torch.arange(60) % 6


@given(st.permutations(list(range(12))), st.integers(1, 3))
def test_split_does_what_a_loop_over_classes_does(order: list[int], shots: int) -> None:
    labels = torch.tensor([7, -3, 2**40])[torch.tensor(order) % 3]
    embeddings = torch.arange(24.0).reshape(12, 2)[torch.tensor(order)]
    support, query = split_episode(embeddings, labels, shots=shots)
    for way, label in enumerate(sorted(set(labels.tolist()))):
        rows = [embeddings[i] for i in range(12) if labels[i] == label]
        assert torch.equal(support[way], torch.stack(rows[:shots]))
        assert torch.equal(query[way], torch.stack(rows[shots:]))


def test_split_undoes_what_the_sampler_does_and_lets_gradients_through() -> None:
    episode = sample_episodes(LABELS, ways=3, shots=2, queries=4, episodes=1)[0]
    embeddings = torch.randn(60, 5, requires_grad=True)
    support, query = split_episode(embeddings[episode.flatten()], LABELS[episode.flatten()], shots=2)
    order = LABELS[episode[:, 0]].argsort()
    assert torch.equal(support, embeddings[episode[order, :2]])
    assert torch.equal(query, embeddings[episode[order, 2:]])
    (support.sum() + 2 * query.sum()).backward()
    assert embeddings.grad is not None
    assert embeddings.grad.sum() == 5 * (3 * 2 + 2 * 3 * 4)


@pytest.mark.parametrize(
    ("rows", "labels", "shots", "words"),
    [
        (3, [0, 0, 1], 1, r"class 1 has 1 and class 0 has 2\. Pass a batch drawn by an EpisodicBatchSampler"),
        (4, [0, 0, 1, 1], 2, r"2-shot leaves no query: each of the 2 classes has 2 rows\. Use shots <= 1"),
        (2, [0, 1], 1, r"1-shot leaves no query: each of the 2 classes has 1 row\. Draw more images"),
        (3, [0, 0], 1, "3 embeddings came with 2 labels"),
        (0, [], 1, "The episode is empty: 0 embeddings"),
    ],
)
def test_what_is_no_episode_is_refused_in_words(rows: int, labels: list[int], shots: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_episode(torch.randn(rows, 2), torch.tensor(labels, dtype=torch.int64), shots=shots)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_several_episodes_are_cut_as_each_by_itself(
    episodes: int, ways: int, shots: int, queries: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = ways * (shots + queries)
    classes = torch.rand(episodes, 9, generator=generator).argsort(dim=1)[:, :ways] - 4
    labels = classes.repeat(1, shots + queries)[:, torch.randperm(size, generator=generator)]
    embeddings = torch.randn(labels.numel(), 2, generator=generator)
    support, query = split_episodes(embeddings, labels.flatten(), shots=shots, episodes=episodes)
    for e, rows in enumerate(embeddings.chunk(episodes)):
        one_support, one_query = split_episode(rows, labels[e], shots=shots)
        assert support[e].equal(one_support)
        assert query[e].equal(one_query)


@pytest.mark.parametrize(
    ("labels", "episodes", "message"),
    [
        (
            [0, 0, 1, 1, 2, 2],
            4,
            r"6 embeddings with labels of shape \(6,\) do not form a batch of 4 episodes of the same",
        ),
        ([0, 0, 1, 1, 5, 5, 5, 5], 2, r"Episode 1 of the 2 of the batch has 1 classes, the first has 2"),
        ([0, 1, 0, 1, 1, 1, 1, 0], 2, r"Episode 1 of the 2 of the batch: .* class 0 has 1 and class 1 has 3"),
        ([0, 1, 2, 3], 2, r"^1-shot leaves no query"),
    ],
)
def test_a_batch_that_is_not_several_episodes_is_refused(labels: list[int], episodes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_episodes(torch.zeros(len(labels), 2), torch.tensor(labels), shots=1, episodes=episodes)
