"""How the matrix of all pairs is cut up so that an evaluation keeps to a budget: every size from one formula."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.options import EngineOptions

ITEM_BYTES = 200
"""Of each query and each item: norms, twins, lists, bounds of errors, values of the metrics."""
PRODUCT_BYTES = 10**6
"""What a product takes in the library that makes it, for each thread, and small things."""
PAIR_BYTES = 48
"""Of a relevant pair: score, sorted copy or two counters, ranks; its table comes on top."""
RANKED_BYTES = 200
"""Of a relevant pair whose metrics are being made."""
COLLECTED_BYTES, KNOT_BYTES = 40, 120
"""Of a collected pair, while pairs are gathered and sorted; of a score at which all pairs are counted, with its
bounds."""
HEIGHT, WIDTH = 256, 2048
"""Queries and items of a tile: its estimates, 2 MB, stay in the cache of a core."""
LEAST = 64
"""Smallest height and width: less takes longer to begin than to make."""
COLLECTED_SHARE = 0.05
"""Share of all pairs that is collected, at most."""
BINS, FEW_BINS, LONG = 20, 4, 64
"""Bins of a table for each threshold; where queries have more than `LONG` thresholds on average, fewer do."""


class Layout(NamedTuple):
    """Sizes that keep to a budget."""

    height: int
    width: int
    kept: bool
    """whether operands are kept, and not made anew for each tile"""
    collected: int
    """pairs that are collected"""
    knots: int
    """relevant scores at which all pairs are counted"""
    batch: int
    """relevant pairs whose counters are held at once"""
    ranked: int
    """relevant pairs whose metrics are made at once"""
    bytes: int
    """of all of it"""

    def batches(self, sizes: NDArray[np.int64]) -> list[slice]:
        """Return batches of whole tiles of queries that have so many relevant items each."""
        if sizes.sum() + len(sizes) <= self.batch or not len(sizes):
            return [slice(0, len(sizes))]
        before, ends = np.append(0, np.cumsum(sizes + 1)), [0]
        while ends[-1] < len(sizes):
            fitting = int(np.searchsorted(before, before[ends[-1]] + self.batch, side="right")) - 1
            fitting = fitting if fitting == len(sizes) else fitting // self.height * self.height
            ends.append(min(len(sizes), max(fitting, ends[-1] + self.height)))
        return [slice(*span) for span in pairwise(ends)]


def plan_layout(
    memory: float,
    queries: int,
    items: int,
    columns: int,
    relevant: int,
    *,
    sides: int = 1,
    threads: int = 1,
    options: EngineOptions | None = None,
) -> Layout:
    """Return sizes for a budget; where it cannot be kept, the smallest ones.

    Args:
        memory: Bytes beyond the embeddings; infinite for no limit.
        queries: Number of queries.
        items: Number of gallery items.
        columns: Components of an operand.
        relevant: Relevant pairs.
        sides: Operands that differ.
        threads: Each has its own tile.
        options: Sizes that are given.
    """
    options, relevant = options or EngineOptions(), relevant + queries
    long = relevant > LONG * queries
    each = PAIR_BYTES + 2 * FEW_BINS if long else PAIR_BYTES + BINS
    fixed = ITEM_BYTES * (queries + items) + PRODUCT_BYTES * threads
    free = max(0.0, min(memory, 2.0**60) - fixed)
    operands = 4 * columns * (queries + (items if sides > 1 else 0))
    kept = operands <= 0.4 * free
    # operands that are made for each tile pay for a square one
    height, width = (HEIGHT, WIDTH) if kept else (4 * HEIGHT, 4 * HEIGHT)

    def working() -> int:
        return threads * 4 * (height * width + (0 if kept else columns * (height + width)))

    while working() > 0.3 * free and max(height, width) > LEAST:
        height, width = (height, width // 2) if width > height else (height // 2, width)
    height, width = options.height or height, options.width or width
    free -= working() + (operands if kept else 0)
    collected = int(max(2**12, min(COLLECTED_SHARE * queries * items, 0.3 * free / COLLECTED_BYTES)))
    knots = int(max(2**10, min(relevant, 0.2 * free / KNOT_BYTES)))
    ranked = int(max(2**11, min(2**21, relevant, 0.1 * free / RANKED_BYTES)))
    least = height * max(1, relevant // max(1, queries))
    batch = int(min(relevant, max(least, 0.35 * free / each)))
    held = COLLECTED_BYTES * collected + KNOT_BYTES * knots + each * batch + RANKED_BYTES * ranked
    used = fixed + (operands if kept else 0) + working() + held
    return Layout(
        height,
        width,
        kept,
        options.collected or collected,
        options.knots or knots,
        options.batch or batch,
        ranked,
        int(used),
    )


def least_bytes(queries: int, items: int, columns: int, relevant: int) -> int:
    """Return the smallest budget that can be kept; the arguments are those of `plan_layout`."""
    return plan_layout(0, queries, items, columns, relevant, sides=2).bytes
