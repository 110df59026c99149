"""Threshold consistency between classes, against loops over classes and thresholds."""

import math

import numpy as np
import pytest
import torch

from fewshot_callbacks import Share, evaluate_retrieval
from fewshot_callbacks.engine import evaluation
from fewshot_callbacks.engine.pooled.sample import Sample
from tests.functional.brute_force import BruteForce
from tests.messages import missing_facts
from tests.thread_processes import in_threads

KEYS = ("opis@fmr0.1", "opis_gap@fmr0.1")


def slow(brute: BruteForce, rate: float = 0.1) -> tuple[list[float], list[int], list[list[float]]]:
    """Thresholds, classes and utilities by their definitions: the coarsest grid with 16 thresholds, and loops."""
    pairs = [
        (label, score, relevant)
        for label, scores, kinds in zip(brute.query_labels, brute.scores, brute.relevance, strict=True)
        for score, relevant in zip(scores, kinds, strict=True)
    ]
    others = sorted(score for _, score, relevant in pairs if not relevant)

    def matching(threshold):
        return sum(score >= threshold for score in others) / len(others)

    for exponent in range(6, -30, -1):
        step = 2.0**exponent
        numbers = range(math.floor(others[0] / step), math.ceil(others[-1] / step) + 1)
        grid = [n * step for n in numbers if rate / 10 <= matching(n * step) <= rate]
        if len(grid) >= 16:
            break
    utilities = {}
    for label in sorted(set(brute.query_labels.tolist())):
        own = [score for of, score, relevant in pairs if of == label and relevant]
        rest = [score for of, score, relevant in pairs if of == label and not relevant]
        if own and rest:
            shares = [(np.mean([s >= t for s in own]), np.mean([s < t for s in rest])) for t in grid]
            utilities[label] = [2 / (1 / a + 1 / b) if a and b else 0.0 for a, b in shares]
    return grid, list(utilities), list(utilities.values())


def case(seed=0, items=50, classes=6, dim=4):
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=items)
    centres = generator.normal(size=(classes, dim))
    spread = generator.uniform(0.3, 1.5, size=(classes, 1))
    return (centres[labels] + spread[labels] * generator.normal(size=(items, dim))).astype(np.float32), labels


@pytest.mark.parametrize(
    ("similarity", "shape"), [("cosine", "gallery"), ("cosine", "one set"), ("dot", "one set"), ("euclidean", "groups")]
)
def test_equals_its_definition(similarity, shape):
    embeddings, labels = case()
    if similarity == "dot":  # scores of relevant and other pairs are thresholds
        embeddings = np.round(2 * embeddings) / 2
    more = {"query_groups": np.arange(50) % 7} if shape == "groups" else {}
    if shape == "gallery":
        more = dict(zip(("gallery", "gallery_labels"), case(seed=1), strict=True))
    thresholds, classes, utilities = slow(BruteForce(embeddings, labels, similarity=similarity, **more))
    if shape == "one set":  # words of one letter, in the order of their numbers
        labels, classes = labels.astype(str), [*map(str, classes)]
    report = evaluate_retrieval(embeddings, labels, **more, similarity=similarity, metrics=KEYS)
    found = report.consistency[0.1]
    assert found.thresholds.tolist() == thresholds
    assert found.labels == tuple(classes)
    assert np.allclose(found.utility, utilities, rtol=1e-14, atol=0)
    table = np.array(utilities)
    assert report["opis@fmr0.1"] == pytest.approx(np.mean((table - table.mean(axis=0)) ** 2), rel=1e-12)
    assert report["opis_gap@fmr0.1"] == pytest.approx(table.mean() - table.mean(axis=1).min(), rel=1e-12)
    assert found.gap(0.4) == pytest.approx(table.mean() - np.sort(table.mean(axis=1))[:3].mean(), rel=1e-12)
    common = max(range(len(thresholds)), key=lambda at: (table.mean(axis=0)[at], at))
    gains = {label: max(row) - row[common] for label, row in zip(classes, utilities, strict=True)}
    wanting = found.wanting()
    assert found.common_threshold == thresholds[common]
    most_first = sorted((gain for gain in gains.values() if gain > 0), reverse=True)
    assert [gain for _, gain in wanting.values()] == pytest.approx(most_first)
    for label, (threshold, gain) in wanting.items():
        row = utilities[classes.index(label)]
        assert gain == pytest.approx(gains[label])
        assert row[thresholds.index(threshold)] == max(row)


