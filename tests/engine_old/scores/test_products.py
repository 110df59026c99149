"""The error that is claimed of an estimate is that of the theory: no estimate of a test comes near it."""

import math

import pytest
import torch

from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.products import CHUNK, ScoreTiles

DIMS = (3, 64, 300, 2000)


def items(count: int, dim: int, seed: int) -> torch.Tensor:
    rows = torch.randn(count, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return rows * torch.linspace(0.5, 3.0, count, dtype=torch.float64)[:, None]


def lengths(tiles: ScoreTiles, queries: torch.Tensor, gallery: torch.Tensor) -> torch.Tensor:
    """What the relative error of a product is multiplied with: |q| |g| at most, as a key."""
    if tiles.similarity == "cosine":
        return torch.ones(len(queries), dtype=torch.float64)
    return queries.norm(dim=1) * gallery.norm(dim=1).max() * tiles.to_exact_score(1.0)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dim", DIMS)
def test_of_a_product_in_some_precision(similarity, dim):
    queries, gallery = items(7, dim, 0), items(9, dim, 1)
    tiles = ScoreTiles.from_rows(queries, gallery, similarity)
    chunks = math.ceil(dim / CHUNK)
    for precision, unit_roundoff, terms in (
        (Precision.FLOAT32, 2.0**-24, min(CHUNK, dim) + chunks),
        (Precision.FLOAT64, 2.0**-53, dim),
    ):
        # gamma of the sum (Higham, section 3.1), and one rounding of each operand
        theory = (terms + 2) * unit_roundoff / (1 - terms * unit_roundoff)
        for of_query, own, others in ((True, queries, gallery), (False, gallery, queries)):
            error = tiles.error(torch.arange(len(own)), precision, of_query=of_query)
            least = theory * lengths(tiles, own, others)
            assert bool((error >= least).all()), (precision, of_query)
            slack = 16 * unit_roundoff * lengths(tiles, own, others)
            assert bool((error <= 1.05 * least + slack + 1e-13 * (precision == Precision.FLOAT64)).all()), (
                precision,
                of_query,
            )


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dim", DIMS)
def test_of_a_product_in_half_precision(similarity, dim):
    queries, gallery = items(7, dim, 0), items(9, dim, 1)
    tiles = ScoreTiles.from_rows(queries, gallery, similarity)
    unit_roundoff = 2.0**-8 if tiles.half == torch.bfloat16 else 2.0**-11
    error = tiles.error(torch.arange(7), Precision.HALF)
    # rounding either operand, and the result
    least = 3 * unit_roundoff * lengths(tiles, queries, gallery)
    assert bool((error >= least).all())
    assert bool((error <= 1.1 * least).all())


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_largest_error_is_that_of_some_query(similarity):
    queries, gallery = items(7, 64, 0), items(9, 64, 1)
    tiles = ScoreTiles.from_rows(queries, gallery, similarity)
    for precision in (Precision.HALF, Precision.FLOAT32, Precision.FLOAT64):
        assert tiles.largest_error(precision) == float(tiles.error(torch.arange(7), precision).max())
