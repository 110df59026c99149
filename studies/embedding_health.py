"""Which numbers of an embedding predict, without a ranking, how well it ranks? Small networks on glyphs or icons.

Run it as it is:    python studies/embedding_health.py     (six minutes on one core; stop and resume it as you like)
On icons:           python studies/embedding_health.py --data icons    (examples/icons lists what to install)
In short:           python studies/embedding_health.py --steps 2 4 --rates 1e-3 --seeds 0 --methods ap simclr

Each method trains the same small network with each learning rate and seed. At several checkpoints the network embeds images
of unseen classes, and the numbers of `embedding_health` are compared with mAP and the accuracy of episodes (5-way, 1-shot).
One method only pulls two views of an image together, so that it collapses. It writes to runs/embedding_health (--output):

    embedding_health.json    a row for each checkpoint; runs in this file are not trained again
    table.md                 the rank correlation (Spearman) of each number with mAP and accuracy, with 95 % intervals

The intervals come from a bootstrap over runs, because checkpoints of one run are not independent.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from icon_themes import IconThemes, on_white  # beside this file
from pytorch_metric_learning import losses
from scipy.stats import spearmanr
from torch import Tensor, nn

from fewshot_callbacks import (
    ClassBalancedBatchSampler,
    Conv4,
    DistanceRatioHead,
    Glyphs,
    SoftAveragePrecisionLoss,
    SoftmaxHead,
    evaluate_retrieval,
)
from fewshot_callbacks.data import augment_glyphs
from fewshot_callbacks.functional import embedding_health, sample_episodes

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, nargs="+", default=[10, 40, 160], help="checkpoints; the last ends the run")
parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 1e-2], help="of Adam")
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
parser.add_argument("--methods", nargs="+", default=["softmax", "dr", "ap", "triplet", "simclr", "attraction"])
parser.add_argument("--data", choices=["glyphs", "icons"], default="glyphs")
parser.add_argument("--output", type=Path, default=Path("runs/embedding_health"))
options = parser.parse_args()
classes_of_batch, items_per_class, width = 32, 4, 16
dim = 64  # dimension of the Conv4 output for 32 x 32 pixels
BETTER_LOW = ("spectral_decay", "uniformity", "nc1", "cdnv", "alignment", "hubness", "antihubs")
COLLAPSING = "attraction"


def of_episodes(head: nn.Module, embeddings: Tensor) -> Tensor:
    """Cross-entropy of a prototypical head; the first image of each class is its prototype."""
    of_classes = embeddings.unflatten(0, (-1, items_per_class))  # (classes, items, dim)
    targets = torch.arange(len(of_classes)).repeat_interleave(items_per_class - 1)
    return nn.functional.cross_entropy(head(of_classes[:, 1:].flatten(0, 1), of_classes[:, 0]), targets)


def loss_of(method: str, network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    if method in ("softmax", "dr"):
        return of_episodes(SoftmaxHead() if method == "softmax" else DistanceRatioHead(), network(look(images)))
    if method in ("ap", "triplet"):
        loss = SoftAveragePrecisionLoss() if method == "ap" else losses.TripletMarginLoss(0.2)
        return loss(network(look(images)), labels)
    one, other = (nn.functional.normalize(network(look(augment_glyphs(images)))) for _ in range(2))
    if method == COLLAPSING:
        return (one - other).square().sum(dim=1).mean()
    return nn.functional.cross_entropy(one @ other.T / 0.2, torch.arange(len(images)))  # SimCLR, only other views


def accuracy(embeddings: Tensor, labels: Tensor) -> float:
    """Return the accuracy over 600 5-way 1-shot episodes, by cosine."""
    rows = nn.functional.normalize(embeddings)[torch.stack(list(sample_episodes(labels, queries=5)))]
    similarity = torch.einsum("ewqd,ecd->ewqc", rows[:, :, 1:], rows[:, :, 0])  # (episodes, ways, queries, ways)
    return float((similarity.argmax(dim=3) == torch.arange(5)[:, None]).double().mean())


@torch.no_grad()
def measured(network: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    network.eval()
    embeddings = torch.cat([network(part) for part in images.split(512)])
    network.train()
    outcome = {
        "mAP": evaluate_retrieval(embeddings, labels, metrics="mAP").mAP,
        "accuracy": accuracy(embeddings, labels),
    }
    health = embedding_health(embeddings, labels)
    return outcome | health.metrics() | {"spread": health.spread, "collapse": health.collapse is not None}


def run(method: str, rate: float, seed: int) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    network, checkpoints = Conv4(pixels.shape[1], width), []
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    batches = ClassBalancedBatchSampler(
        train.labels,
        classes_per_batch=classes_of_batch,
        items_per_class=items_per_class,
        batches=options.steps[-1],
        seed=seed,
    )
    for step, batch in enumerate(batches, start=1):
        images, labels = train.images[batch].float() / 255, train.labels[batch]
        optimizer.zero_grad()
        loss_of(method, network, images, labels).backward()
        optimizer.step()
        if step in options.steps:
            numbers = {name: float(f"{value:.5g}") for name, value in measured(network, pixels, test.labels).items()}
            checkpoints.append({"method": method, "rate": rate, "seed": seed, "step": step} | numbers)
    return checkpoints


def correlation(rows: list[dict[str, Any]], number: str, outcome: str) -> str:
    """Return Spearman's correlation, positive if better numbers go with better outcomes, and its interval over runs."""
    of_runs: dict[Any, list[tuple[float, float]]] = {}
    for row in rows:
        if np.isfinite(row[number]):
            of_runs.setdefault((row["method"], row["rate"], row["seed"]), []).append((row[number], row[outcome]))
    runs, sign = [np.array(pairs) for pairs in of_runs.values()], -1 if number in BETTER_LOW else 1
    draws = np.random.default_rng(0).integers(len(runs), size=(1000, len(runs)))
    values = [sign * spearmanr(*np.concatenate([runs[i] for i in drawn]).T).statistic for drawn in draws]
    value = sign * spearmanr(*np.concatenate(runs).T).statistic
    low, high = np.nanquantile(values, [0.025, 0.975])
    return f"{value:+.2f} ({low:+.2f} to {high:+.2f})"


