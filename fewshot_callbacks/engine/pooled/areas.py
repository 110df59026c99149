"""Areas under the pooled curves, which depend on all relevant scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from fewshot_callbacks.engine.evaluation import PooledPairs
from fewshot_callbacks.engine.pooled.grid import ScoreGrid
from fewshot_callbacks.engine.pooled.questions import NegativeBounds, precision_of
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.scale import Floats


class _RelevantGroup(NamedTuple):
    """A group of neighbouring relevant scores."""

    scores: Floats  # (scores,) ascending
    reaching: Ints  # (scores,) relevant pairs with this score or a higher one
    pairs: Ints  # (scores,) relevant pairs with this score


class PooledAreas:
    """The areas under the pooled curves of an evaluation that has run. The constructor and all methods are collective.

    Args:
        pooled: Counts of all pairs.
        grid: A score grid. After a search, its final grid leaves less to count.
    """

    def __init__(self, pooled: PooledPairs, grid: ScoreGrid) -> None:
        self._relevant = pooled.relevant
        self._negatives = pooled.negatives
        self._grid = grid
        # In one set, both directions of a pair have the same score.
        pairs_of_score = 2 if pooled.evaluation.relevance.symmetric else 1
        # relevant pairs whose scores fit the budget
        self._room = pairs_of_score * max(1, pooled.grid_size)
        self._processes = pooled.vectors.processes

    def bounds_under_precision_recall(self) -> tuple[float, float]:
        """Return bounds of the area under the precision-recall curve, from what is known so far.

        The area is the mean of the precisions at the relevant pairs. A relevant score inside a cell accepts no fewer pairs
        than the upper end of the cell, and no more pairs than the lower end.
        """
        grid = self._grid
        fewest, most = self._negatives.bounds(grid.scores)
        negatives = NegativeBounds(grid.scores, fewest, most, self._negatives.total)
        pairs = grid.reaching - grid.above
        low = pairs * precision_of(grid.reaching, most)
        high = pairs * precision_of(grid.reaching, fewest)
        low_inside = grid.inside_cells * precision_of(grid.reaching_upper_ends + 1, negatives.most_above_lower_ends)
        high_inside = grid.inside_cells * precision_of(grid.above_lower_ends, negatives.fewest_at_upper_ends)
        # The sums are exact, so that equal bounds are the exact area for any grid.
        lowest = math.fsum(np.concatenate((low, low_inside)).tolist())
        highest = math.fsum(np.concatenate((high, high_inside)).tolist())
        return lowest / max(1, grid.total), highest / max(1, grid.total)

    def under_precision_recall(self) -> float:
        """Return the area under the precision-recall curve, rounded. This may take more passes over all pairs."""
        return math.fsum(self._terms()) / max(1, self._grid.total)

    def _terms(self) -> Iterator[float]:
        """Yield terms whose sum is the area times the number of relevant pairs, with all counts closed.

        The first term is a whole number. Each other term is rounded once and belongs to one relevant score. So an exact sum
        of the terms depends neither on the groups nor on the processes.
        """
        grid = self._grid
        first_free = self._first_free_cell()
        # The precision of all relevant pairs above all negatives is 1.
        yield float(grid.above_lower_ends[first_free]) if first_free < len(grid.above_lower_ends) else 0.0
        for group in self._groups_below(first_free):
            self._negatives.close(group.scores)
            negatives, _ = self._negatives.bounds(group.scores)
            yield from (group.pairs * precision_of(group.reaching, negatives)).tolist()

    def under_roc(self) -> float:
        """Return the share of (relevant pair, negative) combinations in the right order; NaN if there are none.

        A tie counts one half. The count is exact and is rounded once. It may take another pass over all pairs.
        """
        if not self._grid.total or not self._negatives.total:
            return math.nan
        wrong = 0
        # All negatives are below the relevant pairs of the other cells.
        for group in self._groups_below(self._first_free_cell()):
            just_above = np.nextafter(group.scores, np.inf)
            fewest, most = self._negatives.bounds(group.scores)
            # A pass that counts at a score also counts just above it, so this call needs one pass. The other two calls then
            # find their counts known and need none.
            self._negatives.close(np.unique(np.where(fewest < most, group.scores, just_above)))
            self._negatives.close(group.scores)
            self._negatives.close(just_above)
            negatives_reaching, _ = self._negatives.bounds(group.scores)
            negatives_above, _ = self._negatives.bounds(just_above)
            wrong += twice_in_wrong_order(group.pairs, negatives_reaching, negatives_above)
        return share_in_right_order(wrong, self._grid.total, self._negatives.total)

    def expected_passes(self) -> int:
        """Return the largest number of further passes that the exact areas take: one for each open group."""
        first_free = self._first_free_cell()
        is_open = self._grid.lower_ends[:first_free] < self._negatives.cutoff
        return len(np.unique(self._groups_of_cells()[:first_free][is_open]))

    def _first_free_cell(self) -> int:
        """Return the lowest cell whose lower end no negative reaches; the number of cells if there is no such cell."""
        _, most = self._negatives.bounds(self._grid.scores)
        # All negatives reach the lower end of cell 0. The numbers fall from cell to cell, so minus the numbers ascends.
        most_at_lower_ends = np.append(self._negatives.total, most)
        return int(np.searchsorted(-most_at_lower_ends, 0))

    def _groups_below(self, cell: int) -> Iterator[_RelevantGroup]:
        """Yield all relevant scores in the cells below one, in groups whose relevant pairs fit the budget.

        The upper end of each cell counts as part of it.
        """
        grid = self._grid
        groups = self._groups_of_cells()[:cell]
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            first = int(members[0])
            last = int(members[-1])
            cells = np.zeros(len(grid.inside_cells), bool)
            cells[first : last + 1] = grid.inside_cells[first : last + 1] > 0
            inside = int(grid.inside_cells[cells].sum())
            refined = grid
            if inside:
                refined = grid.refined(cells, self._relevant.ascending, inside, self._processes)
            in_group = (refined.scores > grid.lower_ends[first]) & (refined.scores <= grid.upper_ends[last])
            reaching = refined.reaching[in_group]
            yield _RelevantGroup(refined.scores[in_group], reaching, reaching - refined.above[in_group])

    def _groups_of_cells(self) -> Ints:
        """Return (grid + 1,) the number of the group to which the scores of each cell of the grid belong."""
        groups: Ints = (self._grid.total - self._grid.reaching_upper_ends) // self._room
        return groups


def twice_in_wrong_order(relevant: Ints, negatives_reaching: Ints, negatives_above: Ints) -> int:
    """Return twice the number of pairs of a relevant score and a negative in the wrong order; a tie is half a pair.

    Args:
        relevant: (scores,) number of relevant pairs with each score.
        negatives_reaching: (scores,) number of negatives with this score or a higher one.
        negatives_above: (scores,) number of negatives with a higher score.
    """
    # A negative above the score counts twice. A tied negative counts once: it reaches the score but is not above it.
    return _exact_sum_of_products(relevant, negatives_reaching + negatives_above)


def share_in_right_order(wrong: int, relevant: int, negatives: int) -> float:
    """Return the area under the ROC curve, rounded once, from exact counts.

    Args:
        wrong: The sum of `twice_in_wrong_order` over all scores.
        relevant: Number of all relevant pairs, at least 1.
        negatives: Number of all negatives, at least 1.
    """
    total = 2 * relevant * negatives
    return (total - wrong) / total


def _exact_sum_of_products(first: Ints, second: Ints) -> int:
    """Return the sum of the products of two lists of numbers of pairs; each product may have more than 64 bits."""
    # In parts of 21 bits: the sum of up to 2**42 pairs, each times such a part, has 63 bits.
    parts = [int((first * ((second >> shift) & (2**21 - 1))).sum()) << shift for shift in (0, 21, 42)]
    return sum(parts)
