"""Jobs of real processes (see `tests.gloo_processes`): an `EmbeddingModule` that is trained by two of them, or by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.data import ClassBalancedBatchSampler
from fewshot_callbacks.losses import SoftAveragePrecisionLoss
from fewshot_callbacks.protonet import EmbeddingModule

GROUPS = ((2, "gloo"),)
LABELS = torch.arange(6).repeat(5)


class Proxies(nn.Module):
    """A loss with parameters: cross-entropy of scores with one vector for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(6, 3, generator=torch.Generator().manual_seed(1)))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(embeddings @ self.vectors.to(embeddings.dtype).T, labels)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(30, 4, generator=generator) + torch.eye(6, 4)[LABELS], LABELS)


def backbone(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def fit(loss: nn.Module, micro_batch: int | None = None, **settings: Any) -> EmbeddingModule:
    """Three classes of five items in each of the batches."""
    sampler = ClassBalancedBatchSampler(LABELS, classes_per_batch=3, items_per_class=5, batches=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    module = EmbeddingModule(
        backbone(),
        loss,
        micro_batch=micro_batch,
        ap_every_n_steps=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    defaults = quiet | {"max_epochs": 2, "enable_checkpointing": False, "precision": "64-true"}
    trainer = Trainer(**(defaults | settings))
    trainer.fit(module, DataLoader(data(), batch_sampler=sampler))
    module.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module


def weights(module: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def both(**settings: Any) -> dict[str, Any]:
    """With soft average precision, and with a loss that has parameters."""
    ranked, proxies = fit(SoftAveragePrecisionLoss(5), 4, **settings), fit(Proxies(), 4, **settings)
    return {"soft AP": weights(ranked), "logged": ranked.logged, "proxies": weights(proxies)}


def answers(rank: int, folder: Path) -> dict[str, Any]:
    """What this process has trained."""
    return both(strategy="ddp", devices=2)
