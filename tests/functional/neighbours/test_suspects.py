"""`suspects` computes the likelihood ratio of loops, finds flipped labels, and serves small and uneven classes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import nearest, suspects
from tests.cases import clustered_items, examples


def by_loops(labels, votes):
    """Log odds without wrong labels and suggestions of each item, by the definition."""
    classes = sorted(set(labels))
    everyone = [v for row in votes for v in row]
    usual = {c: (everyone.count(c) + 1) / (len(everyone) + len(classes)) for c in classes}
    ratios = []
    for i, (own, row) in enumerate(zip(labels, votes, strict=True)):

        def likelihood(of, i=i, row=row):
            lists = zip(labels, votes, strict=True)
            seen = [v for j, (label, other) in enumerate(lists) if label == of and j != i for v in other]
            log_likelihood = sum(math.log((seen.count(v) + 3 * usual[v]) / (len(seen) + 3)) for v in row)
            return log_likelihood / 2 + math.log(labels.count(of))

        others = [c for c in dict.fromkeys(row) if c != own]
        if not others:
            ratios.append((-math.inf, {own}))
            continue
        values = [likelihood(c) for c in others]
        top = max(values)
        total = top + math.log(sum(math.exp(value - top) for value in values))
        ratios.append(
            (total - likelihood(own), {c for c, value in zip(others, values, strict=True) if value > top - 1e-9})
        )
    return ratios


@settings(max_examples=examples(20), deadline=None)
@given(n=st.integers(3, 30), classes=st.integers(2, 6), k=st.sampled_from([1, 3, 8, 40]), seed=st.integers(0, 10**6))
def test_agrees_with_loops(n, classes, k, seed):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(n, 3, generator=generator)
    labels = torch.randint(0, classes, (n,), generator=generator) * 7 - 5
    labels[:2] = torch.tensor([-5, 2])
    found = suspects(vectors, labels, k=k, min_probability=0)
    lists = nearest(vectors, k=k).indices
    votes = [[int(labels[j]) for j in row if j >= 0] for row in lists]
    ratios = by_loops(labels.tolist(), votes)
    assert sorted(found.index.tolist()) == [i for i, (ratio, _) in enumerate(ratios) if ratio > -math.inf]
    number = len(labels.unique())
    rate = 0.05
    for _ in range(50):
        prior = math.log(rate / (1 - rate) / (number - 1))
        odds = [ratio + prior for ratio, _ in ratios]
        rate = sum(1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in odds) / n
        rate = min(max(rate, 1 / (n + 1)), 0.5)
    assert found.noise_rate == pytest.approx(rate, rel=1e-9)
    for place, i in enumerate(found.index.tolist()):
        assert float(found.log_odds[place]) == pytest.approx(odds[i], rel=1e-9, abs=1e-9)
        assert int(found.suggested[place]) in ratios[i][1]
        assert int(found.given[place]) == int(labels[i])
        assert torch.equal(found.neighbours[place], lists[i])
        assert found.votes[place].tolist() == [*votes[i], *[-1] * (k - len(votes[i]))] or -1 in labels.tolist()
    assert bool((found.log_odds.diff() <= 0).all())


def test_finds_flipped_labels():
    vectors, labels = clustered_items(600, 20, 24, noise=0.7)
    wrong, given = torch.randperm(600)[:60], labels.clone()
    given[wrong] = (given[wrong] + torch.randint(1, 20, (len(wrong),))) % 20
    found = suspects(vectors, given)
    right = [int(i in wrong) for i in found.index]
    assert sum(right) >= 0.9 * len(wrong)
    assert sum(right) >= 0.8 * len(found)
    assert found.noise_rate == pytest.approx(0.1, abs=0.03)
    assert int(((found.suggested == labels[found.index]) & torch.tensor(right)).sum()) >= 0.9 * sum(right)


def test_small_and_uneven_classes_named_by_words():
    """Classes of 2 to 5 items beside one of 200: the large one swallows none of them."""
    labels = torch.arange(9).repeat_interleave(torch.tensor([200, 2, 3, 4, 5, 2, 3, 4, 5]))
    vectors = torch.randn(9, 16)[labels] + 0.1 * torch.randn(len(labels), 16)
    clean = suspects(vectors, labels, k=5)
    assert (len(clean), clean.neighbours.shape) == (0, (0, 5))
    given = labels.clone()
    given[3] = 4  # an item of the large class under the name of a small one
    found = suspects(vectors, [f"class {label}" for label in given.tolist()], k=5)
    assert found.label_names == tuple(f"class {label}" for label in range(9))
    assert (found.index.tolist(), found.given.tolist(), found.suggested.tolist()) == ([3], [4], [0])


def test_of_items_that_tie_as_the_last_neighbour_the_lowest_indices_vote():
    """Unlike in `knn_accuracy`, where they share the votes that remain."""
    found = suspects(torch.ones(6, 2), [0, 0, 0, 1, 1, 1], k=2, min_probability=0.0)
    neighbours = {int(item): row.tolist() for item, row in zip(found.index, found.neighbours, strict=True)}
    assert neighbours == {3: [0, 1], 4: [0, 1], 5: [0, 1]}  # the others have neighbours of their own label alone


def test_groups_are_no_neighbours_and_repeated_items_are_those_of_the_caller():
    vectors, labels = clustered_items(80, 4, 6, noise=0.9)
    twice = torch.cat([torch.arange(40), torch.arange(80)])  # the items 0 to 39 come twice
    groups = torch.arange(80) // 3
    found = suspects(vectors[twice], labels[twice], ids=twice, groups=groups[twice], k=5, min_probability=0)
    assert bool((groups[twice[found.neighbours]] != groups[twice[found.index]][:, None]).all())
    once = suspects(vectors, labels, groups=groups, k=5, min_probability=0)
    assert torch.equal(twice[found.index], once.index)
    assert torch.equal(found.log_odds, once.log_odds)
    assert torch.equal(twice[found.neighbours], once.neighbours)
    first = torch.cat([torch.arange(40), torch.arange(80, 120)])  # where each item comes first
    assert bool(torch.isin(torch.cat([found.index, found.neighbours.flatten()]), first).all())
