"""nDCG with a gain for each relevant item."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.settings import Ties

# Below this grade, 2^grade - 1 equals grade * log(2) in float64.
TINY_GRADE = 1e-17

Gain = Literal["exponential", "linear"]
"""Gain of nDCG for a grade: 2^grade - 1 (Burges et al., 2005), or the grade itself (Järvelin and Kekäläinen, 2002)."""


def gains_of(grades: Float[Tensor, "queries columns"], gain: Gain) -> Float[Tensor, "queries columns"]:
    """Return the gain of each relevant item, times a factor per query that cancels in nDCG.

    The factor keeps the gains of a query in the range of float64, with the largest gain near 1. For `linear` it is a power
    of two, which changes no digit. For `exponential` it is 2^-largest, where largest is the query's largest grade, because
    2^grade overflows above a grade of 1,023. exp2 of a whole number is exact, so one rounding remains, as without the
    factor. If largest is below 1, the factor is 1 / (2^largest - 1), because a difference of two powers near 1 would lose
    the digits of the grades.
    """
    if not grades.shape[1]:
        return grades
    largest = grades.amax(dim=1, keepdim=True)
    if gain == "linear":
        exponent = -torch.frexp(largest).exponent.double()
        half = (exponent / 2).floor()  # 2^exponent itself may overflow
        return grades * torch.exp2(half) * torch.exp2(exponent - half)
    gains = torch.exp2(grades - largest) - torch.exp2(-largest)
    gains_below_one = torch.expm1(grades * math.log(2)) / torch.expm1(largest * math.log(2))
    gains = torch.where(largest < 1, gains_below_one, gains)
    # Here expm1(x) equals x up to rounding, and would lose digits for the smallest numbers.
    gains = torch.where(largest < TINY_GRADE, grades / largest, gains)
    return gains.masked_fill(grades == 0, 0.0)


def graded_ndcg(
    ranks: RankBlock,
    gains: Float[Tensor, "queries columns"],
    k: int,
    ties: Ties = "expected",
    absent: Float[Tensor, "queries absent"] | None = None,
) -> Float[Tensor, "queries"]:
    """Return nDCG@k with graded gains: the discounted gains of the first k ranks, divided by their sum in the best order.

    The discount is 1 / log2(rank + 1). Candidates with equal scores share the mean of their gains, which is the expected
    value over their orders (McSherry and Najork, 2008). Optimistic and pessimistic orders put the largest gain of a tie
    first or last.

    `gains` has the columns of `ranks`; 0 in columns that are not valid. `k` is at least 1. `absent` has the gains of
    relevant items that are not in the gallery, padded with 0. The best order includes them. The values are in [0, 1];
    NaN for a query without a relevant candidate, or if all gains are 0.
    """
    gain_at_rank = _mean_gains(ranks, gains, k) if ties == "expected" else _ordered_gains(ranks, gains, k, ties)
    of_all = gains if absent is None else torch.cat([gains, absent], dim=1)
    best = torch.zeros_like(gain_at_rank)
    best[:, : min(k, of_all.shape[1])] = of_all.sort(dim=1, descending=True).values[:, :k]
    discount = torch.log2(torch.arange(2, k + 2, dtype=torch.float64, device=gains.device))
    ideal = (best / discount).sum(dim=1)
    return torch.where(ideal > 0, (gain_at_rank / discount).sum(dim=1) / ideal, torch.nan)


def _mean_gains(ranks: RankBlock, gains: Float[Tensor, "queries columns"], k: int) -> Float[Tensor, "queries k"]:
    """Return the gain at each rank up to k. Candidates with equal scores share the mean of their gains."""
    rows = _row_numbers(gains)
    group = _group_numbers(ranks)
    size = ranks.relevant_tied + ranks.negatives_tied
    mean = torch.zeros_like(gains).scatter_add_(1, group, gains).gather(1, group) / size
    above = ranks.negatives_above + ranks.relevant_above
    # One relevant item represents each group that begins in the first k ranks.
    stands = ranks.valid & (ranks.position_in_tie == 1) & (above < k)
    start = above[stands]
    length = size[stands].minimum(k - start)
    place = torch.arange(int(length.sum()), device=gains.device) - (length.cumsum(0) - length).repeat_interleave(length)
    gain_at_rank = gains.new_zeros(len(gains), k)
    query = rows[stands].repeat_interleave(length)
    gain_at_rank[query, start.repeat_interleave(length) + place] = mean[stands].repeat_interleave(length)
    return gain_at_rank


def _ordered_gains(
    ranks: RankBlock, gains: Float[Tensor, "queries columns"], k: int, ties: Ties
) -> Float[Tensor, "queries k"]:
    """Return the gain at each rank up to k. The largest gain of a tie comes first (`optimistic`) or last."""
    group = _group_numbers(ranks)
    order = gains.argsort(dim=1, descending=ties == "optimistic", stable=True)
    order = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
    rank = ranks.negatives_above + ranks.relevant_above + ranks.position_in_tie - 1
    if ties == "pessimistic":
        rank = rank + ranks.negatives_tied
    inside = ranks.valid & (rank < k)
    gain_at_rank = gains.new_zeros(len(gains), k)
    gain_at_rank[_row_numbers(gains)[inside], rank[inside]] = gains.gather(1, order)[inside]
    return gain_at_rank


def _row_numbers(gains: Float[Tensor, "queries columns"]) -> Int[Tensor, "queries columns"]:
    """Return the row index of each entry."""
    return torch.arange(len(gains), device=gains.device)[:, None].expand_as(gains)


def _group_numbers(ranks: RankBlock) -> Int[Tensor, "queries columns"]:
    """Return the index, from 0 on, of each relevant item's group of equal scores."""
    return (ranks.position_in_tie == 1).cumsum(dim=1) - 1
