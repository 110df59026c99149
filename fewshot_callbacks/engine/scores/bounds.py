"""How far an estimate can be from the exact score, proved.

A product of length n in a precision with unit roundoff u is off by at most n u / (1 - n u) times sum |q_i g_i| <= |q| |g|,
in any order of summation, with or without fused multiply-add (Higham, "Accuracy and Stability of Numerical Algorithms",
section 3.1); rounding the two operands adds a few u. Where the products of several chunks of components are added, n is
the length of a chunk plus their number. Operands in half precision move a product by at most |q - q'| |g| + |q'| |g - g'|,
and its own rounding to half precision comes on top. The same holds of operands in bytes, whose product is exact
(`cpu/byte_kernels.py`). So do the rounding of the exact score, and what lies below the
smallest normal number.

TF32 has the exponents of float32 and 10 bits of mantissa after the leading one (NVIDIA A100 Tensor Core GPU Architecture,
2020), so that a number rounded to the nearest one moves by at most 2**-11 of itself, as to float16. A product of two such
numbers has 22 bits, and is exact in float32; sums are accumulated in float32.

Tensor cores sum exact products a few at a time, K of 4 to 16 of them and what there was before. Each of these K + 1 numbers
is aligned with the largest and cut off, and so is the result (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior
of NVIDIA tensor cores", PeerJ Computer Science 7:e330, 2021). That moves each by less than 2**-23 of the largest, which is
at most sum |q_i g_i|. Up to terms of second order, at most n / K + 1 steps lose less than (K + 2) (n / K + 1) 2**-23 of it:
less than the (n + 12) 2**-22 that is allowed for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.similarity import LargestNorms, VectorSimilarity
from fewshot_callbacks.engine.scores.vectors import Vectors

Items = Float[Tensor, "items"]


@dataclass(frozen=True)
class ErrorBounds:
    """Bounds of the errors of products of some similarity, dimension and precision."""

    similarity: VectorSimilarity
    dim: int
    chunk: int
    """components that one float32 product sums up"""
    half: torch.dtype
    """of operands of `Precision.HALF`; float32 for TF32"""
    queries: LargestNorms
    gallery: LargestNorms
    unrounded: bool = False
    """products of `Precision.HALF` stay in float32, in which they are accumulated"""

    def of(self, vectors: Vectors, index: Tensor, precision: Precision, *, of_query: bool) -> Items:
        """Return for some items the largest distance between an estimate and the exact score, for any other item."""
        others = self.gallery if of_query else self.queries
        return self._error(vectors.norm[index], vectors.centred_norm[index], others, precision)

    def largest(self, precision: Precision) -> float:
        """Return a bound for all pairs of all processes, of this precision or a more exact one."""
        norm, centred_norm = (torch.tensor(largest, dtype=torch.float64) for largest in self.queries)
        return float(self._error(norm, centred_norm, self.gallery, precision))

    def relative(self, precision: Precision) -> float:
        """Return the error of a product of this precision, as a share of the product of the norms."""
        unit_roundoff = 2.0**-53 if precision == Precision.FLOAT64 else 2.0**-24
        columns = self.dim + self.similarity.extra_columns
        terms = columns + 12
        if precision == Precision.FLOAT32:
            terms = min(self.chunk, columns) + math.ceil(columns / self.chunk) + 12
        if precision == Precision.FLOAT64_OF_FLOAT32:
            # to float32 up to three times on either side: the row, its factor, and their product
            terms, unit_roundoff = 8 + math.ceil(columns * 2.0**-29), 2.0**-24
        return 1.02 * (terms * unit_roundoff / (1 - terms * unit_roundoff) + 8 * 2.0**-53)

    def half_low(self, scores: Items, vectors: Vectors, index: Tensor, *, of_query: bool) -> Items:
        """Return for each item a lower bound of the half-precision estimates of pairs that score at least `scores`.

        The result of a product is rounded relative to its size, so near a small score less is lost than `of` says.
        """
        if not self.similarity.bounded:
            return scores - self.of(vectors, index, Precision.HALF, of_query=of_query)
        unit_roundoff, relative = self._half_rounding()
        error = 1.01 * relative + self.of(vectors, index, Precision.FLOAT32, of_query=of_query)
        low = scores - error - 1.01 * unit_roundoff * (scores.abs() + error) - 2.0**-40
        return torch.where(scores.isinf(), scores, low)  # keep infinite thresholds as they are: inf - inf is NaN

    def bytes_low(self, scores: Items, vectors: Vectors, index: Tensor, *, of_query: bool) -> Items:
        """Return for each item a lower bound of the upper bounds that `cpu/byte_kernels.py` computes in float32.

        One error of a float32 product is for what its operands miss. It is at least 14 roundings of the product of the
        norms, and all roundings of the kernel together are at most 30 of these: four more errors cover them.
        """
        return scores - 5 * self.of(vectors, index, Precision.FLOAT32, of_query=of_query)

    def _error(
        self,
        norm: Float[Tensor, "*items"],
        centred_norm: Float[Tensor, "*items"],
        others: LargestNorms,
        precision: Precision,
    ) -> Float[Tensor, "*items"]:
        whole, components = self.similarity.norm_products(norm, centred_norm, others)
        if precision != Precision.HALF:
            smallest = self.dim * (2.0**-960 if precision == Precision.FLOAT64 else 2.0**-120)
            return self.relative(precision) * whole + smallest
        unit_roundoff, relative = self._half_rounding()
        single = self._error(norm, centred_norm, others, Precision.FLOAT32)
        # the rounding of the result to half precision comes last; 2**-40 is for what it loses of a number near zero
        return single + 1.01 * components * (relative + unit_roundoff * (1 + relative)) + 2.0**-40

    def _half_rounding(self) -> tuple[float, float]:
        """Return the unit roundoff of the result, and how far rounding both operands moves a product of unit vectors.

        (dim + 12) 2**-22 covers the accumulation in float32.
        """
        unit_roundoff = 2.0**-8 if self.half == torch.bfloat16 else 2.0**-11
        moved = unit_roundoff + math.sqrt(self.dim) * 2.0**-25  # of a vector of length one; the rest may be subnormal
        if self.unrounded or self.half == torch.float32:
            unit_roundoff = 2.0**-24
        return unit_roundoff, 2 * moved + moved * moved + (self.dim + 12) * 2.0**-22
