"""Observers that keep pairs: the highest of all, and a histogram of all estimates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine import device
from fewshot_callbacks.engine.compiled import allocating
from fewshot_callbacks.engine.counting import MARGIN, RUN, bin_of
from fewshot_callbacks.engine.exact import close_score
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.tiles import Estimates, Tile
from fewshot_callbacks.engine.vectors import Floats

# Of the scores of relevant pairs: as fine as errors of float32 let them be, and 0.25 MB for each thread, which stay in
# the cache of a core. What is not collected is known up to the pairs of a bin or two.
HISTOGRAM_BINS = 2**15
# A cut that every negative reaches, since no score is below -1, nor any estimate far from it; masked pairs do not.
BELOW_ALL = -4.0


class Bag(NamedTuple):
    """Where one thread collects pairs from a cut on; a full bag raises its cut."""

    values: Any  # (capacity,) estimates, or scores in float64
    rows: Any
    columns: Any
    cut: Any  # (1,) every pair from here on is in the bag
    filled: Any  # (1,)
    error: float  # of estimates that are replaced by scores in float64; 0 where they are kept
    histogram: Any  # (bins,) of all estimates; empty where it is not wanted
    origin: float
    scale: float


# What changes of a bag.
HELD = ("values", "rows", "columns", "cut", "filled", "histogram")


@allocating
def _raise_cut(bag):
    """Make room in a full bag: drop the lower half."""
    middle = np.partition(bag.values, bag.values.shape[0] // 2)[bag.values.shape[0] // 2]
    bag.cut[0] = np.nextafter(middle, bag.values.dtype.type(np.inf))
    kept = 0
    for n in range(bag.filled[0]):
        if bag.values[n] >= bag.cut[0]:
            bag.values[kept], bag.rows[kept], bag.columns[kept] = bag.values[n], bag.rows[n], bag.columns[n]
            kept += 1
    bag.filled[0] = kept


@allocating
def _put(bag, i, j, number, estimate, pairs):
    """Put a pair into a bag, if it belongs there."""
    value = estimate
    if bag.error > 0.0:
        value = close_score(pairs, i, j)[0]
    if value < bag.cut[0]:
        return
    if bag.filled[0] == bag.values.shape[0]:
        _raise_cut(bag)
        if value < bag.cut[0]:
            return
    n = bag.filled[0]
    bag.values[n], bag.rows[n], bag.columns[n] = value, i, number + j
    bag.filled[0] = n + 1


@allocating
def _put_all(bag, rows, columns, number, estimates, pairs):
    for n in range(estimates.shape[0]):
        _put(bag, rows[n], columns[n], number, estimates[n], pairs)


@allocating
def _collect(estimates, first_row, first_column, number, bag, pairs, bins_of):
    """Collect the pairs of a tile; put all into the histogram where it is wanted.

    Args:
        estimates: (rows, columns), -inf where a pair is no negative.
        first_row: The query of the first row.
        first_column: The item of the first column, in its part.
        number: Of the first item of the part.
        bag: Of this thread.
        pairs: The vectors of the part.
        bins_of: (RUN,) to work in.
    """
    height, width = estimates.shape
    bins = bag.histogram.shape[0]
    origin, scale = estimates.dtype.type(bag.origin), estimates.dtype.type(bag.scale)
    for r in range(height):
        for first in range(0, width, RUN):
            length, reaching = min(RUN, width - first), 0
            row = estimates[r, first : first + length]
            if bins:
                for c in range(length):
                    bins_of[c] = bin_of(row[c], origin, scale, bins)
                for c in range(length):
                    bag.histogram[np.uint32(bins_of[c])] += 1
            cut = estimates.dtype.type(bag.cut[0] - bag.error)
            for c in range(length):
                reaching += row[c] >= cut
            c = 0
            while reaching > 0:
                if row[c] >= cut:
                    _put(bag, first_row + r, first_column + first + c, number, row[c], pairs)
                    reaching -= 1
                c += 1


@dataclass
class Collector:
    """Observes tiles: collects the pairs whose scores reach a cut, and perhaps makes a histogram of all.

    What is collected are estimates, or, where these are coarse, scores in float64; `error` is how far they can be off.

    Args:
        estimates: The tiles.
        cut: It rises where more pairs reach it than there is room for.
        capacity: Room for pairs.
        bins: First and last score of the histogram; None: there is none.
    """

    estimates: Estimates
    cut: float
    capacity: int
    bins: tuple[float, float] | None = None
    once: bool = True
    error: float = field(init=False)
    _bags: list[Bag] = field(default_factory=list)
    _idle: list[Bag] = field(default_factory=list)

    def __post_init__(self) -> None:
        made = self.estimates
        self.coarse = made.precision in ("bytes", "float16") and not made.vectors.pairs.whole
        # of a sum in float64 of scores in [-1, 1], see `close_score`
        of_sum = 2.1 * (made.vectors.dim + 16) * 2.0**-53
        self.error = (of_sum if self.coarse else made.largest_error * MARGIN) + 2.0**-125

    def space(self) -> tuple[Bag, NDArray[np.int32]]:
        """Return the bag of one thread: one that was begun with other queries, if there is any."""
        if self._idle:
            return self._idle.pop(), np.empty(RUN, np.int32)
        double = self.coarse or self.estimates.precision == "float64"
        dtype: Any = np.float64 if double else np.float32
        room, bins = max(2, self.capacity // self.estimates.threads), HISTOGRAM_BINS if self.bins else 0
        low, high = self.bins or (0.0, 1.0)
        cut = np.nextafter(np.full(1, max(self.cut, BELOW_ALL), dtype), dtype(BELOW_ALL))  # not rounded up
        pairs = np.empty(room, dtype), np.empty(room, np.int32), np.empty(room, np.int32)
        error = self.estimates.largest_error * MARGIN + 2.0**-100 if self.coarse else 0.0
        counts, scale = np.zeros(bins, np.int64), (HISTOGRAM_BINS - 3) / (high - low)
        bag = Bag(*pairs, cut, np.zeros(1, np.int64), error, counts, low, scale)
        self._bags.append(bag)
        return bag, np.empty(RUN, np.int32)

    @property
    def key(self) -> Any:
        """What it collects."""
        return self.bins, self.error

    def state(self) -> list[Any]:
        """Return what is in the bags."""
        return [getattr(bag, name) for bag in self._bags for name in HELD]

    def restore(self, arrays: list[Any]) -> None:
        """Go on with these bags."""
        bag, _ = self.space()
        some = (arrays[n : n + len(HELD)] for n in range(0, len(arrays), len(HELD)))
        self._bags = [bag._replace(**dict(zip(HELD, held, strict=True))) for held in some]
        self.go_on()

    def go_on(self) -> Collector:
        """Look at more queries with the same bags."""
        self._idle = list(self._bags)
        return self

    def see(self, tile: Tile, space: tuple[Bag, NDArray[np.int32]]) -> None:
        """Look at a tile."""
        estimates, (bag, bins_of), pairs = tile.estimates, space, tile.part.vectors.pairs
        if self.estimates.on is None:
            _collect(estimates, tile.row, tile.column, tile.part.first, bag, pairs, bins_of)
            return
        for values, r, c in device.collect(estimates, float(bag.cut[0]) - bag.error):
            _put_all(bag, r + tile.row, c + tile.column, tile.part.first, values, pairs)
        if len(bag.histogram):
            device.fill_histogram(estimates, bag.histogram, bag.origin, bag.scale)

    def found(self) -> tuple[float, NDArray[Any], NDArray[np.int32], NDArray[np.int32]]:
        """Return the cut from which on nothing is missing, and values, queries and items of the pairs that reach it."""
        cut = max((float(bag.cut[0]) for bag in self._bags), default=self.cut)
        parts = [[getattr(bag, name)[: bag.filled[0]] for bag in self._bags] for name in ("values", "rows", "columns")]
        kinds = (np.float64, np.int32, np.int32)
        values, rows, columns = (
            np.concatenate(some) if some else np.empty(0, kind) for some, kind in zip(parts, kinds, strict=True)
        )
        return cut if cut > BELOW_ALL else -np.inf, values, rows, columns

    def histogram(self) -> tuple[Floats, Ints]:
        """Return the edges of the bins, and how many estimates reach each; the first edge is below all."""
        assert self.bins is not None
        (low, high), nothing = self.bins, np.zeros(HISTOGRAM_BINS, np.int64)
        counts = sum((bag.histogram for bag in self._bags), nothing)
        edges = low + np.arange(-1, HISTOGRAM_BINS - 1) * ((high - low) / (HISTOGRAM_BINS - 3))
        reaching: Ints = np.cumsum(counts[::-1])[::-1]
        return np.asarray(edges, np.float64), reaching
