"""Equal rows, so that what repeats is scored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block
from fewshot_callbacks.engine.budget import (
    rows_at_once,
)
from fewshot_callbacks.engine.options import compiled_kernels


def row_numbers(vectors: Tensor) -> Int[Tensor, "items"]:
    """The same number for equal rows (and for no others), so that what repeats is scored once.

    Rows are compared bit by bit after -0.0 became 0.0; candidates come from a hash of 64 bits, and each is checked. Should
    the hash of two different rows be the same, the copies of one of them get numbers of their own, which costs time alone.
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
        if not bool(same.all()):  # two different rows with one hash: give each such row a number of its own
            alone = start + (~same).nonzero().flatten()
            number[alone] = int(number.max()) + 1 + torch.arange(len(alone), device=number.device)
        start += len(part)
    distinct: Tensor = number.unique(return_inverse=True)[1]
    return distinct


@dataclass(frozen=True)
class DistinctItems:
    """Items in the order of their classes; one stands for all equal items of a class."""

    index: Int[Tensor, "entries"]
    classes: Int[Tensor, "entries"]
    weight: Int[Tensor, "entries"]
    by_distinct: Int[Tensor, "items"] | None = None
    """indices of all items, those of one entry next to each other; None where each is an entry of its own"""
    start: Int[Tensor, "entries1"] | None = None
    """where those of each entry begin"""

    def __len__(self) -> int:
        return len(self.index)

    def blocks(
        self, block: range, size: int, part_of_class: Tensor | None, more_borders: Sequence[int] = ()
    ) -> list[Block]:
        """Panels of at most `size` entries, none of which has entries of two parts, or from both sides of a border."""
        borders = {block.start, block.stop} | {border for border in more_borders if border in block}
        if part_of_class is not None:
            part = part_of_class[self.classes]
            borders |= {border for border in ((part.diff() != 0).nonzero().flatten() + 1).tolist() if border in block}
        blocks = []
        for start, stop in pairwise(sorted(borders)):
            number = 0 if part_of_class is None else int(part_of_class[self.classes[start]])
            for first in range(start, stop, size):
                some = slice(first, min(first + size, stop))
                blocks.append(Block(first, self.index[some], self.classes[some], self.weight[some], None, number))
        return blocks


def distinct_items(order: Tensor, classes: Tensor, numbers: Tensor | None, device: torch.device) -> DistinctItems:
    """Merge the items of one class that have the same number; without numbers each item stays by itself."""
    order, classes = order.to(device), classes.to(device)
    if numbers is None:
        return DistinctItems(order, classes, torch.ones_like(order))
    code = classes * (int(numbers.max()) + 1 if len(numbers) else 1) + numbers.to(device)[order]
    _, entry, weight = code.unique(return_inverse=True, return_counts=True)
    by_distinct = entry.argsort(stable=True)
    start = torch.nn.functional.pad(weight.cumsum(0), (1, 0))
    first = by_distinct[start[:-1]]
    return DistinctItems(order[first], classes[first], weight, order[by_distinct], start)
