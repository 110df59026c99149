"""How often the open interval of few-shot accuracy holds the accuracy on all classes, over fresh sets of classes.

    python benchmarks/episode_coverage.py [--sets 200] [--classes 8 10 20 50 100 160]

A class has a centre and a spread of its own, both at random, and 40 images. A test set is some classes with 600 episodes,
5-way with 15 queries; the truth is the mean over 40,000 episodes of 3,000 classes. Printed are the share of the sets whose
open interval holds it, the same of the closed one (mean ± 1.96 standard errors over episodes), and how many times wider
the open one is. In the last column two models, one with noise added to its embeddings, are compared.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from fewshot_callbacks.functional import EpisodeAccuracy, sample_episodes, summarize_accuracies

WAYS, QUERIES, IMAGES, DIM = 5, 15, 40, 16
REGIMES = ((1, 1.0), (5, 0.7), (5, 1.3))
"""shots, and how far the centres lie apart"""


def drawn(classes: int, apart: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Images of two models, and their classes."""
    centre = apart * torch.randn(classes, 1, DIM, generator=generator)
    spread = 0.9 * torch.exp(0.4 * torch.randn(classes, 1, 1, generator=generator))
    images = (centre + spread * torch.randn(classes, IMAGES, DIM, generator=generator)).flatten(0, 1)
    other = images + 0.3 * torch.randn(images.shape, generator=generator)
    return images, other, torch.arange(classes).repeat_interleave(IMAGES)


def accuracy(images: Tensor, labels: Tensor, shots: int, episodes: int, seed: int) -> EpisodeAccuracy:
    """Nearest mean of the support."""
    chosen = sample_episodes(labels, ways=WAYS, shots=shots, queries=QUERIES, episodes=episodes, seed=seed)
    each = images[chosen.indices]
    nearest = torch.cdist(each[:, :, shots:].flatten(1, 2), each[:, :, :shots].mean(dim=2)).argmin(dim=2)
    right = nearest == torch.arange(WAYS).repeat_interleave(QUERIES)
    return summarize_accuracies(right.double().mean(dim=1), chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--classes", type=int, nargs="+", default=[8, 10, 20, 50, 100, 160])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("shots  truth  classes   open  closed  times wider  open of difference")
    for shots, apart in REGIMES:
        generator = torch.Generator().manual_seed(1)
        images, other, labels = drawn(3000, apart, generator)
        all_one, all_other = (accuracy(each, labels, shots, 40_000, 0) for each in (images, other))
        gain = all_one.mean - all_other.mean
        for classes in options.classes:
            held = torch.zeros(3)
            wider = 0.0
            for seed in range(options.sets):
                images, other, labels = drawn(classes, apart, generator)
                one, two = (accuracy(each, labels, shots, 600, seed) for each in (images, other))
                ends = [one.open_interval, one.interval, one.minus(two, over_classes=True).interval]
                truths = [all_one.mean, all_one.mean, gain]
                held += torch.tensor([low <= truth <= high for (low, high), truth in zip(ends, truths, strict=True)])
                wider += ends[0].half_width / ends[1].half_width / options.sets
            opened, closed, compared = (held / options.sets).tolist()
            row = f"{shots:>5}  {all_one.mean:.3f}  {classes:>7}  {opened:.3f}   {closed:.3f}  {wider:>11.1f}"
            print(f"{row}  {compared:>18.3f}", flush=True)


if __name__ == "__main__":
    main()
