"""An exact score is the true similarity of two rows, rounded once to float64; estimates are as near to it as they say."""

import math
import random
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.exact import float64_score
from fewshot_callbacks.engine.int8 import largest_exact_int8
from fewshot_callbacks.engine.layout import plan_layout
from fewshot_callbacks.engine.options import computing, engine_options
from fewshot_callbacks.engine.precision import further_precisions
from fewshot_callbacks.engine.relevance import Lists, PairRelevance
from fewshot_callbacks.engine.tiles import Estimates
from fewshot_callbacks.engine.vectors import Vectors
from tests.cases import examples, sampled_product
from tests.engine.cases import KINDS, SIMILARITIES, vectors
from tests.engine.oracles import exact_rows, true_scores

DTYPES = (np.float32, np.float64)


def of(queries, gallery, similarity, threads=1):
    return Vectors.of(
        torch.from_numpy(queries), None if gallery is None else torch.from_numpy(gallery), similarity, threads=threads
    )


def scores(queries, gallery, similarity):
    """Scores as a user reads them: of whole rows, and of pairs one by one, which are the same."""
    made = of(queries, gallery, similarity)
    exact = exact_rows(made)
    rows, columns = np.indices(exact.shape).reshape(2, -1)
    chance = np.random.default_rng(0).permutation(len(rows))
    assert np.array_equal(made.exact(rows[chance], columns[chance]), exact.reshape(-1)[chance])
    assert np.abs(exact).max(initial=0) <= 1
    return made.scale.to_user(exact)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 32, 33, 130])
def test_are_the_true_scores_rounded_once(dim, similarity, dtype):
    """Sums run in lanes of 32 components: with and without a rest."""
    for kind in KINDS:
        queries, gallery = (vectors(kind, n, dim, n).astype(dtype) for n in (5, 6))
        found, truth = scores(queries, gallery, similarity), true_scores(queries, gallery, similarity)
        assert np.array_equal(found, truth), kind
        one_set = scores(queries, None, similarity)
        assert np.array_equal(one_set, one_set.T)
        assert np.array_equal(one_set, true_scores(queries, queries, similarity)), kind
        equal = (queries[:, None] == queries[None]).all(2)  # equal rows tie with all others
        assert all(np.array_equal(found[i], found[j]) for i, j in np.argwhere(equal))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=2),
    st.sampled_from(SIMILARITIES),
)
def test_hold_for_every_finite_float32(values, similarity):
    data = np.array(values[:8], np.float32)
    assert np.array_equal(scores(data, None, similarity), true_scores(data, data, similarity))


@pytest.mark.parametrize("power", [0, 20, -20])
@pytest.mark.parametrize("whole", [2.0**53, 2.0**53 + 2, 2.0**60 + 2.0**8])
def test_a_distance_beside_a_half_is_rounded_to_its_side(whole, power):
    """The square of a half, a little more and a little less: 106 bits of the root do not tell them apart."""
    half = math.ulp(whole) / 2
    rows = [[0.0, half, 0.0], [0.0, -whole, math.sqrt(half)], [0.0, -whole, 0.0], [math.sqrt(half) / 2, -whole, 0.0]]
    data = np.ldexp(np.array(rows), power)
    assert np.array_equal(scores(data, None, "euclidean"), true_scores(data, data, "euclidean"))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e150, 1e150), min_size=2, max_size=2), min_size=2, max_size=6),
    st.sampled_from(SIMILARITIES),
    st.integers(-1073, 1023 - 500),
)
def test_hold_at_every_power_of_two_of_float64(values, similarity, power):
    """Rows are scaled where squares would leave the range of float64: order and ties stay those of the true scores."""
    data = np.array(values)
    # products smaller than 2**-960 of the largest are not told apart
    data[np.abs(data) < np.abs(data).max() * 2.0**-60] = 0
    top = np.frexp(np.abs(data).max())[1]
    assume(np.abs(data).max() > 0)
    near, far = np.ldexp(data, -top), np.ldexp(np.ldexp(data, -top), power)
    near = np.ldexp(far, -power) if power < -900 else near  # what denormal numbers hold of them
    truth, found = true_scores(near, near, similarity), exact_rows(of(far, None, similarity))
    assert np.array_equal(np.unique(found, return_inverse=True)[1], np.unique(truth, return_inverse=True)[1])
    assert np.array_equal(np.sign(found), np.sign(truth))


