"""Verify speakers, or faces, while a network trains.

Each validation evaluates a trial list of people who are not in training.
"""

import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fewshot_callbacks import (
    EmbeddingSource,
    RetrievalMonitor,
    VerificationMonitor,
)

torch.manual_seed(0)
# The last twenty speakers are in the trial list.
SPEAKERS, RECORDINGS = 60, 10
voices = torch.randn(SPEAKERS, 10)
# The microphones are louder than the voices.
microphones = 2 * torch.randn(8, 30)


class Recordings(Dataset):
    """Made-up features of recordings.

    Ten numbers describe the voice, and thirty describe the microphone.
    """

    def __init__(self, speakers):
        self.speakers = [
            speaker for speaker in speakers for _ in range(RECORDINGS)
        ]
        self.paths = [
            f"id{speaker:03}/{number}.wav"
            for speaker in speakers
            for number in range(RECORDINGS)
        ]
        noise = 0.5 * torch.randn(len(self.paths), 40)
        channels = microphones[torch.randint(8, (len(self.paths),))]
        self.features = (
            torch.cat([voices[self.speakers], channels], dim=1) + noise
        )

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return {
            "features": self.features[index],
            "speaker": self.speakers[index],
            "path": self.paths[index],
        }


class Speakers(LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(40, 16)
        self.classifier = nn.Linear(16, 40)

    def training_step(self, batch, batch_idx):
        scores = self.classifier(
            nn.functional.normalize(self.encoder(batch["features"]))
        )
        return nn.functional.cross_entropy(20 * scores, batch["speaker"])

    def validation_step(self, batch, batch_idx):
        self.encoder(batch["features"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.03)


train_set, val_set = Recordings(range(40)), Recordings(range(40, SPEAKERS))

# A line of a VoxCeleb trial list has 1 (target trial) or 0 (non-target
# trial), and two recordings.
trials = Path(tempfile.mkdtemp()) / "trials.txt"
with trials.open("w") as file:
    for trial in range(4000):
        first = int(torch.randint(len(val_set), ()))
        of_speaker = range(
            first - first % RECORDINGS,
            first - first % RECORDINGS + RECORDINGS,
        )
        second = (
            int(torch.randint(len(val_set), ()))
            if trial % 2
            else of_speaker[int(torch.randint(RECORDINGS, ()))]
        )
        if first != second:
            same = val_set.speakers[first] == val_set.speakers[second]
            file.write(
                f"{int(same)} "
                f"{val_set.paths[first]} {val_set.paths[second]}\n"
            )

# Both monitors share one copy of the embeddings.
source = EmbeddingSource("encoder", labels="speaker")
verification = VerificationMonitor(
    trials,
    ids="path",
    metrics=("eer", "min_dcf@0.05", "tar@far0.01"),
    source=source,
)
best = ModelCheckpoint(
    tempfile.mkdtemp(), monitor="val/eer", mode="min", filename="best"
)

if __name__ == "__main__":
    trainer = Trainer(
        max_epochs=20,
        callbacks=[verification, RetrievalMonitor(source=source), best],
        logger=False,
        accelerator="cpu",
    )
    model = Speakers()
    trainer.validate(
        model, DataLoader(val_set, batch_size=64), verbose=False
    )
    before = float(trainer.callback_metrics["val/eer"])
    trainer.fit(
        model,
        DataLoader(train_set, batch_size=50, shuffle=True),
        DataLoader(val_set, batch_size=64),
    )
    print(
        f"EER {before:.3f} before training, "
        f"{float(trainer.callback_metrics['val/eer']):.3f} after it"
    )
    print(verification.report)
