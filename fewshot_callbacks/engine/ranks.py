"""Ranks of the relevant items of some queries, from counters of candidates above each relevant score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block
from fewshot_callbacks.engine.budget import RANK_BYTES, SHARE_OF_RANKS, least_ranked
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pytorch.count import Counts


@dataclass(frozen=True)
class RankBlock:
    """The ranks of the relevant items of some queries. Rows are queries; columns beyond `relevant` are not valid.

    Relevant items stand in ascending order of their scores. `negatives_*` count candidates of other classes.
    """

    queries: Int[Tensor, "queries"]
    """index of each query"""
    relevant: Int[Tensor, "queries"]
    """number of relevant candidates of each query"""
    valid: Bool[Tensor, "queries columns"]
    negatives_above: Int[Tensor, "queries columns"]
    """negatives with a strictly larger score"""
    negatives_tied: Int[Tensor, "queries columns"]
    """negatives with an equal score"""
    relevant_above: Int[Tensor, "queries columns"]
    """relevant items with a strictly larger score"""
    relevant_tied: Int[Tensor, "queries columns"]
    """relevant items with an equal score, this one included"""
    position_in_tie: Int[Tensor, "queries columns"]
    """1 ... relevant_tied: a number for this item among those equal to it"""

    @classmethod
    def of_scores(
        cls,
        queries: Int[Tensor, "queries"],
        scores: Float[Tensor, "queries columns"],
        negatives_above: Int[Tensor, "queries columns"],
        negatives_tied: Int[Tensor, "queries columns"],
    ) -> RankBlock:
        """Return ranks, given the exact scores of the relevant items, ascending and padded with +inf."""
        relevant = scores.isfinite().sum(dim=1)
        column = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
        below, not_above = column, column + 1
        if bool(((scores[:, 1:] == scores[:, :-1]) & scores[:, 1:].isfinite()).any()):
            below = torch.searchsorted(scores, scores)
            not_above = torch.searchsorted(scores, scores, right=True).minimum(relevant[:, None])
        return cls.of_order(queries, relevant, below, not_above, negatives_above, negatives_tied)

    @classmethod
    def of_order(
        cls,
        queries: Int[Tensor, "queries"],
        relevant: Int[Tensor, "queries"],
        below: Int[Tensor, "queries columns"],
        not_above: Int[Tensor, "queries columns"],
        negatives_above: Int[Tensor, "queries columns"],
        negatives_tied: Int[Tensor, "queries columns"],
    ) -> RankBlock:
        """Return ranks, given how many relevant items score less than each, and how many no more, itself included."""
        column = torch.arange(below.shape[1], device=below.device)
        number = relevant[:, None]
        return cls(
            queries,
            relevant,
            column < number,
            negatives_above,
            negatives_tied,
            number - not_above,
            not_above - below,
            column - below + 1,
        )


class BestMatches(NamedTuple):
    """Of each query, the highest score of its relevant candidates, and how many of them have it."""

    scores: Float[Tensor, "queries"]
    """-inf where a query has no relevant candidate"""
    tied: Int[Tensor, "queries"]

    @classmethod
    def unknown(cls, queries: int, device: torch.device) -> BestMatches:
        """Return those of queries without relevant candidates."""
        scores = torch.full((queries,), -torch.inf, dtype=torch.float64, device=device)
        return cls(scores, torch.zeros(queries, dtype=torch.int64, device=device))

    def note(self, ranks: RankBlock, scores: Float[Tensor, "queries columns"]) -> None:
        """Take the last of the ascending relevant scores of each query."""
        some = (ranks.relevant > 0).nonzero().flatten()
        last = ranks.relevant[some, None] - 1
        self.scores[ranks.queries[some]] = scores[some].gather(1, last).flatten()
        self.tied[ranks.queries[some]] = ranks.relevant_tied[some].gather(1, last).flatten()


def rank_blocks(block: Block, matrix: ScoreMatrix) -> Iterator[tuple[RankBlock, Float[Tensor, "queries columns"]]]:
    """Yield the ranks of a counted block of queries, as many at once as fit the budget, and the relevant scores."""
    assert block.counts is not None
    width = block.counts.thresholds.shape[1]
    fitting = int(matrix.free_bytes * SHARE_OF_RANKS) // (RANK_BYTES * (width + 1))
    # at most 2**21 relevant items, 0.4 GB of tables, however large the budget
    rows = max(least_ranked(width), min(fitting, 2**21 // (width + 1)))
    for start in range(0, len(block), rows):
        some = slice(start, start + rows)
        counts = Counts(*(table[some] for table in (block.counts.thresholds, block.counts.hits, block.counts.ties)))
        scores, above = counts.thresholds, counts.better()
        ranks = RankBlock.of_scores(block.index[some], scores, above, counts.better_or_tied() - above)
        members, row = matrix.duplicates.queries.copies(block.first + start, len(ranks.queries))
        if members is not None and row is not None:  # the same ranks for all equal queries
            ranks = RankBlock(members, *(getattr(ranks, field.name)[row] for field in fields(ranks)[1:]))
            scores = scores[row]
        yield ranks, scores
