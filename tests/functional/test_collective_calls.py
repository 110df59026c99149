"""Functions that several processes call together: in different ways, or with parts that nobody can evaluate."""

from functools import partial

import numpy as np
import pytest
import torch

from fewshot_callbacks.functional import (
    Relevance,
    Share,
    embedding_health,
    evaluate_retrieval,
    grouped_recall,
    knn_accuracy,
    nearest,
)
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments, ratio_of_set
from tests.messages import refused
from tests.thread_processes import in_threads

ITEMS, GALLERY = 30, 24
FUNCTIONS = {
    "evaluate_retrieval": evaluate_retrieval,
    "knn_accuracy": knn_accuracy,
    "embedding_health": embedding_health,
    "nearest": nearest,
    "grouped_recall": partial(grouped_recall, label_groups=4),
}
FIRST_SET = {
    "evaluate_retrieval": ("queries", "query_labels"),
    "knn_accuracy": ("queries", "query_labels"),
    "embedding_health": ("embeddings", "labels"),
    "nearest": ("queries", "query_labels"),
    "grouped_recall": ("queries", "query_labels"),
}
TWO_SETS = {
    "evaluate_retrieval": ("gallery", "gallery_labels"),
    "knn_accuracy": ("gallery", "gallery_labels"),
    "embedding_health": (),
    "nearest": ("gallery", "gallery_labels"),
    "grouped_recall": ("gallery", "gallery_labels"),
}


