"""How much memory an evaluation takes, and how the matrix of all pairs is cut up to keep to a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor

from fewshot_callbacks.engine.options import EngineOptions, Layout

__all__ = ["plan_layout"]


def rows_at_once(embeddings: Tensor) -> int:
    """Return how many rows hold 2**16 numbers, 0.5 MB in float64, to be processed at a time in little memory."""
    return max(1, 2**16 // max(1, embeddings.shape[1]))


SHARE_OF_BLOCKS = 0.25
SHARE_OF_LAYOUT = 0.6
"""Shares of the budget for what is being worked on, and for that and the counters together."""

SHARE_OF_KEPT = 0.2
"""Share of the budget for operands and tables that are kept so as not to make them anew for each tile."""

SHARE_OF_RANKS = 0.25
"""Share of the budget for ranks, and the metrics that are made of them."""

QUERY_BYTES, ITEM_BYTES = 300, 300
"""Of each query and gallery item: places, classes, scales, lengths, bounds of errors, and the metrics of each query.

With the smallest layout, one set of dim 8 took 1.4, 4.2, 13.3 and 16.5 MB for 1,000, 4,000, 16,000 and 20,000 items (peak
of the resident memory, Linux x86-64, one thread) where 250 bytes and `LEAST_SHARE` said 1.6, 3.9, 12 and 15 MB.
"""

PRODUCT_BYTES = 4 * 10**6
"""What a product of a tile takes inside the library that makes it, of few items no more than its result.

Without it, `tests/engine/test_budget.py` finds the smallest budgets exceeded.
"""

LEAST_ROWS = 64
"""Smallest number of queries in a block or a batch, unless there are fewer."""

LEAST_TILE = 2**22
"""Multiplications, or what counting costs in these, below which a tile costs more to begin than to make."""

LEAST_SHARE = 0.5
"""With less than this share of what items take for everything else, beginning tiles would take most of the time: their
number grows with the square of the items."""

COUNTER_BYTES = 8 + 4 + 4
"""A threshold and two counters for each relevant item of a query."""

COPY_BYTES = 8 + 1
"""And a copy of the threshold while those of a query are sorted, which is made of all queries of a small batch at once."""

RANK_BYTES = 200
"""Ranks of a relevant item of a query, a sorted copy of its score, and the metrics made of them."""


def choose_layout(
    memory_bytes: int,
    queries: int,
    gallery: int,
    dim: int,
    relevant: float,
    *,
    threads: int = 1,
    whole_tiles: bool = False,
) -> Layout:
    """Return the largest blocks, and the most counters, that fit the budget.

    Args:
        memory_bytes: The budget, beyond the embeddings.
        queries: Number of queries.
        gallery: Number of gallery items.
        dim: Components of an embedding.
        relevant: Relevant items of a query, the mean over queries.
        threads: Number of threads, each of which works on its own tiles.
        whole_tiles: A tile is as large as its blocks, and several tables of its size are made (plain PyTorch).
    """
    per_query = COUNTER_BYTES * (relevant + 1) + 40
    free = max(0.0, memory_bytes - item_bytes(queries, gallery))
    of_block = partial(block_bytes, dim=dim, relevant=relevant, whole_tiles=whole_tiles)
    block = 2048
    while block > LEAST_ROWS:
        enough_blocks = block * 3 * threads <= max(queries, gallery, 512 * threads)  # for all threads
        if enough_blocks and threads * of_block(block) <= free * SHARE_OF_BLOCKS:
            break
        block //= 2
    columns = block
    working = threads * of_block(block)
    ranked = max(least_ranked(relevant), int(free * SHARE_OF_RANKS / (RANK_BYTES * (relevant + 1))))
    ranks = min(queries, block, ranked) * RANK_BYTES * (relevant + 1)

    def fitting(working: float, per_query: float) -> int:
        return int(min(queries, max(LEAST_ROWS, (free * SHARE_OF_LAYOUT - max(working, ranks)) // per_query)))

    batch = fitting(working, per_query)
    if batch < queries:
        per_query += COPY_BYTES * (relevant + 1)
    # two tiles of small blocks cost more to begin than one that serves both its sides saves
    tight = block * block * max(dim, 64) < LEAST_TILE and threads * of_block(2 * block) > free * SHARE_OF_BLOCKS
    if (batch < queries or tight) and not whole_tiles:
        # a tile serves its rows alone: the more columns, the more often what is known of a row is used while it is at hand
        while 2 * columns <= min(8192, gallery) and (
            block * columns * max(dim, 64) < LEAST_TILE
            or threads * of_block(block, columns=2 * columns) <= free * SHARE_OF_BLOCKS
        ):
            columns *= 2
        working = threads * of_block(block, columns=columns)
        batch = min(batch, fitting(working, per_query))
    return Layout(
        rows=min(block, batch),
        columns=columns,
        batch=batch,
        bytes=int(item_bytes(queries, gallery) + max(working, ranks) + batch * per_query),
    )


def item_bytes(queries: int, gallery: int) -> int:
    """Return the memory of an evaluation for each query and each gallery item, regardless of the budget."""
    return min(PRODUCT_BYTES, 4 * queries * gallery) + QUERY_BYTES * queries + ITEM_BYTES * gallery


def least_bytes(
    queries: int, gallery: int, dim: int, relevant: float, *, threads: int = 1, whole_tiles: bool = False
) -> int:
    """Return the smallest budget that can be kept; the arguments are those of `choose_layout`."""
    items, own = item_bytes(queries, gallery), QUERY_BYTES * queries + ITEM_BYTES * gallery
    layout = choose_layout(0, queries, gallery, dim, relevant, threads=threads, whole_tiles=whole_tiles)
    return items + math.ceil(max((layout.bytes - items) / SHARE_OF_LAYOUT, own * LEAST_SHARE))


def plan_layout(memory_bytes: int, queries: int, gallery: int, dim: int, relevant: float) -> tuple[Layout, int]:
    """Return the blocks of a pass on the CPU, with one thread, and the smallest budget that can be kept.

    The budget is that or `memory_bytes`, if it is larger; the arguments are those of `choose_layout`.
    """
    least = least_bytes(queries, gallery, dim, relevant)
    return choose_layout(max(memory_bytes, least), queries, gallery, dim, relevant), least


def least_ranked(relevant: float) -> int:
    """Return for how many queries ranks are made at once at least: for few, most of the time goes into calls."""
    return max(1, min(16, int(2**12 / (relevant + 1))))


def block_bytes(block: int, dim: int, relevant: float, whole_tiles: bool, columns: int | None = None) -> float:
    """Return what one thread needs: the scores of some rows, in parts, operands, and tables of thresholds.

    Args:
        block: Rows.
        dim: Components.
        relevant: Thresholds of an item.
        whole_tiles: See `choose_layout`.
        columns: As many as rows by default, and then they have tables, too.
    """
    parts = math.ceil(dim / 128) + 2
    if whole_tiles:
        return 48 * block * block + 2 * block * (8 * dim + 8 * relevant + 2200)
    # an operand in float32 and one in half precision or float64, and what the latter are made of
    of_row = 16 * dim + table_bytes(relevant)
    of_column = of_row if columns is None else 16 * dim
    columns = columns or block
    return 4 * parts * min(part_rows(columns), block) * columns + block * of_row + columns * of_column


def table_bins(relevant: float) -> int:
    """Return into how many bins the interval of `relevant` thresholds is cut: few in one, and the tables in the cache."""
    return 1024 if relevant < 256 else max(4096, min(2**14, 2 ** math.ceil(math.log2(4 * relevant))))


def table_bytes(relevant: float) -> int:
    """Return what a query's table takes."""
    return (1 if relevant < 127 else 2 if relevant < 2**15 - 1 else 4) * table_bins(relevant) + 100


