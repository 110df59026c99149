"""Upper bounds from products of bytes: no score is above them, however odd the rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.blocks import Block
from fewshot_callbacks.engine.cpu.byte_kernels import ByteRows, encode, screen_bytes, upper_bounds
from fewshot_callbacks.engine.cpu.count_kernels import Side
from fewshot_callbacks.engine.cpu.products import Products, ProductSpace, bytes_possible, largest_code
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.pooled.record import PairRecord
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.products import ScoreTiles
from tests.engine.cases import KINDS, SIMILARITIES, vectors

ODD = ("plain", "ratios", "zeros", "denormals", "one large", "equal", "smallest")


def rows(kind: str, count: int, dim: int, seed: int) -> np.ndarray:
    """float32 rows that are hard to write in bytes."""
    draw = np.random.default_rng(seed)
    plain = draw.standard_normal((count, dim))
    with np.errstate(under="ignore"):
        made = {
            "plain": plain,
            "ratios": plain * 10.0 ** draw.integers(-30, 3, (count, dim)),
            "zeros": plain * (draw.random((count, 1)) < 0.5),
            "denormals": plain * 2.0**-140,
            "one large": np.where(np.arange(dim) == 0, 1e6, plain),
            "equal": np.ones((count, dim)) * plain[:, :1],
            "smallest": np.where(draw.random((count, dim)) < 0.5, 2.0**-149, 0.0),
        }[kind]
        return made.astype(np.float32)


def encoded(operand: np.ndarray, largest: int) -> tuple[np.ndarray, ByteRows]:
    codes = np.empty(operand.shape, np.int8)
    some = ByteRows(*(np.zeros(len(operand), np.float32) for _ in ByteRows._fields))
    encode(operand, largest, codes, some)
    return codes, some


@settings(deadline=None)  # the first compiles
@given(st.sampled_from(ODD), st.sampled_from(ODD), st.sampled_from([1, 2, 7, 130]), st.integers(0, 99))
def test_no_product_is_above_its_bound(kind, other, dim, seed):
    for largest in (127, 63):
        left, right = rows(kind, 11, dim, seed), rows(other, 13, dim, seed + 1)
        (codes, some), (others, more) = encoded(left, largest), encoded(right, largest)
        assert max(np.abs(codes).max(), np.abs(others).max()) <= largest
        exact = left.astype(np.float64) @ right.T.astype(np.float64)
        bounds = upper_bounds(codes.astype(np.int32) @ others.T.astype(np.int32), some, more)
        sizes = np.abs(left.astype(np.float64)) @ np.abs(right.T.astype(np.float64))
        assert (bounds >= exact - 1e-6 * sizes - 2.0**-120).all()  # float32 roundings, for which `bytes_low` makes room
        mirrored = -upper_bounds(-codes.astype(np.int32) @ others.T.astype(np.int32), some, more)
        assert (mirrored <= exact + 1e-6 * sizes + 2.0**-120).all()


@settings(deadline=None)  # the first compiles
@given(st.sampled_from(ODD), st.sampled_from([1, 7, 130]), st.integers(0, 99))
def test_norms_are_no_smaller_than_they_are(kind, dim, seed):
    left = rows(kind, 11, dim, seed)
    codes, some = encoded(left, 127)
    exact = left.astype(np.float64)
    missed = np.linalg.norm(exact - codes.astype(np.float64) * some.scale.astype(np.float64)[:, None], axis=1)
    assert (some.residual >= missed).all()
    assert (some.norm >= np.linalg.norm(exact, axis=1)).all()
    assert (some.residual <= 0.51 * np.sqrt(dim) * some.scale + 2.0**-119).all()


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 2, 130])
def test_every_pair_passes_where_its_own_score_is_asked(similarity, dtype, dim):
    """The kernel itself: at a threshold of its exact score no pair is ruled out, from either side."""
    assert largest_code() in (63, 127)
    for kind in KINDS:
        left, right = vectors(kind, 23, dim).astype(dtype), vectors(kind, 31, dim, gallery=True).astype(dtype)
        with engine_options():
            tiles = ScoreTiles.from_rows(torch.from_numpy(left), torch.from_numpy(right), similarity)
        assert bytes_possible(tiles)
        products, space = Products(tiles, Precision.BYTES, one_side=False, kept=None), ProductSpace()
        queries, items = torch.arange(23), torch.arange(31)
        scores = tiles.exact_scores(queries, items)
        operands = [
            products.operands(Block(0, index, index, torch.ones_like(index)), space, of_query=of_query)
            for index, of_query in ((queries, True), (items, False))
        ]
        found = products.make(*operands, space)[0]
        sides = [side_of(operand, len(index)) for operand, index in zip(operands, (queries, items), strict=True)]
        for item in range(31):
            for by_row in (True, False):
                index = queries if by_row else torch.full((23,), item)
                low = tiles.bytes_low(scores[:, item], index, of_query=by_row).numpy().astype(np.float32)
                low = np.nextafter(low, np.float32(-np.inf))
                record = PairRecord.nothing()
                for query in range(23):
                    one, before = slice(item, item + 1), int(record.filled[1])
                    screen_bytes(
                        found[query : query + 1, one], query, sides[0],  operands[0].bytes,
                        low if by_row else np.full(23, np.inf, np.float32),
                        Side(*(part[one] for part in sides[1])), ByteRows(*(part[one] for part in operands[1].bytes)),
                        np.full(1, np.inf if by_row else low[query], np.float32),
                        np.zeros((1, 2), np.int32), False, tiles.pairs(), record,
                    )  # fmt: skip
                    assert record.filled[1] == before + 1, (kind, query, item, by_row)


def side_of(operand, count):
    index, nothing = np.arange(count), np.zeros((count, 1), np.int32)
    return Side(
        index, np.ones(count, np.int64), np.zeros(count, np.int64), np.empty((count, 0)), nothing, nothing,
        operand.single.numpy(), np.zeros(count),
    )  # fmt: skip


def test_products_are_exact_at_the_largest_codes():
    largest = largest_code()
    for dim in (1, 3, 64, 510, 512):
        for sign in (1, -1):
            left = torch.full((5, dim), largest, dtype=torch.int8)
            right = torch.full((70, dim), sign * largest, dtype=torch.int8)
            assert torch._int_mm(left, right.T).unique().tolist() == [sign * largest**2 * dim]
