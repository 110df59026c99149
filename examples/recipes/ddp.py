"""Validate in two processes (DDP): your code stays the same.

201 items do not split evenly, so DistributedSampler repeats one item. It
counts once. Run this as a file: `python ddp.py`. Both processes print the
same value.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import RetrievalMonitor


class Encoder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(20, 8)

    def validation_step(self, batch, batch_idx):
        points, labels = batch
        return {"embeddings": self.encoder(points), "labels": labels}


def main() -> None:
    seed_everything(0)
    labels = torch.arange(201) % 20
    data = TensorDataset(
        torch.eye(20)[labels] + 0.3 * torch.randn(201, 20), labels
    )
    trainer = Trainer(
        accelerator="cpu",  # on two GPUs: accelerator="gpu"
        devices=2,
        strategy="ddp",
        callbacks=[RetrievalMonitor()],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.validate(
        Encoder(), DataLoader(data, batch_size=16), verbose=False
    )
    print(
        f"rank {trainer.global_rank}: "
        f"mAP {trainer.callback_metrics['val/mAP']:.6f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
