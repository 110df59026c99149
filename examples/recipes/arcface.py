"""Train with ArcFace from pytorch-metric-learning.

The loss has weights of its own, and the step returns the embedding.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from pytorch_metric_learning.losses import ArcFaceLoss
from torch.utils.data import DataLoader

from fewshot_callbacks import Conv4, Glyphs, RetrievalMonitor


class ArcFace(LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.backbone = Conv4(1)
        # A submodule: its weights are trained and saved.
        self.loss = ArcFaceLoss(classes, embedding_size=256)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return self.loss(self.backbone(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        return {"embeddings": self.backbone(images), "labels": labels}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


seed_everything(0)
train, val = Glyphs("train"), Glyphs("val")
trainer = Trainer(
    max_epochs=1,
    limit_train_batches=5,
    callbacks=[RetrievalMonitor()],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    ArcFace(len(train.class_names)),
    DataLoader(train, batch_size=64, shuffle=True),
    DataLoader(val, batch_size=512),
)
print(f"mAP {trainer.callback_metrics['val/mAP']:.3f}")
