"""A report fails a requirement if its value, or the value of any slice, does not meet it."""

import itertools
import math

import pytest
import torch

from fewshot_callbacks import InputError, compare_reports, compare_slices, evaluate_retrieval, failed_requirements
from tests.messages import refused

LABELS = torch.arange(240) % 40
CAMERAS = ["roof", "door", "yard"] * 80
METRICS = ("mAP", "recall@1", "pair_f1", "recall@precision0.25")


def report_of(noise, slices=None):
    generator = torch.Generator().manual_seed(0)
    points = torch.eye(40)[LABELS] + noise * torch.randn(240, 40, generator=generator)
    return evaluate_retrieval(points, LABELS, slices=slices, metrics=METRICS)


GOOD, BAD = report_of(0.3, {"camera": CAMERAS}), report_of(0.35)
SLICES = GOOD.of_slices("camera", "recall@1")
GAINS = compare_slices(GOOD, BAD, "camera", "mAP")
GAIN = compare_reports(GOOD, BAD)["mAP"]
# What a requirement names -> its numbers: one, or one of each slice.
VALUES = {
    "mAP": [GOOD.mAP],
    "pair_f1": [GOOD["pair_f1"]],
    "recall@precision0.25": [GOOD["recall@precision0.25"]],
    "recall@1.low": [GOOD.intervals["recall@1"].low],
    "recall@1.high": [GOOD.intervals["recall@1"].high],
    "worst(camera) recall@1": [found.value for found in SLICES.values()],
    "worst(camera) recall@1.high": [found.interval.high for found in SLICES.values()],
    "gain(mAP)": [GAIN.value],
    "gain(mAP).low": [GAIN.interval.low],
    "worst(camera) gain(mAP)": [gain.difference.value for gain in GAINS.values()],
    "worst(camera) gain(mAP).low": [gain.difference.interval.low for gain in GAINS.values()],
}
IS_MET = {
    ">=": lambda value, limit: value >= limit,
    "<=": lambda value, limit: value <= limit,
    ">": lambda value, limit: value > limit,
    "<": lambda value, limit: value < limit,
}


@pytest.mark.parametrize(("name", "sign"), itertools.product(VALUES, IS_MET))
def test_every_number_must_be_as_required(name, sign):
    values = VALUES[name]
    for limit in (-1.0, 2.0, *values, *(value + 1e-9 for value in values)):
        expected = all(IS_MET[sign](value, limit) for value in values)
        failures = failed_requirements([f"{name} {sign} {limit!r}"], GOOD, BAD)
        assert (not failures) == expected, (name, sign, limit)


def test_a_sentence_names_the_requirement_the_value_and_the_slice():
    worst = min(SLICES, key=lambda name: SLICES[name].value)
    texts = ["mAP>=0.99", "mAP > 0", "worst(camera) recall@1 >= 0.999"]
    assert failed_requirements(texts, GOOD) == [
        f"mAP>=0.99 is required, but it is {GOOD.mAP:.4f}.",
        f"worst(camera) recall@1 >= 0.999 is required, but it is {SLICES[worst].value:.4f} (camera {worst}).",
    ]


def test_an_unknown_value_fails():
    labels = torch.where(torch.arange(240) % 3 == 2, torch.arange(240) + 1000, LABELS)  # no match in the yard
    points = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
    report = evaluate_retrieval(points, labels, slices={"camera": CAMERAS}, metrics="mAP")
    assert math.isnan(report.of_slices("camera")["yard"].value)
    for requirement in ("worst(camera) mAP >= 0", "worst(camera) mAP.high <= 1"):
        assert failed_requirements([requirement], report) == [
            f"{requirement} is required, but it is unknown (camera yard)."
        ]


def test_saved_reports_are_read(tmp_path):
    GOOD.save(tmp_path / "good.npz")
    BAD.save(tmp_path / "bad.npz")
    texts = ["worst(camera) gain(mAP).low >= 0.99", "mAP >= 0"]
    assert failed_requirements(texts, tmp_path / "good.npz", tmp_path / "bad.npz") == failed_requirements(
        texts, GOOD, BAD
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "mAP",
        "mAP >=",
        "mAP => 0.7",
        "mAP = 0.7",
        "0.7 <= mAP",
        "worst() mAP > 1",
        "mAP >= 0.7, mrr >= 1",
        "mAP.mid >= a",
    ],
)
def test_what_cannot_be_read_is_refused(text):
    with refused(InputError, "failed_requirements", repr(text), "cannot be read", "'mAP >= 0.70'"):
        failed_requirements([text], GOOD)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("mrr >= 0", ("'mrr'", "mAP, recall@1", "metrics=")),
        ("worst(age) mAP >= 0", ("'age'", "'camera'", "slices=")),
        ("gain(mAP) >= 0", ("no other evaluation", "against=")),
        ("worst(camera) pair_f1 >= 0", ("'pair_f1'", "each query")),
        ("pair_f1.low >= 0", ("'pair_f1'", "no interval", ".low")),
    ],
)
def test_what_the_report_does_not_have_is_refused(text, facts):
    with refused(InputError, "failed_requirements", text, *facts):
        failed_requirements([text], GOOD)
