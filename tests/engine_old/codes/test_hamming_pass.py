"""Binary codes by counting distances, against the general road on the same codes, and against loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks.engine.codes.packing import Codes, pack_codes
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.grouped_recall import grouped_recall
from tests.cases import sampled_product
from tests.engine.codes.cases import signs
from tests.functional.brute_force import BruteForce, TooManyOrdersError


def both_roads(case, **options):
    """By counting distances, and by products of codes of -1 and +1."""
    options = {
        "recall_k": (1, 2, 5),
        "precisions": (0.2, 0.6, 0.95),
        "group_size": 3,
        "equal_error_rate": True,
    } | options
    codes, general = dict(case), dict(case)
    counted = evaluate_retrieval(codes.pop("queries"), codes.pop("labels"), similarity="hamming", **codes, **options)
    products = evaluate_retrieval(general.pop("queries"), general.pop("labels"), similarity="dot", **general, **options)
    return counted, products


def assert_same(counted, products, bits):
    for field in ("mean", "per_class", "macro", "grouped", "intervals", "equal_error_rate", "queries_with_ties"):
        assert getattr(counted, field) == getattr(products, field), field
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
    ("form", "bits", "kernel"),
    sampled_product(
        ["one", "groups", "two", "ids", "distractors", "sampled"],
        [3, 64, 100, 130],
        ["compiled", "pytorch"],
        count=16,
    ),
)
def test_counting_is_the_general_road(form, bits, kernel):
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
    with engine_options(kernel=kernel):
        for memory_mb in (512, 0.5):
            counted, products = both_roads(case, memory_mb=memory_mb, macro=True, map_k=(5, (5, "found")), **extra)
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
    found = evaluate_retrieval(codes, labels, similarity="hamming", ties=ties, group_size=None)
    assert found.mAP == pytest.approx(value, abs=1e-12)


def test_threads_and_progress():
    codes, labels = signs(900, 70, classes=30), torch.arange(900) % 30
    seen, before = [], torch.get_num_threads()
    reports = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            reports.append(
                evaluate_retrieval(
                    codes, labels, similarity="hamming", memory_mb=1, progress=lambda *now: seen.append(now)
                )
            )
        finally:
            torch.set_num_threads(before)
    assert reports[0] == reports[1]
    assert seen[-1] == (810_000, 810_000)
    assert len(seen) >= 4


def test_thresholds_are_minus_distances():
    codes = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]])
    report = evaluate_retrieval(codes, torch.tensor([0, 0, 1, 1]), similarity="hamming", group_size=None, threshold=-3)
    assert (report.mAP, report.precision, report.recall) == (1.0, 4 / 8, 1.0)
    best = evaluate_retrieval(codes, torch.tensor([0, 0, 1, 1]), similarity="hamming", group_size=None)
    assert (best.threshold, best.f1) == (-1.0, 1.0)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"gallery": torch.ones(3, 5), "gallery_labels": torch.arange(3)},
                "codes of 6 bits cannot be compared with a gallery of 5",
            ),
            ({"gallery": torch.ones(3, 6)}, "gallery and gallery_labels belong together"),
            ({"prototype_accuracy": True}, "binary codes have no mean that could be a prototype"),
            ({"device": "cuda"}, "are compared on the CPU|torch sees"),
            ({"labels": torch.arange(7)}, "20 codes, but 7 labels"),
        ],
    )
    def test_say_what_is_wrong(self, change, message):
        arguments = {"embeddings": signs(20, 6), "labels": torch.arange(20) % 4, "similarity": "hamming"} | change
        with pytest.raises(ValueError, match=message):
            evaluate_retrieval(**arguments)

    def test_score_tiles_know_no_codes(self):
        with pytest.raises(ValueError, match="binary codes are packed"):
            ScoreTiles.from_rows(signs(3, 4), signs(3, 4), "hamming")


def test_grouped_recall_of_codes():
    codes, labels = signs(200, 40, classes=20), torch.arange(200) % 20
    assert grouped_recall(codes, labels, group_size=6, k=(1, 3), repeats=2, similarity="hamming") == grouped_recall(
        codes, labels, group_size=6, k=(1, 3), repeats=2, similarity="dot"
    )


def test_some_of_the_codes():
    packed = pack_codes(signs(9, 70), "codes", "call")
    some = packed[torch.tensor([3, 1])]
    assert isinstance(some, Codes)
    assert (len(some), some.bits) == (2, 70)
    assert torch.equal(some.words, packed.words[[3, 1]])


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
    options = {"recall_k": (1, 5), "map_k": ((10, "found"),), "ndcg_k": (10,), "group_size": None}
    found = {
        name: evaluate_retrieval(codes, labels, similarity=name, **options).mean
        for name in ("hamming", "cosine", "dot", "euclidean")
    }
    assert found["hamming"] == found["cosine"] == found["dot"] == found["euclidean"]
