"""The first candidates of each query, by exact scores; ties are ordered by position and counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.duplicates import REPEATING_SHARE, row_numbers
from fewshot_callbacks.engine.neighbours.screen import (
    ROWS_OF_TASK,
    Screen,
    Survivors,
    fastest,
    kept_operands,
    threads_for,
    tile_size,
)
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.threads import Task, run_tasks

EXPANDED_AT_ONCE = 2**20
"""Items that equal rows stand for, sorted at once."""

Codes = tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]]


class Nearest(NamedTuple):
    """The first candidates of some queries."""

    items: Int[Tensor, "queries k"]
    """indices of gallery items, the closest first; -1 where there are fewer than k"""
    exact: Float[Tensor, "queries k"]
    """their exact scores, -inf there"""
    left_out: Int[Tensor, "queries"]
    """candidates with the score of the k-th that are not among them"""

    @classmethod
    def empty(cls, queries: int, k: int) -> Nearest:
        """Return lists without a candidate."""
        exact = torch.full((queries, k), -torch.inf, dtype=torch.float64)
        return cls(torch.full((queries, k), -1), exact, torch.zeros(queries, dtype=torch.int64))


@dataclass(frozen=True, eq=False)
class _Entries:
    """Gallery items in the order of their positions; equal rows that the same queries exclude are one entry."""

    index: Int[Tensor, "entries"]
    """the first item of each"""
    weight: NDArray[np.int64]
    members: NDArray[np.int64]
    """all items, those of an entry side by side, in the order of their positions"""
    start: NDArray[np.int64]

    @classmethod
    def of(cls, gallery: Tensor, positions: Tensor, codes: list[Tensor]) -> _Entries:
        """Return the entries of a gallery; items of one entry have the same codes."""
        order = positions.argsort()
        number = row_numbers(gallery)
        if int(number.max()) + 1 > REPEATING_SHARE * len(number):
            ones = np.ones(len(order), np.int64)
            return cls(order, ones, order.numpy(), np.arange(len(order) + 1))
        for code in codes:
            number = torch.stack([number, code]).unique(dim=1, return_inverse=True)[1]
        number = number[order]
        first = torch.full((int(number.max()) + 1,), len(order)).scatter_reduce_(
            0, number, torch.arange(len(order)), "amin"
        )
        renumbered = first.argsort().argsort()[number]  # entries in the order of their first items
        by_entry = renumbered.argsort(stable=True)
        weight = torch.bincount(renumbered)
        start = torch.nn.functional.pad(weight.cumsum(0), (1, 0))
        members = order[by_entry]
        return cls(members[start[:-1]], weight.numpy(), members.numpy(), start.numpy())


class _Lists:
    """The first entries of some queries so far; numbers of entries follow their positions, so they break ties."""

    def __init__(self, queries: int, k: int, weight: NDArray[np.int64]) -> None:
        self.weight = weight
        self.exact = np.full((queries, k), -np.inf)
        self.entries = np.full((queries, k), -1)
        self.left_out = np.zeros(queries, np.int64)

    @property
    def last(self) -> Float[Tensor, "queries"]:
        """The exact score that a candidate must reach; -inf while there are fewer than k."""
        return torch.from_numpy(self.exact[:, -1].copy())

    def add(self, rows: NDArray[np.int64], entries: NDArray[np.int64], exact: NDArray[np.float64]) -> None:
        """Take more entries."""
        if not len(rows):
            return
        touched, k = np.unique(rows), self.exact.shape[1]
        row = np.concatenate([np.repeat(np.arange(len(touched)), k), np.searchsorted(touched, rows)])
        score = np.concatenate([self.exact[touched].ravel(), exact])
        entry = np.concatenate([self.entries[touched].ravel(), entries])
        order = np.lexsort((entry, -score, row))
        row, score, entry = row[order], score[order], entry[order]
        kept = np.arange(len(row)) - np.searchsorted(row, np.arange(len(touched)))[row] < k
        before = self.exact[touched, -1]
        self.exact[touched], self.entries[touched] = score[kept].reshape(-1, k), entry[kept].reshape(-1, k)
        last = self.exact[touched, -1]
        tied = ~kept & (score == last[row]) & (entry >= 0)
        more = np.bincount(row[tied], self.weight[entry[tied]], minlength=len(touched)).astype(np.int64)
        self.left_out[touched] = np.where(before == last, self.left_out[touched], 0) + more


def nearest_items(
    scores: ScoreTiles,
    queries: Int[Tensor, "some"],
    k: int,
    memory_bytes: int,
    *,
    exclusions: tuple[Codes, ...] = (),
    positions: Int[Tensor, "gallery"] | None = None,
) -> Nearest:
    """Return the first k candidates of some queries; with one set, none is its own candidate.

    Args:
        scores: Of all pairs.
        queries: Indices.
        k: At least 1.
        memory_bytes: Budget beyond the vectors and the result.
        exclusions: Pairs of codes; a candidate whose code equals the query's is none.
        positions: Of each gallery item; the earlier of two with equal scores comes first. By default the index.
    """
    positions = torch.arange(len(scores.gallery)) if positions is None else positions
    entries = _Entries.of(scores.gallery, positions, [of_item for _, of_item in exclusions])
    # an item's own entry is listed as well, and the item is left out when lists are expanded
    same_set = scores.queries is scores.gallery
    listed = min(k + same_set, len(entries.index))
    threads = threads_for(scores, len(queries) * len(entries.index))
    search = _Search.planned(scores, queries, entries, listed, exclusions, memory_bytes, threads)
    expansion = _Expansion(
        scores, entries, positions.numpy(), Nearest.empty(len(queries), k), same_set and not exclusions
    )
    rows = min(ROWS_OF_TASK, max(search.tile[0], -(-len(queries) // (4 * threads))))

    def work(some: slice, _: None) -> None:
        start = some.start
        for part, lists in search.of(queries[some]):
            expansion.add(part, lists, slice(start, start + len(part)))
            start += len(part)

    blocks = [slice(start, min(start + rows, len(queries))) for start in range(0, len(queries), rows)]
    tasks = [Task(frozenset(), partial(work, some), 1) for some in blocks]
    run_tasks(tasks, [None] * threads, lambda _: None)
    return expansion.found


@dataclass(frozen=True, eq=False)
class _Search:
    """The first entries of queries, from tiles of estimates."""

    screen: Screen
    entries: _Entries
    listed: int
    """entries in a list"""
    exclusions: tuple[Codes, ...]
    tile: tuple[int, int]
    kept: list[Tensor] | None
    """operands of the entries, where they fit the budget"""

    @classmethod
    def planned(
        cls,
        scores: ScoreTiles,
        queries: Tensor,
        entries: _Entries,
        listed: int,
        exclusions: tuple[Codes, ...],
        memory_bytes: int,
        threads: int,
    ) -> _Search:
        """Choose the precision and the tiles."""

        def about(estimates: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows"]:
            place = max(1, round(listed * estimates.shape[1] / len(entries.index)))
            return estimates.topk(min(place, estimates.shape[1]), dim=1).values[:, -1].double()

        screen = Screen(scores, fastest(scores, queries, entries.index, about))
        tile = tile_size(memory_bytes, threads)
        return cls(screen, entries, listed, exclusions, tile, kept_operands(screen, entries.index, tile, memory_bytes))

    def of(self, queries: Int[Tensor, "some"]) -> list[tuple[Tensor, _Lists]]:
        """Return some queries at a time with their lists."""
        found = [
            (rows, self.screen.operand(rows, of_query=True), _Lists(len(rows), self.listed, self.entries.weight))
            for rows in queries.split(self.tile[0])
        ]
        first = 0
        for number, columns in enumerate(self.entries.index.split(self.tile[1])):
            right = self.screen.operand(columns, of_query=False) if self.kept is None else self.kept[number]
            for rows, left, lists in found:
                kept = self._surviving(rows, columns, left @ right.T, lists.last)
                exact = self.screen.scores.pair_scores(rows[kept.rows], columns[kept.columns])
                lists.add(kept.rows.numpy(), (kept.columns + first).numpy(), exact.numpy())
            first += len(columns)
        return [(rows, lists) for rows, _, lists in found]

    def _surviving(
        self, rows: Tensor, columns: Tensor, estimates: Float[Tensor, "rows columns"], last: Float[Tensor, "rows"]
    ) -> Survivors:
        """Return the candidates of a tile that may be listed."""
        low = self.screen.lowest(last, rows)
        if bool(last.isinf().any()) and self.listed < estimates.shape[1]:
            for of_query, of_item in self.exclusions:
                estimates.masked_fill_(of_query[rows][:, None] == of_item[columns][None, :], -torch.inf)
            # the number of candidates with at least this exact score
            least = estimates.topk(self.listed, dim=1).values[:, -1].double() - self.screen.error(rows)
            low = torch.maximum(low, self.screen.lowest(least, rows))
        hot = (estimates.amax(dim=1) >= low).nonzero().flatten()
        if len(hot) < len(rows):
            estimates, low = estimates[hot], low[hot]
        kept = Survivors.of(estimates >= low[:, None], hot)
        allowed = torch.ones(len(kept.rows), dtype=torch.bool)
        for of_query, of_item in self.exclusions:
            allowed &= of_query[rows[kept.rows]] != of_item[columns[kept.columns]]
        return Survivors(kept.rows[allowed], kept.columns[allowed])


@dataclass(frozen=True, eq=False)
class _Expansion:
    """The items that listed entries stand for, without the queries themselves."""

    scores: ScoreTiles
    entries: _Entries
    positions: NDArray[np.int64]
    found: Nearest
    own: bool
    """the lists may hold the query itself"""

    def add(self, queries: Int[Tensor, "some"], lists: _Lists, out: slice) -> None:
        """Put the items of the lists of some queries into the result."""
        exact, entries, k = lists.exact, lists.entries, self.found.items.shape[1]
        own = queries.numpy() if self.own else np.full(len(queries), -1)
        weight = np.where(entries >= 0, self.entries.weight[entries], 0)
        take = np.clip(k + self.own - _sum_of_higher(exact, weight), 0, weight)
        ends, start = np.cumsum(take.sum(axis=1)), 0
        while start < len(queries):
            taken = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, taken + EXPANDED_AT_ONCE, side="right")))
            part = slice(start, stop)
            self._fill(own[part], exact[part], entries[part], take[part], slice(out.start + start, out.start + stop))
            start = stop
        last = self.found.exact[out, -1].numpy()
        held = np.where(exact == last[:, None], weight, 0).sum(axis=1)
        held += np.where(exact[:, -1] == last, lists.left_out, 0)
        if self.own:
            held -= self.scores.pair_scores(queries, queries).numpy() == last
        listed = (self.found.exact[out].numpy() == last[:, None]).sum(axis=1)
        self.found.left_out[out] = torch.from_numpy(np.where(np.isfinite(last), held - listed, 0))

    def _fill(
        self,
        own: NDArray[np.int64],
        exact: NDArray[np.float64],
        entries: NDArray[np.int64],
        take: NDArray[np.int64],
        out: slice,
    ) -> None:
        """Put the first items of some queries into the result; `take` says how many of each entry are needed."""
        counts = take.ravel()
        slot = np.repeat(np.arange(take.size), counts)
        place = np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)
        item = self.entries.members[self.entries.start[entries.ravel()[slot]] + place]
        row, score = slot // take.shape[1], exact.ravel()[slot]
        others = item != own[row]
        row, score, item = row[others], score[others], item[others]
        order = np.lexsort((self.positions[item], -score, row))
        row, score, item = row[order], score[order], item[order]
        column = np.arange(len(row)) - np.searchsorted(row, np.arange(take.shape[0]))[row]
        kept = column < self.found.items.shape[1]
        self.found.items[out].numpy()[row[kept], column[kept]] = item[kept]
        self.found.exact[out].numpy()[row[kept], column[kept]] = score[kept]


def _sum_of_higher(exact: NDArray[np.float64], weight: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each entry of descending lists the weight of those with a higher score."""
    before = np.cumsum(weight, axis=1) - weight
    begins = np.concatenate([np.ones((len(exact), 1), bool), exact[:, 1:] != exact[:, :-1]], axis=1)
    place = np.maximum.accumulate(np.where(begins, np.arange(exact.shape[1]), 0), axis=1)
    higher: NDArray[np.int64] = np.take_along_axis(before, place, axis=1)
    return higher
