"""The first look at all pairs, whatever their query: a histogram, and the highest negatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle, block_positives
from fewshot_callbacks.engine.pooled.bins import ThresholdBins
from fewshot_callbacks.engine.pooled.highest import TopNegatives
from fewshot_callbacks.engine.pooled.intervals import (
    Bools,
    Floats,
    Ints,
    ScoreIntervals,
    distinct,
    from_above,
    histogram,
    inside_any,
    joined,
)
from fewshot_callbacks.engine.pooled.tally import Located
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.ranking_pass import RankingPass

if TYPE_CHECKING:
    from fewshot_callbacks.engine.cpu.count_kernels import Pooled
    from fewshot_callbacks.engine.pytorch.tiles import Tile, TorchTiles

BINS = 2**15
CELL_BYTES = 160
"""What a cell of the histogram takes while the operating points are found: three counters, and all that is known of it."""
SHARE_OF_CELLS = 0.25
"""Share of the budget for these."""
COLLECTED_SHARE = 0.05
"""No more than this share of all pairs is collected."""
SCREENED_SHARE = 0.001
"""A screen looks closer at no more than this share of all pairs for the histogram's sake."""
SLACK = 1.5
"""A sample may be off by this factor in how many negatives will be wanted."""
LISTED_BYTES = 400
"""What one relevant key costs while it is listed with all that is known of it, with room to spare."""
FEW_COUNTS = 30
"""Fewer pairs of a sample than these tell nothing."""


@dataclass(frozen=True)
class PooledRequest:
    """What is asked of all pairs, in scores."""

    precisions: Sequence[float] = ()
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """the smallest and the largest threshold that may be chosen for recall at a fixed precision"""
    thresholds: Sequence[float] = ()
    """fixed thresholds at which precision, recall and F1 are asked"""
    false_match_rates: Sequence[float] = ()
    equal_error_rate: bool = False
    average_precision: bool = False
    """whether the area under the precision-recall curve is wanted exactly; bounds of it are had anyway"""


