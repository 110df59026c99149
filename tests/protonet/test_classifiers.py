"""Classifiers from vectors or from a support set."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fewshot_callbacks.protonet import ClassVectors, DistanceRatioHead, SoftmaxHead, SupportClassifier, class_logits
from tests.cases import examples
from tests.messages import refused


@given(
    shots=st.integers(1, 3),
    representation=st.sampled_from(["mean", "nearest"]),
    distance=st.sampled_from(["euclidean", "unit_euclidean", "angular"]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(30), deadline=None)
def test_equals_the_logits_of_an_episode(shots, representation, distance, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    support = torch.randn(4, shots, 3, generator=generator, dtype=torch.float64)
    query = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([-3, 0, 5, 2**40])
    shuffled = torch.randperm(4 * shots, generator=generator)
    head = DistanceRatioHead(distance=distance)
    classifier = SupportClassifier(head, representation)
    classifier.fit(support.flatten(0, 1)[shuffled], labels.repeat_interleave(shots)[shuffled])
    expected = class_logits(head, query, support, representation).detach()
    torch.testing.assert_close(classifier(query).detach(), expected, rtol=1e-9, atol=1e-9)
    assert classifier.classes.equal(labels)
    assert classifier.predict(query).tolist() == labels[expected.argmax(1)].tolist()
    torch.testing.assert_close(classifier.probabilities(query), expected.softmax(-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("representation", "logits"), [("mean", [-64.0, 0.0]), ("nearest", [-64.0, -1.0])])
def test_classes_of_different_sizes(representation: str, logits: list[float]) -> None:
    classifier = SupportClassifier(SoftmaxHead(), representation).fit(torch.zeros(2, 3), torch.tensor([0, 1]))
    classifier.fit(torch.tensor([[0.0], [2.0], [9.0]]), torch.tensor([1, 1, 0]))  # in place of the first
    torch.testing.assert_close(classifier(torch.tensor([[1.0]])), torch.tensor([logits], dtype=torch.float64))


def test_a_support_set_that_is_missing_empty_not_finite_or_of_another_dimension_is_refused() -> None:
    classifier = SupportClassifier(SoftmaxHead())
    with refused(ValueError, "SupportClassifier", "fit(support_embeddings, support_labels)"):
        classifier.predict(torch.zeros(1, 2))
    with refused(ValueError, "SupportClassifier.fit", "embeddings", "(0, 2)"):
        classifier.fit(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    with refused(ValueError, "SupportClassifier.fit", "embeddings", "NaN", 2, 0):
        classifier.fit(torch.full((2, 2), torch.nan), torch.tensor([0, 1]))
    classifier.fit(torch.zeros(2, 2), torch.tensor([0, 1]))
    with refused(ValueError, "SupportClassifier", "embeddings", "3 dimensions", "support", 2):
        classifier(torch.zeros(1, 3))


@pytest.mark.parametrize("ask", ["probabilities", "predict"])
def test_embeddings_and_logits_that_are_not_finite_get_no_class(ask: str) -> None:
    classifier = SupportClassifier(SoftmaxHead(), "nearest", embed=lambda items: items)
    classifier.fit(torch.eye(2).bfloat16(), torch.tensor([5, 6]))
    assert classifier.probabilities(torch.eye(2).bfloat16()).dtype == torch.float32
    queries = torch.tensor([[1.0, 0.0]] * 3 + [[math.nan, 1.0]] * 2)
    with refused(ValueError, f"SupportClassifier.{ask}", 2, 5, 3, "NaN", "embeddings.isfinite().all(dim=1)"):
        getattr(classifier, ask)(queries)
    assert [len(getattr(classifier, ask)(queries[:number])) for number in (0, 1)] == [0, 1]
    with refused(ValueError, f"SupportClassifier.{ask}", "logits", 2, 5, 3, "rho"):  # distances that overflow
        getattr(classifier, ask)(torch.tensor([[0.0, 1.0]] * 3 + [[1e200, 0.0]] * 2, dtype=torch.float64))


def test_class_vectors_give_no_class_to_embeddings_and_logits_that_are_not_finite() -> None:
    layer = ClassVectors(2, 2, SoftmaxHead())
    assert repr(layer).startswith("ClassVectors(\n  classes=2, dim=2")
    with refused(ValueError, "ClassVectors.probabilities", "embeddings", "NaN", 2, 5, 3):
        layer.probabilities(torch.tensor([[1.0, 0.0]] * 3 + [[-math.inf, 1.0]] * 2))
    layer.vectors.data.fill_(math.nan)
    with refused(ValueError, "ClassVectors.probabilities", "logits", 1, 0, "class vectors"):
        layer.probabilities(torch.zeros(1, 2))


def test_class_vectors_learn_as_an_ordinary_classifier() -> None:
    """Three directions, scattered: the layer alone learns them, and its confidence is largest at its own vectors."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(90) % 3
    embeddings = 4 * torch.eye(3)[labels] + 0.3 * torch.randn(90, 3, generator=generator)
    layer = ClassVectors(classes=3, dim=3)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(layer(embeddings), labels).backward()
        optimizer.step()
    probabilities = layer.probabilities(embeddings)
    assert probabilities.argmax(1).eq(labels).all()
    torch.testing.assert_close(layer.probabilities(layer.vectors), torch.eye(3), rtol=0.0, atol=1e-6)
    torch.testing.assert_close(layer.probabilities(7 * embeddings), probabilities, rtol=0.0, atol=1e-6)
