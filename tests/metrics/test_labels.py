"""Metrics of labels as strings: batches, copies and processes that never saw the same words agree on their codes."""

import numpy as np
import pytest
import torch
from torchmetrics import MetricCollection

from fewshot_callbacks.functional import discriminant_ratio, evaluate_retrieval
from fewshot_callbacks.functional._labels import LabelFormsError
from fewshot_callbacks.metrics import DiscriminantRatio, EmbeddingStore, RetrievalEvaluation, VarianceRatio
from tests.messages import missing_facts, refused
from tests.metrics import process_jobs
from tests.metrics.cases import COPIES

SETTINGS = {"label_groups": 2}


def items_with_words(items=30, classes=5):
    generator = torch.Generator().manual_seed(items)
    number = torch.arange(items) % classes
    embeddings = torch.randn(classes, 6, generator=generator)[number] + torch.randn(items, 6, generator=generator)
    return embeddings, np.array(["owl", "heron", "Ünal", "", "9"])[number]


def fill(metric, embeddings, words, sizes=(7, 1, 22)):
    for some, own in zip(embeddings.split(sizes), np.split(words, np.cumsum(sizes)[:-1]), strict=True):
        metric.update(some, own.tolist())
    return metric


def test_the_evaluation_of_batches_is_that_of_all_words_and_a_reset_forgets_them():
    embeddings, words = items_with_words()
    metric = COPIES["pickle"](fill(RetrievalEvaluation(**SETTINGS), embeddings[:20], words[:20], (7, 1, 12)))
    values = fill(metric, embeddings[20:], words[20:], (10,)).compute()
    expected = evaluate_retrieval(embeddings, words, **SETTINGS)
    assert metric.report == expected
    assert metric.report.label_names == expected.label_names
    assert values["mAP"] == expected.mAP
    assert metric.report.per_class()["mAP"].keys() == set(words.tolist())
    metric.reset()
    metric.update(embeddings, torch.arange(30) % 5)
    metric.compute()
    assert metric.report.label_names is None


def test_labels_come_as_arrays_lists_or_columns():
    embeddings, words = items_with_words()
    metric = RetrievalEvaluation(**SETTINGS)
    metric.update(embeddings.numpy(), words[:, None], ids=np.arange(30))
    metric.update(embeddings[:3].tolist(), words[:3], ids=[0, 1, 2])
    metric.compute()
    assert metric.report == evaluate_retrieval(embeddings, words, **SETTINGS)


def test_ratios_and_the_scatter_of_each_word():
    embeddings, words = items_with_words()
    names, numbers = np.unique(words, return_inverse=True)
    metrics = fill(MetricCollection([DiscriminantRatio(), VarianceRatio()]), embeddings, words)
    found = metrics["DiscriminantRatio"]
    expected = discriminant_ratio(embeddings, torch.tensor(numbers)).item()
    assert found.compute().item() == pytest.approx(expected, rel=1e-6)
    alone = DiscriminantRatio()
    alone.update(embeddings, numbers)
    expected = {names[number]: scatter for number, scatter in alone.within_scatter().items()}
    assert found.within_scatter() == pytest.approx(expected)


@pytest.mark.parametrize("metric", [RetrievalEvaluation, DiscriminantRatio])
def test_words_beside_integers_and_another_dimension_are_refused(metric):
    embeddings, words = items_with_words()
    call, numbers, messages = f"{metric.__name__}.update", torch.arange(30), []
    for first, second in ((words, numbers), (numbers, words)):
        held = metric()
        held.update(embeddings, first)
        with pytest.raises(LabelFormsError) as caught:
            held.update(embeddings, second)
        messages.append(str(caught.value))
        assert missing_facts(messages[-1], (call, "labels", "strings", "integers")) == []
    assert messages[0] != messages[1]  # which form came first is a fact, too
    with refused(ValueError, call, "dimension", 6, 5):
        held.update(embeddings[:, :5], numbers)


def test_the_store_keeps_words():
    embeddings, words = items_with_words()
    store = EmbeddingStore()
    store.append(embeddings[:10], words[:10].tolist())
    store.append(embeddings[10:].numpy(), words[10:])
    shard = store.shard()
    report = evaluate_retrieval(shard.embeddings, shard.labels, **SETTINGS)
    assert report == evaluate_retrieval(embeddings, words, **SETTINGS)
    with refused(LabelFormsError, "EmbeddingStore.append", "labels", "strings", "integers"):
        store.append(embeddings, torch.arange(30))


def test_words_that_only_one_process_has_reach_the_others(on_ranks):
    embeddings, labels = process_jobs.items()
    expected = evaluate_retrieval(embeddings, process_jobs.words(labels), **process_jobs.SETTINGS)
    for answers in on_ranks:
        report, scatter = answers["words_as_labels"]["first empty"]
        assert report == expected
        assert report.label_names == expected.label_names
        assert scatter.keys() == set(process_jobs.words(labels))


def test_strings_in_one_process_and_integers_in_another_are_refused(on_ranks):
    forms = ("labels", "strings", "integers")
    for answers in on_ranks:
        messages = answers["words_as_labels"]
        assert missing_facts(messages["mixed"], ("RetrievalEvaluation.compute", *forms)) == []
        assert missing_facts(messages["mixed scatter"], ("DiscriminantRatio.within_scatter", *forms)) == []
