"""Products as exact as their proved bounds assume, whatever the caller has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_precision() -> Iterator[None]:
    """Float32 products in float32, without gradients: no autocast, no loosened `torch.set_float32_matmul_precision`.

    Products in half precision sum up in float32, as their bound assumes.
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
