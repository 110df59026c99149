"""Monitor the hidden layer of a classifier without changing its module."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from fewshot_callbacks import (
    DiscriminantRatioMonitor,
    Glyphs,
    RetrievalMonitor,
)


class Classifier(LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Flatten(),
            nn.Linear(32 * 32, 256),
            nn.ReLU(),
            nn.Linear(256, 64),
        )
        self.classifier = nn.Linear(64, classes)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(
            self.classifier(self.encoder(images)), labels
        )

    def validation_step(self, batch, batch_idx):
        # the monitors read the output of the encoder
        self.encoder(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


seed_everything(0)
# the two sets have no class in common
train, val = Glyphs("train"), Glyphs("val")
trainer = Trainer(
    max_epochs=2,
    limit_train_batches=10,
    callbacks=[
        RetrievalMonitor(source="encoder"),
        # In a shuffled batch many classes have only one item, and
        # one item has no scatter within its class.
        DiscriminantRatioMonitor(source="encoder", skip_singletons=True),
    ],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    Classifier(len(train.class_names)),
    DataLoader(train, batch_size=256, shuffle=True),
    DataLoader(val, batch_size=512),
)
print(
    f"mAP {trainer.callback_metrics['val/mAP']:.3f}, "
    f"J {trainer.callback_metrics['val/J']:.2f}"
)
