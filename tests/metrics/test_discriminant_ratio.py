"""The metrics of moments, DiscriminantRatio and VarianceRatio: any cut into batches, copies, and several processes."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics import MetricCollection

from fewshot_callbacks.functional import ClassMoments, variance_ratio, variance_ratio_of_set
from fewshot_callbacks.functional import discriminant_ratio as functional
from fewshot_callbacks.functional._labels import LabelFormsError
from fewshot_callbacks.metrics import DiscriminantRatio, VarianceRatio
from tests.cases import examples
from tests.messages import missing_facts, refused, warned
from tests.metrics import process_jobs
from tests.metrics.cases import COPIES, clustered_items, cut_sets, fill, reloaded


def assert_close(found, expected):
    """One class is not separated at all: what is left of 0 is rounding."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9, equal_nan=True)


@settings(max_examples=examples(25), deadline=None)
@given(cut_sets(), cut_sets(), st.booleans(), st.booleans())
def test_batches_of_any_cut_and_a_merged_metric_give_the_value_of_the_function(case, other, normalize, skip_singletons):
    """Forward gives the value of the batch, and keeps the whole; labels reach from one end of int64 to the other."""
    (embeddings, labels, cuts), options = case, {"normalize": normalize, "skip_singletons": skip_singletons}
    metric = DiscriminantRatio(**options)
    for start, stop in cuts:
        of_batch = functional(embeddings[start:stop].double(), labels[start:stop], **options).float()
        assert_close(metric(embeddings[start:stop], labels[start:stop]), of_batch)
    assert_close(metric.compute(), functional(embeddings.double(), labels, **options).float())
    merged = fill(DiscriminantRatio(**options), embeddings, labels, cuts)
    merged.merge_state(fill(DiscriminantRatio(**options), *other))
    both = torch.cat([embeddings, other[0]]).double(), torch.cat([labels, other[1]])
    assert_close(merged.compute(), functional(*both, **options).float())


@settings(max_examples=examples(15), deadline=None)
@given(cut_sets(), st.booleans())
def test_the_variance_ratio_of_batches_of_any_cut_is_the_value_of_the_function(case, normalize):
    embeddings, labels, cuts = case
    metric = fill(VarianceRatio(normalize=normalize), embeddings, labels, cuts)
    for confidence in (0.5, 0.95):
        of_set = variance_ratio_of_set(embeddings.double(), labels, normalize=normalize, confidence=confidence)
        expected = pytest.approx((of_set.value, *of_set.interval), rel=1e-4, abs=1e-5, nan_ok=True)
        assert (metric.compute().item(), *metric.interval(confidence)) == expected


def test_state_grows_with_classes_not_with_items_and_moves_with_the_metric():
    metric = fill(DiscriminantRatio(), *clustered_items(200), [(0, 100), (100, 200)])
    shapes = {name: [tuple(part.shape) for part in parts] for name, parts in metric.metric_state.items()}
    # of lines of JSON there are none: labels are integers
    expected = {
        "class_labels": [(4,)],
        "class_labels_json": [],
        "classes": [(1,)],
        "counts": [(4,)],
        "origins": [(4, 5)],
        "offsets": [(4, 5)],
        "spread": [(4,)],
    } | {name: [] for name in ("embeddings", "labels", "labels_json", "ids", "ids_json")}
    assert shapes == expected
    assert metric.metric_state["offsets"][0].dtype == torch.float64
    assert {part.device.type for parts in metric.to("meta").metric_state.values() for part in parts} == {"meta"}


def test_within_scatter_is_the_mean_squared_distance_to_the_class_mean():
    embeddings, labels = clustered_items()
    found = fill(DiscriminantRatio(), embeddings, labels - 9, [(0, 13), (13, 40)]).within_scatter()
    assert list(found) == [-9, -8, -7, -6]
    for label in range(4):
        members = embeddings[labels == label].double()
        assert found[label - 9] == pytest.approx(float((members - members.mean(0)).square().sum(1).mean()), rel=1e-9)


@pytest.mark.parametrize("name", [*COPIES, "saved"])
def test_a_copied_or_saved_metric_takes_further_batches(name):
    embeddings, labels = clustered_items()
    metric = (COPIES | {"saved": reloaded})[name](
        fill(DiscriminantRatio(normalize=True), embeddings, labels, [(0, 20)])
    )
    fill(metric, embeddings, labels, [(20, 40)])
    assert_close(metric.compute(), functional(embeddings, labels, normalize=True))
    metric.reset()
    assert metric.within_scatter() == {}


