"""Labels, ids and groups as strings, columns, lists and arrays: the results are the same as for the corresponding integers.

And inputs that no function may take for something else.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.data import EpisodicBatchSampler
from fewshot_callbacks.functional import (
    Share,
    compare_reports,
    discriminant_ratio,
    evaluate_retrieval,
    grouped_recall,
    label_groups,
    sample_episodes,
    split_episode,
    variance_ratio,
)
from fewshot_callbacks.functional._labels import as_labels
from fewshot_callbacks.functional._reading import non_finite_rows
from fewshot_callbacks.protonet import SoftmaxHead, SupportClassifier
from fewshot_callbacks.protonet.evaluation import evaluate_episodes
from tests.functional.calls import CALLS_WITH_LABELS, EPISODE_SIZES
from tests.messages import missing_facts, refused
from tests.thread_processes import in_threads

BOOK = np.array(["heron", "owl", "", "Ünal", "owl 2", "10"])
"""In no order; of one letter more, empty, and looking like numbers."""


PLACES = np.random.default_rng(0).permutation(np.arange(36) % 6)
EMBEDDINGS = np.random.default_rng(1).normal(size=(6, 8))[PLACES] + np.random.default_rng(2).normal(size=(36, 8))
ITEMS, WORDS = torch.tensor(EMBEDDINGS), BOOK[PLACES]
NUMBERS = np.unique(WORDS, return_inverse=True)[1]
EVERYTHING = {"label_groups": 2, "metrics": (*DEFAULT_METRICS, "map@3_min", "macro_mAP")}


def evaluated(labels, **more):
    return evaluate_retrieval(EMBEDDINGS, labels, **{"label_groups": None} | more)


FORMS = {
    "list": list,
    "list of str": lambda words: words.tolist(),
    "array of bytes": lambda words: np.char.encode(words, "utf-8"),
    "array of objects": lambda words: words.astype(object),
    "column": lambda words: words[:, None],
    "list of lists": lambda words: words[:, None].tolist(),
    # what pandas has: no array, but made into one by NumPy
    "categorical": lambda words: SimpleNamespace(__array__=lambda dtype=None, copy=None: words.astype(object)),
}


@pytest.mark.parametrize("form", FORMS)
def test_words_give_the_report_of_their_numbers(form):
    expected, report = evaluated(NUMBERS, **EVERYTHING), evaluated(FORMS[form](WORDS), **EVERYTHING)
    book = np.unique(WORDS).tolist()
    assert report == expected
    assert (report.label_names, expected.label_names) == (tuple(book), None)
    for name, values in expected.per_class().items():
        assert report.per_class()[name] == {book[label]: value for label, value in values.items()}
    assert [report.label_names[code] for code in report.query_labels.tolist()] == WORDS.tolist()
    assert json.loads(json.dumps(report.to_dict()))["label_names"] == book
    assert expected.to_dict()["label_names"] is None


def test_objects_and_columns_of_integers_are_integers():
    expected = evaluated(NUMBERS)
    forms = (NUMBERS.astype(object), [torch.tensor(number) for number in NUMBERS], NUMBERS[:, None].tolist())
    for form in (*forms, torch.tensor(NUMBERS)[:, None], NUMBERS.astype(np.uint16)):
        assert evaluated(form) == expected
    found = as_labels(np.array([2**62, -(2**62)], object), "labels", "test")
    assert found.tolist() == [2**62, -(2**62)]
    for beyond in (np.array([2**70] * 36, object), np.array([2**63] * 36, np.uint64)):
        with refused(ValueError, "query_labels", "integers", "64 bits"):
            evaluated(beyond)


def test_queries_and_gallery_ids_and_groups_as_words():
    queries = np.flatnonzero(NUMBERS[:16] < 4)  # there are words that only the gallery has
    ids, groups = np.arange(36) % 23, np.arange(36) % 11

    def found(labels, ids, groups):
        of_queries, of_gallery = (
            {f"{side}_ids": ids[some], f"{side}_groups": groups[some]}
            for side, some in (("query", queries), ("gallery", slice(16, None)))
        )
        sets = EMBEDDINGS[queries], labels[queries], EMBEDDINGS[16:], labels[16:]
        return evaluate_retrieval(*sets, **of_queries, **of_gallery, label_groups=2)

    report = found(WORDS, np.char.add("image ", ids.astype(str)), np.char.add("video ", groups.astype(str)))
    assert report == found(NUMBERS, ids, groups)
    assert report != found(NUMBERS, ids, np.arange(36))  # groups count here
    assert report != found(NUMBERS, np.arange(36), groups)


def test_embeddings_as_lists_of_rows():
    expected = evaluated(NUMBERS).mAP
    forms = (list(EMBEDDINGS), list(ITEMS), EMBEDDINGS.tolist(), EMBEDDINGS.astype(object), tuple(EMBEDDINGS))
    for form in forms:
        found = evaluate_retrieval(form, NUMBERS.tolist(), label_groups=None)
        assert found.mAP == pytest.approx(expected, abs=1e-6)  # a list of numbers is float32
    for function in (discriminant_ratio, variance_ratio):
        ratio = function(ITEMS, torch.tensor(NUMBERS)[:, None]).item()
        assert function(EMBEDDINGS, WORDS).item() == pytest.approx(ratio, rel=1e-12)
        assert function(EMBEDDINGS.tolist(), WORDS).item() == pytest.approx(ratio, rel=1e-5)


def test_processes_agree_on_the_numbers_of_words():
    expected = evaluated(WORDS, **EVERYTHING)
    mine = [np.arange(36)[WORDS[0] == WORDS], np.arange(36)[WORDS[0] != WORDS], np.arange(0)]  # no word is in two

    def work(process):
        own = mine[process.rank]
        share = Share(process, torch.tensor(own))
        return evaluate_retrieval(ITEMS[own], WORDS[own].tolist(), share=share, **EVERYTHING)

    for report in in_threads(3, work):
        assert report == expected
        assert report.label_names == expected.label_names
        assert report.query_labels.tolist() == expected.query_labels.tolist()


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("labels", "facts"),
    [
        ([*WORDS[:35], None], (1, "36 query_labels", None, "index 35")),
        (np.array([*WORDS[:34], np.nan, None], object), (2, "36 query_labels", "nan", "index 34")),
        ([*WORDS[:35], 3], ("query_labels", f"'{WORDS[0]}'", "index 0", 3, "index 35", "list(map(str, query_labels))")),
        (np.array([2.5] * 36, object), ("query_labels", "float", "index 0", "list(map(str, query_labels))")),
        (np.array([b"\xff"] * 36), ("query_labels", "bytes", "UTF-8", "np.char.decode(query_labels, 'latin-1')")),
        ("heron", ("query_labels", "string", "'heron'", "list")),
        ({"heron": 1}, ("query_labels", "dict", "integers", "strings")),
        (np.char.add(WORDS[:, None], ["a", "b"]), ("query_labels", "(36, 2)", "query_labels[:, 0]")),
        (WORDS[:7], ("36 queries", "7 query_labels")),
    ],
)
def test_what_is_no_label_is_refused(labels, facts):
    with refused(ValueError, "evaluate_retrieval", *facts):
        evaluated(labels)


def test_words_beside_numbers_are_refused():
    for error in in_threads(2, lambda one: evaluated((NUMBERS, WORDS)[one.rank], share=Share(one))):
        facts = ("query_labels in process 0", "query_labels in process 1", "list(map(str, map(int, query_labels)))")
        assert not missing_facts(str(error), facts), error
    with refused(ValueError, "query_labels", "gallery_labels", "strings", "list(map(str, map(int, gallery_labels)))"):
        evaluated(WORDS, gallery=EMBEDDINGS, gallery_labels=NUMBERS)
    with refused(ValueError, "query_ids", "gallery_ids", "strings", "list(map(str, map(int, query_ids)))"):
        evaluated(WORDS, gallery=EMBEDDINGS, gallery_labels=WORDS, query_ids=NUMBERS, gallery_ids=WORDS)


# ------------------------------------------------------------------------------------------------------ every other function


EPISODES = sample_episodes(NUMBERS, **EPISODE_SIZES)
CALLS = CALLS_WITH_LABELS | {
    "evaluate_episodes": lambda items, labels: evaluate_episodes(items, labels, SoftmaxHead(), EPISODES).per_episode
}


@pytest.mark.parametrize("name", CALLS)
def test_every_function_takes_words_and_numbers_in_any_form(name):
    expected = np.asarray(CALLS[name](ITEMS, torch.tensor(NUMBERS)))
    assert np.isfinite(expected).all()
    for labels in (WORDS, WORDS.tolist(), NUMBERS, NUMBERS.tolist()):
        np.testing.assert_allclose(np.asarray(CALLS[name](ITEMS, labels)), expected, rtol=1e-9)


def test_messages_of_other_functions_hold_the_words():
    with pytest.raises(ValueError, match=r"\bgroup \d .*\['[a-d]', '[a-d]'\]"):
        grouped_recall(np.eye(5), ["a", "a", "b", "c", "d"], label_groups=2)
    with refused(ValueError, "label_groups", "labels", "strings", "np.unique(labels, return_inverse=True)[1]"):
        label_groups(WORDS, 2)
    with refused(ValueError, 9, "class ''", 6, "queries <= 5"):
        EpisodicBatchSampler(WORDS, **EPISODE_SIZES | {"queries": 8})
    with refused(ValueError, "EpisodicBatchSampler", "integer", "labels", "torch.float32"):
        EpisodicBatchSampler([0.5, 1.5] * 5, **EPISODE_SIZES)
    with refused(ValueError, "class 'owl'", 2, "class 'heron'", 3, "EpisodicBatchSampler"):
        split_episode(torch.eye(5), ["heron", "heron", "heron", "owl", "owl"], shots=1)


def test_a_classifier_answers_in_the_words_of_its_support():
    classifier = SupportClassifier(SoftmaxHead())
    expected = classifier.fit(ITEMS, torch.tensor(NUMBERS)).predict(ITEMS)
    assert classifier.class_names is None
    assert classifier.fit(EMBEDDINGS, NUMBERS.tolist()).predict(EMBEDDINGS).tolist() == expected.tolist()
    found = classifier.fit(ITEMS, WORDS.tolist()).predict(ITEMS)
    assert classifier.class_names == tuple(np.unique(WORDS).tolist())
    assert found == [np.unique(WORDS)[number] for number in expected.tolist()]
    assert classifier.classes.tolist() == list(range(6))
    assert classifier.fit(ITEMS, torch.tensor(NUMBERS)).predict(ITEMS).equal(expected)  # no words are left of before


def test_reports_of_words_are_compared_by_their_words():
    first = evaluated(WORDS)
    assert compare_reports(first, evaluated(WORDS.tolist()))["mAP"].value == 0
    for labels in (np.char.add(WORDS, "!"), NUMBERS):  # other words with the same numbers
        with refused(ValueError, "compare_reports", "36 queries", "labels"):
            compare_reports(first, evaluated(labels))


def test_given_groups_of_words_are_those_of_their_numbers():
    names = np.unique(WORDS).tolist()
    groups = [["owl", "10"], ["", "heron", "owl 2"]]
    places = [[names.index(word) for word in group] for group in groups]
    of_numbers, of_words = (
        grouped_recall(ITEMS, labels, label_groups=some) for labels, some in ((NUMBERS, places), (WORDS, groups))
    )
    assert (of_words.at, of_words.intervals) == (of_numbers.at, of_numbers.intervals)
    with refused(
        ValueError, "label_groups", "query_labels", "[list(map(str, map(int, group))) for group in label_groups]"
    ):
        grouped_recall(ITEMS, WORDS, label_groups=places)
    with refused(ValueError, 1, "4 labels", "label_groups", "query", "'gull'"):
        grouped_recall(ITEMS, WORDS, ITEMS, ["gull", *WORDS[1:]], label_groups=[["owl", "10"], ["", "gull"]])


# ------------------------------------------------------------------------------------------------------ values that are none


SIDES = {
    "queries": np.random.default_rng(0).normal(size=(12, 3)), "query_labels": np.arange(12) % 4,
    "gallery": np.random.default_rng(1).normal(size=(12, 3)), "gallery_labels": np.arange(12) % 4,
    "query_groups": np.zeros(12, int), "gallery_groups": np.ones(12, int),
    "query_ids": np.arange(12), "gallery_ids": np.arange(12) + 20,
}  # fmt: skip


@pytest.mark.parametrize("call", [evaluate_retrieval, grouped_recall])
@pytest.mark.parametrize("name", SIDES)
def test_masked_values_are_refused(call, name):
    masked = np.ma.masked_array(SIDES[name], mask=np.zeros(SIDES[name].shape, bool))
    assert call(**SIDES | {name: masked}, label_groups=2) == call(**SIDES, label_groups=2)  # nothing is masked
    masked[3] = np.ma.masked
    cures = (f"~np.ma.getmaskarray({name})", f"{name}.filled(0)")
    for form in (masked, list(masked)):  # rows, or numbers and the constant `masked`
        with refused(ValueError, call.__name__, name, "masked", f"{masked[3:4].size} masked", *cures):
            call(**SIDES | {name: form}, label_groups=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rows_that_are_not_finite_are_found_also_where_their_sum_is_not(dtype):
    largest = torch.finfo(dtype).max
    rows = torch.full((70_000, 2), largest, dtype=dtype)  # more than are looked at at once
    assert non_finite_rows(rows).tolist() == []
    rows[[3, 69_999], 1] = torch.tensor([torch.inf, torch.nan], dtype=dtype)
    rows[5] = -torch.inf
    assert non_finite_rows(rows).tolist() == [3, 5, 69_999]
