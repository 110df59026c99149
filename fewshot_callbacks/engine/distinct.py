"""Few distinct rows: every score of two of them is made exactly, once, and stands for all pairs of such rows.

How many negatives score higher is then how many items do, less the relevant items and the query itself, whose scores
are known. Nothing else of the engine knows that rows are repeated.
"""

from __future__ import annotations

import numpy as np

from fewshot_callbacks.engine.exact import exact_scores, workspace
from fewshot_callbacks.engine.options import work_off
from fewshot_callbacks.engine.pooled import Collector, Negatives, Parts
from fewshot_callbacks.engine.ranks import Ranks
from fewshot_callbacks.engine.relevance import Ints, Relevance
from fewshot_callbacks.engine.tiles import Estimates
from fewshot_callbacks.engine.vectors import Floats, Vectors

# An exact score, sorted and placed, takes about as long as so many estimates.
FEWER = 64
# Of a score of two distinct rows: itself and how many reach it, both sorted with their order, and bounds at it and above it.
# 132 were measured for 850 rows, 30 times each, with all else that such an evaluation takes.
HELD_BYTES = 160


def has_few(vectors: Vectors, relevance: Relevance, memory: float) -> bool:
    """Find out whether making the scores of distinct rows pays, and fits; what is excluded is not taken out of them."""
    if relevance.excludes or vectors.processes.count > 1 or vectors.items > len(vectors.pairs.gallery):
        return False
    pairs = vectors.pairs
    queries, items = (int((twin == np.arange(len(twin))).sum()) for twin in (pairs.query_twin, pairs.gallery_twin))
    every = len(pairs.query_twin) * len(pairs.gallery_twin)
    return HELD_BYTES * queries * items <= memory and FEWER * queries * items <= every


class DistinctRows(Negatives):
    """Counts of all pairs from those of distinct rows: the bounds at their scores are equal from the beginning."""

    def __init__(self, estimates: Estimates, parts: Parts) -> None:
        vectors, relevance, pairs = estimates.vectors, estimates.relevance, estimates.vectors.pairs
        items, weights = np.unique(pairs.gallery_twin, return_counts=True)
        rows, self._row = np.unique(pairs.query_twin, return_inverse=True)
        # of each distinct query the scores of the distinct items, ascending; how many items reach each of them, and none
        self._scores = np.empty((len(rows), len(items)))
        self._reaching = np.zeros((len(rows), len(items) + 1), np.int64)

        def make(row: int, work: Floats) -> None:
            out = np.empty(len(items))
            exact_scores(pairs, np.full(len(out), rows[row]), items, out, work)
            order = np.argsort(out)
            self._scores[row] = out[order]
            self._reaching[row, :-1] = np.cumsum(weights[order][::-1])[::-1]

        work_off(range(len(rows)), make, vectors.threads, workspace)
        # score of each query with itself; inf if it is no item
        some = np.flatnonzero(relevance.own >= 0)
        self._own_score = np.full(len(relevance.own), np.inf)
        self._own_score[some] = vectors.exact(some, relevance.own[some])
        self._count_all(estimates, parts)

    def _count_all(self, estimates: Estimates, parts: Parts) -> None:
        """Count how many negatives reach each score."""
        weight = np.bincount(self._row, minlength=len(self._scores))
        scores, number = np.unique(self._scores, return_inverse=True)
        counts = np.bincount(number.reshape(-1), (-np.diff(self._reaching, axis=1) * weight[:, None]).reshape(-1))
        reaching = np.cumsum(counts[::-1].astype(np.int64))[::-1]
        for others, each in (*parts(), (np.sort(self._own_score[np.isfinite(self._own_score)]), 1)):
            reaching = reaching - each * (len(others) - np.searchsorted(others, scores))
        super().__init__(estimates, Collector(estimates, np.inf, 0), int(reaching[0]) // (1 + estimates.mutual))
        self.error, self._distinct = 0.0, scores
        self._add_knots(scores, reaching, reaching)
        above = np.append(reaching[1:], 0)
        self._add_knots(np.nextafter(scores, np.inf), above, above)

    def ranks(self, batch: slice, start: Ints, scores: Floats) -> Ranks:
        """Return the ranks of some queries with these thresholds."""
        reach, above = np.empty((2, len(scores)), np.int64)
        for number, row in enumerate(self._row[batch]):
            some = slice(start[number], start[number + 1])
            reach[some] = self._reaching[row][np.searchsorted(self._scores[row], scores[some])]
            above[some] = self._reaching[row][np.searchsorted(self._scores[row], scores[some], side="right")]
        query = np.repeat(np.arange(len(start) - 1), np.diff(start))
        new = np.append(True, (scores[1:] != scores[:-1]) | (query[1:] != query[:-1]))[: len(scores)]
        first = np.flatnonzero(new)
        run = np.cumsum(new) - 1
        reach -= start[query + 1] - first[run]  # relevant items that reach it
        above -= start[query + 1] - np.append(first, len(scores))[run + 1]
        own = self._own_score[batch][query]
        itself = np.isfinite(own)
        reach -= itself & (own >= scores)
        above -= itself & (own > scores)
        return Ranks(start, scores, above, reach - above)

    @property
    def highest(self) -> Floats:
        """The scores of all distinct pairs, ascending."""
        return self._distinct

    def span(self, others: Floats) -> tuple[float, float]:
        """Return the lowest and the highest score of all pairs, and of some others."""
        every = np.append(others, self._distinct[[0, -1]])
        return float(every.min()), float(every.max())
