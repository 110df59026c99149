"""Keys that checkpoints, early stopping and schedulers wait for: their spelling, their direction, and who else logs them."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, EmbeddingHealthMonitor, KnnMonitor
from fewshot_callbacks.callbacks._conduct import UsageError
from tests.callbacks.models import (
    VALIDATION,
    Embeds,
    Net,
    SaidBefore,
    Scripted,
    gap_monitor,
    items,
    loader,
    messages_of,
    retrieval,
    trainer,
)
from tests.messages import missing_facts, refused, warned

ALL = (
    *("mAP", "recall@1", "eer", "fnmr@fmr0.1", "opis@fmr0.1", "pair_threshold", "macro_mAP"),
    "pair_f1",
)


def all_monitors() -> list[Callback]:
    return [
        retrieval(metrics=ALL),
        KnnMonitor(5, "self"),
        DiscriminantRatioMonitor(),
        EmbeddingHealthMonitor(k=2),
        gap_monitor(),
    ]


def plateau(net: LightningModule, **settings: Any) -> LightningModule:
    """The module with a scheduler that waits for a key."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    key = settings.pop("monitor")
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **settings)
    net.configure_optimizers = lambda: {  # type: ignore[method-assign]
        "optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": key}
    }  # fmt: skip
    return net


HIGHER = (
    *(
        "val/mAP",
        "val/recall@1",
        "val/macro_mAP",
        "val/pair_f1",
        "val/knn@5",
        "val/J",
        "val/variance_ratio_low",
        "val/rankme",
    ),
    *("train/J", "train/rankme", "gap/train_recall@1", "gap/val_grouped_recall@1"),
)
LOWER = (
    *("val/eer", "val/fnmr@fmr0.1", "val/opis@fmr0.1", "val/nc1", "val/cdnv", "val/uniformity", "val/hubness"),
    *("gap/recall@1", "gap/grouped_recall@1_low"),
)
NEITHER = "val/pair_threshold", "val/queries_without_match", "val/spectral_decay", "gap/share_of_time", "val/loss"


@pytest.mark.parametrize("sanity_steps", [0, 1])
@pytest.mark.parametrize("wrong", [True, False])
def test_who_takes_the_worst_value_for_the_best_is_told_once(wrong: bool, sanity_steps: int) -> None:
    modes = dict.fromkeys(HIGHER, "min" if wrong else "max") | dict.fromkeys(LOWER, "max" if wrong else "min")
    modes |= dict.fromkeys(NEITHER, "min")
    waiting = [EarlyStopping(monitor=key, mode=mode, strict=False) for key, mode in modes.items()]
    before = SaidBefore()
    run = trainer(*waiting, *all_monitors(), before, num_sanity_val_steps=sanity_steps, max_epochs=2)
    with warnings.catch_warnings(record=True) as before.caught:
        warnings.simplefilter("always")
        run.fit(Embeds(), loader(), loader())
    told = [words for words in messages_of(before.caught) if ", mode='" in words]
    assert told == [words for words in before.said if ", mode='" in words]
    assert len(told) == (len(HIGHER) + len(LOWER) if wrong else 0)
    for keys, better, mode, cure in ((HIGHER, "higher", "min", "max"), (LOWER, "lower", "max", "min")):
        for key in keys if wrong else ():
            facts = f"EarlyStopping(monitor='{key}', mode='{mode}')", better, f"mode='{cure}'"
            assert any(not missing_facts(one, facts) for one in told), key


@pytest.mark.parametrize("every", [1, 2])
def test_checkpoints_and_schedulers_of_several_loaders_are_told_the_right_mode(every: int, tmp_path: Path) -> None:
    """Lightning makes the loaders of a validation when it first needs them."""
    best, also = (
        ModelCheckpoint(tmp_path, monitor="val/mAP/b"),
        ModelCheckpoint(tmp_path, monitor="val/mAP/a", mode="max"),
    )
    before = SaidBefore()
    run = trainer(best, also, retrieval(), before, max_epochs=2, check_val_every_n_epoch=every)
    net = plateau(Net(), monitor="val/recall@1/a")
    if every > 1:
        net = Net()
    with warned(UserWarning, "higher", "mode='max'") as before.caught:
        run.fit(net, loader(), {"a": loader(), "b": loader(VALIDATION)})
    # Lightning makes the loaders of a validation in the second epoch just before it, and the sanity check is off here.
    assert bool(before.said) == (every == 1)
    told = [words.partition(")")[0] + ")" for words in messages_of(before.caught)]
    wanted = [
        "ModelCheckpoint(monitor='val/mAP/b', mode='min')",
        "ReduceLROnPlateau(monitor='val/recall@1/a', mode='min')",
    ]
    assert told == (wanted if every == 1 else wanted[:1])


