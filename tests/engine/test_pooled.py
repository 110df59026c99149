"""Counts of all pairs together, and the operating points found from them, against loops over all pairs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.counted_values import CountedValues
from fewshot_callbacks.engine.pooled import negatives as pooled_negatives
from fewshot_callbacks.engine.pooled.grid import ScoreGrid
from fewshot_callbacks.engine.pooled.sample import NO_SAMPLE, Sample
from fewshot_callbacks.functional.retrieval.decisions import PooledRequest
from tests.cases import examples, sampled_product
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


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 20), st.integers(1, 70), st.sampled_from([1, 2]))
def test_a_refined_grid_counts_like_a_new_one(seed, number, distinct, room, weight):
    rng = np.random.default_rng(seed)
    pairs = np.sort(rng.integers(0, distinct, number) / 8)
    pieces = [CountedValues(piece, weight=weight) for piece in np.split(pairs, [number // 3])]
    grid = ScoreGrid.from_pieces(np.unique(rng.choice(pairs, rng.integers(0, 3))), pieces)
    while grid.inside_cells.any():
        cells = rng.random(len(grid.inside_cells)) < 0.5
        if not grid.inside_cells[cells].any():
            continue
        refined = grid.refined(cells, lambda: pieces, room)
        assert set(grid.scores) < set(refined.scores) <= set(pairs)
        for score, reaching_it, above in zip(refined.scores, refined.reaching, refined.above, strict=True):
            assert reaching_it == weight * (pairs >= score).sum()
            assert above == weight * (pairs > score).sum()
        if weight * number <= room:
            lower, upper = grid.lower_ends[cells], grid.upper_ends[cells]
            chosen = ((pairs[:, None] > lower) & (pairs[:, None] < upper)).any(1)
            assert set(refined.scores) == set(grid.scores) | set(pairs[chosen])
        grid = refined


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


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


# --------------------------------------------------------------------------------------------- what only the time depends on


WRONG = {
    "none": lambda sample: NO_SAMPLE,
    "one estimate": lambda sample: Sample(sample.estimates[-1:], sample.counts[:1]),
    "too low": lambda sample: sample._replace(estimates=sample.estimates - 0.3),
    "too high": lambda sample: sample._replace(estimates=sample.estimates + 0.3),
    "too few": lambda sample: sample._replace(counts=sample.counts / 1000),
    "too many": lambda sample: sample._replace(counts=sample.counts * 1000),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("labels", ["of classes", "random"])
def test_a_wrong_sample_changes_no_decision(wrong, labels, monkeypatch):
    case = pooled_case("hard", "cosine", 400, 20)
    if labels == "random":
        case["query_labels"] = case["query_labels"][torch.randperm(400, generator=torch.Generator().manual_seed(0))]
    right = Sample.of
    monkeypatch.setattr(Sample, "of", lambda *arguments: WRONG[wrong](right(*arguments)))
    for buffer_pairs in (40, 1000):
        check_decisions(case, request_for(case), buffer_pairs=buffer_pairs, grid_size=300, threads=2)


@pytest.mark.parametrize("number", [0, -1])
def test_a_pass_of_any_precision_counts_the_same(number, monkeypatch):
    """The first that is possible, int8 on many processors, leaves most pairs open; float64 leaves the fewest."""
    chosen = []

    def cheapest(estimates, precisions, open_per_pair, open_price):
        assert len(open_per_pair) == len(precisions)
        chosen.append(precisions[number])
        return precisions[number]

    monkeypatch.setattr(pooled_negatives, "cheapest", cheapest)
    case = pooled_case("hard", "cosine", 400, 20)
    check_decisions(case, request_for(case), precision="float32", buffer_pairs=40, grid_size=300, threads=2)
    check_decisions(case, request_for(case), buffer_pairs=40, grid_size=300, batch_counters=100)
    check_decisions(case, request_for(case), buffer_pairs=40, grid_size=300, as_on_device=True)
    assert chosen


@given(st.integers(0, 2**32), st.integers(0, 300), st.integers(2, 400))
def test_a_sample_keeps_the_highest_estimates_and_some_of_the_others(seed, number, room):
    estimates = np.random.default_rng(seed).integers(-40, 40, number).astype(np.float32)
    sample = Sample.of(estimates, room, 10.0 * number)
    if not number:
        assert sample is NO_SAMPLE
        return
    assert sample.total == pytest.approx(10 * number)
    ascending = np.sort(estimates).astype(np.float64)
    highest = ascending[max(0, number - room // 2) :]
    assert np.array_equal(sample.estimates[-len(highest) :], highest) if len(highest) else room < 2
    assert len(sample.estimates) <= room
    exact = 10.0 * reaching(ascending, np.unique(highest)[1:])
    assert sample.reaching(np.unique(highest)[1:]) == pytest.approx(exact)
    # Others are known up to the estimates between two that are kept.
    every = np.arange(-41.0, 42.0)
    spacing = math.ceil(number / max(1, room // 2))
    assert np.abs(sample.reaching(every) - 10.0 * reaching(ascending, every)).max() <= 10.0 * spacing + 1e-6
    # Fewer reach the next higher estimate.
    score = sample.score_reached_by(5.0 * number)
    assert sample.reaching(np.array([score]))[0] >= 5.0 * number - 1e-6
    assert sample.reaching(np.array([np.nextafter(score, 99)]))[0] <= 5.0 * number + 1e-6
