"""Weights that differ during a validation: training items are embedded with the weights of the training steps."""

import math
from itertools import permutations
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging

from fewshot_callbacks import knn_accuracy
from fewshot_callbacks.callbacks import EmbeddingSource, KnnMonitor
from fewshot_callbacks.functional import evaluate_retrieval, generalization_gap
from tests.callbacks.models import (
    TRAINING,
    VALIDATION,
    Embeds,
    Labelled,
    close,
    expected_metrics,
    gap_monitor,
    items,
    loader,
    retrieval,
    trainer,
    with_prefix,
)
from tests.messages import warned


class Swapped(Embeds):
    """Turns its embeddings in other weights; exchanges them as `Exchange` says."""

    def turn(self) -> None:
        for weight in self.parameters():
            weight.data.copy_(weight.data.flip(0))


class Exchange(Callback):
    """Puts other weights in place before some hook, and the old ones back at another."""

    def __init__(self, before: str, after: str) -> None:
        for hook in {before, after}:
            setattr(self, hook, lambda trainer, module, *_: module.turn())


class ByModule(Swapped):
    """The same in hooks of the module itself."""

    def on_validation_epoch_start(self) -> None:
        self.turn()

    def on_validation_epoch_end(self) -> None:
        self.turn()


def voting(**settings: Any) -> KnnMonitor:
    return KnnMonitor(5, Labelled(TRAINING), **settings)


def expected(net: Swapped) -> dict[str, float]:
    """What weights other than those that the module has give."""
    net.turn()
    training, validation = net.by_hand(TRAINING), net.by_hand(VALIDATION)
    net.turn()
    settings: Any = {"label_groups": 3, "metrics": ("grouped_recall@1", "recall@1")}
    gap = generalization_gap(*(evaluate_retrieval(*part, **settings) for part in (training, validation)))
    vote = knn_accuracy(*validation, *training, k=5)
    return {"val/knn@5": vote.values["knn@5"], "gap/recall@1": gap.metrics()["recall@1"]}


def logged(run: Trainer) -> dict[str, float]:
    return {key: float(run.callback_metrics[key]) for key in ("val/knn@5", "gap/recall@1")}


@pytest.mark.parametrize("order", permutations(range(3)), ids=str)
@pytest.mark.parametrize("embed", [None, "frozen"])
@pytest.mark.parametrize(
    "hooks", [("on_validation_epoch_start", "on_validation_epoch_end"), ("on_validation_start", "on_validation_end")]
)
def test_training_items_are_embedded_with_the_weights_of_the_steps(hooks: Any, embed: Any, order: Any) -> None:
    net = Swapped()
    if embed is not None:
        net.frozen = torch.nn.Sequential(net.frozen, net.encoder)
        net.encoder = torch.nn.Identity()
    callbacks = Exchange(*hooks), voting(source=EmbeddingSource(embed=embed)), gap_monitor()
    run = trainer(*(callbacks[place] for place in order))
    run.validate(net, loader(VALIDATION), verbose=False)
    assert logged(run) == close(expected(net))
    net.turn()
    assert logged(run) != close(expected(net))  # the weights do differ


def test_training_items_are_embedded_with_weights_that_the_module_exchanges() -> None:
    net = ByModule()
    run = trainer(voting(), gap_monitor())
    run.validate(net, loader(VALIDATION), verbose=False)
    assert logged(run) == close(expected(net))


class Averages(EMAWeightAveraging):
    """Keeps the embeddings of averaged weights at each validation."""

    seen: list[dict[str, float]]

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        assert isinstance(pl_module, Swapped)
        pl_module.turn()
        self.seen = [*getattr(self, "seen", []), expected(pl_module)]
        pl_module.turn()


@pytest.mark.parametrize("is_first", [True, False])
def test_training_items_are_embedded_with_the_averaged_weights_of_lightning(is_first: bool) -> None:
    averages, net = Averages(decay=0.9), Swapped()
    seen: list[dict[str, float]] = []

    class Sees(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(logged(trainer))

    monitors = voting(), gap_monitor()
    callbacks = (averages, *monitors) if is_first else (*monitors, averages)
    trainer(*callbacks, Sees(), max_epochs=2).fit(net, loader(TRAINING), loader(VALIDATION))
    assert seen == [close(each) for each in averages.seen]


class Second(Callback):
    """Other weights only for the second loader."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int, at: int = 0
    ) -> None:
        if at == 1 and batch_idx == 0:
            pl_module.turn()


@pytest.mark.parametrize("embed", [None, lambda module, batch: module(batch[0])])
def test_weights_that_change_between_two_loaders_are_refused(embed: Any) -> None:
    """The items of training that vote were embedded at the first batch."""
    run = trainer(voting(source=EmbeddingSource(embed=embed), strict=False), Second())
    with warned(UserWarning, "val/knn@5/dataloader_idx_1", "weights", "bank='self'"):
        run.validate(Swapped(), [loader(VALIDATION), loader(items(seed=9))], verbose=False)
    values = {key: float(value) for key, value in run.callback_metrics.items()}
    assert values["val/knn@5/dataloader_idx_0"] > 0
    assert math.isnan(values["val/knn@5/dataloader_idx_1"])


def test_a_loader_that_fails_leaves_the_vote_of_the_other() -> None:
    """It is a vote of the training items, and of nothing else."""

    class HalfBroken(Embeds):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().validation_step(batch, batch_idx) if dataloader_idx else None

    net = HalfBroken()
    run = trainer(voting(strict=False))
    with warned(UserWarning, "val/knn@5/dataloader_idx_0", "embeddings", "validation_step"):
        run.validate(net, [loader(items(seed=9)), loader(VALIDATION)], verbose=False)
    vote = knn_accuracy(*net.by_hand(VALIDATION), *net.by_hand(TRAINING), k=5)
    assert float(run.callback_metrics["val/knn@5/dataloader_idx_1"]) == pytest.approx(vote.values["knn@5"])
    assert vote.values["knn@5"] != pytest.approx(knn_accuracy(*net.by_hand(VALIDATION), k=5).values["knn@5"])


def test_embeddings_of_training_items_are_not_taken_for_those_of_a_step() -> None:
    """A monitor that listens to the submodule does not take them for those of its step."""
    net, run = Embeds(), trainer(voting(), gap_monitor(), retrieval(name="heard", source="encoder"))
    run.validate(net, loader(VALIDATION), verbose=False)
    expected = with_prefix(expected_metrics(*net.by_hand(VALIDATION)), "val/heard")
    assert float(run.callback_metrics["val/heard/mAP"]) == pytest.approx(expected["val/heard/mAP"])
