"""Accuracies of episodes: their mean, its interval, and differences episode by episode."""

import dataclasses
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewshot_callbacks.functional._jackknife import t_quantile
from fewshot_callbacks.functional.episode_accuracy import summarize_accuracies
from fewshot_callbacks.functional.episodes import EpisodeList, sample_episodes
from fewshot_callbacks.functional.statistics import (
    independent_difference_interval,
    mean_interval,
    paired_difference_interval,
)
from tests.messages import missing_facts, refused

LABELS = torch.arange(60) % 6


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_summary_is_the_schoolbook_one(values: list[float]) -> None:
    episodes = sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=len(values))
    result = summarize_accuracies(torch.tensor(values, dtype=torch.float64), episodes)
    assert result.mean == pytest.approx(statistics.fmean(values))
    assert result.std == pytest.approx(statistics.stdev(values), abs=1e-12)
    assert result.ci95 == pytest.approx(1.96 * statistics.stdev(values) / math.sqrt(len(values)), abs=1e-12)
    assert (result.n, result.ways, result.shots, result.queries) == (len(values), 2, 1, 3)
    assert result.episodes_hash == episodes.hash


def test_summary_in_words_and_one_episode_has_no_spread() -> None:
    episodes = sample_episodes(LABELS, ways=5, shots=1, queries=5, episodes=2)
    result = summarize_accuracies(torch.tensor([0.5, 0.7]), episodes, batch_statistics=True)
    assert str(result) == f"60.00 ± 19.60 % (2 episodes, 5-way 1-shot, batch statistics, hash {episodes.hash})"
    one = summarize_accuracies(torch.tensor([0.25]), episodes.first(1))
    assert one.mean == 0.25
    assert math.isnan(one.std)
    assert math.isnan(one.ci95)
    assert str(one) == f"25.00 % (1 episode, 5-way 1-shot, hash {episodes.first(1).hash})"


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


def test_accuracies_of_different_settings_have_no_difference_and_of_one_episode_no_interval_of_it() -> None:
    episodes = sample_episodes(LABELS, ways=2, shots=1, queries=3, episodes=1)
    values = ((0.5, True), (0.5, False), (0.75, False))
    one, other, better = (
        summarize_accuracies(torch.tensor([value]), episodes, batch_statistics=flag) for value, flag in values
    )
    with refused(ValueError, "batch statistics", "episodes", "compared"):
        one.minus(other)
    assert better.minus(other).value == 0.25
    assert math.isnan(better.minus(other).interval.low)


def test_the_open_interval_is_the_jackknife_over_classes() -> None:
    """Over all episodes of some classes, where each class adds its own part: no noise of a list is to be taken off."""
    ways, parts = 3, torch.rand(9, dtype=torch.float64)
    classes = torch.combinations(torch.arange(9), ways)
    values, list_of_all = parts[classes].mean(dim=1), EpisodeList(torch.zeros(84, ways, 2).long(), ways, 1, 1, classes)
    without = torch.stack([values[~(classes == c).any(dim=1)].mean() for c in range(9)])
    error = (8 / 9 * (without - values.mean()).square().sum()).sqrt().item()
    low, high = summarize_accuracies(values, list_of_all).open_interval
    centre, reach = (math.log(low / (1 - low)) + math.log(high / (1 - high))) / 2, math.log(high / (1 - high))
    mean = values.mean().item()
    assert 1 / (1 + math.exp(-centre)) == pytest.approx(mean)
    moves = without - without.mean()
    freedom = min(8, 2 * moves.square().sum().item() ** 2 / moves.pow(4).sum().item())
    assert reach - centre == pytest.approx(t_quantile(0.95, freedom) * error / (mean * (1 - mean)))
    zero = summarize_accuracies(values * 0, list_of_all)
    difference = summarize_accuracies(values, list_of_all).minus(zero, over_classes=True)
    assert difference.interval.half_width == pytest.approx(t_quantile(0.95, freedom) * error)


def test_an_open_interval_needs_classes_to_spare() -> None:
    labels = torch.arange(70) % 7
    few, enough = (sample_episodes(labels, ways=ways, queries=2, episodes=60) for ways in (5, 4))
    results = [summarize_accuracies(torch.rand(60), episodes) for episodes in (few, enough, enough.first(60))]
    assert [math.isnan(result.open_interval.low) for result in results] == [True, False, False]
    assert math.isnan(results[0].minus(results[1], over_classes=True).interval.low)  # another list
    unknown = summarize_accuracies(torch.rand(60), EpisodeList(few.indices, 5, 1, 2))
    assert math.isnan(unknown.open_interval.low)
    assert math.isnan(unknown.minus(unknown, over_classes=True).interval.low)


def test_every_value_that_is_nan_has_its_reason() -> None:
    values = torch.linspace(0.4, 0.6, 6)
    few, many = (sample_episodes(torch.arange(n).repeat(4), ways=20, shots=1, queries=2, episodes=6) for n in (21, 23))
    result = summarize_accuracies(values, few)
    assert math.isnan(result.open_interval.low)
    [note] = result.notes
    assert not missing_facts(note, ("accuracy_ci95_open", "20-way", "23 classes", 21)), note
    assert summarize_accuracies(values, many).notes == ()
    assert not math.isnan(summarize_accuracies(values, many).open_interval.low)
    assert len(summarize_accuracies(values[:1], few.first(1)).notes) == 2
    [note] = dataclasses.replace(result, classes=None).notes
    assert not missing_facts(note, ("accuracy_ci95_open", "NaN", "classes")), note
    assert "20-way" not in note


def test_an_accuracy_is_equal_to_itself() -> None:
    episodes = sample_episodes(torch.arange(40) % 10, ways=3, shots=1, queries=2, episodes=6)
    result = summarize_accuracies(torch.linspace(0.4, 0.6, 6), episodes)
    for over_classes in (False, True):
        difference = result.minus(result, over_classes=over_classes)
        assert difference.interval == (0, 0)
        assert "equal" in str(difference)
