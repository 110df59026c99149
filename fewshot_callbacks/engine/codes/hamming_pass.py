"""Binary codes: packed to bits, compared by the number of bits in which they differ, ranked only from counts.

There are only as many distances as bits, and so nothing has to be sorted or compared with thresholds: how many relevant and
how many other candidates are at each distance is all that ranks, ties and operating points need. The tie-aware metrics of
codes follow from this histogram in closed form (He, Cakir, Adel Bargal and Sclaroff, "Hashing as tie-aware learning to
rank", CVPR 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.codes.packing import HammingScores
from fewshot_callbacks.engine.options import Progress, compiled_kernels, current_options
from fewshot_callbacks.engine.pooled.bins import ScoreHistogram, ThresholdBins
from fewshot_callbacks.engine.pooled.intervals import Ints, from_above
from fewshot_callbacks.engine.pooled.refine import OpenQuestions
from fewshot_callbacks.engine.pooled.tally import Located
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.engine.threads import Task, run_tasks


class HammingPass:
    """One pass over all pairs of codes, with the methods of `RankingPass`.

    Args:
        scores: The codes.
        candidates: Who may be retrieved.
        memory_bytes: Budget beyond the codes.
        progress: Called with the pairs that are done and the pairs that there are.
        processes: Who else takes some of the queries past the whole gallery.
    """

    precision = None
    """of products, which are not made"""

    def __init__(
        self,
        scores: HammingScores,
        candidates: Candidates,
        memory_bytes: int,
        progress: Progress | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.scores, self.candidates, self.memory_bytes = scores, candidates, memory_bytes
        self.progress, self.processes = progress, processes

    @property
    def distinct_rows(self) -> int:
        """Different codes of the gallery."""
        return len(np.unique(self.scores.gallery.words.numpy(), axis=0))

    def run(self, counts: HammingCounts | None = None) -> Iterator[RankBlock]:
        """Pass over all pairs once and yield the ranks, some queries at a time.

        Args:
            counts: Counts all pairs, regardless of the query.
        """
        candidates, queries, done = self.candidates, self.scores.queries, 0
        order, classes = candidates.query_order.numpy(), candidates.query_class.numpy()
        starts = candidates.gallery_start.numpy()
        most = int((starts[classes + 1] - starts[classes]).max()) if len(classes) else 0
        # counters and sums at each distance; ranks and metrics
        per_query = 64 * (queries.bits + 1) + 160 * (most + 1)
        rows = int(max(1, min(2**14, self.memory_bytes // 4 // per_query)))
        gallery_order = candidates.gallery_order.numpy()
        gallery = np.ascontiguousarray(self.scores.gallery.words.numpy()[gallery_order].T)
        first, last = self._ranges()
        codes = [(query.numpy(), item.numpy()[gallery_order]) for query, item in candidates.exclusions]
        for start in range(0, len(order), rows):
            some = order[start : start + rows]
            of_block = classes[start : start + rows]
            found, relevant = (np.zeros((len(some), queries.bits + 1), np.int32) for _ in range(2))
            excluded = np.array([query[some] for query, _ in codes], np.int64).reshape(len(codes), len(some))
            excluding = np.array([item for _, item in codes], np.int64).reshape(len(codes), gallery.shape[1])
            self._count(
                queries.words.numpy()[some], gallery, first[of_block], last[of_block], starts[of_block],
                starts[of_block + 1], excluded, excluding, found, relevant,
            )  # fmt: skip
            negatives = found - relevant
            if counts is not None:
                counts.add(relevant, negatives)
            done += int((last[of_block] - first[of_block]).sum())
            if self.progress is not None:
                self.progress(done, candidates.pairs)
            yield _ranks(torch.from_numpy(some), torch.from_numpy(relevant), torch.from_numpy(negatives))

    def release(self) -> None:
        """Do nothing: little is held."""

    def best_matches(self) -> None:
        """Return None: for codes there is nothing to gain from ranking the best match only."""

    def _ranges(self) -> tuple[Ints, Ints]:
        """Return for each class the range of the gallery that its queries search: the classes of its part."""
        candidates = self.candidates
        starts = candidates.gallery_start.numpy()
        classes = len(starts) - 1
        if candidates.part is None:
            return np.zeros(classes, np.int64), np.full(classes, starts[-1])
        part = candidates.part.numpy()  # ascending
        return starts[np.searchsorted(part, part)], starts[np.searchsorted(part, part, side="right")]

    def _count(self, *arrays: NDArray[Any]) -> None:
        """Fill the counters, some queries on each thread."""
        per_query, whole = {0, 2, 3, 4, 5, 8, 9}, {1, 7}
        rows = len(arrays[0])

        def part(some: slice) -> list[NDArray[Any]]:
            return [
                array[some]
                if number in per_query
                else array
                if number in whole
                else np.ascontiguousarray(array[:, some])
                for number, array in enumerate(arrays)
            ]

        if compiled_kernels() is None:
            for start in range(0, rows, 64):
                _count_in_torch(self.scores.queries.bits, *part(slice(start, start + 64)))
            return
        from fewshot_callbacks.engine.codes.hamming_kernel import count_distances  # noqa: PLC0415 - needs numba

        def work(some: slice, _: None) -> None:
            count_distances(*part(some))

        threads = current_options().threads or torch.get_num_threads()
        size = max(16, math.ceil(rows / (8 * threads)))
        tasks = [Task(frozenset(), partial(work, slice(start, start + size)), 1) for start in range(0, rows, size)]
        run_tasks(tasks, [None] * min(threads, len(tasks)), lambda _: None)


class HammingCounts:
    """Counts of relevant and irrelevant pairs at each Hamming distance, with the methods of `FirstCounts`.

    Args:
        hamming_pass: The pass.
    """

    def __init__(self, hamming_pass: HammingPass) -> None:
        self._pass, self.scores = hamming_pass, hamming_pass.scores
        self.relevant, self.negatives = np.zeros((2, self.scores.queries.bits + 1), np.int64)

    def run(self) -> Iterator[RankBlock]:
        """Run the pass, and yield its ranks; all pairs are counted when it has ended."""
        yield from self._pass.run(self)
        self.relevant, self.negatives = self._pass.processes.summed(np.stack([self.relevant, self.negatives]))

    def add(self, relevant: NDArray[Any], negatives: NDArray[Any]) -> None:
        """Count the pairs of some queries, by distance."""
        self.relevant += relevant.sum(axis=0, dtype=np.int64)
        self.negatives += negatives.sum(axis=0, dtype=np.int64)

    def bins(self, closer: ThresholdBins | None = None) -> ThresholdBins:
        """Return each distance at which there are relevant pairs as a single score; nothing is known closer."""
        relevant, negatives = self.relevant[::-1], self.negatives[::-1]  # ascending scores
        held = relevant > 0
        scores = np.arange(-len(relevant) + 1, 1, dtype=np.float64)[held]
        accepted = from_above(negatives)[held]
        return ThresholdBins(
            low=scores,
            high=scores,
            single=np.ones(len(scores), bool),
            positives=relevant[held],
            tp=from_above(relevant)[held],
            fewest_fp=accepted,
            most_fp=accepted,
            tied=negatives[held],
            relevant=int(relevant.sum()),
            negatives=int(negatives.sum()),
        )

    def histogram(self) -> ScoreHistogram:
        """Return all pairs by their scores, a bin for each distance."""
        scores = np.arange(-len(self.relevant) + 1, 2, dtype=np.float64)
        return ScoreHistogram(scores, self.relevant[::-1], self.negatives[::-1])

    def accepted(self, score: float) -> tuple[int, int]:
        """Return the true and false positives at a threshold."""
        within = np.arange(len(self.relevant)) <= -score
        return int(self.relevant[within].sum()), int(self.negatives[within].sum())

    def locate(self, rank: int) -> Located:
        """Return the score of the negative that `rank - 1` others follow from above."""
        reached = np.cumsum(self.negatives)
        distance = int(np.searchsorted(reached, rank))
        return Located(-distance, -distance, int(reached[distance]), int(reached[distance] - self.negatives[distance]))

    def count_exactly(self, questions: OpenQuestions) -> tuple[HammingCounts, bool]:
        """Return these counts, which are exact."""
        return self, False


def _ranks(
    queries: Int[Tensor, "queries"], relevant: Int[Tensor, "queries levels"], negatives: Int[Tensor, "queries levels"]
) -> RankBlock:
    """The ranks of the relevant items, from the number of items at each distance."""
    # ascending scores: the farthest first
    relevant, negatives = relevant.flip(1).long(), negatives.flip(1).long()
    so_far = relevant.cumsum(1)
    number = so_far[:, -1]
    width = int(number.max()) if len(number) else 0
    column = torch.arange(width).expand(len(queries), width).contiguous()
    level = torch.searchsorted(so_far, column, right=True).clamp(max=relevant.shape[1] - 1)
    through = so_far.gather(1, level)
    above = negatives.sum(1, keepdim=True) - negatives.cumsum(1)
    below, above, tied = through - relevant.gather(1, level), above.gather(1, level), negatives.gather(1, level)
    return RankBlock.of_order(queries, number, below, through, above, tied)


def _count_in_torch(
    bits: int,
    queries: NDArray[Any],
    gallery: NDArray[Any],
    first: Ints,
    last: Ints,
    begin: Ints,
    end: Ints,
    excluded: Ints,
    excluding: Ints,
    counts: NDArray[Any],
    relevant: NDArray[Any],
) -> None:
    """`hamming_kernel.count_distances` in plain PyTorch: the product of codes of -1 and +1 is bits - 2 distance."""

    def signs(words: NDArray[Any]) -> Tensor:
        unpacked = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :bits]
        return torch.from_numpy(unpacked).float().mul_(2).sub_(1)

    left, bounds = signs(queries), [torch.from_numpy(array)[:, None] for array in (first, last, begin, end)]
    for start in range(0, gallery.shape[1], 4096):
        part = slice(start, start + 4096)
        distance = (
            (bits - left @ signs(np.ascontiguousarray(gallery[:, part].T)).T).div_(2).round_().long()
        )  # whole numbers, which float32 holds
        position = torch.arange(start, start + distance.shape[1])
        candidate = (position >= bounds[0]) & (position < bounds[1])
        for of_query, of_item in zip(excluded, excluding, strict=True):
            candidate &= torch.from_numpy(of_query)[:, None] != torch.from_numpy(of_item[part])
        for table, chosen in (
            (counts, candidate),
            (relevant, candidate & (position >= bounds[2]) & (position < bounds[3])),
        ):
            found = torch.zeros(table.shape, dtype=torch.int32).scatter_add_(1, distance, chosen.to(torch.int32))
            np.add(table, found.numpy(), out=table)
