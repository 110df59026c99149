"""Average precision as a loss, held against loops in float64 and against the exact metric."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.losses import BinaryCodes, SoftAveragePrecisionLoss, average_precision
from tests.cases import examples


def soft_ap_by_loops(scores: list[float], relevant: list[bool], bins: int, low: float, high: float) -> float:
    """Return the soft average precision of one query, computed a score at a time."""
    counts = [0.0] * bins
    hits = [0.0] * bins
    for score, is_relevant in zip(scores, relevant, strict=True):
        for b in range(bins):
            centre = high - b * (high - low) / (bins - 1)
            clamped = min(max(score, low), high)
            weight = max(0.0, 1 - abs(clamped - centre) * (bins - 1) / (high - low))
            counts[b] += weight
            hits[b] += weight * is_relevant
    if not any(relevant):
        return math.nan
    return sum(hits[b] * sum(hits[: b + 1]) / max(sum(counts[: b + 1]), 1e-300) for b in range(bins)) / sum(hits)


def scores_of(queries: Tensor, gallery: Tensor, similarity: str) -> Tensor:
    cosines = normalize(queries, dim=1) @ normalize(gallery, dim=1).T
    return cosines if similarity == "cosine" else 1 - (2.001 - 2 * cosines).sqrt()  # the source's listing


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**16), items=st.integers(2, 12), bins=st.integers(2, 30), low=st.floats(-1.5, 0.2))
def test_values_equal_those_of_loops_for_one_set_and_for_a_gallery(similarity, seed, items, bins, low):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(items, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (items,), generator=generator)
    loss = SoftAveragePrecisionLoss(bins, low=low, high=1.0, similarity=similarity, on_empty="zero")
    scores = scores_of(embeddings, embeddings, similarity)
    gallery_labels = labels[1:] % 2  # a gallery without the third class
    in_gallery = loss.average_precisions(embeddings, labels, embeddings[1:], gallery_labels)
    expected = []
    for query in range(items):
        relevant = (gallery_labels == labels[query]).tolist()
        expected_in_gallery = soft_ap_by_loops(scores[query, 1:].tolist(), relevant, bins, low, 1.0)
        assert float(in_gallery[query]) == pytest.approx(expected_in_gallery, abs=1e-10, nan_ok=True)
        candidates = torch.arange(items) != query
        relevant = (labels[candidates] == labels[query]).tolist()
        expected.append(soft_ap_by_loops(scores[query, candidates].tolist(), relevant, bins, low, 1.0))
    values = loss.average_precisions(embeddings, labels)
    assert values.tolist() == pytest.approx(expected, abs=1e-10, nan_ok=True)
    with_relevant = [value for value in expected if not math.isnan(value)]
    expected_loss = 1 - sum(with_relevant) / len(with_relevant) if with_relevant else 0.0
    assert float(loss(embeddings, labels)) == pytest.approx(expected_loss, abs=1e-10)


def test_the_euclidean_score_is_that_of_the_listing():
    """Equal embeddings have the distance sqrt(0.001) there; by the distance 0 the value differs."""
    angles = torch.tensor([0.0, 0.0, 0.02, 0.04, 0.05, 0.06], dtype=torch.float64)
    embeddings = torch.stack([angles.cos(), angles.sin()], dim=1)
    labels = torch.tensor([0, 0, 1, 0, 1, 0])
    cosines = normalize(embeddings, dim=1) @ normalize(embeddings, dim=1).T
    scores_of_listing = 1 - (2.001 - 2 * cosines).clamp(min=0.001).sqrt()
    scores_of_distance = 1 - (2 - 2 * cosines).clamp(min=0.0).sqrt()
    relevant = (labels[1:] == labels[0]).tolist()
    found = SoftAveragePrecisionLoss(9, low=0.9, similarity="euclidean").average_precisions(embeddings, labels)[0]
    assert float(found) == pytest.approx(
        soft_ap_by_loops(scores_of_listing[0, 1:].tolist(), relevant, 9, 0.9, 1.0), abs=1e-10
    )
    assert abs(float(found) - soft_ap_by_loops(scores_of_distance[0, 1:].tolist(), relevant, 9, 0.9, 1.0)) > 1e-3


def has_derivative(embeddings: Tensor, similarity: str, bins: int) -> bool:
    """Return whether no score lies at a corner of the triangular weights, where there is no derivative."""
    scores = scores_of(embeddings, embeddings, similarity)[~torch.eye(len(embeddings), dtype=torch.bool)]
    places = (1 - scores) * (bins - 1)
    return bool(((places - places.round()).abs() > 1e-4).all())


@pytest.mark.parametrize(("similarity", "is_recomputed"), [("cosine", True), ("euclidean", False)])
def test_gradients_are_those_of_finite_differences(similarity, is_recomputed, monkeypatch):
    if is_recomputed:
        monkeypatch.setattr(average_precision, "CACHED_BYTES", 0)
    monkeypatch.setattr(average_precision, "CHUNK_SCORES", 21)  # several chunks
    labels = torch.tensor([0, 0, 1, 1, 0, 2, 1])
    batches = (torch.randn(7, 3, dtype=torch.float64) for _ in range(20))
    embeddings = next(
        embeddings for embeddings in batches if has_derivative(embeddings, similarity, 7)
    ).requires_grad_()
    gallery = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    loss = partial(SoftAveragePrecisionLoss(7, similarity=similarity), query_labels=labels)
    loss_in_gallery = partial(loss, gallery_labels=torch.arange(5) % 3)
    # The second derivative is that of a penalty on the gradient.
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(loss, (embeddings,))
        assert check(lambda queries, items: loss_in_gallery(queries, gallery=items), (embeddings, gallery))
    (first,) = torch.autograd.grad(loss(embeddings), embeddings)
    (again,) = torch.autograd.grad(loss(embeddings), embeddings, create_graph=True)
    torch.testing.assert_close(again, first)


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-40, 2.0**100])
def test_the_scale_of_embeddings_changes_no_bit_of_the_loss(similarity, scale):
    labels = torch.arange(40) % 8
    loss = SoftAveragePrecisionLoss(similarity=similarity)

    def value_and_gradient(embeddings):
        embeddings.requires_grad_()
        value = loss(embeddings, labels)
        return value.detach(), torch.autograd.grad(value, embeddings)[0]

    embeddings = torch.randn(40, 16)
    expected, gradient = value_and_gradient(embeddings.clone())
    value, scaled_gradient = value_and_gradient(embeddings * scale)
    assert value == expected
    assert gradient.abs().max() > 0
    assert torch.equal(scaled_gradient * scale, gradient)
    row_scales = torch.where(torch.arange(40)[:, None] % 3 == 0, scale, 1.0)
    assert value_and_gradient(embeddings * row_scales)[0] == expected


@pytest.mark.parametrize("dim", [1, 6])
def test_gradients_of_relaxed_codes_are_those_of_finite_differences(dim):
    codes = (0.9 * torch.rand(8, dim, dtype=torch.float64) - 0.45).requires_grad_()
    labels = torch.arange(8) % 3
    loss = SoftAveragePrecisionLoss(similarity="hamming")
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda values: loss(torch.tanh(values), labels), (codes,))


@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**16), items=st.integers(2, 40), bits=st.integers(1, 12), classes=st.integers(1, 5))
def test_exact_codes_have_the_exact_average_precision_of_ties(seed, items, bits, classes):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2, (items, bits), generator=generator) * 2.0 - 1
    labels = torch.randint(0, classes, (items,), generator=generator)
    loss = SoftAveragePrecisionLoss(similarity="hamming", on_empty="zero")
    if len(labels.unique()) == items:
        assert float(loss(codes, labels)) == 0.0
        return
    exact = evaluate_retrieval(codes, labels, similarity="hamming", label_groups=None)["mAP"]
    assert 1 - float(loss(codes.double(), labels)) == pytest.approx(exact, abs=1e-9)
    assert 1 - float(loss(codes, labels)) == pytest.approx(exact, abs=1e-5)


def test_the_value_comes_near_the_exact_average_precision_as_bins_grow():
    labels = torch.arange(200) % 20
    embeddings = (torch.randn(20, 16)[labels] + 1.5 * torch.randn(200, 16)).double()
    exact = evaluate_retrieval(embeddings, labels, label_groups=None)["mAP"]
    losses = [SoftAveragePrecisionLoss(bins, low=-1)(embeddings, labels) for bins in (9, 33, 129, 2049)]
    shortfalls = [exact - 1 + float(loss) for loss in losses]
    assert shortfalls == sorted(shortfalls, reverse=True)
    # The value stays below the exact one: a relevant item is shared by two bins, and its part in the first counts without
    # the second.
    assert 0 < shortfalls[-1] < 0.01 < shortfalls[0] / 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("similarity", ["cosine", "euclidean", "hamming"])
def test_half_precision_is_computed_in_float32(dtype, similarity):
    embeddings = torch.randn(40, 16).mul(0.1).to(dtype).requires_grad_()
    labels = torch.arange(40) % 8
    loss = SoftAveragePrecisionLoss(similarity=similarity)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(embeddings, labels)
    value.backward()
    assert value.dtype == torch.float32
    assert value.detach() == loss(embeddings.detach().float(), labels)
    assert embeddings.grad is not None
    assert embeddings.grad.dtype == dtype
    assert embeddings.grad.isfinite().all()
    assert embeddings.grad.abs().sum() > 0


def test_equal_and_zero_embeddings_have_finite_gradients_and_a_batch_without_a_relevant_pair_zero_gradients():
    for similarity in ("cosine", "euclidean", "hamming"):
        embeddings = torch.ones(8, 4)
        embeddings[3] = 0
        embeddings.requires_grad_()
        SoftAveragePrecisionLoss(similarity=similarity)(embeddings, torch.arange(8) % 2).backward()
        assert embeddings.grad is not None
        assert embeddings.grad.isfinite().all()
        embeddings.grad = None
        value = SoftAveragePrecisionLoss(similarity=similarity, on_empty="zero")(embeddings, torch.arange(8))
        value.backward()
        assert (value, embeddings.grad.count_nonzero()) == (0, 0)


def test_a_few_steps_raise_the_exact_average_precision():
    labels = torch.arange(60) % 6
    inputs = torch.randn(6, 20)[labels] + 2 * torch.randn(60, 20)
    layer = torch.nn.Linear(20, 8)
    before = evaluate_retrieval(layer(inputs).detach(), labels, label_groups=None)["mAP"]
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        SoftAveragePrecisionLoss()(layer(inputs), labels).backward()
        optimizer.step()
    assert evaluate_retrieval(layer(inputs).detach(), labels, label_groups=None)["mAP"] > before + 0.3


def test_codes_are_relaxed_in_training_and_exact_in_evaluation():
    layer = BinaryCodes(temperature=0.5)
    outputs = torch.tensor([[0.3, -2.0, 0.0]], requires_grad=True)
    torch.testing.assert_close(layer(outputs), torch.tanh(2 * outputs))
    assert layer.eval()(outputs).tolist() == [[1, -1, 1]]
    assert "temperature=0.5" in repr(layer)
    assert "bins=25" in repr(SoftAveragePrecisionLoss())
