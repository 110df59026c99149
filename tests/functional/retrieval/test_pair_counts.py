"""Counts of pairs at a few hundred thresholds, which an evaluation reports for plots."""

import math

import numpy as np
import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS, evaluate_retrieval
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional.retrieval.operating_points import PairCounts


def embeddings(items: int = 600, noise: float = 0.8, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(items) % (items // 12)
    centres = torch.randn(items // 12, 24, generator=generator)
    return centres[labels] + noise * torch.randn(items, 24, generator=generator), labels


def scores_of_pairs(vectors, labels, similarity):
    """Ascending scores of relevant and of irrelevant pairs."""
    rows = vectors.double()
    if similarity == "cosine":
        rows = torch.nn.functional.normalize(rows, dim=1)
    scores = -torch.cdist(rows, rows) if similarity == "euclidean" else rows @ rows.T
    same = labels[:, None] == labels[None]
    others = ~torch.eye(len(labels), dtype=torch.bool)
    return scores[same & others].sort().values.numpy(), scores[~same].sort().values.numpy()


def reaching(scores, thresholds):
    return len(scores) - np.searchsorted(scores, thresholds)


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("plain", [False, True])
def test_counts_are_those_of_all_pairs(similarity, plain):
    vectors, labels = embeddings()
    with engine_options(plain=plain):
        counts = evaluate_retrieval(vectors, labels, similarity=similarity).pair_counts
    relevant, irrelevant = scores_of_pairs(vectors, labels, similarity)
    assert (counts.relevant, counts.irrelevant) == (len(relevant), len(irrelevant))
    assert (np.diff(counts.thresholds) >= 0).all()
    assert len(counts.thresholds) <= 500
    reach = counts.tolerance * 1.001 + 1e-9
    for counted, scores in ((counts.true_positives, relevant), (counts.false_positives, irrelevant)):
        assert (counted <= reaching(scores, counts.thresholds - reach)).all()
        assert (counted >= reaching(scores, counts.thresholds + reach)).all()
    assert counts.relevant_counts.sum() == len(relevant)
    assert counts.irrelevant_counts.sum() == len(irrelevant)
    assert counts.sampled_below == -math.inf


def test_operating_points_are_among_the_thresholds():
    report = evaluate_retrieval(*embeddings(), metrics=(*DEFAULT_METRICS, "recall@precision0.5", "recall@precision0.9"))
    for point in (report.decision, *report.at_precision.values()):
        at = int(np.flatnonzero(report.pair_counts.thresholds == point.threshold)[0])
        assert report.pair_counts.true_positives[at] == point.true_positives
        assert report.pair_counts.false_positives[at] == point.false_positives


def test_what_a_screen_has_not_counted_is_estimated_from_a_sample_and_said():
    vectors, labels = embeddings(1200, noise=0.3)
    with engine_options(collected=2**14):
        counts = evaluate_retrieval(vectors, labels).pair_counts
    _, irrelevant = scores_of_pairs(vectors, labels, "cosine")
    true = reaching(irrelevant, counts.thresholds)
    above = counts.thresholds > counts.sampled_below + counts.tolerance
    assert math.isfinite(counts.sampled_below)
    assert above.any()
    assert not above.all()
    assert (counts.false_positives[above] <= reaching(irrelevant, counts.thresholds[above] - 1e-3)).all()
    assert (counts.false_positives[above] >= reaching(irrelevant, counts.thresholds[above] + 1e-3)).all()
    assert np.abs(counts.false_positives - true)[~above].max() < 0.06 * len(irrelevant)
    assert counts.irrelevant_counts.sum() == len(irrelevant)


def test_codes_are_counted_at_each_distance():
    codes = torch.randint(0, 2, (200, 16), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(200) % 10
    counts = evaluate_retrieval(codes, labels, similarity="hamming").pair_counts
    distances = (codes[:, None] != codes[None]).sum(2)
    same = (labels[:, None] == labels[None]).fill_diagonal_(False)
    for threshold, tp in zip(counts.thresholds, counts.true_positives, strict=True):
        assert tp == int((same & (-distances >= threshold)).sum())
    assert (counts.tolerance, counts.sampled_below) == (0.0, -math.inf)
    assert counts.thresholds.tolist() == counts.thresholds.round().tolist()
    assert counts.edges.tolist() == list(
        range(-int(distances.max()), -int((distances + 99 * torch.eye(200)).min()) + 2)
    )
    assert counts.relevant_counts.tolist() == [int((same & (-distances == edge)).sum()) for edge in counts.edges[:-1]]


def test_a_single_class_has_no_irrelevant_pair():
    counts = evaluate_retrieval(torch.randn(8, 3), [1] * 8).pair_counts
    assert (counts.relevant, counts.irrelevant) == (56, 0)
    assert counts.irrelevant_counts.sum() == 0


def test_rates_of_no_pairs_are_not_numbers():
    empty = np.array([0])
    counts = PairCounts(np.array([0.5]), empty, empty, 0, 0, np.array([0.0, 1.0]), empty, empty)
    for rates in (counts.recall, counts.precision, counts.false_match_rate, counts.false_non_match_rate):
        assert np.isnan(rates).all()
    assert np.isnan(counts.at(0.5)).all()


def test_thresholds_are_dense_where_false_matches_change():
    """A curve over false match rates is read on a logarithmic axis: from 30 on, no step doubles the count.

    In 4,096 dimensions the scores of irrelevant pairs have a standard deviation of 3 of the evenly spaced thresholds.
    """
    labels = torch.arange(600) % 50
    vectors = torch.randn(50, 4096)[labels] + 0.1 * torch.randn(600, 4096)
    false_positives = evaluate_retrieval(vectors, labels).pair_counts.false_positives
    counted = np.unique(false_positives[false_positives >= 30])
    assert (counted[1:] < 2 * counted[:-1]).all()
