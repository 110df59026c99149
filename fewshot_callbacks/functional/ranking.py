"""Ranking metrics of each query, from the counts of the pass alone.

Equal keys have no order, so a metric is the mean over all orders of each tied group, in closed form
(`ties="expected"`; McSherry and Najork, "Computing Information Retrieval Performance Measures Efficiently in the
Presence of Tied Scores", ECIR 2008), or the best or the worst of them (`"optimistic"`, `"pessimistic"`).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.functional.ranks import RankBlock

Ties = Literal["expected", "optimistic", "pessimistic"]


def check_ties(ties: str) -> None:
    """Refuse an unknown rule for ties, and name the known ones."""
    if ties not in get_args(Ties):
        raise ValueError(f"ties={ties!r} is unknown. Choose one of {', '.join(get_args(Ties))}.")


def average_precision(
    ranks: RankBlock, ties: Ties = "expected", cut: Int[Tensor, "queries"] | None = None
) -> Float[Tensor, "queries"]:
    """Sum of the precisions at the ranks of the relevant items, divided by the number of relevant items R.

    Args:
        ranks: the ranks of some queries.
        ties: the rule for equal keys.
        cut: only ranks up to this one count; with `cut = R` this is MAP@R (Musgrave, Belongie and Lim,
            "A Metric Learning Reality Check", ECCV 2020). By default all ranks count: average precision.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate.
    """
    above = (ranks.relevant_above + ranks.negatives_above).double()  # k: candidates before the tied group
    relevant_above = ranks.relevant_above.double()  # m
    if ties == "expected":
        tied = (ranks.relevant_tied + ranks.negatives_tied).double()  # n
        others = (ranks.relevant_tied - 1).double() / (tied - 1).clamp(min=1)
        reached = tied if cut is None else (cut[:, None] - above).clamp(min=0).minimum(tied)
        # sum over the places i = 1 ... reached of (m + 1 + (i - 1) others) / (k + i), for an item that is at each
        # place with probability 1 / n
        harmonic = _harmonic_between(above, reached)
        precision = ((relevant_above + 1) * harmonic + others * (reached - (above + 1) * harmonic)) / tied
    else:
        found = relevant_above + ranks.place_in_tie
        rank = _rank(ranks, ties)
        precision = found / rank
        if cut is not None:
            precision = precision.masked_fill(rank > cut[:, None], 0.0)
    return _sum_valid(ranks, precision) / _or_nan(ranks.relevant)


def hits_within(ranks: RankBlock, k: Int[Tensor, "queries"], ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """The (expected) number of relevant items among the first k; divided by k this is precision@k.

    Args:
        ranks: the ranks of some queries.
        k: how far to look, for each query; with `k = R`, `hits / R` is R-precision.
        ties: the rule for equal keys.
    """
    if ties == "expected":
        above = (ranks.relevant_above + ranks.negatives_above).double()
        tied = (ranks.relevant_tied + ranks.negatives_tied).double()
        inside = (k[:, None] - above).clamp(min=0).minimum(tied) / tied
    else:
        inside = (_rank(ranks, ties) <= k[:, None]).double()
    return _sum_valid(ranks, inside)


def recall_at_k(ranks: RankBlock, k: int, ties: Ties = "expected") -> Float[Tensor, "queries"]:
    """Recall@K of metric learning (CMC@K): whether a relevant item is among the first k; its probability under ties.

    Returns:
        One value in [0, 1] for each query; NaN for a query without a relevant candidate.
    """
    if ranks.valid.shape[1] == 0:
        return torch.full(ranks.relevant.shape, torch.nan, dtype=torch.float64, device=ranks.relevant.device)
    best = (ranks.relevant - 1).clamp(min=0)[:, None]  # the most similar relevant item stands last
    above = ranks.negatives_above.gather(1, best).squeeze(1)
    negatives = ranks.negatives_tied.gather(1, best).squeeze(1)
    relevant = ranks.relevant_tied.gather(1, best).squeeze(1)
    if ties == "optimistic":
        found = (above < k).double()
    elif ties == "pessimistic":
        found = (above + negatives < k).double()
    else:
        missed = torch.ones_like(above, dtype=torch.float64)
        tied = (negatives + relevant).double()
        for place in range(k if bool((negatives > 0).any()) else 1):  # without replacement: all drawn are negatives
            drawn = (above + place < k) & (place < tied)
            chance = (negatives - place).clamp(min=0) / (tied - place).clamp(min=1)
            missed = torch.where(drawn, missed * chance, missed)
        found = 1 - missed
    return found.masked_fill(ranks.relevant == 0, torch.nan)


def depends_on_ties(ranks: RankBlock) -> Bool[Tensor, "queries"]:
    """Whether some relevant item of the query ties with a negative, so that the rule for ties matters."""
    return ((ranks.negatives_tied > 0) & ranks.valid).any(dim=1)


def _rank(ranks: RankBlock, ties: Ties) -> Float[Tensor, "queries columns"]:
    rank = ranks.relevant_above + ranks.negatives_above + ranks.place_in_tie
    return (rank + ranks.negatives_tied if ties == "pessimistic" else rank).double()


def _harmonic_between(k: Float[Tensor, "queries columns"], n: Float[Tensor, "queries columns"]) -> Tensor:
    """1 / (k + 1) + ... + 1 / (k + n), without the loss of digits of a difference of two large sums."""
    near = torch.digamma(k.clamp(max=40) + n + 1) - torch.digamma(k.clamp(max=40) + 1)
    # the expansion of H_m around ln(m + 1/2); what it leaves out is below 1e-14 from k = 40 on
    start, end = 1 / (k + 0.5), 1 / (k + n + 0.5)
    far = torch.log1p(n * start)
    for power, factor in ((2, 1 / 24), (4, -7 / 960), (6, 31 / 8064)):
        far = far + factor * (end**power - start**power)
    return torch.where(n == 1, 1 / (k + 1), torch.where(k < 40, near, far))


def _sum_valid(ranks: RankBlock, values: Tensor) -> Float[Tensor, "queries"]:
    """The sum over the relevant items, one after the other, so that columns that are not valid do not change its bits."""
    if values.shape[1] == 0:
        return values.new_zeros(len(values))
    return values.masked_fill(~ranks.valid, 0.0).cumsum(dim=1)[:, -1]


def _or_nan(count: Tensor) -> Float[Tensor, "queries"]:
    return count.double().masked_fill(count == 0, torch.nan)
