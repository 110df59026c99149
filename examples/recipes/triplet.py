"""Train with a triplet loss, miner and sampler.

All three come from pytorch-metric-learning. `EmbeddingModule` takes any
loss that is called with embeddings and labels.
"""

from lightning.pytorch import Trainer, seed_everything
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.miners import TripletMarginMiner
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import nn
from torch.utils.data import DataLoader

from fewshot_callbacks import (
    Conv4,
    DiscriminantRatioMonitor,
    EmbeddingModule,
    Glyphs,
    RetrievalMonitor,
)


class MinedTriplets(nn.Module):
    """The loss of the triplets that the miner picks from a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.miner, self.loss = (
            TripletMarginMiner(margin=0.2),
            TripletMarginLoss(margin=0.2),
        )

    def forward(self, embeddings, labels):
        return self.loss(embeddings, labels, self.miner(embeddings, labels))


seed_everything(0)
train, val = Glyphs("train"), Glyphs("val")
# A batch has 16 classes with 4 images each.
sampler = MPerClassSampler(
    train.labels, m=4, batch_size=64, length_before_new_iter=320
)
trainer = Trainer(
    max_epochs=1,
    callbacks=[RetrievalMonitor(), DiscriminantRatioMonitor()],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    EmbeddingModule(Conv4(1), MinedTriplets()),
    DataLoader(train, batch_size=64, sampler=sampler),
    DataLoader(val, batch_size=512),
)
print(
    f"mAP {trainer.callback_metrics['val/mAP']:.3f}, "
    f"J of the last batch {trainer.callback_metrics['train/J']:.2f}"
)
