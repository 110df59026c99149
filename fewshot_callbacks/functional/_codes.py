"""Binary codes, checked."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def signs(codes: Tensor, name: str, call: str) -> Int[Tensor, "items bits"]:
    """Return codes of two values as int8 of -1 and +1.

    Args:
        codes: (items, bits) of {0, 1}, {-1, +1} or booleans, of any dtype.
        name: What they are called, for messages.
        call: Who was given them.

    Raises:
        ValueError: For another shape, or values outside the two.
    """
    if codes.ndim != 2 or not codes.shape[0] or not codes.shape[1]:
        raise ValueError(
            f"{call}: {name} have shape {tuple(codes.shape)}; codes are (items, bits), with at least one of each."
        )
    codes = codes.detach().cpu()
    high, zero = codes == 1, codes == 0
    low = codes == -1 if codes.dtype != torch.uint8 else torch.zeros_like(zero)  # torch takes -1 for 255 there
    others = codes[~(high | zero | low)]
    if len(others):
        if codes.dtype == torch.uint8:
            values = codes.unique().tolist()
            shown = " and ".join(map(str, values)) if len(values) == 2 else f"{len(values)} values up to {values[-1]}"
            raise ValueError(
                f"{call}: {name} hold {shown}; binary codes hold 0 and 1. Pass {name} > 0 if each value is a bit, or "
                f"np.unpackbits({name}, axis=1) if each is a byte of 8 bits."
            )
        found = ", ".join(f"{value:g}" for value in others[:3].tolist()) + (", ..." if len(others) > 3 else "")
        raise ValueError(
            f"{call}: binary codes hold -1 and +1, or 0 and 1; {len(others):,} of {codes.numel():,} values of {name} are "
            f"neither ({found}). Pass {name}.sign(), or {name} > 0."
        )
    if bool(zero.any()) and bool(low.any()):
        raise ValueError(f"{call}: {name} hold -1 and 0; binary codes hold -1 and +1, or 0 and 1. Pass {name} > 0.")
    return high.to(torch.int8).mul_(2).sub_(1)
