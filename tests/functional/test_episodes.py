"""Episodes: drawn as the labels and the seed say, cut class by class, summarised with their spread."""

import dataclasses
import hashlib
import math
import statistics
import struct
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.episodes.accuracy import summarize_accuracies
from fewshot_callbacks.functional.episodes.sampling import EpisodeList, sample_episodes
from fewshot_callbacks.functional.episodes.splitting import split_episode, split_episodes
from fewshot_callbacks.functional.statistics.intervals import (
    independent_difference_interval,
    mean_interval,
    paired_difference_interval,
)

LABELS = torch.arange(60) % 6


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.integers(-(2**62), 2**62), min_size=3, max_size=8, unique=True),
    ways=st.integers(1, 3),
    shots=st.integers(1, 3),
    queries=st.integers(1, 4),
    extra=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_every_episode_is_made_of_whole_distinct_rows(
    *, values: list[int], ways: int, shots: int, queries: int, extra: int, seed: int
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


def test_the_result_depends_on_arguments_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = sample_episodes(LABELS, queries=5, episodes=20, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        other = sample_episodes(LABELS, queries=5, episodes=20, seed=3)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one.indices, other.indices)
    assert one.hash == other.hash
    assert one.hash != sample_episodes(LABELS, queries=5, episodes=20, seed=4).hash


def test_renaming_the_classes_in_order_changes_nothing() -> None:
    far = torch.tensor([-(2**62), -5, 0, 3, 2**24 + 1, 2**62])[LABELS]
    assert torch.equal(sample_episodes(far, queries=5).indices, sample_episodes(LABELS, queries=5).indices)
    small = LABELS.to(torch.uint8)
    assert torch.equal(sample_episodes(small, queries=5).indices, sample_episodes(LABELS, queries=5).indices)


def test_drawing_is_fast() -> None:
    labels = torch.randint(0, 600, (30_000,))
    start = time.perf_counter()
    sample_episodes(labels)
    assert time.perf_counter() - start < 1.5  # 0.03 s on an idle machine


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
    with pytest.raises(ValueError, match=r"\(2, 3\) classes and images per episode; 2-way 2-shot with 2 queries"):
        EpisodeList(episodes.indices, 2, 2, 2)
    with pytest.raises(ValueError, match=r"first\(-1\)"):
        episodes.first(-1)


LONG = torch.tensor([0] * 20 + [12] * 12 + [13] * 16)


@pytest.mark.parametrize(
    ("labels", "settings_", "words"),
    [
        (
            LONG,
            {"ways": 2},
            r"2-way 1-shot with 15 queries needs 16 images per class; class 12 has 12\. Use queries <= 11 or drop the",
        ),
        (
            LONG,
            {"ways": 2, "queries": 18, "class_names": {12: "heron"}},
            r"needs 19 images per class; class 'heron' has 12, the smallest of 2 classes that are too small\. "
            r"Use queries <= 11 or drop these classes\.",
        ),
        (LONG, {"ways": 2, "shots": 12, "queries": 1}, r"class 12 has 12\. Use fewer shots and queries or drop"),
        (LABELS, {"ways": 2, "class_names": list("abcdef")}, r"class 'a' has 10, the smallest of 6 classes"),
        (LONG, {"ways": 2, "class_names": ["a"]}, "class 12 has 12"),
        (LONG, {"ways": 4}, r"4-way episodes need 4 classes; the labels hold 3\. Use ways <= 3 or add classes\."),
        (torch.zeros(0, dtype=torch.int64), {}, r"5-way episodes need 5 classes; the labels hold 0\. Pass the labels"),
        (LABELS.float(), {}, r"sample_episodes needs integer labels; got torch.float32"),
        (LABELS.reshape(6, 10), {}, r"needs one label for each item; labels has shape \(6, 10\)"),
        (LABELS, {"ways": 0}, "ways is 0; an episode needs at least one. Use ways >= 1."),
        (LABELS, {"shots": 0}, "shots is 0"),
        (LABELS, {"queries": -1}, "queries is -1"),
        (LABELS, {"episodes": 0}, "episodes is 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_words(labels: torch.Tensor, settings_: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample_episodes(labels, **settings_)


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
        (2, [0, 0], 0, "shots is 0"),
    ],
)
def test_what_is_no_episode_is_refused_in_words(rows: int, labels: list[int], shots: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split_episode(torch.randn(rows, 2), torch.tensor(labels, dtype=torch.int64), shots=shots)


def test_split_refuses_floating_labels() -> None:
    with pytest.raises(ValueError, match=r"split_episode needs integer labels; got torch.float32"):
        split_episode(torch.randn(4, 2), torch.tensor([0.0, 0.0, 1.0, 1.0]), shots=1)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_summary_is_the_schoolbook_one(values: list[float]) -> None:
    episodes = sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=len(values))
    result = summarize_accuracies(torch.tensor(values, dtype=torch.float64), episodes)
    assert result.mean == pytest.approx(statistics.fmean(values))
    assert result.std == pytest.approx(statistics.stdev(values), abs=1e-12)
    assert result.ci95 == pytest.approx(1.96 * statistics.stdev(values) / math.sqrt(len(values)), abs=1e-12)
    assert (result.n, result.ways, result.shots, result.queries) == (len(values), 2, 1, 3)
    assert result.episodes_hash == episodes.hash


def test_summary_in_words() -> None:
    episodes = sample_episodes(LABELS, ways=5, shots=1, queries=5, episodes=2)
    result = summarize_accuracies(torch.tensor([0.5, 0.7]), episodes)
    assert str(result) == f"60.00 ± 19.60 % (2 episodes, 5-way 1-shot, hash {episodes.hash})"
    result = summarize_accuracies(torch.tensor([0.5, 0.7]), episodes, batch_statistics=True)
    assert str(result) == f"60.00 ± 19.60 % (2 episodes, 5-way 1-shot, batch statistics, hash {episodes.hash})"


def test_one_episode_has_no_spread() -> None:
    episodes = sample_episodes(LABELS, ways=5, shots=1, queries=5, episodes=1)
    result = summarize_accuracies(torch.tensor([0.25]), episodes)
    assert result.mean == 0.25
    assert math.isnan(result.std)
    assert math.isnan(result.ci95)
    assert str(result) == f"25.00 % (1 episode, 5-way 1-shot, hash {episodes.hash})"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "0 episodes were measured"),
        ([0.5], r"1 accuracies came with a list of 2 episodes.*episode_list\.first\(n\)"),
        ([50.0, 60.0], r"found 50 to 60\. Pass fractions, not percentages"),
        ([0.5, math.nan], "no NaN"),
        ([0.5, -0.1], "found -0.1 to 0.5"),
    ],
)
def test_summary_refuses_what_it_cannot_summarise(values: list[float], words: str) -> None:
    episodes = sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=2)
    with pytest.raises(ValueError, match=words):
        summarize_accuracies(torch.tensor(values), episodes)


