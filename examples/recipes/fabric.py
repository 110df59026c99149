"""Evaluate in a Fabric loop, without a Trainer and without callbacks.

The metric classes reduce over processes. 201 items do not split evenly over
two processes, so Fabric's sampler repeats one item. Its id makes it count
once.
"""

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import DiscriminantRatio, RetrievalEvaluation

seed_everything(0)
labels = torch.arange(201) % 20
points = torch.eye(20)[labels] + 0.3 * torch.randn(201, 20)
# the third tensor is the index, which identifies each item
data = TensorDataset(points, labels, torch.arange(201))

# on two GPUs: accelerator="gpu", devices=2
fabric = Fabric(accelerator="cpu", devices=1)
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
            # stores the embeddings on the CPU
            evaluation.update(embeddings, targets, ids=index)
            ratio.update(embeddings, targets, ids=index)
    values = evaluation.compute()
    print(
        f"epoch {epoch}: mAP {values['mAP']:.3f}, "
        f"Recall@1 {values['recall@1']:.3f}, J {ratio.compute():.2f}"
    )
