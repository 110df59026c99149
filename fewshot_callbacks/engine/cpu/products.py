"""Operands of score tiles on the CPU, and their products."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block
from fewshot_callbacks.engine.cpu.byte_kernels import ByteRows, encode
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores.products import ScoreTiles

Key = tuple[int, bool]
"""First row of a block, and whether it is a block of queries."""


def kept_or_made(key: Key, kept: dict[Key, Any] | None, last: dict[Key, Any], make: Callable[[], Any]) -> Any:
    """Return what is kept for all threads or, if nothing is, what this thread made last; make it where it is missing.

    A thread holds what it needs for the two sides of a tile.
    """
    if kept is None and key not in last and len(last) > 1:
        last.clear()
    held = last if kept is None else kept
    if key not in held:
        held[key] = make()
    return held[key]


class Operands(NamedTuple):
    """One side of a product."""

    single: Tensor
    """in float32, or float64 for products in float64"""
    narrow: Tensor | None = None
    """in half precision or bytes, for products in these"""
    bytes: ByteRows | None = None
    """what belongs to the bytes"""

    def rows(self, some: slice) -> Operands:
        """Return some of the rows, as they are multiplied."""
        return Operands(self.single[some], None if self.narrow is None else self.narrow[some])


@dataclass
class ProductSpace:
    """What a thread makes products in."""

    buffers: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    operands: dict[Key, Operands] = field(default_factory=dict)
    """the last ones made, where they are not kept for all threads"""
    seconds: float = 0.0
    """spent in products"""

    def buffer(self, parts: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return (parts, rows, columns) of memory, whose content is undefined."""
        size = parts * rows * columns
        buffer = self.buffers.get((parts, dtype))
        if buffer is None or len(buffer) < size:
            buffer = self.buffers[parts, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(parts, rows, columns)


class Products:
    """Makes the products of one rectangle at one precision.

    Args:
        scores: Of the rectangle.
        precision: Of the products.
        one_side: Both sides of a product have the same operands.
        kept: Operands that are kept for all threads; None to keep none.
    """

    def __init__(
        self, scores: ScoreTiles, precision: Precision, *, one_side: bool, kept: dict[Key, Operands] | None
    ) -> None:
        self.scores, self.precision, self.one_side, self.kept = scores, precision, one_side, kept

    def operands(self, block: Block, space: ProductSpace, *, of_query: bool) -> Operands:
        """Return the operands of a block, made at most once for each thread that works on it."""

        def make() -> Operands:
            precision = Precision.FLOAT32 if self.precision.screens else self.precision
            single = self.scores.operand(block.index, precision, of_query=of_query)
            if self.precision == Precision.HALF:
                return Operands(single, single[:, : self.scores.dim].to(self.scores.half))
            return self._in_bytes(single, of_query=of_query) if self.precision == Precision.BYTES else Operands(single)

        made: Operands = kept_or_made((block.first, of_query or self.one_side), self.kept, space.operands, make)
        return made

    def _in_bytes(self, single: Tensor, *, of_query: bool) -> Operands:
        dim, codes = self.scores.dim, torch.empty(len(single), self.scores.dim, dtype=torch.int8)
        some = ByteRows(*(np.zeros(len(single), np.float32) for _ in ByteRows._fields))
        if single.shape[1] > dim:
            some = some._replace(offset=single[:, dim if of_query else dim + 1].numpy())
        encode(single.numpy(), largest_code(), codes.numpy(), some)
        return Operands(single, codes, some)

    def make(self, left: Operands, right: Operands, space: ProductSpace) -> NDArray[Any]:
        """Return (chunks, rows, columns): estimates of the scores, to be summed over the chunks; or products of bytes."""
        started = time.perf_counter()
        rows, columns = len(left.single), len(right.single)
        if left.narrow is not None and right.narrow is not None and self.precision == Precision.BYTES:
            estimates = space.buffer(1, rows, columns, torch.int32)
            torch._int_mm(left.narrow, right.narrow.T, out=estimates[0])
        elif left.narrow is not None and right.narrow is not None:
            product = space.buffer(1, rows, columns, self.scores.half)
            torch.mm(left.narrow, right.narrow.T, out=product[0])
            estimates = self.scores.from_half(product[0], left.single, right.single).unsqueeze(0)
        else:
            components = left.single.shape[1]
            chunk = components if self.precision == Precision.FLOAT64 else self.scores.chunk
            estimates = space.buffer(math.ceil(components / chunk), rows, columns, left.single.dtype)
            for number, start in enumerate(range(0, components, chunk)):
                some = slice(start, start + chunk)
                torch.mm(left.single[:, some], right.single[:, some].T, out=estimates[number])
        space.seconds += time.perf_counter() - started
        return estimates.numpy()


@functools.cache
def largest_code() -> int:
    """Return up to which size products of bytes are exact on this processor; 0 where there are none that could pay.

    Without VNNI, oneDNN adds two products of bytes, one of them moved by 128, in 16 bits: of codes up to 63 the sum cannot
    saturate, (63 + 128) * 63 * 2 = 24,066; of larger ones it does.
    """
    if not torch.backends.mkldnn.is_available():
        return 0  # torch then multiplies in a plain loop
    for largest in (127, 63):
        signs = torch.ones(64, 64, dtype=torch.int8)
        signs[::2], signs[::3, ::5] = -1, 1
        left, right = largest * signs, largest * signs.flip(1)
        try:
            product = torch._int_mm(left, right.T)
        except (AttributeError, RuntimeError):  # a private function of torch, 2.6 to 2.15 at least
            return 0
        if torch.equal(product.double(), left.double() @ right.double().T):
            return largest
    return 0


def bytes_possible(scores: ScoreTiles) -> bool:
    """Whether products in bytes can be made of these scores: their sums have to fit 32 bits."""
    return 0 < scores.dim < 2**31 // 127**2 and largest_code() > 0
