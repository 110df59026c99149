"""A metric that a user brings stands wherever a key does, and is refused with the fix where it cannot."""

import copy
import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import torch

from fewshot_callbacks import (
    Metric,
    Relevance,
    RetrievalEvaluation,
    RetrievalMonitor,
    compare_reports,
    evaluate_retrieval,
    evaluate_trials,
)
from fewshot_callbacks.functional import METRICS, Share
from fewshot_callbacks.functional.retrieval import requested_metric
from fewshot_callbacks.functional.retrieval.settings import RetrievalSettings
from tests.functional import brute_force
from tests.functional.brute_force import BruteForce
from tests.functional.retrieval import users_metrics
from tests.functional.retrieval.users_metrics import F1, F1_AT_2, LIFT, MARGIN, MEAN_RANK, RBP, f1_at_k
from tests.messages import missing_facts, refused, warned
from tests.thread_processes import in_threads

pytestmark = pytest.mark.usefixtures("as_users_run_it")

PATH = users_metrics.__name__
ITEMS = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(60) % 20
TIED = torch.randint(0, 2, (24, 3), generator=torch.Generator().manual_seed(1)).float()
TIED_LABELS = torch.arange(24) % 6

# The same metrics by their definitions, for one order of the candidates.
BY_DEFINITION = {
    "f1@2": lambda order: 2 * len(brute_force.hits(order[:2])) / (2 + len(brute_force.hits(order))),
    "mean_rank": lambda order: float(np.mean(brute_force.hits(order))),
}


@pytest.mark.parametrize("ties", ["expected", "optimistic", "pessimistic"])
def test_values_are_those_of_the_definition(ties):
    report = evaluate_retrieval(
        TIED, TIED_LABELS, similarity="dot", metrics=("mAP", F1.at(k=2), MEAN_RANK), ties=ties, label_groups=None
    )
    slow = BruteForce(TIED.numpy(), TIED_LABELS.numpy(), similarity="dot", ties=ties)
    try:
        expected = slow.values(BY_DEFINITION)
    except brute_force.TooManyOrdersError:
        pytest.fail("fewer items are needed")
    for key, values in expected.items():
        assert report.per_query[key].tolist() == pytest.approx(values, abs=1e-12)
    assert list(report.metrics()) == ["mAP", "f1@2", "mean_rank"]
    assert report.queries_with_ties > 5


def test_it_is_evaluated_as_those_of_the_package():
    metrics = ("mAP", F1_AT_2, "precision@2", "ir_recall@2", "macro_f1@2", "f1@3", LIFT, "pair_precision")
    report = evaluate_retrieval(ITEMS, LABELS, metrics=metrics)
    precision, recall, f1 = (report.per_query[key] for key in ("precision@2", "ir_recall@2", "f1@2"))
    assert torch.allclose(f1, (2 * precision * recall / (precision + recall)).nan_to_num(0.0))
    assert list(report.metrics()) == [
        *("mAP", "f1@2", "precision@2", "ir_recall@2", "macro_f1@2", "f1@3", "lift", "pair_precision")
    ]
    assert report["lift"] == pytest.approx(report["pair_precision"] / (2 / 59))
    assert report.at("f1@{k}") == {2: report["f1@2"], 3: report["f1@3"]}
    assert report.at("macro_f1@{k}") == {2: report["macro_f1@2"]}
    assert report.intervals["f1@2"].low < report["f1@2"] < report.intervals["f1@2"].high
    assert report.meaning("f1@2") == "Harmonic mean of precision@2 and ir_recall@2."
    assert not missing_facts(report.meaning("macro_f1@2"), ("Mean", "classes", "f1@2"))
    assert list(report.per_class()["f1@2"]) == list(range(20))
    assert "f1@2 " in str(report)
    assert report.to_dict()["metrics"]["lift"] == report["lift"]
    difference = compare_reports(report, report)
    assert difference["f1@2"].interval.low <= 0
    assert difference["macro_f1@2"].value == difference["lift"].value == 0.0
    with refused(LookupError, "'f1@4'", "f1@2", "metrics=('f1@4', ...)"):
        report["f1@4"]
    with refused(ValueError, "'f2@{k}'", "f1@{k}"):
        report.at("f2@{k}")


