"""How far an embedding has moved: against the definitions, and what must not change it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewshot_callbacks import embedding_movement
from tests.messages import refused


def rows(items: int, dim: int, seed: int) -> Tensor:
    return torch.randn(items, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dependence_by_definition(one: Tensor, other: Tensor) -> float:
    """Song et al. 2012, equation 5: the mean over all four different items of the product that HSIC expects."""
    items = len(one)
    total = 0.0
    count = 0
    for i in range(items):
        for j in range(items):
            for q in range(items):
                for r in range(items):
                    if len({i, j, q, r}) == 4:
                        total += float(one[i, j] * (other[i, j] + other[q, r] - 2 * other[i, q]))
                        count += 1
    return total / count


def test_cka_is_that_of_the_definition() -> None:
    before = rows(7, 3, seed=0)
    after = before @ rows(3, 4, seed=1) + 0.3 * rows(7, 4, seed=2)
    kernel_before = before @ before.T
    kernel_after = after @ after.T
    norms = dependence_by_definition(kernel_before, kernel_before) * dependence_by_definition(
        kernel_after, kernel_after
    )
    expected = dependence_by_definition(kernel_before, kernel_after) / math.sqrt(norms)
    assert embedding_movement(before, after).cka == pytest.approx(expected, rel=1e-9)


def test_the_cosine_is_the_mean_over_items_that_have_a_length() -> None:
    before = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    after = torch.tensor([[2.0, 0.0], [0.0, -1.0], [1.0, 1.0], [4.0, 3.0]])
    movement = embedding_movement(before, after)
    assert movement.cosine == pytest.approx((1 - 1 + 24 / 25) / 3)
    assert movement.unmoved == 0.0


@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3), shift=st.floats(-10, 10))
def test_rotations_shifts_and_a_scale_change_no_cka(seed: int, scale: float, shift: float) -> None:
    before = rows(20, 5, seed)
    rotation, _ = torch.linalg.qr(rows(5, 5, seed + 1))
    moved = scale * before @ rotation + shift
    assert embedding_movement(before, moved).cka == pytest.approx(1.0, abs=1e-6)


@given(seed=st.integers(0, 1000))
def test_the_order_of_the_items_changes_nothing(seed: int) -> None:
    before = rows(12, 4, seed)
    after = rows(12, 4, seed + 1)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    one = embedding_movement(before, after)
    other = embedding_movement(before[order], after[order])
    assert (one.cosine, one.cka) == (pytest.approx(other.cosine, abs=1e-12), pytest.approx(other.cka, abs=1e-12))


def test_cka_of_unrelated_embeddings_is_zero_on_average_however_few_the_items() -> None:
    values = [embedding_movement(rows(8, 32, seed), rows(8, 32, seed + 5000)).cka for seed in range(400)]
    assert abs(sum(values) / len(values)) < 0.05


def test_what_has_not_moved() -> None:
    before = rows(10, 4, seed=3).float()
    assert embedding_movement(before, before).unmoved == 1.0
    after = before.clone()
    after[:3] *= 1.01
    assert embedding_movement(before, after).unmoved == pytest.approx(0.7)


def test_what_is_undefined_is_nan() -> None:
    few = embedding_movement(rows(3, 4, seed=0), rows(3, 4, seed=1))
    assert math.isnan(few.cka)
    assert not math.isnan(few.cosine)
    equal = embedding_movement(torch.ones(5, 2), torch.ones(5, 2))
    assert math.isnan(equal.cka)
    assert equal.unmoved == 1.0
    other_dim = embedding_movement(rows(6, 4, seed=0), rows(6, 5, seed=0))
    assert math.isnan(other_dim.cosine)
    assert math.isnan(embedding_movement(torch.zeros(5, 2), torch.ones(5, 2)).cosine)


@pytest.mark.parametrize(
    ("before", "after", "facts"),
    [
        (torch.ones(3, 2), torch.ones(4, 2), ("before", "3 rows", "after", 4)),
        (torch.ones(3), torch.ones(3), ("before", "(3,)", "(items, dim)")),
        (torch.ones(3, 2), torch.full((3, 2), math.nan), (3, "after", "NaN", "Inf", "index 0")),
    ],
)
def test_rows_that_are_not_the_same_items_twice_are_refused(
    before: Tensor, after: Tensor, facts: tuple[str | int, ...]
) -> None:
    with refused(ValueError, "embedding_movement", *facts):
        embedding_movement(before, after)
