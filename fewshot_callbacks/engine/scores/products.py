"""Scores of pairs: one exact value for each, and fast products that come close to it with a proved bound.

Larger is always closer. The *exact score* of a pair is its true cosine, dot product or minus its distance, computed from the
two rows as real numbers and rounded once to float64: it depends on nothing else, no tile, thread, machine or order of
summation (`pairs` says how). Ranks, ties and thresholds are defined by it. Inside the engine it is held in a unit that keeps
all scores in range, distances as minus their square; what a user reads and writes is in the unit of the data, distances
as minus themselves. `to_user_score` and `to_exact_score` convert between the two.

A matrix product gives only an estimate, whose rounding depends on the tile; `ScoreTiles.tile` therefore hands out each
estimate together with the distance that it can be off (`bounds`).

Every finite float32 (and narrower) row is served. For float64 rows the true value must lie in the range of float64: a score
below 2**-960 times the largest (2**-480 for distances), or components of one row that span more than 2**480, may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.options import triton_kernels
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.bounds import ErrorBounds
from fewshot_callbacks.engine.scores.pairs import ExactScores
from fewshot_callbacks.engine.scores.similarity import LargestNorms, Similarity, check_similarity, vector_similarity
from fewshot_callbacks.engine.scores.units import Units, largest_of
from fewshot_callbacks.engine.scores.vectors import Vectors

__all__ = ["CHUNK", "ScoreTiles", "Similarity", "check_similarity"]

CHUNK = 128
"""Components that one float32 product sums up on the CPU. The error grows with their number, not with the dimension: the
products of several chunks are added afterwards, which costs little and leaves fewer pairs open."""


@dataclass(frozen=True, eq=False)
class Products:
    """Matrix products of queries and gallery items, which estimate their scores with proved errors."""

    query_vectors: Vectors
    gallery_vectors: Vectors
    units: Units
    bounds: ErrorBounds

    def operand(
        self, index: Int[Tensor, "items"], precision: Precision, *, of_query: bool
    ) -> Float[Tensor, "items components"]:
        """Return one side of a product of this precision, ready to be multiplied.

        At `Precision.HALF` the two last columns are to be left out of the product for `"euclidean"`: see `half_product`.
        """
        dtype = torch.float64 if precision == Precision.FLOAT64 else torch.float32
        unit = self.units.queries if of_query else self.units.gallery
        vectors = self._side(of_query)
        return self.units.similarity.operand(vectors, index, dtype, unit, self.units.centre, of_query=of_query)

    def product(self, left: Tensor, right: Tensor, precision: Precision) -> Float[Tensor, "rows columns"]:
        """Return the estimates that two operands of a precision give."""
        if precision == Precision.HALF:
            return self.half_product(left, right)
        if precision != Precision.FLOAT32:
            return left @ right.T
        estimates = left[:, : self.chunk] @ right[:, : self.chunk].T  # (rows, columns)
        for start in range(self.chunk, left.shape[1], self.chunk):
            estimates += left[:, start : start + self.chunk] @ right[:, start : start + self.chunk].T
        return estimates

    def half_product(self, left: Tensor, right: Tensor) -> Float[Tensor, "rows columns"]:
        """Return float32 estimates from a product in half precision of two operands of `Precision.HALF`."""
        left_half, right_half = left[:, : self.dim].to(self.half), right[:, : self.dim].to(self.half)
        return self.from_half(left_half @ right_half.T, left, right)

    def from_half(self, product: Tensor, left: Tensor, right: Tensor) -> Float[Tensor, "rows columns"]:
        """Return float32 estimates from the half-precision product of the first `dim` columns of two operands."""
        estimates: Tensor = product.float()
        if self.units.similarity.extra_columns:
            estimates += left[:, self.dim, None]
            estimates += right[:, self.dim + 1]
        return estimates

    def error(self, index: Tensor, precision: Precision, *, of_query: bool = True) -> Float[Tensor, "items"]:
        """Return for each item the largest distance between an estimate and the exact score, for any other item."""
        return self.bounds.of(self._side(of_query), index, precision, of_query=of_query)

    def largest_error(self, precision: Precision) -> float:
        """Return a bound of `error` for all pairs of all processes, of this precision or a more exact one."""
        return self.bounds.largest(precision)

    def half_low(
        self, scores: Float[Tensor, "items"], index: Int[Tensor, "items"], *, of_query: bool
    ) -> Float[Tensor, "items"]:
        """Return lower bounds of the half-precision estimates of pairs whose exact score is at least `scores`."""
        return self.bounds.half_low(scores, self._side(of_query), index, of_query=of_query)

    def bytes_low(
        self, scores: Float[Tensor, "items"], index: Int[Tensor, "items"], *, of_query: bool
    ) -> Float[Tensor, "items"]:
        """Return below what no upper bound from bytes lies, of pairs whose exact score is at least `scores`."""
        return self.bounds.bytes_low(scores, self._side(of_query), index, of_query=of_query)

    def _side(self, of_query: bool) -> Vectors:
        return self.query_vectors if of_query else self.gallery_vectors

    @property
    def queries(self) -> Tensor:
        """The rows of the queries."""
        return self.query_vectors.rows

    @property
    def gallery(self) -> Tensor:
        """The rows of the gallery."""
        return self.gallery_vectors.rows

    @property
    def similarity(self) -> Similarity:
        """The name of the similarity."""
        return self.units.similarity.name

    @property
    def dim(self) -> int:
        """Components of a row."""
        return self.bounds.dim

    @property
    def device(self) -> torch.device:
        """Where scores are computed."""
        return self.units.device

    @property
    def compiled(self) -> ModuleType | None:
        """The compiled kernels, where they are used."""
        return self.units.compiled

    @property
    def half(self) -> torch.dtype:
        """The dtype of operands of `Precision.HALF`; float32 for TF32."""
        return self.bounds.half

    @property
    def chunk(self) -> int:
        """Components that one float32 product sums up."""
        return self.bounds.chunk


@final
@dataclass(frozen=True, eq=False)
class ScoreTiles(Products):
    """The scores of a set of queries against a set of gallery items, in tiles, without ever holding all of them.

    `ScoreTiles.from_rows` makes them of two tensors.
    """

    @classmethod
    def from_rows(
        cls,
        queries: Tensor,
        gallery: Tensor,
        similarity: Similarity,
        device: torch.device | None = None,
        processes: Processes = ALONE,
    ) -> ScoreTiles:
        """Measure two sets of rows, together with all other processes.

        Args:
            queries: (queries, dim) floating-point rows, finite, on one device.
            gallery: (gallery, dim) rows of the same dtype and device.
            similarity: See `Similarity`.
            device: Where tiles are computed; the rows stay where they are and come over in slices. By default their own.
            processes: Who else holds queries and gallery items; units and bounds are those of all.
        """
        device = queries.device if device is None else device
        units = Units.of_all(queries, gallery, vector_similarity(similarity), device, processes)
        left = units.measure(queries, of_query=True)
        right = left if gallery is queries else units.measure(gallery, of_query=False)
        norms = processes.largest([largest_of(n) for side in (left, right) for n in (side.norm, side.centred_norm)])
        # float16 has three bits more than bfloat16, and scores that are bounded stay far inside its range; TF32 has both
        half = torch.float32 if triton_kernels(device) is not None else torch.bfloat16
        if device.type == "cuda" and units.similarity.bounded:
            half = torch.float16
        chunk = CHUNK if device.type == "cpu" else queries.shape[1]
        largest = LargestNorms(*norms[:2]), LargestNorms(*norms[2:])
        return cls(left, right, units, ErrorBounds(units.similarity, queries.shape[1], chunk, half, *largest))

    def with_gallery(self, gallery: Float[Tensor, "items dim"]) -> ScoreTiles:
        """Return the scores of the same queries and another gallery block, in the same units and with the same bounds.

        Args:
            gallery: Rows of the dtype and device of those that were measured, among which they were counted.
        """
        return replace(self, gallery_vectors=self.units.measure(gallery, of_query=False))

    def with_chunk(self, chunk: int) -> ScoreTiles:
        """Return the same scores, whose float32 products sum up `chunk` components at a time."""
        return replace(self, bounds=replace(self.bounds, chunk=chunk))

    def unrounded(self) -> ScoreTiles:
        """Return the same scores, whose products in half precision are kept in float32."""
        return replace(self, bounds=replace(self.bounds, unrounded=True))

    # ----------------------------------------------------------------------------------------------------- in tiles, exactly

    def tile(
        self, rows: Int[Tensor, "rows"], columns: Int[Tensor, "columns"], precision: Precision
    ) -> tuple[Float[Tensor, "rows columns"], Float[Tensor, "rows"]]:
        """Return estimates of the scores of rows x columns, and how far each row's estimates can be off.

        Args:
            rows: Indices of queries.
            columns: Indices of gallery items.
            precision: The precision of the product, or `Precision.EXACT`: the exact scores, error 0.
        """
        if precision == Precision.EXACT:
            return self.exact_scores(rows, columns), torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        left, right = self.operand(rows, precision, of_query=True), self.operand(columns, precision, of_query=False)
        return self.product(left, right, precision), self.error(rows, precision)

    @cached_property
    def exact(self) -> ExactScores:
        """The exact scores of pairs."""
        inverse_unit = 1 / self.units.queries if self.units.queries else 0.0
        relative = self.bounds.relative(Precision.FLOAT64)
        units = self.units
        return ExactScores(
            self.query_vectors, self.gallery_vectors, units.similarity, units.compiled, inverse_unit, relative
        )

    def pairs(self) -> Any:
        """Return queries and gallery as the compiled kernels take them."""
        return self.exact.for_kernels

    def exact_scores(self, rows: Int[Tensor, "rows"], columns: Int[Tensor, "columns"]) -> Float[Tensor, "rows columns"]:
        """Return the exact scores of rows x columns."""
        return self.exact.batched(rows[None], columns[None])[0]

    def batched_scores(
        self, rows: Int[Tensor, "blocks rows"], columns: Int[Tensor, "blocks columns"]
    ) -> Float[Tensor, "blocks rows columns"]:
        """Return the exact scores of several blocks of the same shape."""
        return self.exact.batched(rows, columns)

    def pair_scores(self, rows: Int[Tensor, "pairs"], columns: Int[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
        """Return the exact scores of single pairs (rows[i], columns[i])."""
        return self.exact.of_pairs(rows, columns)

    # ------------------------------------------------------------------------------------------------- what a user reads

    def to_user_score(self, score: float) -> float:
        """Return the score that a user reads: in the units of the data."""
        return float(self.to_user_scores(torch.tensor(score, dtype=torch.float64)))

    def to_user_scores(self, scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the scores that a user reads for these exact scores."""
        return self.units.similarity.to_user(scores, self.units.queries, self.units.gallery)

    def to_exact_score(self, score: float) -> float:
        """Return the exact score that a user writes as this."""
        return float(self.to_exact_scores(torch.tensor(score, dtype=torch.float64)))

    def to_exact_scores(self, scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the exact scores that a user writes as these."""
        return self.units.similarity.from_user(scores, self.units.queries, self.units.gallery)

    @property
    def score_range(self) -> tuple[float, float]:
        """An interval that holds every exact score."""
        return self.units.similarity.score_range(self.bounds.queries, self.bounds.gallery)

    @property
    def zero_vectors(self) -> tuple[int, int]:
        """How many queries and gallery items have length zero (cosine only; elsewhere a zero vector is nothing odd)."""
        if not self.units.similarity.bounded:
            return 0, 0
        return int((self.query_vectors.norm == 0).sum()), int((self.gallery_vectors.norm == 0).sum())

    @property
    def longest_item(self) -> tuple[int, float]:
        """Which gallery item is the longest, and how many times as long as the median.

        (-1, 1.0) for cosines, and where the median is zero.
        """
        norm = self.gallery_vectors.norm
        if self.units.similarity.bounded or not len(norm) or not norm.median():
            return -1, 1.0
        longest = int(norm.argmax())
        return longest, float(norm[longest] / norm.median())
