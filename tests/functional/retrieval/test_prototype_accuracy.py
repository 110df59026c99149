"""Nearest-prototype accuracy against loops, fractions, and other orders and budgets."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional.retrieval.prototype_accuracy import prototype_accuracy
from tests.cases import examples
from tests.functional import brute_force

SIMILARITIES = ("cosine", "dot", "euclidean")


def one_set(items, labels, similarity="cosine", memory_bytes=10**7):
    options = {"similarity": similarity, "memory_bytes": memory_bytes}
    return prototype_accuracy(items, labels, items, labels, same_set=True, **options)


def two_sets(*sets, similarity="cosine", memory_bytes=10**7):
    return prototype_accuracy(*sets, similarity=similarity, same_set=False, memory_bytes=memory_bytes)


def halves(items, labels):
    half = len(items) // 2
    return items[:half], labels[:half], items[half:], labels[half:]


def same(found, expected):
    np.testing.assert_array_equal(found.numpy(), np.array(expected))


def check_against_loops(items, labels, similarity):
    found = one_set(items, labels, similarity)
    same(found, brute_force.prototype_accuracy(items.numpy(), labels.numpy(), similarity=similarity))
    parts = halves(items, labels)
    expected = brute_force.prototype_accuracy(*(part.numpy() for part in parts), similarity)
    same(two_sets(*parts, similarity=similarity), expected)
    return found


@settings(max_examples=examples(80), deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(SIMILARITIES), st.booleans())
def test_equals_the_loops_in_any_order_with_any_names_and_scale(seed, similarity, ties):
    generator = np.random.default_rng(seed)
    n, dim = generator.integers(2, 10), generator.integers(1, 4)
    # small integers make many exact ties; cosine has those of equal means only, so its lengths are made equal
    rows = np.eye(dim)[generator.integers(0, dim, n)] if similarity == "cosine" else generator.integers(-2, 3, (n, dim))
    items = torch.from_numpy(rows + (0.0 if ties else generator.normal(size=(n, dim)))).float()
    labels, order = torch.from_numpy(generator.integers(-1, 3, n)), torch.from_numpy(generator.permutation(n))
    found = check_against_loops(items, labels, similarity)
    same(one_set(items[order], labels[order], similarity), found[order])
    same(one_set(items, labels * -7 + 3, similarity), found)  # the names of the classes
    same(one_set(items * 2.0**-70, labels, similarity), found)
    parts, after = halves(items, labels), order[order >= n // 2]
    expected = two_sets(*parts, similarity=similarity)
    same(two_sets(*parts[:2], items[after], labels[after], similarity=similarity), expected)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize(("dtype", "shift"), [(torch.float64, 100.0), (torch.float32, 0.0), (torch.float16, 100.0)])
def test_equals_the_loops_on_gaussian_classes(similarity, dtype, shift):
    labels = torch.randint(8, (80,)) * 1000 - 5
    centres = torch.randn(8, 6)
    items = (centres[(labels + 5) // 1000] + 1.5 * torch.randn(80, 6) + shift).to(dtype)
    found = check_against_loops(items, labels, similarity)
    assert found.isnan().sum() <= 1
    assert 0 < found.nanmean() < 1 or shift


@pytest.mark.parametrize(("kind", "similarity"), [("gaussian", "euclidean"), ("codes", "dot"), ("few", "cosine")])
def test_budgets_tiles_threads_and_layout_change_nothing(similarity, kind):
    items = torch.randn(240, 24)
    if kind == "codes":
        items = items.sign()
    if kind == "few":
        items = items[:20].repeat(12, 1)
    labels = torch.randint(50, (240,))
    found = one_set(items, labels, similarity, 10**9)
    for memory_bytes in (1, 200_000):
        same(one_set(items, labels, similarity, memory_bytes), found)
    same(one_set(items.T.contiguous().T, labels, similarity), found)
    for options in ({"threads": 3}, {"height": 16, "width": 48}, {"height": 1, "width": 1}):
        with engine_options(**options):
            same(one_set(items, labels, similarity), found)
    parts = halves(items, labels)
    found = two_sets(*parts, similarity=similarity, memory_bytes=1)
    same(found, two_sets(*parts, similarity=similarity, memory_bytes=10**9))


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 40), st.integers(2, 50), st.sampled_from(SIMILARITIES))
def test_equal_means_of_any_number_of_items_are_equally_similar(items, times, similarity):
    rows, labels = torch.randn(items, 3), torch.repeat_interleave(torch.tensor([items, items * times]))
    found = two_sets(torch.randn(4, 3), torch.arange(4) % 2, rows.repeat(1 + times, 1), labels, similarity=similarity)
    same(found, [1 / 2] * 4)


@pytest.mark.parametrize("item", [2.0, 2.0 - 2.0**-52, -2.0, -1.0 - 2.0**-52])
def test_the_largest_sums_do_not_overflow(item):
    gallery = torch.full((2**20, 1), item, dtype=torch.float64)
    labels = torch.arange(2**20) // (2**20 - 1)  # the mean of all but one is the one
    query = torch.ones(1, 1, dtype=torch.float64)
    for label in (0, 1):
        same(two_sets(query, torch.tensor([label]), gallery, labels, similarity="dot"), [1 / 2])


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("huge", [1e18, 3e38])
def test_one_huge_item_spoils_no_other_class(similarity, huge):
    labels = torch.arange(60) % 6
    items = torch.randn(60, 12) + 2 * torch.randn(6, 12)[labels]
    items[0] = huge
    expected = torch.tensor(brute_force.prototype_accuracy(items.numpy(), labels.numpy(), similarity=similarity))
    found = one_set(items, labels, similarity)
    same(found[labels > 0], expected[labels > 0])
    assert found[labels > 0].mean() > 0.5 or similarity == "dot"


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_collapsed_set_is_chance(similarity):
    labels = torch.tensor([0] * 3 + [1] * 7 + [2] * 11 + [3])
    for value in (0.0, 1 / 3, 1e30, 1e-30):
        items = (torch.rand(1, 5) * value).expand(22, 5)
        same(
            one_set(items, labels, similarity), [1 / 4] * 21 + [math.nan]
        )  # the last is alone, and a prototype for others
        same(two_sets(items, labels, items, labels, similarity=similarity), [1 / 4] * 22)


def test_sets_without_an_item():
    items, labels = torch.eye(4), torch.tensor([0, 0, 1, 2])
    assert two_sets(items, labels, items[:0], labels[:0]).isnan().tolist() == [True] * 4
    assert two_sets(items[:0], labels[:0], items, labels).shape == (0,)


def test_values_at_the_ends_of_float64():
    items = torch.tensor([[1.7e308, 0.0], [1.6e308, 0.0], [0.0, -1.7e308], [1e-310, -1.7e308]], dtype=torch.float64)
    tiny = torch.tensor([[5e-324, 0.0], [1e-323, 0.0], [0.0, 5e-324], [0.0, 5e-324]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1])
    for rows, similarity in (*((items, similarity) for similarity in SIMILARITIES), (tiny, "cosine")):
        same(one_set(rows, labels, similarity), [1.0] * 4)