def test_intervals_follow_the_range():
    """A metric that is stretched has stretched intervals; without a range they are t intervals of the means of classes."""

    def stretched(ranks, ties):
        return 3 + 4 * f1_at_k(ranks, 2, ties)

    bounded = Metric("bounded", "ranks", stretched, "3 and four times the F1.", range=(3.0, 7.0))
    unbounded = Metric("unbounded", "ranks", stretched, "3 and four times the F1.", range=None)
    keys = (F1_AT_2, bounded, unbounded, "macro_f1@2", "macro_bounded", "macro_unbounded")
    first, second = (evaluate_retrieval(rows, LABELS, metrics=keys) for rows in (ITEMS, ITEMS.roll(1, 1).abs()))
    differences = compare_reports(first, second)
    for macro in ("", "macro_"):
        expected = 3 + 4 * np.array(first.intervals[f"{macro}f1@2"])
        assert np.array(first.intervals[f"{macro}bounded"]) == pytest.approx(expected, abs=1e-12)
        expected = 4 * np.array(differences[f"{macro}f1@2"].interval)
        assert np.array(differences[f"{macro}bounded"].interval) == pytest.approx(expected, abs=1e-12)
        # All classes have three queries, so that both means weigh them alike.
        means = torch.tensor(list(first.per_class()["unbounded"].values()))
        reach = scipy.stats.t.ppf(0.975, 19) * means.std().item() / math.sqrt(20)
        assert first.intervals[f"{macro}unbounded"].half_width == pytest.approx(reach, rel=0.2)
        assert first.intervals[f"{macro}unbounded"].low < first["unbounded"]
        assert differences[f"{macro}unbounded"].interval.half_width > 0
    assert compare_reports(first, first)["unbounded"].interval == (0, 0)


@dataclass
class Scaled:
    """An object that can be called, and has no hash."""

    factor: float

    def __call__(self, ranks, ties):
        return self.factor * f1_at_k(ranks, 2, ties)


def test_an_object_that_can_be_called_is_a_function():
    metric = Metric("half", "ranks", Scaled(0.5), "Half of the F1.")
    report = evaluate_retrieval(ITEMS, LABELS, metrics=(metric, F1_AT_2, metric))
    assert report["half"] == pytest.approx(report["f1@2"] / 2)


def test_two_metrics_of_one_key_are_not_compared():
    other = Metric("f1@{k}", "ranks", f1_at_k, "Another one.")
    first, second = (evaluate_retrieval(ITEMS, LABELS, metrics=metric.at(k=2)) for metric in (F1, other))
    with refused(ValueError, "compare_reports", "'f1@2'", "user", "pattern"):
        compare_reports(first, second)


def test_nothing_is_registered():
    before = METRICS
    evaluate_retrieval(ITEMS, LABELS, metrics=("mAP", F1_AT_2))
    assert METRICS is before
    with refused(ValueError, "'f1@2'", "mAP"):
        evaluate_retrieval(ITEMS, LABELS, metrics=("mAP", "f1@2"))


@pytest.mark.parametrize("word", [f"{PATH}.F1_AT_2", f"{PATH}.F1@k=2"])
def test_an_import_path_is_the_metric_that_it_names(word):
    settings = RetrievalSettings(metrics=["mAP", word, "macro_f1@2"])
    assert settings == RetrievalSettings(metrics=("mAP", F1_AT_2, "macro_f1@2"))
    assert hash(settings) == hash(RetrievalSettings(metrics=("mAP", F1_AT_2, "macro_f1@2")))


def test_one_metric_alone_and_the_same_one_twice():
    assert RetrievalSettings(metrics=LIFT).metrics == (LIFT.at(),)
    assert RetrievalSettings(metrics=(F1_AT_2, F1.at(k=2), "f1@2")).metrics == (F1_AT_2, "f1@2")
    assert list(evaluate_retrieval(ITEMS, LABELS, metrics=(F1_AT_2, F1.at(k=2), "f1@2")).metrics()) == ["f1@2"]


def test_a_metric_of_the_package_is_an_object_too():
    recall = next(metric for metric in METRICS if metric.pattern == "recall@{k}")
    assert RetrievalSettings(metrics=(recall.at(k=5), requested_metric("macro_mAP"))).metrics == (
        "recall@5",
        "macro_mAP",
    )


def test_settings_are_text_without_an_address():
    """Processes that evaluate together compare their settings as text."""
    text = str(RetrievalSettings(metrics=(F1_AT_2, LIFT, RBP.at(p=0.5))))
    assert "f1@{k}" in text
    assert "f1_at_k" in text
    assert "0x" not in text
    other = Metric("f1@{k}", "ranks", lambda ranks, k, ties: 2 * f1_at_k(ranks, k, ties), F1.meaning)
    assert str(other) != str(F1)
    assert "0x" not in str(other)


