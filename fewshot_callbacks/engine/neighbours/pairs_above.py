"""All pairs whose exact score reaches a threshold: how many there are, and the highest."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.duplicates import row_numbers
from fewshot_callbacks.engine.neighbours.screen import (
    ROWS_OF_TASK,
    ExactPairs,
    Screen,
    Survivors,
    fastest,
    kept_operands,
    threads_for,
    tile_size,
)
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.threads import Task, run_tasks

DENSE_SHARE = 2.0**-9
"""Share of a tile's pairs that survive from which a more exact product of the tile costs less than exact scores of them."""
BUFFERED = 2**16
"""Pairs that are kept beyond the requested number before the lowest are dropped."""


class PairsAbove(NamedTuple):
    """Pairs whose exact score reaches a threshold, the highest first, those of equal scores by row and column."""

    rows: Int[Tensor, "pairs"]
    columns: Int[Tensor, "pairs"]
    exact: Float[Tensor, "pairs"]
    total: int
    """how many there are, which may be more"""


class _Highest:
    """The highest pairs so far, and the number of all; several threads may add to it.

    Args:
        threshold: The threshold.
        most: How many pairs are wanted.
        ceiling: No exact score is higher.
    """

    def __init__(self, threshold: float, most: int, ceiling: float) -> None:
        self.threshold, self.most, self.ceiling = threshold, most, ceiling
        self.total, self.cut, self._held = 0, threshold, 0
        self._last_row = np.inf
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._lock = threading.Lock()

    def cut_for(self, first_row: int) -> float:
        """Return the exact score from which pairs of this row, or later ones, are wanted."""
        with self._lock:
            return np.inf if self.cut >= self.ceiling and first_row > self._last_row else self.cut

    def add(self, sure: int, rows: Tensor, columns: Tensor, exact: Tensor) -> None:
        """Take pairs; `sure` are only counted."""
        above = exact >= self.threshold
        with self._lock:
            self.total += sure + int(above.sum())
            wanted = above & (exact >= self.cut)
            self._parts.append((rows[wanted], columns[wanted], exact[wanted]))
            self._held += len(self._parts[-1][0])
            if self._held > 2 * self.most + BUFFERED:
                self._compact()

    def result(self) -> PairsAbove:
        """Return what was found."""
        self._compact()
        return PairsAbove(*self._parts[0], self.total)

    def _compact(self) -> None:
        """Drop all but the highest pairs that are wanted."""
        rows, columns, exact = (
            torch.cat([torch.empty(0, dtype=torch.float64 if place == 2 else torch.int64), *parts])
            for place, parts in enumerate(zip(*self._parts, strict=True) if self._parts else [()] * 3)
        )
        order = torch.from_numpy(np.lexsort((columns.numpy(), rows.numpy(), -exact.numpy()))[: self.most])
        self._parts = [(rows[order], columns[order], exact[order])]
        self._held = len(order)
        if self.most and len(order) == self.most:
            self.cut, self._last_row = float(exact[order[-1]]), int(rows[order[-1]])


def find_pairs_above(scores: ScoreTiles, threshold: float, most: int, memory_bytes: int) -> PairsAbove:
    """Find all pairs whose exact score is at least `threshold`; with one set those of a row before its column.

    Args:
        scores: Of all pairs.
        threshold: An exact score.
        most: Pairs that are returned, at most.
        memory_bytes: Budget beyond the vectors and the result.
    """
    rows, items = len(scores.queries), torch.arange(len(scores.gallery))
    same_set = scores.queries is scores.gallery
    threads = threads_for(scores, rows * len(items))
    highest = _Highest(threshold, most, scores.score_range[1])
    numbers = row_numbers(scores.gallery)
    exact = ExactPairs(scores, (numbers if same_set else row_numbers(scores.queries), numbers))
    precision = fastest(
        scores, torch.arange(rows), items, lambda estimates: torch.full((len(estimates),), threshold).double()
    )
    screen, tile = Screen(scores, precision), tile_size(memory_bytes, threads)
    search = _Search(screen, exact, highest, same_set, tile, kept_operands(screen, items, tile, memory_bytes))

    height = min(ROWS_OF_TASK, max(tile[0], -(-rows // (4 * threads))))
    blocks = [range(start, min(start + height, rows)) for start in range(0, rows, height)]
    tasks = [Task(frozenset(), partial(search.block, some), 1) for some in blocks]
    run_tasks(tasks, [None] * threads, lambda _: None)
    return highest.result()


@dataclass(frozen=True, eq=False)
class _Search:
    """Finds pairs in tiles of estimates."""

    screen: Screen
    exact: ExactPairs
    highest: _Highest
    same_set: bool
    tile: tuple[int, int]
    kept: list[Tensor] | None
    """operands of the gallery items, where they fit the budget"""

    def block(self, some: range, _: None) -> None:
        """Search all candidates of some rows."""
        scores, (height, width) = self.screen.scores, self.tile
        parts = [
            (rows, self.screen.operand(rows, of_query=True))
            for rows in torch.arange(some.start, some.stop).split(height)
        ]
        threshold = torch.full((height,), self.highest.threshold, dtype=torch.float64)
        lows = [self.screen.lowest(threshold[: len(rows)], rows) for rows, _ in parts]
        for number, columns in enumerate(torch.arange(len(scores.gallery)).split(width)):
            if self.same_set and int(columns[-1]) < some.start:
                continue
            right = self.screen.operand(columns, of_query=False) if self.kept is None else self.kept[number]
            for (rows, left), low in zip(parts, lows, strict=True):
                # of one set, what lies left of the diagonal is the other side of a pair
                first = max(0, int(rows[0]) - int(columns[0])) if self.same_set else 0
                if first < len(columns):
                    self._search(self.screen, rows, columns[first:], left @ right[first:].T, low)

    def _search(self, screen: Screen, rows: Tensor, columns: Tensor, estimates: Tensor, low: Tensor) -> None:
        """Take the pairs of a tile."""
        hot = (estimates.amax(dim=1) >= low).nonzero().flatten()
        if not len(hot):
            return
        if len(hot) < len(rows):
            rows, estimates, low = rows[hot], estimates[hot], low[hot]
        wanted = estimates >= low[:, None]
        if self.same_set and columns[0] <= rows[-1]:
            wanted &= columns[None, :] > rows[:, None]
        cut = self.highest.cut_for(int(rows[0]))
        sure = 0
        if cut > self.highest.threshold:  # some pairs are only counted
            exact = torch.full((len(rows),), self.highest.threshold, dtype=torch.float64)
            counted = estimates >= screen.highest(exact, rows)[:, None]
            if cut < np.inf:
                counted &= estimates < screen.lowest(torch.full_like(exact, cut), rows)[:, None]
            counted &= wanted
            sure = int(counted.sum())
            wanted &= ~counted
        surviving = int(wanted.sum())
        if surviving > DENSE_SHARE * wanted.numel() and screen.precision < Precision.FLOAT64:
            finer = Screen(self.screen.scores, Precision(screen.precision + 1))
            left, right = finer.operand(rows, of_query=True), finer.operand(columns, of_query=False)
            exact = torch.full((len(rows),), self.highest.threshold, dtype=torch.float64)
            self._search(finer, rows, columns, left @ right.T, finer.lowest(exact, rows))
            return
        kept = Survivors.of(wanted)
        queries, items = rows[kept.rows], columns[kept.columns]
        self.highest.add(sure, queries, items, self.exact.of(queries, items))
