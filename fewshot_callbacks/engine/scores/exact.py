"""Exact scores on any device: the true cosine, dot product or distance of two rows, rounded once to float64.

This is `cpu.exact_kernels` in plain PyTorch, for devices and machines where the compiled kernels do not run: the same sums
with their rounding errors, for many pairs at a time. Both give the float64 that is nearest to the true value, so they agree
to the bit although they do not add in the same way. What the error bound leaves open here is decided by rational numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from jaxtyping import Float
from torch import Tensor

Sum = tuple[Tensor, Tensor]
"""A number as high + low, |low| at most half a unit in the last place of high"""


def two_sum(a: Tensor, b: Tensor) -> Sum:
    """Return sum and error with a + b = sum + error, exactly (Knuth)."""
    total = a + b
    z = total - a
    return total, (a - (total - z)) + (b - z)


def two_product(a: Tensor, b: Tensor) -> Sum:
    """Return product and error with a * b = product + error, exactly (Dekker; 2**27 + 1 splits a float64 into halves)."""
    product = a * b
    t = 134217729.0 * a
    a_high = t - (t - a)
    a_low = a - a_high
    t = 134217729.0 * b
    b_high = t - (t - b)
    b_low = b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def dot(
    left: Float[Tensor, "*shape dim"], right: Float[Tensor, "*other dim"], *, single: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dot products of float64 rows as high + low, and a bound on their error: 0 where nothing was rounded.

    Args:
        left: Rows; the shapes before the last dimension are broadcast.
        right: Rows.
        single: All components are float32 numbers, whose products are exact in float64.
    """
    total = low = errors = left.new_zeros(torch.broadcast_shapes(left.shape[:-1], right.shape[:-1]))
    for x, y in zip(left.movedim(-1, 0).contiguous(), right.movedim(-1, 0).contiguous(), strict=True):
        product = x * y
        if not single:
            product, error = two_product(x, y)
            low, errors = low + error, errors + error.abs()
        total, error = two_sum(total, product)
        low, errors = low + error, errors + error.abs()
    # adding up 2 dim rounding errors in float64 is off by at most this (Higham, section 4.2)
    return *two_sum(total, low), (2 * left.shape[-1] + 4) * 2.0**-53 * errors


def squared_distance(
    left: Float[Tensor, "*shape dim"], right: Float[Tensor, "*other dim"], scale: Float[Tensor, "*pairs"]
) -> Sum:
    """Return squared distances of float64 rows over `scale` (powers of two) as high + low, off by `relative_error`."""
    total = low = torch.zeros_like(scale)
    for x, y in zip(left.movedim(-1, 0).contiguous(), right.movedim(-1, 0).contiguous(), strict=True):
        difference, rest = two_sum(x / scale, -(y / scale))
        square, error = two_product(difference, difference)
        total, other = two_sum(total, square)
        low = low + (error + 2 * difference * rest) + other
    return two_sum(total, low)


def relative_error(dim: int) -> float:
    """Return the relative error of a sum of `dim` squares held as high + low: all have one sign, so nothing cancels."""
    return (dim + 8.0) ** 2 * 2.0**-105


def nearest(high: Tensor, low: Tensor, error: Tensor) -> Tensor:
    """Return the float64 nearest to every number within `error` of high + low; NaN if there are two of them."""
    high, low = two_sum(high, low)
    error = torch.where(error > 0, 1.01 * error + high.abs() * 2.0**-104, 0.0)  # the sums below are rounded themselves
    upper, lower = high + (low + error), high + (low - error)
    return torch.where(upper == lower, upper, torch.nan)


def root(high: Tensor, low: Tensor) -> Sum:
    """Return the square root of high + low, as high + low; relative error below 2**-97."""
    root = high.sqrt()
    square, error = two_product(root, root)
    correction = (((high - square) - error) + low) / (2.0 * root)
    return two_sum(root, correction.masked_fill(root == 0, 0.0))


