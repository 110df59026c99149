"""Exact counts of relevant and irrelevant pairs at given thresholds: the second stage, where the first leaves much open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pooled.bins import ThresholdBins
from fewshot_callbacks.engine.pooled.bounds import CountBounds
from fewshot_callbacks.engine.pooled.intervals import Floats, Ints, ScoreIntervals, inside_any, merged
from fewshot_callbacks.engine.pooled.tally import Located, ThresholdCounts
from fewshot_callbacks.engine.pytorch.count import Counts, count_tile
from fewshot_callbacks.engine.pytorch.tile import Tile

THRESHOLD_BYTES, THRESHOLD_THREAD_BYTES = 250, 16
"""What one threshold takes: two counters, the table that places estimates, what is known of it; and of each thread."""
SHARE_OF_THRESHOLDS = 0.4
"""Share of the budget for these."""


class Recount:
    """Counts relevant pairs and negatives against a list of thresholds, each exactly.

    Args:
        matrix: The pairs.
        thresholds: Scores, ascending.
        intervals: Where the relevant scores among them lie.
        others: Which of them lie elsewhere, perhaps.
        sought: Where negatives of some ranks lie; at the thresholds inside, relevant pairs are not counted.
        bounds: What the first stage has proved.
    """

    def __init__(
        self,
        matrix: ScoreMatrix,
        thresholds: Floats,
        intervals: ScoreIntervals,
        others: Sequence[float],
        sought: ScoreIntervals,
        bounds: CountBounds,
    ) -> None:
        self.matrix, self.intervals, self._bounds = matrix, intervals, bounds
        points = np.sort(np.asarray(others, np.float64))
        self.thresholds = np.unique(np.concatenate([thresholds, intervals.ravel(), points, sought.ravel()]))
        self.exact = _merged(intervals, np.stack([points, points], axis=1))
        """where the score of a relevant pair has to be known to tell which of the thresholds it reaches"""
        self._counted = _merged(intervals, sought)
        most = most_thresholds(matrix) // matrix.processes.count
        self.positives = ThresholdCounts(self.thresholds)
        self.negatives = ThresholdCounts(self.thresholds, _merged(sought), most)

    def relevant(self, scores: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None) -> None:
        """Count the exact scores of relevant pairs."""
        self.positives.add(scores.cpu().numpy(), None if weights is None else weights.cpu().numpy())

    def reduce_over_processes(self) -> None:
        """Sum the counts over all processes. Call it once, after all pairs."""
        for counts in (self.positives, self.negatives):
            counts.reduce_over_processes(self.matrix.processes)

    def share_near(self, margin: float) -> float:
        """Estimate the share of all pairs that lies no further from some threshold than a margin."""
        wider = merged(self._counted[:, 0] - margin, self._counted[:, 1] + margin)
        share = self._bounds.share_within(wider)
        length = float((wider[:, 1] - wider[:, 0]).sum())
        return share * min(1.0, 2 * margin * len(self.thresholds) / length) if length else share

    def add(self, hits: Ints, ties: Ints) -> None:
        """Take the counters of a thread, as in `pytorch.count.Counts`."""
        self.negatives.add_counters(hits, ties)

    def tile(self, tile: Tile) -> None:
        """Count a tile of negatives, made in PyTorch: as the candidates of one query whose thresholds are these."""
        device = tile.estimates.device
        counts = Counts.zeros(torch.from_numpy(self.thresholds).to(device)[None])
        height, width = tile.estimates.shape
        error = tile.error.max()[None]
        for start in range(0, height, 64):
            part = tile.estimates[start : start + 64].reshape(1, -1)
            weights = None
            if self.matrix.repeats:
                weights = (tile.rows.weight[start : start + 64, None] * tile.columns.weight).view(-1)
            zero, opened = count_tile(counts, part, error, weights)
            if len(opened):
                scores = tile.exact_scores(start + opened // width, opened % width)
                counts.add_scores(zero, scores, None if weights is None else weights[opened])
                self._note(scores, None if weights is None else weights[opened], both=tile.both)
        factor = 2 if tile.both else 1
        self.add(factor * counts.hits[0].cpu().numpy(), factor * counts.ties[0].cpu().numpy())

    def _note(self, scores: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None, *, both: bool) -> None:
        if len(self.negatives.noting):
            amount = torch.ones_like(scores, dtype=torch.int64) if weights is None else weights
            self.negatives.note(scores.cpu().numpy(), (2 if both else 1) * amount.cpu().numpy())

    def bins(self) -> ThresholdBins:
        """Return each score that relevant pairs have, and each gap between thresholds that holds some."""
        tp, tp_tied = self.positives.accepted()
        fp, fp_tied = self.negatives.accepted()
        between = self.positives.between()
        gaps = np.flatnonzero(between[1:-1] > 0) if len(between) > 2 else np.empty(0, np.int64)
        own = np.flatnonzero(tp_tied > 0)
        at = self.thresholds
        own = own[inside_any(at[own], self.intervals)]
        gaps = gaps[inside_any(np.nextafter(at[gaps], np.inf), self.intervals)] if len(gaps) else gaps
        low = np.concatenate([at[own], np.nextafter(at[gaps], np.inf)])
        order = np.argsort(low, kind="stable")
        return ThresholdBins(
            low=low[order],
            high=np.concatenate([at[own], np.nextafter(at[gaps + 1], -np.inf)])[order],
            single=np.concatenate([np.ones(len(own), bool), np.zeros(len(gaps), bool)])[order],
            positives=np.concatenate([tp_tied[own], between[1:-1][gaps] if len(gaps) else gaps])[order],
            tp=np.concatenate([tp[own], tp[gaps] - tp_tied[gaps]])[order],
            fewest_fp=np.concatenate([fp[own], fp[gaps + 1] if len(gaps) else gaps])[order],
            most_fp=np.concatenate([fp[own], fp[gaps] - fp_tied[gaps]])[order],
            tied=np.concatenate([fp_tied[own], np.zeros(len(gaps), np.int64)])[order],
            relevant=self.positives.total,
            negatives=self._bounds.negative_pairs,  # those below all thresholds have not been counted here
        )

    def accepted(self, score: float) -> tuple[int, int] | None:
        """Return the true and false positives at a threshold; None if it is none of those that are counted."""
        position = int(np.searchsorted(self.thresholds, score))
        if position == len(self.thresholds) or self.thresholds[position] != score:
            return None
        return int(self.positives.accepted()[0][position]), int(self.negatives.accepted()[0][position])

    def locate(self, rank: int) -> Located:
        """Return where the negative lies that `rank - 1` others follow from above."""
        return self.negatives.locate(rank)


def _merged(*intervals: ScoreIntervals) -> ScoreIntervals:
    """ScoreIntervals in any order, those that touch made one."""
    both = np.concatenate(intervals)
    return merged(*both[np.argsort(both[:, 0], kind="stable")].T)


def most_thresholds(matrix: ScoreMatrix) -> int:
    """Return how many relevant scores are counted one by one; at most as many others are spaced between negatives."""
    of_threshold = THRESHOLD_BYTES + THRESHOLD_THREAD_BYTES * matrix.threads
    return max(1000, int(matrix.free_bytes * SHARE_OF_THRESHOLDS / 2 / of_threshold))
