"""Counts of all pairs together, one threshold for all queries: bounds at any score, closed where they matter.

The scores of all relevant pairs are known. Of the negatives the highest are collected during the pass for the ranks,
as many as a sample says will matter; for what lies below, a histogram of the estimates gives bounds.
`Negatives.bounds` turns both into bounds of the counts at any score; `Negatives.close` makes them equal at given
scores, by exact scores of the collected pairs near them or by one more pass that counts all pairs. So `fewest <=
truth <= most` always, the sample, the cut and the histogram cost time and never a result, and a search that closes
what it finds open ends.

In several processes what is collected, bins and knots are those of each; bounds are the sums of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine import device
from fewshot_callbacks.engine.compiled import kernel
from fewshot_callbacks.engine.counting import MARGIN, RUN, bin_of
from fewshot_callbacks.engine.exact import close_score
from fewshot_callbacks.engine.layout import EVERY
from fewshot_callbacks.engine.ranks import recount
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.tiles import Estimates, Tile
from fewshot_callbacks.engine.vectors import Floats

# Of the scores of relevant pairs: as fine as errors of float32 let them be, and 0.25 MB for each thread, which stay in
# the cache of a core. What is not collected is known up to the pairs of a bin or two.
HISTOGRAM_BINS = 2**15
# A cut that every negative reaches, since no score is below -1, nor any estimate far from it; masked pairs do not. And one
# that none reaches.
BELOW_ALL, ABOVE_ALL = -4.0, 4.0


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


@kernel
def _raise_cut(bag):
    """Make room in a full bag: drop the lower half, or up to three quarters, and all of one value together."""
    room, number = bag.values.shape[0], bag.values.dtype.type
    low, high = bag.cut[0], number(ABOVE_ALL)
    middle = number(0.5) * (low + high)
    while low < middle < high:
        reaching = 0
        for value in bag.values:
            reaching += value >= middle
        if room <= 4 * reaching and 2 * reaching <= room:
            break
        low, high = (middle, high) if 2 * reaching > room else (low, middle)
        middle = number(0.5) * (low + high)
    bag.cut[0] = middle if low < middle else high
    kept = 0
    for n in range(bag.filled[0]):
        if bag.values[n] >= bag.cut[0]:
            bag.values[kept], bag.rows[kept], bag.columns[kept] = bag.values[n], bag.rows[n], bag.columns[n]
            kept += 1
    bag.filled[0] = kept


@kernel
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


@kernel
def _put_all(bag, rows, columns, number, estimates, pairs):
    for n in range(estimates.shape[0]):
        _put(bag, rows[n], columns[n], number, estimates[n], pairs)


@kernel
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


# Some scores of relevant pairs, ascending, and how many pairs each of them stands for.
Part = tuple[Floats, int]
# Makes the scores of all relevant pairs of this process, some at a time.
Parts = Callable[[], Iterable[Part]]

# A sample may be off by this factor.
SLACK = 1.5
# Pairs that are collected in any case.
FEWEST = 2**16


class Positives(NamedTuple):
    """Some scores of relevant pairs, ascending: all distinct ones, or knots, between which lie others."""

    scores: Floats
    # relevant pairs that reach each
    reach: Ints
    # and those that score higher
    above: Ints
    total: int

    @classmethod
    def at(cls, scores: Floats, parts: Iterable[Part], processes: Processes = ALONE) -> Positives:
        """Count the scores of all relevant pairs at some scores; one that no pair has is left out."""
        counts = np.zeros((2, len(scores) + 1), np.int64)
        for part, each in parts:
            counts[:, -1] += each * len(part)
            for row, at in enumerate((scores, np.nextafter(scores, np.inf))):
                counts[row, :-1] += each * _reaching(part, at)
        if processes.count > 1:
            counts = processes.summed(counts)
        (reach, above), real = counts[:, :-1], counts[0, :-1] > counts[1, :-1]
        return cls(scores[real], reach[real], above[real], int(counts[0, -1]))

    @property
    def most(self) -> Ints:
        """Relevant pairs that reach the lowest score between each knot and the one below; the last lie above all."""
        most: Ints = np.append(self.total, self.above)
        return most

    @property
    def between(self) -> Ints:
        """Relevant pairs in there."""
        inside: Ints = self.most - np.append(self.reach, 0)
        return inside

    def opened(self, cells: NDArray[np.bool_], parts: Parts, room: int, processes: Processes = ALONE) -> Positives:
        """Return more knots: the scores in some of these cells, or as many as there is room for."""
        thin, new = math.ceil(self.between[cells].sum() / room), [self.scores]
        known = np.append(self.scores, np.inf)
        for part, _ in parts():
            cell = np.searchsorted(self.scores, part)
            inside = np.unique(part[cells[cell] & (known[cell] != part)])
            new.append(inside[min(thin, len(inside)) // 2 :: thin])  # from the middle: even one halves what is open
        return Positives.at(np.unique(processes.joined(np.concatenate(new))), parts(), processes)


class Sample(NamedTuple):
    """Estimates of the negatives of some queries of all processes, ascending; each stands for `each` negatives."""

    estimates: Floats
    each: float

    def reaching(self, scores: Floats) -> Floats:
        """Estimate how many negatives reach some scores."""
        missed: Ints = np.searchsorted(self.estimates, scores)
        return np.asarray(self.each * (len(self.estimates) - missed), np.float64)


class Wanted(NamedTuple):
    """How many negatives a question needs: to find its answer, and to prove that no lower score is it."""

    needed: float
    proving: float


def collector(estimates: Estimates, sample: Sample, wanted: Sequence[Wanted], scores: Floats) -> Collector:
    """Return what collects the negatives that some questions will need, by a sample.

    Args:
        estimates: The tiles.
        sample: Of the negatives.
        wanted: Of each question.
        scores: Of relevant pairs, ascending.
    """
    processes, pairs = estimates.processes, estimates.pairs
    enough = pairs if pairs <= EVERY else max(FEWEST, int(0.03 * pairs))
    room = max(2, min(estimates.layout.collected, enough) // processes.count)
    if pairs <= room:
        return Collector(estimates, -math.inf, (pairs + estimates.shape[0]) * estimates.threads)
    if not len(sample.estimates) or not len(scores):
        return Collector(estimates, -math.inf, room, None if not len(scores) else _histogram_range(scores, estimates))
    needs = SLACK * np.array(wanted).reshape(-1, 2) / (2 if estimates.mutual else 1) / processes.count
    collected = max(needs[:, 0][needs[:, 0] <= room].max(initial=0), needs[:, 1][needs[:, 1] <= room].max(initial=0))
    proved = bool((needs <= room).all())
    share = max(collected, min(room, FEWEST) // 4) * processes.count / max(1, pairs)
    cut = float(sample.estimates[len(sample.estimates) - 1 - int(min(1.0, share) * (len(sample.estimates) - 1))])
    capacity = min(room, int(2 * collected) + FEWEST)
    return Collector(estimates, cut - 1e-6, capacity, None if proved else _histogram_range(scores, estimates))


def _histogram_range(scores: Floats, estimates: Estimates) -> tuple[float, float]:
    """Return where the bins lie; each is wider than what is rounded when the bin of an estimate is found."""
    low, high, rounded = float(scores[0]), float(scores[-1]), 2.0 ** (-49 if estimates.precision == "float64" else -20)
    width = max((high - low) / HISTOGRAM_BINS, rounded * max(abs(low), abs(high)), 2.0**-100)
    return low - 2 * width, low + HISTOGRAM_BINS * width


class Negatives:
    """How many negatives reach a score: bounds, which `close` makes equal; all calls are collective.

    Args:
        estimates: The tiles.
        seen: What was collected of them.
        own: How many this process has seen.
    """

    def __init__(self, estimates: Estimates, seen: Collector, own: int) -> None:
        self.estimates = replace(estimates, progress=None) if estimates.progress else estimates
        self.processes, self.passes = estimates.processes, 1
        self.each = 2 if estimates.mutual else 1
        self._own = self.each * own
        self.total = int(self._summed(np.array([self._own]))[0])
        self.error = seen.error
        cut, *self._collected = seen.found()
        (self.cut,) = self.processes.largest([cut])
        self._values, self._exact = np.sort(self._collected[0]), np.empty(0)
        if estimates.vectors.pairs.whole:  # the estimates of codes are their scores
            self._values, self._exact = self._values[:0], self._values.astype(np.float64)
            self._collected = [part[:0] for part in self._collected]
        self._knots = (np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))
        if seen.bins is not None:
            edges, reaching = seen.histogram()
            # by so many edges an estimate may lie from its score; and one for rounding, see `_histogram_range`
            away = 1 + math.ceil((estimates.largest_error * MARGIN + 2.0**-125) / (edges[1] - edges[0]))
            if away < len(edges):
                low = np.append(reaching[away:], np.zeros(away, np.int64))
                high = np.append(np.full(away + 1, self._own // self.each), reaching[1:-away])
                self._add_knots(edges, self.each * low, self.each * high)

    def _summed(self, values: Ints) -> Ints:
        return self.processes.summed(values) if self.processes.count > 1 else values

    def _add_knots(self, scores: Floats, fewest: Ints, most: Ints) -> None:
        at, low, high = (np.concatenate(pair) for pair in zip(self._knots, (scores, fewest, most), strict=True))
        order = np.argsort(at, kind="stable")
        # what reaches a score reaches all lower ones
        low, high = np.maximum.accumulate(low[order][::-1])[::-1], np.minimum.accumulate(high[order])
        self._knots = at[order], low, high

    def _reach(self, scores: Floats) -> Floats:
        """Return how far a value may lie from some scores that it has to be compared with exactly; 2**-50: rounding."""
        return self.error + np.minimum(np.abs(scores), 2.0) * 2.0**-50  # infinite ones are asked for as well

    def bounds(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return how many negatives at least, and at most, reach each of some ascending scores."""
        fewest, most = self._summed(np.stack(self._own_bounds(scores)))
        return fewest, most

    def _own_bounds(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return the bounds of the negatives of this process."""
        reach = self._reach(scores)
        fewest, most = _reaching(self._values, scores + reach), _reaching(self._values, scores - reach)
        if len(self._exact):
            certain = _reaching(self._exact, scores)
            fewest, most = fewest + certain, most + certain
        fewest, most = self.each * fewest, self.each * most
        most[scores - reach < self.cut] = self._own
        at, low, high = self._knots
        if len(at):
            after, before = np.searchsorted(at, scores), np.searchsorted(at, scores, side="right") - 1
            fewest = np.maximum(fewest, np.append(low, 0)[after])
            most = np.minimum(most, np.where(before >= 0, high[before], self._own))
        return fewest, most

    @property
    def highest(self) -> Floats:
        """Some values of the collected pairs of all processes, ascending, the highest of them all; collective."""
        number = len(self._values)
        thin = max(1, self.processes.count * number // FEWEST)
        return self._joined(np.append(self._values[:-FEWEST:thin], self._values[-FEWEST:]).astype(np.float64))

    def span(self, others: Floats) -> tuple[float, float]:
        """Return scores below and above all negatives that are known, and some others."""
        # what a full bag has dropped lies below the cut: all, where the highest tie
        dropped = np.array([self.cut] if math.isfinite(self.cut) else [])
        held = (self._values, self._exact, dropped)
        ends = [values[[0, -1]].astype(np.float64) for values in held if len(values)]
        known = np.concatenate([others, *(end + np.array([-self.error, self.error]) for end in ends)])
        low, high = self.processes.largest([-float(known.min(initial=np.inf)), float(known.max(initial=-np.inf))])
        return -low, high

    def estimate(self, scores: Floats, sample: Sample) -> Ints:
        """Estimate how many negatives reach each of some ascending scores.

        From the cut on the counts are those of scores that differ by at most `error`; below it they come from a sample.
        """
        fewest, most = self.bounds(scores)
        counted = self._summed(self.each * (_reaching(self._values, scores) + _reaching(self._exact, scores)))
        if math.isinf(self.cut):
            return np.clip(counted, fewest, most)
        below, at_cut = scores < self.cut + self.error, sample.reaching(np.array([self.cut]))[0]
        last = counted[~below][0] if (~below).any() else 0
        rest = max(1.0, sample.each * len(sample.estimates) - at_cut)
        spread = last + (self.total - last) * np.clip((sample.reaching(scores) - at_cut) / rest, 0.0, 1.0)
        return np.clip(np.where(below, np.rint(spread).astype(np.int64), counted), fewest, most)

    def close(self, scores: Floats) -> None:
        """Make the bounds at some ascending scores equal."""
        fewest, most = self.bounds(scores)
        scores = scores[fewest < most]
        if not len(scores):
            return
        reach = self._reach(scores)
        known = scores - reach >= self.cut
        if known.any():
            self._decide(scores[known] - reach[known], scores[known] + reach[known])
        rest = scores[~known]
        if len(rest):
            self._count(rest)

    def _decide(self, low: Floats, high: Floats) -> None:
        """Make the exact scores of the collected pairs in some intervals, which are ascending."""
        values, rows, columns = self._collected
        near = _inside_any(values, low, high)
        if self.processes.largest([float(near.any())])[0]:
            made = self.estimates.exact(rows[near], columns[near])
            self._exact = np.sort(np.concatenate((self._exact, made)))
            self._collected = [part[~near] for part in self._collected]
            self._values = self._values[~_inside_any(self._values, low, high)]

    def _count(self, scores: Floats) -> None:
        """Count all pairs at some ascending scores, in one more pass."""
        reached, above = recount(self._closer(scores), scores)
        self.passes += 1
        self._add_knots(scores, reached, reached)
        self._add_knots(np.nextafter(scores, np.inf), above, above)

    def _closer(self, scores: Floats) -> Estimates:
        """Return estimates in float32, or in float64 where dense scores would leave many pairs open."""
        estimates = self.estimates.in_precision("float32")
        if self.estimates.precision == "float64":
            return self.estimates
        error = estimates.largest_error
        fewest, most = self.bounds(scores[[0, -1]])
        within = (most[0] - fewest[-1]) / max(1, self.total)
        covered = min(1.0, 2 * error * len(scores) / max(scores[-1] - scores[0], 2 * error, 1e-300))
        return estimates if within * covered < 0.2 else self.estimates.in_precision("float64")

    def _joined(self, scores: Floats) -> Floats:
        return np.sort(self.processes.joined(scores))


@kernel
def _merge(values, scores, out):
    """Count how many of the ascending values reach each of the ascending scores."""
    at = 0
    for k in range(scores.shape[0]):
        while at < values.shape[0] and values[at] < scores[k]:
            at += 1
        out[k] = values.shape[0] - at


def _reaching(values: NDArray[Any], scores: Floats) -> Ints:
    """Count how many of the ascending values reach each of the ascending scores."""
    if 32 * len(scores) < len(values):  # a search takes about as long as reading so many
        return len(values) - np.searchsorted(values, scores)
    out = np.empty(len(scores), np.int64)
    _merge(values, scores, out)
    return out


def _inside_any(values: NDArray[Any], low: Floats, high: Floats) -> NDArray[np.bool_]:
    """Find the values in some intervals, which may overlap."""
    inside: NDArray[np.bool_] = (values >= low[0]) & (values <= high[-1])
    some = values[inside].astype(np.float64)
    inside[inside] = np.searchsorted(low, some, side="right") != np.searchsorted(high, some)
    return inside
