"""Placing candidates among the thresholds of their queries: the compiled loop that most of the time goes to.

`hits` and `ties`, on which everything hangs, count candidates of a query with R ascending thresholds t[0] ... t[R - 1]:

- `hits[k]` candidates lie above exactly the k lowest thresholds, so `hits[k + 1:].sum()` lie above t[k];
- `ties` is a difference array: `ties[:k + 1].sum()` candidates tie with t[k].

With thresholds 0.2, 0.5, 0.5 and candidates 0.1, 0.5, 0.6, 0.9: hits = [1, 1, 0, 2] and ties = [0, 1, 0, -1]. Above
t[0] lie 1 + 0 + 2 = 3, above t[1] lie 0 + 2 = 2; with t[0] ties none, with t[1] and t[2] one each.

How an estimate is placed without a search: the interval from the lowest to the highest threshold is cut into bins. A
table says for each bin how many thresholds lie below it, or, as a complement (~k), that some threshold is near, the
first of them t[k]:

        bins   |  0  |  1  |  2  |  3  |  4  |  5  |
  thresholds         t0-+-t0       t1 t2               (with the margin of an estimate around each)
       table   |  0  | ~0  |  1  | ~1  | ~1  |  3  |

An estimate and a threshold are put into bins by the same monotone arithmetic, so rounding cannot turn them around. A
candidate whose estimate lies within its margin of a threshold is placed by its score: in float64, and where that is
too close, exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fewshot_callbacks.engine.compiled import always_inlined, inlined, kernel
from fewshot_callbacks.engine.exact import LANES, close_score, columns_of, exact_score, exact_scores_beside
from fewshot_callbacks.engine.relevance import is_candidate, place

# Estimates of a row that are handled at once.
RUN = 256
# An error is taken for a little more than it is, so that rounding its sums with scores changes nothing.
MARGIN = 1 + 1e-6


class View(NamedTuple):
    """A tile as the queries see it for which it is counted: some of its rows, or, turned around, some of its columns."""

    estimates: Any  # (rows, columns) of the tile; -inf where a pair is no negative
    turned: bool
    # the first row, or column, of these queries
    start: int
    stop: int
    # number of the query in row, or column, 0
    query: int
    # number of the item in column, or row, 0
    item: int


class Side(NamedTuple):
    """Thresholds of some queries, and counters.

    Thresholds of query i begin at `start[i]`, its counters and its table at `start[i] + i`.
    """

    start: Any  # (queries + 1,)
    thresholds: Any  # ascending for each query
    hits: Any
    ties: Any
    table: Any  # `bins` for each threshold, and as many more for each query
    bins: int
    margin: Any  # (queries,) an estimate further than this from a threshold is surely on its side of it
    origin: Any  # (queries,) where the bins begin: float32, or float64 for estimates in float64
    scale: Any  # (queries,) bins for each unit of score


@always_inlined
def bin_of(value, origin, scale, bins):
    """Return which bin a value lies in: monotone, 0 for what lies below the origin, at most bins - 1."""
    position = np.float32((value - origin) * scale)
    return np.int32(min(np.float32(bins - 2), max(np.float32(-1), position)) + np.float32(1))


@kernel
def fill_tables(side, error, first, last):
    """Fill the tables of some queries for estimates that are off by at most `error`."""
    for i in range(first, last):
        start, number = side.start[i], side.start[i + 1] - side.start[i]
        table = side.table[side.bins * (start + i) : side.bins * (start + i + number + 1)]
        if number == 0:
            table[:] = 0
            continue
        thresholds, bins = side.thresholds[start : start + number], table.shape[0]
        largest = max(abs(thresholds[0]), abs(thresholds[number - 1]))
        # 2**-51 of a score: rounding threshold + margin; 2**-125: below it float32 holds too few bits
        margin = error[i] * MARGIN + largest * 2.0**-51 + 2.0**-125
        side.margin[i] = margin
        side.origin[i] = thresholds[0] - margin
        # a bin for what lies below, and two for what lies above and its rounding; 1e30 where float32 holds no more
        side.scale[i] = min((bins - 3) / (thresholds[number - 1] - thresholds[0] + 2 * margin), 1e30)
        origin, scale, filled = side.origin[i], side.scale[i], 0
        for k in range(number):
            low = bin_of(side.origin.dtype.type(thresholds[k] - margin), origin, scale, bins)
            high = bin_of(side.origin.dtype.type(thresholds[k] + margin), origin, scale, bins) + 1
            table[filled:low] = k
            table[max(filled, low) : high] = ~k
            filled = max(filled, high)
        table[filled:] = number


@inlined
def _below(thresholds, value):
    """Return how many of the ascending thresholds are smaller than a value."""
    low, high = 0, thresholds.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if thresholds[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def place_by_score(pairs, i, j, estimate, thresholds, hits, ties, work):
    """Count a candidate whose estimate lies too close to a threshold.

    The score of the last pair is remembered, for one of equal rows.
    """
    last, query, item = work[3], pairs.query_twin[i], pairs.gallery_twin[j]
    score, error = last[2], 0.0
    known = last[0] == query and last[1] == item
    if pairs.whole:
        score, known = estimate, True
    elif not known:
        score, error = close_score(pairs, i, j)
    below = _below(thresholds, score - error)
    if below < thresholds.shape[0] and thresholds[below] <= score + error:
        if not known:
            score = exact_score(pairs, i, j, work)
            last[0], last[1], last[2] = query, item, score
        below = _below(thresholds, score)
        reached = _below(thresholds, np.nextafter(score, np.inf))
        if reached > below:
            ties[below] += 1
            ties[reached] -= 1
    hits[below] += 1


@inlined
def read_run(view, at, first, run):
    """Copy up to `RUN` estimates of a query of a view, and return how many."""
    if view.turned:
        column = view.estimates[first : first + RUN, at]
        length = column.shape[0]
        for c in range(length):
            run[c] = column[c]
    else:
        row = view.estimates[at, first : first + RUN]
        length = row.shape[0]
        for c in range(length):
            run[c] = row[c]
    return length


@kernel
def highest_of(view, out):
    """Write into `out` what no estimate of each query of a view exceeds: columns are read one by one only if they matter."""
    start, number = view.start, view.stop - view.start
    out[:number] = -np.inf if view.turned else np.inf
    for r in range(view.estimates.shape[0] if view.turned else 0):
        row = view.estimates[r, start : start + number]
        for c in range(number):
            out[c] = max(out[c], row[c])


@kernel
def count_tile(view, side, shared, pairs, highest, run, bins_of, work):
    """Place every candidate of a view among the thresholds of its query; return how many were placed by their scores.

    Args:
        view: Of a tile.
        side: Thresholds and counters.
        shared: All queries have the thresholds of query 0.
        pairs: The vectors.
        highest: (queries of the view,) to work in.
        run: (RUN,) to work in.
        bins_of: (RUN,) to work in.
        work: Of `exact.workspace`.
    """
    width, opened = view.estimates.shape[0 if view.turned else 1], 0
    highest_of(view, highest)
    for at in range(view.start, view.stop):
        i = view.query + at
        s = 0 if shared else i
        start, number = side.start[s], side.start[s + 1] - side.start[s]
        if number == 0 or highest[at - view.start] < side.origin[s]:
            continue
        thresholds = side.thresholds[start : start + number]
        hits, ties = side.hits[start + s : start + s + number + 1], side.ties[start + s : start + s + number + 1]
        table = side.table[side.bins * (start + s) : side.bins * (start + s + number + 1)]
        margin, origin, scale, bins = side.margin[s], side.origin[s], side.scale[s], table.shape[0]
        for first in range(0, width, RUN):
            length = read_run(view, at, first, run)
            passing = above = 0
            for c in range(length):
                passing += run[c] >= origin
            if passing == 0:
                continue
            for c in range(length):
                bins_of[c] = bin_of(run[c], origin, scale, bins)
            for c in range(length):
                above += bins_of[c] == bins - 1
            # in the outer bins nothing is to be asked: they are left out where little lies between them
            sparse = 4 * (passing - above) < length and table[bins - 1] >= 0
            if sparse:
                hits[number] += above
            for c in range(length):
                if sparse and (bins_of[c] == 0 or bins_of[c] == bins - 1):
                    continue
                below = np.int64(table[np.uint32(bins_of[c])])
                if below < 0:
                    below = ~below
                    estimate = np.float64(run[c])
                    while below < number and thresholds[np.uint32(below)] + margin < estimate:
                        below += 1
                    if below < number and thresholds[np.uint32(below)] - margin <= estimate:
                        opened += 1
                        place_by_score(pairs, i, view.item + first + c, estimate, thresholds, hits, ties, work)
                        continue
                hits[np.uint32(below)] += 1
    return opened


@kernel
def sum_counters(side, above, tied):
    """Turn counters into how many candidates lie above each threshold, and how many tie with it."""
    for i in range(side.start.shape[0] - 1):
        start, number = side.start[i], side.start[i + 1] - side.start[i]
        total = np.int64(0)
        for k in range(number - 1, -1, -1):
            total += side.hits[start + i + k + 1]
            above[start + k] = total
        total = np.int64(0)
        for k in range(number):
            total += side.ties[start + i + k]
            tied[start + k] = total


@kernel
def threshold_scores(part, relevant, rules, some, first, offset, once, out, members, work):
    """Make the exact scores of the relevant items of some queries that are here, those of i from `offset[i - first]`.

    Args:
        part: The vectors, and the number of their first item.
        relevant: Lists.
        rules: Of who is a candidate.
        some: Queries, as they follow `first`, those that share a list one after the other.
        first: The query whose scores stand first in `out`.
        offset: Where the scores of each query stand.
        once: Of one set, make only those of items after the query.
        out: Scores, where no others are written than those of candidates.
        members: (dim, items at once + `LANES`) to work in.
        work: Of `exact.workspace`.
    """
    (pairs, number), begin = part, 0
    while begin < some.shape[0]:
        i, end = first + some[begin], begin
        start, stop = relevant.start[i], relevant.stop[i]
        while end < some.shape[0] and relevant.start[i] == start and relevant.stop[i] == stop:
            end += 1
            i = first + some[min(end, some.shape[0] - 1)]
        here = place(relevant.items, start, stop, number)
        last = place(relevant.items, here, stop, number + pairs.gallery.shape[0])
        for p in range(here, last, members.shape[1] - LANES):
            items = relevant.items[p : min(last, p + members.shape[1] - LANES)]
            if end > begin + 1:
                columns_of(pairs.gallery, items, number, members)
            for n in some[begin:end]:
                i = first + n
                later = place(items, 0, items.shape[0], i + 1) if once else 0
                scores = out[offset[n] + p - start + later : offset[n] + p - start + items.shape[0]]
                if end > begin + 1:
                    exact_scores_beside(pairs, i, items, number, members, later, scores, work)
                for m in range(scores.shape[0]):
                    if not is_candidate(i, items[later + m], rules):
                        scores[m] = np.inf
                    elif end == begin + 1:
                        scores[m] = exact_score(pairs, i, items[later + m] - number, work)
        begin = end


@kernel
def mirror_scores(relevant, offset, first, last, out):
    """Copy the scores of one set from where the pair was made for the other item."""
    for i in range(first, last):
        for p in range(relevant.start[i], relevant.stop[i]):
            j, at = relevant.items[p], offset[i] + p - relevant.start[i]
            if j < i:
                start = relevant.start[j]
                out[at] = out[offset[j] + place(relevant.items, start, relevant.stop[j], i) - start]
