"""Labels, ids and groups as words, columns, lists and arrays: the results are those of the numbers behind them.

And inputs that no function may take for something else.
"""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.data import EpisodicBatchSampler
from fewshot_callbacks.functional import (
    ClassMoments,
    Share,
    class_subset,
    clustered_mean_interval,
    compare_reports,
    discriminant_ratio,
    evaluate_retrieval,
    grouped_recall,
    label_groups,
    paired_difference_interval,
    sample_episodes,
    split_episode,
    training_dynamics,
    variance_ratio,
    variance_ratio_of_set,
)
from fewshot_callbacks.functional._reading import as_labels, non_finite_rows
from fewshot_callbacks.protonet import SoftmaxHead, SupportClassifier
from fewshot_callbacks.protonet.evaluation import evaluate_episodes
from tests.thread_processes import in_threads

WORDS = np.array(["heron", "owl", "", "Ünal", "owl 2", "10", "9"])
"""In no order; of one letter more, empty, and looking like numbers."""


class Categorical:
    """What pandas has: no array, but made into one by NumPy."""

    def __init__(self, words):
        self.words = list(words)

    def __len__(self):
        return len(self.words)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.words, dtype=object)


FORMS = {
    "list": list,
    "tuple": tuple,
    "list of str": lambda words: words.tolist(),
    "array": np.array,
    "array of bytes": lambda words: np.char.encode(words, "utf-8"),
    "array of objects": lambda words: words.astype(object),
    "column": lambda words: words[:, None],
    "list of lists": lambda words: words[:, None].tolist(),
    "categorical": Categorical,
}


def made(items=36, classes=6, seed=0):
    """Embeddings, words, and the words numbered in their order."""
    generator = np.random.default_rng(seed)
    number = generator.permutation(np.arange(items) % classes)
    embeddings = generator.normal(size=(classes, 8))[number] + generator.normal(size=(items, 8))
    words = WORDS[number]
    return embeddings, words, np.unique(words, return_inverse=True)[1]


EVERYTHING = {"label_groups": 2, "metrics": (*DEFAULT_METRICS, "map@3_min", "macro_mAP")}


@pytest.mark.parametrize("form", FORMS)
def test_words_give_the_report_of_their_numbers(form):
    embeddings, words, numbers = made()
    expected = evaluate_retrieval(embeddings, numbers, **EVERYTHING)
    report = evaluate_retrieval(embeddings, FORMS[form](words), **EVERYTHING)
    book = np.unique(words).tolist()
    assert report.label_names == tuple(book)
    assert expected.label_names is None
    named = {
        name: {book[label]: value for label, value in values.items()} for name, values in expected.per_class().items()
    }
    assert report == expected
    assert report.per_class() == named
    assert [report.label_names[code] for code in report.query_labels.tolist()] == words.tolist()
    shown = json.loads(json.dumps(report.to_dict()))
    assert shown["label_names"] == book
    assert expected.to_dict()["label_names"] is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(max_size=3), min_size=4, max_size=20), st.sampled_from(["cosine", "hamming"]), st.data())
def test_random_words(words, similarity, data):
    words = [*words, *words]  # so that each has a match
    seed = data.draw(st.integers(0, 5))
    embeddings = np.random.default_rng(seed).normal(size=(len(words), 4))
    embeddings = np.sign(embeddings) if similarity == "hamming" else embeddings
    numbers = [sorted(set(words)).index(word) for word in words]
    options = {"label_groups": 2, "similarity": similarity}
    report = evaluate_retrieval(embeddings, words, **options)
    assert report == evaluate_retrieval(embeddings, numbers, **options)
    assert report.label_names == tuple(sorted(set(words)))


@pytest.mark.parametrize("similarity", ["cosine", "hamming"])
def test_queries_and_gallery_ids_and_groups_as_words(similarity):
    embeddings, words, numbers = made(items=49, classes=7)
    embeddings = np.sign(embeddings) if similarity == "hamming" else embeddings
    known = numbers[:20] < 5  # words that only the gallery has
    ids, groups = np.arange(49) % 31, np.arange(49) % 11
    options = {"label_groups": 2, "similarity": similarity, "gallery": embeddings[20:]}

    def evaluated(labels, of_ids, of_groups):
        return evaluate_retrieval(
            embeddings[:20][known], labels[:20][known], gallery_labels=labels[20:],
            query_ids=of_ids[:20][known], gallery_ids=of_ids[20:],
            query_groups=of_groups[:20][known], gallery_groups=of_groups[20:], **options,
        )  # fmt: skip

    report = evaluated(words, np.char.add("image ", ids.astype(str)), np.char.add("video ", groups.astype(str)))
    assert report == evaluated(numbers, ids, groups)
    assert report != evaluated(numbers, ids, groups * 0 + np.arange(49))  # groups count here


