"""Operating points of all pairs against their definitions: every threshold is tried, in float64 and with loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.operating_points import false_match_rate, precision_of

PRECISIONS = (0.05, 0.3, 0.5, 0.56, 0.6, 2 / 3, 0.75, 0.9, 1.0)
AT_PRECISIONS = tuple(f"recall@precision{precision!r}" for precision in PRECISIONS)


def lowest_point(scores, relevant, precision, thresholds):
    """Counts at the smallest of some thresholds with this precision."""
    for threshold in sorted(thresholds):
        tp = sum(bool(hit) for score, hit in zip(scores, relevant, strict=True) if score >= threshold)
        fp = sum(not hit for score, hit in zip(scores, relevant, strict=True) if score >= threshold)
        if tp and tp / (tp + fp) >= precision:
            return threshold, tp, fp
    return math.nan, 0, 0


def lowest_relevant(scores, relevant, rate):
    """Threshold and rates at the smallest relevant score with at most this false match rate."""
    negatives = sum(not hit for hit in relevant)
    for threshold in sorted({float(score) for score, hit in zip(scores, relevant, strict=True) if hit}):
        fp = sum(not hit for score, hit in zip(scores, relevant, strict=True) if score >= threshold)
        if fp / negatives <= rate:
            return threshold, fp / negatives
    return math.nan, 0.0


def one_query(scores, relevant, **kwargs):
    """A query of 1.0 against items that are their scores: every pair is one decision, and no score is rounded."""
    items = torch.tensor(scores, dtype=torch.float64)[:, None]
    labels = torch.tensor([0 if hit else 1 for hit in relevant])
    return evaluate_retrieval(
        torch.ones(1, 1, dtype=torch.float64), torch.tensor([0]), items, labels, similarity="dot", **kwargs
    )  # fmt: skip


def triple(point):
    return point.threshold, point.true_positives, point.false_positives


def same(found, expected):
    return found == expected or (math.isnan(found[0]) and math.isnan(expected[0]) and found[1:] == expected[1:])


BOUNDS = st.sampled_from([-math.inf, math.inf, -3.0, -0.5, 0.0, 1.0, 2.5])
PAIRS = st.lists(
    st.tuples(st.sampled_from([-2, -1, -0.5, 0, 0.25, 1, 2, 3, 4, 5]), st.booleans()), min_size=1, max_size=30
)


FEW = {"knots": 2, "collected": 2}
"""Room for so little that pairs are counted and listed again."""


@pytest.mark.parametrize("options", [{}, {"plain": True}, FEW, {"precision": "bytes", **FEW}], ids=str)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=PAIRS, low=BOUNDS, high=BOUNDS)
@example(pairs=[(4, True), (3, False), (2, True), (2, False), (1, False), (0, False)], low=0.0, high=math.inf)
@example(pairs=[(5, True)] * 3 + [(4, False)] * 2 + [(-1, True)], low=-math.inf, high=math.inf)
def test_recall_at_precision_is_that_of_the_smallest_of_all_thresholds(options, pairs, low, high):
    scores, relevant = zip(*pairs, strict=True)
    low, high = min(low, high), max(low, high)
    if not any(relevant):
        return
    with engine_options(**options):
        report = one_query(scores, relevant, metrics=AT_PRECISIONS, threshold_bounds=(low, high))
    bounds = {bound for bound in (low, high) if math.isfinite(bound)}
    every = {float(score) for score in scores if low <= score <= high} | bounds
    hits = {float(score) for score, hit in pairs if hit and low <= score <= high} | (bounds & {high})
    for precision in PRECISIONS:
        expected = lowest_point(scores, relevant, precision, hits)
        assert same(triple(report.at_precision[precision]), expected), precision
        _, tp, _ = lowest_point(scores, relevant, precision, every)
        assert report[f"recall@precision{precision!r}"] == tp / sum(relevant)


@settings(max_examples=40, deadline=None)
@given(
    pairs=PAIRS,
    rates=st.lists(st.fractions(0, 1, max_denominator=30).filter(lambda r: 0 < r < 1), max_size=4),
    options=st.sampled_from([{}, FEW]),
)
def test_false_match_rates_are_compared_as_they_are_reported(pairs, rates, options):
    scores, relevant = zip(*pairs, strict=True)
    if not any(relevant) or all(relevant):
        return
    rates = tuple(float(rate) for rate in rates)
    with engine_options(**options):
        report = one_query(scores, relevant, metrics=["mAP", *(f"fnmr@fmr{rate!r}" for rate in rates)])
    for rate in rates:
        threshold, reached = lowest_relevant(scores, relevant, rate)
        point = report.at_false_match_rate[rate]
        assert point.threshold == pytest.approx(threshold, abs=0, nan_ok=True)
        assert point.false_match_rate == reached


@pytest.mark.parametrize(("tp", "fp", "precision"), [(14, 11, 0.56), (7, 3, 0.7), (29, 71, 0.29), (19, 1, 0.95)])
def test_a_precision_that_is_reached_exactly_is_reached(tp, fp, precision):
    assert precision_of(np.array([tp]), np.array([fp])) >= precision
    assert false_match_rate(np.array([fp]), tp + fp).tolist() == [fp / (tp + fp)]
    scores = np.linspace(5, 6, tp + fp)
    relevant = np.arange(tp + fp) < tp
    for bounds in ((0.0, 2.0), (5.0, 6.0), (-math.inf, math.inf), (-math.inf, 2.0), (0.0, math.inf)):
        key = f"recall@precision{precision}"
        report = one_query(scores.tolist(), relevant, metrics=key, threshold_bounds=bounds)
        assert report[key] == 1.0, bounds
        assert triple(report.at_precision[precision]) == (min(5.0, bounds[1]), tp, fp)


def test_the_threshold_is_a_relevant_score_though_a_smaller_one_has_the_precision():
    gallery = torch.tensor([[1, 0], [0.9, 0.19**0.5], [0.5, 0.75**0.5]])
    report = evaluate_retrieval(
        torch.tensor([[1.0, 0]]), torch.tensor([0]), gallery, torch.tensor([0, 0, 1]),
        metrics=(*DEFAULT_METRICS, "recall@precision0.6"), threshold_bounds=(0, 1), label_groups=None,
    )  # fmt: skip
    point = report.at_precision[0.6]
    assert (point.true_positives, point.false_positives, point.precision, point.recall) == (2, 0, 1.0, 1.0)
    assert point.threshold == pytest.approx(0.9, abs=1e-7)  # from 0.0 on two of three would be relevant
