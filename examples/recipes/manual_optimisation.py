"""Monitor manual optimisation with two optimisers.

The monitors read a submodule's output by its name, as in any module.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import DiscriminantRatioMonitor, RetrievalMonitor


class TwoOptimisers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.encoder, self.classifier = nn.Linear(20, 8), nn.Linear(8, 20)

    def training_step(self, batch, batch_idx):
        points, labels = batch
        loss = nn.functional.cross_entropy(
            self.classifier(self.encoder(points)), labels
        )
        for optimiser in self.optimizers():
            optimiser.zero_grad()
        self.manual_backward(loss)
        for optimiser in self.optimizers():
            optimiser.step()

    def validation_step(self, batch, batch_idx):
        self.encoder(batch[0])

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.encoder.parameters()),
            torch.optim.SGD(self.classifier.parameters(), lr=0.1),
        ]


seed_everything(0)
labels = torch.arange(200) % 20
data = TensorDataset(
    torch.eye(20)[labels] + 0.3 * torch.randn(200, 20), labels
)
trainer = Trainer(
    max_epochs=2,
    callbacks=[
        DiscriminantRatioMonitor(source="encoder"),
        RetrievalMonitor(source="encoder"),
    ],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(
    TwoOptimisers(),
    DataLoader(data, batch_size=50),
    DataLoader(data, batch_size=50),
)
print(
    f"mAP {trainer.callback_metrics['val/mAP']:.3f}, "
    f"J {trainer.callback_metrics['train/J']:.2f}"
)
