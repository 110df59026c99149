"""Making tiles on the CPU, some on each thread, and counting them with the compiled kernels.

A thread makes the scores of a few rows with one matrix product and counts them while they are still in its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle, by_partition, pairs_of
from fewshot_callbacks.engine.budget import SHARE_OF_KEPT, table_bytes
from fewshot_callbacks.engine.cpu.counter import Kept, Space, ThresholdList, TileCounter
from fewshot_callbacks.engine.cpu.first_precision import Pilot, precision_for_recount
from fewshot_callbacks.engine.cpu.products import bytes_possible
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pooled.histogram import PooledCounts
from fewshot_callbacks.engine.pooled.record import PairRecord
from fewshot_callbacks.engine.pooled.recount import Recount
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.threads import Task, run_tasks
from fewshot_callbacks.engine.thresholds import Thresholds
from fewshot_callbacks.engine.tile_maker import Choice, Done, TileMaker


class NumbaTiles(TileMaker):
    """See the module.

    Args:
        matrix: The pairs.
    """

    def __init__(self, matrix: ScoreMatrix) -> None:
        self.budget, self.options = matrix.budget, matrix.options
        self.forget()

    def forget(self) -> None:
        """Drop cached operands and threshold tables."""
        self._kept = Kept({}, {})
        self._kept_precision: Precision | None = None

    def choose(self, matrix: ScoreMatrix, thresholds: Thresholds, pooled: PooledCounts | None) -> Choice:
        """Choose what is fastest on this data and processor, tried on a sample of all pairs."""
        return Pilot(matrix, thresholds, pooled).choose()

    def count(
        self, rectangle: ScoreRectangle, precision: Precision, pooled: PooledCounts | None, done: Done
    ) -> Precision:
        """Count the candidates of a rectangle for its queries, and all its pairs for `pooled`."""
        if precision == Precision.BYTES and not bytes_possible(rectangle.scores):
            precision = Precision.HALF  # the process that chose has another processor
        threads = self._threads(rectangle)
        spaces = [
            Space(PairRecord.nothing() if pooled is None else pooled.new_record(self.budget.threads))
            for _ in range(threads)
        ]
        counter = self._counter(rectangle, precision)

        def work(rows: Block, columns: Block, both: bool, space: Space) -> None:
            counter.count(rows, columns, both, space)
            if pooled is not None:
                space.record = space.record.compacted()

        self._run(counter, work, spaces, done)
        for space in spaces:
            if pooled is not None:
                pooled.collect(space.record, rectangle.position)
        return precision

    def recount(self, rectangle: ScoreRectangle, precision: Precision, recount: Recount, done: Done) -> None:
        """Count all pairs of a rectangle against the thresholds of `recount`."""
        precision = precision_for_recount(rectangle, precision, self.options.first_precision, recount)
        spaces = [Space(PairRecord.nothing()) for _ in range(self._threads(rectangle))]
        counters = {id(space): np.zeros((2, len(recount.thresholds) + 1), np.int64) for space in spaces}
        counter = self._counter(rectangle, precision)
        thresholds = ThresholdList.of(recount.thresholds, rectangle.scores.largest_error(precision), counter.dtype)

        def work(rows: Block, columns: Block, both: bool, space: Space) -> None:
            counter.recount(rows, columns, both, space, thresholds, counters[id(space)])

        self._run(counter, work, spaces, done)
        for hits, ties in counters.values():
            recount.add(hits, ties)

    def _threads(self, rectangle: ScoreRectangle) -> int:
        worth_it = rectangle.pairs * rectangle.scores.dim > self.options.threaded_from
        return self.budget.threads if worth_it else 1

    def _counter(self, rectangle: ScoreRectangle, precision: Precision) -> TileCounter:
        """Return a counter that keeps as many operands and tables as the budget allows."""
        if precision != self._kept_precision:
            self._kept, self._kept_precision = Kept({}, {}), precision
        budget = self.budget.free_bytes * SHARE_OF_KEPT
        for block in rectangle.rows:
            budget -= len(block) * table_bytes(0 if block.counts is None else block.counts.thresholds.shape[1])
        one_side = rectangle.is_square and rectangle.scores.similarity != "euclidean"
        items = sum(map(len, rectangle.rows)) + (0 if one_side else sum(map(len, rectangle.columns)))
        operand_bytes = items * rectangle.scores.dim * (8 if precision == Precision.FLOAT64 else 6)
        kept = Kept(
            self._kept.operands if budget >= operand_bytes else None,
            self._kept.margins if budget >= 0 else None,
        )
        return TileCounter(rectangle, precision, kept, self.options.tile_rows)

    def _run(
        self,
        counter: TileCounter,
        work: Callable[[Block, Block, bool, Space], None],
        spaces: Sequence[Space],
        done: Done,
    ) -> None:
        """Work off the tiles of a rectangle, and release what was kept of visiting items."""
        rectangle = counter.rectangle
        try:
            run_tasks(_tasks(rectangle, work, by_column=counter.kept.margins is not None), spaces, done)
        finally:
            # others will come; what is kept of the local queries stays
            visiting = {(block.first, False) for block in rectangle.columns} - {
                (block.first, False) for block in rectangle.rows
            }
            for key in visiting:
                (self._kept.margins or {}).pop(key, None)
                (self._kept.operands or {}).pop(key, None)


def _tasks(
    rectangle: ScoreRectangle, work: Callable[[Block, Block, bool, Space], None], *, by_column: bool
) -> Iterator[Task]:
    """Yield a task for each tile of a rectangle, in the order in which to begin them."""
    tiles = chain.from_iterable(
        _in_turn(rows)
        if rectangle.is_square
        else _each_with_each(rows, columns, both=rectangle.symmetric, by_column=by_column)
        for rows, columns in by_partition(rectangle.rows, rectangle.columns)
    )
    for rows, columns, both in tiles:

        def task(space: Space, rows: Block = rows, columns: Block = columns, both: bool = both) -> None:
            work(rows, columns, both, space)

        changes = {rows.first, columns.first} if both else {rows.first}
        twice = both and not (rectangle.is_square and rows.first == columns.first)
        yield Task(frozenset(changes), task, (2 if twice else 1) * pairs_of(rows, columns))


def _each_with_each(
    rows: Sequence[Block], columns: Sequence[Block], *, both: bool, by_column: bool
) -> Iterator[tuple[Block, Block, bool]]:
    """Yield all pairs of blocks of two sides.

    A thread stays with a column, whose operand it has, or else with a row, whose tables it has. Where both sides are
    counted, no two that follow each other share a block, as far as there are enough.
    """
    if both:
        most = max(len(rows), len(columns), 1)
        pairs = ((i, (i + turn) % most) for turn in range(most) for i in range(len(rows)))
        return ((rows[i], columns[j], True) for i, j in pairs if j < len(columns))
    if by_column:
        return ((row, column, False) for column in columns for row in rows)
    return ((row, column, False) for row in rows for column in columns)


def _in_turn(blocks: Sequence[Block]) -> Iterator[tuple[Block, Block, bool]]:
    """Yield all pairs of blocks of one set.

    No two that follow each other share a block, if possible: a tournament by the circle method, in each round of which
    every block meets one other.
    """
    yield from ((block, block, True) for block in blocks)
    circle: list[int | None] = [*range(len(blocks)), *([None] if len(blocks) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        for one, other in zip(circle[:half], reversed(circle[half:]), strict=True):
            if one is not None and other is not None:
                yield blocks[min(one, other)], blocks[max(one, other)], True
        circle = [circle[0], circle[-1], *circle[1:-1]]
