"""Pooled operating points: every query-candidate pair is one decision, accepted if its score reaches a threshold.

Precision, recall and F1 at a threshold, the threshold of the best F1, and recall at a fixed precision, exact and in
bounded memory. All pairs are never held. A histogram of the whole range, made while the pairs pass for the ranks, leaves
only a narrow stretch of scores in which the answer can lie (a threshold outside it is proved to be worse); one more walk
over the pairs looks at the scores inside that stretch alone. Where many are in it, a walk between the two narrows it
down with a finer histogram of more exact estimates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.functional.ranks import RankingPass, Tile
from fewshot_callbacks.functional.similarity import DOUBLE, SINGLE, rounded

BINS = 8192
FINE_BINS = 2**20
FEW_KEYS = 50_000
"""More negatives than these are first narrowed down by a finer histogram, before their keys are looked at."""

MOST_STRETCHES = 8


@dataclass(frozen=True)
class OperatingPoint:
    """Decisions over all query-candidate pairs at one threshold.

    `threshold` is the smallest accepted score of a relevant pair (or the one that was asked for), `true_positives`,
    `false_positives` and `false_negatives` count pairs. Where no pair is accepted, precision is NaN; where no
    threshold fulfils what was asked, the threshold is NaN, recall and F1 are 0.0.
    """

    threshold: float
    true_positives: int
    false_positives: int
    false_negatives: int

    @property
    def precision(self) -> float:
        """Share of the accepted pairs that are relevant; NaN if none was accepted."""
        accepted = self.true_positives + self.false_positives
        return self.true_positives / accepted if accepted else math.nan

    @property
    def recall(self) -> float:
        """Share of the relevant pairs that are accepted."""
        relevant = self.true_positives + self.false_negatives
        return self.true_positives / relevant if relevant else math.nan

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall, 2 TP / (2 TP + FP + FN)."""
        return 2 * self.true_positives / (2 * self.true_positives + self.false_positives + self.false_negatives)


@dataclass(frozen=True)
class PooledDecisions:
    """The operating points of one evaluation."""

    best_f1: OperatingPoint
    at_precision: dict[float, OperatingPoint]
    """for each asked precision, the point of the smallest threshold that reaches it"""
    at_threshold: dict[float, OperatingPoint]


