"""Intervals of scores, and sorted lists of scores with the number of pairs that have each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]


Ints = NDArray[np.int64]


Floats = NDArray[np.float64]


ScoreIntervals = NDArray[np.float64]
"""(intervals, 2): scores from the first up to the second, both included; ascending, and none touches the next"""


def spaced(low: float, high: float, count: int) -> Floats:
    """Return evenly spaced scores, and as many with equally many float64 numbers between neighbours, both ends included.

    The latter leave one number in `count` even where those of interest are next to zero, and so far from evenly spaced.
    """
    # the bits of float64 numbers, as integers, are in the order of their magnitudes
    first, last = (int(np.float64(abs(end)).view(np.int64)) * (-1 if end < 0 else 1) for end in (low, high))
    offsets = np.linspace(0, last - first, count).astype(np.uint64)
    number = (offsets + np.uint64(first % 2**64)).view(np.int64)
    by_number = np.copysign(np.abs(number).view(np.float64), number)
    scores: Floats = np.unique(np.concatenate([by_number.clip(low, high), np.linspace(low, high, count)]))
    return scores


def merged(low: Floats, high: Floats) -> ScoreIntervals:
    """ScoreIntervals with ascending lower ends, those that touch made one."""
    reached = np.maximum.accumulate(high)
    first = np.flatnonzero(np.append(True, low[1:] > reached[:-1])[: len(low)])
    last = np.append(first[1:], len(low))[: len(first)] - 1
    return np.stack([low[first], reached[last]], axis=1)


def inside_any(scores: Floats, intervals: ScoreIntervals) -> Bools:
    """Tell which scores lie in one of some intervals."""
    if not len(intervals):
        return np.zeros(len(scores), bool)
    last = np.searchsorted(intervals[:, 0], scores, side="right") - 1
    inside: Bools = (last >= 0) & (scores <= intervals[np.maximum(last, 0), 1])
    return inside


def joined(parts: Sequence[tuple[Floats, Ints | None]]) -> tuple[Floats, Ints | None]:
    """Join scores in pieces, with the number of pairs that each stands for."""
    scores = np.concatenate([part[0] for part in parts]) if parts else np.empty(0)
    if all(weights is None for _, weights in parts):
        return scores, None
    return scores, np.concatenate([np.ones(len(own), np.int64) if given is None else given for own, given in parts])


def distinct(scores: Floats, weights: Ints | None, *, in_runs: bool = False) -> tuple[Floats, Ints]:
    """Return ascending distinct scores, and how many pairs have each; faster if told that a few ascending runs are given."""
    if weights is None:
        scores = np.sort(scores, kind="stable" if in_runs else None)  # the stable way merges runs
        first = (
            np.flatnonzero(np.concatenate([[True], scores[1:] != scores[:-1]]))
            if len(scores)
            else np.empty(0, np.int64)
        )
        return scores[first], np.diff(np.append(first, len(scores)))
    values, back = np.unique(scores, return_inverse=True)
    return values, histogram(back, weights, len(values))


def histogram(bins: Ints, weights: Ints | None, count: int) -> Ints:
    """Count the pairs in each bin; exact also where weights are large."""
    if weights is None or not len(weights):
        return np.bincount(bins, minlength=count).astype(np.int64)
    if weights.strides == (0,):
        same: Ints = np.bincount(bins, minlength=count).astype(np.int64) * weights[0]
        return same
    counts = np.zeros(count, np.int64)
    np.add.at(counts, bins, weights)
    return counts


def from_above(counts: NDArray[np.generic]) -> NDArray[Any]:
    """Return for each bin the sum over it and all bins above."""
    return np.cumsum(counts[::-1])[::-1]
