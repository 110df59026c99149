"""Write the embeddings of a checkpoint to a file that gate.sh evaluates.

Each item has an id, a label and a camera.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAMERAS = np.array(["roof", "door", "yard"])


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 16)
        self.classifier = nn.Linear(16, 40)

    def training_step(self, batch, batch_idx):
        points, labels = batch
        return nn.functional.cross_entropy(
            self.classifier(self.encoder(points)), labels
        )

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def items(classes: int, seed: int) -> TensorDataset:
    """Return points: 16 columns differ by class, and 48 are noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(12)
    signal = torch.randn(classes, 16, generator=generator)[labels]
    signal = signal + 0.4 * torch.randn(
        len(labels), 16, generator=generator
    )
    return TensorDataset(
        torch.cat(
            [signal, torch.randn(len(labels), 48, generator=generator)],
            dim=1,
        ),
        labels,
    )


checkpoint = Path(sys.argv[1] if len(sys.argv) > 1 else "model.ckpt")
# In your pipeline the training job writes the checkpoint.
if not checkpoint.exists():
    seed_everything(0)
    trainer = Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        Classifier(),
        DataLoader(items(40, seed=0), batch_size=48, shuffle=True),
    )
    trainer.save_checkpoint(checkpoint)

model = Classifier.load_from_checkpoint(
    checkpoint, map_location="cpu"
).eval()
# other classes than in training, and the same items in each run
val = items(60, seed=1)
with torch.inference_mode():
    rows = torch.cat(
        [
            model.encoder(points)
            for points, _ in DataLoader(val, batch_size=256)
        ]
    )
numbers = np.arange(len(val))
np.savez(
    "embeddings.npz",
    embeddings=rows.numpy(),
    labels=val.tensors[1].numpy(),
    # With ids, a report of other items is refused.
    ids=np.array([f"{number:04}.png" for number in numbers]),
    camera=CAMERAS[numbers % 3],
)
