"""Ranks of the relevant items of some queries, from counters of candidates above each relevant score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.pytorch.count import Counts


@dataclass(frozen=True)
class RankBlock:
    """The ranks of the relevant items of some queries. Rows are queries; columns beyond `relevant` are not valid.

    Relevant items stand in ascending order of their keys. `negatives_*` count candidates of other classes.
    """

    queries: Int[Tensor, "queries"]
    """index of each query"""
    relevant: Int[Tensor, "queries"]
    """number of relevant candidates of each query"""
    valid: Bool[Tensor, "queries columns"]
    negatives_above: Int[Tensor, "queries columns"]
    """negatives with a strictly larger key"""
    negatives_tied: Int[Tensor, "queries columns"]
    """negatives with an equal key"""
    relevant_above: Int[Tensor, "queries columns"]
    """relevant items with a strictly larger key"""
    relevant_tied: Int[Tensor, "queries columns"]
    """relevant items with an equal key, this one included"""
    place_in_tie: Int[Tensor, "queries columns"]
    """1 ... relevant_tied: a number for this item among those equal to it"""


class BestMatches(NamedTuple):
    """Of each query, the highest key of its relevant candidates, and how many of them have it."""

    keys: Float[Tensor, "queries"]
    """-inf where a query has no relevant candidate"""
    tied: Int[Tensor, "queries"]


def ranks_from_counters(queries: Int[Tensor, "queries"], counts: Counts) -> RankBlock:
    """Turn the counters of some queries into ranks.

    Args:
        queries: their indices.
        counts: of the candidates that they were compared with.
    """
    thresholds = counts.thresholds
    valid = thresholds.isfinite()
    relevant = valid.sum(dim=1)
    column = torch.arange(thresholds.shape[1], device=thresholds.device).expand_as(thresholds)
    below, not_above = column, column + 1
    if bool((valid[:, 1:] & (thresholds[:, 1:] == thresholds[:, :-1])).any()):
        below = torch.searchsorted(thresholds, thresholds)
        not_above = torch.searchsorted(thresholds, thresholds, right=True).minimum(relevant[:, None])
    better = counts.better()
    return RankBlock(
        queries=queries,
        relevant=relevant,
        valid=valid,
        negatives_above=better,
        negatives_tied=counts.better_or_tied() - better,
        relevant_above=relevant[:, None] - not_above,
        relevant_tied=not_above - below,
        place_in_tie=column - below + 1,
    )
