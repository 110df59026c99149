"""The plan of an evaluation: pairs, tiles and bytes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.retrieval.cost import plan_evaluation
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval


def test_one_by_hand():
    plan = plan_evaluation(1000, 2000, 128)
    assert plan.pairs == 2_000_000
    assert plan.floating_point_operations == 512_000_000  # 2 * 2e6 * 128
    assert (plan.query_bytes, plan.gallery_bytes) == (1000 * 128 * 4, 2000 * 128 * 4)
    assert plan.matrix_bytes == 8_000_000
    assert plan.memory_bytes == 512 * 10**6
    assert plan_evaluation(10, 10, 4, relevant=0).tiles == 1


sizes = st.integers(1, 300_000)


@settings(max_examples=50, deadline=None)
@given(sizes, sizes, st.integers(1, 4096), st.floats(0.01, 4096), st.integers(0, 5000))
def test_tiles_cover_every_pair_once(queries, gallery, dim, memory_mb, relevant):
    plan = plan_evaluation(queries, gallery, dim, memory_mb=memory_mb, relevant=relevant)
    rows, columns = plan.tile
    assert 1 <= rows <= queries
    assert 1 <= columns <= gallery
    assert plan.tiles == math.ceil(queries / rows) * math.ceil(gallery / columns)
    assert plan.tiles * rows * columns >= plan.pairs


@settings(max_examples=200, deadline=None)
@given(sizes, sizes, st.integers(1, 4096), st.floats(-2, 4), st.integers(0, 5000))
def test_a_plan_keeps_to_its_budget_or_to_the_least_that_is_possible(queries, gallery, dim, power, relevant):
    plan = plan_evaluation(queries, gallery, dim, memory_mb=10**power, relevant=relevant)
    assert plan.needed_bytes <= max(plan.memory_bytes, plan.least_bytes)
    assert plan.least_bytes == plan_evaluation(queries, gallery, dim, memory_mb=1e-6, relevant=relevant).needed_bytes


@pytest.mark.parametrize("memory_mb", [0.1, 24, 64])
def test_every_pair_is_counted_once(memory_mb):
    labels, embeddings = torch.arange(600) % 60, torch.randn(600, 8)
    seen = []
    report = evaluate_retrieval(embeddings, labels, memory_mb=memory_mb, progress=lambda *now: seen.append(now))
    assert (report.pair_counts.relevant, report.pair_counts.irrelevant) == (600 * 9, 600 * 590)
    assert seen == sorted(seen)
    assert seen[-1] == (360_000, 360_000)
    assert len(seen) >= 3


WRONG = [
    *(({name: 0}, f"{name}=0 must be positive") for name in ("queries", "gallery", "dim", "memory_mb", "max_queries")),
    *(
        ({name: value}, f"{name}={value!r} must be a whole number, such as 1000")
        for name in ("queries", "gallery", "dim", "relevant", "max_queries")
        for value in (2.5, "9", True)
    ),
    ({"relevant": -1}, "relevant=-1 must not be negative"),
    ({"dtype": "int4"}, "dtype='int4' is unknown. Choose one of int8, uint8, float16, bfloat16"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_refuses_what_makes_no_sense(as_users_run_it, change, message):
    with pytest.raises(ValueError, match=f"plan_evaluation: {message}"):
        plan_evaluation(**{"queries": 10, "gallery": 10, "dim": 4} | change)


def test_a_sample_of_the_queries():
    plan = plan_evaluation(1000, 2000, 128, max_queries=100)
    assert (plan.queries, plan.pairs, plan.floating_point_operations) == (100, 200_000, 2 * 200_000 * 128)
    assert plan.query_bytes == 1000 * 128 * 4  # all of them are there to be drawn from
    assert plan.tile[0] <= 100
    assert plan_evaluation(1000, 2000, 128, max_queries=5000) == plan_evaluation(1000, 2000, 128)


@pytest.mark.parametrize(("dtype", "size", "copied"), [("float16", 2, 4), ("bfloat16", 2, 4), ("float64", 8, 0)])
def test_half_precision_is_copied_and_float64_is_not(dtype, size, copied):
    plan, two = plan_evaluation(1000, 1000, 16, dtype=dtype), plan_evaluation(1000, 500, 16, dtype=dtype)
    assert (plan.query_bytes, plan.gallery_bytes, plan.copy_bytes) == (16_000 * size, 16_000 * size, 16_000 * copied)
    assert (two.gallery_bytes, two.copy_bytes) == (8_000 * size, 24_000 * copied)
    assert plan_evaluation(1000, 1000, 16).copy_bytes == 0
