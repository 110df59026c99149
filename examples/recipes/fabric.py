"""Fabric: no Trainer and no callbacks, so the metric classes are called in the loop. They reduce over processes.

201 items do not split evenly over two processes, so Fabric's sampler repeats one; by its id it counts once.
"""

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import DiscriminantRatio, RetrievalEvaluation

seed_everything(0)
labels = torch.arange(201) % 20
points = torch.eye(20)[labels] + 0.3 * torch.randn(201, 20)
data = TensorDataset(
    points, labels, torch.arange(201)
)  # the third is the index, which names each item

fabric = Fabric(
    accelerator="cpu", devices=1
)  # on two GPUs: accelerator="gpu", devices=2
fabric.launch()
encoder, classifier = nn.Linear(20, 8), nn.Linear(8, 20)
model = nn.Sequential(encoder, classifier)
model, optimiser = fabric.setup(model, torch.optim.Adam(model.parameters()))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=50))

for epoch in range(2):
    for inputs, targets, _ in loader:
        optimiser.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimiser.step()

    evaluation, ratio = (
        RetrievalEvaluation(metrics=("mAP", "recall@1", "recall@5")),
        DiscriminantRatio(),
    )
    with torch.no_grad():
        for inputs, targets, index in loader:
            embeddings = encoder(inputs)
            evaluation.update(
                embeddings, targets, ids=index
            )  # kept on the CPU
            ratio.update(embeddings, targets, ids=index)
    values = evaluation.compute()
    print(
        f"epoch {epoch}: mAP {values['mAP']:.3f}, Recall@1 {values['recall@1']:.3f}, J {ratio.compute():.2f}"
    )
