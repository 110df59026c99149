"""The scaling of rows to scores and back: how rows are divided and centred before they are multiplied.

All scores are in [-1, 1]. A score is the exact similarity of two rows in range, times a power of two, so that products
stay in the range of float32. Let r be the `range_factor` and f the `score_factor`, both powers of two. Then

    score of a dot product p = p r^2 f
    score of a distance d = -(d r)^2 f
    score of a Hamming distance d of codes of b bits = (b - 2 d) f

The score of a cosine is the cosine itself. `Scale.to_user` and `Scale.from_user` are inverses of each other, up to the
rounding of a squared distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine import exact
from fewshot_callbacks.engine.options import run_tasks, split
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.settings import Similarity

Floats = NDArray[np.float64]
# To add a similarity, add it to `settings.Similarity` and to `_KINDS`; its score to `exact._round`; its operands and the
# meaning of its scores to `OperandRows.fill`, `Scale.to_user` and `from_user`; its range to `functional/neighbours.py`.
_KINDS = {"cosine": exact.COSINE, "dot": exact.DOT, "euclidean": exact.EUCLIDEAN, "hamming": exact.DOT}
# Binary exponents up to which float64 can represent products of four numbers and their rounding errors, with room to
# spare.
_SAFE = 100
# Smallest binary exponent by which rows of float64 are divided; 2**1024 exceeds float64.
LEAST_EXPONENT = -1000


def check_similarity(similarity: str) -> None:
    """Raise an error that lists the known similarities if this one is unknown."""
    if similarity not in get_args(Similarity):
        raise InputError(f"similarity={similarity!r} is unknown. Choose one of {', '.join(get_args(Similarity))}.")


@dataclass(frozen=True)
class Scale:
    """How the rows of a similarity are scaled: the same for all rows of all processes.

    Attributes:
        similarity: How rows are compared.
        dim: Components of a row.
        is_double: Whether rows are compared in float64.
        exponent: Binary exponent by which all rows are divided; None if each row is divided by its own exponent.
        query_factor: Power of two that multiplies queries, so that scores are in [-1, 1].
        item_factor: Power of two that multiplies items.
        centre: (dim,) point to which rows are moved before they are multiplied.
    """

    similarity: Similarity
    dim: int
    is_double: bool
    exponent: int | None
    query_factor: float
    item_factor: float
    centre: Floats

    @property
    def kind(self) -> int:
        """`exact.COSINE`, `exact.DOT` or `exact.EUCLIDEAN`."""
        return _KINDS[self.similarity]

    @property
    def are_codes(self) -> bool:
        """Whether the rows are binary codes, whose estimates are exact."""
        return self.similarity == "hamming"

    @property
    def dtype(self) -> torch.dtype:
        """The type in which rows are compared."""
        if self.are_codes:
            return torch.int8
        return torch.float64 if self.is_double else torch.float32

    @property
    def score_factor(self) -> float:
        """Power of two by which similarities are multiplied to be scores."""
        return self.query_factor * self.item_factor

    @property
    def range_factor(self) -> float:
        """Factor that brings all rows into the range of float64; 1 for cosines, which do not depend on it."""
        return math.ldexp(1.0, -self.exponent) if self.exponent else 1.0

    @property
    def product_weight(self) -> int:
        """The number of times that a product counts in a score: -|q - g|**2 contains twice the product of q and g."""
        return 2 if self.kind == exact.EUCLIDEAN else 1

    @property
    def columns(self) -> int:
        """Components of an operand of floats."""
        return self.dim + (2 if self.kind == exact.EUCLIDEAN else 0)

    def in_range(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the rows, divided by the common power of two or each row by its own power."""
        if self.exponent == 0:
            return rows
        exponents: Any = self.exponent
        if exponents is None:
            exponents = np.frexp(np.abs(rows).max(1, initial=0.0))[1][:, None]
        divided: NDArray[Any] = np.ldexp(rows, -exponents)
        return divided

    def norms_of(self, rows: NDArray[Any], threads: int) -> Floats:
        """Return (rows, 2) the norm of each row in range, rounded to float64, and its rounding error."""
        norms = np.zeros((len(rows), 2))

        def fill(block: slice, work: Floats) -> None:
            exact.exact_norms(rows[block], not self.is_double, norms[block], work)

        run_tasks(split(len(rows)), fill, threads, exact.workspace)
        return norms

    # -------------------------------------------------------------------------------------------------- what a user reads

    def to_user(self, scores: Floats) -> Floats:
        """Return the similarities that scores stand for, in the units of the data."""
        similarities: Floats
        if self.are_codes:
            similarities = (scores / self.score_factor - self.dim) / 2
        elif self.kind == exact.EUCLIDEAN:
            similarities = -np.sqrt(np.maximum(-scores / self.score_factor, 0.0)) / self.range_factor
        else:
            with np.errstate(over="ignore"):
                similarities = scores / self.score_factor / self.range_factor / self.range_factor
        return similarities + 0.0  # turns -0.0 into 0.0

    def from_user(self, similarities: Any) -> Any:
        """Return the scores of similarities. Infinite similarities stay infinite."""
        similarities = np.asarray(similarities, np.float64)
        if self.are_codes:
            return (2 * similarities + self.dim) * self.score_factor
        with np.errstate(over="ignore", invalid="ignore"):
            if self.kind == exact.EUCLIDEAN:
                minus_distances = similarities * self.range_factor
                scores = -minus_distances * minus_distances * self.score_factor
                return np.where(similarities <= 0, scores, np.inf)  # no distance is negative
            return similarities * self.score_factor * self.range_factor * self.range_factor


