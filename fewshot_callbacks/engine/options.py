"""How a pass computes: kernel, precision, threads, sizes. None of it changes a result."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal, get_args

import torch

from fewshot_callbacks.engine.precision import Precision, full_precision

__all__ = ["Progress", "compiled_kernels", "computing_on", "engine_options"]

Progress = Callable[[int, int], None]
"""Called with the number of pairs that are done and the number that there are."""

Kernel = Literal["compiled", "pytorch", "triton"]


@dataclass(frozen=True)
class Layout:
    """How the matrix of all pairs is cut up, so that what is held at once fits a budget."""

    rows: int
    """queries in a block"""
    columns: int
    """gallery items in a block"""
    batch: int
    """queries whose counters are held at once"""
    bytes: int
    """memory that this takes, beyond the embeddings"""

    @property
    def square(self) -> bool:
        """Whether blocks of rows are as long as those of columns."""
        return self.rows == min(self.columns, self.batch)


@dataclass(frozen=True)
class EngineOptions:
    """Options of a pass, which travel as this one value; the results are the same with all of them."""

    kernel: Kernel = "compiled"
    """compiled loops on the CPU and kernels in Triton on CUDA; or plain PyTorch, which any device runs; or Triton on any
    device, which on the CPU means in its interpreter: for tests"""
    first_precision: Precision | None = None
    """precision of the products that a pass begins with; by default the fastest on a sample"""
    threads: int | None = None
    """by default those of torch"""
    layout: Layout | None = None
    """the largest blocks; by default the largest that fit the budget"""
    tile_rows: int = 256
    """rows of a block whose scores are made at once, at most"""
    threaded_from: int = 2**24
    """multiplications of a rectangle from which several threads pay"""
    pilot_pairs: int = 2**20
    """pairs from which a sample pays that chooses the first precision"""
    bins: int = 2**15
    """bins of the histogram of all scores, at most"""
    collected_share: float = 0.05
    """share of all pairs that is collected, at most"""
    listed_bytes: int = 400
    """what one relevant score costs while it is listed with all that is known of it, with room to spare"""

    def __post_init__(self) -> None:
        """Refuse an unknown kernel."""
        if self.kernel not in get_args(Kernel):
            raise ValueError(f"kernel={self.kernel!r} is unknown. Choose one of {', '.join(get_args(Kernel))}.")


_current: ContextVar[EngineOptions] = ContextVar("engine_options")


def current_options() -> EngineOptions:
    """Return the options of the innermost `engine_options`, or the defaults."""
    return _current.get(EngineOptions())


@contextmanager
def engine_options(**changes: Any) -> Iterator[EngineOptions]:
    """Evaluate with other options inside the block: for tests and measurements.

    Examples:
        >>> with engine_options(kernel="pytorch"):
        ...     compiled_kernels() is None
        True
    """
    token = _current.set(replace(current_options(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def compiled_kernels() -> ModuleType | None:
    """Return the compiled kernels; None if they cannot be loaded, or the options choose PyTorch."""
    return _load() if current_options().kernel == "compiled" else None


@functools.cache
def _load() -> ModuleType | None:
    try:
        return importlib.import_module("fewshot_callbacks.engine.cpu.count_kernels")
    except Exception as error:  # numba fails in many ways: not installed, or for another Python, NumPy or processor
        nowhere = "no locator available" in str(error)  # neither beside the module nor in the user's cache folder
        fix = "Naming a folder that can be written in NUMBA_CACHE_DIR" if nowhere else "pip install -U numba"
        warnings.warn(
            f"The compiled counting kernel cannot be loaded ({type(error).__name__}: {error}); evaluation falls back to "
            f"PyTorch, with the same results and several times slower. {fix} brings it back.",
            stacklevel=2,
        )
        return None


def triton_kernels(device: torch.device) -> ModuleType | None:
    """Return the kernels for CUDA; None if this device is not for them or cannot run them, or the options choose PyTorch."""
    kernel = current_options().kernel
    if kernel == "triton":
        return _load_triton(None)
    return _load_triton(device) if kernel == "compiled" and device.type == "cuda" else None


@functools.cache
def _load_triton(device: torch.device | None) -> ModuleType | None:
    if device is not None and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return None  # Triton asks for compute capability 8.0, which is also the first with TF32 and bfloat16
    try:
        kernels = importlib.import_module("fewshot_callbacks.engine.cuda.count_kernels")
        kernels.try_out(torch.device("cpu") if device is None else device)
    except Exception as error:  # Triton needs a C compiler, a driver and a GPU that it knows, beside being installed
        warnings.warn(
            f"The counting kernels for CUDA cannot be loaded ({type(error).__name__}: {error}); evaluation falls back to "
            "plain PyTorch, with the same results and more slowly. pip install -U triton may bring them back.",
            stacklevel=2,
        )
        return None
    return kernels


@contextmanager
def computing_on(device: torch.device | None) -> Iterator[None]:
    """Compute inside the block in full precision, without gradients.

    Passes on the CPU run their own threads, each with its own products, and torch is limited to one. What is left to torch
    are many small operations: threads that wait for each other between them cost more than they bring, the more so where
    something else uses the processor too.

    Args:
        device: Of the passes; None if there is none, and torch keeps its threads.
    """
    compiled = device is not None and device.type == "cpu" and compiled_kernels() is not None
    with full_precision(), _own_threads() if compiled else nullcontext():
        yield


@contextmanager
def _own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    with engine_options(threads=current_options().threads or before):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
