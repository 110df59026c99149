"""Intervals of means and differences: jackknife by hand, known quantiles, coverage."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import beta, t

from fewshot_callbacks.functional.statistics import (
    Difference,
    Interval,
    clustered_mean_interval,
    independent_difference_interval,
    macro_mean_interval,
    mean_interval,
    normal_quantile,
    paired_difference_interval,
    student_interval,
)
from tests.cases import examples
from tests.messages import refused

clusters_of = st.sampled_from([0, 1, -5, 2**61, 7])
metric = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 1.0, 1.0, 1.0]))
queries = st.lists(st.tuples(metric, clusters_of), min_size=1, max_size=30)


def leave_one_out(values, clusters):
    """Mean, jackknife error, degrees of freedom and skewness, by leaving out each cluster in turn."""
    values, clusters = np.array(values, dtype=np.float64), np.array(clusters)
    names = sorted(set(clusters.tolist()))
    mean, count = values.mean(), len(names)
    moves = np.array([mean - values[clusters != name].mean() for name in names])
    error = math.sqrt((count - 1) / count * (moves**2).sum())
    sizes = np.array([(clusters == name).sum() for name in names])
    effective = sizes.sum() ** 2 / (sizes**2).sum()
    if error > 1e-9:
        by_moments = 2 * (moves**2).sum() ** 2 / (moves**4).sum()
        skewness = (moves**3).sum() / (moves**2).sum() ** 1.5
    else:
        by_moments, skewness = 1.0, 0.0
    return mean, error, max(1.0, min(effective - 1, by_moments)), skewness


def expected_of_metric(values, clusters, confidence=0.95):
    mean, error, freedom, _ = leave_one_out(values, clusters)
    count = len(set(clusters))
    if error < 1e-9:  # the weight of one more value at the end of the range
        weight = beta.ppf((1 - confidence) / 2, count, 1)
        return mean * weight, 1 - (1 - mean) * weight
    reach = t.ppf((1 + confidence) / 2, freedom) * error / (mean * (1 - mean))
    centre = math.log(mean / (1 - mean))
    return tuple(float(0.5 + 0.5 * math.tanh((centre + sign * reach) / 2)) for sign in (-1, 1))


def hall_statistic(statistic, skewness):
    """Hall's cubic transformation of the t statistic, as the paper writes it."""
    return statistic + skewness * statistic**2 / 3 + skewness**2 * statistic**3 / 27 + skewness / 6


def test_quantiles_of_the_tables():
    found = [normal_quantile(confidence) for confidence in (0.95, 0.99, 0.6826895)]
    assert found == pytest.approx([1.959964, 2.575829, 1.0], abs=1e-6)


@pytest.mark.parametrize("confidence", [0, 1, 95, math.nan])
def test_confidence_is_a_probability(confidence):
    for interval in (
        mean_interval,
        lambda values, level: paired_difference_interval(values, confidence=level),
        lambda values, level: student_interval(values.numpy()[:, None], level),
        lambda values, level: clustered_mean_interval(values, [0], level),
    ):  # refused also where the interval would be NaN
        with refused(ValueError, f"confidence={confidence}", 0, 1, 0.95):
            interval(torch.ones(1), confidence)


class TestMeanOfAMetric:
    @settings(max_examples=examples(100), deadline=None)
    @given(queries, st.sampled_from([0.5, 0.95, 0.99]))
    def test_equals_leaving_out_one_cluster_at_a_time(self, pairs, confidence):
        values, clusters = zip(*pairs, strict=True)
        interval = clustered_mean_interval(torch.tensor(values), torch.tensor(clusters), confidence)
        if len(set(clusters)) < 2:
            assert all(math.isnan(end) for end in interval)
            return
        assert interval == pytest.approx(expected_of_metric(values, clusters, confidence), abs=1e-7)
        mean = np.mean(np.float64(values))
        assert 0 <= interval.low <= mean + 1e-15
        assert mean - 1e-15 <= interval.high <= 1

    def test_clusters_of_one_are_independent_values_and_repeating_each_adds_no_certainty(self):
        values = torch.rand(40)
        clustered = clustered_mean_interval(values, torch.arange(40).flip(0) * 2**50)
        assert clustered == mean_interval(values) == macro_mean_interval(values, torch.arange(40))
        assert all(math.isnan(end) for end in mean_interval(values[:1]))
        # m copies of each of C values are C clusters: the interval of the C values, not of m C
        values = torch.rand(30, dtype=torch.float64)
        copies, clusters = values.repeat_interleave(5), torch.arange(30).repeat_interleave(5)
        assert clustered_mean_interval(copies, clusters) == pytest.approx(mean_interval(values), abs=1e-12)
        assert mean_interval(copies).half_width < 0.5 * mean_interval(values).half_width

    @settings(max_examples=examples(60), deadline=None)
    @given(queries, st.randoms(use_true_random=False))
    def test_order_and_names_of_clusters_do_not_change_a_bit(self, pairs, random):
        names = dict(zip([0, 1, -5, 2**61, 7], random.sample([9, -4, 2**61, 3, 0, 55], 5), strict=True))
        others = [(value, names[cluster]) for value, cluster in random.sample(pairs, len(pairs))]
        for interval in (clustered_mean_interval, macro_mean_interval):
            found = [
                interval(torch.tensor(v), torch.tensor(c)) for v, c in (zip(*p, strict=True) for p in (pairs, others))
            ]
            assert repr(found[0]) == repr(found[1])

    def test_what_is_no_metric_is_refused_but_for_rounding(self):
        with refused(ValueError, "[0, 1]", "-0.5 to 0.5", "paired_difference_interval"):
            mean_interval(torch.tensor([0.5, -0.5]))
        with refused(ValueError, "[-1, 1]", "0 to 3"):
            paired_difference_interval(torch.tensor([0.0, 3.0]))
        assert mean_interval(torch.tensor([0.5, 1 + 1e-7])) == mean_interval(torch.tensor([0.5, 1.0]))  # rounding
        values = torch.ones(10**5, dtype=torch.float64)
        values[0] = 1 - 2e-12  # the mean rounds to 1
        assert mean_interval(values).high == 1.0


