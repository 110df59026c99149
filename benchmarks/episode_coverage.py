"""How often the open interval of few-shot accuracy covers the accuracy on all classes, over fresh sets of classes.

    python benchmarks/episode_coverage.py [--sets 200] [--classes 8 10 20 50 100 160]

Each class has a random centre, a random spread and 40 images. A test set is a number of classes with 600 episodes, 5-way
with 15 queries; the true accuracy is the mean over 40,000 episodes of 3,000 classes. The table shows the coverage of the
open interval, the coverage of the closed interval (mean ± 1.96 standard errors over episodes), and how many times wider the
open interval is. The last column compares two models, one with noise added to its embeddings.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from fewshot_callbacks.functional import EpisodeAccuracy, sample_episodes, summarize_accuracies

WAYS, QUERIES, IMAGES, DIM = 5, 15, 40, 16
REGIMES = ((1, 1.0), (5, 0.7), (5, 1.3))
"""shots, and the distance between the centres"""


def drawn(classes: int, apart: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings of the same images by two models, and their classes."""
    centre = apart * torch.randn(classes, 1, DIM, generator=generator)
    spread = 0.9 * torch.exp(0.4 * torch.randn(classes, 1, 1, generator=generator))
    images = (centre + spread * torch.randn(classes, IMAGES, DIM, generator=generator)).flatten(0, 1)
    other = images + 0.3 * torch.randn(images.shape, generator=generator)
    return images, other, torch.arange(classes).repeat_interleave(IMAGES)


def accuracy(images: Tensor, labels: Tensor, shots: int, episodes: int, seed: int) -> EpisodeAccuracy:
    """Classify by the nearest support mean."""
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
