"""Matryoshka training: the first dimensions are an embedding, too; and the curve of what each size and code costs."""

from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from fewshot_callbacks import (
    ClassBalancedBatchSampler,
    Conv4,
    EmbeddingModule,
    Glyphs,
    RetrievalMonitor,
    SoftAveragePrecisionLoss,
)
from fewshot_callbacks.plots import compression_curve, save

DIMS = (8, 16, 32, 64)


class Matryoshka(nn.Module):
    """The mean of a loss over the whole embedding and its first dimensions."""

    def __init__(self, loss: nn.Module, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.loss = loss
        self.dims = dims

    def forward(self, embeddings, labels):
        sizes = (*self.dims, embeddings.shape[1])
        return sum(self.loss(embeddings[:, :size], labels) for size in sizes) / len(sizes)


seed_everything(0)
# Conv4 ends in a ReLU. Its outputs are never negative, so their signs
# carry no information. A linear layer has outputs of both signs.
encoder = nn.Sequential(Conv4(1), nn.Linear(256, 128))
train, val = Glyphs("train"), Glyphs("val")
sampler = ClassBalancedBatchSampler(train.labels, classes_per_batch=16, items_per_class=4, batches=20)
retrieval = RetrievalMonitor(dims=DIMS, codes=("int8", "binary"))
trainer = Trainer(max_epochs=1, callbacks=[retrieval], logger=False, enable_checkpointing=False)
trainer.fit(
    EmbeddingModule(encoder, Matryoshka(SoftAveragePrecisionLoss(), DIMS)),
    DataLoader(train, batch_sampler=sampler),
    DataLoader(val, batch_size=512),
)
report = retrieval.compression[""]
print(report)
save(compression_curve(report, title="Matryoshka embeddings of glyphs"), "compression.png")
