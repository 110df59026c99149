"""Labels are kept as they were given, and numbered when the set is whole; see `functional/_labels.py`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewshot_callbacks import Share, nearest
from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional._labels import (
    LabelFormsError,
    Labels,
    as_labels,
    encode,
    encode_ids,
    join,
)
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments
from fewshot_callbacks.metrics import DiscriminantRatio, EmbeddingStore, RetrievalEvaluation
from fewshot_callbacks.metrics._label_states import labels_from_json, labels_to_json
from tests.cases import examples
from tests.messages import missing_facts, refused
from tests.other_device import OtherDevice, on_other
from tests.thread_processes import in_threads

INTEGERS = st.integers(-(2**63), 2**63 - 1)
# Without what UTF-8 cannot hold, which is tested below.
WORDS = st.text(max_size=3)
SETS = st.lists(st.booleans(), min_size=4, max_size=4)


def labels_of(entries):
    if entries and isinstance(entries[0], list):
        return as_labels(torch.tensor(entries), "labels", "test", sets=True)
    return as_labels(entries, "labels", "test")


KINDS = st.sampled_from([INTEGERS, WORDS, SETS])


@settings(max_examples=examples(60), deadline=None)
@given(KINDS.flatmap(lambda kind: st.lists(st.lists(kind, max_size=6), min_size=1, max_size=3)))
def test_processes_agree_on_the_codes_that_one_process_finds(parts):
    everything = labels_of([entry for part in parts for entry in part])
    [expected], names = encode("test", {"labels": everything})
    found = in_threads(len(parts), lambda process: encode("test", {"labels": labels_of(parts[process.rank])}, process))
    assert torch.equal(torch.cat([codes for [codes], _ in found]), expected)
    assert {of_process for _, of_process in found} == {names}
    if names is not None:
        assert list(names) == sorted(set(everything.tolist()))
        assert [names[code] for code in expected.tolist()] == everything.tolist()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([INTEGERS, WORDS]).flatmap(
        lambda kind: st.lists(st.tuples(st.lists(kind, max_size=4), st.lists(kind, max_size=4)), min_size=1, max_size=3)
    )
)
def test_ids_of_processes_are_equal_where_they_were(parts):
    def work(process):
        queries, items = parts[process.rank]
        return encode_ids("test", {"query_ids": labels_of(queries), "gallery_ids": labels_of(items)}, process)

    given_ids = [entry for part in parts for side in part for entry in side]
    found = [code for part in in_threads(len(parts), work) for side in part for code in side.tolist()]
    assert [[one == other for other in found] for one in found] == [
        [one == other for other in given_ids] for one in given_ids
    ]


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([WORDS, SETS]).flatmap(lambda kind: st.lists(st.lists(kind, min_size=1, max_size=4), min_size=1))
)
def test_what_a_metric_keeps_as_json_is_what_it_was_given(batches):
    given_labels = [labels_of(batch) for batch in batches]
    found = labels_from_json(torch.cat([labels_to_json(labels) for labels in given_labels]))
    assert [part.tolist() for part in found] == [part.tolist() for part in given_labels]
    assert [part.form for part in found] == [part.form for part in given_labels]
    assert join("test", found).tolist() == join("test", given_labels).tolist()


# NumPy's arrays of words drop a zero at the end; a file name may hold a surrogate; a word may look like a set of labels.
ODD = [("a\0", "a"), ("\udc80", "a"), ("\x002 0", "\x002 1"), ("a\n", "a"), ("[1, 2]", "(1, 2)"), ("1", "01")]


@pytest.mark.parametrize("pair", ODD)
def test_odd_words_are_two_words(pair):
    report = evaluate_retrieval(torch.eye(4), [*pair, *pair], label_groups=None, metrics="mAP")
    assert report.label_names == tuple(sorted(pair))
    assert labels_from_json(labels_to_json(labels_of([*pair])))[0].tolist() == [*pair]


class Name(str):
    """A word that equals no other."""

    def __eq__(self, other):
        return False

    __hash__ = str.__hash__


def test_a_subclass_of_words_is_the_word():
    assert [*map(type, labels_of([Name("a"), np.str_("a")]).tolist())] == [str, str]
    assert labels_of([Name("a"), Name("a")]).codes.tolist() == [0, 0]


def test_processes_exchange_distinct_words_once():
    def work(process):
        words = [f"class {number % 3}" for number in range(1000)]
        sent, gather = [], process._gather
        process._gather = lambda mine: sent.append(mine) or gather(mine)
        encode("test", {"labels": labels_of(words), "gallery_labels": labels_of(words[:1])}, process)
        return sent

    for [(forms, words)] in in_threads(2, work):
        assert forms == {"labels": "strings", "gallery_labels": "strings"}
        assert words == ["class 0", "class 1", "class 2"]


def test_processes_exchange_digests_of_ids_and_not_their_words():
    def work(process):
        paths = [f"images/a long folder/{number % 3}.jpg" for number in range(1000)]
        sent, gather = [], process._gather
        process._gather = lambda mine: sent.append(mine) or gather(mine)
        encode_ids("test", {"ids": labels_of(paths)}, process)
        return sent

    for forms, digests in in_threads(2, work):
        assert forms == {"ids": "strings"}
        assert digests.shape == (3, 2)


def test_ids_that_are_words_in_one_process_alone_are_refused():
    def work(process):
        ids = (["a.png", "b.png"], [0, 1])[process.rank]
        rows = torch.eye(2)
        return nearest(rows, gallery=rows, query_ids=ids, gallery_ids=ids, share=Share(process))

    for error in in_threads(2, work):
        facts = ("gallery_ids in process 0", "query_ids in process 1", "list(map(str, map(int, query_ids)))")
        assert not missing_facts(str(error), facts), error


# ---------------------------------------------------------------------------------------------------------- one message

TARGETS = torch.tensor([[1, 0], [0, 1]])
MIXED = [
    (["a", "b"], [0, 1], ("strings", "integers")),
    ([0, 1], ["a", "b"], ("integers", "strings")),
    (TARGETS, ["a", "b"], ("zeros and ones", "2 labels", "strings")),
    ([0, 1], TARGETS, ("integers", "zeros and ones", "2 labels")),
    (TARGETS, TARGETS.tile(2), ("zeros and ones", "2 labels", "4 labels")),
]


def in_one_call(first, second):
    evaluate_retrieval(torch.eye(2), first, torch.eye(2), second)


def in_two_processes(first, second):
    def work(process):
        return encode(
            "test", {"labels": as_labels((first, second)[process.rank], "labels", "test", sets=True)}, process
        )

    raise in_threads(2, work)[1]


def in_two_batches(first, second):
    metric = RetrievalEvaluation()
    metric.update(torch.eye(2), first)
    metric.update(torch.eye(2), second)


def in_two_batches_of_a_store(first, second):
    store = EmbeddingStore()
    store.append(torch.eye(2), first)
    store.append(torch.eye(2), second)


def in_joined_states(first, second):
    metric, other = RetrievalEvaluation(), RetrievalEvaluation()
    metric.update(torch.eye(2), first)
    other.update(torch.eye(2), second)
    for name in metric._defaults:  # as torchmetrics joins the states of processes
        parts = [*getattr(metric, name), *getattr(other, name)]
        setattr(metric, name, torch.cat(parts) if parts else [])
    metric.compute()


@pytest.mark.parametrize(
    "call", [in_one_call, in_two_processes, in_two_batches, in_two_batches_of_a_store, in_joined_states]
)
@pytest.mark.parametrize(("first", "second", "forms"), MIXED)
def test_mixed_forms_are_both_named_before_the_cure(call, first, second, forms):
    with pytest.raises(LabelFormsError) as error:
        call(first, second)
    held, _, cure = str(error.value).partition(". ")
    assert "labels" in held
    assert not missing_facts(held, forms), error
    assert not missing_facts(cure, ("list(map(str",)), error


@pytest.mark.parametrize("name", ["ids", "groups"])
def test_ids_and_groups_of_another_form_are_refused_at_once(name):
    metric, store = RetrievalEvaluation(), EmbeddingStore()
    for add in (metric.update, store.append):
        add(torch.eye(2), [0, 1], **{name: ["a", "b"]})
        with refused(LabelFormsError, name, "batch", f"list(map(str, map(int, {name})))"):
            add(torch.eye(2), [0, 1], **{name: [0, 1]})
    assert len(store) == 2


def test_an_empty_batch_has_no_form():
    for labels in (["a", "b"], [0, 1], TARGETS):
        metric, store = RetrievalEvaluation(), EmbeddingStore()
        for add in (metric.update, store.append):
            add(torch.empty(0, 2), [], ids=[])
            add(torch.eye(2), labels, ids=["x", "y"])
        assert len(store.shard().labels) == 2


# ------------------------------------------------------------------------------------------------------ states of metrics


def test_integers_are_a_state_of_integers_and_anything_else_is_json():
    given_labels = {"integers": [3, 1], "strings": ["owl", "heron"], "zeros and ones": TARGETS}
    for form, labels in given_labels.items():
        metric = RetrievalEvaluation()
        metric.update(torch.eye(2), labels, ids=[7, 8], groups=["a", "b"])
        is_integers = form == "integers"
        assert [state.dtype for state in metric.labels] == [torch.int64] * is_integers
        assert [state.dtype for state in metric.labels_json] == [torch.uint8] * (not is_integers)
        assert metric.ids[0].tolist() == [7, 8]
        assert bytes(metric.groups_json[0].tolist()) == b'{"columns": null, "labels": ["a", "b"]}\n'


def test_a_metric_keeps_no_memory_of_its_caller():
    labels, ids = torch.tensor([0, 1, 0]), torch.tensor([5, 6, 7])
    metric = RetrievalEvaluation()
    metric.update(torch.eye(3), labels, ids=ids)
    labels.zero_()
    ids.zero_()
    assert metric.labels[0].tolist() == [0, 1, 0]
    assert metric.ids[0].tolist() == [5, 6, 7]


# --------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("on_device", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("words", [False, True])
def test_labels_and_embeddings_may_be_on_two_devices(on_device, words):
    generator = torch.Generator().manual_seed(0)
    embeddings, labels = torch.randn(12, 3, generator=generator), torch.arange(12) % 3
    names = np.array(["owl", "heron", "wren"])[labels.numpy()].tolist()
    expected = ClassMoments.of(embeddings, labels).discriminant_ratio(skip_singletons=True)
    with OtherDevice():
        rows = on_other(embeddings) if on_device[0] else embeddings
        read = names if words else on_other(labels) if on_device[1] else labels
        halves = [ClassMoments.of(rows[half], read[half]) for half in (slice(7), slice(7, None))]
        value = halves[0].merge(halves[1]).discriminant_ratio(skip_singletons=True)
        assert value.device == rows.device
        torch.testing.assert_close(value.cpu(), expected)

        metric = DiscriminantRatio(skip_singletons=True)
        for half in (slice(7), slice(7, None)):
            metric.update(rows[half], read[half])
        torch.testing.assert_close(metric.compute().cpu(), expected.float())
        assert [*metric.within_scatter()] == (sorted(set(names)) if words else [0, 1, 2])

        evaluation = RetrievalEvaluation(metrics="mAP")
        for half in (slice(7), slice(7, None)):
            evaluation.update(rows[half], read[half])
        report = evaluate_retrieval(embeddings, labels, metrics="mAP")
        assert float(evaluation.compute()["mAP"]) == pytest.approx(report.mAP)

        store = EmbeddingStore()
        store.append(rows, read)
        shard = store.shard()
        assert {shard.embeddings.device.type, shard.places.device.type} == {"cpu"}
        assert shard.labels.tolist() == (names if words else labels.tolist())


def test_labels_are_indexed_from_any_device():
    mask = torch.tensor([True, False, True])
    with OtherDevice():
        for labels in (Labels(torch.tensor([7, 8, 9])), Labels(on_other(torch.tensor([7, 8, 9])))):
            assert labels[mask].tolist() == labels[on_other(mask)].tolist() == [7, 9]
        assert labels_of(["a", "b", "c"])[on_other(mask)].tolist() == ["a", "c"]


# ---------------------------------------------------------------------------------------------------------------- Labels


def test_labels_are_listed_counted_and_arrays():
    for given_labels in ([3, 1], ["owl", "heron"]):
        labels = labels_of(given_labels)
        assert len(labels) == 2
        assert labels.tolist() == given_labels
        assert np.asarray(labels).tolist() == given_labels
    sets = np.asarray(labels_of([[True, True], [False, False]]))
    assert sets.shape == (2,)
    assert sets.tolist() == [(0, 1), ()]
    integers = labels_of([3, 1])
    np.asarray(integers)[:] = 0
    assert integers.tolist() == [3, 1]


def test_codes_of_integers_are_the_integers_and_wait_for_nothing():
    values = torch.tensor([7, -1])
    assert Labels(values).codes is values
    [codes], names = encode("test", {"labels": Labels(values)})
    assert codes is values
    assert names is None


def test_different_targets_have_different_codes():
    """Also targets with equal sums of their bits, in float32 and float64."""
    pairs = [[1.0, 2.0], [8.0, 1.0], [2.0, 1.0], [1.0, 8.0], [-1.0, 2.0], [1.0, -2.0], [0.5, 4.0]]
    for dtype in (torch.float32, torch.float64):
        targets = Labels(torch.tensor([*pairs, *pairs], dtype=dtype).double())
        codes = join("call", [targets]).codes.tolist()
        assert codes[: len(pairs)] == codes[len(pairs) :]
        assert len(set(codes)) == len(pairs)