class TestPairedDifference:
    @settings(max_examples=examples(100), deadline=None)
    @given(st.lists(st.tuples(st.floats(-1, 1, width=32), clusters_of), min_size=1, max_size=30))
    def test_inverts_halls_transformation_unless_it_leaves_all_differences(self, pairs):
        values, clusters = zip(*pairs, strict=True)
        interval = paired_difference_interval(torch.tensor(values), torch.tensor(clusters))
        if len(set(clusters)) < 2:
            assert all(math.isnan(end) for end in interval)
            return
        mean, error, freedom, skewness = leave_one_out(values, clusters)
        if error < 1e-9:
            return
        quantile = t.ppf(0.975, freedom)
        ends = [brentq(lambda s, q=q: hall_statistic(s, skewness) - q, -1e4, 1e4) for q in (quantile, -quantile)]
        low, high = (mean - error * end for end in ends)
        plain = [mean - error * quantile, mean + error * quantile]
        names = np.array(clusters)
        units = [np.mean(np.array(values, np.float64)[names == name]) for name in set(clusters)]
        outside = max(min(*units, plain[0]) - low, high - max(*units, plain[1]))
        if abs(outside) < 1e-5:  # which of the two it is, is a question of rounding
            return
        expected = np.clip(plain if outside > 0 and len(units) >= 8 else [low, high], -1, 1)
        assert interval == pytest.approx(tuple(expected), abs=1e-5)

    def test_one_class_that_differs_from_eleven_does_not_outweigh_them(self):
        """The corrected interval went from -0.009 to 0.056: below every difference."""
        gains = [-0.005, 0.035, 0.04, 0.043, 0.046, 0.048, 0.05, 0.052, 0.054, 0.055, 0.056, 0.069]
        low, high = interval = paired_difference_interval(torch.tensor(gains, dtype=torch.float64))
        assert low > 0
        assert Difference(0.7, 0.7 - sum(gains) / 12, interval).is_beyond_chance
        drawn = np.random.default_rng(0).choice(gains, (10_000, 12)).mean(axis=1)  # the bootstrap agrees
        assert (low, high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.008)

    def test_no_difference_at_all_is_not_certain(self):
        low, high = paired_difference_interval(torch.zeros(60), torch.arange(60) % 20)
        assert (low, high) == pytest.approx((-(1 - 0.025 ** (1 / 20)), 1 - 0.025 ** (1 / 20)))


def test_a_difference_of_independent_means_reaches_to_the_nearer_ends():
    low, high = independent_difference_interval(0.9, Interval(0.8, 0.94), 0.7, Interval(0.67, 0.75))
    assert low == pytest.approx(0.2 - math.hypot(0.1, 0.05))
    assert high == pytest.approx(0.2 + math.hypot(0.04, 0.03))
    unknown = Interval(math.nan, math.nan)
    assert all(math.isnan(end) for end in independent_difference_interval(0.9, unknown, 0.7, Interval(0.6, 0.8)))


class TestOfUnboundedValues:
    @pytest.mark.parametrize(("samples", "confidence"), [(2, 0.95), (3, 0.999), (30, 0.5)])
    def test_equals_scipys_t_interval_at_each_point(self, samples, confidence):
        values = np.random.default_rng(samples).normal(1e3, 5.0, (samples, 4))
        values = values.astype(np.float32)  # computed in double
        low, high = student_interval(values, confidence)
        values = values.astype(np.float64)
        error = values.std(axis=0, ddof=1) / math.sqrt(samples)
        expected = t(samples - 1, values.mean(axis=0), error).ppf([[(1 - confidence) / 2], [(1 + confidence) / 2]])
        assert low.dtype == high.dtype == np.float64
        np.testing.assert_allclose([low, high], expected, rtol=1e-12)  # 1 - 0.9995 has lost three digits

    def test_equal_values_have_no_width(self):
        low, high = student_interval(np.full((3, 2), 0.75))
        assert low.tolist() == high.tolist() == [0.75, 0.75]
        assert np.isnan(student_interval(np.ones((1, 2)))).all()