def test_results_and_metrics_are_pickled_and_copied():
    local = Metric("twice", "ranks", lambda ranks, ties: 2 * f1_at_k(ranks, 2, ties), "Twice the F1.", range=(0, 2))
    report = evaluate_retrieval(ITEMS, LABELS, metrics=(F1_AT_2, local))
    again = pickle.loads(pickle.dumps(report))
    assert again == report
    assert again.meaning("twice") == "Twice the F1."
    assert again.at("f1@{k}") == report.at("f1@{k}")
    assert pickle.loads(pickle.dumps(F1_AT_2)) == F1_AT_2 == copy.deepcopy(F1_AT_2)
    assert copy.deepcopy(report).requested("f1@2").metric.better == "higher"


def test_a_pooled_metric_sees_the_points_of_the_other_keys():
    report = evaluate_retrieval(ITEMS, LABELS, metrics=(MARGIN, "recall@precision0.05"))
    assert report["margin"] == report.at_precision[0.05].threshold - report.decision.threshold
    facts = ("evaluate_retrieval", "'margin'", "LookupError", 0.05, "metrics=('recall@precision0.05', ...)")
    with refused(ValueError, *facts):
        evaluate_retrieval(ITEMS, LABELS, metrics=MARGIN)


def test_queries_without_a_match_are_left_out_whatever_the_function_returns():
    ones = Metric("ones", "ranks", lambda ranks, ties: torch.ones(len(ranks.relevant)), "One.")
    labels = LABELS.clone()
    labels[:3] = torch.tensor([100, 101, 102])
    report = evaluate_retrieval(ITEMS, labels, metrics=ones)
    assert report.per_query["ones"].isnan().tolist() == [True] * 3 + [False] * 57


def test_relevant_items_that_are_not_in_the_gallery_count_in_relevant_alone():
    gallery = torch.eye(3)
    relevance = Relevance.from_judgements(
        {"q": {"a": 1, "missing": 1}, "r": {"missing": 1}}, ["q", "r"], ["a", "b", "c"], unknown="ignore"
    )
    report = evaluate_retrieval(gallery[:2], gallery=gallery, relevance=relevance, metrics=(F1.at(k=1), MEAN_RANK))
    assert report.per_query["f1@1"].tolist() == [2 * 1 / (1 + 2), 0.0]
    assert report.per_query["mean_rank"].tolist()[0] == 1.0
    assert math.isnan(report.per_query["mean_rank"][1])


# ------------------------------------------------------------------------------------------------------------ bad input


def constant(value):
    return Metric("mine", "ranks", lambda ranks, ties: value, "A constant.")


@pytest.mark.parametrize(
    ("metric", "facts"),
    [
        (F1, ("'f1@{k}'", "k", ".at(k=5)")),
        (RBP, ("'rbp@{p}'", "p", ".at(p=0.95)")),
        (Metric("mAP", "ranks", f1_at_k, "Another."), ("'mAP'", "key", "package", "pattern")),
        (Metric("recall@7", "ranks", f1_at_k, "Another."), ("'recall@7'", "key", "package", "pattern")),
        (Metric("mine", "groups", f1_at_k, "Another."), ("'mine'", "input='groups'", "input='ranks'", "input='pairs'")),
        (Metric("mine", "ranks", None, "Another."), ("'mine'", "function", "value=")),
        (
            Metric("mine@{k}", "ranks", lambda ranks, k: ranks, "Another.").at(k=2),
            ("'mine@2'", "value(ranks, k=2, ties='expected')", "'ties'"),
        ),
        (Metric("mine", "pairs", lambda pooled, ties: 1.0, "Another."), ("'mine'", "value(pooled)", "'ties'")),
        (f"{PATH}.F2@k=2", ("metrics", f"'{PATH}.F2@k=2'", PATH, "F2", "F1", "F1_AT_2")),
        (f"{PATH}.NO_METRIC", (f"'{PATH}.NO_METRIC'", "int", "Metric")),
        (f"{PATH}.F1", ("'f1@{k}'", "k", ".at(k=5)")),
        (f"{PATH}.F1@k=2@k=3", (f"'{PATH}.F1@k=2@k=3'", "twice", "my_metrics.F1@k=2")),
        (f"{PATH}.F1@k=2@k=2", (f"'{PATH}.F1@k=2@k=2'", "twice", "my_metrics.F1@k=2")),
        (f"{PATH}.F1@k=x", ("'f1@{k}'", "'f1@x'", "rank", ".at(k=5)")),
        ("no_such_module.F1", ("'no_such_module.F1'", "module", "'no_such_module'")),
        ((F1_AT_2, Metric("f1@2", "ranks", lambda ranks, ties: 0, "Another.")), ("metrics", "two", "'f1@2'", "pattern")),
        ((F1_AT_2, "macro_lift"), ("'macro_lift'", "mAP")),
        ((LIFT, "macro_lift"), ("'macro_lift'", "lift", "query", "'lift'")),
        ((F1_AT_2, "f1@0"), ("'f1@0'", "'f1@1'")),
    ],
)  # fmt: skip
def test_what_is_no_metric_is_refused_before_the_work(metric, facts):
    def monitor():
        RetrievalMonitor(metrics=metric)

    def evaluation():
        evaluate_retrieval(ITEMS, LABELS, metrics=metric)

    for call, name in ((evaluation, "evaluate_retrieval"), (monitor, "RetrievalMonitor")):
        with refused(ValueError, name, *facts):
            call()


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("f1@{rank}", "ranks", f1_at_k, "F1."), ("{rank}", "{k}", "{p}", "'f1@{k}'")),
        (("f1@{k", "ranks", f1_at_k, "F1."), ("braces", "'f1@{k}'")),
        (("macro_f1", "ranks", f1_at_k, "F1."), ("macro_", "classes", "pattern")),
        (("my f1", "ranks", f1_at_k, "F1."), ("key", "letters", "digits", "'f1@{k}'")),
        (("", "ranks", f1_at_k, "F1."), ("key", "letters", "digits", "'f1@{k}'")),
        (("f1", "ranks", 5, "F1."), ("value=5", "function")),
        (("f1", "rank", f1_at_k, "F1."), ("input='rank'", "'ranks'", "'pairs'")),
        (("f1", "ranks", f1_at_k, "F1 at {k}."), ("meaning", "{k}", "pattern")),
        (("f1", "ranks", f1_at_k, "F1.", (1, 0)), ("range=(1, 0)", "(0.0, 1.0)", None)),
        (("f1", "ranks", f1_at_k, "F1.", (0, 1), "max"), ("better='max'", "'higher'", "'lower'", None)),
    ],
)  # fmt: skip
def test_a_metric_that_means_nothing_is_refused_at_its_construction(arguments, facts):
    with refused(ValueError, f"Metric('{arguments[0]}')", *facts):
        Metric(*arguments)