# --------------------------------------------------------------------------------------------------- how a scale is found


def scale_without_factors(
    similarity: Similarity, sides: list[NDArray[Any]], pieces: Iterable[NDArray[Any]], processes: Processes
) -> Scale:
    """Return a scale that brings rows into the range of float64, with no factors and no centre yet. *Collective*.

    Args:
        similarity: How rows are compared.
        sides: The rows in memory: the queries, and the gallery if there are two sets.
        pieces: The rows on disk, piece by piece. They are only read for float64.
        processes: All processes.
    """
    dim = int(sides[0].shape[1])
    is_double = sides[0].dtype == np.float64
    exponent: int | None = 0
    if is_double:
        exponent = _common_exponent(_KINDS[similarity], [*sides, *pieces], processes)
    return Scale(similarity, dim, is_double, exponent, 1.0, 1.0, np.zeros(dim))


def _common_exponent(kind: int, rows: Iterable[NDArray[Any]], processes: Processes) -> int | None:
    """Return the binary exponent to divide all rows by; None if each row is divided by its own exponent. *Collective*.

    It is 0 unless squares of components exceed the range of float64.
    """
    largest_components = np.concatenate([np.abs(piece).max(1, initial=0.0) for piece in rows])
    if kind == exact.COSINE:
        exponents = np.frexp(largest_components)[1]
        (farthest,) = processes.largest([float(np.abs(exponents).max(initial=0))])
        return 0 if farthest <= _SAFE else None
    (largest,) = processes.largest([float(largest_components.max(initial=0.0))])
    exponent = max(LEAST_EXPONENT, int(np.frexp(largest)[1]))
    return 0 if largest == 0.0 or abs(exponent) <= _SAFE else exponent


def with_factors(scale: Scale, largest_norms: list[float]) -> Scale:
    """Return a scale with the powers of two that bring scores to [-1, 1].

    Args:
        scale: A scale.
        largest_norms: The largest norm of each side, over all processes.
    """
    if scale.kind == exact.COSINE:
        return scale
    powers = [2.0 ** math.ceil(math.log2(norm)) if norm else 1.0 for norm in largest_norms]
    # A distance is at most twice the largest norm. Estimates are products of centred rows, whose norms are not larger
    # either.
    if scale.kind == exact.EUCLIDEAN:
        factor = 1.0 / (2.0 * max(powers))
        return replace(scale, query_factor=factor, item_factor=factor)
    return replace(scale, query_factor=1.0 / powers[0], item_factor=1.0 / powers[-1])


def with_centre(scale: Scale, pieces: Callable[[], Iterable[NDArray[Any]]], items: int, processes: Processes) -> Scale:
    """Return the scale with its centre, which for distances is the mean of all processes' items. *Collective*.

    Distances do not change if the centre is subtracted from all rows, and products of centred rows have smaller rounding
    errors.

    Args:
        scale: A scale.
        pieces: Yields all items of this process in range, piece by piece.
        items: Number of items of this process.
        processes: All processes.
    """
    if scale.kind != exact.EUCLIDEAN:
        return scale
    sums = [rows.sum(0, dtype=np.float64) for rows in pieces()]
    every_sum, every_count = zip(*processes.gather((sum(sums), items)), strict=True)
    mean: Floats = sum(every_sum) / max(1, sum(every_count))
    return replace(scale, centre=mean)
