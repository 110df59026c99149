"""Checks and converts single arrays and numbers of a call. `item_reader.read_items` reads the sets of a call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._arrow import is_arrow, without_arrow
from fewshot_callbacks.storage.stored_rows import (
    StoredRows,
    is_of_other_library,
    read_only_tensor,
    tensor_of_other_library,
)
from fewshot_callbacks.system.words import counted, verb, with_article


@contextmanager
def default_mode() -> Iterator[None]:
    """Create new tensors on the CPU inside the block, and keep denormal numbers.

    With another default device (`torch.set_default_device`), new tensors of a calculation would be on that device, but its
    inputs would not. If denormal numbers are flushed to zero (`torch.set_flush_denormal`, or a library that was built with
    `-ffast-math`), the difference of two different numbers can be zero, and the error bounds are wrong. Other threads of the
    process keep their mode. Threads that start inside the block have the mode of the block.
    """
    flushes = sys.float_info.min / 2 == 0
    with ExitStack() as stack:
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if flushes:
            threads = torch.get_num_threads()
            stack.callback(torch.set_flush_denormal, True)
            stack.callback(torch.set_num_threads, threads)
            torch.set_flush_denormal(False)
            torch.set_num_threads(1)  # PyTorch's own threads may have started with the caller's mode
        yield


def as_tensor(value: Any, name: str, call: str) -> Tensor:
    """Return a detached tensor of a tensor, an array, or a list of numbers or rows.

    An array may be a NumPy array, an array that supports DLPack (JAX, CuPy), a column of vectors that supports Arrow's C
    interface (pyarrow, Polars, pandas), or anything that NumPy converts. An array on a device stays there. Do not write to
    the tensor, because it may share the memory of a read-only array. Python floats in a list become float32, independent
    of torch's default dtype.
    """
    if isinstance(value, Tensor):
        refuse_without_values(value, name, call)
        return _computable_values(value)
    value = without_arrow(value, name, call)
    refuse_masked(value, name, call)
    _refuse_words(value, name, call)
    try:
        if isinstance(value, list | tuple) and value and all(map(_is_row, value)):
            return torch.stack([as_tensor(row, name, call) for row in value])
        tensor = tensor_of_other_library(value)
        if tensor is None:
            array = _as_array(value)
            tensor = tensor_of_other_library(array)
        if tensor is None:
            tensor = read_only_tensor(array) if _is_read_only(array) else torch.as_tensor(array, device="cpu")
            if tensor.dtype == torch.get_default_dtype() and _is_of_python_numbers(array):
                tensor = torch.as_tensor(array, device="cpu", dtype=torch.float32)
        return _computable_values(tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = with_article(f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__)
        raise InputError(
            f"{call}: {name} is {kind} that cannot be converted to a tensor ({error}). Pass numbers: a tensor, a NumPy "
            "array, or a list of rows of the same length."
        ) from error


def as_list(ids: Any) -> list[Any]:
    """Return ids as Python strings and integers."""
    values: list[Any] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return [name.item() if hasattr(name, "item") and np.ndim(name) == 0 else name for name in values]


def _computable_values(tensor: Tensor) -> Tensor:
    """Return a tensor that NumPy and PyTorch can compute with: 8-bit floats become float32, lazy signs are resolved."""
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor = tensor.float()
    return tensor.detach().resolve_conj().resolve_neg()


def tensor_code(name: str, value: Any) -> str:
    """Return code that makes a tensor of an argument, for messages: its name, or a call for an array or a list."""
    if isinstance(value, Tensor):
        return name
    if isinstance(value, list | tuple) and len(value) and all(isinstance(row, Tensor) for row in value):
        return f"torch.stack({name})"
    if is_of_other_library(value) and not is_arrow(value):
        return f"torch.from_dlpack({name})"
    if isinstance(value, list | tuple) and len(value) and isinstance(value[0], np.ndarray):
        return f"torch.as_tensor(np.stack({name}))"
    if isinstance(value, np.ndarray | list | tuple):
        return f"torch.as_tensor({name})"
    array_code = _array_code(name, value)
    return f"torch.as_tensor({name}[:])" if array_code is None else f"torch.tensor({array_code})"


def _array_code(name: str, value: Any) -> str | None:
    """Return code that makes a NumPy array of an array of another library; None if NumPy cannot."""
    if is_arrow(value):
        return f"np.array({name}.to_pylist())" if hasattr(value, "to_pylist") else f"np.stack({name})"
    return f"np.asarray({name})" if hasattr(value, "__array__") else None


def number_distinct(values: Int[Tensor, "items"]) -> tuple[Int[Tensor, "items"], Int[Tensor, "distinct"]]:
    """Return the number of the value of each item, and the index of the first item of each value.

    Distinct values are numbered from 0 in ascending order.
    """
    distinct, numbers = values.unique(return_inverse=True)
    indices = torch.arange(len(values), device=values.device)
    first_items = torch.full((len(distinct),), len(values), device=values.device)
    return numbers, first_items.scatter_reduce_(0, numbers, indices, "amin")


def _is_row(value: Any) -> bool:
    """Return whether an entry of a list is a tensor, or an array that supports DLPack."""
    return isinstance(value, Tensor) or is_of_other_library(value)


def _refuse_words(value: Any, name: str, call: str) -> None:
    """Refuse an array of strings, and a list that begins with one."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "US":
        raise InputError(f"{call}: {name} is a NumPy array of strings ({value.dtype}). Pass numbers.")
    first = _first_number(value)
    if isinstance(first, str | bytes):
        raise InputError(f"{call}: {name} contains strings, such as {first!r}. Pass numbers.")


