"""How many classes show a difference: the formula by leaving classes out one by one, and the power that the number has."""

import dataclasses
import math
from statistics import NormalDist

import pytest
import torch
from scipy.stats import chi2

from fewshot_callbacks import InputError, classes_needed, evaluate_retrieval
from fewshot_callbacks.functional import ClassesNeeded, paired_difference_interval
from tests.messages import refused


def reports(labels, seed=0, metrics=("mAP", "recall@1", "macro_mAP", "pair_f1")):
    """Two models of the same items."""
    generator = torch.Generator().manual_seed(seed)
    items = torch.randn(int(labels.max()) + 1, 12, generator=generator)[labels]
    for noise in (1.0, 1.2):
        rows = items + noise * torch.randn(len(labels), 12, generator=generator)
        yield evaluate_retrieval(rows, labels, metrics=metrics)


def leave_one_out(differences, classes):
    """Variance of the mean of the differences and its degrees of freedom, by leaving out one class at a time."""
    labels = classes.unique().tolist()
    moves = [float(differences.mean() - differences[classes != label].mean()) for label in labels]
    second, fourth = (math.fsum(move**power for move in moves) for power in (2, 4))
    shares = [float((classes == label).double().mean()) for label in labels]
    freedom = min(1 / math.fsum(share**2 for share in shares) - 1, 2 * second**2 / fourth)
    return (len(labels) - 1) / len(labels) * second, max(1.0, freedom), len(labels)


@pytest.mark.parametrize("metric", ["mAP", "recall@1", "macro_mAP"])
@pytest.mark.parametrize("sizes", ["equal", "uneven"])
def test_the_number_is_that_of_the_formula(metric, sizes):
    labels = (
        torch.arange(240) % 40 if sizes == "equal" else torch.arange(40).repeat_interleave(2 + torch.arange(40) % 7)
    )
    first, second = reports(labels)
    needed = classes_needed(first, second, 0.02, metric, power=0.9, confidence=0.99)
    differences, classes = (
        first.per_query[metric.removeprefix("macro_")] - second.per_query[metric.removeprefix("macro_")],
        labels,
    )
    if metric == "macro_mAP":
        differences = torch.stack([differences[labels == label].mean() for label in range(40)])
        classes = torch.arange(40)
    variance, freedom, units = leave_one_out(differences, classes)
    quantiles = NormalDist().inv_cdf(0.995) + NormalDist().inv_cdf(0.9)
    expected = units * variance * (quantiles / 0.02) ** 2
    assert needed == ClassesNeeded(
        metric,
        0.02,
        0.9,
        classes=math.ceil(expected) + 2,
        careful=math.ceil(expected * freedom / chi2.ppf(0.2, freedom)) + 2,
        pilot_classes=40,
    )


def test_test_sets_of_so_many_classes_show_the_difference_in_so_many_cases():
    """Differences of classes are normal around the true difference: a pilot of 2,000 classes knows their spread."""
    generator = torch.Generator().manual_seed(0)
    first, second = reports(torch.arange(4000) % 2000, metrics=("mAP",))
    differences = 0.02 + 0.1 * torch.randn(2000, generator=generator).double()
    values = {"mAP": second.per_query["mAP"] * 0 + 0.5}
    second = dataclasses.replace(second, per_query=values)
    first = dataclasses.replace(first, per_query={"mAP": 0.5 + differences.repeat(2)})
    for power in (0.5, 0.8, 0.95):
        needed = classes_needed(first, second, 0.02, power=power)
        drawn = 0.02 + 0.1 * torch.randn(600, needed.classes, generator=generator).double()
        shown = sum(paired_difference_interval(row).low > 0 for row in drawn)
        # four standard errors of a share of 600
        assert abs(shown / 600 - power) < 4 * math.sqrt(power * (1 - power) / 600)


def test_paths_of_saved_reports_are_taken(tmp_path):
    first, second = reports(torch.arange(120) % 12)
    for name, report in (("a", first), ("b", second)):
        report.save(tmp_path / f"{name}.npz")
    assert classes_needed(tmp_path / "a.npz", tmp_path / "b.npz", 0.01) == classes_needed(first, second, 0.01)


def test_twice_the_difference_needs_a_quarter_and_the_order_of_reports_does_not_matter():
    first, second = reports(torch.arange(240) % 40)
    small, large = (classes_needed(first, second, difference) for difference in (0.01, 0.02))
    assert small.classes - 2 == pytest.approx(4 * (large.classes - 2), abs=4)
    assert small.careful > small.classes
    assert classes_needed(second, first, 0.01) == small


def test_what_cannot_be_estimated_is_refused():
    first, second = reports(torch.arange(120) % 12)
    [other, _] = reports(torch.arange(120) % 10)
    with refused(InputError, "classes_needed", "first report", "120"):
        classes_needed(first, other, 0.01)
    with refused(InputError, "classes_needed", "mAP", "12 classes"):
        classes_needed(first, first, 0.01)
    one, another = reports(torch.zeros(10, dtype=torch.long))
    with refused(InputError, "classes_needed", "mAP", "1 class"):
        classes_needed(one, another, 0.01)
    with refused(InputError, "classes_needed", "pair_f1", "mAP"):
        classes_needed(first, second, 0.01, "pair_f1")
    for difference in (0.0, -0.1, math.nan, math.inf):
        with refused(InputError, "classes_needed", "difference", difference):
            classes_needed(first, second, difference)
    for power in (0.0, 1.0, math.nan):
        with refused(InputError, "classes_needed", "power", power):
            classes_needed(first, second, 0.01, power=power)
