"""Fingerprints of the weights of a module, which tell whether they have changed."""

from __future__ import annotations

import torch
from torch import nn

# Number of bytes of an element -> the integers of this size, as which its bits are read.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weight_fingerprints(module: nn.Module) -> list[int]:
    """Return a number for each parameter that is another one once its values are others.

    It is a sum of the bits of this process's part of the values, read as integers: exact, whatever the device. Sums of the
    rows and of the columns have factors, so that exchanged values do not go unseen. A parameter whose bits cannot be read,
    such as one without memory, has no number.
    """
    marks = []
    for parameter in module.parameters():
        # A part of a parameter that several processes share must not be exchanged with them.
        values = parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()
        try:
            bits = values.contiguous().view(_INTEGERS[values.element_size()])
            rows = bits.reshape(len(bits) if bits.ndim else 1, -1)
            of_columns, of_rows = (rows.sum(dim=dim, dtype=torch.int64) for dim in (0, 1))
            mark = (of_columns * _odd_numbers(of_columns)).sum() + (of_rows * _odd_numbers(of_rows)).sum()
            marks.append(mark.cpu())
        except (KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
            continue
    return [int(mark) for mark in marks]


def _odd_numbers(like: torch.Tensor) -> torch.Tensor:
    return 2 * torch.arange(len(like), device=like.device) + 1
