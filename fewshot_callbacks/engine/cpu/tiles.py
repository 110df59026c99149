"""Making the tiles on the CPU, some on each thread, and counting them with the compiled kernel.

A thread makes the scores of a few rows with one matrix product and counts them while they are still in its cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.budget import SHARE_OF_KEPT, part_rows, table_bytes, table_cells
from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.cpu import count_kernels as compiled
from fewshot_callbacks.engine.options import forced_precision
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.count import Counts
from fewshot_callbacks.engine.ranking_pass import Look, RankingPass
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.threads import Task, run_tasks

PILOT_ROWS, PILOT_COLUMNS = 128, 2048
"""A piece of the matrix of all pairs on which the first precision is chosen."""

CLOSER = 30.0
"""What looking at one pair closer costs, in float32 products of a pair."""

MANY_SURVIVE = 0.05
"""Where a screen lets more pairs than these pass, it does not pay."""

CLOSE = 0.01
"""Where more pairs than these are open, an estimate with a larger error does not pay."""

PILOT_PAIRS = 2**20
"""Below so many pairs there is nothing to choose."""

MANY_PAIRS = 2**25
"""Below so many pairs a quarter of that piece has to do."""


@runtime_checkable
class PooledLook(Protocol):
    """A `Look` that records all pairs of a tile while they are counted."""

    def pooled(self, walk: RankingPass, threads: int) -> compiled.Pooled:
        """An empty record, one for each thread."""

    def between(self, record: compiled.Pooled) -> compiled.Pooled:
        """Called after each task: make room, or leave the record as it is."""

    def absorb(self, walk: RankingPass, rectangle: ScoreRectangle, record: compiled.Pooled) -> None:
        """Take what a thread has recorded in a rectangle."""

    def narrow(self, low: float, high: float) -> None:
        """Learn that a sample, of which float64 products will be made, lies in this range of keys."""

    def expect(self, walk: RankingPass, record: compiled.Pooled, rows: Block, columns: Block) -> None:
        """Learn from a sample, before `pooled` is called again, what will be wanted."""


@runtime_checkable
class EdgesLook(Protocol):
    """A `Look` that counts all pairs against one list of keys."""

    def edges(self) -> NDArray[np.float64]:
        """The keys, ascending."""

    def share_within(self, margin: float) -> float:
        """About which share of all pairs lies no further from some key than this."""

    def add(self, hits: NDArray[np.int64], ties: NDArray[np.int64]) -> None:
        """Take the counters of a thread, as in `kernels.reference.Counts`."""


class _Operands(NamedTuple):
    single: Tensor
    half: Tensor | None

    def rows(self, part: slice) -> _Operands:
        return _Operands(self.single[part], None if self.half is None else self.half[part])


@dataclass
class _Space:
    """What a thread works in."""

    pooled: compiled.Pooled
    scores: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    operands: dict[tuple[int, bool], _Operands] = field(default_factory=dict)
    margins: dict[tuple[int, bool], compiled.Margins] = field(default_factory=dict)
    product_seconds: float = 0.0
    edge_hits: NDArray[np.int64] | None = None
    edge_ties: NDArray[np.int64] | None = None


class NumbaTiles:
    """See the module."""

    one: compiled.Side | None = None
    one_margins: compiled.Margins | None = None
    of_one_set: bool
    kept_precision: Precision | None = None

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of what was kept of the queries, from one rectangle to the next."""
        self.sides: dict[tuple[int, bool], compiled.Side] = {}
        self.kept_margins: dict[tuple[int, bool], compiled.Margins] = {}
        self.kept_operands: dict[tuple[int, bool], _Operands] = {}

    def prepare(self, walk: RankingPass, look: Look | None) -> None:
        """Choose the first precision."""
        self.ranking_pass = walk
        self._enter(walk.scores, walk.candidates, both=walk.both, of_one_set=walk.both)
        if walk.precision is None:
            walk.precision = self._choose_precision(look)

    def _enter(self, scores: ScoreTiles, candidates: Candidates, *, both: bool, of_one_set: bool) -> None:
        self.scores, self.candidates, self.both, self.of_one_set = scores, candidates, both, of_one_set
        self.pairs = scores.pairs()

    def walk(self, walk: RankingPass, rectangle: ScoreRectangle, look: Look | None, *, counting: bool = True) -> None:
        """Take the queries of a rectangle past its candidates."""
        assert walk.precision is not None
        self._enter(rectangle.scores, rectangle.candidates, both=rectangle.both, of_one_set=rectangle.of_one_set)
        blocks, columns = rectangle.rows, rectangle.columns
        edges = look if isinstance(look, EdgesLook) and not counting else None
        self.precision = walk.precision if edges is None else self._precision_for(edges)
        threads = walk.threads if rectangle.distinct_pairs * self.scores.dim > 2**24 else 1
        self.sides = {
            (block.first, of_query): self.side(block, of_query=of_query)
            for some, of_query in ((blocks, True), (columns, False))
            for block in some
        }
        if self.precision != self.kept_precision:
            self.kept_margins, self.kept_operands, self.kept_precision = {}, {}, self.precision
        budget = walk.free_bytes * SHARE_OF_KEPT
        budget -= sum(len(block) * table_bytes(self.sides[block.first, True].thresholds.shape[1]) for block in blocks)
        self.keeps_margins = budget >= 0
        # with two sets, or for distances, the two sides of a product are not the same
        self.one_operand = self.of_one_set and self.scores.similarity != "euclidean"
        items = sum(map(len, blocks)) + (0 if self.one_operand else sum(map(len, columns)))
        self.keeps_operands = budget >= items * self.scores.dim * (8 if self.precision == Precision.FLOAT64 else 6)
        observer = look if isinstance(look, PooledLook) else None
        try:
            spaces = [self._space(observer, edges) for _ in range(threads)]
            if edges is not None:
                self.one = _edge_side(edges)
                error = np.array([self.scores.largest_error(self.precision)])
                dtype = np.float64 if self.precision == Precision.FLOAT64 else np.float32
                self.one_margins = _margins(
                    self.one,
                    error,
                    dtype,
                    cells=int(min(2**21, max(2**12, 2 ** math.ceil(math.log2(8 * len(self.one.thresholds[0]) + 1))))),
                )
            if self.of_one_set:
                pairs_of_blocks = _in_turn(blocks)
            else:
                pairs_of_blocks = _each_with_each(blocks, columns, both=self.both, by_column=self.keeps_margins)
            tasks = (
                self._task(rows, some, both, observer, edges)
                for rows, some, both in pairs_of_blocks
                if rows.part == some.part
            )
            run_tasks(tasks, spaces, walk.done)
        finally:
            self.sides = {}  # they hold on to the counters
            self.one = self.one_margins = None
            self.scores, self.pairs = walk.scores, None  # and these to a guest's vectors
            guests = {(block.first, False) for block in columns} - {(block.first, False) for block in blocks}
            for key in guests:  # others will come; the queries stay
                self.kept_margins.pop(key, None)
                self.kept_operands.pop(key, None)
        for space in spaces:
            if observer is not None:
                observer.absorb(walk, rectangle, space.pooled)
            if edges is not None and space.edge_hits is not None and space.edge_ties is not None:
                edges.add(space.edge_hits, space.edge_ties)

    def _space(self, observer: PooledLook | None, edges: EdgesLook | None) -> _Space:
        threads = self.ranking_pass.threads
        space = _Space(_nothing_pooled() if observer is None else observer.pooled(self.ranking_pass, threads))
        if edges is not None:
            space.edge_hits = np.zeros(len(edges.edges()) + 1, np.int64)
            space.edge_ties = np.zeros_like(space.edge_hits)
        return space

    def _task(
        self, rows: Block, columns: Block, both: bool, observer: PooledLook | None, edges: EdgesLook | None
    ) -> Task:
        def work(space: _Space) -> None:
            if edges is not None:
                self.count_edges(rows, columns, both, space)
            else:
                self.count(rows, columns, both, space)
            if observer is not None:
                space.pooled = observer.between(space.pooled)

        changes = {rows.first, columns.first} if both else {rows.first}
        pairs = int(rows.weight.sum()) * int(columns.weight.sum())
        off_diagonal = both and not (self.of_one_set and rows.first == columns.first)
        return Task(frozenset(changes), work, 2 * pairs if off_diagonal else pairs)

    # ----------------------------------------------------------------------------------------------------------- a tile

    def side(self, block: Block, *, of_query: bool) -> compiled.Side:
        """A block as the kernel takes it."""
        counts = block.counts
        if counts is None:
            counts = Counts.zeros(torch.empty(len(block), 0, dtype=torch.float64), torch.int32)
        return compiled.Side(
            block.index.numpy(),
            block.weight.numpy(),
            block.relevant.numpy(),
            counts.thresholds.numpy(),
            counts.hits.numpy(),
            counts.ties.numpy(),
            _NO_OPERAND,
            self.scores.error(block.index, Precision.FLOAT64_OF_FLOAT32, of_query=of_query).numpy(),
        )

    def _operands(self, block: Block, space: _Space, *, of_query: bool) -> _Operands:
        key = (block.first, of_query or self.one_operand)
        if (kept := self.kept_operands.get(key)) is not None:
            return kept
        if key not in space.operands:
            if len(space.operands) > 1:
                space.operands.clear()
            precision = Precision.FLOAT32 if self.precision == Precision.HALF else self.precision
            single = self.scores.operand(block.index, precision, of_query=of_query)
            half = single[:, : self.scores.dim].to(self.scores.half) if self.precision == Precision.HALF else None
            space.operands[key] = _Operands(single, half)
            if self.keeps_operands:
                self.kept_operands[key] = space.operands.pop(key)
                return self.kept_operands[key]
        return space.operands[key]

    def _sides(self, rows: Block, columns: Block, space: _Space) -> tuple[compiled.Side, compiled.Side]:
        """Both sides of a tile with their operands."""
        return (
            self.sides[rows.first, True]._replace(operand=self._operands(rows, space, of_query=True).single.numpy()),
            self.sides[columns.first, False]._replace(
                operand=self._operands(columns, space, of_query=False).single.numpy()
            ),
        )

    def _margins(self, block: Block, side: compiled.Side, space: _Space, *, of_query: bool) -> compiled.Margins:
        key = (block.first, of_query or self.of_one_set)  # with one set both sides are the same
        if (kept := self.kept_margins.get(key)) is not None:
            return kept
        if key not in space.margins:
            if len(space.margins) > 1:
                space.margins.clear()
            error = self.scores.error(block.index, self.precision, of_query=of_query)
            space.margins[key] = _margins(
                side, error.numpy(), np.float64 if self.precision == Precision.FLOAT64 else np.float32
            )
            if self.keeps_margins:
                self.kept_margins[key] = space.margins.pop(key)
                return self.kept_margins[key]
        return space.margins[key]

    def _scores(self, left: _Operands, right: _Operands, space: _Space) -> NDArray[np.floating[Any]]:
        """(parts, rows, columns): the estimates of the first precision, to be summed over the parts."""
        started = time.perf_counter()
        rows, columns = len(left.single), len(right.single)
        if left.half is not None and right.half is not None:
            product = self._buffer(space, 1, rows, columns, self.scores.half)
            torch.mm(left.half, right.half.T, out=product[0])
            scores = self.scores.from_half(product[0], left.single, right.single).unsqueeze(0)
        else:
            components = left.single.shape[1]
            part = components if self.precision == Precision.FLOAT64 else self.scores.part
            scores = self._buffer(space, math.ceil(components / part), rows, columns, left.single.dtype)
            for number, start in enumerate(range(0, components, part)):
                some = slice(start, start + part)
                torch.mm(left.single[:, some], right.single[:, some].T, out=scores[number])
        space.product_seconds += time.perf_counter() - started
        return scores.numpy()

    @staticmethod
    def _buffer(space: _Space, parts: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        size = parts * rows * columns
        buffer = space.scores.get((parts, dtype))
        if buffer is None or len(buffer) < size:
            buffer = space.scores[parts, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(parts, rows, columns)

    def _parts(self, rows: Block, columns: Block, both: bool, space: _Space) -> Any:
        """The scores of some rows at a time, with what the kernels need to know of them."""
        left, right = (
            self._operands(block, space, of_query=of_query) for block, of_query in ((rows, True), (columns, False))
        )
        of_one_set = both and self.of_one_set
        diagonal = of_one_set and rows.first == columns.first
        spans = np.empty((len(rows), 2), np.int32)
        classes, others = rows.classes.numpy(), columns.classes.numpy()
        spans[:, 0] = 0 if of_one_set else np.searchsorted(others, classes)
        spans[:, 1] = np.searchsorted(others, classes, side="right")
        across = self.candidates.across_classes
        height = part_rows(len(columns))
        for start in range(0, len(rows), height):
            stop = min(start + height, len(rows))
            first = start if diagonal else 0  # on the diagonal, what lies left of it was seen from the other side
            scores = self._scores(
                left.rows(slice(start, stop)),
                right.rows(slice(first, None)),
                space,
            )
            if across:
                excluded = self.candidates.excluded(rows.index[start:stop, None], columns.index[None, first:])
                torch.from_numpy(scores)[0].masked_fill_(excluded, -torch.inf)
            yield scores, start, first, np.maximum(spans[start:stop] - np.int32(first), 0).astype(np.int32)

    def count(self, rows: Block, columns: Block, both: bool, space: _Space) -> None:
        """Count one tile."""
        row_side, column_side = self._sides(rows, columns, space)
        pooled = space.pooled
        if self.precision == Precision.HALF:
            row_low = self._lowest(rows, pooled, of_query=True)
            column_low = (
                self._lowest(columns, pooled, of_query=False) if both else np.full(len(columns), np.inf, np.float32)
            )
            for scores, start, first, spans in self._parts(rows, columns, both, space):
                compiled.screen(
                    scores[0], start, row_side, row_low, _from(column_side, first), column_low[first:], spans, both,
                    self.pairs, pooled,
                )  # fmt: skip
            return
        row_margins = self._margins(rows, row_side, space, of_query=True)
        column_margins = (
            self._margins(columns, column_side, space, of_query=False) if both else _NO_MARGINS[self.precision]
        )
        dtype = np.float64 if self.precision == Precision.FLOAT64 else np.float32
        cut = np.nextafter(dtype(pooled.cut), dtype(-np.inf)) if math.isfinite(pooled.cut) else dtype(np.inf)
        for scores, start, first, spans in self._parts(rows, columns, both, space):
            compiled.count(
                scores, start, row_side, row_margins, _from(column_side, first),
                _from(column_margins, first) if both else column_margins, spans, both, self.ranking_pass.repeats, self.pairs,
                pooled, cut,
            )  # fmt: skip

    def count_edges(self, rows: Block, columns: Block, both: bool, space: _Space) -> None:
        """Count one tile against the keys of an `EdgesLook`, for all its queries at once."""
        row_side, column_side = self._sides(rows, columns, space)
        for scores, start, first, spans in self._parts(rows, columns, both, space):
            compiled.count_pool(
                scores, start, row_side, _from(column_side, first), spans, both, self.pairs,
                self.one, self.one_margins, space.edge_hits, space.edge_ties,
            )  # fmt: skip

    def _lowest(self, block: Block, pooled: compiled.Pooled, *, of_query: bool) -> NDArray[np.float32]:
        """For each item an estimate that nothing of interest falls short of."""
        least = torch.full((len(block),), min(pooled.floor, pooled.cut), dtype=torch.float64)
        if block.counts is not None and block.counts.thresholds.shape[1]:
            least = least.minimum(block.counts.thresholds[:, 0])
        low = self.scores.half_low(least, block.index, of_query=of_query)
        return np.nextafter(low.numpy().astype(np.float32), np.float32(-np.inf))

    # -------------------------------------------------------------------------------------------------- the first precision

    def _choose_precision(self, look: Look | None) -> Precision:
        """What is fastest on this data and processor, tried on a sample of all pairs."""
        walk, forced = self.ranking_pass, forced_precision()
        if forced == Precision.HALF and walk.candidates.across_classes:
            forced = Precision.FLOAT32  # a screen cannot tell who is excluded
        observer = look if isinstance(look, PooledLook) else None
        nothing_here = not walk.distinct_pairs  # queries in one process, and the gallery in another
        if walk.pairs < PILOT_PAIRS or nothing_here or (forced is not None and observer is None):
            return Precision.FLOAT32 if forced is None else forced
        few = walk.pairs < MANY_PAIRS
        rows, columns = walk.sample(PILOT_ROWS // (2 if few else 1), PILOT_COLUMNS // (2 if few else 1))
        assert rows.counts is not None
        cost, record = self._try(Precision.FLOAT32, rows, columns, observer)
        if observer is not None:
            observer.expect(walk, record, rows, columns)
        if forced == Precision.FLOAT64:
            self._look_closer(rows, columns, observer)
        if forced is not None:
            return forced
        costs = {Precision.FLOAT32: cost}
        part, walk.scores.part = walk.scores.part, walk.scores.dim + 2
        if (
            record.filled[1] > CLOSE * len(rows) * len(columns)
            or self._try(Precision.FLOAT32, rows, columns, observer)[0] > cost
        ):
            walk.scores.part = part  # many small products leave fewer pairs open than one large
        if record.filled[1] > 0.05 * len(rows) * len(columns):
            costs[Precision.FLOAT64], _ = self._try(Precision.FLOAT64, rows, columns, observer)
        elif not walk.candidates.across_classes and self._survivors(rows, columns, observer) < MANY_SURVIVE:
            costs[Precision.HALF], _ = self._try(Precision.HALF, rows, columns, observer)
        precision = min(costs, key=lambda precision: costs[precision])
        if precision == Precision.FLOAT64:
            self._look_closer(rows, columns, observer)
        return precision

    def _look_closer(self, rows: Block, columns: Block, observer: PooledLook | None) -> None:
        """Where float64 products are made, let the look see a sample as finely as they tell pairs apart."""
        if (
            observer is None or self.ranking_pass.candidates.across_classes
        ):  # what is excluded would be taken for very low
            return
        assert rows.counts is not None
        estimates, _ = self.scores.tile(rows.index, columns.index, Precision.FLOAT64)
        keys = rows.counts.thresholds
        some = torch.cat([estimates[rows.classes[:, None] != columns.classes], keys[keys.isfinite()]])
        if len(some):
            observer.narrow(float(some.min()), float(some.max()))
            observer.expect(self.ranking_pass, self._try(Precision.FLOAT64, rows, columns, observer)[1], rows, columns)

    def _survivors(self, rows: Block, columns: Block, observer: PooledLook | None) -> float:
        """Share of a sample that a screen in half precision would have to look at closer."""
        left, right = (
            self.scores.operand(block.index, Precision.HALF, of_query=of_query)
            for block, of_query in ((rows, True), (columns, False))
        )
        pooled = _nothing_pooled() if observer is None else observer.pooled(self.ranking_pass, 1)
        low = torch.from_numpy(self._lowest(rows, pooled, of_query=True))
        passing = self.scores.half_product(left, right) >= low[:, None]
        passing &= rows.classes[:, None] != columns.classes
        return float(passing.count_nonzero()) / passing.numel()

    def _precision_for(self, edges: EdgesLook) -> Precision:
        """What should be fastest for counting against some keys alone, where the pairs near them are looked at closer."""
        forced = forced_precision()
        if forced is not None and not (forced == Precision.HALF and self.ranking_pass.candidates.across_classes):
            return forced

        def cost(precision: Precision) -> float:
            product = {Precision.HALF: 0.45, Precision.FLOAT32: 1.0, Precision.FLOAT64: 2.0}[precision]
            return product + CLOSER * edges.share_within(self.scores.largest_error(precision))

        return min(
            [Precision.FLOAT32, Precision.FLOAT64] + [Precision.HALF] * (self.ranking_pass.precision == Precision.HALF),
            key=cost,
        )

    def _try(
        self, precision: Precision, rows: Block, columns: Block, observer: PooledLook | None
    ) -> tuple[float, compiled.Pooled]:
        """Seconds that a sample takes at a precision, and what was recorded."""
        self.precision, self.kept_precision = precision, None
        self.kept_margins, self.keeps_margins = {}, False
        self.kept_operands, self.keeps_operands, self.one_operand = {}, False, False
        assert rows.counts is not None
        shape = (precision, self.scores.similarity, self.scores.part, len(rows), len(columns), self.scores.dim)
        for _ in range(1 if shape in _ran else 2):  # the first time may compile, also in the library of products
            some = replace(rows, counts=Counts.zeros(rows.counts.thresholds, torch.int32))
            self.sides = {(0, True): self.side(some, of_query=True), (0, False): self.side(columns, of_query=False)}
            space = _Space(_nothing_pooled() if observer is None else observer.pooled(self.ranking_pass, 1))
            started = time.perf_counter()
            self.count(some, columns, False, space)
            seconds = time.perf_counter() - started
        _ran.add(shape)
        directions = 2 if self.ranking_pass.both else 1
        return space.product_seconds + directions * (seconds - space.product_seconds), space.pooled


_ran: set[tuple[object, ...]] = set()
"""Samples of which shape have been timed in this process"""


def _margins(
    side: compiled.Side, error: NDArray[np.float64], dtype: type[np.floating[Any]], cells: int = 0
) -> compiled.Margins:
    """Tables for estimates of this dtype, as fine as the number of thresholds asks for."""
    items, relevant = side.thresholds.shape
    cells = cells or table_cells(relevant)
    margins = compiled.Margins(
        np.empty(items),
        np.empty(items, dtype),
        np.empty(items, dtype),
        np.empty((items, cells), np.int8 if relevant < 127 else np.int16 if relevant < 2**15 - 1 else np.int32),
    )
    compiled.margins(side, error, margins)
    return margins


def _no_margins(dtype: type[np.floating[Any]]) -> compiled.Margins:
    return compiled.Margins(np.empty(0), np.empty(0, dtype), np.empty(0, dtype), np.empty((0, 1), np.int16))


_NO_MARGINS = {Precision.FLOAT32: _no_margins(np.float32), Precision.FLOAT64: _no_margins(np.float64)}


_NO_OPERAND = np.empty((0, 0), np.float32)


def _nothing_pooled() -> compiled.Pooled:
    return compiled.Pooled(
        np.zeros(2, np.int64), 0.0, 1e-30, math.inf, math.inf,  # not 0: -inf times 0 is no number
        np.empty(0), np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64), np.zeros(3, np.int64),
    )  # fmt: skip


def _edge_side(edges: EdgesLook) -> compiled.Side:
    """The keys as the thresholds of one query for all pairs."""
    keys = edges.edges()
    one = np.zeros(1, np.int64)
    nothing = np.zeros((1, 1), np.int32)
    return compiled.Side(one, one + 1, one + len(keys), keys[None], nothing, nothing, _NO_OPERAND, np.zeros(1))


def _from(arrays: Any, first: int) -> Any:
    """The items of a side, or of its tables, from one on."""
    return arrays if first == 0 else type(arrays)(*(array[first:] for array in arrays))


def _each_with_each(
    rows: Sequence[Block], columns: Sequence[Block], *, both: bool, by_column: bool
) -> Iterator[tuple[Block, Block, bool]]:
    """All pairs of blocks of two sides, in the order in which to begin them.

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
    """All pairs of blocks of one set, in the order in which to begin them.

    No two that follow each other share a block, where that can be had: a tournament by the circle method, in each round of
    which every block meets one other.
    """
    yield from ((block, block, True) for block in blocks)
    places: list[int | None] = [*range(len(blocks)), *([None] if len(blocks) % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        for one, other in zip(places[:half], reversed(places[half:]), strict=True):
            if one is not None and other is not None:
                yield blocks[min(one, other)], blocks[max(one, other)], True
        places = [places[0], places[-1], *places[1:-1]]