class PooledCounts:
    """The first look: a histogram of all pairs, and the negatives with the highest estimates.

    A negative's key lies in the cell of its estimate or in one beside it: a cell is at least twice as wide as the error.

    Args:
        walk: the pairs.
        request: what will be asked.
        capacity: how many pairs may be held.
    """

    def __init__(self, walk: RankingPass, request: PooledRequest, capacity: int) -> None:
        self.walk, self.request, self.capacity = walk, request, capacity
        self._lay(*walk.scores.key_range, walk.scores.largest_error(Precision.FLOAT32))
        self.highest = TopNegatives(walk, 0.0)
        self.floor = -math.inf
        self._expected_floor = self._expected_cut = math.inf
        self.processes = walk.processes
        self.holds_positives = walk.relevant_pairs * 40 <= walk.free_bytes * self.processes.count
        self.screened = False
        self._coarsest = Precision.FLOAT32
        self._bounds: tuple[Floats, Floats, Ints, Ints] | None = None

    def _lay(self, low: float, high: float, error: float) -> None:
        """Cut a range of keys into cells. The first and the last hold what lies beyond, too."""
        most = min(BINS, int(self.walk.free_bytes * SHARE_OF_CELLS / CELL_BYTES))
        bins = max(4, min(most, int((high - low) / (2.5 * error)) if error else most))
        # spare cells at either end, so that what matters is in none that has no neighbour
        width = max((high - low) / bins, 3 * error, 1e-300)
        self.origin, self.scale, self.cells_count = low - 3 * width, 1 / width, bins + 8
        self.positives = np.zeros(self.cells_count, np.int64)
        self.negatives = np.zeros(self.cells_count, np.int64)

    def narrow(self, low: float, high: float) -> None:
        """Nearly all keys lie in this range, and float64 products will tell them apart: lay finer cells there."""
        least, most = self.walk.scores.key_range
        spare = 0.05 * (high - low)
        self._lay(max(least, low - spare), min(most, high + spare), self.walk.scores.largest_error(Precision.FLOAT64))

    # ----------------------------------------------------------------------------------------------------------- looking

    def cell_of(self, keys: Floats) -> Ints:
        """The kernel's own arithmetic: monotone in the key."""
        with np.errstate(over="ignore"):  # infinity is clipped, as in the kernel
            place = ((keys - self.origin) * self.scale).astype(np.float32)
        return (np.clip(place, np.float32(-1), np.float32(self.cells_count - 2)) + np.float32(1)).astype(np.int64)

    def relevant(self, keys: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None) -> None:
        """Count the keys of relevant pairs."""
        values = keys.cpu().numpy()
        amount = None if weights is None else weights.cpu().numpy()
        self.positives += histogram(self.cell_of(values), amount, self.cells_count)

    def tile(self, _: TorchTiles, tile: Tile) -> None:
        """Count the estimates of a tile of negatives."""
        self._coarsest = min(self._coarsest, Precision(tile.precision))
        place = ((tile.estimates - self.origin) * self.scale).float().clamp_(-1, self.cells_count - 2) + 1
        # the first bin is for what is no candidate; a coarse estimate of the lowest keys may fall short of the second
        place = place.long().clamp_(min=1).masked_fill_(tile.estimates == -torch.inf, 0)
        if self.walk.repeats:
            weights = (tile.rows.weight[:, None] * tile.columns.weight[None, :]).view(-1)
            counts = torch.zeros(self.cells_count, dtype=torch.int64, device=place.device)
            counts.index_add_(0, place.view(-1), weights)
        else:
            counts = torch.bincount(place.view(-1), minlength=self.cells_count)
        self.negatives += counts.cpu().numpy() * (2 if tile.both else 1)

    def pooled(self, _: RankingPass, threads: int) -> Pooled:
        """An empty record for one thread."""
        from fewshot_callbacks.engine.cpu.count_kernels import Pooled  # noqa: PLC0415 - needs numba

        screened = self.walk.precision == Precision.HALF
        capacity = max(1, self.capacity // threads) if math.isfinite(self._expected_cut) else 1
        return Pooled(
            np.zeros(self.cells_count, np.int64),
            self.origin,
            self.scale,
            self._expected_floor if screened or self.walk.precision is None else -math.inf,
            self._expected_cut,
            np.empty(capacity),
            np.empty(capacity, np.int32),
            np.empty(capacity, np.int32),
            np.empty(capacity if self.walk.repeats else 0, np.int64),
            np.zeros(3, np.int64),
        )

    def between(self, record: Pooled) -> Pooled:
        """Make room where a record has become too full: the highest half stays."""
        filled = int(record.filled[0])
        capacity = len(record.values)
        if filled <= capacity // 2:
            return record
        if filled > capacity:  # some were lost: nothing below the highest can be vouched for
            record.filled[0] = 0
            return record._replace(cut=math.inf)
        cut = float(np.partition(record.values[:filled], filled // 2)[filled // 2])
        keep = record.values[:filled] >= cut
        kept = int(keep.sum())
        if kept > capacity // 2 + capacity // 4:  # equal estimates by the thousand
            record.filled[0] = 0
            return record._replace(cut=math.inf)
        for array in (record.values, record.rows, record.columns, record.weights):
            if len(array):
                array[:kept] = array[:filled][keep]
        record.filled[0] = kept
        return record._replace(cut=cut)

    def absorb(self, walk: RankingPass, rectangle: ScoreRectangle, record: Pooled) -> None:
        """Take what a thread has recorded in a rectangle."""
        record = self.between(record)
        self.negatives += record.histogram
        self.screened = walk.precision == Precision.HALF
        if walk.precision == Precision.FLOAT64:
            self._coarsest = Precision.FLOAT64
        self.floor = self._expected_floor if self.screened else -math.inf
        # of what a screen lets pass, the product of the rounded operands is recorded
        self.highest.error = walk.scores.largest_error(
            Precision.FLOAT64_OF_FLOAT32 if self.screened else self._coarsest
        )
        self.highest.add(record, rectangle.place)
        if len(self.highest) > self.capacity:  # many blocks, and a sample that was wrong
            self.highest.discard()
            self._expected_cut = math.inf

    def expect(self, walk: RankingPass, record: Pooled, rows: Block, columns: Block) -> None:
        """Foretell from a sample which negatives will be wanted, so that they are collected on the way."""
        self._expected_floor = self._expected_cut = math.inf
        share = int(rows.weight.sum()) * int(columns.weight.sum()) / walk.pairs
        keys, weights = block_positives(rows, weighted=walk.repeats)
        chosen = int(rows.weight.sum()) / walk.queries * walk.sampled_share
        amount = None if weights is None else weights.numpy()
        positives = histogram(self.cell_of(keys.numpy()), amount, self.cells_count) / chosen
        negatives = record.histogram.astype(np.float64)
        negatives[0] = 0
        accepted = from_above(negatives) / share
        wanted = self._wanted(from_above(positives), accepted, float(negatives.sum()) / share)
        budget = min(COLLECTED_SHARE * walk.pairs, self.processes.count * self.capacity / 2 * (2 if walk.both else 1))
        needed = max((SLACK * amount for amount in wanted if SLACK * amount <= budget), default=0.0)
        if needed and self.holds_positives:
            needed = max(needed, FEW_COUNTS / share)
            # two cells lower, since an estimate may be too low, and so may the key's
            self._expected_cut = self._edge(int(np.count_nonzero(accepted >= needed)) - 3)
            for threshold in self.request.thresholds:
                key = walk.scores.to_key(threshold)
                if accepted[int(self.cell_of(np.array([key]))[0])] * SLACK <= budget:
                    self._expected_cut = min(self._expected_cut, key - 2 / self.scale)
        screened = max(SCREENED_SHARE * walk.pairs, needed)
        self._expected_floor = min(self._edge(int(np.count_nonzero(accepted >= screened))), self._expected_cut)

    def _wanted(self, tp: Floats, fp: Floats, negatives: float) -> list[float]:
        """How many negatives each point of the request accepts, by the counts of a sample."""
        relevant = tp[0]
        if not relevant:
            return []
        f1 = 2 * tp / (tp + fp + relevant)
        # near its maximum F1 is flat: the lowest of all thresholds that come close
        wanted = [float(fp[np.flatnonzero(f1 >= 0.95 * f1.max())[0]])]
        precision = tp / np.maximum(tp + fp, 1e-9)
        for asked in self.request.precisions:
            reaching = np.flatnonzero((precision >= asked) & (tp > 0))
            if len(reaching):  # those above the smallest such relevant key, and more until the precision is lost
                wanted += [float(fp[reaching[0]]), min(float(tp[reaching[0]]) * (1 / asked - 1), negatives)]
        wanted += [rate * negatives for rate in self.request.false_match_rates]
        if self.request.equal_error_rate and negatives:
            crossing = np.flatnonzero(1 - tp / relevant >= fp / negatives)
            wanted += [float(fp[crossing[0]])] if len(crossing) else []
        return wanted

    def _edge(self, cell: int) -> float:
        """Where a cell begins."""
        return self.origin + (max(cell, 1) - 1) / self.scale

    @property
    def expectations(self) -> tuple[Any, ...]:
        """What a sample has foretold, for `expecting` of another process."""
        return self.origin, self.scale, self.cells_count, self._expected_floor, self._expected_cut

    def expecting(self, expectations: tuple[Any, ...]) -> None:
        """Look out for what a sample has foretold to another process."""
        self.origin, self.scale, self.cells_count, self._expected_floor, self._expected_cut = expectations
        self.positives = np.zeros(self.cells_count, np.int64)
        self.negatives = np.zeros(self.cells_count, np.int64)

    # ---------------------------------------------------------------------------------------------------------- deciding

    def reduce_over_processes(self) -> None:
        """All pairs have passed: know what every process has seen of them."""
        self.positives = self.processes.summed(self.positives)
        self.negatives = self.processes.summed(self.negatives)
        self._coarsest = Precision(-int(self.processes.largest([-self._coarsest])[0]))
        self.highest.reduce_over_processes()

    def cells(self) -> ThresholdBins:
        """What is known: of each relevant key in some cells above the cut, and of the other cells of the histogram."""
        negatives = self.negative_pairs()
        known, (low_edges, high_edges, fewest, most) = self._known_cells(), self._cell_bounds()
        keys, positives = distinct(*self._positives_in(known), in_runs=self.processes.count > 1)
        tp = from_above(self.positives)
        beyond = int(tp[known.stop]) if known.stop < self.cells_count else 0
        fp, most_fp = self.highest.bounds(keys)
        held = self.positives > 0
        under, over = held.copy(), held.copy()
        under[known.start :] = False
        over[: known.stop] = False

        def in_order(of_cells: NDArray[Any], of_keys: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([of_cells[under], of_keys, of_cells[over]])

        return ThresholdBins(
            low=in_order(low_edges, keys),
            high=in_order(high_edges, keys),
            single=in_order(np.zeros(self.cells_count, bool), fp == most_fp),
            positives=in_order(self.positives, positives),
            tp=in_order(tp, from_above(positives) + beyond),
            fewest_fp=in_order(fewest, fp),
            most_fp=np.minimum(in_order(most, most_fp), negatives),
            tied=in_order(np.zeros(self.cells_count, np.int64), np.zeros(len(keys), np.int64)),
            relevant=int(tp[0]),
            negatives=negatives,
        )

    def locate(self, rank: int) -> Located:
        """Between which keys the negative lies that `rank - 1` others follow from above."""
        low_edges, high_edges, fewest, most = self._cell_bounds()
        possible = np.flatnonzero((fewest < rank) & (most >= rank))
        return Located(float(low_edges[possible[0]]), float(high_edges[possible[-1]]))

    def _cell_bounds(self) -> tuple[Floats, Floats, Ints, Ints]:
        """Where each cell begins and ends, and how many negatives a threshold in it accepts at least, and at most."""
        if self._bounds is None:
            self._bounds = self._find_cell_bounds()
        return self._bounds

    def _find_cell_bounds(self) -> tuple[Floats, Floats, Ints, Ints]:
        away, known = self._away(), self._known_cells()
        accepted = from_above(self.negatives)
        padded = np.pad(accepted, (away, away + 1))
        padded[:away] = accepted[0]
        fewest, most = padded[2 * away + 1 :], padded[: -2 * away - 1]
        # the arithmetic of `cell_of` rounds to float32, by less than a hundredth of a cell
        edges = self._edge(1) + (np.arange(self.cells_count) - 1) / self.scale
        low_edges, high_edges = edges - 0.01 / self.scale, edges + 1.01 / self.scale
        low_edges[0] = min(low_edges[0], self.walk.scores.key_range[0])
        high_edges[-1] = max(high_edges[-1], self.walk.scores.key_range[1])
        if self.screened:
            most = np.where(low_edges - 1 / self.scale <= self.floor, self.negative_pairs(), most)
        if math.isfinite(self.highest.cut):
            reaching, _ = self.highest.bounds(np.array([self.highest.exact_above]))
            fewest = np.where(np.arange(self.cells_count) < known.start - 1, np.maximum(fewest, reaching), fewest)
        return low_edges, high_edges, fewest, most

    def _away(self) -> int:
        """A negative's key lies at most so many cells away from its estimate's."""
        return math.ceil(self.walk.scores.largest_error(self._coarsest) * self.scale + 0.05)

    def _known_cells(self) -> range:
        """Cells in which all negatives were collected, as many as the budget allows to list the relevant keys of."""
        if not math.isfinite(self.highest.cut):
            return range(self.cells_count, self.cells_count)
        start = int(self.cell_of(np.array([self.highest.exact_above]))[0]) + 1
        listed = np.cumsum(self.positives[start:])
        most = self.walk.free_bytes // LISTED_BYTES
        return range(start, start + int(np.searchsorted(listed, most, side="right")))

    def _positives_in(self, cells: range) -> tuple[Floats, Ints | None]:
        """The keys of the relevant pairs in some cells."""
        if not cells:
            return np.empty(0), None
        interval = np.array([[self._edge(cells.start) - 1 / self.scale, math.inf]])  # and what the arithmetic may round

        def inside(keys: Floats) -> Bools:
            place = self.cell_of(keys)
            chosen: Bools = (place >= cells.start) & (place < cells.stop)
            return chosen

        return self._chosen(interval, inside)

    def _chosen(self, intervals: ScoreIntervals, inside: Callable[[Floats], Bools]) -> tuple[Floats, Ints | None]:
        """Of the relevant pairs in some intervals those whose keys are inside, in all processes."""
        parts = []
        for keys, weights in self.walk.positives(intervals):
            values = keys.cpu().numpy()
            chosen = inside(values)
            parts.append((values[chosen], None if weights is None else weights.cpu().numpy()[chosen]))
        own = joined(parts)
        if own[1] is None and self.processes.count > 1:
            own = np.sort(own[0]), None  # each its own; see `distinct`
        return joined(self.processes.gather(own))

    def negative_pairs(self) -> int:
        """All pairs that are neither relevant nor excluded."""
        if self.walk.candidates.across_classes:
            return int(self.negatives[1:].sum())
        return self.walk.pairs - self.walk.relevant_pairs

    def share_within(self, intervals: ScoreIntervals) -> float:
        """About which share of the negatives lies inside some intervals."""
        below = np.append(0, np.cumsum(self.negatives))
        low, high = self.cell_of(intervals).T
        total = max(1, int(below[-1] - below[1]))
        return min(1.0, float((below[high + 1] - below[low]).sum() / total))

    def accepted(self, key: float) -> tuple[int, int] | None:
        """True and false positives at a threshold; None if another look is needed."""
        if key == math.inf:
            return 0, 0
        if self.highest.exact_above <= key:
            fewest, most = (int(count[0]) for count in self.highest.bounds(np.array([key])))
        else:  # no negative lies as high, or nothing is said
            reaching = max(0, int(self.cell_of(np.array([key]))[0]) - self._away())
            fewest, most = 0, int(self.negatives[reaching:].sum()) if key > self.floor + 2 / self.scale else 1
        if fewest != most:
            return None
        keys, amount = self.positives_within(np.array([[key, math.inf]]))
        return int(len(keys) if amount is None else amount.sum()), fewest

    def distinct_within(self, intervals: ScoreIntervals, most: int) -> Floats | None:
        """The distinct keys of the relevant pairs inside some intervals, ascending; None if there are more than so many."""
        found = np.empty(0)
        if not len(intervals):
            return found
        for keys, _ in self.walk.positives(intervals):
            if len(found) > most:  # every process goes on to the end
                continue
            values = keys.cpu().numpy()
            found = distinct(np.concatenate([found, values[inside_any(values, intervals)]]), None)[0]
        if self.processes.largest([float(len(found))])[0] > most:
            return None
        found = distinct(self.processes.joined(found), None)[0]
        return None if len(found) > most else found

    def positives_within(self, intervals: ScoreIntervals) -> tuple[Floats, Ints | None]:
        """The keys of the relevant pairs inside some intervals."""
        if not len(intervals):
            return np.empty(0), None
        return self._chosen(intervals, lambda keys: inside_any(keys, intervals))
