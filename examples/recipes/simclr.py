"""Monitor SimCLR, which trains on two views per image without labels.

Only the evaluation uses labels.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from fewshot_callbacks import (
    Conv4,
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingSource,
    Glyphs,
    KnnMonitor,
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
# A training step embeds each item twice.
source = EmbeddingSource("backbone", views=2)
trainer = Trainer(
    max_epochs=1,
    limit_train_batches=5,
    callbacks=[
        # warns if the embedding collapses
        EmbeddingHealthMonitor(source=source, every_n_steps=5),
        # J needs labels, and training has none.
        DiscriminantRatioMonitor(source=source, every_n_steps=None),
        RetrievalMonitor(source=source),
        # bank="train" if both sets have the same classes
        KnnMonitor(20, bank="self", source=source),
    ],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    SimCLR(),
    DataLoader(
        train, batch_size=64, shuffle=True, collate_fn=without_labels
    ),
    DataLoader(val, batch_size=512),
)
found = trainer.callback_metrics
print(
    f"RankMe {found['train/rankme']:.1f} of a batch of 128 views, "
    f"{found['val/rankme']:.1f} of all 256 dimensions"
)
print(
    f"mAP {found['val/mAP']:.3f}; "
    f"a vote of 20 neighbours is right for {found['val/knn@20']:.3f}"
)
