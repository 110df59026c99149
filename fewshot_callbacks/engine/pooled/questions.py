"""Questions about all pairs: each asks for one relevant score, which becomes a threshold for all queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.pooled.collector import Wanted
from fewshot_callbacks.engine.pooled.grid import ScoreGrid, above_lower_ends, at_upper_ends
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.scale import Floats

Bools = NDArray[np.bool_]
Counts = Ints | Floats
"""Exact numbers of pairs, or numbers estimated from a sample."""
Holds = Callable[[Ints, Counts, int, float], Bools]
"""Returns whether a condition holds at each score, given the numbers of relevant pairs and of negatives that each score
accepts, and the numbers of all relevant pairs and of all negatives. Fewer accepted negatives never hurt."""

# A rate is the correctly rounded quotient of two counts, as a report shows it, and is compared with the requested rate. So
# 14 of 25 reaches 0.56, although the float64 number 0.56 is slightly more than 14/25. Float64 division rounds correctly, and
# counts below 2**53 are float64 numbers. Rounding is monotone, so fewer false positives never do worse.


def precision_of(true_positives: Ints, false_positives: Counts) -> Floats:
    """Return the share of the accepted pairs that are relevant; 0 if no pair is accepted."""
    values: Floats = true_positives / np.maximum(true_positives + false_positives, 1)
    return values


def false_match_rate(false_positives: Counts, negatives: float) -> Floats:
    """Return the share of the negatives that are accepted; 0 if there are no negatives."""
    values: Floats = false_positives / max(negatives, 1)
    return values


def f1_of(true_positives: Ints, false_positives: Counts, relevant: int) -> Floats:
    """Return F1 at each threshold, 2 TP / (2 TP + FP + FN)."""
    values: Floats = 2 * true_positives / np.maximum(true_positives + false_positives + relevant, 1)
    return values


class NegativeBounds(NamedTuple):
    """Bounds of the number of negatives at each score of the score grid."""

    scores: Floats
    """(grid,) scores at which negatives are counted: the scores of the grid, or the next higher float64 numbers"""
    fewest: Ints  # (grid,)
    most: Ints  # (grid,)
    total: int
    """number of all negatives"""

    @property
    def open(self) -> Ints:
        """(grid,) Number of negatives that may or may not reach each score."""
        return self.most - self.fewest

    @property
    def fewest_at_upper_ends(self) -> Ints:
        """(grid + 1,) Smallest number of negatives that reach the upper end of each cell."""
        return at_upper_ends(self.fewest)

    @property
    def most_above_lower_ends(self) -> Ints:
        """(grid + 1,) Largest number of negatives that score higher than the lower end of each cell."""
        return above_lower_ends(self.total, self.most)


class Findings(NamedTuple):
    """The answer of a question as far as bounds of the negatives determine it.

    It is settled once no open position and no cell is left.
    """

    position: int | None
    """grid position of the answer, unless another score is the answer; None if no score of the grid is an answer"""
    open_positions: Ints
    """positions in the grid of scores whose counts may change the answer, likely answers first"""
    cells: Bools
    """(grid + 1,) whether relevant scores inside each cell may be the answer; a superfluous cell costs time, and a
    missing cell gives a wrong answer"""


@runtime_checkable
class Question(Protocol):
    """Asks for one relevant score, as a threshold of all pairs."""

    @property
    def counts_above(self) -> bool:
        """Whether only negatives above the threshold are counted, rather than all that reach it."""

    def find(self, grid: ScoreGrid, negatives: NegativeBounds) -> Findings:
        """Return where the answer is or may be, given the score grid and bounds of the negatives at its scores."""

    def wanted(self, grid: ScoreGrid, false_positives: Floats, negatives: float) -> Wanted:
        """Return about how many of the highest negatives find the answer, and prove that no lower score is the answer.

        Args:
            grid: The score grid.
            false_positives: (grid,) number of negatives that reach each of its scores, estimated from a sample.
            negatives: Number of all negatives, estimated from a sample.
        """


@dataclass(frozen=True)
class BestF1:
    """Asks for the score with the best F1; for the highest such score if several tie."""

    counts_above: bool = False

    def find(self, grid: ScoreGrid, negatives: NegativeBounds) -> Findings:
        """Return where the best F1 is or may be."""
        lowest_f1 = f1_of(grid.reaching, negatives.most, grid.total)
        highest_f1 = f1_of(grid.reaching, negatives.fewest, grid.total)
        proved = lowest_f1.max(initial=0.0)
        possible = np.flatnonzero(highest_f1 >= proved)
        open_positions = possible[negatives.open[possible] > 0]
        likely_first = np.argsort(-(lowest_f1 + highest_f1)[open_positions], kind="stable")
        # the F1 of a score inside a cell if it accepted all relevant pairs of the cell and none of its negatives
        highest_f1_in_cells = f1_of(grid.above_lower_ends, negatives.fewest_at_upper_ends, grid.total)
        cells = (highest_f1_in_cells >= proved) & (grid.inside_cells > 0)
        # The highest score that may be the best is the answer once nothing is open.
        position = int(possible[-1])
        return Findings(position, open_positions[likely_first], cells)

    def wanted(self, grid: ScoreGrid, false_positives: Floats, negatives: float) -> Wanted:
        """Return about how many negatives find the best F1, and prove that no lower score has a better F1."""
        f1 = 2 * grid.reaching / (grid.reaching + false_positives + grid.total)
        best = f1.max()
        # F1 is flat near its maximum, so count the negatives that reach the lowest score with almost the best F1.
        needed = float(false_positives[np.argmax(f1 >= 0.95 * best)])
        # With FP negatives F1 is at most 2 R / (2 R + FP), even if all R relevant pairs are accepted. With more than
        # 2 R (1 / best - 1) negatives this is less than `best`.
        proving = 2 * grid.total * (1 / best - 1)
        return Wanted(min(needed, proving), proving)


@dataclass(frozen=True)
class LowestScore:
    """Asks for the lowest relevant score from `low` to `high` at which a condition holds."""

    holds: Holds
    low: float = -math.inf
    high: float = math.inf
    counts_above: bool = False
    """whether pairs above the score are counted; then fewer relevant pairs must never hurt in `holds` either"""

    def find(self, grid: ScoreGrid, negatives: NegativeBounds) -> Findings:
        """Return where the lowest score is or may be."""
        counted = self._counted(grid)
        allowed = (grid.scores >= self.low) & (grid.scores <= self.high)
        may_hold = allowed & self.holds(counted, negatives.fewest, grid.total, negatives.total)
        certain = np.flatnonzero(allowed & self.holds(counted, negatives.most, grid.total, negatives.total))
        open_positions = np.flatnonzero(may_hold)
        cells = self._possible_cells(grid, negatives) & (grid.inside_cells > 0)
        if not len(certain):
            return Findings(None, open_positions, cells)
        # The lowest score is not above a score at which the condition certainly holds.
        first = int(certain[0])
        cells[first + 1 :] = False
        open_positions = open_positions[open_positions < first]
        if not len(open_positions) and negatives.open[first]:
            # The condition holds for any count, but the count is part of the answer.
            open_positions = certain[:1]
        return Findings(first, open_positions, cells)

    def _counted(self, grid: ScoreGrid) -> Ints:
        """Return the number of relevant pairs that are counted at each score of the grid."""
        return grid.above if self.counts_above else grid.reaching

    def _possible_cells(self, grid: ScoreGrid, negatives: NegativeBounds) -> Bools:
        """Return which cells overlap [low, high] and may have a score at which the condition holds."""
        most_counted = grid.reaching_upper_ends if self.counts_above else grid.above_lower_ends
        possible = self.holds(most_counted, negatives.fewest_at_upper_ends, grid.total, negatives.total)
        return possible & (grid.upper_ends >= self.low) & (grid.lower_ends <= self.high)

    def wanted(self, grid: ScoreGrid, false_positives: Floats, negatives: float) -> Wanted:
        """Return about how many negatives find the lowest score, and prove it. The interval is ignored."""
        holds = self.holds(self._counted(grid), false_positives, grid.total, negatives)
        reached = np.flatnonzero(holds)
        needed = float(false_positives[reached[0]]) if len(reached) else 0.0
        if self.counts_above:
            return Wanted(needed, needed)
        # If the condition does not even hold with all relevant pairs, it holds at no lower score.
        all_relevant = np.full(len(grid.reaching), grid.total)
        none_below = np.flatnonzero(~self.holds(all_relevant, false_positives, grid.total, negatives))
        return Wanted(needed, float(false_positives[none_below[-1]]) if len(none_below) else 0.0)


def at_precision(precision: float, low: float, high: float) -> LowestScore:
    """Return the question for the lowest relevant score from `low` to `high` with at least this precision."""

    def holds(true_positives: Ints, false_positives: Counts, _: int, __: float) -> Bools:
        return (true_positives > 0) & (precision_of(true_positives, false_positives) >= precision)

    return LowestScore(holds, low, high)


def at_false_match_rate(rate: float) -> LowestScore:
    """Return the question for the lowest relevant score that accepts at most this share of the negatives."""

    def holds(_: Ints, false_positives: Counts, __: int, negatives: float) -> Bools:
        return false_match_rate(false_positives, negatives) <= rate

    return LowestScore(holds)


def rates_cross(above: Ints, false_positives: Counts, relevant: int, negatives: float) -> Bools:
    """Return where the share of rejected relevant pairs is at least the share of accepted negatives."""
    crossed: Bools = (relevant - above) / max(relevant, 1) >= false_positives / max(negatives, 1)
    return crossed
