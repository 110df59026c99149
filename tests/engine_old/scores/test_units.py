"""Scores of other vectors in the same units: what is measured once for all pairs holds for each part of them."""

import dataclasses
import math

import pytest
import torch

from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.products import ScoreTiles

SIMILARITIES = ("cosine", "dot", "euclidean")
KERNELS = ("compiled", "pytorch")
PRECISIONS = (Precision.HALF, Precision.FLOAT32, Precision.FLOAT64, Precision.EXACT)


def rows(count: int, seed: int) -> torch.Tensor:
    """Rows of very different lengths, one of them zero, away from the origin."""
    generator = torch.Generator().manual_seed(seed)
    lengths = 10.0 ** torch.linspace(-6, 3, count)
    vectors = (torch.randn(count, 24, generator=generator) + 1) * lengths[:, None]
    vectors[count // 2] = 0
    return vectors


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("one_set", [False, True])
def test_parts_have_the_scores_and_bounds_of_the_whole(similarity, kernel, one_set):
    queries = rows(30, 0)
    gallery = queries if one_set else rows(40, 1)
    with engine_options(kernel=kernel):
        whole = ScoreTiles.from_rows(queries, gallery, similarity)
    some, others = torch.arange(4, 17), torch.arange(9, 30)
    part = whole.with_gallery(gallery[others])
    assert part.score_range == whole.score_range
    assert part.to_user_score(-0.25) == whole.to_user_score(-0.25)
    for precision in PRECISIONS:
        # products of the same operands: a product's rounding may depend on the shape of its tile
        if precision != Precision.EXACT:
            for index, other, of_query in ((some, some, True), (torch.arange(len(others)), others, False)):
                made, wanted = (
                    tiles.operand(places, precision, of_query=of_query)
                    for tiles, places in ((part, index), (whole, other))
                )
                assert torch.equal(made, wanted)
                made, wanted = (
                    tiles.error(places, precision, of_query=of_query)
                    for tiles, places in ((part, index), (whole, other))
                )
                assert torch.equal(made, wanted)
            assert part.largest_error(precision) == whole.largest_error(precision)
    assert torch.equal(part.exact_scores(some, torch.arange(len(others))), whole.exact_scores(some, others))


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_another_chunk_changes_the_bound_of_float32_products_alone(similarity):
    queries = torch.randn(5, 300)
    tiles = ScoreTiles.from_rows(queries, queries, similarity)
    fewer = tiles.with_chunk(16)
    assert (tiles.chunk, fewer.chunk) == (128, 16)
    assert fewer.largest_error(Precision.FLOAT32) < tiles.largest_error(Precision.FLOAT32)
    assert fewer.largest_error(Precision.FLOAT64) == tiles.largest_error(Precision.FLOAT64)
    index = torch.arange(5)
    estimates, error = fewer.tile(index, index, Precision.FLOAT32)
    exact = fewer.exact_scores(index, index)
    assert torch.equal(exact, tiles.exact_scores(index, index))
    assert bool(((estimates - exact).abs() <= error[:, None]).all())


def test_nobody_changes_scores_from_outside():
    tiles = ScoreTiles.from_rows(torch.randn(3, 4), torch.randn(2, 4), "cosine")
    for holder, name in (
        (tiles, "units"),
        (tiles.bounds, "chunk"),
        (tiles.units, "queries"),
        (tiles.query_vectors, "rows"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(holder, name, None)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_what_a_user_writes_is_what_a_user_reads(similarity):
    tiles = ScoreTiles.from_rows(rows(20, 0), rows(25, 1), similarity)
    for score in (-0.75, -1e-9, 0.0):
        assert tiles.to_user_score(tiles.to_exact_score(score)) == pytest.approx(score, rel=1e-15, abs=0)
    for score in (math.inf, -math.inf):
        assert tiles.to_exact_score(score) == score
    assert math.isnan(tiles.to_user_score(math.nan))
    assert tiles.to_exact_score(0.5) == (
        math.inf if similarity == "euclidean" else pytest.approx(0.5 * tiles.to_exact_score(1.0))
    )
    written = torch.tensor([-3.0, -0.5, 0.0], dtype=torch.float64)
    assert tiles.to_exact_scores(written).tolist() == [tiles.to_exact_score(score) for score in written.tolist()]