def _first_number(value: Any) -> Any:
    """Return the first entry of nested lists; any other value unchanged."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value


def _is_of_python_numbers(value: Any) -> bool:
    """Return whether a value is nested lists of Python numbers, to which torch gives its default dtype."""
    return isinstance(value, list | tuple) and not isinstance(_first_number(value), np.generic)


def _as_array(value: Any) -> Any:
    """Return a list of numbers unchanged; any other value as an array that torch accepts."""
    if isinstance(value, Sequence) and not any(hasattr(first, "__array__") for first in value[:1]):
        return value
    array = np.asarray(value) if isinstance(value, Sequence) or hasattr(value, "__array__") else value
    if isinstance(array, np.ndarray) and array.dtype.kind == "O":
        array = array.astype(np.float64)
    if isinstance(array, np.ndarray) and array.dtype.kind in "fiub":
        # torch refuses negative strides and a foreign byte order
        return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    return array


def _is_read_only(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind in "fiub" and not array.flags.writeable


def refuse_without_values(tensor: Tensor, name: str, call: str) -> None:
    """Refuse meta tensors, tensors that are not dense, and DTensors."""
    if tensor.is_meta:
        raise InputError(
            f"{call}: {name} is a meta tensor, which has a shape but no values. Pass a tensor that was computed on the "
            "CPU or on an accelerator."
        )
    if hasattr(tensor, "full_tensor"):
        raise InputError(
            f"{call}: {name} is a DTensor, so this process only has a part of it. Call {name}.full_tensor() in all "
            "processes of its mesh, and pass the result."
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.layout == torch.strided else str(tensor.layout).removeprefix("torch.")
        fix = f"{name}.to_padded_tensor(0.0)" if tensor.is_nested else f"{name}.to_dense()"
        raise InputError(f"{call}: {name} has the layout {kind}, which is not dense. Pass {fix}.")


def refuse_masked(value: Any, name: str, call: str) -> None:
    """Refuse arrays with masked values, which would be valid values in a tensor."""
    arrays = value if isinstance(value, list | tuple) else [value]
    masked = sum(int(np.ma.getmaskarray(array).sum()) for array in arrays if isinstance(array, np.ma.MaskedArray))
    if masked:
        stack = f"{name} = np.ma.stack({name}), then " if arrays is value else ""  # a list has no mask of its own
        raise InputError(
            f"{call}: {name} is a masked array with {counted(masked, 'masked value')}, which would be valid values in a "
            f"tensor. Drop the items with a masked value from all arguments, {stack}keep = "
            f"~np.ma.getmaskarray({name}).reshape(len({name}), -1).any(axis=1), then {name}.data[keep]. Or replace masked "
            f"values, {name}.filled(0)."
        )


def check_embeddings(embeddings: Tensor, name: str, call: str, code: str | None = None) -> None:
    """Refuse anything but a finite, non-empty, floating-point (items, dim) matrix (see `check_matrix`)."""
    check_matrix(embeddings, name, call, code)
    refuse_non_finite(non_finite_rows(embeddings), len(embeddings), name, call, code=code)


def check_matrix(embeddings: Tensor | StoredRows, name: str, call: str, code: str | None = None) -> None:
    """Refuse anything but a non-empty, floating-point (items, dim) matrix; its values may be NaN.

    `code` makes a tensor of the argument (see `tensor_code`); None for its name.
    """
    code = code or name
    if embeddings.ndim != 2:
        fix = matrix_from(code, embeddings.ndim)
        raise InputError(f"{needs(call)} {name} of shape (items, dim), but got shape {tuple(embeddings.shape)}. {fix}")
    if not embeddings.dtype.is_floating_point:
        raise InputError(
            f"{needs(call)} floating-point {name}, but got {embeddings.dtype}. {as_floats(code, embeddings.dtype)}"
        )
    if embeddings.shape[0] == 0:
        raise InputError(f"{call}: {name} is empty (shape {tuple(embeddings.shape)}). Pass at least one item.")
    if embeddings.shape[1] == 0:
        raise InputError(
            f"{call}: {name} has no dimensions (shape {tuple(embeddings.shape)}). Pass vectors of at least one number."
        )


@contextmanager
def named(call: str, inner: str, remedies: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Word the errors of an inner function for a caller that has other arguments.

    `remedies` maps a sentence of the inner function to what the user of the caller can do.
    """
    try:
        yield
    except ValueError as error:
        message = str(error)
        if message.startswith((f"{inner}:", f"{inner} ", f"{inner}(")):
            message = f"{call}{message.removeprefix(inner)}"
        error.args = (reworded(message, remedies),)
        raise


