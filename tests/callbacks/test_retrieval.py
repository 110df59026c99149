"""RetrievalMonitor: what is logged is what `evaluate_retrieval` says, for one loader, several, or a gallery."""

import math
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import DEFAULT_METRICS, knn_accuracy
from fewshot_callbacks.callbacks import RetrievalMonitor, _conduct
from fewshot_callbacks.functional import evaluate_retrieval
from tests.callbacks.models import (
    FEATURES,
    TRAINING,
    Embeds,
    Labelled,
    Net,
    Scripted,
    close,
    items,
    keyed,
    loader,
    measured,
    retrieval,
    said,
    scripted,
    trainer,
    validated,
)

QUERIES, GALLERY = items(), items(per_class=4, seed=4)


# ---------------------------------------------------------------------------------------------------- values of one set


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"similarity": "euclidean"},
        {
            "similarity": "dot",
            "metrics": ("mAP", "recall@2", "recall@precision0.2", "recall@precision0.5"),
            "threshold": 0.1,
        },
        {"label_groups": 3, "metrics": (*DEFAULT_METRICS, "grouped_recall@2"), "seed": 7},
        {"label_groups": 2, "memory_mb": 2},
        {"metrics": (*DEFAULT_METRICS, "recall@precision0.2"), "threshold_bounds": (0.3, 1)},
        {
            "metrics": (
                *("map@3_found", "ir_recall@2", "ir_recall@3", "precision@2", "ndcg@4", "prototype_accuracy"),
                *("macro_mAP", "auc_pr", "fnmr@fmr0.01", "eer", "mAP"),
            ),
            "device": "auto",
        },
    ],
)
def test_what_is_logged_is_what_the_function_says(settings: dict[str, Any]) -> None:
    net = Net()
    monitor = retrieval(**settings)
    logged = validated(monitor, net, loader(QUERIES, batch_size=7))
    expected = measured(*net.by_hand(QUERIES), **settings)
    assert logged == close(keyed(expected))
    assert 0 < logged["val/mAP"] < 1
    assert monitor.report is not None
    assert monitor.report.metrics() == close({key: expected[key] for key in expected if key != "queries_without_match"})


def test_what_is_spilled_to_a_disk_is_logged_alike(tmp_path: Any) -> None:
    net = Net()
    kept, spilled = (validated(retrieval(spill_to=folder), net, loader(QUERIES, 7)) for folder in (None, tmp_path))
    assert kept == spilled
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="spill_to='nowhere' cannot be written to"):
        RetrievalMonitor(spill_to="nowhere")


