"""The monitors in whole fits: what Lightning's own callbacks see, and that nothing else changes."""

import math
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, RetrievalMonitor
from fewshot_callbacks.callbacks import retrieval as retrieval_module
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import discriminant_ratio
from tests.callbacks.models import (
    Embeds,
    EveryBatch,
    EveryEpoch,
    Net,
    Scripted,
    gap_monitor,
    hooks,
    items,
    loader,
    measured,
    retrieval,
    said,
    scripted,
    trainer,
)
from tests.functional.variance import logged_by_definition

NAN = math.nan


def quality_to_map(quality: float, n: int = 36) -> float:
    points, labels = (tensor[:n] for tensor in items().tensors)
    return NAN if math.isnan(quality) else measured(scripted(points, labels, quality), labels)["mAP"]


def is_clean(net: Net, *monitors: Any) -> bool:
    """No hook, no embeddings, nothing expected."""
    return hooks(net) == 0 and not any(
        monitor._reader._captured
        or monitor._failed
        or getattr(getattr(monitor, "_parts", None), "stores", None)
        or getattr(monitor, "_moments", None)
        for monitor in monitors
    )


# ------------------------------------------------------------------------------------- checkpoints and early stopping

QUALITY = [0.0, 0.6, 4.0, 0.3]
MAPS = [quality_to_map(quality) for quality in QUALITY]


@pytest.mark.parametrize("monitor_last", [True, False])
def test_model_checkpoint_keeps_the_best_epoch(tmp_path: Path, monitor_last: bool) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val/mAP", mode="max", filename="{epoch}")
    epochs = EveryEpoch()
    callbacks = [best, retrieval(), epochs] if monitor_last else [retrieval(), best, epochs]
    trainer(*callbacks, max_epochs=4).fit(Scripted(QUALITY), loader(), loader())
    assert epochs.values == pytest.approx(MAPS, rel=1e-6)
    assert Path(best.best_model_path).name == "epoch=2.ckpt"
    assert float(best.best_model_score) == 1.0


def test_early_stopping_stops_after_the_best_epoch() -> None:
    stopping, epochs = EarlyStopping("val/mAP", mode="max", patience=1), EveryEpoch()
    quality = [0.0, 4.0, 0.3, 0.3, 0.3]
    run = trainer(stopping, retrieval(), epochs, max_epochs=5)
    run.fit(Scripted(quality), loader(), loader())
    assert stopping.stopped_epoch == 2
    assert epochs.values == pytest.approx([quality_to_map(q) for q in quality[:3]], rel=1e-6)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_a_fit_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    first, again = (
        ModelCheckpoint(tmp_path, monitor="val/mAP", mode="max", filename="{epoch}", save_last=True) for _ in range(2)
    )
    monitors = retrieval(), DiscriminantRatioMonitor(every_n_steps=3)
    trainer(*monitors, first, max_epochs=2).fit(Scripted(QUALITY), loader(), loader())
    epochs, rest = EveryEpoch(), EveryBatch()
    run = trainer(retrieval(), DiscriminantRatioMonitor(every_n_steps=3), rest, epochs, again, max_epochs=4)
    run.fit(Scripted(QUALITY), loader(), loader(), ckpt_path=first.last_model_path)
    assert epochs.values == pytest.approx(MAPS[2:], rel=1e-6)
    assert Path(again.best_model_path).name == "epoch=2.ckpt"
    # batches 9 and 12 are due, the first and the last of the 9th to 16th that follow the 8 of the first fit
    every = [float(discriminant_ratio(step["embeddings"], step["labels"])) for step in rest.outputs]
    assert rest.logged[0] == pytest.approx(every[0])
    assert rest.logged[3:6] == pytest.approx([every[3]] * 3)


# ------------------------------------------------------------------------------------------------- shapes of a validation


def test_validate_and_test_after_fit_look_at_the_loaders_they_are_given() -> None:
    net, other = Net(), items(per_class=4, seed=4)
    monitors = retrieval(), DiscriminantRatioMonitor()
    run = trainer(*monitors)
    run.fit(net, loader(), [loader(), loader()])
    assert "val/mAP/dataloader_idx_1" in run.callback_metrics
    [validated] = run.validate(net, loader(other), verbose=False)
    [tested] = run.test(net, loader(other), verbose=False)
    embeddings, labels = net.by_hand(other)
    ratios = {"J": float(discriminant_ratio(embeddings, labels))} | logged_by_definition(embeddings, labels)
    expected = measured(embeddings, labels) | ratios
    assert validated == pytest.approx({f"val/{name}": value for name, value in expected.items()}, rel=1e-5)
    assert tested == pytest.approx({f"test/{name}": value for name, value in expected.items()}, rel=1e-5)
    assert set(monitors[0].reports) == {""}
    assert is_clean(net, *monitors)


