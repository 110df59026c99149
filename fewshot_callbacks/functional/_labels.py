"""Labels, ids and groups: stored as passed, and encoded as integers when a set is complete.

    batch -> as_labels -> Labels -> join -> encode -> codes and names

A batch adds `Labels`: integers, strings, or sets of labels. When a set is complete, `encode` gives every distinct label a
code that all arguments and processes agree on. For this, the processes exchange their distinct strings once. Integers are
their own codes, because reports show them.

`as_labels` reads labels, with one function per form: `_labels_of_sets`, `_labels_of_integers` and `_labels_of_entries`.
`Labels.form` is the name of the form in messages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._arrow import without_arrow
from fewshot_callbacks.functional._reading import as_tensor, needs, refuse_masked, refuse_without_values, tensor_code
from fewshot_callbacks.storage.stored_rows import is_of_other_library
from fewshot_callbacks.system.words import counted, verb, with_article

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_INTEGERS = int | np.integer | np.bool_
LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

# Bytes per digest of an id. Among 1e9 ids, two have the same digest with a probability of 1e18 / 2^129, below 1e-20.
DIGEST_BYTES = 16

# Last word of the name of an argument -> noun for its entries, unless these are labels.
_NOUNS = {"ids": "id", "groups": "group", "places": "place", "clusters": "cluster", "folds": "fold"}


class LabelFormsError(InputError):
    """Raised for labels of different forms, which is a mistake in the arguments that later data cannot fix."""


@dataclass(frozen=True)
class Labels:
    """The label of each item, in the form in which it was passed.

    Examples:
        >>> labels = as_labels(["owl", "heron", "owl"], "labels", "example")
        >>> len(labels), labels.tolist()
        (3, ['owl', 'heron', 'owl'])
        >>> import numpy as np
        >>> np.asarray(labels[1:])
        array(['heron', 'owl'], dtype=object)
    """

    values: Int[Tensor, "items"] | Float64[Tensor, "items *targets"] | Shaped[np.ndarray, "items"]
    """int64 integers on their device; or an array of objects, which are strings, or the set of labels of each item as an
    ascending tuple of columns; or regression targets in float64, (items,) or (items, targets)"""
    columns: int | None = None
    """number of columns of zeros and ones, for sets of labels; None if each item has one label"""

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> Labels:
        """Return the labels of a slice, a mask or indices, on any device."""
        if isinstance(rows, Tensor):
            rows = rows.to(self.values.device) if isinstance(self.values, Tensor) else rows.cpu().numpy()
        return Labels(self.values[rows], self.columns)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the labels as a NumPy array: int64 for integers, objects for strings and for tuples of columns."""
        values = self.values.cpu().numpy() if isinstance(self.values, Tensor) else self.values
        array: NDArray[Any] = np.array(values, dtype=dtype, copy=copy is not False)
        return array

    def tolist(self) -> list[Any]:
        """Return the labels as Python integers, strings, or tuples of columns."""
        entries: list[Any] = self.values.tolist()
        return entries

    @property
    def form(self) -> str:
        """The form of the labels, for messages: integers, strings, zeros and ones, or targets."""
        if self.are_targets:
            return "targets of a regression"
        if isinstance(self.values, Tensor):
            return "integers"
        return "strings" if self.columns is None else f"zeros and ones of {counted(self.columns, 'label')}"

    @property
    def are_targets(self) -> bool:
        """Whether these are regression targets instead of classes."""
        return isinstance(self.values, Tensor) and self.values.is_floating_point()

    @property
    def codes(self) -> Int[Tensor, "items"]:
        """Integers that are equal if the labels are. Use `encode` for codes that can be compared with other labels."""
        return self.encoded()[0]

    def encoded(self) -> tuple[Int[Tensor, "items"], tuple[Any, ...] | None]:
        """Return codes that are only valid for these labels, and the label of each code; None for integers."""
        [codes], names = encode("Labels.encoded", {"labels": self})
        return codes, names

    def distinct(self) -> tuple[Labels, Int[Tensor, "items"]]:
        """Return the distinct labels, ascending, and the index of each item's label among them."""
        if isinstance(self.values, Tensor):
            integers, index = self.values.unique(return_inverse=True)
            return Labels(integers), index
        codes, names = self.encoded()
        return Labels(_objects(names or ()), self.columns), codes


