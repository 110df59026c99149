"""Pooled operating points: every query-candidate pair is one decision, accepted if its score reaches a threshold.

Precision, recall and F1 at a threshold, the threshold of the best F1, recall at a fixed precision, the false non-match
rate at a fixed false match rate and the equal error rate: each is decided by how many negatives reach the score of some
relevant pair. All pairs are never held. While they pass for the ranks, a histogram of the whole range is made, and the
keys of the highest negatives are collected, as many as a sample of the pairs says will be needed. What a histogram's
cell leaves undecided is proved to lie in a narrow stretch; if it is not among the collected keys, one more walk over the
pairs counts them against the relevant pairs of that stretch alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.functional.kernels.reference import Counts, count_tile
from fewshot_callbacks.functional.ranks import Panel, RankingPass, panel_positives
from fewshot_callbacks.functional.similarity import HALF, SINGLE

if TYPE_CHECKING:
    from fewshot_callbacks.functional.kernels.compiled import Pooled
    from fewshot_callbacks.functional.torch_walk import Tile, TorchWalk

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BINS = 2**15
COLLECTED_SHARE = 0.02
"""No more than this share of all pairs is collected: their keys cost some ten times what counting them costs."""
SCREENED_SHARE = 0.001
"""A screen looks closer at no more than this share of all pairs for the histogram's sake."""
SLACK = 1.5
"""A sample may be off by this factor in how many negatives will be wanted."""
FEW_COUNTS = 30
"""Fewer pairs of a sample than these tell nothing."""


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
class ErrorRatePoint:
    """Verification at a fixed false match rate: a pair of different classes is accepted at most so often.

    `threshold` is the smallest accepted score of a relevant pair; NaN where not even the highest may be accepted.
    """

    threshold: float
    false_match_rate: float
    """share of the pairs of different classes that are accepted"""
    false_non_match_rate: float
    """share of the relevant pairs that are rejected"""