# ------------------------------------------------------------------------------------------------------ the sanity check


def test_the_sanity_check_measures_nothing() -> None:
    epochs = EveryEpoch()
    seen: list[set[str]] = []

    class AtStart(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append({*trainer.callback_metrics, *trainer.progress_bar_metrics, *monitors[0].reports})

    monitors = retrieval(), DiscriminantRatioMonitor()
    trainer(*monitors, epochs, AtStart(), num_sanity_val_steps=2).fit(Scripted([0.6]), loader(), loader())
    assert seen == [set()]
    assert epochs.values == pytest.approx([quality_to_map(0.6)])  # and nothing of the sanity check is left in it


class Useless(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx)
        return {"loss": batch[0].mean()}


@pytest.mark.parametrize("monitor", [retrieval, DiscriminantRatioMonitor])
def test_the_sanity_check_shows_what_cannot_be_measured_and_says_it_once(monitor: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match="sanity check") as warned:
        trainer(monitor(strict=False), num_sanity_val_steps=1, max_epochs=2).fit(Useless(), loader(), loader())
    [words] = said(warned)
    assert words.startswith(
        f"The sanity check shows that validation cannot be measured. {type(monitor()).__name__} found no embeddings: "
        "validation_step returned a mapping with the keys 'loss'; expected 'embeddings'."
    )


# --------------------------------------------------------------------------------------------- nothing else is changed


def test_a_submodule_that_cannot_be_read_fills_no_memory_while_training() -> None:
    """After a failed validation nobody reads what the submodule returns in the steps of the training."""
    net, monitor = Net(), retrieval(source="encoder", labels="nowhere", strict=False)
    kept: list[Any] = []
    net.classifier.register_forward_pre_hook(lambda *_: kept.append(monitor._reader._captured))
    with pytest.warns(UserWarning, match=r"labels='nowhere'\): the batch is a list of 2 and has no such entry"):
        trainer(monitor, max_epochs=2).fit(net, loader(), loader())
    assert kept == [None] * 8


# ---------------------------------------------------------------------------------------------------- when things fail


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Lightning ignores SIGINT once it has seen one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("_ctrl_c")
def test_an_interrupted_evaluation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monitors = retrieval(source="encoder"), DiscriminantRatioMonitor(source="encoder")
    net = Net()
    run = trainer(*monitors)
    monkeypatch.setattr(retrieval_module, "evaluate_retrieval", interrupt)
    with pytest.raises(SystemExit):
        run.fit(net, loader(), loader())
    assert is_clean(net, *monitors)
    monkeypatch.undo()
    [logged] = run.validate(net, loader(), verbose=False)  # and both can be used again
    assert logged["val/mAP"] == pytest.approx(measured(*net.by_hand(items()))["mAP"], rel=1e-5)


def test_an_unexpected_error_of_the_evaluation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise MemoryError("cannot allocate 12 GiB")

    monkeypatch.setattr(retrieval_module, "evaluate_retrieval", out_of_memory)
    run = trainer(retrieval())
    with pytest.warns(UserWarning, match="are NaN. MemoryError: cannot allocate 12 GiB"):
        run.fit(Net(), loader(), loader())
    assert math.isnan(run.callback_metrics["val/mAP"])


def test_embeddings_are_dropped_as_soon_as_they_are_measured() -> None:
    monitors = retrieval(), DiscriminantRatioMonitor()
    held: list[int] = []

    class Watch(Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            held.append(len(monitors[0]._parts.stores[0, False]))

        def on_validation_end(self, *_: Any) -> None:
            held.append(len(monitors[0]._parts.stores) + len(monitors[1]._moments))

    trainer(*monitors, Watch()).fit(Net(), loader(), loader())
    assert held == [11, 22, 33, 36, 0]


# ------------------------------------------------------------------------------------------------------------- ProtoNet


@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
@pytest.mark.parametrize("settings", [{}, {"limit_val_batches": 0}], ids=str)
def test_a_monitor_that_is_never_validated_does_no_harm(settings: dict[str, Any]) -> None:
    net, monitors = Net(), (RetrievalMonitor(), DiscriminantRatioMonitor())
    run = trainer(*monitors, **settings)
    run.fit(net, loader(), loader() if settings else None)
    assert not [key for key in run.callback_metrics if key.startswith("val/")]
    assert is_clean(net, *monitors)


# --------------------------------------------------------------------------- keys that Lightning's own callbacks monitor


class Scheduled(Net):
    """Its learning rate follows a value of the validation."""

    def __init__(self, monitor: str) -> None:
        super().__init__()
        self.monitor = monitor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.monitor}}


def sketches_and_photos() -> dict[str, Any]:
    return {"sketches": loader(), "photos": loader()}


