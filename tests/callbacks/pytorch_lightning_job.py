"""A script of a user of `pytorch_lightning`: trains, resumes and validates, and writes what it has seen to `seen.json`.

`test_pytorch_lightning.py` runs it in processes of its own, since a process works with one of Lightning's two packages.
"""

import json
import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# isort: split

from fewshot_callbacks import EmbeddingModule, RetrievalMonitor, SoftAveragePrecisionLoss
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, EmbeddingMap, ScorePlots, TrainingDynamicsMonitor
from fewshot_callbacks.functional import discriminant_ratio, evaluate_retrieval
from fewshot_callbacks.trainer import lightning

FOLDER, PROCESSES = Path(sys.argv[1]), int(sys.argv[2])
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
SETTINGS = QUIET | {"devices": PROCESSES, "strategy": "ddp" if PROCESSES > 1 else "auto", "log_every_n_steps": 1}


def data() -> TensorDataset:
    """33 noisy points of six classes: of two processes one repeats an item."""
    labels = torch.arange(33) % 6
    points = torch.eye(6, 12)[labels] + 0.5 * torch.randn(33, 12, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, labels)


def loader(shuffle: bool = False) -> DataLoader:
    return DataLoader(data(), batch_size=12, shuffle=shuffle)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(12, 5)

    def training_step(self, batch, batch_idx):
        embeddings = self.encoder(batch[0])
        return {"loss": embeddings.square().mean(), "embeddings": embeddings, "labels": batch[1]}

    def validation_step(self, batch, batch_idx):
        return {"embeddings": self.encoder(batch[0]), "labels": batch[1]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def values_of(trainer: pl.Trainer) -> dict[str, float]:
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def by_hand(net: Net) -> dict[str, float]:
    """What a validation must log, without a Trainer."""
    points, labels = data().tensors
    with torch.no_grad():
        embeddings = net.cpu().encoder(points)
    metrics = evaluate_retrieval(embeddings, labels).metrics()
    return {f"val/{key}": value for key, value in metrics.items()} | {
        "val/J": float(discriminant_ratio(embeddings, labels))
    }


def fit(epochs: int, checkpoint: str | None = None) -> dict:
    """A fit with pictures and checkpoints, from the first epoch or from a checkpoint."""
    pl.seed_everything(1)
    best = ModelCheckpoint(FOLDER / f"until {epochs}", monitor="val/mAP", mode="max", save_last=True)
    dynamics = TrainingDynamicsMonitor(every_n_steps=1, shots=1, strict=False)
    monitors = [RetrievalMonitor(), DiscriminantRatioMonitor(), dynamics]
    pictures = [ScorePlots(max_share=None), EmbeddingMap(max_share=None, projector=True)] if PROCESSES > 1 else []
    logger = TensorBoardLogger(FOLDER, name="logs", version=f"until {epochs}")
    trainer = pl.Trainer(max_epochs=epochs, logger=logger, callbacks=[*monitors, *pictures, best], **SETTINGS)
    net = Net()
    trainer.fit(net, loader(shuffle=True), loader(), ckpt_path=checkpoint)
    return {
        "values": values_of(trainer),
        "by hand": by_hand(net),
        "steps": list(dynamics.history.steps),
        "best": best.best_model_path,
        "last": best.last_model_path,
    }


def module_of_this_package() -> dict:
    """A fit of an `EmbeddingModule`, and its weights after loading them from the checkpoint."""
    trainer = pl.Trainer(
        max_epochs=1, logger=False, default_root_dir=FOLDER / "module", callbacks=RetrievalMonitor(), **QUIET
    )
    encoder = nn.Linear(12, 5)
    module = EmbeddingModule(encoder, SoftAveragePrecisionLoss())
    trainer.fit(module, loader(), loader())
    path = trainer.checkpoint_callback.best_model_path
    loaded = EmbeddingModule.load_from_checkpoint(path, backbone=nn.Linear(12, 5), loss=SoftAveragePrecisionLoss())
    return {"values": values_of(trainer), "same weights": torch.equal(loaded.backbone.weight, encoder.weight)}


def main() -> None:
    seen = {"package": lightning.PACKAGE, "first": fit(2)}
    seen["resumed"] = fit(3, seen["first"]["last"])
    pl.seed_everything(1)
    net = Net()
    trainer = pl.Trainer(logger=False, callbacks=[RetrievalMonitor(), DiscriminantRatioMonitor()], **SETTINGS)
    trainer.validate(net, loader(), verbose=False)
    seen["validated"] = {"values": values_of(trainer), "by hand": by_hand(net)}
    if PROCESSES == 1:
        seen["module"] = module_of_this_package()
    if trainer.is_global_zero:
        (FOLDER / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
