"""The score grid: scores of relevant pairs, and how many relevant pairs reach each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.counted_values import CountedValues
from fewshot_callbacks.engine.counting import FloatArray
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.scale import Floats

# Yields the scores of all relevant pairs of this process, in pieces.
RelevantPieces = Callable[[], Iterable[CountedValues]]


def unique_scores(scores: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct scores, ascending. The scores of one process are ascending, and are not sorted again."""
    if not len(scores):
        return scores
    if (scores[1:] < scores[:-1]).any():
        scores = np.sort(scores)
    is_first = np.ones(len(scores), bool)
    np.not_equal(scores[1:], scores[:-1], out=is_first[1:])
    return scores[is_first]


def at_upper_ends(counts: Ints) -> Ints:
    """Return (grid + 1,) the numbers of pairs that reach the upper end of each cell.

    No pair reaches the upper end of the last cell, which is infinite.

    Args:
        counts: (grid,) numbers of pairs that reach each score of the grid.
    """
    return np.append(counts, 0)


def above_lower_ends(total: int, above: Ints) -> Ints:
    """Return (grid + 1,) the numbers of pairs above the lower end of each cell.

    All pairs are above the lower end of the first cell, which is minus infinity.

    Args:
        total: Number of all pairs.
        above: (grid,) numbers of pairs above each score of the grid.
    """
    return np.append(total, above)


