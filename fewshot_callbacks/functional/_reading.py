"""Reads what callers pass: arrays as tensors, and labels, ids and groups, integers or strings, as int64 codes.

The code of a word is a hash of its UTF-8 bytes, so that batches, arguments and processes agree on it without communication;
a code book maps codes back to words. Two words with the same code are refused when their books are merged: n words hold
such a pair with a probability of about n^2 / 2^65, 3e-8 for a million. Where the order of labels matters (splits into
groups, episodes), codes are replaced by the index of the word in alphabetical order (`numbered`), as
`np.unique(words, return_inverse=True)[1]` does.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.sources.stored_rows import StoredRows

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

# Code -> its word.
CodeBook = Mapping[int, str]
# What the word of a set of labels begins with; its number of labels and the labels of the item follow. It is half of a
# surrogate pair, which no text holds; words that are given are checked for it.
SET = "\ud800"


@contextmanager
def default_mode() -> Iterator[None]:
    """Inside the block, make new tensors on the CPU, and keep denormal numbers.

    A default device (`torch.set_default_device`) would hold some tensors of a calculation, and not those of its inputs.
    Where denormal numbers are flushed to zero (`torch.set_flush_denormal`, or a library that was built with
    `-ffast-math`), two different numbers have a difference of zero, and neighbouring ones are equal: no bound of an
    error holds. Other threads of the process keep their mode, and threads that are started inside have this one.
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
            torch.set_num_threads(1)  # PyTorch's own threads may have begun with the caller's mode
        yield


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
    """Refuse an array of strings, and a list that begins with one."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "US":
        raise ValueError(f"{call}: {name} is a NumPy array of strings ({value.dtype}); expected numbers.")
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, str | bytes):
        raise ValueError(f"{call}: {name} hold strings, such as {first!r}; expected numbers.")


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


def check_embeddings(embeddings: Tensor, name: str, call: str) -> None:
    """Refuse anything but a finite, non-empty, floating-point (items, dim) matrix."""
    check_matrix(embeddings, name, call)
    refuse_non_finite(non_finite_rows(embeddings), len(embeddings), name, call)


def check_matrix(embeddings: Tensor | StoredRows, name: str, call: str) -> None:
    """Refuse anything but a non-empty, floating-point (items, dim) matrix; its values may be NaN."""
    if embeddings.ndim != 2:
        hint = (
            f"For a single item pass {name}[None]; for items of one number each {name}[:, None]."
            if embeddings.ndim == 1
            else f"Flatten what belongs to one item: {name}.flatten(1)."
            if embeddings.ndim > 2
            else "Pass a matrix."
        )
        raise ValueError(f"{call} needs {name} of shape (items, dim); got shape {tuple(embeddings.shape)}. {hint}")
    if not embeddings.dtype.is_floating_point:
        raise ValueError(f"{call} needs floating-point {name}; got {embeddings.dtype}. Pass {name}.float().")
    if embeddings.shape[0] == 0:
        raise ValueError(f"{call}: {name} is empty (shape {tuple(embeddings.shape)}). Pass at least one item.")
    if embeddings.shape[1] == 0:
        raise ValueError(f"{call}: {name} has no dimensions (shape {tuple(embeddings.shape)}).")


def refuse_unknown(call: str, name: str, value: Any, known: Any, fix: str) -> None:
    """Refuse a setting that is none of the words of a `Literal`."""
    if value not in get_args(known):
        raise ValueError(f"{call}: there is no {name}={value!r}. {fix}")


def check_seed(call: str, name: str, seed: Any) -> int:
    """Return a seed that PyTorch's generators take, which have 64 bits.

    Raises:
        ValueError: With the range.
    """
    whole = seed.__index__() if hasattr(seed, "__index__") and not isinstance(seed, bool) else None
    if whole is None or not -(2**63) <= whole < 2**64:
        raise ValueError(f"{call}: {name}={seed!r} must be a whole number, such as 0, from -2**63 to 2**64 - 1.")
    return int(whole)


def refuse_non_finite(bad: Tensor, items: int, name: str, call: str, where: str = "") -> None:
    """Refuse a matrix with non-finite rows.

    Args:
        bad: Indices of the non-finite rows, ascending.
        items: Number of all rows.
        name: Name of the argument, for messages.
        call: The public function, for messages.
        where: Which file holds the first of them.
    """
    if len(bad):
        raise ValueError(
            f"{call}: {len(bad)} of {items} rows of {name} hold NaN or Inf, the first at index "
            f"{int(bad[0])}{where}. Find the step that made them (a diverged loss, a division by a zero norm, float16 "
            f"overflow), or drop them: keep = {name}.isfinite().all(dim=1)."
        )


def non_finite_rows(embeddings: Tensor | StoredRows) -> Tensor:
    """Find the indices of rows with NaN or Inf, in slices: one mask of the whole matrix would take a quarter of it."""
    if isinstance(embeddings, StoredRows):
        return torch.cat([some.start + non_finite_rows(rows) for some, rows in embeddings.chunks()])
    if embeddings.dtype in (torch.float32, torch.float64) and bool(embeddings.sum().isfinite()):
        return torch.empty(0, dtype=torch.int64, device=embeddings.device)  # the sum of all, a third of the time
    rows = max(1, 2**16 // max(1, embeddings.shape[1]))  # 0.5 MB in float64
    slices = [~part.isfinite().all(dim=1) for part in embeddings.split(rows)]
    return torch.cat(slices).nonzero().flatten()


def computable(vectors: Tensor) -> Tensor:
    """Make the rows contiguous in memory, and half precision float32, which holds each of its values."""
    return (vectors if vectors.dtype in (torch.float32, torch.float64) else vectors.float()).contiguous()


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
        fix = f"Pass {name} > 0."
        if codes.dtype == torch.int8:  # how sentence-transformers packs bits: bytes minus 128
            fix = (
                f"Pass {name} > 0 if each value is a number, or "
                f"np.unpackbits(np.asarray({name}).view(np.uint8) ^ 128, axis=1) if each is a byte of 8 bits, as "
                'quantize_embeddings(precision="binary") makes them.'
            )
        raise ValueError(
            f"{call}: binary codes hold -1 and +1, or 0 and 1; {len(others):,} of {codes.numel():,} values of {name} are "
            f"neither ({found}). {fix}"
        )
    if bool(zero.any()) and bool(low.any()):
        raise ValueError(f"{call}: {name} hold -1 and 0; binary codes hold -1 and +1, or 0 and 1. Pass {name} > 0.")
    return high.to(torch.int8).mul_(2).sub_(1)


# -------------------------------------------------------------------------------------------------------------- labels


@dataclass(frozen=True)
class Labels:
    """One label for each item."""

    # integers as they were given, or the codes of words; int64 on the device where they were
    codes: Int[Tensor, "items"]
    # None for integers, and where there is no item
    words: CodeBook | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: Any) -> Labels:
        return Labels(self.codes[index], self.words)

    @property
    def form(self) -> str:
        """What they are, for messages: strings, integers, or sets of so many labels."""
        word = next(iter(self.words.values()), "") if self.words else ""
        if word.startswith(SET):
            return f"zeros and ones of {word[1:].partition(' ')[0]} labels"
        return "integers" if self.words is None else "strings"

    def shown(self, code: int) -> int | str:
        """Return a label as it was given, for messages."""
        return code if self.words is None else repr(self.words[code])

    def numbered(self) -> tuple[Int[Tensor, "items"], tuple[str, ...] | None]:
        """Integers as they are; or the place of each word in the second value, which holds each string once, sorted."""
        [numbers], names = numbered("labels", {"labels": self})
        return numbers, names


def as_labels(value: Any, name: str, call: str, *, sets: bool = False) -> Labels:
    """Read labels in any form: a tensor, array, list or table column of integers or strings, (items,) or (items, 1).

    Args:
        value: The labels, or `Labels`, which stay what they are.
        name: Name of the argument, for messages.
        call: The public function, for messages.
        sets: Read zeros and ones (items, labels), too: the label of an item is then the word of its set, see `sets_in`.

    Raises:
        ValueError: For floats, missing values, strings mixed with integers, and other shapes.

    Examples:
        >>> import torch
        >>> as_labels(["owl", "heron", "owl"], "labels", "example").numbered()
        (tensor([1, 0, 1]), ('heron', 'owl'))
        >>> as_labels(torch.tensor([[7], [-1]]), "labels", "example").codes
        tensor([ 7, -1])
    """
    if isinstance(value, Labels):
        return value
    read = value if isinstance(value, Tensor) else _array_or_tensor(value, name, call)
    if read.ndim == 2 and read.shape[1] == 1:
        read = read.reshape(-1)
    if isinstance(read, Tensor):
        read = as_tensor(read, name, call)
        if read.ndim == 1 and not len(read):
            return Labels(read.long())
        if sets and read.ndim == 2:
            return _of_targets(read, name, call)
        _check_shape(read.shape, name, call, is_words=False)
        return Labels(_integers(read, name, call))
    _check_shape(read.shape, name, call, is_words=True)
    return _of_objects(read.tolist(), name, call)


def labels_of_each(value: Any, items: int, name: str, of: str, call: str, *, sets: bool = False) -> Labels:
    """Read labels (see `as_labels`), one for each of `items` items, on the device where they are.

    Raises:
        ValueError: As `as_labels` does, and if there are not as many as items.
    """
    labels = as_labels(value, name, call, sets=sets)
    if len(labels) != items:
        raise ValueError(
            f"{call}: {items} {of}, but {len(labels)} {name}. Both must come from the same items in the same order."
        )
    return labels


def read_labels(value: Any, items: int, name: str, of: str, call: str, *, sets: bool = False) -> Labels:
    """Read labels (see `as_labels`), one for each of `items` items, as int64 on the CPU.

    Raises:
        ValueError: As `labels_of_each` does.
    """
    labels = labels_of_each(value, items, name, of, call, sets=sets)
    return Labels(labels.codes.to(device="cpu", dtype=torch.int64).contiguous(), labels.words)


def check_labels(value: Any, items: int, name: str, of: str, call: str) -> Int[Tensor, "items"]:
    """Read labels of which only equality matters: the codes of `read_labels`."""
    return read_labels(value, items, name, of, call).codes


def numbered(call: str, labels: Mapping[str, Labels]) -> tuple[list[Int[Tensor, "_"]], tuple[str, ...] | None]:
    """Number the labels of several arguments in common.

    Args:
        call: The public function, for messages.
        labels: Labels by the name of the argument.

    Returns:
        The numbers of each, and the word of each number, sorted; for integers these themselves, and None.

    Raises:
        ValueError: If some are strings and others integers, or two words have the same code.
    """
    refuse_words_beside_integers(call, labels)
    book = merged_books((part.words for part in labels.values()), call)
    if book is None:
        return [part.codes for part in labels.values()], None
    names = tuple(sorted(book.values()))
    place = {word: number for number, word in enumerate(names)}
    known = sorted(book)
    numbers = torch.tensor([place[book[code]] for code in known], device="cpu")
    codes = torch.tensor(known, device="cpu")
    return [
        numbers[torch.searchsorted(codes, part.codes.cpu())].to(part.codes.device) for part in labels.values()
    ], names


def joined_labels(parts: Sequence[Labels], call: str) -> Labels:
    """Concatenate labels.

    Raises:
        ValueError: As `numbered` does.
    """
    refuse_words_beside_integers(call, {f"labels of part {number}": part for number, part in enumerate(parts)})
    book = merged_books((part.words for part in parts), call)
    return Labels(torch.cat([part.codes.cpu() for part in parts]), book)


def refuse_words_beside_integers(call: str, labels: Mapping[str, Labels]) -> None:
    """Refuse labels of which some are strings and others integers.

    Raises:
        ValueError: With the names of two such arguments.
    """
    given = [(name, part.words is not None) for name, part in labels.items() if len(part)]
    for (name, is_words), (other, other_is_words) in pairwise(given):
        if is_words != other_is_words:
            kinds = ("strings", "integers") if is_words else ("integers", "strings")
            raise ValueError(
                f"{call}: {name} are {kinds[0]}, {other} {kinds[1]}. Pass both in the same form, strings as "
                "list(map(str, ...))."
            )


def merged_books(books: Iterable[CodeBook | None], call: str) -> CodeBook | None:
    """Merge code books; None if none has words.

    Raises:
        ValueError: If two words have the same code.
    """
    whole: dict[int, str] | None = None
    for book in books:
        if book is not None:
            whole = {} if whole is None else whole
            for code, word in book.items():
                if whole.setdefault(code, word) != word:
                    raise ValueError(
                        f"{call}: the strings {whole[code]!r} and {word!r} have the same code of 64 bits. Number the labels "
                        "instead: np.unique(labels, return_inverse=True)[1]."
                    )
    return whole


def book_of(words: Iterable[str], call: str) -> dict[int, str]:
    """Make the code book of some words.

    Raises:
        ValueError: If two words have the same code.
    """
    return dict(merged_books(({word_code(word): word} for word in words), call) or {})


def word_code(word: str) -> int:
    """Hash a word to 64 bits, the same in every process (Python's `hash` is not)."""
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def sets_in(words: Iterable[str], call: str) -> list[list[int]] | None:
    """Return the labels of each word of a set, as `as_labels` makes them; None if no word is one.

    Raises:
        ValueError: If some are words of sets and others are not, or they are sets of different numbers of labels.
    """
    forms, sets = set(), []
    for word in words:
        width, *labels = word[1:].split(" ") if word.startswith(SET) else [""]
        forms.add(width)
        sets.append([*map(int, labels)])
    if len(forms) > 1:
        facts = sorted(f"zeros and ones of {width} labels" if width else "one label" for width in forms)
        raise ValueError(
            f"{call}: some items have {facts[0]}, others {facts[1]}. Pass the same form for all; column j must be the same "
            "label for all."
        )
    return None if forms <= {""} else sets


def refuse_ids_of_two_sets(call: str, ids: Any | None, *, one_set: bool) -> None:
    """Refuse the identity of the items of one set where there are two.

    Raises:
        ValueError: With the arguments for two sets.
    """
    if ids is not None and not one_set:
        raise ValueError(
            f"{call}: ids is for one set, and there is a gallery. Pass query_ids= and gallery_ids=, so that a query's own "
            "copy is no candidate."
        )


def exclusion_codes(call: str, same_set: bool, queries: int, items: int, **given: Any) -> dict[str, Tensor | None]:
    """Check ids and groups of both sides.

    Args:
        call: The public function, for messages.
        same_set: Queries and gallery are one set.
        queries: How many there are.
        items: How many there are.
        **given: `query_ids`, `gallery_ids`, `query_groups` and `gallery_groups`, as far as there are any.

    Returns:
        `int64` codes by the name of the argument; None for what was not given.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if same_set and given.keys() & {"query_ids", "gallery_ids"}:
        raise ValueError(
            f"{call}: query_ids and gallery_ids are for two sets; with one set an item is never its own candidate. Pass "
            "ids= if some items come several times: the first of each id is counted."
        )
    if same_set and "query_groups" in given:
        given.setdefault("gallery_groups", given["query_groups"])
    codes: dict[str, Tensor | None] = {}
    for kind in ("ids", "groups"):
        sides = {f"query_{kind}": queries, f"gallery_{kind}": items}
        read = {
            name: read_labels(given[name], length, name, f"{name.partition('_')[0]} items", call)
            for name, length in sides.items()
            if name in given
        }
        if len(read) == 1:
            raise ValueError(f"{call}: query_{kind} and gallery_{kind} belong together. Pass both, or neither.")
        refuse_words_beside_integers(call, read)
        codes |= {name: read[name].codes if name in read else None for name in sides}
    return codes


def _of_targets(targets: Tensor, name: str, call: str) -> Labels:
    """Make labels of zeros and ones (items, labels)."""
    targets = targets.detach().cpu()
    wrong = int(((targets != 0) & (targets != 1)).sum())
    if wrong:
        raise ValueError(
            f"{call}: {name} have shape {tuple(targets.shape)}, and {wrong:,} entries are neither 0 nor 1. Entry "
            "(i, j) is 1 if item i has label j; for one label each pass one integer or string for each item."
        )
    distinct, row = targets.bool().unique(dim=0, return_inverse=True)
    words = [" ".join([f"{SET}{targets.shape[1]}", *map(str, one.nonzero()[:, 0].tolist())]) for one in distinct]
    book = book_of(words, call)
    codes = torch.tensor([*book], dtype=torch.int64, device="cpu")
    return Labels(codes[row], book or None)


def _array_or_tensor(value: Any, name: str, call: str) -> Tensor | NDArray[Any]:
    """Read numbers as a tensor, and what may be strings as an array of objects."""
    refuse_masked(value, name, call)
    if isinstance(value, str | bytes):
        raise ValueError(f"{call}: {name} is the single string {value!r}. Pass a list with one for each item.")
    if not isinstance(value, Sequence | np.ndarray) and not hasattr(value, "__array__"):
        raise ValueError(
            f"{call}: {name} is a {type(value).__name__}; expected a list, array or tensor of integers or strings, one "
            f"for each item."
        )
    array = value
    if isinstance(value, Sequence):
        if not len(value) or isinstance(_first(value), int | float | np.number | Tensor):
            try:
                return torch.as_tensor(value, device="cpu")
            except (TypeError, ValueError, RuntimeError, OverflowError):
                pass  # a later entry is no number: read below
        array = np.fromiter(map(_unpacked, value), dtype=object, count=len(value))
    array = np.asarray(array)
    if array.dtype.kind not in "USO":
        return as_tensor(array, name, call)
    if array.dtype.kind == "S":
        try:
            array = np.char.decode(array, "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{call}: {name} are bytes that are not UTF-8 ({error}). Pass np.char.decode({name}, encoding=...)."
            ) from error
    objects: NDArray[Any] = array
    return objects


def _first(value: Sequence[Any]) -> Any:
    """Take the first entry, or the first of the first row."""
    first = value[0]
    return first[0] if isinstance(first, list | tuple) and len(first) else first


def _unpacked(entry: Any) -> Any:
    """Unpack a row of one entry, so that a list of such rows is a column."""
    if type(entry) is str:
        return entry
    if isinstance(entry, Tensor) and entry.numel() == 1:
        return entry.item()
    return entry[0] if isinstance(entry, list | tuple | np.ndarray) and np.shape(entry) == (1,) else entry


def _of_objects(entries: list[Any], name: str, call: str) -> Labels:
    """Make labels of entries that are all words, or all integers."""
    kinds = set(map(type, entries))
    if all(issubclass(kind, str) for kind in kinds):
        words = dict.fromkeys(map(str, entries))
        if any(word.startswith(SET) for word in words):
            raise ValueError(
                f"{call}: {name} hold a word that begins with {SET!r}, half of a surrogate pair, which is no text. Decode "
                'the words with errors="surrogateescape" or "replace".'
            )
        book = book_of(words, call)
        codes = {word: code for code, word in book.items()}
        return Labels(torch.tensor([codes[word] for word in entries], dtype=torch.int64, device="cpu"), book or None)
    if all(issubclass(kind, int | np.integer | np.bool_) for kind in kinds):
        try:
            return Labels(torch.tensor(list(map(int, entries)), dtype=torch.int64, device="cpu"))
        except (OverflowError, RuntimeError, ValueError) as error:
            raise ValueError(_beyond(name, call)) from error
    _refuse_objects(entries, name, call)
    raise AssertionError("every entry is a word or an integer")


def _refuse_objects(entries: list[Any], name: str, call: str) -> None:
    """Raise the error that names the first entry that is not a label, or strings among integers."""
    missing = [index for index, entry in enumerate(entries) if _is_missing(entry)]
    if missing:
        raise ValueError(
            f"{call}: {len(missing)} of {len(entries)} {name} {'is' if len(missing) == 1 else 'are'} missing, the first "
            f"({entries[missing[0]]}) at index {missing[0]}. Drop these items from all arguments."
        )
    first: dict[type, int] = {}
    for index, entry in enumerate(entries):
        kind = int if isinstance(entry, int | np.integer | np.bool_) else str if isinstance(entry, str) else type(entry)
        if kind not in (int, str):
            raise ValueError(
                f"{call}: {name} hold a {kind.__name__} at index {index}; expected integers or strings, such as "
                f"list(map(str, {name}))."
            )
        first.setdefault(kind, index)
    words, numbers = first[str], first[int]
    raise ValueError(
        f"{call}: {name} mix strings and integers: {str(entries[words])!r} at index {words}, {entries[numbers]} at index "
        f"{numbers}. Pass strings for all: list(map(str, {name}))."
    )


def _is_missing(entry: Any) -> bool:
    """Check for None, NaN, and pandas' NA and NaT."""
    return (
        entry is None
        or (isinstance(entry, float) and math.isnan(entry))
        or type(entry).__name__ in ("NAType", "NaTType")
    )


def _integers(labels: Tensor, name: str, call: str) -> Tensor:
    """Convert integer labels to int64; refuse floats."""
    if labels.dtype in UNSIGNED:
        labels = labels.to(torch.int64)
        if bool((labels < 0).any()):
            raise ValueError(_beyond(name, call))
    if labels.dtype not in LABEL_DTYPES:
        raise ValueError(
            f"{call} needs integer {name}; got {labels.dtype}. Floating-point labels lose identities above 2**24: "
            f"pass {name}.long(), or number the classes with torch.unique({name}, return_inverse=True)."
        )
    return labels.to(torch.int64)


def _beyond(name: str, call: str) -> str:
    return f"{call}: {name} hold integers beyond 64 bits. Pass them as strings: list(map(str, {name}))."


def _check_shape(shape: tuple[int, ...], name: str, call: str, *, is_words: bool) -> None:
    if len(shape) == 1:
        return
    hint = f"Pass {name}.flatten()."
    if len(shape) == 2:
        fix = f"one column: {name}[:, 0]" if is_words else f"{name}.argmax(dim=1) if they are one-hot"
        hint = f"Pass {fix}; evaluate_retrieval takes zeros and ones for items with several labels each."
    raise ValueError(f"{call} needs one label for each item; {name} has shape {tuple(shape)}. {hint}")
