"""The RetrievalEvaluation metric: any cut into batches, copies, and several processes."""

import copy
import dataclasses
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.metrics import RetrievalEvaluation
from tests.metrics import gloo_jobs

SETTINGS = {"label_groups": 2, "metrics": ("mAP", "recall@1", "recall@3")}


def made(items=30, classes=5):
    generator = torch.Generator().manual_seed(items)
    number = torch.arange(items) % classes
    centres = torch.randn(classes, 6, generator=generator)
    return centres[number] + torch.randn(items, 6, generator=generator), number - 2**61


def fill(metric, embeddings, labels, size):
    for batch in zip(embeddings.split(size), labels.split(size), strict=True):
        metric.update(*batch)
    return metric


def same(found, expected):
    """The metrics of a report, as float64 scalars."""
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.dtype == torch.float64
        assert value.item() == pytest.approx(float(expected[name]), abs=1e-12, nan_ok=True), name


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 24), st.lists(st.integers(0, 24), max_size=4), st.sampled_from(["cosine", "euclidean"]))
def test_equals_the_function_over_any_cut(items, cuts, similarity):
    embeddings, labels = made(items, 4 if items >= 8 else 1)
    options = SETTINGS | {"similarity": similarity}
    metric = RetrievalEvaluation(**options)
    bounds = sorted({0, items, *(min(cut, items) for cut in cuts)})
    for start, stop in itertools.pairwise(bounds):
        metric.update(embeddings[start:stop], labels[start:stop])
    expected = evaluate_retrieval(embeddings, labels, **options)
    same(metric.compute(), expected.metrics())
    assert metric.report == expected


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda metric: pickle.loads(pickle.dumps(metric)),
        lambda metric: metric.clone(),
        lambda m: m.cpu(),
    ],
    ids=["deepcopy", "pickle", "clone", "cpu"],
)
def test_a_copy_goes_on_from_there(copied):
    embeddings, labels = made()
    metric = copied(fill(RetrievalEvaluation(**SETTINGS), embeddings[:20], labels[:20], 8))
    fill(metric, embeddings[20:], labels[20:], 8)
    same(metric.compute(), evaluate_retrieval(embeddings, labels, **SETTINGS).metrics())


def test_what_is_kept_is_a_compact_copy_in_the_dtype_of_the_model():
    embeddings, labels = made()
    wide = torch.cat([embeddings, embeddings], dim=1).half().requires_grad_()
    metric = RetrievalEvaluation(**SETTINGS)
    metric.update(wide[:, :6], labels)
    expected = evaluate_retrieval(embeddings.half(), labels.clone(), **SETTINGS)
    with torch.no_grad():
        wide.fill_(0)
        labels.fill_(0)
    same(metric.compute(), expected.metrics())
    (kept,) = metric.embeddings
    assert kept.dtype == torch.float16
    assert not kept.requires_grad
    assert kept.untyped_storage().nbytes() == kept.numel() * 2


def test_keywords_of_torchmetrics_stand_beside_the_settings():
    metric = RetrievalEvaluation(
        metrics=("mAP", "recall@2"), label_groups=None, sync_on_compute=False, compute_with_cache=False
    )
    assert not metric.sync_on_compute
    assert not metric.compute_with_cache
    assert fill(metric, *made(), 10).compute().keys() == {"mAP", "recall@2"}


class Holder(LightningModule):
    """A module that holds its metric, as the docstring of the metric says."""

    def __init__(self):
        super().__init__()
        self.retrieval = RetrievalEvaluation(**SETTINGS)

    def validation_step(self, batch, batch_idx):
        self.retrieval.update(*batch)

    def on_validation_epoch_end(self):
        self.log_dict(self.retrieval.compute())
        self.retrieval.reset()


def test_a_module_logs_it_as_a_dictionary():
    embeddings, labels = made()
    trainer = Trainer(logger=False, enable_progress_bar=False, accelerator="cpu")
    loader = DataLoader(TensorDataset(embeddings, labels), batch_size=7)
    expected = evaluate_retrieval(embeddings, labels, **SETTINGS).metrics()
    module = Holder()
    for _ in range(2):  # the second validation begins anew
        [logged] = trainer.validate(module, loader, verbose=False)
        assert logged == pytest.approx(expected, abs=1e-6)


