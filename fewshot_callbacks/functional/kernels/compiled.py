"""The counting kernel compiled for the CPU.

It gives the counts of `reference`, to the last one, from the same proved bounds; what it adds is that a pair which an
estimate leaves open is decided on the spot: by a float64 product of the two vectors, and where that is not enough by
their key. All kernels release the interpreter's lock and run on one thread each; the pass starts as many as it may use.

How a pair is placed among R thresholds without a search: the stretch from the lowest to the highest threshold of a query is
cut into cells. A table says for each cell how many thresholds lie below it, and whether one lies so near that an
estimate in the cell may be on the wrong side of it (then the number is stored as its complement, below zero). The cell of
an estimate and that of a threshold come from the same monotone arithmetic, so a smaller cell means a smaller number,
however the division into cells was rounded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

FEW = 96
"""So many thresholds are compared faster than searched."""
MEMBERS = 256
"""So many items of a class are split into slices at a time."""
RUN = 256
"""Columns that are handled at once: their tables and counters stay in the second cache."""

_kernel = numba.njit(nogil=True, cache=True, error_model="numpy")
# a call would push every field of every array that it is given
_inlined = numba.njit(nogil=True, cache=True, error_model="numpy", forceinline=True)
# sums of integers that float64 holds are exact in any order, and a proved bound holds for any order
_any_order = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


class Vectors(NamedTuple):
    """The items of one side, and what turns their products into keys."""

    values: NDArray[np.floating]  # (items, dim)
    inverse_scale: NDArray[np.float64]  # (items,) power of two
    factor: NDArray[np.float64]  # (items,) what a product of scaled vectors is multiplied with
    square: NDArray[np.float64]  # (items,) exact squared length of the scaled vector


class Pairs(NamedTuple):
    """Queries, gallery, and how their keys are defined; see `similarity.ScoreTiles`."""

    queries: Vectors
    gallery: Vectors
    similarity: int  # 0 cosine, 1 dot, 2 euclidean
    slices: int
    bits: int


class Side(NamedTuple):
    """The items along one side of a tile. A side that asks nothing has no thresholds."""

    items: NDArray[np.int64]  # (items,) into the vectors
    weight: NDArray[np.int64]  # (items,) how many equal items each stands for
    relevant: NDArray[np.int64]  # (items,)
    thresholds: NDArray[np.float64]  # (items, relevant) ascending
    error: NDArray[np.float64]  # (items,) of a float64 product
    hits: NDArray[np.int32]  # (items, relevant + 1)
    ties: NDArray[np.int32]  # (items, relevant + 1)
    operand: NDArray[np.floating]  # (items, components) what is multiplied, item after item as they are here
    rounding: NDArray[np.float64]  # (items,) error of a float64 product of operands


class Margins(NamedTuple):
    """What an estimate is compared with, and the tables."""

    reach: NDArray[np.float64]  # (items,) an estimate further than this from a threshold is surely on its side of it
    origin: NDArray[np.floating]  # (items,)
    scale: NDArray[np.floating]  # (items,)
    table: NDArray[np.signedinteger]  # (items, cells)


class Pooled(NamedTuple):
    """What is recorded of all pairs, whatever their query: a histogram, and which pairs have the highest estimates."""

    histogram: NDArray[
        np.int64
    ]  # (bins + 1,) the first bin is for what lies below all others, and for what is no candidate
    origin: float
    scale: float
    floor: float  # a screen records no value below this one
    cut: float  # pairs with estimates from here on are collected
    values: NDArray[np.float64]  # (capacity,) their estimates
    rows: NDArray[np.int32]  # (capacity,) their queries
    columns: NDArray[np.int32]  # (capacity,) and their gallery items
    weights: NDArray[np.int64]  # (capacity,) how many pairs each stands for; empty where that is the same for all
    filled: NDArray[np.int64]  # (3,) pairs collected; pairs left open by the estimate; keys computed


# ------------------------------------------------------------------------------------------------------ scores of pairs


@_any_order
def _product(left, right, left_scale, right_scale):
    total = 0.0
    for k in range(left.shape[0]):
        total += (np.float64(left[k]) * left_scale) * (np.float64(right[k]) * right_scale)
    return total


@_any_order
def _negative_distance(left, right, scale):
    total = 0.0
    for k in range(left.shape[0]):
        difference = (np.float64(left[k]) - np.float64(right[k])) * scale
        total -= difference * difference
    return total


@_any_order
def _two_slices(left, right, left_scale, right_scale, base):
    """Sums over products of slices whose places add to 0, 1, 2; each an integer without rounding."""
    first = second = third = 0.0
    for k in range(left.shape[0]):
        x = np.float64(left[k]) * left_scale * base
        x0 = np.rint(x)
        x1 = np.rint((x - x0) * base)
        y = np.float64(right[k]) * right_scale * base
        y0 = np.rint(y)
        y1 = np.rint((y - y0) * base)
        first += x0 * y0
        second += x0 * y1 + x1 * y0
        third += x1 * y1
    return first, second, third


@_any_order
def _three_slices(left, right, left_scale, right_scale, base):
    first = second = third = fourth = fifth = 0.0
    for k in range(left.shape[0]):
        x = np.float64(left[k]) * left_scale * base
        x0 = np.rint(x)
        x = (x - x0) * base
        x1 = np.rint(x)
        x2 = np.rint((x - x1) * base)
        y = np.float64(right[k]) * right_scale * base
        y0 = np.rint(y)
        y = (y - y0) * base
        y1 = np.rint(y)
        y2 = np.rint((y - y1) * base)
        first += x0 * y0
        second += x0 * y1 + x1 * y0
        third += x0 * y2 + x1 * y1 + x2 * y0
        fourth += x1 * y2 + x2 * y1
        fifth += x2 * y2
    return first, second, third, fourth, fifth


@_kernel
def _slice_sums(pairs, i, j):
    """The exact value of the product of two scaled vectors, rounded as the key is."""
    queries, gallery = pairs.queries, pairs.gallery
    left, right = queries.values[i], gallery.values[j]
    left_scale, right_scale = queries.inverse_scale[i], gallery.inverse_scale[j]
    base = 2.0**pairs.bits
    unit = 1.0 / base
    if pairs.slices == 2:
        first, second, third = _two_slices(left, right, left_scale, right_scale, base)
        return (third * unit**4 + second * unit**3) + first * unit**2
    first, second, third, fourth, fifth = _three_slices(left, right, left_scale, right_scale, base)
    if pairs.similarity == 2:
        a = _three_slices(left, left, left_scale, left_scale, base)
        b = _three_slices(right, right, right_scale, right_scale, base)
        first = 2 * first - a[0] - b[0]
        second = 2 * second - a[1] - b[1]
        third = 2 * third - a[2] - b[2]
        fourth = 2 * fourth - a[3] - b[3]
        fifth = 2 * fifth - a[4] - b[4]
    return (((fifth * unit**6 + fourth * unit**5) + third * unit**4) + second * unit**3) + first * unit**2


@_kernel
def _key(pairs, i, j):
    return _key_of(pairs, _slice_sums(pairs, i, j), i, j)


@_kernel
def _key_of(pairs, total, i, j):
    if pairs.similarity == 0:
        length = np.sqrt(pairs.queries.square[i] * pairs.gallery.square[j])
        if length == 0.0:
            return 0.0
        return min(max(total / length, -1.0), 1.0)
    if pairs.similarity == 1:
        return total * (pairs.queries.factor[i] * pairs.gallery.factor[j])
    return min(total, 0.0)


@_inlined
def _score(pairs, i, j):
    """The key up to the error of a float64 product."""
    queries, gallery = pairs.queries, pairs.gallery
    if pairs.similarity == 2:
        return _negative_distance(queries.values[i], gallery.values[j], queries.inverse_scale[i])
    product = _product(queries.values[i], gallery.values[j], queries.inverse_scale[i], gallery.inverse_scale[j])
    return product * queries.factor[i] * gallery.factor[j]


@_kernel
def keys(pairs, rows, columns, out):
    """The keys of the pairs (rows[p], columns[p])."""
    for p in range(rows.shape[0]):
        out[p] = _key(pairs, rows[p], columns[p])


@_any_order
def _split(row, scale, base, first, second):
    """The two slices of a scaled row, as whole numbers."""
    for k in range(row.shape[0]):
        x = np.float64(row[k]) * scale * base
        first[k] = np.rint(x)
        second[k] = np.rint((x - first[k]) * base)


@_any_order
def _sliced(x0, x1, y0, y1):
    first = second = third = 0.0
    for k in range(x0.shape[0]):
        first += x0[k] * y0[k]
        second += x0[k] * y1[k] + x1[k] * y0[k]
        third += x1[k] * y1[k]
    return first, second, third


@_kernel
def class_keys(pairs, queries, first, start, stop, gallery, same_set, out):
    """The keys of each query and the items of its class.

    Args:
        pairs: the vectors.
        queries: (rows,) indices.
        first: with one set, the place of the first of them in `gallery`, where the others follow; -1 if they do not.
        start: (rows,) place in `gallery` where the query's class begins.
        stop: (rows,) and where it ends.
        gallery: (items,) indices in the order of classes.
        same_set: a query is no candidate for itself, and the key of two queries is made once.
        out: (rows, columns) where the keys are put, +inf for the query itself and behind the last.
    """
    dim = pairs.gallery.values.shape[1]
    base = 2.0**pairs.bits
    unit = 1.0 / base
    own = np.empty((2, dim))
    sliced = pairs.slices == 2
    members = np.empty((2, MEMBERS if sliced else 0, dim))
    rows = queries.shape[0]
    r = np.int64(0)
    while r < rows:
        behind = r + 1  # the queries of one class
        while behind < rows and start[behind] == start[r] and stop[behind] == stop[r]:
            behind += 1
        width = stop[r] - start[r]
        for begin in range(0, width, MEMBERS):
            end = min(begin + MEMBERS, width)
            if sliced:  # every vector is split once, not for each pair
                for m in range(begin, end):
                    item = gallery[start[r] + m]
                    scale = pairs.gallery.inverse_scale[item]
                    _split(pairs.gallery.values[item], scale, base, members[0, m - begin], members[1, m - begin])
            for q in range(r, behind):
                row = out[q]
                if sliced:
                    scale = pairs.queries.inverse_scale[queries[q]]
                    _split(pairs.queries.values[queries[q]], scale, base, own[0], own[1])
                column = first + q - start[r]  # of this query in the rows of others
                for m in range(begin, end):
                    other = start[r] + m - first  # the row of this member, if it is a query here
                    if same_set and gallery[start[r] + m] == queries[q]:
                        row[m] = np.inf
                    elif (
                        same_set
                        and first >= 0
                        and 0 <= other < rows
                        and (column < begin or (column < end and other < q))
                    ):
                        row[m] = out[other, column]  # made before
                    elif sliced:
                        sums = _sliced(own[0], own[1], members[0, m - begin], members[1, m - begin])
                        total = (sums[2] * unit**4 + sums[1] * unit**3) + sums[0] * unit**2
                        row[m] = _key_of(pairs, total, queries[q], gallery[start[r] + m])
                    else:
                        row[m] = _key(pairs, queries[q], gallery[start[r] + m])
        for q in range(r, behind):
            out[q, width:] = np.inf
        r = behind


@_kernel
def near_keys(estimates, queries, members, error, closer, pairs, same_set, low, high, many, gaps, out):
    """The keys of those pairs that may lie in one of some stretches; the others are counted between these.

    Args:
        estimates: (rows, columns) of the keys.
        queries: (rows,) indices.
        members: (columns,) indices.
        error: (rows,) of the estimates.
        closer: (rows,) of float64 products.
        pairs: the vectors.
        same_set: a query is no candidate for itself.
        low: (stretches,) ascending, where they begin.
        high: (stretches,) and end.
        many: stop at a row before which more than this share of the pairs needed their keys.
        gaps: (stretches + 1,) counters of the pairs below the first, between the first and the second, ...
        out: (rows * columns,) where the keys are put.

    Returns:
        How many keys, and how many rows were looked at.
    """
    rows, columns = estimates.shape
    filled = 0
    for r in range(rows):
        if filled > 1024 and filled > many * r * columns:
            return filled, r
        reach = np.float64(error[r])
        for c in range(columns):
            if same_set and members[c] == queries[r]:
                continue
            value = np.float64(estimates[r, c])
            begun = _begun(low, value + reach)
            if begun == 0 or high[begun - 1] < value - reach:
                gaps[begun] += 1
                continue
            value = _score(pairs, queries[r], members[c])
            begun = _begun(low, value + closer[r])
            if begun == 0 or high[begun - 1] < value - closer[r]:
                gaps[begun] += 1
                continue
            out[filled] = _key(pairs, queries[r], members[c])
            filled += 1
    return filled, rows


@_inlined
def _begun(low, value):
    """How many ascending numbers are not above a value."""
    first, last = 0, low.shape[0]
    while first < last:
        middle = (first + last) // 2
        if low[middle] <= value:
            first = middle + 1
        else:
            last = middle
    return first


# ------------------------------------------------------------------------------------------------------ rows of one side


@_kernel
def row_scales(values, out):
    """For each row the smallest power of two that no component exceeds; 1 for a row of zeros."""
    for i in range(values.shape[0]):
        row = values[i]
        largest = row[0] * 0
        for k in range(row.shape[0]):
            largest = max(largest, abs(row[k]))
        out[i] = 1.0 if largest == 0 else math.ldexp(1.0, math.frexp(np.float64(largest))[1])


@_kernel
def row_hashes(bits, odd, out):
    """A number of 64 bits for each row, the same for equal rows."""
    for i in range(bits.shape[0]):
        row = bits[i]
        total = np.int64(0)
        for k in range(row.shape[0]):
            pattern = np.int64(row[k])
            total += (pattern ^ (pattern >> 29)) * odd[k]
        out[i] = total


@_any_order
def _dropped(row, scale, base, slices):
    """Squared length of what the slices of a scaled row leave out, in units of the last slice."""
    total = 0.0
    for k in range(row.shape[0]):
        rest = np.float64(row[k]) * scale * base
        rest -= np.rint(rest)
        for _ in range(1, slices):
            rest *= base
            rest -= np.rint(rest)
        total += rest * rest
    return total


@_kernel
def squares(values, inverse_scale, slices, bits, out, dropped):
    """The exact squared length of each scaled row, rounded as a key is, and the length of what its slices leave out."""
    base = 2.0**bits
    unit = 1.0 / base
    for i in range(values.shape[0]):
        row, scale = values[i], inverse_scale[i]
        dropped[i] = np.sqrt(_dropped(row, scale, base, slices)) * unit**slices
        if slices == 2:
            first, second, third = _two_slices(row, row, scale, scale, base)
            out[i] = (third * unit**4 + second * unit**3) + first * unit**2
        else:
            first, second, third, fourth, fifth = _three_slices(row, row, scale, scale, base)
            out[i] = (((fifth * unit**6 + fourth * unit**5) + third * unit**4) + second * unit**3) + first * unit**2


@_kernel
def operand(values, index, scale, factor, out):
    """Chosen rows in float32: divided by a power of two, then multiplied with a factor, rounded after each."""
    for i in range(index.shape[0]):
        row = values[index[i]]
        inverse = 1.0 / scale[index[i]]
        multiplier = np.float32(factor[index[i]])
        for k in range(row.shape[0]):
            out[i, k] = np.float32(np.float64(row[k]) * inverse) * multiplier


# ------------------------------------------------------------------------------------------------------------- margins


@numba.njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _cell(value, origin, scale, cells):
    """Which cell a value lies in: monotone in the value, 0 for what lies below the origin, at most cells - 1."""
    place = np.float32((value - origin) * scale)
    # in this order of arguments what is not a number lies below as well
    return np.int32(min(np.float32(cells - 2), max(np.float32(-1), place)) + np.float32(1))


@_kernel
def margins(side, error, out):
    """Fill the tables of one side, for estimates that are off by at most `error` of each item."""
    cells = out.table.shape[1]
    ends = np.empty(2, out.origin.dtype)
    for i in range(side.items.shape[0]):
        relevant = side.relevant[i]
        entries = out.table[i]
        if relevant == 0:
            out.reach[i] = 0.0
            out.origin[i] = 1e30
            out.scale[i] = 1.0
            entries[:] = 0
            continue
        thresholds = side.thresholds[i]
        largest = max(abs(thresholds[0]), abs(thresholds[relevant - 1]))
        # a little more than the error, so that rounding these sums changes nothing
        reach = error[i] * (1 + 1e-6) + largest * 2.0**-51 + 2.0**-125
        out.reach[i] = reach
        out.origin[i] = thresholds[0] - reach
        out.scale[i] = min((cells - 3) / (thresholds[relevant - 1] - thresholds[0] + 2 * reach), 1e30)
        origin, scale = out.origin[i], out.scale[i]
        cell = 0
        for k in range(relevant):
            # rounding is monotone: what an estimate reaches, it reaches rounded
            ends[0], ends[1] = thresholds[k] - reach, thresholds[k] + reach
            start = _cell(ends[0], origin, scale, cells)
            stop = _cell(ends[1], origin, scale, cells) + 1
            entries[cell:start] = k
            entries[max(cell, start) : stop] = ~k
            cell = max(cell, stop)
        entries[cell:] = relevant


# ------------------------------------------------------------------------------------------------------------ counting


@_inlined
def _below(thresholds, relevant, value):
    """How many of the ascending thresholds are smaller than the value."""
    low = 0
    high = relevant
    while high - low > FEW:
        middle = (low + high) >> 1
        if thresholds[np.uint64(middle)] < value:
            low = middle + 1
        else:
            high = middle
    # a few are compared all at once: a branch that nobody can foresee costs more
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
def _place_key(side, item, key, weight):
    """Count a candidate whose key is known."""
    relevant = side.relevant[item]
    below = _below(side.thresholds[item], relevant, key)
    not_above = _not_above(side.thresholds[item], relevant, key)
    side.hits[item, below] += weight
    if not_above > below:
        side.ties[item, below] -= weight
        side.ties[item, not_above] += weight


@_inlined
def _collect(pooled, value, query, item, weight):
    """Note a pair whose estimate is among the highest."""
    place = pooled.filled[0]
    if place < pooled.values.shape[0]:
        pooled.values[place] = value
        pooled.rows[place] = query
        pooled.columns[place] = item
        if place < pooled.weights.shape[0]:
            pooled.weights[place] = weight
    pooled.filled[0] = place + 1


@_inlined
def _resolve(pairs, rows, i, columns, j, row_open, column_open, screened, pooled, weight):
    """Decide a pair that its estimate left open; `screened`: nothing has been recorded of it yet."""
    query, item = rows.items[i], columns.items[j]
    # the operands lie next to each other in memory, the vectors far apart
    value = _operand_product(rows.operand[i], columns.operand[j])
    if screened:
        if value >= pooled.floor:
            pooled.histogram[_cell(value, pooled.origin, pooled.scale, pooled.histogram.shape[0])] += weight
        if value >= pooled.cut:
            _collect(pooled, value, query, item, weight)
    if row_open and _place(rows, i, value, rows.rounding[i], columns.weight[j]):
        row_open = False
    if column_open and _place(columns, j, value, columns.rounding[j], rows.weight[i]):
        column_open = False
    if not (row_open or column_open):
        return
    value = _score(pairs, query, item)
    if row_open and _place(rows, i, value, rows.error[i], columns.weight[j]):
        row_open = False
    if column_open and _place(columns, j, value, columns.error[j], rows.weight[i]):
        column_open = False
    if not (row_open or column_open):
        return
    key = _key(pairs, query, item)
    pooled.filled[2] += 1
    if row_open:
        _place_key(rows, i, key, columns.weight[j])
    if column_open:
        _place_key(columns, j, key, rows.weight[i])


@_inlined
def _span(half, first, width, before, after):
    """The columns of a run that are negatives: those up to `before`, then those from `after` on."""
    if half == 0:
        return first, min(first + RUN, width, before)
    return max(first, after), min(first + RUN, width)


@_inlined
def _sum_parts(estimates, r, start, stop, value):
    """The estimates of a span: slices and unsigned places spare the compiler the thought of negative ones."""
    part = estimates[0, r, start:stop]
    for c in range(stop - start):
        value[c] = part[c]
    for p in range(1, estimates.shape[0]):
        part = estimates[p, r, start:stop]
        for c in range(stop - start):
            value[c] += part[c]


@_kernel
def count(estimates, first_row, rows, row_margins, columns, column_margins, spans, both, weighted, pairs, pooled, cut):
    """Count every candidate of a tile for its query, and for its column's item too where `both`.

    Args:
        estimates: (parts, tile rows, columns); the estimate of a pair is the sum over the parts.
        first_row: the tile's first row in `rows`.
        rows: the queries.
        row_margins: their tables.
        columns: the candidates; where `both`, queries as well.
        column_margins: their tables.
        spans: (tile rows, 2): columns from the first up to the second are no negatives of this row; where `both`, none
            before the second is.
        both: each pair counts for its two items.
        weighted: some entry stands for several items.
        pairs: the vectors.
        pooled: what is recorded of all pairs.
        cut: `pooled.cut` in the precision of the estimates, not rounded up.
    """
    _, height, width = estimates.shape
    value = np.empty(RUN, estimates.dtype)
    row_cell = np.empty(RUN, np.int32)
    column_cell = np.empty(RUN, np.int32)
    bins = np.empty(RUN, np.int32)
    open_at = np.empty(2 * RUN, np.int32)
    opened = 0
    origin = value.dtype.type(pooled.origin)
    scale = value.dtype.type(pooled.scale)
    bin_count = pooled.histogram.shape[0]
    row_cells, column_cells = row_margins.table.shape[1], column_margins.table.shape[1]
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
            _sum_parts(estimates, r, start, stop, value)
            highest = np.int32(0)
            wanted = 0
            for c in range(length):
                row_cell[c] = _cell(value[c], row_origin, row_scale, row_cells)
                highest = max(highest, row_cell[c])
            for c in range(length):
                bins[c] = _cell(value[c], origin, scale, bin_count)
                wanted += value[c] >= cut
            if both:
                column_origin, column_scale = column_margins.origin[start:stop], column_margins.scale[start:stop]
                for c in range(length):
                    column_cell[c] = _cell(value[c], column_origin[c], column_scale[c], column_cells)
                    highest = max(highest, column_cell[c])
            if weighted:
                for c in range(length):
                    pooled.histogram[np.uint32(bins[c])] += pair_factor * row_weight * columns.weight[start + c]
            else:
                for c in range(length):
                    pooled.histogram[np.uint32(bins[c])] += pair_factor
            if highest == 0 and wanted == 0:
                continue
            table, hits = row_margins.table[i], rows.hits[i]
            row_thresholds, row_reach = rows.thresholds[i], row_margins.reach[i]
            for c in range(length):
                entry = np.int64(table[np.uint32(row_cell[c])])
                if entry < 0:
                    entry = ~entry
                    estimate = np.float64(value[c])
                    while entry < row_relevant and row_thresholds[np.uint32(entry)] + row_reach < estimate:
                        entry += 1
                    if entry < row_relevant and row_thresholds[np.uint32(entry)] - row_reach <= estimate:
                        open_at[opened] = c
                        opened += 1
                        continue
                hits[np.uint32(entry)] += columns.weight[start + c] if weighted else 1
            row_opened = opened
            if both:
                tables, column_hits = column_margins.table[start:stop], columns.hits[start:stop]
                column_thresholds, column_reach = columns.thresholds[start:stop], column_margins.reach[start:stop]
                column_relevant = columns.relevant[start:stop]
                for c in range(length):
                    entry = np.int64(tables[c, np.uint32(column_cell[c])])
                    if entry < 0:
                        entry = ~entry
                        estimate, reach = np.float64(value[c]), column_reach[c]
                        while entry < column_relevant[c] and column_thresholds[c, np.uint32(entry)] + reach < estimate:
                            entry += 1
                        if entry < column_relevant[c] and column_thresholds[c, np.uint32(entry)] - reach <= estimate:
                            open_at[opened] = c
                            opened += 1
                            continue
                    column_hits[c, np.uint32(entry)] += row_weight if weighted else 1
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
    """`count` where few candidates come near any threshold: look closer at those that do, and at nothing else.

    Candidates below the lowest threshold of a query are not counted for it, since they beat nothing.

    Args:
        estimates: (tile rows, columns).
        first_row: as in `count`, like what is not named here.
        rows: the queries.
        row_low: (rows,) an estimate below it is surely below all thresholds of the row, and of no interest to the pool.
        columns: the candidates.
        column_low: (columns,) the same for the columns; `inf` where they ask nothing.
        spans: as in `count`.
        both: as in `count`.
        pairs: the vectors.
        pooled: what is recorded of all pairs.
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
                part, others_low = estimates[r, start:stop], column_low[start:stop]
                passing = 0
                for c in range(stop - start):
                    passing += part[c] >= min(low, others_low[c])
                if passing == 0:
                    continue
                for c in range(stop - start):
                    if part[c] >= min(low, others_low[c]):
                        j = start + c
                        pooled.filled[1] += 1
                        _resolve(
                            pairs, rows, i, columns, j, rows.relevant[i] > 0, both and columns.relevant[j] > 0, True,
                            pooled, pair_factor * rows.weight[i] * columns.weight[j],
                        )  # fmt: skip


