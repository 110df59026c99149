"""The rows of one side of a product, from which its operands are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.engine import exact
from fewshot_callbacks.engine.int8 import Int8Operand, largest_exact_int8, round_rows
from fewshot_callbacks.engine.operands import DTYPES, ITEM_COLUMNS, NO_COLUMNS, QUERY_COLUMNS, Operand, place_rows
from fewshot_callbacks.engine.options import Precision, run_tasks, split
from fewshot_callbacks.engine.scale import Floats, Scale

# Largest factor by which rounding may have shortened a norm.
LONGER = 1 + 1e-9


@dataclass
class OperandRows:
    """Queries, or gallery items, as one side of a product.

    Args:
        rows: (rows, dim) in range (`Scale.in_range`).
        norms: (rows,) their norms.
        scale: How they are scaled.
        are_queries: Whether they are the queries. If one set has the same operand for both sides, its rows are the queries.
        threads: Number of threads to compute with.
    """

    rows: NDArray[Any]
    norms: Floats
    scale: Scale
    are_queries: bool
    threads: int
    # the operand in int8; `int8_operand` computes it at its first call
    _int8: Int8Operand | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: Any, rows: NDArray[Any]) -> OperandRows:
        """Return some of the rows.

        Args:
            index: A slice, or an array of row numbers.
            rows: These rows, which the caller may use for something else as well.
        """
        operand = None if self._int8 is None else self._int8.take(index)
        return OperandRows(rows, self.norms[index], self.scale, self.are_queries, self.threads, operand)

    def new_operand(self, rows: int, precision: Precision) -> Operand:
        """Return an operand with room for a number of rows."""
        if precision == "int8":
            integers = torch.empty(rows, self.scale.dim, dtype=DTYPES[precision])
            return Operand(integers, scale=np.zeros(rows, np.float32), offset=np.zeros(rows, np.float32))
        return Operand(torch.empty(rows, self.scale.columns, dtype=DTYPES[precision]))

    def operand(self, precision: Precision) -> Operand:
        """Return the operand of all rows."""
        if precision == "int8":
            return self.int8_operand().operand
        out = self.new_operand(len(self), precision)

        def fill(block: slice, _: None) -> None:
            self.fill(block, out.take(block))

        run_tasks(split(len(self)), fill, self.threads)
        return out

    def fill(self, rows: slice, out: Operand) -> None:
        """Write a slice of the rows of an operand in float16, float32 or float64."""
        placed = out.rows
        if placed.dtype == torch.float16:  # compiled loops do not write float16
            placed = torch.empty(out.rows.shape)
        extra = NO_COLUMNS
        if self.scale.kind == exact.EUCLIDEAN:
            extra = QUERY_COLUMNS if self.are_queries else ITEM_COLUMNS
        place_rows(self.rows[rows], self.scale.centre, self._divisors(rows), extra, placed.numpy())
        if placed is not out.rows:
            out.rows.copy_(placed)

    def lengths(self) -> Floats:
        """Return (rows,) upper bounds of the norm of each row as it is multiplied."""
        if self.scale.kind == exact.COSINE:
            return np.ones(len(self.norms))
        if self.scale.kind == exact.DOT:
            return self.norms * self._factor
        out = np.empty(len(self))

        def fill(block: slice, _: None) -> None:
            rows = self.new_operand(block.stop - block.start, "float64").rows.numpy()
            place_rows(self.rows[block], self.scale.centre, self._divisors(block), ITEM_COLUMNS, rows)
            out[block] = np.sqrt(rows[:, -1])

        run_tasks(split(len(out)), fill, self.threads)
        return out * LONGER

    def int8_operand(self) -> Int8Operand:
        """Return the operand in int8, which is computed once."""
        if self._int8 is None:
            self._int8 = self._round_to_int8()
        return self._int8

    def free_int8_operand(self) -> None:
        """Free the operand in int8. A later call computes it again."""
        self._int8 = None

    @property
    def _factor(self) -> float:
        return self.scale.query_factor if self.are_queries else self.scale.item_factor

    def _divisors(self, rows: slice) -> Floats:
        """Return the divisor of each row before it is multiplied: its norm for cosines, else a power of two."""
        norms = self.norms[rows]
        if self.scale.kind == exact.COSINE:
            return np.where(norms > 0, norms, 1.0)
        return np.full(len(norms), 1 / self._factor)

    def _round_to_int8(self) -> Int8Operand:
        """Compute the operand in int8."""
        number = len(self)
        operand = self.new_operand(number, "int8")
        remainder_norms = np.empty(number)
        integers = operand.rows.numpy()
        largest = 1 if self.scale.are_codes else largest_exact_int8()
        has_offsets = self.scale.kind == exact.EUCLIDEAN
        weight = self.scale.product_weight if self.are_queries else 1

        def fill(block: slice, work: Floats) -> None:
            assert operand.scale is not None
            assert operand.offset is not None
            tables = integers[block], operand.scale[block], operand.offset[block], remainder_norms[block]
            round_rows(
                self.rows[block], self.scale.centre, self._divisors(block), largest, weight, has_offsets, tables, work
            )

        run_tasks(split(number), fill, self.threads, lambda: np.empty(self.scale.dim))
        return Int8Operand(operand, remainder_norms * (1 + 1e-6) + 2.0**-60)  # covers the rounding of the norms
