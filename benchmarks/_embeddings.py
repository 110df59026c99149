"""Seeded embeddings of a chosen difficulty, more like those of a real model than isotropic noise is.

The variance decays over the directions, as it does for the output of a trained network. How much noise there is in all
is found by bisection, so that a difficulty means the same mAP at every size. With "outliers" each item has its own,
heavy-tailed amount of noise, so that most classes hold a few items that lie among those of other classes.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

TARGETS = {"well-trained": 0.995, "outliers": 0.995, "middling": 0.6, "hard": 0.15}
"""difficulty -> the mAP that the noise is chosen for"""

DIFFICULTIES = (*TARGETS, "random", "near-collapsed", "collapsed", "repeated")

COPIES = 10
"""how often "repeated" holds each vector"""


def make(items: int, dim: int, difficulty: str, per_class: float = 53, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit vectors and their labels, shuffled.

    Args:
        items: how many.
        dim: of each.
        difficulty: one of `TARGETS`; "random" (labels mean nothing); "near-collapsed" (cosines within 1e-7 of each
            other, yet in an order that means something); "collapsed" (all vectors are equal); "repeated" (each vector
            ten times; every fifth vector belongs to two classes).
        per_class: items of each class, about: there are round(items / per_class) classes.
        seed: the same seed, the same embeddings on the same machine.

    Returns:
        (items, dim) float32 embeddings and (items,) int64 labels.

    Examples:
        >>> embeddings, labels = make(200, 8, "middling")
        >>> embeddings.shape, int(labels.max()) + 1
        (torch.Size([200, 8]), 4)
    """
    if difficulty not in DIFFICULTIES:
        raise ValueError(f"difficulty={difficulty!r} is none of {', '.join(DIFFICULTIES)}.")
    generator = torch.Generator().manual_seed(seed)
    if difficulty == "collapsed":
        labels = _labels(items, per_class, generator)
        return normalize(torch.randn(1, dim, generator=generator), dim=1).repeat(items, 1), labels
    if difficulty == "repeated":
        return _repeated(items, dim, per_class, seed, generator)
    if difficulty == "near-collapsed":
        around, labels = make(items, dim, "middling", per_class, seed)
        centre = normalize(torch.randn(1, dim, generator=generator, dtype=torch.float64), dim=1)
        # two unit vectors 1.5e-4 from a centre are at most 3e-4 apart: 1 - cosine <= 4.5e-8
        return normalize(centre + 1.5e-4 * around, dim=1).float(), labels

    labels = _labels(items, per_class, generator)
    spread = torch.arange(1, dim + 1).pow(-0.35)  # at dim = 512 about as many directions as 120 equal ones
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q  # no direction is an axis
    centres = normalize((torch.randn(int(labels.max()) + 1, dim, generator=generator) * spread) @ turn, dim=1)
    noise = normalize((torch.randn(items, dim, generator=generator) * spread) @ turn, dim=1)
    if difficulty == "outliers":
        noise *= torch.randn(items, 1, generator=generator).mul_(0.5).exp_()
    if difficulty == "random":
        return normalize(noise, dim=1), labels
    asked = torch.randperm(items, generator=generator)[: max(128, min(1024, 4_000_000 // items))]
    low, high = math.log(0.02), math.log(100.0)
    for _ in range(14):
        middle = (low + high) / 2
        reached = _mean_average_precision(_mixed(centres, noise, labels, math.exp(middle)), labels, asked)
        if reached > TARGETS[difficulty]:
            low = middle
        else:
            high = middle
    return _mixed(centres, noise, labels, math.exp(low)), labels


def parts(items: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` items, in order."""
    return (slice(start, min(start + size, items)) for start in range(0, items, size))


def _labels(items: int, per_class: float, generator: torch.Generator) -> Tensor:
    return (torch.arange(items) % max(round(items / per_class), 1))[torch.randperm(items, generator=generator)]


def _mixed(centres: Tensor, noise: Tensor, labels: Tensor, amount: float) -> Tensor:
    mixed = noise * amount
    for part in parts(len(labels), 16384):
        mixed[part] = normalize(mixed[part] + centres[labels[part]], dim=1)
    return mixed


def _repeated(items: int, dim: int, per_class: float, seed: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    distinct = -(-items // COPIES)
    vectors, vector_label = make(distinct, dim, "middling", max(per_class / COPIES, 2), seed)
    of_item = torch.randperm(items, generator=generator)
    copy, of_item = of_item // distinct, of_item % distinct
    labels = vector_label[of_item]
    elsewhere = (of_item % 5 == 0) & (copy % 2 == 1)
    labels[elsewhere] = (labels[elsewhere] + 1) % (int(vector_label.max()) + 1)
    return vectors[of_item], labels


def _mean_average_precision(embeddings: Tensor, labels: Tensor, asked: Tensor) -> float:
    """Of some of the items as queries against all others, by sorting."""
    rank, values = torch.arange(1, len(labels), dtype=torch.float32), []
    for some in asked.split(64):
        scores = embeddings[some] @ embeddings.T
        scores[torch.arange(len(some)), some] = -torch.inf
        found = labels[scores.argsort(dim=1, descending=True)[:, :-1]] == labels[some, None]
        values.append((found.cumsum(1) / rank * found).sum(1) / found.sum(1))
    return float(torch.cat(values).nanmean())
