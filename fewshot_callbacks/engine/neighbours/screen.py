"""Tiles of estimates, and cut-offs below (or above) which no pair of a given exact score can be estimated."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.engine.duplicates import REPEATING_SHARE
from fewshot_callbacks.engine.options import current_options
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.products import ScoreTiles

ROWS_OF_TASK, TILE = 1024, (256, 2048)
"""Rows that a thread works off at once, and the largest tile: its estimates stay in a processor's cache."""
PAIR_BYTES = 120
"""What a pair of a tile takes if all of its pairs survive: its estimate, its indices, its exact score, and sorting it."""
SHARE_OF_TILES, SHARE_OF_OPERANDS = 0.4, 0.4
"""Shares of the budget for tiles, and for operands that are kept."""
EXACT_SECONDS = 2e-6
"""What the exact score of a pair takes, about; measured: 2.7e-6 at 512 components on a busy core."""
SAMPLE = (128, 2048)
"""Rows and columns of the sample on which the precision is chosen."""


class Screen:
    """Estimates of one precision.

    Args:
        scores: Of all pairs.
        precision: Of the products; half precision only where `can_be_half`.
    """

    def __init__(self, scores: ScoreTiles, precision: Precision) -> None:
        self.scores, self.precision = scores.with_chunk(scores.dim + 2), precision
        self.dtype = {Precision.HALF: scores.half, Precision.FLOAT64: torch.float64}.get(precision, torch.float32)

    @staticmethod
    def can_be_half(scores: ScoreTiles) -> bool:
        """Whether a product of operands in half precision alone is an estimate: distances need two more columns."""
        return not scores.units.similarity.extra_columns

    def operand(self, index: Int[Tensor, "items"], *, of_query: bool) -> Float[Tensor, "items components"]:
        """Return one side of a product."""
        precision = Precision.FLOAT32 if self.precision == Precision.HALF else self.precision
        return self.scores.operand(index, precision, of_query=of_query).to(self.dtype)

    def lowest(self, exact: Float[Tensor, "queries"], queries: Int[Tensor, "queries"]) -> Float[Tensor, "queries"]:
        """Return for each query an estimate that no pair of at least this exact score stays below."""
        if self.precision == Precision.HALF:
            low = self.scores.half_low(exact, queries, of_query=True)
        else:
            low = exact - self.error(queries)
        low = low - exact.nan_to_num(posinf=0.0, neginf=0.0).abs() * 2.0**-50  # for the rounding of these sums
        return torch.nextafter(low.to(self.dtype), torch.tensor(-torch.inf, dtype=self.dtype, device=low.device))

    def highest(self, exact: Float[Tensor, "queries"], queries: Int[Tensor, "queries"]) -> Float[Tensor, "queries"]:
        """Return for each query an estimate that every pair below this exact score stays below."""
        high = exact + self.error(queries)
        high = high + exact.abs() * 2.0**-50
        return torch.nextafter(high.to(self.dtype), torch.tensor(torch.inf, dtype=self.dtype, device=high.device))

    def error(self, queries: Int[Tensor, "queries"]) -> Float[Tensor, "queries"]:
        """Return for each query how far its estimates can be off."""
        return self.scores.error(queries, self.precision) * (1 + 1e-6)


class Survivors(NamedTuple):
    """Pairs of a tile: row and column of each."""

    rows: Int[Tensor, "pairs"]
    columns: Int[Tensor, "pairs"]

    @classmethod
    def of(cls, wanted: Bool[Tensor, "rows columns"], rows: Int[Tensor, "rows"] | None = None) -> Survivors:
        """Return where a mask is set; `rows` are the numbers of its rows."""
        row, column = wanted.nonzero(as_tuple=True)
        return cls(row if rows is None else rows[row], column)


