"""Evaluate two encoders, as in CLIP: images and their captions.

Images search captions, and captions search images. Five captions belong to
one image. The step returns both embeddings. `labels` names the entries that
say which image and which captions belong together. `ids` names the entries
that identify each image and each caption, so that each counts once, even in
several processes.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import EmbeddingSource, RetrievalMonitor

torch.manual_seed(0)
images, captions, dim = 200, 5, 32
pixels = torch.randn(images, 64)
texts = pixels[:, None] + 2 * torch.randn(images, captions, 64)
data = TensorDataset(pixels, texts, torch.arange(images))


class TwoEncoders(LightningModule):
    def __init__(self):
        super().__init__()
        self.of_images, self.of_texts = (
            torch.nn.Linear(64, dim),
            torch.nn.Linear(64, dim),
        )
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def both(self, batch):
        pixels, texts, _ = batch
        return self.of_images(pixels), self.of_texts(texts.flatten(0, 1))

    def training_step(self, batch, batch_idx):
        of_images, of_texts = map(
            torch.nn.functional.normalize, self.both(batch)
        )
        logits = self.scale.exp() * of_images @ of_texts[::captions].T
        own = torch.arange(len(logits))
        loss = torch.nn.functional.cross_entropy
        return (loss(logits, own) + loss(logits.T, own)) / 2

    def validation_step(self, batch, batch_idx):
        of_images, of_texts = self.both(batch)
        number = batch[2]
        return {
            "image_embeds": of_images,
            "text_embeds": of_texts,
            "image": number,
            "image_of_text": number.repeat_interleave(captions),
            "text": (
                number[:, None] * captions + torch.arange(captions)
            ).flatten(),
        }

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


monitor = RetrievalMonitor(
    source=EmbeddingSource(
        ("image_embeds", "text_embeds"),
        labels=("image", "image_of_text"),
        ids=("image", "text"),
    ),
    metrics=("recall@1", "recall@5", "recall@10", "mAP"),
)
trainer = Trainer(
    callbacks=[monitor],
    max_epochs=3,
    logger=False,
    accelerator="cpu",
    enable_checkpointing=False,
)
trainer.fit(
    TwoEncoders(),
    DataLoader(data, batch_size=50, shuffle=True),
    DataLoader(data, batch_size=50),
)
for direction in ("image_to_text", "text_to_image"):
    report = monitor.reports[direction]
    logged = trainer.callback_metrics[f"val/{direction}/recall@5"]
    print(
        f"{direction}: {report.queries} queries, "
        f"{report.gallery} in the gallery, recall@5 {logged:.3f}"
    )
assert (
    monitor.reports["text_to_image"].queries
    == captions * monitor.reports["image_to_text"].queries
)