def test_compute_before_update_is_nan_and_says_so():
    with warned(UserWarning, "DiscriminantRatio", "compute", "update"):
        assert DiscriminantRatio().compute().isnan()
    assert all(map(math.isnan, VarianceRatio().interval()))
    metric = DiscriminantRatio()
    metric.update(torch.empty(0, 7), torch.empty(0, dtype=torch.long))
    assert metric.compute().isnan()
    embeddings, labels = clustered_items()  # an empty batch fixes no dimension
    metric.update(embeddings.requires_grad_(), labels)
    expected = metric.within_scatter()
    with torch.no_grad():  # no graph is held, and no view
        embeddings.fill_(0)
        labels.fill_(0)
    assert metric.within_scatter() == expected
    assert not any(part.requires_grad for parts in metric.metric_state.values() for part in parts)


def test_a_refused_batch_leaves_the_state_as_it_was():
    metric = fill(DiscriminantRatio(), *clustered_items(), [(0, 40)])
    expected = metric.within_scatter()
    with refused(ValueError, "DiscriminantRatio", "labels", "(4, 3)", "labels.argmax(dim=1)"):
        metric.update(torch.ones(4, 2), torch.ones(4, 3).long())
    assert metric.within_scatter() == expected


def test_in_a_collection_each_batch_is_added_once_for_both(monkeypatch):
    embeddings, labels = clustered_items()
    both = MetricCollection([DiscriminantRatio(), VarianceRatio()])
    both.update(embeddings[:10], labels[:10])
    calls, of = [], ClassMoments.of
    monkeypatch.setattr(ClassMoments, "of", staticmethod(lambda *args: calls.append(1) or of(*args)))
    both.update(embeddings[10:25], labels[10:25])
    both.update(embeddings[25:], labels[25:])
    assert len(calls) == 2
    found = both.compute()
    assert_close(found["DiscriminantRatio"], functional(embeddings, labels))
    assert_close(found["VarianceRatio"], variance_ratio(embeddings, labels))


def repeated_items():
    """40 items, of which every third comes twice and one three times, in an order of its own; the index of each."""
    embeddings, labels = clustered_items()
    rows = torch.cat([torch.arange(40), torch.arange(0, 40, 3), torch.tensor([6])])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))]
    return embeddings[rows], labels[rows], rows