def _are_inside_cells(scores: FloatArray, grid: ScoreGrid, cells: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which of the ascending scores are inside the chosen cells, (grid + 1,), of a grid."""
    steps = np.zeros(len(scores) + 1, np.int8)
    np.add.at(steps, np.searchsorted(scores, grid.lower_ends[cells], side="right"), 1)
    np.subtract.at(steps, np.searchsorted(scores, grid.upper_ends[cells], side="left"), 1)
    return np.cumsum(steps[:-1], dtype=np.int8) > 0


class GridCounts:
    """Numbers of pairs at each score of a grid, summed over pieces.

    Args:
        scores: (grid,) ascending.
    """

    def __init__(self, scores: Floats) -> None:
        self.scores = scores
        # (grid,) pairs with this score or a higher one
        self.reaching = np.zeros(len(scores), np.int64)
        # (grid,) pairs with a higher score
        self.above = np.zeros(len(scores), np.int64)
        self.total = 0
        # lowest and highest score of all pairs
        self.lowest = np.inf
        self.highest = -np.inf

    def add(self, piece: CountedValues) -> None:
        """Count the pairs of a piece."""
        self.reaching += piece.count_reaching(self.scores)
        self.above += piece.count_reaching(np.nextafter(self.scores, np.inf))
        self.total += piece.total
        self.lowest = min(self.lowest, float(piece.values.min(initial=np.inf)))
        self.highest = max(self.highest, float(piece.values.max(initial=-np.inf)))


@dataclass(frozen=True)
class ScoreGrid:
    """The score grid: ascending distinct scores of relevant pairs, all or some, and the relevant pairs at each score.

    A grid of n scores cuts the line into n + 1 cells. Neither end of a cell belongs to the cell:

        cell 0     | cell 1              | ... | cell n
        -inf       grid[0]      grid[1]        grid[n - 1]     +inf
    """

    scores: Floats  # (grid,)
    reaching: Ints  # (grid,) relevant pairs with this score or a higher one
    above: Ints  # (grid,) relevant pairs with a higher score
    total: int  # all relevant pairs

    @classmethod
    def from_pieces(cls, scores: Floats, pieces: Iterable[CountedValues], processes: Processes = ALONE) -> ScoreGrid:
        """Return a grid with the relevant pairs counted at each score. *Collective*.

        Args:
            scores: Ascending. Scores of no relevant pair are left out.
            pieces: The scores of all relevant pairs of this process.
            processes: All processes.
        """
        counts = GridCounts(scores)
        for piece in pieces:
            counts.add(piece)
        return cls.from_counts(counts, processes)

    @classmethod
    def from_counts(cls, counts: GridCounts, processes: Processes = ALONE) -> ScoreGrid:
        """Return a grid, given counts of one process. Scores of no relevant pair are left out. *Collective*."""
        reaching = counts.reaching
        above = counts.above
        total = counts.total
        if processes.count > 1:
            totals = processes.summed(np.concatenate((reaching, above, [total])))
            reaching, above = totals[:-1].reshape(2, -1)
            total = int(totals[-1])
        occurs = reaching > above
        return cls(counts.scores[occurs], reaching[occurs], above[occurs], total)

    @property
    def lower_ends(self) -> Floats:
        """(grid + 1,) Lower end of each cell."""
        return np.append(-np.inf, self.scores)

    @property
    def upper_ends(self) -> Floats:
        """(grid + 1,) Upper end of each cell."""
        return np.append(self.scores, np.inf)

    @cached_property
    def above_lower_ends(self) -> Ints:
        """(grid + 1,) Relevant pairs that score higher than the lower end of each cell."""
        return above_lower_ends(self.total, self.above)

    @cached_property
    def reaching_upper_ends(self) -> Ints:
        """(grid + 1,) Relevant pairs that reach the upper end of each cell."""
        return at_upper_ends(self.reaching)

    @cached_property
    def inside_cells(self) -> Ints:
        """(grid + 1,) Relevant pairs inside each cell; 0 everywhere if the grid contains all of their scores."""
        inside: Ints = self.above_lower_ends - self.reaching_upper_ends
        assert inside.min() >= 0, "a cell has a negative number of pairs"
        return inside

    def refined(
        self, cells: NDArray[np.bool_], pieces: RelevantPieces, room: int, processes: Processes = ALONE
    ) -> ScoreGrid:
        """Return the grid with more scores: all scores in the chosen cells, or as many as fit. *Collective*.

        Args:
            cells: (grid + 1,) whether each cell is chosen. Some of the chosen cells have scores inside (`inside_cells`).
            pieces: Yields the scores of all relevant pairs of this process.
            room: Number of scores that there is room for.
            processes: All processes.
        """
        step = math.ceil(self.inside_cells[cells].sum() / room)
        added: list[FloatArray] = [self.scores]
        kept: list[CountedValues] = []
        for piece in pieces():
            inside = piece.where(_are_inside_cells(piece.values, self, cells))
            scores = unique_scores(inside.values)
            # The first score is in the middle of the first step, so that even a single score halves its cell.
            added.append(scores[min(step, len(scores)) // 2 :: step])
            if step == 1:  # there is room for all
                kept.append(inside)
        scores = unique_scores(processes.joined(np.concatenate(added)))
        if step > 1:
            return ScoreGrid.from_pieces(scores, pieces(), processes)
        return self._with_all_inside(scores, kept, processes)

    def _with_all_inside(self, scores: Floats, inside: Sequence[CountedValues], processes: Processes) -> ScoreGrid:
        """Return the grid with all scores inside the chosen cells, without counting all pairs again. *Collective*.

        A new score s is inside a cell. The upper end u of the cell is a score of this grid or infinity. Therefore

            reaching(s) = reaching(u) + pairs inside the cells that reach s - pairs inside the cells that reach u

        and the same holds for the pairs above s.

        Args:
            scores: Ascending: the scores of this grid, and all scores inside these cells.
            inside: The scores inside these cells of the relevant pairs of this process.
            processes: All processes.
        """
        inside_pairs = CountedValues.joined(inside)
        inside_counts = np.stack(
            [inside_pairs.count_reaching(scores), inside_pairs.count_reaching(np.nextafter(scores, np.inf))]
        )
        if processes.count > 1:
            inside_counts = processes.summed(inside_counts)
        inside_reaching, inside_above = inside_counts
        old_positions = np.searchsorted(scores, self.scores)
        is_new = np.ones(len(scores), bool)
        is_new[old_positions] = False
        cells = np.searchsorted(self.scores, scores[is_new])
        from_other_cells = (self.reaching_upper_ends - at_upper_ends(inside_reaching[old_positions]))[cells]
        reaching = np.empty(len(scores), np.int64)
        reaching[old_positions] = self.reaching
        reaching[is_new] = from_other_cells + inside_reaching[is_new]
        above = np.empty(len(scores), np.int64)
        above[old_positions] = self.above
        above[is_new] = from_other_cells + inside_above[is_new]
        return ScoreGrid(scores, reaching, above, self.total)