def reworded(message: str, remedies: Mapping[str, str]) -> str:
    """Return a message with the sentences of another caller.

    Examples:
        >>> reworded("No items. Pass a gallery.", {"Pass a gallery.": "Pass bank=..."})
        'No items. Pass bank=...'
    """
    for sentence, replacement in remedies.items():
        message = message.replace(sentence, replacement)
    return message


def needs(call: str) -> str:
    """Return the beginning of a sentence on what a call, or several callbacks `A and B`, need.

    Examples:
        >>> needs("knn_accuracy"), needs("KnnMonitor and ProbeMonitor")
        ('knn_accuracy needs', 'KnnMonitor and ProbeMonitor need')
    """
    return f"{call} {'need' if ' and ' in call else 'needs'}"


def as_floats(code: str, dtype: torch.dtype) -> str:
    """Return a sentence on how to convert a matrix to floating-point numbers, with both parts of complex numbers."""
    if dtype.is_complex:
        return f"Pass torch.view_as_real({code}).flatten(1), the real and imaginary parts."
    return f"Pass {code}.float()."


def matrix_from(code: str, ndim: int) -> str:
    """Return a sentence on how to make a matrix of a tensor with this number of dimensions."""
    if ndim == 1:
        return f"For a single item, pass {code}[None]. For items of one number each, pass {code}[:, None]."
    if ndim > 2:
        return f"Flatten each item: {code}.flatten(1)."
    return "Pass a matrix."


def refuse_unknown(call: str, name: str, value: Any, known: Any, fix: str) -> None:
    """Refuse a setting that is not one of the choices of a `Literal`.

    `known` is the `Literal`. `fix` says what to pass instead.
    """
    if value not in get_args(known):
        raise InputError(f"{call}: {name}={value!r} does not exist. {fix}")


def check_seed(call: str, name: str, seed: Any) -> int:
    """Return a seed as a 64-bit integer, as PyTorch's generators need it."""
    is_whole = hasattr(seed, "__index__") and not isinstance(seed, bool)
    if not is_whole or not -(2**63) <= seed.__index__() < 2**64:
        raise InputError(
            f"{call}: {name}={seed!r} is not a whole number from -2**63 to 2**64 - 1. Pass a seed such as 0."
        )
    return int(seed.__index__())


