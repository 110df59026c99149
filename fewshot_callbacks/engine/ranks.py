"""A rank is a count: of each relevant item of each query, how many candidates score higher, and how many the same."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine import device
from fewshot_callbacks.engine.counting import (
    RUN,
    Side,
    count_tile,
    fill_tables,
    mirror_scores,
    sum_counters,
    threshold_scores,
)
from fewshot_callbacks.engine.exact import LANES, MEMBERS, MEMBERS_BYTES, workspace
from fewshot_callbacks.engine.layout import FEW_BINS
from fewshot_callbacks.engine.options import Precision, split, work_off
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.tiles import Estimates, Part, Tile
from fewshot_callbacks.engine.vectors import Floats


@dataclass(frozen=True)
class RankBlock:
    """The ranks of the relevant items of some queries. Rows are queries; columns beyond `relevant` are not valid.

    Relevant items stand in ascending order of their scores. `negatives_*` count candidates that are not relevant.
    """

    # number of each query
    queries: Int[Tensor, "queries"]
    # number of relevant candidates of each query
    relevant: Int[Tensor, "queries"]
    valid: Bool[Tensor, "queries columns"]
    # negatives with a strictly larger score
    negatives_above: Int[Tensor, "queries columns"]
    # negatives with an equal score
    negatives_tied: Int[Tensor, "queries columns"]
    # relevant items with a strictly larger score
    relevant_above: Int[Tensor, "queries columns"]
    # relevant items with an equal score, this one included
    relevant_tied: Int[Tensor, "queries columns"]
    # 1 ... relevant_tied: a number for this item among those equal to it
    position_in_tie: Int[Tensor, "queries columns"]
    # which entry of the query's list this item is, where that was asked for
    places: Int[Tensor, "queries columns"] | None = None

    @classmethod
    def of_scores(
        cls,
        queries: Int[Tensor, "queries"],
        scores: Float[Tensor, "queries columns"],
        negatives_above: Int[Tensor, "queries columns"],
        negatives_tied: Int[Tensor, "queries columns"],
    ) -> RankBlock:
        """Return ranks, given the exact scores of the relevant items, ascending and padded with +inf."""
        relevant = scores.isfinite().sum(dim=1)
        column = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
        below, not_above = column, column + 1
        if bool(((scores[:, 1:] == scores[:, :-1]) & scores[:, 1:].isfinite()).any()):
            below = torch.searchsorted(scores, scores)
            not_above = torch.searchsorted(scores, scores, right=True).minimum(relevant[:, None])
        number = relevant[:, None]
        return cls(
            queries,
            relevant,
            column < number,
            negatives_above,
            negatives_tied,
            number - not_above,
            not_above - below,
            column - below + 1,
        )


class Ranks(NamedTuple):
    """Of each query's relevant items by ascending scores, those of the n-th query from `start[n]` to `start[n + 1]`."""

    start: Ints
    scores: Floats
    # candidates that are not relevant and score higher
    above: Ints
    # and those with the same score
    tied: Ints
    # which entry of the query's list each is, where that was asked for
    places: NDArray[np.int32] = np.empty(0, np.int32)

    def blocks(self, first: int, pairs: int) -> Iterator[RankBlock]:
        """Yield padded ranks of about so many relevant pairs at a time, of the queries from number `first` on."""
        sizes = np.diff(self.start)
        order = np.argsort(sizes, kind="stable")  # lists of one length together, since all are padded to the longest
        done = 0
        while done < len(order):
            # as many as fit if all were as long as the last of them
            area = sizes[order[done:]] * np.arange(1, len(order) - done + 1)
            some = order[done : done + max(1, int(np.searchsorted(area, pairs, side="right")))]
            done += len(some)
            width = int(sizes[some[-1]])
            at = np.minimum(self.start[some][:, None] + np.arange(width), max(0, len(self.scores) - 1))
            valid = np.arange(width) < sizes[some][:, None]
            scores, above, tied = np.where(valid, self.scores[at], np.inf), self.above[at], self.tied[at]
            tables = (scores, *(np.where(valid, counts, 0).astype(np.int64) for counts in (above, tied)))
            block = RankBlock.of_scores(torch.from_numpy(first + some), *map(torch.from_numpy, tables))
            places = torch.from_numpy(self.places[at].astype(np.int64)) if len(self.places) else None
            yield replace(block, places=places)

    def best(self) -> tuple[Floats, Ints]:
        """Return of each query the highest score of its relevant items, -inf of none, and how many have it."""
        sizes = np.diff(self.start)
        best, tied = np.full(len(sizes), -np.inf), np.zeros(len(sizes), int)
        some = sizes > 0
        best[some] = self.scores[self.start[1:][some] - 1]
        for part in split(len(sizes), 64):  # not a number more for each pair at once
            of_part = self.scores[self.start[part.start] : self.start[part.stop]]
            query = np.repeat(np.arange(part.start, part.stop), sizes[part])
            tied[part] = np.bincount(query[of_part == best[query]] - part.start, minlength=part.stop - part.start)
        return best, tied


