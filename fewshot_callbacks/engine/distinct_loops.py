"""The compiled loops of `distinct.py`, which derive the counts of all queries from the counts of distinct rows."""

from __future__ import annotations

import numpy as np

from fewshot_callbacks.engine.compiled import inlined, kernel
from fewshot_callbacks.engine.relevance import lower_bound


@kernel
def write_at_places(offsets, thresholds, scores):
    """Write the threshold of each list entry of queries to the position of the entry."""
    for n in range(offsets.shape[0] - 1):
        for k in range(thresholds.offsets[n], thresholds.offsets[n + 1]):
            scores[offsets[n] + thresholds.places[k]] = thresholds.scores[k]


@kernel
def add_inside(first_row, thresholds, lists, copies, above, tied):
    """Add the pairs inside the lists of distinct queries to the counts of pairs outside.

    The scores of the pairs inside are the thresholds. Each threshold counts the items of all equal thresholds as tied.
    """
    for n in range(thresholds.offsets.shape[0] - 1):
        start = thresholds.offsets[n]
        end = thresholds.offsets[n + 1]
        list_start = lists.start[first_row + n]
        items_above = np.int64(0)
        while end > start:  # a run of equal thresholds, the highest run first
            begin = end
            items = np.int64(0)
            while begin > start and thresholds.scores[begin - 1] == thresholds.scores[end - 1]:
                begin -= 1
                items += copies[lists.items[list_start + thresholds.places[begin]]]
            for k in range(begin, end):
                above[k] += items_above
                tied[k] += items
            items_above += items
            end = begin


@inlined
def _fill_slots(lists, row, slots):
    """Write, for each distinct item in the list of a row, its position in that list."""
    for p in range(lists.start[row], lists.stop[row]):
        slots[lists.items[p]] = p - lists.start[row]


@kernel
def look_up(queries, original, lookup, first_row, in_list, slots, entry_offsets, entries, self_scores):
    """Write the exact scores of list entries, +inf for pairs that are not candidates, and of each query with itself.

    Args:
        queries: Queries; queries of one row are adjacent.
        original: The lists of all queries, and their self-matches.
        lookup: The lists of distinct queries; the distinct row of each item and of each query.
        first_row: The first distinct query of `in_list`.
        in_list: The exact score of each entry of the lists of distinct queries, and where the entries of each begin.
        slots: (distinct items,) to work in.
        entry_offsets: (queries + 1,) where the entries of each query begin in `entries`.
        entries: The scores of all list entries.
        self_scores: (queries,) NaN if the query is not an item, or is excluded anyway.
    """
    relevant, self_match = original
    lists, row_of_item, row_of_query = lookup
    scores, offsets = in_list
    previous_row = -1
    for n in range(queries.shape[0]):
        q = queries[n]
        row = row_of_query[q]
        if row != previous_row:
            _fill_slots(lists, row, slots)
            previous_row = row
        start = offsets[row - first_row]
        entry = entry_offsets[n]
        for p in range(relevant.start[q], relevant.stop[q]):
            item = relevant.items[p]
            entries[entry] = np.inf if item == self_match[q] else scores[start + slots[row_of_item[item]]]
            entry += 1
        self_scores[n] = np.nan
        if self_match[q] >= 0:
            score = scores[start + slots[row_of_item[self_match[q]]]]
            if score < np.inf:
                self_scores[n] = score


@kernel
def subtract(rows, all_items, offsets, scores, self_scores, above, tied):
    """Write the number of negatives above, and tied with, each threshold of queries.

    Args:
        rows: (queries,) distinct query of each, counted from the first of `all_items`.
        all_items: Where the thresholds of each distinct query begin; the thresholds; the items above and tied with
            each.
        offsets: Where the thresholds of each query begin.
        scores: (thresholds,) thresholds of the queries, ascending for each query.
        self_scores: (queries,) score of each query with itself; NaN if there is none.
        above: (thresholds,) negatives above each.
        tied: (thresholds,) negatives tied with each.
    """
    row_offsets, row_scores, items_above, items_tied = all_items
    for n in range(rows.shape[0]):
        first_of_row = row_offsets[rows[n]]
        k = row_offsets[rows[n] + 1]
        last = offsets[n + 1]
        end = last
        while end > offsets[n]:  # a run of equal thresholds, the highest run first
            score = scores[end - 1]
            begin = end
            while begin > offsets[n] and scores[begin - 1] == score:
                begin -= 1
            step = 1  # the next threshold is near: the search goes down from the last one by steps that double
            while k - step >= first_of_row and row_scores[k - step] >= score:
                k -= step
                step *= 2
            k = lower_bound(row_scores, max(first_of_row, k - step), k, score)
            number_above = items_above[k] - (last - end)
            number_tied = items_tied[k] - (end - begin)
            if self_scores[n] > score:
                number_above -= 1
            if self_scores[n] == score:
                number_tied -= 1
            for p in range(begin, end):
                above[p] = number_above
                tied[p] = number_tied
            end = begin


@kernel
def count_relevant(queries, original, lookup, first_row, offsets, slots, relevant_pairs, self_pairs):
    """Count, for each list entry of distinct queries, the relevant pairs it stands for, and the queries themselves.

    Args:
        queries: All queries of the distinct queries; queries of one row are adjacent.
        original: The lists of all queries, and their self-matches.
        lookup: The lists of distinct queries; the distinct row of each item and of each query.
        first_row: The first distinct query of `offsets`.
        offsets: Where the entries of the list of each distinct query begin.
        slots: (distinct items,) to work in.
        relevant_pairs: (entries,) relevant pairs.
        self_pairs: (entries,) pairs of a query and itself.
    """
    relevant, self_match = original
    lists, row_of_item, row_of_query = lookup
    previous_row = -1
    for n in range(queries.shape[0]):
        q = queries[n]
        row = row_of_query[q]
        if row != previous_row:
            _fill_slots(lists, row, slots)
            previous_row = row
        start = offsets[row - first_row]
        for p in range(relevant.start[q], relevant.stop[q]):
            item = relevant.items[p]
            if item != self_match[q]:
                relevant_pairs[start + slots[row_of_item[item]]] += 1
        if self_match[q] >= 0:
            self_pairs[start + slots[row_of_item[self_match[q]]]] += 1
