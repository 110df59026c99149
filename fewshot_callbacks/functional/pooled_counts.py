"""Looking at all pairs, whatever their query: a histogram, the keys of the highest negatives, and counts at chosen keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.functional.kernels.reference import Counts, count_tile
from fewshot_callbacks.functional.pooled_cells import Bools, Cells, Floats, Ints, Stretch, from_above, merged
from fewshot_callbacks.functional.ranks import Panel, RankingPass, panel_positives
from fewshot_callbacks.functional.similarity import HALF, SINGLE

if TYPE_CHECKING:
    from fewshot_callbacks.functional.kernels.compiled import Pooled
    from fewshot_callbacks.functional.torch_walk import Tile, TorchWalk

BINS = 2**15
COLLECTED_SHARE = 0.02
"""No more than this share of all pairs is collected: their keys cost some ten times what counting them costs."""
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
    """The first look: a histogram of all pairs, and the keys of the highest negatives.

    A negative's key lies in the cell of its estimate or in one beside it: a cell is at least twice as wide as the error.

    Args:
        walk: the pairs.
        request: what will be asked.
        capacity: how many keys may be held.
    """

    def __init__(self, walk: RankingPass, request: PooledRequest, capacity: int) -> None:
        self.walk, self.request, self.capacity = walk, request, capacity
        low, high = walk.scores.key_range
        error = walk.scores.largest_error(SINGLE)
        bins = max(4, min(BINS, int((high - low) / (2.5 * error)) if error else BINS))
        # spare cells at either end, so that what matters is in none that has no neighbour
        width = max((high - low) / bins, 3 * error, 1e-300)
        self.origin, self.scale, self.cells_count = low - 3 * width, 1 / width, bins + 8
        self.cut = self.floor = math.inf
        self.known = range(0)
        self._expected_floor = self._expected_cut = math.inf
        self.positives = np.zeros(self.cells_count, np.int64)
        self.negatives = np.zeros(self.cells_count, np.int64)
        self._keys: list[Floats] = []
        self._weights: list[Ints] = []
        self._cuts: list[float] = []
        self.holds_positives = walk.candidates.relevant_pairs * 40 <= walk.memory_bytes
        self.screened = False
        self._coarsest = SINGLE

    # ----------------------------------------------------------------------------------------------------------- looking

    def cell_of(self, keys: Floats) -> Ints:
        """The kernel's own arithmetic: monotone in the key."""
        place = ((keys - self.origin) * self.scale).astype(np.float32)
        return (np.clip(place, np.float32(-1), np.float32(self.cells_count - 2)) + np.float32(1)).astype(np.int64)

    def relevant(self, keys: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None) -> None:
        """Count the keys of relevant pairs."""
        values = keys.cpu().numpy()
        amount = None if weights is None else weights.cpu().numpy()
        self.positives += _histogram(self.cell_of(values), amount, self.cells_count)

    def tile(self, _: TorchWalk, tile: Tile) -> None:
        """Count the estimates of a tile of negatives."""
        self._coarsest = min(self._coarsest, tile.rung)
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
        from fewshot_callbacks.functional.kernels.compiled import Pooled  # noqa: PLC0415 - needs numba

        screened = self.walk.rung == HALF
        capacity = max(1, self.capacity // threads) if math.isfinite(self._expected_cut) else 1
        return Pooled(
            np.zeros(self.cells_count, np.int64),
            self.origin,
            self.scale,
            self._expected_floor if screened or self.walk.rung is None else -math.inf,
            self._expected_cut,
            np.empty(capacity),
            np.empty(capacity, np.int64),
            np.zeros(3, np.int64),
        )

    def between(self, record: Pooled) -> Pooled:
        """Make room where a record has become too full: the highest half stays."""
        filled = int(record.filled[0])
        capacity = len(record.keys)
        if filled <= capacity // 2:
            return record
        if filled > capacity:  # some were lost: nothing below the highest can be vouched for
            record.filled[0] = 0
            return record._replace(cut=math.inf)
        cut = float(np.partition(record.keys[:filled], filled // 2)[filled // 2])
        keep = record.keys[:filled] >= cut
        kept = int(keep.sum())
        if kept > capacity // 2 + capacity // 4:  # equal keys by the thousand
            record.filled[0] = 0
            return record._replace(cut=math.inf)
        record.weights[:kept] = record.weights[:filled][keep]
        record.keys[:kept] = record.keys[:filled][keep]
        record.filled[0] = kept
        return record._replace(cut=cut)

    def absorb(self, walk: RankingPass, record: Pooled) -> None:
        """Take what a thread has recorded."""
        record = self.between(record)
        filled = int(record.filled[0])
        self.negatives += record.histogram
        self._keys.append(record.keys[:filled].copy())
        self._weights.append(record.weights[:filled].copy())
        self.screened = walk.rung == HALF
        self.floor = self._expected_floor if self.screened else -math.inf
        self._cuts.append(record.cut)

    def expect(self, walk: RankingPass, record: Pooled, rows: Panel, columns: Panel) -> None:
        """Foretell from a sample which negatives will be wanted, so that their keys are collected on the way."""
        share = int(rows.weight.sum()) * int(columns.weight.sum()) / walk.pairs
        keys, weights = panel_positives(rows, weighted=walk.repeats)
        chosen = int(rows.weight.sum()) / len(walk.candidates.query_order)
        amount = None if weights is None else weights.numpy()
        positives = _histogram(self.cell_of(keys.numpy()), amount, self.cells_count) / chosen
        negatives = record.histogram.astype(np.float64)
        negatives[0] = 0
        accepted = from_above(negatives) / share
        wanted = self._wanted(from_above(positives), accepted, float(negatives.sum()) / share)
        budget = min(COLLECTED_SHARE * walk.pairs, self.capacity / 2 * (2 if walk.both else 1))
        needed = max((SLACK * amount for amount in wanted if SLACK * amount <= budget), default=0.0)
        if needed and self.holds_positives:
            needed = max(needed, FEW_COUNTS / share)
            self._expected_cut = self._edge(int(np.count_nonzero(accepted >= needed)) - 1)
            for threshold in self.request.thresholds:
                key = walk.scores.to_key(threshold)
                if accepted[int(self.cell_of(np.array([key]))[0])] * SLACK <= budget:
                    self._expected_cut = min(self._expected_cut, key)
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
            wanted.append(float(fp[reaching[0]]) if len(reaching) else 0.0)
        wanted += [rate * negatives for rate in self.request.false_match_rates]
        if self.request.equal_error_rate and negatives:
            crossing = np.flatnonzero(1 - tp / relevant >= fp / negatives)
            wanted += [float(fp[crossing[0]])] if len(crossing) else []
        return wanted

    def _edge(self, cell: int) -> float:
        """Where a cell begins."""
        return self.origin + (max(cell, 1) - 1) / self.scale

    # ---------------------------------------------------------------------------------------------------------- deciding

    def cells(self) -> Cells:
        """What is known: all of each relevant key in some cells above the cut, and the other cells of the histogram."""
        self.cut = cut = max(self._cuts, default=math.inf)
        negatives = self.negative_pairs()
        self.known = known = self._known_cells(cut)
        top = _Tally(*_distinct(*self._positives_in(known)))
        top.add(*self._collected())
        # a negative's key lies at most so many cells away from its estimate's
        away = math.ceil(self.walk.scores.largest_error(self._coarsest) * self.scale + 0.05)
        accepted = from_above(self.negatives)
        padded = np.pad(accepted, (away, away + 1))
        padded[:away] = accepted[0]
        fewest, most = padded[2 * away + 1 :], padded[: -2 * away - 1]
        # the arithmetic of `cell_of` rounds to float32, by less than a hundredth of a cell
        edges = self._edge(1) + (np.arange(self.cells_count) - 1) / self.scale
        low_edges, high_edges = edges - 0.01 / self.scale, edges + 1.01 / self.scale
        if self.screened:
            most = np.where(low_edges - 1 / self.scale <= self.floor, negatives, most)
        if math.isfinite(cut):
            below = np.arange(self.cells_count) < self.cell_of(np.array([cut]))[0]
            fewest = np.where(below, np.maximum(fewest, self._reaching(cut)), fewest)
        tp = from_above(self.positives)
        beyond = int(tp[known.stop]) if known.stop < self.cells_count else 0
        fp, tied = top.accepted()
        held = self.positives > 0
        under, over = held.copy(), held.copy()
        under[known.start :] = False
        over[: known.stop] = False
        most = np.minimum(most, negatives)

        def in_order(of_cells: NDArray[Any], of_keys: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([of_cells[under], of_keys, of_cells[over]])

        return Cells(
            low=in_order(low_edges, top.keys),
            high=in_order(high_edges, top.keys),
            single=in_order(np.zeros(self.cells_count, bool), np.ones(len(top.keys), bool)),
            positives=in_order(self.positives, top.positives),
            tp=in_order(tp, from_above(top.positives) + beyond),
            fewest_fp=in_order(fewest, fp),
            most_fp=in_order(most, fp),
            tied=in_order(np.zeros(self.cells_count, np.int64), tied),
            relevant=int(tp[0]),
            negatives=negatives,
        )

    def _known_cells(self, cut: float) -> range:
        """The cells above the cut, from the lowest on, as many as the budget allows to list the relevant keys of."""
        if not math.isfinite(cut):
            return range(self.cells_count, self.cells_count)
        start = int(self.cell_of(np.array([cut]))[0]) + 1
        listed = np.cumsum(self.positives[start:])
        most = max(1000, self.walk.memory_bytes // LISTED_BYTES)
        return range(start, start + int(np.searchsorted(listed, most, side="right")))

    def _positives_in(self, cells: range) -> tuple[Floats, Ints | None]:
        """The keys of the relevant pairs in some cells."""
        parts: list[tuple[Floats, Ints | None]] = []
        if not cells:
            return np.empty(0), None
        for keys, weights in self.walk.positives():
            values = keys.cpu().numpy()
            place = self.cell_of(values)
            inside = (place >= cells.start) & (place < cells.stop)
            parts.append((values[inside], None if weights is None else weights.cpu().numpy()[inside]))
        return _joined(parts)

    def _collected(self) -> tuple[Floats, Ints | None]:
        """The keys of the highest negatives, and how many pairs each stands for."""
        keys, weights = _joined(list(zip(self._keys, self._weights, strict=True)))
        if weights is not None and len(weights) and not self.walk.repeats:  # the same for all: sorted, all is faster
            return np.sort(keys), np.broadcast_to(weights[:1], keys.shape)
        return keys, weights

    def _reaching(self, key: float) -> int:
        """How many negatives reach a key that is not below the cut."""
        keys, weights = self._collected()
        reaching = keys >= key
        return int(reaching.sum() if weights is None else weights[reaching].sum())

    def negative_pairs(self) -> int:
        """All pairs that are neither relevant nor excluded."""
        if not self.screened:
            return int(self.negatives[1:].sum())
        return self.walk.pairs - self.walk.candidates.relevant_pairs

    def share_within(self, stretches: Sequence[Stretch]) -> float:
        """About which share of the negatives lies inside some stretches."""
        cells = [self.cell_of(np.array(stretch)) for stretch in merged(stretches)]
        total = max(1, int(self.negatives[1:].sum()))
        return float(sum(self.negatives[low : high + 1].sum() for low, high in cells) / total)

    def accepted(self, key: float) -> tuple[int, int] | None:
        """True and false positives at a threshold; None if it lies where only a histogram was made."""
        if key < self.cut:
            return None
        keys, amount = self.positives_within([Stretch(key, math.inf)])
        return int(len(keys) if amount is None else amount.sum()), self._reaching(key)

    def positives_within(self, stretches: Sequence[Stretch]) -> tuple[Floats, Ints | None]:
        """The keys of the relevant pairs inside some stretches."""
        if not stretches:
            return np.empty(0), None
        parts = []
        for keys, weights in self.walk.positives():
            part = (keys.cpu().numpy(), None if weights is None else weights.cpu().numpy())
            parts.append(_inside(part, stretches))
        return _joined(parts)


class EdgeCounts:
    """Another look: relevant pairs and negatives counted against a list of keys, each exactly.

    Args:
        first: what is known of the pairs.
        edges: the keys, ascending.
        stretches: where the relevant keys among them lie.
    """

    def __init__(self, first: PooledCounts, edges: Floats, stretches: Sequence[Stretch]) -> None:
        self.walk, self._edges, self.stretches, self._first = first.walk, edges, stretches, first
        self.positives, self.negatives = _Tally(edges), _Tally(edges)

    def relevant(self, keys: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None) -> None:
        """Count the keys of relevant pairs."""
        self.positives.add(keys.cpu().numpy(), None if weights is None else weights.cpu().numpy())

    def edges(self) -> Floats:
        """The keys."""
        return self._edges

    def share_within(self, margin: float) -> float:
        """About which share of all pairs lies no further from some key than this."""
        share = self._first.share_within([Stretch(low - margin, high + margin) for low, high in self.stretches])
        length = sum(high - low + 2 * margin for low, high in self.stretches)
        return share * min(1.0, 2 * margin * len(self._edges) / length) if length else share

    def add(self, hits: Ints, ties: Ints) -> None:
        """Take the counters of a thread."""
        self.negatives.hits += hits
        self.negatives.ties += ties

    def tile(self, walk: TorchWalk, tile: Tile) -> None:
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
        factor = 2 if tile.both else 1
        self.add(factor * counts.hits[0].cpu().numpy(), factor * counts.ties[0].cpu().numpy())

    def cells(self) -> Cells:
        """Each key that relevant pairs have, and each gap between keys that holds some."""
        tp, tp_tied = self.positives.accepted()
        fp, fp_tied = self.negatives.accepted()
        between = self.positives.between()
        gaps = np.flatnonzero(between[1:-1] > 0) if len(between) > 2 else np.empty(0, np.int64)
        own = np.flatnonzero(tp_tied > 0)
        edges = self._edges
        inside = _inside_any(edges, self.stretches)
        own = own[inside[own]]
        gaps = gaps[_inside_any(np.nextafter(edges[gaps], np.inf), self.stretches)] if len(gaps) else gaps
        low = np.concatenate([edges[own], np.nextafter(edges[gaps], np.inf)])
        order = np.argsort(low, kind="stable")
        return Cells(
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


class _Tally:
    """How many pairs lie at and between some ascending, distinct keys."""

    def __init__(self, keys: Floats, positives: Ints | None = None) -> None:
        self.keys = keys
        self.positives = np.zeros(len(keys), np.int64) if positives is None else positives
        self.hits = np.zeros(len(keys) + 1, np.int64)
        self.ties = np.zeros(len(keys) + 1, np.int64)

    def add(self, keys: Floats, weights: Ints | None) -> None:
        below = np.searchsorted(self.keys, keys)
        not_above = np.searchsorted(self.keys, keys, side="right")
        self.hits += _histogram(below, weights, len(self.hits))
        tied = below != not_above
        if tied.any():
            of_tied = None if weights is None else weights[tied]
            self.ties -= _histogram(below[tied], of_tied, len(self.ties))
            self.ties += _histogram(not_above[tied], of_tied, len(self.ties))

    @property
    def total(self) -> int:
        return int(self.hits.sum())

    def accepted(self) -> tuple[Ints, Ints]:
        """For each key, how many are not below it, and how many of those are equal to it."""
        above = from_above(self.hits)[1:]
        reached = from_above(self.hits + self.ties)[1:]
        return reached, reached - above

    def between(self) -> Ints:
        """How many lie below the first key, between the first and the second, ..., above the last."""
        reached, tied = self.accepted()
        gaps: Ints = np.concatenate([[self.total], reached - tied]) - np.concatenate([reached, [0]])
        return gaps


def closer_look(first: PooledCounts, cells: Cells, decisive: Bools, wanted: Sequence[float]) -> EdgeCounts:
    """A look at the relevant keys in the decisive cells, or at as many evenly spaced keys as may be held."""
    index = np.flatnonzero(decisive)
    stretches = merged([Stretch(float(cells.low[i]), float(cells.high[i])) for i in index])
    capacity = max(1000, first.capacity // 4)
    if int(cells.positives[decisive].sum()) <= capacity:
        edges = _distinct(*first.positives_within(stretches))[0]
    else:
        each = max(2, capacity // max(1, len(stretches)))
        edges = np.concatenate([np.linspace(stretch.low, stretch.high, each) for stretch in stretches])
    ends = [bound for stretch in stretches for bound in stretch]
    return EdgeCounts(first, np.unique(np.concatenate([edges, np.array([*ends, *wanted])])), stretches)


def _inside_any(keys: Floats, stretches: Sequence[Stretch]) -> Bools:
    inside = np.zeros(len(keys), bool)
    for low, high in stretches:
        inside |= (keys >= low) & (keys <= high)
    return inside


def _inside(part: tuple[Floats, Ints | None], stretches: Sequence[Stretch]) -> tuple[Floats, Ints | None]:
    keys, weights = part
    inside = _inside_any(keys, stretches)
    return keys[inside], None if weights is None else weights[inside]


def _joined(parts: Sequence[tuple[Floats, Ints | None]]) -> tuple[Floats, Ints | None]:
    keys = np.concatenate([part[0] for part in parts]) if parts else np.empty(0)
    weights = [part[1] for part in parts if part[1] is not None]
    return keys, np.concatenate(weights) if weights else None


def _distinct(keys: Floats, weights: Ints | None) -> tuple[Floats, Ints]:
    """Ascending distinct keys, and how many pairs have each."""
    if weights is None:
        keys = np.sort(keys)
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.empty(0, np.int64)
        return keys[first], np.diff(np.append(first, len(keys)))
    distinct, back = np.unique(keys, return_inverse=True)
    return distinct, _histogram(back, weights, len(distinct))


def _histogram(place: Ints, weights: Ints | None, cells: int) -> Ints:
    """Exact also where weights are large."""
    if weights is None or not len(weights):
        return np.bincount(place, minlength=cells).astype(np.int64)
    if weights.strides == (0,):
        same: Ints = np.bincount(place, minlength=cells).astype(np.int64) * weights[0]
        return same
    counts = np.zeros(cells, np.int64)
    np.add.at(counts, place, weights)
    return counts
