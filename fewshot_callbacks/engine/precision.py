"""The precisions in which scores are estimated, and float32 products as exact as their proved bounds assume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch


class Precision(IntEnum):
    """How the score of a pair is made, from the fastest estimate to the exact score."""

    BYTES = -1
    """A product of operands that are rounded to small integers: it tells how high a score can be, no more."""
    HALF = 0
    """A product of bfloat16, float16 or TF32 operands."""
    FLOAT32 = 1
    """A product of float32 operands."""
    FLOAT64 = 2
    """A product of float64 operands."""
    EXACT = 3
    """The exact score itself."""
    FLOAT64_OF_FLOAT32 = 4
    """A float64 product of the float32 operands, of a single pair: only the operands are rounded."""

    @property
    def screens(self) -> bool:
        """Whether its estimates only rule out pairs that come near no threshold."""
        return self <= Precision.HALF


@contextmanager
def full_precision() -> Iterator[None]:
    """Make float32 products in float32, without gradients: no autocast, no `torch.set_float32_matmul_precision`.

    Products in half precision accumulate in float32, as their bound assumes.
    """
    before = torch.get_float32_matmul_precision()
    cuda = torch.backends.cuda.matmul
    reductions = cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction
    torch.set_float32_matmul_precision("highest")
    cuda.allow_fp16_reduced_precision_reduction = cuda.allow_bf16_reduced_precision_reduction = False
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction = reductions
