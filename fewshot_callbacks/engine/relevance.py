"""Who is relevant to whom, and who is no candidate: lists of gallery items, one for each query.

This is all that the engine knows of labels, several labels, judgements, junk, captions, identities or cameras. Lists
are parts of one array: the items of query i are `items[start[i] : stop[i]]`, ascending. The queries of a class share
one part. Nothing is taken out of a list for an item that is no candidate: that is found out while scores are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.compiled import inlined, kernel

Ints = NDArray[np.int64]


class Lists(NamedTuple):
    """Some gallery items of each query."""

    start: Ints  # (queries,)
    stop: Ints  # (queries,)
    items: NDArray[np.int32]  # ascending from start to stop

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Lists:
        """Return lists of any order."""
        ends = np.cumsum([0, *map(len, lists)])
        return cls(ends[:-1], ends[1:], np.array([item for some in lists for item in sorted(some)], np.int32))

    @classmethod
    def of_labels(cls, labels: NDArray[Any], gallery_labels: NDArray[Any]) -> Lists:
        """Return for each query the items with its label."""
        order = np.argsort(gallery_labels, kind="stable")
        ordered = gallery_labels[order]
        first, last = np.searchsorted(ordered, labels, side="left"), np.searchsorted(ordered, labels, side="right")
        return cls(first, last, order.astype(np.int32))

    @classmethod
    def none(cls, queries: int) -> Lists:
        """Return empty lists."""
        return cls(np.zeros(queries, np.int64), np.zeros(queries, np.int64), np.empty(0, np.int32))

    @property
    def sizes(self) -> Ints:
        """Length of each list."""
        return self.stop - self.start


@dataclass(frozen=True)
class Relevance:
    """What is asked of the pairs of some queries and gallery items.

    Args:
        relevant: To each query, if they are candidates for it.
        own: (queries,) number of the item that the query itself is, which is no candidate; -1 for none.
        codes: For each kind of exclusion the codes of the queries and of the items: a pair with equal codes is no candidate.
        ignored: Further items that are no candidates.
        mutual: Queries and items are one set, i is in the lists of j if j is in those of i, and both have the same codes.
        groups: The group of each query, ascending, and of each item, ascending in each process: only pairs of one group are
            looked at, and no list holds others. None for all pairs.
    """

    relevant: Lists
    own: NDArray[np.int32]
    codes: Sequence[tuple[NDArray[Any], NDArray[Any]]] = ()
    ignored: Lists = field(default=Lists.none(0))
    mutual: bool = False
    groups: tuple[Ints, Ints] | None = None
    _of_queries: NDArray[np.int32] = field(init=False, repr=False)
    _of_items: NDArray[np.int32] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        queries = len(self.own)
        if not len(self.ignored.start):
            object.__setattr__(self, "ignored", Lists.none(queries))
        numbers = [np.unique(np.concatenate(pair), return_inverse=True)[1].astype(np.int32) for pair in self.codes]
        rest = len(self.codes[0][1]) if self.codes else 0
        whole = np.stack(numbers) if numbers else np.empty((0, queries + rest), np.int32)
        object.__setattr__(self, "_of_queries", whole[:, :queries].copy())
        object.__setattr__(self, "_of_items", whole[:, queries:].copy())

    @property
    def excludes(self) -> bool:
        """Whether more than a query itself is no candidate."""
        return len(self._of_queries) > 0 or len(self.ignored.items) > 0

    @property
    def numbered(self) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """The codes of each kind, as numbers from 0 on."""
        return list(zip(self._of_queries, self._of_items, strict=True))

    @property
    def rules(self) -> tuple[Any, ...]:
        """What `is_candidate` reads."""
        return self.ignored, self._of_queries, self._of_items, self.own

    def blocks(self, first: int, items: int) -> list[tuple[int, int, int, int]]:
        """Return rows (start, stop) and columns (start, stop) of the pairs that are looked at, among some items.

        Args:
            first: Number of the first item.
            items: Number of items, from there on.
        """
        if self.groups is None:
            return [(0, len(self.own), 0, items)]
        of_queries, of_items = self.groups[0], self.groups[1][first : first + items]
        group, start, rows = np.unique(of_queries, return_index=True, return_counts=True)
        ends = (np.searchsorted(of_items, group, side=side) for side in ("left", "right"))
        spans = zip(start, start + rows, *ends, strict=True)
        return [(int(row), int(end), int(column), int(stop)) for row, end, column, stop in spans if column < stop]

    def mask(self, estimates: NDArray[Any], row: int, column: int, *, once: bool) -> int:
        """Write -inf over the pairs of a tile that are no negatives; return how many negatives are left.

        Args:
            estimates: (rows, columns) of the tile.
            row: The query of its first row.
            column: The item of its first column.
            once: A pair of one set is met with the smaller number as the query.
        """
        return int(_mask(estimates, row, column, self.relevant, self.rules, once))


@inlined
def place(items, start, stop, item):
    """Return where an item is in an ascending list, or the next one."""
    low, high = start, stop
    while low < high:
        middle = (low + high) // 2
        if items[middle] < item:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def is_candidate(i, j, rules):
    """Find out whether an item may be ranked for a query."""
    ignored, of_queries, of_items, own = rules
    candidate = own[i] != j
    for e in range(of_queries.shape[0]):
        candidate &= of_queries[e, i] != of_items[e, j]
    if candidate and ignored.items.shape[0]:
        at = place(ignored.items, ignored.start[i], ignored.stop[i], j)
        candidate = at == ignored.stop[i] or ignored.items[at] != j
    return candidate


@kernel
def _mask_list(row, start, stop, items, first):
    """Write -inf over the items of a list; return how many were there."""
    masked = 0
    at = place(items, start, stop, first)
    while at < stop and items[at] < first + row.shape[0]:
        column = items[at] - first
        masked += row[column] != -np.inf
        row[column] = -np.inf
        at += 1
    return masked


@kernel
def _mask(estimates, first_row, first_column, relevant, rules, once):
    ignored, of_queries, of_items, own = rules
    height, width = estimates.shape
    left = height * width
    for r in range(height):
        i, row = first_row + r, estimates[r]
        itself = own[i] - first_column
        for c in range(0 if once else max(0, itself), min(width, itself + 1)):
            row[c] = -np.inf
            left -= 1
        left -= _mask_list(row, relevant.start[i], relevant.stop[i], relevant.items, first_column)
        left -= _mask_list(row, ignored.start[i], ignored.stop[i], ignored.items, first_column)
        for e in range(of_queries.shape[0]):
            code, others = of_queries[e, i], of_items[e, first_column : first_column + width]
            found = False
            for c in range(width):  # a loop without a branch, since most rows of a tile hold no such item
                found |= others[c] == code
            if found:
                for c in range(width):
                    if others[c] == code and row[c] != -np.inf:
                        row[c] = -np.inf
                        left -= 1
    return left
