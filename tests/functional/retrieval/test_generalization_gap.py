"""The gap of two reports and its intervals by hand, and what is said of it."""

import math

import pytest
import torch

from fewshot_callbacks.functional import evaluate_retrieval, generalization_gap, grouped_recall


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
    with pytest.raises(ValueError, match=r"groups of 10 labels .* cannot be compared with groups of 5"):
        generalization_gap(report(60, 1.0), report(60, 1.0, label_groups=5, metrics=("recall@1", "grouped_recall@1")))
