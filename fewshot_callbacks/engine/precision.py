"""Which products are the fastest: their time on this processor, and what a sample of the pairs says they leave open."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.engine import device
from fewshot_callbacks.engine.options import Precision
from fewshot_callbacks.engine.tiles import Estimates
from fewshot_callbacks.engine.vectors import DTYPES, Floats

# What a pair whose estimate is too close to a threshold costs, in float32 products of a pair: 72 and 12 ns for 512
# components, 20 and 3 for 128 (AMD Zen 4, one core, `close_score` beside `torch.mm` of 256 x 2,048).
OPEN_PRICE = 6.0
# Of the product that is timed, on a processor and on a GPU.
SIZES, DEVICE_SIZES = (64, 1024), (4096, 4096)
# Of the sampled queries.
LOOKED_AT = 16
# A product that takes so many times as long as in float32 at once is not tried again.
SLOW = 4.0


@functools.cache
def seconds_of_a_pair(precision: Precision, columns: int, on: torch.device | None = None) -> float:
    """Return what a product takes for one pair; timed once in a process."""
    sizes = DEVICE_SIZES if on is not None and on.type == "cuda" else SIZES
    left, right = (torch.ones(size, columns, dtype=DTYPES[precision], device=on) for size in sizes)
    out = torch.empty(sizes, dtype=torch.float64 if precision == "float64" else torch.float32, device=on)
    taken = []
    for _ in range(5):  # the first may compile
        started = time.perf_counter()
        made = torch._int_mm(left, right.T) if precision == "bytes" else device.multiply(left, right, out)
        made[0, 0].item()  # waits for a device
        taken.append((time.perf_counter() - started) / out.numel())
        if precision == "bytes" and min(taken[1:], default=0.0) > SLOW * seconds_of_a_pair("float32", columns):
            break
    return min(taken)


def fastest(
    estimates: Estimates,
    start: NDArray[np.int64],
    thresholds: Floats,
    rows: Sequence[int],
    sampled: Sequence[NDArray[Any]],
) -> Precision:
    """Return the precision whose products, and the closer look at what they leave open, take the least time; collective.

    Args:
        estimates: The tiles in float32.
        start: Where the thresholds of each query begin.
        thresholds: Ascending for each query.
        rows: Some queries.
        sampled: The estimates of the negatives of each of these.
    """
    vectors = estimates.vectors
    sides = 2 if estimates.mutual else 1
    tried: list[Precision] = [*vectors.precisions(estimates.on), "float32", "float64"]
    if not estimates.layout.coded:  # bytes and their scales are made once, not for each tile
        tried = [precision for precision in tried if precision != "bytes"]
    able = vectors.processes.gather(tried)  # processors may differ
    tried = [precision for precision in tried if all(precision in others for others in able)]
    errors = [vectors.error(precision) for precision in tried]
    open_pairs, pairs = np.zeros(len(tried)), 0
    for row, values in list(zip(rows, sampled, strict=True))[:: max(1, len(rows) // LOOKED_AT)]:
        own = thresholds[start[row] : start[row + 1]]
        pairs += len(values)
        for number, error in enumerate(of_row[row] for of_row in errors):
            # one search: a negative is open if some threshold lies in [value - error, value + error]
            at = np.searchsorted(own, values - error)
            open_pairs[number] += (np.append(own, np.inf)[at] <= values + error).sum()
    totals = vectors.processes.summed(np.array([*open_pairs.astype(np.int64), pairs]))
    single = seconds_of_a_pair("float32", vectors.columns) / (1 if estimates.on is None else vectors.threads)
    costs = [
        seconds_of_a_pair(precision, vectors.columns, estimates.on)
        + sides * OPEN_PRICE * single * opened / max(1, totals[-1])
        for precision, opened in zip(tried, totals[:-1], strict=True)
    ]
    everywhere = np.max(vectors.processes.gather(costs), axis=0)  # the slowest process is waited for
    chosen = tried[int(np.argmin(everywhere))]
    if chosen != "bytes":
        vectors.forget_codes()
    return chosen