powers = st.tuples(
    st.sampled_from((-3, -1, 1, 3)), st.sampled_from((0, -1, -52, -53, -54, -106, -107, -108, -160, -400))
)


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(powers, min_size=1, max_size=8), st.sampled_from(SIMILARITIES))
def test_sums_with_many_ties_and_remainders(terms, similarity):
    """Their remainder decides the rounding of what is computed from them."""
    row = np.array([[math.ldexp(number, power // (1 + (similarity == "euclidean"))) for number, power in terms]])
    other = np.zeros_like(row) if similarity == "euclidean" else np.ones_like(row)
    assert np.array_equal(scores(row, other, similarity), true_scores(row, other, similarity))


@given(st.integers(0, 2**53), st.integers(-(2**53), 0))
def test_distances_that_are_integers(one, other):
    """Some lie in the middle between two float64."""
    for low, high in ((other, one), (-1, 2**53), (-3, 2**53)):
        found = scores(np.array([[float(high)]]), np.array([[float(low)]]), "euclidean")
        assert found.tolist() == [[-float(high - low)]]


# ---------------------------------------------------------------------------- all but in the middle between two float64


def as_squares(total):
    """Integers whose squares add up to `total`, the largest first (about ten of them, as each step halves the bits)."""
    parts = []
    while total > 0:
        parts.append(math.isqrt(total))
        total -= parts[-1] ** 2
    return parts


def middle(chance):
    """An odd number of 54 bits: half of it lies in the middle between two float64."""
    return chance.getrandbits(54) | 1 | 1 << 53


def near_middle(similarity, chance, closeness, dim):
    """Two rows whose score differs by about 2**-closeness of itself from the middle between two float64.

    Squares of integers make up what is missing: of two rows with a distance, to the square of that distance; of a cosine
    with a row of one component, to the squared norm of the other row.
    """
    one, other, parts = np.zeros((1, dim)), np.zeros((1, dim)), []
    while not parts or len(parts) > dim or (similarity == "cosine" and max(parts[1:], default=2**53) >= 2**53):
        half, first = middle(chance), chance.getrandbits(53) | 1 << 52
        if similarity == "euclidean":
            parts = as_squares(half**2 + chance.choice((-1, 1)) * max(1, half**2 >> (closeness - 1)))
        else:
            norm = (first * first << 108) // half**2  # rounded down: 0 and 1 more are on the two sides of the middle
            step = norm >> (closeness - 1)
            norm += chance.choice((-step, step) if step else (0, 1))
            parts = [first, *as_squares(norm - first * first)]
    other[0, : len(parts)] = parts
    if similarity == "euclidean":  # the first difference is no float64
        one[0, : len(parts)] = [int(float(part)) - part for part in parts]
    else:
        one[0, 0] = chance.choice((-1, 1)) * chance.randint(1, 9)
    return one, other


DIMS, CLOSEST = (14, 60, 300), 96
"""What is promised: a cosine or a distance no closer to the middle than 2**-97 of itself is rounded to the nearer."""


@settings(max_examples=examples(160), deadline=None)
@given(
    st.integers(0, 2**32), st.integers(50, CLOSEST) | st.integers(CLOSEST - 9, CLOSEST), st.sampled_from(DIMS),
    st.sampled_from(["cosine", "euclidean"]),
)  # fmt: skip
def test_are_rounded_to_the_nearer_of_the_two(seed, closeness, dim, similarity):
    """Also as close to the middle as is promised."""
    query, item = near_middle(similarity, random.Random(seed), closeness, dim)
    assert np.array_equal(scores(query, item, similarity), true_scores(query, item, similarity))


@pytest.mark.parametrize("similarity", [*SIMILARITIES, "hamming"])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e300])
def test_what_a_user_reads_is_read_back(similarity, scale):
    kind, dtype = ("codes", np.int8) if similarity == "hamming" else ("mixed", np.float64)
    made = of((vectors(kind, 30, 12) * (1 if similarity == "hamming" else scale)).astype(dtype), None, similarity)
    exact = exact_rows(made)
    assert (
        np.array_equal(made.scale.from_user(made.scale.to_user(exact)), exact) or scale == 1e300
    )  # where they are infinite
    assert made.scale.from_user([math.inf, -math.inf]).tolist() == [math.inf, -math.inf]
    assert np.isnan(made.scale.to_user(np.array([np.nan]))).all()
    assert similarity != "euclidean" or made.scale.from_user(0.5) == math.inf  # no distance is negative


# ----------------------------------------------------------------------------------------------------------- estimates


@dataclass
class Seen:
    """Observes tiles: keeps all estimates."""

    estimates: Any
    per_query: bool = True
    errors: list = field(default_factory=list)

    def __post_init__(self):
        self.values = np.full(self.estimates.shape, np.nan)

    def new_workspace(self):
        return None

    def see(self, tile, space):
        for view, *_ in self.estimates.views(tile):
            values = np.asarray(view.estimates.T if view.transposed else view.estimates, np.float64)[
                view.start : view.stop
            ]
            of_queries = self.values[view.first_query + view.start : view.first_query + view.stop]
            part = of_queries[:, view.first_item : view.first_item + values.shape[1]]
            part[values > -np.inf] = values[values > -np.inf]


def estimates_of(vectors, precision, *, mutual=False, on=None):
    queries, items = len(vectors.pairs.queries), len(vectors.pairs.gallery)
    own = np.arange(queries, dtype=np.int32) if mutual else np.full(queries, -1, np.int32)
    layout = plan_layout(10**8, queries, items, vectors.scale.columns, 0)._replace(height=7, width=14)
    shown = Estimates(vectors, PairRelevance(Lists.none(queries), own), precision, layout, symmetric=mutual, device=on)
    seen = Seen(shown)
    shown.show(seen)
    if mutual:  # an item is not compared with itself
        seen.values[np.diag_indices(queries)] = exact_rows(vectors)[np.diag_indices(queries)]
    return seen.values


@pytest.mark.parametrize(
    ("kind", "dim", "dtype"), sampled_product((*KINDS, "orthogonal"), [1, 2, 130], DTYPES, count=20)
)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_no_estimate_is_off_by_more_than_the_error_of_its_row_and_column(similarity, kind, dim, dtype):
    """With one set and two; data far from the origin, or that cancel, included."""
    if kind == "orthogonal":  # x . y = 0, by terms of the largest size
        left, right = np.ones((23, dim)), np.ones((31, dim))
        right[:, : dim // 2] = -1
        left, right = left * vectors("real", 1, dim), right * vectors("real", 31, 1) / vectors("real", 1, dim)
    else:
        left, right = vectors(kind, 23, dim), vectors(kind, 31, dim, gallery=True)
    for gallery in (right.astype(dtype), None):
        with computing():
            made = of(left.astype(dtype), gallery, similarity)
            exact = exact_rows(made)
            for precision in ("float32", "float64", *further_precisions(made.scale.dim)):
                for on in (None, torch.device("cpu"))[: 1 + (precision != "int8")]:
                    off = np.abs(estimates_of(made, precision, mutual=gallery is None, on=on) - exact)
                    assert (off <= made.error_bounds(precision)[:, None]).all(), precision
                    assert gallery is not None or (off <= made.error_bounds_of_items(precision)).all(), precision


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_aligned_remainders_attain_the_error_bound_of_int8(similarity):
    """What rounding leaves of a query is parallel to the item, and what it leaves of the item to the rounded query."""
    largest = largest_exact_int8()
    if not largest:
        pytest.skip("this processor does not multiply int8 exactly")
    step = 0.499 / largest  # which rounds to zero
    for sign in (1, -1):
        made = of(np.array([[1.0, sign * step]]), np.array([[step, sign * 1.0]]), similarity)
        off = np.abs(estimates_of(made, "int8", mutual=False) - exact_rows(made))
        bound = made.error_bounds("int8")
        assert 0.95 * bound[0] <= off[0, 0] <= bound[0]


@dataclass
class Order:
    """Observes tiles: keeps where they lie, in the order in which they come."""

    height: int
    per_query: bool = True
    tiles: list = field(default_factory=list)

    def new_workspace(self):
        return None

    def see(self, tile, space):
        rows, columns = tile.estimates.shape
        self.tiles.append((range(tile.row, tile.row + rows), range(tile.column, tile.column + columns)))

    def blocks(self, items):
        return {item // self.height for item in items}


@pytest.mark.parametrize("mutual", [True, False])
def test_tiles_that_threads_compute_at_the_same_time_count_for_different_queries(mutual):
    """One lock guards the counters of a block of queries: threads that count for one block wait for each other."""
    queries, height, at_once = 2_000, 7, 16
    layout = plan_layout(10**8, queries, queries, 3, 0)._replace(height=height, width=2 * height)
    rows = vectors("real", queries, 3)
    own = np.arange(queries, dtype=np.int32) if mutual else np.full(queries, -1, np.int32)
    with computing():
        made = of(rows, None if mutual else rows, "dot")
        order = Order(height)
        with engine_options(threads=1):
            shown = Estimates(made, PairRelevance(Lists.none(queries), own), "float32", layout, symmetric=mutual)
            shown.show(order)
    first_of_all = order.tiles[: len(order.tiles) // 2]  # the last tiles are of few rows
    clashes = 0
    for start in range(0, len(first_of_all) - at_once, at_once):
        counted = [
            order.blocks(tile_rows) | (order.blocks(columns) if mutual else set())
            for tile_rows, columns in first_of_all[start : start + at_once]
        ]
        clashes += sum(map(len, counted)) - len(set().union(*counted))
    # One row after the other, each tile clashes more than once.
    assert clashes <= 0.25 * len(first_of_all)


@pytest.mark.parametrize("dim", [3, 64, 700])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_errors_are_those_of_the_theory(similarity, dim):
    """No estimate of a test comes near the worst case, so that only its formula can be held against the claim."""
    queries, gallery = (
        np.random.default_rng(n).normal(size=(n, dim)) * np.linspace(0.5, 3, n)[:, None] for n in (7, 9)
    )
    made = of(queries, gallery, similarity)
    lengths = np.ones(7)
    if similarity == "dot":
        lengths = np.linalg.norm(queries, axis=1) * np.linalg.norm(gallery, axis=1).max() * made.scale.from_user(1.0)
    for precision, roundoff in (("float16", 2.0**-11), ("float32", 2.0**-24), ("float64", 2.0**-53)):
        # of the sum (Higham, section 3.1), of each operand and of the result
        terms = {"float16": 2}.get(precision, dim + 2) * roundoff
        error = made.error_bounds(precision)
        assert (error >= terms / (1 - terms) * lengths).all()
        most = 1.2 * terms + 16 * roundoff + 1e-13 + dim * 2.0**-22 * (precision == "float16")
        assert (error <= most * lengths).all()


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_score_in_float64_is_as_close_as_it_says(similarity, dtype):
    for kind in KINDS:
        two = vectors(kind, 40, 20).astype(dtype)
        made = of(two[:17].copy(), two[17:].copy(), similarity)
        exact = exact_rows(made)
        for i, j in np.ndindex(exact.shape):
            score, error = float64_score(made.pairs, i, j)
            assert abs(Fraction(score) - Fraction(exact[i, j])) <= Fraction(error), kind
            assert error <= 1e-13


# -------------------------------------------------------------------------------------------------------- other vectors


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("one_set", [False, True])
def test_some_queries_or_other_items_have_the_scores_and_bounds_of_the_whole(similarity, one_set):
    """What is measured once for all pairs holds for each part of them."""
    queries = ((vectors("real", 30, 24) + 1) * np.logspace(-6, 3, 30)[:, None]).astype(np.float32)
    gallery = None if one_set else vectors("mixed", 40, 24, 1).astype(np.float32)
    some, others = np.array([28, 3, 3, 17, 5]), np.array([0, 29, 13, 7])
    with computing():
        whole = of(queries, gallery, similarity)
        exact = exact_rows(whole)
        for coded in (False, True):
            if coded and "int8" in further_precisions(whole.scale.dim):
                whole.error_bounds("int8")  # what was made of all rows serves their parts
            visited, taken = whole.with_gallery(whole.pairs.gallery[others], 30), whole.take(some, others)
            parts = ((visited, exact[:, others], slice(None)), (taken, exact[np.ix_(some, others)], some))
            for part, wanted, chosen in parts:
                assert np.array_equal(exact_rows(part), wanted)
                assert np.array_equal(part.scale.to_user(wanted), whole.scale.to_user(wanted))
                for precision in ("float32", "float64", *further_precisions(whole.scale.dim)):
                    assert np.array_equal(part.error_bounds(precision), whole.error_bounds(precision)[chosen])
                    assert not one_set or np.array_equal(
                        part.error_bounds_of_items(precision), whole.error_bounds_of_items(precision)[others]
                    )
                    off = np.abs(estimates_of(part, precision) - wanted)
                    assert (off <= part.error_bounds(precision)[:, None]).all()


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_what_a_part_finds_out_first_is_not_taken_for_that_of_the_whole(similarity):
    rows = vectors("real", 40, 24).astype(np.float32)
    with computing():
        whole, other = of(rows, None, similarity), of(rows, None, similarity)
        if "int8" not in further_precisions(whole.scale.dim):
            pytest.skip("This processor does not multiply int8.")
        chosen = np.arange(1)
        whole.take(chosen, chosen).error_bounds("int8")
        assert np.array_equal(whole.error_bounds("int8"), other.error_bounds("int8"))


def test_torch_multiplies_int8_exactly():
    """With its private product; where it is missing, evaluations would only take longer."""
    left, right = torch.arange(-8, 8, dtype=torch.int8).view(2, 8), torch.arange(24, dtype=torch.int8).view(8, 3)
    product = torch._int_mm(left, right)
    assert product.dtype == torch.int32
    assert product.tolist() == (left.long() @ right.long()).tolist()
