"""Metrics of labels as words: batches, copies and processes that never saw the same words agree on their codes."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import MetricCollection

from fewshot_callbacks.functional import discriminant_ratio, evaluate_retrieval
from fewshot_callbacks.metrics import DiscriminantRatio, EmbeddingStore, RetrievalEvaluation, VarianceRatio
from tests.metrics import gloo_jobs

SETTINGS = {"label_groups": 2}


def made(items=30, classes=5):
    generator = torch.Generator().manual_seed(items)
    number = torch.arange(items) % classes
    embeddings = torch.randn(classes, 6, generator=generator)[number] + torch.randn(items, 6, generator=generator)
    return embeddings, np.array(["owl", "heron", "Ünal", "", "9"])[number]


def fill(metric, embeddings, words, sizes=(7, 1, 22)):
    for some, own in zip(embeddings.split(sizes), np.split(words, np.cumsum(sizes)[:-1]), strict=True):
        metric.update(some, own.tolist())
    return metric


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_the_evaluation_of_any_cut_is_that_of_all_words(cuts):
    embeddings, words = made()
    sizes = [*cuts, 30 - sum(cuts)] if sum(cuts) < 30 else [30]
    metric = fill(RetrievalEvaluation(**SETTINGS), embeddings, words, sizes)
    values = metric.compute()
    expected = evaluate_retrieval(embeddings, words, **SETTINGS)
    assert metric.report == expected
    assert metric.report.label_names == expected.label_names
    assert values["mAP"] == expected.mAP
    assert metric.report.per_class()["mAP"].keys() == set(words.tolist())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.clone()])
def test_a_copy_keeps_the_words_and_a_reset_forgets_them(copied):
    embeddings, words = made()
    metric = copied(fill(RetrievalEvaluation(**SETTINGS), embeddings[:20], words[:20], (8, 12)))
    fill(metric, embeddings[20:], words[20:], (10,)).compute()
    assert metric.report == evaluate_retrieval(embeddings, words, **SETTINGS)
    metric.reset()
    metric.update(embeddings, torch.arange(30) % 5)
    metric.compute()
    assert metric.report.label_names is None


def test_arrays_lists_and_columns():
    embeddings, words = made()
    expected = evaluate_retrieval(embeddings, words, **SETTINGS)
    metric = RetrievalEvaluation(**SETTINGS)
    metric.update(embeddings.numpy(), words[:, None], ids=np.arange(30))
    metric.update(embeddings[:3].tolist(), words[:3], ids=[0, 1, 2])
    metric.compute()
    assert metric.report == expected
    numbers = np.unique(words, return_inverse=True)[1]
    for ratio in (DiscriminantRatio(), VarianceRatio()):
        ratio.update(embeddings.numpy(), numbers[:, None])
        value = ratio.compute()
        ratio.reset()
        ratio.update(embeddings, torch.tensor(numbers))
        assert ratio.compute() == value


def test_ratios_and_the_scatter_of_each_word():
    embeddings, words = made()
    numbers = np.unique(words, return_inverse=True)[1]
    metrics = MetricCollection([DiscriminantRatio(), VarianceRatio()])
    fill(metrics, embeddings, words)
    assert metrics["DiscriminantRatio"].compute().item() == pytest.approx(
        discriminant_ratio(embeddings, torch.tensor(numbers)).item(), rel=1e-6
    )
    alone = DiscriminantRatio()
    alone.update(embeddings, numbers)
    expected = {np.unique(words)[number]: scatter for number, scatter in alone.within_scatter().items()}
    assert metrics["DiscriminantRatio"].within_scatter() == pytest.approx(expected)


@pytest.mark.parametrize("metric", [RetrievalEvaluation, DiscriminantRatio, VarianceRatio])
def test_words_beside_integers_and_another_dimension_are_refused(metric):
    embeddings, words = made()
    name = metric.__name__
    for first, second, kinds in ((words, torch.arange(30), "words, those of this batch integers"),
                                 (torch.arange(30), words, "integers, those of this batch words")):  # fmt: skip
        held = metric()
        held.update(embeddings, first)
        with pytest.raises(ValueError, match=f"^{name}.update: the labels so far are {kinds}. Pass the same"):
            held.update(embeddings, second)
    held = metric()
    held.update(embeddings, words)
    with pytest.raises(ValueError, match=rf"^{name}.update: the embeddings so far have dimension 6, .*batch 5"):
        held.update(embeddings[:, :5], words)


def test_the_store_keeps_codes_and_their_words():
    embeddings, words = made()
    store = EmbeddingStore()
    store.append(embeddings[:10], words[:10].tolist())
    store.append(embeddings[10:].numpy(), words[10:])
    shard = store.shard()
    expected = evaluate_retrieval(embeddings, words, **SETTINGS)
    report = evaluate_retrieval(shard.embeddings, shard.named_labels, **SETTINGS)
    assert report == expected
    with pytest.raises(ValueError, match=r"EmbeddingStore.append: the labels so far are words"):
        store.append(embeddings, torch.arange(30))


class TestSeveralProcesses:
    @pytest.mark.parametrize("name", gloo_jobs.SHARDS)
    def test_words_that_only_one_process_has(self, on_ranks, name):
        embeddings, labels = gloo_jobs.items(24 if name == "even" else 23)
        expected = evaluate_retrieval(embeddings, gloo_jobs.words(labels), **gloo_jobs.SETTINGS)
        for answers in on_ranks:
            report, scatter = answers["words_as_labels"][name]
            assert report == expected
            assert report.label_names == expected.label_names
            assert scatter.keys() == set(gloo_jobs.words(labels))

    def test_a_process_with_integers(self, on_ranks):
        for answers in on_ranks:
            assert (
                "RetrievalEvaluation.compute: some labels are words, others integers"
                in answers["words_as_labels"]["mixed"]
            )
            assert (
                "within_scatter: some labels are words, others integers" in answers["words_as_labels"]["mixed scatter"]
            )