def test_order_memory_and_processes_change_no_bit():
    embeddings, labels = case(items=500, classes=20, dim=8)
    order = np.random.default_rng(2).permutation(500)

    def share(process):
        own = slice(0, 200) if process.rank == 0 else slice(200, None)
        return evaluate_retrieval(embeddings[own], labels[own], metrics=KEYS, share=Share(process))

    expected = evaluate_retrieval(embeddings, labels, metrics=KEYS)
    others = [
        evaluate_retrieval(embeddings[order], labels[order], metrics=KEYS),
        evaluate_retrieval(embeddings, labels, metrics=KEYS, memory_mb=0.1),  # in batches of queries
    ]
    for report in (*others, *in_threads(2, share)):
        assert report.values == expected.values
        found, known = report.consistency[0.1], expected.consistency[0.1]
        assert found.labels == known.labels
        assert np.array_equal(found.thresholds, known.thresholds)
        assert np.array_equal(found.utility, known.utility)


@pytest.mark.parametrize(
    ("embeddings", "labels", "facts", "without_pairs"),
    [
        (torch.ones(40, 4), torch.arange(40) % 4, ("opis@fmr0.1", "NaN", "scores", "tie"), 0),
        (1 + 1e-12 * torch.randn(40, 4).double(), torch.arange(40) % 4, ("opis@fmr0.1", "NaN", "scores", "tie"), 0),
        (torch.ones(41, 4), [*torch.arange(40) % 4, 4], ("opis@fmr0.1", "NaN", "scores", "tie"), 1),
        (torch.eye(40, 4), torch.zeros(40).long(), ("opis@fmr0.1", "NaN", "two classes"), 1),
        (torch.randn(40, 4), [0] * 39 + [1], ("opis@fmr0.1", "NaN", "two classes"), 1),
        (torch.randn(40, 4), [*range(13)] * 3 + [13], (1, "14 classes", "pair"), 1),
    ],
)
def test_classes_and_thresholds_that_are_missing_are_noted(embeddings, labels, facts, without_pairs):
    report = evaluate_retrieval(embeddings, labels, metrics=KEYS)
    is_defined = "NaN" not in facts
    assert [missing_facts(note, facts) for note in report.notes].count([]) == 1, report.notes
    found = report.consistency[0.1]
    assert found.classes_without_pairs == without_pairs
    assert is_defined or (found.wanting(), math.isnan(found.common_threshold)) == ({}, True)
    assert math.isnan(report["opis@fmr0.1"]) == math.isnan(report["opis_gap@fmr0.1"]) == (not is_defined)


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
@pytest.mark.parametrize(
    "sampled", ["nothing", "one score", "only high scores", "only low scores", "the other way round"]
)
def test_no_value_depends_on_the_sample(similarity, sampled, monkeypatch):
    """A search that begins in the wrong place takes more passes, and finds the same thresholds."""
    embeddings, labels = case(items=90)
    expected = evaluate_retrieval(embeddings, labels, metrics=KEYS, similarity=similarity)
    assert math.isfinite(expected["opis@fmr0.1"])

    def wrong(estimates, drawn):
        scores = np.sort(np.concatenate(drawn)).astype(np.float64)
        other = {
            "nothing": scores[:0],
            "one score": scores[:1],
            "only high scores": scores[-3:],
            "only low scores": scores[:3],
            "the other way round": np.sort(scores[0] + scores[-1] - scores),
        }[sampled]
        return Sample(other, np.arange(len(other), 0.0, -1.0))

    monkeypatch.setattr(evaluation, "_joined_sample", wrong)
    found = evaluate_retrieval(embeddings, labels, metrics=KEYS, similarity=similarity)
    assert found.values == expected.values
    assert np.array_equal(found.consistency[0.1].thresholds, expected.consistency[0.1].thresholds)


def test_no_thresholds_are_sought_for_ever_beside_a_single_score():
    """Nearly all pairs score zero: the search comes closer and closer to it, and ends."""
    rows = torch.eye(40)
    rows[:, 0] += (torch.arange(40) == 3).float()
    report = evaluate_retrieval(rows, torch.arange(40) // 2, metrics=("opis@fmr0.1",), similarity="dot")
    assert math.isnan(report["opis@fmr0.1"])
