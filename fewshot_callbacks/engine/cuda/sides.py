"""The two sides of a product as the kernels take them: operands, and where the thresholds and counters of each item lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.count import rounded
from fewshot_callbacks.engine.scores.products import ScoreTiles


def to_tf32(values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Round float32 numbers to the nearest that TF32 holds: 10 bits of mantissa after the leading one, of 23.

    What the hardware does with the other 13 bits, rounding or dropping them, changes these numbers no more.
    """
    bits = values.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@dataclass(frozen=True, eq=False)
class Side:
    """The items along one side of a part of the score matrix, block after block."""

    blocks: Sequence[Block]
    index: Int[Tensor, "items"]
    codes: Int[Tensor, "codes items"]
    """their classes, and what else excludes pairs: a pair with one equal code is no candidate"""
    weight: Int[Tensor, "items"]
    operand: Float[Tensor, "items dim"]
    """in the precision of the product"""
    shift: Float[Tensor, "items"]
    """added to each estimate"""
    single: Float[Tensor, "items columns"]
    """operand in float32"""
    thresholds: Sequence[Float[Tensor, "queries relevant"]]
    """of each block"""
    reach: Float[Tensor, "items"]
    """a little more than the error of an estimate"""
    rounding: Float[Tensor, "items"]
    """a little more than the error of a float64 product of operands in float32"""

    @classmethod
    def of(cls, rectangle: ScoreRectangle, blocks: Sequence[Block], precision: Precision, *, of_query: bool) -> Side:
        """Gather some blocks of a rectangle, which have the queries, or the gallery items, of its scores."""
        scores = rectangle.scores.unrounded()
        index, classes, weight = (
            torch.cat([getattr(block, name) for block in blocks]) for name in ("index", "classes", "weight")
        )
        exclusions = rectangle.candidates.exclusions if rectangle.candidates.across_classes else ()
        codes = [classes, *(pair[0 if of_query else 1][index] for pair in exclusions)]
        single = scores.operand(index, Precision.FLOAT32, of_query=of_query)
        operand, shift = single, torch.zeros(len(index), device=single.device)
        if precision == Precision.HALF:
            operand, shift = rough_operand(scores, single, of_query=of_query)
        thresholds = [
            torch.empty(len(block), 0, dtype=torch.float64, device=single.device)
            if block.counts is None
            else block.counts.thresholds.contiguous()
            for block in blocks
        ]
        largest = torch.cat([_largest(of_block) for of_block in thresholds])
        reach, rounding = (
            # so that rounding the sums of these and a threshold changes nothing
            scores.error(index, kind, of_query=of_query) * (1 + 1e-6) + largest * 2.0**-51 + 2.0**-125
            for kind in (precision, Precision.FLOAT64_OF_FLOAT32)
        )
        return cls(
            blocks, index, torch.stack(codes), weight.int(), operand.contiguous(), shift, single.contiguous(),
            thresholds, reach, rounding,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.index)

    @cached_property
    def widths(self) -> Int[Tensor, "items"]:
        """How many thresholds each item has, the padding included."""
        return self._of_items([of_block.shape[1] for of_block in self.thresholds]).int()

    @cached_property
    def lowest(self) -> Float[Tensor, "items"]:
        """An estimate below this is surely below all thresholds of the item."""
        first = [of_block[:, 0] if of_block.shape[1] else _infinite(of_block) for of_block in self.thresholds]
        return rounded(torch.cat(first) - self.reach, torch.float32, up=False)

    @cached_property
    def thresholds_at(self) -> Int[Tensor, "items"]:
        """The address of the thresholds of each item."""
        return self._addresses(self.thresholds)

    @cached_property
    def hits_at(self) -> Int[Tensor, "items"]:
        """The address of the counters of each item, which the kernels change."""
        return self._addresses([None if block.counts is None else block.counts.hits for block in self.blocks])

    @property
    def bits(self) -> int:
        """No item has as many as 2**bits thresholds."""
        return max(of_block.shape[1] for of_block in self.thresholds).bit_length()

    def _of_items(self, of_blocks: Sequence[int]) -> Int[Tensor, "items"]:
        values = torch.tensor(of_blocks, device=self.index.device)
        lengths = torch.tensor([len(block) for block in self.blocks], device=self.index.device)
        return values.repeat_interleave(lengths, output_size=len(self))

    def _addresses(self, tables: Sequence[Tensor | None]) -> Int[Tensor, "items"]:
        """Return the address of each item's row in its block's table; 0 where there is none."""
        rows = [torch.arange(len(block), device=self.index.device) for block in self.blocks]
        widths = [0 if table is None else table.shape[1] * table.element_size() for table in tables]
        starts = [0 if table is None else table.data_ptr() for table in tables]
        return self._of_items(starts) + self._of_items(widths) * torch.cat(rows)


def rough_operand(
    scores: ScoreTiles, single: Float[Tensor, "items columns"], *, of_query: bool
) -> tuple[Float[Tensor, "items dim"], Float[Tensor, "items"]]:
    """Return the operand of `Precision.HALF` that belongs to one in float32, and what is added to the products."""
    components = single[:, : scores.dim]
    operand = to_tf32(components.contiguous()) if scores.half == torch.float32 else components.to(scores.half)
    if single.shape[1] == scores.dim:
        return operand, torch.zeros(len(single), device=single.device)
    return operand, single[:, scores.dim + (0 if of_query else 1)].contiguous()


def _largest(thresholds: Float[Tensor, "queries relevant"]) -> Float[Tensor, "queries"]:
    padded = torch.nn.functional.pad(thresholds.abs().masked_fill(thresholds.isinf(), 0.0), (0, 1))
    return padded.amax(dim=1)


def _infinite(thresholds: Float[Tensor, "queries relevant"]) -> Float[Tensor, "queries"]:
    return torch.full((len(thresholds),), torch.inf, dtype=torch.float64, device=thresholds.device)
