"""Slices have the means and intervals of only their queries; their gains have Holm's p-values."""

import math

import numpy as np
import pytest
import torch

from fewshot_callbacks import InputError, Metric, Share, compare_slices, evaluate_retrieval, relevant_ranks
from fewshot_callbacks.functional import (
    Labels,
    Relevance,
    RetrievalReport,
    clustered_mean_interval,
    paired_difference_interval,
    paired_difference_p_value,
)
from tests.messages import refused
from tests.thread_processes import in_threads

LABELS = torch.arange(240) % 40
CAMERAS = [("roof", "door", "roof", "yard")[index % 4] for index in range(240)]
AGES = torch.arange(240) // 100 - 1
METRICS = ("pair_f1", "recall@1", "mAP", "macro_mAP")


def points(noise=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.eye(40)[LABELS] + noise * torch.randn(240, 40, generator=generator)


def report_of(noise=0.5, **arguments):
    arguments = {"slices": {"camera": CAMERAS, "age": AGES}, "metrics": METRICS} | arguments
    return evaluate_retrieval(points(noise), LABELS, **arguments)


def of_value(report, attribute, value):
    """Which queries of a report have a value, given the attribute of all rows."""
    rows = torch.arange(240)
    for index in (report.counted, report.drawn):
        rows = rows if index is None else rows[index]
    return torch.tensor([list(attribute)[row] == value for row in rows.tolist()])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"query_ids": [*range(120), *range(60), *range(180, 240)]},
        {"max_queries": 100},
        {"confidence": 0.8},
        {"query_groups": torch.arange(240) % 3},
        {"gallery": points(seed=1), "gallery_labels": LABELS, "max_queries": 100},
    ],
)
def test_a_slice_has_the_mean_and_the_interval_of_its_queries(arguments):
    report = report_of(**arguments)
    for name, attribute, values in (("camera", CAMERAS, {"roof", "door", "yard"}), ("age", AGES.tolist(), {-1, 0, 1})):
        slices = report.of_slices(name, "recall@1")
        assert set(slices) == values
        for value, found in slices.items():
            inside = of_value(report, attribute, value)
            recall, labels = report.per_query["recall@1"][inside], report.query_labels[inside]
            assert found.value == pytest.approx(float(recall.mean()), abs=1e-15)
            assert found.interval == clustered_mean_interval(recall, labels, 1 - (1 - report.confidence) / 3)
            assert (found.queries, found.classes) == (int(inside.sum()), len(set(labels.tolist())))
            assert found.share == int(inside.sum()) / report.queries
        assert slices[slices.worst].value == min(found.value for found in slices.values())


def test_the_mean_over_classes_of_a_slice():
    report = report_of()
    inside = of_value(report, CAMERAS, "roof")
    precision, labels = report.per_query["mAP"][inside], report.query_labels[inside]
    means = [float(precision[labels == label].mean()) for label in labels.unique()]
    assert report.of_slices("camera", "macro_mAP")["roof"].value == pytest.approx(np.mean(means), abs=1e-15)


def test_the_first_metric_of_queries_is_taken():
    assert report_of().of_slices("camera").metric == "recall@1"


def test_queries_without_a_match_count_in_no_slice():
    labels = torch.where(torch.arange(240) % 4 == 3, torch.arange(240) + 1000, LABELS)  # all queries of the yard
    slices = evaluate_retrieval(points(), labels, slices={"camera": CAMERAS}).of_slices("camera")
    assert (slices["yard"].queries, slices["yard"].share) == (0, 0.0)
    assert math.isnan(slices["yard"].value)
    assert slices.worst in ("roof", "door")
    assert str(slices).splitlines()[3].split() == ["yard", "0", "0", "0.0", "%"]
    inside = torch.tensor([camera == "door" for camera in CAMERAS])
    report = evaluate_retrieval(points(), labels)
    precision = report.per_query["mAP"][inside]
    present = ~precision.isnan()
    expected = clustered_mean_interval(precision[present], labels[inside][present], 1 - 0.05 / 2)
    assert slices["door"].interval == expected


def test_the_worst_of_a_metric_that_is_better_low_is_the_largest():
    first = Metric(
        "first",
        "ranks",
        lambda ranks, ties: relevant_ranks(ranks, ties).nan_to_num(1e9).amin(1),
        "",
        range=None,
        better="lower",
    )
    slices = report_of(metrics=(first,)).of_slices("camera")
    assert slices[slices.worst].value == max(found.value for found in slices.values())
    assert str(slices).splitlines()[1].split()[0] == slices.worst


@pytest.mark.parametrize("form", [list, np.array, lambda words: Labels(np.array(words, object)), np.asarray])
def test_values_come_in_the_forms_of_labels(form):
    assert report_of(slices={"camera": form(CAMERAS)}).of_slices("camera") == report_of().of_slices("camera")
    assert report_of(slices={"age": form(AGES.tolist())}).slices["age"].values() == AGES.tolist()


def test_relevance_in_place_of_labels():
    relevance = Relevance.from_lists(
        [[item for item in range(240) if item % 40 == row % 40 and item != row] for row in range(240)]
    )
    of_relevance = evaluate_retrieval(points(), relevance=relevance, slices={"camera": CAMERAS}, metrics="mAP")
    assert of_relevance.of_slices("camera")["roof"].value == report_of().of_slices("camera", "mAP")["roof"].value
    assert of_relevance.of_slices("camera")["roof"].classes == 120


