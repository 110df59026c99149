"""The number of classes decides on Grouped Recall, in silence; what was set is used, or refused."""

import pytest
import torch

from fewshot_callbacks import RetrievalEvaluation, RetrievalMonitor, evaluate_retrieval, generalization_gap
from fewshot_callbacks.functional import DEFAULT_METRICS, grouped_recall
from tests.messages import missing_facts, refused, warned


def items(classes, generator_seed=0):
    """Embeddings of six items of each class, and their labels."""
    labels = torch.arange(classes).repeat(6)
    return torch.randn(len(labels), 8, generator=torch.Generator().manual_seed(generator_seed)), labels


@pytest.mark.parametrize("classes", [20, 21, 45])
def test_enough_classes_are_searched_ten_at_a_time(classes):
    report, ten = evaluate_retrieval(*items(classes)), evaluate_retrieval(*items(classes), label_groups=10)
    assert report == evaluate_retrieval(*items(classes), label_groups="auto") == ten
    assert report["grouped_recall@1"] == grouped_recall(*items(classes), label_groups=10).at[1]
    assert (report.grouped.group_size, report.to_dict()["grouped"]["group_size"]) == (10, 10)
    [line] = [line for line in str(report).splitlines() if line.startswith("grouped_recall@1")]
    facts = (f"{classes // 10} groups", "10 classes")
    assert not missing_facts(line, facts), line
    assert not missing_facts(report.meaning("grouped_recall@1"), facts), report.meaning("grouped_recall@1")


@pytest.mark.parametrize("classes", [2, 3, 19])
@pytest.mark.parametrize("metrics", [DEFAULT_METRICS, (*DEFAULT_METRICS, "eer")])
def test_fewer_classes_have_no_grouped_recall_and_no_note(classes, metrics):
    report = evaluate_retrieval(*items(classes), metrics=metrics)
    assert (report.grouped, report.notes) == (None, ())
    assert report.values == evaluate_retrieval(*items(classes), metrics=metrics, label_groups=None).values
    with refused(LookupError, "'grouped_recall@1'", "10 labels", 20, classes):
        report["grouped_recall@1"]


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"label_groups": 10}, "label_groups=10"),
        ({"metrics": ("mAP", "grouped_recall@1")}, "label_groups='auto'"),
        ({"metrics": "grouped_recall@1_miss"}, "label_groups='auto'"),
        ({"metrics": (*DEFAULT_METRICS, "grouped_recall@5")}, "label_groups='auto'"),
    ],
)
def test_whoever_asks_for_it_is_told_why_it_is_missing(settings, groups):
    [note] = evaluate_retrieval(*items(19), **settings).notes
    assert not missing_facts(note, ("Grouped Recall", groups, 20, 19, "label_groups <= 9")), note


@pytest.mark.parametrize("groups", [5, [[0, 1, 2], [3, 4, 5]]])
def test_groups_without_a_metric_of_groups_are_refused(groups):
    settings = {"label_groups": groups, "metrics": ("mAP", "recall@1")}
    for call, sets in ((evaluate_retrieval, items(30)), (RetrievalMonitor, ()), (RetrievalEvaluation, ())):
        with refused(ValueError, call.__name__, "label_groups", "Grouped Recall", "metrics", "'grouped_recall@1'"):
            call(*sets, **settings)
    for unset in ("auto", None):
        assert evaluate_retrieval(*items(30), **settings | {"label_groups": unset}).grouped is None


def test_no_groups_and_no_other_metric_leave_nothing_to_compute():
    for call, sets in ((evaluate_retrieval, items(30)), (RetrievalMonitor, ()), (RetrievalEvaluation, ())):
        with refused(ValueError, call.__name__, "label_groups=None", "Grouped Recall", "metrics", "'mAP'"):
            call(*sets, label_groups=None, metrics="grouped_recall@1")


def test_ranks_lie_below_the_number_of_classes_that_are_searched():
    assert evaluate_retrieval(*items(30), metrics="grouped_recall@9")["grouped_recall@9"] > 0
    with refused(ValueError, "ranks", "(10,)", "label_groups=10", "'auto'"):
        evaluate_retrieval(*items(30), metrics="grouped_recall@10")


def test_the_function_has_groups_of_ten_by_default():
    assert grouped_recall(*items(30)) == grouped_recall(*items(30), label_groups=10)
    with warned(UserWarning, "1 group", "10 labels", "interval"):
        assert grouped_recall(*items(12)).groups == 1


def test_a_gap_says_how_many_classes_are_missing():
    reports = evaluate_retrieval(*items(30)), evaluate_retrieval(*items(15))
    with refused(ValueError, "validation", "Grouped Recall", "label_groups='auto'", "10 labels", 20, 15):
        generalization_gap(*reports)


def test_the_metric_class_is_silent_as_well():
    metric = RetrievalEvaluation()
    metric.update(*items(6))
    assert "grouped_recall@1" not in metric.compute()
    assert metric.report.notes == ()
