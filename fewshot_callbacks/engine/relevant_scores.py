"""Exact scores between each query and the gallery items of its class.

Ranks need all of them: they are the thresholds. The pooled counts need those inside a few intervals only; there an
estimate tells which, as it does for pairs of different classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, islice, pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.pooled.intervals import Floats, Ints, ScoreIntervals
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.threads import Task, run_tasks

SCREENED_ROWS, SCREENED_COLUMNS = 128, 4096
"""Rows and columns of relevant pairs that are estimated together, as long as the budget allows it."""
SCREENED_SHARE = 0.125
"""Share of the budget for these: an estimate, and room for an exact score and a copy of it."""
HANDED_ON_BYTES = 500
"""Bytes of the budget for each exact score that is handed on at once; each takes about 60 bytes meanwhile."""
MANY_NEAR = 0.25
"""Share of pairs near the intervals from which on it is cheaper to score all of them exactly."""


class RelevantScores:
    """Makes the exact scores between each query and the gallery items of its class.

    Args:
        scores: The scores.
        candidates: Who is relevant.
        memory_bytes: Budget for everything that is made on the way.
        threads: How many work on them.
        repeats: A row stands for all equal items of a class.
    """

    def __init__(
        self, scores: ScoreTiles, candidates: Candidates, memory_bytes: int, threads: int, *, repeats: bool
    ) -> None:
        self.scores, self.candidates, self.memory_bytes, self.threads = scores, candidates, memory_bytes, threads
        self.same_set = scores.queries is scores.gallery
        self.compiled = scores.compiled is not None and not repeats
        of_column = threads * (SCREENED_ROWS * (4 + 8 + 8) + 4 * scores.dim)
        self.handed_on = memory_bytes // HANDED_ON_BYTES
        self.columns = min(SCREENED_COLUMNS, max(64, int(memory_bytes * SCREENED_SHARE / of_column)))
        if self.compiled:
            self._pairs, self._gallery = scores.pairs(), candidates.gallery_order.numpy()

    def _class_scores(self, queries: Ints, first: int, start: Ints, stop: Ints, out: Floats) -> None:
        assert self.scores.compiled is not None
        self.scores.compiled.class_scores(self._pairs, queries, first, start, stop, self._gallery, self.same_set, out)
        if len(self.candidates.exclusions) > self.same_set:  # others than of the query itself
            self._exclude(queries, start, stop, np.inf, out)

    def _exclude(self, queries: Ints, start: Ints, stop: Ints, value: float, scores: NDArray[np.floating]) -> None:
        """Write a value over the scores of excluded pairs of each query and a run of the gallery in the order of classes."""
        if len(queries) and self.candidates.exclusions:
            assert self.scores.compiled is not None
            low, high = int(start.min()), int(stop.max())
            codes = self.candidates.codes(torch.from_numpy(queries), self.candidates.gallery_order[low:high])
            self.scores.compiled.exclude(*(code.numpy() for code in codes), start - low, value, scores)

    def of(
        self, queries: Int[Tensor, "queries"], classes: Int[Tensor, "queries"], first: int | None = None
    ) -> Float[Tensor, "queries columns"]:
        """Return the exact scores of each query's relevant candidates, ascending, padded with +inf.

        Args:
            queries: Indices of queries.
            classes: Their class numbers, ascending.
            first: The position of the first among all, where the others follow it.
        """
        candidates, device = self.candidates, self.scores.device
        if self.compiled:
            opening, closing = candidates.gallery_start[classes], candidates.gallery_start[classes + 1]
            found = np.empty((len(queries), int((closing - opening).max())))
            self._class_scores(queries.numpy(), -1 if first is None else first, opening.numpy(), closing.numpy(), found)
            found.sort(axis=1)
            return without_last_columns(torch.from_numpy(found))
        present, rows_of = classes.unique_consecutive(return_counts=True)
        starts = candidates.gallery_start[present].tolist()
        widths = candidates.gallery_start.diff()[present].tolist()
        thresholds = torch.full((len(queries), max(widths, default=0)), torch.inf, dtype=torch.float64, device=device)
        row = 0
        shapes = zip(rows_of.tolist(), widths, starts, strict=True)
        runs = ((shape, list(run)) for shape, run in groupby(shapes, key=lambda run: run[:2]))
        for (rows, width), run in runs:
            blocks = len(run)
            if width:
                begin = torch.tensor([start for _, _, start in run], device=device)
                own = queries[row : row + blocks * rows].view(blocks, rows)
                for part, offset in self._class_blocks(own, begin, width):
                    thresholds[row + offset : row + offset + len(part), :width] = part
            row += blocks * rows
        return without_last_columns(thresholds.sort(dim=1).values)

    def _class_blocks(
        self, queries: Int[Tensor, "blocks rows"], first: Int[Tensor, "blocks"], width: int
    ) -> Iterator[tuple[Float[Tensor, "queries columns"], int]]:
        """Yield exact scores inside classes of one shape, +inf where a pair is excluded, and the first row of each part."""
        blocks, rows = queries.shape
        gallery_order = self.candidates.gallery_order
        per_vector = 8 * self.scores.dim * 8  # a few float64 copies of each vector
        at_once = max(1, self.memory_bytes // 4 // (per_vector * (rows + width) + 32 * rows * width))
        if at_once > 1 or blocks > 1:
            # classes of about 16 MB of vectors at once, even where the budget allows more
            at_once = min(at_once, max(1, 2**22 // (per_vector * (rows + width))) * 4)
            for block in range(0, blocks, at_once):
                some = queries[block : block + at_once]
                gallery = gallery_order[first[block : block + at_once, None] + torch.arange(width, device=first.device)]
                exact = self.scores.batched_scores(some, gallery)
                excluded = self.candidates.excluded(some.unsqueeze(2), gallery.unsqueeze(1))
                yield exact.masked_fill_(excluded, torch.inf).flatten(0, 1), block * rows
            return
        columns_at_once = max(16, self.memory_bytes // 8 // per_vector)
        rows_at_once = max(1, min(columns_at_once, self.memory_bytes // 8 // (32 * width)))
        start = int(first[0])
        for row in range(0, rows, rows_at_once):
            part = queries[0, row : row + rows_at_once]
            parts = []
            for column in range(0, width, columns_at_once):
                gallery = gallery_order[start + column : start + min(column + columns_at_once, width)]
                excluded = self.candidates.excluded(part.unsqueeze(1), gallery.unsqueeze(0))
                parts.append(self.scores.exact_scores(part, gallery).masked_fill_(excluded, torch.inf))
            yield torch.cat(parts, dim=1), row

    def near(self, intervals: ScoreIntervals) -> Iterator[tuple[Float[Tensor, "scores"], Int[Tensor, "scores"]]]:
        """Yield the exact scores of all relevant pairs inside some intervals, and one for all others between two of these.

        Args:
            intervals: Of scores.

        Yields:
            Scores, and how many pairs each stands for. One that stands for others lies in the same gap as these.
        """
        low, high = (np.ascontiguousarray(ends) for ends in intervals.T)
        spaces = [np.zeros(len(low) + 1, np.int64) for _ in range(self.threads)]
        found: list[Floats] = []
        for pieces in self._pieces():
            tasks = [Task(frozenset(), partial(self._screen, found, *piece, low, high), 1) for piece in pieces]
            run_tasks(tasks, spaces[: len(tasks)], lambda _: None)
            if sum(map(len, found)) >= self.handed_on:
                yield _each_once(found)
                found.clear()
        if found:
            yield _each_once(found)
        gaps = np.sum(spaces, axis=0)
        between = np.concatenate([[-np.inf], (high[:-1] + low[1:]) / 2, [np.inf]])
        yield torch.from_numpy(between[gaps > 0]), torch.from_numpy(gaps[gaps > 0])

    def _pieces(self) -> Iterator[list[tuple[Int[Tensor, "queries"], slice]]]:
        """Yield queries of one class with the positions of some of their relevant candidates, one piece for each thread."""
        candidates = self.candidates
        starts = zip(candidates.query_start.tolist(), candidates.gallery_start.tolist(), strict=True)
        pieces = (
            (queries, slice(start, min(start + self.columns, last)))
            for (query, first), (last_query, last) in pairwise(starts)
            for start in range(first, last, self.columns)
            for queries in candidates.query_order[query:last_query].split(SCREENED_ROWS)
            if last_query > query
        )
        while some := list(islice(pieces, self.threads)):
            yield some

    def _screen(
        self, found: list[Floats], queries: Tensor, members: slice, low: Floats, high: Floats, gaps: Ints
    ) -> None:
        """Add the exact scores of some relevant pairs inside the intervals to `found`, and count the others in `gaps`."""
        assert self.scores.compiled is not None
        left = self.scores.operand(queries, Precision.FLOAT32, of_query=True)
        right = self.scores.operand(self.candidates.gallery_order[members], Precision.FLOAT32, of_query=False)
        estimates = self.scores.product(left, right, Precision.FLOAT32)  # (queries, members)
        exact = np.empty(estimates.numel())
        index = queries.numpy()
        begin, end = np.full(len(index), members.start), np.full(len(index), members.stop)
        self._exclude(index, begin, end, np.nan, estimates.numpy())
        filled, rows = self.scores.compiled.near_scores(
            estimates.numpy(), index, self._gallery[members], self.scores.error(queries, Precision.FLOAT32).numpy(),
            self._pairs, low, high, MANY_NEAR, gaps, exact,
        )  # fmt: skip
        found.append(exact[:filled].copy())
        if rows < len(index):
            rest = np.empty((len(index) - rows, members.stop - members.start))
            self._class_scores(index[rows:], -1, begin[rows:], end[rows:], rest)
            found.append(rest[rest < np.inf])


def _each_once(scores: Sequence[Floats]) -> tuple[Float[Tensor, "scores"], Int[Tensor, "scores"]]:
    joined = torch.from_numpy(np.concatenate(scores))
    return joined, torch.ones(1, dtype=torch.int64).expand(len(joined))


def without_last_columns(ordered: Float[Tensor, "queries columns"]) -> Float[Tensor, "queries fewer"]:
    """Drop the columns that are +inf in all ascending rows: with one set, the item itself is one in each row."""
    most = int(ordered.isfinite().sum(dim=1).max()) if ordered.numel() else 0
    return ordered[:, :most].contiguous()
