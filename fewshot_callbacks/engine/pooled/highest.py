"""The pairs of different classes with the highest estimates, as they were met on the way past all pairs."""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.pooled.intervals import Floats, Ints, inside_any, merged
from fewshot_callbacks.engine.pooled.tally import ThresholdCounts
from fewshot_callbacks.engine.threads import Task, run_tasks

if TYPE_CHECKING:
    from fewshot_callbacks.engine.cpu.count_kernels import Pooled
    from fewshot_callbacks.engine.ranking_pass import RankingPass
    from fewshot_callbacks.engine.scores.products import ScoreTiles

KEYS_AT_ONCE = 2**13


class _Part(NamedTuple):
    rectangle: int
    values: Floats
    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    weights: Ints | None


class TopNegatives:
    """Every negative whose key lies well above `cut`, with an estimate of that key.

    Args:
        walk: the pairs.
        error: no estimate lies further from its key than this.
    """

    def __init__(self, walk: RankingPass, error: float) -> None:
        self.walk, self.error = walk, error
        self._cuts: list[float] = []
        self._parts: list[_Part] = []

    def add(self, record: Pooled, rectangle: int = 0) -> None:
        """Take what one thread has collected in a rectangle; each thread has seen other pairs."""
        some = slice(int(record.filled[0]))
        weights = record.weights[some].copy() if len(record.weights) else None
        self._cuts.append(record.cut)
        self._parts.append(
            _Part(rectangle, record.values[some].copy(), record.rows[some].copy(), record.columns[some].copy(), weights)
        )

    def __len__(self) -> int:
        return sum(len(part.values) for part in self._parts)

    def discard(self) -> None:
        """Keep nothing: they have become too many."""
        self._parts, self._cuts = [], [math.inf]

    def reduce_over_processes(self) -> None:
        """All pairs have been met: from where on nothing is missing in any process, and how far estimates are off."""
        cut, self.error = self.walk.processes.largest([self.cut, self.error])
        self._cuts = [cut]

    @property
    def cut(self) -> float:
        """Estimates from here on have been kept."""
        return max(self._cuts, default=math.inf)

    @property
    def exact_above(self) -> float:
        """Every negative with this key or a higher one is here."""
        return self.cut + self.error

    @cached_property
    def _ordered(self) -> tuple[Floats, Ints | None]:
        """Estimates in ascending order, and how many pairs there are from each on (None: as many as estimates)."""
        values = np.concatenate([np.empty(0), *(part.values for part in self._parts)])
        if not self.walk.repeats:
            return np.sort(values), None
        weights = np.concatenate([np.empty(0, np.int64), *(_weights(part, 1) for part in self._parts)])
        order = np.argsort(values)
        return values[order], np.append(np.cumsum(weights[order][::-1])[::-1], 0)

    def _reaching(self, estimates: Floats, side: str) -> Ints:
        ordered, from_here = self._ordered
        place = np.searchsorted(ordered, estimates, side="right" if side == "right" else "left")
        if from_here is not None:
            counts: Ints = from_here[place]
            return counts
        return (len(ordered) - place) * (2 if self.walk.both else 1)

    def bounds(self, keys: Floats) -> tuple[Ints, Ints]:
        """How many negatives at least, and at most, reach each of these keys, none of which lies below `exact_above`."""
        # a little more, so that the rounding of these sums changes nothing
        reach = self.error * (1 + 1e-9) + np.abs(keys) * 2.0**-50
        counts = np.stack([self._reaching(keys + reach, "right"), self._reaching(keys - reach, "left")])
        fewest, most = self.walk.processes.summed(counts)
        return fewest, most

    def count(self, tally: ThresholdCounts) -> None:
        """Count the pairs against some keys, the lowest of which is not below `exact_above`, exactly.

        The vectors of those whose key is asked for are met once more, if they are not here.
        """
        edges = tally.keys
        reach = self.error * (1 + 1e-9) + float(np.abs(edges[[0, -1]]).max()) * 2.0**-50
        noting = merged(tally.noting[:, 0] - reach, tally.noting[:, 1] + reach)
        open_pairs: dict[int, list[tuple[_Part, Ints]]] = {}
        for part in self._parts:
            weights = _weights(part, 2 if self.walk.both else 1)
            above = part.values > edges[-1] + reach
            within = np.flatnonzero((part.values >= edges[0] - reach) & ~above)
            inside = part.values[within]
            open_ = np.searchsorted(edges, inside - reach) != np.searchsorted(edges, inside + reach, side="right")
            open_ |= inside_any(inside, noting)
            tally.add(inside[~open_], weights[within[~open_]])
            tally.add(np.full(1, np.inf), weights[above].sum()[None])
            if open_.any():
                open_pairs.setdefault(part.rectangle, []).append((part, within[open_]))
        for place, scores in self.walk.revisit_tiles(bool(open_pairs)):
            for part, index in open_pairs.get(place, []):
                keys = self._keys(scores, part.rows[index], part.columns[index])
                weights = _weights(part, 2 if self.walk.both else 1)[index]
                tally.add(keys, weights)
                tally.note(keys, weights)
            del scores  # before the next guest comes

    def _keys(self, scores: ScoreTiles, rows: NDArray[np.int32], columns: NDArray[np.int32]) -> Floats:
        keys = np.empty(len(rows))
        assert scores.compiled is not None
        compute, pairs = scores.compiled.keys, scores.pairs()

        def fill(start: int, _: None) -> None:
            part = slice(start, start + KEYS_AT_ONCE)
            compute(pairs, rows[part], columns[part], keys[part])

        tasks = [Task(frozenset(), partial(fill, start), 1) for start in range(0, len(rows), KEYS_AT_ONCE)]
        if tasks:
            run_tasks(tasks, [None] * min(self.walk.threads, len(tasks)), lambda _: None)
        return keys


def _weights(part: _Part, each: int) -> Ints:
    """How many pairs each entry stands for; `each` where that is the same for all."""
    return np.broadcast_to(np.int64(each), part.values.shape) if part.weights is None else part.weights
