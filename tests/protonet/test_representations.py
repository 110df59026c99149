"""What represents a class, by its formula."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fewshot_callbacks.functional.episodes import sample_episodes
from fewshot_callbacks.protonet import (
    Distance,
    DistanceHead,
    DistanceRatioHead,
    Representation,
    SoftmaxHead,
    class_logits,
    evaluate_episodes,
)
from fewshot_callbacks.protonet.heads import check_representation
from tests.protonet.slow_distances import DISTANCES, slow_distance


def slow_class_logits(head: DistanceHead, query: Tensor, support: Tensor, representation: Representation) -> Tensor:
    """One query and one class at a time, in float64; the distance of a class first, then its logit."""
    out = torch.empty(len(query), len(support), dtype=torch.float64)
    for i, q in enumerate(query.tolist()):
        for c, shots in enumerate(support.tolist()):
            if representation == "nearest":
                distance = min(slow_distance(q, shot, head.distance) for shot in shots)
            else:
                directions = [[x / math.hypot(*shot) for x in shot] for shot in shots]
                columns = zip(*(shots if head.distance == "euclidean" else directions), strict=True)
                mean = [math.fsum(column) / len(shots) for column in columns]
                distance = slow_distance(q, mean, head.distance)
            if isinstance(head, DistanceRatioHead):
                out[i, c] = -math.exp(head.log_rho.item()) * math.log(math.sqrt(distance**2 + 1e-10))
            else:
                out[i, c] = -(distance**2)
    return out


def heads(distance: Distance) -> list[DistanceHead]:
    return [SoftmaxHead(distance), DistanceRatioHead(distance=distance)]


@given(
    ways=st.integers(1, 4),
    shots=st.integers(1, 4),
    queries=st.integers(1, 5),
    distance=st.sampled_from(DISTANCES),
    representation=st.sampled_from(["mean", "nearest"]),
    ratio=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=80, deadline=None)
def test_class_logits_equal_the_definition(
    ways: int, shots: int, queries: int, distance: Distance, representation: Representation, ratio: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(queries, 3, generator=generator, dtype=torch.float64)
    support = torch.randn(ways, shots, 3, generator=generator, dtype=torch.float64)
    head = heads(distance)[ratio]
    logits = class_logits(head, query, support, representation).detach()
    torch.testing.assert_close(logits, slow_class_logits(head, query, support, representation), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("representation", ["mean", "nearest"])
@pytest.mark.parametrize("head", heads("euclidean"), ids=["softmax", "dr"])
def test_several_episodes_at_once_equal_a_loop(head: DistanceHead, representation: Representation) -> None:
    query, support = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 4, 2, 5)
    together = class_logits(head, query, support, representation)
    for e in itertools.product(range(2), range(3)):
        torch.testing.assert_close(
            class_logits(head, query[e], support[e], representation), together[e], rtol=0, atol=0
        )


def test_with_one_shot_both_representations_are_the_same() -> None:
    query, support = torch.randn(6, 5), torch.randn(4, 1, 5)
    for head in heads("angular"):
        one, other = class_logits(head, query, support), class_logits(head, query, support, "nearest")
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


def test_the_nearest_support_point_gets_the_gradient() -> None:
    support = torch.tensor([[[0.0], [3.0]], [[9.0], [7.0]]], requires_grad=True)
    logits = class_logits(DistanceRatioHead(), torch.tensor([[1.0]]), support, "nearest")
    nn.functional.cross_entropy(logits, torch.tensor([0])).backward()
    assert support.grad is not None
    assert (support.grad != 0).flatten().tolist() == [True, False, False, True]


def test_any_head_takes_both_representations() -> None:
    class DotProduct(nn.Module):
        def forward(self, query: Tensor, points: Tensor) -> Tensor:
            return query @ points.mT

    query, support = torch.tensor([[1.0, 0.0]]), torch.tensor([[[1.0, 0.0], [3.0, 0.0]]])
    assert class_logits(DotProduct(), query, support).item() == 2.0
    assert class_logits(DotProduct(), query, support, "nearest").item() == 3.0


def test_no_shot_is_refused_for_both() -> None:
    for representation in ("mean", "nearest"):
        with pytest.raises(ValueError, match=r"support of shape \(3, 0, 2\) has 0 shots\. Give .* shot >= 1"):
            class_logits(SoftmaxHead(), torch.zeros(1, 2), torch.zeros(3, 0, 2), representation)


def test_an_unknown_representation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ProtoNet: there is no representation='median'\. Choose 'mean'"):
        check_representation("median", "ProtoNet")


def test_episodes_are_evaluated_with_the_nearest_support_point() -> None:
    """Two classes of two points each: the mean of one lies on the other's points, which the nearest point does not see."""
    embeddings = torch.tensor([[-4.0], [4.0], [-4.1], [4.1], [0.1], [-0.1], [0.2], [-0.2]])
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    episodes = sample_episodes(labels, ways=2, shots=3, queries=1, episodes=20)
    nearest = evaluate_episodes(embeddings, labels, SoftmaxHead(), episodes, representation="nearest")
    mean = evaluate_episodes(embeddings, labels, SoftmaxHead(), episodes)
    assert nearest.mean == 1.0
    assert mean.mean < 1.0
