"""Products of int8: rows that are rounded to integers times a scale, and the error bounds of their products.

They are fast on processors with instructions for them (VNNI), and take a quarter of the memory of float32. But they leave
more pairs open. `precision.py` weighs both.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.engine import exact
from fewshot_callbacks.engine.compiled import kernel
from fewshot_callbacks.engine.operands import Operand


class Int8Operand(NamedTuple):
    """An operand in int8, and the norms of the remainders after its rows are rounded to integers."""

    operand: Operand
    remainder_norms: NDArray[np.float64]  # (rows,) upper bound of the norm of the remainder, row - scale * integers

    def take(self, index: slice | NDArray[np.int64]) -> Int8Operand:
        """Return some of its rows.

        Args:
            index: A slice, or an array of row numbers.
        """
        return Int8Operand(self.operand.take(index), self.remainder_norms[index])


def int8_error_bounds(
    remainder_norms: NDArray[np.float64],
    lengths: NDArray[np.float64],
    largest_remainder_norm: float,
    longest: float,
    product_weight: int,
    sizes: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return (rows,) how far an estimate from a product of int8 can be from the exact score, above it or below.

    The bounds are in units of scores. A bound that is too small gives wrong ranks. A bound that is too large only costs
    time.

    With q' and g' for the rounded rows, |q.g - q'.g'| <= |q - q'| |g| + |q'| |g - g'| (Cauchy and Schwarz), and |q'| is at
    most |q| + |q - q'|. Here |q| is one of `lengths`, |q - q'| one of `remainder_norms`, |g| at most `longest` and |g - g'|
    at most `largest_remainder_norm`. So a product is off by at most

        remainder_norm * longest + (length + remainder_norm) * largest_remainder_norm

    Rows of two columns can attain this: q' is then parallel to g - g', and g to q - q'. The norm of a remainder of n columns
    is about sqrt(n / 12) times the scale, since rounding errors are spread evenly over a step.

    The product of the integers is exact. `scale_product` rounds a few times in float32, which 2**-20 of the largest estimate
    covers. The largest estimate exceeds `sizes` by little more than `largest_remainder_norm`, since lengths are at most 1.

    Args:
        remainder_norms: (rows,) upper bound of the norm of the remainder of each row, which is moved to the centre and
            divided as `round_rows` does it.
        lengths: (rows,) upper bound of the norm of each row, moved and divided likewise.
        largest_remainder_norm: The largest of `remainder_norms` of an item of any process.
        longest: The largest of `lengths` of an item of any process.
        product_weight: The number of times that a product counts: 2 for distances, else 1.
        sizes: (rows,) for each row, the largest product of its norm with the norm of an item.
    """
    rounded = remainder_norms * longest + (lengths + remainder_norms) * largest_remainder_norm
    return product_weight * (rounded + 2.0**-20 * (sizes + largest_remainder_norm))


@kernel
def round_rows(values, centre, divisors, largest, weight, has_offsets, tables, work):
    """Round rows, moved to a centre and divided, to integers times a scale.

    Args:
        values: (rows, dim).
        centre: (dim,).
        divisors: (rows,).
        largest: Largest integer.
        weight: 2 for an operand whose products count twice, else 1.
        has_offsets: Whether minus the squared norm is added to each estimate.
        tables: (rows, dim) the integers; (rows,) scales, offsets, and norms of remainders.
        work: (dim,) to work in.
    """
    integers, scales, offsets, remainder_norms = tables
    for r in range(values.shape[0]):
        row = values[r]
        rounded = integers[r]
        divisor = divisors[r]
        top = 0.0
        for k in range(row.shape[0]):
            work[k] = (np.float64(row[k]) - centre[k]) / divisor
        for k in range(row.shape[0]):
            top = max(top, abs(work[k]))
        offsets[r] = -exact.plain_sum(work, work, False) if has_offsets else 0.0
        scale = np.float64(np.float32(max(top / largest, 2.0**-100)))  # large enough to divide by in float32
        for k in range(row.shape[0]):
            nearest = min(max(np.rint(work[k] / scale), -largest), largest)
            rounded[k] = np.int8(nearest)
            work[k] -= nearest * scale
        scales[r] = weight * scale
        remainder_norms[r] = np.sqrt(exact.plain_sum(work, work, False))


@kernel
def scale_product(product, scales, offsets, item_scales, item_offsets, out):
    """Write into `out` the estimates that a product of integers stands for."""
    for r in range(product.shape[0]):
        row = product[r]
        estimates = out[r]
        scale = scales[r]
        offset = offsets[r]
        for c in range(row.shape[0]):
            estimates[c] = np.float32(row[c]) * (scale * item_scales[c]) + (offset + item_offsets[c])


@functools.cache
def largest_exact_int8() -> int:
    """Return the largest integer whose products this processor sums exactly; 0 if int8 products cannot pay here.

    Without VNNI, oneDNN shifts one operand by 128 and adds two int8 products in 16 bits. For integers up to 63 the sum
    cannot saturate: (63 + 128) * 63 * 2 = 24,066. For larger integers it does.
    """
    if not torch.backends.mkldnn.is_available():
        return 0  # torch then multiplies in a plain loop
    signs = torch.ones(64, 64, dtype=torch.int8)
    signs[::2] = -1
    signs[::3, ::5] = 1
    for largest in (127, 63):
        left = largest * signs
        right = largest * signs.flip(1)
        try:
            product = torch._int_mm(left, right.T)
        except (AttributeError, RuntimeError):  # a private function of torch, 2.6 to 2.15 at least
            return 0
        if torch.equal(product.double(), left.double() @ right.double().T):
            return largest
    return 0
