"""Heads and what represents a class, against the formulas: logits, gradients and limits."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fewshot_callbacks.protonet import DistanceRatioHead, SoftmaxHead, SupportClassifier, class_logits, make_head
from fewshot_callbacks.protonet.heads import DistanceHead, prototypes, squared_distances
from tests.cases import examples
from tests.messages import refused

DISTANCES = ["euclidean", "unit_euclidean", "angular"]
HEADS = [SoftmaxHead(), DistanceRatioHead()]
EVERY_HEAD = [kind(distance=distance) for kind in (SoftmaxHead, DistanceRatioHead) for distance in DISTANCES]
each_head = pytest.mark.parametrize("head", HEADS, ids=["softmax", "dr"])


def test_a_head_without_logits_says_what_it_lacks() -> None:
    class Unfinished(DistanceHead):
        pass

    with refused(NotImplementedError, "Unfinished", "logits(squared)"):
        Unfinished()(torch.zeros(1, 2), torch.zeros(3, 2))


def slow_distance(q: list[float], p: list[float], distance: str) -> float:
    """Between two vectors, in float64."""
    if distance == "euclidean":
        return math.dist(q, p)
    lengths = math.hypot(*q), math.hypot(*p)
    if 0.0 in lengths:
        return 1.0 if distance == "unit_euclidean" else math.pi / 2
    cosine = math.fsum(a * b for a, b in zip(q, p, strict=True)) / math.prod(lengths)
    chord = math.dist([a / lengths[0] for a in q], [b / lengths[1] for b in p])
    return chord if distance == "unit_euclidean" else math.acos(min(max(cosine, -1.0), 1.0))


def slow_logits(head: DistanceHead, query: Tensor, support: Tensor, representation: str = "mean") -> Tensor:
    """One query and one class at a time, in float64; the distance of a class first, then its logit."""
    out = torch.empty(len(query), len(support), dtype=torch.float64)
    for i, q in enumerate(query.tolist()):
        for c, shots in enumerate(support.tolist()):
            if representation == "nearest":
                distance = min(slow_distance(q, shot, head.distance) for shot in shots)
            else:
                directions = [[x / (math.hypot(*shot) or 1.0) for x in shot] for shot in shots]
                columns = zip(*(shots if head.distance == "euclidean" else directions), strict=True)
                mean = [math.fsum(column) / len(shots) for column in columns]
                distance = slow_distance(q, mean, head.distance)
            if isinstance(head, DistanceRatioHead):
                out[i, c] = -math.exp(head.log_rho.item()) * math.log(math.sqrt(distance**2 + 1e-10))
            else:
                out[i, c] = -(distance**2)
    return out


@pytest.mark.parametrize(
    ("head", "distances", "probability", "loss"),
    [
        (SoftmaxHead(), (1.0, 2.0), 0.95257, 0.048587),
        (DistanceRatioHead(math.log(2.0)), (1.0, 2.0), 0.80000, 0.22314),
        (SoftmaxHead(), (2.0, 4.0), 0.99999, 6.1442e-6),
        (DistanceRatioHead(math.log(2.0)), (2.0, 4.0), 0.80000, 0.22314),
    ],
)
def test_both_heads_give_the_values_of_table_1_of_the_distance_ratio_paper(
    head: nn.Module, distances, probability: float, loss: float
) -> None:
    logits = head(torch.zeros(1, 2).double(), torch.tensor(distances).double().diag())  # a prototype on each axis
    assert logits.softmax(dim=-1)[0, 0].item() == pytest.approx(probability, abs=5e-6)
    assert nn.functional.cross_entropy(logits, torch.tensor([0])).item() == pytest.approx(loss, rel=2e-5)


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
    head=st.sampled_from(EVERY_HEAD),
    representation=st.sampled_from(["mean", "nearest"]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(50), deadline=None)
def test_logits_of_several_shots_and_episodes_equal_the_definition(sizes, head, representation, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    ways, shots, queries = sizes
    query = torch.randn(2, queries, 3, generator=generator, dtype=torch.float64)
    support = torch.randn(2, ways, shots, 3, generator=generator, dtype=torch.float64)
    query[0, 0] = 0.0  # an embedding without a direction
    if not head.on_sphere:
        support[1, 0] = query[1, 0]  # a distance of zero
    logits = class_logits(head, query[None], support[None], representation).detach()[0]
    expected = [slow_logits(head, *episode, representation) for episode in zip(query, support, strict=True)]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-8, atol=1e-8)


@each_head
def test_a_large_common_offset_of_all_embeddings_loses_no_digits(head: nn.Module) -> None:
    query, points = torch.randint(-8, 8, (30, 16)).float() / 8, torch.randint(-8, 8, (5, 16)).float() / 8
    # Sums of eighths and 2**14 are exact in float32, so the differences of the shifted points are the same numbers.
    shifted = head(query + 2.0**14, points + 2.0**14)
    torch.testing.assert_close(shifted, head(query, points), rtol=0.0, atol=0.0)


def test_the_nearest_support_point_and_log_rho_get_gradients() -> None:
    support, head = torch.tensor([[[0.0], [3.0]], [[9.0], [7.0]]], requires_grad=True), DistanceRatioHead()
    logits = class_logits(head, torch.tensor([[1.0]]), support, "nearest")
    nn.functional.cross_entropy(logits, torch.tensor([0])).backward()
    assert (support.grad != 0).flatten().tolist() == [True, False, False, True]
    assert 0 < abs(head.log_rho.grad.item()) < math.inf


@pytest.mark.parametrize("head", [*EVERY_HEAD, DistanceRatioHead().to(torch.bfloat16)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_embeddings_and_autocast_give_float32_logits(head: DistanceHead, dtype: torch.dtype) -> None:
    query, points = torch.randn(7, 5).to(dtype), torch.randn(4, 5).to(dtype)
    logits = head(query, points)
    assert logits.dtype == getattr(head, "rho", logits).dtype == torch.float32
    torch.testing.assert_close(logits, slow_logits(head, query, points[:, None]).float(), rtol=1e-5, atol=1e-5)
    assert prototypes(points[:, None]).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(query, points).equal(logits)
        assert torch.is_autocast_enabled("cpu")


def test_make_head_takes_a_name_or_any_module() -> None:
    class DotProduct(nn.Module):
        def forward(self, query: Tensor, points: Tensor) -> Tensor:
            return query @ points.mT

    head, query, support = DotProduct(), torch.tensor([[1.0, 0.0]]), torch.tensor([[[1.0, 0.0], [3.0, 0.0]]])
    assert make_head(head) is head
    assert [class_logits(head, query, support, kind).item() for kind in ("mean", "nearest")] == [2.0, 3.0]
    assert isinstance(make_head("softmax"), SoftmaxHead)
    assert repr(make_head("dr")) == "DistanceRatioHead(rho=7.389)"
    assert repr(SoftmaxHead("angular")) == "SoftmaxHead(distance='angular')"


def test_small_angles_keep_their_digits() -> None:
    query, points = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1e-6], [-1.0, 1e-6]])
    small, large = squared_distances(query, points, "angular")[0].sqrt().tolist()
    assert small == pytest.approx(1e-6, rel=1e-5)  # the arc cosine of a float32 product gives 0
    assert large == pytest.approx(math.pi, abs=1e-5)


@pytest.mark.parametrize("head", EVERY_HEAD, ids=repr)
@pytest.mark.parametrize("place", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("kind", ["float64", "bfloat16 autocast"])
def test_gradients_are_finite_where_points_meet(head: DistanceHead, place: list[float], kind: str) -> None:
    dtype = torch.float64 if kind == "float64" else torch.float32
    query = torch.tensor([place], dtype=dtype, requires_grad=True)
    points = torch.tensor([place, [-x for x in place], [0.0, 2.0, 0.0]], dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind.startswith("bfloat16")):
        loss = nn.functional.cross_entropy(head(query @ torch.eye(3, dtype=dtype), points), torch.tensor([0]))
    loss.backward()
    assert loss.isfinite()
    assert torch.cat([query.grad, points.grad]).abs().max() < 1e3  # no NaN, and no blow-up at length 0


@given(
    scale=st.floats(1.0, 1e3),
    seed=st.integers(0, 2**16),
    shots=st.integers(1, 3),
    representation=st.sampled_from(["mean", "nearest"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    autocast=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_scaling_all_embeddings_changes_no_distance_ratio_probability(
    scale, seed, shots, representation, dtype, autocast
) -> None:
    generator = torch.Generator().manual_seed(seed)
    support, query = (torch.randn(n, 4, generator=generator, dtype=torch.float64).to(dtype) for n in (3 * shots, 6))
    # Scaling float32 numbers rounds them, which is not the head's doing: powers of two scale without.
    scale = scale if dtype == torch.float64 else 2.0 ** round(math.log2(scale))
    if torch.cdist(query, support).min() < 0.02:
        return  # the 1e-10 under the square root shows there
    classifier, labels = (
        SupportClassifier(DistanceRatioHead(), representation),
        torch.arange(3).repeat_interleave(shots),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        one, other = (classifier.fit(s * support, labels).probabilities(s * query) for s in (1.0, scale))
    assert one.dtype == dtype
    torch.testing.assert_close(other, one, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_at_a_prototype_the_confidence_goes_to_one_and_the_others_to_zero(distance: str, dtype) -> None:
    """Equations 7 and 8, approached along a line: the confidence in the class of the point rises to 1."""
    points = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, -1.0]], dtype=torch.float64)
    head = DistanceRatioHead(distance=distance)
    for c in range(3):
        before = 0.0
        for step in (1.0, 0.5, 0.1, 0.01, 0.0):
            query = (points[c : c + 1] + step * torch.tensor([[0.3, 0.2]], dtype=torch.float64)).to(dtype)
            confidence = head(query, points.to(dtype)).softmax(-1)[0].detach()
            assert float(confidence[c]) >= before - 1e-6
            before = float(confidence[c])
        torch.testing.assert_close(confidence.double(), torch.eye(3, dtype=torch.float64)[c], rtol=0.0, atol=1e-6)


@given(seed=st.integers(0, 2**16), ways=st.integers(2, 5))
@settings(max_examples=examples(30), deadline=None)
def test_probabilities_are_those_of_bayes_rule_with_gaussian_or_with_narrow_cauchy_densities(
    seed: int, ways: int
) -> None:
    """Appendix A: densities around the points of the classes, all classes equally likely, written out."""
    generator = torch.Generator().manual_seed(seed)
    query, points = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (4, ways))

    def by_bayes_rule(density: Callable[[float], float]) -> Tensor:
        likelihoods = [[density(math.dist(q, p)) for p in points.tolist()] for q in query.tolist()]
        return torch.tensor([[one / math.fsum(row) for one in row] for row in likelihoods], dtype=torch.float64)

    def gaussian(distance: float, sigma: float = math.sqrt(0.5)) -> float:
        return math.exp(-0.5 * (distance / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))

    def cauchy(distance: float, width: float) -> float:
        return width / (math.pi * (width**2 + distance**2))

    softmax, ratio = (
        head(query, points).softmax(-1).detach() for head in (SoftmaxHead(), DistanceRatioHead(math.log(2)))
    )
    torch.testing.assert_close(softmax, by_bayes_rule(gaussian), rtol=1e-6, atol=1e-9)
    limit = [by_bayes_rule(lambda distance, width=width: cauchy(distance, width)) for width in (1.0, 0.1, 1e-5)]
    apart = [float((found - ratio).abs().max()) for found in limit]
    assert apart[0] > apart[1] > apart[2]
    torch.testing.assert_close(ratio, limit[-1], rtol=1e-6, atol=1e-9)  # the 1e-10 of the head is this width, squared


def test_the_mean_of_the_support_is_most_likely_for_softmax_and_one_of_its_points_for_distance_ratios() -> None:
    """Appendix A: the product of the densities of the support points, for a point of the class that is moved about."""
    support = torch.tensor([[0.0, 0.0], [1.0, 0.2], [0.3, 1.5]], dtype=torch.float64)
    steps = torch.linspace(-1, 2, 61, dtype=torch.float64)
    grid = torch.cat([torch.cartesian_prod(steps, steps), support.mean(0, keepdim=True), support])

    def most_likely(head: DistanceHead) -> Tensor:
        # a logit is the logarithm of a density, up to a constant
        return grid[head(support, grid).sum(dim=0).argmax()]

    torch.testing.assert_close(most_likely(SoftmaxHead()), support.mean(0))
    assert (most_likely(DistanceRatioHead(math.log(2))) - support).norm(dim=1).min() < 1e-12