def test_the_table_has_the_worst_first():
    lines = str(report_of().of_slices("camera", "recall@1")).splitlines()
    assert lines[0].split() == ["camera", "recall@1", "interval", "queries", "classes", "share"]
    assert [float(line.split()[1]) for line in lines[1:4]] == sorted(float(line.split()[1]) for line in lines[1:4])
    assert "95 %" in lines[4]
    assert "looks worse than it is" in lines[4]


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_agree_with_one(processes):
    order = torch.randperm(240, generator=torch.Generator().manual_seed(1))
    ids = [f"{row % 200}" for row in range(240)]

    def work(process):
        # The last process has no queries.
        own = order[process.rank :: processes - 1] if process.rank < processes - 1 else order[:0]
        return evaluate_retrieval(
            points()[own],
            LABELS[own],
            query_ids=[ids[row] for row in own.tolist()],
            slices={"age": AGES[own], "camera": [CAMERAS[row] for row in own.tolist()]},
            max_queries=90,
            share=Share(process, own),
        )

    alone = report_of(query_ids=ids, max_queries=90, metrics=("mAP",))
    for report in in_threads(processes, work):
        for attribute in ("camera", "age"):
            assert report.of_slices(attribute) == alone.of_slices(attribute)


def test_processes_with_other_attributes_are_refused():
    def work(process):
        slices = {"camera": CAMERAS[:120]} if process.rank else {"age": AGES[:120]}
        return evaluate_retrieval(points()[:120], LABELS[:120], slices=slices, share=Share(process))

    for error in in_threads(2, work):
        assert isinstance(error, InputError)
        assert "slices" in str(error)


def test_other_slices_are_refused():
    with refused(InputError, "evaluate_retrieval", "slices is a list", "Pass slices="):
        report_of(slices=[CAMERAS])
    with refused(InputError, "evaluate_retrieval", "240 queries", "239 slices['camera']"):
        report_of(slices={"camera": CAMERAS[1:]})
    with refused(InputError, "evaluate_retrieval", "slices['age']", "31 values", "40 classes", "at most 30", "bins"):
        report_of(slices={"age": torch.arange(240) % 31})
    assert len(report_of(slices={"age": torch.arange(240) % 30}).of_slices("age")) == 30
    with refused(InputError, "RetrievalReport.of_slices", "'light'", "'age', 'camera'", "slices={'light': values}"):
        report_of().of_slices("light")
    with refused(InputError, "RetrievalReport.of_slices", "recall@1, mAP, macro_mAP", "not 'pair_f1'"):
        report_of().of_slices("camera", "pair_f1")
    with refused(InputError, "RetrievalReport.of_slices", "has none"):
        report_of(metrics="pair_f1").of_slices("camera")


@pytest.mark.parametrize("attribute", ["camera", "age"])
@pytest.mark.parametrize("arguments", [{}, {"max_queries": 100}, {"query_ids": [*range(120), *range(120)]}])
def test_gains_are_paired_and_p_values_are_holms(attribute, arguments):
    first, second = report_of(0.4, **arguments), report_of(0.5, **arguments)
    gains = compare_slices(first, second, attribute, "mAP")
    values = CAMERAS if attribute == "camera" else AGES.tolist()
    p_values = {}
    for value, gain in gains.items():
        inside = of_value(first, values, value)
        differences = (first.per_query["mAP"] - second.per_query["mAP"])[inside]
        labels = first.query_labels[inside]
        assert gain.difference.value == pytest.approx(float(differences.mean()), abs=1e-14)
        assert gain.difference.interval == paired_difference_interval(differences, labels, 1 - 0.05 / len(gains))
        assert gain.queries == int(inside.sum())
        p_values[value] = paired_difference_p_value(differences, labels)
    ordered = sorted(p_values, key=p_values.get)
    for position, value in enumerate(ordered):
        corrected = max((len(gains) - before) * p_values[ordered[before]] for before in range(position + 1))
        assert gains[value].p_value == pytest.approx(min(1.0, corrected), rel=1e-12)


def test_saved_reports_are_compared(tmp_path):
    first, second = report_of(0.4), report_of(0.5, slices=None)
    first.save(tmp_path / "a.npz")
    second.save(tmp_path / "b.npz")
    assert compare_slices(tmp_path / "a.npz", tmp_path / "b.npz", "camera") == compare_slices(first, second, "camera")
    assert RetrievalReport.load(tmp_path / "a.npz").of_slices("age") == first.of_slices("age")


def test_a_model_against_itself_has_no_gain():
    gains = compare_slices(report_of(), report_of(), "camera")
    assert {gain.difference.is_equal for gain in gains.values()} == {True}
    assert {gain.p_value for gain in gains.values()} == {1.0}
    assert "all values are equal" in str(gains)
    assert gains.to_dict()["roof"]["value"] == 0.0


def test_other_comparisons_are_refused():
    with refused(InputError, "compare_slices", "'light'", "'age', 'camera'"):
        compare_slices(report_of(), report_of(), "light")
    with refused(InputError, "compare_slices", "no attribute 'camera'", "it has none"):
        compare_slices(report_of(slices=None), report_of(), "camera")
    with refused(InputError, "compare_slices", "not 'mrr'"):
        compare_slices(report_of(), report_of(), "camera", "mrr")
    with refused(InputError, "compare_slices", "'camera' of a query is not the same"):
        compare_slices(report_of(), report_of(slices={"camera": CAMERAS[::-1]}), "camera")
    with refused(InputError, "compare_slices", "their ids"):
        compare_slices(report_of(query_ids=range(240)), report_of(query_ids=range(1, 241)), "camera")
    with refused(InputError, "confidence"):
        compare_slices(report_of(), report_of(), "camera", confidence=1.5)
