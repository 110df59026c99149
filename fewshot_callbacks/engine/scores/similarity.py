"""What the cosine, the dot product and the Euclidean distance do differently; larger is always closer.

Each is a small object without state. Everything else in this package treats them alike: a score is a product of two rows
that were scaled by powers of two, times a factor of each row, in a unit that keeps all scores in range. The Euclidean
distance is held as minus its square, which is such a product of rows with two more columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple, final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.scores import exact
from fewshot_callbacks.engine.scores.vectors import ChosenRows, Vectors

Similarity = Literal["cosine", "dot", "euclidean", "hamming"]
"""`cosine`: cosine of the angle, 0 for a zero vector. `dot`: inner product. `euclidean`: minus the Euclidean distance.
`hamming`: minus the number of bits in which two binary codes differ; see `codes`, which `ScoreTiles` does not know."""

TINIEST = 2.0**-1022
"""The smallest normal float64."""


class LargestNorms(NamedTuple):
    """The largest norms of one side, over all processes."""

    norm: float
    centred_norm: float


def check_similarity(similarity: str) -> None:
    """Refuse an unknown similarity, and name the known ones."""
    if similarity not in get_args(Similarity):
        raise ValueError(f"similarity={similarity!r} is unknown. Choose one of {', '.join(get_args(Similarity))}.")


def vector_similarity(similarity: Similarity) -> VectorSimilarity:
    """Return the similarity of this name; refuse one that is unknown or does not compare vectors."""
    check_similarity(similarity)
    if similarity == "hamming":
        raise ValueError("ScoreTiles: binary codes are packed, and compared by codes.HammingPass.")
    return next(kind for kind in (Cosine(), Dot(), Euclidean()) if kind.name == similarity)


class VectorSimilarity(ABC):
    """How two vectors make a score. `Cosine`, `Dot` and `Euclidean` are all there are."""

    name: ClassVar[Similarity]
    kernel: ClassVar[int]
    """its number in the compiled kernels"""
    bounded: ClassVar[bool] = False
    """no score leaves [-1, 1], and the lengths of vectors do not count"""
    centred: ClassVar[bool] = False
    """scores do not change when all vectors move; products are made of vectors that are moved to their centre"""
    extra_columns: ClassVar[int] = 0
    """columns of an operand beside the components of its row"""
    scale_of_zeros: ClassVar[float] = 1.0
    """the scale of a row of zeros; any number does where it only divides that row"""

    def units(self, query_scale: float, gallery_scale: float) -> tuple[float, float]:
        """Return the units of the two sides, given their largest scales: powers of two that keep scores in range."""
        return query_scale, gallery_scale

    def factor(
        self, root: Float[Tensor, "items"], scale: Float[Tensor, "items"], unit: float
    ) -> Float[Tensor, "items"]:
        """Return what scaled rows are multiplied by; `root` is the norm of each."""
        return scale / unit

    def norm(self, root: Float[Tensor, "items"], factor: Float[Tensor, "items"]) -> Float[Tensor, "items"]:
        """Return the norms that bound the scores."""
        return root * factor

    def operand(
        self,
        vectors: Vectors,
        index: Int[Tensor, "some"],
        dtype: torch.dtype,
        unit: float,
        centre: Float[Tensor, "dim"],
        *,
        of_query: bool,
    ) -> Float[Tensor, "some columns"]:
        """Return some rows as one side of a product of this dtype."""
        return vectors.scaled(index, dtype).mul_(vectors.factor[index].to(dtype).unsqueeze(1))

    @abstractmethod
    def norm_products(
        self, norm: Float[Tensor, "*items"], centred_norm: Float[Tensor, "*items"], others: LargestNorms
    ) -> tuple[Float[Tensor, "*items"], Float[Tensor, "*items"]]:
        """Return bounds of sum |q_i g_i| over all columns of two operands, and over the components of their rows alone."""

    @abstractmethod
    def score_range(self, queries: LargestNorms, gallery: LargestNorms) -> tuple[float, float]:
        """Return an interval that holds every score."""

    def to_user(
        self, scores: Float[Tensor, "*shape"], query_unit: float, gallery_unit: float
    ) -> Float[Tensor, "*shape"]:
        """Return the scores that a user reads: in the units of the data, and not squared."""
        return scores * query_unit * gallery_unit

    def from_user(
        self, scores: Float[Tensor, "*shape"], query_unit: float, gallery_unit: float
    ) -> Float[Tensor, "*shape"]:
        """Return the scores, in our units, that a user reads as these."""
        return scores / query_unit / gallery_unit

    @abstractmethod
    def exact(self, left: ChosenRows, right: ChosenRows, *, single: bool) -> Float[Tensor, "*pairs"]:
        """Return the exact scores of scaled rows; NaN where their error bound leaves two float64 open."""

    def exact_unit(self, left: ChosenRows, right: ChosenRows) -> Tensor | float:
        """Return the powers of two that turn `exact` into scores in our units."""
        return left.factor * right.factor

    def by_fractions(self, left: ChosenRows, right: ChosenRows) -> float:
        """Return what `exact` approximates, for one pair, by rational numbers."""
        one, other = ((side.values / side.scale).tolist() for side in (left, right))
        return exact.by_fractions(one, other, self.name)


def _scaled_dot(left: ChosenRows, right: ChosenRows, *, single: bool) -> tuple[Tensor, Tensor, Tensor]:
    return exact.dot(left.values / left.scale.unsqueeze(-1), right.values / right.scale.unsqueeze(-1), single=single)


@final
class Cosine(VectorSimilarity):
    """The cosine of the angle; 0 for a zero vector."""

    name = "cosine"
    kernel = 0
    bounded = True

    def units(self, query_scale: float, gallery_scale: float) -> tuple[float, float]:
        return 1.0, 1.0

    def factor(self, root: Tensor, scale: Tensor, unit: float) -> Tensor:
        return torch.where(root == 0, 0.0, 1 / root)

    def norm(self, root: Tensor, factor: Tensor) -> Tensor:
        return root

    def norm_products(self, norm: Tensor, centred_norm: Tensor, others: LargestNorms) -> tuple[Tensor, Tensor]:
        return torch.ones_like(norm), torch.ones_like(norm)

    def score_range(self, queries: LargestNorms, gallery: LargestNorms) -> tuple[float, float]:
        return -1.0, 1.0

    def exact(self, left: ChosenRows, right: ChosenRows, *, single: bool) -> Tensor:
        squares = [(side.square, side.square_low) for side in (left, right)]
        return exact.cosine(_scaled_dot(left, right, single=single), squares[0], squares[1], left.values.shape[-1])

    def exact_unit(self, left: ChosenRows, right: ChosenRows) -> float:
        return 1.0


@final
class Dot(VectorSimilarity):
    """The inner product."""

    name = "dot"
    kernel = 1

    def norm_products(self, norm: Tensor, centred_norm: Tensor, others: LargestNorms) -> tuple[Tensor, Tensor]:
        return norm * others.norm, norm * others.norm

    def score_range(self, queries: LargestNorms, gallery: LargestNorms) -> tuple[float, float]:
        bound = queries.norm * gallery.norm * (1 + 1e-9)
        return -bound, bound

    def exact(self, left: ChosenRows, right: ChosenRows, *, single: bool) -> Tensor:
        return exact.nearest(*_scaled_dot(left, right, single=single))


@final
class Euclidean(VectorSimilarity):
    """Minus the Euclidean distance, held as minus its square."""

    name = "euclidean"
    kernel = 2
    centred = True
    extra_columns = 2
    # a pair takes the larger of its two scales: a row of zeros must not be the one that gives it
    scale_of_zeros = TINIEST

    def units(self, query_scale: float, gallery_scale: float) -> tuple[float, float]:
        unit = max(query_scale, gallery_scale)
        return unit, unit

    def operand(
        self, vectors: Vectors, index: Tensor, dtype: torch.dtype, unit: float, centre: Tensor, *, of_query: bool
    ) -> Tensor:
        rows = vectors.chosen(index).double() / unit - centre / unit
        square = -rows.square().sum(1, keepdim=True)
        # -|q - g|^2 = 2 q.g - |q|^2 - |g|^2, all in one product of two more columns
        ones = torch.ones_like(square)
        return torch.cat((2 * rows, square, ones) if of_query else (rows, ones, square), dim=1).to(dtype)

    def norm_products(self, norm: Tensor, centred_norm: Tensor, others: LargestNorms) -> tuple[Tensor, Tensor]:
        whole = 2 * (centred_norm + others.centred_norm) ** 2
        return whole, 2 * centred_norm * others.centred_norm

    def score_range(self, queries: LargestNorms, gallery: LargestNorms) -> tuple[float, float]:
        return -((queries.norm + gallery.norm) ** 2) * (1 + 1e-9), 0.0

    def to_user(self, scores: Tensor, query_unit: float, gallery_unit: float) -> Tensor:
        return -(-scores).clamp(min=0.0).sqrt() * query_unit

    def from_user(self, scores: Tensor, query_unit: float, gallery_unit: float) -> Tensor:
        distance = scores / query_unit
        return torch.where(scores <= 0, -(distance * distance), torch.inf)  # no distance is negative

    def exact(self, left: ChosenRows, right: ChosenRows, *, single: bool) -> Tensor:
        scale = torch.maximum(left.scale, right.scale)
        squares = exact.squared_distance(left.values, right.values, scale)
        return exact.negative_square(*squares, left.values.shape[-1])

    def exact_unit(self, left: ChosenRows, right: ChosenRows) -> Tensor:
        return torch.maximum(left.factor, right.factor).square()

    def by_fractions(self, left: ChosenRows, right: ChosenRows) -> float:
        scale = torch.maximum(left.scale, right.scale)
        one, other = ((side.values / scale).tolist() for side in (left, right))
        return exact.by_fractions(one, other, self.name)
