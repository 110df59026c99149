"""Decorators that compile the loops of this package with numba."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

try:
    import numba
except Exception as error:  # numba fails in many ways: not installed, or for another Python, NumPy or processor
    raise ImportError(
        "fewshot_callbacks cannot import numba, which compiles its kernels "
        f"({type(error).__name__}: {error}). Run pip install -U numba."
    ) from error

try:
    from fewshot_callbacks.system.compile_notice import announce_compiling
    from fewshot_callbacks.system.loop_cache import cache_on_disk
except (ImportError, AttributeError) as error:  # a newer numba has moved its private parts
    warnings.warn(
        f"fewshot_callbacks cannot cache its compiled kernels with numba {numba.__version__} ({error}). Every process "
        "compiles them again, which takes about twenty seconds. Install an older numba, or update fewshot-callbacks.",
        stacklevel=2,
    )

    def cache_on_disk(loop: Any) -> Any:
        """Return the loop as it is. Only this process keeps it."""
        return loop

else:
    announce_compiling()

# `_nrt=False` switches reference counts off: numba counts references to the fields of a tuple atomically, which took
# half the time of the counting loop. `error_model="numpy"` switches off the check for a division by zero.
# `no_cfunc_wrapper` omits wrappers for C, which nothing uses and which take time to compile.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}


def _compiler(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function at its first call and caches the result on disk if it can."""

    def compiled(function: Callable[..., Any]) -> Any:
        return cache_on_disk(numba.njit(**OPTIONS | options)(function))

    return compiled


kernel = _compiler()
# For loops that only other loops call. They have no wrapper for calls from Python, which would take time to compile. A
# call from Python ends the process.
inner_kernel = _compiler(no_cpython_wrapper=True)
inlined = _compiler(forceinline=True, no_cpython_wrapper=True)
# For functions that are inlined before types are known, so that each type gets its own loop.
always_inlined = _compiler(inline="always")
# For sums whose bound holds in every order; only other loops call them.
any_order = _compiler(no_cpython_wrapper=True, fastmath={"reassoc", "contract", "nsz"})
