"""Another look at all pairs, whatever their query: exact counts at chosen keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.pooled.bins import ThresholdBins
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.pooled.intervals import (
    Bools,
    Floats,
    Ints,
    ScoreIntervals,
    distinct,
    inside_any,
    joined,
    merged,
    spaced,
)
from fewshot_callbacks.engine.pooled.tally import Located, ThresholdCounts
from fewshot_callbacks.engine.pytorch.count import Counts, count_tile

if TYPE_CHECKING:
    from fewshot_callbacks.engine.pytorch.tiles import Tile, TorchTiles


EDGE_BYTES, EDGE_THREAD_BYTES = 250, 16
"""What one key takes: counters of two tallies, the table that places estimates, what is known of it; and of each thread."""
SHARE_OF_EDGES = 0.4
"""Share of the budget for these."""
LISTED_EDGES = 2**10
"""So many keys cut a interval into pieces narrower than the error of float32 estimates, if it is a few cells long."""


class Recount:
    """Another look: relevant pairs and negatives counted against a list of keys, each exactly.

    Args:
        first: what is known of the pairs.
        edges: the keys, ascending.
        intervals: where the relevant keys among them lie.
        others: which of them lie elsewhere, perhaps.
        sought: where negatives of some ranks lie; at the edges inside, relevant pairs are not counted.
    """

    def __init__(
        self,
        first: PooledCounts,
        edges: Floats,
        intervals: ScoreIntervals,
        others: Sequence[float] = (),
        sought: ScoreIntervals | None = None,
    ) -> None:
        self.walk, self.intervals, self._first = first.walk, intervals, first
        sought = np.empty((0, 2)) if sought is None else sought
        points = np.sort(np.asarray(others, np.float64))
        self._edges = edges = np.unique(np.concatenate([edges, intervals.ravel(), points, sought.ravel()]))
        self.exact = _merged(intervals, np.stack([points, points], axis=1))
        """where the key of a relevant pair has to be known to tell which of the edges it reaches"""
        self._counted = _merged(intervals, sought)
        most = most_edges(first) // self.walk.processes.count
        self.positives, self.negatives = ThresholdCounts(edges), ThresholdCounts(edges, _merged(sought), most)

    def relevant(self, keys: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None) -> None:
        """Count the keys of relevant pairs."""
        self.positives.add(keys.cpu().numpy(), None if weights is None else weights.cpu().numpy())

    def reduce_over_processes(self) -> None:
        """All pairs have passed: know what every process has counted."""
        for tally in (self.positives, self.negatives):
            tally.hits, tally.ties = self.walk.processes.summed(np.stack([tally.hits, tally.ties]))
        self.negatives.noted = distinct(*joined(self.walk.processes.gather(self.negatives.noted)))

    def edges(self) -> Floats:
        """The keys."""
        return self._edges

    def share_within(self, margin: float) -> float:
        """About which share of all pairs lies no further from some key than this."""
        wider = merged(self._counted[:, 0] - margin, self._counted[:, 1] + margin)
        share = self._first.share_within(wider)
        length = float((wider[:, 1] - wider[:, 0]).sum())
        return share * min(1.0, 2 * margin * len(self._edges) / length) if length else share

    def add(self, hits: Ints, ties: Ints) -> None:
        """Take the counters of a thread."""
        self.negatives.hits += hits
        self.negatives.ties += ties

    def tile(self, walk: TorchTiles, tile: Tile) -> None:
        """Count a tile of negatives: as the candidates of one query whose thresholds are the keys."""
        device = tile.estimates.device
        counts = Counts.zeros(torch.from_numpy(self._edges).to(device)[None])
        height, width = tile.estimates.shape
        error = tile.error.max()[None]
        for start in range(0, height, 64):
            part = tile.estimates[start : start + 64].reshape(1, -1)
            weights = None
            if self.walk.repeats:
                weights = (tile.rows.weight[start : start + 64, None] * tile.columns.weight).view(-1)
            zero, place = count_tile(counts, part, error, weights)
            if len(place):
                rows, columns = start + place // width, place % width
                keys = walk.keys_of(tile, rows, columns)
                counts.add_keys(zero, keys, None if weights is None else weights[place])
                self._note(keys, None if weights is None else weights[place], both=tile.both)
        factor = 2 if tile.both else 1
        self.add(factor * counts.hits[0].cpu().numpy(), factor * counts.ties[0].cpu().numpy())

    def _note(self, keys: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None, *, both: bool) -> None:
        if len(self.negatives.noting):
            amount = torch.ones_like(keys, dtype=torch.int64) if weights is None else weights
            self.negatives.note(keys.cpu().numpy(), (2 if both else 1) * amount.cpu().numpy())

    def cells(self) -> ThresholdBins:
        """Each key that relevant pairs have, and each gap between keys that holds some."""
        tp, tp_tied = self.positives.accepted()
        fp, fp_tied = self.negatives.accepted()
        between = self.positives.between()
        gaps = np.flatnonzero(between[1:-1] > 0) if len(between) > 2 else np.empty(0, np.int64)
        own = np.flatnonzero(tp_tied > 0)
        edges = self._edges
        inside = inside_any(edges, self.intervals)
        own = own[inside[own]]
        gaps = gaps[inside_any(np.nextafter(edges[gaps], np.inf), self.intervals)] if len(gaps) else gaps
        low = np.concatenate([edges[own], np.nextafter(edges[gaps], np.inf)])
        order = np.argsort(low, kind="stable")
        return ThresholdBins(
            low=low[order],
            high=np.concatenate([edges[own], np.nextafter(edges[gaps + 1], -np.inf)])[order],
            single=np.concatenate([np.ones(len(own), bool), np.zeros(len(gaps), bool)])[order],
            positives=np.concatenate([tp_tied[own], between[1:-1][gaps] if len(gaps) else gaps])[order],
            tp=np.concatenate([tp[own], tp[gaps] - tp_tied[gaps]])[order],
            fewest_fp=np.concatenate([fp[own], fp[gaps + 1] if len(gaps) else gaps])[order],
            most_fp=np.concatenate([fp[own], fp[gaps] - fp_tied[gaps]])[order],
            tied=np.concatenate([fp_tied[own], np.zeros(len(gaps), np.int64)])[order],
            relevant=self.positives.total,
            negatives=self._first.negative_pairs(),  # those below all keys have not been counted here
        )

    def accepted(self, key: float) -> tuple[int, int] | None:
        """True and false positives at a threshold that is one of the keys."""
        place = int(np.searchsorted(self._edges, key))
        if place == len(self._edges) or self._edges[place] != key:
            return None
        return int(self.positives.accepted()[0][place]), int(self.negatives.accepted()[0][place])

    def locate(self, rank: int) -> Located:
        """Where the negative lies that `rank - 1` others follow from above."""
        return self.negatives.locate(rank)


def _merged(*intervals: ScoreIntervals) -> ScoreIntervals:
    """ScoreIntervals in any order, those that touch made one."""
    both = np.concatenate(intervals)
    return merged(*both[np.argsort(both[:, 0], kind="stable")].T)


def most_edges(first: PooledCounts) -> int:
    """How many relevant keys are looked at one by one; at most as many others are spaced between negatives."""
    of_edge = EDGE_BYTES + EDGE_THREAD_BYTES * first.walk.threads
    return max(1000, int(first.walk.free_bytes * SHARE_OF_EDGES / 2 / of_edge))


def plan_recount(
    first: PooledCounts,
    cells: ThresholdBins,
    decisive: Bools,
    wanted: Sequence[float],
    sought: Sequence[tuple[float, float]],
    early: Sequence[tuple[float, float]],
) -> Recount:
    """A look at the relevant keys in the decisive cells, or, if they are too many, at some of them and at spaced keys.

    Near its maximum F1 is flat, and many cells can hold it, but most likely those where it seems to be highest: their keys
    are looked at one by one, which as a rule settles the others, of which less is known.

    Args:
        first: the first look.
        cells: what is known of the relevant keys.
        decisive: in which of these cells a point can lie.
        wanted: more keys at which the accepted pairs are counted.
        sought: intervals in which negatives of some rank lie.
        early: others that may be sought later, taken in where all pairs are scanned anyway.
    """
    index = np.flatnonzero(decisive)
    low, high = cells.low[index], cells.high[index]
    capacity = most_edges(first)
    alone = np.append(True, np.diff(index) > 1)[: len(index)]  # what follows each other is one interval
    last = np.append(alone[1:], True)[: len(index)]
    intervals = merged(low[alone], np.maximum.accumulate(high)[last])
    # where keys are not held they would have to be made once more, only to find that they are too many
    may_fit = first.walk.both or int(cells.positives[decisive].sum()) <= capacity
    edges = first.distinct_within(intervals, capacity) if may_fit else None
    if edges is None:
        singly = capacity * 7 // 8
        likely = cells.likely_best_f1(index, singly)
        some = first.distinct_within(merged(low[likely], high[likely]), singly)
        intervals = merged(low, high)
        each = max(2, (capacity - singly) // max(1, len(intervals)))
        edges = np.linspace(intervals[:, 0], intervals[:, 1], each).ravel()
        if some is not None:
            edges = np.concatenate([edges, some])
    lowest = min([*wanted, *intervals[:1, 0].tolist(), *(low for low, _ in sought)])
    known = lowest >= first.highest.exact_above
    ranked = np.array([*sought, *(() if known else early)], np.float64).reshape(-1, 2)
    if len(ranked):
        # where the keys of these negatives will be listed, spaced ones only make sure that there is an end; else they
        # save scans, at a cost that is small beside a scan's
        listed = known or first.walk.scores.compiled is None
        count = LISTED_EDGES if listed else max(LISTED_EDGES, min(capacity // 2, first.walk.pairs // 64))
        edges = np.concatenate([edges, *(spaced(low, high, count // len(ranked) + 3) for low, high in ranked)])
    return Recount(first, edges, intervals, wanted, ranked)
