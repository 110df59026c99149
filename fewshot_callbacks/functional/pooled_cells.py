"""What is known of all pairs in runs of scores, how they are counted, and in which runs an operating point can lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Stretches = NDArray[np.float64]
"""(stretches, 2): keys from the first up to the second, both included; ascending, and none touches the next"""


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


@runtime_checkable
class Scores(Protocol):
    """What turns keys into the scores that a user reads."""

    def to_score(self, key: float) -> float:
        """The score of a key."""


class Located(NamedTuple):
    """Where in the descending order of their keys a negative of some rank lies."""

    low: float
    high: float
    """its key lies between these two, both included"""
    reached: int | None = None
    """where they are the same: how many negatives have this key or a higher one"""
    above: int = 0
    """and how many have a higher one"""


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

    def likely_best_f1(self, index: Ints, positives: int) -> Ints:
        """Of these cells those whose F1 seems highest, ascending, as many as hold no more than so many relevant pairs."""
        middle = _f1(
            self.tp[index] - self.positives[index] // 2, (self.fewest_fp + self.most_fp)[index] // 2, self.relevant
        )
        order = np.argsort(-middle, kind="stable")
        fitting = np.cumsum(self.positives[index[order]]) <= positives
        chosen: Ints = np.sort(order[fitting])
        return chosen

    def at_precision(self, precision: float, low: float, high: float) -> Bools:
        """The cells that can hold the smallest relevant key in [low, high] that reaches this precision as a threshold."""
        allowed = (self.high >= low) & (self.low <= high)
        possible = allowed & (precision_of(self.tp, self.fewest_fp) >= precision)
        certain = allowed & (self.low >= low) & (self.high <= high) & (precision_of(self.tp, self.most_fp) >= precision)
        return _up_to_first(possible, certain)

    def at_false_match_rate(self, rate: float) -> Bools:
        """The cells that can hold the smallest relevant key that, as a threshold, keeps this false match rate."""
        fewest, most = (false_match_rate(fp, self.negatives) for fp in (self.fewest_fp, self.most_fp))
        return _up_to_first(fewest <= rate, most <= rate)

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
        return Enclosure(float(low.sum()) / self.relevant, float(high.sum()) / self.relevant)

    def of(self, chosen: Bools) -> Cells:
        """Some of the cells."""
        return Cells(
            self.low[chosen],
            self.high[chosen],
            self.single[chosen],
            self.positives[chosen],
            self.tp[chosen],
            self.fewest_fp[chosen],
            self.most_fp[chosen],
            self.tied[chosen],
            self.relevant,
            self.negatives,
        )

    def curve(self, scores: Scores, points: int) -> tuple[tuple[float, float, float], ...]:
        """Threshold, precision and recall at cells that are about evenly spaced in recall."""
        recall = self.tp / self.relevant
        wanted = np.unique(np.searchsorted(-recall, -np.linspace(1, 0, points), side="left").clip(max=len(recall) - 1))
        fp = (self.fewest_fp + self.most_fp) / 2
        return tuple(
            (scores.to_score(float(self.low[i])), float(self.tp[i] / (self.tp[i] + fp[i])), float(recall[i]))
            for i in reversed(wanted.tolist())
        )


class Tally:
    """How many pairs lie at and between some ascending, distinct keys.

    Args:
        keys: these keys.
        noting: where the keys of the pairs are listed, as far as they are computed.
        most: no more keys than these are listed.
    """

    def __init__(self, keys: Floats, noting: Stretches | None = None, most: int = 0) -> None:
        self.keys, self.most = keys, most
        self.noting = np.empty((0, 2)) if noting is None else noting
        self.hits = np.zeros(len(keys) + 1, np.int64)
        self.ties = np.zeros(len(keys) + 1, np.int64)
        self.noted: tuple[Floats, Ints] = np.empty(0), np.empty(0, np.int64)
        """ascending keys, and how many pairs have each; nothing vouches that none is missing"""

    def add(self, keys: Floats, weights: Ints | None) -> None:
        """Count some pairs with these keys."""
        inside = (keys >= self.keys[0]) & (keys <= self.keys[-1])
        if not inside.all():  # to compare with two keys costs less than to search among all
            for place, outside in ((0, keys < self.keys[0]), (-1, keys > self.keys[-1])):
                self.hits[place] += outside.sum() if weights is None else weights[outside].sum()
            keys, weights = keys[inside], None if weights is None else weights[inside]
        below = np.searchsorted(self.keys, keys)
        not_above = np.searchsorted(self.keys, keys, side="right")
        self.hits += histogram(below, weights, len(self.hits))
        tied = below != not_above
        if tied.any():
            of_tied = None if weights is None else weights[tied]
            self.ties -= histogram(below[tied], of_tied, len(self.ties))
            self.ties += histogram(not_above[tied], of_tied, len(self.ties))

    def note(self, keys: Floats, weights: Ints | None) -> None:
        """List the keys of some pairs, of those that lie where keys are wanted."""
        inside = inside_any(keys, self.noting)
        if not inside.any():
            return
        noted = distinct(*joined([self.noted, (keys[inside], None if weights is None else weights[inside])]))
        if len(noted[0]) <= self.most:
            self.noted = noted

    @property
    def total(self) -> int:
        """All pairs."""
        return int(self.hits.sum())

    def accepted(self) -> tuple[Ints, Ints]:
        """For each key, how many are not below it, and how many of those are equal to it."""
        above = from_above(self.hits)[1:]
        reached = from_above(self.hits + self.ties)[1:]
        return reached, reached - above

    def locate(self, rank: int) -> Located:
        """Where the pair lies that `rank - 1` others follow from above."""
        reached, tied = self.accepted()
        above = reached - tied
        last = int(np.count_nonzero(reached >= rank)) - 1
        if last >= 0 and above[last] < rank:
            key = float(self.keys[last])
            return Located(key, key, int(reached[last]), int(above[last]))
        low = float(np.nextafter(self.keys[last], np.inf)) if last >= 0 else -math.inf
        if last + 1 == len(self.keys):
            return Located(low, math.inf)
        high, beyond = float(np.nextafter(self.keys[last + 1], -np.inf)), int(reached[last + 1])
        if last < 0:  # not all of those below the lowest key may have been counted
            return Located(low, high)
        count = int(above[last]) - beyond
        if low == high:
            return Located(low, high, beyond + count, beyond)
        keys, weights = self.noted
        inside = slice(np.searchsorted(keys, low), np.searchsorted(keys, high, side="right"))
        if weights[inside].sum() != count:  # some of the keys between these two have not been listed
            return Located(low, high)
        through = beyond + from_above(weights[inside])
        place = int(np.count_nonzero(through >= rank)) - 1
        key = float(keys[inside][place])
        return Located(key, key, int(through[place]), int(through[place] - weights[inside][place]))

    def between(self) -> Ints:
        """How many lie below the first key, between the first and the second, ..., above the last."""
        reached, tied = self.accepted()
        gaps: Ints = np.concatenate([[self.total], reached - tied]) - np.concatenate([reached, [0]])
        return gaps


def spaced(low: float, high: float, count: int) -> Floats:
    """Keys from one to another: evenly spaced ones, and as many with equally many float64 numbers between neighbours.

    The latter leave one number in `count` even where those of interest are next to zero, and so far from evenly spaced.
    """
    # the bits of float64 numbers, as integers, are in the order of their magnitudes
    first, last = (int(np.float64(abs(end)).view(np.int64)) * (-1 if end < 0 else 1) for end in (low, high))
    offsets = np.linspace(0, last - first, count).astype(np.uint64)
    number = (offsets + np.uint64(first % 2**64)).view(np.int64)
    by_number = np.copysign(np.abs(number).view(np.float64), number)
    keys: Floats = np.unique(np.concatenate([by_number.clip(low, high), np.linspace(low, high, count)]))
    return keys


def merged(low: Floats, high: Floats) -> Stretches:
    """Stretches with ascending lower ends, those that touch made one."""
    reached = np.maximum.accumulate(high)
    first = np.flatnonzero(np.append(True, low[1:] > reached[:-1])[: len(low)])
    last = np.append(first[1:], len(low))[: len(first)] - 1
    return np.stack([low[first], reached[last]], axis=1)


def inside_any(keys: Floats, stretches: Stretches) -> Bools:
    """Which keys lie in one of some stretches."""
    if not len(stretches):
        return np.zeros(len(keys), bool)
    last = np.searchsorted(stretches[:, 0], keys, side="right") - 1
    inside: Bools = (last >= 0) & (keys <= stretches[np.maximum(last, 0), 1])
    return inside


def joined(parts: Sequence[tuple[Floats, Ints | None]]) -> tuple[Floats, Ints | None]:
    """Keys in pieces, with the number of pairs that each stands for, made one piece."""
    keys = np.concatenate([part[0] for part in parts]) if parts else np.empty(0)
    if all(weights is None for _, weights in parts):
        return keys, None
    return keys, np.concatenate([np.ones(len(own), np.int64) if given is None else given for own, given in parts])


def distinct(keys: Floats, weights: Ints | None, *, in_runs: bool = False) -> tuple[Floats, Ints]:
    """Ascending distinct keys, and how many pairs have each; faster if told that a few ascending runs are given."""
    if weights is None:
        keys = np.sort(keys, kind="stable" if in_runs else None)  # the stable way merges runs
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.empty(0, np.int64)
        return keys[first], np.diff(np.append(first, len(keys)))
    values, back = np.unique(keys, return_inverse=True)
    return values, histogram(back, weights, len(values))


def histogram(place: Ints, weights: Ints | None, cells: int) -> Ints:
    """Pairs in each cell; exact also where weights are large."""
    if weights is None or not len(weights):
        return np.bincount(place, minlength=cells).astype(np.int64)
    if weights.strides == (0,):
        same: Ints = np.bincount(place, minlength=cells).astype(np.int64) * weights[0]
        return same
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


def from_above(counts: NDArray[np.generic]) -> NDArray[Any]:
    """For each cell, the sum over it and all cells above."""
    return np.cumsum(counts[::-1])[::-1]


def _f1(tp: Ints, fp: Ints, relevant: int) -> Floats:
    values: Floats = 2 * tp.astype(np.float64) / (tp + fp + relevant)
    return values


# A rate is compared with what was asked for as the correctly rounded quotient of two counts: the number that a report
# shows, and so 14 of 25 reaches 0.56, though this float64 number is a little more than 14/25. Float64 division rounds
# correctly, and counts below 2**53 are float64 numbers. Rounding is monotone, so fewer false positives never do worse.


def precision_of(tp: Ints, fp: Ints) -> Floats:
    """Share of the accepted pairs that are relevant; 0 where none is accepted."""
    values: Floats = tp / np.maximum(tp + fp, 1)
    return values


def false_match_rate(fp: Ints, negatives: int) -> Floats:
    """Share of the negatives that are accepted; 0 where there are none."""
    values: Floats = fp / max(negatives, 1)
    return values


def most_false_positives(tp: int, precision: float) -> int:
    """The largest number of false positives at which so many true positives have this precision, by `precision_of`."""
    accepted = int(tp / Fraction(float(precision)))  # within one of the answer, which rounding the quotient may move
    while tp / (accepted + 1) >= precision:
        accepted += 1
    while accepted > tp and tp / accepted < precision:
        accepted -= 1
    return accepted - tp
