"""Exact scores are the true values rounded once to float64, by both kernels, for every finite input."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.scores.exact import by_fractions, dot, in_pieces
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from tests.cases import sampled_product
from tests.engine.scores.true_scores import KERNELS, scores, true_score
from tests.functional.brute_force import BruteForce, root

SIMILARITIES = ("cosine", "dot", "euclidean")


def rows(kind: str, count: int, dim: int, dtype: type, seed: int) -> np.ndarray:
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


KINDS = ("normal", "wide", "outlier", "scales", "offset", "integers", "cancelling", "repeated", "half")


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_are_the_true_scores_rounded_once(kernel, similarity, dtype):
    for number, kind in enumerate(KINDS):
        queries, gallery = rows(kind, 5, 12, dtype, number), rows(kind, 6, 12, dtype, 100 + number)
        expected = [[true_score(query, item, similarity) for item in gallery] for query in queries]
        assert scores(queries, gallery, similarity, kernel) == expected, kind


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3), min_size=2),
    st.sampled_from(SIMILARITIES),
    st.sampled_from(KERNELS),
)
def test_hold_for_every_finite_float32(values, similarity, kernel):
    data = np.array(values[:8], np.float32)
    expected = [[true_score(query, item, similarity) for item in data] for query in data]
    assert scores(data, data, similarity, kernel) == expected


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("first", [1.0, 1.0 + 2.0**-52, -1.0, -1.0 - 2.0**-52, 2.0 - 2.0**-52])
def test_a_half_is_rounded_by_what_follows(first, kernel):
    """A sum in the middle between two float64, but for a term far below what two float64 can hold."""
    query = np.ones((1, 4))
    terms = product(
        [first], [2.0**-53, -(2.0**-53), 2.0**-54], [0, 2.0**-120, -(2.0**-120)], [0, 2.0**-240, -(2.0**-240)]
    )
    gallery = np.array(list(terms), np.float64)
    expected = [true_score(query[0], item, "dot") for item in gallery]
    assert scores(query, gallery, "dot", kernel) == [expected]
    assert len(set(expected)) >= 3


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=7).filter(any),
    st.lists(st.integers(-40, 40), min_size=2, max_size=7).filter(any),
    st.integers(1, 2**12),
    st.sampled_from(KERNELS),
)
def test_equal_angles_tie(query, item, factor, kernel):
    size = min(len(query), len(item))
    if not (any(query[:size]) and any(item[:size])):
        return
    query, item = np.array(query[:size], np.float32), np.array(item[:size], np.float32)
    (found,) = scores(query[None], np.stack([item, item * factor, item * 3]), "cosine", kernel)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_tie_of_angles_counts_as_a_tie(kernel):
    gallery = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    for labels in ([0, 1], [1, 0]):
        with engine_options(kernel=kernel):
            report = evaluate_retrieval(
                torch.ones(1, 2), torch.tensor([0]), gallery, torch.tensor(labels), group_size=None
            )
        assert report.mAP == pytest.approx(0.75, abs=1e-15)
        assert report.queries_with_ties == 1


def average_precision(scores_of_query: list[float], relevant: list[bool]) -> float:
    """Of distinct scores."""
    ranked = [hit for _, hit in sorted(zip(scores_of_query, relevant, strict=True), reverse=True)]
    hits = np.cumsum(ranked)
    return float(np.mean([hits[place] / (place + 1) for place in range(len(ranked)) if ranked[place]]))


@pytest.mark.parametrize(
    ("huge", "similarity", "kernel"),
    sampled_product([1e10, 1e18, float(np.finfo(np.float32).max)], SIMILARITIES, KERNELS, count=6),
)
def test_one_huge_row_leaves_the_others_as_they_are(huge, similarity, kernel):
    rng = np.random.default_rng(5)
    labels = np.arange(60) % 6
    data = (rng.normal(size=(60, 40)) + 0.9 * rng.normal(size=(6, 40))[labels]).astype(np.float32)
    data[0] = huge
    expected = []
    for i in range(60):
        others = [j for j in range(60) if j != i]
        found = [true_score(data[i], data[j], similarity) for j in others]
        if similarity == "euclidean" and i == 0:
            continue  # all others lie equally far from it
        expected.append(average_precision(found, [labels[j] == labels[i] for j in others]))
    with engine_options(kernel=kernel):
        report = evaluate_retrieval(
            torch.from_numpy(data), torch.from_numpy(labels), similarity=similarity, group_size=None
        )
    assert report.per_query["mAP"][60 - len(expected) :].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_small_components_beside_a_large_one_count(kernel):
    gallery = torch.tensor([[1e13, 1.0], [1e13, 1.1], [1e13, 1.2], [1e13, 1.3]])
    with engine_options(kernel=kernel):
        report = evaluate_retrieval(
            torch.tensor([[0.0, 1.0]]), torch.tensor([0]), gallery, torch.tensor([1, 1, 1, 0]), similarity="dot",
            group_size=None,
        )  # fmt: skip
    assert (report.mAP, report.threshold) == (1.0, float(gallery[3, 1]))


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_a_threshold_given_back_decides_alike(similarity):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        embeddings, labels = torch.randn(40, 9, generator=generator), torch.arange(40) % 5
        best = evaluate_retrieval(embeddings, labels, similarity=similarity, group_size=None)
        again = evaluate_retrieval(embeddings, labels, similarity=similarity, group_size=None, threshold=best.threshold)
        assert again.decision == best.decision


class InRationalNumbers(BruteForce):
    """All metrics by their definitions, on scores without any rounding but the last."""

    def score(self, a: np.ndarray, b: np.ndarray) -> float:
        if self.similarity == "hamming":
            return -float((a != b).sum())
        return true_score(a, b, self.similarity)


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
@given(sets(), st.sampled_from((*SIMILARITIES, "hamming")), st.sampled_from(KERNELS))
def test_metrics_are_those_of_rational_scores(data, similarity, kernel):
    embeddings, labels = data
    if similarity == "hamming":
        embeddings = (embeddings > embeddings.median()).float()
    reference = InRationalNumbers(embeddings.double().numpy(), labels.numpy(), similarity=similarity)
    with engine_options(kernel=kernel):
        report = evaluate_retrieval(embeddings, labels, similarity=similarity, recall_k=(1, 3), group_size=None)
    assert report.mAP == pytest.approx(reference.mean_average_precision, abs=1e-12)
    assert report.metrics()["map@r"] == pytest.approx(reference.map_at_r, abs=1e-12)
    assert report.recall_at[3] == pytest.approx(reference.recall_at(3), abs=1e-12)
    tp, fp, fn = reference.pooled(report.threshold)
    assert (tp, fp, fn) == (
        report.decision.true_positives,
        report.decision.false_positives,
        report.decision.false_negatives,
    )


@given(st.integers(1, 2**200), st.integers(1, 2**200))
def test_square_roots_of_rational_numbers(numerator, denominator):
    left = [float(numerator % 2**53), 0.0]
    assert by_fractions(left, [0.0, 0.0], "euclidean") == 0.0 - left[0] * left[0]
    value = Fraction(numerator, denominator)
    distance = by_fractions([float(value), 1.0], [0.0, 0.0], "euclidean")
    expected = root(Fraction(float(value)) ** 2 + 1)
    assert distance == 0.0 - expected * expected  # `expected ** 2` is not always rounded to nearest


@given(st.integers(0, 2**53), st.integers(-(2**53), 0))
@example(2**53, -1)  # the distance lies in the middle between two float64
@example(2**53, -3)
def test_distances_that_are_integers(one, other):
    distance = float(one - other)
    assert by_fractions([float(one)], [float(other)], "euclidean") == 0.0 - distance * distance


@pytest.mark.parametrize("single", [True, False])
def test_the_error_of_a_sum_grows_with_its_terms(single):
    """Adding up n errors of e may be off by n units of the last place of their sum."""
    terms, error = 50, 2.0**-60
    left = torch.full((1, terms + 1), error, dtype=torch.float64)
    left[0, 0] = 1.0  # beside it every other term is rounded away
    high, low, bound = dot(left, torch.ones_like(left), single=single)
    assert (float(high), float(low)) == (1.0, terms * error)
    assert float(bound) >= terms * 2.0**-53 * terms * error


def test_pieces_are_put_together_in_place():
    first, second = torch.arange(7)[:, None], torch.arange(5)[None, :]
    sizes = []

    def made(one, other):
        sizes.append((one + other).numel())
        return 10 * one + other

    for pairs, items in ((1000, 1000), (6, 1000), (1000, 4), (1, 1)):
        assert torch.equal(in_pieces(made, first, second, pairs, items), 10 * first + second)
    assert max(sizes[1:]) <= 6


def test_rows_at_the_upper_end_of_float64():
    huge = (
        torch.full((4, 3), 1e300, dtype=torch.float64)
        * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[:, None]
    )
    report = evaluate_retrieval(huge, torch.tensor([0, 0, 1, 1]), similarity="euclidean", group_size=None)
    assert report.mAP == pytest.approx(np.mean([1, 0.75, 0.75, 1]))
