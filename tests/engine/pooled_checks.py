"""What counts of all pairs have to be, by loops over all pairs."""

import dataclasses
import math

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from fewshot_callbacks.functional.retrieval.decisions import PooledRequest, decide
from tests.engine.oracles import evaluated, scores_of

ROADS = (
    {},
    {"precision": "int8", "grid_size": 20, "buffer_pairs": 60, "threads": 2},
    {"precision": "int8", "grid_size": 16, "buffer_pairs": 4},
    {"precision": "float32", "buffer_pairs": 200, "height": 16},
    {"precision": "float64", "grid_size": 40, "batch_counters": 40, "buffer_pairs": 500},
    {"precision": "float64", "buffer_pairs": 4, "batch_counters": 1, "height": 16},
    {"as_on_device": True, "grid_size": 20, "buffer_pairs": 60},
    {"memory": 10**5, "threads": 2},
)
"""From all that is asked being known after one pass, to nothing being known."""


def reaching(scores, thresholds):
    """How many of the ascending scores reach each threshold."""
    return len(scores) - np.searchsorted(scores, thresholds)


def request_for(case, **changes):
    """All that can be asked, with thresholds that occur in the case."""
    queries = case["queries"].double()
    some = {"dot": float(queries[0] @ queries[1]), "euclidean": -float((queries[0] - queries[1]).norm())}
    thresholds = (some.get(case["similarity"], 0.5), 0.0, -0.25)
    asked = PooledRequest((0.05, 0.11, 0.3, 0.75, 1.0), thresholds=thresholds, false_match_rates=(0.0, 1e-3, 0.1, 0.7))
    return dataclasses.replace(asked, equal_error_rate=True, average_precision=True, **changes)


def check_decisions(case, request, **road):
    """Compare `decide` with loops over the scores of all pairs."""
    truth = scores_of(case)
    positives, negatives = truth.positives, truth.negatives
    with evaluated(case, request, **road) as (result, _):
        done = result.pooled
        found, vectors = decide(done, request), done.vectors
    scores = np.unique(positives)
    tp, fp = reaching(positives, scores), reaching(negatives, scores)

    def user(score):
        return float(vectors.scale.to_user(np.array([score]))[0])

    def same(point, threshold, tp, fp):
        assert (point.threshold, point.true_positives, point.false_positives) == (threshold, tp, fp)
        assert point.false_negatives == len(positives) - tp

    f1 = 2 * tp / (tp + fp + len(positives))
    best = np.flatnonzero(f1 == f1.max())[-1]
    same(found.best_f1, user(scores[best]), tp[best], fp[best])
    low, high = (float(vectors.scale.from_user(bound)) for bound in request.allowed_thresholds)
    tried = np.unique(np.append(positives[(positives >= low) & (positives <= high)], high))
    tried = tried[np.isfinite(tried)]
    tried_tp, tried_fp = reaching(positives, tried), reaching(negatives, tried)
    for precision in request.precisions:
        reach = np.flatnonzero(tried_tp / np.maximum(tried_tp + tried_fp, 1) >= precision)
        point = found.at_precision[precision]
        if len(reach):
            at = reach[0]
            bound = request.allowed_thresholds[1] if tried[at] == high and high not in positives else user(tried[at])
            same(point, bound, tried_tp[at], tried_fp[at])
        else:
            assert math.isnan(point.threshold)
            assert point.recall == 0
    for threshold in request.thresholds:
        score = float(vectors.scale.from_user(threshold))
        same(found.at_threshold[threshold], threshold, (positives >= score).sum(), (negatives >= score).sum())
    for rate in request.false_match_rates:
        allowed = np.flatnonzero(fp / max(len(negatives), 1) <= rate)
        point = found.at_false_match_rate[rate]
        if not len(negatives):
            values = (point.threshold, point.false_match_rate, point.false_non_match_rate)
            assert np.isnan(values).all()
        elif not len(allowed):
            assert math.isnan(point.threshold)
            assert point.false_non_match_rate == 1
        else:
            at = allowed[0]
            assert (point.threshold, point.false_match_rate) == (user(scores[at]), fp[at] / len(negatives))
            assert point.false_non_match_rate == 1 - tp[at] / len(positives)
    every, is_relevant = np.append(positives, negatives), np.repeat([1, 0], [len(positives), len(negatives)])
    area, proved = average_precision_score(is_relevant, every), found.auc_pr
    assert proved.low - 1e-9 <= area <= proved.high + 1e-9
    assert not request.average_precision or proved.high - proved.low < 1e-9
    if request.equal_error_rate and len(negatives):
        assert found.equal_error_rate == pytest.approx(equal_error_rate(positives, negatives), abs=1e-12)
    for threshold, precision, recall in found.curve:
        exact_tp, exact_fp = (
            (some >= float(vectors.scale.from_user(threshold))).sum() for some in (positives, negatives)
        )
        assert recall == exact_tp / len(positives)
        assert done.negatives.cutoff > -np.inf or precision == exact_tp / (exact_tp + exact_fp)
    return found


def equal_error_rate(positives, negatives):
    """Where the line through the points of all thresholds, from the highest on, meets FMR = FNMR."""
    before = (0.0, 1.0)
    thresholds = np.unique(np.append(positives, negatives))[::-1]
    rates = reaching(negatives, thresholds) / len(negatives), 1 - reaching(positives, thresholds) / len(positives)
    for fmr, fnmr in zip(*rates, strict=True):
        if fmr >= fnmr:
            ahead, behind = before[1] - before[0], fmr - fnmr
            return before[0] + (fmr - before[0]) * ahead / (ahead + behind)
        before = fmr, fnmr
    raise AssertionError("they always meet")
