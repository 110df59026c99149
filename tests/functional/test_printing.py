"""What `print` and the prompt show of results: tables, whatever their size."""

import copy
import pickle
import re

import pytest
import torch

from fewshot_callbacks import (
    compare_reports,
    evaluate_identification,
    evaluate_retrieval,
    evaluate_trials,
    knn_accuracy,
    leakage,
    linear_probe,
)
from fewshot_callbacks.functional import embedding_health, near_duplicates, nearest, read_trials, suspects
from tests.messages import missing_facts, refused

GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.arange(600) % 20
ROWS = torch.nn.functional.one_hot(LABELS, 20).float() + 0.4 * torch.randn(600, 20, generator=GENERATOR)
WORDS = [f"class {label}" for label in LABELS.tolist()]
METRICS = ("mAP", "recall@1", "pair_f1", "recall@precision0.95", "fnmr@fmr0.01")
FIRST, SECOND = (evaluate_retrieval(rows, LABELS, metrics=METRICS) for rows in (ROWS, ROWS + 0.5 * ROWS.flip(1)))


@pytest.fixture
def trials(tmp_path):
    lines = [f"{n % 2} speaker{n}/a.wav speaker{n + (n + 1) % 2}/b.wav" for n in range(1200)]
    (tmp_path / "trials.txt").write_text("\n".join(lines))
    return read_trials(tmp_path / "trials.txt")


RESULTS = {
    "report": lambda: FIRST,
    "differences": lambda: compare_reports(FIRST, SECOND),
    "votes": lambda: knn_accuracy(ROWS, LABELS, k=5),
    "probe": lambda: linear_probe(ROWS[:300], LABELS[:300], ROWS[300:], LABELS[300:]),
    "health": lambda: embedding_health(ROWS, LABELS),
    "trials": lambda: evaluate_trials(ROWS[:, 0], LABELS == 0),
    "identification": lambda: evaluate_identification(ROWS[:300], LABELS[:300], ROWS[300:], LABELS[300:] % 19),
    "nearest": lambda: nearest(ROWS, LABELS, k=10),
    "near duplicates": lambda: near_duplicates(ROWS, min_score=0.5),
    "leakage": lambda: leakage(FIRST, ROWS, torch.cat([ROWS[:30], -ROWS])),
    "suspects": lambda: suspects(ROWS, WORDS[:590] + ["class 0"] * 10, min_probability=0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_shown_as_a_short_table(name):
    shown = repr(RESULTS[name]())
    assert shown == str(RESULTS[name]())
    assert len(shown) < 3000
    assert "tensor(" not in shown
    assert "\n" in shown


def test_trials_are_shown_by_their_first(trials):
    lines = repr(trials).splitlines()
    assert lines[0] == "1,200 trials, 600 target, 600 non-target"
    assert lines[1].split() == ["trial", "first", "second"]
    assert lines[2].split() == ["non-target", "speaker0/a.wav", "speaker1/b.wav"]
    assert lines[-1] == "... and 1,190 more"
    assert len(trials) == 1200


def test_neighbours_are_shown_with_scores_and_labels():
    found = nearest(torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 1.0]]), ["owl", "owl", "heron"], k=1)
    assert str(found).splitlines() == [
        "3 queries with 1 neighbour each, and the score of each in brackets; * has the query's label",
        "query            1",
        "    0  1* (1.0000)",
        "    1  0* (1.0000)",
        "    2   0 (0.7071)",
    ]
    exactly = nearest(torch.eye(2), gallery=torch.eye(2)[:1], k=3)
    assert str(exactly).splitlines()[2].split() == ["0", "0", "(1.0000)", "-", "-"]


def test_suspects_are_shown_with_their_labels():
    labels = WORDS.copy()
    labels[7] = "class 8"
    rows = torch.nn.functional.one_hot(LABELS, 20).float() + 0.05 * torch.randn(600, 20, generator=GENERATOR)
    found = suspects(rows, labels)
    assert str(found).splitlines()[1].split() == ["item", "given", "suggested", "probability"]
    item, *words, probability = re.split("  +", str(found).splitlines()[2].strip())
    assert (item, words) == ("7", ["class 8", "class 7"])
    assert float(probability) > 0.5
    assert str(suspects(ROWS, LABELS)).startswith(f"{len(suspects(ROWS, LABELS))} items whose label may be wrong")
    steering = suspects(ROWS, [f"{word}\x1b[2J" for word in labels])
    assert "\x1b" not in str(steering)


def test_pairs_are_shown_with_the_number_that_is_left_out():
    found = near_duplicates(torch.tensor([[1.0, 0.0], [1.0, 0.01], [1.0, 0.02]]), most=1)
    assert str(found).startswith("3 pairs with a score of at least 0.98 (1 listed)\nfirst  second   score\n")


