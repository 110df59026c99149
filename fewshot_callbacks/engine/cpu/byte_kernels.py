"""A screen in bytes, compiled for the CPU: rows as small integers times a scale, and what their products prove.

With x' = scale * codes and y' of two rows x and y, |x.y - x'.y'| <= |x - x'| |y| + |x'| |y - y'| (Cauchy-Schwarz), and the
product of the codes is an exact integer. So every pair has an upper bound of its score, from norms of its two rows alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.cpu.count_kernels import RUN, _allocating, _any_order, _resolve, _span

EXCLUDED = -(2**31)
"""Stands for the product of an excluded pair: no product of bytes is that low."""


class ByteRows(NamedTuple):
    """What belongs to the codes of some rows."""

    scale: NDArray[np.float32]
    """(rows,) what a code of one stands for"""
    residual: NDArray[np.float32]
    """(rows,) at least the norm of what the codes miss"""
    norm: NDArray[np.float32]
    """(rows,) at least the norm"""
    offset: NDArray[np.float32]
    """(rows,) what is added to the product for this row"""


@_any_order
def encode(operand, largest, codes, out):
    """Fill codes of at most `largest`, and all but the offsets of what belongs to them."""
    for i in range(codes.shape[0]):
        row, code = operand[i, : codes.shape[1]], codes[i]
        top = np.float32(0)
        for k in range(row.shape[0]):
            top = max(top, abs(row[k]))
        # a normal number, so that its inverse is finite; smaller components have code 0
        scale = max(top / np.float32(largest), np.float32(2.0**-126))
        inverse = np.float32(1) / scale
        missed = square = 0.0
        for k in range(row.shape[0]):
            code[k] = np.int8(np.floor(row[k] * inverse + np.float32(0.5)))
            rest = np.float64(row[k]) - np.float64(code[k]) * np.float64(scale)  # the product is exact
            missed += rest * rest
            square += np.float64(row[k]) * np.float64(row[k])
        out.scale[i] = scale
        # more than the rounding of these sums, and to float32
        out.residual[i] = np.sqrt(missed) * (1 + 1e-6) + 2.0**-120
        out.norm[i] = np.sqrt(square) * (1 + 1e-6) + 2.0**-120


def upper_bounds(products: NDArray[np.int32], rows: ByteRows, columns: ByteRows) -> NDArray[np.float64]:
    """Return upper bounds of the products of two sides of rows, from those of their codes, as `screen_bytes` does."""
    error = rows.residual[:, None] * columns.norm + (rows.norm + rows.residual)[:, None] * columns.residual
    found: NDArray[np.float64] = rows.scale[:, None] * (products * columns.scale) + error
    return found + rows.offset[:, None] + columns.offset


@_allocating
def screen_bytes(
    products, first_row, rows, row_bytes, row_low, columns, column_bytes, column_low, spans, both, pairs, pooled
):
    """Count as `count_kernels.screen` does, of products of codes.

    Args:
        products: (tile rows, columns) of codes, or `EXCLUDED`.
        first_row: As in `screen`, like what is not named here.
        rows: The queries.
        row_bytes: What belongs to their codes.
        row_low: (rows,) an upper bound below it is surely below all thresholds of the row, and of no interest to the pool.
        columns: The candidates.
        column_bytes: What belongs to their codes.
        column_low: (columns,) the same for the columns; `inf` where they ask nothing.
        spans: As in `screen`.
        both: As in `screen`.
        pairs: The vectors.
        pooled: What is recorded of all pairs.
    """
    height, width = products.shape
    pair_factor = 2 if both else 1
    surplus = np.empty(RUN, np.float32)
    for r in range(height):
        i = first_row + r
        low, offset, scale = row_low[i], row_bytes.offset[i], row_bytes.scale[i]
        residual, reach = row_bytes.residual[i], row_bytes.norm[i] + row_bytes.residual[i]
        for first in range(0, width, RUN):
            for half in range(2):
                start, stop = _span(half, first, width, spans[r, 0], spans[r, 1])
                if start >= stop:
                    continue
                product, others_low = products[r, start:stop], column_low[start:stop]
                others_scale, others_offset = column_bytes.scale[start:stop], column_bytes.offset[start:stop]
                others_residual, others_norm = column_bytes.residual[start:stop], column_bytes.norm[start:stop]
                passing = 0
                for c in range(stop - start):
                    error = residual * others_norm[c] + reach * others_residual[c]
                    highest = scale * (np.float32(product[c]) * others_scale[c]) + error + others_offset[c]
                    surplus[c] = -1 if product[c] == EXCLUDED else highest - (min(low, others_low[c]) - offset)
                    passing += surplus[c] >= 0
                if passing == 0:
                    continue
                for c in range(stop - start):
                    if surplus[c] >= 0:
                        j = start + c
                        pooled.filled[1] += 1
                        _resolve(
                            pairs, rows, i, columns, j, rows.relevant[i] > 0, both and columns.relevant[j] > 0, True,
                            pooled, pair_factor * rows.weight[i] * columns.weight[j],
                        )  # fmt: skip
