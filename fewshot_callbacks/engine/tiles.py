"""The one loop over tiles of estimates, which everything else observes, and how gallery items visit the queries.

Each process numbers all items: its own first, then those of the next process, and so on. What is known of an item
beside its row (labels, identities) is known everywhere, by these numbers; rows are known of the own part and of one
visiting chunk. With one process there is one part, and nothing travels.

Two rules keep processes together. Whatever steers a collective call comes from numbers that all have. Whatever a
score is made of is that of all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine import device
from fewshot_callbacks.engine.counting import View
from fewshot_callbacks.engine.exact import Pairs
from fewshot_callbacks.engine.layout import Layout
from fewshot_callbacks.engine.options import Precision, Progress, work_off
from fewshot_callbacks.engine.relevance import Relevance
from fewshot_callbacks.engine.vectors import Floats, Operand, Vectors, scale_product
from fewshot_callbacks.journal import END, Arrays, Record, current_journal
from fewshot_callbacks.stored import spans

# In which a part travels, at least.
CHUNKS = 4


class Part(NamedTuple):
    """Some items of the gallery, whose rows are here: those of this process, or visitors."""

    # of the queries with them
    vectors: Vectors
    # number of the first item among all
    first: int
    # they are the queries, so that a tile serves its columns as well
    mutual: bool
    # the queries that meet them here; what the others meet is met in another process as well
    meets: slice
    # they are queries elsewhere, for which is counted here
    guests: bool = False


def everyone(processes: Processes, mine: NDArray[Any]) -> NDArray[Any]:
    """Return what all processes hold, in the order in which this one numbers it."""
    parts = processes.gather(mine)
    return np.concatenate(parts[processes.rank :] + parts[: processes.rank])


def visitors(
    vectors: Vectors, *, mutual: bool, travellers: Sequence[Any] = (), record: Record | None = None
) -> Iterator[Part]:
    """Yield the parts of the gallery that are not in memory, and those of all other processes; collective.

    Args:
        vectors: Of this process.
        mutual: A pair of one set is met in both processes. Of two parts the lower process meets the first half of its rows
            with the first half of the other, and the second with the second; the higher one the first with the second, and
            the second with the first: so each pair is met once, and with each visit both have as much to do.
        travellers: Who counts for visitors, as `ranks.RankCounter` does: `leave` gives what goes along with some items,
            `receive` gets ready for visitors, `counted` gives what goes back, and `add` takes what came back.
        record: Says which parts are done, and is told which are: the first in memory, then these in their order.
    """
    processes, own, resident = vectors.processes, vectors.items, len(vectors.pairs.gallery)
    rank, count, queries = processes.rank, processes.count, len(vectors.pairs.queries)
    every = processes.gather((own, vectors.pieces))
    sizes, chunks = [size for size, _ in every], max(CHUNKS, *(pieces for _, pieces in every))
    half, begun = chunks // 2, 1 if record is None else max(1, record.part)
    pieces = spans(resident, own, max(1, -(-own // chunks)))
    most = max(processes.gather(len(pieces)))
    reading = iter(vectors.read(pieces[begun - 1 :]))
    for number in range(begun, most + 1):
        if record is not None:
            record.reached(number)
        for some, values in islice(reading, 1):
            yield Part(vectors.with_gallery(values, some.start), some.start, False, slice(0, queries))
            del values  # before the next piece but one is read
    first = own
    for step in range(1, count):
        destination, source = (rank - step) % count, (rank + step) % count
        number = most + 1 + (step - 1) * chunks  # of the first visit
        left = range(min(chunks, max(0, begun - number)), chunks)
        for chunk, (some, here) in zip(left, vectors.read(_span(own, chunk, chunks) for chunk in left), strict=True):
            if record is not None:
                record.reached(number + chunk)
            along = [torch.from_numpy(table) for traveller in travellers for table in traveller.leave(some)]
            mine = [torch.from_numpy(here), *along] if some.start < some.stop else None
            theirs = processes.exchange(mine, destination, source)
            first_here, back = first + _span(sizes[source], chunk, chunks).start, None
            if theirs is not None:
                halfway, lower = _span(queries, half, chunks).start, (chunk < half) == (rank < source)
                meets = slice(0, queries) if not mutual else slice(0, halfway) if lower else slice(halfway, queries)
                values, *tables = (table.numpy() for table in theirs)
                part = Part(vectors.with_gallery(values, first_here), first_here, False, meets, bool(travellers))
                for traveller in travellers:
                    traveller.receive(part, tables)
                yield part
                back = [torch.from_numpy(counters) for traveller in travellers for counters in traveller.counted()]
                del part, values, tables, theirs  # visitors leave before others come
            if travellers:
                counted = processes.exchange(back, source, destination)
                for traveller in travellers if counted else ():
                    traveller.add(some, [counters.numpy() for counters in counted or ()])
        first += sizes[source]


def _span(items: int, chunk: int, chunks: int) -> slice:
    return slice(items * chunk // chunks, items * (chunk + 1) // chunks)


class Tile(NamedTuple):
    """Estimates of some pairs; -inf where a pair is no negative."""

    estimates: Any  # (rows, columns) an array, or a tensor where PyTorch operations count
    # the query of the first row
    row: int
    # the item of the first column, in its part
    column: int
    part: Part


@runtime_checkable
class Observer(Protocol):
    """What is told of every tile, by several threads at once."""

    @property
    def once(self) -> bool:
        """Whether a pair of one set is to be seen once, not for each of its items."""

    def space(self) -> Any:
        """Return what one thread works in."""

    def see(self, tile: Tile, space: Any) -> None:
        """Look at a tile."""


@runtime_checkable
class Resumable(Observer, Protocol):
    """An observer that goes on from what it held when a process was killed."""

    @property
    def key(self) -> Any:
        """What the state is of, briefly."""

    def state(self) -> Arrays:
        """Return what it holds, between two tiles."""

    def restore(self, arrays: Arrays) -> None:
        """Hold what `state` returned."""


@dataclass
class Estimates:
    """All pairs of some queries with the whole gallery, in tiles.

    Args:
        vectors: Both sides.
        relevance: Whose lists are masked.
        precision: Of the products.
        layout: How large everything may be.
        mutual: A tile of one set serves its columns as well.
        on: Where products are made; None: on the CPU, with compiled loops.
        progress: Called with the number of pairs done and the number of all pairs.
    """

    vectors: Vectors
    relevance: Relevance
    precision: Precision
    layout: Layout
    mutual: bool = False
    on: torch.device | None = None
    progress: Progress | None = None
    # queries and items of this process
    shape: tuple[int, int] = field(init=False)
    # of all processes; of one set whose tiles serve both sides, each once
    pairs: int = field(init=False)

    def __post_init__(self) -> None:
        self.threads, self.processes = self.vectors.threads if self.on is None else 1, self.vectors.processes
        self._masks = None if self.on is None else device.Masks(self.relevance, self.on)
        self.shape = len(self.vectors.pairs.queries), self.vectors.items
        queries, items = np.sum(self.processes.gather(self.shape), axis=0).tolist()
        self.items, self.pairs = items, queries * items // (2 if self.mutual else 1)
        self.height, self.width = self.layout.height, self.layout.width
        self.keeps = self.layout.coded if self.precision == "bytes" else self.layout.kept
        if self.precision == "float64" and not self.keeps:
            self.width = max(1, self.width // 2)
        sides = (0, -1)[: self.vectors.sides] if self.keeps else ()
        self._kept = {side: self._there(self.vectors.operand(side, self.precision)) for side in sides}
        if len(sides) == 1:
            self._kept[-1] = self._kept[0]
        self.error = self.vectors.error(self.precision)
        (self.largest_error,) = self.processes.largest([float(self.error.max(initial=0.0))])
        self._locks = [threading.Lock() for _ in range(self.shape[0] // self.height + 1)]
        self._done, self._telling = 0, threading.Lock()

    def in_precision(self, precision: Precision) -> Estimates:
        """Return the same pairs with products of another precision."""
        return self if precision == self.precision else replace(self, precision=precision)

    # ------------------------------------------------------------------------------------------------------- the pairs

    def parts(self, *, travellers: Sequence[Any] = (), record: Record | None = None) -> Iterator[Part]:
        """Yield all parts of the gallery."""
        if record is None or record.part == 0:
            yield Part(self.vectors, 0, self.mutual, slice(0, self.shape[0]))
        yield from visitors(self.vectors, mutual=self.mutual, travellers=travellers, record=record)

    def exact(self, rows: NDArray[Any], columns: NDArray[Any]) -> Floats:
        """Return the exact scores of some pairs of own queries and numbers of items; collective."""
        scores = np.empty(len(rows))
        for part in self.parts():
            here = (columns >= part.first) & (columns < part.first + len(part.vectors.pairs.gallery))
            scores[here] = part.vectors.exact(rows[here], columns[here] - part.first)
        return scores

    def sample(self, rows: Sequence[int]) -> list[NDArray[Any]]:
        """Return, for some queries, the estimates of all negatives of the own part; in float32 or float64."""
        made: list[list[NDArray[Any]]] = [[np.empty(0, np.float32)] for _ in rows]
        left = [self._rows(self.vectors, 0, slice(row, row + 1), None).rows for row in rows]
        items = len(self.vectors.pairs.gallery) if left else 0
        for column in range(0, items, self.width):
            some = slice(column, min(items, column + self.width))
            part = torch.mm(torch.cat(left), self._rows(self.vectors, -1, some, None).rows.T).cpu().numpy()
            for at, row in enumerate(rows):
                self.relevance.mask(part[at : at + 1], row, column, once=False)
                made[at].append(part[at][part[at] > -np.inf])
        return [np.concatenate(parts) for parts in made]

    # -------------------------------------------------------------------------------------------------------- the loop

    def views(self, tile: Tile) -> Iterator[tuple[View, Pairs, bool, AbstractContextManager[bool]]]:
        """Yield a tile for its rows, and, where its columns are queries as well, turned around for some of these at a time.

        With each view come the vectors, whether its queries are visitors, and their lock.
        """
        (part, pairs), (rows, columns) = (tile.part, tile.part.vectors.pairs), tile.estimates.shape
        yield View(tile.estimates, False, 0, rows, tile.row, tile.column), pairs, False, self._lock(tile.row)
        if part.mutual or part.guests:
            pairs, first = pairs.turned(), 0
            while first < columns:
                block = columns if self.on is not None else self.height - (tile.column + first) % self.height
                last = min(columns, first + block)
                lock = self._lock(tile.column + first)
                yield View(tile.estimates, True, first, last, tile.column, tile.row), pairs, part.guests, lock
                first = last

    def _lock(self, query: int) -> AbstractContextManager[bool]:
        """Return the lock of a block of queries, or visitors."""
        return self._locks[query // self.height % len(self._locks)]

    def show(self, *observers: Observer, queries: slice | None = None, told: bool = False) -> int:
        """Make every tile of some queries once and show it to each observer; return how many pairs were not masked.

        Collective. Of a set whose tiles serve both sides, each pair is counted once.

        Args:
            *observers: Each sees all tiles, several at a time.
            queries: Some of the queries; all by default.
            told: Tell how far it is.
        """
        queries = queries or slice(0, self.shape[0])
        visited = self.mutual and self.processes.count > 1
        travellers: list[Any] = [observer for observer in observers if visited and not observer.once]
        once, spaces = all(observer.once or observer in travellers for observer in observers), list[Any]()
        record = self._record(observers, queries, spaces)
        for part in self.parts(travellers=travellers, record=record):
            self._show_part(part, observers, queries, spaces, record, once=once, told=told)
            del part  # visitors leave before others come
        if record is not None:
            record.reached(END, end=True)
        return sum(int(space[0][0]) for space in spaces)

    def _record(self, observers: Sequence[Observer], queries: slice, spaces: list[Any]) -> Record | None:
        """Return where the state of a pass is written, and begin with what was written before; None without a journal."""
        journal = current_journal()
        resumable = [each for each in observers if journal is not None and isinstance(each, Resumable)]
        if journal is None or len(resumable) < len(observers):
            return None
        place = self.precision, self.height, self.width, self.mutual, self.shape, queries
        record = journal.record(repr((place, [each.key for each in resumable])))

        def state() -> Arrays:
            held = [each.state() for each in resumable]
            seen = [self._done, sum(int(space[0][0]) for space in spaces), *map(len, held)]
            return [np.array(seen), *chain.from_iterable(held)]

        record.state, arrays = state, iter(record.resumed())
        seen = next(arrays, None)
        if seen is not None:
            self._done = int(seen[0])
            spaces.append((seen[1:2],))
            for each, length in zip(resumable, seen[2:], strict=True):
                each.restore(list(islice(arrays, int(length))))
        return record

    def _show_part(
        self,
        part: Part,
        observers: Sequence[Observer],
        queries: slice,
        spaces: list[Any],
        record: Record | None,
        *,
        once: bool,
        told: bool,
    ) -> None:
        """Show the tiles of one part; threads take the `spaces` of those before, and add missing ones."""
        vectors, idle = part.vectors, list[Any]()
        columns = self._kept.get(-1) if vectors is self.vectors else None
        if columns is None and self.keeps:
            columns = self._there(vectors.operand(-1, self.precision))

        def space() -> Any:
            if idle:
                return idle.pop()
            room = () if self.keeps else tuple(map(self._room, (self.height, self.width)))
            spaces.append((np.zeros(1, np.int64), self._buffers(), room, [observer.space() for observer in observers]))
            return spaces[-1]

        def work(span: tuple[int, int, int, int], space: Any) -> None:
            (row, end, column, stop), (left_over, buffers, room, own) = span, space
            some = slice(column, stop)
            left = self._rows(self.vectors, 0, slice(row, end), room[0] if room else None)
            right = self._rows(vectors, -1, some, room[1]) if columns is None else columns.part(some)
            estimates = self._product(left, right, buffers)
            place, shape = (row, part.first + column), estimates.shape
            if self._masks is None:
                made = self.relevance.mask(estimates, *place, once=part.mutual)
            else:
                made = self._masks.write(buffers[0], shape, *place, once=part.mutual)
            met = part.meets.start <= row < part.meets.stop
            left_over += made * met
            for observer, own_space in zip(observers, own, strict=True):
                if met or not observer.once:
                    observer.see(Tile(estimates, row, column, part), own_space)
            with self._telling:
                self._done += (end - row) * (some.stop - column) * (2 if part.mutual or part.guests else 1)

        def tell() -> None:
            if told and self.progress is not None:
                total = self.shape[0] * self.items
                self.progress(min(self._done, total), total)

        tiles = self._plan(part, queries, once=once)
        for some in (tiles,) if record is None else record.spells(tiles):
            # what was counted before a kill has no room to work in
            idle[:] = [held for held in spaces if len(held) > 1]
            work_off(some, work, self.threads, space, tell)

    def _plan(self, part: Part, queries: slice, *, once: bool) -> Iterator[tuple[int, int, int, int]]:
        """Yield the rows (start, stop) and the columns (start, stop) of each tile."""
        for first, last, left, right in self.relevance.blocks(part.first, len(part.vectors.pairs.gallery)):
            rows = part.meets if once else slice(0, last)
            start, stop = max(first, queries.start, rows.start), min(last, queries.stop, rows.stop)
            # no tile has rows of two blocks of queries, each of which has a lock
            inner = range((start // self.height + 1) * self.height, stop, self.height)
            halves = {end for end in (part.meets.start, part.meets.stop) if start < end < stop}
            ends = sorted({*inner, *halves, start, max(start, stop)})
            for row, end in pairwise(ends):
                for column in range(row if part.mutual else left, right, self.width):
                    yield row, end, column, min(right, column + self.width)

    def _rows(self, vectors: Vectors, side: int, some: slice, room: Operand | None) -> Operand:
        """Return some rows of an operand, which are made in `room` if they are not kept."""
        if vectors is self.vectors and self._kept:
            return self._kept[side].part(some)
        made = (room or self._room(some.stop - some.start)).part(slice(0, some.stop - some.start))
        vectors.fill(side, some, made)
        return self._there(made)

    def _room(self, rows: int) -> Operand:
        return self.vectors.new_operand(rows, self.precision)

    def _there(self, operand: Operand) -> Operand:
        return operand if self.on is None else operand._replace(rows=operand.rows.to(self.on))

    def _buffers(self) -> tuple[Any, ...]:
        """Return what one thread makes products and estimates in."""
        room = self.height * self.width
        if self.on is not None:
            double = self.precision == "float64"
            # one more, for what has no place in a tile
            return (torch.full((room + 1,), -torch.inf, dtype=torch.float64 if double else None, device=self.on),)
        in_bytes = self.precision == "bytes"
        made = torch.int32 if in_bytes else torch.float64 if self.precision == "float64" else torch.float32
        return torch.empty(room, dtype=made), np.empty(room, np.float32) if in_bytes else None

    def _product(self, left: Operand, right: Operand, buffers: tuple[Any, ...]) -> Any:
        """Return the estimates of one tile."""
        rows, columns = len(left.rows), len(right.rows)
        out = buffers[0][: rows * columns].view(rows, columns)
        if self.on is not None:
            return device.multiply(left.rows, right.rows, out)
        multiply: Callable[..., Any] = torch._int_mm if self.precision == "bytes" else torch.mm
        made, estimates = multiply(left.rows, right.rows.T, out=out), buffers[1]
        if estimates is None:
            return made.numpy()
        estimates = estimates[: rows * columns].reshape(rows, columns)
        scale_product(made.numpy(), left.scale, left.offset, right.scale, right.offset, estimates)
        return estimates