def refuse_non_finite(rows: Tensor, items: int, name: str, call: str, where: str = "", code: str | None = None) -> None:
    """Refuse a matrix with non-finite rows.

    `rows` are the indices of the non-finite rows, ascending. `where` is the location of the first one in files.
    """
    if len(rows):
        code = code or name
        raise InputError(
            f"{call}: {len(rows)} of {counted(items, 'row')} of {name} {verb(len(rows), 'contains', 'contain')} NaN or Inf, "
            f"the first at index {int(rows[0])}{where}. Find the cause (a diverged loss, a division by a zero norm, float16 "
            f"overflow), or drop these rows: keep = {code}.isfinite().all(dim=1), then {code}[keep], and the same items of "
            "the other arguments."
        )


def non_finite_rows(embeddings: Tensor | StoredRows) -> Tensor:
    """Return the indices of rows with NaN or Inf, ascending.

    Rows are searched in slices, because a mask of the whole matrix would take a quarter of its memory. The sum of all
    numbers is computed first. It takes a third of the time, and it is only finite if all numbers are.
    """
    if isinstance(embeddings, StoredRows):
        return torch.cat([chunk.start + non_finite_rows(rows) for chunk, rows in embeddings.chunks()])
    if embeddings.dtype in (torch.float32, torch.float64) and bool(embeddings.sum().isfinite()):
        return torch.empty(0, dtype=torch.int64, device=embeddings.device)
    slice_rows = max(1, 2**16 // max(1, embeddings.shape[1]))  # 0.5 MB in float64
    masks = [~rows.isfinite().all(dim=1) for rows in embeddings.split(slice_rows)]
    return torch.cat(masks).nonzero().flatten()


def computable(vectors: Tensor) -> Tensor:
    """Return contiguous rows; half precision becomes float32, without loss."""
    if vectors.dtype not in (torch.float32, torch.float64):
        vectors = vectors.float()
    return vectors.contiguous()


def signs(codes: Tensor, name: str, call: str, code: str | None = None) -> Int[Tensor, "items bits"]:
    """Return codes of two values as int8 of -1 and +1.

    `codes` have the values {0, 1}, {-1, +1} or booleans, in any dtype.
    """
    code = code or name
    if codes.ndim != 2 or not codes.shape[0] or not codes.shape[1]:
        raise InputError(
            f"{call}: {name} have shape {tuple(codes.shape)}. Pass codes of shape (items, bits), with at least one of each."
        )
    codes = codes.detach().cpu()
    is_one = codes == 1
    is_zero = codes == 0
    # In unsigned bytes, torch compares 255 as equal to -1.
    is_minus_one = torch.zeros_like(is_zero) if codes.dtype == torch.uint8 else codes == -1
    other_values = codes[~(is_one | is_zero | is_minus_one)]
    if len(other_values):
        _refuse_other_values(codes, other_values, name, call, code)
    if bool(is_zero.any()) and bool(is_minus_one.any()):
        raise InputError(
            f"{call}: {name} contain -1 and 0, but binary codes contain -1 and +1, or 0 and 1. Pass {code} > 0."
        )
    return is_one.to(torch.int8).mul_(2).sub_(1)


def _refuse_other_values(codes: Tensor, other_values: Tensor, name: str, call: str, code: str) -> None:
    """Refuse codes of more than two values. For bytes that hold 8 bits each, the message says how to unpack them."""
    if codes.dtype == torch.uint8:
        values = codes.unique().tolist()
        examples = " and ".join(map(str, values)) if len(values) == 2 else f"{len(values)} values up to {values[-1]}"
        raise InputError(
            f"{call}: {name} hold {examples}; binary codes hold 0 and 1. Pass {code} > 0 if each value is a bit, or "
            f"np.unpackbits({name}, axis=1) if each is a byte of 8 bits."
        )
    fix = f"Pass {code} > 0."
    if codes.dtype == torch.int8:  # how sentence-transformers packs bits: bytes minus 128
        fix = (
            f"Pass {code} > 0 if each value is a number, or "
            f"np.unpackbits(np.asarray({name}).view(np.uint8) ^ 128, axis=1) if each is a byte of 8 bits, as "
            'quantize_embeddings(precision="binary") makes them.'
        )
    examples = ", ".join(f"{value:g}" for value in other_values[:3].tolist())
    if len(other_values) > 3:
        examples += ", ..."
    raise InputError(
        f"{call}: binary codes hold -1 and +1, or 0 and 1; {len(other_values):,} of {codes.numel():,} values of {name} are "
        f"neither ({examples}). {fix}"
    )
