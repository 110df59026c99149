"""Counting a part of the score matrix with the kernels, list after list."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import ScoreRectangle
from fewshot_callbacks.engine.cuda.sides import Side
from fewshot_callbacks.engine.pooled.bins import ScoreGrid
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.tile import exact_scores

COPIES = 16
"""Of the histogram. Tiles that run at once add to different ones, or all would wait for the few bins of common scores."""
PAIRS = 32
"""Listed pairs that one program places."""


class Histogram(NamedTuple):
    """Counters of all pairs by the bins of their estimates."""

    grid: ScoreGrid
    floor: float
    """no estimate below it is counted"""
    counters: Int[Tensor, "copies bins"]

    @classmethod
    def empty(cls, grid: ScoreGrid, floor: float, device: torch.device) -> Histogram:
        """Return counters of no pair yet."""
        return cls(grid, floor, torch.zeros(COPIES, grid.bins, dtype=torch.int64, device=device))

    def total(self) -> Int[Tensor, "bins"]:
        """Return what all copies have counted."""
        return self.counters.sum(dim=0)


class PairList(NamedTuple):
    """Pairs that the items along one side have to be compared with once more."""

    items: Int[Tensor, "capacity"]
    others: Int[Tensor, "capacity"]
    estimates: Tensor
    filled: Int[Tensor, "four"]

    @classmethod
    def of(cls, capacity: int, device: torch.device) -> PairList:
        """Return an empty list."""
        items, others = torch.empty(2, capacity, dtype=torch.int32, device=device)
        counts = torch.tensor([0, capacity, 0, 0], dtype=torch.int32, device=device)
        return cls(items, others, torch.empty(capacity, device=device), counts)

    def clear(self) -> None:
        """Take all pairs out."""
        self.filled.zero_()
        self.filled[1] = len(self.items)


class PartCounter:
    """Counts tiles of some rows and some columns of a rectangle.

    Args:
        kernels: `cuda.count_kernels`.
        rectangle: That the items belong to.
        precision: Of the products, half precision or float32.
        rows: The queries.
        columns: The candidates.
        tile: Rows and columns of a tile; a power of two, 16 at least.
        capacity: Pairs that a list holds; those of one tile at least.
        histogram: Of all pairs; None if nobody asks.
    """

    def __init__(
        self,
        kernels: ModuleType,
        rectangle: ScoreRectangle,
        precision: Precision,
        rows: Side,
        columns: Side,
        tile: int,
        capacity: int,
        histogram: Histogram | None = None,
    ) -> None:
        self.kernels, self.rectangle, self.rows, self.columns, self.tile = kernels, rectangle, rows, columns, tile
        device = rows.index.device
        self.lists = [PairList.of(max(capacity, tile * tile), device) for _ in range(2)]
        self.histogram = histogram or Histogram.empty(ScoreGrid(0.0, 0.0, 1), math.inf, device)
        self.everything = kernels.HISTOGRAM if histogram is not None else 0
        self.tf32 = precision == Precision.HALF and rectangle.scores.half == torch.float32
        self.products = 0
        """float64 products of pairs that estimates left open, so far"""

    def count(self, tiles: Int[Tensor, "tiles two"], twice: Int[Tensor, "tiles"]) -> None:
        """Count some tiles.

        Args:
            tiles: Their rows and columns, in tiles.
            twice: Which are counted for their columns, too.
        """
        todo = torch.full_like(twice, self.kernels.ROWS + self.everything) + self.kernels.COLUMNS * twice
        device = tiles.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # where Triton starts kernels
            self._count(tiles, todo)

    def _count(self, tiles: Tensor, todo: Tensor) -> None:
        while len(tiles):
            for listed in self.lists:
                listed.clear()
            self._make(tiles, todo)
            remain = (todo != 0).nonzero().flatten()
            sides = (self.rows, self.columns), (self.columns, self.rows)
            for listed, (side, other) in zip(self.lists, sides, strict=True):
                self._work_off(listed, side, other)
            tiles, todo = tiles[remain], todo[remain]

    def _make(self, tiles: Tensor, todo: Tensor) -> None:
        rows, columns, (grid, floor, counters) = self.rows, self.columns, self.histogram
        self.kernels.count_tiles[(len(tiles),)](
            tiles, todo,
            *(argument for side in (rows, columns) for argument in (
                side.operand, side.shift, side.codes, side.weight, side.lowest, len(side),
            )),
            *self.lists[0], *self.lists[1],
            counters, grid.origin, grid.scale, grid.bins, len(counters), floor,
            rows.operand.shape[1], len(self.lists[0].items),
            CODES=len(rows.codes), TILE=self.tile,
            CHUNK=128 // rows.operand.element_size(), TF32=self.tf32, num_warps=8, num_stages=3,
        )  # fmt: skip

    def _work_off(self, listed: PairList, side: Side, other: Side) -> None:
        """Place the pairs of a list; what their float64 products leave open is decided by exact scores."""
        reserved, end, *_ = listed.filled.tolist()
        number = min(reserved, end)
        if not number:
            return
        left = torch.empty(2, number, dtype=torch.int32, device=listed.items.device)
        self.kernels.place_pairs[(-(-number // PAIRS),)](
            listed.items, listed.others, listed.estimates, number,
            side.thresholds_at, side.hits_at, side.widths, side.reach, side.rounding, side.single, other.single,
            other.weight, side.single.shape[1], *left, listed.filled,
            BITS=side.bits, PAIRS=PAIRS, CHUNK=64,
        )  # fmt: skip
        *_, products, still = listed.filled.tolist()
        self.products += products
        if still:
            self._decide(side, other, *left[:, :still].long())

    def _decide(self, side: Side, other: Side, items: Tensor, others: Tensor) -> None:
        """Count pairs by their exact scores."""
        pairs = side.index[items], other.index[others]
        query, gallery = pairs if side is self.rows else pairs[::-1]
        scores, weights = exact_scores(self.rectangle, query, gallery), other.weight[others].long()
        lengths = torch.tensor([len(block) for block in side.blocks], device=items.device)
        ends = lengths.cumsum(0)
        block_of = torch.searchsorted(ends, items, right=True)
        for number in block_of.unique().tolist():
            counts, some = side.blocks[number].counts, block_of == number
            assert counts is not None
            counts.add_scores(items[some] - (ends - lengths)[number], scores[some], weights[some])