def relevant_scores(
    estimates: Estimates, queries: slice, *, once: bool = False, ordered: bool = True, placed: bool = False
) -> tuple[Ints, Floats, NDArray[np.int32], Floats]:
    """Return where the thresholds of each query begin, these, their places in lists, and what was made; collective.

    The thresholds are the scores of relevant candidates; of one set in one process the last are those of each pair once.

    Args:
        estimates: The tiles.
        queries: Some of the queries.
        once: Of one set, leave out the pairs in which the query has the larger number.
        ordered: Put them into ascending order.
        placed: Find out which entry of its query's list each is.
    """
    relevance, threads, first = estimates.relevance, estimates.vectors.threads, queries.start
    lists, every = relevance.relevant, queries == slice(0, estimates.shape[0])
    offset = np.append(0, np.cumsum(lists.sizes[queries]))
    out = np.full(offset[-1], np.inf)
    order = np.argsort(lists.start[queries], kind="stable")  # what queries share a list of stays in the cache
    some = split(len(offset) - 1, 64)
    mirrored = relevance.mutual and every and not once
    width = max(1, min(MEMBERS, MEMBERS_BYTES // (8 * estimates.vectors.dim)))
    for part in estimates.parts():
        here = part.vectors.pairs, part.first
        halved = part.vectors is estimates.vectors and (once or mirrored)

        def fill(some: slice, space: Any, here: Any = here, once: bool = halved) -> None:
            threshold_scores(here, lists, relevance.rules, order[some], first, offset, once, out, *space)

        work_off(some, fill, threads, lambda: (np.zeros((estimates.vectors.dim, width + LANES)), workspace()))
        del part, here, fill  # visitors leave before others come
    made = out[out < np.inf]
    if mirrored:
        work_off(some, lambda some, _: mirror_scores(lists, offset, some.start, some.stop, out), threads)
    places = np.empty(len(out) if placed else 0, np.int32)
    if ordered:
        work_off(some, lambda some, _: _sort_each(offset[some.start : some.stop + 1], out, places), threads)
    kept = out < np.inf
    start = np.searchsorted(np.flatnonzero(kept), offset)
    scores, places = out[kept], places[kept] if placed else places
    return start, scores, places, made if estimates.processes.count == 1 else scores.copy()


def _sort_each(offset: Ints, values: Floats, places: NDArray[np.int32]) -> None:
    """Sort the thresholds of each query; where `places` has room, write which of them stands where."""
    for start, stop in pairwise(offset.tolist()):
        some = values[start:stop]
        if len(places):
            places[start:stop] = order = some.argsort(kind="stable")
            some[:] = some[order]
        else:
            some.sort()


def new_side(start: Ints, thresholds: Floats, error: Floats, precision: Precision, bins: int, threads: int) -> Side:
    """Return thresholds with empty counters, and tables for estimates of this precision."""
    queries, most = len(start) - 1, int(np.diff(start).max(initial=0))
    counters, estimated = len(thresholds) + queries, np.float64 if precision == "float64" else np.float32
    side = Side(
        start,
        thresholds,
        np.zeros(counters, np.int32),
        np.zeros(counters, np.int32),
        np.empty(bins * counters, np.int8 if most < 127 else np.int16 if most < 2**15 - 1 else np.int32),
        bins,
        np.empty(queries),
        np.empty(queries, estimated),
        np.empty(queries, estimated),
    )
    work_off(split(queries), lambda some, _: fill_tables(side, error, some.start, some.stop), threads)
    return side


@dataclass
class RankCounter:
    """Observes tiles: counts the candidates between the thresholds of their queries, or of one list for all pairs.

    Args:
        estimates: The tiles.
        start: Where the thresholds of each query begin.
        thresholds: Ascending for each query.
        first: The first query of these.
        shared: There is one list, and every pair is counted against it.
    """

    estimates: Estimates
    start: Ints
    thresholds: Floats
    first: int = 0
    shared: bool = False
    side: Side = field(init=False)
    _own: list[Side] = field(init=False, default_factory=list)
    _guests: Side | None = field(init=False, default=None)
    # on a device: of the own side, and of that of guests
    _there: dict[bool, device.Placing] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        made = self.estimates
        error = made.error[self.first : self.first + len(self.start) - 1]
        if self.shared:
            error = np.array([made.largest_error])
        bins = FEW_BINS if self.shared else made.layout.bins
        self.side = new_side(self.start, self.thresholds, error, made.precision, bins, made.threads)

    @property
    def once(self) -> bool:
        """Whether a pair is to be seen once, not for each of its items."""
        return self.shared

    def space(self) -> Any:
        """Return what one thread works in; where all would change the same counters, it has its own."""
        side = self.side
        if self.shared:
            wide = np.int32 if math.prod(self.estimates.shape) < 2**31 else np.int64
            side = side._replace(hits=np.zeros(len(side.hits), wide), ties=np.zeros(len(side.ties), wide))
            self._own.append(side)
        self._place(side, guests=False)
        dtype = np.float64 if self.estimates.precision == "float64" else np.float32
        highest = np.empty(self.estimates.height, dtype)
        return side, (highest, np.empty(RUN, dtype), np.empty(RUN, np.int32), workspace())

    def _place(self, side: Side, *, guests: bool) -> None:
        made = self.estimates
        if made.on is not None:
            self._there[guests] = device.Placing(side, made.on, shared=self.shared, threads=made.vectors.threads)

    def see(self, tile: Tile, space: Any) -> None:
        """Count a tile."""
        side, work = space
        for view, pairs, guests, lock in self.estimates.views(tile):
            counted, seen, those = self._guests if guests else side, view, pairs
            if self.first and not guests:
                names = ("queries", "query_norm", "query_twin")
                those = pairs._replace(**{name: getattr(pairs, name)[self.first :] for name in names})
                seen = view._replace(query=view.query - self.first)
            assert counted is not None
            with nullcontext() if self.shared else lock:
                if self._there:
                    self._there[guests].count(seen, those)
                else:
                    count_tile(seen, counted, self.shared, those, *work)
            if self.shared:  # a pair is counted once
                return

    @property
    def key(self) -> Any:
        """The thresholds, briefly."""
        return len(self.start), zlib.crc32(self.thresholds.tobytes(), zlib.crc32(self.start.tobytes())), self.shared

    def state(self) -> list[Any]:
        """Return all counters."""
        if self._there:
            self._there[False].add_counters()
        return [table for side in (self.side, *self._own) for table in (side.hits, side.ties)]

    def restore(self, arrays: list[Any]) -> None:
        """Go on from these counters."""
        self.side.hits[:], self.side.ties[:], *own = arrays
        self._own = [self.side._replace(hits=hits, ties=ties) for hits, ties in zip(own[::2], own[1::2], strict=True)]

    def leave(self, some: slice) -> list[Any]:
        """Return the thresholds of some queries that visit another process."""
        start = self.start[some.start : some.stop + 1]
        return [start - start[0], self.thresholds[start[0] : start[-1]]]

    def receive(self, part: Part, tables: list[Any]) -> None:
        """Count for visitors."""
        made = self.estimates
        start, thresholds = tables
        error = part.vectors.error(made.precision, -1)
        self._guests = new_side(start, thresholds, error, made.precision, made.layout.bins, made.threads)
        self._place(self._guests, guests=True)

    def counted(self) -> list[Any]:
        """Return the counters of the visitors."""
        assert self._guests is not None
        if self._there:
            self._there[True].add_counters()
        return [self._guests.hits, self._guests.ties]

    def add(self, some: slice, counted: list[Any]) -> None:
        """Add what another process has counted for some queries."""
        counters = slice(self.start[some.start] + some.start, self.start[some.stop] + some.stop)
        for own, more in zip((self.side.hits, self.side.ties), counted, strict=True):
            own[counters] += more

    def ranks(self) -> Ranks:
        """Return what was counted, after which nothing more can be."""
        self.side = side = self.side._replace(table=np.empty(0, np.int8))
        if self._there:
            self._there[False].add_counters()
        if self.shared:
            each = 2 if self.estimates.mutual else 1
            nothing = np.zeros(len(self.thresholds) + 1, np.int64)
            hits, ties = (each * sum((getattr(own, name) for own in self._own), nothing) for name in ("hits", "ties"))
            return Ranks(self.start, self.thresholds, hits[:0:-1].cumsum()[::-1], ties[:-1].cumsum())
        above, tied = np.empty((2, len(self.thresholds)), side.hits.dtype)
        sum_counters(side, above, tied)
        return Ranks(self.start, self.thresholds, above, tied)


def recount(estimates: Estimates, scores: Floats) -> tuple[Ints, Ints]:
    """Count exactly, in one more pass, how many negatives reach each of some ascending scores, and how many lie above it.

    Collective; the counts are those of this process.
    """
    counter = RankCounter(estimates, np.array([0, len(scores)]), scores, shared=True)
    estimates.show(counter)
    ranks = counter.ranks()
    return ranks.above + ranks.tied, ranks.above
