"""Configure the monitors in a YAML file for Lightning's CLI.

The file gives the class_path and the settings of each monitor.
"""

import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONFIG = """
seed_everything: 0
trainer:
  max_epochs: 2
  logger: false
  callbacks:
    - class_path: fewshot_callbacks.RetrievalMonitor
      init_args:
        # an EmbeddingSource, which the next monitor shares
        source: &source { source: encoder, labels: 1 }
        metrics: [mAP, "recall@1", "recall@5", "map@10_found"]
    - class_path: fewshot_callbacks.KnnMonitor
      init_args: { k: [5], bank: self, source: *source }
    - class_path: fewshot_callbacks.DiscriminantRatioMonitor
      init_args:
        source: encoder
        every_n_steps: null  # only validation
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args:
        monitor: val/mAP
        mode: max
        filename: best
        auto_insert_metric_name: false
model:
  dim: 8
"""


class Classifier(LightningModule):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.encoder, self.classifier = (
            nn.Linear(20, dim),
            nn.Linear(dim, 20),
        )

    def training_step(self, batch, batch_idx):
        points, labels = batch
        return nn.functional.cross_entropy(
            self.classifier(self.encoder(points)), labels
        )

    def validation_step(self, batch, batch_idx):
        self.encoder(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Points(LightningDataModule):
    def setup(self, stage):
        labels = torch.arange(200) % 20
        self.data = TensorDataset(
            torch.eye(20)[labels] + 0.3 * torch.randn(200, 20), labels
        )

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=50)

    val_dataloader = train_dataloader


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "monitors.yaml")
        config.write_text(CONFIG)
        # Without args, the CLI reads your command line.
        cli = LightningCLI(
            Classifier, Points, args=["fit", "--config", str(config)]
        )
    values = cli.trainer.callback_metrics
    print(
        f"mAP {values['val/mAP']:.3f}, "
        f"Recall@5 {values['val/recall@5']:.3f}, J {values['val/J']:.2f}"
    )
