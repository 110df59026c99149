"""`evaluate_retrieval` against brute force, scikit-learn and itself on other orders, scales, budgets and devices."""

import dataclasses
import json
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_curve

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from tests.cases import made
from tests.functional.brute_force import BruteForce

SIMILARITIES = ("cosine", "dot", "euclidean")


@st.composite
def retrieval_cases(draw):
    """Small sets with many ties (few values, few dimensions), singletons, distractors, both forms."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    dim = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["grid", "codes", "real", "offset", "collapsed", "repeated"]))
    classes = draw(st.integers(1, 5))

    def vectors(n: int) -> np.ndarray:
        if kind == "grid":
            return rng.integers(-1, 2, (n, dim)).astype(np.float32)
        if kind == "codes":
            return rng.choice([-1.0, 1.0], (n, dim)).astype(np.float32)
        if kind == "collapsed":
            return np.full((n, dim), 0.3, dtype=np.float32)
        if kind == "repeated":
            return np.tile(rng.normal(size=(2, dim)), (n, 1))[:n].astype(np.float32)
        return (rng.normal(size=(n, dim)) + (1000.0 if kind == "offset" else 0.0)).astype(np.float32)

    n = draw(st.integers(2, 9))
    case = {"queries": vectors(n), "query_labels": rng.integers(0, classes, n) * 2**61 - 5}
    if draw(st.booleans()):
        m = draw(st.integers(1, 9))
        case |= {"gallery": vectors(m), "gallery_labels": rng.integers(0, classes + 1, m) * 2**61 - 5}
        if draw(st.booleans()):
            case |= {"query_ids": rng.integers(0, 6, n), "gallery_ids": rng.integers(0, 6, m)}
        if draw(st.booleans()):
            case |= {"query_groups": rng.integers(0, 6, n), "gallery_groups": rng.integers(0, 6, m)}
    elif draw(st.booleans()):
        case |= {"query_groups": rng.integers(0, 6, n)}
    elif draw(st.booleans()):  # the same items twice, some of which have copies
        ids = rng.permutation(n) // draw(st.integers(1, 2))
        case |= {"gallery": case["queries"].copy(), "gallery_labels": case["query_labels"].copy()}
        case |= {"query_ids": ids, "gallery_ids": ids.copy()}
    case["similarity"] = draw(st.sampled_from(SIMILARITIES))
    case["ties"] = draw(st.sampled_from(["expected", "optimistic", "pessimistic"]))
    return case


def evaluate(case, **kwargs):
    case = {key: torch.as_tensor(value) if isinstance(value, np.ndarray) else value for key, value in case.items()}
    return evaluate_retrieval(case.pop("queries"), case.pop("query_labels"), **case, **{"label_groups": None} | kwargs)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(retrieval_cases(), st.sampled_from([None, (0.0, 1.0), (-0.5, 0.25)]))
def test_equals_brute_force(case, bounds):
    expected = BruteForce(**case)
    if not expected.matched:
        with pytest.raises(ValueError, match=r"has .* its class"):
            evaluate(case)
        return
    low, high = bounds or (-math.inf, math.inf)
    report = evaluate(
        case,
        metrics=(
            *("mAP", "map@r", "r_precision", "recall@1", "recall@2", "recall@5", "ir_recall@1", "ir_recall@3", "f1"),
            *("recall@precision0.3", "recall@precision0.75", "recall@precision1"),
        ),
        threshold_bounds=bounds,
    )
    assert report.mAP == pytest.approx(expected.mean_average_precision, abs=1e-12)
    assert report["map@r"] == pytest.approx(expected.map_at_r, abs=1e-12)
    assert report["r_precision"] == pytest.approx(expected.r_precision, abs=1e-12)
    for k in (1, 2, 5):
        assert report[f"recall@{k}"] == pytest.approx(expected.recall_at(k), abs=1e-12)
    for k, value in report.at("ir_recall@{k}").items():
        assert value == pytest.approx(expected.ir_recall_at(k), abs=1e-12)
    assert len(report.at("ir_recall@{k}")) == 2
    assert report.queries_without_match == len(expected.scores) - len(expected.matched)
    assert report["f1"] == pytest.approx(expected.best_f1, abs=1e-12)
    for precision, point in report.at_precision.items():
        assert point.recall == pytest.approx(expected.recall_at_precision(precision, low, high), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(retrieval_cases(), st.floats(-1, 1))
@example({"queries": np.zeros((2, 1), np.float32), "query_labels": np.zeros(2, int), "similarity": "euclidean"}, -1.0)
def test_fixed_threshold(case, threshold):
    expected = BruteForce(**case)
    if expected.matched:
        report = evaluate(case, threshold=threshold)
        found = (report.decision.true_positives, report.decision.false_positives, report.decision.false_negatives)
        if case["similarity"] == "cosine" or not np.isclose(np.concatenate(expected.scores), threshold).any():
            assert found == expected.pooled(threshold)


def fast_reference(embeddings, labels):
    """mAP, Recall@1 and best F1 of a set without ties, by sorting whole rows in float64."""
    unit = torch.nn.functional.normalize(embeddings.double(), dim=1)
    scores = unit @ unit.T
    same = labels[:, None] == labels[None, :]
    scores.fill_diagonal_(-2)
    same.fill_diagonal_(False)
    ranked = same.gather(1, scores.argsort(1, descending=True))
    hits = ranked.double().cumsum(1)
    rank = torch.arange(1, len(labels) + 1)
    average = (hits / rank * ranked).sum(1) / ranked.sum(1)
    off = ~torch.eye(len(labels), dtype=torch.bool)
    pairs, order = same[off], scores[off].argsort(descending=True)
    tp = pairs[order].double().cumsum(0)
    f1 = 2 * tp / (torch.arange(1, len(tp) + 1) + pairs.sum())
    return float(average.mean()), float(ranked[:, 0].double().mean()), float(f1.max())


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0, 100.0])
def test_larger_sets_equal_a_sorted_reference(noise):
    embeddings, labels = made(noise=noise)
    report = evaluate_retrieval(embeddings, labels)
    assert (report.mAP, report["recall@1"], report["f1"]) == pytest.approx(
        fast_reference(embeddings, labels), abs=1e-12
    )


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("kind", ["real", "codes", "collapsed", "repeated", "near-collapsed", "few-classes"])
def test_memory_threads_order_and_scale_change_nothing(similarity, kind):
    embeddings, labels = made(300, 3 if kind == "few-classes" else 20, 16)
    labels[:40] = labels[0]  # classes of different size
    if kind == "codes":
        embeddings = embeddings.sign()
    elif kind == "collapsed":
        embeddings = embeddings[:1].expand(300, -1)
    elif kind == "repeated":
        embeddings = embeddings[torch.arange(300) % 7]
    elif kind == "near-collapsed":
        embeddings = 1 + 1e-4 * embeddings
    options = {
        "similarity": similarity,
        "label_groups": 3 if kind == "few-classes" else 5,
        "metrics": (*DEFAULT_METRICS, "recall@precision0.5"),
    }
    report = evaluate_retrieval(embeddings, labels, **options)
    assert report == evaluate_retrieval(embeddings, labels, memory_mb=0.5, **options)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert report == evaluate_retrieval(embeddings, labels, **options)
    finally:
        torch.set_num_threads(threads)
    order = torch.randperm(300)
    shuffled = evaluate_retrieval(embeddings[order], labels[order], **options)
    assert shuffled.metrics() == report.metrics()
    assert shuffled.decision == report.decision
    if similarity != "cosine" or kind == "codes":
        scaled = evaluate_retrieval(embeddings * 4, labels, **options)
        assert scaled.mAP == report.mAP
        assert scaled["f1"] == report["f1"]


def test_collapsed_embeddings_are_at_chance():
    labels = torch.arange(10).repeat_interleave(6)
    report = evaluate_retrieval(torch.ones(60, 8), labels, label_groups=None)
    n, r = 59, 5
    chance = sum((1 + (i - 1) * (r - 1) / (n - 1)) / i for i in range(1, n + 1)) / n
    assert report.mAP == pytest.approx(chance, abs=1e-12)
    assert report["recall@1"] == pytest.approx(r / n, abs=1e-12)


@pytest.mark.parametrize("capacity_mb", [0.4, 512])
def test_coarse_groups_are_refined_until_exact(capacity_mb):
    embeddings, labels = made(600, 20, 6, noise=2.0)  # 17,000 relevant pairs, more than the small budget holds
    report = evaluate_retrieval(embeddings, labels, memory_mb=capacity_mb, metrics=("mAP", "recall@1", "f1"))
    assert report["f1"] == pytest.approx(fast_reference(embeddings, labels)[2], abs=1e-12)


class TestScores:
    @pytest.mark.parametrize("similarity", SIMILARITIES)
    @pytest.mark.parametrize("precision", ["bytes", "float64"])
    def test_the_precision_of_products_changes_nothing(self, similarity, precision):
        embeddings, labels = made(200, 10, 12, noise=3.0)
        report = evaluate_retrieval(embeddings, labels, similarity=similarity)
        with engine_options(precision=precision):
            assert evaluate_retrieval(embeddings, labels, similarity=similarity) == report

    def test_a_distance_of_zero_has_no_sign(self):
        report = evaluate_retrieval(torch.ones(4, 2), torch.arange(4) // 2, similarity="euclidean", label_groups=None)
        assert math.copysign(1.0, report.decision.threshold) == 1.0

    @pytest.mark.parametrize("similarity", SIMILARITIES)
    def test_zeros_of_either_sign_are_equal(self, similarity):
        queries = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1e-30]])
        labels = torch.tensor([0, 1, 0, 1, 0])
        report = evaluate_retrieval(queries, labels, similarity=similarity, label_groups=None)
        assert report == evaluate_retrieval(queries + 0.0, labels, similarity=similarity, label_groups=None)

    def test_a_loose_matmul_setting_is_put_back_and_changes_nothing(self):
        embeddings, labels = made(100, 10, 64)
        expected = evaluate_retrieval(embeddings, labels)
        before = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision("medium")
            assert evaluate_retrieval(embeddings, labels) == expected
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision(before)


class TestInput:
    def test_accepts_numpy_half_precision_and_any_integers(self):
        embeddings, labels = made(80, 8, 16)
        expected = evaluate_retrieval(embeddings.half().float(), labels)
        assert evaluate_retrieval(embeddings.half(), labels.to(torch.uint8)) == dataclasses.replace(expected)
        from_numpy = evaluate_retrieval(embeddings.half().float().numpy(), (labels - 4 + 2**62).numpy())
        assert from_numpy.mAP == expected.mAP

    def test_gradients_are_left_alone(self):
        embeddings, labels = made(40, 4, 8)
        embeddings.requires_grad_()
        assert evaluate_retrieval(embeddings, labels, label_groups=None).mAP > 0
        assert embeddings.grad is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"labels": torch.arange(7)}, r"40 embeddings, but 7 labels. Both must come"),
            ({"embeddings": torch.randn(40)}, r"shape \(items, dim\); got shape \(40,\). For a single item"),
            ({"embeddings": torch.randn(40, 2, 2)}, r"Flatten what belongs to one item: embeddings.flatten\(1\)"),
            ({"embeddings": torch.zeros(40, 2, dtype=torch.long)}, r"floating-point embeddings; got torch.int64"),
            ({"labels": torch.randn(40)}, r"integer labels; got torch.float32.*labels.long\(\)"),
            ({"labels": torch.full((40, 3), 2)}, r"120 entries are neither 0 nor 1"),
            ({"embeddings": torch.randn(0, 4), "labels": torch.arange(0)}, r"embeddings is empty"),
            (
                {"labels": torch.arange(40)},
                r"none of the 40 queries has another item.*each of the 40 labels occurs once",
            ),
            ({"gallery": torch.randn(3, 8)}, r"gallery without gallery_labels"),
            ({"gallery_labels": torch.arange(3)}, r"gallery_labels without gallery"),
            ({"gallery": torch.randn(3, 9), "gallery_labels": torch.arange(3)}, r"dimension 8, the gallery has 9"),
            (
                {"gallery": torch.randn(3, 8), "gallery_labels": torch.arange(3) + 99},
                r"0 of the queries' 4 labels occur",
            ),
            ({"embeddings": torch.empty(40, 0)}, r"embeddings has no dimensions \(shape \(40, 0\)\)"),
            (
                {"labels": torch.arange(40) // 2, "query_groups": torch.arange(40) // 2},
                r"none of the 40 queries has another item of its class that ids or groups do not exclude",
            ),
            ({"query_ids": torch.arange(40)}, r"ids are for two sets"),
        ],
    )
    def test_refuses_with_fact_and_fix(self, change, message, as_users_run_it):
        embeddings, labels = made(40, 4, 8)
        with pytest.raises(ValueError, match=message):
            evaluate_retrieval(**({"embeddings": embeddings, "labels": labels} | change))

    def test_non_finite_rows_are_counted_and_located(self):
        embeddings, labels = made(40, 4, 8)
        embeddings[[5, 31], 2] = torch.tensor([math.nan, -math.inf])
        with pytest.raises(ValueError, match=r"2 of 40 rows of embeddings hold NaN or Inf, the first at index 5"):
            evaluate_retrieval(embeddings, labels)


EVERYTHING = {
    "metrics": (
        *("mAP", "mrr", "map@5_min", "map@10_found", "map@3_relevant", "recall@1", "recall@7", "ir_recall@4"),
        *("precision@3", "ndcg@5", "prototype_accuracy", "macro_mAP", "grouped_recall@1", "grouped_recall@2"),
        *("auc_pr", "recall@precision0.9", "fnmr@fmr0.01", "fnmr@fmr0.001", "eer"),
    ),
    "label_groups": 5,
}


def test_names_of_metrics_are_those_of_the_report():
    report = evaluate_retrieval(*made(100, 20, 8), **EVERYTHING)
    assert tuple(report.metrics()) == EVERYTHING["metrics"]
    assert tuple(json.loads(json.dumps(report.to_dict()))["metrics"]) == EVERYTHING["metrics"]
    assert tuple(evaluate_retrieval(*made(100, 20, 8)).metrics()) == DEFAULT_METRICS
    for order in (("f1", "mAP"), ("eer", "macro_recall@1", "recall@1")):
        assert tuple(evaluate_retrieval(*made(100, 20, 8), metrics=order).metrics()) == order
    assert tuple(evaluate_retrieval(*made(100, 20, 8), metrics="f1").metrics()) == ("f1",)


def test_what_was_not_asked_for_is_no_quiet_number():
    report = evaluate_retrieval(*made(100, 20, 8), metrics=("f1", "recall@2"))
    for missing in (lambda: report.mAP, lambda: report["mAP"]):
        with pytest.raises(
            LookupError, match=r"this report has no 'mAP', but f1, recall@2. Ask for it .*metrics=\('mAP', "
        ):
            missing()
    with pytest.raises(ValueError, match="there is no metric 'recal@2'; did you mean 'recall@2'"):
        report["recal@2"]
    assert report.at("recall@{k}") == {2: report["recall@2"]}


OF_PAIRS = ("decision", "at_precision", "at_false_match_rate", "auc_pr", "curve", "pair_counts")


@pytest.mark.parametrize("name", OF_PAIRS)
def test_pairs_are_counted_where_that_was_asked_for(name):
    data, asked = made(100, 20, 8), ("mAP", "recall@2")
    report = evaluate_retrieval(*data, metrics=asked)
    with pytest.raises(
        LookupError, match=r"counted no pairs, since none of mAP, recall@2 is of .* metrics=\('f1', ...\)"
    ):
        getattr(report, name)
    assert not {"curve", "auc_pr_bounds", "thresholds_at_precision"} & report.to_dict().keys()
    whole = evaluate_retrieval(*data, metrics=(*asked, "f1"))
    assert (report.metrics(), report.per_query["mAP"].tolist()) == (
        {key: whole[key] for key in asked},
        whole.per_query["mAP"].tolist(),
    )
    for one in ({"threshold": 0.5}, {"metrics": ("eer", "mAP")}, {"metrics": ("opis@fmr0.1",)}):
        getattr(evaluate_retrieval(*data, **{"metrics": asked} | one), name)
    assert whole.to_dict()["curve"]


def test_every_metric_equals_its_loop():
    embeddings, labels = made(120, 15, 6, noise=2.0)
    report = evaluate_retrieval(embeddings, labels, **EVERYTHING)
    loops = BruteForce(embeddings.numpy(), labels.numpy())
    assert report["mrr"] == pytest.approx(loops.mean_reciprocal_rank, abs=1e-12)
    assert report["precision@3"] == pytest.approx(loops.precision_at(3), abs=1e-12)
    assert report["ir_recall@4"] == pytest.approx(loops.ir_recall_at(4), abs=1e-12)
    assert report["ndcg@5"] == pytest.approx(loops.ndcg_at(5), abs=1e-12)
    for k, divisor in ((5, "min"), (10, "found"), (3, "relevant")):
        expected = loops.average_precision_at(k, divisor)
        assert report.metrics()[f"map@{k}_{divisor}"] == pytest.approx(expected, abs=1e-12)
    of_classes = report.per_class()["mAP"]
    assert set(of_classes) == set(labels.tolist())
    assert report["macro_mAP"] == pytest.approx(sum(of_classes.values()) / len(of_classes), abs=1e-12)


class TestPooledRates:
    def pairs(self, embeddings, labels):
        scores = (
            torch.nn.functional.normalize(embeddings.double()) @ torch.nn.functional.normalize(embeddings.double()).T
        )
        others = ~torch.eye(len(labels), dtype=torch.bool)
        return scores[others].numpy(), (labels[:, None] == labels)[others].numpy()

    @pytest.mark.parametrize("noise", [0.3, 1.0, 3.0, 100.0])
    def test_equal_scikit_learn(self, noise):
        embeddings, labels = made(300, 20, 12, noise=noise)
        report = evaluate_retrieval(
            embeddings,
            labels,
            label_groups=None,
            metrics=(*DEFAULT_METRICS, "fnmr@fmr0.001", "fnmr@fmr0.01", "fnmr@fmr0.2", "eer"),
        )
        scores, relevant = self.pairs(embeddings, labels)
        area = average_precision_score(relevant, scores)
        assert report.auc_pr.low - 1e-9 <= area <= report.auc_pr.high + 1e-9
        assert report.auc_pr.error < 0.01
        exact = evaluate_retrieval(embeddings, labels, label_groups=None, metrics=(*DEFAULT_METRICS, "auc_pr"))
        assert exact.auc_pr.error < 1e-12
        assert exact.metrics()["auc_pr"] == pytest.approx(area, abs=1e-9)
        assert "auc_pr" not in report.metrics()
        false_match, match, _ = roc_curve(relevant, scores, drop_intermediate=False)
        for rate, point in report.at_false_match_rate.items():
            allowed = false_match <= np.floor(rate * (~relevant).sum() + 1e-9) / (~relevant).sum() + 1e-15
            assert point.false_non_match_rate == pytest.approx(1 - match[allowed].max(), abs=1e-9)
            assert point.false_match_rate <= rate
        crossing = np.flatnonzero(1 - match <= false_match)[0]
        between = slice(crossing - 1, crossing + 1)
        gap = (1 - match - false_match)[between]
        expected = np.interp(0, -gap, false_match[between])
        assert report["eer"] == pytest.approx(expected, abs=2 / relevant.sum())

    def test_a_single_class_has_no_error_rates(self):
        embeddings, _ = made(20, 2, 4)
        report = evaluate_retrieval(
            embeddings, torch.zeros(20, dtype=torch.int64), metrics=(*DEFAULT_METRICS, "fnmr@fmr0.1", "eer")
        )
        assert math.isnan(report.metrics()["fnmr@fmr0.1"])
        assert math.isnan(report["eer"])

    def test_the_curve_is_a_thinned_one(self):
        report = evaluate_retrieval(*made(300, 20, 12, noise=2.0), label_groups=None)
        recalls = [recall for _, _, recall in report.curve]
        assert recalls == sorted(recalls)
        assert recalls[-1] == 1.0
        assert 20 < len(recalls) <= 200
        assert all(0 < precision <= 1 for _, precision, _ in report.curve)


class TestSample:
    def test_a_sample_is_near_the_whole_and_says_what_it_is(self):
        embeddings, labels = made(2000, 40, 16, noise=2.0)
        whole = evaluate_retrieval(embeddings, labels, label_groups=None)
        part = evaluate_retrieval(embeddings, labels, label_groups=None, max_queries=500)
        assert (part.queries, part.gallery, part.is_estimate, whole.is_estimate) == (500, 2000, True, False)
        low, high = part.intervals["mAP"]
        margin = high - low
        assert low - margin < whole.mAP < high + margin
        assert "500 of 2,000 queries were drawn (seed 0)" in part.notes[0]
        assert evaluate_retrieval(embeddings, labels, label_groups=None, max_queries=500) == part
        assert evaluate_retrieval(embeddings, labels, label_groups=None, max_queries=500, seed=1) != part

    def test_each_class_gives_its_share(self):
        labels = torch.tensor([0] * 100 + [1] * 300 + [2] * 600)
        options = {"label_groups": None, "metrics": "recall@1"}
        drawn = evaluate_retrieval(torch.randn(1000, 2), labels, max_queries=100, seed=3, **options).drawn
        assert torch.bincount(labels[drawn]).tolist() == [10, 30, 60]

    def test_as_many_as_there_are_is_no_sample(self):
        embeddings, labels = made(100, 10, 8)
        assert evaluate_retrieval(embeddings, labels, max_queries=100) == evaluate_retrieval(embeddings, labels)

    def test_a_drawn_query_is_no_candidate_of_itself(self):
        embeddings, labels = made(60, 20, 8, noise=50.0)
        whole = evaluate_retrieval(embeddings, labels, label_groups=None)
        part = evaluate_retrieval(embeddings, labels, label_groups=None, max_queries=59)
        same = [
            label for label, value in whole.per_class()["mAP"].items() if part.per_class()["mAP"].get(label) == value
        ]
        assert len(same) >= 19  # all but the class that lost a query


def test_auto_is_a_device_that_is_there():
    embeddings, labels = made(100, 10, 8)
    assert evaluate_retrieval(embeddings, labels, device="auto").mAP == evaluate_retrieval(embeddings, labels).mAP


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("noise", [0.3, 3.0])
def test_the_same_on_a_gpu(noise):
    embeddings, labels = made(3000, 60, 130, noise=noise)
    assert evaluate_retrieval(embeddings, labels, device="cuda") == evaluate_retrieval(embeddings, labels)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 60), st.sampled_from([0.5, 2.0]), st.booleans())
def test_the_order_of_the_data_does_not_change_a_bit_of_the_report(seed, items, noise, two_sets):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 12, (items,), generator=generator).repeat(2) * 5 - 2**40
    embeddings = (labels[:, None] % 7 + noise * torch.randn(2 * items, 4, generator=generator)).round(decimals=1)
    order, other = (torch.randperm(len(labels), generator=generator) for _ in range(2))
    options = {
        "metrics": ("mAP", "recall@1", "recall@2", "ndcg@5", "macro_mAP", "f1", "grouped_recall@1", "grouped_recall@2"),
        "label_groups": 3,
        "similarity": "euclidean",
    }
    if len(labels.unique()) < 3:
        options |= {"label_groups": None}
    sets, permuted = (embeddings, labels), (embeddings[order], labels[order])
    if two_sets:
        sets, permuted = (*sets, *sets), (*permuted, embeddings[other], labels[other])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Grouped recall over 1 group")
        report, again = evaluate_retrieval(*sets, **options), evaluate_retrieval(*permuted, **options)
    assert repr(again.intervals) == repr(report.intervals)
    assert again.metrics() == report.metrics()
    assert again == report


def test_intervals_hold_their_means():
    report = evaluate_retrieval(*made(600, 40, 8, noise=2.0))
    for name, interval in report.intervals.items():
        assert interval.low < report.metrics()[name] < interval.high


@pytest.mark.parametrize("memory_mb", [0.3, 512])
def test_progress_never_falls_back(memory_mb):
    """Where all pairs are counted once more, the total was doubled, and the bar fell from 100 to 50 %."""
    seen = []
    options = {
        "metrics": (*DEFAULT_METRICS, "recall@precision0.05", "recall@precision0.06"),
        "memory_mb": memory_mb,
        "progress": lambda *now: seen.append(now),
    }
    evaluate_retrieval(torch.randn(1000, 8), torch.arange(1000) % 20, **options)
    assert {total for _, total in seen} == {10**6}
    assert seen == sorted(seen)
    assert seen[-1] == (10**6, 10**6)


@pytest.mark.parametrize("memory_mb", [3.0, 0.4, 1e-6])
def test_small_budgets_change_no_number_and_one_that_cannot_be_kept_is_told(memory_mb):
    embeddings, labels = made(600, 20, 6, noise=2.0)
    report = evaluate_retrieval(embeddings, labels, memory_mb=memory_mb, label_groups=5)
    assert report == evaluate_retrieval(embeddings, labels, label_groups=5)
    told = report.memory_note
    assert (told is not None) == (memory_mb < 1)
    if told is not None:
        assert report.messages[-1] == told
        assert f"budget of {memory_mb:g} MB cannot be kept" in told
        enough = float(told.split("memory_mb=")[1].split(" ")[0])
        assert evaluate_retrieval(embeddings, labels, memory_mb=enough).memory_note is None


def test_no_k_of_grouped_recall_leaves_it_out() -> None:
    embeddings, labels = torch.randn(60, 4), torch.arange(60) % 20  # classes enough for two groups of 10
    report = evaluate_retrieval(embeddings, labels, metrics=("mAP", "recall@1"))
    assert report.grouped is None
    assert report.notes == ()
    assert report.mAP == evaluate_retrieval(embeddings, labels, label_groups=None).mAP


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