# ---------------------------------------------------------------------------------------------------------------- reading


def as_labels(value: Any, name: str, call: str, *, sets: bool = False) -> Labels:
    """Return labels from a tensor, array, list or table column of integers or strings, (items,) or (items, 1).

    `Labels` are returned unchanged. With `sets`, zeros and ones of shape (items, labels) are also accepted.

    Examples:
        >>> import torch
        >>> as_labels(["owl", "heron", "owl"], "labels", "example").tolist()
        ['owl', 'heron', 'owl']
        >>> as_labels(torch.tensor([[7], [-1]]), "labels", "example").tolist()
        [7, -1]
        >>> as_labels(torch.tensor([[1, 0, 1], [0, 0, 0]]), "labels", "example", sets=True).tolist()
        [(0, 2), ()]
    """
    if isinstance(value, Labels):
        return value
    if isinstance(value, Tensor):
        refuse_without_values(value, name, call)
    array = value if isinstance(value, Tensor) else _array_or_tensor(value, name, call)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array.reshape(-1)
    if not isinstance(array, Tensor):
        code = name if isinstance(value, np.ndarray) else f"np.asarray({name})"
        _check_shape(array.shape, name, call, f"one column: {code}[:, 0]", code)
        return _labels_of_entries(array.tolist(), name, call)
    numbers = as_tensor(array, name, call)
    if numbers.ndim == 1 and not len(numbers):
        return Labels(numbers.long())
    if sets and numbers.ndim == 2:
        return _labels_of_sets(numbers, name, call)
    code = tensor_code(name, value)
    _check_shape(numbers.shape, name, call, f"{code}.argmax(dim=1) if they are one-hot", code)
    return _labels_of_integers(numbers, name, call, code)


def as_targets(value: Any, name: str, call: str) -> Labels | None:
    """Return regression targets, (items,) or (items, targets) floating-point numbers; None for anything else."""
    if isinstance(value, Labels):
        return value if value.are_targets else None
    array = value if isinstance(value, Tensor) else _array_or_tensor(value, name, call)
    if not isinstance(array, Tensor) or not array.is_floating_point() or array.ndim not in (1, 2):
        return None
    missing = int((~array.isfinite()).sum())
    if missing:
        raise InputError(
            f"{call}: {missing:,} of {counted(array.numel(), 'target')} in {name} {verb(missing, 'is', 'are')} NaN or "
            "infinite. Drop these items."
        )
    return Labels(array.detach().double())


def labels_of_each(value: Any, items: int, name: str, of: str, call: str, *, sets: bool = False) -> Labels:
    """Return labels (see `as_labels`), one per item, on their device."""
    labels = as_labels(value, name, call, sets=sets)
    if len(labels) != items:
        raise InputError(
            f"{call}: there are {items} {of}, but {len(labels)} {name}. Pass one per item, in the same order."
        )
    return labels


def read_labels(value: Any, items: int, name: str, of: str, call: str, *, sets: bool = False) -> Labels:
    """Return labels (see `as_labels`), one per item, on the CPU."""
    return on_cpu(labels_of_each(value, items, name, of, call, sets=sets))


def check_labels(value: Any, items: int, name: str, of: str, call: str) -> Int[Tensor, "items"]:
    """Return codes on the CPU that are equal if labels are; integers are their own codes."""
    return read_labels(value, items, name, of, call).codes


def no_labels() -> Labels:
    """Return empty labels, which can be joined with labels of any form."""
    return Labels(torch.empty(0, dtype=torch.int64, device="cpu"))


def on_cpu(labels: Labels) -> Labels:
    """Return the same labels on the CPU."""
    if isinstance(labels.values, Tensor):
        return Labels(labels.values.cpu().contiguous())
    return labels