class PooledHistogram:
    """Counts of relevant pairs (by key) and of negatives (by estimate) in evenly spaced bins.

    A negative's key lies in the bin of its estimate or in one beside it: a bin is at least twice as wide as the error.

    Args:
        walk: the pairs; its estimates must be those of `rung` or better.
        stretch: the keys to look at; by default all. What lies above is counted, what lies below is not.
        bins: at most so many.
        rung: how exact the estimates are.
    """

    def __init__(
        self, walk: RankingPass, stretch: _Stretch | None = None, bins: int = BINS, rung: int = SINGLE
    ) -> None:
        low, high = walk.scores.key_range if stretch is None else stretch
        error = walk.scores.largest_error(rung)
        bins = 2 * max(1, min(bins, int((high - low) / (2 * error)) if error else bins) // 2)
        # two spare bins at either end, so that what matters is in none that has no neighbour
        margin = max(2 * (high - low) / bins, 2 * error, 1e-300)
        self.walk, self.rung, self._whole = walk, rung, stretch is None
        self.edges = torch.linspace(
            low - margin, high + margin, bins + 1, dtype=torch.float64, device=walk.scores.device
        )
        self.positives = torch.zeros(bins, dtype=torch.int64, device=walk.scores.device)
        self.negatives = torch.zeros_like(self.positives)
        self._positives_above = self._negatives_above = 0
        self._positives_below = 0

    def relevant(self, keys: Float[Tensor, "pairs"]) -> None:
        """Count the keys of relevant pairs."""
        place = torch.searchsorted(self.edges, keys, right=True) - 1
        inside = (place >= 0) & (place < len(self.positives))
        self.positives += torch.bincount(place[inside], minlength=len(self.positives))
        self._positives_above += int((place >= len(self.positives)).count_nonzero())
        self._positives_below += int((place < 0).count_nonzero())

    def tile(self, tile: Tile) -> None:
        """Count the estimates of a tile of negatives."""
        low, high, bins = float(self.edges[0]), float(self.edges[-1]), len(self.negatives)
        above = tile.estimates > high
        if tile.weights is None and tile.estimates.device.type == "cpu":
            # what lies outside is ignored; a tile has at most 2**23 pairs, which a float32 counter holds exactly
            self.negatives += torch.histc(tile.estimates, bins=bins, min=low, max=high).long()
            self._negatives_above += int(above.count_nonzero())
            return
        place = ((tile.estimates - low) * (bins / (high - low))).clamp(0, bins - 1).long()
        weights = torch.ones_like(place) if tile.weights is None else tile.weights.expand_as(place)
        self._negatives_above += int(weights[above].sum())
        weights = weights.masked_fill(above | (tile.estimates < low), 0)
        self.negatives.index_add_(0, place.view(-1), weights.reshape(-1))

    def cells(self) -> _Cells:
        """What is known of each bin."""
        accepted = _from_above(self.negatives)  # by estimate; the key may lie one bin further up or down
        padded = torch.nn.functional.pad(accepted, (1, 2))
        padded[0] = accepted[0]
        padded += self._negatives_above
        inside = _from_above(self.positives)
        candidate = self.positives > 0
        if not self._whole:  # the end bins are spare: of their negatives some are outside
            candidate[0] = candidate[-1] = False
        return _Cells(
            low=self.edges[:-1],
            high=torch.nextafter(self.edges[1:], self.edges[:-1]),
            candidate=candidate,
            tp=inside + self._positives_above,
            fewest_fp=padded[3:],
            most_fp=padded[:-3],
            relevant=int(inside[0]) + self._positives_above + self._positives_below,
        )


class _Groups:
    """Second look: relevant pairs and negatives at each key of some stretches, and in the gaps between them.

    Distinct keys are kept with their counts as long as there are at most `capacity`; beyond that, neighbours are
    merged into coarser groups, and another look at the decisive ones among them is needed.
    """

    def __init__(self, stretches: Sequence[_Stretch], walk: RankingPass, capacity: int) -> None:
        self.stretches, self.walk, self.capacity = stretches, walk, capacity
        self.rung = SINGLE
        bounds = [-math.inf, *(bound for stretch in stretches for bound in stretch), math.inf]
        gaps = [(low, high) for low, high in zip(bounds[::2], bounds[1::2], strict=True) if low < high]
        device = walk.scores.device
        self._starts = torch.tensor(
            sorted(set(bounds[:-1])), dtype=torch.float64, device=device
        )  # of every gap and stretch
        self._gap_starts = torch.tensor([low for low, _ in gaps], dtype=torch.float64, device=device)
        self.low = self._gap_starts
        self.high = torch.tensor(
            [math.nextafter(high, -math.inf) for _, high in gaps], dtype=torch.float64, device=device
        )
        self.positives = torch.zeros(len(gaps), dtype=torch.int64, device=device)
        self.negatives = torch.zeros_like(self.positives)

    def relevant(self, keys: Float[Tensor, "pairs"]) -> None:
        """Count the keys of relevant pairs."""
        self._add(keys, torch.ones_like(keys, dtype=torch.int64), to_positives=True)

    def tile(self, tile: Tile) -> None:
        """Count a tile of negatives: those in or near a stretch by key, the others by the gap they are in."""
        estimates, error = tile.estimates, tile.error[:, None]
        near = torch.zeros_like(estimates, dtype=torch.bool)
        for low, high in self.stretches:
            near |= (estimates >= rounded(low - error, estimates.dtype, up=False)) & (
                estimates <= rounded(high + error, estimates.dtype, up=True)
            )
        rows, columns = near.nonzero(as_tuple=True)
        if len(rows):
            weights = torch.ones_like(rows) if tile.weights is None else tile.weights[columns]
            self._add(self.walk.keys_of(tile, rows, columns), weights, to_positives=False)
        # what is not near a stretch is surely in the gap where its estimate is; below the lowest nothing is accepted
        tops = [*(low for low, _ in self.stretches[1:]), math.inf]
        for (_, low), high in zip(self.stretches, tops, strict=True):
            if low < high:
                inside = (estimates > low) & (estimates < high) & ~near
                count = inside.count_nonzero() if tile.weights is None else (inside.sum(dim=0) * tile.weights).sum()
                self.negatives[torch.searchsorted(self.low, low, right=True) - 1] += count

    def _add(self, keys: Tensor, weights: Tensor, *, to_positives: bool) -> None:
        counts = self.positives if to_positives else self.negatives
        place = torch.searchsorted(self.low, keys, right=True) - 1
        known = keys <= self.high[place]
        counts.index_add_(0, place[known], weights[known])
        if bool(known.all()):
            return
        new, back = keys[~known].unique(return_inverse=True)
        amount = torch.zeros_like(new, dtype=torch.int64).index_add_(0, back, weights[~known])
        nothing = torch.zeros_like(amount)
        order = torch.cat([self.low, new]).argsort()
        self.low = torch.cat([self.low, new])[order]
        self.high = torch.cat([self.high, new])[order]
        self.positives = torch.cat([self.positives, amount if to_positives else nothing])[order]
        self.negatives = torch.cat([self.negatives, nothing if to_positives else amount])[order]
        while len(self.low) > max(self.capacity, 4 * len(self._starts)):
            self._merge_neighbours()

    def _merge_neighbours(self) -> None:
        """Make one group of two that follow each other in one stretch."""
        part = torch.searchsorted(self._starts, self.low, right=True) - 1
        first_of_part = torch.searchsorted(part, part)
        place = torch.arange(len(part), device=part.device)
        starts_group = (place - first_of_part) % 2 == 0
        group = starts_group.cumsum(0) - 1
        groups = int(group[-1]) + 1
        self.low = self.low[starts_group]
        self.high = torch.full_like(self.low, -torch.inf).scatter_reduce_(0, group, self.high, "amax")
        self.positives = torch.zeros_like(self.positives[:groups]).index_add_(0, group, self.positives)
        self.negatives = torch.zeros_like(self.negatives[:groups]).index_add_(0, group, self.negatives)

    def cells(self) -> _Cells:
        """What is known of each group; a gap is none, since the look before has ruled it out."""
        fp = _from_above(self.negatives)
        single = self.low == self.high
        return _Cells(
            low=self.low,
            high=self.high,
            candidate=(self.positives > 0) & ~torch.isin(self.low, self._gap_starts),
            tp=_from_above(self.positives),
            fewest_fp=torch.where(single, fp, fp - self.negatives),
            most_fp=fp,
            relevant=int(self.positives.sum()),
        )

    def accepted(self, key: float) -> tuple[int, int]:
        """True and false positives at a threshold where a stretch begins."""
        above = self.low >= key
        return int(self.positives[above].sum()), int(self.negatives[above].sum())


class _Stretch(NamedTuple):
    """Keys from `low` up to, but not including, `high`."""

    low: float
    high: float


class _Cells(NamedTuple):
    """Runs of keys in ascending order, and what a threshold at a relevant pair inside each of them accepts."""

    low: Float[Tensor, "cells"]
    high: Float[Tensor, "cells"]
    candidate: Bool[Tensor, "cells"]
    """whether the cell holds a threshold that may be chosen"""
    tp: Int[Tensor, "cells"]
    """true positives at the lowest of its thresholds; at the others there are fewer"""
    fewest_fp: Int[Tensor, "cells"]
    """at least so many false positives at each of its thresholds"""
    most_fp: Int[Tensor, "cells"]
    """at most so many"""
    relevant: int
    """number of all relevant pairs"""

    def best_f1(self) -> Bool[Tensor, "cells"]:
        """The cells that can hold the threshold of the best F1."""
        highest = _f1(self.tp, self.fewest_fp, self.relevant)
        reached = _f1(self.tp, self.most_fp, self.relevant)[self.candidate]
        return self.candidate & (highest >= reached.max())

    def at_precision(self, precision: float, low: float, high: float) -> Bool[Tensor, "cells"]:
        """The cells that can hold the smallest threshold in [low, high] that reaches this precision."""
        allowed = self.candidate & (self.high >= low) & (self.low <= high)
        possible = allowed & (_precision(self.tp, self.fewest_fp) >= precision)
        certain = allowed & (self.low >= low) & (self.high <= high) & (_precision(self.tp, self.most_fp) >= precision)
        if bool(certain.any()):
            possible[int(certain.nonzero()[0]) + 1 :] = False
        return possible


def decide(
    histogram: PooledHistogram,
    *,
    precisions: Sequence[float],
    bounds: tuple[float, float],
    thresholds: Sequence[float] = (),
    capacity: int = 1_000_000,
) -> PooledDecisions:
    """Find the operating points after a walk that the histogram has observed.

    Args:
        histogram: what it saw.
        precisions: the precisions for which recall at fixed precision is asked, in (0, 1].
        bounds: the smallest and the largest threshold (a score) that may be chosen for these.
        thresholds: fixed thresholds (scores) at which precision, recall and F1 are asked.
        capacity: how many distinct keys may be held.

    Returns:
        The points; each is exact.
    """
    walk = histogram.walk
    lowest, highest = float(histogram.edges[0]), float(histogram.edges[-1])

    def key_of(score: float) -> float:
        return min(max(walk.scores.to_key(score), lowest), highest)

    low, high = (key_of(bound) for bound in bounds)
    borders = sorted({low, high, *(key_of(threshold) for threshold in thresholds)})
    looks: PooledHistogram | _Groups = histogram
    while True:
        cells = looks.cells()
        decisive = cells.best_f1()
        for precision in precisions:
            decisive |= cells.at_precision(precision, low, high)
        if isinstance(looks, _Groups) and bool((cells.low == cells.high)[decisive].all()):
            break
        if looks is histogram and _negatives_in(cells, decisive) > FEW_KEYS:
            around = decisive.nonzero().flatten()
            hull = _Stretch(float(cells.low[around[0]]), float(cells.high[around[-1]]))
            looks = PooledHistogram(walk, hull, FINE_BINS, DOUBLE)
        else:
            looks = _Groups(_stretches(cells, decisive, borders), walk, capacity)
        walk.scan(looks)

    def point(threshold: float, tp: int, fp: int) -> OperatingPoint:
        return OperatingPoint(threshold, tp, fp, cells.relevant - tp)

    def point_of(cell: int) -> OperatingPoint:
        return point(walk.scores.to_score(float(cells.low[cell])), int(cells.tp[cell]), int(cells.fewest_fp[cell]))

    at_precision = {}
    for precision in precisions:
        reaching = cells.at_precision(precision, low, high).nonzero()
        at_bound = point(bounds[1], *looks.accepted(high))
        if len(reaching):
            at_precision[precision] = point_of(int(reaching[0]))
        elif at_bound.true_positives and at_bound.precision >= precision:
            at_precision[precision] = at_bound
        else:
            at_precision[precision] = point(math.nan, 0, 0)
    return PooledDecisions(
        best_f1=point_of(int(cells.best_f1().nonzero()[-1])),
        at_precision=at_precision,
        at_threshold={threshold: point(threshold, *looks.accepted(key_of(threshold))) for threshold in thresholds},
    )


def _stretches(cells: _Cells, decisive: Bool[Tensor, "cells"], borders: Sequence[float]) -> list[_Stretch]:
    """The decisive cells as few stretches, cut at the borders, so that counts above a border are exact."""
    index = decisive.nonzero().flatten()
    follows = torch.nn.functional.pad(index.diff() == 1, (1, 0))  # decisive like the cell before it
    first, last = index[~follows], index[~torch.nn.functional.pad(follows[1:], (0, 1))]
    ends = torch.nextafter(cells.high, torch.full_like(cells.high, torch.inf))  # the last key belongs to its cell
    runs = [_Stretch(low, high) for low, high in zip(cells.low[first].tolist(), ends[last].tolist(), strict=True)]
    while len(runs) > MOST_STRETCHES:  # bridge the narrowest gap
        gap = min(range(len(runs) - 1), key=lambda i: runs[i + 1].low - runs[i].high)
        runs[gap : gap + 2] = [_Stretch(runs[gap].low, runs[gap + 1].high)]
    for border in borders:
        around = next((i for i, run in enumerate(runs) if run.low < border < run.high), None)
        if around is not None:
            runs[around : around + 1] = [_Stretch(runs[around].low, border), _Stretch(border, runs[around].high)]
        elif all(run.low != border for run in runs):
            runs.append(_Stretch(border, math.nextafter(border, math.inf)))
    return sorted(runs)


def _negatives_in(cells: _Cells, decisive: Bool[Tensor, "cells"]) -> int:
    """At most so many negatives lie in these cells."""
    return int((cells.most_fp - cells.fewest_fp)[decisive].sum())


def _from_above(counts: Int[Tensor, "cells"]) -> Int[Tensor, "cells"]:
    """For each cell, the sum over it and all cells above."""
    return counts.flip(0).cumsum(0).flip(0)


def _f1(tp: Tensor, fp: Tensor, relevant: int) -> Float[Tensor, "cells"]:
    return 2 * tp.double() / (tp + fp + relevant).double()


def _precision(tp: Tensor, fp: Tensor) -> Float[Tensor, "cells"]:
    return tp.double() / (tp + fp).clamp(min=1).double()