def test_differences_say_their_sign():
    found = compare_reports(FIRST, SECOND)
    assert isinstance(found, dict)
    lines = str(found).splitlines()
    assert lines[0].split() == ["metric", "first", "second", "first", "-", "second", "interval", "significant"]
    assert not missing_facts(lines[-1], ("zero", "first", "larger")), lines
    change = found["mAP"]
    assert f"{change.value:+.4f}" in lines[1]
    assert str(change).startswith(f"{change.first:.4f} - {change.second:.4f} = {change.value:+.4f} (")
    assert (
        str(found["pair_f1"])
        == f"{found['pair_f1'].first:.4f} - {found['pair_f1'].second:.4f} = {found['pair_f1'].value:+.4f}"
    )


def test_an_operating_point_that_is_not_there_is_refused_with_those_that_are():
    point = FIRST.at_precision[0.95]
    assert str(point).startswith(f"threshold {point.threshold:.4f}: precision {point.precision:.4f}, recall ")
    with refused(LookupError, "precision", 0.5, 0.95, "metrics=('recall@precision0.5', ...)"):
        FIRST.at_precision[0.5]
    with refused(LookupError, "false match rate", 0.5, 0.01, "metrics=('fnmr@fmr0.5', ...)"):
        FIRST.at_false_match_rate[0.5]
    for other in (pickle.loads(pickle.dumps(FIRST.at_precision)), copy.deepcopy(FIRST.at_precision)):
        assert other == {0.95: point}
        with refused(LookupError, 0.5, 0.95, "metrics=('recall@precision0.5', ...)"):
            other[0.5]
    assert FIRST.at_precision.get(0.5) is None


def test_pooled_decisions_are_shown_point_by_point():
    pooled = FIRST.pooled
    lines = repr(pooled).splitlines()
    assert repr(pooled) == str(pooled)
    assert lines[0] == f"best F1: {pooled.best_f1}"
    assert lines[1] == f"precision of at least 0.95: {FIRST.at_precision[0.95]}"
    point = FIRST.at_false_match_rate[0.01]
    assert lines[2] == (
        f"false match rate of at most 0.01: threshold {point.threshold:.4f}: false match rate "
        f"{point.false_match_rate:.4f}, false non-match rate {point.false_non_match_rate:.4f}"
    )
    assert lines[3] == f"area under the precision-recall curve: {FIRST.auc_pr.value:.4f}"
    assert len(lines) == 4
    at_half = evaluate_retrieval(ROWS, LABELS, metrics=("eer", "pair_f1"), threshold=0.5)
    assert f"given threshold: {at_half.decision}" in str(at_half.pooled)
    assert f"equal error rate: {at_half['eer']:.4f}" in str(at_half.pooled)


def test_counts_of_pairs_are_shown_at_ten_thresholds():
    counts = FIRST.pair_counts
    lines = repr(counts).splitlines()
    assert repr(counts) == str(counts)
    assert lines[0] == f"{counts.relevant:,} relevant and {counts.irrelevant:,} irrelevant pairs"
    assert lines[1].split("  ")[-1].strip() == "false match rate"
    rows = [list(map(float, line.split())) for line in lines[2:12]]
    assert rows[0][0] == round(counts.thresholds.min(), 4)
    assert rows[-1][0] == round(counts.thresholds.max(), 4)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    for row in rows:
        [at] = [n for n, each in enumerate(counts.thresholds) if round(each, 4) == row[0]][:1]
        expected = counts.recall[at], counts.precision[at], counts.false_match_rate[at]
        assert row[1:] == pytest.approx(expected, abs=6e-5, nan_ok=True)
    assert lines[-1] == f"... and {len(counts.thresholds) - 10:,} more"


def test_threshold_consistency_is_shown_with_the_classes_that_want_another():
    tight = ROWS + 2 * torch.nn.functional.one_hot(LABELS, 20) * (LABELS < 10)[:, None]
    found = evaluate_retrieval(tight, WORDS, metrics=("opis@fmr0.1",)).consistency[0.1]
    lines = repr(found).splitlines()
    assert repr(found) == str(found)
    assert lines[0] == f"20 classes at {len(found.thresholds)} thresholds: OPIS {found.opis:.4f}, gap {found.gap():.4f}"
    assert (
        lines[1]
        == f"common threshold {found.common_threshold:.4f}; classes that gain the most from their own threshold:"
    )
    assert lines[2].split() == ["class", "threshold", "gain"]
    label, (threshold, gain) = next(iter(found.wanting().items()))
    assert lines[3].strip().rsplit(maxsplit=2) == [label, f"{threshold:.4f}", f"{gain:.4f}"]
    same = evaluate_retrieval(ROWS, WORDS, metrics=("opis@fmr0.1",)).consistency[0.1]
    assert str(same).splitlines()[1:] == [
        f"common threshold {same.common_threshold:.4f}; no class gains from its own threshold"
    ]
    steering = evaluate_retrieval(tight, [f"{word}\x1b[2J" for word in WORDS], metrics=("opis@fmr0.1",))
    assert "\x1b" not in str(steering.consistency[0.1])
    alone = evaluate_retrieval(ROWS, [0] * 600, metrics=("opis@fmr0.1",))
    assert (
        str(alone.consistency[0.1])
        == "0 classes at 0 thresholds: OPIS nan, gap nan; 1 class without a pair is left out"
    )
