"""Bounds of the number of negatives at known scores, and the negatives that are in no tile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from fewshot_callbacks.engine.counted_values import NO_VALUES, CountedValues, first_reaching
from fewshot_callbacks.engine.pooled.grid import GridCounts
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.scale import Floats


class CountBounds(NamedTuple):
    """Scores at which the number of negatives of this process is bounded."""

    scores: Floats  # ascending
    fewest: Ints
    most: Ints

    def with_more(self, scores: Floats, fewest: Ints, most: Ints) -> CountBounds:
        """Return these bounds and more bounds, each as tight as its neighbours allow."""
        scores = np.concatenate((self.scores, scores))
        order = np.argsort(scores, kind="stable")
        fewest = np.concatenate((self.fewest, fewest))[order]
        most = np.concatenate((self.most, most))[order]
        # A negative that reaches a score reaches all lower ones.
        fewest = np.maximum.accumulate(fewest[::-1])[::-1]
        most = np.minimum.accumulate(most)
        return CountBounds(scores[order], fewest, most)

    def at(self, scores: Floats, total: int) -> tuple[Ints, Ints]:
        """Return the bounds at ascending scores, given the number of all negatives."""
        # A negative that reaches a higher score reaches this one, and one that reaches this one reaches a lower score.
        next_higher = first_reaching(self.scores, scores)
        next_lower = first_reaching(self.scores, np.nextafter(scores, np.inf)) - 1
        fewest = np.append(self.fewest, 0)[next_higher]
        most = np.append(total, self.most)[next_lower + 1]
        return fewest, most


# Nothing is known.
NO_BOUNDS = CountBounds(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))


@runtime_checkable
class ListedNegatives(Protocol):
    """The negatives of this process that are in no tile (`distinct.py`), with bounds of how many reach a score."""

    @property
    def total(self) -> int:
        """Number of these negatives."""

    def bounds(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return the fewest and the most of them that can reach each of the ascending scores."""

    def with_closed(self, scores: Floats) -> ListedNegatives:
        """Return the same negatives with equal bounds at the ascending scores. *Collective*."""

    def some_scores(self) -> Floats:
        """Return ascending scores. The scores of all these negatives are between the first and the last."""


class CachedNegatives:
    """Listed negatives whose exact scores are all known.

    Args:
        scores: The exact scores.
    """

    def __init__(self, scores: CountedValues) -> None:
        self.total = scores.total
        self._scores = scores

    def bounds(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return how many of them reach each of the ascending scores, as both bounds."""
        counts = self._scores.count_reaching(scores)
        return counts, counts

    def with_closed(self, scores: Floats) -> ListedNegatives:
        """Return these negatives, since all their bounds are equal."""
        del scores
        return self

    def some_scores(self) -> Floats:
        """Return all of their scores."""
        return self._scores.values.astype(np.float64)


@dataclass(frozen=True)
class RecomputedNegatives:
    """Listed negatives whose exact scores are recomputed when needed. Their numbers are known at some scores."""

    total: int
    known: CountBounds
    # lowest and highest exact score; empty if there are no negatives
    ends: Floats
    # yields the exact scores of all these negatives, in pieces
    pieces: Callable[[], Iterable[CountedValues]]

    @classmethod
    def of(cls, counts: GridCounts, pieces: Callable[[], Iterable[CountedValues]]) -> RecomputedNegatives:
        """Return negatives that have been counted at the scores of a grid.

        Args:
            counts: Their numbers at these scores.
            pieces: Yields their exact scores, in pieces.
        """
        ends = np.array([counts.lowest, counts.highest]) if counts.total else np.empty(0)
        return cls(counts.total, CountBounds(counts.scores, counts.reaching, counts.reaching), ends, pieces)

    def bounds(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return the fewest and the most of them that can reach each of the ascending scores."""
        return self.known.at(scores, self.total)

    def with_closed(self, scores: Floats) -> ListedNegatives:
        """Return the same negatives with equal bounds at the ascending scores. *Collective*."""
        counts = np.zeros(len(scores), np.int64)
        for piece in self.pieces():
            counts += piece.count_reaching(scores)
        return replace(self, known=self.known.with_more(scores, counts, counts))

    def some_scores(self) -> Floats:
        """Return the lowest and the highest of their scores."""
        return self.ends


NO_LISTED = CachedNegatives(NO_VALUES)
