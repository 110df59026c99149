"""The exact score of a pair: the true cosine, dot product or distance of two rows, rounded once to float64.

A sum of products is kept together with the sum of its rounding errors (Dot2; Ogita, Rump and Oishi, "Accurate sum and
dot product", 2005), which gives about 106 bits and a bound on the remaining error. If that bound leaves two float64
numbers possible (Ziv's test), the sum is computed again without any rounding (Shewchuk 1997). So the score depends only on
the two rows, and not on the order of summation, the tile, the thread or the process. It is symmetric, and equal rows tie.
A distance is compared with the midpoint between two numbers (`_rounded_root`). A cosine within 2**-97 of such a midpoint is
rounded from about 100 bits. There is no proof that this gives the nearer number, and no case is known in which it does not.

Sums run in interleaved lanes, which the compiler turns into vector instructions. For one pair, there are `LANES` lanes of
components. If several queries are compared with the same items, there is one lane for each item, which takes less than
half the time.

| bound | where it comes from |
| --- | --- |
| `(dim + LANES + 8)**2 2**-104 size` of a sum | `dim + LANES + 2` errors of 2**-53, added up in twice as many roundings |
| `size` for a dot product | the product of the norms (Cauchy and Schwarz) |
| `size` for a squared distance | itself; covers rests three times as large, and the square of a difference's own error |
| `2**-97` of a cosine | two norms, at most 2**-99 each; their product and the quotient in 106 bits, below 2**-100 each |
| `(dim + 8)**2 2**-105` of a cosine | the squared norms, sums of `dim` terms of one sign |
| `2**-98` of a distance | the square root of a number of 106 bits: at most 2**-99, and its use |
| `1.01 error + 2**-104 |score|` | the sums of Ziv's test are rounded themselves |
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.compiled import any_order, inlined, inner_kernel, kernel

# Kinds of scores, as the compiled loops read them. The cosine of two rows.
COSINE = 0
# The dot product of two rows.
DOT = 1
# Minus the squared distance of two rows.
EUCLIDEAN = 2
# Four vector registers of AVX2, two of AVX-512: enough additions at a time that none waits for the one before.
LANES = 16
# Largest number of items whose scores with a query are computed at the same time.
MEMBERS = 64
# Largest number of bytes of these items' components, which stay in the cache of a core.
MEMBERS_BYTES = 2**18
# Room for a sum without rounding: float64 spans 2,100 bits, which are at most 40 numbers that do not overlap.
PARTIALS = 64


# Rows of queries or items: float32 or float64, or int8 for binary codes of -1 and +1.
Rows = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int8]


class Pairs(NamedTuple):
    """The rows of queries and gallery, as the compiled loops read them."""

    queries: Rows  # (queries, dim)
    gallery: Rows  # (items, dim)
    query_norm: NDArray[np.float64]  # (queries, 2) norm, rounded to float64, and its rounding error
    gallery_norm: NDArray[np.float64]  # (items, 2)
    # (queries,) number of the first duplicate of each row. In chunks these numbers begin with the number of the first
    # item, so that they are unique over the chunks of a pass: `counting.place_by_score` remembers a score by them.
    query_first_duplicate: NDArray[np.int64]
    gallery_first_duplicate: NDArray[np.int64]  # (items,)
    query_copies: NDArray[np.int32]  # (queries,) how many queries each row stands for: 1 unless rows are distinct rows
    gallery_copies: NDArray[np.int32]  # (items,)
    distinct: bool  # whether rows are distinct rows and may stand for several
    kind: int  # COSINE, DOT or EUCLIDEAN
    single: bool  # whether components have at most 24 bits, so that float64 represents their products exactly
    exact_estimates: bool  # whether estimates are exact scores, since they are sums of small integers
    score_factor: float  # power of two by which similarities are multiplied to be scores

    def turned(self) -> Pairs:
        """Return the gallery as queries, and the queries as gallery. Scores stay the same."""
        return self._replace(
            queries=self.gallery,
            gallery=self.queries,
            query_norm=self.gallery_norm,
            gallery_norm=self.query_norm,
            query_first_duplicate=self.gallery_first_duplicate,
            gallery_first_duplicate=self.query_first_duplicate,
            query_copies=self.gallery_copies,
            gallery_copies=self.query_copies,
        )


def workspace() -> NDArray[np.float64]:
    """Return the arrays in which exact scores are computed, as rows of one.

    Rows 0 and 1 are for the sums of the lanes and their errors, row 2 is for a sum without rounding. Row 3 remembers the
    last pair of `counting.place_by_score`: the first duplicates of its rows, and its exact score; -1 for no pair.
    """
    width = max(LANES, PARTIALS, MEMBERS)
    room = np.zeros(4 * width + 8)
    # The address is a multiple of 64 bytes: a register stored across two cache lines takes twice as long to read again.
    first = -room.ctypes.data % 64 // 8
    work = room[first : first + 4 * width].reshape(4, width)
    work[3] = -1.0
    return work


# ---------------------------------------------------------------------------------------- sums with their rounding errors


@inlined
def two_sum(a, b):
    """Return sum and error with a + b = sum + error, exactly (Knuth)."""
    total = a + b
    z = total - a
    return total, (a - (total - z)) + (b - z)


@inlined
def two_product(a, b):
    """Return product and error with a * b = product + error, exactly (Dekker; 134217729 is 2**27 + 1)."""
    product = a * b
    t = 134217729.0 * a
    a_high = t - (t - a)
    a_low = a - a_high
    t = 134217729.0 * b
    b_high = t - (t - b)
    b_low = b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


@inlined
def _single_product(x, y):
    """Return the product of two components of float32. It is exact in float64."""
    return x * y, 0.0


@inlined
def _squared_difference(x, y):
    """Return a term of a squared distance as square + rest; the error is below 2**-104 of it."""
    difference, error = two_sum(x, -y)
    square, rest = two_product(difference, difference)
    return square, rest + 2.0 * difference * error


def _summing(term):
    """Return the two sums of one kind of terms. A single loop for all kinds would branch and not be vectorised."""

    @inlined
    def add(total, low, x, y):
        product, rest = term(np.float64(x), np.float64(y))
        total, error = two_sum(total, product)
        return total, low + (error + rest)

    @inner_kernel
    def sum_of_terms(left, right, work):
        """Return the sum of the terms of two rows as high + low. Lane n sums components n, n + LANES, and so on."""
        total = work[0, :LANES]
        low = work[1, :LANES]
        dim = left.shape[0]
        total[:] = 0.0
        low[:] = 0.0
        full = dim // LANES * LANES  # components that fill all lanes
        for k in range(0, full, LANES):
            left_lanes = left[k : k + LANES]
            right_lanes = right[k : k + LANES]
            for lane in range(LANES):
                total[lane], low[lane] = add(total[lane], low[lane], left_lanes[lane], right_lanes[lane])
        for k in range(full, dim):
            total[k - full], low[k - full] = add(total[k - full], low[k - full], left[k], right[k])
        width = LANES
        # Halves of the lanes are added. Lane by lane, each addition would wait for the one before.
        while width > 1:
            width //= 2
            for lane in range(width):
                total[lane], error = two_sum(total[lane], total[lane + width])
                low[lane] += low[lane + width] + error
        return two_sum(total[0], low[0])

    @inner_kernel
    def sums_of_terms(left, members, first, stop, work):
        """Write the sums of a row with columns `first` up to `stop` of `members`, as high + low, into rows 0 and 1."""
        number = stop - first
        total = work[0, :number]
        low = work[1, :number]
        total[:] = 0.0
        low[:] = 0.0
        for k in range(left.shape[0]):
            row = members[k, first:stop]
            for m in range(number):
                total[m], low[m] = add(total[m], low[m], left[k], row[m])

    return sum_of_terms, sums_of_terms


_dot_single, _dots_single = _summing(_single_product)
_dot_double, _dots_double = _summing(two_product)
_squared_distance, _squared_distances = _summing(_squared_difference)


@inner_kernel
def _sum(left, right, of_differences, single, work):
    """Return a dot product, or a squared distance, which is not negative, as high + low."""
    if of_differences:
        return _squared_distance(left, right, work)
    return _dot_single(left, right, work) if single else _dot_double(left, right, work)


@inlined
def _bound(pairs, i, j, high):
    """Return a bound on the error of the sum of a pair. The table at the top of this file derives it."""
    size = high if pairs.kind == EUCLIDEAN else pairs.query_norm[i, 0] * pairs.gallery_norm[j, 0]
    return 0.0 if pairs.exact_estimates else (pairs.queries.shape[1] + LANES + 8.0) ** 2 * 2.0**-104 * size


@inner_kernel
def _grow(partials, count, value):
    """Add a number to an exact sum: `count` numbers that do not overlap, the smallest first."""
    filled = 0
    for n in range(count):
        value, low = two_sum(value, partials[n])
        if low != 0.0:
            partials[filled] = low
            filled += 1
    partials[filled] = value
    return filled + 1


@inner_kernel
def _expand(left, right, of_differences, partials):
    """Write a dot product or a squared distance as numbers that do not overlap, and return how many there are.

    The smallest number is first. Their sum is the dot product or squared distance without any rounding.
    """
    count = 0
    for k in range(left.shape[0]):
        x = np.float64(left[k])
        y = np.float64(right[k])
        error = 0.0
        if of_differences:
            x, error = two_sum(x, -y)
            y = x
        for factor, other_factor in ((x, y), (2.0 * x, error), (error, error)):
            product, rest = two_product(factor, other_factor)
            if product != 0.0:
                count = _grow(partials, count, rest)
                count = _grow(partials, count, product)
    return count


@inner_kernel
def _rounded_sum(partials, count):
    """Return the sum of numbers that do not overlap, rounded once, and about the error of this rounding."""
    if count == 0:
        return 0.0, 0.0
    last = count - 1
    high = partials[last]
    low = 0.0
    while last > 0 and low == 0.0:
        last -= 1
        high, low = two_sum(high, partials[last])
    rest = 0.0
    for k in range(last):
        rest += partials[k]
    if last > 0 and (low < 0.0) == (rest < 0.0):  # a midpoint is rounded to even only if nothing follows
        double_low = 2.0 * low
        neighbour = high + double_low
        if double_low == neighbour - high:
            return neighbour, low - double_low + rest
    return high, low + rest


@inner_kernel
def _above_square(partials, count, number, half):
    """Return whether an exact sum is above (number + half)**2, as -1, 0 or 1, and the number of its parts.

    The sum has the same value afterwards, and perhaps more parts. `half` is a power of two or its negative.
    """
    sign = 0.0
    for direction in (-1.0, 1.0):
        for factor, other_factor in ((number, number), (2.0 * number, half), (half, half)):
            product, rest = two_product(factor, other_factor)
            count = _grow(partials, count, direction * rest)
            count = _grow(partials, count, direction * product)
        if direction < 0.0:
            for k in range(count):
                sign = np.sign(partials[k]) if partials[k] != 0.0 else sign
    return sign, count


@inner_kernel
def _rounded_root(partials, count):
    """Return the square root of an exact sum, rounded once.

    In 106 bits, the root can look like a midpoint between two float64 numbers without being one. So the exact sum is
    compared with the squares of both neighbouring midpoints.
    """
    high, low = _rounded_sum(partials, count)
    root, rest = _root(high, low)
    nearest = root + rest
    if nearest == 0.0:
        return 0.0
    above = np.nextafter(nearest, np.inf)
    below = np.nextafter(nearest, 0.0)
    sign, count = _above_square(partials, count, nearest, 0.5 * (above - nearest))
    if sign > 0.0:
        return above
    sign, count = _above_square(partials, count, nearest, -0.5 * (nearest - below))
    if sign < 0.0:
        return below
    return nearest


@inlined
def _nearest(high, low, error):
    """Return the float64 nearest to every number within `error` of high + low; NaN if there are two."""
    high, low = two_sum(high, low)
    if error > 0.0:
        error = 1.01 * error + abs(high) * 2.0**-104
    upper = high + (low + error)
    lower = high + (low - error)
    return upper if upper == lower else np.nan


@inlined
def _root(high, low):
    """Return the square root of high + low, as high + low; relative error below 2**-99."""
    root = np.sqrt(high)
    if root == 0.0:
        return 0.0, 0.0
    square, error = two_product(root, root)
    return two_sum(root, (((high - square) - error) + low) / (2.0 * root))


@inlined
def _round(pairs, i, j, high, low, error, finish):
    """Return the score of a pair, given its sum; NaN if the error leaves two scores possible.

    Args:
        pairs: The rows.
        i: The query.
        j: The item.
        high: The rounded sum.
        low: The rounding error of the sum.
        error: How far high + low can be from the sum.
        finish: Whether high + low is the exact sum, rounded to 106 bits, so that there is nothing more to test. Distances
            are finished by `_rounded_root` instead.
    """
    if pairs.kind == DOT:  # `high` is the number nearest to an exact sum; `low` may look like half of its last place
        return (high if finish else _nearest(high, low, error)) * pairs.score_factor
    if pairs.kind == EUCLIDEAN:
        root, rest = _root(high, low)
        # an error of the square gives half that error, divided by the root; 0.6 is for rounding
        bound = root * 2.0**-98 + (0.6 * error / root if root > 0.0 else 0.0)
        distance = _nearest(root, rest, 0.0 if error == 0.0 and root == 0.0 else bound)
        return 0.0 - distance * distance * pairs.score_factor  # sqrt(x * x) = x, so that the distance can be read back
    query_norm = pairs.query_norm[i, 0]
    query_norm_low = pairs.query_norm[i, 1]
    item_norm = pairs.gallery_norm[j, 0]
    item_norm_low = pairs.gallery_norm[j, 1]
    if query_norm == 0.0 or item_norm == 0.0:
        return 0.0  # the cosine with a row of zeros
    product, rest = two_product(query_norm, item_norm)
    norms, norms_low = two_sum(product, rest + (query_norm * item_norm_low + query_norm_low * item_norm))
    first = high / norms
    back, back_low = two_product(first, norms)
    second = ((((high - back) - back_low) + low) - first * norms_low) / norms
    bound = 0.0
    if not finish and (high != 0.0 or error != 0.0):
        bound = abs(first) * (2.0**-97 + (pairs.queries.shape[1] + 8.0) ** 2 * 2.0**-105) + 1.01 * error / norms
    return min(max(_nearest(first, second, bound), -1.0), 1.0)


@inner_kernel
def exact_score(pairs, i, j, work):
    """Return the exact score of one pair."""
    left = pairs.queries[i]
    right = pairs.gallery[j]
    of_differences = pairs.kind == EUCLIDEAN
    high, low = _sum(left, right, of_differences, pairs.single, work)
    score = _round(pairs, i, j, high, low, _bound(pairs, i, j, high), False)
    if math.isnan(score):
        count = _expand(left, right, of_differences, work[2])
        if of_differences:
            root = _rounded_root(work[2], count)
            return 0.0 - root * root * pairs.score_factor
        high, low = _rounded_sum(work[2], count)
        score = _round(pairs, i, j, high, low, 0.0, True)
    return score


@any_order
def plain_sum(left, right, of_differences):
    """Return the dot product or minus the squared distance of two rows, in float64 and any order."""
    total = 0.0
    if of_differences:
        for k in range(left.shape[0]):
            difference = np.float64(left[k]) - np.float64(right[k])
            total -= difference * difference
    else:
        for k in range(left.shape[0]):
            total += np.float64(left[k]) * np.float64(right[k])
    return total


@kernel
def float64_score(pairs, i, j):
    """Return the score by a sum in float64, and a bound on its distance from the exact score.

    The bound is from Higham, section 3.1, with 16 roundings in addition to those in the sum: in the norms, the
    quotient, the exact score and the sums of a caller. It is never 0, which marks exact scores in `nearest.py`.
    """
    total = plain_sum(pairs.queries[i], pairs.gallery[j], pairs.kind == EUCLIDEAN)
    relative = (pairs.queries.shape[1] + 16) * 2.0**-53
    if pairs.kind == EUCLIDEAN:  # all terms have one sign: the error is relative to the sum
        return total * pairs.score_factor, -total * pairs.score_factor * 2 * relative + 2.0**-960
    norms = pairs.query_norm[i, 0] * pairs.gallery_norm[j, 0]
    if pairs.kind == DOT:
        return total * pairs.score_factor, relative * norms * pairs.score_factor + 2.0**-960
    return (total / norms if norms > 0.0 else 0.0), relative


@kernel
def exact_scores(pairs, rows, columns, out, work):
    """Write the exact scores of the pairs (rows[p], columns[p]). Consecutive pairs of equal rows are computed once."""
    last_query = np.int64(-1)
    last_item = np.int64(-1)
    score = 0.0
    for p in range(rows.shape[0]):
        query = pairs.query_first_duplicate[rows[p]]
        item = pairs.gallery_first_duplicate[columns[p]]
        if query != last_query or item != last_item:
            score = exact_score(
                pairs, np.int64(rows[p]), np.int64(columns[p]), work
            )  # the loop is compiled for one type
            last_query = query
            last_item = item
        out[p] = score


@inner_kernel
def columns_of(rows, items, first_item, out):
    """Write the rows of items into the columns of `out`; `rows[0]` is the row of `first_item`."""
    for m in range(items.shape[0]):
        row = rows[items[m] - first_item]
        for k in range(row.shape[0]):
            out[k, m] = row[k]


@inner_kernel
def exact_scores_beside(pairs, i, items, first_item, members, first, out, work):
    """Write the exact scores of a query with the items `items[first:]`; NaN if a score needs a sum without rounding.

    The rows of the items are the columns of `members`.
    """
    left = pairs.queries[i]
    # It is rounded up to whole vectors of `LANES` columns, since a partial vector would be added number by number.
    # `members` has room for them.
    stop = first - (first - items.shape[0]) // LANES * LANES
    if pairs.kind == EUCLIDEAN:
        _squared_distances(left, members, first, stop, work)
    elif pairs.single:
        _dots_single(left, members, first, stop, work)
    else:
        _dots_double(left, members, first, stop, work)
    for m in range(out.shape[0]):
        high, low = two_sum(work[0, m], work[1, m])
        j = items[first + m] - first_item
        out[m] = _round(pairs, i, j, high, low, _bound(pairs, i, j, high), False)


@kernel
def exact_norms(values, single, out, work):
    """Write the norm of each row, rounded to float64, and its rounding error.

    Nothing cancels in the squared norm, so its error is below dim**2 2**-105 of it.
    """
    for i in range(values.shape[0]):
        row = values[i]
        high, low = _dot_single(row, row, work) if single else _dot_double(row, row, work)
        out[i, 0], out[i, 1] = _root(high, low)
