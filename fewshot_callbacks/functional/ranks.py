"""The pass: for each relevant item of each query, how many candidates come before it, in bounded memory.

A rank is a count, so nothing is sorted and no row of scores is kept. The relevant keys of a query are its thresholds;
tiles of estimates stream past and are compared with them. Where an estimate lies closer to a threshold than its proved
error, a more exact rung decides (see `similarity`). The counts therefore depend on the vectors alone: not on the size
of the tiles, the threads, the device or the order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.functional.candidates import Candidates, row_numbers
from fewshot_callbacks.functional.kernels import Counts, count_pairs, count_tile
from fewshot_callbacks.functional.similarity import DOUBLE, EXACT, SINGLE, ScoreTiles

Progress = Callable[[int, int], None]
"""Called with the number of pairs that are done and the number that there are."""

MANY_OPEN = 0.002
"""Share of a tile's pairs from which a float64 product of the whole tile is cheaper than their keys one by one."""

MANY_KEYS = 0.01
"""Share of a tile's pairs from which the exact product of the whole tile is cheaper than their keys one by one."""


@dataclass(frozen=True)
class RankBlock:
    """The ranks of the relevant items of some queries. Rows are queries; columns beyond `relevant` are not valid.

    Relevant items stand in ascending order of their keys. `negatives_*` count candidates of other classes.
    """

    queries: Int[Tensor, "queries"]
    """index of each query"""
    relevant: Int[Tensor, "queries"]
    """number of relevant candidates of each query"""
    valid: Bool[Tensor, "queries columns"]
    negatives_above: Int[Tensor, "queries columns"]
    """negatives with a strictly larger key"""
    negatives_tied: Int[Tensor, "queries columns"]
    """negatives with an equal key"""
    relevant_above: Int[Tensor, "queries columns"]
    """relevant items with a strictly larger key"""
    relevant_tied: Int[Tensor, "queries columns"]
    """relevant items with an equal key, this one included"""
    place_in_tie: Int[Tensor, "queries columns"]
    """1 ... relevant_tied: a number for this item among those equal to it"""


class Tile(NamedTuple):
    """Estimated keys of some queries against some negatives; -inf where the pair is no negative candidate."""

    rows: Int[Tensor, "queries"]
    """indices of the queries"""
    columns: Int[Tensor, "candidates"]
    """indices of the gallery items"""
    estimates: Float[Tensor, "queries candidates"]
    error: Float[Tensor, "queries"]
    weights: Int[Tensor, "candidates"] | None
    """how many equal items of one class each column stands for"""
    exact: bool
    """the estimates are the keys themselves"""


@runtime_checkable
class Observer(Protocol):
    """Something that looks at all pairs as they pass."""

    def relevant(self, keys: Float[Tensor, "pairs"]) -> None:
        """See the keys of relevant pairs."""

    def tile(self, tile: Tile) -> None:
        """See a tile of negatives."""

    @property
    def rung(self) -> int:
        """How exact the estimates must be, at least."""


@dataclass(frozen=True)
class TileSize:
    """How much of the matrix of all pairs is looked at at once."""

    queries: int
    gallery: int


