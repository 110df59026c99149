"""Counting: how many candidates beat each of a query's relevant scores. Every kernel gives the same counts.

`reference` is plain PyTorch, for any device; `compiled` is for the CPU. `use` chooses between them.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Literal, get_args

from fewshot_callbacks.engine.precision import Precision

Kernel = Literal["compiled", "reference"]

_chosen: list[Kernel] = ["compiled"]


def compiled_kernels() -> ModuleType | None:
    """The compiled kernels, or None where the reference is to be used: they cannot be loaded, or `use` says so."""
    return _load() if _chosen[-1] == "compiled" else None


@contextmanager
def use(kernel: Kernel) -> Iterator[None]:
    """Evaluate with this kernel inside the block; the counts are the same, the time is not.

    Examples:
        >>> with use("reference"):
        ...     compiled_kernels() is None
        True
    """
    if kernel not in get_args(Kernel):
        raise ValueError(f"kernel={kernel!r} is unknown. Choose one of {', '.join(get_args(Kernel))}.")
    _chosen.append(kernel)
    try:
        yield
    finally:
        _chosen.pop()


@functools.cache
def _load() -> ModuleType | None:
    try:
        return importlib.import_module("fewshot_callbacks.engine.cpu.count_kernels")
    except Exception as error:  # numba fails in many ways: not installed, or for another Python, NumPy or processor
        warnings.warn(
            f"The compiled counting kernel cannot be loaded ({type(error).__name__}: {error}); evaluation falls back to "
            "PyTorch, with the same results and several times slower. pip install -U numba brings it back.",
            stacklevel=2,
        )
        return None


Progress = Callable[[int, int], None]
"""Called with the number of pairs that are done and the number that there are."""


PrecisionName = Literal["bfloat16", "float32", "float64"]


_PRECISIONS = {"bfloat16": Precision.HALF, "float32": Precision.FLOAT32, "float64": Precision.FLOAT64}


_forced: list[Precision] = []


@contextmanager
def first_precision(precision: PrecisionName) -> Iterator[None]:
    """Make the pass begin with products of this precision inside the block; by default it takes what is fastest.

    The results are the same; this serves tests and measurements. `"bfloat16"` stands for the half precision of the device.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown. Choose one of {', '.join(_PRECISIONS)}.")
    _forced.append(_PRECISIONS[precision])
    try:
        yield
    finally:
        _forced.pop()


def forced_precision() -> Precision | None:
    """What `first_precision` asks for."""
    return _forced[-1] if _forced else None
