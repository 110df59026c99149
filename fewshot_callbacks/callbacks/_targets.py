"""Multi-label targets of a monitor: kept as one number for each item, as labels are, and evaluated as targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.callbacks._failures import UsageError
from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.functional._labels import Labels, as_labels, word_code
from fewshot_callbacks.functional.retrieval import (
    DEFAULT_METRICS,
    MULTILABEL_METRICS,
    MultilabelReport,
    Progress,
    RankOptions,
    RetrievalSettings,
    evaluate_multilabel,
    without_targets,
)
from fewshot_callbacks.metrics.embedding_store import Shard, in_order

# The settings that `evaluate_multilabel` has, too.
ARGUMENTS = tuple(get_type_hints(RankOptions))


class TargetBook:
    """Numbers for the rows of multi-label targets, the same in every process, and the rows for the numbers.

    Args:
        settings: Of the monitor.
        owner: Name of the callback, for messages.
    """

    def __init__(self, settings: RetrievalSettings, owner: str) -> None:
        self.settings, self.owner = settings, owner
        # columns of the targets; None as long as no batch of the run had any
        self.labels: int | None = None
        self._has_single_labels = False
        self._rows: dict[int, bytes] = {}

    def read(self, labels: Any, step: str) -> Labels:
        """Read labels: multi-label targets as the number of each row, those of any other form as they are.

        Args:
            labels: Labels of a batch.
            step: Where they come from, for messages.

        Raises:
            UsageError: If targets are not 0 or 1, have other columns than before, are mixed with labels of another form, or
                a setting has no use for them.
            ValueError: If they are neither targets nor labels.
        """
        # A single column holds labels, as some data sets keep them.
        is_target = isinstance(labels, Tensor | np.ndarray) and labels.ndim == 2 and labels.shape[1] > 1
        if not is_target:
            self._has_single_labels = True
        if self._has_single_labels and (is_target or self.labels is not None):
            raise UsageError(
                f"{self.owner}: some batches of {step} have multi-label targets (items, labels), others one label for each "
                "item. Use the same form in all batches."
            )
        if not is_target:
            return as_labels(labels, "labels", self.owner)
        targets = torch.as_tensor(labels, device="cpu").detach()
        if self.labels not in (None, targets.shape[1]):
            raise UsageError(
                f"{self.owner}: the multi-label targets of {step} have {targets.shape[1]} columns, those before had "
                f"{self.labels}. Column j must be the same label in all batches."
            )
        if not bool(((targets == 0) | (targets == 1)).all()):
            raise UsageError(
                f"{self.owner}: the labels of {step} have shape {tuple(targets.shape)} and hold other values than 0 and 1. "
                "Multi-label targets say with 0 and 1 which labels an item has; else give one integer for each item."
            )
        if self.labels is None:
            self.labels = targets.shape[1]
            _refuse_settings_of_classes(self.settings, self.labels, self.owner)
        distinct, row = targets.bool().unique(dim=0, return_inverse=True)
        numbers = [self._enter(packed.tobytes()) for packed in np.packbits(distinct.numpy(), axis=1)]
        return Labels(torch.tensor(numbers, dtype=torch.int64, device="cpu")[row])

    def _enter(self, row: bytes) -> int:
        number = word_code(row.hex())  # a hash, not a count: processes agree on it without a word to each other
        if self._rows.setdefault(number, row) != row:
            raise ValueError(f"{self.owner}: two different targets have the same number of 64 bits, by chance.")
        return number

    def join(self, processes: Processes) -> None:
        """Enter what the books of all processes hold. Collective."""
        for labels, rows in processes.gather((self.labels, self._rows)):
            if None not in (labels, self.labels) and labels != self.labels:
                raise ValueError(
                    f"{self.owner}: multi-label targets have {self.labels} columns in one process, {labels} in another."
                )
            self.labels = labels if self.labels is None else self.labels
            self._rows |= rows

    @property
    def metrics(self) -> Sequence[str]:
        """The keys of the metrics, also where nothing could be computed."""
        return self.settings.keys() if self.labels is None else target_metrics(self.settings)

    def names(self, shard: Shard) -> Mapping[int, Any] | None:
        """Return what each code in a shard means: a word, or the columns that hold a 1; None where codes are labels."""
        if self.labels is None:
            return shard.words
        distinct = shard.labels.unique()
        rows = self.targets(distinct)
        return {
            number: tuple(row.nonzero()[:, 0].tolist()) for number, row in zip(distinct.tolist(), rows, strict=True)
        }

    def targets(self, numbers: Int[Tensor, "items"]) -> Float[Tensor, "items labels"]:
        """Return the rows of these numbers."""
        if not len(numbers):
            return torch.empty(0, self.labels or 1, device="cpu")
        packed = np.frombuffer(b"".join(self._rows[number] for number in numbers.tolist()), np.uint8)
        bits = np.unpackbits(packed.reshape(len(numbers), -1), axis=1, count=self.labels)
        return torch.from_numpy(bits).float()

    def evaluate(self, shards: Sequence[Shard], processes: Processes, progress: Progress | None) -> MultilabelReport:
        """Evaluate queries, and the gallery if there is one: every process is sent all. Collective."""
        tensors = []
        for shard in shards:
            parts = processes.gather(shard) if processes.count > 1 else [shard]
            embeddings, numbers = in_order(parts, [part.labels for part in parts])
            tensors += [embeddings, self.targets(numbers)]
        arguments: dict[str, Any] = {name: getattr(self.settings, name) for name in ARGUMENTS}
        return evaluate_multilabel(*tensors, **arguments | {"metrics": self.metrics}, progress=progress)


def target_metrics(settings: RetrievalSettings) -> Sequence[str]:
    """List what a monitor logs of multi-label targets: what it was asked for, or the default of `evaluate_multilabel`."""
    return MULTILABEL_METRICS if settings.metrics == DEFAULT_METRICS else settings.metrics


def _refuse_settings_of_classes(settings: RetrievalSettings, labels: int, owner: str) -> None:
    """Refuse settings that multi-label targets have no use for.

    Raises:
        UsageError: With their names.
    """
    default = RetrievalSettings()
    names = [
        entry.name
        for entry in fields(settings)
        if entry.name not in ARGUMENTS and getattr(settings, entry.name) not in (getattr(default, entry.name), None)
    ]
    names += without_targets(target_metrics(settings))
    if names:
        raise UsageError(
            f"{owner}: the labels are multi-label targets (items, {labels}), for which {', '.join(names)} cannot be "
            f"computed. "
            "Means and groups of classes, pooled pairs, a sample of queries and a device need one label for each item. "
            f"Leave {'it' if len(names) == 1 else 'them'} out, or give one integer for each item."
        )
