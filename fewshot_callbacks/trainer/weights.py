"""Fingerprints of a module's weights, which show whether the weights have changed."""

from __future__ import annotations

import torch
from torch import nn

from fewshot_callbacks.trainer.sharded import reshard

# bytes per element -> integer type of this size
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Values are weighted in chunks of this number, because each takes several 64-bit integers.
_AT_ONCE = 2**22
# A large odd number. Its multiples are spread over all 64 bits.
_ODD = 0x9E3779B97F4A7C15 - 2**64


def weight_fingerprints(module: nn.Module) -> list[int]:
    """Return a number for each parameter, which nearly always changes if a value changes.

    The number is the sum of the bits of this process's values, read as integers, each times an odd number of its place.
    Integer sums wrap, so the number is exact on every device. A parameter whose bits cannot be read, such as one
    without memory, has no number.
    """
    reshard(module)  # otherwise the number would depend on whether a forward pass left the weights whole
    fingerprints = []
    for parameter in module.parameters():
        # This must not exchange parts of a sharded parameter.
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
        try:
            bits = values.contiguous().view(_INTEGERS[values.element_size()])
            fingerprints.append(_weighted_sum(bits.reshape(-1)).cpu())
        except (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            continue
    return [int(fingerprint) for fingerprint in fingerprints]


def _weighted_sum(bits: torch.Tensor) -> torch.Tensor:
    """Return the sum of integers, each times an odd number of its place, modulo 2**64."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), _AT_ONCE):
        values = bits[first : first + _AT_ONCE].long()
        # The upper half is mixed into the lower one, because the bits of many floats end in zeros.
        values = values ^ (values >> (4 * bits.element_size() - 3))
        places = torch.arange(first + 1, first + 1 + len(values), device=bits.device)
        factors = places * _ODD ^ (places * _ODD) >> 29
        total += (values * (factors | 1)).sum()
    return total
