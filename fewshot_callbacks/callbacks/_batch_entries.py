"""Entries of a batch or of a step's output: ids, groups, gallery flags, and probable labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewshot_callbacks.callbacks._conduct import UsageError, describe, without_owner
from fewshot_callbacks.callbacks.embedding_source import FUNCTION, Entry
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional._reading import as_list
from fewshot_callbacks.metrics.item_batch import read_ids
from fewshot_callbacks.system.words import counted

# usual names of labels in a batch
LABEL_NAMES = ("label", "labels", "target", "targets", "class", "classes", "y")


def read_flag(entry: Entry, outputs: Any, batch: Any, items: int, owner: str, views: int = 1, hint: str = "") -> Tensor:
    """Return the mask of a batch's gallery items, (items,) on the CPU.

    With several views of each item, the batch may have one flag for each item.
    """
    flags = read_entry("gallery", entry, outputs, batch, owner, hint)
    if isinstance(flags, np.ndarray | list) and all(isinstance(flag, bool | np.bool_) for flag in flags):
        flags = torch.tensor(flags, dtype=torch.bool, device="cpu")
    if not isinstance(flags, Tensor) or flags.ndim != 1:
        raise UsageError(f"{owner}: gallery gave {describe(flags)}. It must give one boolean for each item.")
    mask = flags.detach().cpu().bool()
    if len(mask) * views == items:
        mask = mask.repeat(views)
    if len(mask) != items:
        raise UsageError(
            f"{owner}: gallery has {counted(len(mask), 'entry')} for {counted(items, 'embedding')}. It must give one "
            "boolean for each item."
        )
    return mask


def read_names(
    argument: str, entries: Entry | Sequence[Entry], outputs: Any, batch: Any, items: int, owner: str, views: int = 1
) -> Labels:
    """Return an id or a group for each embedding, on the CPU. Two are equal if all their entries are equal.

    With the argument `ids`, each view of an item gets its own id. A batch with several views may have one value for
    each item.
    """
    entry_list = [entries] if isinstance(entries, str | int) or callable(entries) else entries
    columns = [read_entry(argument, entry, outputs, batch, owner) for entry in entry_list]
    values = columns[0]
    if len(columns) > 1:
        lists = [as_list(column) for column in columns]
        lengths = [len(column) for column in lists]
        if len(set(lengths)) > 1:
            raise UsageError(
                f"{owner}: the entries {entry_list} of {argument} have {lengths} values. Pass entries of one length."
            )
        values = [repr(row) for row in zip(*lists, strict=True)]
    if views > 1 and hasattr(values, "__len__") and len(values) * views == items:
        names = [str(name) for name in as_list(values)]
        values = names * views
        if argument == "ids":
            values = [f"{name}, view {view}" for view in range(views) for name in names]
    try:
        return read_ids(values, items, owner, argument)
    except ValueError as error:
        raise UsageError(
            f"{owner}: {argument} gave {describe(values)}. It must give an integer or a string for each "
            f"of the {items} embeddings. {without_owner(error, owner)}"
        ) from error


def read_entry(argument: str, entry: Entry, outputs: Any, batch: Any, owner: str, hint: str = "") -> Any:
    """Return an entry of the step's output or the batch, or a function's result."""
    if callable(entry):
        return entry(outputs, batch)
    if isinstance(entry, int):
        try:
            return batch[entry]
        except (KeyError, IndexError, TypeError) as error:
            raise UsageError(
                f"{owner}({argument}={entry!r}): the batch is {describe(batch)} and has no such entry. Pass an existing "
                f"position, a key, or a function of (outputs, batch).{hint}"
            ) from error
    for mapping in (outputs, batch):
        if isinstance(mapping, Mapping) and entry in mapping:
            return mapping[entry]
    raise UsageError(
        f"{owner}({argument}={entry!r}): neither what the step returned ({describe(outputs)}) nor the batch "
        f"({describe(batch)}) has that entry. Pass a function of (outputs, batch) that returns it.{hint}"
    )


def entry_of_labels(batch: Any, ids: Any = None) -> Any:
    """Return the key or position in a batch that probably has the labels; otherwise a guess."""
    if isinstance(batch, Mapping):
        entries: dict[Any, Any] = dict(batch)
        fallback: Any = "key"
    elif isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) > 1:
        entries = dict(list(enumerate(batch))[1:])
        fallback = 1
    else:
        entries = {}
        fallback = FUNCTION
    candidates = [name for name, values in entries.items() if name != ids and _are_words_or_integers(values)]
    named = [name for name in candidates if str(name).lower() in LABEL_NAMES]
    # Values that all differ are ids.
    repeated = [name for name in candidates if len(set(as_list(entries[name]))) < len(entries[name])]
    return next(iter([*named, *repeated]), fallback)


def _are_words_or_integers(values: Any) -> bool:
    """Return whether an entry of a batch has an integer or a string for each item."""
    if isinstance(values, Tensor):
        return values.ndim == 1 and not values.is_floating_point()
    return isinstance(values, list | tuple) and all(isinstance(value, str | int) for value in values)


def is_pair(batch: Any) -> bool:
    """Return whether a batch has two parts. The second may be the labels."""
    return isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2


def are_views(first: Any, second: Any) -> bool:
    """Return whether both parts of a batch are inputs of one shape; zeros and ones are labels."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    if first.shape != second.shape or second.ndim < 2:
        return False
    return second.is_floating_point() and not are_zeros_and_ones(second)


def are_zeros_and_ones(values: Tensor) -> bool:
    """Return whether a tensor has only zeros and ones."""
    return bool(((values == 0) | (values == 1)).all())
