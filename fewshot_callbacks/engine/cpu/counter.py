"""Counting the tiles of one rectangle with the compiled kernels, at one precision."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.budget import part_rows, table_bins
from fewshot_callbacks.engine.cpu import count_kernels as kernels
from fewshot_callbacks.engine.cpu.byte_kernels import EXCLUDED, ByteRows, screen_bytes
from fewshot_callbacks.engine.cpu.products import Key, Operands, Products, ProductSpace, kept_or_made
from fewshot_callbacks.engine.pooled.record import PairRecord
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.count import Counts


@dataclass
class Space:
    """What a thread works in."""

    record: PairRecord
    products: ProductSpace = field(default_factory=ProductSpace)
    margins: dict[Key, kernels.Margins] = field(default_factory=dict)
    """the last ones made, where they are not kept for all threads"""


@dataclass
class Kept:
    """What is kept for all threads, as far as the budget allows; None where nothing is."""

    operands: dict[Key, Operands] | None = None
    margins: dict[Key, kernels.Margins] | None = None


class ThresholdList(NamedTuple):
    """Thresholds for all pairs, as the kernels take them."""

    side: kernels.Side
    """of one query"""
    margins: kernels.Margins
    """its tables"""

    @classmethod
    def of(cls, thresholds: NDArray[np.float64], error: float, dtype: type[np.floating[Any]]) -> ThresholdList:
        """Return a list for estimates of this dtype that are off by at most `error`."""
        one, nothing = np.zeros(1, np.int64), np.zeros((1, 1), np.int32)
        side = kernels.Side(
            one, one + 1, one + len(thresholds), thresholds[None], nothing, nothing, _NO_OPERAND, np.zeros(1)
        )
        # eight bins for each threshold or more, so that most hold none; at most 2**21, a table of 8 MB
        bins = int(min(2**21, max(2**12, 2 ** math.ceil(math.log2(8 * len(thresholds) + 1)))))
        return cls(side, _make_margins(side, np.array([error]), dtype, bins))


class TileCounter:
    """Counts tiles of a rectangle; several threads may call it at once, each with its own space.

    Args:
        rectangle: The pairs.
        precision: Of the products.
        kept: Operands and tables that are kept for all threads.
        tile_rows: Rows of a tile that are made at once, at most.
    """

    def __init__(self, rectangle: ScoreRectangle, precision: Precision, kept: Kept, tile_rows: int) -> None:
        self.rectangle, self.precision, self.kept, self.tile_rows = rectangle, precision, kept, tile_rows
        self.pairs = rectangle.scores.pairs()
        # with two sets, or for distances, the two sides of a product are not the same
        one_side = rectangle.is_square and rectangle.scores.similarity != "euclidean"
        self.products = Products(rectangle.scores, precision, one_side=one_side, kept=kept.operands)
        self.sides = {
            (block.first, of_query): self._side(block, of_query=of_query)
            for blocks, of_query in ((rectangle.rows, True), (rectangle.columns, False))
            for block in blocks
        }

    @property
    def dtype(self) -> type[np.floating[Any]]:
        """Of the estimates."""
        return np.float64 if self.precision == Precision.FLOAT64 else np.float32

    def count(self, rows: Block, columns: Block, both: bool, space: Space) -> None:
        """Count the candidates of a tile for its rows, and for its columns too where `both`."""
        row_side, column_side = self._sides_of(rows, columns, space)
        record = space.record
        if self.precision.screens:
            row_low = self.lowest(rows, record, of_query=True)
            column_low = np.full(len(columns), np.inf, np.float32)
            if both:
                column_low = self.lowest(columns, record, of_query=False)
            row_bytes, column_bytes = self._bytes(rows, columns, space)
            for estimates, start, first, spans in self._parts(rows, columns, both, space):
                others, others_low = _from(column_side, first), column_low[first:]
                if row_bytes is None:
                    kernels.screen(
                        estimates[0], start, row_side, row_low, others, others_low, spans, both, self.pairs, record
                    )
                else:
                    screen_bytes(
                        estimates[0], start, row_side, row_bytes, row_low, others, _from(column_bytes, first),
                        others_low, spans, both, self.pairs, record,
                    )  # fmt: skip
            return
        row_margins = self._margins(rows, row_side, space, of_query=True)
        column_margins = (
            self._margins(columns, column_side, space, of_query=False) if both else _NO_MARGINS[self.precision]
        )
        cut = self.dtype(np.inf)
        if math.isfinite(record.cut):
            cut = np.nextafter(self.dtype(record.cut), self.dtype(-np.inf))
        for estimates, start, first, spans in self._parts(rows, columns, both, space):
            kernels.count(
                estimates, start, row_side, row_margins, _from(column_side, first),
                _from(column_margins, first) if both else column_margins, spans, both, self.rectangle.repeats,
                self.pairs, record, cut,
            )  # fmt: skip

    def recount(
        self,
        rows: Block,
        columns: Block,
        both: bool,
        space: Space,
        thresholds: ThresholdList,
        counters: NDArray[np.int64],
    ) -> None:
        """Count the pairs of a tile against one list of thresholds, into (2, thresholds + 1) counters: hits and ties."""
        row_side, column_side = self._sides_of(rows, columns, space)
        for estimates, start, first, spans in self._parts(rows, columns, both, space):
            kernels.count_pool(
                estimates, start, row_side, _from(column_side, first), spans, both, self.pairs, *thresholds, *counters
            )

    def lowest(self, block: Block, record: PairRecord, *, of_query: bool) -> NDArray[np.float32]:
        """Return per-row cut-offs: pairs estimated below cannot change any result."""
        least = torch.full((len(block),), min(record.floor, record.cut), dtype=torch.float64)
        if block.counts is not None and block.asks:
            least = least.minimum(block.counts.thresholds[:, 0])
        scores = self.rectangle.scores
        lowest = scores.bytes_low if self.precision == Precision.BYTES else scores.half_low
        low = lowest(least, block.index, of_query=of_query)
        return np.nextafter(low.numpy().astype(np.float32), np.float32(-np.inf))

    # ------------------------------------------------------------------------------------------------------- both sides

    def _side(self, block: Block, *, of_query: bool) -> kernels.Side:
        counts = block.counts
        if counts is None:
            counts = Counts.zeros(torch.empty(len(block), 0, dtype=torch.float64), torch.int32)
        scores, rounded = self.rectangle.scores, Precision.FLOAT64_OF_FLOAT32
        return kernels.Side(
            block.index.numpy(),
            block.weight.numpy(),
            block.relevant.numpy(),
            counts.thresholds.numpy(),
            counts.hits.numpy(),
            counts.ties.numpy(),
            _NO_OPERAND,
            scores.error(block.index, rounded, of_query=of_query).numpy(),
        )

    def _sides_of(self, rows: Block, columns: Block, space: Space) -> tuple[kernels.Side, kernels.Side]:
        """Return both sides of a tile with their operands."""
        row_side, column_side = (
            self.sides[block.first, of_query]._replace(
                operand=self.products.operands(block, space.products, of_query=of_query).single.numpy()
            )
            for block, of_query in ((rows, True), (columns, False))
        )
        return row_side, column_side

    def _bytes(self, rows: Block, columns: Block, space: Space) -> tuple[ByteRows | None, ByteRows | None]:
        """Return what belongs to the bytes of both sides, for products in these."""
        left, right = (
            self.products.operands(block, space.products, of_query=of_query).bytes
            for block, of_query in ((rows, True), (columns, False))
        )
        return left, right

    def _margins(self, block: Block, side: kernels.Side, space: Space, *, of_query: bool) -> kernels.Margins:
        key = (block.first, of_query or self.rectangle.is_square)  # with one set both sides are the same

        def make() -> kernels.Margins:
            error = self.rectangle.scores.error(block.index, self.precision, of_query=of_query)
            return _make_margins(side, error.numpy(), self.dtype)

        made: kernels.Margins = kept_or_made(key, self.kept.margins, space.margins, make)
        return made

    def _parts(self, rows: Block, columns: Block, both: bool, space: Space) -> Iterator[tuple[Any, int, int, Any]]:
        """Yield the estimates of some rows at a time, and the data that the kernels need with them.

        Yields:
            Estimates; the first row; the first column; for each row, the columns that are no negatives.
        """
        left, right = (
            self.products.operands(block, space.products, of_query=of_query)
            for block, of_query in ((rows, True), (columns, False))
        )
        of_one_set = both and self.rectangle.is_square
        diagonal = of_one_set and rows.first == columns.first
        spans = np.empty((len(rows), 2), np.int32)
        classes, others = rows.classes.numpy(), columns.classes.numpy()
        spans[:, 0] = 0 if of_one_set else np.searchsorted(others, classes)
        spans[:, 1] = np.searchsorted(others, classes, side="right")
        excludes = self.rectangle.candidates.across_classes
        if excludes:
            codes = self.rectangle.candidates.codes(rows.index, columns.index)
            row_codes, column_codes = (code.numpy() for code in codes)
        height = part_rows(len(columns), self.tile_rows)
        for start in range(0, len(rows), height):
            stop = min(start + height, len(rows))
            first = start if diagonal else 0  # diagonal block: the lower triangle was counted from the other side
            operands = left.rows(slice(start, stop)), right.rows(slice(first, None))
            estimates = self.products.make(*operands, space.products)
            if excludes:
                begin = np.full(stop - start, first)
                value = EXCLUDED if self.precision == Precision.BYTES else np.nan
                kernels.exclude(row_codes[:, start:stop], column_codes, begin, value, estimates[0])
            yield estimates, start, first, np.maximum(spans[start:stop] - np.int32(first), 0).astype(np.int32)


def _make_margins(
    side: kernels.Side, error: NDArray[np.float64], dtype: type[np.floating[Any]], bins: int = 0
) -> kernels.Margins:
    """Return tables for estimates of this dtype, as fine as the number of thresholds asks for."""
    items, relevant = side.thresholds.shape
    bins = bins or table_bins(relevant)
    margins = kernels.Margins(
        np.empty(items),
        np.empty(items, dtype),
        np.empty(items, dtype),
        np.empty((items, bins), np.int8 if relevant < 127 else np.int16 if relevant < 2**15 - 1 else np.int32),
    )
    kernels.margins(side, error, margins)
    return margins


def _no_margins(dtype: type[np.floating[Any]]) -> kernels.Margins:
    return kernels.Margins(np.empty(0), np.empty(0, dtype), np.empty(0, dtype), np.empty((0, 1), np.int16))


_NO_MARGINS = {Precision.FLOAT32: _no_margins(np.float32), Precision.FLOAT64: _no_margins(np.float64)}

_NO_OPERAND = np.empty((0, 0), np.float32)


def _from(arrays: Any, first: int) -> Any:
    """Return the items of a side, or of its tables, from one on."""
    return arrays if first == 0 else type(arrays)(*(array[first:] for array in arrays))