def quotient(high: Tensor, low: Tensor, divisor: Tensor, divisor_low: Tensor | float = 0.0) -> Sum:
    """Return (high + low) / (divisor + divisor_low) as high + low; relative error below 2**-98. Over infinity it is 0."""
    first = high / divisor
    back, back_low = two_product(first, divisor.masked_fill(divisor.isinf(), 0.0))
    return first, ((((high - back) - back_low) + low) - first * divisor_low) / divisor


def cosine(products: tuple[Tensor, Tensor, Tensor], square: Sum, other: Sum, dim: int) -> Tensor:
    """Return cosines from dot products with their error and squared norms; NaN where these leave two float64 open."""
    high, low, error = products
    norms, rest = two_product(square[0], other[0])
    norm, norm_low = root(*two_sum(norms, rest + (square[0] * other[1] + square[1] * other[0])))
    norm = norm.masked_fill(norm == 0, torch.inf)  # a zero row has cosine 0 to everything
    first, second = quotient(high, low, norm, norm_low)
    relative = torch.where((high == 0) & (error == 0), 0.0, 2.0**-97 + relative_error(dim))
    return nearest(first, second, first.abs() * relative + 1.01 * error / norm).clamp(-1.0, 1.0)


def negative_square(high: Tensor, low: Tensor, dim: int) -> Tensor:
    """Return minus the square of the rounded distance, from a squared distance; NaN where two values are open."""
    distance, rest = root(high, low)
    distance = nearest(distance, rest, distance * (2.0**-97 + relative_error(dim)))
    return 0.0 - distance * distance


def by_fractions(left: list[float], right: list[float], similarity: str) -> float:
    """Return the dot product, cosine or minus the squared rounded distance of two rows, rounded but once."""
    one, other = [Fraction(x) for x in left], [Fraction(y) for y in right]
    if similarity == "euclidean":
        distance = nearest_root(sum((x - y) ** 2 for x, y in zip(one, other, strict=True)))
        return 0.0 - distance * distance
    product = Fraction(sum(x * y for x, y in zip(one, other, strict=True)))
    if similarity == "dot":
        return float(product)
    norms = Fraction(sum(x * x for x in one) * sum(y * y for y in other))
    return math.copysign(nearest_root(product * product / norms), product) if product else 0.0


def nearest_root(square: Fraction | int) -> float:
    """Return the float64 nearest to a square root; the division of two integers is rounded correctly in Python."""
    numerator, denominator = Fraction(square).as_integer_ratio()
    shift = max(0, 64 + (denominator.bit_length() - numerator.bit_length()) // 2)
    root = math.isqrt((numerator << 2 * shift) // denominator)
    exact = root * root * denominator == numerator << 2 * shift
    return (2 * root + (not exact)) / (1 << (shift + 1))


def in_pieces(
    make: Callable[[Tensor, Tensor], Tensor], rows: Tensor, columns: Tensor, pairs: int, items: int
) -> Tensor:
    """Call `make(rows, columns)` for two tensors that are broadcast, piece by piece, each of bounded size.

    Args:
        make: Elementwise in the broadcast shape.
        rows: The first tensor.
        columns: The second, with as many dimensions.
        pairs: The most elements of the broadcast shape in a piece.
        items: The most elements of both tensors in a piece.
    """
    shape = torch.broadcast_shapes(rows.shape, columns.shape)
    if math.prod(shape) <= 1 or (math.prod(shape) <= pairs and rows.numel() + columns.numel() <= items):
        return make(rows, columns)
    axis = shape.index(max(shape))
    row_halves, column_halves = (
        part.chunk(2, axis) if part.shape[axis] > 1 else (part, part) for part in (rows, columns)
    )
    halves = zip(row_halves, column_halves, strict=True)
    return torch.cat([in_pieces(make, some, others, pairs, items) for some, others in halves], dim=axis)
