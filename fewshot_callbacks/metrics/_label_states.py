"""Labels, ids and groups as states of a metric.

torchmetrics concatenates the tensors of a state over batches and processes. Each column of labels therefore has two
states, of which one is empty. Integers are one tensor per batch. Other labels are one line of JSON per batch, so that
concatenated states are a text of all lines:

    labels       int64 (items,) per batch
    labels_json  uint8 (bytes,) per batch: {"columns": null, "labels": ["owl", "heron"]}
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor
from torchmetrics import Metric

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, join
from fewshot_callbacks.functional._repeated import first_of_each, note_on_ids
from fewshot_callbacks.metrics._rows import sketches_of


def add_label_states(metric: Metric, name: str) -> None:
    """Add the two states of a column of labels, ids or groups."""
    for state in (name, _json_state(name)):
        metric.add_state(state, default=[], dist_reduce_fx="cat")


def append_labels(metric: Metric, name: str, labels: Labels) -> None:
    """Append the labels of a batch to the state for their form; integers as a copy on the CPU."""
    if isinstance(labels.values, Tensor):
        getattr(metric, name).append(labels.values.to("cpu", copy=True))
    else:
        getattr(metric, _json_state(name)).append(labels_to_json(labels))


def set_labels(metric: Metric, name: str, labels: Labels) -> None:
    """Replace the labels of all batches."""
    for state in (name, _json_state(name)):
        setattr(metric, state, [])
    append_labels(metric, name, labels)


def has_labels(metric: Metric, name: str) -> bool:
    """Return whether a batch had labels, even a batch without items."""
    return any(len(getattr(metric, state)) > 0 for state in (name, _json_state(name)))


def form_of_labels(metric: Metric, name: str) -> str:
    """Return the form of the labels so far (see `Labels.form`); empty before the first item."""
    json_batches = _filled_tensors(getattr(metric, _json_state(name)))
    if json_batches:
        return labels_from_json(json_batches[0])[0].form
    return "integers" if _filled_tensors(getattr(metric, name)) else ""


def labels_in_states(metric: Metric, name: str, call: str, argument: str | None = None) -> Labels:
    """Return the labels of all batches on the CPU; after torchmetrics has joined the states, the labels of all processes."""
    batches = [Labels(tensor.cpu().to(torch.int64)) for tensor in _filled_tensors(getattr(metric, name))]
    for tensor in _filled_tensors(getattr(metric, _json_state(name))):
        batches += labels_from_json(tensor)
    return join(call, batches, argument or name)


def refuse_other_columns(call: str, earlier: Mapping[str, bool], given: Mapping[str, Any]) -> None:
    """Refuse a batch if it has other arguments than earlier batches."""
    for name, had_earlier in earlier.items():
        if had_earlier != (given[name] is not None):
            raise InputError(f"{call}: some batches have {name}, but others do not. Pass {name} with each batch.")


def first_of_each_id(
    is_compared: Bool[Tensor, "items"], batches: list[Tensor], labels: Labels, ids: Labels, call: str
) -> Bool[Tensor, "items"]:
    """Return whether each item is the first of its id among the items that a mask selects.

    Other items of an id give a warning if they differ from the first in embedding or label.
    """
    rows = is_compared.nonzero()[:, 0]
    codes = ids[rows].codes
    note = note_on_ids(codes, labels[rows].codes, sketches_of(batches)[rows])
    if note is not None:
        warnings.warn(f"{call}: {note}", stacklevel=3)
    is_first = torch.zeros_like(is_compared)
    is_first[rows[first_of_each(codes)]] = True
    return is_first


def batches_in(state: list[Tensor] | Tensor) -> list[Tensor]:
    """Return the tensors of a state; after processes were joined it is a single tensor."""
    return [state] if isinstance(state, Tensor) else list(state)


def labels_to_json(labels: Labels) -> UInt8[Tensor, "bytes"]:
    """Return labels as a line of JSON, in ASCII: UTF-8 cannot encode half of a surrogate pair."""
    line = json.dumps({"columns": labels.columns, "labels": labels.tolist()}) + "\n"
    return torch.frombuffer(bytearray(line.encode("ascii")), dtype=torch.uint8)


def labels_from_json(lines: UInt8[Tensor, "bytes"]) -> list[Labels]:
    """Return the labels of each line that `labels_to_json` made."""
    text = lines.cpu().to(torch.uint8).numpy().tobytes()
    return [_labels_from_line(line) for line in text.splitlines()]


def _labels_from_line(line: bytes) -> Labels:
    """Return the labels of one line. If it has columns, its labels are sets."""
    fields = json.loads(line)
    labels = fields["labels"]
    if fields["columns"] is not None:
        labels = map(tuple, labels)
    return Labels(np.fromiter(labels, dtype=object, count=len(fields["labels"])), fields["columns"])


def _json_state(name: str) -> str:
    """Return the name of the state of labels that are not integers."""
    return f"{name}_json"


def _filled_tensors(state: list[Tensor] | Tensor) -> list[Tensor]:
    """Return the tensors of a state that are not empty."""
    return [tensor for tensor in batches_in(state) if tensor.numel()]