def test_a_plot_shows_each_value_but_the_threshold():
    metric = fill(RetrievalEvaluation(**SETTINGS), *made(), 10)
    values = metric.compute()
    figure, axes = metric.plot()
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [name for name in values if name != "threshold"]
    assert [bar.get_width() for bar in axes.patches] == [values[name].item() for name in names]
    assert {text.get_text() for text in axes.texts} == {f"{values[name]:.3f}" for name in names}
    own = figure.add_subplot()
    assert metric.plot(values, ax=own) == (figure, own)


def test_a_plot_of_several_results_has_a_line_for_each_value():
    metric = RetrievalEvaluation(**SETTINGS)
    results = [metric(*made()), metric(*made(20))]
    _, axes = metric.plot(results)
    lines = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
    assert lines["mAP"] == [float(result["mAP"]) for result in results]
    assert "threshold" not in lines


def test_forward_gives_the_batch_and_keeps_the_whole():
    embeddings, labels = made(40, 5)
    metric = RetrievalEvaluation(**SETTINGS)
    for batch in zip(embeddings.split(20), labels.split(20), strict=True):
        same(metric(*batch), evaluate_retrieval(*batch, **SETTINGS).metrics())
    same(metric.compute(), evaluate_retrieval(embeddings, labels, **SETTINGS).metrics())


def test_the_report_is_that_of_the_last_compute():
    embeddings, labels = made()
    metric = RetrievalEvaluation(**SETTINGS)
    assert metric.report is None
    fill(metric, embeddings[:20], labels[:20], 10).compute()
    assert metric.report.queries == 20
    fill(metric, embeddings[20:], labels[20:], 10).compute()
    assert metric.report.queries == 30
    assert dataclasses.is_dataclass(metric.report)


def test_compute_before_update_says_what_to_call():
    metric = RetrievalEvaluation()
    with (
        pytest.warns(UserWarning, match="called before the ``update`` method"),
        pytest.raises(ValueError, match=r"no batch was added. Call update\(embeddings, labels\) first"),
    ):
        metric.compute()


@pytest.mark.parametrize(
    ("embeddings", "labels", "message"),
    [
        (
            torch.ones(4),
            torch.arange(4),
            r"RetrievalEvaluation needs embeddings of shape \(items, dim\); got .* \(4,\)",
        ),
        (torch.ones(4, 2, 2), torch.arange(4), r"Flatten what belongs to one item: embeddings.flatten\(1\)"),
        (torch.ones(4, 2), torch.ones(4), r"RetrievalEvaluation needs integer labels; got torch.float32"),
        (torch.ones(4, 2), torch.arange(3), r"RetrievalEvaluation: 4 embeddings, but 3 labels"),
    ],
)
def test_refusals_leave_the_state_alone(embeddings, labels, message):
    metric = fill(RetrievalEvaluation(**SETTINGS), *made(), 10)
    with pytest.raises(ValueError, match=message):
        metric.update(embeddings, labels)
    assert len(metric.embeddings) == len(metric.labels) == 3


def test_of_items_with_one_id_the_first_counts():
    embeddings, labels = made(30, 5)
    metric = RetrievalEvaluation(**SETTINGS)
    for some in torch.cat([torch.arange(30), torch.arange(9)]).split(13):
        metric.update(embeddings[some], labels[some], ids=some)
    same(metric.compute(), evaluate_retrieval(embeddings, labels, **SETTINGS).metrics())
    with pytest.raises(ValueError, match="some batches have ids, others none"):
        metric.update(embeddings, labels)


def test_ids_that_name_no_single_items_are_a_warning():
    embeddings, labels = made(40, 4)
    metric = RetrievalEvaluation(**SETTINGS)
    metric.update(embeddings, labels, ids=torch.arange(40) // 2 % 20)
    with pytest.warns(UserWarning, match="RetrievalEvaluation: 20 of 20 ids are shared .* 20 of 40 items are left out"):
        found = metric.compute()
    same(found, evaluate_retrieval(embeddings[::2], labels[::2], **SETTINGS).metrics())


@pytest.mark.parametrize("name", [*gloo_jobs.SHARDS, "half"])
def test_every_rank_gets_the_value_of_one_process(on_ranks, name):
    embeddings, labels = gloo_jobs.items(24 if name == "even" else 23)
    embeddings = embeddings.half() if name == "half" else embeddings
    expected = evaluate_retrieval(embeddings, labels, **SETTINGS).metrics()
    for answers in on_ranks:
        same(answers["retrieval"][name], expected)


def test_what_a_sampler_repeats_is_found_by_ids(on_ranks):
    expected = evaluate_retrieval(*gloo_jobs.items(23), **SETTINGS).metrics()
    for answers in on_ranks:
        same(answers["retrieval"]["ids"], expected)
