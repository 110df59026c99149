"""`evaluate_retrieval` at its edges: negative thresholds, labels that occur once, no dimension."""

import math

import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.functional import evaluate_retrieval

ONE = torch.tensor([[1.0, 0.0]])
FAR = torch.tensor([[-0.5, math.sqrt(0.75)], [-1.0, 0.0]])  # its match, and behind it another


@pytest.mark.parametrize(
    ("settings", "recall"),
    [
        ({}, 1.0),
        ({"threshold_bounds": (-1.0, 1.0)}, 1.0),
        ({"threshold_bounds": (0.0, 1.0)}, 0.0),
        ({"similarity": "dot"}, 1.0),
        ({"similarity": "euclidean"}, 1.0),
    ],
)
def test_every_threshold_may_be_chosen_unless_bounds_are_given(settings, recall):
    report = evaluate_retrieval(ONE, torch.tensor([0]), FAR, torch.tensor([0, 1]), label_groups=None, **settings)
    assert report.mAP == 1.0
    assert report["recall@precision0.95"] == recall


def test_labels_that_occur_once_are_what_is_wrong_whatever_the_groups():
    labels, groups = torch.arange(3), torch.tensor([0, 0, 1])
    with pytest.raises(
        ValueError, match="of the 3 queries has another item of its class \\(each of the 3 labels occurs once"
    ):
        evaluate_retrieval(torch.randn(3, 2), labels, query_groups=groups)
    with pytest.raises(
        ValueError, match="of the 3 queries has another item of its class that ids or groups do not exclude"
    ):
        evaluate_retrieval(torch.randn(3, 2), torch.tensor([5, 5, 7]), query_groups=groups)


@pytest.mark.parametrize("side", ["embeddings", "gallery"])
def test_embeddings_without_a_dimension_are_refused(side):
    sets = {"embeddings": torch.randn(4, 3), "gallery": torch.randn(4, 3)} | {side: torch.empty(4, 0)}
    labels = torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match=f"{side} has no dimensions \\(shape \\(4, 0\\)\\)"):
        evaluate_retrieval(sets["embeddings"], labels, sets["gallery"], labels)


def test_a_cosine_does_not_see_the_length_of_an_embedding():
    generator = torch.Generator().manual_seed(0)
    embeddings, labels = torch.randn(60, 8, generator=generator), torch.arange(60) % 6
    lengths = 2.0 ** torch.randint(-20, 20, (60, 1), generator=generator)  # powers of two round nothing
    report, other = (
        evaluate_retrieval(rows, labels, label_groups=3, metrics=(*DEFAULT_METRICS, "eer"))
        for rows in (embeddings, lengths * embeddings)
    )
    assert report.intervals == other.intervals
    assert report.decision == other.decision
    dot = evaluate_retrieval(lengths * embeddings, labels, label_groups=3, similarity="dot")
    assert dot.mAP != report.mAP
