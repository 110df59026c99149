"""Fit a linear probe at each validation of a self-supervised run.

The probe shows how accurate a classifier on top of the embedding would be.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Subset

from fewshot_callbacks import (
    Conv4,
    EmbeddingSource,
    Glyphs,
    ProbeMonitor,
    RetrievalMonitor,
)
from fewshot_callbacks.data import augment_glyphs


class SimCLR(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.projector = Conv4(1), nn.Linear(256, 64)

    def training_step(self, images, batch_idx):
        first, second = (
            nn.functional.normalize(
                self.projector(self.backbone(augment_glyphs(images))), dim=1
            )
            for _ in range(2)
        )
        logits = first @ second.T / 0.2
        return nn.functional.cross_entropy(
            logits, torch.arange(len(images), device=self.device)
        )

    def validation_step(self, batch, batch_idx):
        self.backbone(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def without_labels(items):
    return torch.stack([image for image, _ in items])


seed_everything(0)
train, val = Glyphs("train"), Glyphs("val")
# The probe is fitted on the bank. The training classes are other classes,
# so the bank is half of the validation images.
bank, queries = (
    Subset(val, range(0, len(val), 2)),
    Subset(val, range(1, len(val), 2)),
)
source = EmbeddingSource("backbone")
probe = ProbeMonitor(bank, source=source)
trainer = Trainer(
    max_epochs=2,
    limit_train_batches=5,
    callbacks=[probe, RetrievalMonitor(source=source)],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    SimCLR(),
    DataLoader(
        train, batch_size=64, shuffle=True, collate_fn=without_labels
    ),
    DataLoader(queries, batch_size=512),
)
found = trainer.callback_metrics
print(
    f"a linear classifier is right for {found['val/probe']:.3f} of the "
    f"images, mAP is {found['val/mAP']:.3f}"
)
print(probe.reports[""])
