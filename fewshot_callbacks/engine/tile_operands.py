"""The operands of tiles: they are computed once and cached, or recomputed for each tile.

An `Estimates` object owns the cached float operands. Operands in int8 belong to the `Vectors` until `free_int8_operands`,
because the error bounds of the vectors depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

from fewshot_callbacks.engine.backends import TileBackend
from fewshot_callbacks.engine.operand_rows import OperandRows
from fewshot_callbacks.engine.operands import Operand
from fewshot_callbacks.engine.options import Precision
from fewshot_callbacks.engine.vectors import Vectors

# Returns the operand of items of a chunk, given their positions in the chunk and the room of the calling thread.
ItemRows = Callable[[slice, Operand | None], Operand]


@runtime_checkable
class TileOperands(Protocol):
    """The operands of all tiles. Each tile takes a slice of their rows."""

    def new_room(self, rows: int) -> Operand | None:
        """Return an operand in which one thread recomputes a number of rows; None if no operand is recomputed."""

    def query_rows(self, rows: slice, room: Operand | None) -> Operand:
        """Return the operand of queries, which may be written into the room of the calling thread."""

    def items_of(self, vectors: Vectors) -> ItemRows:
        """Return a function that returns the operand of items of a chunk.

        Args:
            vectors: The vectors of the chunk.
        """

    def in_float16(self) -> TileOperands | None:
        """Return the same operands in float16, if they can be converted; None if they have to be computed."""


def tile_operands(vectors: Vectors, precision: Precision, backend: TileBackend, *, cached: bool) -> TileOperands:
    """Return the operands of the tiles of vectors.

    Args:
        vectors: Queries and gallery.
        precision: Precision of the products.
        backend: Multiplies them.
        cached: Whether they are computed once and kept in memory. This is necessary for int8.
    """
    if not cached:
        return RecomputedOperands(vectors, precision, backend)
    queries = backend.place(vectors.query_rows.operand(precision))
    items = queries
    if vectors.item_rows is not vectors.query_rows:
        items = backend.place(vectors.item_rows.operand(precision))
    return CachedOperands(vectors, precision, backend, queries, items)


class CachedOperands:
    """Operands that are computed once. The operand of a chunk from disk or another process lives as long as the chunk.

    Args:
        vectors: Queries and gallery.
        precision: Precision of the products.
        backend: Multiplies them.
        queries: The operand of all queries.
        items: The operand of all items in memory; the same object if one operand serves as both.
    """

    def __init__(
        self, vectors: Vectors, precision: Precision, backend: TileBackend, queries: Operand, items: Operand
    ) -> None:
        self._vectors = vectors
        self._precision: Precision = precision
        self._backend = backend
        self._queries = queries
        self._items = items

    def new_room(self, rows: int) -> None:
        """Return nothing: no operand is recomputed."""

    def query_rows(self, rows: slice, room: Operand | None) -> Operand:
        """Return the operand of queries."""
        return self._queries.take(rows)

    def items_of(self, vectors: Vectors) -> ItemRows:
        """Return a function that returns the operand of items of a chunk, computed first if it is not cached."""
        in_memory = vectors is self._vectors
        items = self._items if in_memory else self._backend.place(vectors.item_rows.operand(self._precision))

        def item_rows(rows: slice, room: Operand | None) -> Operand:
            return items.take(rows)

        return item_rows

    def in_float16(self) -> CachedOperands:
        """Return the same operands in float16. One operand that serves as both stays one."""
        queries = Operand(self._queries.rows.half())
        items = queries if self._items is self._queries else Operand(self._items.rows.half())
        return CachedOperands(self._vectors, "float16", self._backend, queries, items)


class RecomputedOperands:
    """Operands that are computed for each tile, in the room of a thread.

    Args:
        vectors: Queries and gallery.
        precision: Precision of the products: a float type.
        backend: Multiplies them.
    """

    def __init__(self, vectors: Vectors, precision: Precision, backend: TileBackend) -> None:
        self._queries = vectors.query_rows
        self._precision: Precision = precision
        self._backend = backend

    def new_room(self, rows: int) -> Operand:
        """Return an operand in which one thread recomputes a number of rows."""
        return self._queries.new_operand(rows, self._precision)

    def query_rows(self, rows: slice, room: Operand | None) -> Operand:
        """Return the operand of queries, in a room if there is one."""
        return self._compute(self._queries, rows, room)

    def items_of(self, vectors: Vectors) -> ItemRows:
        """Return a function that returns the operand of items of a chunk, in a room if there is one."""
        return partial(self._compute, vectors.item_rows)

    def in_float16(self) -> None:
        """Return nothing: there is no operand to convert."""

    def _compute(self, side: OperandRows, rows: slice, room: Operand | None) -> Operand:
        number = rows.stop - rows.start
        if room is None:
            room = self.new_room(number)
        computed = room.take(slice(0, number))
        side.fill(rows, computed)
        return self._backend.place(computed)
