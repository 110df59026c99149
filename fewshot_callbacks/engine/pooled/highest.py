"""The negatives with the highest estimates, collected during a pass."""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.pooled.intervals import Floats, Ints, inside_any, merged
from fewshot_callbacks.engine.pooled.record import PairRecord
from fewshot_callbacks.engine.pooled.tally import ThresholdCounts
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.threads import Task, run_tasks

SCORES_AT_ONCE = 2**13


class OpenPairs(NamedTuple):
    """Pairs of one rectangle whose exact scores are needed."""

    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    weights: Ints
    """how many pairs each stands for"""


class _Part(NamedTuple):
    position: int
    values: Floats
    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    weights: Ints | None


class TopNegatives:
    """Every negative whose exact score lies well above `cut`, with an estimate of that score.

    Args:
        weighted: A pair may stand for several equal ones.
        symmetric: Without weights, each pair stands for two.
    """

    def __init__(self, weighted: bool, *, symmetric: bool) -> None:
        self.weighted, self.each, self.error = weighted, 2 if symmetric else 1, 0.0
        self._cuts: list[float] = []
        self._parts: list[_Part] = []

    def add(self, record: PairRecord, position: int = 0, error: float = 0.0) -> None:
        """Take what one thread has collected of a rectangle; each thread has seen other pairs.

        Args:
            record: Of the thread.
            position: Of the rectangle in the pass.
            error: No estimate lies further from its exact score than this.
        """
        some = slice(int(record.filled[0]))
        weights = record.weights[some].copy() if self.weighted else None
        self.error = error
        self._cuts.append(record.cut)
        self._parts.append(
            _Part(position, record.values[some].copy(), record.rows[some].copy(), record.columns[some].copy(), weights)
        )

    def __len__(self) -> int:
        return sum(len(part.values) for part in self._parts)

    def discard(self) -> None:
        """Keep nothing: they have become too many."""
        self._parts, self._cuts = [], [math.inf]

    def reduce_over_processes(self, processes: Processes) -> None:
        """Agree from which score on nothing is missing in any process, and how far estimates are off."""
        cut, self.error = processes.largest([self.cut, self.error])
        self._cuts = [cut]

    @property
    def cut(self) -> float:
        """Estimates from here on have been kept."""
        return max(self._cuts, default=math.inf)

    @property
    def exact_above(self) -> float:
        """Every negative with this exact score or a higher one is here."""
        return self.cut + self.error

    @cached_property
    def _ordered(self) -> tuple[Floats, Ints | None]:
        """Estimates in ascending order, and how many pairs there are from each on (None: as many as estimates)."""
        values = np.concatenate([np.empty(0), *(part.values for part in self._parts)])
        if not self.weighted:
            return np.sort(values), None
        weights = np.concatenate([np.empty(0, np.int64), *(self._weights(part, 1) for part in self._parts)])
        order = np.argsort(values)
        return values[order], np.append(np.cumsum(weights[order][::-1])[::-1], 0)

    def _reaching(self, estimates: Floats, side: str) -> Ints:
        ordered, from_here = self._ordered
        position = np.searchsorted(ordered, estimates, side="right" if side == "right" else "left")
        if from_here is not None:
            counts: Ints = from_here[position]
            return counts
        return (len(ordered) - position) * self.each

    def bounds(self, scores: Floats) -> NDArray[np.int64]:
        """Return how many negatives of this process at least, and at most, reach each of these scores.

        Args:
            scores: None below `exact_above`.
        """
        # a little more, so that the rounding of these sums changes nothing
        reach = self.error * (1 + 1e-9) + np.abs(scores) * 2.0**-50
        return np.stack([self._reaching(scores + reach, "right"), self._reaching(scores - reach, "left")])

    def count(self, counts: ThresholdCounts) -> dict[int, list[OpenPairs]]:
        """Count the pairs against some thresholds, the lowest of which is not below `exact_above`.

        Returns:
            By the position of their rectangle, pairs that are not counted: their estimates leave open on which side of a
            threshold they lie, or their exact scores are to be listed. See `exact_scores_of`.
        """
        thresholds = counts.thresholds
        reach = self.error * (1 + 1e-9) + float(np.abs(thresholds[[0, -1]]).max()) * 2.0**-50
        noting = merged(counts.noting[:, 0] - reach, counts.noting[:, 1] + reach)
        open_pairs: dict[int, list[OpenPairs]] = {}
        for part in self._parts:
            weights = self._weights(part, self.each)
            above = part.values > thresholds[-1] + reach
            within = np.flatnonzero((part.values >= thresholds[0] - reach) & ~above)
            within = within[part.values[within].argsort()]  # NumPy finds the places of ascending values much faster
            inside = part.values[within]
            open_ = np.searchsorted(thresholds, inside - reach) != np.searchsorted(
                thresholds, inside + reach, side="right"
            )
            open_ |= inside_any(inside, noting)
            counts.add(inside[~open_], weights[within[~open_]])
            counts.add(np.full(1, np.inf), weights[above].sum()[None])
            if open_.any():
                chosen = within[open_]
                pairs = OpenPairs(part.rows[chosen], part.columns[chosen], weights[chosen])
                open_pairs.setdefault(part.position, []).append(pairs)
        return open_pairs

    def _weights(self, part: _Part, each: int) -> Ints:
        """Return how many pairs each entry stands for."""
        return np.broadcast_to(np.int64(each), part.values.shape) if part.weights is None else part.weights


def exact_scores_of(scores: ScoreTiles, pairs: OpenPairs, threads: int) -> Floats:
    """Return the exact score of each pair, made on several threads."""
    found = np.empty(len(pairs.rows))
    assert scores.compiled is not None
    compute, sides = scores.compiled.pair_scores, scores.pairs()

    def fill(start: int, _: None) -> None:
        some = slice(start, start + SCORES_AT_ONCE)
        compute(sides, pairs.rows[some], pairs.columns[some], found[some])

    tasks = [Task(frozenset(), partial(fill, start), 1) for start in range(0, len(found), SCORES_AT_ONCE)]
    if tasks:
        run_tasks(tasks, [None] * min(threads, len(tasks)), lambda _: None)
    return found
