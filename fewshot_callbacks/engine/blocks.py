"""Blocks of queries and of gallery items, and which of them meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.scores.products import ScoreTiles


@dataclass(frozen=True)
class Block:
    """Some entries in the order of their classes. An entry stands for all equal items of one class.

    A block of queries has `counts`; one that is only searched has none.
    """

    first: int
    """place of the first entry among all"""
    index: Int[Tensor, "entries"]
    """of one of the equal items"""
    classes: Int[Tensor, "entries"]
    weight: Int[Tensor, "entries"]
    """how many equal items there are"""
    counts: Counts | None = None
    part: int = 0
    """a block of queries is compared with those of the same part alone"""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def relevant(self) -> Int[Tensor, "entries"]:
        """How many relevant candidates each query has."""
        if self.counts is None:
            return torch.zeros_like(self.index)
        return self.counts.thresholds.isfinite().sum(dim=1)


@dataclass(frozen=True)
class ScoreRectangle:
    """Queries, and some candidates that they are compared with."""

    scores: ScoreTiles
    candidates: Candidates
    """who is excluded; indices are those of the scores"""
    rows: Sequence[Block]
    columns: Sequence[Block]
    both: bool
    """each tile serves both its sides"""
    numbers: tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]] | None = None
    """where rows repeat: the same number for equal ones"""
    place: int = 0
    """of this rectangle among those of one way through all pairs"""

    @property
    def of_one_set(self) -> bool:
        """Rows and columns are the same blocks, and each pair of these is to be met once."""
        return self.both and self.rows is self.columns

    @property
    def distinct_pairs(self) -> int:
        """Pairs of entries."""
        return sum(map(len, self.rows)) * sum(map(len, self.columns))


def largest_class(candidates: Candidates) -> int:
    """Gallery items of the largest class that has a query."""
    in_class = candidates.gallery_start.diff()[candidates.query_class]
    return int(in_class.max()) if len(in_class) else 0


def block_positives(
    block: Block, *, weighted: bool, rows: slice = slice(None)
) -> tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]:
    """The keys of the relevant pairs of some rows, and the number of pairs each stands for where that is not one."""
    assert block.counts is not None
    thresholds = block.counts.thresholds[rows]
    valid = thresholds.isfinite()
    weights = block.weight[rows, None].expand_as(valid)[valid] if weighted else None
    return thresholds[valid], weights
