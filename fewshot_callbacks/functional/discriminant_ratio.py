"""The discriminant ratio J: scatter between classes over scatter within classes, by traces alone.

J = Tr(S_B) / (Tr(S_W) + eps) with Tr(S_W) = sum over items of |E_i - mu_class|^2 and Tr(S_B) = sum over classes of
n_c |mu_c - mu|^2 (Fisher's criterion; K. Fukunaga, "Introduction to Statistical Pattern Recognition", 1990, chapter 10).
J (N - C) / (C - 1) is the index of Calinski and Harabasz (1974). Only the traces are formed, never the d x d matrices:
O(B d) time and memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.functional._checks import LABEL_DTYPES
from fewshot_callbacks.functional.processes import ALONE, Processes

EPS = 1e-12


def discriminant_ratio(
    embeddings: Tensor, labels: Tensor, *, eps: float = EPS, normalize: bool = False, skip_singletons: bool = False
) -> Float[Tensor, ""]:
    """J of one batch, on the device of the embeddings and without waiting for it.

    Args:
        embeddings: (items, dim), any floating dtype; computed in float32 at least.
        labels: (items,) integer labels, any values, same device.
        eps: added to the scatter within classes.
        normalize: scale each embedding to length 1 first. J does not change when all embeddings are multiplied by one
            number, but it does change under normalisation.
        skip_singletons: leave out classes with a single item: they add scatter between classes, but can add none within.

    Returns:
        A scalar on the same device, >= 0, larger is better separated; no gradient flows. NaN where J says nothing: every
        class has one item, the batch is empty, or all embeddings are equal (0 / 0).

    Raises:
        ValueError: if embeddings are not (items, dim) or labels are not one integer for each item. Values are not looked
            at, since that would wait for the device; NaN in the embeddings makes J NaN.

    Examples:
        >>> import torch
        >>> embeddings = torch.tensor([[0.0, 0.0], [0.0, 2.0], [4.0, 0.0], [4.0, 2.0]])
        >>> round(discriminant_ratio(embeddings, torch.tensor([0, 0, 1, 1])).item(), 6)  # 16 / 4
        4.0
    """
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        raise ValueError(
            f"discriminant_ratio needs floating-point embeddings of shape (items, dim); got {embeddings.dtype} of shape "
            f"{tuple(embeddings.shape)}. Flatten what belongs to one item: embeddings.flatten(1)."
        )
    if labels.shape != embeddings.shape[:1] or labels.dtype not in LABEL_DTYPES:
        raise ValueError(
            f"discriminant_ratio needs one integer label for each of the {len(embeddings)} embeddings; got "
            f"{labels.dtype} of shape {tuple(labels.shape)}."
        )
    with torch.no_grad(), torch.autocast(embeddings.device.type, enabled=False):
        return _discriminant_ratio(embeddings.detach(), labels, eps, normalize, skip_singletons)


def _discriminant_ratio(
    embeddings: Tensor, labels: Tensor, eps: float, normalize: bool, skip_singletons: bool
) -> Float[Tensor, ""]:
    items = _at_least_float32(embeddings)
    if len(items) == 0:
        return items.new_full((), torch.nan)
    if normalize:
        items = torch.nn.functional.normalize(items, dim=1)
    items = items - items[:1]  # a common offset, however large, cancels without a rounding; equal rows become zeros
    # Number the classes without `unique`, whose result has a size that only the device knows.
    ordered, order = (labels.long() if labels.dtype == torch.bool else labels).sort()
    items = items[order]  # (items, dim)
    number = torch.nn.functional.pad(ordered[1:] != ordered[:-1], (1, 0)).cumsum(0)  # (items,) 0 ... classes - 1
    count = items.new_zeros(len(items)).index_add_(0, number, items.new_ones(len(items)))  # 0 behind the last class
    means = torch.zeros_like(items).index_add_(0, number, items) / count.clamp(min=1).unsqueeze(1)
    apart = items - means[number]  # (items, dim)
    if skip_singletons:  # a class of one item has no scatter within, and must not move the centre
        count = count * (count > 1)
        centre = (means * count.unsqueeze(1)).sum(dim=0) / count.sum().clamp(min=1)
    else:
        centre = items.mean(dim=0)
    within = apart.square().sum()
    between = (count * (means - centre).square().sum(dim=1)).sum()
    undefined = (count.max() <= 1) | (within + between == 0)
    return torch.where(undefined, torch.nan, between / (within + eps))


def _at_least_float32(embeddings: Tensor) -> Tensor:
    return embeddings if embeddings.dtype == torch.float64 else embeddings.float()


@dataclass(frozen=True)
class ClassMoments:
    """What J needs of a set of items: per class the count, the mean and the scatter around it.

    Moments of disjoint sets can be merged in any order (Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances", 1979), so that J of a set can be had in one pass over its batches, or
    over the shards of several processes.

    Examples:
        >>> import torch
        >>> embeddings, labels = torch.randn(60, 8), torch.arange(60) % 5
        >>> whole = ClassMoments.of(embeddings, labels)
        >>> parts = ClassMoments.of(embeddings[:13], labels[:13]).merge(ClassMoments.of(embeddings[13:], labels[13:]))
        >>> torch.testing.assert_close(parts.discriminant_ratio(), whole.discriminant_ratio())
    """

    labels: Int[Tensor, "classes"]
    """ascending, each once"""
    counts: Int[Tensor, "classes"]
    means: Float[Tensor, "classes dim"]
    """float64"""
    scatter: Float[Tensor, "classes"]
    """sum of squared distances of the items of a class to its mean"""

    @classmethod
    def nothing(cls, dim: int) -> ClassMoments:
        """Those of no items."""
        return cls.of(torch.empty(0, dim), torch.empty(0, dtype=torch.int64))

    @classmethod
    def of(cls, embeddings: Float[Tensor, "items dim"], labels: Int[Tensor, "items"]) -> ClassMoments:
        """The moments of one batch, in float64 on its device."""
        items = embeddings.detach().double()
        present, number, counts = labels.unique(return_inverse=True, return_counts=True)
        offset = items[:1].expand(min(len(items), 1), -1).sum(dim=0)  # the first row, or zeros if there is none
        shifted = items - offset
        means = torch.zeros(len(present), items.shape[1], dtype=torch.float64, device=items.device)
        means = means.index_add_(0, number, shifted) / counts.unsqueeze(1)
        squares = (shifted - means[number]).square().sum(dim=1)
        scatter = torch.zeros(len(present), dtype=torch.float64, device=items.device).index_add_(0, number, squares)
        return cls(present.long(), counts, means + offset, scatter)

    def merge(self, other: ClassMoments) -> ClassMoments:
        """The moments of both sets together."""
        labels, place = torch.cat([self.labels, other.labels]).unique(return_inverse=True)
        mine, theirs = place[: len(self.labels)], place[len(self.labels) :]

        def spread(values: Tensor, at: Tensor) -> Tensor:
            return values.new_zeros(len(labels), *values.shape[1:]).index_copy_(0, at, values)

        counts_a, counts_b = spread(self.counts, mine), spread(other.counts, theirs)
        means_a, means_b = spread(self.means, mine), spread(other.means, theirs)
        counts = counts_a + counts_b
        share = (counts_b.double() / counts).unsqueeze(1)
        step = means_b - means_a
        means = torch.where(share == 0, means_a, torch.where(share == 1, means_b, means_a + step * share))
        scatter = spread(self.scatter, mine) + spread(other.scatter, theirs)
        return ClassMoments(labels, counts, means, scatter + step.square().sum(dim=1) * counts_a * counts_b / counts)

    def shared(self, processes: Processes) -> ClassMoments:
        """Of the classes that are this process's, the moments of the items of all processes: each class is one's alone.

        Every process has to call it; one without items brings moments of as many dimensions and no class.
        """
        owner = self.labels.remainder(processes.count)
        mine = self._of(owner == processes.rank)
        for step in range(1, processes.count):
            to = (processes.rank + step) % processes.count
            leaving = self._of(owner == to)
            tensors = [leaving.labels, leaving.counts, leaving.means, leaving.scatter]
            theirs = processes.exchange(tensors, to=to, source=(processes.rank - step) % processes.count)
            mine = mine.merge(ClassMoments(*(theirs or ())))
        return mine

    def _of(self, chosen: Bool[Tensor, "classes"]) -> ClassMoments:
        return ClassMoments(self.labels[chosen], self.counts[chosen], self.means[chosen], self.scatter[chosen])

    def discriminant_ratio(
        self, *, eps: float = EPS, skip_singletons: bool = False, processes: Processes = ALONE
    ) -> Float[Tensor, ""]:
        """J of the whole set; NaN where it says nothing (see `discriminant_ratio`).

        Args:
            eps: see `discriminant_ratio`.
            skip_singletons: see `discriminant_ratio`.
            processes: those that hold the other classes of the set (see `shared`).
        """
        keep = self.counts > (1 if skip_singletons else 0)
        counts, means, scatter = self.counts[keep].double(), self.means[keep], self.scatter[keep]
        first = [means for means in processes.gather(means[:1]) if len(means)]
        if not first or processes.largest([float(counts.max()) if len(counts) else 0.0])[0] <= 1:
            return self.means.new_full((), torch.nan)
        shifted = means - first[0]
        totals = processes.gather(((shifted * counts.unsqueeze(1)).sum(dim=0), counts.sum(), scatter.sum()))
        weighted, items, within = (reduce(torch.add, parts) for parts in zip(*totals, strict=True))
        between = (counts * (shifted - weighted / items).square().sum(dim=1)).sum()
        between = reduce(torch.add, processes.gather(between))
        return torch.where((within == 0) & (between == 0), torch.nan, between / (within + eps))
