"""The histogram of all pairs: its cells hold every score, are as fine as estimates allow, and keep to their budget."""

import math

import numpy as np
import pytest

from fewshot_callbacks.engine.open_pass import open_pass
from fewshot_callbacks.engine.options import EngineOptions
from fewshot_callbacks.engine.pooled.first_counts import FirstCounts
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.functional.retrieval.threshold_rules import PooledRequest
from fewshot_callbacks.functional.retrieval.threshold_search import decide
from tests.engine.cases import SIMILARITIES, engine, pooled_case, prepared

MEGABYTE = 10**6
BINS = EngineOptions.bins


def histogram_of(similarity, memory_bytes=100 * MEGABYTE, kind="hard"):
    """The empty histogram of a set, the smallest and the largest score that are possible, and its width of cells."""
    tiles, candidates = prepared(pooled_case(kind, similarity))
    first = PooledCounts(open_pass(tiles, candidates, memory_bytes).matrix, capacity=1000)
    return first, *tiles.score_range, tiles.largest_error


def assert_cells(first, low, high, error, most=BINS):
    """From `low` to `high` cells as narrow as the error of the estimates, or as many cells as fit; none at the ends."""
    width = 1 / first.forecast.grid.scale
    assert width >= 2.5 * error
    assert width <= 1.2 * max((high - low) / most, 3 * error)
    inner = first.forecast.grid.bin_of(np.array([low, high]))
    assert inner.min() >= 3
    assert inner.max() <= first.forecast.grid.bins - 4
    edges = [first.forecast.grid.edge(cell) for cell in range(1, first.forecast.grid.bins)]
    assert np.all(first.forecast.grid.bin_of(np.array(edges) + 0.5 * width) == np.arange(1, first.forecast.grid.bins))
    assert first.forecast.grid.bin_of(np.array([-math.inf, math.inf])).tolist() == [0, first.forecast.grid.bins - 1]


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_cells_are_as_fine_as_the_estimates(similarity):
    first, low, high, error = histogram_of(similarity)
    assert_cells(first, low, high, error(Precision.FLOAT32))
    assert first.forecast.grid.bins > BINS / 2
    first.zoom(low + 0.50 * (high - low), low + 0.52 * (high - low))  # a tenth more, and what float64 tells apart
    assert_cells(first, low + 0.499 * (high - low), low + 0.521 * (high - low), error(Precision.FLOAT64))
    first.zoom(low - 1, high + 1)  # no score lies there
    assert 1 / first.forecast.grid.scale <= 1.001 * (high - low) / BINS


@pytest.mark.parametrize("megabytes", [1, 4])
def test_cells_take_a_quarter_of_the_budget(megabytes):
    first, low, high, _ = histogram_of("cosine", megabytes * MEGABYTE)
    most = int(first.matrix.free_bytes / 4 / 160)
    assert most / 2 < first.forecast.grid.bins <= most + 8
    assert first.positives.shape == first.negatives.shape == (first.forecast.grid.bins,)
    assert 1 / first.forecast.grid.scale <= 1.2 * (high - low) / most


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_area_is_enclosed_closely(precision):
    tiles, candidates = prepared(pooled_case("hard", "cosine", 300, 10))
    with engine(precision=precision):
        ranking_pass = open_pass(tiles, candidates, 100 * MEGABYTE)
        first = FirstCounts(ranking_pass, PooledCounts(ranking_pass.matrix, capacity=1000))
        for _ in first.run():
            pass
        area = decide(first, PooledRequest()).average_precision
    assert 0 < area.high - area.low < 1e-3
