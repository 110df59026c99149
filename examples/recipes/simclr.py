"""SimCLR: a step calls the backbone once for each of two views; labels are only used in the evaluation."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from fewshot_callbacks import Conv4, DiscriminantRatioMonitor, EmbeddingSource, Glyphs, RetrievalMonitor
from fewshot_callbacks.data import augment_glyphs


class SimCLR(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.projector = Conv4(1), nn.Linear(256, 64)

    def training_step(self, batch, batch_idx):
        images, _ = batch
        first, second = (
            nn.functional.normalize(self.projector(self.backbone(augment_glyphs(images))), dim=1) for _ in range(2)
        )
        logits = first @ second.T / 0.2
        return nn.functional.cross_entropy(logits, torch.arange(len(images), device=self.device))

    def validation_step(self, batch, batch_idx):
        self.backbone(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


seed_everything(0)
train, val = Glyphs("train"), Glyphs("val")
trainer = Trainer(
    max_epochs=1,
    limit_train_batches=5,
    callbacks=[
        DiscriminantRatioMonitor(source=EmbeddingSource("backbone", views=2)),  # each item is embedded twice in a step
        RetrievalMonitor(source="backbone"),
    ],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    SimCLR(),
    DataLoader(train, batch_size=64, shuffle=True),
    DataLoader(val, batch_size=512),
)
print(f"mAP {trainer.callback_metrics['val/mAP']:.3f}, J of both views {trainer.callback_metrics['train/J']:.2f}")