@pytest.mark.parametrize(
    ("parameters", "facts"),
    [
        ({}, ("Metric('f1@{k}').at()", "k", ".at(k=5)")),
        ({"p": 0.5}, ("Metric('f1@{k}').at(p=0.5)", "k", ".at(k=5)")),
        ({"k": 2, "p": 0.5}, ("Metric('f1@{k}').at(k=2, p=0.5)", "pattern", "p", ".at(k=5)")),
        *(({"k": k}, ("'f1@{k}'", f"'f1@{k}'", "rank", ".at(k=5)")) for k in (0, -1, 2.5, True, "a")),
        ({"k": 2**63}, (f"'f1@{2**63}'", "2**63 - 1")),
    ],
)
def test_parameters_that_do_not_fit_are_refused(parameters, facts):
    with refused(ValueError, *facts):
        F1.at(**parameters)


@pytest.mark.parametrize(
    "value", [torch.zeros(()), torch.zeros(7, 2), 0.5, None, torch.zeros(1, dtype=torch.complex64)]
)
def test_a_function_that_returns_another_shape_is_named(value):
    returned = tuple(value.shape) if isinstance(value, torch.Tensor) else value
    with refused(ValueError, "evaluate_retrieval", "'mine'", returned, "60 queries", "(60,)", "len(ranks.relevant)"):
        evaluate_retrieval(ITEMS, LABELS, metrics=constant(value))


def test_an_array_is_as_good_as_a_tensor_and_booleans_as_numbers():
    hits = Metric(
        "hit", "ranks", lambda ranks, ties: (ranks.negatives_above[:, -1] == 0).numpy(), "Whether it is first."
    )
    report = evaluate_retrieval(ITEMS, LABELS, metrics=(hits, "recall@1"))
    assert report["hit"] == report["recall@1"]


def test_a_function_that_raises_is_named():
    broken = Metric("mine", "ranks", lambda ranks, ties: 1 / 0, "A mistake.")
    with refused(ValueError, "evaluate_retrieval", "'mine'", "ZeroDivisionError"):
        evaluate_retrieval(ITEMS, LABELS, metrics=broken)
    broken = Metric("mine", "pairs", lambda pooled: "high", "A mistake.")
    with refused(ValueError, "evaluate_retrieval", "'mine'", "'high'", "number"):
        evaluate_retrieval(ITEMS, LABELS, metrics=broken)


