"""How many pairs lie at and between chosen thresholds."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.pooled.intervals import (
    Floats,
    Ints,
    ScoreIntervals,
    distinct,
    from_above,
    histogram,
    inside_any,
    joined,
)


class Located(NamedTuple):
    """Where in the descending order of their keys a negative of some rank lies."""

    low: float
    high: float
    """its key lies between these two, both included"""
    reached: int | None = None
    """where they are the same: how many negatives have this key or a higher one"""
    above: int = 0
    """and how many have a higher one"""


class ThresholdCounts:
    """How many pairs lie at and between some ascending, distinct keys.

    Args:
        keys: these keys.
        noting: where the keys of the pairs are listed, as far as they are computed.
        most: no more keys than these are listed.
    """

    def __init__(self, keys: Floats, noting: ScoreIntervals | None = None, most: int = 0) -> None:
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

    def add_counters(self, hits: Ints, ties: Ints) -> None:
        """Add what was counted elsewhere against the same thresholds."""
        self.hits += hits
        self.ties += ties

    def reduce_over_processes(self, processes: Processes) -> None:
        """Sum the counts, and join the lists of scores, of all processes."""
        self.hits, self.ties = processes.summed(np.stack([self.hits, self.ties]))
        self.noted = distinct(*joined(processes.gather(self.noted)))

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
