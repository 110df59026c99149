"""Reads numbers in tensors, arrays, lists and tables as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor


def as_tensor(value: Any, name: str, call: str) -> Tensor:
    """Read a tensor, anything NumPy makes an array of, or a list of numbers or rows, as a detached tensor.

    Raises:
        ValueError: For values that are masked, no numbers, or not there (a meta tensor), and for sparse tensors.
    """
    if isinstance(value, Tensor):
        refuse_without_values(value, name, call)
        return value.detach()
    refuse_masked(value, name, call)
    _refuse_words(value, name, call)
    try:
        if isinstance(value, list | tuple) and value and all(isinstance(part, Tensor) for part in value):
            return torch.stack([as_tensor(part, name, call) for part in value])
        return torch.as_tensor(_as_array(value), device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(
            f"{call}: {name} is a {kind} that cannot be converted to a tensor ({error}). Pass numbers: a tensor, a "
            f"NumPy array, or "
            "a list of rows of the same length."
        ) from error


def number_distinct(values: Int[Tensor, "items"]) -> tuple[Int[Tensor, "items"], Int[Tensor, "distinct"]]:
    """Number the distinct values in ascending order.

    Returns:
        The number of each item's value, and for each distinct value the index of its first item.
    """
    distinct, number = values.unique(return_inverse=True)
    first = torch.full((len(distinct),), len(values), device=values.device)
    return number, first.scatter_reduce_(0, number, torch.arange(len(values), device=values.device), "amin")


def _refuse_words(value: Any, name: str, call: str) -> None:
    """Refuse an array of words, and a list that begins with one."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "US":
        raise ValueError(f"{call}: {name} is a NumPy array of words ({value.dtype}); expected numbers.")
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, str | bytes):
        raise ValueError(f"{call}: {name} hold words, such as {first!r}; expected numbers.")


def _as_array(value: Any) -> Any:
    """Return a list of numbers unchanged, and anything else as an array that torch accepts."""
    if isinstance(value, Sequence) and not any(hasattr(part, "__array__") for part in value[:1]):
        return value
    array = np.asarray(value) if isinstance(value, Sequence) or hasattr(value, "__array__") else value
    if isinstance(array, np.ndarray) and array.dtype.kind == "O":
        array = array.astype(np.float64)
    if isinstance(array, np.ndarray) and array.dtype.kind in "fiub":
        # torch takes no negative strides, no foreign byte order, and warns of arrays that cannot be written to
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        return array if array.flags.writeable else array.copy()
    return array


def refuse_without_values(tensor: Tensor, name: str, call: str) -> None:
    """Refuse a tensor on the meta device, which holds no values, and one that is not laid out in rows.

    Raises:
        ValueError: With what to pass instead.
    """
    if tensor.is_meta:
        raise ValueError(
            f"{call}: {name} is a meta tensor, which has a shape but no values. Pass one that was computed on the CPU or "
            "an accelerator."
        )
    if tensor.layout != torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        fix = f"{name}.to_padded_tensor(0.0)" if tensor.is_nested else f"{name}.to_dense()"
        raise ValueError(f"{call}: {name} is a tensor of layout {kind}; expected a dense one. Pass {fix}.")


def refuse_masked(value: Any, name: str, call: str) -> None:
    """Refuse arrays with masked values, which a tensor would hold as if they were valid.

    Raises:
        ValueError: With two ways to get rid of it.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    masked = sum(int(np.ma.getmaskarray(part).sum()) for part in parts if isinstance(part, np.ma.MaskedArray))
    if masked:
        raise ValueError(
            f"{call}: {name} is a masked array with {masked} masked values, which a tensor would take for valid ones. Drop "
            f"the items with a masked value from all arguments, keep = ~np.ma.getmaskarray({name}).reshape(len({name}), "
            f"-1).any(axis=1), then {name}.data[keep]; or choose what stands in their place, {name}.filled(0)."
        )