def part_rows(columns: int, most: int = EngineOptions.tile_rows) -> int:
    """Return how many rows of a tile are made at once."""
    return max(16, min(most, 2**19 // max(1, columns)))


@dataclass(frozen=True)
class Budget:
    """How much memory a pass may take, and how the matrix of all pairs is cut up to keep to it."""

    memory_bytes: int
    """what was granted, or the least that this evaluation can do with"""
    queries: int
    """distinct queries of the process that holds most"""
    items: int
    """distinct gallery items of the process that holds most"""
    dim: int
    threads: int
    whole_tiles: bool
    """a tile is as large as its blocks: plain PyTorch"""
    relevant: float
    """thresholds of a query, the mean over queries"""
    limit: Layout | None = None
    """the largest blocks that are allowed"""

    @property
    def free_bytes(self) -> int:
        """What is left beside what is held for each query and item."""
        return self.memory_bytes - item_bytes(self.queries, self.items)

    @cached_property
    def layout(self) -> Layout:
        """The blocks for queries with as many relevant items as the mean."""
        return self.layout_for(self.relevant)

    def layout_for(self, relevant: float) -> Layout:
        """Return the blocks for queries with `relevant` relevant items."""
        if self.limit is not None:
            rows, columns, batch = self.limit.rows, self.limit.columns, self.limit.batch
            return Layout(min(rows, batch), columns, min(batch, self.queries), 0)
        return choose_layout(
            self.memory_bytes,
            self.queries,
            self.items,
            self.dim,
            relevant,
            threads=self.threads,
            whole_tiles=self.whole_tiles,
        )
