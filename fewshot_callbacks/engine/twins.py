"""Groups of twins, and the lists of relevant items that they share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.compiled import inlined, kernel
from fewshot_callbacks.engine.relevance import Ints, Lists, PairRelevance, lower_bound

# Bytes of a list entry.
ENTRY_BYTES = 4


class TwinGroups(NamedTuple):
    """Elements in groups of twins. Groups are numbered in the order of their first elements."""

    group_of: Ints  # (elements,) group of each element
    first: Ints  # (groups,) first element of each group

    @classmethod
    def of(cls, keys: Sequence[NDArray[Any]]) -> TwinGroups:
        """Return the groups of elements whose keys are all equal.

        Args:
            keys: (elements,) integers, for each kind of key.
        """
        number = np.unique(keys[0], return_inverse=True)[1]
        for key in keys[1:]:
            values, other_number = np.unique(key, return_inverse=True)
            number = np.unique(number * max(1, len(values)) + other_number, return_inverse=True)[1]
        _, first, number = np.unique(number, return_index=True, return_inverse=True)
        order = np.argsort(first)
        new_number = np.empty(len(order), np.int64)
        new_number[order] = np.arange(len(order))
        return cls(new_number[number], first[order])

    @property
    def copies(self) -> NDArray[np.int32]:
        """(groups,) Number of elements of each group."""
        return np.bincount(self.group_of, minlength=len(self.first)).astype(np.int32)


class UnitedLists(NamedTuple):
    """The lists of queries that the list of each distinct query unites: the lists of all queries that it stands for.

    Rows that unite the same lists share one list. So there is not one list for each row in several classes, but one list for
    each combination of classes.
    """

    # (rows,) the list of each distinct query
    list_of_row: Ints
    # (lists + 1,) where the queries of each list begin
    first_query: Ints
    # queries whose lists are united; a row may stand for further queries with one of these lists
    queries: Ints
    # (lists + 1,) where the distinct items of each list begin
    first_item: Ints

    @classmethod
    def of(cls, relevance: PairRelevance, rows: TwinGroups, row_of_item: NDArray[np.int32]) -> UnitedLists:
        """Return the lists to unite, without their items.

        Args:
            relevance: The lists of all queries, and their self-matches.
            rows: The distinct query of each query.
            row_of_item: (items,) distinct item of each item.
        """
        lists = relevance.relevant
        # A list may lack the query itself as an item. Then two queries with this list need different items.
        row_outside = np.full(len(relevance.self_match), -1, np.int32)
        _find_outside(lists, relevance.self_match, row_of_item, row_outside)
        # queries of one kind have the same items to unite
        kinds = TwinGroups.of([lists.start, lists.stop, row_outside])
        list_of_row, kinds_of_lists = _combinations(rows, kinds)
        first_query = np.cumsum([0, *map(len, kinds_of_lists)])
        queries = kinds.first[np.concatenate([np.empty(0, np.int64), *kinds_of_lists])]
        first_item = np.zeros(len(first_query), np.int64)
        _unite(relevance, row_of_item, first_query, queries, first_item, np.empty(0, np.int32))
        return cls(list_of_row, first_query, queries, first_item)

    @property
    def bytes(self) -> int:
        """Memory of the distinct items of all lists."""
        return ENTRY_BYTES * int(self.first_item[-1])

    @property
    def longest(self) -> int:
        """Largest number of distinct items of a list."""
        return int(np.diff(self.first_item).max(initial=0))

    def lists(self, relevance: PairRelevance, row_of_item: NDArray[np.int32]) -> Lists:
        """Return the list of each distinct query. The arguments are the same as for `of`."""
        items = np.empty(self.first_item[-1], np.int32)
        _unite(relevance, row_of_item, self.first_query, self.queries, self.first_item, items)
        for start, stop in pairwise(self.first_item.tolist()):
            items[start:stop].sort()
        return Lists(self.first_item[self.list_of_row], self.first_item[self.list_of_row + 1], items)


def _combinations(rows: TwinGroups, kinds: TwinGroups) -> tuple[Ints, list[Ints]]:
    """Return the kinds of queries that each row stands for, as combinations that rows may share.

    Returns:
        The number of the combination of each row, (rows,), and the kinds of each combination, ascending.
    """
    number_of_kinds = max(1, len(kinds.first))
    pairs = np.unique(rows.group_of * number_of_kinds + kinds.group_of)
    row, kind = np.divmod(pairs, number_of_kinds)
    borders = np.searchsorted(row, np.arange(len(rows.first) + 1))
    number_of: dict[bytes, int] = {}
    numbers = np.empty(len(rows.first), np.int64)
    for n, (start, stop) in enumerate(pairwise(borders.tolist())):
        numbers[n] = number_of.setdefault(kind[start:stop].tobytes(), len(number_of))
    return numbers, [np.frombuffer(combination, np.int64) for combination in number_of]


def _unite(
    relevance: PairRelevance,
    row_of_item: NDArray[np.int32],
    first_query: Ints,
    queries: Ints,
    first_item: Ints,
    items: NDArray[np.int32],
) -> None:
    """Write where the distinct items of each list begin, and, if there is room, the items in any order."""
    seen_in = np.full(int(row_of_item.max(initial=-1)) + 1, -1)
    original = relevance.relevant, relevance.self_match
    _unite_lists(first_query, queries, original, row_of_item, seen_in, first_item, items)


@kernel
def _find_outside(relevant, self_match, row_of_item, row_outside):
    """Write the distinct item of each query that is a gallery item, but not in its list of relevant items."""
    for q in range(self_match.shape[0]):
        item = self_match[q]
        position = lower_bound(relevant.items, relevant.start[q], relevant.stop[q], item)
        is_inside = position < relevant.stop[q] and relevant.items[position] == item
        if item >= 0 and not is_inside:
            row_outside[q] = row_of_item[item]


@inlined
def _add_to_list(row, number, count, seen_in, out):
    """Add a distinct item to list `number` once, and return the end of the list; without room, only count."""
    if seen_in[row] == number:
        return count
    seen_in[row] = number
    if out.shape[0]:
        out[count] = row
    return count + 1


@kernel
def _unite_lists(first_query, queries, original, row_of_item, seen_in, offsets, out):
    """Write the distinct items of each list, in any order, or, without room for them, where each list begins.

    Args:
        first_query: (lists + 1,) where the queries of each list begin.
        queries: Queries whose lists each list unites.
        original: The lists of all queries, and their self-matches.
        row_of_item: The distinct item of each item.
        seen_in: (distinct items,) the last list that each was added to; -1 for none.
        offsets: (lists + 1,) where each list begins.
        out: (entries,) the items of all lists; empty to write only `offsets`.
    """
    relevant, self_match = original
    count = np.int64(0)
    for n in range(first_query.shape[0] - 1):
        for position in range(first_query[n], first_query[n + 1]):
            q = queries[position]
            for p in range(relevant.start[q], relevant.stop[q]):
                count = _add_to_list(row_of_item[relevant.items[p]], n, count, seen_in, out)
            if self_match[q] >= 0:
                count = _add_to_list(row_of_item[self_match[q]], n, count, seen_in, out)
        offsets[n + 1] = count
