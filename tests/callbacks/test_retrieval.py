"""RetrievalMonitor: the logged values equal `evaluate_retrieval`, for one loader, several, or a gallery."""

import math
import warnings
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as with_settings
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import DEFAULT_METRICS, Metric, knn_accuracy, relevant_ranks
from fewshot_callbacks.callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingSource,
    KnnMonitor,
    RetrievalMonitor,
    _conduct,
)
from fewshot_callbacks.functional import evaluate_retrieval
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments
from tests.callbacks.models import (
    FEATURES,
    TRAINING,
    Embeds,
    Labelled,
    Net,
    close,
    expected_metrics,
    items,
    loader,
    log_of_validation,
    messages_of,
    retrieval,
    trainer,
    with_prefix,
)
from tests.callbacks.process_jobs import ReturnedPoints
from tests.cases import examples
from tests.messages import refused, warned

QUERIES, GALLERY = items(), items(per_class=4, seed=4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"similarity": "dot", "metrics": ("mAP", "recall@2", "recall@precision0.2"), "threshold": 0.1},
        {"label_groups": 3, "metrics": (*DEFAULT_METRICS, "grouped_recall@2"), "seed": 7, "memory_mb": 2},
        {"metrics": (*DEFAULT_METRICS, "recall@precision0.2"), "threshold_bounds": (0.3, 1)},
        {"metrics": ("map@3_found", "ir_recall@2", "prototype_accuracy", "macro_mAP", "eer", "mAP"), "device": "auto"},
    ],
)
def test_what_is_logged_is_what_the_function_says(settings: dict[str, Any]) -> None:
    net, monitor = Net(), retrieval(**settings)
    logged = log_of_validation(monitor, net, loader(QUERIES, batch_size=7))
    expected = expected_metrics(*net.by_hand(QUERIES), **settings)
    assert logged == close(with_prefix(expected))
    assert 0 < logged["val/mAP"] < 1
    assert monitor.report is not None
    assert monitor.report.metrics() == close({key: expected[key] for key in expected if key != "queries_without_match"})


MEAN_RANK = Metric(
    "mean_rank",
    "ranks",
    lambda ranks, ties: relevant_ranks(ranks, ties).nanmean(dim=1),
    "Mean rank.",
    range=None,
    better="lower",
)
GAIN = Metric("gain", "pairs", lambda pooled: pooled.best_f1.f1 - 0.1, "F1 above 0.1.")


def test_metrics_of_a_user_are_logged_and_their_directions_are_known() -> None:
    settings = {"metrics": ("mAP", MEAN_RANK, GAIN, "macro_mean_rank")}
    net, monitor = Net(), retrieval(**settings)
    logged = log_of_validation(monitor, net, loader(QUERIES, batch_size=7))
    assert logged == close(with_prefix(expected_metrics(*net.by_hand(QUERIES), **settings)))
    assert list(logged) == ["val/mAP", "val/mean_rank", "val/gain", "val/macro_mean_rank"]
    run = trainer(EarlyStopping(monitor="val/mean_rank", mode="max"), retrieval(**settings))
    with warned(UserWarning, "EarlyStopping(monitor='val/mean_rank', mode='max')", "lower", "mode='min'"):
        run.fit(Net(), loader(), loader())


def test_metrics_of_a_user_are_nan_where_nothing_can_be_evaluated() -> None:
    labels = torch.arange(len(QUERIES))
    with warned(UserWarning, "val/mean_rank", "NaN", "queries", len(labels)):
        logged = log_of_validation(
            retrieval(metrics=(MEAN_RANK, GAIN)), Net(), loader(TensorDataset(QUERIES.tensors[0], labels))
        )
    assert logged == close({"val/mean_rank": math.nan, "val/gain": math.nan})