@pytest.mark.parametrize(
    ("key", "loaders", "words"),
    [
        ("val/map", loader, "Did you mean 'val/mAP'?"),
        ("val/recall_1", loader, "Did you mean 'val/recall@1'?"),
        ("val/j", loader, "Did you mean 'val/J'?"),
        ("val/mAP", sketches_and_photos, "Did you mean 'val/mAP/photos'?"),
        ("val/mAP/dataloader_idx_0", loader, "Did you mean 'val/mAP'?"),
    ],
)
@pytest.mark.parametrize("kind", [ModelCheckpoint, EarlyStopping, "ReduceLROnPlateau"])
def test_a_misspelt_key_ends_the_run_at_its_sanity_check(
    key: str, loaders: Any, words: str, kind: Any, tmp_path: Path
) -> None:
    """Lightning itself would say so after the first epoch."""
    callbacks = [] if kind == "ReduceLROnPlateau" else [kind(monitor=key)]
    net, batches = Scheduled(key) if kind == "ReduceLROnPlateau" else Net(), EveryBatch()
    run = trainer(
        *callbacks, retrieval(), DiscriminantRatioMonitor(), batches, default_root_dir=tmp_path, num_sanity_val_steps=1
    )
    with pytest.raises(UsageError, match=re.escape(words)) as raised:
        run.fit(net, loader(), loaders())
    assert str(raised.value).startswith(f"{getattr(kind, '__name__', kind)}(monitor={key!r}): ")
    assert not batches.outputs


class Loud(Net):
    """Logs a key of its own that looks like one of the monitor's, at the end of the validation."""

    def on_validation_epoch_end(self) -> None:
        self.log("val/map", 0.5)


@pytest.mark.parametrize("sanity_steps", [0, 1])
@pytest.mark.filterwarnings("ignore:.*nothing else has so far")
def test_a_key_that_the_module_logs_itself_is_its_own_affair(sanity_steps: int, tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val/map", mode="max")
    trainer(best, retrieval(), num_sanity_val_steps=sanity_steps).fit(Loud(), loader(), loader())
    assert best.best_model_score == 0.5


@pytest.mark.parametrize("key", ["val/map", "val/grouped_recal"])
def test_what_may_still_be_logged_is_a_warning(key: str) -> None:
    """Without a sanity check nobody knows what the module logs; a key that is only similar may be another callback's."""
    early = EarlyStopping(monitor=key, strict=False)
    run = trainer(early, retrieval(label_groups=3), num_sanity_val_steps=int(key != "val/map"))
    words = f"EarlyStopping(monitor='{key}'): no monitor here logs this value, and nothing else has so far."
    with pytest.warns(UserWarning, match=f"^{re.escape(words)}"):
        run.fit(Net(), loader(), loader())


@pytest.mark.parametrize("key", ["val/mAP", "val/J", "val/variance_ratio_low", "train/J", "val/loss", "gap/recall@1"])
def test_keys_that_exist_or_that_nobody_knows_pass_in_silence(key: str) -> None:
    early = EarlyStopping(monitor=key, strict=False)
    run = trainer(early, retrieval(), DiscriminantRatioMonitor(), gap_monitor(), num_sanity_val_steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "EarlyStopping.monitor")
        run.fit(Embeds(), loader(), loader())


# --------------------------------------------------------------------------------------- too few classes for a metric


def test_a_metric_that_needs_more_classes_has_no_key_and_one_notice() -> None:
    """Also where a later validation fails; NaN in every table would say nothing."""
    net, monitor = Scripted([0.6, 0.6, NAN]), RetrievalMonitor()
    run = trainer(monitor, max_epochs=3)
    with pytest.warns(UserWarning, match="Grouped|other values") as caught:
        run.fit(net, loader(), loader())
    [notice] = [words for words in said(caught) if "Grouped" in words]
    assert notice.startswith("val: Grouped Recall is left out: two groups of label_groups=10 labels need 20")
    assert not [key for key in run.callback_metrics if "grouped" in key]
    assert math.isnan(run.callback_metrics["val/mAP"])


@pytest.mark.filterwarnings("ignore:.*Grouped Recall is left out")
def test_who_monitors_such_a_metric_is_told(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="val/grouped_recall@1", mode="max")
    with pytest.raises(UsageError, match=r"ModelCheckpoint\(monitor='val/grouped_recall@1'\): this set has too few"):
        trainer(best, RetrievalMonitor()).fit(Net(), loader(), loader())
    run = trainer(best, RetrievalMonitor(strict=False))
    with pytest.warns(UserWarning, match="val/grouped_recall@1 is NaN. ModelCheckpoint.*this set has too few classes"):
        run.fit(Net(), loader(), loader())
    assert math.isnan(run.callback_metrics["val/grouped_recall@1"])