@pytest.mark.parametrize(
    "form",
    [
        list,
        lambda embeddings: list(map(torch.tensor, embeddings)),
        lambda embeddings: embeddings.tolist(),
        lambda embeddings: embeddings.astype(object),
        tuple,
    ],
)
def test_embeddings_as_lists_of_rows(form):
    embeddings, _, numbers = made()
    expected = evaluate_retrieval(embeddings, numbers, label_groups=2)
    found = evaluate_retrieval(form(embeddings), numbers.tolist(), label_groups=2)
    assert found.mAP == pytest.approx(expected.mAP, abs=1e-6)  # a list of numbers is float32


@pytest.mark.parametrize("count", [2, 3])
def test_processes_agree_on_the_numbers_of_words(count):
    embeddings, words, _ = made()
    embeddings = torch.tensor(embeddings)
    expected = evaluate_retrieval(embeddings, words, **EVERYTHING)
    mine = [np.arange(36)[words == words[0]], np.arange(36)[words != words[0]], np.arange(0)]  # no word is in two

    def work(process):
        own = mine[process.rank]
        return evaluate_retrieval(
            embeddings[own], words[own].tolist(), share=Share(process, torch.tensor(own)), **EVERYTHING
        )

    for report in in_threads(count, work):
        assert report == expected
        assert report.label_names == expected.label_names
        assert report.query_labels.tolist() == expected.query_labels.tolist()


def test_processes_of_which_one_has_numbers_are_refused_everywhere():
    embeddings, words, numbers = made()
    embeddings = torch.tensor(embeddings)

    def work(process):
        own = slice(process.rank * 18, process.rank * 18 + 18)
        labels = words[own] if process.rank else numbers[own]
        return evaluate_retrieval(embeddings[own], labels, label_groups=None, share=Share(process))

    for error in in_threads(2, work):
        assert "labels in process 0 are integers, labels in process 1 words. Pass both in the same form" in str(error)


# ------------------------------------------------------------------------------------------------------ what is refused


def evaluated(labels, **more):
    return evaluate_retrieval(made()[0], labels, label_groups=None, **more)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([*made()[1][:35], None], r"1 of 36 labels is missing, the first \(None\) at index 35"),
        (np.array([*made()[1][:34], np.nan, None], object), r"2 of 36 labels are missing, the first \(nan\) at index 34"),
        ([*made()[1][:35], 3], r"labels mix words and integers: '.*' at index 0, 3 at index 35"),
        ([("a", 1)] * 36, "labels hold a tuple at index 0|one label for each item"),
        (np.array([2.5] * 36, object), r"labels hold a float at index 0"),
        (np.array([b"\xff"] * 36), r"labels are bytes that are not UTF-8.*\.decode"),
        ("heron", r"labels is the single word 'heron'"),
        ({"heron": 1}, r"labels is a dict"),
        (2 * np.eye(36, 6, dtype=int), r"6 entries are neither 0 nor 1"),
        (np.char.add(made()[1][:, None], ["a", "b"]), r"one label for each item; labels has shape \(36, 2\)"),
        (made()[1][:7], r"36 embeddings, but 7 labels"),
    ],
)  # fmt: skip
def test_what_is_no_label_is_refused(labels, message):
    with pytest.raises(ValueError, match=rf"^evaluate_retrieval.*({message})"):
        evaluated(labels)


def test_words_beside_numbers_are_refused():
    embeddings, words, numbers = made()
    with pytest.raises(ValueError, match=r"labels are words, gallery_labels integers. Pass both in the same form"):
        evaluated(words, gallery=embeddings, gallery_labels=numbers)
    with pytest.raises(ValueError, match=r"query_ids are integers, gallery_ids words. Pass both in the same form"):
        evaluated(words, gallery=embeddings, gallery_labels=words, query_ids=numbers, gallery_ids=words)


def test_two_words_of_one_code_are_refused(monkeypatch):
    monkeypatch.setattr("fewshot_callbacks.functional._reading.word_code", len)
    with pytest.raises(ValueError, match=r"the words '9' and 'a' have the same code"):
        evaluate_retrieval(torch.eye(4), ["9", "a", "9", "a"], label_groups=None)
    with pytest.raises(ValueError, match=r"the words '.' and '.' have the same code"):
        evaluate_retrieval(torch.eye(2), ["9", "9"], torch.eye(2), ["a", "a"], label_groups=None)


def test_objects_of_integers_are_integers():
    numbers = made()[2]
    expected = evaluated(numbers)
    assert evaluated(numbers.astype(object)) == expected
    assert evaluated([torch.tensor(number) for number in numbers]) == expected
    for column in (
        numbers[:, None],
        numbers[:, None].tolist(),
        torch.tensor(numbers)[:, None],
        numbers.astype(np.uint16),
    ):
        assert evaluated(column) == expected
    found = as_labels(np.array([2**62, -(2**62)], object), "labels", "test")
    assert found.codes.tolist() == [2**62, -(2**62)]
    with pytest.raises(ValueError, match=r"labels hold integers beyond 64 bits"):
        evaluated(np.array([2**70] * 36, object))
    with pytest.raises(ValueError, match=r"labels hold integers beyond 64 bits"):
        evaluated(np.array([2**63] * 36, np.uint64))


