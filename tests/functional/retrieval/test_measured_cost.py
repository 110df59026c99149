"""`measure_evaluation`: what is evaluated, what is extrapolated, and what is refused. No test asserts a duration."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from fewshot_callbacks.functional import measure_evaluation, plan_evaluation
from fewshot_callbacks.functional.retrieval import measured_cost
from fewshot_callbacks.functional.retrieval.measured_cost import FIRST_ROWS, MeasuredEvaluation, TimedSample
from tests.messages import missing_facts, refused


@pytest.fixture
def clock():
    """The seconds of a clock that only evaluations move on."""
    return [0.0]


@pytest.fixture
def evaluated(monkeypatch, clock):
    """Evaluations take as long as a formula says; the fixture lists their arguments."""
    calls = []

    def evaluate(queries, query_labels, gallery, gallery_labels, **settings):
        calls.append((queries, query_labels, gallery, settings))
        items = len(queries if gallery is None else gallery)
        clock[0] += 0.1 + 1e-5 * len(queries) + 1e-8 * len(queries) * items

    monkeypatch.setattr(measured_cost, "evaluate_retrieval", evaluate)
    monkeypatch.setattr(measured_cost.time, "perf_counter", lambda: clock[0])
    return calls


def test_the_growth_between_two_samples_is_extrapolated(evaluated):
    plan = plan_evaluation(100_000, 100_000, 8, memory_mb=4000)
    measured = measure_evaluation(plan, difficulty="hard", seconds=30)
    assert measured.is_extrapolated
    assert measured.low_seconds < 0.1 + 1 + 100 < measured.high_seconds
    smaller, larger = measured.samples
    assert larger.queries == 2 * smaller.queries > FIRST_ROWS
    assert measured.high_seconds == pytest.approx(min(larger.seconds) * (100_000 / larger.queries) ** 2)
    power = np.log2(min(larger.seconds) / min(smaller.seconds))
    assert 1 < power < 2
    assert measured.low_seconds == pytest.approx(min(larger.seconds) * (100_000 / larger.queries) ** power)
    assert not missing_facts(str(measured), ("100,000 queries", "100,000 items", "extrapolated", f"{larger.gallery:,}"))
    assert {call[3]["memory_mb"] for call in evaluated} == {4000}


@pytest.mark.parametrize(("exponent", "bounds"), [(0.2, (1, 2)), (1.5, (1.5, 2)), (2.6, (2, 2))])
def test_the_power_of_the_rows_is_between_one_and_two(monkeypatch, clock, exponent, bounds):
    def evaluate(queries, *_, **__):
        clock[0] += 0.1 * (len(queries) / FIRST_ROWS) ** exponent

    monkeypatch.setattr(measured_cost, "evaluate_retrieval", evaluate)
    monkeypatch.setattr(measured_cost.time, "perf_counter", lambda: clock[0])
    measured = measure_evaluation(plan_evaluation(10**6, 10**6, 8), difficulty="hard", seconds=3)
    larger = measured.samples[-1]
    growth = [seconds / min(larger.seconds) for seconds in (measured.low_seconds, measured.high_seconds)]
    assert growth == pytest.approx([(10**6 / larger.gallery) ** power for power in bounds])


def test_more_items_take_longer(evaluated):
    measured = [
        measure_evaluation(plan_evaluation(items, items, 8), seconds=5) for items in (10_000, 50_000, 200_000, 10**6)
    ]
    for small, large in pairwise(measured):
        assert small.low_seconds < large.low_seconds
        assert small.high_seconds < large.high_seconds


@pytest.mark.parametrize("seconds", [1.0, 3.0, 10.0, 40.0])
def test_the_time_is_used_and_not_exceeded(evaluated, clock, seconds):
    measured = measure_evaluation(plan_evaluation(10**6, 10**6, 8), difficulty="hard", seconds=seconds)
    compiled_in = 0.1 + 1e-5 * len(evaluated[0][0]) + 1e-8 * len(evaluated[0][0]) ** 2
    assert clock[0] - compiled_in <= seconds
    # An evaluation of twice the size, which takes four times as long at most, would have exceeded it.
    assert clock[0] - compiled_in + 4 * min(measured.samples[-1].seconds) > seconds


def test_a_range_is_extrapolated_if_one_of_its_difficulties_is(monkeypatch, clock):
    def evaluate(queries, query_labels, *_, **__):
        similarity_of_class = queries[query_labels == 0].mean(0).norm()
        clock[0] += 1e-7 * len(queries) ** 2 * (1 if similarity_of_class > 0.8 else 20)

    monkeypatch.setattr(measured_cost, "evaluate_retrieval", evaluate)
    monkeypatch.setattr(measured_cost.time, "perf_counter", lambda: clock[0])
    plan = plan_evaluation(8000, 8000, 64)
    by_difficulty = [measure_evaluation(plan, difficulty=name, seconds=15) for name in ("well-trained", "hard")]
    assert [measured.is_extrapolated for measured in by_difficulty] == [False, True]
    both = measure_evaluation(plan, seconds=30)
    assert both.is_extrapolated
    assert both.low_seconds == pytest.approx(by_difficulty[0].low_seconds)
    assert both.high_seconds == pytest.approx(by_difficulty[1].high_seconds)


def test_a_set_that_was_evaluated_once_has_one_time():
    sample = TimedSample(4000, 4000, (3.0,))
    measured = MeasuredEvaluation(4000, 4000, 64, 3.0, 3.0, is_extrapolated=False, samples=(sample,))
    assert not missing_facts(str(measured), ("3.0 s", "4,000 queries"))


def test_a_small_evaluation_is_measured_itself():
    measured = measure_evaluation(plan_evaluation(300, 200, 8), difficulty="well-trained", seconds=0.1)
    assert not measured.is_extrapolated
    assert not missing_facts(str(measured), ("300 queries", "200 items", "measured"))
    assert 0 < measured.low_seconds <= measured.high_seconds
    assert {(sample.queries, sample.gallery) for sample in measured.samples} == {(300, 200)}


def test_drawn_queries_are_drawn_in_each_sample(evaluated):
    measure_evaluation(plan_evaluation(10_000, 10_000, 8, max_queries=1000), seconds=1)
    assert {call[3]["max_queries"] / len(call[0]) for call in evaluated} == {0.1}


def test_whole_classes_are_drawn_and_few_classes_shrink(evaluated):
    embeddings = torch.randn(40_000, 4)
    plan = plan_evaluation(40_000, 40_000, 4)
    measure_evaluation(plan, embeddings, torch.arange(40_000) % 4000, seconds=1)
    counts = evaluated[0][1].unique(return_counts=True)[1]
    assert set(counts[:-1].tolist()) == {10}
    assert len(counts) == len(evaluated[0][1]) // 10
    evaluated.clear()
    measure_evaluation(plan, embeddings, torch.arange(40_000) % 4, seconds=1)
    assert len(evaluated[0][1].unique()) == 4


def test_a_set_of_a_few_rows_is_evaluated_whole(evaluated):
    measured = measure_evaluation(plan_evaluation(9, 9, 4), torch.randn(9, 4), torch.arange(9) % 3, seconds=1)
    assert not measured.is_extrapolated
    assert {len(call[0]) for call in evaluated} == {9}


def test_rows_that_are_too_long_for_the_whole_set_are_extrapolated(evaluated):
    dim = measured_cost.MOST_BYTES // (4 * 128)
    measured = measure_evaluation(plan_evaluation(1000, 1000, dim), difficulty="hard", seconds=9)
    assert measured.is_extrapolated
    assert [sample.gallery for sample in measured.samples] == [64, 128]


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"difficulty": "easy"}, ("difficulty='easy'", "well-trained", "hard")),
        ({"seconds": 0}, ("seconds=0", "positive", 10)),
        ({"queries": torch.ones(9, 4)}, ("embeddings", "labels", "counted")),
        ({"queries": torch.ones(9, 3), "query_labels": torch.arange(9)}, ("plan", "dim=4", "(9, 3)")),
        ({"queries": torch.ones(9, 4), "query_labels": torch.arange(8)}, ("9 embeddings", "8 labels")),
        ({"queries": torch.ones(9, 4), "difficulty": "hard"}, ("difficulty", "generated", "embeddings")),
    ],
)
def test_wrong_arguments_are_refused(as_users_run_it, arguments, facts):
    with refused(ValueError, "measure_evaluation", *facts):
        measure_evaluation(plan_evaluation(9, 9, 4), **arguments)


def test_rows_that_are_too_long_are_refused():
    with refused(ValueError, "measure_evaluation", "dim=9000000000000", "dimension") as caught:
        measure_evaluation(plan_evaluation(9, 9, 9 * 10**12))
    assert "--" not in str(caught.value)
