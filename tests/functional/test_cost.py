import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.functional.candidates import find_candidates
from fewshot_callbacks.functional.cost import plan_evaluation
from fewshot_callbacks.functional.ranks import RankingPass, choose_tile_size
from fewshot_callbacks.functional.similarity import SINGLE, ScoreTiles


def test_one_by_hand():
    plan = plan_evaluation(1000, 2000, 128)
    assert plan.pairs == 2_000_000
    assert plan.floating_point_operations == 512_000_000  # 2 * 2e6 * 128
    assert (plan.query_bytes, plan.gallery_bytes) == (1000 * 128 * 4, 2000 * 128 * 4)
    assert plan.matrix_bytes == 8_000_000
    assert plan.memory_bytes == 512 * 10**6
    assert plan.tile == (1000, 2000)
    assert plan.tiles == 1


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


@settings(max_examples=50, deadline=None)
@given(st.integers(2**20, 2**34), st.integers(1, 2048), st.integers(0, 500))
def test_a_tile_keeps_to_its_budget(memory_bytes, dim, relevant):
    size = choose_tile_size(memory_bytes, dim, relevant)
    if size.gallery > 16 and size.queries > 1:  # smaller tiles are not made, whatever the budget
        counters, tile = 160 * (relevant + 1) * size.queries, 48 * size.queries * size.gallery
        operands = 24 * dim * size.gallery
        assert counters <= memory_bytes / 4
        assert tile <= memory_bytes / 2
        assert operands <= memory_bytes / 4


def test_more_memory_means_fewer_tiles():
    tiles = [plan_evaluation(60_000, 60_000, 512, memory_mb=memory).tiles for memory in (16, 64, 256, 1024)]
    assert tiles == sorted(tiles, reverse=True)
    assert tiles[0] > tiles[-1]


def test_is_what_the_pass_does(monkeypatch):
    labels, embeddings = torch.arange(600) % 60, torch.randn(600, 8)
    plan = plan_evaluation(600, 600, 8, memory_mb=0.25, relevant=10)
    tiles = ScoreTiles(embeddings, embeddings, "cosine")
    walk = RankingPass(tiles, find_candidates(labels, labels, same_set=True), int(0.25 * 10**6))
    seen, tile = [], tiles.tile

    def spy(rows, columns, rung):
        if rung == SINGLE:  # not what is looked at again more exactly
            seen.append((len(rows), len(columns)))
        return tile(rows, columns, rung)

    monkeypatch.setattr(tiles, "tile", spy)
    assert sum(len(ranks.queries) for ranks in walk.run()) == 600
    assert sum(rows * columns for rows, columns in seen) == plan.pairs == walk.pairs
    assert plan.tiles > 10
    # the pass makes blocks of queries of about the planned size, never larger ones
    assert max(rows for rows, _ in seen) <= plan.tile[0]
    assert max(columns for _, columns in seen) <= plan.tile[1]
    assert plan.tiles <= len(seen) <= 3 * plan.tiles


@pytest.mark.parametrize("name", ["queries", "gallery", "dim", "memory_mb"])
@pytest.mark.parametrize("value", [0, -1])
def test_refuses_what_is_not_positive(name, value):
    arguments = {"queries": 10, "gallery": 10, "dim": 4} | {name: value}
    with pytest.raises(ValueError, match=rf"plan_evaluation: {name}={value} must be positive"):
        plan_evaluation(**arguments)


def test_refuses_a_negative_number_of_relevant_items():
    with pytest.raises(ValueError, match=r"relevant=-1 must not be negative"):
        plan_evaluation(10, 10, 4, relevant=-1)
    assert plan_evaluation(10, 10, 4, relevant=0).tiles == 1
