"""Binary codes against vectors of -1 and +1, and against loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from tests.cases import examples, sampled_product
from tests.functional.brute_force import BruteForce, TooManyOrdersError

ITEMS, LABELS = torch.arange(180), torch.arange(180) % 13
FORMS = {
    "one set": {},
    "groups": {"query_groups": ITEMS % 60},
    "a sample": {"max_queries": 50},
    "ids": {"gallery_labels": LABELS[:150], "query_ids": ITEMS % 90, "gallery_ids": ITEMS[:150] % 110},
    "distractors": {"gallery_labels": torch.where(ITEMS[:150] % 7 == 0, 99, LABELS[:150])},
}
EVERYTHING = {
    "metrics": (
        *DEFAULT_METRICS, "macro_mAP", "map@5_min", "map@10_found", "ndcg@10", "recall@precision0.2", "recall@precision0.6",
        "auc_pr", "eer",
    ),
    "label_groups": 3,
}  # fmt: skip


def signs(items, bits, seed=0):
    """Codes of -1 and +1; those of a class differ in every fourth bit or so."""
    centres = np.random.default_rng(7).choice([-1.0, 1.0], (13, bits))
    flips = np.random.default_rng(seed).choice([1.0, 1.0, 1.0, -1.0], (items, bits))
    return torch.from_numpy(centres[np.arange(items) % 13] * flips)


@pytest.mark.parametrize(
    ("form", "bits", "as_on_device"), sampled_product(FORMS, [3, 16, 33, 64, 130], [False, True], count=6)
)
def test_cosine_and_distance_rank_codes_as_hamming_does(form, bits, as_on_device):
    """d_H = K/4 |u - v|^2 of codes scaled to length 1 = K/2 (1 - cos) = (K - b.b') / 2, so that every metric is the same."""
    codes, sets = signs(180, bits), dict(FORMS[form])
    if "gallery_labels" in sets:
        sets["gallery"] = signs(150, bits, seed=3)

    def found(similarity, memory_mb=512):
        options = EVERYTHING | {"similarity": similarity, "memory_mb": memory_mb}
        return evaluate_retrieval(codes, LABELS, **sets, **options)

    with engine_options(as_on_device=as_on_device):
        hamming = found("hamming")
        others = {name: found(name) for name in ("cosine", "dot", "euclidean")} | {"in batches": found("hamming", 0.5)}
    assert hamming.is_estimate is (form == "a sample")
    for name, other in others.items():
        for field in ("grouped", "intervals", "queries_with_ties"):
            assert getattr(hamming, field) == getattr(other, field), (name, field)
        assert hamming.per_class() == other.per_class()
        in_other_units = {"pair_threshold": math.nan, "auc_pr": math.nan}
        assert repr(hamming.values | in_other_units) == repr(other.values | in_other_units), name
        assert hamming["auc_pr"] == pytest.approx(other["auc_pr"], abs=1e-12)
        points = [(hamming.decision, other.decision)]
        points += [(point, other.at_precision[precision]) for precision, point in hamming.at_precision.items()]
        for one, point in points:
            assert (one.true_positives, one.false_positives) == (point.true_positives, point.false_positives)
            if name == "dot" and not math.isnan(one.threshold):
                assert one.threshold == (point.threshold - bits) / 2


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**31), st.booleans())
def test_ties_are_those_of_loops(items, bits, classes, seed, expected_order):
    ties = "expected" if expected_order else "pessimistic"
    rng = np.random.default_rng(seed)
    codes, labels = torch.from_numpy(rng.choice([-1.0, 1.0], (items, bits))), rng.integers(0, classes, items)
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
    codes, labels = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]), torch.tensor([0, 0, 1, 1])
    report = evaluate_retrieval(codes, labels, similarity="hamming", label_groups=None, threshold=-3)
    assert (report.mAP, report["pair_precision"], report["pair_recall"]) == (1.0, 4 / 8, 1.0)
    best = evaluate_retrieval(codes, labels, similarity="hamming", label_groups=None)
    assert (best["pair_threshold"], best["pair_f1"]) == (-1.0, 1.0)
