"""A validation is compared with a reference: the last significantly better one, the first one, or a saved report."""

import math
from copy import copy
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar

from fewshot_callbacks.functional.statistics import paired_difference_interval
from tests.callbacks import gain_jobs
from tests.callbacks.models import Scripted, items, loader, messages_of, retrieval, trainer
from tests.gloo_processes import answers
from tests.messages import refused

QUALITY = (0.5, 0.8, 0.8, 0.79, 1.2, 1.1, 1.19, 1.21)
DATA = items(per_class=20)
KEYS = ("val/mAP_gain", "val/mAP_gain_low", "val/mAP_gain_high", "val/mAP_reference")


class Logged(Callback):
    """Keeps what was logged in each epoch, and the values of the queries."""

    def __init__(self, monitor):
        self.monitor, self.epochs, self.values, self.labels, self.texts = monitor, [], [], [], []

    def on_validation_end(self, trainer, pl_module):
        self.epochs.append({key: float(value) for key, value in trainer.callback_metrics.items() if "/mAP" in key})
        if self.monitor.report is not None:
            self.values.append(self.monitor.report.per_query["mAP"])
            self.labels.append(self.monitor.report.query_labels)
            self.texts.append(str(self.monitor.report))


def fitted(monitor, *callbacks, quality=QUALITY, loaders=None, **settings):
    logged = Logged(monitor)
    settings = {"max_epochs": len(quality)} | settings
    path = settings.pop("ckpt_path", None)
    run = trainer(monitor, *callbacks, logged, **settings)
    run.fit(Scripted(quality), loader(DATA), loaders or loader(DATA), ckpt_path=path)
    return logged


def by_hand(logged, against):
    """What has to be logged, from the values of the queries alone."""
    reference, tries, expected = 0, 0, []
    for epoch, values in enumerate(logged.values):
        if epoch == 0:
            expected.append((0.0, 0.0, 0.0, float(values.mean())))
            continue
        tries = tries + 1 if against == "best" else 1
        differences = values - logged.values[reference]
        low, high = 0.0, 0.0
        if differences.any():
            low, high = paired_difference_interval(differences, logged.labels[0], 1 - 0.05 / tries)
        gain = float(values.mean() - logged.values[reference].mean())
        if low > 0 and against == "best":
            reference, tries = epoch, 0
        expected.append((gain, low, high, float(logged.values[reference].mean())))
    return expected


@pytest.mark.parametrize("against", ["best", "first"])
def test_gains_are_those_of_the_reference(against):
    logged = fitted(retrieval(compare=against, metrics=("mAP", "recall@1")))
    expected = by_hand(logged, against)
    for found, values in zip(logged.epochs, expected, strict=True):
        assert [found[name] for name in KEYS] == pytest.approx(list(values), abs=1e-6)
    references = [values[-1] for values in expected]
    assert len(set(references)) == (1 if against == "first" else 4)
    assert references == sorted(references)


def test_nothing_is_logged_or_kept_unless_asked_for(tmp_path):
    save = ModelCheckpoint(tmp_path, save_last=True)
    assert set(fitted(retrieval(metrics="mAP"), save).epochs[-1]) == {"val/mAP"}
    assert "fewshot_callbacks_gains" not in torch.load(tmp_path / "last.ckpt", weights_only=True)


def test_the_report_and_the_bar_say_it_as_a_sentence(capsys):
    monitor = retrieval(compare="best", metrics="mAP")
    logged = fitted(monitor, TQDMProgressBar(), enable_progress_bar=True)
    assert "the reference for the next validations" in logged.texts[0]
    assert "mAP is better than the reference by" in logged.texts[1]
    assert "not significant" in logged.texts[2]
    assert capsys.readouterr().out.count("than the reference by") >= 3


def test_a_saved_report_is_compared_with_in_every_stage(tmp_path):
    first = retrieval(metrics=("mAP", "recall@1"))
    fitted(first, quality=QUALITY[:1])
    first.report.save(tmp_path / "old.npz")
    for compare in (tmp_path / "old.npz", str(tmp_path / "old.npz"), first.report):
        monitor = retrieval(compare=compare, metrics="mAP")
        runner = trainer(monitor)
        runner.validate(Scripted([1.2]), loader(DATA), verbose=False)
        expected = monitor.report.mAP - first.report.mAP
        assert float(runner.callback_metrics["val/mAP_gain"]) == pytest.approx(expected, abs=1e-6)
        assert float(runner.callback_metrics["val/mAP_gain_low"]) > 0


@pytest.mark.parametrize("compare", ["bets", Path("nowhere.npz"), ""])
def test_a_reference_that_is_none_is_refused_where_it_is_given(compare):
    with refused(ValueError, "compare", str(compare)):
        retrieval(compare=compare)


def test_a_damaged_report_is_refused_where_it_is_given(tmp_path):
    (tmp_path / "old.npz").write_bytes(b"PK" + bytes(100))
    with refused(ValueError, "old.npz"):
        retrieval(compare=tmp_path / "old.npz")


def test_another_set_than_that_of_a_saved_report_is_said_and_not_compared(tmp_path):
    first = retrieval(metrics="mAP")
    fitted(first, quality=QUALITY[:1])
    monitor = retrieval(compare=first.report, metrics="mAP")
    run = trainer(monitor)
    with pytest.warns(UserWarning, match="The gain is NaN") as said:
        run.validate(Scripted([1.2]), loader(items(per_class=4)), verbose=False)
    assert messages_of(said, "the reference", "labels")
    assert all(math.isnan(run.callback_metrics[key]) for key in KEYS)