NAMES = {
    "indices": lambda rows: rows,
    "words": lambda rows: [f"{row}.png" for row in rows.tolist()],
    "paths": lambda rows: [Path(f"{row}.png") for row in rows.tolist()],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("normalize", [False, True])
def test_each_item_counts_once_by_its_id(name, normalize):
    embeddings, labels, rows = repeated_items()
    whole = clustered_items()
    ratio, variance = (metric(normalize=normalize) for metric in (DiscriminantRatio, VarianceRatio))
    both = MetricCollection([ratio, variance])
    for some in torch.arange(len(rows)).split(7):
        both.update(embeddings[some], labels[some], ids=NAMES[name](rows[some]))
    found = both.compute()
    assert_close(found["DiscriminantRatio"], functional(*whole, normalize=normalize))
    assert_close(found["VarianceRatio"], variance_ratio(*whole, normalize=normalize))
    interval = variance_ratio_of_set(whole[0].double(), whole[1], normalize=normalize).interval
    assert tuple(both["VarianceRatio"].interval()) == pytest.approx(tuple(interval), rel=1e-9)
    scatter = fill(DiscriminantRatio(normalize=normalize), *whole, [(0, 40)]).within_scatter()
    assert both["DiscriminantRatio"].within_scatter() == pytest.approx(scatter, rel=1e-9)
    assert abs(functional(embeddings, labels, normalize=normalize) / found["DiscriminantRatio"] - 1) > 0.01


@pytest.mark.parametrize("name", [*COPIES, "saved"])
def test_a_copied_or_saved_metric_with_ids_takes_further_batches(name):
    embeddings, labels, rows = repeated_items()
    metric = DiscriminantRatio()
    metric.update(embeddings[:20], labels[:20], rows[:20])
    metric = (COPIES | {"saved": reloaded})[name](metric)
    assert_close(metric(embeddings[20:], labels[20:], rows[20:]), functional(*clustered_items_of(rows[20:])))
    assert_close(metric.compute(), functional(*clustered_items()))
    metric.reset()
    metric.update(*clustered_items())  # another epoch may go without
    assert_close(metric.compute(), functional(*clustered_items()))


def clustered_items_of(rows):
    embeddings, labels = clustered_items()
    return embeddings[rows.unique()], labels[rows.unique()]


def test_items_of_one_id_that_differ_are_a_warning():
    embeddings, labels = clustered_items()
    metric = VarianceRatio()
    metric.update(embeddings, labels, torch.arange(40))
    metric.update(embeddings[:2] + 9, labels[:2], torch.arange(2))
    with warned(UserWarning, "VarianceRatio", "ids", 2, 40, 42):
        assert_close(metric.compute(), variance_ratio(embeddings, labels))


def test_ids_come_with_each_batch_or_with_none():
    embeddings, labels = clustered_items()
    batch, ids = (embeddings[:9], labels[:9]), torch.arange(9)
    for first, second in (((), (ids,)), ((ids,), ())):
        metric = DiscriminantRatio()
        metric.update(embeddings[:0], labels[:0])  # a batch without items says nothing of ids
        metric.update(*batch, *first)
        with refused(ValueError, "DiscriminantRatio.update", "ids", "batch"):
            metric.update(*batch, *second)
        assert_close(metric.compute(), functional(*batch))
    metric = DiscriminantRatio()
    metric.update(*batch, ids)
    for wrong, error, facts in (
        (ids[:5], ValueError, (9, "embeddings", 5)),
        (["a"] * 9, LabelFormsError, ("DiscriminantRatio.update", "integers", "strings")),
        (ids / 2, ValueError, ("torch.float32", "list(map(str, ids.tolist()))")),
    ):
        with refused(error, "ids", *facts):
            metric.update(*batch, wrong)
    with refused(ValueError, "DiscriminantRatio.update", "dimension", 5, 2):
        metric.update(torch.ones(9, 2), labels[:9], ids)
    with refused(LabelFormsError, "DiscriminantRatio.update", "labels", "integers", "strings"):
        metric.update(embeddings[:9], ["a"] * 9, ids)
    assert_close(metric.compute(), functional(*batch))


class TestSeveralProcesses:
    @pytest.mark.parametrize("name", process_jobs.SHARDS)
    def test_every_rank_gets_the_value_of_one_process(self, on_ranks, name):
        embeddings, labels = process_jobs.items()
        alone = fill(DiscriminantRatio(), embeddings, labels, [(0, 23)])
        expected = variance_ratio_of_set(embeddings, labels)
        for answers in on_ranks:
            value, scatter, ratio, interval = answers["ratios"][name]
            torch.testing.assert_close(value, alone.compute(), rtol=1e-6, atol=0)
            assert scatter == pytest.approx(alone.within_scatter(), rel=1e-9)
            assert float(ratio) == pytest.approx(expected.value, rel=1e-6)
            assert interval == pytest.approx(tuple(expected.interval), rel=1e-6)

    def test_each_process_goes_on_with_its_own_state(self, on_ranks):
        embeddings, labels = process_jobs.items()
        count = len(on_ranks)
        more = torch.arange(count).float().repeat_interleave(2)[:, None].expand(2 * count, 5)
        expected = functional(torch.cat([embeddings, more]), torch.cat([labels, torch.tensor([7, 8] * count)]))
        for answers in on_ranks:
            torch.testing.assert_close(answers["ratios"]["continued"], expected, rtol=1e-5, atol=0)
            assert math.isnan(answers["ratios"]["nothing"])

    def test_what_a_sampler_repeats_is_found_by_ids(self, on_ranks):
        embeddings, labels = process_jobs.items()
        alone = fill(DiscriminantRatio(), embeddings, labels, [(0, 23)])
        for answers in on_ranks:
            value, scatter, ratio, interval = answers["ratios"]["ids"]
            torch.testing.assert_close(value, alone.compute(), rtol=1e-6, atol=0)
            assert scatter == pytest.approx(alone.within_scatter(), rel=1e-9)
            expected = variance_ratio_of_set(embeddings, labels)
            assert float(ratio) == pytest.approx(expected.value, rel=1e-6)
            assert interval == pytest.approx(tuple(expected.interval), rel=1e-6)

    def test_ids_of_some_processes_alone_are_refused_by_all(self, on_ranks):
        for answers in on_ranks:
            message = answers["given_by_one"]["ids of J"]
            assert missing_facts(message, ("DiscriminantRatio.compute", "ids", "process")) == []
