"""Detect LoRA adapters that were not loaded.

The monitor warns if no embedding has changed, and suggests what to check.
"""

import warnings

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import (
    EmbeddingHealthMonitor,
    RetrievalMonitor,
    SoftAveragePrecisionLoss,
)


class LowRank(nn.Module):
    """A frozen layer with a rank-4 adapter in parallel."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(layer.in_features, 4, bias=False),
            nn.Linear(4, layer.out_features, bias=False),
        )
        # At first the adapter changes nothing.
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs):
        return self.layer(inputs) + self.up(self.down(inputs))


class Tuned(LightningModule):
    def __init__(self, is_active: bool) -> None:
        super().__init__()
        # as if it were pretrained
        self.encoder = nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)
        )
        adapted = LowRank(self.encoder[2])
        if is_active:
            self.encoder[2] = adapted
        # The adapter is trained in any case. Embeddings only pass through
        # it if `is_active`.
        self.adapters = nn.ModuleList([adapted])
        self.loss = SoftAveragePrecisionLoss()

    def training_step(self, batch, batch_idx):
        embeddings = (
            self.encoder(batch[0])
            + 0 * self.adapters[0](torch.zeros(1, 64)).sum()
        )
        return self.loss(embeddings, batch[1])

    def validation_step(self, batch, batch_idx):
        return {"embeddings": self.encoder(batch[0]), "labels": batch[1]}

    def configure_optimizers(self):
        adapters = [
            *self.adapters[0].down.parameters(),
            *self.adapters[0].up.parameters(),
        ]
        return torch.optim.Adam(adapters, lr=0.01)


def points(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(480) % 12
    centres = torch.randn(
        12, 32, generator=torch.Generator().manual_seed(0)
    )
    return TensorDataset(
        centres[labels] + 2 * torch.randn(480, 32, generator=generator),
        labels,
    )


for is_active in (False, True):
    seed_everything(0)
    trainer = Trainer(
        max_epochs=3,
        callbacks=[
            RetrievalMonitor(label_groups=None),
            EmbeddingHealthMonitor(every_n_steps=None),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(
            Tuned(is_active),
            DataLoader(points(1), batch_size=96, shuffle=True),
            DataLoader(points(2), batch_size=480),
        )
    found = trainer.callback_metrics
    print(
        f"adapter {'active' if is_active else 'not loaded'}: "
        f"mAP {found['val/mAP']:.3f}, mean cosine of each item to"
    )
    print(
        "  itself at the first validation "
        f"{found['val/cosine_to_first']:.3f}"
    )
    for warning in caught:
        if "no embedding has changed" in str(warning.message):
            print(f"  {warning.message}")
