"""How the matrix of all pairs is cut up so that an evaluation keeps to a budget: every size from one formula."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.options import current_options

# Of each query: norms, twins, lists, bounds of errors, values of the metrics; of each item, which has no more than the first
# three.
QUERY_BYTES, ITEM_BYTES = 200, 100
# Of an item that is read when it is needed: its number in lists, and what it is excluded by.
READ_BYTES = 24
# What a product takes in the library that makes it, for each thread, and small things.
PRODUCT_BYTES = 10**6
# Of a relevant pair while pairs are counted: score, sorted copy, two counters, on top of which comes its table; and at
# least so much before and after, when it has no table: a second copy of its score, or its ranks.
PAIR_BYTES, LEAST_PAIR_BYTES = 24, 32
# And of one of a batch, whose scores are made again: those of the batch before, and where each lies among the knots.
AGAIN_BYTES = 24
# Of a relevant pair whose metrics are being made.
RANKED_BYTES = 200
# Of a collected pair, while pairs are gathered and sorted; of a score at which all pairs are counted, with its bounds.
COLLECTED_BYTES, KNOT_BYTES = 40, 120
# Queries and items of a tile: its estimates, 2 MB, stay in the cache of a core. The width is no power of two, at which
# the numbers of a column would share the same places of that cache.
HEIGHT, WIDTH = 256, 2032
# Both, of a tile on a device, and what each of its estimates takes: itself in float64, marks, and what is copied of it.
DEVICE_SIDE, DEVICE_BYTES = 2**14, 20
# There another pass takes less than to bring many pairs to the CPU: about 0.1 us each.
DEVICE_COLLECTED = 2**22
# Where what is held of each item alone exceeds `LARGE` bytes, the rest has so many, whatever the budget: with the smallest
# tiles an evaluation of millions of items would take many times as long, and save next to nothing.
LARGE, SPARE = 2**29, 2**26
# Smallest height and width: less takes longer to begin than to make.
LEAST = 64
# Share of all pairs that is collected, at most; of so few pairs all are.
COLLECTED_SHARE, EVERY = 0.05, 2**18
# Bins of a table for each threshold; where queries have more than `LONG` thresholds on average, of numbers of two bytes
# then, fewer do, and where only so the counters of all queries fit: each further batch reads all items once more, and of
# one set makes each product twice.
BINS, FEW_BINS, LONG = 20, 4, 64
# Share of what is left that counters may take, and may where those of all queries then fit.
OF_BATCH, OF_ALL = 0.55, 0.7


class Layout(NamedTuple):
    """Sizes that keep to a budget."""

    height: int
    width: int
    # whether operands are kept, and not made anew for each tile
    kept: bool
    # whether those in bytes are, a quarter as large
    coded: bool
    # pairs that are collected
    collected: int
    # relevant scores at which all pairs are counted
    knots: int
    # relevant pairs whose counters are held at once
    batch: int
    # of a table for each of them
    bins: int
    # relevant pairs whose metrics are made at once
    ranked: int
    # whether the scores of all relevant pairs are kept, and not made anew for each question
    stored: bool
    # of all of it
    bytes: int

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


def _of_a_pair(bins: int) -> int:
    """Return the bytes of a relevant pair with a table of so many bins: few are numbers of two bytes."""
    return max(LEAST_PAIR_BYTES, PAIR_BYTES + (bins if bins == BINS else 2 * bins))


def plan_layout(
    memory: float,
    queries: int,
    items: int,
    columns: int,
    relevant: int,
    *,
    read: int = 0,
    sides: int = 1,
    threads: int = 1,
    on_device: bool = False,
) -> Layout:
    """Return sizes for a budget; where it cannot be kept, the smallest ones.

    Args:
        memory: Bytes beyond the embeddings; infinite for no limit.
        queries: Number of queries.
        items: Number of gallery items.
        columns: Components of an operand.
        relevant: Relevant pairs.
        read: Further items, which are read some at a time.
        sides: Operands that differ.
        threads: Each has its own tile.
        on_device: There is one tile, on a device, large and with copies of parts of it.
    """
    options, relevant = current_options(), relevant + queries
    fixed = QUERY_BYTES * queries + ITEM_BYTES * items + READ_BYTES * read + PRODUCT_BYTES * threads
    operands = 4 * columns * (queries + (items if sides > 1 else 0))
    of_an_estimate, of_a_query = DEVICE_BYTES if on_device else 4 * threads, -(-relevant // max(1, queries))

    def used(sizes: Layout) -> int:
        rows = 0 if sizes.kept else columns * (sizes.height + sizes.width)
        tiles = of_an_estimate * sizes.height * sizes.width + threads * 4 * rows
        pooled = COLLECTED_BYTES * sizes.collected + KNOT_BYTES * sizes.knots
        ranks = _of_a_pair(sizes.bins) * sizes.batch + RANKED_BYTES * sizes.ranked
        if sizes.batch < relevant:
            ranks += 8 * relevant if sizes.stored else AGAIN_BYTES * sizes.batch
        return fixed + tiles + (operands if sizes.kept else operands // 4 if sizes.coded else 0) + pooled + ranks

    # everything has its least, and a share of what is left beside it: operands 0.4 and tiles 0.1, or operands in bytes 0.2
    # and tiles 0.2, or tiles alone 0.3, the scores of relevant pairs 0.15, counters their share, then 0.9 of the rest; so
    # no share shrinks by much where more memory lets another begin
    fewest, pairs = min(relevant, LEAST * of_a_query), queries * (items + read)
    bins = FEW_BINS if relevant > LONG * queries else BINS
    least = Layout(LEAST, LEAST, False, False, 2**12, 2**10, fewest, bins, min(2**11, relevant), False, 0)
    free = max(SPARE if fixed > LARGE else 0.0, min(memory, 2.0**60) - used(least))
    kept, coded = operands <= 0.4 * free, operands // 4 <= 0.2 * free and not on_device
    # operands that are made for each tile pay for a square one
    height, width = (DEVICE_SIDE,) * 2 if on_device else (HEIGHT, WIDTH) if kept or coded else (4 * HEIGHT, 4 * HEIGHT)
    # a batch is a row of tiles at least
    while height > LEAST and _of_a_pair(bins) * (height * of_a_query - fewest) > 0.1 * free:
        height //= 2
    sizes = least._replace(height=height, width=width, kept=kept, coded=coded)
    share = (operands if kept else operands // 4 if coded else 0) + (0.3 if not coded else 0.1 if kept else 0.2) * free
    while used(sizes) - used(least) > share and sizes.height * sizes.width > LEAST**2:
        longer = "width" if sizes.width > sizes.height else "height"
        sizes = sizes._replace(**{longer: getattr(sizes, longer) // 2})
    height, width = options.height or sizes.height, options.width or sizes.width
    sizes = sizes._replace(height=height, width=width, stored=8 * relevant <= 0.15 * free)
    rest = max(0.0, free - used(sizes) + used(least))
    held, again = (8, 0) if sizes.stored else (0, AGAIN_BYTES)  # of each pair; `rest` is without what is held
    whole = [few for few in (bins, FEW_BINS) if (_of_a_pair(few) - held) * relevant <= OF_ALL * rest]
    batch = relevant if whole else min(relevant, fewest + int(OF_BATCH * rest / (_of_a_pair(bins) + again)))
    sizes = sizes._replace(batch=options.batch or batch, bins=(*whole, bins)[0])
    rest = max(0.0, free - used(sizes) + used(least))
    wanted = min(DEVICE_COLLECTED if on_device else pairs, max(int(COLLECTED_SHARE * pairs), min(EVERY, pairs)))
    sizes = sizes._replace(
        collected=options.collected
        or max(least.collected, min(wanted, least.collected + int(0.45 * rest / COLLECTED_BYTES))),
        knots=options.knots or max(least.knots, min(relevant, least.knots + int(0.3 * rest / KNOT_BYTES))),
        ranked=min(2**21, relevant, least.ranked + int(0.15 * rest / RANKED_BYTES)),
    )
    sizes = sizes._replace(bytes=used(sizes))
    return sizes._replace(stored=sizes.batch >= relevant or (sizes.stored and options.batch is None))


def least_bytes(queries: int, items: int, columns: int, relevant: int) -> int:
    """Return the smallest budget that can be kept; the arguments are those of `plan_layout`."""
    return plan_layout(0, queries, items, columns, relevant, sides=2).bytes