def join(call: str, batches: Sequence[Labels], name: str = "labels") -> Labels:
    """Return the labels of all batches, one after the other.

    Labels have one form, and integers are on one device. Empty labels have no form.
    """
    non_empty = [batch for batch in batches if len(batch)]
    if not non_empty:
        return batches[0] if batches else no_labels()
    forms = sorted({batch.form for batch in non_empty}, reverse=True)
    refuse_other_forms(call, {f"some {name}": forms[0], "others": forms[-1]}, name)
    if non_empty[0].are_targets:
        return Labels(torch.cat([batch.values for batch in non_empty if isinstance(batch.values, Tensor)]))
    if forms == ["integers"]:
        return Labels(torch.cat([_integers_in(batch) for batch in non_empty]))
    return Labels(np.concatenate([batch.values for batch in non_empty]), non_empty[0].columns)


# --------------------------------------------------------------------------------------------------------------- encoding


def encode(
    call: str, labels: Mapping[str, Labels], processes: Processes = ALONE
) -> tuple[list[Int[Tensor, "_"]], tuple[Any, ...] | None]:
    """Return codes that all arguments and processes agree on, and the label of each code. *Collective*.

    Args:
        call: The public function, for messages.
        labels: Labels of this process, by the name of the argument; any of them may be empty.
        processes: All processes with labels. They only exchange their distinct strings.

    Returns:
        The codes of each argument, and the label of each code, ascending. Integers are their own codes, on their device,
        and the labels are then None. Other codes are on the CPU.

    Raises:
        ValueError: If labels have different forms. Every process raises it.

    Examples:
        >>> queries, gallery = as_labels(["owl"], "a", "example"), as_labels(["heron", "owl"], "b", "example")
        >>> encode("example", {"a": queries, "b": gallery})
        ([tensor([1]), tensor([0, 1])], ('heron', 'owl'))
    """
    by_rank = processes.gather((_forms(labels), _distinct_objects(labels.values())))
    forms = [of_rank for of_rank, _ in by_rank]
    refuse_other_forms(call, _forms_of_all(forms))
    if not _are_objects(forms):
        return [_integers_in(column) for column in labels.values()], None
    # A dictionary of the sorted strings is faster than `np.unique`, which compares objects: for a million strings of 1,000
    # classes it takes 0.05 s instead of 1.7 s.
    names = sorted(set().union(*(of_rank for _, of_rank in by_rank)))
    code_of = {label: code for code, label in enumerate(names)}
    return [_looked_up(column, code_of) for column in labels.values()], tuple(names)


def encode_ids(call: str, labels: Mapping[str, Labels], processes: Processes = ALONE) -> list[Int[Tensor, "_"]]:
    """Return codes that are equal where ids or groups are equal, in all arguments and processes. *Collective*.

    Unlike `encode`, it neither keeps nor sorts the ids. Processes exchange a digest of 16 bytes instead of each distinct
    string, because file paths are all distinct and long. Half a million distinct strings in each of two processes take about
    1 s of processor time per process. Integers are their own codes, so nothing is computed or sent.

    Ids are integers or strings of this process, by argument name, and may be empty.
    """
    forms = processes.gather(_forms(labels))
    refuse_other_forms(call, _forms_of_all(forms))
    if not _are_objects(forms):
        return [_integers_in(column) for column in labels.values()]
    words = _distinct_objects(labels.values())
    codes = range(len(words)) if processes.count == 1 else _codes_of_digests(words, processes)
    code_of = dict(zip(words, codes, strict=True))
    return [_looked_up(column, code_of) for column in labels.values()]


def hashes_of_labels(labels: Labels) -> Int[Tensor, "items"]:
    """Return 64 bits per label, the same in every process and set: integers themselves, and digests of strings."""
    if isinstance(labels.values, Tensor):
        return _integers_in(labels)
    return torch.from_numpy(_digests(labels.tolist())[:, 0].copy())


def refuse_other_forms(call: str, forms: Mapping[str, str], argument: str | None = None) -> None:
    """Refuse labels of different forms, which cannot be compared.

    `forms` maps a name to the form of its labels (see `Labels.form`). `argument` is the argument that all labels came
    from, if there is only one.
    """
    for (name, form), (other_name, other_form) in pairwise(forms.items()):
        if form != other_form:
            strings = "list(map(str, ...))"
            if {form, other_form} == {"integers", "strings"}:
                of_integers = argument or (name if form == "integers" else other_name).split(" in process")[0]
                strings = _strings_of_integers(of_integers)
            raise LabelFormsError(
                f"{call}: {name} are {form}, {other_name} {other_form}. Pass the same form in all arguments, batches and "
                f"processes: integers, strings as {strings}, or zeros and ones whose column j is the same label."
            )


