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


def models(noises, items=300, classes=30, dim=12, seed=0):
    """Embeddings of the same items by models of different quality, whose errors have much in common."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(items) % classes
    centres = torch.randn(classes, dim, generator=generator)
    error = torch.randn(items, dim, generator=generator)
    return [centres[labels] + noise * error for noise in noises], labels


class TestReports:
    def test_of_one_and_the_same_differ_in_nothing(self):
        (embeddings,), labels = models([1.0])
        report = evaluate_retrieval(embeddings, labels, label_groups=5, metrics=(*DEFAULT_METRICS, "macro_mAP"))
        for name, difference in compare_reports(report, report).items():
            assert difference.value == 0, name
            assert not difference.is_beyond_chance
            low, high = (
                difference.interval
            )  # equal on these classes, which leaves open by how much they differ on others
            assert math.isnan(low) or (low == pytest.approx(-high) and 0 < high < 0.6)

    def test_compare_each_query_with_itself(self):
        (good, bad), labels = models([1.0, 1.1])
        first, second = (
            evaluate_retrieval(some, labels, label_groups=5, metrics=(*DEFAULT_METRICS, "macro_mAP"))
            for some in (good, bad)
        )
        found = compare_reports(first, second)
        assert set(found) == set(first.metrics())
        for name in ("mAP", "map@r", "recall@1"):
            values = first.per_query[name] - second.per_query[name]
            assert found[name].interval == paired_difference_interval(values, labels)
            assert found[name].value == pytest.approx(float(values.mean()), abs=1e-12)
        paired, alone = found["mAP"].interval.half_width, first.intervals["mAP"].half_width
        assert paired < alone / 2.5  # what is hard for both is no part of it
        assert found["mAP"].is_beyond_chance
        of_classes = torch.stack(
            [(first.per_query["mAP"] - second.per_query["mAP"])[labels == c].mean() for c in range(30)]
        )
        assert found["macro_mAP"].interval == pytest.approx(paired_difference_interval(of_classes), abs=1e-12)
        of_groups = (first.grouped.per_group[1] - second.grouped.per_group[1])[0]
        assert found["grouped_recall@1"].interval == paired_difference_interval(of_groups)
        for name in ("f1", "threshold", "recall@precision0.95"):
            assert math.isnan(found[name].interval.low)
            assert not found[name].is_beyond_chance

    def test_queries_without_a_match_are_left_out_of_both(self):
        (good, bad), labels = models([0.5, 1.5])
        labels[:7] = torch.arange(100, 107)
        first, second = (evaluate_retrieval(some, labels, label_groups=None) for some in (good, bad))
        values = (first.per_query["mAP"] - second.per_query["mAP"])[7:]
        assert bool(first.per_query["mAP"][:7].isnan().all())
        assert compare_reports(first, second)["mAP"].value == pytest.approx(float(values.mean()), abs=1e-12)

    def test_those_of_other_queries_are_refused(self):
        (some, _), labels = models([0.5, 1.5])
        first = evaluate_retrieval(some, labels, label_groups=None)
        for other in (
            evaluate_retrieval(some[:90], labels[:90], label_groups=None),
            evaluate_retrieval(some, labels.flip(0)),
        ):
            with pytest.raises(
                ValueError, match=r"the first evaluation has 300 queries, the second \d+, and their labels"
            ):
                compare_reports(first, other)

    def test_confidence_widens_the_intervals(self):
        reports = [evaluate_retrieval(some, models([1])[1], label_groups=5) for some in models([1.0, 1.1])[0]]
        widths = [compare_reports(*reports, confidence=c)["mAP"].interval.half_width for c in (0.5, 0.95)]
        assert widths[1] / widths[0] > normal_quantile(0.95) / normal_quantile(0.5)
        with pytest.raises(ValueError, match="confidence=2 is not between 0 and 1"):
            compare_reports(*reports, confidence=2)


class TestGroups:
    def test_of_two_sets_are_independent(self):
        (some,), labels = models([2.5])
        (other,), _ = models([3.0], seed=1)
        first, second = (
            grouped_recall(some, labels, label_groups=5, k=(1, 2)),
            grouped_recall(other, labels, label_groups=5),
        )
        found = first.minus(second)
        assert list(found) == [1]
        assert found[1].value == first.at[1] - second.at[1]
        (low, high), (other_low, other_high) = (mean_interval(part.per_group[1][0]) for part in (first, second))
        below = math.hypot(first.at[1] - low, other_high - second.at[1])
        above = math.hypot(high - first.at[1], second.at[1] - other_low)
        assert found[1].interval == pytest.approx((found[1].value - below, found[1].value + above), abs=1e-12)

    def test_of_another_size_or_confidence_are_refused(self):
        (some,), labels = models([2.5])
        five = grouped_recall(some, labels, label_groups=5)
        for other in (
            grouped_recall(some, labels, label_groups=6),
            grouped_recall(some, labels, label_groups=5, confidence=0.9),
        ):
            with pytest.raises(ValueError, match=r"groups of 5 labels at confidence 0.95 cannot be compared with"):
                five.minus(other)


@pytest.mark.parametrize(("ends", "beyond"), [((0.1, 0.2), True), ((-0.2, -0.1), True), ((-0.1, 0.2), False)])
def test_beyond_chance_is_an_interval_without_zero(ends, beyond):
    difference = Difference(0.5, 0.4, Interval(*ends))
    assert difference.is_beyond_chance is beyond
    assert difference.value == pytest.approx(0.1)
    assert not Difference(0.5, 0.4, Interval(math.nan, math.nan)).is_beyond_chance


# ------------------------------------------------------------------------------------- the gap of training and other classes


def embedded(classes, noise, seed=0, per_class=6):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(per_class)
    centres = torch.randn(classes, 16, generator=generator)
    return centres[labels] + noise * torch.randn(len(labels), 16, generator=generator), labels


def report(classes, noise, seed=0, **settings):
    return evaluate_retrieval(
        *embedded(classes, noise, seed),
        **({"metrics": ("mAP", "recall@1", "recall@5", "grouped_recall@1", "grouped_recall@5")} | settings),
    )


def test_differences_and_their_intervals_by_hand():
    training, validation = report(60, 0.7), report(40, 1.4, seed=1)
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
    assert gap.classes == (60, 40)
    assert gap.items_per_class == (6, 6)
    assert gap.is_overfitting
    assert next(iter(gap.metrics())) == "grouped_recall@1"
    assert gap.metrics()["recall@5_low"] == gap.recall[5].interval.low


def test_what_is_said():
    words = generalization_gap(report(60, 0.7), report(40, 1.4, 1)).in_words()
    assert "beyond its 95% interval: overfitting" in words
    assert "among 60 training classes" in words
    assert "easier" in generalization_gap(report(60, 1.4), report(40, 0.7, 1)).in_words()
    assert "within chance (95%)" in generalization_gap(report(60, 1.0), report(60, 1.0, 2)).in_words()


def test_more_validation_classes_alone_make_no_gap():
    gap = generalization_gap(report(100, 1.0), report(800, 1.0, 1))
    assert gap.recall[1].interval.low > 0
    assert not gap.is_overfitting
    assert abs(gap.grouped[1].value) < 0.05


def test_without_groups_there_is_nothing_to_compare():
    with pytest.raises(
        ValueError, match=r"the validation report has no Grouped Recall.*labels need 20.*use a smaller label_groups"
    ):
        generalization_gap(report(60, 1.0), report(15, 1.0))
    with pytest.raises(ValueError, match=r"share no K: Grouped Recall at \[1\] and \[5\]"):
        generalization_gap(
            report(60, 1.0, metrics=("recall@1", "grouped_recall@1")),
            report(60, 1.0, metrics=("recall@5", "grouped_recall@5")),
        )