@with_settings(max_examples=examples(15), deadline=None)
@example(items=40, classes=4, batch_size=7, few_values=False, dtype=torch.float64, seed=0)
@example(items=40, classes=4, batch_size=40, few_values=False, dtype=torch.bfloat16, seed=1)
@given(
    items=st.integers(2, 40),
    classes=st.integers(1, 6),
    batch_size=st.integers(1, 45),
    few_values=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
def test_order_batches_and_precision_change_no_value(
    items: int, classes: int, batch_size: int, few_values: bool, dtype: torch.dtype, seed: int
) -> None:
    """Random sets in any order, cut into any batches, in any precision: what must not move does not."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(-classes, classes, (items,), generator=generator)
    labels[0] = labels[1]  # somebody has a match
    points = torch.randn(items, 3, generator=generator, dtype=torch.float64)  # numbers that float32 does not hold
    points = (points.round() if few_values else points).to(dtype)
    order = torch.randperm(items, generator=generator)
    expected, monitor = evaluate_retrieval(points, labels, label_groups=None), retrieval()
    data = DataLoader(TensorDataset(points[order], labels[order]), batch_size=batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sets without a J
        logged = log_of_validation((monitor, DiscriminantRatioMonitor()), ReturnedPoints(), data)
    found = monitor.report
    assert found is not None
    assert found.values == expected.values
    assert repr((found.decision, found.at_precision)) == repr((expected.decision, expected.at_precision))
    assert {name: interval.low for name, interval in found.intervals.items()} == pytest.approx(
        {name: interval.low for name, interval in expected.intervals.items()}, rel=1e-12, abs=1e-12, nan_ok=True
    )
    ratio = float(ClassMoments.of(points, labels).discriminant_ratio())
    assert logged["val/J"] == pytest.approx(ratio, rel=1e-6, nan_ok=True)


def test_what_is_spilled_to_a_disk_is_logged_alike(tmp_path: Any) -> None:
    net = Net()
    kept, spilled = (
        log_of_validation(retrieval(source=EmbeddingSource(spill_to=folder)), net, loader(QUERIES, 7))
        for folder in (None, tmp_path)
    )
    assert kept == spilled
    assert not [*tmp_path.iterdir()]
    with refused(ValueError, "RetrievalMonitor", "spill_to='nowhere'", "folder"):
        RetrievalMonitor(source=EmbeddingSource(spill_to="nowhere"))


@pytest.mark.filterwarnings("ignore:.*copy")  # there are four points, each of them twice
def test_recall_at_a_precision_may_choose_a_threshold_below_zero_unless_bounds_are_given() -> None:
    """Cosines of embeddings that point apart are negative; the source's bounds are (0, 1)."""
    labels = torch.arange(2).repeat_interleave(4)
    angles = torch.deg2rad(torch.where(torch.arange(8) % 2 == 0, 0.0, 100.0)) + labels * math.pi
    points, metrics = torch.stack([angles.cos(), angles.sin()], dim=1), (*DEFAULT_METRICS, "recall@precision0.4")
    recalls = [
        log_of_validation(retrieval(metrics=metrics, **bounds), ReturnedPoints(), loader(TensorDataset(points, labels)))
        for bounds in ({}, {"threshold_bounds": (0, 1)})
    ]
    assert recalls[0]["val/recall@precision0.4"] == 1.0  # 12 of 28 pairs are relevant: accept all, at cosine -1
    assert recalls[1]["val/recall@precision0.4"] < 0.5


@pytest.mark.filterwarnings(r"ignore:.*\d+ of \d+ queries")
@pytest.mark.parametrize("metric", ["grouped_recall@1", "grouped_recall@1_miss"])
def test_given_groups_of_labels_are_measured_as_the_function_does(metric: str) -> None:
    points, labels = QUERIES.tensors
    lone = TensorDataset(torch.cat([points, torch.ones(1, FEATURES)]), torch.cat([labels, torch.tensor([99])]))
    settings = {"label_groups": [[-7, 3, 99], [13, 23, 33, 43]], "metrics": ("mAP", metric)}
    net, monitor = Net(), retrieval(**settings)
    logged = log_of_validation(monitor, net, loader(lone))
    assert logged == close(with_prefix(expected_metrics(*net.by_hand(lone), **settings)))
    assert monitor.report.grouped.labels == (((-7, 3, 99), (13, 23, 33, 43)),)


@pytest.mark.parametrize(("prog_bar", "shown"), [(True, {"val/mAP"}), (False, set())])
def test_only_map_is_shown_in_the_progress_bar(prog_bar: bool, shown: set[str]) -> None:
    run = trainer(retrieval(prog_bar=prog_bar))
    run.validate(Net(), loader(), verbose=False)
    assert set(run.progress_bar_metrics) == shown


def test_no_queries_without_a_match_are_no_chart_unless_it_is_monitored(tmp_path: Path) -> None:
    run = trainer(retrieval(), max_epochs=2)
    run.fit(Net(), loader(), loader(QUERIES))
    assert not [key for key in run.callback_metrics if "match" in key]
    best = ModelCheckpoint(tmp_path, monitor="val/queries_without_match")
    trainer(best, retrieval()).fit(Net(), loader(), loader(QUERIES))
    assert best.best_model_score == 0


def test_a_chart_of_queries_without_a_match_that_has_begun_goes_on() -> None:
    """Two queries have none in the second epoch alone."""
    points, labels = QUERIES.tensors
    lone = TensorDataset(torch.cat([points, -points[:2]]), torch.cat([labels, torch.tensor([1, 2])]))

    class Counts(Callback):
        values: ClassVar[list[float]] = []

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.values.append(float(trainer.callback_metrics.get("val/queries_without_match", -1)))

    class Changing(LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return loader()

        def val_dataloader(self) -> DataLoader[Any]:
            assert self.trainer is not None
            return loader(lone if self.trainer.current_epoch == 1 else QUERIES)

    run = trainer(retrieval(), Counts(), max_epochs=3, reload_dataloaders_every_n_epochs=1)
    with warned(UserWarning, "val", 2, 38, "queries"):
        run.fit(Net(), datamodule=Changing())
    assert Counts.values == [-1, 2, 0]


def test_queries_without_a_match_are_counted_and_noted_once() -> None:
    points, labels = QUERIES.tensors
    data = TensorDataset(torch.cat([points, -points[:2]]), torch.cat([labels, torch.tensor([1, 2])]))
    net, monitor = Net(), retrieval()
    for _ in range(2):  # once in each run
        run = trainer(monitor, max_epochs=2)
        with warned(UserWarning, "val", 2, 38, "queries") as caught:
            run.fit(net, loader(), loader(data))
        assert len(messages_of(caught)) == 1
    assert run.callback_metrics["val/queries_without_match"] == 2
    assert run.callback_metrics["val/mAP"] == pytest.approx(expected_metrics(*net.by_hand(data))["mAP"], rel=1e-5)


def test_each_loader_is_evaluated_by_itself() -> None:
    net, monitor = Net(), retrieval()
    expected = [expected_metrics(*net.by_hand(data)) for data in (QUERIES, GALLERY)]
    listed = log_of_validation(monitor, net, [loader(QUERIES), loader(GALLERY)])
    ends = "/dataloader_idx_0", "/dataloader_idx_1"
    assert listed == close(with_prefix(expected[0], end=ends[0]) | with_prefix(expected[1], end=ends[1]))
    assert set(monitor.reports) == set(ends)
    assert monitor.report is None
    named = log_of_validation(monitor, net, {"easy": loader(QUERIES), "hard": loader(GALLERY)})
    assert named == close(with_prefix(expected[0], end="/easy") | with_prefix(expected[1], end="/hard"))


@pytest.mark.parametrize(("gallery", "searched"), [(0, QUERIES), (1, GALLERY), ("dataloader_idx_1", GALLERY)])
def test_a_gallery_loader_by_index_and_by_name(gallery: int | str, searched: TensorDataset) -> None:
    """By the name that it has in a dictionary, too, which may hold several sets of queries."""
    net, third = Net(), items(per_class=2, seed=5)
    asked = GALLERY if gallery == 0 else QUERIES
    expected = expected_metrics(*net.by_hand(asked), *net.by_hand(searched))
    assert log_of_validation(retrieval(gallery=gallery), net, [loader(QUERIES), loader(GALLERY)]) == close(
        with_prefix(expected)
    )
    assert expected["mAP"] != pytest.approx(expected_metrics(*net.by_hand(asked))["mAP"])
    loaders = {"day": loader(asked), "shop": loader(searched), "night": loader(third)}
    of_night = expected_metrics(*net.by_hand(third), *net.by_hand(searched))
    both = with_prefix(expected, end="/day") | with_prefix(of_night, end="/night")
    assert log_of_validation(retrieval(gallery="shop"), net, loaders) == close(both)


class Flagged(Net):
    """Batches of points, labels and the flag of the gallery, as a mapping; the flag in the output comes first."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        flags = {"in_gallery": batch["shop"], "both": batch["shop"]}
        return {"embeddings": self.embed(batch["points"]), "labels": batch["labels"]} | flags


def flagged(flag: Tensor) -> DataLoader[Any]:
    rows = zip(*QUERIES.tensors, flag, ~flag, strict=True)
    return DataLoader([dict(zip(("points", "labels", "shop", "both"), row, strict=True)) for row in rows], batch_size=7)


@pytest.mark.parametrize("flag", ["in_gallery", "shop", "both", lambda outputs, batch: batch["shop"].long()])
def test_a_flag_for_each_item_marks_the_gallery(flag: Any) -> None:
    net, chosen = Flagged(), (torch.arange(36) % 2 == 0) & (torch.arange(36) < 24)  # two of each class
    embeddings, labels = net.by_hand(QUERIES)
    expected = expected_metrics(embeddings[~chosen], labels[~chosen], embeddings[chosen], labels[chosen])
    monitor = retrieval(gallery=flag)
    assert log_of_validation(monitor, net, flagged(chosen)) == close(with_prefix(expected))
    assert monitor.report is not None
    assert (monitor.report.queries, monitor.report.gallery) == (24, 12)


@pytest.mark.parametrize(
    ("gallery", "facts"),
    [
        ("nowhere", ("gallery='nowhere'", "batch", "'points'", "'labels'", "'shop'", "'both'")),
        (lambda o, b: [1, 0], ("gallery", "list", 2, "boolean")),
        (lambda o, b: b["points"], ("gallery", "(7, 12)", "boolean")),
        (lambda o, b: b["shop"][:2], ("gallery", 2, 7, "boolean")),
        (lambda o, b: b["shop"] | True, ("queries", "empty")),
        (0, ("gallery=0", "loader", "queries")),
        (3, ("gallery=3", "'dataloader_idx_0'", 1)),
        ("shelf", ("gallery='shelf'", "loader", "'dataloader_idx_0'")),
    ],
)
def test_what_is_wrong_with_a_gallery_is_said_and_the_values_are_nan(gallery: Any, facts: tuple[Any, ...]) -> None:
    loaders = flagged(torch.arange(36) % 3 == 0)
    with warned(UserWarning, "val/mAP", "NaN", *facts):
        logged = log_of_validation(retrieval(strict=False, gallery=gallery), Flagged(), loaders)
    assert set(logged) == set(with_prefix(expected_metrics(*Net().by_hand(QUERIES))))
    assert all(map(math.isnan, logged.values()))
    with refused(ValueError, *facts):
        log_of_validation(retrieval(strict=True, gallery=gallery), Flagged(), loaders)


class HalfBroken(Net):
    """Gives no embeddings of the first of two loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        gives = dataloader_idx or len(self.trainer.num_val_batches) == 1
        return super().validation_step(batch, batch_idx) if gives else None


@pytest.mark.parametrize("fails", ["the evaluation", "the step"])
def test_the_failure_of_one_loader_leaves_the_other(fails: str) -> None:
    """And no report of an earlier evaluation."""
    net, monitor = HalfBroken() if fails == "the step" else Net(), retrieval(strict=False)
    log_of_validation(monitor, net)
    assert monitor.report is not None
    broken = loader(QUERIES)
    facts: tuple[Any, ...] = ("validation_step", "None", "'embeddings'")
    if fails == "the evaluation":
        broken = loader(TensorDataset(QUERIES.tensors[0] * math.nan, QUERIES.tensors[1]))
        facts = ("queries", 36, "Inf")
    with warned(UserWarning, "val/mAP/dataloader_idx_0", "NaN", *facts):
        logged = log_of_validation(monitor, net, [broken, loader(GALLERY)])
    assert math.isnan(logged["val/mAP/dataloader_idx_0"])
    assert logged["val/mAP/dataloader_idx_1"] == pytest.approx(expected_metrics(*net.by_hand(GALLERY))["mAP"], rel=1e-5)
    assert set(monitor.reports) == {"/dataloader_idx_1"}


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"metrics": ("mAP", "recall@0")}, ("'recall@0'", "'recall@1'")),
        ({"label_groups": 1}, ("label_groups=1", 2, "'auto'", "None")),
        ({"name": ""}, ("name=''", "val/mAP", "test/mAP")),
        ({"query_groups": "camera"}, ("query_groups", "groups='camera'")),
        ({"gallery_groups": "camera"}, ("gallery_groups", "groups='camera'")),
        (
            {"groups": [[0, 1], [2, 3]]},
            ("groups=[[0, 1], [2, 3]]", "groups=('person', 'camera')", "label_groups=[[0, 1, 2], [3, 4, 5]]"),
        ),
        ({"queries": "encoder"}, ("queries", "source='encoder'")),
        ({"query_ids": "path"}, ("query_ids", "source=EmbeddingSource(ids='path')")),
        ({"is_gallery": "shop"}, ("is_gallery", "gallery=1", "gallery='is_gallery'")),
        ({"source": ("a", "b", "c")}, ("source=('a', 'b', 'c')", "('embeddings', 'labels')")),
        ({"source": [1, 2]}, ("source=[1, 2]", "('embeddings', 'labels')")),
        ({"source": 3}, ("source=3", "keys", "submodule", "(outputs, batch)", "EmbeddingSource")),
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_a_wrong_setting_is_refused_at_once(settings: dict[str, Any], facts: tuple[Any, ...]) -> None:
    with refused(ValueError, "RetrievalMonitor", *facts):
        RetrievalMonitor(**settings)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [({"k": 0}, ("k=0", 1)), ({"bank": "training"}, ("bank='training'", "'train'", "'gallery'", "'self'"))],
)
def test_a_wrong_setting_of_a_vote_is_refused_at_once(settings: dict[str, Any], facts: tuple[Any, ...]) -> None:
    with refused(ValueError, "KnnMonitor", *facts):
        KnnMonitor(**settings)


