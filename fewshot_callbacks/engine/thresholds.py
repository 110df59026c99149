"""The thresholds of the queries: exact scores of their relevant items, over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block
from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.exchange import Exchange
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pooled.intervals import ScoreIntervals
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.ranks import BestMatches
from fewshot_callbacks.engine.relevant_scores import RelevantScores, without_last_columns
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.threads import Task, run_tasks


class Thresholds:
    """Makes the thresholds of blocks of queries.

    Args:
        matrix: The pairs.
        exchange: How the gallery of other processes is met.
        best: Rank the best match of each query alone, which is known: its score is the only threshold.
    """

    def __init__(self, matrix: ScoreMatrix, exchange: Exchange, best: BestMatches | None) -> None:
        self.matrix, self.exchange, self.best = matrix, exchange, best
        self.local = self._relevant_scores(matrix.scores, matrix.candidates)
        self.held: list[Block] | None = None
        """all blocks of queries, once they are counted, where their counters fit the budget"""

    @property
    def most(self) -> float:
        """The most thresholds that a query may have."""
        return self.matrix.everyone.most_relevant if self.best is None else 1.0

    def _relevant_scores(self, scores: ScoreTiles, candidates: Candidates) -> RelevantScores:
        matrix = self.matrix
        return RelevantScores(scores, candidates, matrix.free_bytes, matrix.threads, repeats=matrix.repeats)

    def query_blocks(self, batch: range, *, hold: bool = False) -> list[Block]:
        """Return the blocks of a batch of queries, with thresholds and empty counters; `hold` them until released."""
        if self.held is not None:
            return self.held
        bare = self.matrix.query_blocks(batch)
        blocks = [
            replace(block, counts=Counts.zeros(scores, torch.int32))
            for block, scores in zip(bare, self.of_blocks(bare), strict=True)
        ]
        if hold:
            self.held = blocks
        return blocks

    def release(self) -> None:
        """Release the blocks that are held, with their counters."""
        self.held = None

    def of_block(self, block: Block) -> Float[Tensor, "queries columns"]:
        """Return the thresholds of each query among the gallery of this process, ascending, padded with +inf."""
        if self.best is None:
            return self.local.of(block.index, block.classes, block.first if block.first >= 0 else None)
        scores, tied = self.best.scores[block.index], self.best.tied[block.index]
        column = torch.arange(int(tied.max()) if len(tied) else 0, device=scores.device)
        return torch.where(column < tied[:, None], scores[:, None], torch.inf)

    def of_blocks(self, blocks: Sequence[Block]) -> list[Float[Tensor, "queries columns"]]:
        """Return the thresholds of each query among the whole gallery, ascending, padded with +inf; collective."""
        parallel = self.local.compiled and self.best is None
        found = [[part] for part in self._each(blocks, self.of_block, parallel=parallel)]
        for visitors in self.exchange.galleries() if self.best is None else ():
            scores = self._relevant_scores(visitors.scores, visitors.candidates)
            of_visitors = self._each(blocks, partial(_sorted_scores, scores), parallel=scores.compiled)
            for parts, part in zip(found, of_visitors, strict=True):
                parts.append(part)
            del visitors, scores, of_visitors  # free the visiting vectors before the next exchange
        whole = []
        for parts in found:
            whole.append(
                without_last_columns(torch.cat(parts, dim=1).sort(dim=1).values) if len(parts) > 1 else parts[0]
            )
            parts.clear()
        return whole

    def _each(self, blocks: Sequence[Block], make: Callable[[Block], Tensor], *, parallel: bool) -> list[Tensor]:
        """Call `make` for each block, some on each thread."""
        made: list[Tensor] = [torch.empty(0)] * len(blocks)

        def fill(number: int, _: None = None) -> None:
            made[number] = make(blocks[number])

        tasks = [Task(frozenset(), partial(fill, number), 1) for number in range(len(blocks))]
        if tasks:
            run_tasks(tasks, [None] * (min(self.matrix.threads, len(tasks)) if parallel else 1), lambda _: None)
        return made

    def relevant_scores(
        self, intervals: ScoreIntervals
    ) -> Iterator[tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]]:
        """Yield the exact scores of the relevant pairs of this process's queries, in chunks; collective.

        Args:
            intervals: Inside which all are needed; between these, one may stand for others that lie in the same gap.

        Yields:
            Scores, and how many pairs each stands for (None: one).
        """
        if self.held is not None or not self.local.compiled:
            for batch in self.matrix.batches():
                for block in self.query_blocks(batch):
                    yield from block.relevant_score_chunks(self.matrix.free_bytes, weighted=self.matrix.repeats)
            return
        yield from self.local.near(intervals)
        for visitors in self.exchange.galleries():
            yield from self._relevant_scores(visitors.scores, visitors.candidates).near(intervals)
            del visitors  # free the visiting vectors before the next exchange


def _sorted_scores(scores: RelevantScores, block: Block) -> Float[Tensor, "queries columns"]:
    return scores.of(block.index, block.classes)
