"""Measure overfitting, even if the validation set has more classes.

The gap compares equal numbers of classes, and has an interval.
"""

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
        # The bank is a data set or a loader of the training images,
        # without augmentation.
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