def choose_tile_size(memory_bytes: int, dim: int, relevant: int) -> TileSize:
    """The tile that fits the budget.

    A quarter of it goes to the counters of the queries (160 bytes for each relevant item), half to the tile
    (48 bytes for each pair) and a quarter to the operands of the product (24 bytes for each component).
    """
    queries = max(1, min(2048, memory_bytes // 4 // (160 * (relevant + 1))))
    gallery = min(memory_bytes // 2 // (48 * queries), memory_bytes // 4 // (24 * dim), 2**23 // queries)
    return TileSize(queries, max(16, min(16384, gallery)))


class RankingPass:
    """One way through all pairs of queries and gallery.

    Args:
        tiles: the scores.
        candidates: who may be retrieved.
        memory_bytes: budget for everything beyond the embeddings themselves.
        progress: called now and then with the pairs that are done and the pairs that there are.
    """

    def __init__(
        self, tiles: ScoreTiles, candidates: Candidates, memory_bytes: int, progress: Progress | None = None
    ) -> None:
        self.scores, self.candidates, self.memory_bytes = tiles, candidates, memory_bytes
        self._progress = progress
        self._first_rung = SINGLE
        self._repeats = False
        self._find_repeats()
        self.pairs = len(candidates.query_order) * len(candidates.gallery_order)
        self.pairs_done, self.pairs_total = 0, self.pairs

    def _find_repeats(self) -> None:
        """Let one column stand for all equal items of a class, where there are enough of them to matter."""
        candidates = self.candidates
        self._entries, self._entry_class = candidates.gallery_order, candidates.gallery_class
        self._weights: Tensor | None = None
        numbers = row_numbers(self.scores.gallery)
        self.distinct_rows = rows = int(numbers.max()) + 1
        if rows > 0.9 * len(numbers):
            return
        self._repeats = True
        self._gallery_number = numbers
        same_set = self.scores.queries is self.scores.gallery
        self._query_number = numbers if same_set else row_numbers(self.scores.queries)
        if candidates.across_classes:
            return
        key = candidates.gallery_class * rows + numbers[candidates.gallery_order]
        _, entry, weights = key.unique(return_inverse=True, return_counts=True)
        first = torch.full_like(weights, len(key)).scatter_reduce_(
            0, entry, torch.arange(len(key), device=key.device), "amin"
        )
        self._entries, self._entry_class = candidates.gallery_order[first], candidates.gallery_class[first]
        self._weights = weights

    # ---------------------------------------------------------------------------------------------------------- walking

    def blocks(self) -> Iterator[range]:
        """Runs of places of queries, each small enough for its counters, together all queries."""
        start, queries = 0, len(self.candidates.query_order)
        while start < queries:
            # classes are ordered by size: the last query of the block has the most relevant items
            stop = min(start + 2048, queries)
            while stop - start > (fitting := self._rows_that_fit(stop - 1)):
                stop = start + max(fitting, (stop - start) // 2)
            yield range(start, stop)
            start = stop

    def _rows_that_fit(self, place: int) -> int:
        query_class = self.candidates.query_class[place]
        relevant = self.candidates.gallery_start[query_class + 1] - self.candidates.gallery_start[query_class]
        return choose_tile_size(self.memory_bytes, self.scores.dim, int(relevant)).queries

    def relevant_keys(self, block: range) -> Float[Tensor, "queries columns"]:
        """The keys of each query's relevant candidates, ascending, with +inf behind the last."""
        candidates, device = self.candidates, self.scores.device
        query_class = candidates.query_class[block.start : block.stop]
        present, rows_of = query_class.unique_consecutive(return_counts=True)
        starts = candidates.gallery_start[present].tolist()
        widths = candidates.gallery_start.diff()[present].tolist()
        thresholds = torch.full((len(block), max(widths, default=0)), torch.inf, dtype=torch.float64, device=device)
        place = block.start
        shapes = zip(rows_of.tolist(), widths, starts, strict=True)
        runs = ((shape, list(run)) for shape, run in groupby(shapes, key=lambda entry: entry[:2]))
        for (rows, width), run in runs:
            first, blocks = run[0][2], len(run)
            if width:
                for keys, offset in self._class_blocks(place, first, blocks, rows, width):
                    thresholds[place - block.start + offset : place - block.start + offset + len(keys), :width] = keys
            place += blocks * rows
        return thresholds.sort(dim=1).values

    def _class_blocks(
        self, place: int, first: int, blocks: int, rows: int, width: int
    ) -> Iterator[tuple[Float[Tensor, "queries columns"], int]]:
        """Keys of queries x gallery of classes of one shape that follow each other; excluded pairs are +inf.

        Yields a part of the rows and where it begins.
        """
        query_order, gallery_order = self.candidates.query_order, self.candidates.gallery_order
        per_vector = 8 * self.scores.dim * 8  # a few float64 slices of each vector
        at_once = max(1, self.memory_bytes // 4 // (per_vector * (rows + width) + 32 * rows * width))
        if at_once > 1 or blocks > 1:
            for block in range(0, blocks, at_once):
                some = min(at_once, blocks - block)
                queries = query_order[place + block * rows :][: some * rows].view(some, rows)
                gallery = gallery_order[first + block * width :][: some * width].view(some, width)
                keys = self.scores.batched_keys(queries, gallery)
                excluded = self.candidates.excluded(queries.unsqueeze(2), gallery.unsqueeze(1))
                yield keys.masked_fill_(excluded, torch.inf).flatten(0, 1), block * rows
            return
        columns_at_once = max(16, self.memory_bytes // 8 // per_vector)
        rows_at_once = max(1, min(columns_at_once, self.memory_bytes // 8 // (32 * width)))
        for row in range(0, rows, rows_at_once):
            queries = query_order[place + row : place + min(row + rows_at_once, rows)]
            parts = []
            for column in range(0, width, columns_at_once):
                gallery = gallery_order[first + column : first + min(column + columns_at_once, width)]
                excluded = self.candidates.excluded(queries.unsqueeze(1), gallery.unsqueeze(0))
                parts.append(self.scores.keys(queries, gallery).masked_fill_(excluded, torch.inf))
            yield torch.cat(parts, dim=1), row

    def tiles(self, block: range, relevant: int, rung: int) -> Iterator[Tile]:
        """The tiles of a block of queries against all negatives of the gallery, at this rung or a more exact one."""
        rows = self.candidates.query_order[block.start : block.stop]
        row_class = self.candidates.query_class[block.start : block.stop]
        size = choose_tile_size(self.memory_bytes, self.scores.dim, relevant)
        share = len(self.candidates.gallery_order) / len(self._entries)
        for start in range(0, len(self._entries), size.gallery):
            columns = self._entries[start : start + size.gallery]
            column_class = self._entry_class[start : start + size.gallery]
            rung_now = max(rung, self._first_rung)
            estimates, error = self.scores.tile(rows, columns, rung_now)
            if bool(column_class[0] <= row_class[-1]) and bool(column_class[-1] >= row_class[0]):
                estimates.masked_fill_(row_class[:, None] == column_class[None, :], -torch.inf)
            if self.candidates.across_classes:
                estimates.masked_fill_(self.candidates.excluded(rows[:, None], columns[None, :]), -torch.inf)
            weights = None if self._weights is None else self._weights[start : start + size.gallery]
            yield Tile(rows, columns, estimates, error, weights, exact=rung_now == EXACT)
            self.pairs_done += round(len(rows) * len(columns) * share)
            if self._progress is not None:
                self._progress(min(self.pairs_done, self.pairs_total), self.pairs_total)

    def keys_of(self, tile: Tile, rows: Int[Tensor, "pairs"], columns: Int[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
        """The keys of some pairs of a tile, by the cheapest exact way."""
        if tile.exact:
            return tile.estimates[rows, columns]
        query, gallery = tile.rows[rows], tile.columns[columns]
        back: Tensor | None = None
        if self._repeats:
            width = int(self._gallery_number.max()) + 1
            pair = self._query_number[query] * width + self._gallery_number[gallery]
            distinct, back = pair.unique(return_inverse=True)
            first = torch.full_like(distinct, len(pair)).scatter_reduce_(
                0, back, torch.arange(len(pair), device=pair.device), "amin"
            )
            query, gallery = query[first], gallery[first]
            rows, columns = rows[first], columns[first]
        if len(query) > MANY_KEYS * tile.estimates.numel():
            keys = self.scores.keys(tile.rows, tile.columns)[rows, columns]
        else:
            keys = self.scores.pair_keys(query, gallery)
        return keys if back is None else keys[back]

    # --------------------------------------------------------------------------------------------------------- counting

    def run(self, observer: Observer | None = None) -> Iterator[RankBlock]:
        """Walk over all pairs once and yield the ranks, block of queries by block."""
        for block in self.blocks():
            thresholds = self.relevant_keys(block)
            if observer is not None:
                observer.relevant(thresholds[thresholds.isfinite()])
            counts = Counts.zeros(thresholds)
            if thresholds.shape[1] or observer is not None:
                for tile in self.tiles(block, thresholds.shape[1], SINGLE if observer is None else observer.rung):
                    if observer is not None:
                        observer.tile(tile)
                    if thresholds.shape[1]:
                        self._count(counts, tile)
            else:  # no query of this block has a match, and nobody else looks at its pairs
                self.pairs_done += len(block) * len(self.candidates.gallery_order)
            yield _rank_block(self.candidates.query_order[block.start : block.stop], counts)

    def scan(self, observer: Observer) -> None:
        """Walk over all pairs once more, for an observer alone."""
        self.pairs_total += self.pairs
        for block in self.blocks():
            thresholds = self.relevant_keys(block)
            observer.relevant(thresholds[thresholds.isfinite()])
            for tile in self.tiles(block, thresholds.shape[1], observer.rung):
                observer.tile(tile)

    def _count(self, counts: Counts, tile: Tile) -> None:
        rows, columns = count_tile(counts, tile.estimates, tile.error, tile.weights)
        open_share = len(rows) / tile.estimates.numel()
        if tile.estimates.dtype == torch.float32 and open_share > MANY_OPEN:
            estimates, error = self.scores.tile(tile.rows, tile.columns, DOUBLE)
            weights = None if tile.weights is None else tile.weights[columns]
            still = count_pairs(counts, rows, estimates[rows, columns], error, weights)
            rows, columns = rows[still], columns[still]
        if len(rows):
            weights = None if tile.weights is None else tile.weights[columns]
            counts.add_keys(rows, self.keys_of(tile, rows, columns), weights)
        if open_share > 0.5 and not self._repeats:  # the next tile is likely to be as close: start one rung higher
            self._first_rung = min(self._first_rung + 1, EXACT)


def _rank_block(queries: Tensor, counts: Counts) -> RankBlock:
    thresholds = counts.thresholds
    valid = thresholds.isfinite()
    relevant = valid.sum(dim=1)
    if thresholds.shape[1]:
        below = torch.searchsorted(thresholds, thresholds)
        not_above = torch.searchsorted(thresholds, thresholds, right=True).minimum(relevant[:, None])
    else:
        below = not_above = torch.zeros_like(thresholds, dtype=torch.int64)
    better = counts.better()
    column = torch.arange(thresholds.shape[1], device=thresholds.device)
    return RankBlock(
        queries=queries,
        relevant=relevant,
        valid=valid,
        negatives_above=better,
        negatives_tied=counts.better_or_tied() - better,
        relevant_above=relevant[:, None] - not_above,
        relevant_tied=not_above - below,
        place_in_tie=column - below + 1,
    )
