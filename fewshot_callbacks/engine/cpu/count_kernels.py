"""The counting kernel compiled for the CPU.

It gives the counts of `pytorch.count`, to the last one, from the same proved bounds; what it adds is that a pair which an
estimate leaves open is decided on the spot: by a float64 product of the two vectors, and where that is not enough by
their exact score. All kernels release the interpreter's lock and run on one thread each; the pass starts as many as it
may use.

How a pair is placed among R thresholds without a search: the interval from the lowest to the highest threshold of a query is
cut into bins. A table says for each bin how many thresholds lie below it, and whether one lies so near that an estimate
in the bin may be on the wrong side of it (then the number is stored as its complement, below zero). The bin of an
estimate and that of a threshold come from the same monotone arithmetic, so a smaller bin means a smaller number, however
the division into bins was rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks._compiling import announce_compiling
from fewshot_callbacks.engine.cpu.exact_kernels import (  # noqa: F401 - one door to all compiled kernels
    UNCOUNTED,
    Pairs,
    Vectors,
    class_scores,
    close_score,
    exact_score,
    pair_scores,
    squares,
)

announce_compiling()

SCANNED = 96
"""Up to this many thresholds are scanned faster than searched."""
RUN = 256
"""Columns that are handled at once: their tables and counters stay in the second cache."""

_kernel = numba.njit(**UNCOUNTED)
_allocating = numba.njit(**UNCOUNTED | {"_nrt": True})
# inlined: a call would copy every field of each array argument onto the stack
_inlined = numba.njit(**UNCOUNTED, forceinline=True)
# sums of integers that float64 holds are exact in any order, and a proved bound holds for any order
_any_order = numba.njit(**UNCOUNTED, fastmath={"reassoc", "contract", "nsz"})


class Side(NamedTuple):
    """The items along one side of a tile. A side that asks nothing has no thresholds."""

    items: NDArray[np.int64]  # (items,) into the vectors
    weight: NDArray[np.int64]  # (items,) how many equal items each stands for
    relevant: NDArray[np.int64]  # (items,)
    thresholds: NDArray[np.float64]  # (items, relevant) ascending
    hits: NDArray[np.int32]  # (items, relevant + 1)
    ties: NDArray[np.int32]  # (items, relevant + 1)
    operand: NDArray[np.floating]  # (items, components) what is multiplied, item after item as they are here
    rounding: NDArray[np.float64]  # (items,) error of a float64 product of operands


class Margins(NamedTuple):
    """What an estimate is compared with, and the tables."""

    margin: NDArray[np.float64]  # (items,) an estimate further than this from a threshold is surely on its side of it
    origin: NDArray[np.floating]  # (items,)
    scale: NDArray[np.floating]  # (items,)
    table: NDArray[np.signedinteger]  # (items, bins) thresholds below each bin, or the complement of that number


# -------------------------------------------------------------------------------------- relevant pairs near some scores


@_kernel
def near_scores(estimates, queries, members, error, pairs, low, high, many, gaps, out):
    """Make the exact scores of those pairs that may lie in an interval; count the others between the intervals.

    Args:
        estimates: (rows, columns) of the scores; not a number where a pair is excluded.
        queries: (rows,) indices.
        members: (columns,) indices.
        error: (rows,) of the estimates.
        pairs: The vectors.
        low: (intervals,) ascending, where they begin.
        high: (intervals,) and end.
        many: Stop at a row before which more than this share of the pairs needed their exact scores.
        gaps: (intervals + 1,) counters of the pairs below the first, between the first and the second, ...
        out: (rows * columns,) where the exact scores are put.

    Returns:
        How many exact scores were made, and in how many rows.
    """
    rows, columns = estimates.shape
    filled = 0
    for r in range(rows):
        if filled > 1024 and filled > many * r * columns:
            return filled, r
        margin = np.float64(error[r])
        for c in range(columns):
            value = np.float64(estimates[r, c])
            if np.isnan(value):
                continue
            begun = _begun(low, value + margin)
            if begun == 0 or high[begun - 1] < value - margin:
                gaps[begun] += 1
                continue
            value, closer = close_score(pairs, queries[r], members[c])
            begun = _begun(low, value + closer)
            if begun == 0 or high[begun - 1] < value - closer:
                gaps[begun] += 1
                continue
            out[filled] = exact_score(pairs, queries[r], members[c])
            filled += 1
    return filled, rows


@_inlined
def _begun(low, value):
    """Return how many of the ascending numbers are not above a value."""
    first, last = 0, low.shape[0]
    while first < last:
        middle = (first + last) // 2
        if low[middle] <= value:
            first = middle + 1
        else:
            last = middle
    return first


# ------------------------------------------------------------------------------------------------------ excluded pairs


@_kernel
def exclude(row_codes, column_codes, first, value, values):
    """Write one value over those of excluded pairs: of items that have a code in common.

    Asking every pair takes 1 % of the product of 512 components, since a register holds sixteen codes.

    Args:
        row_codes: (exclusions, rows).
        column_codes: (exclusions, items).
        first: (rows,) the item of the first column.
        value: What is written; what is no number passes no comparison and lies in no bin but the first.
        values: (rows, columns); those beyond the last item stay.
    """
    for e in range(row_codes.shape[0]):
        for r in range(values.shape[0]):
            code, others, row = row_codes[e, r], column_codes[e, first[r] :], values[r]
            width, found = min(len(row), len(others)), False
            for c in range(width):
                found |= others[c] == code
            if found:
                for c in range(width):
                    if others[c] == code:
                        row[c] = value


# ---------------------------------------------------------------------------------------------------------- equal rows


@_kernel
def row_hashes(bits, odd, out):
    """Make a number of 64 bits for each row, the same for equal rows.

    In PyTorch, in one pass for each operation, this takes four times as long: 2 % of an evaluation of 8,000 x 512.
    """
    for i in range(bits.shape[0]):
        row = bits[i]
        total = np.int64(0)
        for k in range(row.shape[0]):
            pattern = np.int64(row[k])
            total += (pattern ^ (pattern >> 29)) * odd[k]
        out[i] = total


# ------------------------------------------------------------------------------------------------------------- margins


@numba.njit(**UNCOUNTED, inline="always")
def _bin(value, origin, scale, bins):
    """Return which bin a value lies in: monotone in the value, 0 for what lies below the origin, at most bins - 1."""
    position = np.float32((value - origin) * scale)
    # in this order of arguments what is not a number lies below as well
    return np.int32(min(np.float32(bins - 2), max(np.float32(-1), position)) + np.float32(1))


@_allocating
def margins(side, error, out):
    """Fill the tables of one side, for estimates that are off by at most `error` of each item."""
    bins = out.table.shape[1]
    ends = np.empty(2, out.origin.dtype)
    for i in range(side.items.shape[0]):
        relevant = side.relevant[i]
        table = out.table[i]
        if relevant == 0:  # all estimates lie in the first bin, below an origin that none reaches
            out.margin[i] = 0.0
            out.origin[i] = 1e30
            out.scale[i] = 1.0
            table[:] = 0
            continue
        thresholds = side.thresholds[i]
        largest = max(abs(thresholds[0]), abs(thresholds[relevant - 1]))
        # a little more than the error, so that rounding these sums changes nothing
        margin = error[i] * (1 + 1e-6) + largest * 2.0**-51 + 2.0**-125
        out.margin[i] = margin
        out.origin[i] = thresholds[0] - margin
        # a bin for what lies below, and two for what lies above and its rounding; 1e30 where float32 holds no more
        out.scale[i] = min((bins - 3) / (thresholds[relevant - 1] - thresholds[0] + 2 * margin), 1e30)
        origin, scale = out.origin[i], out.scale[i]
        filled = 0
        for k in range(relevant):
            # rounding is monotone: what an estimate reaches, it reaches rounded
            ends[0], ends[1] = thresholds[k] - margin, thresholds[k] + margin
            start = _bin(ends[0], origin, scale, bins)
            stop = _bin(ends[1], origin, scale, bins) + 1
            table[filled:start] = k
            table[max(filled, start) : stop] = ~k
            filled = max(filled, stop)
        table[filled:] = relevant


# ------------------------------------------------------------------------------------------------------------ counting


@_inlined
def _below(thresholds, relevant, value):
    """Return how many of the ascending thresholds are smaller than the value."""
    low = 0
    high = relevant
    while high - low > SCANNED:
        middle = (low + high) >> 1
        if thresholds[np.uint64(middle)] < value:
            low = middle + 1
        else:
            high = middle
    # branch-free scan: an unpredictable branch costs more
    rest = thresholds[low:high]
    count = np.int64(low)
    for k in range(rest.shape[0]):
        count += rest[k] < value
    return count


@_inlined
def _not_above(thresholds, relevant, value):
    return _below(thresholds, relevant, np.nextafter(value, np.inf))


@_any_order
def _operand_product(left, right):
    total = 0.0
    for k in range(left.shape[0]):
        total += np.float64(left[k]) * np.float64(right[k])
    return total


@_inlined
def _place(side, item, value, error, weight):
    """Count a candidate whose score is known up to an error; False if a threshold is too near."""
    relevant = side.relevant[item]
    thresholds = side.thresholds[item]
    below = _below(thresholds, relevant, value - error)
    if below < relevant and thresholds[below] <= value + error:
        return False
    side.hits[item, below] += weight
    return True


@_inlined
def _place_exact(side, item, value, weight):
    """Count a candidate whose exact score is known."""
    relevant = side.relevant[item]
    below = _below(side.thresholds[item], relevant, value)
    not_above = _not_above(side.thresholds[item], relevant, value)
    side.hits[item, below] += weight
    if not_above > below:
        side.ties[item, below] -= weight
        side.ties[item, not_above] += weight


@_inlined
def _collect(pooled, value, query, item, weight):
    """Note a pair whose estimate is among the highest."""
    position = pooled.filled[0]
    if position < pooled.values.shape[0]:
        pooled.values[position] = value
        pooled.rows[position] = query
        pooled.columns[position] = item
        if position < pooled.weights.shape[0]:
            pooled.weights[position] = weight
    pooled.filled[0] = position + 1


@_inlined
def _resolve(pairs, rows, i, columns, j, row_open, column_open, screened, pooled, weight):
    """Decide a pair that its estimate left open; `screened`: nothing has been recorded of it yet."""
    query, item = rows.items[i], columns.items[j]
    # the operands lie next to each other in memory, the vectors far apart
    value = _operand_product(rows.operand[i], columns.operand[j])
    if screened:
        if value >= pooled.floor:
            pooled.histogram[_bin(value, pooled.origin, pooled.scale, pooled.histogram.shape[0])] += weight
        if value >= pooled.cut:
            _collect(pooled, value, query, item, weight)
    if row_open and _place(rows, i, value, rows.rounding[i], columns.weight[j]):
        row_open = False
    if column_open and _place(columns, j, value, columns.rounding[j], rows.weight[i]):
        column_open = False
    if not (row_open or column_open):
        return
    value, error = close_score(pairs, query, item)
    if row_open and _place(rows, i, value, error, columns.weight[j]):
        row_open = False
    if column_open and _place(columns, j, value, error, rows.weight[i]):
        column_open = False
    if not (row_open or column_open):
        return
    value = exact_score(pairs, query, item)
    pooled.filled[2] += 1
    if row_open:
        _place_exact(rows, i, value, columns.weight[j])
    if column_open:
        _place_exact(columns, j, value, rows.weight[i])


@_inlined
def _span(half, first, width, before, after):
    """Return the columns of a run that are negatives: first those up to `before`, then those from `after` on."""
    if half == 0:
        return first, min(first + RUN, width, before)
    return max(first, after), min(first + RUN, width)


@_inlined
def _sum_chunks(estimates, r, start, stop, value):
    """Sum the chunks of a span of estimates; slicing lets LLVM drop the checks for negative indices."""
    chunk = estimates[0, r, start:stop]
    for c in range(stop - start):
        value[c] = chunk[c]
    for p in range(1, estimates.shape[0]):
        chunk = estimates[p, r, start:stop]
        for c in range(stop - start):
            value[c] += chunk[c]


@_allocating
def count(estimates, first_row, rows, row_margins, columns, column_margins, spans, both, weighted, pairs, pooled, cut):
    """Count every candidate of a tile for its query, and for its column's item too where `both`.

    Args:
        estimates: (chunks, tile rows, columns); the estimate of a pair is the sum over the chunks.
        first_row: The tile's first row in `rows`.
        rows: The queries.
        row_margins: Their tables.
        columns: The candidates; where `both`, queries as well.
        column_margins: Their tables.
        spans: (tile rows, 2): columns from the first up to the second are no negatives of this row; where `both`, none
            before the second is.
        both: Each pair counts for its two items.
        weighted: Some row or column stands for several equal items.
        pairs: The vectors.
        pooled: What is recorded of all pairs.
        cut: `pooled.cut` in the precision of the estimates, not rounded up.
    """
    _, height, width = estimates.shape
    value = np.empty(RUN, estimates.dtype)
    row_bin = np.empty(RUN, np.int32)
    column_bin = np.empty(RUN, np.int32)
    histogram_bin = np.empty(RUN, np.int32)
    open_at = np.empty(2 * RUN, np.int32)
    opened = 0
    origin = value.dtype.type(pooled.origin)
    scale = value.dtype.type(pooled.scale)
    bin_count = pooled.histogram.shape[0]
    row_bins, column_bins = row_margins.table.shape[1], column_margins.table.shape[1]
    pair_factor = 2 if both else 1
    runs = (width + RUN - 1) // RUN
    for turn in range(runs * height):
        # where columns ask too, their tables stay in the cache for all rows; else those of a row for all columns
        run, r = (turn // height, turn % height) if both else (turn % runs, turn // runs)
        first = run * RUN
        i = first_row + r
        row_weight, row_relevant = rows.weight[i], rows.relevant[i]
        row_origin, row_scale = row_margins.origin[i], row_margins.scale[i]
        for half in range(2):
            start, stop = _span(half, first, width, spans[r, 0], spans[r, 1])
            if start >= stop:
                continue
            length = stop - start
            _sum_chunks(estimates, r, start, stop, value)
            highest = np.int32(0)
            wanted = 0
            for c in range(length):
                row_bin[c] = _bin(value[c], row_origin, row_scale, row_bins)
                highest = max(highest, row_bin[c])
            for c in range(length):
                histogram_bin[c] = _bin(value[c], origin, scale, bin_count)
                wanted += value[c] >= cut
            if both:
                column_origin, column_scale = column_margins.origin[start:stop], column_margins.scale[start:stop]
                for c in range(length):
                    column_bin[c] = _bin(value[c], column_origin[c], column_scale[c], column_bins)
                    highest = max(highest, column_bin[c])
            if weighted:
                for c in range(length):
                    pooled.histogram[np.uint32(histogram_bin[c])] += (
                        pair_factor * row_weight * columns.weight[start + c]
                    )
            else:
                for c in range(length):
                    pooled.histogram[np.uint32(histogram_bin[c])] += pair_factor
            if highest == 0 and wanted == 0:
                continue
            table, hits = row_margins.table[i], rows.hits[i]
            row_thresholds, row_margin = rows.thresholds[i], row_margins.margin[i]
            for c in range(length):
                beaten = np.int64(table[np.uint32(row_bin[c])])
                if beaten < 0:
                    beaten = ~beaten
                    estimate = np.float64(value[c])
                    while beaten < row_relevant and row_thresholds[np.uint32(beaten)] + row_margin < estimate:
                        beaten += 1
                    if beaten < row_relevant and row_thresholds[np.uint32(beaten)] - row_margin <= estimate:
                        open_at[opened] = c
                        opened += 1
                        continue
                hits[np.uint32(beaten)] += columns.weight[start + c] if weighted else 1
            row_opened = opened
            if both:
                tables, column_hits = column_margins.table[start:stop], columns.hits[start:stop]
                column_thresholds, column_margin = columns.thresholds[start:stop], column_margins.margin[start:stop]
                column_relevant = columns.relevant[start:stop]
                for c in range(length):
                    beaten = np.int64(tables[c, np.uint32(column_bin[c])])
                    if beaten < 0:
                        beaten = ~beaten
                        estimate, margin = np.float64(value[c]), column_margin[c]
                        while (
                            beaten < column_relevant[c] and column_thresholds[c, np.uint32(beaten)] + margin < estimate
                        ):
                            beaten += 1
                        if beaten < column_relevant[c] and column_thresholds[c, np.uint32(beaten)] - margin <= estimate:
                            open_at[opened] = c
                            opened += 1
                            continue
                    column_hits[c, np.uint32(beaten)] += row_weight if weighted else 1
            pooled.filled[1] += opened
            for o in range(opened):
                j = start + open_at[o]
                _resolve(
                    pairs, rows, i, columns, j, o < row_opened, o >= row_opened, False, pooled, np.int64(0)
                )  # fmt: skip
            opened = 0
            if wanted:
                for c in range(length):
                    if value[c] >= cut:
                        weight = pair_factor * row_weight * columns.weight[start + c]
                        _collect(pooled, value[c], rows.items[i], columns.items[start + c], weight)


@_kernel
def screen(estimates, first_row, rows, row_low, columns, column_low, spans, both, pairs, pooled):
    """Count as `count` does where few candidates come near any threshold: only those that do are compared with it.

    Candidates below the lowest threshold of a query are not counted for it, since they beat nothing.

    Args:
        estimates: (tile rows, columns).
        first_row: As in `count`, like what is not named here.
        rows: The queries.
        row_low: (rows,) an estimate below it is surely below all thresholds of the row, and of no interest to the pool.
        columns: The candidates.
        column_low: (columns,) the same for the columns; `inf` where they ask nothing.
        spans: As in `count`.
        both: As in `count`.
        pairs: The vectors.
        pooled: What is recorded of all pairs.
    """
    height, width = estimates.shape
    pair_factor = 2 if both else 1
    for r in range(height):
        i = first_row + r
        low = row_low[i]
        for first in range(0, width, RUN):
            for half in range(2):
                start, stop = _span(half, first, width, spans[r, 0], spans[r, 1])
                if start >= stop:
                    continue
                estimate, others_low = estimates[r, start:stop], column_low[start:stop]
                passing = 0
                for c in range(stop - start):
                    passing += estimate[c] >= min(low, others_low[c])
                if passing == 0:
                    continue
                for c in range(stop - start):
                    if estimate[c] >= min(low, others_low[c]):
                        j = start + c
                        pooled.filled[1] += 1
                        _resolve(
                            pairs, rows, i, columns, j, rows.relevant[i] > 0, both and columns.relevant[j] > 0, True,
                            pooled, pair_factor * rows.weight[i] * columns.weight[j],
                        )  # fmt: skip


@_allocating
def count_pool(estimates, first_row, rows, columns, spans, both, pairs, edges, edge_margins, hits, ties):
    """Count every candidate of a tile against one list of scores, regardless of the query.

    Args:
        estimates: (chunks, tile rows, columns), as in `count`, like what is not named here.
        first_row: As in `count`.
        rows: The queries.
        columns: The candidates.
        spans: As in `count`.
        both: As in `count`.
        pairs: The vectors.
        edges: A side of one item, whose thresholds are these scores.
        edge_margins: Its tables.
        hits: (scores + 1,) counters of what lies above that many scores and ties with none.
        ties: (scores + 1,) as in `pytorch.count.Counts`.
    """
    _, height, width = estimates.shape
    pair_factor = 2 if both else 1
    thresholds, relevant = edges.thresholds[0], edges.relevant[0]
    origin, scale, table = edge_margins.origin[0], edge_margins.scale[0], edge_margins.table[0]
    margin = edge_margins.margin[0]
    bins = table.shape[0]
    value = np.empty(RUN, estimates.dtype)
    bin_of = np.empty(RUN, np.int32)
    inner = np.empty(RUN, np.int32)
    weighted = rows.weight.max() > 1 or columns.weight.max() > 1
    below, above = np.int64(table[0]), np.int64(table[bins - 1])
    outer = not weighted and below >= 0 and above >= 0  # the first and the last bin leave nothing to decide
    lowest = highest = 0
    for r in range(height):
        i = first_row + r
        rounding = rows.rounding[i]
        for first in range(0, width, RUN):
            for half in range(2):
                start, stop = _span(half, first, width, spans[r, 0], spans[r, 1])
                if start >= stop:
                    continue
                length = stop - start
                _sum_chunks(estimates, r, start, stop, value)
                for c in range(length):
                    bin_of[c] = _bin(value[c], origin, scale, bins)
                some = length
                if outer:
                    some = 0
                    for c in range(length):
                        lowest += bin_of[c] == 0
                        highest += bin_of[c] == bins - 1
                    for c in range(length):
                        inner[some] = c
                        some += (bin_of[c] != 0) & (bin_of[c] != bins - 1)
                for n in range(some):
                    c = int(inner[n]) if outer else n
                    beaten = np.int64(table[np.uint32(bin_of[c])])
                    weight = pair_factor * rows.weight[i] * columns.weight[start + c]
                    if beaten < 0:
                        k = ~beaten
                        estimate = np.float64(value[c])
                        while k < relevant and thresholds[k] + margin < estimate:
                            k += 1
                        if k < relevant and thresholds[k] - margin <= estimate:
                            query, item = rows.items[i], columns.items[start + c]
                            score = _operand_product(rows.operand[i], columns.operand[start + c])
                            k = _below(thresholds, relevant, score - rounding)
                            if k < relevant and thresholds[k] <= score + rounding:
                                score, error = close_score(pairs, query, item)
                                k = _below(thresholds, relevant, score - error)
                                if k < relevant and thresholds[k] <= score + error:
                                    score = exact_score(pairs, query, item)
                                    k = _below(thresholds, relevant, score)
                                    not_above = _not_above(thresholds, relevant, score)
                                    if not_above > k:
                                        ties[k] -= weight
                                        ties[not_above] += weight
                        hits[k] += weight
                    else:
                        hits[beaten] += weight
    if outer:
        hits[below] += pair_factor * lowest
        hits[above] += pair_factor * highest
