"""The first k candidates of each query, and the pairs from a score on: two more observers of the same tiles."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.compiled import kernel
from fewshot_callbacks.engine.counting import MARGIN, RUN, highest_of, read_run
from fewshot_callbacks.engine.exact import exact_score, exact_scores, workspace
from fewshot_callbacks.engine.options import Precision, current_options, split, work_off
from fewshot_callbacks.engine.precision import seconds_of_a_pair
from fewshot_callbacks.engine.ranks import RankCounter
from fewshot_callbacks.engine.relevance import Ints, Lists, Relevance
from fewshot_callbacks.engine.tiles import Estimates, Tile
from fewshot_callbacks.engine.vectors import Floats, Vectors


class Kept(NamedTuple):
    """What is kept of each query: candidates that may be among its first k."""

    scores: Any  # (queries, room) estimates, or exact scores
    items: Any  # (queries, room)
    known: Any  # (queries, room) whether a score is exact
    filled: Any  # (queries,)
    cut: Any  # (queries,) estimates below it are not among the first k
    left_out: Any  # (queries,) candidates that were dropped and score as the k-th does


@kernel
def _settle(pairs, i, k, kept, work):
    """Sort what is kept of a query by exact scores, of equal ones the lower item first; keep k."""
    scores, items, known, number = kept.scores[i], kept.items[i], kept.known[i], kept.filled[i]
    before = scores[k - 1] if number >= k and known[k - 1] else -np.inf
    for n in range(number):
        score, item = scores[n], items[n]
        if not known[n]:
            score = exact_score(pairs, i, item, work)
        at = n
        while at > 0 and (scores[at - 1] < score or (scores[at - 1] == score and items[at - 1] > item)):
            scores[at], items[at] = scores[at - 1], items[at - 1]
            at -= 1
        scores[at], items[at], known[n] = score, item, True
    kept.filled[i] = min(number, k)
    if number >= k:
        if scores[k - 1] > before:
            kept.left_out[i] = 0
        for n in range(k, number):
            kept.left_out[i] += scores[n] == scores[k - 1]
    known[kept.filled[i] :] = False


@kernel
def _keep_highest(view, pairs, k, error, kept, highest, run, work):
    """Keep of each query every candidate that may be among its first k; a full row is settled, which raises its cut."""
    highest_of(view, highest)
    for at in range(view.start, view.stop):
        i = view.query + at
        for first in range(0, view.estimates.shape[0 if view.turned else 1], RUN):
            if highest[at - view.start] < kept.cut[i]:
                break
            length, passing = read_run(view, at, first, run), 0
            for c in range(length):
                passing += run[c] >= kept.cut[i]
            if passing == 0:
                continue
            for c in range(length):
                estimate = run[c]
                if estimate < kept.cut[i] or estimate == -np.inf:
                    continue
                if kept.filled[i] == kept.scores.shape[1]:
                    _settle(pairs, i, k, kept, work)
                    last = kept.scores[i, k - 1]
                    # rounding to float32 moves the cut by less than 2**-23 of it
                    kept.cut[i] = last - error[i] * MARGIN - abs(last) * 2.0**-23 - 2.0**-125
                    if estimate < kept.cut[i]:
                        continue
                n = kept.filled[i]
                kept.scores[i, n], kept.items[i, n] = estimate, view.item + first + c
                kept.filled[i] = n + 1


@dataclass
class Nearest:
    """Observes tiles: keeps the first k candidates of each query.

    Args:
        estimates: The tiles, of one process; relevant items are masked, so that there should be none.
        k: How many.
    """

    estimates: Estimates
    k: int
    once: bool = False

    def __post_init__(self) -> None:
        queries, room = self.estimates.shape[0], 2 * self.k + 16
        self._kept = Kept(
            np.empty((queries, room)),
            np.empty((queries, room), np.int32),
            np.zeros((queries, room), np.bool_),
            np.zeros(queries, np.int64),
            np.full(queries, -np.inf, np.float32),
            np.zeros(queries, np.int64),
        )

    def space(self) -> Any:
        """Return what one thread works in."""
        dtype = np.float64 if self.estimates.precision == "float64" else np.float32
        return np.empty(self.estimates.height, dtype), np.empty(RUN, dtype), workspace()

    def see(self, tile: Tile, space: Any) -> None:
        """Look at a tile."""
        error = self.estimates.error
        for view, pairs, _, lock in self.estimates.views(tile):
            with lock:
                _keep_highest(view, pairs, self.k, error, self._kept, *space)

    def found(self) -> tuple[Ints, Floats, Ints]:
        """Return items and scores, the nearest first, and how many are left out; -1 and -inf for missing candidates.

        Those left out have the score of the last one listed.
        """
        kept, pairs = self._kept, self.estimates.vectors.pairs

        def settle(some: slice, work: Floats) -> None:
            _settle_some(pairs, some.start, some.stop, self.k, kept, work)

        work_off(split(len(kept.filled)), settle, self.estimates.threads, workspace)
        missing = np.arange(self.k) >= kept.filled[:, None]
        items = np.where(missing, -1, kept.items[:, : self.k]).astype(np.int64)
        return items, np.where(missing, -np.inf, kept.scores[:, : self.k]), kept.left_out


@kernel
def _settle_some(pairs, first, last, k, kept, work):
    for i in range(first, last):
        _settle(pairs, i, k, kept, work)


# Pairs that are looked at at once, and listed beyond twice what is asked for: some 60 and 80 bytes of each are in use.
STRIPE, HELD = 2**15, 2**16


@dataclass
class HighestPairs:
    """Observes tiles: lists the pairs whose exact scores reach a threshold, the highest of them if they are too many.

    Args:
        estimates: The tiles, of one process.
        threshold: An exact score.
        most: How many pairs are listed.
    """

    estimates: Estimates
    threshold: float
    most: int
    once: bool = True
    _cut: float = field(init=False)
    _last_row: float = np.inf
    _parts: list[tuple[Ints, Ints, Floats]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._cut, self._lock, self._held = self.threshold, threading.Lock(), 0

    def space(self) -> Any:
        """Return nothing: pairs are few."""

    def see(self, tile: Tile, space: Any) -> None:
        """Look at a tile."""
        if self.most == 0 or (self._cut >= 1.0 and tile.row > self._last_row):
            return  # no score is higher, and later rows come after those of the same score
        height, width = tile.estimates.shape
        step = max(1, STRIPE // width)  # all pairs may reach it
        for first in range(0, height, step):
            self._see_rows(tile, slice(first, min(height, first + step)))

    def _see_rows(self, tile: Tile, some: slice) -> None:
        reach = self.estimates.largest_error * MARGIN + abs(self._cut) * 2.0**-23 + 2.0**-125
        estimates = tile.estimates[some]
        with np.errstate(over="ignore"):  # below all numbers of float32, every pair reaches it
            lowest = estimates.dtype.type(self._cut - reach)
        if estimates.max() < lowest:
            return
        rows, columns = np.divmod(np.flatnonzero(estimates >= lowest), estimates.shape[1])
        rows, columns = rows + tile.row + some.start, columns + tile.column
        scores = np.empty(len(rows))
        exact_scores(tile.part.vectors.pairs, rows, columns, scores, workspace())
        with self._lock:
            wanted = scores >= self._cut
            self._parts.append((rows[wanted], columns[wanted], scores[wanted]))
            self._held += int(wanted.sum())
            if self._held > 2 * self.most + HELD:
                self._compact()

    def _compact(self) -> None:
        rows, columns, scores = map(np.concatenate, zip(*self._parts, strict=True))
        order = np.lexsort((columns, rows, -scores))[: self.most]
        self._parts, self._held = [(rows[order], columns[order], scores[order])], len(order)
        if len(order) == self.most:
            self._cut = float(scores[order[-1]])
            self._last_row = float(rows[order][scores[order] == self._cut].max())

    def found(self) -> tuple[Ints, Ints, Floats]:
        """Return rows, columns and scores, the highest first, of equal scores the lower row and column."""
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        self._compact()
        return self._parts[0]


def _all_pairs(vectors: Vectors, relevance: Relevance, memory: float, *, mutual: bool) -> Estimates:
    """Return the tiles of all pairs, in the precision that is the fastest where few of them matter."""
    queries, items = len(vectors.pairs.queries), len(vectors.pairs.gallery)
    options, layout = current_options(), vectors.layout(memory, 0)
    tried: list[Precision] = [*vectors.precisions(), "float32"] if queries * items >= 2**22 else ["float32"]
    tried = [precision for precision in tried if precision != "bytes" or layout.coded]
    quickest = min(tried, key=lambda some: seconds_of_a_pair(some, vectors.columns))
    precision = vectors.possible(options.precision or quickest, kept=layout.coded)
    return Estimates(vectors, relevance, precision, layout, mutual)


def nearest_items(
    vectors: Vectors, own: NDArray[np.int32], codes: Any, k: int, memory: float
) -> tuple[Ints, Floats, Ints]:
    """Return the first k candidates of each query: items, scores, and how many as good ones are left out.

    Args:
        vectors: Queries and gallery of one process.
        own: Number of the item that each query is; -1 for none.
        codes: Of exclusions, as in `Relevance`.
        k: How many.
        memory: Budget in bytes.
    """
    lists = Lists.none(len(own))
    relevance = Relevance(lists, own, codes)
    seen = Nearest(_all_pairs(vectors, relevance, memory, mutual=vectors.one_set), k)
    seen.estimates.show(seen)
    return seen.found()


def pairs_from(vectors: Vectors, threshold: float, most: int, memory: float) -> tuple[Ints, Ints, Floats, int]:
    """Return the highest pairs that reach an exact score: rows, columns, scores; and how many pairs reach it."""
    queries = len(vectors.pairs.queries)
    own = np.arange(queries, dtype=np.int32) if vectors.one_set else np.full(queries, -1, np.int32)
    estimates = _all_pairs(vectors, Relevance(Lists.none(queries), own), memory, mutual=vectors.one_set)
    seen = HighestPairs(estimates, threshold, most)
    counter = RankCounter(estimates, np.array([0, 1]), np.array([threshold]), shared=True)
    estimates.show(seen, counter)
    ranks = counter.ranks()
    return *seen.found(), int(ranks.above[0] + ranks.tied[0]) // (2 if estimates.mutual else 1)
