"""Fits with and without monitors of a module that draws random numbers, and all states that a monitor could change."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from fewshot_callbacks import TrialList
from fewshot_callbacks.callbacks import (
    DiscriminantRatioMonitor,
    EmbeddedSet,
    EmbeddingHealthMonitor,
    KnnMonitor,
    Monitor,
    ProbeMonitor,
    TrainingDynamicsMonitor,
    VerificationMonitor,
)
from tests.callbacks.models import (
    SHOTS,
    TRAINING,
    VALIDATION,
    Embeds,
    Labelled,
    episodes,
    gap_monitor,
    loader,
    retrieval,
    trainer,
)


class RandomNet(Embeds):
    """A module that draws from every random state in every step; some weights are frozen, and its optimiser has a state."""

    shots = SHOTS

    def __init__(self) -> None:
        super().__init__()
        self.frozen.eval()
        self.encoder[1].bias.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        random.random()  # without use: the type checker of the tests draws from the same state
        noise = np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        return outputs | {"loss": outputs["loss"] * (1 + noise)}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002
        return super().validation_step(batch, batch_idx)

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.classifier.train()  # where it makes no difference but for the mode

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam((weight for weight in self.parameters() if weight.requires_grad), lr=0.01)


def names_of(outputs: Any, batch: Any) -> list[str]:
    """Return a name for each item, by its first number."""
    return [f"{float(point[0]):.9f}" for point in batch[0]]


def trials() -> TrialList:
    """Return each validation item beside the first one."""
    (first, *others), labels = names_of(None, VALIDATION.tensors), VALIDATION.tensors[1]
    return TrialList(same=tuple((labels[1:] == labels[0]).tolist()), items=((first,) * len(others), tuple(others)))


class MeanLength(Monitor):
    """One of a user's own."""

    names = ("mean_length",)

    def measure(self, items: EmbeddedSet) -> dict[str, float]:
        return {"mean_length": float(items.embeddings.norm(dim=1).mean())}


def all_monitors(**settings: Any) -> list[Any]:
    """Return one monitor of each kind, and of the votes one for each kind of bank."""
    return [
        retrieval(source="encoder", strict=True),
        DiscriminantRatioMonitor(source="encoder", strict=True),
        gap_monitor(**({"strict": True} | settings)),
        TrainingDynamicsMonitor(every_n_steps=1, strict=True),
        EmbeddingHealthMonitor(source="encoder", every_n_steps=1, k=2, strict=True),
        KnnMonitor(3, "self", source="encoder", strict=True),
        KnnMonitor(3, Labelled(TRAINING), name="bank", strict=True),
        ProbeMonitor(Labelled(TRAINING), strict=True),
        VerificationMonitor(trials(), names_of, source="encoder", metrics=("eer",), strict=True),
        MeanLength(source="encoder", strict=True),
    ]


def random_states() -> list[Any]:
    """Return the random states of PyTorch and NumPy; `test_python_random_is_left_alone_too` is about Python's."""
    return [torch.get_rng_state(), np.random.get_state()[1].tolist()]  # noqa: NPY002


def modes_of(net: nn.Module) -> list[bool]:
    return [submodule.training for submodule in net.modules()]


class StateRecorder(Callback):
    """Records everything that a monitor could change, after each batch and each validation."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def note(self, net: LightningModule) -> None:
        gradients = [None if weight.grad is None else weight.grad.clone() for weight in net.parameters()]
        weights = {name: value.clone() for name, value in net.state_dict().items()}
        self.states.append(
            [weights, gradients, modes_of(net), [w.requires_grad for w in net.parameters()], random_states()]
        )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.note(pl_module)
        self.states.append(outputs["loss"].clone())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.note(pl_module)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def states_of_fit(*monitors: Callback, **settings: Any) -> tuple[RandomNet, list[Any]]:
    """Fit a module from the same seed; return it, and the states during and after the fit."""
    seed_everything(5)
    net = RandomNet()
    recorder = StateRecorder()
    run = trainer(
        *monitors, recorder, **({"max_epochs": 2, "num_sanity_val_steps": 1, "val_check_interval": 4} | settings)
    )
    run.fit(net, episodes(), [loader(VALIDATION), loader(VALIDATION)])
    state = [
        net.state_dict(),
        [optimizer.state_dict() for optimizer in run.optimizers],
        random_states(),
        modes_of(net),
        [torch.get_float32_matmul_precision(), torch.get_num_threads()],
    ]
    return net, [*recorder.states, *state]
