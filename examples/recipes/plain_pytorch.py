"""Evaluate in a plain PyTorch loop, with two function calls."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import discriminant_ratio, evaluate_retrieval

torch.manual_seed(0)
labels = torch.arange(200) % 20
data = TensorDataset(
    torch.eye(20)[labels] + 0.3 * torch.randn(200, 20), labels
)
loader = DataLoader(data, batch_size=50)
encoder, classifier = nn.Linear(20, 8), nn.Linear(8, 20)
optimiser = torch.optim.Adam(
    [*encoder.parameters(), *classifier.parameters()]
)

for points, targets in loader:
    embeddings = encoder(points)
    loss = nn.functional.cross_entropy(classifier(embeddings), targets)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    print(
        f"loss {loss:.2f}, "
        f"J {discriminant_ratio(embeddings.detach(), targets):.2f}"
    )

with torch.inference_mode():
    embeddings = torch.cat([encoder(points) for points, _ in loader])
report = evaluate_retrieval(embeddings, labels)
low, high = report.intervals["mAP"].low, report.intervals["mAP"].high
print(
    f"mAP {report.mAP:.3f} (95 % interval {low:.3f} to {high:.3f}), "
    f"Recall@1 {report['recall@1']:.3f}"
)
