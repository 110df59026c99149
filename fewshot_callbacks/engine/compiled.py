"""How the loops of this package are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import numba

    from fewshot_callbacks.system.compile_notice import announce_compiling
    from fewshot_callbacks.system.loop_cache import cache_on_disk, name_by_content
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
        loop = numba.njit(**OPTIONS | options)(function)
        if "<locals>" in function.__qualname__:
            name_by_content(loop)
        return cache_on_disk(loop)

    return compiled


kernel = _compiler()
inlined = _compiler(forceinline=True)
# For what is inlined before types are known, and so takes part in the loop of each type.
always_inlined = _compiler(inline="always")
# For sums whose bound holds in every order.
any_order = _compiler(fastmath={"reassoc", "contract", "nsz"})
