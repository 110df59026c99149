"""Counts of all pairs together, and the operating points found from them, against loops over all pairs."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from fewshot_callbacks.functional.retrieval.operating_points import PooledRequest, decide
from tests.cases import sampled_product
from tests.engine.cases import POOLED, SIMILARITIES, cases, engines, pooled_case
from tests.engine.oracles import evaluated, scores_of

ROADS = (
    {},
    {"precision": "int8", "grid_size": 20, "buffer_pairs": 60, "threads": 2},
    {"precision": "int8", "grid_size": 16, "buffer_pairs": 4},
    {"precision": "float32", "buffer_pairs": 200, "height": 16},
    {"precision": "float64", "grid_size": 40, "batch_counters": 40, "buffer_pairs": 500},
    {"precision": "float64", "buffer_pairs": 4, "batch_counters": 1, "height": 16},
    {"as_on_device": True, "grid_size": 20, "buffer_pairs": 60},
    {"memory": 10**5, "threads": 2},
)
"""From all that is asked being known after one pass, to nothing being known."""


def reaching(scores, thresholds):
    """How many of the ascending scores reach each threshold."""
    return len(scores) - np.searchsorted(scores, thresholds)


def request_for(case, **changes):
    """All that can be asked, with thresholds that occur in the case."""
    queries = case["queries"].double()
    some = {"dot": float(queries[0] @ queries[1]), "euclidean": -float((queries[0] - queries[1]).norm())}
    thresholds = (some.get(case["similarity"], 0.5), 0.0, -0.25)
    asked = PooledRequest((0.05, 0.11, 0.3, 0.75, 1.0), thresholds=thresholds, false_match_rates=(0.0, 1e-3, 0.1, 0.7))
    return dataclasses.replace(asked, equal_error_rate=True, average_precision=True, **changes)


@pytest.mark.parametrize(
    ("kind", "similarity", "road"), sampled_product(POOLED, SIMILARITIES, range(len(ROADS)), count=14)
)
def test_bounds_enclose_the_truth_and_closing_makes_them_equal_to_it(kind, similarity, road):
    case, road = pooled_case(kind, similarity), ROADS[road]
    truth, rng = scores_of(case), np.random.default_rng(0)
    positives, negatives = truth.positives, truth.negatives
    every = np.unique([*positives, *negatives, -1.5, 1.5])
    every = np.unique([np.nextafter(every, -9), every, np.nextafter(every, 9)])
    with evaluated(case, PooledRequest((0.3,)), **road) as (result, _):
        done = result.pooled
        found = done.negatives
        assert (found.total, done.grid.total) == (len(negatives), len(positives))

        def enclosed(scores):
            fewest, most = found.bounds(scores)
            exact = reaching(negatives, scores)
            assert (fewest <= exact).all()
            assert (exact <= most).all()
            return fewest, most

        enclosed(every)
        for number in (1, 3, 40, 10**6):
            some = np.sort(rng.choice(every, min(number, len(every)), replace=False))
            found.close(some)
            fewest, most = enclosed(some)
            assert np.array_equal(fewest, most)
            enclosed(every)
        assert found.passes <= 5
        reached = done.relevant_reaching(every)
        assert np.array_equal(reached, reaching(positives, every))
        low, high = found.span(positives[[0, -1]])
        assert low <= positives[0]
        assert high >= truth.scores[truth.candidate].max()
        assert np.array_equal(found.estimate(every, done.sample), reaching(negatives, every))  # since all is closed


# ------------------------------------------------------------------------------------------------------ operating points


def check_decisions(case, request, **road):
    """Compare `decide` with loops over the scores of all pairs."""
    truth = scores_of(case)
    positives, negatives = truth.positives, truth.negatives
    with evaluated(case, request, **road) as (result, _):
        done = result.pooled
        found, vectors = decide(done, request), done.vectors
    scores = np.unique(positives)
    tp, fp = reaching(positives, scores), reaching(negatives, scores)

    def user(score):
        return float(vectors.to_user(np.array([score]))[0])

    def same(point, threshold, tp, fp):
        assert (point.threshold, point.true_positives, point.false_positives) == (threshold, tp, fp)
        assert point.false_negatives == len(positives) - tp

    f1 = 2 * tp / (tp + fp + len(positives))
    best = np.flatnonzero(f1 == f1.max())[-1]
    same(found.best_f1, user(scores[best]), tp[best], fp[best])
    low, high = (float(vectors.from_user(bound)) for bound in request.allowed_thresholds)
    tried = np.unique(np.append(positives[(positives >= low) & (positives <= high)], high))
    tried = tried[np.isfinite(tried)]
    tried_tp, tried_fp = reaching(positives, tried), reaching(negatives, tried)
    for precision in request.precisions:
        reach = np.flatnonzero(tried_tp / np.maximum(tried_tp + tried_fp, 1) >= precision)
        point = found.at_precision[precision]
        if len(reach):
            at = reach[0]
            bound = request.allowed_thresholds[1] if tried[at] == high and high not in positives else user(tried[at])
            same(point, bound, tried_tp[at], tried_fp[at])
        else:
            assert math.isnan(point.threshold)
            assert point.recall == 0
    for threshold in request.thresholds:
        score = float(vectors.from_user(threshold))
        same(found.at_threshold[threshold], threshold, (positives >= score).sum(), (negatives >= score).sum())
    for rate in request.false_match_rates:
        allowed = np.flatnonzero(fp / max(len(negatives), 1) <= rate)
        point = found.at_false_match_rate[rate]
        if not len(negatives):
            values = (point.threshold, point.false_match_rate, point.false_non_match_rate)
            assert np.isnan(values).all()
        elif not len(allowed):
            assert math.isnan(point.threshold)
            assert point.false_non_match_rate == 1
        else:
            at = allowed[0]
            assert (point.threshold, point.false_match_rate) == (user(scores[at]), fp[at] / len(negatives))
            assert point.false_non_match_rate == 1 - tp[at] / len(positives)
    every, is_relevant = np.append(positives, negatives), np.repeat([1, 0], [len(positives), len(negatives)])
    area, proved = average_precision_score(is_relevant, every), found.auc_pr
    assert proved.low - 1e-9 <= area <= proved.high + 1e-9
    assert not request.average_precision or proved.high - proved.low < 1e-9
    if request.equal_error_rate and len(negatives):
        assert found.equal_error_rate == pytest.approx(equal_error_rate(positives, negatives), abs=1e-12)
    for threshold, precision, recall in found.curve:
        exact_tp, exact_fp = ((some >= float(vectors.from_user(threshold))).sum() for some in (positives, negatives))
        assert recall == exact_tp / len(positives)
        assert done.negatives.cutoff > -np.inf or precision == exact_tp / (exact_tp + exact_fp)
    return found


def equal_error_rate(positives, negatives):
    """Where the line through the points of all thresholds, from the highest on, meets FMR = FNMR."""
    before = (0.0, 1.0)
    thresholds = np.unique(np.append(positives, negatives))[::-1]
    rates = reaching(negatives, thresholds) / len(negatives), 1 - reaching(positives, thresholds) / len(positives)
    for fmr, fnmr in zip(*rates, strict=True):
        if fmr >= fnmr:
            ahead, behind = before[1] - before[0], fmr - fnmr
            return before[0] + (fmr - before[0]) * ahead / (ahead + behind)
        before = fmr, fnmr
    raise AssertionError("they always meet")


EVERY, BOUNDS = (-math.inf, math.inf), ((0.3, 0.35), (0.999, 1.0), (-1.0, -0.5), (0.4, 0.4), (-0.1, math.inf))


@pytest.mark.parametrize(
    ("kind", "similarity", "road"), sampled_product(POOLED, SIMILARITIES, range(len(ROADS)), count=14)
)
def test_operating_points_are_those_of_loops(kind, similarity, road):
    case = pooled_case(kind, similarity)
    check_decisions(case, request_for(case), **ROADS[road])
    if similarity == "cosine":
        for bounds in BOUNDS:
            check_decisions(case, request_for(case, allowed_thresholds=bounds), **ROADS[road])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), engines(), st.sampled_from((EVERY, *BOUNDS)))
def test_operating_points_of_any_case(case, road, bounds):
    if len(scores_of(case).positives):
        request = request_for(case, allowed_thresholds=bounds) if len(case["queries"]) > 1 else PooledRequest((0.5,))
        check_decisions(case, request, **road)


@pytest.mark.parametrize("as_on_device", [False, True])
def test_a_threshold_that_no_float32_holds(as_on_device):
    """It lies as far from scores of 1e-80 as that; what is no negative is -inf, and does not reach it either."""
    values = [2.0, -2.0, -3.0, 3.0, -3.0, 0.0, -3.0, -1.0, 0.0, -1.0, -1.0, -3.0, -3.0, -3.0, -3.0]
    queries, labels = 1e-40 * torch.tensor(values)[:, None], torch.arange(15).clip(1)
    case = {"queries": queries, "query_labels": labels, "similarity": "dot"}
    check_decisions(case, request_for(case), as_on_device=as_on_device, buffer_pairs=4)


@pytest.mark.parametrize("precision", ["int8", "float64"])
def test_far_more_pairs_than_are_collected(precision):
    """Labels that say nothing: each relevant score is a possible threshold, and negatives lie around all of them."""
    case = pooled_case("hard", "cosine", 700, 35)
    case["query_labels"] = case["query_labels"][torch.randperm(700)]
    check_decisions(case, request_for(case), precision=precision, buffer_pairs=3000, threads=2)
    check_decisions(case, request_for(case), precision=precision, buffer_pairs=300, grid_size=300)
