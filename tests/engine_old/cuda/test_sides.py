"""Operands that the kernels multiply, and the bounds of what tensor cores make of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.cuda.sides import Side, rough_operand, to_tf32
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.scores.products import ScoreTiles
from tests.engine.cases import SIMILARITIES, prepared

HALVES = {"tf32": torch.float32, "float16": torch.float16}


def test_tf32_has_ten_bits_of_mantissa():
    values = torch.cat(
        [torch.randn(10_000) * 10.0 ** torch.randint(-30, 30, (10_000,)), torch.tensor([0.0, -0.0, 1.0])]
    )
    mantissa, exponent = np.frexp(values.double().numpy())
    # 11 bits with the leading one: to the nearest number of units of 2**-11
    nearest = np.ldexp(np.trunc(mantissa * 2**11 + 0.5 * np.sign(mantissa)) / 2**11, exponent)
    assert np.array_equal(to_tf32(values).double().numpy(), nearest)
    assert torch.equal(to_tf32(to_tf32(values)), to_tf32(values))
    assert not (to_tf32(values).view(torch.int32) & 0x1FFF).any()


def tensor_core(left, right, block):
    """Dot products of rows as tensor cores sum them: exact products, `block` at a time, aligned and cut off to float32.

    Fasi, Higham, Mikaitis and Pranesh (2021) found no guard bit on the V100, and more on its successors.
    """
    total = torch.zeros(len(left), dtype=torch.float64)
    for start in range(0, left.shape[1], block):
        terms = torch.cat([total[:, None], left[:, start : start + block] * right[:, start : start + block]], dim=1)
        largest = terms.abs().amax(dim=1).clamp(min=2.0**-126)
        unit = torch.exp2(largest.log2().floor() - 23)
        total = (terms / unit[:, None]).trunc().sum(dim=1) * unit
        unit = torch.exp2(total.abs().clamp(min=2.0**-126).log2().floor() - 23)
        total = (total / unit).trunc() * unit
    return total


def worst(dim, sign):
    """Rows whose components are all rounded in one direction, by nearly half a unit of the last of 11 bits."""
    return torch.full((1, dim), 1 + sign * 2.0**-11 * (1 - 2.0**-9) + 2.0**-10 * (sign < 0), dtype=torch.float32)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("dim", [3, 64, 512])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_no_estimate_is_off_by_more_than_is_claimed(similarity, dim, block, half):
    if half == "float16" and similarity != "cosine":
        pytest.skip("float16 is for cosines alone")
    generator = torch.Generator().manual_seed(dim)
    random = [torch.randn(40, dim, generator=generator) * torch.rand(40, 1, generator=generator) for _ in range(2)]
    queries = torch.cat([random[0], worst(dim, 1), worst(dim, 1), random[0].abs(), random[0]])
    gallery = torch.cat([random[1], worst(dim, 1), worst(dim, -1), random[1].abs(), random[0]])
    scores = ScoreTiles.from_rows(queries, gallery, similarity)
    scores = replace(scores, bounds=replace(scores.bounds, half=HALVES[half], chunk=dim + 2)).unrounded()
    index = torch.arange(len(queries))
    exact, sides = scores.pair_scores(index, index), []
    for of_query in (True, False):
        single = scores.operand(index, Precision.FLOAT32, of_query=of_query)
        sides.append(rough_operand(scores, single, of_query=of_query))
    (left, of_left), (right, of_right) = sides
    estimate = tensor_core(left.double(), right.double(), block).float() + of_left + of_right
    off = (estimate.double() - exact).abs()
    for of_query in (True, False):
        assert bool((off <= scores.error(index, Precision.HALF, of_query=of_query)).all())


@pytest.mark.parametrize("half", HALVES)
def test_the_bound_is_hardly_larger_than_what_happens(half):
    # every component rounded up as far as can be: the bound of 2 * 2**-11 is nearly reached
    dim = 64
    queries = torch.cat([worst(dim, 1), torch.ones(1, dim)])
    scores = ScoreTiles.from_rows(queries, queries, "dot")
    scores = replace(scores, bounds=replace(scores.bounds, half=HALVES[half])).unrounded()
    operand, _ = rough_operand(scores, scores.operand(torch.arange(2), Precision.FLOAT32, of_query=True), of_query=True)
    off = float((operand.double()[0].square().sum() - scores.pair_scores(*torch.zeros(2, 1).long())).abs())
    error = float(scores.error(torch.arange(1), Precision.HALF))
    assert 0.8 * error < off < error


def test_addresses_point_to_the_rows_of_each_block():
    blocks, start = [], 0
    for length, width in ((3, 2), (2, 0), (4, 5)):
        thresholds = torch.arange(length * width).double().view(length, width) + 100 * start
        index = torch.arange(start, start + length)
        blocks.append(Block(start, index, index, torch.ones(length).long(), Counts.zeros(thresholds, torch.int32)))
        start += length
    blocks.append(Block(start, torch.arange(start, start + 1), torch.zeros(1).long(), torch.ones(1).long()))
    scores, candidates = prepared(
        {"queries": torch.randn(10, 3), "query_labels": torch.arange(10), "similarity": "cosine"}
    )
    numbers = torch.arange(10), torch.arange(10)
    rectangle = ScoreRectangle(scores, candidates, blocks, blocks, symmetric=False, repeats=False, numbers=numbers)
    side = Side.of(rectangle, blocks, Precision.HALF, of_query=True)
    assert side.widths.tolist() == [2, 2, 2, 0, 0, 5, 5, 5, 5, 0]
    assert side.bits == 3
    thresholds = blocks[2].counts.thresholds
    assert side.thresholds_at[5:9].tolist() == [row.data_ptr() for row in thresholds]
    hits = blocks[0].counts.hits
    assert side.hits_at[:3].tolist() == [row.data_ptr() for row in hits]
    assert side.lowest[5] <= thresholds[0, 0]
    assert bool((side.lowest[[3, 4, 9]] == torch.inf).all())
