"""Groups of candidates with equal scores: their position in the ranking of a query, and averages over their orders."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.settings import Ties


def depends_on_ties(ranks: RankBlock) -> Bool[Tensor, "queries"]:
    """Return, for each query, whether a relevant item ties with a negative, so that the rule for ties matters."""
    return _ties_with_negative(ranks).any(dim=1)


def found_at(ranks: RankBlock) -> Int[Tensor, "queries columns"]:
    """Return the number of relevant items from the best one down to each one. Columns have ascending scores."""
    columns = torch.arange(ranks.valid.shape[1], device=ranks.relevant.device)
    return relevant_in_gallery(ranks)[:, None] - columns


def relevant_in_gallery(ranks: RankBlock) -> Int[Tensor, "queries"]:
    """Return the number of relevant items of each query that are in the gallery."""
    return ranks.valid.sum(dim=1)


def is_within(ranks: RankBlock, k: Int[Tensor, "queries"], ties: Ties) -> Bool[Tensor, "queries columns"]:
    """Return whether each item is among the first k. Relevant items come first in a tied group (pessimistic: last)."""
    rank = found_at(ranks).add_(ranks.negatives_above)
    if ties == "pessimistic":
        rank += ranks.negatives_tied
    return rank <= k[:, None]


def _ties_with_negative(ranks: RankBlock) -> Bool[Tensor, "queries columns"]:
    """Return whether each relevant item ties with a negative."""
    return (ranks.negatives_tied > 0) & ranks.valid


class TiedGroups(NamedTuple):
    """Groups of candidates with equal scores that contain relevant items and negatives. Each group appears once."""

    # row of the block
    query: Int[Tensor, "groups"]
    # flat index, in the block, of one relevant item of the group
    entry: Int[Tensor, "groups"]
    # number of candidates with a higher score
    above: Int[Tensor, "groups"]
    relevant_above: Int[Tensor, "groups"]
    # number of candidates in the group
    size: Int[Tensor, "groups"]
    # number of relevant candidates in the group
    relevant: Int[Tensor, "groups"]

    def only(self, chosen: Bool[Tensor, "groups"]) -> TiedGroups:
        """Return the groups that a mask selects."""
        return TiedGroups(*(values[chosen] for values in self))


def groups_to_average(ranks: RankBlock, ties: Ties, cut: Int[Tensor, "queries"] | None = None) -> TiedGroups | None:
    """Return the tied groups over whose orders a metric is averaged; None if there are none, or if a rule orders them.

    Groups that begin beyond the rank `cut` are left out because none of their ranks count.
    """
    if ties != "expected" or not bool(_ties_with_negative(ranks).any()):
        return None
    group = tied_groups(ranks, cut)
    return group if len(group.query) else None


def tied_groups(ranks: RankBlock, cut: Int[Tensor, "queries"] | None) -> TiedGroups:
    """Return the tied groups that begin no later than the rank `cut` of their query. `cut=None` returns all groups."""
    stands_for_group = _ties_with_negative(ranks) & (ranks.position_in_tie == 1)
    if cut is not None:
        stands_for_group &= ranks.relevant_above + ranks.negatives_above < cut[:, None]
    query, column = stands_for_group.nonzero(as_tuple=True)
    entry = query * ranks.valid.shape[1] + column

    def of_groups(counts: Int[Tensor, "queries columns"]) -> Int[Tensor, "groups"]:
        return counts.flatten().gather(0, entry)  # a flat index is faster than `counts[query, column]`

    relevant_above = of_groups(ranks.relevant_above)
    relevant = of_groups(ranks.relevant_tied)
    return TiedGroups(
        query=query,
        entry=entry,
        above=relevant_above + of_groups(ranks.negatives_above),
        relevant_above=relevant_above,
        size=relevant + of_groups(ranks.negatives_tied),
        relevant=relevant,
    )


def replace_tied(
    terms: Float[Tensor, "queries columns"],
    ranks: RankBlock,
    group: TiedGroups,
    means: Float[Tensor, "groups"],
) -> None:
    """Replace the terms of items that tie with a negative: one term of each group by its mean, all others by 0."""
    terms.masked_fill_(_ties_with_negative(ranks), 0.0)
    # `put_` raises an error under `torch.use_deterministic_algorithms`.
    terms.view(-1).scatter_(0, group.entry, means)


class _QueryGroup(NamedTuple):
    """The candidates that tie with one relevant item of each query."""

    # number of candidates with a higher score
    above: Int[Tensor, "queries"]
    # numbers of negatives and of relevant items in the group
    negatives: Int[Tensor, "queries"]
    relevant: Int[Tensor, "queries"]


def best_group(ranks: RankBlock) -> _QueryGroup:
    """Return the group of the most similar relevant item, the last column. All candidates above it are negatives."""
    column = (relevant_in_gallery(ranks) - 1).clamp(min=0)[:, None]
    return _QueryGroup(
        above=ranks.negatives_above.gather(1, column).squeeze(1),
        negatives=ranks.negatives_tied.gather(1, column).squeeze(1),
        relevant=ranks.relevant_tied.gather(1, column).squeeze(1),
    )


def last_group(ranks: RankBlock) -> _QueryGroup:
    """Return the group of the least similar relevant item, the first column."""
    return _QueryGroup(
        above=ranks.negatives_above[:, 0] + ranks.relevant_above[:, 0],
        negatives=ranks.negatives_tied[:, 0],
        relevant=ranks.relevant_tied[:, 0],
    )
