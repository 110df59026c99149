"""Pairs that were noted with estimates: what they prove, and what their keys decide."""

import math

import numpy as np
import pytest

from fewshot_callbacks.engine.open_pass import open_pass
from fewshot_callbacks.engine.pooled.highest import TopNegatives, exact_scores_of
from fewshot_callbacks.engine.pooled.record import PairRecord
from fewshot_callbacks.engine.pooled.tally import ThresholdCounts
from tests.engine.cases import SIMILARITIES, pooled_case, prepared
from tests.engine.oracles import pair_keys


def noted(case, error, cut_share, parts=2):
    """Negatives above a cut, with estimates that are off by up to `error`, split over some threads; and all negatives."""
    tiles, candidates = prepared(case)
    matrix = open_pass(tiles, candidates, 10**8).matrix
    keys, relevant, wanted = pair_keys(case)
    rows, columns = np.nonzero(np.triu(~relevant & wanted))
    of_pairs = keys[rows, columns]
    rng = np.random.default_rng(0)
    values = of_pairs + rng.uniform(-error, error, len(of_pairs))
    cut = float(np.quantile(values, cut_share))
    highest = TopNegatives(matrix.repeats, symmetric=matrix.symmetric_ranks)
    for part in range(parts):
        mine = (np.arange(len(values)) % parts == part) & (values >= cut)
        empty = np.zeros(2, np.int64)
        highest.add(
            PairRecord(
                empty, 0.0, 1.0, -math.inf, cut, values[mine], rows[mine].astype(np.int32),
                columns[mine].astype(np.int32), empty[:0], np.array([mine.sum(), 0, 0]),
            ),
            error=error,
        )  # fmt: skip
    return matrix, highest, keys[~relevant & wanted], keys[relevant & wanted]


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("kind", ["hard", "few-values"])
@pytest.mark.parametrize("error", [1e-9, 1e-2])
def test_bounds_hold_the_counts(kind, similarity, error):
    _, highest, negatives, positives = noted(pooled_case(kind, similarity), error, 0.6)
    asked = np.unique(np.concatenate([positives, negatives]))
    asked = asked[asked >= highest.exact_above]
    assert len(asked)
    truth = np.array([(negatives >= key).sum() for key in asked])
    fewest, most = highest.bounds(asked)
    assert (fewest <= truth).all()
    assert (truth <= most).all()
    far = np.array([np.abs(negatives - key).min() > 2 * error for key in asked])
    assert (fewest == most)[far].all()


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("kind", ["hard", "few-values"])
@pytest.mark.parametrize("error", [0.0, 1e-9, 1e-2])
def test_their_keys_are_counted_exactly(kind, similarity, error):
    matrix, highest, negatives, positives = noted(pooled_case(kind, similarity), error, 0.6)
    edges = np.unique(np.concatenate([positives[::3], negatives[::7]]))
    edges = edges[edges >= highest.exact_above]
    counts = ThresholdCounts(edges)
    for pairs in highest.count(counts).get(0, []):
        counts.add(exact_scores_of(matrix.scores, pairs, 1), pairs.weights)
    reached, tied = counts.accepted()
    assert reached.tolist() == [(negatives >= key).sum() for key in edges]
    assert tied.tolist() == [(negatives == key).sum() for key in edges]


def test_the_highest_cut_of_all_threads_is_what_can_be_vouched_for():
    case = pooled_case("hard", "cosine")
    _, highest, *_ = noted(case, 1e-9, 0.5, parts=1)
    lower = highest.cut
    empty = np.zeros(0)
    index = np.zeros(0, np.int32)
    nothing = np.zeros(3, np.int64)
    pooled = PairRecord(nothing, 0.0, 1.0, 0.0, lower + 1, empty, index, index, nothing[:0], nothing)
    highest.add(pooled)
    assert highest.cut == lower + 1
    assert len(highest) > 100
    highest.discard()
    highest.add(pooled)
    assert (highest.cut, len(highest)) == (math.inf, 0)
    assert TopNegatives(False, symmetric=True).cut == math.inf
