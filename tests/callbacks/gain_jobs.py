"""A training that compares its validations, on one process and on two (see `tests.gloo_processes`)."""

from typing import Any

import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, TensorDataset

from tests.callbacks.models import Scripted, items, retrieval, trainer

GROUPS = ((1, "gloo"), (2, "gloo"))
ITEMS = 115  # two processes get 58 each, one item twice


class _Keep(Callback):
    def __init__(self, logged: list[dict[str, float]]) -> None:
        self.logged = logged

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.logged.append({key: float(value) for key, value in trainer.callback_metrics.items() if "mAP" in key})


def answers(rank: int, folder: Any) -> list[dict[str, float]]:
    torch.manual_seed(0)
    data = TensorDataset(*(tensor[:ITEMS] for tensor in items(per_class=20).tensors))
    monitor = retrieval(compare="best", metrics=("mAP", "recall@1"))
    logged: list[dict[str, float]] = []
    settings = {"strategy": "ddp", "devices": torch.distributed.get_world_size(), "num_nodes": 1}
    quality = [0.5, 0.9, 0.9, 0.7, 1.3]
    runner = trainer(monitor, _Keep(logged), max_epochs=len(quality), **settings)
    runner.fit(Scripted(quality), DataLoader(data, batch_size=16), DataLoader(data, batch_size=16))
    return logged
