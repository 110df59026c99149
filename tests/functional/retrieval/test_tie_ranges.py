"""The range that ties leave: the values where relevant items come last, and first, in each group of equal scores."""

import json
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import Relevance, evaluate_retrieval
from fewshot_callbacks.functional import Share, TieRange
from tests.cases import examples
from tests.functional import brute_force
from tests.functional.brute_force import BruteForce
from tests.functional.retrieval.users_metrics import F1, MEAN_RANK
from tests.integration_packages import integration
from tests.thread_processes import in_threads

CODES = torch.randint(0, 2, (30, 4), generator=torch.Generator().manual_seed(3))
LABELS = torch.arange(30) % 6
HAMMING = {"similarity": "hamming", "label_groups": None}
KEYS = [key for key in brute_force.rank_metrics(3) if not key.endswith("_found")]


def slow_means(codes, labels, ties, metrics):
    return {
        key: np.nanmean(values)
        for key, values in BruteForce(codes.numpy(), labels.numpy(), similarity="hamming", ties=ties)
        .values(metrics)
        .items()
    }


@pytest.mark.parametrize("ties", ["expected", "optimistic", "pessimistic"])
def test_its_ends_are_those_of_the_two_orders(ties):
    metrics = {key: brute_force.rank_metrics(3)[key] for key in KEYS}
    report = evaluate_retrieval(CODES, LABELS, metrics=KEYS, ties=ties, **HAMMING)
    lowest, highest = (slow_means(CODES, LABELS, rule, metrics) for rule in ("pessimistic", "optimistic"))
    assert list(report.tie_ranges) == KEYS
    for key in KEYS:
        assert report.tie_ranges[key] == pytest.approx((lowest[key], highest[key]), abs=1e-12)
        assert lowest[key] - 1e-12 <= report[key] <= highest[key] + 1e-12
    assert report.queries_with_ties == 30


def test_macro_means_and_metrics_of_a_user_have_one_and_others_have_none():
    keys = ("macro_mAP", F1.at(k=2), MEAN_RANK, "map@3_found", "pair_f1", "eer")
    report = evaluate_retrieval(CODES, LABELS, metrics=keys, **HAMMING)
    ends = [
        evaluate_retrieval(CODES, LABELS, metrics=keys, ties=rule, **HAMMING) for rule in ("pessimistic", "optimistic")
    ]
    assert list(report.tie_ranges) == ["macro_mAP", "f1@2", "mean_rank"]
    for key, found in report.tie_ranges.items():
        assert found == tuple(sorted(end[key] for end in ends))
    assert ends[0]["mean_rank"] > ends[1]["mean_rank"]  # the lower rank is the better


def test_there_is_none_where_nothing_ties():
    report = evaluate_retrieval(torch.randn(30, 4), LABELS)
    assert report.tie_ranges == {}
    assert "ties" not in str(report)


@pytest.mark.parametrize("count", [2, 3])
def test_it_is_the_same_in_several_processes_also_where_queries_of_one_tie(count):
    rows = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    rows[[0, 1, 12]] = rows[0].clone()
    alone = evaluate_retrieval(rows, LABELS, metrics=("mAP", "macro_mAP", "recall@1"), label_groups=None)
    assert 0 < alone.queries_with_ties < 30
    assert alone.tie_ranges["mAP"].lowest < alone.mAP < alone.tie_ranges["mAP"].highest

    def part(processes):
        own = torch.arange(30)[processes.rank :: processes.count]
        share = Share(processes, own)
        keys = ("mAP", "macro_mAP", "recall@1")
        return evaluate_retrieval(rows[own], LABELS[own], metrics=keys, label_groups=None, share=share)

    for report in in_threads(count, part):
        assert report == alone
        assert report.tie_ranges == alone.tie_ranges


