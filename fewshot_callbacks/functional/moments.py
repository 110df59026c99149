"""Moments (count, mean and scatter) of a set of items and of its classes, merged over processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.functional import _scatter_kernel
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments, unit_rows

# The decay is fitted to these eigenvalues, counted from 1. The first two show the classes, and the end of a long spectrum
# is noise.
DECAY = (3, 100)
# Fewer eigenvalues do not show a slope.
FEWEST_EIGENVALUES = 3
# Rows that are converted to float64 at a time.
TILE = 2048


@dataclass(frozen=True)
class Moments:
    """The count, the mean and the scatter matrix of a set of items, in float64; those of disjoint sets merge in any order.

    Examples:
        >>> import torch
        >>> items = torch.randn(60, 8)
        >>> parts = Moments.of(items[:13]).merge(Moments.of(items[13:]))
        >>> torch.testing.assert_close(parts.scatter, Moments.of(items).scatter)
    """

    count: int
    origin: Float[Tensor, "dim"]
    """an item, from which the mean is measured, so that no offset costs a digit"""
    offset: Float[Tensor, "dim"]
    """mean minus origin"""
    scatter: Float[Tensor, "dim dim"]
    """sum over items of (item - mean)(item - mean)'"""

    @classmethod
    def of(cls, items: Float[Tensor, "items dim"]) -> Moments:
        """Return the moments of at least one item."""
        origin = items[0].double()
        shifted = items - origin  # float64 for any dtype of the items
        offset = shifted.mean(dim=0)
        shifted -= offset
        return cls(len(items), origin, offset, gram(shifted))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the union of two disjoint sets."""
        count = self.count + other.count
        step = (other.origin - self.origin) + (other.offset - self.offset)  # from one mean to the other
        between = step.outer(step) * (self.count * other.count / count)
        offset = self.offset + step * (other.count / count)
        return Moments(count, self.origin, offset, self.scatter + other.scatter + between)

    @property
    def mean(self) -> Float[Tensor, "dim"]:
        """The mean of all items."""
        return self.origin + self.offset

    @cached_property
    def eigenvalues(self) -> Float[Tensor, "rank"]:
        """Eigenvalues of the scatter matrix that are more than rounding, the largest first."""
        return _positive(self.scatter)

    def rankme(self) -> float:
        """Return RankMe, from 1 to the smaller of items and dimensions; NaN if all items are 0."""
        second_moment = self.scatter + self.count * self.mean.outer(self.mean)
        singular = _positive(second_moment).sqrt()
        missing = max(0, min(self.count, len(self.mean)) - len(singular))
        return _entropy_rank(torch.cat([singular, singular.new_zeros(missing)]), 1e-7)

    def effective_rank(self) -> float:
        """Return the effective rank of the covariance, at least 1; NaN if all items are equal."""
        return _entropy_rank(self.eigenvalues, 0.0)

    def spectral_decay(self) -> float:
        """Return how fast the eigenvalues of the covariance fall; NaN where there are too few of them."""
        first, last = DECAY
        logs = self.eigenvalues[first - 1 : last].log()
        if len(logs) < FEWEST_EIGENVALUES:
            return math.nan
        log_index = torch.arange(first, first + len(logs), dtype=torch.float64, device=logs.device).log()
        centred = log_index - log_index.mean()
        return -float((centred @ logs) / (centred @ centred))

    @property
    def spread(self) -> float:
        """Root mean square length of the deviations from the mean over that of the items; 0 if all items are 0."""
        deviation = float(self.scatter.trace())
        total = deviation + self.count * float(self.mean.square().sum())
        return math.sqrt(deviation / total) if total else 0.0


def gram(rows: Float[Tensor, "items dim"]) -> Float[Tensor, "dim dim"]:
    """Return the products of the columns of a matrix with each other."""
    dim = rows.shape[1]
    products = rows.new_empty(dim, dim)
    step = max(1, -(-dim // 4))
    for first in range(0, dim, step):
        # The matrix is symmetric.
        block = rows[:, first : first + step].T @ rows[:, first:]
        products[first : first + step, first:] = block
        products[first:, first : first + step] = block.T
    return products


def _positive(matrix: Float[Tensor, "dim dim"]) -> Float[Tensor, "rank"]:
    """Return the eigenvalues of a symmetric matrix above rounding, descending."""
    values: Tensor = torch.linalg.eigvalsh(matrix).flip(0)
    return values[values > values[0].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps]


def _entropy_rank(values: Float[Tensor, "n"], floor: float) -> float:
    """Return exp of the entropy of the shares of descending values, plus a floor; NaN if all are 0."""
    if not len(values) or float(values[0]) == 0:
        return math.nan
    share = values / values.sum() + floor
    return math.exp(-float(torch.special.xlogy(share, share).sum()))


class MomentsOfClasses(NamedTuple):
    """The moments of each class: of its items, and of its items as unit vectors."""

    items: ClassMoments
    unit_vectors: ClassMoments


def moments_of_all(
    rows: Tensor, codes: Tensor | None, processes: Processes, *, normalize: bool
) -> tuple[Moments, MomentsOfClasses | None]:
    """Return the moments of the items of all processes, and of each class if there are labels. *Collective*."""
    # Squares of float64 may overflow, so rows are scaled. A power of two keeps every digit.
    largest = float(rows.abs().max()) if rows.dtype == torch.float64 and rows.numel() else 0.0
    largest_of_all = max(processes.gather(largest))
    if largest_of_all > 2.0**1000:  # the length of a row may be infinite
        rows = rows * 2.0**-500
        largest_of_all *= 2.0**-500
    scale = 2.0 ** math.frexp(largest_of_all)[1]
    by_rank = processes.gather(_moments_here(rows, codes, scale, normalize=normalize))
    moments, of_items, of_unit_vectors = (_merged(moments_by_rank) for moments_by_rank in zip(*by_rank, strict=True))
    return moments, None if of_items is None else MomentsOfClasses(of_items, of_unit_vectors)


def _moments_here(
    rows: Tensor, codes: Tensor | None, scale: float, *, normalize: bool
) -> tuple[Moments | None, ClassMoments | None, ClassMoments | None]:
    """Return the moments of this process's rows, of each class, and of each class as unit vectors; None without rows.

    `codes` are the classes; None without labels. `scale` is the length that counts as 1, unless `normalize` scales each
    row to length 1.
    """
    if not len(rows):
        return None, None, None
    tiles = (unit_rows(tile.double()) if normalize else tile / scale for tile in rows.split(TILE))
    moments = reduce(Moments.merge, (Moments.of(tile) for tile in tiles))
    if codes is None:
        return moments, None, None
    lengths = torch.from_numpy(_scatter_kernel.lengths(rows.numpy()))
    of_unit_vectors = _class_moments(rows, codes, lengths)
    of_items = of_unit_vectors if normalize else _class_moments(rows, codes, torch.full_like(lengths, scale))
    return moments, of_items, of_unit_vectors


def _class_moments(
    rows: Float[Tensor, "items dim"], codes: Int[Tensor, "items"], lengths: Float[Tensor, "items"]
) -> ClassMoments:
    """Return the moments of each class of rows divided by `lengths`, in one pass over the rows."""
    present, number, counts = codes.unique(return_inverse=True, return_counts=True)
    origin = number.sort(stable=True).indices[counts.cumsum(0) - counts]  # the first item of each class
    sums, squares = _scatter_kernel.class_sums(rows.numpy(), lengths.numpy(), number.numpy(), origin.numpy())
    offsets = torch.from_numpy(sums) / counts[:, None]
    # The origin is an item, so the subtracted term is at most n times the remaining scatter, and its rounding n 2^-53 of it.
    scatter = (torch.from_numpy(squares) - counts * offsets.square().sum(dim=1)).clamp(min=0)
    origins = rows[origin].double() / lengths[origin, None]
    return ClassMoments(Labels(present.long()), counts, origins, offsets, scatter.sqrt())


def _merged(moments_by_rank: Sequence[Any]) -> Any:
    """Return the merged moments of the processes with rows; None if there are none."""
    present = [moments for moments in moments_by_rank if moments is not None]
    return reduce(lambda merged, moments: merged.merge(moments), present) if present else None
