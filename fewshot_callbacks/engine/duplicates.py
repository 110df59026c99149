"""Equal rows, so that what repeats is scored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.blocks import Block
from fewshot_callbacks.engine.budget import rows_at_once
from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.options import compiled_kernels
from fewshot_callbacks.engine.scores.products import ScoreTiles

REPEATING_SHARE = 0.9
"""Share of distinct rows up to which it pays to score equal rows once."""


def row_numbers(vectors: Tensor) -> Int[Tensor, "items"]:
    """Return the same number for equal rows (and for no others), so that what repeats is scored once.

    Rows are compared bit by bit after -0.0 became 0.0; candidates come from a hash of 64 bits, and each is checked. Should
    the hash of two different rows be the same, the copies of one of them get separate numbers, which only costs time.
    """
    wide = torch.int64 if vectors.dtype == torch.float64 else torch.int32
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (vectors.shape[1],), generator=generator) * 2 + 1
    odd = odd.to(vectors.device)

    def bits(rows: Tensor) -> Tensor:
        rows = rows if rows.dtype == torch.float64 else rows.float()
        return (rows + 0.0).view(wide)

    def mixed(rows: Tensor) -> Tensor:
        pattern = bits(rows).long()
        return ((pattern ^ (pattern >> 29)) * odd).sum(dim=1)  # the low bits of short numbers are all zero

    compiled, at_once = compiled_kernels() if vectors.device.type == "cpu" else None, rows_at_once(vectors)
    if compiled is None:
        hashes = torch.cat([mixed(part) for part in vectors.split(at_once)])
    else:
        hashes = torch.empty(len(vectors), dtype=torch.int64)
        for start in range(0, len(vectors), at_once):
            part = slice(start, start + at_once)
            compiled.row_hashes(bits(vectors[part]).numpy(), odd.numpy(), hashes[part].numpy())
    if len(hashes.unique()) == len(hashes):
        return torch.arange(len(hashes), device=hashes.device)
    number = hashes.unique(return_inverse=True)[1]
    first = torch.full_like(number, len(number)).scatter_reduce_(
        0, number, torch.arange(len(number), device=number.device), "amin"
    )
    start = 0
    for part in vectors.split(at_once):
        same = (bits(part) == bits(vectors[first[number[start : start + len(part)]]])).all(dim=1)
        if not bool(same.all()):  # two different rows with one hash: give each such row its own number
            alone = start + (~same).nonzero().flatten()
            number[alone] = int(number.max()) + 1 + torch.arange(len(alone), device=number.device)
        start += len(part)
    distinct: Tensor = number.unique(return_inverse=True)[1]
    return distinct


@dataclass(frozen=True)
class DistinctItems:
    """Different items, sorted by class. Equal vectors of one class are one of them; `weight` counts the copies."""

    index: Int[Tensor, "distinct"]
    classes: Int[Tensor, "distinct"]
    weight: Int[Tensor, "distinct"]
    by_distinct: Int[Tensor, "items"] | None = None
    """indices of all items, equal ones side by side; None where no two are merged"""
    start: Int[Tensor, "distinct1"] | None = None
    """where the copies of each distinct item begin in `by_distinct`"""

    def __len__(self) -> int:
        return len(self.index)

    def blocks(
        self, run: range, size: int, part_of_class: Tensor | None, more_borders: Sequence[int] = ()
    ) -> list[Block]:
        """Cut a run of items into blocks of at most `size`, none of which crosses a border or holds two partitions."""
        borders = {run.start, run.stop} | {border for border in more_borders if border in run}
        if part_of_class is not None:
            part = part_of_class[self.classes]
            borders |= {border for border in ((part.diff() != 0).nonzero().flatten() + 1).tolist() if border in run}
        blocks = []
        for start, stop in pairwise(sorted(borders)):
            number = 0 if part_of_class is None else int(part_of_class[self.classes[start]])
            for first in range(start, stop, size):
                some = slice(first, min(first + size, stop))
                blocks.append(Block(first, self.index[some], self.classes[some], self.weight[some], partition=number))
        return blocks

    def copies(self, first: int, count: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the copies of some distinct items, and of which of these each is one; None where no two are merged."""
        if self.by_distinct is None or self.start is None:
            return None, None
        members = self.by_distinct[self.start[first] : self.start[first + count]]
        number = torch.arange(count, device=members.device)
        return members, number.repeat_interleave(self.weight[first : first + count])


def distinct_items(order: Tensor, classes: Tensor, numbers: Tensor | None, device: torch.device) -> DistinctItems:
    """Merge the items of one class that have the same number; without numbers each item stays by itself."""
    order, classes = order.to(device), classes.to(device)
    if numbers is None:
        return DistinctItems(order, classes, torch.ones_like(order))
    code = classes * (int(numbers.max()) + 1 if len(numbers) else 1) + numbers.to(device)[order]
    _, number, weight = code.unique(return_inverse=True, return_counts=True)
    by_distinct = number.argsort(stable=True)
    start = torch.nn.functional.pad(weight.cumsum(0), (1, 0))
    first = by_distinct[start[:-1]]
    return DistinctItems(order[first], classes[first], weight, order[by_distinct], start)


@dataclass(frozen=True)
class Duplicates:
    """Which queries and which gallery items are equal; equal items of one class are merged."""

    queries: DistinctItems
    """of this process"""
    items: DistinctItems
    """of this process; the very queries with one set"""
    numbers: tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]]
    """of each query and item: the same number for equal rows"""
    repeats: bool
    """whether rows repeat often enough to score equal ones once"""
    distinct_rows: int
    """different rows of the gallery; over several processes an upper bound, exact where all rows are equal"""
    sizes: tuple[tuple[int, int], ...]
    """distinct queries and gallery items of each process"""


def find_duplicates(scores: ScoreTiles, candidates: Candidates, processes: Processes) -> Duplicates:
    """Find equal rows; collective.

    Args:
        scores: Of what this process holds.
        candidates: Of this process.
        processes: Who holds the rest.
    """
    same_set, device = scores.queries is scores.gallery, scores.device
    numbers = row_numbers(scores.gallery)
    distinct = int(numbers.max()) + 1 if len(numbers) else 0
    row = scores.gallery[0] + 0.0 if distinct == 1 else None
    holders = [held for held in processes.gather((distinct, len(numbers), row)) if held[1]]
    repeats = any(different <= REPEATING_SHARE * items for different, items, _ in holders)
    rows = [row for *_, row in holders if row is not None]
    collapsed = len(rows) == len(holders) and all(torch.equal(row, rows[0]) for row in rows)
    query_numbers = numbers if same_set or not repeats else row_numbers(scores.queries)
    merge = repeats and not candidates.has_codes  # equal queries may differ in whom they may retrieve
    items = distinct_items(candidates.gallery_order, candidates.gallery_class, numbers if merge else None, device)
    queries = items
    if not same_set:
        merged = query_numbers if merge else None
        queries = distinct_items(candidates.query_order, candidates.query_class, merged, device)
    return Duplicates(
        queries,
        items,
        (query_numbers.to(device), numbers.to(device)),
        repeats,
        1 if collapsed else sum(different for different, *_ in holders),
        tuple(processes.gather((len(queries), len(items)))),
    )
