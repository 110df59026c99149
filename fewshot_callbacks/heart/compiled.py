"""How the loops of this package are compiled."""

from __future__ import annotations

from typing import Any

import numba

# Without reference counts (`_nrt=False`): numba counts references to the fields of a tuple atomically, which took half of the
# time of the counting loop. `error_model="numpy"`: a division by zero is checked for nowhere.
OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy", "_nrt": False}

kernel = numba.njit(**OPTIONS)
inlined = numba.njit(**OPTIONS, forceinline=True)
allocating = numba.njit(**(OPTIONS | {"_nrt": True}))
"""For loops that call what allocates: a sort, a partition."""
any_order = numba.njit(**OPTIONS, fastmath={"reassoc", "contract", "nsz"})
"""For sums whose bound holds in every order."""
