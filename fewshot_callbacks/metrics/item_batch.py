"""The items of one batch, as a store, a torchmetrics metric and a collection append them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, labels_of_each, read_labels, refuse_other_forms
from fewshot_callbacks.functional._reading import as_floats, as_tensor, matrix_from, needs, tensor_code
from fewshot_callbacks.system.words import counted

# types of integers in a list of ids; a tensor or array in the list is one integer
INTEGERS = (int, np.integer, Tensor, np.ndarray)


@dataclass(frozen=True)
class ItemBatch:
    """Embeddings of items, and their labels and other columns."""

    embeddings: Float[Tensor, "items dim"]
    """on the device on which they were given"""
    labels: Labels
    """integers or targets on the device on which they were given, or strings; see `Labels`"""
    columns: Mapping[Hashable, Labels]
    """name -> value of each item, on the CPU: `ids`, `groups` and others"""
    positions: Int[Tensor, "items"] | None = None
    """index of each item in this process's pass over its data; None for the next indices"""

    @classmethod
    def read(
        cls,
        method: str,
        embeddings: Any,
        labels: Any,
        ids: Any | None = None,
        groups: Any | None = None,
        positions: Tensor | None = None,
        *,
        sets: bool = False,
        floats: bool = False,
    ) -> ItemBatch:
        """Read the arguments of a public method such as `EmbeddingStore.append`.

        `embeddings` are (items, dim), of any library. `floats` refuses embeddings that are not floating-point numbers.
        """
        owner, _, name = method.rpartition(".")
        # `KnnMonitor(bank=...)` is a callback without a method.
        call = owner if name.isidentifier() and owner else method
        code = tensor_code("embeddings", embeddings)
        rows = as_tensor(embeddings, "embeddings", call)
        if rows.ndim != 2:
            raise InputError(
                f"{needs(call)} embeddings of shape (items, dim); got shape {tuple(rows.shape)}. "
                f"{matrix_from(code, rows.ndim)}"
            )
        if floats and len(rows) and not rows.is_floating_point():
            fix = as_floats(code, rows.dtype)
            raise InputError(f"{needs(call)} floating-point embeddings; got {rows.dtype}. {fix}")
        item_labels = labels_of_each(labels, len(rows), "labels", "embeddings", call, sets=sets)
        given = {name: values for name, values in (("ids", ids), ("groups", groups)) if values is not None}
        columns: dict[Hashable, Labels] = {
            name: read_ids(values, len(rows), call, name) for name, values in given.items()
        }
        if positions is not None and positions.shape != rows.shape[:1]:
            raise InputError(
                f"{needs(call)} one position for each of the {counted(len(rows), 'embedding')}; got positions of shape "
                f"{tuple(positions.shape)}."
            )
        return cls(rows, item_labels, columns, positions)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def forms(self) -> dict[Hashable, str]:
        """Name -> form of the labels and of each column (see `Labels.form`); empty without items."""
        columns = {"labels": self.labels, **self.columns} if len(self) else {}
        return {name: column.form for name, column in columns.items()}

    def refuse_unlike(self, method: str, dim: int | None, forms: Mapping[Any, str]) -> None:
        """Refuse a batch that does not fit earlier batches.

        Before the first batch, `dim` is None and `forms` is empty.
        """
        for name, column in {"labels": self.labels, **self.columns}.items():
            refuse_another_form(method, forms.get(name, ""), column, str(name))
        if dim not in (None, self.embeddings.shape[1]):
            raise InputError(
                f"{method}: earlier embeddings have dimension {dim}, but this batch has {self.embeddings.shape[1]}. "
                "Pass every batch from the same layer."
            )


def refuse_another_form(call: str, form: str, values: Labels, name: str = "labels") -> None:
    """Refuse a batch whose values have a new form, such as integers after strings.

    `form` is empty before the first batch. A batch without items is never refused.
    """
    if form and len(values):
        refuse_other_forms(call, {f"the {name} so far": form, f"the {name} of this batch": values.form}, name)


def read_ids(ids: Any, items: int, call: str, name: str = "ids") -> Labels:
    """Return ids or groups on the CPU: integers or strings. Other list entries, such as paths, become strings."""
    if isinstance(ids, list | tuple) and not all(isinstance(entry, INTEGERS) for entry in ids):
        ids = list(map(str, ids))
    return copied(read_labels(ids, items, name, "embeddings", call))


def copied(labels: Labels) -> Labels:
    """Return a copy of labels that are a tensor, which could be changed in place; other labels unchanged."""
    return Labels(labels.values.clone()) if isinstance(labels.values, Tensor) else labels
