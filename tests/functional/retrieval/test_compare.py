"""Differences of two reports or of two Grouped Recalls, with their intervals; the gap of training and other classes."""

import math

import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.functional import compare_reports, evaluate_retrieval, generalization_gap, grouped_recall
from fewshot_callbacks.functional.statistics import (
    Difference,
    Interval,
    mean_interval,
    normal_quantile,
    paired_difference_interval,
)
from tests.messages import missing_facts, refused

LABELS = torch.arange(300) % 30


def model(noise, seed=0):
    """Embeddings of the same items by a model of this quality; those of one seed have much of their errors in common."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(30, 12, generator=generator)
    return centres[LABELS] + noise * torch.randn(300, 12, generator=generator)


@pytest.fixture(scope="module")
def reports():
    """Of a good model and of one that is a little worse."""
    options = {"label_groups": 5, "metrics": (*DEFAULT_METRICS, "macro_mAP")}
    return [evaluate_retrieval(model(noise), LABELS, **options) for noise in (1.0, 1.1)]


class TestReports:
    def test_of_one_and_the_same_differ_in_nothing(self, reports):
        for name, difference in compare_reports(reports[0], reports[0]).items():
            assert difference.value == 0, name
            assert not difference.is_beyond_chance
            assert math.isnan(difference.interval.low) or difference.interval == (0, 0)
            assert difference.is_equal == ("equal" in str(difference)) != math.isnan(difference.interval.low)
        assert str(compare_reports(reports[0], reports[0])).count("equal") >= 8

    def test_of_nearly_the_same_have_a_narrow_interval_and_are_not_said_to_be_equal(self):
        moved = model(1.0)
        moved[7] = moved[8]
        near, same = (evaluate_retrieval(rows, LABELS, label_groups=None) for rows in (moved, model(1.0)))
        found = compare_reports(near, same)["mAP"]
        assert found.value != 0
        assert not found.is_equal
        assert "equal" not in str(found)
        assert 0 < found.interval.half_width < 0.05

    def test_compare_each_query_with_itself(self, reports):
        first, second = reports
        found = compare_reports(first, second)
        assert set(found) == set(first.metrics())
        for name in ("mAP", "map@r", "recall@1"):
            values = first.per_query[name] - second.per_query[name]
            assert found[name].interval == paired_difference_interval(values, LABELS)
            assert found[name].value == pytest.approx(float(values.mean()), abs=1e-12)
        paired, alone = found["mAP"].interval.half_width, first.intervals["mAP"].half_width
        assert paired < alone / 2.5  # what is hard for both is no part of it
        assert found["mAP"].is_beyond_chance
        differing = first.per_query["mAP"] - second.per_query["mAP"]
        of_classes = torch.stack([differing[c == LABELS].mean() for c in range(30)])
        assert found["macro_mAP"].interval == pytest.approx(paired_difference_interval(of_classes), abs=1e-12)
        of_groups = (first.grouped.per_group[1] - second.grouped.per_group[1])[0]
        assert found["grouped_recall@1"].interval == paired_difference_interval(of_groups)
        of_pairs = [found[name] for name in ("pair_f1", "pair_threshold", "recall@precision0.95")]
        assert all(math.isnan(one.interval.low) and not one.is_beyond_chance for one in of_pairs)

    def test_queries_without_a_match_are_left_out_of_both(self):
        labels = LABELS.clone()
        labels[:7] = torch.arange(100, 107)
        first, second = (evaluate_retrieval(model(noise), labels, metrics="mAP") for noise in (0.5, 1.5))
        values = first.per_query["mAP"] - second.per_query["mAP"]
        assert values.isnan().tolist() == [True] * 7 + [False] * 293
        assert compare_reports(first, second)["mAP"].value == pytest.approx(values.nanmean().item(), abs=1e-12)

    def test_those_of_other_queries_are_refused(self, reports):
        for labels in (LABELS[:90], LABELS.flip(0)):
            other = evaluate_retrieval(model(1.0)[: len(labels)], labels)
            with refused(ValueError, "compare_reports", "300 queries", len(labels), "labels"):
                compare_reports(reports[0], other)

    def test_confidence_widens_the_intervals(self, reports):
        widths = [compare_reports(*reports, confidence=c)["mAP"].interval.half_width for c in (0.5, 0.95)]
        assert widths[1] / widths[0] > normal_quantile(0.95) / normal_quantile(0.5)
        with refused(ValueError, "confidence=2", 0, 1):
            compare_reports(*reports, confidence=2)


def test_groups_of_two_sets_are_independent():
    first = grouped_recall(model(2.5), LABELS, label_groups=5, k=(1, 2))
    second = grouped_recall(model(3.0, seed=1), LABELS, label_groups=5)
    found = first.minus(second)
    assert list(found) == [1]
    assert found[1].value == first.at[1] - second.at[1]
    (low, high), (other_low, other_high) = (mean_interval(part.per_group[1][0]) for part in (first, second))
    below = math.hypot(first.at[1] - low, other_high - second.at[1])
    above = math.hypot(high - first.at[1], second.at[1] - other_low)
    assert found[1].interval == pytest.approx((found[1].value - below, found[1].value + above), abs=1e-12)


def test_beyond_chance_is_an_interval_without_zero():
    intervals = (0.1, 0.2), (-0.2, -0.1), (-0.1, 0.2), (math.nan, math.nan)
    differences = [Difference(0.5, 0.4, Interval(*ends)) for ends in intervals]
    assert [difference.is_beyond_chance for difference in differences] == [True, True, False, False]
    assert differences[0].value == pytest.approx(0.1)


# ------------------------------------------------------------------------------------- the gap of training and other classes


def embedded(classes, noise, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(6)
    centres = torch.randn(classes, 16, generator=generator)
    return centres[labels] + noise * torch.randn(len(labels), 16, generator=generator), labels


def report(*case, metrics=("mAP", "recall@1", "recall@5", "grouped_recall@1", "grouped_recall@5"), **settings):
    return evaluate_retrieval(*embedded(*case), metrics=metrics, **settings)


def test_differences_and_their_intervals_by_hand():
    training, validation = report(60, 0.7), report(40, 1.4, 1)
    gap = generalization_gap(training, validation)
    for k in (1, 5):
        sides = [grouped_recall(*embedded(*case), k=k) for case in ((60, 0.7), (40, 1.4, 1))]
        assert gap.grouped[k].value == pytest.approx(sides[0].at[k] - sides[1].at[k])
        assert gap.grouped[k] == sides[0].minus(sides[1])[k]
        name = f"recall@{k}"
        assert gap.recall[k].value == pytest.approx(training[name] - validation[name])
        of_training, of_validation = (part.intervals[name] for part in (training, validation))
        below = math.hypot(training[name] - of_training.low, of_validation.high - validation[name])
        assert gap.recall[k].interval.low == pytest.approx(gap.recall[k].value - below)
    assert (gap.classes, gap.items_per_class, gap.is_overfitting) == ((60, 40), (6, 6), True)
    assert next(iter(gap.metrics())) == "grouped_recall@1"
    assert gap.metrics()["recall@5_low"] == gap.recall[5].interval.low
    assert not missing_facts(gap.in_words(), ("95%", "overfitting", "60 training classes")), gap.in_words()


def test_classes_that_are_easier_and_chance_are_called_so():
    assert "easier" in generalization_gap(report(60, 1.4), report(40, 0.7, 1)).in_words()
    said = generalization_gap(report(60, 1.0), report(60, 1.0, 2)).in_words()
    assert not missing_facts(said, ("not significant", "95%")), said


def test_without_groups_or_a_common_k_there_is_nothing_to_compare():
    with refused(ValueError, "validation", "Grouped Recall", 20, 15, "label_groups='auto'") as caught:
        generalization_gap(report(60, 1.0), report(15, 1.0))
    assert "notes" not in str(caught.value)
    with refused(ValueError, "validation", "label_groups=9 labels", 18, 15, "label_groups <= 7") as caught:
        generalization_gap(report(60, 1.0), report(15, 1.0, label_groups=9))
    assert missing_facts(str(caught.value), ("'auto'", "notes")) == ["'auto'", "notes"]
    one, five = (report(60, 1.0, metrics=(f"recall@{k}", f"grouped_recall@{k}")) for k in (1, 5))
    with refused(ValueError, "Grouped Recall", "[1]", "[5]", "metrics=('grouped_recall@1', 'recall@1')"):
        generalization_gap(one, five)