def test_grades_come_in_the_best_and_in_the_worst_order():
    items = torch.ones(4, 2)
    relevance = Relevance.from_lists([[0, 1]], gallery=4, grades=[[3, 1]])
    report = evaluate_retrieval(items[:1], gallery=items, relevance=relevance, metrics=("ndcg@4", "ndcg@4_linear"))
    discount = 1 / np.log2(np.arange(2, 6))
    for key, gains in (("ndcg@4", (7, 1)), ("ndcg@4_linear", (3, 1))):
        worst = (gains[1] * discount[2] + gains[0] * discount[3]) / (gains[0] * discount[0] + gains[1] * discount[1])
        assert report.tie_ranges[key] == pytest.approx((worst, 1.0), abs=1e-12)


def test_it_is_printed_beside_the_interval_and_stored():
    report = evaluate_retrieval(CODES, LABELS, metrics=("mAP", "pair_f1"), **HAMMING)
    lowest, highest = report.tie_ranges["mAP"]
    [line] = [line for line in str(report).splitlines() if line.startswith("mAP")]
    assert line.endswith(f")  ties: {lowest:.4f} to {highest:.4f}")
    assert "ties" not in next(line for line in str(report).splitlines() if line.startswith("pair_f1"))
    assert json.loads(json.dumps(report.to_dict()))["tie_ranges"] == {"mAP": [lowest, highest]}
    assert pickle.loads(pickle.dumps(report)) == report
    page = pytest.importorskip("fewshot_callbacks.report.page")
    assert page.metric_texts(report)[0].meaning.endswith(f" Ties: {lowest:.4f} to {highest:.4f}.")


def test_a_range_that_four_digits_do_not_show_is_not_printed():
    """One copy in a thousand queries moves no digit."""
    rows = torch.randn(1500, 8, generator=torch.Generator().manual_seed(0))
    rows[[1, 40]] = rows[0].clone()
    report = evaluate_retrieval(rows, torch.arange(1500) % 50, metrics=("minp",), label_groups=None)
    assert report.queries_with_ties > 0
    assert 0 <= report.tie_ranges["minp"].width < 5e-5
    assert "ties:" not in str(report).splitlines()[1]


def test_it_has_its_width():
    assert TieRange(lowest=0.25, highest=1.0).width == 0.75


# Metric of the package tie-aware-retrieval-metrics -> ours.
OF_THE_PROTOCOL = {
    "hits": None, "recall": "ir_recall@{}", "precision": "precision@{}", "f1": "f1@{}", "ndcg": "ndcg@{}", "mrr": "mrr@{}",
    "map": "map@{}_relevant",
}  # fmt: skip


@settings(max_examples=examples(30), deadline=None)
@given(
    scores=st.lists(st.integers(0, 3), min_size=4, max_size=12),
    relevant=st.lists(st.booleans(), min_size=12, max_size=12),
    k=st.integers(1, 4),
)
def test_the_protocol_for_low_precision_gives_the_same_three_values(scores, relevant, k):
    """Yang et al., "Reliable Evaluation Protocol for Low-Precision Retrieval", ACL 2026, by the authors' package."""
    trm = integration("trm")
    relevant = relevant[: len(scores)]
    relevant[0] = True
    theirs = trm.evaluate([[float(score) for score in scores]], [relevant], list(OF_THE_PROTOCOL), [k]).metrics
    items = torch.tensor(scores).double()[:, None]
    keys = [key.format(k) for key in OF_THE_PROTOCOL.values() if key is not None]
    metrics = [F1.at(k=k) if key.startswith("f1") else key for key in keys]
    report = evaluate_retrieval(
        torch.ones(1, 1).double(), [1], items, [int(hit) for hit in relevant], similarity="dot", metrics=metrics,
        label_groups=None,
    )  # fmt: skip
    for name, key in OF_THE_PROTOCOL.items():
        if key is None:
            continue
        result = theirs[name][k]
        value = report[key.format(k)]
        assert value == pytest.approx(result.expected, abs=1e-12)
        lowest, highest = report.tie_ranges.get(key.format(k), (value, value))
        assert (lowest, highest) == pytest.approx((result.minimum, result.maximum), abs=1e-12)
        assert math.isclose(highest - lowest, result.range, abs_tol=1e-12)