@_kernel
def count_pool(estimates, first_row, rows, columns, spans, both, pairs, edges, edge_margins, hits, ties):
    """Count every candidate of a tile against one list of keys, whatever its query.

    Args:
        estimates: (parts, tile rows, columns), as in `count`, like what is not named here.
        first_row: as in `count`.
        rows: the queries.
        columns: the candidates.
        spans: as in `count`.
        both: as in `count`.
        pairs: the vectors.
        edges: a side of one item, whose thresholds are the keys.
        edge_margins: its tables.
        hits: (keys + 1,) counters of what lies above so many keys and ties with none.
        ties: (keys + 1,) as in `reference.Counts`.
    """
    _, height, width = estimates.shape
    pair_factor = 2 if both else 1
    keys, relevant = edges.thresholds[0], edges.relevant[0]
    origin, scale, table = edge_margins.origin[0], edge_margins.scale[0], edge_margins.table[0]
    reach = edge_margins.reach[0]
    cells = table.shape[0]
    value = np.empty(RUN, estimates.dtype)
    place = np.empty(RUN, np.int32)
    inner = np.empty(RUN, np.int32)
    weighted = rows.weight.max() > 1 or columns.weight.max() > 1
    below, above = np.int64(table[0]), np.int64(table[cells - 1])
    outer = not weighted and below >= 0 and above >= 0  # the first and the last cell leave nothing to decide
    lowest = highest = 0
    for r in range(height):
        i = first_row + r
        error, rounding = rows.error[i], rows.rounding[i]
        for first in range(0, width, RUN):
            for half in range(2):
                start, stop = _span(half, first, width, spans[r, 0], spans[r, 1])
                if start >= stop:
                    continue
                length = stop - start
                _sum_parts(estimates, r, start, stop, value)
                for c in range(length):
                    place[c] = _cell(value[c], origin, scale, cells)
                some = length
                if outer:
                    some = 0
                    for c in range(length):
                        lowest += place[c] == 0
                        highest += place[c] == cells - 1
                    for c in range(length):
                        inner[some] = c
                        some += (place[c] != 0) & (place[c] != cells - 1)
                for n in range(some):
                    c = int(inner[n]) if outer else n
                    entry = np.int64(table[np.uint32(place[c])])
                    weight = pair_factor * rows.weight[i] * columns.weight[start + c]
                    if entry < 0:
                        k = ~entry
                        estimate = np.float64(value[c])
                        while k < relevant and keys[k] + reach < estimate:
                            k += 1
                        if k < relevant and keys[k] - reach <= estimate:
                            query, item = rows.items[i], columns.items[start + c]
                            score = _operand_product(rows.operand[i], columns.operand[start + c])
                            k = _below(keys, relevant, score - rounding)
                            if k < relevant and keys[k] <= score + rounding:
                                score = _score(pairs, query, item)
                                k = _below(keys, relevant, score - error)
                            if k < relevant and keys[k] <= score + error:
                                key = _key(pairs, query, item)
                                k = _below(keys, relevant, key)
                                not_above = _not_above(keys, relevant, key)
                                if not_above > k:
                                    ties[k] -= weight
                                    ties[not_above] += weight
                        hits[k] += weight
                    else:
                        hits[entry] += weight
    if outer:
        hits[below] += pair_factor * lowest
        hits[above] += pair_factor * highest
