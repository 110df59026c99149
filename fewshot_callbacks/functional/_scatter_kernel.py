"""Both ratios of a batch on the CPU, and sums over the items of classes, as compiled loops.

Why compiled: the ratios are computed in every training step that a monitor watches, and PyTorch's operations take about four
times as long (`python benchmarks/variance_ratio.py --cost` prints both).

`discriminant_ratio.py` says what is computed, and why relative to an item of each class. The loops do not scale their
sums, so their input must not be larger than float32: float64 holds the squares of narrower types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.system.compile_notice import announce_compiling
from fewshot_callbacks.system.loop_cache import cache_on_disk

announce_compiling()

# The compiler may reorder sums: those of float64 over a batch are far more precise than the result, which is float32.
_compile = numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call, and keep the result on disk where that can be done."""
    return cache_on_disk(_compile(function))


# 2^64 divided by the golden ratio, the multiplier of Fibonacci hashing (Knuth, TAOCP 3, section 6.4).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@_kernel
def ratios(
    items: NDArray[np.floating], labels: NDArray[np.int64], eps: float, skip_singletons: bool
) -> tuple[float, float]:
    """Return J and the variance ratio of (items, dim) values; NaN where they are undefined."""
    n, dim = items.shape
    if n == 0 or dim == 0:
        return math.nan, math.nan
    origin = _first_of_class(labels)
    count = np.zeros(n)  # items of a class, in the row of its origin
    offset = np.zeros((n, dim))  # mean minus origin of a class, in the row of its origin
    for i in range(n):
        o = origin[i]
        count[o] += 1
        for k in range(dim):
            offset[o, k] += np.float64(items[i, k]) - np.float64(items[o, k])
    for i in range(n):
        if count[i] > 1:
            for k in range(dim):
                offset[i, k] /= count[i]
    within = 0.0
    for i in range(n):
        o = origin[i]
        for k in range(dim):
            deviation = np.float64(items[i, k]) - np.float64(items[o, k]) - offset[o, k]
            within += deviation * deviation
    classes = 0.0
    squares = 0.0
    for i in range(n):
        classes += count[i] > 0
        squares += count[i] * count[i]
    between = _between(items, count, offset, 0)
    estimate = math.nan
    if 1 < classes < n and within != 0:
        n0 = (n - squares / n) / (classes - 1)
        estimate = (between / within * ((n - classes) / (classes - 1)) - 1) / n0
    if skip_singletons:
        between = _between(items, count, offset, 1)
    j = 1 / ((1 + eps) / (between / within) + eps)
    return j if count.max() > 1 else math.nan, estimate


@_kernel
def _first_of_class(labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first item of each item's class, by a hash table with linear probing."""
    n = len(labels)
    bits = 1
    while (1 << bits) < 2 * n:
        bits += 1
    table = np.full(1 << bits, -1)
    first = np.empty(n, dtype=np.int64)
    for i in range(n):
        slot = np.int64((np.uint64(labels[i]) * _GOLDEN) >> np.uint64(64 - bits))
        while table[slot] >= 0 and labels[table[slot]] != labels[i]:
            slot = (slot + 1) & ((1 << bits) - 1)
        if table[slot] < 0:
            table[slot] = i
        first[i] = table[slot]
    return first


@_kernel
def _between(items: NDArray[np.floating], count: NDArray[np.float64], offset: NDArray[np.float64], above: int) -> float:
    """Return the scatter between the classes of more than `above` items."""
    n, dim = items.shape
    # Means are relative to that of a class that takes part: beside an outlier that does not, others would lose digits.
    reference = count.argmax()
    centre = np.zeros(dim)
    total = 0.0
    for i in range(n):
        if count[i] > above:
            total += count[i]
            for k in range(dim):
                mean = np.float64(items[i, k]) - np.float64(items[reference, k]) + offset[i, k] - offset[reference, k]
                centre[k] += count[i] * mean
    scatter = 0.0
    for i in range(n):
        if count[i] > above:
            for k in range(dim):
                mean = np.float64(items[i, k]) - np.float64(items[reference, k]) + offset[i, k] - offset[reference, k]
                scatter += count[i] * (mean - centre[k] / total) ** 2
    return scatter


@_kernel
def lengths(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the Euclidean length of each row, without an overflow or underflow of its squares; 1 for a row of zeros."""
    lengths_of_rows = np.ones(len(rows))
    for i in range(len(rows)):
        largest = 0.0
        total = 0.0
        for value in rows[i]:
            largest = max(largest, np.float64(abs(value)))
        if largest > 0:
            for value in rows[i]:
                total += (np.float64(value) / largest) ** 2
            lengths_of_rows[i] = largest * math.sqrt(total)
    return lengths_of_rows


@_kernel
def class_sums(
    rows: NDArray[np.floating], lengths: NDArray[np.float64], number: NDArray[np.int64], origin: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return, for each class, the sum of the differences of its items from its origin, and the sum of their squares.

    Args:
        rows: (items, dim), each of which is divided by its length.
        lengths: (items,).
        number: (items,) number of the class of each item.
        origin: (classes,) index of an item of each class, from which the others are measured.
    """
    sums = np.zeros((len(origin), rows.shape[1]))
    squares = np.zeros(len(origin))
    for i in range(len(rows)):
        c = number[i]
        o = origin[number[i]]
        total = 0.0
        for k in range(rows.shape[1]):
            difference = np.float64(rows[i, k]) / lengths[i] - np.float64(rows[o, k]) / lengths[o]
            sums[c, k] += difference
            total += difference * difference
        squares[c] += total
    return sums, squares