def test_a_value_that_is_never_a_number_is_noted():
    nothing = Metric("mine", "ranks", lambda ranks, ties: torch.full((len(ranks.relevant),), math.nan), "Nothing.")
    of_pairs = Metric("ours", "pairs", lambda pooled: math.nan, "Nothing.")
    report = evaluate_retrieval(ITEMS, LABELS, metrics=("mAP", nothing, of_pairs))
    assert math.isnan(report["mine"])
    assert report.mAP > 0
    [of_queries, pooled] = report.notes
    assert not missing_facts(of_queries, ("mine", "NaN", "60 queries", "match")), of_queries
    assert not missing_facts(pooled, ("ours", "NaN", "function")), pooled


def test_values_beyond_the_range_are_refused():
    for metric in (constant(torch.ones(60) * 2), Metric("mine", "pairs", lambda pooled: 2, "Two.")):
        with refused(ValueError, "evaluate_retrieval", "'mine'", "range=(0.0, 1.0)", "2 to 2", "range=None"):
            evaluate_retrieval(ITEMS, LABELS, metrics=metric)


def test_trials_take_keys_alone():
    with refused(ValueError, "evaluate_trials", "metrics", "'lift'", "evaluate_retrieval", "keys"):
        evaluate_trials([0.1, 0.2, 0.9], [0, 0, 1], metrics=(LIFT,))


# ------------------------------------------------------------------------------------------------------------- the class


def test_the_metric_of_torchmetrics_takes_it_and_knows_which_values_are_better():
    assert RetrievalEvaluation(metrics=(MEAN_RANK,)).higher_is_better is False
    assert RetrievalEvaluation(metrics=(MEAN_RANK, "mAP")).higher_is_better is None
    metric = RetrievalEvaluation(metrics=("mAP", F1_AT_2, LIFT, "macro_f1@2"))
    clone = metric.clone()
    for part in (slice(0, 30), slice(30, 60)):
        metric.update(ITEMS[part], LABELS[part])
    report = evaluate_retrieval(ITEMS, LABELS, metrics=("mAP", F1_AT_2, LIFT, "macro_f1@2"))
    assert {key: value.item() for key, value in metric.compute().items()} == report.metrics()
    with warned(UserWarning, "batch", "NaN"):
        values = clone(ITEMS[:2], torch.tensor([0, 1]))
    assert list(values) == ["mAP", "f1@2", "lift", "macro_f1@2"]


def test_its_values_are_drawn_if_they_have_a_range():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    metric = RetrievalEvaluation(metrics=("mAP", F1_AT_2, MEAN_RANK))
    metric.update(ITEMS, LABELS)
    _, axes = metric.plot()
    drawn = {text.get_text() for text in axes.get_legend().get_texts()}
    assert drawn == {"mAP", "f1@2"}


# ------------------------------------------------------------------------------------------------------ where keys stand


def test_a_configuration_names_it_by_its_import_path():
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(RetrievalMonitor, "monitor")
    settings = {"metrics": ["mAP", f"{PATH}.F1@k=2", f"{PATH}.LIFT"]}
    monitor = {"class_path": "fewshot_callbacks.RetrievalMonitor", "init_args": settings}
    parsed = parser.parse_object({"monitor": monitor})
    assert parser.dump(parsed).count(f"- {PATH}.") == 2
    made = parser.instantiate_classes(parsed).monitor
    assert [requested.key for requested in made._metrics()] == ["mAP", "f1@2", "lift"]


def test_a_report_has_its_sentence():
    page = pytest.importorskip("fewshot_callbacks.report.page")
    report = evaluate_retrieval(ITEMS, LABELS, metrics=("mAP", F1_AT_2))
    assert page.metric_texts(report)[1].meaning == "Harmonic mean of precision@2 and ir_recall@2."


def test_it_is_the_same_in_several_processes_which_must_bring_the_same_function():
    metrics = ("mAP", F1_AT_2, MEAN_RANK, LIFT, "macro_f1@2")
    alone = evaluate_retrieval(ITEMS, LABELS, metrics=metrics)

    def part(processes, asked=metrics):
        own = torch.arange(60)[processes.rank :: processes.count]
        return evaluate_retrieval(ITEMS[own], LABELS[own], metrics=asked, share=Share(processes, own))

    assert all(report == alone for report in in_threads(2, part))
    other = Metric("f1@{k}", "ranks", lambda ranks, k, ties: f1_at_k(ranks, k, ties) / 2, F1.meaning).at(k=2)
    refusals = in_threads(2, lambda processes: part(processes, (F1_AT_2, other)[processes.rank : processes.rank + 1]))
    facts = ("metrics", "Metric('f1@{k}', 'ranks', f1_at_k)", "process 0", "process 1")
    assert [missing_facts(str(refusal), facts) for refusal in refusals] == [[], []]
