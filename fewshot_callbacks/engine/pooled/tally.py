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
    """Where in the descending order of the scores a negative of some rank lies."""

    low: float
    high: float
    """its score lies between these two, both included"""
    reached: int | None = None
    """where they are the same: how many negatives have this score or a higher one"""
    above: int = 0
    """and how many have a higher one"""


class ThresholdCounts:
    """How many pairs lie at and between some ascending, distinct thresholds.

    Args:
        thresholds: These.
        noting: Where the exact scores of the pairs are listed, as far as they are computed.
        most: No more scores than these are listed.
    """

    def __init__(self, thresholds: Floats, noting: ScoreIntervals | None = None, most: int = 0) -> None:
        self.thresholds, self.most = thresholds, most
        self.noting = np.empty((0, 2)) if noting is None else noting
        self.hits = np.zeros(len(thresholds) + 1, np.int64)
        self.ties = np.zeros(len(thresholds) + 1, np.int64)
        self.noted: tuple[Floats, Ints] = np.empty(0), np.empty(0, np.int64)
        """ascending scores, and how many pairs have each; nothing vouches that none is missing"""

    def add(self, scores: Floats, weights: Ints | None) -> None:
        """Count some pairs with these scores."""
        inside = (scores >= self.thresholds[0]) & (scores <= self.thresholds[-1])
        if not inside.all():  # to compare with two thresholds costs less than to search among all
            for end, outside in ((0, scores < self.thresholds[0]), (-1, scores > self.thresholds[-1])):
                self.hits[end] += outside.sum() if weights is None else weights[outside].sum()
            scores, weights = scores[inside], None if weights is None else weights[inside]
        below = np.searchsorted(self.thresholds, scores)
        not_above = np.searchsorted(self.thresholds, scores, side="right")
        self.hits += histogram(below, weights, len(self.hits))
        tied = below != not_above
        if tied.any():
            of_tied = None if weights is None else weights[tied]
            self.ties -= histogram(below[tied], of_tied, len(self.ties))
            self.ties += histogram(not_above[tied], of_tied, len(self.ties))

    def note(self, scores: Floats, weights: Ints | None) -> None:
        """List the exact scores of those pairs that lie where they are wanted."""
        inside = inside_any(scores, self.noting)
        if not inside.any():
            return
        noted = distinct(*joined([self.noted, (scores[inside], None if weights is None else weights[inside])]))
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
        """All pairs that have been counted."""
        return int(self.hits.sum())

    def accepted(self) -> tuple[Ints, Ints]:
        """Return for each threshold how many are not below it, and how many of those are equal to it."""
        above = from_above(self.hits)[1:]
        reached = from_above(self.hits + self.ties)[1:]
        return reached, reached - above

    def locate(self, rank: int) -> Located:
        """Return where the pair lies that `rank - 1` others follow from above."""
        reached, tied = self.accepted()
        above = reached - tied
        last = int(np.count_nonzero(reached >= rank)) - 1
        if last >= 0 and above[last] < rank:
            score = float(self.thresholds[last])
            return Located(score, score, int(reached[last]), int(above[last]))
        low = float(np.nextafter(self.thresholds[last], np.inf)) if last >= 0 else -math.inf
        if last + 1 == len(self.thresholds):
            return Located(low, math.inf)
        high, beyond = float(np.nextafter(self.thresholds[last + 1], -np.inf)), int(reached[last + 1])
        if last < 0:  # not all of those below the lowest threshold may have been counted
            return Located(low, high)
        count = int(above[last]) - beyond
        if low == high:
            return Located(low, high, beyond + count, beyond)
        scores, weights = self.noted
        inside = slice(np.searchsorted(scores, low), np.searchsorted(scores, high, side="right"))
        if weights[inside].sum() != count:  # some of the scores between these two have not been listed
            return Located(low, high)
        through = beyond + from_above(weights[inside])
        chosen = int(np.count_nonzero(through >= rank)) - 1
        score = float(scores[inside][chosen])
        return Located(score, score, int(through[chosen]), int(through[chosen] - weights[inside][chosen]))

    def between(self) -> Ints:
        """Return how many lie below the first threshold, between the first and the second, ..., above the last."""
        reached, tied = self.accepted()
        gaps: Ints = np.concatenate([[self.total], reached - tied]) - np.concatenate([reached, [0]])
        return gaps
