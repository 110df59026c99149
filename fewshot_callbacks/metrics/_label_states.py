"""Labels, ids and groups as states of a metric.

A state is a list of tensors that are concatenated, those of batches and those of processes. Integers are such a tensor a
batch. Anything else is a line of JSON a batch, in UTF-8, for lines that are concatenated are a text of more lines. So
everything that is labelled has two states, of which one is empty:

    labels       int64 (items,) a batch
    labels_json  uint8 (bytes,) a batch: {"columns": null, "labels": ["owl", "heron"]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torchmetrics import Metric

from fewshot_callbacks.functional._labels import Labels, join


def add_label_states(metric: Metric, name: str) -> None:
    """Add the two states of labels, or of what else has this name."""
    for state in (name, _json_state(name)):
        metric.add_state(state, default=[], dist_reduce_fx="cat")


def append_labels(metric: Metric, name: str, labels: Labels) -> None:
    """Append the labels of a batch to the state of their form. A copy of integers is kept, on the CPU."""
    if isinstance(labels.values, Tensor):
        getattr(metric, name).append(labels.values.to("cpu", copy=True))
    else:
        getattr(metric, _json_state(name)).append(labels_to_json(labels))


def set_labels(metric: Metric, name: str, labels: Labels) -> None:
    """Keep these labels in place of all earlier ones."""
    for state in (name, _json_state(name)):
        setattr(metric, state, [])
    append_labels(metric, name, labels)


def has_labels(metric: Metric, name: str) -> bool:
    """Return whether some batch gave labels, be it of no item."""
    return any(len(getattr(metric, state)) > 0 for state in (name, _json_state(name)))


def form_of_labels(metric: Metric, name: str) -> str:
    """Return the form of the labels so far (see `Labels.form`), by the first batch with an item; empty before it."""
    lines = next(_parts(getattr(metric, _json_state(name))), None)
    if lines is not None:
        return labels_from_json(lines)[0].form
    integers = next(_parts(getattr(metric, name)), None)
    return "" if integers is None else "integers"


def labels_in_states(metric: Metric, name: str, call: str, shown: str | None = None) -> Labels:
    """Return the labels of all batches and, where processes have been joined, of all processes, on the CPU.

    Args:
        metric: The metric that holds them.
        name: Name of the state.
        call: The public method, for messages.
        shown: What messages call them, by default as the state.

    Raises:
        ValueError: If they have different forms.
    """
    integers = [Labels(part.cpu().to(torch.int64)) for part in _parts(getattr(metric, name))]
    others = [labels for part in _parts(getattr(metric, _json_state(name))) for labels in labels_from_json(part)]
    return join(call, [*integers, *others], shown or name)


def labels_to_json(labels: Labels) -> UInt8[Tensor, "bytes"]:
    """Return labels as a line of JSON in ASCII, which escapes what UTF-8 cannot hold: half of a surrogate pair."""
    line = json.dumps({"columns": labels.columns, "labels": labels.tolist()}) + "\n"
    return torch.frombuffer(bytearray(line.encode("ascii")), dtype=torch.uint8)


def labels_from_json(lines: UInt8[Tensor, "bytes"]) -> list[Labels]:
    """Return the labels of each line that `labels_to_json` made."""
    text = lines.cpu().to(torch.uint8).numpy().tobytes()
    return [_of_line(line) for line in text.splitlines()]


def _of_line(line: bytes) -> Labels:
    """Return the labels of one line."""
    fields = json.loads(line)
    labels = fields["labels"]
    if fields["columns"] is not None:
        labels = map(tuple, labels)
    return Labels(np.fromiter(labels, dtype=object, count=len(fields["labels"])), fields["columns"])


def _json_state(name: str) -> str:
    """Return the name of the state of labels that are no integers."""
    return f"{name}_json"


def _parts(state: Sequence[Tensor] | Tensor) -> Iterator[Tensor]:
    """Return the tensors of a state that hold something; it is a single tensor where processes have been joined."""
    parts = [state] if isinstance(state, Tensor) else state
    return (part for part in parts if part.numel())
