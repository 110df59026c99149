"""Nearest-prototype accuracy against loops, fractions, and other orders and budgets."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional.retrieval import prototype_accuracy as module
from fewshot_callbacks.functional.retrieval.prototype_accuracy import prototype_accuracy
from tests.cases import sampled_product
from tests.functional import brute_force

SIMILARITIES = ("cosine", "dot", "euclidean")


def one_set(items, labels, similarity="cosine", memory_bytes=10**7):
    return prototype_accuracy(
        items, labels, items, labels, similarity=similarity, same_set=True, memory_bytes=memory_bytes
    )


def two_sets(queries, query_labels, gallery, gallery_labels, similarity="cosine", memory_bytes=10**7):
    return prototype_accuracy(
        queries, query_labels, gallery, gallery_labels, similarity=similarity, same_set=False, memory_bytes=memory_bytes
    )


def same(found, expected):
    np.testing.assert_array_equal(found.numpy(), np.array(expected))


# Small integers make many exact ties; cosine has those of equal means only, so its lengths are made equal.
@st.composite
def small_sets(draw, similarity):
    items, dim = draw(st.integers(2, 9)), draw(st.integers(1, 3))
    if similarity == "cosine":
        row = st.integers(0, dim - 1).map(lambda i: [float(i == j) for j in range(dim)])
    else:
        row = st.lists(st.integers(-2, 2).map(float), min_size=dim, max_size=dim)
    rows = draw(st.lists(row, min_size=items, max_size=items))
    labels = draw(st.lists(st.integers(-1, 2), min_size=items, max_size=items))
    return torch.tensor(rows), torch.tensor(labels)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(SIMILARITIES))
def test_equals_the_loops_where_there_are_ties(data, similarity):
    items, labels = data.draw(small_sets(similarity))
    same(
        one_set(items, labels, similarity),
        brute_force.prototype_accuracy(items.numpy(), labels.numpy(), similarity=similarity),
    )
    half = len(items) // 2
    parts = items[:half], labels[:half], items[half:], labels[half:]
    same(two_sets(*parts, similarity), brute_force.prototype_accuracy(*(p.numpy() for p in parts), similarity))


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_equals_the_loops_on_gaussian_classes(similarity, dtype, shift):
    labels = torch.randint(12, (150,)) * 1000 - 5
    centres = torch.randn(12, 6)
    items = (centres[(labels + 5) // 1000] + 1.5 * torch.randn(150, 6) + shift).to(dtype)
    found = one_set(items, labels, similarity)
    same(found, brute_force.prototype_accuracy(items.numpy(), labels.numpy(), similarity=similarity))
    parts = items[:60], labels[:60], items[60:], labels[60:]
    same(two_sets(*parts, similarity), brute_force.prototype_accuracy(*(p.numpy() for p in parts), similarity))
    assert found.isnan().sum() <= 1
    assert 0 < found.nanmean() < 1 or shift


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(SIMILARITIES), st.booleans())
def test_order_and_memory_change_nothing(data, similarity, ties):
    items, labels = data.draw(small_sets(similarity))
    if not ties:
        items = items + torch.randn(items.shape)
    order = torch.tensor(data.draw(st.permutations(range(len(items)))))
    found = one_set(items, labels, similarity)
    same(one_set(items[order], labels[order], similarity), found[order])
    same(one_set(items, labels * -7 + 3, similarity), found)  # the names of the classes
    same(one_set(items * 2.0**-70, labels, similarity), found)
    half = len(items) // 2
    parts = (items[:half], labels[:half], items[half:], labels[half:])
    after = order[order >= half]
    same(two_sets(*parts[:2], items[after], labels[after], similarity), two_sets(*parts, similarity))


@pytest.mark.parametrize(("kind", "similarity"), sampled_product(["gaussian", "codes", "few"], SIMILARITIES, count=4))
def test_tiles_and_layout_change_nothing(similarity, kind):
    generator = torch.Generator().manual_seed(3)
    items = torch.randn(400, 24, generator=generator)
    if kind == "codes":
        items = items.sign()
    if kind == "few":
        items = items[:20].repeat(20, 1)
    labels = torch.randint(50, (400,), generator=generator)
    found = one_set(items, labels, similarity, 10**9)
    for memory_bytes in (1, 200_000, 2_000_000):
        same(one_set(items, labels, similarity, memory_bytes), found)
    same(one_set(items.T.contiguous().T, labels, similarity), found)
    parts = items[:150], labels[:150], items[150:], labels[150:]
    same(two_sets(*parts, similarity, 1), two_sets(*parts, similarity, 10**9))
    expected = brute_force.prototype_accuracy(items[:120].numpy(), labels[:120].numpy(), similarity=similarity)
    same(one_set(items[:120], labels[:120], similarity), expected)
    for options in ({"threads": 3}, {"height": 16, "width": 48}, {"height": 1, "width": 1}):
        with engine_options(**options):
            same(one_set(items[:120], labels[:120], similarity), expected)


BITS = 40


@settings(max_examples=300, deadline=None)
@given(st.integers(-(2**53), 2**53), st.integers(1, 2**10), st.integers(1, 2**8))
def test_means_are_the_fractions_rounded(numerator, count, times):
    def mean(numerator, count):
        table, unit = torch.tensor([[numerator]]), torch.ones(1, 1, dtype=torch.float64)
        return module._Sums(0, table, unit, torch.tensor([count]), BITS).means(slice(None)).item()

    found, exact = mean(numerator, count), Fraction(numerator, count) / 2**BITS
    if abs(numerator) >= count**2:
        assert found == float(exact)
    assert abs(Fraction(found) - exact) <= 0.75 * math.ulp(found)
    assert mean(numerator * times, count * times) == found  # equal means are equal, whatever the number of items
    assert mean(-numerator, count) == -found


@pytest.mark.parametrize("item", [2.0, 2.0 - 2.0**-52, -2.0, 1.0 + 2.0**-52])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 255, 256, 2**20 - 1])
def test_the_largest_sums_do_not_overflow(item, count):
    bits, unit = 62 - count.bit_length(), torch.ones(1, 1, dtype=torch.float64)
    sums = count * module._on_grid(torch.tensor([[item]], dtype=torch.float64), unit, bits)
    mean = module._Sums(0, sums, unit, torch.tensor([count]), bits).means(slice(None)).item()
    assert mean == float(Fraction(sums.item(), count) / 2**bits)
    assert mean == pytest.approx(item, rel=2.0**-bits)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("huge", [1e18, float(torch.finfo(torch.float32).max)])
def test_one_huge_item_spoils_no_other_class(similarity, huge):
    labels = torch.arange(60) % 6
    items = torch.randn(60, 12) + 2 * torch.randn(6, 12)[labels]
    items[0] = huge
    expected = brute_force.prototype_accuracy(items.numpy(), labels.numpy(), similarity=similarity)
    found = one_set(items, labels, similarity)
    same(found[1:][labels[1:] > 0], np.array(expected)[1:][labels[1:].numpy() > 0])
    if similarity == "cosine":
        same(found, expected)
    if similarity == "euclidean":
        assert found[labels > 0].mean() > 0.5


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("value", [0.0, 1 / 3, 1e30, 1e-30])
def test_a_collapsed_set_is_chance(similarity, value):
    labels = torch.tensor([0] * 3 + [1] * 7 + [2] * 11 + [3])
    items = (torch.rand(1, 5) * value).expand(22, 5)
    same(one_set(items, labels, similarity), [1 / 4] * 21 + [math.nan])  # the last is alone, and a prototype for others
    same(two_sets(items, labels, items, labels, similarity), [1 / 4] * 22)


def test_who_has_no_prototype():
    items = torch.eye(4)
    labels = torch.tensor([0, 0, 1, 2])
    found = one_set(items, labels)
    assert found.isnan().tolist() == [False, False, True, True]
    found = two_sets(items, labels, items[:3], torch.tensor([0, 1, 1]))
    assert found.isnan().tolist() == [False, False, False, True]
    nothing = two_sets(items, labels, items[:0], labels[:0])
    assert nothing.shape == (4,)
    assert nothing.isnan().all()
    assert two_sets(items[:0], labels[:0], items, labels).shape == (0,)


def test_leaving_the_query_out_matters():
    # the first item is 5 from the mean of its class, 10 from that of its other members, 7.25 from that of the other class
    items, labels = torch.tensor([[0.0], [10.0], [-7.0], [-7.5]]), torch.tensor([0, 0, 1, 1])
    same(one_set(items, labels, "euclidean"), [0.0, 1.0, 1.0, 1.0])
    same(two_sets(items, labels, items, labels, "euclidean"), [1.0] * 4)


def test_cosine_averages_directions():
    # one long item does not turn the prototype: its direction counts once
    gallery, labels = torch.tensor([[100.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.2]]), torch.tensor([0, 0, 0, 1])
    query = torch.tensor([[0.5, 1.0]])
    same(two_sets(query, labels[:1], gallery, labels), [1.0])
    same(two_sets(query, labels[:1], gallery, labels, "dot"), [1.0])
    scaled = gallery * torch.tensor([[1e-30], [7.0], [1e-3], [1e20]])
    same(two_sets(query, labels[:1], scaled, labels), [1.0])


def test_extreme_values():
    items = torch.tensor([[1.7e308, 0.0], [1.6e308, 0.0], [0.0, -1.7e308], [1e-310, -1.7e308]], dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1])
    for similarity in SIMILARITIES:
        same(one_set(items, labels, similarity), [1.0] * 4)
    tiny = torch.tensor([[5e-324, 0.0], [1e-323, 0.0], [0.0, 5e-324], [0.0, 5e-324]], dtype=torch.float64)
    same(one_set(tiny, labels), [1.0] * 4)