@given(
    episodes=st.integers(1, 4),
    ways=st.integers(1, 4),
    shots=st.integers(1, 3),
    queries=st.integers(1, 3),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_several_episodes_are_cut_as_each_by_itself(
    episodes: int, ways: int, shots: int, queries: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.stack(
        [
            (torch.randperm(9, generator=generator)[:ways] - 4).repeat(shots + queries)[
                torch.randperm(ways * (shots + queries), generator=generator)
            ]
            for _ in range(episodes)
        ]
    )
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
            r"6 embeddings with labels of shape \(6,\) are no batch of 4 episodes of the same size",
        ),
        ([0, 0, 1, 1, 2, 2, 2, 3], 2, r"Episode 1 of the 2 of the batch: .*class 2 has 3|Episode 1 .* class 3 has 1"),
        ([0, 0, 1, 1, 5, 5, 5, 5], 2, r"Episode 1 of the 2 of the batch has 1 classes, the first has 2"),
        ([0, 0, 0, 0, 5, 5, 6, 6], 2, r"Episode 1 of the 2 of the batch has 2 classes, the first has 1"),
        ([0, 1, 0, 1, 1, 1, 1, 0], 2, r"Episode 1 of the 2 of the batch: .* class 0 has 1 and class 1 has 3"),
        ([0, 1, 2, 3], 2, r"1-shot leaves no query"),
    ],
)
def test_a_batch_that_is_not_several_episodes_is_refused(labels: list[int], episodes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_episodes(torch.zeros(len(labels), 2), torch.tensor(labels), shots=1, episodes=episodes)


def test_the_difference_of_two_accuracies_is_taken_episode_by_episode() -> None:
    episodes = sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=50)
    hard = torch.rand(50, dtype=torch.float64) * 0.8  # what both find hard
    one = summarize_accuracies(hard + 0.1 + 0.02 * torch.rand(50, dtype=torch.float64), episodes)
    other = summarize_accuracies(hard, episodes)
    gains = (one.per_episode - other.per_episode).tolist()
    difference = one.minus(other)
    assert difference.value == pytest.approx(statistics.mean(gains))
    assert difference.interval == paired_difference_interval(one.per_episode - other.per_episode)
    assert difference.is_beyond_chance
    assert other.minus(one).value == -difference.value
    # of other episodes nothing is known pair by pair
    elsewhere = summarize_accuracies(hard, sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=50, seed=1))
    expected = independent_difference_interval(one.mean, one.interval, elsewhere.mean, elsewhere.interval)
    assert one.minus(elsewhere).interval == expected
    assert expected.half_width == pytest.approx(math.hypot(one.ci95, elsewhere.ci95), rel=0.05)  # of fifty episodes


def test_the_interval_of_few_episodes_or_near_one_is_not_that_of_the_papers() -> None:
    episodes = sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=5)
    for values in ([0.9, 1.0, 1.0, 0.8, 1.0], [1.0] * 5):
        result = summarize_accuracies(torch.tensor(values), episodes)
        assert result.interval == mean_interval(result.per_episode)
        assert result.mean - result.interval.low > result.ci95
        assert result.interval.high <= 1
        # without the accuracies themselves: the same up to its degrees of freedom
        alone = dataclasses.replace(result, per_episode=None).interval
        assert result.interval.low <= alone.low + 1e-9 < result.mean


def test_accuracies_of_different_settings_have_no_difference() -> None:
    episodes = sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=2)
    accuracies = torch.tensor([0.5, 0.7])
    one, other = (summarize_accuracies(accuracies, episodes, batch_statistics=flag) for flag in (True, False))
    with pytest.raises(ValueError, match="batch statistics of its episodes, the other was not"):
        one.minus(other)


def test_one_episode_leaves_the_difference_without_an_interval() -> None:
    episodes = sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=1)
    one, other = (summarize_accuracies(torch.tensor([value]), episodes) for value in (0.5, 0.75))
    assert other.minus(one).value == 0.25
    assert math.isnan(other.minus(one).interval.low)
