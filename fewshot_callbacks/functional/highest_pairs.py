"""The pairs of different classes with the highest estimates, as they were met on the way past all pairs."""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.functional.pooled_cells import Floats, Ints, Tally
from fewshot_callbacks.functional.workers import Task, run_tasks

if TYPE_CHECKING:
    from fewshot_callbacks.functional.kernels.compiled import Pooled
    from fewshot_callbacks.functional.ranks import RankingPass

KEYS_AT_ONCE = 2**13


class _Part(NamedTuple):
    values: Floats
    rows: NDArray[np.int32]
    columns: NDArray[np.int32]
    weights: Ints | None


class HighestPairs:
    """Every negative whose key lies well above `cut`, with an estimate of that key.

    Args:
        walk: the pairs.
        error: no estimate lies further from its key than this.
    """

    def __init__(self, walk: RankingPass, error: float) -> None:
        self.walk, self.error = walk, error
        self._cuts: list[float] = []
        self._parts: list[_Part] = []

    def add(self, record: Pooled) -> None:
        """Take what one thread has collected; each thread has seen other pairs."""
        some = slice(int(record.filled[0]))
        weights = record.weights[some].copy() if len(record.weights) else None
        self._cuts.append(record.cut)
        self._parts.append(
            _Part(record.values[some].copy(), record.rows[some].copy(), record.columns[some].copy(), weights)
        )

    def __len__(self) -> int:
        return sum(len(part.values) for part in self._parts)

    def give_up(self) -> None:
        """Keep nothing: they have become too many."""
        self._parts, self._cuts = [], [math.inf]

    @property
    def cut(self) -> float:
        """Estimates from here on have been kept."""
        return max(self._cuts, default=math.inf)

    @property
    def complete_from(self) -> float:
        """Every negative with this key or a higher one is here."""
        return self.cut + self.error

    @cached_property
    def _all(self) -> _Part:
        parts, self._parts = self._parts, []  # not to be held twice
        weights = [part.weights for part in parts if part.weights is not None]
        self._parts.append(
            _Part(
                np.concatenate([part.values for part in parts]),
                np.concatenate([part.rows for part in parts]),
                np.concatenate([part.columns for part in parts]),
                np.concatenate(weights) if weights else None,
            )
        )
        return self._parts[0]

    @cached_property
    def _ordered(self) -> tuple[Floats, Ints | None]:
        """Estimates in ascending order, and how many pairs there are from each on (None: as many as estimates)."""
        values, weights = self._all.values, self._all.weights
        if weights is None:
            return np.sort(values), None
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
        """How many negatives at least, and at most, reach each of these keys, none of which lies below `complete_from`."""
        if not self._parts:
            nothing = np.zeros(len(keys), np.int64)
            return nothing, nothing
        # a little more, so that the rounding of these sums changes nothing
        reach = self.error * (1 + 1e-9) + np.abs(keys) * 2.0**-50
        return self._reaching(keys + reach, "right"), self._reaching(keys - reach, "left")

    def count(self, tally: Tally) -> None:
        """Count the pairs against some keys, the lowest of which is not below `complete_from`, exactly."""
        edges, (values, rows, columns, weights) = tally.keys, self._all
        reach = self.error * (1 + 1e-9) + float(np.abs(edges[[0, -1]]).max()) * 2.0**-50
        above = values > edges[-1] + reach
        within = np.flatnonzero((values >= edges[0] - reach) & ~above)
        inside = values[within]
        open_ = np.searchsorted(edges, inside - reach) != np.searchsorted(edges, inside + reach, side="right")
        inside[open_] = self._keys(rows[within[open_]], columns[within[open_]])
        each = 2 if self.walk.both else 1
        amount = np.broadcast_to(np.int64(each), values.shape) if weights is None else weights
        tally.add(inside, amount[within])
        tally.add(np.full(1, np.inf), amount[above].sum()[None])

    def _keys(self, rows: NDArray[np.int32], columns: NDArray[np.int32]) -> Floats:
        keys = np.empty(len(rows))
        scores = self.walk.scores
        assert scores.compiled is not None
        compute, pairs = scores.compiled.keys, scores.pairs()

        def fill(start: int, _: None) -> None:
            part = slice(start, start + KEYS_AT_ONCE)
            compute(pairs, rows[part], columns[part], keys[part])

        tasks = [Task(frozenset(), partial(fill, start), 1) for start in range(0, len(rows), KEYS_AT_ONCE)]
        if tasks:
            run_tasks(tasks, [None] * min(self.walk.threads, len(tasks)), lambda _: None)
        return keys
