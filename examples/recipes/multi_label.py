"""Evaluate items that have several labels each.

Two items are relevant to each other if they share a label, and nDCG counts
how many labels they share. A step returns its labels as zeros and ones of
shape (items, labels), as binary cross-entropy takes them.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import (
    Relevance,
    RetrievalMonitor,
    evaluate_retrieval,
)

torch.manual_seed(0)
tags = (torch.rand(300, 12) < 0.2).float()
pixels = tags @ torch.randn(12, 32) + torch.randn(300, 32)
data = TensorDataset(pixels, tags)


class Tagger(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(
            torch.nn.Linear(32, 32), torch.nn.ReLU()
        )
        self.head = torch.nn.Linear(32, 12)

    def training_step(self, batch, batch_idx):
        pixels, tags = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(
            self.head(self.backbone(pixels)), tags
        )

    def validation_step(self, batch, batch_idx):
        pixels, tags = batch
        return {"embeddings": self.backbone(pixels), "labels": tags}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


monitor, net = (
    RetrievalMonitor(metrics=("mAP", "ndcg@10", "precision@10")),
    Tagger(),
)
trainer = Trainer(
    callbacks=[monitor],
    max_epochs=3,
    logger=False,
    accelerator="cpu",
    enable_checkpointing=False,
)
trainer.fit(
    net,
    DataLoader(data, batch_size=50, shuffle=True),
    DataLoader(data, batch_size=50),
)
print(monitor.report)

# The same without a Trainer: labels can be columns or sets of names.
with torch.no_grad():
    embeddings = net.backbone(pixels)
report = evaluate_retrieval(embeddings, tags, metrics=("mAP", "ndcg@10"))
names = [
    [f"tag {number}" for number in row.nonzero().flatten().tolist()]
    for row in tags
]
named = evaluate_retrieval(
    embeddings,
    relevance=Relevance.from_label_sets(names),
    metrics=("mAP", "ndcg@10"),
)
assert report.metrics() == named.metrics()
