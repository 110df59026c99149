"""The pass: for each relevant item of each query, how many candidates come before it, in bounded memory.

A rank is a count, so nothing is sorted and no row of scores is kept. The relevant keys of a query are its thresholds;
tiles of estimates stream past and are compared with them. Where an estimate lies closer to a threshold than its proved
error, a more exact rung decides (see `similarity`). The counts therefore depend on the vectors alone: not on the size
of the tiles, the threads, the device or the order of the data.

With one set the score of a pair serves both its items, so that each tile is made once for two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.functional.candidates import Candidates, row_numbers
from fewshot_callbacks.functional.kernels.reference import Counts
from fewshot_callbacks.functional.pooled_cells import Stretches
from fewshot_callbacks.functional.processes import ALONE, Processes
from fewshot_callbacks.functional.relevant_keys import RelevantKeys
from fewshot_callbacks.functional.similarity import DOUBLE, HALF, SINGLE, ScoreTiles
from fewshot_callbacks.functional.workers import Task, available_threads, own_threads, run_tasks

Progress = Callable[[int, int], None]
"""Called with the number of pairs that are done and the number that there are."""

Rung = Literal["bfloat16", "float32", "float64"]

_RUNGS = {"bfloat16": HALF, "float32": SINGLE, "float64": DOUBLE}
_forced: list[int] = []


@contextmanager
def first_rung(rung: Rung) -> Iterator[None]:
    """Make the pass begin with products of this precision inside the block; by default it takes what is fastest.

    The results are the same; this serves tests and measurements. `"bfloat16"` stands for the half precision of the device.
    """
    if rung not in _RUNGS:
        raise ValueError(f"rung={rung!r} is unknown. Choose one of {', '.join(_RUNGS)}.")
    _forced.append(_RUNGS[rung])
    try:
        yield
    finally:
        _forced.pop()


def forced_rung() -> int | None:
    """What `first_rung` asks for."""
    return _forced[-1] if _forced else None


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


@dataclass(frozen=True)
class Panel:
    """Some entries in the order of their classes. An entry stands for all equal items of one class.

    A panel of queries has `counts`; one that is only searched has none.
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
    """a panel of queries is compared with those of the same part alone"""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def relevant(self) -> Int[Tensor, "entries"]:
        """How many relevant candidates each query has."""
        if self.counts is None:
            return torch.zeros_like(self.index)
        return self.counts.thresholds.isfinite().sum(dim=1)


@dataclass(frozen=True)
class Meeting:
    """Queries, and some candidates that they are compared with."""

    scores: ScoreTiles
    candidates: Candidates
    """who is excluded; indices are those of the scores"""
    rows: Sequence[Panel]
    columns: Sequence[Panel]
    both: bool
    """each tile serves both its sides"""
    numbers: tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]] | None = None
    """where rows repeat: the same number for equal ones"""
    place: int = 0
    """of this meeting among those of one way through all pairs"""

    @property
    def of_one_set(self) -> bool:
        """Rows and columns are the same panels, and each pair of these is to be met once."""
        return self.both and self.rows is self.columns

    @property
    def entry_pairs(self) -> int:
        """Pairs of entries."""
        return sum(map(len, self.rows)) * sum(map(len, self.columns))


@runtime_checkable
class Look(Protocol):
    """Something that looks at all pairs as they pass, whatever their query."""

    def relevant(self, keys: Float[Tensor, "pairs"], weights: Int[Tensor, "pairs"] | None) -> None:
        """See the keys of relevant pairs, each of which stands for `weights` pairs (one by default)."""


@dataclass(frozen=True)
class Layout:
    """How the matrix of all pairs is cut up, so that what is held at once fits a budget."""

    rows: int
    """queries in a panel"""
    columns: int
    """gallery entries in a panel"""
    block: int
    """queries whose counters are held at once"""
    bytes: int
    """memory that this takes, beyond the embeddings"""

    @property
    def square(self) -> bool:
        """Panels of rows are as long as those of columns."""
        return self.rows == min(self.columns, self.block)


PART_ROWS = 256
"""No more rows of a tile than these are made at once."""

