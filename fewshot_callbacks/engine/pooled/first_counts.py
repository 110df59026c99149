"""What is known of all pairs after a pass, regardless of the query: between which bounds the counts at each score lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.pooled.bins import ThresholdBins
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.pooled.intervals import (
    Bools,
    Floats,
    Ints,
    ScoreIntervals,
    distinct,
    from_above,
    inside_any,
    joined,
)
from fewshot_callbacks.engine.pooled.tally import Located
from fewshot_callbacks.engine.ranking_pass import RankingPass


class FirstCounts:
    """Bounds of the counts at each score, from what was observed during a pass.

    Args:
        ranking_pass: the pass; it makes relevant scores once more.
        counts: what was observed.
    """

    def __init__(self, ranking_pass: RankingPass, counts: PooledCounts) -> None:
        counts.reduce_over_processes()
        self.ranking_pass, self.matrix, self.scores = ranking_pass, ranking_pass.matrix, ranking_pass.matrix.scores
        self.positives, self.negatives, self.grid, self.floor = (
            counts.positives,
            counts.negatives,
            counts.grid,
            counts.floor,
        )
        self.highest = counts.highest
        # a negative's score lies at most so many bins away from its estimate's
        self._away = math.ceil(counts.error * counts.grid.scale + 0.05)
        self._bin_bounds = self._find_bin_bounds()

    def cells(self) -> ThresholdBins:
        """What is known: of each relevant key in some cells above the cut, and of the other cells of the histogram."""
        negatives = self.negative_pairs()
        known, (low_edges, high_edges, fewest, most) = self._known_bins(), self._bin_bounds
        keys, positives = distinct(*self._positives_in(known), in_runs=self.matrix.processes.count > 1)
        tp = from_above(self.positives)
        beyond = int(tp[known.stop]) if known.stop < self.grid.bins else 0
        fp, most_fp = self._reaching(keys)
        held = self.positives > 0
        under, over = held.copy(), held.copy()
        under[known.start :] = False
        over[: known.stop] = False

        def in_order(of_cells: NDArray[Any], of_keys: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([of_cells[under], of_keys, of_cells[over]])

        return ThresholdBins(
            low=in_order(low_edges, keys),
            high=in_order(high_edges, keys),
            single=in_order(np.zeros(self.grid.bins, bool), fp == most_fp),
            positives=in_order(self.positives, positives),
            tp=in_order(tp, from_above(positives) + beyond),
            fewest_fp=in_order(fewest, fp),
            most_fp=np.minimum(in_order(most, most_fp), negatives),
            tied=in_order(np.zeros(self.grid.bins, np.int64), np.zeros(len(keys), np.int64)),
            relevant=int(tp[0]),
            negatives=negatives,
        )

    def locate(self, rank: int) -> Located:
        """Between which keys the negative lies that `rank - 1` others follow from above."""
        low_edges, high_edges, fewest, most = self._bin_bounds
        possible = np.flatnonzero((fewest < rank) & (most >= rank))
        return Located(float(low_edges[possible[0]]), float(high_edges[possible[-1]]))

    def _find_bin_bounds(self) -> tuple[Floats, Floats, Ints, Ints]:
        away, known = self._away, self._known_bins()
        accepted = from_above(self.negatives)
        padded = np.pad(accepted, (away, away + 1))
        padded[:away] = accepted[0]
        fewest, most = padded[2 * away + 1 :], padded[: -2 * away - 1]
        # the arithmetic of `cell_of` rounds to float32, by less than a hundredth of a cell
        edges = self.grid.edge(1) + (np.arange(self.grid.bins) - 1) / self.grid.scale
        low_edges, high_edges = edges - 0.01 / self.grid.scale, edges + 1.01 / self.grid.scale
        low_edges[0] = min(low_edges[0], self.scores.score_range[0])
        high_edges[-1] = max(high_edges[-1], self.scores.score_range[1])
        if self.floor > -math.inf:
            most = np.where(low_edges - 1 / self.grid.scale <= self.floor, self.negative_pairs(), most)
        if math.isfinite(self.highest.cut):
            reaching, _ = self._reaching(np.array([self.highest.exact_above]))
            fewest = np.where(np.arange(self.grid.bins) < known.start - 1, np.maximum(fewest, reaching), fewest)
        return low_edges, high_edges, fewest, most

    def _known_bins(self) -> range:
        """Cells in which all negatives were collected, as many as the budget allows to list the relevant keys of."""
        if not math.isfinite(self.highest.cut):
            return range(self.grid.bins, self.grid.bins)
        start = int(self.grid.bin_of(np.array([self.highest.exact_above]))[0]) + 1
        listed = np.cumsum(self.positives[start:])
        most = self.matrix.free_bytes // self.matrix.options.listed_bytes
        return range(start, start + int(np.searchsorted(listed, most, side="right")))

    def _positives_in(self, cells: range) -> tuple[Floats, Ints | None]:
        """The keys of the relevant pairs in some cells."""
        if not cells:
            return np.empty(0), None
        interval = np.array([[self.grid.edge(cells.start) - 1 / self.grid.scale, math.inf]])  # and rounding

        def inside(keys: Floats) -> Bools:
            place = self.grid.bin_of(keys)
            chosen: Bools = (place >= cells.start) & (place < cells.stop)
            return chosen

        return self._chosen(interval, inside)

    def _chosen(self, intervals: ScoreIntervals, inside: Callable[[Floats], Bools]) -> tuple[Floats, Ints | None]:
        """Of the relevant pairs in some intervals those whose keys are inside, in all processes."""
        parts = []
        for keys, weights in self.ranking_pass.thresholds.relevant_scores(intervals):
            values = keys.cpu().numpy()
            chosen = inside(values)
            parts.append((values[chosen], None if weights is None else weights.cpu().numpy()[chosen]))
        own = joined(parts)
        if own[1] is None and self.matrix.processes.count > 1:
            own = np.sort(own[0]), None  # each its own; see `distinct`
        return joined(self.matrix.processes.gather(own))

    def negative_pairs(self) -> int:
        """All pairs that are neither relevant nor excluded."""
        if self.matrix.candidates.across_classes:
            return int(self.negatives[1:].sum())
        return self.matrix.everyone.pairs - self.matrix.everyone.relevant_pairs

    def share_within(self, intervals: ScoreIntervals) -> float:
        """About which share of the negatives lies inside some intervals."""
        below = np.append(0, np.cumsum(self.negatives))
        low, high = self.grid.bin_of(intervals).T
        total = max(1, int(below[-1] - below[1]))
        return min(1.0, float((below[high + 1] - below[low]).sum() / total))

    def accepted(self, key: float) -> tuple[int, int] | None:
        """True and false positives at a threshold; None if another look is needed."""
        if key == math.inf:
            return 0, 0
        if self.highest.exact_above <= key:
            fewest, most = (int(count[0]) for count in self._reaching(np.array([key])))
        else:  # no negative lies as high, or nothing is said
            reaching = max(0, int(self.grid.bin_of(np.array([key]))[0]) - self._away)
            fewest, most = 0, int(self.negatives[reaching:].sum()) if key > self.floor + 2 / self.grid.scale else 1
        if fewest != most:
            return None
        keys, amount = self.positives_within(np.array([[key, math.inf]]))
        return int(len(keys) if amount is None else amount.sum()), fewest

    def distinct_within(self, intervals: ScoreIntervals, most: int) -> Floats | None:
        """The distinct keys of the relevant pairs inside some intervals, ascending; None if there are more than so many."""
        found = np.empty(0)
        if not len(intervals):
            return found
        for keys, _ in self.ranking_pass.thresholds.relevant_scores(intervals):
            if len(found) > most:  # every process goes on to the end
                continue
            values = keys.cpu().numpy()
            found = distinct(np.concatenate([found, values[inside_any(values, intervals)]]), None)[0]
        if self.matrix.processes.largest([float(len(found))])[0] > most:
            return None
        found = distinct(self.matrix.processes.joined(found), None)[0]
        return None if len(found) > most else found

    def positives_within(self, intervals: ScoreIntervals) -> tuple[Floats, Ints | None]:
        """The keys of the relevant pairs inside some intervals."""
        if not len(intervals):
            return np.empty(0), None
        return self._chosen(intervals, lambda keys: inside_any(keys, intervals))

    def _reaching(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return how many negatives at least, and at most, reach each of these scores, from `exact_above` on."""
        fewest, most = self.matrix.processes.summed(self.highest.bounds(scores))
        return fewest, most
