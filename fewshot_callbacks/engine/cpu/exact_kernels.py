"""Exact scores on the CPU: the true cosine, dot product or distance of two rows, rounded once to float64.

A sum of products is accumulated twice: in float64, and, beside it, the sum of the rounding errors of the first (Dot2 of
Ogita, Rump and Oishi, "Accurate sum and dot product", SIAM Journal on Scientific Computing 26, 2005). The result carries
about 106 bits and a bound on its error. If both ends of that bound round to the same float64, this is the exact score
(Ziv's test); otherwise the sum is made once more without any rounding (Shewchuk, "Adaptive precision floating-point
arithmetic and fast robust geometric predicates", Discrete & Computational Geometry 18, 1997). The value therefore does not
depend on the order of summation, the tile, the thread or the machine.

Rows are scaled by powers of two, which rounds nothing. numba's cache of `compiled` does not notice a change of this file:
delete the `*.nbi` files after one. All kernels release the interpreter's lock and use one thread.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

COSINE, DOT, EUCLIDEAN = 0, 1, 2
MEMBERS = 64
"""Gallery items that are scored together: 64 x 512 components in float64 fit into the second-level cache."""
PARTIALS = 64
"""Numbers that an exact sum is held in; float64 spans 2,100 bits, so at most 40 of them do not overlap."""

# numba counts references to arrays by atomic operations, also to the fields of a tuple that is read, which took more than
# half of the time. What makes no array needs none of this.
UNCOUNTED: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "_nrt": False}
_kernel = numba.njit(**UNCOUNTED)
_allocating = numba.njit(**UNCOUNTED | {"_nrt": True})
# inlined: a call would copy every field of each array argument onto the stack
_inlined = numba.njit(**UNCOUNTED, forceinline=True)
# any order: the error bound of a float64 product holds for every order of summation
_any_order = numba.njit(**UNCOUNTED, fastmath={"reassoc", "contract", "nsz"})


class Vectors(NamedTuple):
    """The rows of one side, and what turns their products into exact scores."""

    values: NDArray[np.floating]  # (items, dim)
    inverse_scale: NDArray[np.float64]  # (items,) power of two: times it, a row's largest component is in [1, 2)
    factor: NDArray[np.float64]  # (items,) what a product of scaled rows is multiplied by to estimate the score
    square: NDArray[np.float64]  # (items,) squared norm of the scaled row
    square_low: NDArray[np.float64]  # (items,) and what rounding it to float64 left out


class Pairs(NamedTuple):
    """Queries, gallery, and how their scores are defined; see `scores.products.ScoreTiles`."""

    queries: Vectors
    gallery: Vectors
    similarity: int
    single: bool  # both sides are float32: products of their components are exact in float64
    inverse_unit: float  # power of two that distances are multiplied by
    relative: float  # error of a float64 product of two rows, as a share of the product of their norms


# ---------------------------------------------------------------------------------------- sums with their rounding errors


@_inlined
def _two_sum(a, b):
    """Return sum and error with a + b = sum + error, exactly (Knuth)."""
    total = a + b
    z = total - a
    return total, (a - (total - z)) + (b - z)


@_inlined
def _fast_two_sum(a, b):
    """Return sum and error with a + b = sum + error, exactly, where a is not the smaller one (Dekker)."""
    total = a + b
    return total, b - (total - a)


@_inlined
def _two_product(a, b):
    """Return product and error with a * b = product + error, exactly (Dekker; 2**27 + 1 splits a float64 into halves)."""
    product = a * b
    t = 134217729.0 * a
    a_high = t - (t - a)
    a_low = a - a_high
    t = 134217729.0 * b
    b_high = t - (t - b)
    b_low = b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


@_kernel
def _dot(left, right, left_scale, right_scale, single):
    """Return a dot product as high + low, and a bound on its error; the bound is 0 where nothing was rounded."""
    total = low = errors = 0.0
    for k in range(left.shape[0]):
        x, y = np.float64(left[k]) * left_scale, np.float64(right[k]) * right_scale
        if single:
            product = x * y
        else:
            product, error = _two_product(x, y)
            low += error
            errors += abs(error)
        total, error = _two_sum(total, product)
        low += error
        errors += abs(error)
    total, low = _two_sum(total, low)
    return total, low, _error_of_sum(errors, left.shape[0])


@_inlined
def _error_of_sum(errors, terms):
    """Return a bound on the error of adding up `2 terms` rounding errors in float64 (Higham, section 4.2)."""
    return (2 * terms + 4) * 2.0**-53 * errors


@_kernel
def _squared_distance(left, right, scale):
    """Return the squared distance of two rows times `scale`, as high + low; `_relative_error` bounds its error."""
    total = low = 0.0
    for k in range(left.shape[0]):
        difference, rest = _two_sum(np.float64(left[k]) * scale, -(np.float64(right[k]) * scale))
        square, error = _two_product(difference, difference)
        low += error + 2 * difference * rest
        total, error = _two_sum(total, square)
        low += error
    return _two_sum(total, low)


@_inlined
def _relative_error(dim):
    """Return the relative error of a sum of `dim` squares held as high + low: all have one sign, so nothing cancels."""
    return (dim + 8.0) ** 2 * 2.0**-105


@_kernel
def _grow(partials, count, value):
    """Add a number to an exact sum: `count` numbers that do not overlap, the smallest first."""
    kept = 0
    for i in range(count):
        other = partials[i]
        if abs(value) < abs(other):
            value, other = other, value
        high = value + other
        low = other - (high - value)
        if low != 0.0:
            partials[kept] = low
            kept += 1
        value = high
    partials[kept] = value
    return kept + 1


@_kernel
def _rounded_sum(partials, count):
    """Round an exact sum to float64, and what is left of it, too; a half goes to even only if nothing follows."""
    last = count - 1
    high, low = partials[last], 0.0
    while last > 0 and low == 0.0:
        last -= 1
        high, low = _two_sum(high, partials[last])
    rest = 0.0
    for k in range(last):  # the smallest first: a partial may hold a few bits only
        rest += partials[k]
    if last > 0 and (low < 0.0) == (rest < 0.0):
        twice = 2.0 * low
        if (high + twice) - high == twice:
            return high + twice, low - twice + rest
    return high, low + rest


@_allocating
def _exact_dot(left, right, left_scale, right_scale):
    partials = np.zeros(PARTIALS)
    count = 0
    for k in range(left.shape[0]):
        product, error = _two_product(np.float64(left[k]) * left_scale, np.float64(right[k]) * right_scale)
        if error != 0.0:
            count = _grow(partials, count, error)
        count = _grow(partials, count, product)
    return _rounded_sum(partials, count)


@_allocating
def _exact_squared_distance(left, right, scale):
    partials = np.zeros(PARTIALS)
    count = 0
    for k in range(left.shape[0]):
        difference, rest = _two_sum(np.float64(left[k]) * scale, -(np.float64(right[k]) * scale))
        for one, other in ((difference, difference), (2.0 * difference, rest), (rest, rest)):
            product, error = _two_product(one, other)
            if error != 0.0:
                count = _grow(partials, count, error)
            if product != 0.0:
                count = _grow(partials, count, product)
    return _rounded_sum(partials, count) if count else (0.0, 0.0)


# ------------------------------------------------------------------------------------------------------- rounded once


@_inlined
def _nearest(high, low, error):
    """Return the float64 nearest to every number within `error` of high + low; NaN if there are two of them."""
    high, low = _two_sum(high, low)
    if error > 0.0:
        error = 1.01 * error + abs(high) * 2.0**-104  # the sums below are rounded themselves
    upper, lower = high + (low + error), high + (low - error)
    return upper if upper == lower else np.nan


@_inlined
def _root(high, low):
    """Return the square root of high + low, as high + low; relative error below 2**-99."""
    root = np.sqrt(high)
    if root == 0.0:
        return 0.0, 0.0
    square, error = _two_product(root, root)
    return _two_sum(root, (((high - square) - error) + low) / (2.0 * root))


@_inlined
def _cosine(high, low, square, square_low, other, other_low):
    """Return the cosine as first + second, and the product of the norms, from their squares; 0 for a zero row."""
    if square == 0.0 or other == 0.0:
        return 0.0, 0.0, 1.0
    product, rest = _two_product(square, other)
    product, rest = _two_sum(product, rest + (square * other_low + square_low * other))
    root, root_low = _root(product, rest)
    first = high / root
    back, back_low = _two_product(first, root)
    return first, ((((high - back) - back_low) + low) - first * root_low) / root, root


@_inlined
def _negative_square(high, low, error):
    """Return minus the square of the rounded distance; NaN where `error`, a share of it, leaves two float64 open.

    Its square root is that distance again: sqrt(x * x) = x in IEEE arithmetic.
    """
    root, root_low = _root(high, low)
    bound = root * (2.0**-98 + error) if error > 0.0 else 0.0
    distance = _nearest(root, root_low, bound)
    return 0.0 - distance * distance  # not -0.0 for equal rows


@_inlined
def _rounded_score(pairs, i, j, high, low, error):
    """Return the exact score from a sum of products and its error; NaN where these leave two values open."""
    queries, gallery = pairs.queries, pairs.gallery
    if pairs.similarity == COSINE:
        first, second, norms = _cosine(
            high, low, queries.square[i], queries.square_low[i], gallery.square[j], gallery.square_low[j]
        )
        bound = 0.0
        if high != 0.0 or error != 0.0:
            bound = abs(first) * (2.0**-97 + _relative_error(queries.values.shape[1])) + 1.01 * error / norms
        return min(max(_nearest(first, second, bound), -1.0), 1.0)
    if pairs.similarity == DOT:
        return _nearest(high, low, error) * (queries.factor[i] * gallery.factor[j])
    unit = max(queries.factor[i], gallery.factor[j])
    return _negative_square(high, low, error) * unit * unit


@_kernel
def _without_rounding(pairs, i, j):
    """Return the score from exact sums, known to 97 bits after the root: the nearer of what these leave open."""
    left, right = pairs.queries.values[i], pairs.gallery.values[j]
    left_scale, right_scale = pairs.queries.inverse_scale[i], pairs.gallery.inverse_scale[j]
    if pairs.similarity == EUCLIDEAN:
        high, low = _exact_squared_distance(left, right, min(left_scale, right_scale))
        unit = max(pairs.queries.factor[i], pairs.gallery.factor[j])
        return _negative_square(high, low, 0.0) * unit * unit
    high, low = _exact_dot(left, right, left_scale, right_scale)
    if pairs.similarity == DOT:
        return high * (pairs.queries.factor[i] * pairs.gallery.factor[j])
    square, square_low = _exact_dot(left, left, left_scale, left_scale)
    other, other_low = _exact_dot(right, right, right_scale, right_scale)
    first, second, _ = _cosine(high, low, square, square_low, other, other_low)
    return min(max(first + second, -1.0), 1.0)


@_kernel
def exact_score(pairs, i, j):
    """Return the exact score of one pair, or minus the square of its exact distance, in the units of `pairs`."""
    left, right = pairs.queries.values[i], pairs.gallery.values[j]
    left_scale, right_scale = pairs.queries.inverse_scale[i], pairs.gallery.inverse_scale[j]
    if pairs.similarity == EUCLIDEAN:
        high, low = _squared_distance(left, right, min(left_scale, right_scale))
        error = _relative_error(left.shape[0])
    else:
        high, low, error = _dot(left, right, left_scale, right_scale, pairs.single)
    value = _rounded_score(pairs, i, j, high, low, error)
    return _without_rounding(pairs, i, j) if math.isnan(value) else value


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


@_inlined
def close_score(pairs, i, j):
    """Return an estimate of the exact score by a float64 product of the two rows, and a bound on its error.

    A squared distance is a sum of positive terms, so its error is relative to itself. 2**-960 stands for what underflows.
    """
    queries, gallery = pairs.queries, pairs.gallery
    left, right = queries.values[i], gallery.values[j]
    if pairs.similarity == EUCLIDEAN:
        value = _negative_distance(left, right, pairs.inverse_unit)
        return value, -value * pairs.relative + 2.0**-960
    product = _product(left, right, queries.inverse_scale[i], gallery.inverse_scale[j])
    factor = queries.factor[i] * gallery.factor[j]
    if pairs.similarity == COSINE:
        return product * factor, pairs.relative
    norms = factor * np.sqrt(queries.square[i] * gallery.square[j])
    return product * factor, pairs.relative * norms + 2.0**-960


# ------------------------------------------------------------------------------------------------------ many at a time


@_kernel
def pair_scores(pairs, rows, columns, out):
    """Make the exact scores of the pairs (rows[p], columns[p])."""
    for p in range(rows.shape[0]):
        out[p] = exact_score(pairs, rows[p], columns[p])


@_kernel
def _dots(row, members, start, stop, single, sums):
    """Make `_dot` of a scaled row with columns `start` to `stop` of `members` (dim, width): total, low, errors of each."""
    dim = members.shape[0]
    total, low, errors = sums[0][: stop - start], sums[1][: stop - start], sums[2][: stop - start]
    low[:] = 0.0
    if single:
        # Products of components below 2 sum to at most 4 dim. Beside an offset of three times that or more, a sum stays in
        # one binade and above what is added: its rounding error takes three operations instead of six (Dekker), and is
        # at most half of the binade's last place. The offset is taken away again without rounding.
        reach = 2.0 ** math.ceil(math.log2(4 * dim))
        total[:] = 3 * reach
        errors[:] = dim * reach * 2.0**-52
        first = dim // 4 * 4
        for k in range(0, first, 4):  # four components at a time, so that the sums stay in registers between them
            w, x, y, z = row[k], row[k + 1], row[k + 2], row[k + 3]
            one, two = members[k][start:stop], members[k + 1][start:stop]
            three, four = members[k + 2][start:stop], members[k + 3][start:stop]
            for m in range(stop - start):
                end, error = _fast_two_sum(total[m], w * one[m])
                end, other = _fast_two_sum(end, x * two[m])
                end, third = _fast_two_sum(end, y * three[m])
                total[m], fourth = _fast_two_sum(end, z * four[m])
                low[m] += (error + other) + (third + fourth)
        for k in range(first, dim):
            for m in range(stop - start):
                total[m], error = _fast_two_sum(total[m], row[k] * members[k, start + m])
                low[m] += error
        for m in range(stop - start):
            total[m] -= 3 * reach
        return
    total[:] = 0.0
    errors[:] = 0.0
    for k in range(dim):
        x, one = row[k], members[k][start:stop]
        for m in range(stop - start):
            product, error = _two_product(x, one[m])
            low[m] += error
            errors[m] += abs(error)
            total[m], error = _two_sum(total[m], product)
            low[m] += error
            errors[m] += abs(error)


@_kernel
def _squared_distances(row, members, start, stop, scale, sums):
    """Make `_squared_distance` of a row and columns `start` to `stop` of `members` (dim, width), times each pair's scale."""
    total, low, scales = sums[0][: stop - start], sums[1][: stop - start], scale[: stop - start]
    total[:] = 0.0
    low[:] = 0.0
    for k in range(members.shape[0]):
        x, one = row[k], members[k][start:stop]
        for m in range(stop - start):
            difference, rest = _two_sum(x * scales[m], -(one[m] * scales[m]))
            square, error = _two_product(difference, difference)
            low[m] += error + 2 * difference * rest
            total[m], error = _two_sum(total[m], square)
            low[m] += error


