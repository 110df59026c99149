"""Metrics of graded relevance, of the last relevant item and by trapezoids: means over all orders of tied candidates."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import revisited_protocol
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.functional.retrieval.rank_metrics import (
    graded_ndcg,
    inverse_penalty,
    precision_up_to_last,
    reciprocal_rank,
    trapezoid_average_precision,
)

TIES = ("expected", "optimistic", "pessimistic")


def ranks_of(scores, gains):
    """The ranks of one query, and its gains in their columns: relevant is what has a gain."""
    scores, gains = torch.tensor(scores, dtype=torch.float64), torch.tensor(gains, dtype=torch.float64)
    order = scores[gains > 0].argsort(stable=True)
    relevant, negatives = scores[gains > 0][order], scores[gains == 0]
    above = (negatives[None] > relevant[:, None]).sum(1)
    tied = (negatives[None] == relevant[:, None]).sum(1)
    block = RankBlock.of_scores(torch.zeros(1, dtype=torch.int64), relevant[None], above[None], tied[None])
    return block, gains[gains > 0][order][None]


def orders_of(scores, gains):
    """The gains in every order in which no candidate stands before one of a higher score."""
    levels = [
        [g for s, g in zip(scores, gains, strict=True) if s == score] for score in sorted(set(scores), reverse=True)
    ]
    for parts in itertools.product(*map(itertools.permutations, levels)):
        yield [gain for part in parts for gain in part]


def of_orders(metric, scores, gains, ties):
    values = [metric(order) for order in orders_of(scores, gains)]
    return {"expected": math.fsum(values) / len(values), "optimistic": max(values), "pessimistic": min(values)}[ties]


def dcg(gains, k):
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains[:k]))


def inp(gains):
    return sum(gain > 0 for gain in gains) / (1 + max(rank for rank, gain in enumerate(gains) if gain))


def trapezoids(gains):
    """The authors' program: old and new recall and precision at each hit."""
    area, hits = 0.0, 0
    for rank, gain in enumerate(gains):
        if gain:
            before = hits / rank if rank else 1.0
            hits += 1
            area += (before + hits / (rank + 1)) / 2
    return area / hits


def up_to_last(gains, k):
    """The authors' program: kq = min(largest rank of a relevant item, k)."""
    within = min(k, 1 + max(rank for rank, gain in enumerate(gains) if gain))
    return sum(gain > 0 for gain in gains[:within]) / within


def mrr(gains, k):
    first = next(rank for rank, gain in enumerate(gains) if gain)
    return 1 / (first + 1) if first < k else 0.0


CANDIDATES = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 1, 2, 3])), min_size=1, max_size=7).filter(
    lambda some: any(gain for _, gain in some)
)


@settings(max_examples=150, deadline=None)
@given(CANDIDATES, st.integers(1, 9), st.sampled_from(TIES))
def test_are_means_over_all_orders_of_ties(candidates, k, ties):
    scores, gains = zip(*candidates, strict=True)
    ranks, own = ranks_of(scores, gains)
    ideal = dcg(sorted(gains, reverse=True), k)
    for found, metric in (
        (graded_ndcg(ranks, own, k, ties), lambda order: dcg(order, k) / ideal),
        (inverse_penalty(ranks, ties), inp),
        (trapezoid_average_precision(ranks, ties), trapezoids),
        (reciprocal_rank(ranks, ties, k), lambda order: mrr(order, k)),
        (precision_up_to_last(ranks, k, ties), lambda order: up_to_last(order, k)),
    ):
        assert float(found) == pytest.approx(of_orders(metric, scores, gains, ties), abs=1e-12)


@pytest.mark.parametrize("ties", TIES)
def test_large_ties(ties):
    """10,000 candidates of one score, against sums over the place of the last, and the first, relevant item."""
    n, r, k = 9_990, 10, 500
    ranks, _ = ranks_of([0.5] * (n + r), [1] * r + [0] * n)
    first = [math.comb(n + r - x, r - 1) / math.comb(n + r, r) for x in range(1, n + 2)]
    wanted = {
        "expected": (
            sum(p * r / (n + r + 1 - x) for x, p in enumerate(first, 1)),
            sum(p / x for x, p in enumerate(first[:k], 1)),
        ),
        "optimistic": (1.0, 1.0),
        "pessimistic": (r / (n + r), 0.0),
    }[ties]
    assert float(inverse_penalty(ranks, ties)) == pytest.approx(wanted[0], abs=1e-12)
    assert float(reciprocal_rank(ranks, ties, k)) == pytest.approx(wanted[1], abs=1e-12)


def test_the_revisited_protocol_is_that_of_its_authors_program():
    """Loops: junk leaves the ranking, a query without a relevant image leaves the means."""
    rng = np.random.default_rng(0)
    queries, gallery = (torch.from_numpy(rng.normal(size=(n, 6))) for n in (12, 90))
    truth = []
    for query in range(12):
        some = rng.permutation(90)
        easy, hard, junk = np.split(some[: 9 + query], [4, 9])
        truth.append({"bbx": None, "easy": easy.tolist() if query else [], "hard": hard, "junk": junk.tolist()})
    reports = revisited_protocol(queries, gallery, truth, similarity="dot")
    setups = {
        "easy": (("easy",), ("hard", "junk")),
        "medium": (("easy", "hard"), ("junk",)),
        "hard": (("hard",), ("easy", "junk")),
    }
    assert reports.keys() == setups.keys()
    for name, (relevant, ignored) in setups.items():
        values = []
        for query, lists in enumerate(truth):
            good, bad = ([int(i) for part in parts for i in lists[part]] for parts in (relevant, ignored))
            order = [int(i) for i in (gallery @ queries[query]).argsort(descending=True) if int(i) not in bad]
            gains = [int(i in good) for i in order]
            if good:
                values.append([trapezoids(gains), *(up_to_last(gains, k) for k in (1, 5, 10))])
        assert reports[name].queries_without_match == 12 - len(values)
        assert [*reports[name].metrics().values()] == pytest.approx(np.mean(values, axis=0).tolist(), abs=1e-12)


def test_what_the_revisited_protocol_lacks_is_said():
    with pytest.raises(ValueError, match=r"ground_truth\[0\] has no 'junk'. Pass for each query its lists"):
        revisited_protocol(torch.ones(1, 2), torch.ones(2, 2), [{"easy": [0], "hard": [1]}])
    with pytest.raises(ValueError, match="1 pairs are both relevant and ignored"):
        revisited_protocol(torch.ones(1, 2), torch.ones(2, 2), [{"easy": [0], "hard": [1], "junk": [0]}])