def test_a_set_that_changes_in_a_training_begins_anew():
    class Grows(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                trainer.val_dataloaders.dataset.tensors = items(per_class=4).tensors

    monitor = retrieval(compare="best", metrics="mAP")
    with pytest.warns(UserWarning, match="new reference"):
        logged = fitted(monitor, Grows(), quality=QUALITY[:5], loaders=loader(copy(DATA)))
    assert [len(values) for values in logged.values] == [120, 120, 24, 24, 24]
    assert [logged.epochs[2][key] for key in KEYS] == [0, 0, 0, pytest.approx(float(logged.values[2].mean()))]
    assert logged.epochs[4]["val/mAP_gain_low"] > 0


def test_checkpoints_and_early_stopping_may_monitor_the_reference(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, monitor="val/mAP_reference", mode="max", filename="{epoch}")
    stopping = EarlyStopping("val/mAP_reference", mode="max", patience=2)
    fitted(retrieval(compare="best", metrics="mAP"), checkpoint, stopping)
    # Epochs 2 and 3 are not better than epoch 1. The first epoch, with gains of zero, does not end the training.
    assert stopping.stopped_epoch == 3
    assert Path(checkpoint.best_model_path).name == "epoch=1.ckpt"


@pytest.mark.parametrize(("compare", "warned"), [("best", True), ("first", False)])
def test_a_watcher_of_a_gain_over_the_best_is_warned_of(compare, warned, tmp_path, recwarn):
    watcher = ModelCheckpoint(tmp_path, monitor="val/mAP_gain_low", mode="max")
    fitted(retrieval(compare=compare, metrics="mAP"), watcher, quality=QUALITY[:2])
    assert bool(messages_of(recwarn, "ModelCheckpoint", "val/mAP_gain_low", "'val/mAP'")) == warned


@pytest.mark.filterwarnings("ignore:Be aware that when using")
def test_a_resumed_training_continues_with_its_reference(tmp_path):
    whole = fitted(retrieval(compare="best", metrics="mAP"))
    save = ModelCheckpoint(tmp_path, save_last=True)
    fitted(retrieval(compare="best", metrics="mAP"), save, max_epochs=4)
    rest = fitted(retrieval(compare="best", metrics="mAP"), max_epochs=8, ckpt_path=tmp_path / "last.ckpt")
    assert rest.epochs == whole.epochs[4:]


@pytest.mark.filterwarnings("ignore:Be aware that when using")
def test_a_resumed_training_with_another_first_metric_begins_anew(tmp_path):
    save = ModelCheckpoint(tmp_path, save_last=True)
    fitted(retrieval(compare="best", metrics=("mAP", "mrr")), save, max_epochs=2)
    monitor = retrieval(compare="best", metrics=("mrr", "mAP"))
    fitted(monitor, max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
    assert monitor.report.gain.metric == "mrr"
    assert monitor.report.gain.is_first


@pytest.mark.filterwarnings("ignore:Be aware that when using")
def test_a_reference_that_cannot_be_read_does_not_end_a_resumed_training(tmp_path):
    save = ModelCheckpoint(tmp_path, save_last=True)
    fitted(retrieval(compare="best", metrics="mAP"), save, max_epochs=2)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    checkpoint["fewshot_callbacks_gains"]["val"][""]["report"].zero_()
    torch.save(checkpoint, tmp_path / "last.ckpt")
    monitor = retrieval(compare="best", metrics="mAP")
    with pytest.warns(UserWarning, match="new reference"):
        fitted(monitor, max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
    assert monitor.report.gain.is_first


def test_two_monitors_keep_their_references_apart(tmp_path):
    monitors = [retrieval(compare=how, metrics="mAP", name=how) for how in ("best", "first")]
    save = ModelCheckpoint(tmp_path, save_last=True)
    logged = fitted(monitors[0], monitors[1], save)
    kept = torch.load(tmp_path / "last.ckpt", weights_only=True)["fewshot_callbacks_gains"]
    assert set(kept) == {"val/best", "val/first"}
    assert logged.epochs[-1]["val/best/mAP_reference"] > logged.epochs[-1]["val/first/mAP_reference"]


def test_several_loaders_have_references_of_their_own():
    monitor = retrieval(compare="best", metrics="mAP")
    logged = fitted(monitor, loaders=[loader(DATA), loader(items(per_class=9))], quality=QUALITY[:2])
    gains = [logged.epochs[1][f"val/mAP_gain/dataloader_idx_{index}"] for index in (0, 1)]
    assert min(gains) > 0
    assert gains[0] != gains[1]


def test_a_second_training_begins_anew():
    monitor = retrieval(compare="best", metrics="mAP")
    fitted(monitor)
    again = fitted(monitor)
    assert again.epochs[0]["val/mAP_gain_high"] == 0


def test_a_metric_of_queries_is_needed():
    with refused(Exception, "compare", "metrics"):
        fitted(retrieval(compare="best", metrics="pair_f1"), quality=QUALITY[:1])


def test_two_processes_log_what_one_does(gloo_folder):
    [alone] = answers(gloo_folder, gain_jobs.__name__, 1)
    both = answers(gloo_folder, gain_jobs.__name__, 2)
    assert both[0] == both[1]
    assert alone[3]["val/mAP_gain_high"] < 0 < alone[4]["val/mAP_gain_low"]
    for found, expected in zip(both[0], alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
