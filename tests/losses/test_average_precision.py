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


def by_loops(scores: list[float], relevant: list[bool], bins: int, low: float, high: float) -> float:
    """Soft average precision of one query, a score at a time."""
    counts, hits = [0.0] * bins, [0.0] * bins
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
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), items=st.integers(2, 12), bins=st.integers(2, 30), low=st.floats(-1.5, 0.2))
def test_equals_loops(similarity, seed, items, bins, low):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(items, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (items,), generator=generator)
    loss = SoftAveragePrecisionLoss(bins, low=low, high=1.0, similarity=similarity, on_empty="zero")
    scores = scores_of(embeddings, embeddings, similarity)
    # against a gallery without some classes
    of_two, others = loss.average_precisions(embeddings, labels, embeddings[1:], labels[1:] % 2), labels[1:] % 2
    expected = []
    for query in range(items):
        of_query = by_loops(scores[query, 1:].tolist(), (others == labels[query]).tolist(), bins, low, 1.0)
        assert float(of_two[query]) == pytest.approx(of_query, abs=1e-10, nan_ok=True)
        rest = torch.arange(items) != query
        relevant = (labels[rest] == labels[query]).tolist()
        expected.append(by_loops(scores[query, rest].tolist(), relevant, bins, low, 1.0))
    found = loss.average_precisions(embeddings, labels)
    assert found.tolist() == pytest.approx(expected, abs=1e-10, nan_ok=True)
    present = [value for value in expected if not math.isnan(value)]
    mean = 1 - sum(present) / len(present) if present else 0.0
    assert float(loss(embeddings, labels)) == pytest.approx(mean, abs=1e-10)


def test_the_euclidean_score_is_that_of_the_listing():
    """Also of equal embeddings, whose distance 0 it makes sqrt(0.001); by the distance itself the value is another one."""
    angles = torch.tensor([0.0, 0.0, 0.02, 0.04, 0.05, 0.06], dtype=torch.float64)
    embeddings, labels = torch.stack([angles.cos(), angles.sin()], dim=1), torch.tensor([0, 0, 1, 0, 1, 0])
    cosines = normalize(embeddings, dim=1) @ normalize(embeddings, dim=1).T
    of_listing, of_distance = (1 - (2 + more - 2 * cosines).clamp(min=more).sqrt() for more in (0.001, 0.0))
    relevant = (labels[1:] == labels[0]).tolist()
    found = SoftAveragePrecisionLoss(9, low=0.9, similarity="euclidean").average_precisions(embeddings, labels)[0]
    assert float(found) == pytest.approx(by_loops(of_listing[0, 1:].tolist(), relevant, 9, 0.9, 1.0), abs=1e-10)
    assert abs(float(found) - by_loops(of_distance[0, 1:].tolist(), relevant, 9, 0.9, 1.0)) > 1e-3


def clear_of_kinks(embeddings: Tensor, similarity: str, bins: int) -> bool:
    """Whether no score lies where the triangles have their corners, where there is no derivative."""
    scores = scores_of(embeddings, embeddings, similarity)[~torch.eye(len(embeddings), dtype=torch.bool)]
    places = (1 - scores) * (bins - 1)
    return bool(((places - places.round()).abs() > 1e-4).all())


@pytest.mark.parametrize(("similarity", "remade"), [("cosine", True), ("euclidean", False)])
def test_gradients_are_those_of_finite_differences(similarity, remade, monkeypatch):
    if remade:
        monkeypatch.setattr(average_precision, "KEPT_BYTES", 0)
    monkeypatch.setattr(average_precision, "CHUNK_SCORES", 21)  # several pieces
    labels = torch.tensor([0, 0, 1, 1, 0, 2, 1])
    drawn = (torch.randn(7, 3, dtype=torch.float64) for _ in range(20))
    embeddings = next(each for each in drawn if clear_of_kinks(each, similarity, 7)).requires_grad_()
    gallery = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    loss = partial(SoftAveragePrecisionLoss(7, similarity=similarity), labels=labels)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):  # as of a penalty on the first
        assert check(loss, (embeddings,))
        of_two = partial(loss, gallery_labels=torch.arange(5) % 3)
        assert check(lambda one, other, of_two=of_two: of_two(one, gallery=other), (embeddings, gallery))
    (first,) = torch.autograd.grad(loss(embeddings), embeddings)
    (again,) = torch.autograd.grad(loss(embeddings), embeddings, create_graph=True)
    torch.testing.assert_close(again, first)


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-40, 2.0**100])
def test_no_scale_changes_a_bit(similarity, scale):
    labels, loss = torch.arange(40) % 8, SoftAveragePrecisionLoss(similarity=similarity)

    def of(embeddings):
        embeddings.requires_grad_()
        value = loss(embeddings, labels)
        return value.detach(), torch.autograd.grad(value, embeddings)[0]

    embeddings = torch.randn(40, 16)
    (expected, gradient), (value, of_scaled) = of(embeddings.clone()), of(embeddings * scale)
    assert value == expected
    assert gradient.abs().max() > 0
    assert torch.equal(of_scaled * scale, gradient)
    rows = torch.where(torch.arange(40)[:, None] % 3 == 0, scale, 1.0)  # a length of its own for each row
    assert of(embeddings * rows)[0] == expected


@pytest.mark.parametrize("dim", [1, 6])
def test_gradients_of_relaxed_codes(dim):
    codes = (0.9 * torch.rand(8, dim, dtype=torch.float64) - 0.45).requires_grad_()
    labels = torch.arange(8) % 3
    loss = SoftAveragePrecisionLoss(similarity="hamming")
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda values: loss(torch.tanh(values), labels), (codes,))


@settings(max_examples=25, deadline=None)
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
    short = [exact - 1 + float(loss) for loss in losses]
    assert short == sorted(short, reverse=True)
    # what stays is lost where a relevant item's own two parts fall into two bins: the first part counts without the second
    assert 0 < short[-1] < 0.01 < short[0] / 5


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


def test_embeddings_alike_or_of_length_zero_have_finite_gradients_and_a_batch_without_a_pair_those_of_zero():
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


def test_codes_are_relaxed_in_training_alone():
    layer, outputs = BinaryCodes(temperature=0.5), torch.tensor([[0.3, -2.0, 0.0]], requires_grad=True)
    torch.testing.assert_close(layer(outputs), torch.tanh(2 * outputs))
    assert layer.eval()(outputs).tolist() == [[1, -1, 1]]
    assert "temperature=0.5" in repr(layer)
    assert "bins=25" in repr(SoftAveragePrecisionLoss())
