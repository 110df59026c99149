"""Train a Hugging Face vision transformer with Lightning.

A batch is a dictionary, and the embedding is a field of the model's output.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTModel

from fewshot_callbacks import EmbeddingSource, RetrievalMonitor


class Transformer(LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        config = ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
        # ViTModel.from_pretrained("google/vit-base-patch16-224-in21k")
        # downloads weights
        self.vit = ViTModel(config)
        self.classifier = nn.Linear(config.hidden_size, classes)

    def training_step(self, batch, batch_idx):
        logits = self.classifier(
            self.vit(pixel_values=batch["pixel_values"]).pooler_output
        )
        return nn.functional.cross_entropy(logits, batch["labels"])

    def validation_step(self, batch, batch_idx):
        self.vit(pixel_values=batch["pixel_values"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


seed_everything(0)
labels = torch.arange(80) % 20
images = torch.rand(20, 3, 32, 32)[labels] + torch.rand(80, 3, 32, 32)
data = [
    {"pixel_values": image, "labels": label}
    for image, label in zip(images, labels, strict=True)
]
trainer = Trainer(
    max_epochs=1,
    callbacks=[
        RetrievalMonitor(
            source=EmbeddingSource("vit:pooler_output", labels="labels")
        )
    ],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    Transformer(20),
    DataLoader(data, batch_size=16, shuffle=True),
    DataLoader(data, batch_size=16),
)
print(f"mAP {trainer.callback_metrics['val/mAP']:.3f}")
