"""How an evaluation computes: threads, precision, sizes. None of it changes a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

# Called with the number of pairs that are done and the number that there are.
Progress = Callable[[int, int], None]

# Of the products that estimate scores: products of small integers, on a processor alone, or of numbers with 11 bits, on a
# GPU alone, with 24 or with 53. Processors that multiply bfloat16 fast multiply bytes twice as fast, which round no more.
Precision = Literal["bytes", "float16", "float32", "float64"]


@dataclass(frozen=True)
class EngineOptions:
    """Options that travel as this one value; they are for tests and measurements."""

    # of the products; by default the one that a sample promises to be the fastest
    precision: Precision | None = None
    # by default those of torch
    threads: int | None = None
    # queries of a tile; by default as many as the budget and the cache of a processor suggest
    height: int | None = None
    # gallery items of a tile
    width: int | None = None
    # relevant pairs whose counters are held at once; by default as many as the budget allows
    batch: int | None = None
    # relevant scores at which all pairs are counted first; by default all for which there is room
    knots: int | None = None
    # pairs that are collected for points of all pairs, at most
    collected: int | None = None
    # count by PyTorch operations, as on a GPU, on any device
    plain: bool = False


_current: ContextVar[EngineOptions] = ContextVar("engine_options")


def current_options() -> EngineOptions:
    """Return the options of the innermost `engine_options`, or the defaults."""
    return _current.get(EngineOptions())


@contextmanager
def engine_options(**changes: Any) -> Iterator[EngineOptions]:
    """Evaluate with other options inside the block: for tests and measurements.

    Examples:
        >>> with engine_options(threads=1):
        ...     current_options().threads
        1
    """
    token = _current.set(replace(current_options(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


@contextmanager
def computing() -> Iterator[int]:
    """Compute inside the block as the proofs assume, and yield the number of threads to compute with.

    Products of float32 are made in float32, without autocast or gradients, and torch runs one thread, since the engine has
    its own: what is left to torch are many small operations, between which threads that wait for each other cost more than
    they bring.
    """
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    cuda = torch.backends.cuda.matmul
    reductions = cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction
    torch.set_float32_matmul_precision("highest")
    cuda.allow_fp16_reduced_precision_reduction = cuda.allow_bf16_reduced_precision_reduction = False
    torch.set_num_threads(1)
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield current_options().threads or threads
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(before)
        cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction = reductions
