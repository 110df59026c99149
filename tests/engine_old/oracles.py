"""What a pass must count, by comparing the exact scores of all pairs one by one."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from sklearn.metrics import average_precision_score, roc_curve

from fewshot_callbacks.engine.open_pass import open_pass
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.pooled.first_counts import FirstCounts
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.functional.retrieval.threshold_search import decide
from tests.engine.cases import (
    PRECISIONS,
    prepared,
)

TABLES = ("negatives_above", "negatives_tied", "relevant_above", "relevant_tied", "position_in_tie")


def counted(case, look=None):
    """For each query the rows of all `RankBlock`s."""
    tiles, candidates = prepared(case)
    done = []
    walk = open_pass(tiles, candidates, 10**8, progress=lambda *pairs: done.append(pairs))
    found = {}
    for block in walk.run(look):
        for row, query in enumerate(block.queries.tolist()):
            assert query not in found
            assert int(block.valid[row].sum()) == int(block.relevant[row])
            found[query] = [getattr(block, name)[row][block.valid[row]].tolist() for name in TABLES]
    assert done[-1] == (candidates.pairs, candidates.pairs)
    return found


def pair_keys(case):
    """The keys of all pairs by the road that is proved elsewhere, who is relevant, and who is a candidate at all."""
    with engine_options(kernel="pytorch"):
        tiles, candidates = prepared(case)
        rows, columns = torch.arange(len(tiles.queries)), torch.arange(len(tiles.gallery))
        keys = tiles.exact_scores(rows, columns).numpy()
    wanted = ~candidates.excluded(rows[:, None], columns[None, :]).numpy()
    item_labels = case.get("gallery_labels", case["query_labels"])
    return keys, (case["query_labels"][:, None] == item_labels[None, :]).numpy(), wanted


def expected(case):
    """`counted`, by comparing keys."""
    found = {}
    for query, (keys, relevant, wanted) in enumerate(zip(*pair_keys(case), strict=True)):
        own, others = np.sort(keys[relevant & wanted]), keys[~relevant & wanted]
        found[query] = [
            [int((others > key).sum()) for key in own],
            [int((others == key).sum()) for key in own],
            [int((own > key).sum()) for key in own],
            [int((own == key).sum()) for key in own],
            [int((own[:place] == key).sum()) + 1 for place, key in enumerate(own)],
        ]
    return found


RUNGS = {name: precision for name, precision in PRECISIONS.items() if precision != Precision.BYTES}
"""Those that estimate scores; bytes only bound them."""


def all_pairs(case):
    keys, relevant, wanted = pair_keys(case)
    return keys[relevant & wanted], keys[~relevant & wanted]


def accepted(scores, thresholds):
    return len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")


def check_decisions(case, request, capacity=10_000, observer=PooledCounts):
    """Compare `decide` with loops over all relevant keys; returns the decisions and what was seen first."""
    positives, negatives = all_pairs(case)
    tiles, candidates = prepared(case)
    ranking_pass = open_pass(tiles, candidates, 10**8)
    first = FirstCounts(ranking_pass, observer(ranking_pass.matrix, request.wanted, request.thresholds, capacity))
    for _ in first.run():
        pass
    found = decide(first, request)
    keys = np.unique(positives)
    tp, fp = accepted(positives, keys), accepted(negatives, keys)

    def same(point, key, tp, fp):
        assert (point.true_positives, point.false_positives) == (tp, fp)
        assert point.false_negatives == len(positives) - tp
        assert point.threshold == tiles.to_user_score(float(key))

    f1 = 2 * tp / (tp + fp + len(positives))
    best = np.flatnonzero(f1 == f1.max())[-1]
    same(found.best_f1, keys[best], tp[best], fp[best])
    low, high = (tiles.to_exact_score(bound) for bound in request.bounds)
    tried = np.unique(np.concatenate([positives, negatives, [low, high]]))
    tried = tried[(tried >= low) & (tried <= high) & np.isfinite(tried)]
    tried_tp, tried_fp = accepted(positives, tried), accepted(negatives, tried)
    for precision in request.precisions:
        reaching = np.flatnonzero(tried_tp / np.maximum(tried_tp + tried_fp, 1) >= precision)
        point = found.at_precision[precision]
        if len(reaching):
            chosen = reaching[0]
            assert (point.true_positives, point.false_positives) == (tried_tp[chosen], tried_fp[chosen])
            assert point.false_negatives == len(positives) - tried_tp[chosen]
            bound = {low: request.bounds[0], high: request.bounds[1]}
            assert point.threshold == bound.get(tried[chosen], tiles.to_user_score(float(tried[chosen])))
        else:
            assert math.isnan(point.threshold)
            assert point.recall == 0
    for threshold in request.thresholds:
        key, point = tiles.to_exact_score(threshold), found.at_threshold[threshold]
        assert (point.true_positives, point.false_positives) == ((positives >= key).sum(), (negatives >= key).sum())
    for rate in request.false_match_rates:
        allowed = np.flatnonzero(fp / max(len(negatives), 1) <= rate)
        point = found.at_false_match_rate[rate]
        if not len(negatives):
            assert all(
                math.isnan(part) for part in (point.threshold, point.false_match_rate, point.false_non_match_rate)
            )
            continue
        if not len(allowed):
            assert math.isnan(point.threshold)
            assert point.false_non_match_rate == 1
            continue
        assert point.threshold == tiles.to_user_score(float(keys[allowed[0]]))
        assert point.false_match_rate == fp[allowed[0]] / len(negatives)
        assert point.false_non_match_rate == pytest.approx(1 - tp[allowed[0]] / len(positives), abs=1e-15)
    scores = np.concatenate([positives, negatives])
    truth = np.concatenate([np.ones(len(positives), int), np.zeros(len(negatives), int)])
    area = average_precision_score(truth, scores)
    assert found.average_precision.low - 1e-9 <= area <= found.average_precision.high + 1e-9
    if request.equal_error_rate and len(negatives):
        assert found.equal_error_rate == pytest.approx(equal_error_rate(positives, negatives), abs=1e-12)
        fmr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
        # where the two cross: the lowest such place is the only one, since one falls where the other rises
        crossing = brentq(lambda at: np.interp(at, np.arange(len(fmr)), fmr + tpr) - 1, 0, len(fmr) - 1, xtol=1e-13)
        assert found.equal_error_rate == pytest.approx(np.interp(crossing, np.arange(len(fmr)), fmr), abs=1e-9)
    return found, first


def equal_error_rate(positives, negatives):
    """Where the line through the points of all thresholds, from the highest on, meets FMR = FNMR."""
    before = (0.0, 1.0)
    thresholds = np.unique(np.concatenate([positives, negatives]))[::-1]
    rates = accepted(negatives, thresholds) / len(negatives), 1 - accepted(positives, thresholds) / len(positives)
    for fmr, fnmr in zip(*rates, strict=True):
        if fmr >= fnmr:
            ahead, behind = before[1] - before[0], fmr - fnmr
            return before[0] + (fmr - before[0]) * ahead / (ahead + behind)
        before = fmr, fnmr
    raise AssertionError("they always meet")
