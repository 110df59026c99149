"""The VarianceRatio metric: any cut into batches, copies, and several processes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import MetricCollection

from fewshot_callbacks.functional import ClassMoments, variance_ratio, variance_ratio_of_set
from fewshot_callbacks.functional import discriminant_ratio as function_of_j
from fewshot_callbacks.metrics import DiscriminantRatio, VarianceRatio
from tests.metrics import gloo_jobs
from tests.metrics.cases import cut_sets, fill, made


@settings(max_examples=30, deadline=None)
@given(cut_sets(), st.booleans())
def test_equals_the_function_over_any_cut(case, normalize):
    embeddings, labels, cuts = case
    metric = fill(VarianceRatio(normalize=normalize), embeddings, labels, cuts)
    expected = variance_ratio(embeddings.double(), labels, normalize=normalize)
    torch.testing.assert_close(metric.compute(), expected.float(), rtol=1e-5, atol=1e-5, equal_nan=True)
    of_set = variance_ratio_of_set(embeddings.double(), labels, normalize=normalize)
    assert tuple(metric.interval()) == pytest.approx(tuple(of_set.interval), rel=1e-4, abs=1e-5, nan_ok=True)


def test_in_a_collection_each_batch_is_added_once_for_both(monkeypatch):
    embeddings, labels = made()
    both = MetricCollection([DiscriminantRatio(), VarianceRatio()])
    both.update(embeddings[:10], labels[:10])
    calls, of = [], ClassMoments.of
    monkeypatch.setattr(ClassMoments, "of", staticmethod(lambda *args: calls.append(1) or of(*args)))
    both.update(embeddings[10:25], labels[10:25])
    both.update(embeddings[25:], labels[25:])
    assert len(calls) == 2
    found = both.compute()
    torch.testing.assert_close(found["DiscriminantRatio"], function_of_j(embeddings, labels), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["VarianceRatio"], variance_ratio(embeddings, labels), rtol=1e-5, atol=0)


def test_a_confidence_of_the_users_own():
    assert all(map(math.isnan, VarianceRatio().interval()))
    metric = fill(VarianceRatio(), *made(), [(0, 40)])
    assert tuple(metric.interval(0.5)) == pytest.approx(tuple(variance_ratio_of_set(*made(), confidence=0.5).interval))


@pytest.mark.parametrize("name", gloo_jobs.SHARDS)
def test_every_process_gets_the_value_and_the_interval_of_one(on_ranks, name):
    expected = variance_ratio_of_set(*gloo_jobs.items(24 if name == "even" else 23))
    for answers in on_ranks:
        value, interval = answers["variance_ratio"][name]
        assert float(value) == pytest.approx(expected.value, rel=1e-6)
        assert interval == pytest.approx(tuple(expected.interval), rel=1e-6)
