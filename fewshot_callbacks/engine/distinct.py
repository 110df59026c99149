"""Few distinct rows: every score of two of them is made exactly, once, and stands for all pairs of such rows.

How many negatives score higher is then how many items do, less the relevant items and the query itself, whose scores
are known. Nothing else of the engine knows that rows are repeated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fewshot_callbacks.engine.exact import exact_scores, workspace
from fewshot_callbacks.engine.pooled import Parts
from fewshot_callbacks.engine.ranks import Ranks
from fewshot_callbacks.engine.relevance import Ints, Relevance
from fewshot_callbacks.engine.threads import work_off
from fewshot_callbacks.engine.vectors import Floats, Vectors

# An exact score, sorted and placed, takes about as long as so many estimates.
FEWER = 64
# Of a score of two distinct rows: itself and, while it is sorted, its order.
HELD_BYTES = 16


def has_few(vectors: Vectors, relevance: Relevance, memory: float) -> bool:
    """Find out whether making the scores of distinct rows pays, and fits; what is excluded is not taken out of them."""
    if relevance.excludes or vectors.processes.count > 1:
        return False
    pairs = vectors.pairs
    queries, items = (int((twin == np.arange(len(twin))).sum()) for twin in (pairs.query_twin, pairs.gallery_twin))
    fits = HELD_BYTES * queries * items <= memory
    return fits and FEWER * queries * items <= len(pairs.query_twin) * len(pairs.gallery_twin)


class DistinctRows:
    """Counts of all pairs from those of distinct rows; it answers what `Negatives` answers."""

    passes, cut, error = 1, -np.inf, 0.0

    def __init__(self, vectors: Vectors, relevance: Relevance, parts: Parts) -> None:
        self.vectors, self.parts, self.threads = vectors, parts, vectors.threads
        pairs = vectors.pairs
        items, weights = np.unique(pairs.gallery_twin, return_counts=True)
        rows, self._row = np.unique(pairs.query_twin, return_inverse=True)
        self._values = np.empty((len(rows), len(items)))
        """of each distinct query the scores of the distinct items, ascending"""
        self._reaching = np.zeros((len(rows), len(items) + 1), np.int64)
        """how many items reach each of them, and none"""

        def make(row: int, work: Floats) -> None:
            out = np.empty(len(items))
            exact_scores(pairs, np.full(len(out), rows[row]), items, out, work)
            order = np.argsort(out)
            self._values[row] = out[order]
            self._reaching[row, :-1] = np.cumsum(weights[order][::-1])[::-1]

        work_off(range(len(rows)), make, self.threads, workspace)
        some = np.flatnonzero(relevance.own >= 0)
        self._own = np.full(len(relevance.own), np.inf)
        self._own[some] = vectors.exact(some, relevance.own[some])
        """score of each query with itself; inf if it is no item"""
        self.total = (
            len(relevance.own) * len(pairs.gallery_twin) - len(some) - sum(each * len(part) for part, each in parts())
        )

    def ranks(self, batch: slice, start: Ints, scores: Floats) -> Ranks:
        """Return the ranks of some queries with these thresholds."""
        reach, above = np.empty((2, len(scores)), np.int64)

        for number, row in enumerate(self._row[batch]):
            some = slice(start[number], start[number + 1])
            reach[some] = self._reaching[row][np.searchsorted(self._values[row], scores[some])]
            above[some] = self._reaching[row][np.searchsorted(self._values[row], scores[some], side="right")]
        query = np.repeat(np.arange(len(start) - 1), np.diff(start))
        new = np.append(True, (scores[1:] != scores[:-1]) | (query[1:] != query[:-1]))[: len(scores)]
        first = np.flatnonzero(new)
        run = np.cumsum(new) - 1
        reach -= start[query + 1] - first[run]  # relevant items that reach it
        above -= start[query + 1] - np.append(first, len(scores))[run + 1]
        own = self._own[batch][query]
        itself = np.isfinite(own)
        reach -= itself & (own >= scores)
        above -= itself & (own > scores)
        return Ranks(start, scores, above, reach - above)

    def bounds(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return how many negatives reach each of some ascending scores, twice: nothing is open."""
        weight = np.bincount(self._row, minlength=len(self._values))
        values, order = self._flat()
        reached = (-np.diff(self._reaching, axis=1) * weight[:, None]).reshape(-1)[order]
        reaching = np.append(np.cumsum(reached[::-1])[::-1], 0)[np.searchsorted(values, scores)]
        for some, each in (*self.parts(), (np.sort(self._own[np.isfinite(self._own)]), 1)):
            reaching = reaching - each * (len(some) - np.searchsorted(some, scores))
        return reaching, reaching

    def _flat(self) -> tuple[Floats, Ints]:
        order = np.argsort(self._values, axis=None, kind="stable")
        return self._values.reshape(-1)[order], order

    def close(self, scores: Floats) -> None:
        """Nothing is open."""

    @property
    def highest(self) -> Floats:
        """The scores of all distinct pairs, ascending."""
        return np.unique(self._values)

    def span(self, others: Floats) -> tuple[float, float]:
        """Return the lowest and the highest score of all pairs."""
        every = np.append(others, [self._values.min(), self._values.max()])
        return float(every.min()), float(every.max())

    def estimate(self, scores: Floats, sample: Any) -> Ints:
        """Return how many negatives reach each of some ascending scores; nothing is sampled."""
        return self.bounds(scores)[0]

    def locate(self, rank: int) -> float:
        """Return the score of the negative that `rank` - 1 others follow from above."""
        values = np.unique(self._values)
        reached, _ = self.bounds(values)
        return float(values[np.flatnonzero(reached >= rank)[-1]])
