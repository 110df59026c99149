"""How the loops of this package are compiled."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import numba

    from fewshot_callbacks._compiling import announce_compiling
except Exception as error:  # numba fails in many ways: not installed, or for another Python, NumPy or processor
    raise ImportError(
        "fewshot_callbacks needs numba, which compiles its loops, and it cannot be loaded "
        f"({type(error).__name__}: {error}). Run pip install -U numba."
    ) from error

announce_compiling()

# Without reference counts (`_nrt=False`): numba counts references to the fields of a tuple atomically, which took half
# of the time of the counting loop. `error_model="numpy"`: a division by zero is checked for nowhere.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}


def _compiler(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function at its first call, and keeps the result on disk where it can."""

    def compiled(function: Callable[..., Any]) -> Any:
        try:
            made = numba.njit(**OPTIONS | options, cache=True)(function)
            with suppress(AttributeError):  # numba's own: without it a pull of one file may need the kept loops deleted
                made._cache._cache_file._source_stamp = _stamp()
            return made
        except RuntimeError:  # no folder can be written: neither beside the module, nor the user's, nor NUMBA_CACHE_DIR
            warnings.warn(
                "numba finds no folder in which it can keep the compiled loops of fewshot_callbacks: each process compiles "
                "them anew, in about twenty seconds. Name a folder that can be written in NUMBA_CACHE_DIR.",
                stacklevel=1,  # one place for all loops, so that it is shown once
            )
            return numba.njit(**OPTIONS | options)(function)

    return compiled


@functools.cache
def _stamp() -> tuple[tuple[str, int, int], ...]:
    """Return what a kept loop has to be as new as: all files here, since numba looks at the one that calls the others."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)


kernel = _compiler()
inlined = _compiler(forceinline=True)
# For what is inlined before types are known, and so takes part in the loop of each type.
always_inlined = _compiler(inline="always")
# For sums whose bound holds in every order.
any_order = _compiler(fastmath={"reassoc", "contract", "nsz"})
