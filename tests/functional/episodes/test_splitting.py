"""Episodes are cut into support and queries, class by class."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.episodes import split_episode, split_episodes
from tests.cases import examples


@given(st.permutations(list(range(12))), st.integers(1, 3))
def test_split_does_what_a_loop_over_classes_does(order: list[int], shots: int) -> None:
    labels = torch.tensor([7, -3, 2**40])[torch.tensor(order) % 3]
    embeddings = torch.arange(24.0).reshape(12, 2)[torch.tensor(order)].requires_grad_()
    support, query = split_episode(embeddings, labels, shots=shots)
    assert support.requires_grad
    for way, label in enumerate(sorted(set(labels.tolist()))):
        rows = [embeddings[i] for i in range(12) if labels[i] == label]
        assert torch.equal(support[way], torch.stack(rows[:shots]))
        assert torch.equal(query[way], torch.stack(rows[shots:]))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 999))
@settings(max_examples=examples(40), deadline=None)
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