def test_recall_at_a_precision_may_choose_a_threshold_below_zero_unless_bounds_are_given() -> None:
    """Cosines of embeddings that point apart are negative; the source's bounds are (0, 1)."""

    class Apart(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            _, labels = batch
            angles = torch.deg2rad(torch.where(torch.arange(len(labels)) % 2 == 0, 0.0, 100.0)) + labels // 20 * 3.14159
            return {"embeddings": torch.stack([angles.cos(), angles.sin()], dim=1), "labels": labels // 20}

    points = TensorDataset(torch.zeros(8, 12), torch.arange(2).repeat_interleave(4) * 20)
    logged, within = (
        validated(
            RetrievalMonitor(metrics=(*DEFAULT_METRICS, "recall@precision0.4"), label_groups=None, **bounds),
            Apart(),
            loader(points),
        )
        for bounds in ({}, {"threshold_bounds": (0, 1)})
    )
    assert logged["val/recall@precision0.4"] == 1.0  # 12 of 28 pairs are relevant: accept all, at cosine -1
    assert within["val/recall@precision0.4"] < 0.5


@pytest.mark.parametrize("unmatched", ["exclude", "miss"])
def test_given_groups_of_labels_and_what_counts_in_them(unmatched: str) -> None:
    lone = TensorDataset(
        torch.cat([items().tensors[0], torch.ones(1, FEATURES)]), torch.cat([items().tensors[1], torch.tensor([99])])
    )
    settings = {
        "label_groups": [[-7, 3, 99], [13, 23, 33, 43]],
        "metrics": ("mAP", f"grouped_recall@1{'_miss' * (unmatched == 'miss')}"),
    }
    net, monitor = Net(), retrieval(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the query without a match
        logged = validated(monitor, net, loader(lone))
    assert logged == close(keyed(measured(*net.by_hand(lone), **settings), "val"))
    assert monitor.report.grouped.labels == (((-7, 3, 99), (13, 23, 33, 43)),)


def test_a_sample_of_queries_is_said_to_be_one() -> None:
    with pytest.warns(UserWarning, match="val: An estimate: 20 of 36 queries were drawn"):
        validated(retrieval(max_queries=20), Net(), loader())


def test_only_map_is_shown_in_the_progress_bar() -> None:
    for prog_bar, shown in ((True, {"val/mAP"}), (False, set())):
        run = trainer(retrieval(prog_bar=prog_bar))
        run.validate(Net(), loader(), verbose=False)
        assert set(run.progress_bar_metrics) == shown


def test_queries_without_a_match_are_counted_and_noted_once() -> None:
    points, labels = QUERIES.tensors
    data = TensorDataset(torch.cat([points, -points[:2]]), torch.cat([labels, torch.tensor([1, 2])]))
    net, monitor = Net(), retrieval()
    for _ in range(2):  # once in each run
        run = trainer(monitor, max_epochs=2)
        with pytest.warns(UserWarning, match="val: 2 of 38 queries have no match and are left out of every mean") as w:
            run.fit(net, loader(), loader(data))
        assert len(said(w)) == 1
    assert run.callback_metrics["val/queries_without_match"] == 2
    assert run.callback_metrics["val/mAP"] == pytest.approx(measured(*net.by_hand(data))["mAP"], rel=1e-5)


# ------------------------------------------------------------------------------------------------- queries and galleries


def test_each_loader_is_evaluated_by_itself() -> None:
    net, monitor = Net(), retrieval()
    expected = [measured(*net.by_hand(data)) for data in (QUERIES, GALLERY)]
    listed = validated(monitor, net, [loader(QUERIES), loader(GALLERY)])
    assert listed == close(
        keyed(expected[0], end="/dataloader_idx_0") | keyed(expected[1], end="/dataloader_idx_1"),
    )
    assert set(monitor.reports) == {"/dataloader_idx_0", "/dataloader_idx_1"}
    assert monitor.report is None
    named = validated(monitor, net, {"easy": loader(QUERIES), "hard": loader(GALLERY)})
    assert named == close(keyed(expected[0], end="/easy") | keyed(expected[1], end="/hard"))


@pytest.mark.parametrize("gallery", [0, 1, "shop", "dataloader_idx_1"])
def test_a_gallery_loader_by_index_and_by_name(gallery: int | str) -> None:
    net = Net()
    first, second = loader(QUERIES), loader(GALLERY)
    loaders: Any = {"street": first, "shop": second} if gallery == "shop" else [first, second]
    asked, searched = (GALLERY, QUERIES) if gallery == 0 else (QUERIES, GALLERY)
    expected = measured(*net.by_hand(asked), *net.by_hand(searched))
    assert validated(retrieval(gallery=gallery), net, loaders) == close(keyed(expected))
    assert expected["mAP"] != pytest.approx(measured(*net.by_hand(asked))["mAP"])


def test_several_sets_of_queries_against_one_gallery() -> None:
    net, third = Net(), items(per_class=2, seed=5)
    loaders = {"day": loader(QUERIES), "shop": loader(GALLERY), "night": loader(third)}
    day, night = (measured(*net.by_hand(data), *net.by_hand(GALLERY)) for data in (QUERIES, third))
    expected = keyed(day, end="/day") | keyed(night, end="/night")
    assert validated(retrieval(gallery="shop"), net, loaders) == close(expected)


class Flagged(Net):
    """Batches of points, labels and the flag of the gallery, as a mapping."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        points, labels, flag = batch.values() if isinstance(batch, dict) else batch
        return {"embeddings": self.embed(points), "labels": labels, "in_gallery": flag}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, data: TensorDataset, flag: Tensor) -> None:
        self.data, self.flag = data, flag

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        point, label = self.data[index]
        return {"points": point, "labels": label, "shop": self.flag[index]}


@pytest.mark.parametrize("flag", ["in_gallery", "shop", "function"])
def test_a_flag_for_each_item(flag: str) -> None:
    net, chosen = Flagged(), (torch.arange(36) % 2 == 0) & (torch.arange(36) < 24)  # two of each class
    embeddings, labels = net.by_hand(QUERIES)
    expected = measured(embeddings[~chosen], labels[~chosen], embeddings[chosen], labels[chosen])
    monitor = retrieval(gallery=(lambda outputs, batch: batch["shop"].long()) if flag == "function" else flag)
    logged = validated(monitor, net, DataLoader(Rows(QUERIES, chosen), batch_size=7))
    assert logged == close(keyed(expected))
    assert monitor.report is not None
    assert (monitor.report.queries, monitor.report.gallery) == (24, 12)


@pytest.mark.filterwarnings("ignore:.*Shown once")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gallery": "nowhere"}, "nor the batch \\(a mapping with the keys 'points', 'labels', 'shop'\\)"),
        ({"gallery": lambda o, b: b["shop"][:2]}, "gallery has 2 entries for 7 embeddings. Expected one boolean"),
        ({"gallery": lambda o, b: b["shop"] | True}, "embeddings is empty"),
        ({"gallery": 0}, r"\(gallery=0\): there is one loader only, so there are no queries"),
        ({"gallery": 3}, r"\(gallery=3\): there is no such loader; there are 'dataloader_idx_0'. Pass one.*below 1"),
        ({"gallery": "shelf"}, "gallery='shelf'.*Nor is there such a loader; there are 'dataloader_idx_0'"),
    ],
)
def test_what_is_wrong_with_a_gallery_is_said_and_the_values_are_nan(settings: dict[str, Any], words: str) -> None:
    loaders = DataLoader(Rows(QUERIES, torch.arange(36) % 3 == 0), batch_size=7)
    with pytest.warns(UserWarning, match=f"val/mAP and the other values of this set are NaN. .*{words}"):
        logged = validated(retrieval(strict=False, **settings), Flagged(), loaders)
    assert set(logged) == set(keyed(measured(*Net().by_hand(QUERIES))))
    assert all(map(math.isnan, logged.values()))
    with pytest.raises(ValueError, match=words):
        validated(retrieval(strict=True, **settings), Flagged(), loaders)


def test_the_failure_of_one_loader_leaves_the_other() -> None:
    net, monitor = Net(), retrieval()
    broken = TensorDataset(QUERIES.tensors[0] * math.nan, QUERIES.tensors[1])
    with pytest.warns(
        UserWarning,
        match=r"val/mAP/dataloader_idx_0 and the other values.*36 of 36 rows of embeddings hold NaN or Inf",
    ):
        logged = validated(monitor, net, [loader(broken), loader(GALLERY)])
    assert math.isnan(logged["val/mAP/dataloader_idx_0"])
    assert logged["val/mAP/dataloader_idx_1"] == pytest.approx(measured(*net.by_hand(GALLERY))["mAP"], rel=1e-5)
    assert set(monitor.reports) == {"/dataloader_idx_1"}


def test_a_report_does_not_outlive_the_evaluation_that_fails() -> None:
    monitor = retrieval()
    validated(monitor, Net(), loader())
    assert monitor.report is not None
    with pytest.warns(UserWarning, match="are NaN"):
        validated(monitor, Net(), loader(TensorDataset(QUERIES.tensors[0] * math.nan, QUERIES.tensors[1])))
    assert monitor.report is None


# --------------------------------------------------------------------------------------------------------- number types


def test_half_precision_is_stored_as_it_comes() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net = Net()
        embeddings, labels = net.by_hand(QUERIES)
    assert embeddings.dtype == torch.bfloat16
    seen: list[torch.dtype] = []
    monitor = retrieval()

    class Looks(Callback):
        def on_validation_epoch_end(self, *_: Any) -> None:
            seen.extend(batch.embeddings.dtype for batch in monitor._parts.stores[0, False]._batches)

    made = trainer(Looks(), monitor, precision="bf16-mixed")
    made.validate(net, loader(), verbose=False)
    assert set(seen) == {torch.bfloat16}
    assert {key: float(value) for key, value in made.callback_metrics.items()} == close(
        keyed(measured(embeddings, labels))
    )


def test_double_precision_is_kept() -> None:
    """Embeddings whose classes float32 cannot tell apart."""

    class Fine(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            points, labels = batch
            return {"embeddings": 1.0 + 1e-12 * scripted(points.double(), labels, 50.0), "labels": labels}

    settings = {"similarity": "euclidean"}
    logged = validated(retrieval(**settings), Fine(), loader(), precision="64-true")
    assert logged["val/mAP"] == 1.0
    embeddings = 1.0 + 1e-12 * scripted(QUERIES.tensors[0].double(), QUERIES.tensors[1], 50.0)
    assert evaluate_retrieval(embeddings.float(), QUERIES.tensors[1], label_groups=2, **settings).mAP < 0.5


# --------------------------------------------------------------------------------------------------- settings and monitors


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gallery_flag": "g"}, "gallery_flag is no setting. Write gallery='is_gallery'"),
        ({"metrics": ("mAP", "recall@0")}, "RetrievalMonitor: there is no metric 'recall@0'"),
        (
            {"metrics": (*DEFAULT_METRICS, "recall@precision1.5")},
            "RetrievalMonitor: metrics hold 'recall@precision1.5'",
        ),
        ({"threshold": math.nan}, "RetrievalMonitor.*threshold"),
        ({"threshold_bounds": (1.0, 0.0)}, r"RetrievalMonitor: threshold_bounds=\(1.0, 0.0\) must hold the smallest"),
        ({"label_groups": 1}, "RetrievalMonitor: label_groups=1 must"),
        ({"memory_mb": 0}, "RetrievalMonitor.*memory_mb"),
        ({"name": ""}, r"RetrievalMonitor\(name=''\) names nothing. Leave out name for val/mAP and test/mAP"),
        ({"prefix": "t2i"}, "prefix is no setting. Write name='t2i' for val/t2i/mAP"),
    ],
)
def test_a_wrong_setting_is_refused_at_once(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RetrievalMonitor(**settings)


@pytest.mark.parametrize("stage", ["val", "test"])
def test_two_monitors_with_different_names(stage: str) -> None:
    """A name stands beside the stage, so that a test is not taken for a validation."""
    net = Net()
    monitors = retrieval(), retrieval(name="far", similarity="euclidean")
    run = trainer(*monitors)
    (run.validate if stage == "val" else run.test)(net, loader(), verbose=False)
    embeddings, labels = net.by_hand(items())
    expected = keyed(measured(embeddings, labels), stage)
    expected |= keyed(measured(embeddings, labels, similarity="euclidean"), f"{stage}/far")
    assert {key: float(value) for key, value in run.callback_metrics.items()} == close(expected)


@pytest.mark.parametrize("name", [None, "far"])
def test_two_monitors_that_would_log_the_same_keys_are_refused(name: str | None) -> None:
    """Lightning would log their mean."""
    expected = "Two RetrievalMonitors in one Trainer would log under the same keys, .* Give them different names"
    with pytest.raises(ValueError, match=expected):
        trainer(retrieval(name=name), retrieval(name=name)).validate(Net(), loader(), verbose=False)


# ------------------------------------------------------------------------------------------------------------- progress


BARS = {
    "tqdm": TQDMProgressBar,
    "rich": RichProgressBar,
    "tqdm off": lambda: TQDMProgressBar(refresh_rate=0),
    "rich off": lambda: RichProgressBar(refresh_rate=0),
    "none": lambda: None,
}


@pytest.mark.parametrize("bar", BARS)
@pytest.mark.parametrize("long", [True, False])
def test_a_long_evaluation_is_shown_on_the_trainers_bar_and_a_short_one_is_not(
    bar: str, long: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_conduct, "QUIET_SECONDS", 0.0 if long else 1000.0)
    spy = mock.Mock(wraps=_conduct.tqdm)
    monkeypatch.setattr(_conduct, "tqdm", spy)
    shown, add_task = BARS[bar](), mock.create_autospec(Progress.add_task, side_effect=Progress.add_task)
    monkeypatch.setattr(Progress, "add_task", add_task)
    run = trainer(retrieval(), *([] if shown is None else [shown]), enable_progress_bar=shown is not None)
    run.fit(Net(), loader(), loader())
    assert 0 < run.callback_metrics["val/mAP"] <= 1
    named = "self", "desc", "start", "total"  # arguments of Rich's method
    tasks = [dict(zip(named, call.args, strict=False)) | call.kwargs for call in add_task.call_args_list]
    tasks += [call.kwargs for call in spy.call_args_list]
    ours = [task["total"] for task in tasks if task.get("desc") == "Retrieval of val"]
    assert len(ours) == (1 if long and "off" not in bar and bar != "none" else 0)
    assert all(total >= 36 * 35 / 2 for total in ours)
    text = "".join(capfd.readouterr())
    assert ("Retrieval of val" in text) == (bool(ours) and bar == "tqdm") or bar == "rich"
    if bar == "rich":  # nothing of ours stays on the Trainer's bar
        assert not [task for task in shown.progress.tasks if task.description == "Retrieval of val"]


def test_ids_that_name_no_single_items_are_told_once():
    def identities(outputs: Any, batch: Any) -> list[str]:  # and camera: such as those of several photographs
        return [f"identity {label} camera 1" for label in batch[1].tolist()]

    monitor = retrieval(ids=identities, label_groups=None, strict=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(monitor, max_epochs=2)
        run.fit(Net(), loader(), loader())
    told = [str(warning.message) for warning in caught if "ids are shared" in str(warning.message)]
    assert len(told) == 1
    assert told[0].startswith("RetrievalMonitor: 6 of 6 ids are shared by items that differ in embedding or label.")
    assert (
        "so that 30 of 36 items are left out, and 30 of them are no repetitions. Pass ids that name single" in told[0]
    )


# -------------------------------------------------------------------------------------------------- a vote of neighbours


class WithTraining(LightningDataModule):
    def training_data_for_evaluation(self) -> Any:
        return Labelled(TRAINING)

    def val_dataloader(self) -> Any:
        return loader()


@pytest.mark.parametrize("bank", ["train", "gallery", "self", "given"])
def test_neighbours_vote(bank: str) -> None:
    """Each bank gives what the function gives; the module is in training mode afterwards, as it was."""
    net, given = Embeds(), DataLoader(Labelled(TRAINING), batch_size=7, shuffle=True)
    of_loader = {"gallery": {"gallery": 1}, "given": {}}.get(bank, {})
    monitor = retrieval(knn=(1, 5), knn_bank=given if bank == "given" else bank, **of_loader)
    run = trainer(monitor)
    if bank == "train":
        run.validate(net, datamodule=WithTraining(), verbose=False)
    else:
        run.validate(net, [loader(), loader(GALLERY)] if bank == "gallery" else loader(), verbose=False)
    sets = {"train": [TRAINING], "given": [TRAINING], "gallery": [GALLERY], "self": []}[bank]
    report = knn_accuracy(*(part for data in (QUERIES, *sets) for part in net.by_hand(data)), k=(1, 5))
    logged = {key: float(value) for key, value in run.callback_metrics.items() if "knn" in key}
    assert logged == close(keyed(report.values))
    assert net.training


def test_what_cannot_vote_is_told() -> None:
    with pytest.warns(UserWarning, match=r"val, knn: Only 35 items can vote, so that the values of k = 99 are NaN"):
        logged = validated(retrieval(knn=(5, 99), knn_bank="self"), Net(), loader())
    assert math.isnan(logged["val/knn@99"])
    assert logged["val/knn@5"] > 0
    other = TensorDataset(TRAINING.tensors[0], TRAINING.tensors[1] + 1)
    with pytest.warns(UserWarning, match=r"none of the 36 queries has a candidate of its label"):
        logged = validated(retrieval(knn=5, knn_bank=Labelled(other)), Embeds(), loader())
    assert math.isnan(logged["val/knn@5"])
    assert not math.isnan(logged["val/mAP"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"knn": 0}, "knn=0 must be a whole number of at least 1"),
        ({"knn": 5, "knn_bank": "training"}, r"knn_bank='training'\): choose 'train', 'gallery', 'self'"),
        ({"knn": 5, "exclude": "camera"}, "Pass knn or exclude, not both"),
    ],
)
def test_wrong_votes(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval(**settings)


def test_training_items_are_embedded_as_the_step_embeds() -> None:
    with pytest.raises(ValueError, match=r"RetrievalMonitor has no training set: pass knn_bank=\.\.\."):
        validated(retrieval(knn=5), Embeds(), loader())
    with pytest.raises(ValueError, match=r"Scripted has no forward method, and embed is not given"):
        validated(retrieval(knn=5, knn_bank=Labelled(TRAINING)), Scripted([1.0]), loader())
