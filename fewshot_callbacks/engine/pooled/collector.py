"""The collector: an observer that keeps the highest negatives of a pass, and perhaps a histogram of all estimates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.candidate_buffer import BELOW_ALL, CandidateBuffer
from fewshot_callbacks.engine.counting import ERROR_FACTOR, RUN, FloatArray
from fewshot_callbacks.engine.layout import EVERY
from fewshot_callbacks.engine.observers import Tile
from fewshot_callbacks.engine.pooled.sample import Sample
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.scale import Floats
from fewshot_callbacks.engine.tiles import Estimates
from fewshot_callbacks.files.journal import Arrays

# Bins of a histogram: about as fine as errors of float32 allow. They take 0.25 MB for each thread, which stay in the cache
# of a core. The score of a pair that is not collected is known up to its error bound and one bin.
HISTOGRAM_BINS = 2**15

# A sample may be off by this factor, so this many times the predicted number of pairs is collected if there is room. With
# 1.5, synthetic sets of 31,730 and 158,652 items took a further pass, which costs far more than these pairs.
SLACK = 3.0
# Share of the room that is planned to be filled, since a buffer that overflows drops a quarter of its pairs or more.
FILLED_SHARE = 0.8
# There is room for this many pairs beyond twice the number that questions need, if the budget allows.
LEAST_CAPACITY = 2**16
# Largest share of all pairs of all processes that is collected; symmetric pairs count once. `layout.COLLECTED_SHARE`
# limits the pairs of one process, and so its memory.
MOST_SHARE = 0.06
# The cut-off is this far below the sampled estimate, so that rounding cannot put it above.
CUTOFF_OFFSET = 1e-6


class Collected(NamedTuple):
    """All pairs that reach a cut-off, and some below it."""

    # -inf if all pairs were collected
    cutoff: float
    values: FloatArray  # (pairs,)
    queries: NDArray[np.int32]  # (pairs,)
    items: NDArray[np.int32]  # (pairs,)
    # (pairs,) how many pairs each pair stands for; None for one each
    copies: Ints | None

    def where(self, mask: NDArray[np.bool_]) -> Collected:
        """Return the pairs that a mask selects."""
        copies = None if self.copies is None else self.copies[mask]
        return Collected(self.cutoff, self.values[mask], self.queries[mask], self.items[mask], copies)


class Collector:
    """Observer that collects the pairs whose scores reach a cut-off, and perhaps makes a histogram of all estimates.

    It collects estimates, or scores in float64 if estimates are coarse. `error_bound` is how far these values can be from
    the exact scores.

    Args:
        estimates: The tiles.
        cutoff: It rises if more pairs reach it than there is room for.
        capacity: Largest number of pairs.
        bins: Where the histogram begins and ends; None if there is none.
    """

    per_query = False

    def __init__(
        self, estimates: Estimates, cutoff: float, capacity: int, bins: tuple[float, float] | None = None
    ) -> None:
        self.estimates = estimates
        self.cutoff = cutoff
        self.capacity = capacity
        self.bins = bins
        self.coarse = estimates.precision in ("int8", "float16") and not estimates.vectors.pairs.exact_estimates
        # error bound of a sum in float64 of scores in [-1, 1], see `float64_score`
        sum_error_bound = 2.1 * (estimates.vectors.scale.dim + 16) * 2.0**-53
        self.error_bound = (
            sum_error_bound if self.coarse else estimates.largest_error_bound * ERROR_FACTOR
        ) + 2.0**-125
        self._buffers: list[CandidateBuffer] = []
        # buffers of an earlier batch of queries, which threads fill further
        self._idle: list[CandidateBuffer] = []

    def new_workspace(self) -> tuple[CandidateBuffer, NDArray[np.int32]]:
        """Return the buffer of one thread and an array for bins. Buffers of an earlier batch are used first."""
        if self._idle:
            return self._idle.pop(), np.empty(RUN, np.int32)
        double = self.coarse or self.estimates.precision == "float64"
        dtype: Any = np.float64 if double else np.float32
        capacity = max(2, self.capacity // self.estimates.threads)
        lowest, highest = self.bins or (0.0, 1.0)
        buffer = CandidateBuffer(
            values=np.empty(capacity, dtype),
            rows=np.empty(capacity, np.int32),
            columns=np.empty(capacity, np.int32),
            # rounded down, so that no pair between the cut-off and its rounded value is lost
            cutoff=np.nextafter(np.full(1, max(self.cutoff, BELOW_ALL), dtype), dtype(BELOW_ALL)),
            filled=np.zeros(1, np.int64),
            error_bound=self.estimates.largest_error_bound * ERROR_FACTOR + 2.0**-100 if self.coarse else 0.0,
            histogram=np.zeros(HISTOGRAM_BINS if self.bins else 0, np.int64),
            origin=lowest,
            bins_per_score=(HISTOGRAM_BINS - 3) / (highest - lowest),
        )
        self._buffers.append(buffer)
        return buffer, np.empty(RUN, np.int32)

    def see(self, tile: Tile, workspace: tuple[CandidateBuffer, NDArray[np.int32]]) -> None:
        """Collect from a tile."""
        buffer, bins_of = workspace
        self.estimates.backend.collect(tile, buffer, bins_of)

    def next_batch(self) -> Collector:
        """Return this collector, which uses the same buffers for another batch of queries."""
        self._idle = list(self._buffers)
        return self

    @property
    def key(self) -> object:
        """Bins of the histogram, and error bound of the collected values."""
        return self.bins, self.error_bound

    def state(self) -> Arrays:
        """Return what is in the buffers."""
        arrays: Arrays = []
        for buffer in self._buffers:
            arrays += [buffer.values, buffer.rows, buffer.columns, buffer.cutoff, buffer.filled, buffer.histogram]
        return arrays

    def restore(self, arrays: Arrays) -> None:
        """Resume with these buffers."""
        empty, _ = self.new_workspace()
        self._buffers = []
        for first in range(0, len(arrays), 6):
            values, rows, columns, cutoff, filled, histogram = arrays[first : first + 6]
            buffer = empty._replace(
                values=values, rows=rows, columns=columns, cutoff=cutoff, filled=filled, histogram=histogram
            )
            self._buffers.append(buffer)
        self.next_batch()

    def collected(self) -> Collected:
        """Return all pairs that reach the highest cut-off of all buffers, and the pairs below it in other buffers."""
        cutoff = max((float(buffer.cutoff[0]) for buffer in self._buffers), default=self.cutoff)
        values: list[NDArray[Any]] = [buffer.values[: buffer.filled[0]] for buffer in self._buffers] or [np.empty(0)]
        none = [np.empty(0, np.int32)]
        queries = np.concatenate([buffer.rows[: buffer.filled[0]] for buffer in self._buffers] or none)
        items = np.concatenate([buffer.columns[: buffer.filled[0]] for buffer in self._buffers] or none)
        return Collected(
            cutoff if cutoff > BELOW_ALL else -np.inf,
            np.concatenate(values),
            queries,
            items,
            self.estimates.vectors.copies_of_pairs(queries, items),
        )

    def histogram(self) -> tuple[Floats, Ints]:
        """Return the lower edges of the bins, and how many estimates reach each.

        Bin 0 counts everything below the second edge, including masked pairs. Edges follow from `counting.bin_of`.
        """
        assert self.bins is not None
        lowest, highest = self.bins
        counts = np.zeros(HISTOGRAM_BINS, np.int64)
        for buffer in self._buffers:
            counts += buffer.histogram
        edges = lowest + np.arange(-1, HISTOGRAM_BINS - 1) * ((highest - lowest) / (HISTOGRAM_BINS - 3))
        reaching: Ints = np.cumsum(counts[::-1])[::-1]
        return np.asarray(edges, np.float64), reaching


class Wanted(NamedTuple):
    """How many of the highest negatives a question needs, to find its answer and to prove that no lower score is it."""

    needed: float
    proving: float


def plan_collector(estimates: Estimates, sample: Sample, wanted: Sequence[Wanted], scores: Floats) -> Collector:
    """Return a collector of the negatives that questions will need.

    Args:
        estimates: The tiles.
        sample: Estimates of a sample of negatives.
        wanted: The number of negatives that each question needs.
        scores: Scores of relevant pairs, ascending.
    """
    pairs = estimates.total_pairs
    processes = estimates.processes.count
    most_of_all = pairs if pairs <= EVERY else max(LEAST_CAPACITY, int(MOST_SHARE * pairs))
    # most pairs that this process collects
    room = max(2, min(estimates.layout.buffer_pairs, most_of_all) // processes)
    if pairs <= room:  # all pairs are collected; each thread has room for all pairs, since it may see all of them
        return Collector(estimates, -math.inf, (pairs + estimates.shape[0]) * estimates.threads)
    if not len(scores):
        return Collector(estimates, -math.inf, room)
    bins = range_of_binary_codes(estimates)
    if not len(sample.estimates):
        return Collector(estimates, -math.inf, room, bins or _histogram_range(scores, estimates))
    # (questions, 2) pairs of this process; a symmetric pair is two negatives, and is collected once
    pairs_wanted = np.array(wanted).reshape(-1, 2) / estimates.directions / processes
    has_room = pairs_wanted <= FILLED_SHARE * room
    planned = min(FILLED_SHARE * room, SLACK * pairs_wanted[has_room].max(initial=0))
    share_of_pairs = max(planned, min(room, LEAST_CAPACITY) // 4) * processes / max(1, pairs)
    cutoff = sample.score_reached_by(share_of_pairs * sample.total) - CUTOFF_OFFSET
    capacity = min(room, int(2 * planned) + LEAST_CAPACITY)
    # The histogram of binary codes is exact. For other rows, a histogram gives bounds to questions that may need more pairs
    # than are collected, and may save a second pass.
    if bins is None and not has_room.all():
        bins = _histogram_range(scores, estimates)
    return Collector(estimates, cutoff, capacity, bins)


def range_of_binary_codes(estimates: Estimates) -> tuple[float, float] | None:
    """Return the ends of a histogram with one bin for each score that two binary codes can have.

    Each score is in the middle of its bin.

    Returns:
        None for other rows, and for codes of more than `HISTOGRAM_BINS` - 4 bits.
    """
    vectors = estimates.vectors
    if not vectors.pairs.exact_estimates or vectors.scale.dim + 1 > HISTOGRAM_BINS - 3:
        return None
    # Each position at which two codes differ lowers their score by 2 units.
    lowest = -(vectors.scale.dim + 1) * vectors.scale.score_factor
    return lowest, lowest + (HISTOGRAM_BINS - 3) * 2 * vectors.scale.score_factor


def _histogram_range(scores: Floats, estimates: Estimates) -> tuple[float, float]:
    """Return the ends of a histogram. Its bins are wider than the rounding of the position of an estimate."""
    lowest = float(scores[0])
    highest = float(scores[-1])
    rounding = 2.0 ** (-49 if estimates.precision == "float64" else -20)
    largest = max(abs(lowest), abs(highest))
    width = max((highest - lowest) / HISTOGRAM_BINS, rounding * largest, 2.0**-100)
    return lowest - 2 * width, lowest + HISTOGRAM_BINS * width
