"""Seeded embeddings of a chosen difficulty, closer to the output of a real model than isotropic noise.

The variance decays over the directions, as in the output of a trained network. Bisection finds the total amount of
noise, so that a difficulty means the same mAP at every size. With "outliers" each item has its own, heavy-tailed amount
of noise, so that most classes have a few items in the middle of other classes.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

TARGETS = {"well-trained": 0.995, "outliers": 0.995, "middling": 0.6, "hard": 0.15}
"""difficulty -> the mAP that the noise is chosen for"""

DIFFICULTIES = (*TARGETS, "random", "near-collapsed", "collapsed", "repeated", "heavy-tailed")

COPIES = 10
"""how often each vector appears if the difficulty is "repeated" """

# "heavy-tailed": the exponent of the Pareto distribution of class sizes, and the smallest and largest class.
TAIL_EXPONENT = 1.7
LEAST_CLASS = 6.5
GREATEST_CLASS = 600
# Fraction of duplicates at `COPIED_AT` items, and its growth with each doubling: larger collections have more duplicates.
COPIED_SHARE = 0.3
COPIED_AT = 20_000
COPIED_GROWTH = 0.07
# Distinct vectors that are duplicated, per item.
COPIED_VECTORS = 0.2
# How fast the variance decays over the directions, the norm of the mean that all vectors share, and the mAP.
HEAVY_TAILED_DECAY = 0.4
HEAVY_TAILED_MEAN = 0.34
HEAVY_TAILED_TARGET = 0.14


def make(items: int, dim: int, difficulty: str, per_class: float = 53, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Unit vectors and their labels, shuffled.

    Args:
        items: Number of items.
        dim: Dimension of the embeddings.
        difficulty: One of `TARGETS`; "random" (the labels are random); "near-collapsed" (all cosines are within 1e-7 of
            each other, but their order is meaningful); "collapsed" (all vectors are equal); "repeated" (each vector
            appears ten times, and every fifth vector belongs to two classes); "heavy-tailed" (classes have 6 to 600
            items, median 9; at least a third of the items are duplicates of a few vectors, across classes, like a
            paragraph that appears in many documents; all vectors share a mean). "heavy-tailed" ignores `per_class`.
        per_class: Mean number of items per class: there are round(items / per_class) classes.
        seed: The same seed gives the same embeddings on the same machine.

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
    if difficulty == "heavy-tailed":
        return _heavy_tailed(items, dim, generator)
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
    return _with_noise(
        lambda amount: _mixed(centres, noise, labels, amount), labels, asked, TARGETS[difficulty]
    ), labels


def parts(items: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` items, in order."""
    return (slice(start, min(start + size, items)) for start in range(0, items, size))


def _labels(items: int, per_class: float, generator: torch.Generator) -> Tensor:
    return (torch.arange(items) % max(round(items / per_class), 1))[torch.randperm(items, generator=generator)]


def _mixed(centres: Tensor, noise: Tensor, labels: Tensor, amount: float) -> Tensor:
    mixed = noise * amount
    for part in parts(len(labels), 16384):
        mixed[part] = normalize(mixed[part] + centres[labels[part]], dim=1)
    return mixed


def _with_noise(mixed: Callable[[float], Tensor], labels: Tensor, asked: Tensor, target: float) -> Tensor:
    """Return embeddings whose noise brings the mAP to the target; bisection finds the amount.

    Args:
        mixed: Returns the embeddings with a given amount of noise.
        labels: Labels of all items.
        asked: The queries that are averaged.
        target: The mAP.
    """
    low, high = math.log(0.02), math.log(100.0)
    for _ in range(14):
        middle = (low + high) / 2
        if _mean_average_precision(mixed(math.exp(middle)), labels, asked) > target:
            low = middle
        else:
            high = middle
    return mixed(math.exp(low))


def _heavy_tailed(items: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    uniform = torch.rand(items, generator=generator)
    sizes = (LEAST_CLASS * uniform ** (-1 / TAIL_EXPONENT)).clamp(max=GREATEST_CLASS).long()
    classes = int((sizes.cumsum(0) < items).sum()) + 1
    labels = torch.arange(classes).repeat_interleave(sizes[:classes])[:items]
    labels = labels[torch.randperm(items, generator=generator)]
    spread = torch.arange(1, dim + 1).pow(-HEAVY_TAILED_DECAY)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
    mean = HEAVY_TAILED_MEAN * normalize(torch.randn(dim, generator=generator), dim=0)

    def directions(number: int) -> Tensor:
        return normalize((torch.randn(number, dim, generator=generator) * spread) @ turn, dim=1)

    centres = directions(classes)
    noise = directions(items)
    share = COPIED_SHARE + COPIED_GROWTH * math.log2(items / COPIED_AT)
    is_copy = torch.rand(items, generator=generator) < share
    vectors = directions(max(1, round(COPIED_VECTORS * items)))
    frequency = 1.0 / torch.arange(1, len(vectors) + 1)
    copied = vectors[torch.multinomial(frequency, items, replacement=True, generator=generator)]

    def mixed(amount: float) -> Tensor:
        embeddings = normalize(_mixed(centres, noise, labels, amount) + mean, dim=1)
        embeddings[is_copy] = normalize(copied[is_copy] + mean, dim=1)
        return embeddings

    asked = torch.randperm(items, generator=generator)[:512]
    return _with_noise(mixed, labels, asked, HEAVY_TAILED_TARGET), labels


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
    """Return the mAP of some items as queries against all other items, by sorting."""
    rank, values = torch.arange(1, len(labels), dtype=torch.float32), []
    for some in asked.split(64):
        scores = embeddings[some] @ embeddings.T
        scores[torch.arange(len(some)), some] = -torch.inf
        found = labels[scores.argsort(dim=1, descending=True)[:, :-1]] == labels[some, None]
        values.append((found.cumsum(1) / rank * found).sum(1) / found.sum(1))
    return float(torch.cat(values).nanmean())