@pytest.mark.parametrize("stage", ["val", "test"])
def test_two_monitors_log_under_their_own_names(stage: str) -> None:
    """A name stands beside the stage, so that a test is not taken for a validation."""
    net, run = Net(), trainer(retrieval(), retrieval(name="far", similarity="euclidean"))
    (run.validate if stage == "val" else run.test)(net, loader(), verbose=False)
    expected = with_prefix(expected_metrics(*net.by_hand(QUERIES)), stage)
    expected |= with_prefix(expected_metrics(*net.by_hand(QUERIES), similarity="euclidean"), f"{stage}/far")
    assert {key: float(value) for key, value in run.callback_metrics.items()} == close(expected)


@pytest.mark.parametrize("name", [None, "far"])
def test_two_monitors_that_would_log_the_same_keys_are_refused(name: str | None) -> None:
    """Lightning would log their mean."""
    with refused(ValueError, "RetrievalMonitors", "Trainer", "keys", "name='t2i'", "val/t2i/mAP"):
        log_of_validation((retrieval(name=name), retrieval(name=name)), Net())


@pytest.mark.parametrize(
    ("bar", "refresh_rate", "quiet", "shows"),
    [
        (TQDMProgressBar, 1, 0.0, True),
        (TQDMProgressBar, 0, 0.0, False),
        (TQDMProgressBar, 1, 1000.0, False),
        (RichProgressBar, 1, 0.0, True),
        (RichProgressBar, 0, 0.0, False),
        (None, 0, 0.0, False),
    ],
)
def test_a_long_evaluation_is_shown_on_the_trainers_bar_and_a_short_one_is_not(
    bar: Any, refresh_rate: int, quiet: float, shows: bool, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_conduct, "QUIET_SECONDS", quiet)
    spy = mock.Mock(wraps=_conduct.tqdm)
    monkeypatch.setattr(_conduct, "tqdm", spy)
    add_task = mock.create_autospec(Progress.add_task, side_effect=Progress.add_task)
    monkeypatch.setattr(Progress, "add_task", add_task)
    bars = [bar(refresh_rate=refresh_rate)] if bar else []
    run = trainer(retrieval(), *bars, enable_progress_bar=bool(bars))
    run.fit(Net(), loader(), loader())
    assert 0 < run.callback_metrics["val/mAP"] <= 1
    named = "self", "desc", "start", "total"  # arguments of Rich's method
    tasks = [dict(zip(named, call.args, strict=False)) | call.kwargs for call in add_task.call_args_list]
    tasks += [call.kwargs for call in spy.call_args_list]
    ours = [task["total"] for task in tasks if task.get("desc") == "Retrieval of val"]
    assert len(ours) == shows
    assert all(total >= 36 * 35 / 2 for total in ours)
    text = "".join(capfd.readouterr())
    if bar is RichProgressBar:  # nothing of ours stays on the Trainer's bar
        tasks = bars[0].progress.tasks if refresh_rate else []
        assert not [task for task in tasks if task.description == "Retrieval of val"]
    else:
        assert ("Retrieval of val" in text) == shows


