"""The first stage of the pooled counts: what a pass over all pairs proves of the counts at each score."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.pooled.bins import ScoreHistogram, ThresholdBins
from fewshot_callbacks.engine.pooled.bounds import BinBounds, CountBounds
from fewshot_callbacks.engine.pooled.highest import exact_scores_of
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.pooled.intervals import Bools, Floats, Ints, distinct, from_above, merged
from fewshot_callbacks.engine.pooled.recount import Recount
from fewshot_callbacks.engine.pooled.refine import OpenQuestions, plan_recount
from fewshot_callbacks.engine.pooled.relevant_pairs import RelevantPairs
from fewshot_callbacks.engine.pooled.tally import Located
from fewshot_callbacks.engine.ranking_pass import RankingPass
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.engine.scores.products import ScoreTiles


class FirstCounts:
    """Bounds of the counts of all pairs at each score; every call is collective.

    Args:
        ranking_pass: The pass; it makes relevant scores, or all, once more.
        observer: What observes it.
    """

    bounds: CountBounds
    """what the pass proves, when it has ended"""
    _of_bins: BinBounds

    def __init__(self, ranking_pass: RankingPass, observer: PooledCounts) -> None:
        self.ranking_pass, self._observer = ranking_pass, observer
        ranking_pass.expect_scans()

    def run(self) -> Iterator[RankBlock]:
        """Run the pass, and yield its ranks; all pairs are counted when it has ended."""
        yield from self.ranking_pass.run(self._observer)
        self.bounds = self._observer.reduce_over_processes()
        self._of_bins = self.bounds.of_bins()

    @property
    def scores(self) -> ScoreTiles:
        """The scores of the vectors that this process holds."""
        return self.ranking_pass.matrix.scores

    @property
    def relevant(self) -> RelevantPairs:
        """The scores of the relevant pairs."""
        return RelevantPairs(self.ranking_pass.thresholds.relevant_scores, self.ranking_pass.matrix.processes)

    def bins(self, closer: ThresholdBins | None = None) -> ThresholdBins:
        """Return what is known: of each relevant score in some bins above the cut, and of the other bins.

        Args:
            closer: List the relevant scores in these bins as well, as far as the budget allows.
        """
        bounds, listed = self.bounds, self.listed_bins(closer)
        grid, of_bins = bounds.grid, self._of_bins
        scores, positives = distinct(*self._relevant_in(listed), in_runs=bounds.processes.count > 1)
        number, tp = grid.bin_of(scores), from_above(bounds.positives)
        not_listed = tp - from_above(bounds.positives * listed)
        low = int(np.searchsorted(scores, bounds.highest.exact_above))
        fp, most_fp = np.concatenate([bounds.at(scores[:low]), bounds.reaching(scores[low:])], axis=1)
        others = (bounds.positives > 0) & ~listed
        order = np.argsort(np.concatenate([np.flatnonzero(others), number]), kind="stable")

        def in_order(in_bins: NDArray[Any], at_scores: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([in_bins[others], at_scores])[order]

        return ThresholdBins(
            low=in_order(of_bins.low, scores),
            high=in_order(of_bins.high, scores),
            single=in_order(np.zeros(grid.bins, bool), fp == most_fp),
            positives=in_order(bounds.positives, positives),
            tp=in_order(tp, from_above(positives) + not_listed[number]),
            fewest_fp=in_order(of_bins.fewest, fp),
            most_fp=np.minimum(in_order(of_bins.most, most_fp), bounds.negative_pairs),
            tied=in_order(np.zeros(grid.bins, np.int64), np.zeros(len(scores), np.int64)),
            relevant=int(tp[0]),
            negatives=bounds.negative_pairs,
        )

    def histogram(self) -> ScoreHistogram:
        """Return all pairs by their scores."""
        return self.bounds.histogram()

    def accepted(self, score: float) -> tuple[int, int] | None:
        """Return the true and false positives at a threshold; None if the pairs have to be counted for it."""
        if score == math.inf:
            return 0, 0
        negatives = self.bounds.accepted(score)
        if negatives is None:
            return None
        scores, weights = self.relevant.within(np.array([[score, math.inf]]))
        return int(len(scores) if weights is None else weights.sum()), negatives

    def locate(self, rank: int) -> Located:
        """Return between which scores the negative lies that `rank - 1` others follow from above."""
        return self._of_bins.locate(rank)

    def count_exactly(self, questions: OpenQuestions) -> tuple[Recount, bool]:
        """Count all pairs exactly at the thresholds that are still open.

        Returns:
            The counts, and whether all pairs had to be scanned.
        """
        ranking_pass, highest = self.ranking_pass, self.bounds.highest
        recount = plan_recount(ranking_pass.matrix, self.bounds, self.relevant, questions)
        for scores, weights in self.relevant.scores(recount.exact) if len(recount.exact) else ():
            recount.relevant(scores, weights)
        scanned = bool(recount.thresholds[0] < highest.exact_above)
        if scanned:
            ranking_pass.scan(recount)
        else:
            open_pairs = highest.count(recount.negatives)
            for position, tiles in ranking_pass.revisit_tiles(bool(open_pairs)):
                for pairs in open_pairs.get(position, []):
                    exact = exact_scores_of(tiles, pairs, ranking_pass.matrix.threads)
                    recount.negatives.add(exact, pairs.weights)
                    recount.negatives.note(exact, pairs.weights)
                del tiles  # free the visiting vectors before the next exchange
        recount.reduce_over_processes()
        return recount, scanned

    def listed_bins(self, closer: ThresholdBins | None = None) -> Bools:
        """Return the bins whose relevant scores are listed, as many as the budget allows.

        Those whose negatives have all been collected come first, then the requested ones.
        """
        bounds, matrix = self.bounds, self.ranking_pass.matrix
        listed = np.arange(bounds.grid.bins) >= bounds.complete_from
        most = matrix.free_bytes // matrix.options.listed_bytes
        listed &= np.cumsum(bounds.positives * listed) <= most
        if closer is not None:
            asked = np.zeros(len(listed), bool)
            asked[bounds.grid.bin_of((closer.low + closer.high) / 2)] = True
            asked &= ~listed
            listed |= asked & (np.cumsum(bounds.positives * asked) <= most - bounds.positives[listed].sum())
        return listed

    def _relevant_in(self, bins: Bools) -> tuple[Floats, Ints | None]:
        """Return the scores of the relevant pairs in some bins."""
        grid, first = self.bounds.grid, np.flatnonzero(bins & ~np.append(False, bins[:-1]))
        last = np.flatnonzero(bins & ~np.append(bins[1:], False))
        low, high = (grid.origin + (ends - 1) / grid.scale for ends in (first, last + 1))
        low[first == 0], high[last == grid.bins - 1] = -math.inf, math.inf
        intervals = merged(low - 1 / grid.scale, high + 1 / grid.scale)  # rounding
        return self.relevant.chosen(intervals, lambda scores: bins[grid.bin_of(scores)])
