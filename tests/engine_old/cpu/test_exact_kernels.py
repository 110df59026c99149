"""Exact scores that lie all but in the middle between two float64, where the last bits of a sum decide the rounding."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.cpu import exact_kernels as exact
from tests.engine.cases import prepared
from tests.engine.scores.true_scores import KERNELS, scores, true_score

DIMS = (14, 60, 300)
CLOSEST = {"compiled": 96, "pytorch": 110}
"""The compiled kernels promise a cosine or a distance that is no closer to the middle than 2**-97 of itself."""


def as_squares(total: int) -> list[int]:
    """Integers whose squares add up to `total`, the largest first (about ten of them, as each step halves the bits)."""
    parts: list[int] = []
    while total > 0:
        parts.append(math.isqrt(total))
        total -= parts[-1] ** 2
    return parts


def middle(chance: random.Random) -> int:
    """An odd number of 54 bits: half of it lies in the middle between two float64."""
    return chance.getrandbits(54) | 1 | 1 << 53


def near_cosine(chance: random.Random, closeness: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """A query and an item whose cosine differs by about 2**-closeness of itself from the middle between two float64.

    The query has one component, so that the cosine is that component of the item over its norm. The item's squared norm
    is chosen, and made up by the squares of its other components.
    """
    while True:
        first, half = chance.getrandbits(53) | 1 << 52, middle(chance)
        norm = (first * first << 108) // half**2  # rounded down: 0 and 1 more are on the two sides of the middle
        step = norm >> (closeness - 1)
        norm += chance.choice((-step, step) if step else (0, 1))
        rest = as_squares(norm - first * first)
        if rest and max(rest) < 2**53 and len(rest) < dim:
            break
    query, item = np.zeros((1, dim)), np.zeros((1, dim))
    query[0, 0] = chance.choice((-1, 1)) * chance.randint(1, 9)
    item[0, : 1 + len(rest)] = [first, *rest]
    return query, item


def near_distance(chance: random.Random, closeness: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Likewise two rows and their distance; the first difference is not a float64."""
    while True:
        half = middle(chance)
        parts = as_squares(half**2 + chance.choice((-1, 1)) * max(1, half**2 >> (closeness - 1)))
        if len(parts) <= dim:
            break
    query, item = np.zeros((1, dim)), np.zeros((1, dim))
    item[0, : len(parts)] = parts
    query[0, : len(parts)] = [int(float(part)) - part for part in parts]
    return query, item


NEAR = {"cosine": near_cosine, "euclidean": near_distance}


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(50, 110), st.sampled_from(DIMS), st.sampled_from(list(NEAR)),
    st.sampled_from(KERNELS),
)  # fmt: skip
def test_are_rounded_to_the_nearer_of_the_two(seed, closeness, dim, similarity, kernel):
    closeness = min(closeness, CLOSEST[kernel])
    query, item = NEAR[similarity](random.Random(seed), closeness, dim)
    assert scores(query, item, similarity, kernel) == [[true_score(query[0], item[0], similarity)]]


@pytest.mark.parametrize("similarity", list(NEAR))
@pytest.mark.parametrize("kernel", KERNELS)
def test_as_close_as_is_promised(similarity, kernel):
    chance = random.Random(0)
    for number in range(30):
        query, item = NEAR[similarity](chance, CLOSEST[kernel] - number % 10, DIMS[number % len(DIMS)])
        assert scores(query, item, similarity, kernel) == [[true_score(query[0], item[0], similarity)]]


powers = st.tuples(st.sampled_from((-3, -1, 1, 3)), st.sampled_from((0, -1, -52, -53, -54, -106, -107, -108, -160)))


@settings(max_examples=200, deadline=None)
@given(st.lists(powers, min_size=1, max_size=8))
def test_exact_sums_keep_what_rounding_leaves_out(terms):
    """Sums with many ties, whose remainder decides the rounding of what is computed from them."""
    row = np.array([number * 2.0**power for number, power in terms])
    total = sum(map(Fraction, row.tolist()), Fraction(0))
    products = exact._exact_dot(row, np.ones(len(row)), 1.0, 1.0)
    halves = np.array([math.ldexp(number, power // 2) for number, power in terms])
    squared = exact._exact_squared_distance(halves, np.zeros(len(row)), 1.0)
    for wanted, (high, low) in (
        (total, products),
        (sum((Fraction(half) ** 2 for half in halves.tolist()), Fraction(0)), squared),
    ):
        assert high == float(wanted)
        left_out = wanted - Fraction(high)
        assert abs(Fraction(float(low)) - left_out) <= abs(left_out) * Fraction(1, 2**51)


@pytest.mark.parametrize("classes", [1, 3])
def test_of_the_pairs_of_a_class(classes):
    """Each row's key with those before it is taken from them, and its own begin anywhere in a block of items."""
    rng = np.random.default_rng(0)
    items = 150
    tails = rng.choice([-1.0, 0.0, 1.0], (items, 3)) * 2.0 ** np.array([-53, -120, -240])
    rows = np.where(rng.random((items, 1)) < 0.5, 1.0, np.concatenate([np.ones((items, 1)), tails], axis=1))
    labels = torch.arange(items) % classes
    case = {"queries": torch.from_numpy(rows), "query_labels": labels, "similarity": "dot"}
    tiles, candidates = prepared(case)
    order = candidates.query_order
    for some in (slice(0, items), slice(40, 120)):
        start, stop = (candidates.gallery_start[candidates.query_class[some] + more].numpy() for more in (0, 1))
        keys = np.empty((len(start), int((stop - start).max())))
        exact.class_scores(tiles.pairs(), order[some].numpy(), some.start, start, stop, order.numpy(), True, keys)
        for found, query, begin, end in zip(keys, order[some], start, stop, strict=True):
            expected = [
                math.inf if item == query else true_score(rows[query], rows[item], "dot") for item in order[begin:end]
            ]
            assert [*map(tiles.to_user_score, found[: end - begin])] == expected