def whole(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # whole numbers have many equal scores
    return torch.randint(-2, 3, (n, 3), generator=generator).float(), torch.randint(5, (n,), generator=generator)


def part(rank, count, first, second):
    """The share of a process: of one set, or of two."""
    rows, labels = whole(ITEMS)
    mine = torch.arange(rank, ITEMS, count)
    given = dict(zip(first, (rows[mine], labels[mine]), strict=True))
    if second:
        others, other_labels = whole(GALLERY, 1)
        theirs = torch.arange(rank, GALLERY, count)
        given |= dict(zip(second, (others[theirs], other_labels[theirs]), strict=True))
    return given


def left_out(*names):
    return lambda given: [given.pop(name) for name in names]


def changed(**options):
    return lambda given: given.update(options)


CALLS = [
    (
        "evaluate_retrieval",
        True,
        left_out("gallery", "gallery_labels"),
        ("gallery", "process 0", "left out in process 1"),
    ),
    (
        "evaluate_retrieval",
        False,
        changed(query_groups=[0] * 15),
        ("query_groups", "left out in process 0", "process 1"),
    ),
    (
        "evaluate_retrieval",
        False,
        changed(metrics=("mAP",)),
        ("metrics", "'mAP'", "process 0", "('mAP',) in process 1"),
    ),
    (
        "evaluate_retrieval",
        False,
        changed(places=[*range(1, 30, 2)]),
        ("query_places", "left out in process 0", "process 1"),
    ),
    ("knn_accuracy", True, left_out("gallery", "gallery_labels"), ("gallery", "process 0", "left out in process 1")),
    ("knn_accuracy", False, changed(k=3), ("k", "[2] in process 0", "[3] in process 1")),
    ("knn_accuracy", False, changed(temperature=None), ("temperature", "0.07 in process 0", "None in process 1")),
    ("knn_accuracy", False, changed(temperature=-1), ("temperature=-1", 0.07)),
    ("knn_accuracy", False, changed(similarity="dot"), ("similarity", "cosine in process 0", "dot in process 1")),
    ("knn_accuracy", False, changed(confidence=0.5), ("confidence", "0.95 in process 0", "0.5 in process 1")),
    ("knn_accuracy", False, changed(places=[*range(1, 30, 2)]), ("query_places", "left out in process 0", "process 1")),
    ("knn_accuracy", False, changed(query_labels=[1, 2]), ("15 queries", "2 query_labels")),
    (
        "knn_accuracy",
        False,
        changed(query_labels=["owl"] * 15),
        ("query_labels", "process 0", "process 1", "list(map(str, map(int, query_labels)))"),
    ),
    ("knn_accuracy", False, changed(queries=torch.ones(15, 4)), ("queries", "3 in process 0", "4 in process 1")),
    ("knn_accuracy", False, changed(queries=torch.ones(15)), ("queries", "(items, dim)", "(15,)")),
    ("knn_accuracy", False, changed(query_groups=[0] * 15), ("query_groups", "left out in process 0", "process 1")),
    ("nearest", True, left_out("gallery", "gallery_labels"), ("gallery", "process 0", "left out in process 1")),
    ("nearest", False, left_out("query_labels"), ("query_labels", "process 0", "left out in process 1")),
    ("nearest", False, changed(k=3), ("k", "2 in process 0", "3 in process 1")),
    ("nearest", False, changed(k=0), ("k=0", 1)),
    ("nearest", False, changed(query_indices=[1]), ("query_indices", "None in process 0", "[1] in process 1")),
    ("nearest", False, changed(queries=torch.ones(15, 4)), ("queries", "3 in process 0", "4 in process 1")),
    ("nearest", False, changed(query_labels=[1, 2]), ("15 queries", "2 query_labels")),
    ("grouped_recall", True, left_out("gallery", "gallery_labels"), ("gallery", "left out in process 1")),
    ("grouped_recall", False, changed(seed=1), ("seed", "0 in process 0", "1 in process 1")),
    ("grouped_recall", False, changed(repeats=2), ("repeats", "1 in process 0", "2 in process 1")),
    ("grouped_recall", False, changed(label_groups=None), ("label_groups=None", 10)),
    ("embedding_health", False, changed(k=None), ("k", "2 in process 0", "None in process 1")),
    ("embedding_health", False, changed(normalize=True), ("normalize", "False in process 0", "True in process 1")),
    ("embedding_health", False, left_out("labels"), ("labels", "process 0", "left out in process 1")),
    (
        "embedding_health",
        False,
        changed(labels=["owl"] * 15),
        ("labels", "process 0", "process 1", "list(map(str, map(int, labels)))"),
    ),
    (
        "embedding_health",
        False,
        changed(places=[*range(1, 30, 2)]),
        ("query_places", "left out in process 0", "process 1"),
    ),
    (
        "embedding_health",
        False,
        changed(embeddings=torch.ones(15, 4)),
        ("embeddings", "3 in process 0", "4 in process 1"),
    ),
]


@pytest.mark.parametrize(("name", "two", "change", "facts"), CALLS)
@pytest.mark.parametrize("count", [2, 3])
def test_what_one_process_does_otherwise_is_said_by_all_at_once(name, two, change, facts, count):
    def work(processes):
        given = part(processes.rank, count, FIRST_SET[name], TWO_SETS[name] if two else ())
        given |= {} if name == "evaluate_retrieval" else {"k": 2}
        if processes.rank == 1:
            change(given)
            if count == 3:
                given = {key: value[:10] if isinstance(value, torch.Tensor) else value for key, value in given.items()}
                given |= {
                    key: value[:10] for key, value in given.items() if isinstance(value, list) and len(value) == 15
                }
        share = Share(processes, given.pop("places", None))
        return FUNCTIONS[name](**given, share=share)

    outcomes = in_threads(count, work)
    assert len({str(outcome) for outcome in outcomes}) == 1, outcomes
    facts = [str(fact).replace("15", str(ITEMS // count)) for fact in facts]
    with refused(ValueError, name, *facts):
        raise outcomes[0]


@pytest.mark.filterwarnings("ignore:Grouped recall over 1 group")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("empty", [0, 1])
def test_without_places_the_items_of_a_process_follow_those_of_the_one_before(name, empty):
    """Also where one process holds none."""
    rows, labels = whole(ITEMS)
    options = {} if name == "evaluate_retrieval" else {"k": 3}
    expected = FUNCTIONS[name](rows, labels, **options)
    for cuts in ((0, 11, 30), (0, 30, 30) if empty else (0, 0, 30)):

        def work(processes, cuts=cuts):
            mine = slice(*cuts[processes.rank : processes.rank + 2])
            return FUNCTIONS[name](rows[mine], labels[mine], **options, share=Share(processes))

        for found in in_threads(2, work):
            assert not isinstance(found, BaseException), found
            if name == "embedding_health":
                assert found.metrics() == pytest.approx(expected.metrics(), rel=1e-9, nan_ok=True)
                assert [often for _, often in found.hubs] == pytest.approx([often for _, often in expected.hubs])
                continue
            if name == "nearest":
                assert torch.equal(found.indices, expected.indices)
                assert torch.equal(found.scores, expected.scores)
                continue
            if name == "grouped_recall":
                assert found == expected
                continue
            assert found.values == expected.values
            for key, values in expected.per_query.items():
                assert torch.equal(values.nan_to_num(-1), found.per_query[key].nan_to_num(-1)), key


def test_a_bank_without_places_follows_in_the_order_of_the_processes():
    (rows, labels), (gallery, gallery_labels) = whole(ITEMS), whole(GALLERY, 1)
    expected = knn_accuracy(rows, labels, gallery, gallery_labels, k=(1, 5))

    def work(processes):
        mine, theirs = [(slice(0, 4), slice(0, 0)), (slice(4, 30), slice(0, 24))][processes.rank]
        return knn_accuracy(
            rows[mine], labels[mine], gallery[theirs], gallery_labels[theirs], k=(1, 5), share=Share(processes)
        )

    for found in in_threads(2, work):
        assert found == expected
        assert all(torch.equal(of, found.per_query[key]) for key, of in expected.per_query.items())


@pytest.mark.parametrize("name", ["knn_accuracy", "embedding_health"])
@pytest.mark.parametrize(
    ("places", "facts"),
    [
        ([[0, 1], [1, 2]], ("places", "0 to 3")),
        ([[0, 1], [5, 3]], ("places", "0 to 3")),
        ([[0], [1, 2]], (2, "1 places")),
    ],
)
def test_places_are_those_of_each_item_once(name, places, facts):
    def work(processes):
        share = Share(processes, places[processes.rank])
        return FUNCTIONS[name](torch.eye(2), [0, 0], k=2, share=share)

    outcomes = in_threads(2, work)
    assert len({str(outcome) for outcome in outcomes}) == 1
    with refused(ValueError, name, FIRST_SET[name][0], *facts):
        raise outcomes[0]


def test_processes_that_all_hold_nothing_are_told():
    for name, function in FUNCTIONS.items():

        def work(processes, function=function):
            return function(torch.empty(0, 3), torch.empty(0, dtype=torch.long), share=Share(processes))

        for outcome in in_threads(2, work):
            with refused(ValueError, name, FIRST_SET[name][0], "empty", "process"):
                raise outcome


def test_judgements_that_differ_between_processes_are_refused():
    rows, _ = whole(4)

    def work(processes):
        lists = [[1], [0], [3], [2]] if processes.rank else [[2], [3], [0], [1]]
        mine = slice(0, 2) if processes.rank else slice(2, 4)
        return evaluate_retrieval(rows[mine], relevance=Relevance.from_lists(lists), share=Share(processes))

    outcomes = in_threads(2, work)
    assert len({str(outcome) for outcome in outcomes}) == 1
    facts = ("relevance", "Relevance(4 queries in one set, 4 relevant pairs, 0 ignored)", "process 0", "process 1")
    with refused(ValueError, "evaluate_retrieval", *facts):
        raise outcomes[0]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"eps": 0.5}, ("eps", "1e-30 in process 0", "0.5 in process 1")),
        ({"skip_singletons": True}, ("skip_singletons", "False in process 0", "True in process 1")),
        ({"dim": 4}, ("embeddings", "3 in process 0", "4 in process 1")),
    ],
)
def test_the_ratio_of_a_set_is_asked_for_alike(change, facts):
    def work(processes):
        options = dict(change) if processes.rank else {}
        rows = np.random.default_rng(processes.rank).normal(size=(8, options.pop("dim", 3)))
        return ratio_of_set(ClassMoments.of(rows, [0, 1] * 4), processes, **options)

    outcomes = in_threads(2, work)
    assert len({str(outcome) for outcome in outcomes}) == 1, outcomes
    with refused(ValueError, *facts):
        raise outcomes[0]
