"""Your own LightningModule, unchanged, with the two monitors attached.

The module below is an ordinary classifier without any code for embeddings: its steps return a loss or nothing at all.
The monitors listen to its hidden layer by name. The classes that it is evaluated on are not those that it was trained
on: that is what the embedding is for.

Run it as it is:    python examples/your_own_module.py
"""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from fewshot_callbacks import DiscriminantRatioMonitor, GlyphSet, RetrievalMonitor


class Classifier(LightningModule):
    """Pixels, a hidden layer, one logit for each training class."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(32 * 32, 512), nn.ReLU(), nn.Linear(512, 128))
        self.classifier = nn.Linear(128, classes)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.classifier(self.encoder(images)), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, _ = batch
        self.encoder(images)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=float, default=1.0, help="share of the training batches in an epoch")
    options = parser.parse_args()

    seed_everything(0)
    train, val = GlyphSet.load("train"), GlyphSet.load("val")
    trainer = Trainer(
        max_epochs=options.epochs,
        limit_train_batches=options.batches,
        callbacks=[
            # the name of the submodule whose output is the embedding; many classes are alone in a batch, and say nothing
            DiscriminantRatioMonitor(source="encoder", skip_singletons=True),
            RetrievalMonitor(source="encoder"),
        ],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        Classifier(len(train.characters)),
        DataLoader(train, batch_size=256, shuffle=True, collate_fn=lambda batch: batch),
        DataLoader(val, batch_size=512, collate_fn=lambda batch: batch),
    )
    for name in ("val/mAP", "val/recall@1", "val/grouped_recall@1", "val/J"):
        print(f"{name:<22}{float(trainer.callback_metrics[name]):.3f}")


if __name__ == "__main__":
    main()
