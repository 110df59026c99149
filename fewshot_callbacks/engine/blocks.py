"""Blocks of queries and of gallery items, and the rectangles of the score matrix that they span."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.scores.products import ScoreTiles

POSITIVE_BYTES = 500
"""Bytes of the budget for each relevant pair whose score is handed on at once; each takes about 60 bytes meanwhile."""


@dataclass(frozen=True)
class Block:
    """A block of rows (or columns) of the score matrix, sorted by class.

    Equal vectors of one class share one row; `weight` counts them. A block of queries has `counts`; one that is only
    searched has none.
    """

    first: int
    """position of the first row among all; -1 for a random sample, whose rows are not contiguous"""
    index: Int[Tensor, "distinct"]
    """of one of the equal vectors"""
    classes: Int[Tensor, "distinct"]
    weight: Int[Tensor, "distinct"]
    counts: Counts | None = None
    partition: int = 0
    """a block of queries only meets gallery blocks of its own partition (Grouped Recall)"""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def relevant(self) -> Int[Tensor, "distinct"]:
        """How many relevant candidates each query has."""
        if self.counts is None:
            return torch.zeros_like(self.index)
        return self.counts.thresholds.isfinite().sum(dim=1)

    @property
    def asks(self) -> bool:
        """Whether some query of the block has a threshold."""
        return self.counts is not None and self.counts.thresholds.shape[1] > 0

    def relevant_scores(
        self, *, weighted: bool, rows: slice = slice(None)
    ) -> tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]:
        """Return the exact scores of the relevant pairs of some rows, and how many pairs each stands for (None: one)."""
        assert self.counts is not None
        thresholds = self.counts.thresholds[rows]
        valid = thresholds.isfinite()
        weights = self.weight[rows, None].expand_as(valid)[valid] if weighted else None
        return thresholds[valid], weights

    def relevant_score_chunks(
        self, memory_bytes: int, *, weighted: bool
    ) -> Iterator[tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]]:
        """Yield `relevant_scores` in chunks that fit the budget, since each score is copied several times on the way."""
        assert self.counts is not None
        rows = max(1, memory_bytes // POSITIVE_BYTES // (self.counts.thresholds.shape[1] + 1))
        for start in range(0, len(self), rows):
            yield self.relevant_scores(weighted=weighted, rows=slice(start, start + rows))


@dataclass(frozen=True)
class ScoreRectangle:
    """The scores of some blocks of queries with some blocks of candidates."""

    scores: ScoreTiles
    candidates: Candidates
    """who is excluded; indices are those of the scores"""
    rows: Sequence[Block]
    columns: Sequence[Block]
    symmetric: bool
    """each tile is counted for its rows and for its columns"""
    repeats: bool
    """some row or column stands for several equal items"""
    numbers: tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]]
    """the same number for equal queries, and for equal gallery items"""
    position: int = 0
    """sequence number within one pass; 0 is the local part"""

    @property
    def is_square(self) -> bool:
        """Rows and columns are the same blocks; each pair of them is visited once."""
        return self.symmetric and self.rows is self.columns

    @property
    def pairs(self) -> int:
        """Pairs of a row and a column."""
        return sum(map(len, self.rows)) * sum(map(len, self.columns))


def by_partition(rows: Sequence[Block], columns: Sequence[Block]) -> Iterator[tuple[list[Block], list[Block]]]:
    """Yield the blocks of each partition that has rows and columns; only these meet."""
    partitions: dict[int, tuple[list[Block], list[Block]]] = {}
    for side, blocks in enumerate((rows, columns)):
        for block in blocks:
            partitions.setdefault(block.partition, ([], []))[side].append(block)
    return ((own, others) for own, others in partitions.values() if own and others)


def pairs_of(rows: Block, columns: Block) -> int:
    """Return how many pairs of items a tile holds."""
    return int(rows.weight.sum()) * int(columns.weight.sum())
