"""Overfitting, or does the validation set just have more classes? A gap that can be compared, with its interval."""

from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from fewshot_callbacks import (
    ClassBalancedBatchSampler,
    Conv4,
    EmbeddingModule,
    GeneralizationGapMonitor,
    Glyphs,
    RetrievalMonitor,
    SoftAveragePrecisionLoss,
)

seed_everything(0)
train, val = Glyphs("train"), Glyphs("val")
sampler = ClassBalancedBatchSampler(
    train.labels, classes_per_batch=16, items_per_class=4, batches=10
)
trainer = Trainer(
    max_epochs=1,
    callbacks=[
        RetrievalMonitor(),
        # the training images as an evaluation sees them, without augmentation; a data set or a loader
        GeneralizationGapMonitor(bank=DataLoader(train, batch_size=512)),
    ],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    EmbeddingModule(Conv4(1), SoftAveragePrecisionLoss()),
    DataLoader(train, batch_sampler=sampler),
    DataLoader(val, batch_size=512),
)
for key, value in trainer.callback_metrics.items():
    if key.startswith("gap/"):
        print(f"{key:<32}{value:.3f}")