options.output.mkdir(parents=True, exist_ok=True)
file = options.output / "embedding_health.json"
done: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
data, look = (Glyphs, torch.nn.Identity()) if options.data == "glyphs" else (IconThemes, on_white)
train, test = data("train"), data("test")
pixels = look(test.images.float() / 255)
for method in options.methods:
    for rate in options.rates:
        for seed in options.seeds:
            if any((row["method"], row["rate"], row["seed"]) == (method, rate, seed) for row in done):
                continue
            began = time.process_time()
            done += run(method, rate, seed)
            file.write_text("[\n" + ",\n".join(map(json.dumps, done)) + "\n]\n")
            print(
                f"{method}, rate {rate:g}, seed {seed}: mAP {done[-1]['mAP']:.3f}, {time.process_time() - began:.0f} s"
            )
for method in options.methods:
    rows = [row for row in done if row["method"] == method]
    print(f"{method}: a collapse is reported for {sum(row['collapse'] > 0 for row in rows)} of {len(rows)} checkpoints")
numbers = [name for name in done[0] if name not in ("method", "rate", "seed", "step", "mAP", "accuracy", "collapse")]
sound = [row for row in done if row["method"] != COLLAPSING]
last = [row for row in sound if row["step"] == options.steps[-1]]
header = ["number", "mAP, all", "accuracy, all", f"mAP, without {COLLAPSING}", "mAP, last checkpoints of these"]
lines = [f"| {' | '.join(header)} |", "| --- | ---: | ---: | ---: | ---: |"]
for number in numbers:
    cells = [correlation(done, number, "mAP"), correlation(done, number, "accuracy")]
    cells += [correlation(some, number, "mAP") for some in (sound, last)]
    lines.append(f"| `{number}` | {' | '.join(cells)} |")
(options.output / "table.md").write_text("\n".join(lines) + "\n")
print("\n".join(lines))