SHARE_OF_PANELS = 0.25
SHARE_OF_LAYOUT = 0.6
"""Shares of the budget for what is being worked on, and for that and the counters together."""
SHARE_OF_KEPT = 0.2
"""Share of the budget for operands and tables that are kept so as not to make them anew for each tile."""
SHARE_OF_RANKS = 0.25
"""Share of the budget for ranks, and the metrics that are made of them."""
POSITIVE_BYTES = 500
"""So many times fewer relevant pairs than bytes of the budget are recorded at once; each takes about 60 bytes meanwhile."""
SHARE_OF_KEYS = 0.1
"""Share of the budget for the keys of the highest negatives."""

QUERY_BYTES, ITEM_BYTES = 300, 300
"""Of each query and gallery item: places, classes, scales, lengths, bounds of errors, and the metrics of each query.

With the smallest layout, one set of dim 8 took 1.4, 4.2, 13.3 and 16.5 MB for 1,000, 4,000, 16,000 and 20,000 items (peak
of the resident memory, Linux x86-64, one thread) where 250 bytes and `LEAST_SHARE` said 1.6, 3.9, 12 and 15 MB.
"""

PRODUCT_BYTES = 4 * 10**6
"""What a product of a tile takes inside the library that makes it, of few items no more than its result.

Without it, `tests/functional/test_memory.py` finds the smallest budgets exceeded.
"""

LEAST_ROWS = 64
"""No panel and no block has fewer queries, as long as there are so many."""
LEAST_TILE = 2**22
"""Multiplications, or what counting costs in these, below which a tile costs more to begin than to make."""
LEAST_SHARE = 0.5
"""With less than this share of what items take for everything else, beginning tiles would take most of the time: their
number grows with the square of the items."""

COUNTER_BYTES = 8 + 4 + 4
"""A threshold and two counters for each relevant item of a query."""
COPY_BYTES = 8 + 1
"""And a copy of the threshold while those of a query are sorted, which is made of all queries of a small block at once."""
RANK_BYTES = 200
"""Ranks of a relevant item of a query, a sorted copy of its score, and the metrics made of them."""


