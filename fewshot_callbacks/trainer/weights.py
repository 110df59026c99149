"""Fingerprints of the weights of a module, which tell whether they have changed."""

from __future__ import annotations

import torch
from torch import nn

from fewshot_callbacks.trainer.sharded import reshard

# Number of bytes of an element -> integer type of this size, which reads its bits.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Number of values that are weighted at a time: their integers take eight times the memory of a value in bytes.
_AT_ONCE = 2**22
# A large odd number: its multiples are spread over all 64 bits.
_ODD = 0x9E3779B97F4A7C15 - 2**64


def weight_fingerprints(module: nn.Module) -> list[int]:
    """Return a number for each parameter. Other values nearly always give another number.

    The number is the sum of the bits of this process's values, read as integers, each times a random odd number. Sums of
    integers wrap, so the number is exact on every device. A parameter whose bits cannot be read, such as one without
    memory, has no number.
    """
    reshard(module)  # else the number would tell whether a forward pass has left the weights whole
    fingerprints = []
    for parameter in module.parameters():
        # Processes that share a parameter must not exchange their parts of it.
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
        try:
            bits = values.contiguous().view(_INTEGERS[values.element_size()])
            fingerprints.append(_weighted_sum(bits.reshape(-1)).cpu())
        except (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            continue
    return [int(fingerprint) for fingerprint in fingerprints]


def _weighted_sum(bits: torch.Tensor) -> torch.Tensor:
    """Return the sum of some integers, each times an odd number of its place, modulo 2**64."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), _AT_ONCE):
        values = bits[first : first + _AT_ONCE].long()
        # The upper half is mixed into the lower, since small floats end in zeros.
        values = values ^ (values >> (4 * bits.element_size() - 3))
        places = torch.arange(first + 1, first + 1 + len(values), device=bits.device)
        factors = places * _ODD ^ (places * _ODD) >> 29
        total += (values * (factors | 1)).sum()
    return total