@pytest.mark.filterwarnings("ignore:.*are NaN")
def test_ids_that_name_no_single_items_are_told_once() -> None:
    def identities(outputs: Any, batch: Any) -> list[str]:  # and camera: such as those of several photographs
        return [f"identity {label} camera 1" for label in batch[1].tolist()]

    facts = "RetrievalMonitor", "ids", 6, 30, 36
    with warned(UserWarning, *facts) as caught:
        trainer(retrieval(source=EmbeddingSource(ids=identities), strict=False), max_epochs=2).fit(
            Net(), loader(), loader()
        )
    assert len(messages_of(caught, *facts)) == 1


@pytest.mark.parametrize("voters", ["train", "gallery", "self", "given"])
def test_neighbours_vote_as_the_function_says(voters: str) -> None:
    """Each set of voters gives what the function gives; each submodule is in the mode afterwards in which it was."""
    net, given = Embeds(), DataLoader(Labelled(TRAINING), batch_size=7, shuffle=True)
    net.frozen.eval()
    modes = [part.training for part in net.modules()]
    run = trainer(KnnMonitor((1, 5), given if voters == "given" else voters, gallery=[None, 1][voters == "gallery"]))
    if voters == "train":
        data = LightningDataModule.from_datasets(val_dataset=QUERIES, batch_size=11)
        data.training_data_for_evaluation = lambda: Labelled(TRAINING)
        run.validate(net, datamodule=data, verbose=False)
    else:
        run.validate(net, [loader(), loader(GALLERY)] if voters == "gallery" else loader(), verbose=False)
    assert [part.training for part in net.modules()] == modes
    assert set(modes) == {True, False}
    sets = {"train": [TRAINING], "given": [TRAINING], "gallery": [GALLERY], "self": []}[voters]
    report = knn_accuracy(*(part for data in (QUERIES, *sets) for part in net.by_hand(data)), k=(1, 5))
    logged = {key: float(value) for key, value in run.callback_metrics.items() if "knn" in key}
    assert logged == close(with_prefix(report.values))


def test_what_cannot_vote_is_told() -> None:
    with warned(UserWarning, "val", 35, "knn@99", "knn@99_top5", "NaN", "k"):
        logged = log_of_validation(KnnMonitor((5, 99), "self"), Net())
    assert math.isnan(logged["val/knn@99"])
    assert logged["val/knn@5"] > 0
    other = TensorDataset(TRAINING.tensors[0], TRAINING.tensors[1] + 1)
    with warned(UserWarning, "val/knn@5", "NaN", "queries", 36, "label"):
        logged = log_of_validation((retrieval(), KnnMonitor(5, Labelled(other))), Embeds())
    assert math.isnan(logged["val/knn@5"])
    assert not math.isnan(logged["val/mAP"])
