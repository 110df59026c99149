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


class Mistaken(Steps):
    """Attributes that the process of rank 1, or a later batch of it, has in another form."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().validation_step(batch, batch_idx)
        codes = batch[2]
        is_second = self.global_rank == 1
        output["mixed"] = codes if is_second else output["camera"]
        output["late"] = codes.float() if is_second and batch_idx > 1 else codes
        output["many"] = torch.arange(len(codes)) + 16 * batch_idx
        return output


def answers(rank: int, folder: Any) -> tuple[float, dict[str, Any], dict[str, float]]:
    noise = torch.randn(115, 30, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(torch.eye(30)[LABELS] + 0.4 * noise, LABELS, torch.arange(115) // 7 % 3)
    monitor = retrieval(slices="camera", metrics=("mAP",))
    runner = trainer(monitor, strategy="ddp", devices=torch.distributed.get_world_size(), num_nodes=1)
    runner.validate(Steps(), DataLoader(data, batch_size=16), verbose=False)
    assert monitor.report is not None
    worst = float(runner.callback_metrics["val/mAP_worst_camera"])
    with_mistakes = retrieval(slices=("mixed", "late", "many", "camera"), metrics=("mAP",))
    runner = trainer(with_mistakes, strategy="ddp", devices=torch.distributed.get_world_size(), num_nodes=1)
    runner.validate(Mistaken(), DataLoader(data, batch_size=16), verbose=False)
    values = {name: float(value) for name, value in runner.callback_metrics.items()}
    return worst, monitor.report.to_dict()["slices"], values
