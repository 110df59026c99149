"""Validate on several named sets, and keep the best checkpoint of one."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import RetrievalMonitor


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classifier = nn.Linear(20, 8), nn.Linear(8, 20)

    def training_step(self, batch, batch_idx):
        points, labels = batch
        return nn.functional.cross_entropy(
            self.classifier(self.encoder(points)), labels
        )

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        points, labels = batch
        return {"embeddings": self.encoder(points), "labels": labels}

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def made(noise: float) -> TensorDataset:
    labels = torch.arange(200) % 20
    return TensorDataset(
        torch.eye(20)[labels] + noise * torch.randn(200, 20), labels
    )


seed_everything(0)
loaders = {
    "clean": DataLoader(made(0.2), batch_size=50),
    "noisy": DataLoader(made(0.5), batch_size=50),
}
best = ModelCheckpoint(
    monitor="val/mAP/noisy",
    mode="max",
    filename="best-epoch={epoch}-mAP={val/mAP/noisy:.3f}",
    # Otherwise the slashes in the key make folders.
    auto_insert_metric_name=False,
)
trainer = Trainer(
    max_epochs=2, callbacks=[RetrievalMonitor(), best], logger=False
)
trainer.fit(
    Classifier(),
    DataLoader(made(0.3), batch_size=20),
    CombinedLoader(loaders, "sequential"),
)
print(
    {
        key: round(float(value), 3)
        for key, value in trainer.callback_metrics.items()
        if "mAP/" in key
    }
)
print(best.best_model_path)