@_kernel
def _load(side, index, similarity, out):
    """Copy rows of one side into the columns of `out` (dim, count), scaled but for distances."""
    for m in range(index.shape[0]):
        row = side.values[index[m]]
        scale = 1.0 if similarity == EUCLIDEAN else side.inverse_scale[index[m]]
        for k in range(row.shape[0]):
            out[k, m] = np.float64(row[k]) * scale


@_kernel
def _row_scores(pairs, query, row, items, members, start, stop, sums, out):
    """Make the scores of one query with the gallery items from `start` to `stop`, whose rows are these columns of `members`.

    The columns are named by their numbers: a slice of `members` would not be contiguous, and not be vectorised.
    """
    dim = members.shape[0]
    if pairs.similarity == EUCLIDEAN:
        scale = sums[3]
        for m in range(start, stop):
            scale[m - start] = min(pairs.queries.inverse_scale[query], pairs.gallery.inverse_scale[items[m]])
        _squared_distances(row, members, start, stop, scale, sums)
    else:
        _dots(row, members, start, stop, pairs.single, sums)
    for m in range(start, stop):
        high, low = _two_sum(sums[0, m - start], sums[1, m - start])
        error = _relative_error(dim) if pairs.similarity == EUCLIDEAN else _error_of_sum(sums[2, m - start], dim)
        value = _rounded_score(pairs, query, items[m], high, low, error)
        # a smaller bound of the error may do, such as 0 for a product of 0
        out[m] = exact_score(pairs, query, items[m]) if math.isnan(value) else value


