"""Operands: the two factors of a product of floats, and how far such a product can be from the exact score."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.compiled import kernel
from fewshot_callbacks.engine.options import Precision

DTYPES = {"int8": torch.int8, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
# Largest relative error of one rounded operation.
ROUNDOFF: dict[str, float] = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
# `place_rows` adds no columns to a row.
NO_COLUMNS = 0
# It adds two columns to a query. With the two columns of an item, one product gives minus the squared distance.
QUERY_COLUMNS = 1
# It adds two columns to an item.
ITEM_COLUMNS = 2


class Operand(NamedTuple):
    """One factor of a product.

    An estimate is the product of a query row and an item row. Products of int8 are integers, from which the estimate is
    `product * (query_scale * item_scale) + (query_offset + item_offset)`.
    """

    rows: Tensor  # (rows, columns)
    scale: NDArray[np.float32] | None = None  # (rows,) only for int8
    offset: NDArray[np.float32] | None = None  # (rows,) only for int8

    def take(self, index: Any) -> Operand:
        """Return some of its rows.

        Args:
            index: A slice, or an array of row numbers.
        """
        is_slice = isinstance(index, slice)
        rows = self.rows[index] if is_slice else self.rows.index_select(0, torch.from_numpy(index))
        if self.scale is None or self.offset is None:
            return Operand(rows)
        return Operand(rows, self.scale[index], self.offset[index])


def float_error_bounds(
    precision: Precision, columns: int, product_weight: int, sizes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return (rows,) how far a product of floats can be from the exact score.

    A sum of `columns` products is rounded in any order (Higham, section 3.1). The bound includes 12 more roundings for the
    operands, their norms and this formula. Operands in float16 add their own rounding: 2.1 times its roundoff, and 2**-25
    for components that are too small for float16. A GPU may truncate instead of rounding where it sums them.

    Args:
        precision: float16, float32 or float64.
        columns: Components of a row of an operand.
        product_weight: The number of times that a product counts: 2 for distances, else 1.
        sizes: (rows,) for each row, the largest product of its norm with the norm of a row of the other side.
    """
    is_half = precision == "float16"
    roundoff = min(ROUNDOFF[precision], 2.0**-24)  # float16 is summed in float32
    of_sum = (2 if is_half else 1) * roundoff * (columns + 12)
    relative = 1.02 * of_sum / (1 - of_sum) + 2.0**-50
    if is_half:
        relative += 2.1 * ROUNDOFF["float16"]
        tiniest = math.sqrt(columns) * 2.0**-23  # for both operands, if no row is longer than 1
    else:
        tiniest = columns * (2.0**-960 if precision == "float64" else 2.0**-120)
    return product_weight * relative * sizes + tiniest


@kernel
def place_rows(values, centre, divisors, extra, out):
    """Move rows to a centre and divide them. Two more columns make the product 2 q.g - |q|**2 - |g|**2 = -|q - g|**2.

    Args:
        values: (rows, dim).
        centre: (dim,).
        divisors: (rows,).
        extra: `NO_COLUMNS`, `QUERY_COLUMNS` or `ITEM_COLUMNS`.
        out: (rows, dim or dim + 2).
    """
    dim = values.shape[1]
    for r in range(values.shape[0]):
        square = 0.0
        divisor = divisors[r]
        for k in range(dim):
            value = (np.float64(values[r, k]) - centre[k]) / divisor
            square += value * value
            out[r, k] = 2 * value if extra == QUERY_COLUMNS else value
        if extra != NO_COLUMNS:
            out[r, dim], out[r, dim + 1] = (-square, -1.0) if extra == QUERY_COLUMNS else (1.0, square)
