"""Search settings with Optuna: a trial returns the logged mAP."""

import optuna
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import RetrievalMonitor


class Classifier(LightningModule):
    def __init__(self, dim: int, learning_rate: float) -> None:
        super().__init__()
        self.encoder, self.classifier = (
            nn.Linear(20, dim),
            nn.Linear(dim, 20),
        )
        self.learning_rate = learning_rate

    def training_step(self, batch, batch_idx):
        points, labels = batch
        return nn.functional.cross_entropy(
            self.classifier(self.encoder(points)), labels
        )

    def validation_step(self, batch, batch_idx):
        self.encoder(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


labels = torch.arange(200) % 20
points = torch.eye(20)[labels] + 0.3 * torch.randn(
    200, 20, generator=torch.Generator().manual_seed(0)
)
loader = DataLoader(TensorDataset(points, labels), batch_size=50)


def objective(trial):
    seed_everything(0)  # trials differ only in their settings
    model = Classifier(
        trial.suggest_int("dim", 2, 16),
        trial.suggest_float("learning_rate", 1e-3, 1e-1, log=True),
    )
    trainer = Trainer(
        max_epochs=3,
        callbacks=[RetrievalMonitor(source="encoder", prog_bar=False)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, loader)
    return trainer.callback_metrics["val/mAP"].item()


study = optuna.create_study(direction="maximize")
study.optimize(objective, n_trials=4)
print(f"mAP {study.best_value:.3f} with {study.best_params}")
