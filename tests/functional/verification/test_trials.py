"""`evaluate_trials` agrees with the definitions in rational numbers, and its intervals cover the true value."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t
from sklearn.metrics import roc_auc_score

from fewshot_callbacks import evaluate_retrieval, evaluate_trials
from tests.cases import examples
from tests.messages import missing_facts, refused

trials = st.lists(st.tuples(st.integers(-3, 4), st.booleans()), min_size=2, max_size=40).filter(
    lambda drawn: len({same for _, same in drawn}) == 2
)


def rates(drawn, threshold):
    """FNMR and FMR at a threshold."""
    same, different = ([score for score, kind in drawn if kind == wanted] for wanted in (True, False))
    return (
        Fraction(sum(score < threshold for score in same), len(same)),
        Fraction(sum(score >= threshold for score in different), len(different)),
    )


@settings(max_examples=examples(120), deadline=None)
@given(trials, st.sampled_from([0.01, 0.1, 0.25, 0.5, 1]), st.sampled_from([(1.0, 1.0), (10.0, 1.0), (1.0, 3.0)]))
def test_rates_costs_and_thresholds_are_the_definitions(drawn, p, costs):
    scores, same = zip(*drawn, strict=True)
    thresholds = [*sorted(set(scores)), math.inf]
    keys = ("eer", "min_dcf@0.01", "min_dcf@0.5", f"tar@far{p}")
    found = evaluate_trials(scores, same, metrics=keys, miss_cost=costs[0], false_match_cost=costs[1])
    at = next(t for t in thresholds if float(rates(drawn, t)[1]) <= p)
    assert (found[f"tar@far{p}"], found.thresholds[f"tar@far{p}"]) == (float(1 - rates(drawn, at)[0]), at)
    for prior in (Fraction(1, 100), Fraction(1, 2)):
        prices = Fraction(costs[0]) * prior, Fraction(costs[1]) * (1 - prior)
        paid = [sum(price * rate for price, rate in zip(prices, rates(drawn, t), strict=True)) for t in thresholds]
        key = f"min_dcf@{float(prior)}"
        assert found[key] == pytest.approx(float(min(paid) / min(prices)), rel=1e-14)
        assert found[key] <= 1
        assert paid[thresholds.index(found.thresholds[key])] == pytest.approx(min(paid), rel=1e-14)
    after = next(n for n, t in enumerate(thresholds) if rates(drawn, t)[0] >= rates(drawn, t)[1])
    (miss, match), (more, fewer) = (rates(drawn, thresholds[n]) for n in (after - 1, after))
    line = miss + (more - miss) * (match - miss) / ((match - miss) + (more - fewer))
    assert found["eer"] == pytest.approx(float(line), rel=1e-14, abs=1e-16)
    assert found.thresholds["eer"] == thresholds[after - 1]


def test_of_equal_costs_the_highest_threshold_counts():
    """By default both mistakes cost one."""
    key = "min_dcf@0.5"
    report = evaluate_trials([3.0, 2.0, 1.0, 0.0], [1, 0, 1, 0], metrics=(key,))
    assert (report[key], report.thresholds[key]) == (0.5, 3.0)
    assert evaluate_trials([2.0, 1.0, 0.0], [0, 1, 0], metrics=(key,))[key] == 0.5


def test_all_pairs_of_a_set_are_trials_like_others():
    embeddings, labels = torch.randint(-2, 3, (40, 3)).double(), torch.arange(40) % 6
    of_set = evaluate_retrieval(
        embeddings, labels, metrics=("eer", "fnmr@fmr0.05", "pair_auroc"), similarity="euclidean"
    )
    i, j = torch.triu_indices(40, 40, 1)
    scores = -((embeddings[i] - embeddings[j]) ** 2).sum(1)
    found = evaluate_trials(scores, labels[i] == labels[j], metrics=("eer", "tar@far0.05", "pair_auroc"))
    assert found["eer"] == of_set["eer"]
    assert found["pair_auroc"] == of_set["pair_auroc"]
    assert 1 - found["tar@far0.05"] == of_set["fnmr@fmr0.05"]


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_accuracy_is_that_of_the_threshold_that_is_best_on_the_other_folds(data):
    """Each fold has both kinds; the threshold is the middle of the highest of the intervals that are as good."""
    rows = [(data.draw(st.integers(-3, 4)), kind, fold) for fold in "abc" for kind in (True, False)]
    rows += data.draw(st.lists(st.tuples(st.integers(-3, 4), st.booleans(), st.sampled_from("abc")), max_size=20))
    scores, same, folds = zip(*rows, strict=True)
    report = evaluate_trials(scores, same, folds=folds, metrics=("accuracy",))
    for fold in "abc":
        inside = [row for row in rows if row[2] == fold]
        others = [row for row in rows if row[2] != fold]
        ends = [-math.inf, *sorted({score for score, *_ in others}), math.inf]

        def right(threshold, some):
            return sum((score >= threshold) == kind for score, kind, _ in some)

        values = [right(high, others) for high in ends[1:]]  # of the interval that ends at each
        last = max(n for n, value in enumerate(values) if value == max(values))
        first = last
        while first and values[first - 1] == max(values):
            first -= 1
        low, high = ends[first], ends[last + 1]
        threshold = high if math.isinf(low) or math.isinf(high) else (low + high) / 2
        assert report.folds[fold] == (right(threshold, inside) / len(inside), threshold)
    accuracies = [accuracy for accuracy, _ in report.folds.values()]
    assert report["accuracy"] == pytest.approx(np.mean(accuracies), rel=1e-15)
    assert report.accuracy_error == pytest.approx(np.std(accuracies, ddof=1) / math.sqrt(3), rel=1e-15)


def test_cost_of_likelihood_ratios():
    scores, same = [2.0, -1.0, 1000.0, -1000.0, 0.0], [True, True, True, False, False]
    expected = (math.log2(1 + math.exp(-2)) + math.log2(1 + math.exp(1))) / 3 / 2 + 1 / 2 / 2
    assert evaluate_trials(scores, same, metrics=("cllr",))["cllr"] == pytest.approx(expected, rel=1e-15)
    assert evaluate_trials([0, 0], [True, False], metrics=("cllr",))["cllr"] == 1


@settings(max_examples=examples(120), deadline=None)
@given(trials)
def test_the_area_under_the_roc_curve_is_the_share_of_couples_in_the_right_order(drawn):
    """Ties count one half; the exact fraction is rounded once."""
    targets, others = ([score for score, kind in drawn if kind == wanted] for wanted in (True, False))
    right = sum((one > other) + Fraction(one == other, 2) for one in targets for other in others)
    scores, same = zip(*drawn, strict=True)
    report = evaluate_trials(scores, same, metrics=("pair_auroc",))
    assert report["pair_auroc"] == float(right / (len(targets) * len(others)))
    assert report["pair_auroc"] == pytest.approx(roc_auc_score(same, scores), abs=1e-15)
    assert report.thresholds == {}


def test_the_interval_of_the_area_is_delongs_if_no_two_trials_share_an_identity():
    """DeLong et al. 1988: the variances of both kinds of placements, each over its number of trials, add up."""
    rng = np.random.default_rng(0)
    same = np.arange(900) < 300
    scores = np.round(rng.normal(size=900) + same, 1)
    first = np.arange(900)
    second = np.where(same, first, first + 1000)
    report = evaluate_trials(scores, same, first=first, second=second, metrics=("pair_auroc",))
    targets, others = scores[same], scores[~same]
    placements = [np.mean((others < score) + (others == score) / 2) for score in targets]
    other_placements = [np.mean((targets > score) + (targets == score) / 2) for score in others]
    assert report["pair_auroc"] == pytest.approx(np.mean(placements), rel=1e-12)
    error = math.sqrt(np.var(placements, ddof=1) / 300 + np.var(other_placements, ddof=1) / 600)
    # On the scale of the logit the interval is symmetric.
    low, high = report.intervals["pair_auroc"]
    value = report["pair_auroc"]
    reach = (math.log(high / (1 - high)) - math.log(low / (1 - low))) / 2
    assert reach == pytest.approx(1.96 * error / (value * (1 - value)), rel=0.02)


def scored_pairs(identities, items, seed):
    """Scores, kinds and identities of all pairs."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(identities), items)
    rows = rng.normal(size=(identities, 8))[labels] + 0.8 * rng.normal(size=(len(labels), 8))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    i, j = np.triu_indices(len(rows), 1)
    return (rows[i] * rows[j]).sum(1), labels[i] == labels[j], labels[i], labels[j]


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Of 60 sets 48 or more with a probability of 99.9 % if 94 % do; taking trials as independent holds far fewer."""
    keys = ("eer", "pair_auroc", "min_dcf@0.1", "tar@far0.05", "tar@far0.1", "cllr")
    truth = evaluate_trials(*scored_pairs(700, 3, 0)[:2], metrics=keys)
    held = dict.fromkeys(keys, 0)
    for seed in range(60):
        scores, same, first, second = scored_pairs(40, 3, 1 + seed)
        found = evaluate_trials(scores, same, first=first, second=second, metrics=keys)
        for key, (low, high) in found.intervals.items():
            held[key] += low <= truth[key] <= high
            assert low <= found[key] <= high
    assert min(held.values()) >= 48


def test_leaving_out_each_identity_gives_the_error_of_a_mean():
    """The interval of accuracy, at thresholds far from all scores, from a loop over identities."""
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 12, (2, 300))
    second[:100] = first[:100]
    same, folds = first == second, np.arange(300) % 2
    scores = np.where(rng.random(300) < 0.8, same, ~same).astype(float)
    found = evaluate_trials(scores, same, first=first, second=second, folds=folds, metrics=("cllr",))
    bits = np.log2(1 + np.exp(np.where(same, -scores, scores)))

    def cost(some):
        return (bits[some & same].mean() + bits[some & ~same].mean()) / 2

    moves = np.array([cost((first != g) & (second != g)) for g in range(12)]) - cost(np.full(300, True))
    couples: dict[frozenset, float] = {}
    for i in np.flatnonzero(~same):
        key = frozenset((first[i], second[i]))
        couples[key] = couples.get(key, 0.0) + (bits[i] - bits[~same].mean()) / 2 / (~same).sum()
    variance = 11 / 12 * ((moves**2).sum() - sum(value**2 for value in couples.values()))
    freedom = min(11, 2 * (moves**2).sum() ** 2 / (moves**4).sum())
    reach = t.ppf(0.975, freedom) * math.sqrt(variance) / found["cllr"]
    expected = [found["cllr"] * math.exp(side * reach) for side in (-1, 1)]
    assert found.intervals["cllr"] == pytest.approx(expected, rel=1e-9)


def test_order_and_form_do_not_matter():
    scores, same, first, second = scored_pairs(20, 3, 5)
    folds = np.arange(len(scores)) % 4
    whole = evaluate_trials(scores, same, first=first, second=second, folds=folds)
    order = np.random.default_rng(0).permutation(len(scores))
    words = [np.array([f"p{code:02}" for code in side[order]]) for side in (second, first)]
    other = torch.from_numpy(scores[order]), same[order].astype(int)
    again = evaluate_trials(*other, first=words[0], second=list(words[1]), folds=folds[order])
    left_out = {"intervals": None, "pair_counts": None}
    assert vars(again) | left_out == vars(whole) | left_out
    for key, interval in whole.intervals.items():
        assert again.intervals[key] == pytest.approx(interval, rel=1e-12, nan_ok=True)


def test_what_the_report_shows():
    scores, same, first, second = scored_pairs(20, 3, 5)
    of_area = evaluate_trials(scores, same, first=first, second=second, metrics=("pair_auroc",))
    low, high = of_area.intervals["pair_auroc"]
    line = str(of_area).splitlines()[1]
    assert missing_facts(line, ("pair_auroc", f"{of_area['pair_auroc']:.4f}", f"{low:.4f}", f"{high:.4f}")) == []
    report = evaluate_trials(scores, same, first=first, second=second)
    assert str(report).splitlines()[0] == "1,770 trials, 60 target, 1,710 non-target"
    assert report.notes == (
        "min_dcf@0.01, tar@far0.001: no interval, because fewer than 10 non-target trials are accepted.",
    )
    assert json.loads(json.dumps(report.to_dict()))["intervals"]["tar@far0.001"] == [None, None]
    counts = report.pair_counts
    assert (counts.relevant, counts.irrelevant) == (60, 1710)
    assert (counts.relevant_counts.sum(), counts.irrelevant_counts.sum()) == (60, 1710)
    for threshold, tp, fp in zip(counts.thresholds, counts.true_positives, counts.false_positives, strict=True):
        assert (tp, fp) == ((scores[same] >= threshold).sum(), (scores[~same] >= threshold).sum())
    few = evaluate_trials([0.5, 0.5], [True, False])
    assert not missing_facts(few.notes[0], ("false match rate", "1 / 1", "1 non-target"))
    assert few.thresholds["tar@far0.01"] == math.inf
    assert few.to_dict()["thresholds"]["tar@far0.01"] is None
    with refused(LookupError, "'tar@far0.5'", "eer", "metrics=('tar@far0.5', ...)"):
        few["tar@far0.5"]


@pytest.mark.parametrize("confidence", [0.99999999, 1 - 1e-15, 1 - 2**-53])
@pytest.mark.parametrize("identities", [3, 6])
def test_a_confidence_near_one_has_wide_intervals(confidence, identities):
    generator = np.random.default_rng(0)
    first, second = generator.integers(0, identities, (2, 400))
    same = first == second
    scores = generator.normal(size=400) + 2 * same
    usual, found = (
        evaluate_trials(scores, same, first=first, second=second, metrics=("eer", "cllr"), confidence=level)
        for level in (0.95, confidence)
    )
    for key, (low, high) in found.intervals.items():
        assert low <= usual.intervals[key].low < usual.intervals[key].high <= high, key
        assert low >= 0


def test_costs_are_numbers_of_any_library():
    scores, same = [0.9, 0.8, 0.3, 0.7, 0.2, 0.1], [1, 1, 1, 0, 0, 0]
    expected = evaluate_trials(scores, same, miss_cost=2.0)
    assert evaluate_trials(scores, same, miss_cost=np.float32(2)) == expected
