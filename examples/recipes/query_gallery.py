"""Search a gallery that is in a second loader.

For example, the gallery has shop photos and the queries are street photos.
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

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        points, labels = batch
        return {"embeddings": self.encoder(points), "labels": labels}


seed_everything(0)
centres = torch.randn(20, 20)
query_labels, gallery_labels = torch.arange(40) % 20, torch.arange(200) % 20
queries = TensorDataset(
    centres[query_labels] + torch.randn(40, 20), query_labels
)
gallery = TensorDataset(
    centres[gallery_labels] + torch.randn(200, 20), gallery_labels
)
trainer = Trainer(
    # Loader 1 is the gallery. Every other loader is a set of queries.
    callbacks=[RetrievalMonitor(gallery=1)],
    logger=False,
    enable_checkpointing=False,
)
trainer.validate(
    Encoder(),
    [
        DataLoader(queries, batch_size=32),
        DataLoader(gallery, batch_size=32),
    ],
)
