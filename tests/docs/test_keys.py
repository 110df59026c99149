"""The page of all logged keys has exactly the keys that callbacks log with their default settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingSource,
    GeneralizationGapMonitor,
    KnnMonitor,
    ProbeMonitor,
    RetrievalMonitor,
    TrainingDynamicsMonitor,
    TrialList,
    VerificationMonitor,
)
from tests.docs import pages

PAGE = pages.ROOT / "docs" / "callbacks" / "keys.md"
CLASSES = 20


class Classifier(LightningModule):
    """A linear encoder with a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.classifier = nn.Linear(8, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.classifier(self.encoder(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.encoder(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data_set(items: int) -> TensorDataset:
    """Rows, labels and ids of items. Any four items in order are two of each of two classes."""
    index = torch.arange(items)
    labels = (index // 4 * 2 + index % 2) % CLASSES
    rows = torch.randn(items, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(rows, labels, index)


SOURCE = EmbeddingSource("encoder", labels=1)
CALLED = EmbeddingSource(embed="encoder", labels=1)
TRIALS = TrialList(same=(True, False), items=(("0", "2"), ("0", "1")))
BANK = data_set(80)
# Name of a callback -> a function that makes it with its defaults, and the optimiser steps until it has logged all keys.
CALLBACKS: dict[str, tuple[Callable[[], Callback], int]] = {
    "RetrievalMonitor": (lambda: RetrievalMonitor(source=SOURCE), 1),
    "DiscriminantRatioMonitor": (lambda: DiscriminantRatioMonitor(source=SOURCE), 1),
    "EmbeddingHealthMonitor": (lambda: EmbeddingHealthMonitor(source=SOURCE), 50),
    "GeneralizationGapMonitor": (lambda: GeneralizationGapMonitor(bank=BANK, source=CALLED), 1),
    "KnnMonitor": (lambda: KnnMonitor(bank=BANK, source=CALLED), 1),
    "ProbeMonitor": (lambda: ProbeMonitor(bank=BANK, source=CALLED), 1),
    "VerificationMonitor": (lambda: VerificationMonitor(TRIALS, ids=2, source=SOURCE), 1),
    "TrainingDynamicsMonitor": (lambda: TrainingDynamicsMonitor(shots=1, source=CALLED), 100),
}


def keys_by_callback() -> dict[str, list[str]]:
    """Name of a callback -> the keys below it in the first table of the page."""
    table = PAGE.read_text(encoding="utf-8").partition("## Optional keys")[0]
    keys: dict[str, list[str]] = {}
    for is_callback, name in re.findall(r"^\| (\[?)`([^`]+)`", table, re.MULTILINE):
        if is_callback:
            keys[name] = listed = []
        else:
            listed.append(name)
    return keys


def logged_keys(callback: Callback, steps: int, folder: Any) -> list[str]:
    """The keys that a callback logs in two epochs of training with so many steps in all."""
    steps_per_epoch = max(1, steps // 2)
    trainer = Trainer(
        callbacks=[callback], max_epochs=2, limit_train_batches=steps_per_epoch, default_root_dir=folder, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Classifier(), DataLoader(data_set(4 * steps_per_epoch), batch_size=4), DataLoader(data_set(80), 40))
    return list(trainer.callback_metrics)


def test_the_page_lists_every_callback() -> None:
    assert list(keys_by_callback()) == list(CALLBACKS)


@pytest.mark.filterwarnings("ignore")  # the data is too small for intervals
@pytest.mark.parametrize("name", CALLBACKS)
def test_the_page_lists_the_keys_of(name: str, tmp_path: Any) -> None:
    make, steps = CALLBACKS[name]
    listed = keys_by_callback()[name]
    assert sorted(listed) == sorted(logged_keys(make(), steps, tmp_path))
