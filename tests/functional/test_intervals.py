import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.intervals import Interval, clustered_mean_interval, mean_interval, normal_quantile

values_and_clusters = st.lists(
    st.tuples(st.floats(-10, 10, width=32), st.sampled_from([0, 1, -5, 2**61, 7])), min_size=2, max_size=30
)


def sandwich(values, clusters, z):
    """The linearised ratio of two sums over clusters, by loops."""
    names = sorted(set(clusters))
    n = len(values)
    mean = sum(values) / n
    deviations = [sum(v - mean for v, c in zip(values, clusters, strict=True) if c == name) for name in names]
    variance = len(names) / (len(names) - 1) * sum(d * d for d in deviations) / n**2
    return mean, z * math.sqrt(variance)


@pytest.mark.parametrize(("confidence", "quantile"), [(0.95, 1.959964), (0.99, 2.575829), (0.6826895, 1.0)])
def test_quantiles_of_the_tables(confidence, quantile):
    assert normal_quantile(confidence) == pytest.approx(quantile, abs=1e-6)


@pytest.mark.parametrize("confidence", [0, 1, 95, -0.5, math.nan])
def test_confidence_is_a_probability(confidence):
    message = r"confidence=.* is no probability between 0 and 1. Pass for instance 0.95"
    with pytest.raises(ValueError, match=message):
        normal_quantile(confidence)
    with pytest.raises(ValueError, match=message):  # refused also where the interval would be NaN
        mean_interval(torch.ones(1), confidence)
    with pytest.raises(ValueError, match=message):
        clustered_mean_interval(torch.ones(1), torch.zeros(1, dtype=torch.long), confidence)


class TestMeanInterval:
    def test_closed_form(self):
        # 0 and 1, n times each: s^2 = n / (2 (2 n - 1)), so that s / sqrt(2 n) = 1 / (2 sqrt(2 n - 1))
        interval = mean_interval(torch.tensor([0.0, 1.0]).repeat(50))
        half = 1.959963984540054 / (2 * math.sqrt(99))
        assert interval == pytest.approx((0.5 - half, 0.5 + half), abs=1e-12)
        assert interval.half_width == pytest.approx(half, abs=1e-12)

    def test_is_the_textbook_formula(self):
        values = np.random.default_rng(0).normal(size=37)
        half = normal_quantile(0.9) * values.std(ddof=1) / math.sqrt(37)
        interval = mean_interval(torch.from_numpy(values), confidence=0.9)
        assert interval == pytest.approx((values.mean() - half, values.mean() + half), abs=1e-12)

    def test_equal_values_have_no_width(self):
        assert mean_interval(torch.full((9,), 0.25)) == (0.25, 0.25)

    def test_small_differences_on_a_large_value_do_not_cancel(self):
        values = torch.tensor([16_777_214.0, 16_777_216.0])  # both exact in float32; their squares are not
        assert mean_interval(values).half_width == pytest.approx(1.959964, abs=1e-6)

    @pytest.mark.parametrize("n", [0, 1])
    def test_nan_for_fewer_than_two(self, n):
        assert all(math.isnan(end) for end in mean_interval(torch.ones(n)))


class TestClusteredMeanInterval:
    @settings(max_examples=40, deadline=None)
    @given(values_and_clusters)
    def test_equals_loops(self, pairs):
        values, clusters = zip(*pairs, strict=True)
        interval = clustered_mean_interval(torch.tensor(values), torch.tensor(clusters))
        if len(set(clusters)) < 2:
            assert all(math.isnan(end) for end in interval)
            return
        mean, half = sandwich(values, clusters, normal_quantile(0.95))
        assert interval == pytest.approx((mean - half, mean + half), abs=1e-9)

    def test_clusters_of_one_are_independent_values(self):
        values = torch.randn(40)
        clustered = clustered_mean_interval(values, torch.arange(40).flip(0) * 2**50)
        assert clustered == pytest.approx(mean_interval(values), abs=1e-12)

    def test_repeating_each_value_adds_no_certainty(self):
        # m copies of each of C values are C clusters: the interval of the C values, not of m C
        values = torch.randn(30)
        copies, clusters = values.repeat_interleave(5), torch.arange(30).repeat_interleave(5)
        assert clustered_mean_interval(copies, clusters) == pytest.approx(mean_interval(values), abs=1e-12)
        assert mean_interval(copies).half_width < 0.5 * mean_interval(values).half_width

    def test_order_and_names_of_clusters_change_nothing(self):
        values, clusters = torch.randn(60), torch.arange(60) % 7
        expected = clustered_mean_interval(values, clusters)
        order = torch.randperm(60)
        names = torch.tensor([9, -4, 2**61, 3, 0, 55, 7])
        assert clustered_mean_interval(values[order], names[clusters[order]]) == pytest.approx(expected, abs=1e-12)

    @pytest.mark.parametrize("n", [0, 1, 5])
    def test_nan_for_fewer_than_two_clusters(self, n):
        assert all(math.isnan(end) for end in clustered_mean_interval(torch.randn(n), torch.zeros(n, dtype=torch.long)))

    def test_covers_the_true_mean_where_the_naive_interval_does_not(self):
        generator = torch.Generator().manual_seed(0)
        trials, classes = 1000, 60
        sizes = torch.randint(2, 9, (classes,), generator=generator)
        clusters = torch.arange(classes).repeat_interleave(sizes)
        covered = {"clustered": 0, "naive": 0}
        for _ in range(trials):  # values of one class share half of their variance; their true mean is 0
            of_class = torch.randn(classes, generator=generator)[clusters]
            values = of_class + torch.randn(len(clusters), generator=generator)
            for name, (low, high) in (
                ("clustered", clustered_mean_interval(values, clusters)),
                ("naive", mean_interval(values)),
            ):
                covered[name] += low <= 0 <= high
        # the standard error of a share of 0.95 over 1,000 trials is 0.007; with 60 clusters about 0.01 is lost
        assert 0.92 < covered["clustered"] / trials < 0.97
        assert covered["naive"] / trials < 0.85


def test_half_width():
    assert Interval(0.25, 0.75).half_width == 0.25
