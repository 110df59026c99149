"""Counts of all pairs together, and the operating points found from them, against loops over all pairs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.retrieval.operating_points import PooledRequest
from tests.cases import sampled_product
from tests.engine.cases import POOLED, SIMILARITIES, cases, engines, pooled_case
from tests.engine.oracles import evaluated, scores_of
from tests.engine.pooled_checks import ROADS, check_decisions, reaching, request_for


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
        assert np.array_equal(found.estimate(every), reaching(negatives, every))  # since all is closed


@pytest.mark.parametrize("kind", POOLED)
@pytest.mark.parametrize(
    "road",
    [{}, {"buffer_pairs": 4, "threads": 2}, {"buffer_pairs": 4, "as_on_device": True}, {"batch_counters": 1}],
    ids=str,
)
def test_one_pass_knows_all_counts_of_binary_codes(kind, road):
    case = pooled_case(kind, "hamming")
    case["queries"] = torch.where(case["queries"] > 0, 1, -1).to(torch.int8)
    negatives = scores_of(case).negatives
    every = np.unique([*negatives, *scores_of(case).positives, -1.5, 1.5])
    every = np.unique([np.nextafter(every, -9), every, np.nextafter(every, 9)])
    with evaluated(case, PooledRequest((0.3,)), **road) as (result, _):
        found = result.pooled.negatives
        found.close(every)  # the scores of equal rows may have to be computed again
        fewest, most = found.bounds(every)
        assert np.array_equal(fewest, reaching(negatives, every))
        assert np.array_equal(most, fewest)
        assert found.passes == 1


# ------------------------------------------------------------------------------------------------------ operating points


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
