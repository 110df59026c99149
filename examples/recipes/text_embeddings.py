"""Evaluate text embeddings, and show the worst queries as texts.

The labels are strings.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from fewshot_callbacks import RetrievalMonitor, RetrievalPanels

QUESTIONS = {
    "refund": (
        "how do I get my money back",
        "I want a refund",
        "please return my money",
        "refund my order",
    ),
    "delivery": (
        "where is my parcel",
        "when will my order arrive",
        "track my delivery",
        "my parcel is late",
    ),
    "password": (
        "I forgot my password",
        "reset my password",
        "cannot log in",
        "change the password please",
    ),
}


class Encoder(LightningModule):
    """A bag of hashed words: replace it with your sentence encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(1000, 32)

    def embed(self, texts):
        numbers = [
            [sum(map(ord, word)) % 1000 for word in text.split()]
            for text in texts
        ]
        offsets = torch.tensor([0, *map(len, numbers)]).cumsum(0)[:-1]
        return self.words(
            torch.tensor([number for text in numbers for number in text]),
            offsets,
        )

    def validation_step(self, batch, batch_idx):
        return {
            "embeddings": self.embed(batch["text"]),
            "labels": batch["intent"],
        }


seed_everything(0)
data = [
    {"text": text, "intent": intent}
    for intent, texts in QUESTIONS.items()
    for text in texts
]
monitor = RetrievalMonitor(metrics=("mAP", "recall@1"), label_groups=None)
trainer = Trainer(
    # Without a logger, the panels are PNG files in the run's folder.
    callbacks=[monitor, RetrievalPanels()],
    logger=False,
    enable_checkpointing=False,
)
trainer.validate(Encoder(), DataLoader(data, batch_size=4))
