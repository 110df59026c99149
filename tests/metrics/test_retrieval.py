"""The RetrievalEvaluation metric: any cut into batches, copies, and several processes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection

from fewshot_callbacks.functional import Relevance, evaluate_retrieval
from fewshot_callbacks.metrics import RetrievalEvaluation
from tests.metrics import gloo_jobs
from tests.metrics.cases import COPIES, WRONG_BATCHES

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


@pytest.mark.parametrize("copied", COPIES)
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


def test_a_plot_has_a_point_or_a_line_for_each_value_but_the_threshold():
    metric = RetrievalEvaluation(**SETTINGS | {"metrics": ("mAP", "recall@1", "threshold")})
    results = [metric(*made()), metric(*made(20))]
    for values, expected in ((None, [metric.compute()]), (results, results)):
        _, axes = metric.plot(values)
        lines = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
        for name in ("mAP", "recall@1"):
            assert lines[name] == [float(result[name]) for result in expected]
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


def test_compute_before_update_says_what_to_call():
    metric = RetrievalEvaluation()
    with (
        pytest.warns(UserWarning, match="called before the ``update`` method"),
        pytest.raises(ValueError, match=r"no batch was added. Call update\(embeddings, labels\) first"),
    ):
        metric.compute()


@pytest.mark.parametrize(("embeddings", "labels", "message"), WRONG_BATCHES)
def test_refusals_leave_the_state_alone(embeddings, labels, message):
    metric = fill(RetrievalEvaluation(**SETTINGS), *made(), 10)
    with pytest.raises(ValueError, match=f"RetrievalEvaluation{message}"):
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


def sides(count=40, queries=15):
    embeddings, labels = made(count)
    return embeddings, labels, torch.arange(count) >= queries, torch.arange(count) % 7, torch.arange(count) % 11


@pytest.mark.parametrize("collected", [False, True])
def test_queries_and_a_gallery_with_ids_and_groups(collected):
    embeddings, labels, in_gallery, groups, ids = sides()
    metric = RetrievalEvaluation(**SETTINGS)
    filled = MetricCollection({"retrieval": metric}) if collected else metric
    for some in torch.arange(len(labels)).split(9):
        filled.update(embeddings[some], labels[some], is_gallery=in_gallery[some], groups=groups[some])
    parts = [~in_gallery, in_gallery]
    named = dict(zip(("query_groups", "gallery_groups"), (groups[part] for part in parts), strict=True))
    sets = [side[part] for part in parts for side in (embeddings, labels)]
    expected = evaluate_retrieval(*sets, **named, **SETTINGS)
    same(filled.compute(), expected.metrics())
    copies = RetrievalEvaluation(**SETTINGS)
    copies.update(embeddings, labels, ids=ids, is_gallery=in_gallery)  # one id, several items: the first of each side
    first = [torch.tensor([row for row in rows if ids[row] not in ids[rows[: rows.index(row)]]])
             for rows in (part.nonzero().flatten().tolist() for part in parts)]  # fmt: skip
    sets = [side[some] for some in first for side in (embeddings, labels)]
    with pytest.warns(UserWarning, match="ids are shared by items that differ"):
        found = copies.compute()
    same(found, evaluate_retrieval(*sets, query_ids=ids[first[0]], gallery_ids=ids[first[1]], **SETTINGS).metrics())


def test_several_labels_an_item():
    targets = torch.randint(0, 2, (30, 4), generator=torch.Generator().manual_seed(0))
    embeddings = made()[0]
    metric = fill(RetrievalEvaluation(), embeddings, targets, 8)
    same(metric.compute(), evaluate_retrieval(embeddings, targets).metrics())
    with pytest.raises(ValueError, match="labels so far are zeros and ones of 4 labels, those of this batch integers"):
        metric.update(embeddings, torch.zeros(30, dtype=torch.long))


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize("gallery", [False, True])
def test_judgements_by_id(words, gallery):
    embeddings, _, in_gallery, *_ = sides()
    ids = [f"item {i}" if words else i for i in range(40)]
    queries = 15 if gallery else 40
    judged = {ids[i]: {ids[(i * 3 + step) % 25 + 15]: 1 + step % 2 for step in range(3)} for i in range(1, queries)}
    metric = RetrievalEvaluation(judgements=judged, metrics=("mAP", "ndcg@5"))
    for some in torch.randperm(40).split(9):
        flag = {"is_gallery": in_gallery[some]} if gallery else {}
        metric.update(embeddings[some], ids=[ids[i] for i in some.tolist()], **flag)
    names = (ids[:15], ids[15:]) if gallery else (ids,)
    relevance = Relevance.from_judgements(judged, *names)
    sets = {"embeddings": embeddings[:15], "gallery": embeddings[15:]} if gallery else {"embeddings": embeddings}
    same(metric.compute(), evaluate_retrieval(**sets, relevance=relevance, metrics=("mAP", "ndcg@5")).metrics())
    unknown = RetrievalEvaluation(judgements={"nobody": ["item 3"]})
    unknown.update(embeddings, ids=[f"item {i}" for i in range(40)])
    with pytest.raises(ValueError, match="no query has the ids 'nobody'"):
        unknown.compute()


@pytest.mark.parametrize(
    ("judgements", "batch", "words"),
    [
        (None, {}, "neither labels nor judgements say who is relevant"),
        ({0: [1]}, {"labels": [0, 1]}, "labels and judgements both say who is relevant"),
        ({0: [1]}, {}, "judgements name items by their ids. Pass the ids"),
        (None, {"labels": [0, 1], "is_gallery": [0, 1]}, r"is_gallery of shape \(2,\) and type torch.int64 must"),
    ],
)  # fmt: skip
def test_what_an_update_lacks_is_said(judgements, batch, words):
    with pytest.raises(ValueError, match=words):
        RetrievalEvaluation(judgements=judgements).update(torch.eye(2), **batch)


@pytest.mark.parametrize("name", ["ids", "groups", "is_gallery"])
def test_what_only_some_batches_have_is_refused(name):
    metric = RetrievalEvaluation()
    metric.update(torch.eye(2), [0, 1])
    with pytest.raises(ValueError, match=f"some batches have {name}, others none. Pass them with each batch"):
        metric.update(torch.eye(2), [0, 1], **{name: torch.tensor([True, False]) if name == "is_gallery" else [0, 1]})


def test_a_refused_batch_leaves_the_metric_as_it_was():
    metric = RetrievalEvaluation(**SETTINGS)
    with pytest.raises(ValueError, match="is_gallery of shape"):
        metric.update(torch.eye(2), [0, 1], ids=[0, 1], is_gallery=[0.5, 1.0])
    embeddings, labels = made()
    fill(metric, embeddings, labels, 7)
    same(metric.compute(), evaluate_retrieval(embeddings, labels, **SETTINGS).metrics())


@pytest.mark.parametrize("form", [list, np.array, lambda ids: [np.int64(i) for i in ids], torch.tensor])
def test_ids_of_judgements_are_integers_of_any_kind(form):
    metric = RetrievalEvaluation(judgements={0: [2], 1: [3]}, metrics="mAP")
    metric.update(torch.eye(4)[[0, 1]], ids=form([0, 1]), is_gallery=False)
    metric.update(torch.eye(4)[[0, 1]], ids=form([2, 3]), is_gallery=True)
    assert metric.compute()["mAP"] == 1
