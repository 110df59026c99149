"""`ExactAccuracyCalculator` compared with `AccuracyCalculator`."""

import inspect
import logging
import math

import numpy as np
import pytest
import torch

from tests.integration_packages import how_to_install

pytest.importorskip("pytorch_metric_learning", reason=how_to_install("pytorch_metric_learning"))
from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity, LpDistance, SNRDistance
from pytorch_metric_learning.testers import GlobalEmbeddingSpaceTester
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN

from fewshot_callbacks.integrations import ExactAccuracyCalculator
from tests.messages import missing_facts, refused, warned

CPU = torch.device("cpu")
KEYS = (
    "mean_average_precision",
    "mean_average_precision_at_r",
    "mean_reciprocal_rank",
    "precision_at_1",
    "r_precision",
)
SEARCHES = {
    "euclidean": CustomKNN(LpDistance(normalize_embeddings=False, power=2)),
    "batched": CustomKNN(LpDistance(normalize_embeddings=False), batch_size=7),
    "normalised": CustomKNN(LpDistance()),
    "cosine": CustomKNN(CosineSimilarity()),
    "dot": CustomKNN(DotProductSimilarity(normalize_embeddings=False)),
}


def sets():
    """Return the queries and 90 references of 6 classes, one of which no query has; a query has a class of its own."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 6
    points = torch.randn(6, 5, generator=generator)[labels] + torch.randn(120, 5, generator=generator)
    labels = labels * 10 - 7
    query_labels = labels[:30].clone()
    query_labels[labels[:30] == 43] = 3
    query_labels[4] = 1000
    return points[:30], query_labels, points[30:], labels[30:]


def both(**options):
    arguments = {"include": KEYS, "device": CPU, "knn_func": SEARCHES["euclidean"]} | options
    return {"ours": ExactAccuracyCalculator(**arguments), "theirs": AccuracyCalculator(**arguments)}


def assert_same(found):
    assert list(found["ours"]) == list(found["theirs"])
    for name, value in found["theirs"].items():
        assert found["ours"][name] == pytest.approx(value, abs=1e-6, nan_ok=True), name


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("k", [None, 28, "max_bin_count"])  # 28: not less than the relevant items of any query
@pytest.mark.parametrize("means", [{}, {"avg_of_avgs": True}, {"return_per_class": True}], ids=str)
def test_values_and_keys_are_theirs_where_nothing_ties(search, k, means):
    calculators = both(k=k, knn_func=SEARCHES[search], **means)
    query, query_labels, reference, reference_labels = sets()
    for arguments in (
        (query, query_labels, reference, reference_labels),
        (query, query_labels),
        (
            query,
            query_labels,
            torch.cat([query, reference]),
            torch.cat([query_labels, reference_labels]),
            True,
        ),
    ):
        assert_same({name: calculator.get_accuracy(*arguments) for name, calculator in calculators.items()})


def test_labels_may_be_arrays_of_integers_or_of_other_numbers():
    points, numbers = 2 ** torch.arange(20)[:, None], torch.arange(20) % 3
    for labels in (numbers, numbers + 0.5):
        arguments = points.numpy(), labels.numpy()
        found = {name: calculator.get_accuracy(*arguments) for name, calculator in both().items()}
        assert_same(found)
        column = arguments[1][:, None]  # as the testers collect them
        assert both()["ours"].get_accuracy(arguments[0], column) == found["ours"]


def test_a_search_at_k_does_not_change_what_does_not_depend_on_it():
    """Theirs warns that r_precision and MAP@R are wrong where k is less than the number of relevant items."""
    query, query_labels, *_ = sets()
    names = ("mean_average_precision_at_r", "r_precision")
    values = [both(k=k, include=names)["ours"].get_accuracy(query, query_labels) for k in (1, None)]
    assert values[0] == values[1]


def test_a_k_below_the_number_of_relevant_references_is_told(caplog):
    query, query_labels, reference, reference_labels = sets()
    most_relevant = int((query_labels[:, None] == reference_labels).sum(dim=1).max())
    for k, is_told in ((most_relevant - 1, True), (most_relevant, False), ("max_bin_count", False), (None, False)):
        caplog.clear()
        both(k=k)["ours"].get_accuracy(query, query_labels, reference, reference_labels)
        told = [record.getMessage() for record in caplog.records]
        facts = (f"k={k}", most_relevant, "references")
        assert any(not missing_facts(text, facts) for text in told) == is_told
    caplog.clear()
    both(k=1, include=("mean_average_precision",))["ours"].get_accuracy(query, query_labels)
    assert not caplog.records


def differ_in_the_second(one, other):
    return (one[..., 0] == other[..., 0]) & (one[..., 1] != other[..., 1])


def are_near(one, other):
    return (one - other).abs() < 11


@pytest.mark.parametrize("k", [None, "max_bin_count"])
@pytest.mark.parametrize("means", [{}, {"avg_of_avgs": True}, {"return_per_class": True}], ids=str)
@pytest.mark.parametrize("comparison", [differ_in_the_second, are_near])
def test_a_comparison_of_labels_says_who_is_relevant(comparison, means, k):
    query, query_labels, reference, reference_labels = sets()
    if comparison is differ_in_the_second:
        query_labels = torch.stack([query_labels, torch.arange(30) % 2], dim=1)
        reference_labels = torch.stack([reference_labels, torch.arange(90) % 4], dim=1)
    calculators = both(label_comparison_fn=comparison, k=k, **means)
    sides = [(query, query_labels, reference, reference_labels)]
    if comparison is are_near:  # theirs counts an item that is not relevant to itself as one of the relevant ones
        sides.append((query, query_labels))
        sides.append(
            (query, query_labels, torch.cat([query, reference]), torch.cat([query_labels, reference_labels]), True)
        )
    for arguments in sides:
        assert_same({name: calculator.get_accuracy(*arguments) for name, calculator in calculators.items()})


def test_an_item_that_is_not_relevant_to_itself_does_not_lower_the_number_of_relevant_ones():
    """Theirs subtracts one for the item itself, so that R is 1 where two items are relevant."""
    labels = torch.tensor([[0, 0], [0, 1], [0, 2]])
    calculators = both(label_comparison_fn=differ_in_the_second, include=("r_precision", "mean_average_precision"))
    found = {name: each.get_accuracy(torch.eye(3), labels) for name, each in calculators.items()}
    assert found["ours"] == {"mean_average_precision": 1, "r_precision": 1}
    assert found["theirs"]["mean_average_precision"] == 2


def test_labels_beyond_float32_are_kept_apart():
    """Four items of a class each: as float32, two of the labels are equal, so that theirs finds a match."""
    labels = 2**24 + torch.arange(4)
    found = {name: calculator.get_accuracy(torch.eye(4), labels) for name, calculator in both().items()}
    assert not math.isnan(found["theirs"]["mean_average_precision"])
    assert all(math.isnan(value) for value in found["ours"].values())


def test_queries_without_a_reference_give_nan_and_a_warning(caplog):
    arguments = torch.eye(3), torch.arange(3)
    with caplog.at_level(logging.WARNING):
        found = {name: calculator.get_accuracy(*arguments) for name, calculator in both().items()}
    assert_same(found)
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("None of the query labels are in the reference set.") == 2
    assert_same({name: each.get_accuracy(*arguments) for name, each in both(return_per_class=True).items()})


def test_ties_count_as_the_mean_over_orders():
    """Two relevant items and two others at one distance: the first is relevant in half of the orders."""
    query, reference = torch.zeros(1, 2), torch.ones(4, 2)
    calculator = both()["ours"]
    found = calculator.get_accuracy(query, torch.tensor([0]), reference, torch.tensor([0, 0, 1, 1]))
    assert found["precision_at_1"] == 0.5
    assert found == calculator.get_accuracy(query, torch.tensor([0]), reference, torch.tensor([1, 1, 0, 0]))


def clusters(points, number):
    return (points[:, 0] > points[:, 0].median()).long()


def test_other_metrics_are_left_to_the_parent():
    class Counted(ExactAccuracyCalculator):
        def calculate_items(self, query, **_):
            return len(query)

    calculator = Counted(device=CPU, kmeans_func=clusters)
    theirs = AccuracyCalculator(device=CPU, kmeans_func=clusters, knn_func=SEARCHES["euclidean"])
    query, query_labels, *_ = sets()
    found = calculator.get_accuracy(query, query_labels)
    assert found.pop("items") == 30
    assert_same({"ours": found, "theirs": theirs.get_accuracy(query, query_labels)})
    assert {"NMI", "AMI", "items"} < set(calculator.get_curr_metrics())


def test_include_and_exclude_choose_the_metrics():
    query, query_labels, *_ = sets()
    calculators = both()
    for options in ({"include": ("r_precision", "precision_at_1")}, {"exclude": ("r_precision",)}):
        assert_same({name: each.get_accuracy(query, query_labels, **options) for name, each in calculators.items()})
    alone = both(include=("mean_reciprocal_rank",))["ours"]  # a TypeError of theirs
    assert list(alone.get_accuracy(query, query_labels)) == ["mean_reciprocal_rank"]


def test_a_tester_and_its_hook_get_the_values_of_theirs():
    query, query_labels, reference, reference_labels = sets()
    data = {
        "val": torch.utils.data.TensorDataset(query, query_labels),
        "train": torch.utils.data.TensorDataset(reference, reference_labels),
    }
    found = {}
    for name, calculator in both(knn_func=SEARCHES["cosine"]).items():
        seen = {}
        tester = GlobalEmbeddingSpaceTester(
            accuracy_calculator=calculator,
            dataloader_num_workers=0,
            data_device=CPU,
            end_of_testing_hook=lambda tester, seen=seen: seen.update(tester.all_accuracies["val"]),
        )
        tester.test(data, 1, torch.nn.Identity(), splits_to_eval=[("val", ["train", "val"])])
        found[name] = seen
    assert "mean_average_precision_at_r_level0" in found["ours"]
    assert_same(found)


def test_the_constructor_takes_their_arguments_in_their_order():
    calculator = ExactAccuracyCalculator(("r_precision",), (), True, False, 3, None, CPU)
    assert (calculator.get_curr_metrics(), calculator.avg_of_avgs, calculator.k) == (["r_precision"], True, 3)
    assert calculator.description() == "avg_of_avgs"
    ours, theirs = (
        inspect.signature(kind.get_accuracy).parameters for kind in (ExactAccuracyCalculator, AccuracyCalculator)
    )
    assert list(ours) == list(theirs)


@pytest.mark.usefixtures("as_users_run_it")
def test_the_order_of_version_1_is_refused():
    query, query_labels, reference, reference_labels = sets()
    calculator = both()["ours"]
    order = "query, query_labels, reference, reference_labels"
    with refused(ValueError, "query_labels", "(90, 5)", "reference", "(30,)", order):
        calculator.get_accuracy(query, reference, query_labels, reference_labels, False)
    with refused(ValueError, "query_labels", "(30, 5)", order, "version 1"):
        calculator.get_accuracy(query.numpy(), query.numpy(), query_labels.numpy(), query_labels.numpy(), True)


@pytest.mark.usefixtures("as_users_run_it")
def test_arguments_that_do_not_fit_are_refused_with_the_fix():
    query, query_labels, reference, reference_labels = sets()
    calculator = both()["ours"]
    with refused(ValueError, 30, "queries", 29, "query_labels"):
        calculator.get_accuracy(query, query_labels[1:], reference, reference_labels)
    with refused(ValueError, "ref_includes_query=True", "reference", "query", "ref_includes_query=False"):
        calculator.get_accuracy(query, query_labels, reference, reference_labels, True)
    compared = both(label_comparison_fn=are_near)["ours"]
    for arguments, facts in (
        ((query, query_labels[1:]), (29, 30)),
        ((query, query_labels, reference, reference_labels[1:]), (30, 89, 90)),
    ):
        with refused(ValueError, "relevance", "queries", "gallery", *facts):
            compared.get_accuracy(*arguments)
    with refused(ValueError, "queries", "(0, 5)"):
        calculator.get_accuracy(query[:0], query_labels[:0], reference, reference_labels)
    with refused(NotImplementedError, "clustering"):
        ExactAccuracyCalculator(label_comparison_fn=lambda one, other: one == other, include=("NMI",))
    for distance in (SNRDistance(), LpDistance(p=1), DotProductSimilarity(power=2)):
        with refused(
            ValueError, "knn_func", "CustomKNN", "CosineSimilarity", "DotProductSimilarity", "LpDistance(p=2)"
        ):
            ExactAccuracyCalculator(knn_func=CustomKNN(distance), device=CPU)
    with refused(ValueError, "avg_of_avgs", "return_per_class"):
        ExactAccuracyCalculator(avg_of_avgs=True, return_per_class=True)


@pytest.mark.parametrize(
    ("index", "expected"), [("IndexFlatL2", "euclidean"), ("IndexFlatIP", "dot"), ("IndexIVF", None)]
)
def test_an_index_of_faiss_has_its_similarity_or_is_refused(index, expected):
    search = type("FaissKNN", (), {"index_init_fn": type(index, (), {})})()
    if expected is None:
        with refused(ValueError, "ExactAccuracyCalculator", "knn_func", "CustomKNN", "LpDistance(p=2)"):
            ExactAccuracyCalculator(knn_func=search)
    else:
        assert ExactAccuracyCalculator(knn_func=search).similarity == expected


def test_values_do_not_depend_on_the_memory():
    query, query_labels, *_ = sets()
    values = [
        ExactAccuracyCalculator(include=KEYS, memory_mb=memory).get_accuracy(query, query_labels) for memory in (1, 512)
    ]
    assert values[0] == values[1]
    assert np.isfinite(list(values[0].values())).all()


def test_items_that_come_twice_are_a_warning_and_a_kind_is_told_once():
    embeddings = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % 4
    calculator = ExactAccuracyCalculator(include=("precision_at_1",))
    with warned(UserWarning, "ExactAccuracyCalculator", 40, "copy", "query_ids", "gallery_ids"):
        calculator.get_accuracy(embeddings.repeat(2, 1), labels.repeat(2))
    assert calculator.get_accuracy(embeddings.repeat(2, 1), labels.repeat(2)) == {"precision_at_1": 1.0}
