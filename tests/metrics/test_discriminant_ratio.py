"""The metrics of moments, DiscriminantRatio and VarianceRatio: any cut into batches, copies, and several processes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import MetricCollection

from fewshot_callbacks.functional import ClassMoments, variance_ratio, variance_ratio_of_set
from fewshot_callbacks.functional import discriminant_ratio as functional
from fewshot_callbacks.metrics import DiscriminantRatio, VarianceRatio
from tests.metrics import gloo_jobs
from tests.metrics.cases import COPIES, WRONG_BATCHES, cut_sets, fill, made


@settings(max_examples=36, deadline=None)
@given(cut_sets(), st.booleans(), st.booleans())
def test_equals_the_function_over_any_cut(case, normalize, skip_singletons):
    embeddings, labels, cuts = case
    options = {"normalize": normalize, "skip_singletons": skip_singletons}
    metric = fill(DiscriminantRatio(**options), embeddings, labels, cuts)
    expected = functional(embeddings.double(), labels, **options).float()
    # one class is not separated at all: what is left of 0 is rounding
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-5, atol=1e-9, equal_nan=True)


@settings(max_examples=18, deadline=None)
@given(cut_sets())
def test_forward_gives_the_batch_and_keeps_the_whole(case):
    embeddings, labels, cuts = case
    metric = DiscriminantRatio()
    for start, stop in cuts:
        of_batch = metric(embeddings[start:stop], labels[start:stop])
        expected = functional(embeddings[start:stop].double(), labels[start:stop]).float()
        torch.testing.assert_close(of_batch, expected, rtol=1e-5, atol=1e-9, equal_nan=True)
    expected = functional(embeddings.double(), labels).float()
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-5, atol=1e-9, equal_nan=True)


@settings(max_examples=27, deadline=None)
@given(cut_sets(), cut_sets())
def test_merging_two_metrics_equals_one(case, other_case):
    # the labels of both reach from one end of int64 to the other: their differences overflow
    (embeddings, labels, cuts), (others, other_labels, other_cuts) = case, other_case
    metric = fill(DiscriminantRatio(), embeddings, labels, cuts)
    metric.merge_state(fill(DiscriminantRatio(), others, other_labels, other_cuts))
    expected = ClassMoments.of(torch.cat([embeddings, others]), torch.cat([labels, other_labels]))
    torch.testing.assert_close(
        metric.compute(), expected.discriminant_ratio().float(), rtol=1e-5, atol=1e-9, equal_nan=True
    )


def test_state_grows_with_classes_not_with_items():
    metric = DiscriminantRatio()
    for _ in range(5):
        metric.update(*made(200))
    state = metric.metric_state
    assert {name: [tuple(part.shape) for part in parts] for name, parts in state.items()} == {
        "class_labels": [(4,)],
        "counts": [(4,)],
        "origins": [(4, 5)],
        "offsets": [(4, 5)],
        "spread": [(4,)],
        "words": [],  # labels are integers
    }
    assert state["offsets"][0].dtype == torch.float64


def test_within_scatter_is_the_mean_squared_distance_to_the_class_mean():
    embeddings, labels = made()
    metric = fill(DiscriminantRatio(), embeddings, labels - 9, [(0, 13), (13, 40)])
    found = metric.within_scatter()
    assert list(found) == [-9, -8, -7, -6]
    for label in range(4):
        members = embeddings[labels == label].double()
        expected = (members - members.mean(0)).square().sum(1).mean()
        assert found[label - 9] == pytest.approx(float(expected), rel=1e-9)
    assert DiscriminantRatio().within_scatter() == {}


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_goes_on_from_there(copied):
    embeddings, labels = made()
    metric = copied(fill(DiscriminantRatio(normalize=True), embeddings, labels, [(0, 20)]))
    fill(metric, embeddings, labels, [(20, 40)])
    expected = functional(embeddings, labels, normalize=True)
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-5, atol=0)
    metric.reset()
    assert metric.within_scatter() == {}


def test_a_saved_state_goes_on_from_there():
    embeddings, labels = made()
    first, second = DiscriminantRatio(), DiscriminantRatio()
    for metric in (first, second):
        metric.persistent(True)
    fill(first, embeddings, labels, [(0, 20)])
    second.load_state_dict(first.state_dict())
    fill(second, embeddings, labels, [(20, 40)])
    torch.testing.assert_close(second.compute(), functional(embeddings, labels), rtol=1e-5, atol=0)


def test_state_moves_with_the_metric():
    metric = fill(DiscriminantRatio(), *made(), [(0, 40)]).to("meta")
    assert {part.device.type for parts in metric.metric_state.values() for part in parts} == {"meta"}


def test_compute_before_update_is_nan_and_says_so():
    with pytest.warns(UserWarning, match="called before the ``update`` method"):
        assert DiscriminantRatio().compute().isnan()
    metric = DiscriminantRatio()
    metric.update(torch.empty(0, 5), torch.empty(0, dtype=torch.long))
    assert metric.compute().isnan()
    metric.update(*made())  # an empty batch fixes no dimension
    assert metric.compute() > 0


def test_holds_no_graph_and_no_view():
    embeddings, labels = made()
    metric = DiscriminantRatio()
    metric.update(embeddings.requires_grad_(), labels)
    expected = metric.compute()
    with torch.no_grad():
        embeddings.fill_(0)
        labels.fill_(0)
    metric.update(torch.empty(0, 5), torch.empty(0, dtype=torch.long))  # forgets the cached value
    assert torch.equal(metric.compute(), expected)
    assert not any(part.requires_grad for parts in metric.metric_state.values() for part in parts)


MATRIX = (torch.ones(4, 2), torch.ones(4, 3).long(), r".*labels has shape \(4, 3\). Pass labels.argmax")


@pytest.mark.parametrize(("embeddings", "labels", "message"), [*WRONG_BATCHES, MATRIX])
def test_refusals_leave_the_state_alone(embeddings, labels, message):
    metric = fill(DiscriminantRatio(), *made(), [(0, 40)])
    expected = metric.within_scatter()
    with pytest.raises(ValueError, match=f"DiscriminantRatio{message}"):
        metric.update(embeddings, labels)
    assert metric.within_scatter() == expected


@settings(max_examples=30, deadline=None)
@given(cut_sets(), st.booleans())
def test_the_variance_ratio_equals_the_function_over_any_cut(case, normalize):
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
    torch.testing.assert_close(found["DiscriminantRatio"], functional(embeddings, labels), rtol=1e-5, atol=0)
    torch.testing.assert_close(found["VarianceRatio"], variance_ratio(embeddings, labels), rtol=1e-5, atol=0)


def test_a_confidence_of_the_users_own():
    assert all(map(math.isnan, VarianceRatio().interval()))
    metric = fill(VarianceRatio(), *made(), [(0, 40)])
    assert tuple(metric.interval(0.5)) == pytest.approx(tuple(variance_ratio_of_set(*made(), confidence=0.5).interval))


class TestSeveralProcesses:
    @pytest.mark.parametrize("name", gloo_jobs.SHARDS)
    def test_every_rank_gets_the_value_of_one_process(self, on_ranks, name):
        embeddings, labels = gloo_jobs.items(24 if name == "even" else 23)
        alone = fill(DiscriminantRatio(), embeddings, labels, [(0, len(labels))])
        for answers in on_ranks:
            value, scatter = answers["discriminant_ratio"][name]
            torch.testing.assert_close(value, alone.compute(), rtol=1e-6, atol=0)
            assert scatter == pytest.approx(alone.within_scatter(), rel=1e-9)

    def test_each_process_goes_on_with_its_own_state(self, on_ranks):
        embeddings, labels = gloo_jobs.items(23)
        count = len(on_ranks)
        more = torch.arange(count).float().repeat_interleave(2)[:, None].expand(2 * count, 5)
        expected = functional(torch.cat([embeddings, more]), torch.cat([labels, torch.tensor([7, 8] * count)]))
        for answers in on_ranks:
            torch.testing.assert_close(answers["discriminant_ratio"]["continued"], expected, rtol=1e-5, atol=0)

    def test_nothing_anywhere_is_nan(self, on_ranks):
        assert all(math.isnan(answers["discriminant_ratio"]["nothing"]) for answers in on_ranks)

    @pytest.mark.parametrize("name", gloo_jobs.SHARDS)
    def test_every_process_gets_the_value_and_the_interval_of_one(self, on_ranks, name):
        expected = variance_ratio_of_set(*gloo_jobs.items(24 if name == "even" else 23))
        for answers in on_ranks:
            value, interval = answers["variance_ratio"][name]
            assert float(value) == pytest.approx(expected.value, rel=1e-6)
            assert interval == pytest.approx(tuple(expected.interval), rel=1e-6)
