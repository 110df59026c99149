"""Fingerprints of the weights of a module, which tell whether they have changed."""

from __future__ import annotations

import torch
from torch import nn

# Number of bytes of an element -> integer type of this size, which reads its bits.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weight_fingerprints(module: nn.Module) -> list[int]:
    """Return a number for each parameter. Other values give another number.

    The number is a sum of the bits of this process's values, read as integers. So it is exact on every device.
    The sums of rows and of columns are multiplied by odd numbers, so that exchanged values change it. A parameter whose bits
    cannot be read, such as one without memory, has no number.
    """
    fingerprints = []
    for parameter in module.parameters():
        # Processes that share a parameter must not exchange their parts of it.
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
        try:
            bits = values.contiguous().view(_INTEGERS[values.element_size()])
            rows = bits.reshape(len(bits) if bits.ndim else 1, -1)
            column_sums = rows.sum(dim=0, dtype=torch.int64)
            row_sums = rows.sum(dim=1, dtype=torch.int64)
            fingerprint = _weighted_sum(column_sums) + _weighted_sum(row_sums)
            fingerprints.append(fingerprint.cpu())
        except (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            continue
    return [int(fingerprint) for fingerprint in fingerprints]


def _weighted_sum(sums: torch.Tensor) -> torch.Tensor:
    """Return 1 * sums[0] + 3 * sums[1] + 5 * sums[2] + ..."""
    odd_numbers = 2 * torch.arange(len(sums), device=sums.device) + 1
    return (sums * odd_numbers).sum()