# ------------------------------------------------------------------------------------------------------ every other function


EPISODES = sample_episodes(made()[2], ways=3, shots=1, queries=3, episodes=7)
NAMED = {
    "grouped_recall": lambda items, labels: grouped_recall(items, labels, label_groups=2, repeats=3).at[1],
    "discriminant_ratio": discriminant_ratio,
    "variance_ratio": variance_ratio,
    "moments": lambda items, labels: (
        ClassMoments.of(items[:20], labels[:20]).merge(ClassMoments.of(items[20:], labels[20:])).discriminant_ratio()
    ),
    "variance_ratio_of_set": lambda items, labels: variance_ratio_of_set(items, labels).interval,
    "clustered_mean_interval": lambda items, labels: clustered_mean_interval(items[:, 0].abs() / 9, labels),
    "paired_difference_interval": lambda items, labels: paired_difference_interval(items[:, 0] / 9, labels),
    "class_subset": lambda items, labels: class_subset(labels, 3, 2),
    "sample_episodes": lambda items, labels: sample_episodes(labels, ways=3, queries=3, episodes=7).indices.flatten(),
    "EpisodicBatchSampler": lambda items, labels: torch.tensor(
        list(EpisodicBatchSampler(labels, ways=3, shots=1, queries=3, episodes=7))
    ).flatten(),
    "evaluate_episodes": lambda items, labels: evaluate_episodes(items, labels, SoftmaxHead(), EPISODES).per_episode,
    "split_episode": lambda items, labels: torch.cat(split_episode(items, labels, shots=2), dim=1).flatten(),
    "training_dynamics": lambda items, labels: training_dynamics(items, items.sin(), labels, shots=2).alpha,
}


@pytest.mark.parametrize("name", NAMED)
def test_every_function_takes_words_and_numbers_in_any_form(name):
    embeddings, words, numbers = made()
    items, call = torch.tensor(embeddings), NAMED[name]
    expected = np.asarray(call(items, torch.tensor(numbers)))
    assert np.isfinite(expected).all()
    for labels in (words, words.tolist(), numbers, numbers.tolist()):
        np.testing.assert_allclose(np.asarray(call(items, labels)), expected, rtol=1e-9)


@pytest.mark.parametrize("function", [discriminant_ratio, variance_ratio])
def test_embeddings_of_ratios_are_lists_and_arrays_as_well(function):
    embeddings, words, numbers = made()
    expected = function(torch.tensor(embeddings), torch.tensor(numbers)[:, None]).item()
    assert function(embeddings, words).item() == pytest.approx(expected, rel=1e-12)
    assert function(embeddings.tolist(), words).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda words: grouped_recall(np.eye(5), ["a", "a", "b", "c", "d"], label_groups=2),
            r"group \d \(labels \['[a-d]', '[a-d]'\]\) has a match",
        ),
        (
            lambda words: label_groups(words, 2),
            r"label_groups: labels are words.*np.unique\(labels, return_inverse=True\)",
        ),
        (
            lambda words: EpisodicBatchSampler(words, ways=3, shots=1, queries=8, episodes=1),
            "needs 9 images per class; class '' has 6",
        ),
        (
            lambda words: EpisodicBatchSampler([0.5, 1.5] * 5, ways=2, shots=1, queries=2, episodes=1),
            "EpisodicBatchSampler needs integer labels; got torch.float32",
        ),
        (
            lambda words: split_episode(torch.eye(5), ["heron", "heron", "heron", "owl", "owl"], shots=1),
            "class 'owl' has 2 and class 'heron' has 3",
        ),
    ],
)
def test_messages_of_other_functions_hold_the_words(call, message):
    with pytest.raises(ValueError, match=message):
        call(made()[1])


def test_a_classifier_answers_in_the_words_of_its_support():
    embeddings, words, numbers = made()
    items = torch.tensor(embeddings)
    classifier = SupportClassifier(SoftmaxHead())
    expected = classifier.fit(items, torch.tensor(numbers)).predict(items)
    assert classifier.class_names is None
    assert classifier.fit(embeddings, numbers.tolist()).predict(embeddings).tolist() == expected.tolist()
    found = classifier.fit(items, words.tolist()).predict(items)
    assert classifier.class_names == tuple(np.unique(words).tolist())
    assert found == [np.unique(words)[number] for number in expected.tolist()]
    assert classifier.classes.tolist() == list(range(6))
    assert classifier.fit(items, torch.tensor(numbers)).predict(items).equal(expected)  # no words are left of before