def test_a_checkpoint_that_keeps_none_has_no_best(tmp_path: Path) -> None:
    last = ModelCheckpoint(tmp_path, monitor="val/mAP", save_top_k=0, save_last=True)
    trainer(last, retrieval()).fit(Net(), loader(), loader())  # warnings are errors here


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        *(
            (key, "val/mAP")
            for key in ("val_mAP", "mAP", "valid/mAP", "validation_map", "Val-MAP", "test/mAP", "eval/mAP")
        ),
        *((key, "val/recall@1") for key in ("recall1", "val_recall_1", "valid/Recall@1")),
        *((key, "val/J") for key in ("j", "val_j")),
        *((key, "gap/recall@1") for key in ("gap_recall_1", "gap_recall1")),
    ],
)
@pytest.mark.parametrize("loaders", [1, 2])
def test_another_spelling_of_a_key_ends_the_run_of_a_strict_monitor(key: str, meant: str, loaders: int) -> None:
    monitors = retrieval(strict=True), DiscriminantRatioMonitor(), gap_monitor()
    run = trainer(EarlyStopping(monitor=key, mode="max"), *monitors, num_sanity_val_steps=1)
    meant += "/first" if loaders == 2 and not meant.startswith("gap") else ""
    with refused(UsageError, f"EarlyStopping(monitor={key!r})", repr(meant)):
        run.fit(Embeds(), loader(), loader() if loaders == 1 else {"first": loader(), "second": loader(VALIDATION)})
    assert run.global_step == 0


@pytest.mark.parametrize("key", ["f1", "precision", "recall", "threshold"])
@pytest.mark.parametrize("loaders", [1, 2])
def test_a_key_of_pairs_without_its_first_word_is_told(key: str, loaders: int) -> None:
    run = trainer(EarlyStopping(monitor=f"val/{key}", mode="max", strict=False), retrieval(), num_sanity_val_steps=1)
    name = "/first" if loaders == 2 else ""
    with warned(UserWarning, f"EarlyStopping(monitor='val/{key}')", f"'val/pair_{key}{name}'"):
        run.fit(Net(), loader(), loader() if loaders == 1 else {"first": loader(), "second": loader(VALIDATION)})


class Trains(Net):
    """Logs a metric of its own in training, which no sanity check shows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"pair_f1": 0.5, "train/mAP": 0.5}, on_epoch=True)
        return super().training_step(batch, batch_idx)


class TrainsBeside(Callback):
    """The same, in a callback."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("pair_f1", 0.5)


@pytest.mark.parametrize(("net", "beside"), [(Trains, ()), (Net, (TrainsBeside,))])
def test_a_key_that_is_logged_in_training_alone_ends_no_run(net: Any, beside: Any) -> None:
    early, before = EarlyStopping(monitor="pair_f1", mode="max"), SaidBefore()
    run = trainer(early, *(each() for each in beside), retrieval(), before, num_sanity_val_steps=1)
    with warnings.catch_warnings(record=True) as before.caught:
        warnings.simplefilter("always")
        run.fit(net(), loader(), loader())
    assert run.callback_metrics["pair_f1"] == 0.5
    [words] = before.said
    assert "monitor='pair_f1'" in words
    assert messages_of(before.caught) == before.said


def test_a_key_of_training_is_no_misspelt_one_of_validation() -> None:
    run = trainer(EarlyStopping(monitor="train/mAP", mode="max"), retrieval(), num_sanity_val_steps=1)
    run.fit(Trains(), loader(), loader())  # warnings are errors here


class InStep(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val/mAP", 0.5)
        return super().validation_step(batch, batch_idx)


class Beside(Callback):
    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log("val/mAP", 0.5)


@pytest.mark.parametrize(
    ("net", "beside", "stage"),
    [(InStep, (), "fit"), (Net, (Beside,), "fit"), (InStep, (), "validate"), (Net, (Beside,), "validate")],
)
def test_a_key_that_others_log_too_is_said_once(net: Any, beside: Any, stage: str) -> None:
    run = trainer(*(each() for each in beside), retrieval(prog_bar=False), num_sanity_val_steps=1, max_epochs=2)
    facts = "RetrievalMonitor", "'val/mAP'", "name='exact'", "val/exact/mAP"
    loaders = {"fit": (loader(), loader()), "validate": (loader(),)}[stage]
    with warned(UserWarning, *facts) as caught:
        getattr(run, stage)(net(), *loaders)
    assert len(messages_of(caught, *facts)) == 1


def test_a_key_that_the_module_logs_at_the_end_is_said_before_lightning_refuses_it() -> None:
    class AtEnd(Net):
        def on_validation_epoch_end(self) -> None:
            self.log("val/mAP", 0.5)

    run = trainer(retrieval(), num_sanity_val_steps=1)
    with (
        warned(UserWarning, "RetrievalMonitor", "'val/mAP'", "name='exact'"),
        refused(MisconfigurationException, "self.log(val/mAP, ...)", "on_validation_epoch_end"),
    ):
        run.fit(AtEnd(), loader(), loader())


def test_keys_of_several_loaders_that_the_step_logs_too_are_said() -> None:
    """Lightning adds the index of the loader to a key of a step."""
    run = trainer(retrieval())
    with warned(UserWarning, "RetrievalMonitor", "'val/mAP/dataloader_idx_0'", "name='exact'"):
        run.validate(InStep(), [loader(), loader(items(seed=9))], verbose=False)


def test_a_monitor_with_a_name_of_its_own_shares_no_key() -> None:
    trainer(retrieval(name="exact"), max_epochs=2, num_sanity_val_steps=1).fit(InStep(), loader(), loader())
    trainer(retrieval(), max_epochs=2, num_sanity_val_steps=1).fit(Scripted([0.5, 0.6]), loader(), loader())