def choose_layout(
    memory_bytes: int,
    queries: int,
    gallery: int,
    dim: int,
    relevant: float,
    *,
    threads: int = 1,
    whole_tiles: bool = False,
) -> Layout:
    """The largest panels, and the most counters, that fit the budget.

    Args:
        memory_bytes: the budget, beyond the embeddings.
        queries: number of queries.
        gallery: number of gallery items.
        dim: components of an embedding.
        relevant: relevant items of a query, the mean over queries.
        threads: each works on tiles of its own.
        whole_tiles: a tile is as large as its panels, and several tables of its size are made (plain PyTorch).
    """
    per_query = COUNTER_BYTES * (relevant + 1) + 40
    free = max(0.0, memory_bytes - item_bytes(queries, gallery))
    panel_bytes = partial(_panel_bytes, dim=dim, relevant=relevant, whole_tiles=whole_tiles)
    panel = 2048
    while panel > LEAST_ROWS:
        enough_panels = panel * 3 * threads <= max(queries, gallery, 512 * threads)  # for all threads
        if enough_panels and threads * panel_bytes(panel) <= free * SHARE_OF_PANELS:
            break
        panel //= 2
    columns = panel
    working = threads * panel_bytes(panel)
    ranked = max(least_ranked(relevant), int(free * SHARE_OF_RANKS / (RANK_BYTES * (relevant + 1))))
    ranks = min(queries, panel, ranked) * RANK_BYTES * (relevant + 1)

    def fitting(working: float, per_query: float) -> int:
        return int(min(queries, max(LEAST_ROWS, (free * SHARE_OF_LAYOUT - max(working, ranks)) // per_query)))

    block = fitting(working, per_query)
    if block < queries:
        per_query += COPY_BYTES * (relevant + 1)
    # two tiles of small panels cost more to begin than one that serves both its sides saves
    tight = panel * panel * max(dim, 64) < LEAST_TILE and threads * panel_bytes(2 * panel) > free * SHARE_OF_PANELS
    if (block < queries or tight) and not whole_tiles:
        # a tile serves its rows alone: the more columns, the more often what is known of a row is used while it is at hand
        while 2 * columns <= min(8192, gallery) and (
            panel * columns * max(dim, 64) < LEAST_TILE
            or threads * panel_bytes(panel, columns=2 * columns) <= free * SHARE_OF_PANELS
        ):
            columns *= 2
        working = threads * panel_bytes(panel, columns=columns)
        block = min(block, fitting(working, per_query))
    return Layout(
        rows=min(panel, block),
        columns=columns,
        block=block,
        bytes=int(item_bytes(queries, gallery) + max(working, ranks) + block * per_query),
    )


def item_bytes(queries: int, gallery: int) -> int:
    """What an evaluation holds for each query and each gallery item, whatever its budget."""
    return min(PRODUCT_BYTES, 4 * queries * gallery) + QUERY_BYTES * queries + ITEM_BYTES * gallery


def least_bytes(
    queries: int, gallery: int, dim: int, relevant: float, *, threads: int = 1, whole_tiles: bool = False
) -> int:
    """The smallest budget that can be kept; the arguments are those of `choose_layout`."""
    items, own = item_bytes(queries, gallery), QUERY_BYTES * queries + ITEM_BYTES * gallery
    layout = choose_layout(0, queries, gallery, dim, relevant, threads=threads, whole_tiles=whole_tiles)
    return items + math.ceil(max((layout.bytes - items) / SHARE_OF_LAYOUT, own * LEAST_SHARE))


def least_ranked(relevant: float) -> int:
    """For how many queries ranks are made at once at least: for few, most of the time goes into calls."""
    return max(1, min(16, int(2**12 / (relevant + 1))))


def _panel_bytes(panel: int, dim: int, relevant: float, whole_tiles: bool, columns: int | None = None) -> float:
    """What one thread needs: the scores of some rows, in parts, operands, and tables of thresholds.

    Args:
        panel: rows.
        dim: components.
        relevant: thresholds of an item.
        whole_tiles: see `choose_layout`.
        columns: as many as rows by default, and then they have tables, too.
    """
    parts = math.ceil(dim / 128) + 2
    if whole_tiles:
        return 48 * panel * panel + 2 * panel * (8 * dim + 8 * relevant + 2200)
    # an operand in float32 and one in half precision or float64, and what the latter are made of
    of_row = 16 * dim + table_bytes(relevant)
    of_column = of_row if columns is None else 16 * dim
    columns = columns or panel
    return 4 * parts * min(part_rows(columns), panel) * columns + panel * of_row + columns * of_column


def table_cells(relevant: float) -> int:
    """Into how many cells the stretch of so many thresholds is cut: few of them in one, and the tables in the cache."""
    return 1024 if relevant < 256 else max(4096, min(2**14, 2 ** math.ceil(math.log2(4 * relevant))))


def table_bytes(relevant: float) -> int:
    """What a query's table takes."""
    return (1 if relevant < 127 else 2 if relevant < 2**15 - 1 else 4) * table_cells(relevant) + 100


def part_rows(columns: int) -> int:
    """How many rows of a tile are made at once."""
    return max(16, min(PART_ROWS, 2**19 // max(1, columns)))


class BestMatches(NamedTuple):
    """Of each query, the highest key of its relevant candidates, and how many of them have it."""

    keys: Float[Tensor, "queries"]
    """-inf where a query has no relevant candidate"""
    tied: Int[Tensor, "queries"]


class RankingPass:
    """One way through all pairs of queries and gallery.

    Args:
        tiles: the scores.
        candidates: who may be retrieved.
        memory_bytes: budget for everything beyond the embeddings themselves; the least that is possible where it is smaller.
        walker: who makes the tiles; see `walkers`.
        progress: called now and then with the pairs that are done and the pairs that there are.
        best: rank the best matches of each query alone, which are these.
        rung: the first rung; by default the one that is fastest.
    """

    processes: Processes = ALONE
    """who else walks over a part of all pairs"""

    def __init__(
        self,
        tiles: ScoreTiles,
        candidates: Candidates,
        memory_bytes: int,
        walker: Walker,
        progress: Progress | None = None,
        best: BestMatches | None = None,
        rung: int | None = None,
    ) -> None:
        self.scores, self.candidates = tiles, candidates
        self.walker, self.progress, self.best, self.rung = walker, progress, best, rung
        self.same_set = tiles.queries is tiles.gallery
        self.threads = available_threads() if tiles.compiled is not None else 1
        self._find_entries()
        self._count()
        relevant = 1.0 if best is not None else self.relevant_pairs / max(1, self.queries)
        most = 1.0 if best is not None else self.most_relevant
        self.memory_bytes = max(memory_bytes, least_bytes(*self._shape(most), **self._options))
        self.free_bytes = self.memory_bytes - item_bytes(*self.most_entries)
        self.layout = self._layout(relevant)
        # one tile serves both of its items, where nobody is excluded by a code; of ranks, where all counters are held
        self.turns = self.same_set and not candidates.across_classes
        self.both = self.turns and self.layout.block >= self.most_entries[0] and self.layout.square
        self.pairs_done, self.pairs_total = 0, self.pairs
        self._held: list[Panel] | None = None
        self.keys = RelevantKeys(tiles, candidates, self.free_bytes, self.threads, repeats=self.repeats)

    def _find_entries(self) -> None:
        """Let one entry stand for all equal items of a class, where there are enough of them to matter."""
        candidates, device = self.candidates, self.scores.device
        numbers = row_numbers(self.scores.gallery)
        self._find_repeats(numbers)
        query_numbers = numbers if self.same_set or not self.repeats else row_numbers(self.scores.queries)
        self.gallery_numbers, self.query_numbers = numbers.to(device), query_numbers.to(device)
        merge = self.repeats and not candidates.across_classes
        self._gallery_entries = _entries(
            candidates.gallery_order, candidates.gallery_class, numbers if merge else None, device
        )
        self._query_entries = (
            self._gallery_entries
            if self.same_set
            else _entries(candidates.query_order, candidates.query_class, query_numbers if merge else None, device)
        )

    def _find_repeats(self, numbers: Int[Tensor, "gallery"]) -> None:
        self.distinct_rows = int(numbers.max()) + 1 if len(numbers) else 0
        self.repeats = 0 < self.distinct_rows <= 0.9 * len(numbers)

    def _count(self) -> None:
        """What there is in all: pairs, relevant ones, queries, gallery items of each class, entries to be held at once."""
        candidates = self.candidates
        self.pairs, self.relevant_pairs = candidates.pairs, candidates.relevant_pairs
        self.queries, self.in_class = len(candidates.query_order), candidates.gallery_start.diff()
        self.most_relevant = largest_class(candidates)
        self.most_entries = len(self._query_entries), len(self._gallery_entries)
        self.sampled_share = 1.0

    def _layout(self, relevant: float) -> Layout:
        return choose_layout(self.memory_bytes, *self._shape(relevant), **self._options)

    def _shape(self, relevant: float) -> tuple[int, int, int, float]:
        return *self.most_entries, self.scores.dim, relevant

    @property
    def _options(self) -> dict[str, Any]:
        return {"threads": self.threads, "whole_tiles": self.scores.compiled is None}

    # ---------------------------------------------------------------------------------------------------------- panels

    @property
    def entry_pairs(self) -> int:
        """Pairs of entries; fewer than pairs of items where items repeat."""
        return len(self._query_entries) * len(self._gallery_entries)

    def blocks(self) -> Iterator[range]:
        """Runs of query entries whose counters are held at once, together all of them."""
        start, queries = 0, len(self._query_entries)
        while start < queries:
            # classes are ordered by size: the last query of a block has the most relevant items
            stop = min(start + self.layout.block, queries)
            while stop - start > (fitting := self._queries_that_fit(stop - 1)):
                stop = start + max(fitting, (stop - start) // 2)
            if self.both:
                stop = queries
            yield range(start, stop)
            start = stop

    def _queries_that_fit(self, entry: int) -> int:
        return self._layout(int(self.in_class[self._query_entries.classes[entry]])).block

    def query_panels(self, block: range) -> list[Panel]:
        """The panels of a block of queries, with thresholds and empty counters."""
        if self._held is not None:
            return self._held
        size = self.layout.rows
        if not self.both:  # at least one panel for each thread
            rounds = max(1, math.ceil(len(block) / size / self.threads))
            size = max(16, math.ceil(len(block) / rounds / self.threads))
        bare = self._query_panels(block, size)
        thresholds = self._thresholds_of(bare)
        panels = [
            replace(panel, counts=Counts.zeros(keys, torch.int32)) for panel, keys in zip(bare, thresholds, strict=True)
        ]
        if self.both:
            self._held = panels
        return panels

    def _query_panels(self, block: range, size: int) -> list[Panel]:
        return self._query_entries.panels(block, size, self.candidates.part)

    def _thresholds_of(self, panels: Sequence[Panel]) -> list[Float[Tensor, "queries columns"]]:
        """What the candidates of the queries of each panel are compared with."""
        thresholds: list[Tensor] = [torch.empty(0)] * len(panels)

        def fill(number: int, _: None = None) -> None:
            thresholds[number] = self._thresholds(panels[number])

        if self.keys.compiled and self.best is None and panels:
            tasks = [Task(frozenset(), partial(fill, number), 1) for number in range(len(panels))]
            run_tasks(tasks, [None] * min(self.threads, len(panels)), lambda _: None)
        else:
            for number in range(len(panels)):
                fill(number)
        return thresholds

    def gallery_panels(self) -> list[Panel]:
        """The panels of the gallery."""
        entries = self._gallery_entries
        return entries.panels(range(len(entries)), self.layout.columns, self.candidates.part)

    def sample(self, queries: int, gallery: int, seed: int = 0) -> tuple[Panel, Panel]:
        """Some queries with thresholds, and some gallery entries, drawn at random: no more than fit the budget."""
        relevant = self.most_relevant if self.best is None else 1.0

        def taken() -> float:  # several copies of the thresholds are made on the way
            tiles = _panel_bytes(queries, self.scores.dim, relevant, whole_tiles=False, columns=gallery)
            return tiles + queries * 4 * COUNTER_BYTES * (relevant + 1)

        while taken() > self.free_bytes * SHARE_OF_PANELS and (queries > LEAST_ROWS // 4 or gallery > LEAST_ROWS):
            if queries > LEAST_ROWS // 4 and queries * (relevant + 1) > gallery:
                queries //= 2
            elif gallery > LEAST_ROWS:
                gallery //= 2
            else:
                queries //= 2
        generator = torch.Generator().manual_seed(seed)

        def drawn(entries: Entries, count: int) -> Panel:
            chosen = torch.randperm(len(entries), generator=generator)[:count].sort().values.to(entries.index.device)
            return Panel(0, entries.index[chosen], entries.classes[chosen], entries.weight[chosen])

        panel = drawn(self._query_entries, queries)
        thresholds = self._thresholds(replace(panel, first=-1))
        return replace(panel, counts=Counts.zeros(thresholds, torch.int32)), drawn(self._gallery_entries, gallery)

    def positives(
        self, stretches: Stretches | None = None
    ) -> Iterator[tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]]:
        """The keys of all relevant pairs, and how many pairs each stands for (None: one), in pieces.

        Args:
            stretches: where the keys have to be exact; between these, one may stand for others that lie in the same gap.
        """
        if stretches is not None and self.keys.compiled and self._held is None:
            with self._threads():
                yield from self.keys.near(stretches)
            return
        for block in self.blocks():
            for panel in self.query_panels(block):
                yield from self.positives_of(panel)

    def positives_of(self, panel: Panel) -> Iterator[tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]]:
        """`panel_positives` in pieces, since each key is copied several times on the way."""
        assert panel.counts is not None
        rows = max(1, int(self.free_bytes // POSITIVE_BYTES) // (panel.counts.thresholds.shape[1] + 1))
        for part in torch.arange(len(panel)).split(rows):
            yield panel_positives(panel, weighted=self.repeats, rows=slice(int(part[0]), int(part[-1]) + 1))

    # ------------------------------------------------------------------------------------------------------- thresholds

    def _thresholds(self, panel: Panel) -> Float[Tensor, "queries columns"]:
        """The keys that candidates are compared with; a panel whose entries do not follow each other begins at -1."""
        if self.best is None:
            return self.keys.of(panel.index, panel.classes, panel.first if panel.first >= 0 else None)
        keys, tied = self.best.keys[panel.index], self.best.tied[panel.index]
        column = torch.arange(int(tied.max()) if len(tied) else 0, device=keys.device)
        return torch.where(column < tied[:, None], keys[:, None], torch.inf)

    # --------------------------------------------------------------------------------------------------------- counting

    def run(self, look: Look | None = None) -> Iterator[RankBlock]:
        """Walk over all pairs once and yield the ranks, some queries at a time."""
        queries, device = len(self.candidates.query_order), self.scores.device
        self._found = BestMatches(
            torch.full((queries,), -torch.inf, dtype=torch.float64, device=device),
            torch.zeros(queries, dtype=torch.int64, device=device),
        )
        with self._threads():
            self._prepare(look)
        for block in self.blocks():
            yield from self._ranks_of(block, look)

    def _ranks_of(self, block: range, look: Look | None) -> Iterator[RankBlock]:
        panels = self.query_panels(block)
        if look is not None:
            for panel in panels:
                for keys, weights in self.positives_of(panel):
                    look.relevant(keys, weights)
        if look is not None or self._anyone_asks(panels):
            self._walk(panels, look, counting=True)
        else:  # no query of this block has a match, and nobody else looks at its pairs
            self.done(len(block) * self.pairs // max(1, len(self._query_entries)))
        for panel in panels:
            yield from self._rank_blocks(panel)

    def _prepare(self, look: Look | None) -> None:
        self.walker.prepare(self, look)

    def _anyone_asks(self, panels: Sequence[Panel]) -> bool:
        return any(panel.counts.thresholds.shape[1] for panel in panels if panel.counts)

    def meetings(self, panels: Sequence[Panel], *, counting: bool = True) -> Iterator[Meeting]:
        """The queries of some panels with all that they are compared with, one after the other."""
        both = self.both if counting else self.turns
        yield self._at_home(panels, both=both)

    def _at_home(self, panels: Sequence[Panel], *, both: bool) -> Meeting:
        columns = panels if both else self.gallery_panels()
        numbers = (self.query_numbers, self.gallery_numbers) if self.repeats else None
        return Meeting(self.scores, self.candidates, panels, columns, both, numbers)

    def scan(self, look: Look) -> None:
        """Walk over all pairs once more, for a look at the negatives alone."""
        self.pairs_total += self.pairs
        panels = self._held
        if panels is None:
            panels = self._query_panels(range(len(self._query_entries)), self.layout.columns)
        self._walk(panels, look, counting=False)

    def _walk(self, panels: Sequence[Panel], look: Look | None, *, counting: bool) -> None:
        try:
            with self._threads():
                for meeting in self.meetings(panels, counting=counting):
                    self.walker.walk(self, meeting, look, counting=counting)
                    del meeting  # before the next guest comes
        finally:
            self.walker.forget()

    def again(self, asked: bool) -> Iterator[tuple[int, ScoreTiles]]:
        """The scores of each meeting of `run`, by its place, if any process asks for some."""
        if asked:
            yield 0, self.scores

    def release(self) -> None:
        """Let go of the counters; whoever asks for the positives once more has them made anew."""
        self._held = None

    def _threads(self) -> AbstractContextManager[None]:
        return own_threads() if self.scores.compiled is not None else nullcontext()

    def done(self, pairs: int) -> None:
        """Note pairs of items as done, and tell whoever wants to know."""
        self.pairs_done += pairs
        if self.progress is not None:
            self.progress(min(self.pairs_done, self.pairs_total), self.pairs_total)

    def _rank_blocks(self, panel: Panel) -> Iterator[RankBlock]:
        assert panel.counts is not None
        width = panel.counts.thresholds.shape[1]
        fitting = int(self.free_bytes * SHARE_OF_RANKS) // (RANK_BYTES * (width + 1))
        rows = max(least_ranked(width), min(fitting, 2**21 // (width + 1)))
        for start in range(0, len(panel), rows):
            part = slice(start, start + rows)
            counts = Counts(*(table[part] for table in (panel.counts.thresholds, panel.counts.hits, panel.counts.ties)))
            block = _rank_block(panel.index[part], counts)
            members, row = self._copies(panel.first + start, len(block.queries))
            if members is not None and row is not None:  # the same ranks for every query that an entry stands for
                block = RankBlock(members, *(getattr(block, field.name)[row] for field in fields(block)[1:]))
            self._note_best(block, counts.thresholds if row is None else counts.thresholds[row])
            yield block

    def _copies(self, first: int, rows: int) -> tuple[Tensor | None, Tensor | None]:
        """The queries for which some entries stand, and the place of the entry of each; None where each is its own."""
        entries = self._query_entries
        if entries.by_entry is None or entries.start is None:
            return None, None
        members = entries.by_entry[entries.start[first] : entries.start[first + rows]]
        return members, torch.arange(rows, device=members.device).repeat_interleave(
            entries.weight[first : first + rows]
        )

    def _note_best(self, block: RankBlock, keys: Tensor) -> None:
        some = (block.relevant > 0).nonzero().flatten()
        last = block.relevant[some, None] - 1
        self._found.keys[block.queries[some]] = keys[some].gather(1, last).flatten()
        self._found.tied[block.queries[some]] = block.relevant_tied[some].gather(1, last).flatten()

    def best_matches(self) -> BestMatches:
        """What `run` found: the highest key that a relevant candidate of each query has."""
        return self._found


@runtime_checkable
class Foretold(Protocol):
    """A `Look` that learns from a sample what to look out for, and can pass that on to other processes."""

    @property
    def expectations(self) -> tuple[Any, ...]:
        """What a sample has foretold."""

    def expecting(self, expectations: tuple[Any, ...]) -> None:
        """Look out for what a sample has foretold to another process."""


@runtime_checkable
class Walker(Protocol):
    """What makes the tiles and counts them."""

    def prepare(self, walk: RankingPass, look: Look | None) -> None:
        """Called once, before the first block."""

    def walk(self, walk: RankingPass, meeting: Meeting, look: Look | None, *, counting: bool = True) -> None:
        """Take the queries of a meeting past its candidates."""

    def forget(self) -> None:
        """All meetings of these queries are over."""


@dataclass(frozen=True)
class Entries:
    """Items in the order of their classes; one stands for all equal items of a class."""

    index: Int[Tensor, "entries"]
    classes: Int[Tensor, "entries"]
    weight: Int[Tensor, "entries"]
    by_entry: Int[Tensor, "items"] | None = None
    """indices of all items, those of one entry next to each other; None where each is an entry of its own"""
    start: Int[Tensor, "entries1"] | None = None
    """where those of each entry begin"""

    def __len__(self) -> int:
        return len(self.index)

    def panels(
        self, block: range, size: int, part_of_class: Tensor | None, more_borders: Sequence[int] = ()
    ) -> list[Panel]:
        """Panels of at most `size` entries, none of which has entries of two parts, or from both sides of a border."""
        borders = {block.start, block.stop} | {border for border in more_borders if border in block}
        if part_of_class is not None:
            part = part_of_class[self.classes]
            borders |= {border for border in ((part.diff() != 0).nonzero().flatten() + 1).tolist() if border in block}
        panels = []
        for start, stop in pairwise(sorted(borders)):
            number = 0 if part_of_class is None else int(part_of_class[self.classes[start]])
            for first in range(start, stop, size):
                some = slice(first, min(first + size, stop))
                panels.append(Panel(first, self.index[some], self.classes[some], self.weight[some], None, number))
        return panels


def largest_class(candidates: Candidates) -> int:
    """Gallery items of the largest class that has a query."""
    in_class = candidates.gallery_start.diff()[candidates.query_class]
    return int(in_class.max()) if len(in_class) else 0


def _entries(order: Tensor, classes: Tensor, numbers: Tensor | None, device: torch.device) -> Entries:
    order, classes = order.to(device), classes.to(device)
    if numbers is None:
        return Entries(order, classes, torch.ones_like(order))
    code = classes * (int(numbers.max()) + 1 if len(numbers) else 1) + numbers.to(device)[order]
    _, entry, weight = code.unique(return_inverse=True, return_counts=True)
    by_entry = entry.argsort(stable=True)
    start = torch.nn.functional.pad(weight.cumsum(0), (1, 0))
    first = by_entry[start[:-1]]
    return Entries(order[first], classes[first], weight, order[by_entry], start)


def panel_positives(
    panel: Panel, *, weighted: bool, rows: slice = slice(None)
) -> tuple[Float[Tensor, "pairs"], Int[Tensor, "pairs"] | None]:
    """The keys of the relevant pairs of some rows, and the number of pairs each stands for where that is not one."""
    assert panel.counts is not None
    thresholds = panel.counts.thresholds[rows]
    valid = thresholds.isfinite()
    weights = panel.weight[rows, None].expand_as(valid)[valid] if weighted else None
    return thresholds[valid], weights


def _rank_block(queries: Tensor, counts: Counts) -> RankBlock:
    thresholds = counts.thresholds
    valid = thresholds.isfinite()
    relevant = valid.sum(dim=1)
    column = torch.arange(thresholds.shape[1], device=thresholds.device).expand_as(thresholds)
    below, not_above = column, column + 1
    if bool((valid[:, 1:] & (thresholds[:, 1:] == thresholds[:, :-1])).any()):
        below = torch.searchsorted(thresholds, thresholds)
        not_above = torch.searchsorted(thresholds, thresholds, right=True).minimum(relevant[:, None])
    better = counts.better()
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