class ExactPairs:
    """Exact scores of pairs, made once for equal pairs where rows repeat.

    Args:
        scores: Of all pairs.
        numbers: Of each query and each gallery item, the same for equal rows.
    """

    def __init__(self, scores: ScoreTiles, numbers: tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]]) -> None:
        self.scores, self.numbers = scores, numbers
        self.distinct = [int(side.max()) + 1 for side in numbers]
        sizes = map(len, numbers)
        self.repeats = any(few <= REPEATING_SHARE * all_ for few, all_ in zip(self.distinct, sizes, strict=True))

    def of(self, queries: Int[Tensor, "pairs"], items: Int[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
        """Return the exact score of each pair."""
        if not self.repeats:
            return self.scores.pair_scores(queries, items)
        code = self.numbers[0][queries] * self.distinct[1] + self.numbers[1][items]
        distinct, back = code.unique(return_inverse=True)
        first = torch.empty_like(distinct)
        first[back] = torch.arange(len(code))
        scores: Tensor = self.scores.pair_scores(queries[first], items[first])[back]
        return scores


def tile_size(memory_bytes: int, threads: int) -> tuple[int, int]:
    """Return rows and columns of a tile that fit the budget."""
    limit = current_options().layout
    if limit is not None:
        return limit.rows, limit.columns
    rows, columns = TILE
    while threads * rows * columns * PAIR_BYTES > memory_bytes * SHARE_OF_TILES and (rows > 16 or columns > 128):
        rows, columns = (rows, columns // 2) if columns > 4 * rows or rows <= 16 else (rows // 2, columns)
    return rows, columns


def kept_operands(
    screen: Screen, items: Int[Tensor, "items"], tile: tuple[int, int], memory_bytes: int
) -> list[Tensor] | None:
    """Return the operands of each block of gallery items; None if they do not fit the budget."""
    if screen.dtype.itemsize * (screen.scores.dim + 2) * len(items) > memory_bytes * SHARE_OF_OPERANDS:
        return None
    return [screen.operand(block, of_query=False) for block in items.split(tile[1])]


def threads_for(scores: ScoreTiles, pairs: int) -> int:
    """Return how many threads are worth it; plain PyTorch has its own."""
    options = current_options()
    worth_it = scores.compiled is not None and pairs * scores.dim > options.threaded_from
    return (options.threads or torch.get_num_threads()) if worth_it else 1


def fastest(
    scores: ScoreTiles, queries: Tensor, items: Tensor, wanted: Callable[[Float[Tensor, "rows columns"]], Tensor]
) -> Precision:
    """Return the precision that takes the least time on a sample, exact scores of what it leaves open included.

    Args:
        scores: Of all pairs.
        queries: Their indices.
        items: Indices of gallery items.
        wanted: Makes of estimates the exact score from which a pair of each row is wanted, about.
    """
    named = current_options().first_precision
    if named is not None:
        named = max(named, Precision.HALF)
        half = named == Precision.HALF and not Screen.can_be_half(scores)
        return Precision.FLOAT32 if half else min(named, Precision.FLOAT64)
    if len(queries) * len(items) < current_options().pilot_pairs:
        return Precision.FLOAT32
    generator = torch.Generator().manual_seed(0)
    rows, columns = (
        side[torch.randint(len(side), (size,), generator=generator)]
        for side, size in zip((queries, items), SAMPLE, strict=True)
    )
    exact = wanted(scores.tile(rows, columns, Precision.FLOAT64)[0])
    costs = {}
    for precision in (Precision.HALF, Precision.FLOAT32, Precision.FLOAT64):
        if precision == Precision.HALF and not Screen.can_be_half(scores):
            continue
        screen = Screen(scores, precision)
        left, right = screen.operand(rows, of_query=True), screen.operand(columns, of_query=False)
        seconds = []
        for _ in range(3):  # the first may compile in the product library
            started = time.perf_counter()
            estimates = left @ right.T
            seconds.append(time.perf_counter() - started)
        surviving = int((estimates >= screen.lowest(exact, rows)[:, None]).sum())
        costs[precision] = min(seconds) + EXACT_SECONDS * surviving
    return min(costs, key=lambda precision: costs[precision])
