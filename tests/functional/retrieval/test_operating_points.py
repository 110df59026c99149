"""Decisions over all pairs: operating points where every threshold is tried, with loops, and the counts for plots."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts
from fewshot_callbacks.functional.verification.scores import trial_scores
from tests.cases import clustered_items, examples

PRECISIONS = (0.05, 0.3, 0.5, 0.56, 0.6, 2 / 3, 0.75, 0.9, 1.0)


def reaching(pairs, threshold):
    """Numbers of relevant pairs and of negatives that reach a threshold."""
    tp = sum(hit for score, hit in pairs if score >= threshold)
    return tp, sum(score >= threshold for score, _ in pairs) - tp


def lowest_point(pairs, precision, thresholds):
    """The smallest of some thresholds with this precision, and the counts at it."""
    for threshold in sorted(thresholds):
        tp, fp = reaching(pairs, threshold)
        if tp and tp / (tp + fp) >= precision:
            return threshold, tp, fp
    return math.nan, 0, 0


def evaluate_pairs(pairs, **kwargs):
    """A query of 1.0 against items that are their scores: every pair is one decision, and no score is rounded."""
    scores, relevant = zip(*pairs, strict=True)
    items, query = torch.tensor(scores, dtype=torch.float64)[:, None], torch.ones(1, 1, dtype=torch.float64)
    return evaluate_retrieval(query, [1], items, [int(hit) for hit in relevant], similarity="dot", **kwargs)


def counts_of(point):
    """The threshold of a point, and its counts."""
    return point.threshold, point.true_positives, point.false_positives


BOUNDS = st.sampled_from([-math.inf, math.inf, -3.0, -0.5, 0.0, 1.0, 2.5])
PAIRS = st.lists(
    st.tuples(st.sampled_from([-2, -1, -0.5, 0, 0.25, 1, 2, 3, 4, 5]), st.booleans()), min_size=1, max_size=30
).filter(lambda pairs: any(hit for _, hit in pairs))
RATES = st.lists(st.fractions(0, 1, max_denominator=30).filter(lambda rate: 0 < rate < 1).map(float), max_size=4)
LITTLE_ROOM = {"grid_size": 2, "buffer_pairs": 2}
"""Room for so little that pairs are counted and listed again."""


@pytest.mark.parametrize(
    "options", [{}, {"as_on_device": True}, LITTLE_ROOM, {"precision": "int8", **LITTLE_ROOM}], ids=str
)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=PAIRS, low=BOUNDS, high=BOUNDS, rates=RATES)
@example(pairs=[(4, 1), (3, 0), (2, 1), (2, 0), (1, 0), (0, 0)], low=0.0, high=math.inf, rates=[0.5])
@example(pairs=[(5 + n / 32, n < 14) for n in range(25)], low=0.0, high=2.0, rates=[])  # 14 of 25 is 0.56
@example(pairs=[(1, 1), (0, 1)], low=0.0, high=1.0, rates=[])  # at both bounds
@example(pairs=[(5, 1)] * 3 + [(4, 0)] * 2 + [(-1, 1)], low=-math.inf, high=math.inf, rates=[])
def test_recall_at_precision_is_that_of_the_smallest_of_all_thresholds(options, pairs, low, high, rates):
    """And false match rates, as they are reported, that of the smallest relevant score."""
    low, high = min(low, high), max(low, high)
    keys = [f"recall@precision{precision!r}" for precision in PRECISIONS]
    with engine_options(**options):
        asked = [*keys, *(f"fnmr@fmr{rate!r}" for rate in rates)]
        report = evaluate_pairs(pairs, metrics=asked, threshold_bounds=(low, high))
    bounds = {bound for bound in (low, high) if math.isfinite(bound)}
    thresholds = {score for score, _ in pairs if low <= score <= high} | bounds
    relevant_scores = {score for score, hit in pairs if hit}
    negatives = sum(not hit for _, hit in pairs)
    relevant_thresholds = {score for score in relevant_scores if low <= score <= high} | (bounds & {high})
    for precision, key in zip(PRECISIONS, keys, strict=True):
        expected = lowest_point(pairs, precision, relevant_thresholds)  # NaN is NaN here
        np.testing.assert_array_equal(counts_of(report.at_precision[precision]), expected)
        _, tp, _ = lowest_point(pairs, precision, thresholds)
        assert report[key] == tp / sum(hit for _, hit in pairs)
    for rate in rates if negatives else ():
        rates_at = ((at, reaching(pairs, at)[1] / negatives) for at in sorted(relevant_scores))
        expected = next((found for found in rates_at if found[1] <= rate), (math.nan, 0.0))
        point = report.at_false_match_rate[rate]
        np.testing.assert_array_equal((point.threshold, point.false_match_rate), expected)


@pytest.mark.parametrize(
    ("similarity", "scale"),
    [
        *[(similarity, scale) for similarity in ("cosine", "euclidean") for scale in (1.0, 1e-158, 1e300)],
        ("dot", 1.0),
        ("dot", 1e-150),
        ("dot", 1e-158),  # products below the normal numbers of float64
    ],
)
def test_a_threshold_accepts_the_pairs_that_it_counts_among_the_scores_that_a_user_reads(similarity, scale):
    vectors, labels = clustered_items(60, 6, noise=2)
    vectors = vectors.double() * scale
    metrics = ("pair_f1", "recall@precision0.3", "fnmr@fmr0.1")
    report = evaluate_retrieval(vectors, labels, similarity=similarity, metrics=metrics, label_groups=None)
    queries, items = np.nonzero(~np.eye(len(labels), dtype=bool))
    scores = trial_scores(vectors, queries, items, similarity=similarity).numpy()
    relevant = (labels[queries] == labels[items]).numpy()
    merges_scores = (similarity, scale) == ("dot", 1e-158)
    for point in (report.pooled.best_f1, report.at_precision[0.3]):
        assert point.threshold in scores[relevant]
        accepted = scores >= point.threshold
        counts = np.array([(accepted & relevant).sum(), (accepted & ~relevant).sum()])
        counted = np.array([point.true_positives, point.false_positives])
        assert (counts >= counted).all() if merges_scores else (counts == counted).all()
    verification = report.at_false_match_rate[0.1]
    rejected = (scores < verification.threshold)[relevant].mean()
    assert merges_scores or rejected == pytest.approx(verification.false_non_match_rate, abs=1e-12)


# ------------------------------------------------------------------------------------ counts at a few hundred thresholds


def count_reaching(scores, thresholds):
    return len(scores) - np.searchsorted(scores, thresholds)


def scores_of_pairs(vectors, labels, similarity):
    """Ascending scores of relevant and of irrelevant pairs."""
    rows = vectors.double()
    if similarity == "cosine":
        rows = torch.nn.functional.normalize(rows, dim=1)
    scores = -torch.cdist(rows, rows) if similarity == "euclidean" else rows @ rows.T
    same = labels[:, None] == labels
    others = ~torch.eye(len(labels), dtype=torch.bool)
    return scores[same & others].sort().values.numpy(), scores[~same].sort().values.numpy()


@pytest.mark.parametrize(("similarity", "as_on_device"), [("cosine", False), ("dot", True), ("euclidean", False)])
def test_counts_are_those_of_all_pairs_and_the_operating_points_are_among_them(similarity, as_on_device):
    vectors, labels = clustered_items(400, 34, noise=0.8)
    asked = (*DEFAULT_METRICS, "recall@precision0.5")
    with engine_options(as_on_device=as_on_device):
        report = evaluate_retrieval(vectors, labels, similarity=similarity, metrics=asked)
    counts, (relevant, irrelevant) = report.pair_counts, scores_of_pairs(vectors, labels, similarity)
    assert (counts.relevant, counts.irrelevant) == (len(relevant), len(irrelevant))
    assert (np.diff(counts.thresholds) >= 0).all()
    assert len(counts.thresholds) <= 500
    reach = counts.tolerance * 1.001 + 1e-9
    for counted, scores in ((counts.true_positives, relevant), (counts.false_positives, irrelevant)):
        assert (counted <= count_reaching(scores, counts.thresholds - reach)).all()
        assert (counted >= count_reaching(scores, counts.thresholds + reach)).all()
    assert (counts.relevant_counts.sum(), counts.irrelevant_counts.sum()) == (len(relevant), len(irrelevant))
    assert counts.sampled_below == -math.inf
    for point in (report.decision, *report.at_precision.values()):
        at = int(np.flatnonzero(counts.thresholds == point.threshold)[0])
        assert counts.true_positives[at] == point.true_positives
        assert counts.false_positives[at] == point.false_positives


def test_what_a_screen_has_not_counted_is_estimated_from_a_sample_and_said():
    vectors, labels = clustered_items(1200, 100, noise=0.3)
    with engine_options(buffer_pairs=2**14):
        counts = evaluate_retrieval(vectors, labels).pair_counts
    _, irrelevant = scores_of_pairs(vectors, labels, "cosine")
    true = count_reaching(irrelevant, counts.thresholds)
    above = counts.thresholds > counts.sampled_below + counts.tolerance
    assert math.isfinite(counts.sampled_below)
    assert above.any()
    assert not above.all()
    assert (counts.false_positives[above] <= count_reaching(irrelevant, counts.thresholds[above] - 1e-3)).all()
    assert (counts.false_positives[above] >= count_reaching(irrelevant, counts.thresholds[above] + 1e-3)).all()
    assert np.abs(counts.false_positives - true)[~above].max() < 0.06 * len(irrelevant)
    assert counts.irrelevant_counts.sum() == len(irrelevant)


def test_codes_are_counted_at_each_distance():
    codes, labels = torch.randint(0, 2, (200, 16)), torch.arange(200) % 10
    counts = evaluate_retrieval(codes, labels, similarity="hamming").pair_counts
    distances = (codes[:, None] != codes).sum(2)
    same = (labels[:, None] == labels).fill_diagonal_(False)
    expected = [int((same & (-distances >= threshold)).sum()) for threshold in counts.thresholds]
    assert counts.true_positives.tolist() == expected
    assert (counts.tolerance, counts.sampled_below) == (0.0, -math.inf)
    assert counts.thresholds.tolist() == counts.thresholds.round().tolist()
    smallest = int((distances + 99 * torch.eye(200)).min())
    assert counts.edges.tolist() == list(range(-int(distances.max()), -smallest + 2))
    assert counts.relevant_counts.tolist() == [int((same & (-distances == edge)).sum()) for edge in counts.edges[:-1]]


def test_rates_of_no_pairs_are_not_numbers():
    counts = evaluate_retrieval(torch.randn(8, 3), [1] * 8).pair_counts
    assert (counts.relevant, counts.irrelevant, counts.irrelevant_counts.sum()) == (56, 0, 0)
    assert np.isnan(counts.false_match_rate).all()
    empty = np.array([0])
    counts = PairCounts(np.array([0.5]), empty, empty, 0, 0, np.array([0.0, 1.0]), empty, empty)
    rates = counts.recall, counts.precision, counts.false_match_rate, counts.false_non_match_rate, counts.at(0.5)
    assert np.isnan(np.concatenate(rates)).all()


def test_thresholds_are_dense_where_false_matches_change():
    """A curve over false match rates is read on a logarithmic axis: from 30 on, no step doubles the count.

    In 4,096 dimensions the scores of irrelevant pairs have a standard deviation of 3 of the evenly spaced thresholds.
    """
    false_positives = evaluate_retrieval(*clustered_items(600, 50, 4096, noise=0.1)).pair_counts.false_positives
    counted = np.unique(false_positives[false_positives >= 30])
    assert (counted[1:] < 2 * counted[:-1]).all()