@dataclass(frozen=True)
class Enclosure:
    """A value known up to a proved bound."""

    low: float
    high: float

    @property
    def value(self) -> float:
        """The middle."""
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """Half the width: the value is off by no more."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class PooledDecisions:
    """The operating points of one evaluation."""

    best_f1: OperatingPoint
    at_precision: dict[float, OperatingPoint]
    """for each asked precision, the point of the smallest threshold that reaches it"""
    at_threshold: dict[float, OperatingPoint]
    at_false_match_rate: dict[float, ErrorRatePoint]
    equal_error_rate: float | None
    """None where it was not asked for"""
    average_precision: Enclosure
    """area under the pooled precision-recall curve, as the sum of precision times the step in recall"""
    curve: tuple[tuple[float, float, float], ...]
    """thinned: threshold, precision and recall, by ascending recall; precision within the enclosure of its cell"""
    walks: int
    """how often all pairs had to be looked at"""


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
        place = place.long()
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
        accepted = _from_above(negatives) / share
        wanted = self._wanted(_from_above(positives), accepted, float(negatives.sum()) / share)
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
        """What is known: of each relevant key above the cut all, below it the cells of the histogram."""
        self.cut = cut = max(self._cuts, default=math.inf)
        negatives = self.negative_pairs()
        from_cut = [Stretch(cut, math.inf)] if math.isfinite(cut) else []
        keys, amount = _distinct(*self.positives_within(from_cut))
        top = _Tally(keys, amount)
        top.add(*self._collected())
        positives = self.positives - _histogram(self.cell_of(keys), amount, self.cells_count)
        # a negative's key lies at most so many cells away from its estimate's
        away = math.ceil(self.walk.scores.largest_error(self._coarsest) * self.scale + 0.05)
        accepted = _from_above(self.negatives)
        padded = np.pad(accepted, (away, away + 1))
        padded[:away] = accepted[0]
        fewest, most = padded[2 * away + 1 :], padded[: -2 * away - 1]
        # the arithmetic of `cell_of` rounds to float32, by less than a hundredth of a cell
        edges = self._edge(1) + (np.arange(self.cells_count) - 1) / self.scale
        low_edges, high_edges = edges - 0.01 / self.scale, edges + 1.01 / self.scale
        if self.screened:
            most = np.where(low_edges - 1 / self.scale <= self.floor, negatives, most)
        fewest = np.maximum(fewest, self._reaching(cut))
        some = positives > 0
        fp, tied = top.accepted()
        relevant = int(positives.sum()) + int(top.positives.sum())
        tp_top = _from_above(top.positives)
        tp = _from_above(positives) + int(top.positives.sum())
        return Cells(
            low=np.concatenate([low_edges[some], top.keys]),
            high=np.concatenate([np.minimum(high_edges[some], math.nextafter(cut, -math.inf)), top.keys]),
            single=np.concatenate([np.zeros(int(some.sum()), bool), np.ones(len(top.keys), bool)]),
            positives=np.concatenate([positives[some], top.positives]),
            tp=np.concatenate([tp[some], tp_top]),
            fewest_fp=np.concatenate([fewest[some], fp]),
            most_fp=np.concatenate([np.minimum(most[some], negatives), fp]),
            tied=np.concatenate([np.zeros(int(some.sum()), np.int64), tied]),
            relevant=relevant,
            negatives=negatives,
        )

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
        cells = [self.cell_of(np.array(stretch)) for stretch in _merged(stretches)]
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


class Stretch(NamedTuple):
    """Keys from `low` up to `high`, both included."""

    low: float
    high: float


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
        above = _from_above(self.hits)[1:]
        reached = _from_above(self.hits + self.ties)[1:]
        return reached, reached - above

    def between(self) -> Ints:
        """How many lie below the first key, between the first and the second, ..., above the last."""
        reached, tied = self.accepted()
        return np.concatenate([[self.total], reached - tied]) - np.concatenate([reached, [0]])


class Cells(NamedTuple):
    """Runs of keys in ascending order that hold relevant pairs, and what a threshold at one of these accepts."""

    low: Floats
    high: Floats
    single: Bools
    """one key, of which everything is known"""
    positives: Ints
    """relevant pairs inside"""
    tp: Ints
    """true positives at the lowest threshold; at the others there are fewer"""
    fewest_fp: Ints
    """at least so many false positives at each threshold"""
    most_fp: Ints
    """at most so many"""
    tied: Ints
    """of a single key: negatives with this very key"""
    relevant: int
    """number of all relevant pairs"""
    negatives: int
    """number of all other pairs"""

    def best_f1(self) -> Bools:
        """The cells that can hold the threshold of the best F1."""
        highest = _f1(self.tp, self.fewest_fp, self.relevant)
        reached = _f1(self.tp, self.most_fp, self.relevant)
        return highest >= reached.max() if len(reached) else np.zeros(0, bool)

    def at_precision(self, precision: float, low: float, high: float) -> Bools:
        """The cells that can hold the smallest threshold in [low, high] that reaches this precision."""
        allowed = (self.high >= low) & (self.low <= high)
        possible = allowed & (_precision(self.tp, self.fewest_fp) >= precision)
        certain = allowed & (self.low >= low) & (self.high <= high) & (_precision(self.tp, self.most_fp) >= precision)
        return _up_to_first(possible, certain)

    def at_false_match_rate(self, rate: float) -> Bools:
        """The cells that can hold the smallest threshold which accepts at most this share of the negatives."""
        most = math.floor(rate * self.negatives * (1 + 1e-12))
        return _up_to_first(self.fewest_fp <= most, self.most_fp <= most)

    def equal_error_rate(self) -> Bools:
        """The cells that can hold the lowest relevant key beyond which FNMR is no longer smaller than FMR."""
        if not self.negatives:
            return np.zeros(len(self.low), bool)
        rejected = self.relevant - self.tp  # below the cell
        fewest = (self.fewest_fp - self.tied) / self.negatives
        most = (self.most_fp - self.tied) / self.negatives
        possible = (rejected + self.positives) / self.relevant >= fewest
        certain = np.where(self.single, possible, (rejected + 1) / self.relevant >= most)
        return _up_to_first(possible, certain)

    def crossing(self, cell: int) -> float:
        """The equal error rate, if FNMR and FMR cross at this single key or just before it."""
        before = (self.relevant - self.tp[cell]) / self.relevant
        after = before + self.positives[cell] / self.relevant
        match_before = self.fewest_fp[cell] / self.negatives
        match_after = (self.fewest_fp[cell] - self.tied[cell]) / self.negatives
        if before >= match_before:
            return float(before)
        step = (match_before - before) / ((match_before - before) + (after - match_after))
        return float(before + step * (after - before))

    def average_precision(self) -> Enclosure:
        """Area under the precision-recall curve: sum of the precisions at the relevant pairs over their number."""
        single = self.single
        tp, n = self.tp.astype(np.float64), self.positives.astype(np.float64)
        # inside a run of several keys each relevant pair has between tp - n + 1 and tp true positives
        least = np.where(single, tp, tp - n + 1)
        low = n * least / (least + self.most_fp)
        high = n * tp / (tp + self.fewest_fp)
        return Enclosure(math.fsum(low.tolist()) / self.relevant, math.fsum(high.tolist()) / self.relevant)

    def of(self, chosen: Bools) -> Cells:
        """Some of the cells."""
        return Cells(*(part[chosen] for part in self[:-2]), self.relevant, self.negatives)

    def curve(self, scores: RankingPass, points: int) -> tuple[tuple[float, float, float], ...]:
        """Threshold, precision and recall at cells that are about evenly spaced in recall."""
        recall = self.tp / self.relevant
        wanted = np.unique(np.searchsorted(-recall, -np.linspace(1, 0, points), side="left").clip(max=len(recall) - 1))
        fp = (self.fewest_fp + self.most_fp) / 2
        return tuple(
            (scores.scores.to_score(float(self.low[i])), float(self.tp[i] / (self.tp[i] + fp[i])), float(recall[i]))
            for i in reversed(wanted.tolist())
        )


CURVE_POINTS = 200


@dataclass
class _Found:
    """What has been decided so far."""

    best_f1: OperatingPoint | None = None
    at_precision: dict[float, OperatingPoint] = field(default_factory=dict)
    at_threshold: dict[float, OperatingPoint] = field(default_factory=dict)
    at_rate: dict[float, ErrorRatePoint] = field(default_factory=dict)
    equal_error_rate: float | None = None
    area: Enclosure | None = None


def decide(first: PooledCounts) -> PooledDecisions:
    """Find the operating points after a walk that `first` has observed.

    Returns:
        The points; each is exact. The area under the curve is enclosed by proved bounds.
    """
    walk, request = first.walk, first.request
    scores, found = walk.scores, _Found()
    low, high = (scores.to_key(bound) for bound in request.bounds)
    borders = {threshold: scores.to_key(threshold) for threshold in request.thresholds}
    look: PooledCounts | EdgeCounts = first
    initial = first.cells()
    cells, walks = initial, 1

    def point(threshold: float, tp: int, fp: int) -> OperatingPoint:
        return OperatingPoint(threshold, tp, fp, initial.relevant - tp)

    def point_of(cell: int) -> OperatingPoint:
        return point(scores.to_score(float(cells.low[cell])), int(cells.tp[cell]), int(cells.fewest_fp[cell]))

    while True:
        undecided: list[Bools] = []
        wanted_keys: list[float] = []

        def settled(decisive: Bools, undecided: list[Bools] = undecided) -> Ints | None:
            """The decisive cells, if each is a single key; else they have to be looked at again."""
            if bool(cells.single[decisive].all()):
                return np.flatnonzero(decisive)
            undecided.append(decisive)
            return None

        if found.best_f1 is None and (chosen := settled(cells.best_f1())) is not None:
            found.best_f1 = point_of(int(chosen[-1]))
        for precision in request.precisions:
            if precision in found.at_precision:
                continue
            chosen = settled(cells.at_precision(precision, low, high))
            if chosen is None:
                continue
            if len(chosen):
                found.at_precision[precision] = point_of(int(chosen[0]))
                continue
            at_bound = look.accepted(high) if math.isfinite(high) else (0, 0)
            if at_bound is None:
                wanted_keys.append(high)
            elif at_bound[0] and at_bound[0] >= precision * sum(at_bound):
                found.at_precision[precision] = point(request.bounds[1], *at_bound)
            else:
                found.at_precision[precision] = point(math.nan, 0, 0)
        for threshold, key in borders.items():
            if threshold not in found.at_threshold:
                counts = look.accepted(key)
                if counts is None:
                    wanted_keys.append(key)
                else:
                    found.at_threshold[threshold] = point(threshold, *counts)
        for rate in request.false_match_rates:
            if rate not in found.at_rate and (chosen := settled(cells.at_false_match_rate(rate))) is not None:
                found.at_rate[rate] = _error_rates(scores.to_score, cells, chosen)
        if request.equal_error_rate and found.equal_error_rate is None:
            chosen = settled(cells.equal_error_rate())
            if chosen is not None:
                found.equal_error_rate = cells.crossing(int(chosen[0])) if len(chosen) else math.nan
        if request.average_precision and found.area is None:
            if walks == 1 and not bool(cells.single.all()):
                undecided.append(~cells.single)
            else:
                found.area = cells.average_precision()
                if walks > 1:  # what the first look knew of single keys, and the rest from this one
                    known = initial.of(initial.single).average_precision()
                    rest = cells.of((cells.low < first.cut) | ~cells.single).average_precision()
                    found.area = Enclosure(known.low + rest.low, known.high + rest.high)
        if not undecided and not wanted_keys:
            break
        decisive = np.logical_or.reduce(undecided) if undecided else np.zeros(len(cells.low), bool)
        look = _closer(first, cells, decisive, wanted_keys)
        walk.scan(look)
        cells, walks = look.cells(), walks + 1
    assert found.best_f1 is not None
    return PooledDecisions(
        best_f1=found.best_f1,
        at_precision={precision: found.at_precision[precision] for precision in request.precisions},
        at_threshold=found.at_threshold,
        at_false_match_rate={rate: found.at_rate[rate] for rate in request.false_match_rates},
        equal_error_rate=found.equal_error_rate,
        average_precision=found.area or initial.average_precision(),
        curve=initial.curve(walk, CURVE_POINTS),
        walks=walks,
    )


def _closer(first: PooledCounts, cells: Cells, decisive: Bools, wanted: Sequence[float]) -> EdgeCounts:
    """A look at the relevant keys in the decisive cells, or at as many evenly spaced keys as may be held."""
    index = np.flatnonzero(decisive)
    stretches = _merged([Stretch(float(cells.low[i]), float(cells.high[i])) for i in index])
    capacity = max(1000, first.capacity // 4)
    if int(cells.positives[decisive].sum()) <= capacity:
        edges = _distinct(*first.positives_within(stretches))[0]
    else:
        each = max(2, capacity // max(1, len(stretches)))
        edges = np.concatenate([np.linspace(stretch.low, stretch.high, each) for stretch in stretches])
    ends = [bound for stretch in stretches for bound in stretch]
    return EdgeCounts(first, np.unique(np.concatenate([edges, np.array([*ends, *wanted])])), stretches)


def _error_rates(to_score: Any, cells: Cells, chosen: Ints) -> ErrorRatePoint:
    if not len(chosen):
        return ErrorRatePoint(math.nan, 0.0, 1.0)
    cell = int(chosen[0])
    return ErrorRatePoint(
        to_score(float(cells.low[cell])),
        float(cells.fewest_fp[cell] / cells.negatives) if cells.negatives else 0.0,
        float(1 - cells.tp[cell] / cells.relevant),
    )


def _merged(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Ascending stretches, those that touch made one."""
    merged: list[Stretch] = []
    for stretch in stretches:
        if merged and stretch.low <= merged[-1].high:
            merged[-1] = Stretch(merged[-1].low, max(merged[-1].high, stretch.high))
        else:
            merged.append(stretch)
    return merged


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
        return np.bincount(place, minlength=cells).astype(np.int64) * weights[0]
    counts = np.zeros(cells, np.int64)
    np.add.at(counts, place, weights)
    return counts


def _up_to_first(possible: Bools, certain: Bools) -> Bools:
    """What is possible, up to the first cell that is certain."""
    first = np.flatnonzero(possible & certain)
    if len(first):
        possible = possible.copy()
        possible[first[0] + 1 :] = False
    return possible


def _from_above(counts: NDArray[np.generic]) -> NDArray[Any]:
    """For each cell, the sum over it and all cells above."""
    return np.cumsum(counts[::-1])[::-1]


def _f1(tp: Ints, fp: Ints, relevant: int) -> Floats:
    return 2 * tp.astype(np.float64) / (tp + fp + relevant)


def _precision(tp: Ints, fp: Ints) -> Floats:
    return tp.astype(np.float64) / np.maximum(tp + fp, 1)
