"""An exact score is the true similarity of two rows, rounded once to float64; estimates are as near to it as they say."""

import math
import random
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.exact import close_score
from fewshot_callbacks.engine.layout import plan_layout
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.relevance import Lists, Relevance
from fewshot_callbacks.engine.tiles import Estimates
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from tests.cases import made, sampled_product
from tests.engine.cases import KINDS, SIMILARITIES, vectors
from tests.engine.oracles import exact_rows, root, true_scores
from tests.functional.brute_force import BruteForce
from tests.functional.brute_force import root as decimal_root

DTYPES = (np.float32, np.float64)


def of(queries, gallery, similarity, threads=1):
    return Vectors(
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
    return made.to_user(exact)


def rows(kind, count, dim, dtype, seed):
    """Rows on which a rounded sum goes wrong."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(count, dim))
    if kind == "wide":  # every component has a magnitude of its own
        normal *= 10.0 ** rng.uniform(-30, 30, (count, dim))
    elif kind == "outlier":
        normal[0] = np.finfo(np.float32).max
    elif kind == "scales":
        normal *= 10.0 ** rng.uniform(-18, 18, (count, 1))
    elif kind == "offset":
        normal = 1e4 + normal * 1e-3
    elif kind == "integers":
        normal = rng.integers(-3, 4, (count, dim))
    elif kind == "cancelling":  # each row is orthogonal to others up to its last bits
        half = normal[:, : dim // 2] * 10.0 ** rng.uniform(-8, 8, (count, dim // 2))
        normal = np.concatenate([half, -half * (1 + 1e-7 * (rng.random(half.shape) < 0.3))], axis=1)
        normal[::2, dim // 2 :] = normal[::2, : dim // 2]
    elif kind == "repeated":
        normal[1::2] = normal[::2][: len(normal[1::2])]
    elif kind == "half":
        normal = normal.astype(np.float16)
    return normal.astype(dtype)


ROWS = ("normal", "wide", "outlier", "scales", "offset", "integers", "cancelling", "repeated", "half")


def test_the_reference_is_that_of_rational_numbers():
    """Its integers against fractions and square roots of 400 digits."""
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 4, 3)) * 10.0 ** rng.integers(-20, 20, (2, 4, 3))
    right[0] = 0
    one, other = ([[Fraction(x) for x in row] for row in side.tolist()] for side in (left, right))
    for (i, a), (j, b) in product(enumerate(one), enumerate(other)):
        dot, square = (
            sum(x * y for x, y in zip(a, b, strict=True)),
            sum((x - y) ** 2 for x, y in zip(a, b, strict=True)),
        )
        norms = sum(x * x for x in a) * sum(y * y for y in b)
        cosine = math.copysign(decimal_root(dot * dot / norms), dot) if dot else 0.0
        for similarity, wanted in (("dot", float(dot)), ("euclidean", -decimal_root(square)), ("cosine", cosine)):
            assert true_scores(left, right, similarity)[i, j] == wanted
    assert [root(n, 1) for n in (0, 1, 4, 2**106 + 2**54)] == [0.0, 1.0, 2.0, math.ldexp(1, 53)]


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 12, 32, 33, 130])
def test_are_the_true_scores_rounded_once(dim, similarity, dtype):
    """Sums run in lanes of 32 components: with and without a rest."""
    for number, kind in enumerate(ROWS):
        queries, gallery = rows(kind, 5, dim, dtype, number), rows(kind, 6, dim, dtype, 100 + number)
        found, truth = scores(queries, gallery, similarity), true_scores(queries, gallery, similarity)
        assert np.array_equal(found, truth), kind
        one_set = scores(queries, None, similarity)
        assert np.array_equal(one_set, one_set.T)
        assert np.array_equal(one_set, true_scores(queries, queries, similarity)), kind
        equal = (queries[:, None] == queries[None]).all(2)  # equal rows tie with all others
        assert all(np.array_equal(found[i], found[j]) for i, j in np.argwhere(equal))


@pytest.mark.parametrize("dim", [1, 64, 100, 300])
def test_of_codes_are_minus_the_bits_that_differ(dim):
    queries, gallery = (vectors("codes", n, dim, n).astype(np.int8) for n in (9, 11))
    assert np.array_equal(scores(queries, gallery, "hamming"), true_scores(queries, gallery, "hamming"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=2),
    st.sampled_from(SIMILARITIES),
)
def test_hold_for_every_finite_float32(values, similarity):
    data = np.array(values[:8], np.float32)
    assert np.array_equal(scores(data, None, similarity), true_scores(data, data, similarity))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e150, 1e150), min_size=2, max_size=2), min_size=2, max_size=6),
    st.sampled_from(SIMILARITIES),
    st.integers(-1073, 1023 - 500),
)
def test_hold_at_every_power_of_two_of_float64(values, similarity, power):
    """Rows are scaled where squares would leave the range of float64: order and ties stay those of the true scores."""
    data = np.array(values)
    data[np.abs(data) < np.abs(data).max() * 2.0**-60] = (
        0  # products smaller than 2**-960 of the largest are not told apart
    )
    top = np.frexp(np.abs(data).max())[1]
    assume(np.abs(data).max() > 0)
    near, far = np.ldexp(data, -top), np.ldexp(np.ldexp(data, -top), power)
    near = np.ldexp(far, -power) if power < -900 else near  # what denormal numbers hold of them
    truth, found = true_scores(near, near, similarity), exact_rows(of(far, None, similarity))
    assert np.array_equal(np.unique(found, return_inverse=True)[1], np.unique(truth, return_inverse=True)[1])
    assert np.array_equal(np.sign(found), np.sign(truth))


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("power", [-1000, -500, -290, -3, 3, 290, 490])
def test_powers_of_two_scale_similarities_exactly(similarity, power):
    data = rows("normal", 12, 7, np.float64, 0)
    plain, scaled = scores(data, None, similarity), scores(np.ldexp(data, power), None, similarity)
    factor = {"cosine": 0, "dot": 2 * power, "euclidean": power}[similarity]
    assert np.array_equal(scaled, np.ldexp(plain, factor))


@pytest.mark.parametrize("first", [1.0, 1.0 + 2.0**-52, -1.0, -1.0 - 2.0**-52, 2.0 - 2.0**-52])
def test_a_half_is_rounded_by_what_follows(first):
    """A sum in the middle between two float64, but for a term far below what two float64 can hold."""
    query = np.ones((1, 4))
    tails = ([2.0**-53, -(2.0**-53), 2.0**-54], [0, 2.0**-120, -(2.0**-120)], [0, 2.0**-240, -(2.0**-240)])
    gallery = np.array(list(product([first], *tails)))
    expected = true_scores(query, gallery, "dot")
    assert np.array_equal(scores(query, gallery, "dot"), expected)
    assert len(np.unique(expected)) >= 3


powers = st.tuples(
    st.sampled_from((-3, -1, 1, 3)), st.sampled_from((0, -1, -52, -53, -54, -106, -107, -108, -160, -400))
)


@settings(max_examples=200, deadline=None)
@given(st.lists(powers, min_size=1, max_size=8), st.sampled_from(SIMILARITIES))
def test_sums_with_many_ties_and_remainders(terms, similarity):
    """Their remainder decides the rounding of what is computed from them."""
    row = np.array([[math.ldexp(number, power // (1 + (similarity == "euclidean"))) for number, power in terms]])
    other = np.zeros_like(row) if similarity == "euclidean" else np.ones_like(row)
    assert np.array_equal(scores(row, other, similarity), true_scores(row, other, similarity))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-40, 40), st.integers(-40, 40)), min_size=2, max_size=7), st.integers(1, 2**12))
def test_equal_angles_tie(components, factor):
    query, item = np.array(components, np.float32).T
    assume(query.any() and item.any())
    (found,) = scores(query[None].copy(), np.stack([item, item * factor, item * 3]), "cosine")
    assert found[0] == found[1] == found[2]


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


def near_cosine(chance, closeness, dim):
    """A query and an item whose cosine differs by about 2**-closeness of itself from the middle between two float64.

    The query has one component, so that the cosine is that component of the item over its norm. The item's squared norm
    is chosen, and made up by the squares of its other components.
    """
    while True:
        first, half = chance.getrandbits(53) | 1 << 52, middle(chance)
        norm = (first * first << 108) // half**2  # rounded down: 0 and 1 more are on the two sides of the middle
        step = norm >> (closeness - 1)
        norm += chance.choice((-step, step) if step else (0, 1))
        rest = as_squares(norm - first * first)
        if rest and max(rest) < 2**53 and len(rest) < dim:
            break
    query, item = np.zeros((1, dim)), np.zeros((1, dim))
    query[0, 0] = chance.choice((-1, 1)) * chance.randint(1, 9)
    item[0, : 1 + len(rest)] = [first, *rest]
    return query, item


def near_distance(chance, closeness, dim):
    """Likewise two rows and their distance; the first difference is not a float64."""
    while True:
        half = middle(chance)
        parts = as_squares(half**2 + chance.choice((-1, 1)) * max(1, half**2 >> (closeness - 1)))
        if len(parts) <= dim:
            break
    query, item = np.zeros((1, dim)), np.zeros((1, dim))
    item[0, : len(parts)] = parts
    query[0, : len(parts)] = [int(float(part)) - part for part in parts]
    return query, item


NEAR, DIMS, CLOSEST = {"cosine": near_cosine, "euclidean": near_distance}, (14, 60, 300), 96
"""What is promised: a cosine or a distance no closer to the middle than 2**-97 of itself is rounded to the nearer."""


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(50, CLOSEST), st.sampled_from(DIMS), st.sampled_from(list(NEAR)))
def test_are_rounded_to_the_nearer_of_the_two(seed, closeness, dim, similarity):
    query, item = NEAR[similarity](random.Random(seed), closeness, dim)
    assert np.array_equal(scores(query, item, similarity), true_scores(query, item, similarity))


@pytest.mark.parametrize("similarity", list(NEAR))
def test_as_close_as_is_promised(similarity):
    chance = random.Random(0)
    for number in range(60):
        query, item = NEAR[similarity](chance, CLOSEST - number % 10, DIMS[number % len(DIMS)])
        assert np.array_equal(scores(query, item, similarity), true_scores(query, item, similarity))


# ----------------------------------------------------------------------------------------------------- metrics on top


class InRationalNumbers(BruteForce):
    """All metrics by their definitions, on scores without any rounding but the last."""

    def score(self, a, b):
        return float(true_scores(a[None], b[None], self.similarity)[0, 0])


@st.composite
def sets(draw):
    """Small sets of any scale, offset and precision, with outliers and repeated rows."""
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    limit = {torch.float16: 2, torch.float64: 70}.get(dtype, 18)
    n, dim, seed = draw(st.integers(4, 9)), draw(st.integers(1, 5)), draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(n, dim)) if draw(st.booleans()) else rng.integers(-2, 3, (n, dim)).astype(float)
    values += draw(st.sampled_from([0.0, 0.0, 1.0, 1000.0]))
    values *= 10.0 ** draw(st.integers(-limit, limit) if dtype != torch.float16 else st.just(0))
    if draw(st.booleans()):
        values[draw(st.integers(0, n - 1))] *= 10.0**limit
    embeddings = torch.from_numpy(values).to(dtype).nan_to_num()  # the largest finite number where it is too large
    labels = torch.from_numpy(rng.integers(0, 3, n))
    labels[1] = labels[0]
    return embeddings, labels


@settings(max_examples=60, deadline=None)
@given(sets(), st.sampled_from((*SIMILARITIES, "hamming")))
def test_metrics_are_those_of_rational_scores(data, similarity):
    embeddings, labels = data
    if similarity == "hamming":
        embeddings = (embeddings > embeddings.median()).float()
    reference = InRationalNumbers(embeddings.double().numpy(), labels.numpy(), similarity=similarity)
    report = evaluate_retrieval(
        embeddings, labels, similarity=similarity, metrics=("mAP", "map@r", "recall@3"), label_groups=None
    )
    assert report.mAP == pytest.approx(reference.mean_average_precision, abs=1e-12)
    assert report.metrics()["map@r"] == pytest.approx(reference.map_at_r, abs=1e-12)
    assert report["recall@3"] == pytest.approx(reference.recall_at(3), abs=1e-12)
    best = report.decision
    assert reference.pooled(best.threshold) == (best.true_positives, best.false_positives, best.false_negatives)


@pytest.mark.parametrize(("huge", "similarity"), sampled_product([1e10, 1e18, 3.4e38], SIMILARITIES, count=4))
def test_one_huge_row_leaves_the_others_as_they_are(huge, similarity):
    data, labels = made(60, 6, 40, noise=0.9)
    data[0] = huge
    reference = InRationalNumbers(data.numpy(), labels.numpy(), similarity=similarity)
    report = evaluate_retrieval(data, labels, similarity=similarity, label_groups=None)
    for query in range(similarity == "euclidean", 60):  # all others lie equally far from the first
        ranked = reference.relevance[query][np.argsort(-reference.scores[query], kind="stable")]
        precision = np.cumsum(ranked)[ranked] / (np.flatnonzero(ranked) + 1)
        assert report.per_query["mAP"][query] == pytest.approx(precision.mean(), abs=1e-12)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_threshold_given_back_decides_alike(similarity):
    for seed in range(20):
        embeddings, labels = made(40, 5, 9, noise=3, seed=seed)
        best = evaluate_retrieval(embeddings, labels, similarity=similarity, label_groups=None)
        again = evaluate_retrieval(
            embeddings, labels, similarity=similarity, label_groups=None, threshold=best.decision.threshold
        )
        assert again.decision == best.decision


@pytest.mark.parametrize("similarity", [*SIMILARITIES, "hamming"])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e300])
def test_what_a_user_reads_is_read_back(similarity, scale):
    kind, dtype = ("codes", np.int8) if similarity == "hamming" else ("mixed", np.float64)
    made = of((vectors(kind, 30, 12) * (1 if similarity == "hamming" else scale)).astype(dtype), None, similarity)
    exact = exact_rows(made)
    assert np.array_equal(made.from_user(made.to_user(exact)), exact) or scale == 1e300  # where they are infinite
    assert made.from_user([math.inf, -math.inf]).tolist() == [math.inf, -math.inf]
    assert np.isnan(made.to_user(np.array([np.nan]))).all()
    assert similarity != "euclidean" or made.from_user(0.5) == math.inf  # no distance is negative


# ----------------------------------------------------------------------------------------------------------- estimates


@dataclass
class Seen:
    """Observes tiles: keeps all estimates."""

    estimates: Any
    once: bool = False
    errors: list = field(default_factory=list)

    def __post_init__(self):
        self.values = np.full(self.estimates.shape, np.nan)

    def space(self):
        return None

    def see(self, tile, space):
        for view, *_ in self.estimates.views(tile):
            values = np.asarray(view.estimates.T if view.turned else view.estimates, np.float64)[view.start : view.stop]
            of_queries = self.values[view.query + view.start : view.query + view.stop]
            part = of_queries[:, view.item : view.item + values.shape[1]]
            part[values > -np.inf] = values[values > -np.inf]


def estimates_of(vectors, precision, *, mutual=False, on=None):
    queries, items = len(vectors.pairs.queries), len(vectors.pairs.gallery)
    own = np.arange(queries, dtype=np.int32) if mutual else np.full(queries, -1, np.int32)
    layout = plan_layout(10**8, queries, items, vectors.columns, 0)._replace(height=7, width=14)
    shown = Estimates(vectors, Relevance(Lists.none(queries), own), precision, layout, mutual, on)
    seen = Seen(shown)
    shown.show(seen)
    if mutual:  # an item is not compared with itself
        seen.values[np.diag_indices(queries)] = exact_rows(vectors)[np.diag_indices(queries)]
    return seen.values


@pytest.mark.parametrize(
    ("kind", "dim", "dtype"), sampled_product((*KINDS, "cancelling"), [1, 2, 130], DTYPES, count=24)
)
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_no_estimate_is_off_by_more_than_the_error_of_its_row_and_column(similarity, kind, dim, dtype):
    """With one set and two; data far from the origin, or that cancel, included."""
    if kind == "cancelling":  # x . y = 0, by terms of the largest size
        left, right = np.ones((23, dim)), np.ones((31, dim))
        right[:, : dim // 2] = -1
        left, right = left * vectors("real", 1, dim), right * vectors("real", 31, 1) / vectors("real", 1, dim)
    else:
        left, right = vectors(kind, 23, dim), vectors(kind, 31, dim, gallery=True)
    for gallery in (right.astype(dtype), None):
        with computing():
            made = of(left.astype(dtype), gallery, similarity)
            exact = exact_rows(made)
            for precision in ("float32", "float64", *made.precisions()):
                for on in (None, torch.device("cpu"))[: 1 + (precision != "bytes")]:
                    off = np.abs(estimates_of(made, precision, mutual=gallery is None, on=on) - exact)
                    assert (off <= made.error(precision)[:, None]).all(), precision
                    assert gallery is not None or (off <= made.error(precision, -1)).all(), precision


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
        lengths = np.linalg.norm(queries, axis=1) * np.linalg.norm(gallery, axis=1).max() * made.from_user(1.0)
    for precision, roundoff in (("float16", 2.0**-11), ("float32", 2.0**-24), ("float64", 2.0**-53)):
        # of the sum (Higham, section 3.1), of each operand and of the result
        terms = {"float16": 2}.get(precision, dim + 2) * roundoff
        error = made.error(precision)
        assert (error >= terms / (1 - terms) * lengths).all()
        most = 1.2 * terms + 16 * roundoff + 1e-13 + dim * 2.0**-22 * (precision == "float16")
        assert (error <= most * lengths).all()


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_score_in_float64_is_as_close_as_it_says(similarity, dtype):
    for kind in (*KINDS, "cancelling", "wide"):
        two = rows(kind, 40, 20, dtype, 0) if kind in ROWS else vectors(kind, 40, 20).astype(dtype)
        made = of(two[:17].copy(), two[17:].copy(), similarity)
        exact = exact_rows(made)
        for i, j in np.ndindex(exact.shape):
            score, error = close_score(made.pairs, i, j)
            assert abs(Fraction(score) - Fraction(exact[i, j])) <= Fraction(error), kind
            assert error <= 1e-13


# -------------------------------------------------------------------------------------------------------- other vectors


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("one_set", [False, True])
def test_some_queries_or_other_items_have_the_scores_and_bounds_of_the_whole(similarity, one_set):
    """What is measured once for all pairs holds for each part of them."""
    queries = (rows("normal", 30, 24, np.float32, 0) + 1) * np.logspace(-6, 3, 30, dtype=np.float32)[:, None]
    gallery = None if one_set else rows("scales", 40, 24, np.float32, 1)
    some, others = np.array([28, 3, 3, 17, 5]), np.array([0, 29, 13, 7])
    with computing():
        whole = of(queries, gallery, similarity)
        exact = exact_rows(whole)
        for coded in (False, True):
            if coded and "bytes" in whole.precisions():
                whole.error("bytes")  # what was made of all rows serves their parts
            visited, taken = whole.with_gallery(whole.pairs.gallery[others], 30), whole.take(some, others)
            parts = ((visited, exact[:, others], slice(None)), (taken, exact[np.ix_(some, others)], some))
            for part, wanted, chosen in parts:
                assert np.array_equal(exact_rows(part), wanted)
                assert np.array_equal(part.to_user(wanted), whole.to_user(wanted))
                for precision in ("float32", "float64", *whole.precisions()):
                    assert np.array_equal(part.error(precision), whole.error(precision)[chosen])
                    assert not one_set or np.array_equal(part.error(precision, -1), whole.error(precision, -1)[others])
                    off = np.abs(estimates_of(part, precision) - wanted)
                    assert (off <= part.error(precision)[:, None]).all()
