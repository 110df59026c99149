"""A validation with slices, on one process and on two (see `tests.gloo_processes`)."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, TensorDataset

from tests.callbacks.models import retrieval, trainer

GROUPS = ((1, "gloo"), (2, "gloo"))
CAMERAS = ("roof", "door", "yard")
# Two processes get 58 items each, one item twice.
LABELS = torch.arange(115) % 30


class Steps(LightningModule):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        points, labels, codes = batch
        return {"embeddings": points, "labels": labels, "camera": [CAMERAS[code] for code in codes.tolist()]}


def answers(rank: int, folder: Any) -> tuple[float, dict[str, Any]]:
    noise = torch.randn(115, 30, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(torch.eye(30)[LABELS] + 0.4 * noise, LABELS, torch.arange(115) // 7 % 3)
    monitor = retrieval(slices="camera", metrics=("mAP",))
    runner = trainer(monitor, strategy="ddp", devices=torch.distributed.get_world_size(), num_nodes=1)
    runner.validate(Steps(), DataLoader(data, batch_size=16), verbose=False)
    assert monitor.report is not None
    return float(runner.callback_metrics["val/mAP_worst_camera"]), monitor.report.to_dict()["slices"]