def test_reports_of_words_are_compared_by_their_words():
    words, numbers = made()[1:]
    first, second = (evaluated(labels) for labels in (words, words.tolist()))
    assert compare_reports(first, second)["mAP"].value == 0
    others = np.char.add(words, "!")  # other words with the same numbers
    for labels in (others, numbers):
        with pytest.raises(ValueError, match=r"compare_reports: .*labels are not the same"):
            compare_reports(first, evaluated(labels))


def test_given_groups_of_words_are_those_of_their_numbers():
    numbers = torch.arange(60) % 6
    words = [["owl", "heron", "crane", "stork", "finch", "raven"][number] for number in numbers.tolist()]
    embeddings = torch.randn(6, 8)[numbers] + torch.randn(60, 8)
    names = sorted(set(words))
    places = [[names.index(word) for word in group] for group in (("owl", "crane"), ("raven", "heron", "finch"))]
    of_numbers = grouped_recall(embeddings, [names.index(word) for word in words], label_groups=places)
    of_words = grouped_recall(embeddings, words, label_groups=[["owl", "crane"], ["raven", "heron", "finch"]])
    assert of_words.at == of_numbers.at
    assert of_words.intervals == of_numbers.intervals
    with pytest.raises(ValueError, match="label_groups are integers, labels words"):
        grouped_recall(embeddings, words, label_groups=places)
    with pytest.raises(
        ValueError, match="1 of the 4 labels in label_groups are those of no query, the first is 'gull'"
    ):
        grouped_recall(
            embeddings, words, embeddings, ["gull", *words[1:]], label_groups=[["owl", "crane"], ["raven", "gull"]]
        )


# ------------------------------------------------------------------------------------------------------ values that are none

CALLS = {
    "evaluate_retrieval": lambda **given: evaluate_retrieval(label_groups=None, **given),
    "grouped_recall": lambda **given: grouped_recall(label_groups=2, **given),
}


def inputs():
    generator = np.random.default_rng(0)
    labels = np.arange(12) % 4
    sets = {"embeddings": generator.normal(size=(12, 3)), "labels": labels}
    return sets | {"gallery": generator.normal(size=(12, 3)), "gallery_labels": labels, "query_groups": labels * 0,
                   "gallery_groups": labels * 0 + 1, "query_ids": labels, "gallery_ids": labels + 20}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", inputs())
def test_masked_values_are_refused(call, name):
    given = inputs()
    given[name] = np.ma.masked_array(given[name], mask=np.zeros(given[name].shape, bool))
    expected = CALLS[call](**inputs())
    assert CALLS[call](**given) == expected  # nothing is masked
    given[name][3] = np.ma.masked
    masked = given[name][3:4].size
    with pytest.raises(
        ValueError, match=rf"^{call}: {name} is a masked array with {masked} masked values, .*filled\(0\)"
    ):
        CALLS[call](**given)
    given[name] = list(given[name])  # rows, or numbers and the constant `masked`
    with pytest.raises(ValueError, match=f"{name} is a masked array with {masked} masked values"):
        CALLS[call](**given)


def test_the_proposed_mend_works():
    given = {name: value for name, value in inputs().items() if name in ("embeddings", "labels")}
    embeddings = np.ma.masked_array(given["embeddings"], mask=np.zeros((12, 3), bool))
    embeddings[5, 1] = np.ma.masked
    with pytest.raises(ValueError, match=re.escape("keep = ~np.ma.getmaskarray(embeddings)")):
        evaluate_retrieval(embeddings, given["labels"])
    keep = ~np.ma.getmaskarray(embeddings).reshape(len(embeddings), -1).any(axis=1)
    dropped = evaluate_retrieval(embeddings.data[keep], given["labels"][keep], label_groups=None)
    assert dropped.queries == 11
    assert evaluate_retrieval(embeddings.filled(0), given["labels"], label_groups=None).queries == 12


def test_masked_targets_are_refused():
    targets = np.ma.masked_array(np.eye(3, dtype=int)[[0, 0, 1]], mask=np.eye(3, dtype=bool))
    with pytest.raises(ValueError, match=r"^evaluate_retrieval: labels is a masked array with 3 masked values"):
        evaluate_retrieval(torch.eye(3), targets)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rows_that_are_not_finite_are_found_also_where_their_sum_is_not(dtype):
    largest = torch.finfo(dtype).max
    rows = torch.full((70_000, 2), largest, dtype=dtype)  # more than are looked at at once
    assert non_finite_rows(rows).tolist() == []
    rows[[3, 69_999], 1] = torch.tensor([torch.inf, torch.nan], dtype=dtype)
    rows[5] = -torch.inf
    assert non_finite_rows(rows).tolist() == [3, 5, 69_999]
