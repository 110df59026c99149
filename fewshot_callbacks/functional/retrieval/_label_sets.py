"""Items with several labels each, and the number of labels that two items share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped
from numpy.typing import NDArray

from fewshot_callbacks.engine.relevance import Lists
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._reading import as_list, as_tensor
from fewshot_callbacks.system.words import counted, verb


def read_label_sets(
    call: str, name: str, targets: Any
) -> tuple[Sequence[Sequence[Any] | NDArray[np.integer]], int | None]:
    """Return the labels of each item, and the number of columns of a table of zeros and ones (None for a list)."""
    if isinstance(targets, list | tuple):
        return [_labels_of_item(call, f"{name}[{item}]", labels) for item, labels in enumerate(targets)], None
    if hasattr(targets, "tocsr"):  # scipy.sparse
        table = targets.tocsr()
        table.sum_duplicates()
        entries = table.data
    else:
        entries = table = as_tensor(targets, name, call).cpu().numpy()
    if table.ndim != 2:
        raise InputError(f"{call}: {name} have the shape {table.shape}. Pass zeros and ones of shape (items, labels).")
    wrong = int((~np.isin(entries, (0, 1))).sum())
    if wrong:
        raise InputError(
            f"{call}: {wrong:,} of {counted(entries.size, 'entry')} in {name} {verb(wrong, 'is', 'are')} neither 0 nor 1. "
            "Set entry (i, j) to 1 if item i has label j, and to 0 otherwise."
        )
    rows, numbers = table.nonzero()
    return list(np.split(numbers, np.searchsorted(rows, np.arange(1, table.shape[0])))), table.shape[1]


def shared_labels(of_query: Lists, of_item: Lists, *, one_set: bool) -> tuple[Lists, Shaped[np.ndarray, "pairs"]]:
    """Return the items that share labels with each query, ascending, and how many labels each item shares.

    In one set, item i is query i and is not relevant to itself.
    """
    number = len(of_item.start)
    items_of_label = _items_of_labels(of_item, labels=1 + int(of_query.items.max(initial=-1)))
    items = [np.empty(0, np.int32)]
    grades = [np.empty(0, np.uint16)]
    for query, labels in enumerate(np.split(of_query.items, of_query.stop[:-1])):
        # an item appears once for each label that it shares with the query
        sharing = np.concatenate([np.empty(0, np.int32), *(items_of_label[label] for label in labels)])
        shared = np.bincount(sharing, minlength=number)
        if one_set:
            shared[query] = 0
        relevant = np.flatnonzero(shared)
        items.append(relevant.astype(np.int32))
        grades.append(shared[relevant].astype(np.uint16))
    ends = np.cumsum([len(relevant) for relevant in items])
    return Lists(ends[:-1], ends[1:], np.concatenate(items)), np.concatenate(grades)


def _items_of_labels(of_item: Lists, labels: int) -> list[NDArray[np.int32]]:
    """Return the items with each label, for this number of labels."""
    item_of_entry = np.repeat(np.arange(len(of_item.start), dtype=np.int32), of_item.sizes)
    entries = Lists.of_labels(np.arange(labels), of_item.items)
    return [item_of_entry[entries.items[start:stop]] for start, stop in zip(entries.start, entries.stop, strict=True)]


def clusters_of_sets(of_query: Lists) -> NDArray[np.int64]:
    """Return the index of each query's label set, with the sets sorted as rows of zeros and ones."""
    # Labels are negated because the larger row has a 1 in the first column in which two rows differ.
    sets = [tuple((-labels).tolist()) for labels in np.split(of_query.items, of_query.stop[:-1])]
    number_of_set = {labels: number for number, labels in enumerate(sorted(set(sets)))}
    return np.array([number_of_set[labels] for labels in sets], np.int64)


def _labels_of_item(call: str, name: str, labels: Any) -> list[str | int]:
    """Return the labels of an item as Python strings or integers."""
    if isinstance(labels, str | bytes) or not (isinstance(labels, Iterable) or hasattr(labels, "tolist")):
        fix = f"Pass [{labels!r}] for one label, or [] for no label."
        if not isinstance(labels, str | int):
            fix = "Pass a list such as ['sky'] or [3], or [] for no label."
        raise InputError(f"{call}: {name} is {labels!r}, which is not a set or list with the labels of an item. {fix}")
    plain_labels: list[str | int] = []
    for label in as_list(labels):
        if isinstance(label, str):
            plain_labels.append(str(label))
        elif isinstance(label, int):
            plain_labels.append(int(label))
        else:
            raise InputError(
                f"{call}: {name} contains {label!r}, which is neither a string nor an integer. Leave out missing labels, "
                "and convert other labels with str(label)."
            )
    if len(set(plain_labels)) < len(plain_labels):
        raise InputError(
            f"{call}: {name} contains a label twice. Pass each label once. If these are zeros and ones, pass them as a "
            "tensor or an array."
        )
    return plain_labels


def number_labels(call: str, sides: Mapping[str, Sequence[Sequence[Any] | NDArray[np.integer]]]) -> list[Lists]:
    """Return the labels of each item as indices from 0 on, ascending. All sides share the same indices."""
    # Strings and integers cannot be sorted together, and 1 is not '1', so all labels must be of one kind.
    kinds: dict[bool, str] = {}  # whether labels are strings -> where the first label of this kind was found
    labels: set[Any] = set()
    for name, side in sides.items():
        for item, labels_of_item in enumerate(side):
            listed = as_list(labels_of_item)
            labels.update(listed)
            for label in listed:
                if isinstance(label, str) not in kinds:
                    kinds[isinstance(label, str)] = f"{name}[{item}] contains {label!r}"
    if len(kinds) > 1:
        raise InputError(
            f"{call}: some labels are strings and some are integers: {kinds[True]}, {kinds[False]}. Pass one kind, for "
            "instance [[str(label) for label in labels] for labels in targets]."
        )
    number_of_label = {label: number for number, label in enumerate(sorted(labels))}
    numbered = []
    for side in sides.values():
        numbers = [[number_of_label[label] for label in as_list(labels_of_item)] for labels_of_item in side]
        numbered.append(Lists.of(numbers))
    return numbered