@_allocating
def class_scores(pairs, queries, first, start, stop, gallery, same_set, out):
    """Make the exact scores of each query and the items of its class, or of any other run of items.

    Of two queries of one set the score is made once, in whichever row comes first. Without that the scores take 1.9 times
    as long, a twelfth of an evaluation of 8,000 x 512 with classes of 53, and a third of it with classes of 2,000.

    Args:
        pairs: The rows of both sides.
        queries: (rows,) indices.
        first: With one set, the position of the first of them in `gallery`, where the others follow; -1 if they do not.
        start: (rows,) position in `gallery` where the query's class begins.
        stop: (rows,) and where it ends.
        gallery: (items,) indices in the order of classes.
        same_set: A query is no candidate for itself, and the score of two queries is made once.
        out: (rows, columns) where the scores are put, +inf for the query itself and after the last.
    """
    dim = pairs.gallery.values.shape[1]
    own, members, sums = np.empty((dim, 1)), np.empty((dim, MEMBERS)), np.empty((4, MEMBERS))
    rows = queries.shape[0]
    r = np.int64(0)
    while r < rows:
        after = r + 1  # the queries of one class
        while after < rows and start[after] == start[r] and stop[after] == stop[r]:
            after += 1
        width = stop[r] - start[r]
        for begin in range(0, width, MEMBERS):
            end = min(begin + MEMBERS, width)
            items = gallery[start[r] + begin : start[r] + end]
            _load(pairs.gallery, items, pairs.similarity, members)
            for q in range(r, after):
                row = out[q]
                # columns whose score was made for another query here, as its score with this one
                made_from = made_to = begin
                if same_set and first >= 0:
                    column = first + q - start[r]  # of this query in the rows of others
                    others = rows if column < begin else q if column < end else 0
                    made_from = min(max(first - start[r], begin), end)
                    made_to = min(max(first - start[r] + others, made_from), end)
                    for m in range(made_from, made_to):
                        row[m] = out[start[r] + m - first, column]
                _load(pairs.queries, queries[q : q + 1], pairs.similarity, own)
                for low, high in ((begin, made_from), (made_to, end)):
                    _row_scores(
                        pairs, queries[q], own[:, 0], items, members, low - begin, high - begin, sums, row[begin:]
                    )  # fmt: skip
                if same_set:
                    for m in range(begin, end):
                        if items[m - begin] == queries[q]:
                            row[m] = np.inf
        for q in range(r, after):
            out[q, width:] = np.inf
        r = after


@_kernel
def squares(values, inverse_scale, single, out, low):
    """Make the squared norm of each scaled row, as a float64 and what rounding to it left out."""
    for i in range(values.shape[0]):
        row, scale = values[i], inverse_scale[i]
        out[i], low[i], _ = _dot(row, row, scale, scale, single)
