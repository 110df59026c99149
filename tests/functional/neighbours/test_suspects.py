"""`suspects` computes the likelihood ratio of loops, finds flipped labels, and serves small and uneven classes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import nearest, suspects
from tests.cases import made


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


@settings(max_examples=25, deadline=None)
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


def flipped(vectors, labels, share, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    given = labels.clone()
    given[wrong] = (given[wrong] + torch.randint(1, int(labels.max()) + 1, (len(wrong),), generator=generator)) % (
        labels.max() + 1
    )
    return given, set(wrong.tolist())


@pytest.mark.parametrize("share", [0.01, 0.05, 0.1])
def test_finds_flipped_labels(share):
    vectors, labels = made(600, 20, 24, noise=0.7)
    given, wrong = flipped(vectors, labels, share)
    found = suspects(vectors, given)
    hits = wrong & set(found.index.tolist())
    assert len(hits) >= 0.9 * len(wrong)
    assert len(hits) >= 0.8 * len(found)
    assert found.noise_rate == pytest.approx(share, abs=0.03)
    right = [
        int(suggested) == int(labels[i])
        for i, suggested in zip(found.index, found.suggested, strict=True)
        if int(i) in wrong
    ]
    assert sum(right) >= 0.9 * len(right)


def test_small_and_uneven_classes():
    """Classes of 2 to 5 items beside one of 200: the large one swallows none of them."""
    sizes = [200, 2, 3, 4, 5, 2, 3, 4, 5]
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    centres = torch.randn(len(sizes), 16)
    vectors = centres[labels] + 0.1 * torch.randn(len(labels), 16)
    clean = suspects(vectors, labels, k=5)
    assert (len(clean), clean.neighbours.shape) == (0, (0, 5))
    given = labels.clone()
    given[3] = 4  # an item of the large class under the name of a small one
    found = suspects(vectors, given, k=5)
    assert found.index.tolist() == [3]
    assert found.suggested.tolist() == [0]


def test_words():
    vectors, labels = made(40, 2, 8, noise=0.1)
    words = [("jay", "owl")[label] for label in labels]
    words[5] = "jay"
    found = suspects(vectors, words)
    assert found.label_names == ("jay", "owl")
    assert (found.index.tolist(), found.given.tolist(), found.suggested.tolist()) == ([5], [0], [1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k=0 must be a whole number"),
        ({"labels": [1, 1, 1, 1]}, "all 4 labels are the same"),
        ({"labels": [1, 2, 3]}, "4 embeddings, but 3 labels"),
        ({"labels": [0.5, 1, 2, 3]}, "labels"),
        ({"min_probability": 1.5}, "min_probability=1.5 must be a probability"),
        ({"embeddings": torch.full((4, 2), math.nan)}, "4 of 4 rows of embeddings hold NaN"),
        ({"embeddings": torch.ones(4)}, "suspects needs embeddings of shape (items, dim)"),
        ({"embeddings": torch.ones(1, 2), "labels": [1]}, "none of the 1 queries has a candidate"),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=r"^suspects") as caught:
        suspects(**{"embeddings": torch.eye(4), "labels": [0, 0, 1, 1]} | arguments)
    assert message in str(caught.value)
