"""Threshold consistency between classes, against loops over classes and thresholds."""

import math

import numpy as np
import pytest
import torch

from fewshot_callbacks import Relevance, Share, evaluate_retrieval
from fewshot_callbacks.functional import ThresholdConsistency
from tests.functional.brute_force import BruteForce
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
    classes, utilities = [], []
    for label in sorted(set(brute.query_labels.tolist())):
        own = [score for of, score, relevant in pairs if of == label and relevant]
        rest = [score for of, score, relevant in pairs if of == label and not relevant]
        if own and rest:
            classes.append(label)
            sensitivity = [np.mean([score >= t for score in own]) for t in grid]
            specificity = [np.mean([score < t for score in rest]) for t in grid]
            utilities.append(
                [2 / (1 / a + 1 / b) if a and b else 0.0 for a, b in zip(sensitivity, specificity, strict=True)]
            )
    return grid, classes, utilities


def case(seed=0, items=50, classes=6, dim=4):
    generator = np.random.default_rng(seed)
    labels = generator.integers(classes, size=items)
    centres = generator.normal(size=(classes, dim))
    spread = generator.uniform(0.3, 1.5, size=(classes, 1))
    return (centres[labels] + spread[labels] * generator.normal(size=(items, dim))).astype(np.float32), labels


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean"])
@pytest.mark.parametrize("shape", ["one set", "groups", "gallery"])
def test_equals_its_definition(similarity, shape):
    embeddings, labels = case()
    if similarity == "dot":  # scores of relevant and other pairs are thresholds
        embeddings = np.round(2 * embeddings) / 2
    sets = {"query_labels": labels}
    arguments = {"labels": labels}
    if shape == "groups":
        sets["query_groups"] = arguments["query_groups"] = np.arange(50) % 7
    if shape == "gallery":
        other, other_labels = case(seed=1)
        sets |= {"gallery": other, "gallery_labels": other_labels}
        arguments |= {"gallery": other, "gallery_labels": other_labels}
    thresholds, classes, utilities = slow(BruteForce(embeddings, similarity=similarity, **sets))
    report = evaluate_retrieval(embeddings, **arguments, similarity=similarity, metrics=KEYS)
    found = report.consistency[0.1]
    assert found.thresholds.tolist() == thresholds
    assert found.labels == tuple(classes)
    assert np.allclose(found.utility, utilities, rtol=1e-14, atol=0)
    table = np.array(utilities)
    assert report["opis@fmr0.1"] == pytest.approx(np.mean((table - table.mean(axis=0)) ** 2), rel=1e-12)
    assert report["opis_gap@fmr0.1"] == pytest.approx(table.mean() - table.mean(axis=1).min(), rel=1e-12)
    common = max(range(len(thresholds)), key=lambda at: (table.mean(axis=0)[at], at))
    gains = {label: max(row) - row[common] for label, row in zip(classes, utilities, strict=True)}
    wanting = found.wanting()
    assert [gain for _, gain in wanting.values()] == pytest.approx(
        sorted((g for g in gains.values() if g > 0), reverse=True)
    )
    for label, (threshold, gain) in wanting.items():
        row = utilities[classes.index(label)]
        assert gain == pytest.approx(gains[label])
        assert row[thresholds.index(threshold)] == max(row)


def same(one, other):
    assert one.values == other.values
    found, expected = one.consistency[0.1], other.consistency[0.1]
    assert found.labels == expected.labels
    assert np.array_equal(found.thresholds, expected.thresholds)
    assert np.array_equal(found.utility, expected.utility)


def test_order_memory_and_processes_change_no_bit():
    embeddings, labels = case(items=700, classes=20, dim=8)
    expected = evaluate_retrieval(embeddings, labels, metrics=KEYS)
    order = np.random.default_rng(2).permutation(700)
    same(evaluate_retrieval(embeddings[order], labels[order], metrics=KEYS), expected)
    same(evaluate_retrieval(embeddings, labels, metrics=KEYS, memory_mb=0.1), expected)  # in batches of queries

    def share(process):
        own = slice(0, 200) if process.rank == 0 else slice(200, None)
        return evaluate_retrieval(embeddings[own], labels[own], metrics=KEYS, share=Share(process))

    for report in in_threads(2, share):
        same(report, expected)


def test_a_class_with_a_wider_spread_wants_a_lower_threshold():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 12
    centres = torch.nn.functional.normalize(torch.randn(12, 32, generator=generator), dim=1)
    spread = torch.where(labels == 3, 0.25, 0.1)[:, None]
    embeddings = centres[labels] + spread * torch.randn(600, 32, generator=generator)
    words = [f"class {label:02}" for label in labels.tolist()]
    found = evaluate_retrieval(embeddings, words, metrics="opis@fmr0.1").consistency[0.1]
    [(name, (threshold, gain)), *_] = found.wanting().items()
    assert (name, threshold < found.common_threshold, gain > 0.01) == ("class 03", True, True)
    assert found.gap(1 / 12) > found.gap(1 / 2) > 0
    even = ThresholdConsistency(found.thresholds, found.labels, found.utility[[0] * 12])
    assert (even.opis, even.gap()) == pytest.approx((0, 0), abs=1e-15)


@pytest.mark.parametrize(
    ("embeddings", "labels", "note"),
    [
        (torch.ones(40, 4), torch.arange(40) % 4, "needs two classes"),
        (torch.eye(40, 4), torch.zeros(40).long(), "needs two classes"),
        (torch.randn(40, 4), [0] * 39 + [1], "needs two classes"),
        (torch.randn(40, 4), [*range(13)] * 3 + [13], "leaves out 1 of 14 classes"),
    ],
)
def test_what_is_missing_is_said(embeddings, labels, note):
    report = evaluate_retrieval(embeddings, labels, metrics=KEYS)
    assert [note in one for one in report.notes].count(True) == 1
    assert math.isnan(report["opis@fmr0.1"]) == math.isnan(report["opis_gap@fmr0.1"]) == ("needs" in note)


def test_classes_are_needed():
    judged = Relevance.from_lists([[1], [0]])
    with pytest.raises(ValueError, match=r"opis@fmr0\.1 cannot be computed where items have several labels"):
        evaluate_retrieval(torch.randn(2, 4), relevance=judged, metrics="opis@fmr0.1")
