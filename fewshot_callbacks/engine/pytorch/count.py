"""The counting kernel in plain PyTorch, for any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

SPARSE_SHARE = 0.2
"""Share of a tile above the lowest thresholds below which its candidates are compared one by one."""


@dataclass
class Counts:
    """Counters of a block of queries, filled tile by tile.

    `thresholds` holds the exact scores of each query's relevant items, ascending, padded with +inf. A candidate that lies
    strictly above exactly k of them adds its weight to column k of `hits`. Where it ties with the next ones, up to the
    m-th, the weight is also taken from column k of `ties` and added to column m.
    """

    thresholds: Float[Tensor, "queries relevant"]
    hits: Int[Tensor, "queries relevant1"]
    ties: Int[Tensor, "queries relevant1"]

    @classmethod
    def zeros(cls, thresholds: Float[Tensor, "queries relevant"], dtype: torch.dtype = torch.int64) -> Counts:
        """Return counters of no candidate yet."""
        queries, relevant = thresholds.shape
        empty = torch.zeros(queries, relevant + 1, dtype=dtype, device=thresholds.device)
        return cls(thresholds, empty, empty.clone())

    def add(self, hits: Int[Tensor, "counters"]) -> None:
        """Add candidates that tie with no threshold: hits[q * (relevant + 1) + k] of them beat k thresholds of query q."""
        self.hits += hits.view_as(self.hits)

    def better(self) -> Int[Tensor, "queries relevant"]:
        """Return for each threshold the number of candidates strictly above it."""
        return _suffix_sums(self.hits.long())

    def better_or_tied(self) -> Int[Tensor, "queries relevant"]:
        """Return for each threshold the number of candidates not below it."""
        return _suffix_sums(self.hits.long() + self.ties)

    def add_scores(
        self, rows: Int[Tensor, "pairs"], scores: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None
    ) -> None:
        """Count candidates whose exact scores are known, of the queries `rows`."""
        below = _rank_in_row(self.thresholds, rows, scores, or_equal=False)
        not_above = _rank_in_row(self.thresholds, rows, scores, or_equal=True)
        ones = torch.ones_like(rows) if weights is None else weights
        ones = ones.to(self.hits.dtype)
        start = rows * self.hits.shape[1]
        self.hits.view(-1).index_add_(0, start + below, ones)
        self.ties.view(-1).index_add_(0, start + below, -ones)
        self.ties.view(-1).index_add_(0, start + not_above, ones)


def count_tile(
    counts: Counts,
    estimates: Float[Tensor, "queries candidates"],
    error: Float[Tensor, "queries"],
    weights: Int[Tensor, "candidates"] | None = None,
) -> tuple[Int[Tensor, "open"], Int[Tensor, "open"]]:
    """Count the candidates of a tile whose estimate decides, and return the others.

    Args:
        counts: The counters of these queries; changed in place.
        estimates: Of the scores; -inf where there is no candidate.
        error: How far an estimate can lie from the exact score.
        weights: How many candidates each column stands for; one each by default.

    Returns:
        Rows and columns of the pairs that lie too close to a threshold to be decided. They have not been counted.
    """
    low, high = _margins(counts, error, estimates.dtype)
    passing = estimates >= low[:, :1]  # below the lowest threshold nothing is beaten
    if float(passing.count_nonzero()) < SPARSE_SHARE * passing.numel():
        rows, columns = passing.nonzero(as_tuple=True)
        is_open = _count_pairs(
            counts, rows, estimates[rows, columns], low, high, None if weights is None else weights[columns]
        )
        return rows[is_open], columns[is_open]
    relevant = counts.thresholds.shape[1]
    beaten = torch.searchsorted(high, estimates)  # (queries, candidates)
    undecided = (low.gather(1, beaten.clamp(max=relevant - 1)) <= estimates) & (beaten < relevant)
    rows, columns = undecided.nonzero(as_tuple=True)
    beaten += torch.arange(len(beaten), device=beaten.device)[:, None] * (relevant + 1)
    if weights is None:
        hits = torch.bincount(beaten.view(-1), minlength=counts.hits.numel())
        hits.index_add_(0, beaten[rows, columns], torch.full_like(rows, -1))
    else:
        hits = _bincount(beaten.view(-1), weights.expand_as(beaten).masked_fill(undecided, 0).view(-1), counts.hits)
    counts.add(hits)
    return rows, columns


def count_pairs(
    counts: Counts,
    rows: Int[Tensor, "pairs"],
    estimates: Float[Tensor, "pairs"],
    error: Float[Tensor, "queries"],
    weights: Int[Tensor, "pairs"] | None = None,
) -> Bool[Tensor, "pairs"]:
    """Count single pairs as `count_tile` does, and return which of them are still open."""
    return _count_pairs(counts, rows, estimates, *_margins(counts, error, estimates.dtype), weights)


def _count_pairs(
    counts: Counts, rows: Tensor, estimates: Tensor, low: Tensor, high: Tensor, weights: Tensor | None
) -> Bool[Tensor, "pairs"]:
    relevant = counts.thresholds.shape[1]
    beaten = _rank_in_row(high, rows, estimates, or_equal=False)
    is_open = (low[rows, beaten.clamp(max=relevant - 1)] <= estimates) & (beaten < relevant)
    decided = ~is_open
    positions = (rows * (relevant + 1) + beaten)[decided]
    counts.add(_bincount(positions, None if weights is None else weights[decided], counts.hits))
    return is_open


def _margins(counts: Counts, error: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (low, high): an estimate below `low` is surely below its threshold, one beyond `high` surely above."""
    low = rounded(counts.thresholds - error[:, None], dtype, up=False)  # (queries, relevant)
    high = rounded(counts.thresholds + error[:, None], dtype, up=True)
    return low, high


def _rank_in_row(table: Tensor, rows: Tensor, values: Tensor, *, or_equal: bool) -> Int[Tensor, "pairs"]:
    """Return how many numbers in each pair's row of the (ascending) table lie below its value; `or_equal`: not above it."""
    low = torch.zeros_like(rows)
    high = torch.full_like(rows, table.shape[1])
    for _ in range(table.shape[1].bit_length()):
        middle = (low + high) // 2
        number = table[rows, middle.clamp(max=table.shape[1] - 1)]
        right = (number <= values) if or_equal else (number < values)
        right &= low < high
        low = torch.where(right, middle + 1, low)
        high = torch.where(right, high, middle)
    return low


def _bincount(positions: Tensor, weights: Tensor | None, like: Tensor) -> Int[Tensor, "counters"]:
    if weights is None:
        return torch.bincount(positions, minlength=like.numel())
    return torch.zeros_like(like, dtype=torch.int64).view(-1).index_add_(0, positions, weights)


def _suffix_sums(histogram: Int[Tensor, "queries columns"]) -> Tensor:
    """Return in column j the sum of all columns after column j."""
    return histogram.flip(1).cumsum(1).flip(1)[:, 1:]


def rounded(values: Float[Tensor, "*shape"], dtype: torch.dtype, *, up: bool) -> Float[Tensor, "*shape"]:
    """Return float64 values in a narrower dtype, rounded to one side: at least (`up`) or at most the value."""
    if values.dtype == dtype:
        return values
    narrow = values.to(dtype)
    limit = torch.full_like(narrow, torch.inf if up else -torch.inf)
    wrong = (narrow.double() < values) if up else (narrow.double() > values)
    return torch.where(wrong, torch.nextafter(narrow, limit), narrow)
