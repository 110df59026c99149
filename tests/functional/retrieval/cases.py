"""Small sets that are hard on an evaluation, and the comparison of all its metrics with loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.evaluate import NothingToRetrieveError
from tests.functional.brute_force import BruteForce, rank_metrics
from tests.messages import refused


@st.composite
def retrieval_cases(draw, similarities, several=False):
    """Small sets with many ties (few values, few dimensions), singletons, distractors, both forms, one label or several."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dim, classes = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["grid", "codes", "real", "offset", "collapsed", "repeated"]))
    similarity = draw(st.sampled_from(similarities))

    def vectors(n: int) -> np.ndarray:
        if kind == "codes" or similarity == "hamming":
            return rng.choice([-1.0, 1.0], (n, dim)).astype(np.float32)
        if kind == "grid":
            return rng.integers(-1, 2, (n, dim)).astype(np.float32)
        if kind == "collapsed":
            return np.full((n, dim), 0.3, dtype=np.float32)
        if kind == "repeated":
            return np.tile(rng.normal(size=(2, dim)), (n, 1))[:n].astype(np.float32)
        return (rng.normal(size=(n, dim)) + (1000.0 if kind == "offset" else 0.0)).astype(np.float32)

    def labels(n: int, classes: int) -> np.ndarray:
        return rng.integers(0, 2, (n, 4)) if several else rng.integers(0, classes, n) * 2**61 - 5

    most = 6 if several else 9  # grades can be ordered in more ways
    n, m = draw(st.integers(2, most)), draw(st.integers(1, most))
    case = {"queries": vectors(n), "query_labels": labels(n, classes), "similarity": similarity}
    if draw(st.booleans()):
        case |= {"gallery": vectors(m), "gallery_labels": labels(m, classes + 1)}
        if draw(st.booleans()):
            case |= {"query_ids": rng.permutation(9)[:n], "gallery_ids": rng.permutation(9)[:m]}
        if draw(st.booleans()):
            case |= {"query_groups": rng.integers(0, 6, n), "gallery_groups": rng.integers(0, 6, m)}
    elif draw(st.booleans()):
        case |= {"query_groups": rng.integers(0, 6, n)}
    elif draw(st.booleans()):  # the same items twice
        ids = rng.permutation(n)
        case |= {"gallery": case["queries"].copy(), "gallery_labels": case["query_labels"].copy()}
        case |= {"query_ids": ids, "gallery_ids": ids.copy()}
    return case | {"ties": draw(st.sampled_from(["expected", "optimistic", "pessimistic"]))}


def check_all_metrics(case, k, threshold=None, threshold_bounds=None):
    """Compare every metric, at rank k, with its definition."""
    expected, metrics, several = BruteForce(**case), rank_metrics(k), case["query_labels"].ndim > 1
    options = {name: torch.as_tensor(part) if isinstance(part, np.ndarray) else part for name, part in case.items()}
    sets = options.pop("queries"), options.pop("query_labels")
    keys = (*metrics, "pair_f1", *(f"recall@precision{precision}" for precision in (0.3, 0.75, 1.0)))
    options |= {"metrics": keys if several else (*keys, "macro_mAP")}
    options |= {"threshold": threshold, "threshold_bounds": threshold_bounds}
    if not expected.matched:
        with refused(NothingToRetrieveError, f"{len(case['queries'])} queries"):
            evaluate_retrieval(*sets, **options)
        return
    report = evaluate_retrieval(*sets, **options)
    wanted = expected.values(metrics)
    for key, values in wanted.items():
        assert report.per_query[key].tolist() == pytest.approx(values, abs=1e-12, nan_ok=True), key
        present = np.array(values)[~np.isnan(values)]
        mean = present.mean() if len(present) else math.nan
        assert report[key] == pytest.approx(mean, abs=1e-12, nan_ok=True), key
    assert report.queries_without_match == len(expected.scores) - len(expected.matched)
    if not several:
        values, labels = np.array(wanted["mAP"])[expected.matched], case["query_labels"][expected.matched]
        means = {int(label): values[labels == label].mean() for label in np.unique(labels)}
        assert report.per_class()["mAP"] == pytest.approx(means, abs=1e-12)
        assert report["macro_mAP"] == pytest.approx(np.mean([*means.values()]), abs=1e-12)
    if threshold is None:
        assert report["pair_f1"] == pytest.approx(expected.best_f1, abs=1e-12)
    elif case["similarity"] == "cosine" or not np.isclose(np.concatenate(expected.scores), threshold).any():
        found = (report.decision.true_positives, report.decision.false_positives, report.decision.false_negatives)
        assert found == expected.pooled(threshold)
    for precision, point in report.at_precision.items():
        recall = expected.recall_at_precision(precision, *(threshold_bounds or (-math.inf, math.inf)))
        assert point.recall == pytest.approx(recall, abs=1e-12)
