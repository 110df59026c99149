"""Binary codes against vectors of -1 and +1, and against loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional._codes import signs as signs_of
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.grouped_recall import grouped_recall
from tests.cases import sampled_product
from tests.functional.brute_force import BruteForce, TooManyOrdersError


def signs(items, bits, seed=0, classes=None):
    """Codes of -1 and +1; with classes, those of one class differ in every fourth bit or so."""
    rng = np.random.default_rng(seed)
    if classes is None:
        return torch.from_numpy(rng.choice([-1.0, 1.0], (items, bits)))
    centres = np.random.default_rng(7).choice([-1.0, 1.0], (classes, bits))
    return torch.from_numpy(centres[np.arange(items) % classes] * rng.choice([1.0, 1.0, 1.0, -1.0], (items, bits)))


def both_roads(case, **options):
    """As codes, and as vectors of -1 and +1."""
    options = {
        "metrics": (
            *("mAP", "recall@1", "recall@2", "recall@5", "recall@precision0.2", "recall@precision0.6"),
            *("recall@precision0.95", "eer"),
        ),
        "label_groups": 3,
    } | options
    codes, general = dict(case), dict(case)
    counted = evaluate_retrieval(codes.pop("queries"), codes.pop("labels"), similarity="hamming", **codes, **options)
    products = evaluate_retrieval(general.pop("queries"), general.pop("labels"), similarity="dot", **general, **options)
    return counted, products


def assert_same(counted, products, bits):
    for field in ("grouped", "intervals", "queries_with_ties"):
        assert getattr(counted, field) == getattr(products, field), field
    assert counted.per_class() == products.per_class()
    scores = {"threshold": math.nan, "auc_pr": math.nan}  # in other units, and rounded otherwise
    assert repr(counted.values | scores) == repr(products.values | scores)
    points = [(counted.decision, products.decision)]
    points += [(counted.at_precision[p], products.at_precision[p]) for p in counted.at_precision]
    for one, other in points:
        assert (one.true_positives, one.false_positives) == (other.true_positives, other.false_positives)
        if not math.isnan(other.threshold):
            assert one.threshold == (other.threshold - bits) / 2
    assert counted.auc_pr.low - 1e-12 <= products.auc_pr.high
    assert products.auc_pr.low <= counted.auc_pr.high + 1e-12
    assert counted.auc_pr.error < 1e-12


@pytest.mark.parametrize(
    ("form", "bits", "plain"),
    sampled_product(
        ["one", "groups", "two", "ids", "distractors", "sampled"], [3, 64, 100, 130], [False, True], count=16
    ),
)
def test_codes_are_vectors_of_signs(form, bits, plain):
    labels = torch.arange(180) % 13
    case, extra = {"queries": signs(180, bits, classes=13), "labels": labels}, {}
    if form == "groups":
        case["query_groups"] = torch.arange(180) % 60
    elif form == "sampled":
        extra["max_queries"] = 50
    elif form != "one":
        case |= {"gallery": signs(150, bits, 3, classes=13), "gallery_labels": torch.arange(150) % 13}
    if form == "ids":
        case |= {"query_ids": torch.arange(180) % 90, "gallery_ids": torch.arange(150) % 110}
    elif form == "distractors":
        case["gallery_labels"] = torch.where(torch.arange(150) % 7 == 0, 99, case["gallery_labels"])
    with engine_options(plain=plain):
        for memory_mb in (512, 0.5):
            counted, products = both_roads(
                case, memory_mb=memory_mb, metrics=(*DEFAULT_METRICS, "map@5_min", "map@5_found", "macro_mAP"), **extra
            )
            assert_same(counted, products, bits)
            assert counted.is_estimate is (form == "sampled")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**31),
    st.sampled_from(["expected", "pessimistic"]),
)
def test_ties_are_those_of_loops(items, bits, classes, seed, ties):
    codes = signs(items, bits, seed)
    labels = np.random.default_rng(seed).integers(0, classes, items)
    if np.bincount(labels).max() < 2:
        return
    try:
        expected = BruteForce(codes.numpy().astype(np.float32), labels, similarity="dot", ties=ties)
        value = expected.mean_average_precision
    except TooManyOrdersError:
        return
    found = evaluate_retrieval(codes, labels, similarity="hamming", ties=ties, label_groups=None)
    assert found.mAP == pytest.approx(value, abs=1e-12)


def test_thresholds_are_minus_distances():
    codes = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]])
    report = evaluate_retrieval(
        codes, torch.tensor([0, 0, 1, 1]), similarity="hamming", label_groups=None, threshold=-3
    )
    assert (report.mAP, report["precision"], report["recall"]) == (1.0, 4 / 8, 1.0)
    best = evaluate_retrieval(codes, torch.tensor([0, 0, 1, 1]), similarity="hamming", label_groups=None)
    assert (best["threshold"], best["f1"]) == (-1.0, 1.0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"gallery": torch.ones(3, 5), "gallery_labels": torch.arange(3)},
                "codes of 6 bits cannot be compared with a gallery of 5",
            ),
            ({"gallery": torch.ones(3, 6)}, "gallery and gallery_labels belong together"),
            (
                {"metrics": (*DEFAULT_METRICS, "prototype_accuracy")},
                "binary codes have no mean that could be a prototype",
            ),
            ({"device": "cuda"}, "are compared on the CPU|torch sees"),
            ({"labels": torch.arange(7)}, "20 codes, but 7 labels"),
        ],
    )
    def test_say_what_is_wrong(self, change, message):
        arguments = {"embeddings": signs(20, 6), "labels": torch.arange(20) % 4, "similarity": "hamming"} | change
        with pytest.raises(ValueError, match=message):
            evaluate_retrieval(**arguments)


def test_grouped_recall_of_codes():
    codes, labels = signs(200, 40, classes=20), torch.arange(200) % 20
    assert grouped_recall(codes, labels, label_groups=6, k=(1, 3), repeats=2, similarity="hamming") == grouped_recall(
        codes, labels, label_groups=6, k=(1, 3), repeats=2, similarity="dot"
    )


@pytest.mark.parametrize("bits", [16, 33])
def test_cosine_and_distance_rank_codes_as_hamming_does(bits):
    """d_H = K/4 |u - v|^2 of codes scaled to length 1 = K/2 (1 - cos) = (K - b.b') / 2, in every pair and every metric."""
    codes, labels = signs(120, bits, classes=12), torch.arange(120) % 12
    scaled = codes.double() / bits**0.5
    differing = (codes[:, None] != codes[None]).sum(dim=2).double()
    products = codes.double() @ codes.double().T
    assert torch.equal(differing, (bits - products) / 2)
    torch.testing.assert_close(differing, bits / 2 * (1 - products / bits))
    torch.testing.assert_close(differing, bits / 4 * (scaled[:, None] - scaled[None]).square().sum(dim=2))
    assert differing.min() >= 0
    assert differing.max() <= bits
    options = {"metrics": ("mAP", "map@10_found", "recall@1", "recall@5", "ndcg@10"), "label_groups": None}
    found = {
        name: evaluate_retrieval(codes, labels, similarity=name, **options).values
        for name in ("hamming", "cosine", "dot", "euclidean")
    }
    assert found["hamming"] == found["cosine"] == found["dot"] == found["euclidean"]


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (
            torch.tensor([[1.0, -1.0], [0.5, 2.0]]),
            r"2 of 4 values of codes are neither \(0.5, 2\). Pass codes.sign\(\)",
        ),
        (torch.full((3, 4), math.nan), r"12 of 12 values of codes are neither \(nan, nan, nan, ...\)"),
        (torch.tensor([[1, -1, 0]]), r"codes hold -1 and 0"),
        (torch.ones(3), r"codes have shape \(3,\); codes are \(items, bits\)"),
        (torch.ones(0, 3), r"codes have shape \(0, 3\)"),
        (torch.ones(3, 0), r"codes have shape \(3, 0\)"),
    ],
)
def test_what_is_no_code_is_refused(codes, message):
    with pytest.raises(ValueError, match=message):
        signs_of(codes, "codes", "call")