def _strings_of_integers(name: str) -> str:
    """Return the code that makes strings of integers; the string of an entry of a tensor would be `tensor(7)`."""
    if name == "label_groups":
        return "[list(map(str, map(int, group))) for group in label_groups]"
    return f"list(map(str, map(int, {name})))"


def _forms(labels: Mapping[str, Labels]) -> dict[str, str]:
    """Return the form of each argument that has an item."""
    return {name: column.form for name, column in labels.items() if len(column)}


def _forms_of_all(forms: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the form of each argument of each process; the process is named where there are several."""
    if len(forms) == 1:
        return dict(forms[0])
    return {
        f"{name} in process {rank}": form
        for rank, forms_of_rank in enumerate(forms)
        for name, form in forms_of_rank.items()
    }


def _are_objects(forms: Iterable[Mapping[str, str]]) -> bool:
    """Return whether labels, which have one form, are words or sets."""
    are_numbers = ("integers", "targets of a regression")
    return any(form not in are_numbers for forms_of_rank in forms for form in forms_of_rank.values())


def _integers_in(labels: Labels) -> Int[Tensor, "items"]:
    """Return labels that are integers, or of no item; of targets their hashes."""
    if labels.are_targets:
        assert isinstance(labels.values, Tensor)
        return _hashes_of_targets(labels.values)
    return labels.values if isinstance(labels.values, Tensor) else torch.empty(0, dtype=torch.int64, device="cpu")


def _hashes_of_targets(targets: Tensor) -> Int[Tensor, "items"]:
    """Return a hash of the values of each item: a sum of their bits times random odd numbers, modulo 2**64."""
    bits = targets.cpu().reshape(len(targets), -1).view(torch.int64)
    factors = torch.randint(2**62, (bits.shape[1],), generator=torch.Generator().manual_seed(0)) | 1
    # The upper half is mixed into the lower, since small floats end in zeros.
    return ((bits ^ (bits >> 29)) * factors).sum(dim=1)


def _distinct_objects(labels: Iterable[Labels]) -> list[Any]:
    """Return the distinct strings or sets of labels, in order of first occurrence; integers are skipped."""
    objects = (label for column in labels if not isinstance(column.values, Tensor) for label in column.tolist())
    return list(dict.fromkeys(objects))


def _codes_of_digests(words: Sequence[str], processes: Processes) -> list[int]:
    """Return a code for each distinct string, the same in all processes. *Collective*."""
    digests_by_rank = processes.gather(_digests(words))
    codes = _numbered_rows(np.concatenate(digests_by_rank))
    first = sum(len(digests) for digests in digests_by_rank[: processes.rank])
    codes_of_words: list[int] = codes[first : first + len(words)].tolist()
    return codes_of_words


def _digests(words: Sequence[str]) -> Int[np.ndarray, "words 2"]:
    """Return a digest of 16 bytes for each string, the same in every process, as two integers."""
    hashed = [
        hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest() for word in words
    ]
    return np.frombuffer(b"".join(hashed), dtype="<i8").reshape(-1, 2)


def _numbered_rows(rows: Int[np.ndarray, "rows 2"]) -> Int[np.ndarray, "rows"]:
    """Return a number for each row, from 0, the same for equal rows."""
    order = np.lexsort(rows.T)
    is_next = (rows[order][1:] != rows[order][:-1]).any(axis=1)
    numbers = np.zeros(len(rows), np.int64)
    numbers[order[1:]] = is_next.cumsum()
    return numbers


def _looked_up(labels: Labels, code_of: Mapping[Any, int]) -> Int[Tensor, "items"]:
    """Return the code of each label, on the CPU."""
    return torch.tensor([code_of[label] for label in labels.tolist()], dtype=torch.int64, device="cpu")


# ------------------------------------------------------------------------------------------------- reading of single forms


def _objects(entries: Sequence[Any]) -> NDArray[Any]:
    """Return a one-dimensional array of the entries; `np.array` would make a matrix of tuples of equal length."""
    return np.fromiter(entries, dtype=object, count=len(entries))


def _labels_of_sets(targets: Tensor, name: str, call: str) -> Labels:
    """Return the set of labels of each row of zeros and ones (items, labels)."""
    targets = targets.detach().cpu()
    wrong = int(((targets != 0) & (targets != 1)).sum())
    if wrong:
        raise InputError(
            f"{call}: {name} have shape {tuple(targets.shape)}, but {counted(wrong, 'entry')} {verb(wrong, 'is', 'are')} "
            "neither 0 nor 1. Set entry (i, j) to 1 if item i has label j. If each item has one label, pass one integer or "
            "string per item."
        )
    columns = targets.nonzero()[:, 1].tolist()
    ends = targets.bool().sum(dim=1).cumsum(0).tolist()
    sets = [tuple(columns[start:stop]) for start, stop in pairwise([0, *ends])]
    return Labels(_objects(sets), targets.shape[1])


def _array_or_tensor(value: Any, name: str, call: str) -> Tensor | NDArray[Any]:
    """Return numbers as a tensor, and entries that may be strings as an array of strings or objects."""
    value = without_arrow(value, name, call)
    refuse_masked(value, name, call)
    if isinstance(value, str | bytes):
        raise InputError(f"{call}: {name} is the single string {value!r}. Pass a list with one string per item.")
    if isinstance(value, Sequence):
        return _read_sequence(value, name, call)
    if is_of_other_library(value) and not _is_read_by_numpy(value):
        return as_tensor(value, name, call)
    if not hasattr(value, "__array__"):
        raise InputError(
            f"{call}: {name} is {with_article(type(value).__name__)}. Pass a list, array or tensor of integers or "
            "strings, one per item."
        )
    return _read_array(np.asarray(value), name, call)


def _is_read_by_numpy(value: Any) -> bool:
    """Return whether NumPy can read an array of another library; CuPy refuses implicit copies."""
    try:
        return bool(np.asarray(value).ndim)
    except Exception:  # each library has its own errors
        return False


def _read_sequence(entries: Sequence[Any], name: str, call: str) -> Tensor | NDArray[Any]:
    """Return the numbers of a list as a tensor, and other entries as an array of objects."""
    if not len(entries) or isinstance(_first_entry(entries), int | float | np.number | Tensor):
        # If a later entry is not a number, the entries are read as objects.
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            return torch.as_tensor(entries, device="cpu")
    objects: NDArray[Any] = np.fromiter(map(_unpacked, entries), dtype=object, count=len(entries))
    return objects


def _read_array(array: NDArray[Any], name: str, call: str) -> Tensor | NDArray[Any]:
    """Return an array of numbers as a tensor, an array of bytes as strings, and any other array unchanged."""
    if array.dtype.kind not in "USO":
        return as_tensor(array, name, call)
    if array.dtype.kind != "S":
        return array
    try:
        words: NDArray[Any] = np.char.decode(array, "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{call}: {name} are bytes that are not UTF-8 ({error}). Pass np.char.decode({name}, 'latin-1'), with the "
            "encoding of the bytes."
        ) from error
    return words


def _first_entry(entries: Sequence[Any]) -> Any:
    """Return the first entry or, if it is a row, the first entry of the row."""
    first = entries[0]
    return first[0] if isinstance(first, list | tuple) and len(first) else first


def _unpacked(entry: Any) -> Any:
    """Return the single entry of a row of length 1, so that a list of such rows is a column; else the entry."""
    if type(entry) is str:
        return entry
    if isinstance(entry, Tensor) and entry.numel() == 1:
        return entry.item()
    if is_of_other_library(entry) and getattr(entry, "size", 0) == 1:
        return entry.item()
    return entry[0] if isinstance(entry, list | tuple | np.ndarray) and np.shape(entry) == (1,) else entry


def _labels_of_entries(entries: list[Any], name: str, call: str) -> Labels:
    """Return labels from entries that are all strings or all integers."""
    if not entries:
        return no_labels()
    kinds = set(map(type, entries))
    if all(issubclass(kind, str) for kind in kinds):
        # `str`, because an instance of a subclass may differ from its text, and may be impossible to pickle.
        return Labels(_objects([*map(str, entries)]))
    if all(issubclass(kind, _INTEGERS) for kind in kinds):
        try:
            return Labels(torch.tensor(list(map(int, entries)), dtype=torch.int64, device="cpu"))
        except (OverflowError, RuntimeError, ValueError) as error:
            raise InputError(_beyond_64_bits(name, call)) from error
    raise InputError(f"{call}: {_fault_of_entries(entries, name)}")


def _fault_of_entries(entries: list[Any], name: str) -> str:
    """Return the fault of entries that are neither all strings nor all integers, and the fix."""
    missing = [index for index, entry in enumerate(entries) if _is_missing(entry)]
    if missing:
        return (
            f"{len(missing)} of {len(entries)} {name} {verb(len(missing), 'is', 'are')} missing, the first "
            f"({entries[missing[0]]}) at index {missing[0]}. Drop these items from all arguments."
        )
    for index, entry in enumerate(entries):
        if not isinstance(entry, str | _INTEGERS):
            return (
                f"{name} contain {with_article(type(entry).__name__)} at index {index}. Pass integers or strings, such as "
                f"list(map(str, {name}))."
            )
    are_words = [isinstance(entry, str) for entry in entries]
    word = are_words.index(True)
    integer = are_words.index(False)
    return (
        f"{name} mix strings and integers: {str(entries[word])!r} at index {word}, {entries[integer]} at index {integer}. "
        f"Pass strings for all: list(map(str, {name}))."
    )


def _is_missing(entry: Any) -> bool:
    """Return whether an entry is None, NaN, or pandas' NA or NaT."""
    return (
        entry is None
        or (isinstance(entry, float) and math.isnan(entry))
        or type(entry).__name__ in ("NAType", "NaTType")
    )


def _labels_of_integers(integers: Tensor, name: str, call: str, code: str) -> Labels:
    """Return 64-bit labels from integers; floats are refused. `code` makes the tensor, for messages."""
    if integers.dtype in UNSIGNED:
        integers = integers.to(torch.int64)
        if bool((integers < 0).any()):
            raise InputError(_beyond_64_bits(name, call, f"{code}.tolist()"))
    if integers.dtype not in LABEL_DTYPES:
        raise InputError(
            f"{needs(call)} integer {name}, but got {integers.dtype}. {_fix_of_floats(integers, name, code)}"
        )
    return Labels(integers.to(torch.int64))


def _fix_of_floats(numbers: Tensor, name: str, code: str) -> str:
    """Return a sentence on what to pass instead of floats; `long` would give 0.2 and 0.7 the same class."""
    missing = numbers.isnan().nonzero().flatten().tolist()
    if missing:
        return (
            f"{len(missing)} of {len(numbers)} {name} {verb(len(missing), 'is', 'are')} missing, the first (nan) at "
            f"index {missing[0]}. Drop these items from all arguments."
        )
    if numbers.is_floating_point() and torch.equal(numbers, numbers.trunc()):
        return f"Floating-point labels are not distinct above 2**24. Pass {code}.long()."
    return f"They are not whole numbers. If each value is a class, pass list(map(str, {code}.tolist()))."


def _beyond_64_bits(name: str, call: str, code: str | None = None) -> str:
    return f"{call}: {name} contain integers beyond 64 bits. Pass them as strings: list(map(str, {code or name}))."


def _check_shape(shape: tuple[int, ...], name: str, call: str, column: str, code: str) -> None:
    """Refuse labels that are not one per item. The message shows how to select a column, or how to flatten them."""
    if len(shape) == 1:
        return
    fix = f"Pass {code}.flatten()."
    noun = _NOUNS.get(name.rpartition("_")[2], "label") if name != "label_groups" else "label"
    if len(shape) == 2 and noun == "label":
        fix = f"Pass {column}. (evaluate_retrieval accepts zeros and ones for items with several labels.)"
    elif len(shape) == 2:
        fix = f"Pass one column: {code}[:, 0]."
    raise InputError(f"{needs(call)} one {noun} per item, but {name} has shape {tuple(shape)}. {fix}")
