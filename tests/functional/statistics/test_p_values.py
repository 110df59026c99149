"""p values of paired differences agree with their intervals, and Holm's correction with its definition."""

import math

import pytest
import torch
from scipy import stats

from fewshot_callbacks import InputError
from fewshot_callbacks.functional import holm, paired_difference_interval, paired_difference_p_value
from tests.messages import refused


def skewed(seed, units=40):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(units, generator=generator).double() ** 2
    return 0.2 * sizes * torch.randn(units, generator=generator).sign() + 0.01


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-2.0, 5.0), None])
@pytest.mark.parametrize("seed", range(20))
def test_the_interval_at_one_minus_p_ends_at_zero(seed, bounds):
    values = skewed(seed)
    clusters = torch.arange(40) % 13
    p = paired_difference_p_value(values, clusters, bounds)
    assert 0 < p < 1
    for confidence, has_zero in ((1 - p - 1e-6, False), (1 - p + 1e-6, True)):
        low, high = paired_difference_interval(values, clusters, confidence, bounds)
        assert (low <= 0 <= high) == has_zero


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("units", [2, 5, 12])
def test_of_equal_differences_it_ends_there_too(units, sign):
    values = torch.full((units,), 0.3 * sign)
    p = paired_difference_p_value(values)
    for confidence, has_zero in ((1 - p - 1e-6, False), (1 - p + 1e-6, True)):
        if 0 < confidence < 1:
            low, high = paired_difference_interval(values, confidence=confidence)
            assert (low <= 0 <= high) == has_zero
    assert math.isnan(paired_difference_p_value(values, bounds=None))


@pytest.mark.parametrize("units", [10, 20])
@pytest.mark.parametrize("power", [1, 3, 8])
@pytest.mark.parametrize("seed", range(10))
def test_where_the_plain_interval_takes_over_they_agree_too(seed, power, units):
    """Where all differences have one sign, the correction carries an end beyond them at some level."""
    values = 0.5 * torch.rand(units, generator=torch.Generator().manual_seed(seed)).double() ** power
    p = paired_difference_p_value(values)
    for level, has_zero in ((p * (1 + 1e-6), False), (p * (1 - 1e-6), True)):
        low, high = paired_difference_interval(values, confidence=1 - level)
        assert (low <= 0 <= high) == has_zero or p < 1e-8  # 1 - p has too few digits


def test_without_skewness_it_is_that_of_students_t():
    values = torch.tensor([-0.1, 0.0, 0.1, 0.2, 0.3]).double()
    expected = stats.ttest_1samp(values, 0).pvalue
    assert paired_difference_p_value(values) == pytest.approx(expected)
    assert paired_difference_p_value(values, bounds=None) == pytest.approx(expected)


def test_unknown_and_equal():
    assert paired_difference_p_value(torch.zeros(5)) == 1.0
    assert paired_difference_p_value(torch.zeros(5), bounds=None) == 1.0
    assert math.isnan(paired_difference_p_value(torch.tensor([0.5])))
    assert math.isnan(paired_difference_p_value(torch.tensor([0.5, 0.1]), [3, 3]))
    values = torch.tensor([0.1, math.nan, 0.2, -0.05, 0.1, 0.2])
    assert paired_difference_p_value(values) == paired_difference_p_value(values[~values.isnan()])
    with refused(InputError, "[-1, 1]"):
        paired_difference_p_value(torch.tensor([3.0, 0.1]))


def test_holm_is_its_definition():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        p_values = (torch.rand(7, generator=generator).double() ** 2).tolist()
        corrected = holm(p_values)
        for level in (0.01, 0.05, 0.3, 0.7):
            rejected = set()
            for step, index in enumerate(sorted(range(7), key=p_values.__getitem__)):
                if p_values[index] > level / (7 - step):
                    break
                rejected.add(index)
            assert {index for index in range(7) if corrected[index] <= level} == rejected


def test_holm_leaves_out_nan_and_refuses_other_numbers():
    first, unknown, second = holm([0.02, math.nan, 0.04])
    assert (first, second) == (0.04, 0.04)
    assert math.isnan(unknown)
    assert holm([]) == []
    with refused(InputError, "holm", "1.5", "between 0 and 1"):
        holm([0.2, 1.5])
