"""Reads the labels of steps, and records their forms."""

from __future__ import annotations

from typing import Any

from fewshot_callbacks.callbacks._conduct import UsageError, describe, without_owner
from fewshot_callbacks.distributed.torch_distributed import gather_objects
from fewshot_callbacks.functional._labels import Labels, as_labels, as_targets


class LabelReader:
    """Reads labels, and records which forms a run has had.

    Args:
        takes_sets: Whether an item may have several labels, given as zeros and ones.
    """

    def __init__(self, *, takes_sets: bool = False) -> None:
        self.takes_sets = takes_sets
        # whether any monitor takes regression targets
        self.takes_targets = False
        # names of the monitors that do not take targets, for messages
        self.owner_of_classes = ""
        # form of the labels so far (see `Labels.form`); empty before the first
        self.form = ""
        # whether items have several labels each
        self.has_sets = False
        # whether labels are floating-point numbers. Some monitors read them as targets, and the others as several labels
        # per item if they are only zeros and ones.
        self.has_targets = False
        # error for monitors that do not take targets; None while all targets of this validation were zeros and ones
        self.target_error: Exception | None = None

    def read(self, labels: Any, step: str, owner: str) -> Labels:
        """Return the labels of a step, one or several for each item."""
        targets = as_targets(labels, "labels", owner) if self.takes_targets else None
        if targets is not None:
            self._see_targets(labels, step)
            return targets
        item_labels = as_labels(labels, "labels", owner, sets=self.takes_sets)
        if not len(item_labels):
            return item_labels
        form = item_labels.form
        are_sets = item_labels.columns is not None
        # The store refuses other mixed forms in one loader.
        if self.form not in ("", form) and (are_sets or self.has_sets):
            raise UsageError(
                f"{owner}: the labels of {step} are {form}, but earlier labels were {self.form}. Use one form for all."
            )
        self.form = form
        self.has_sets = self.has_sets or are_sets
        return item_labels

    def _see_targets(self, labels: Any, step: str) -> None:
        """Store an error for monitors that do not take targets, unless all labels are zeros and ones."""
        self.has_targets = True
        if self.target_error is not None:
            return
        owner = self.owner_of_classes
        try:
            as_labels(labels, "labels", owner, sets=True)
        except ValueError as error:
            fault = without_owner(error, owner)
            self.target_error = UsageError(f"{owner}: the labels of {step} are {describe(labels)}. {fault}")

    def are_sets(self, *, to_targets: bool) -> bool:
        """Return whether items have several labels each, as far as this process knows.

        `to_targets` is true if the caller reads floating-point zeros and ones as targets.
        """
        are_zeros_and_ones = self.has_targets and self.target_error is None
        return self.has_sets or (are_zeros_and_ones and not to_targets)

    def agree(self) -> None:
        """Share what is known about labels with processes without items. *Collective*."""
        by_rank = gather_objects((self.has_sets, self.has_targets))
        self.has_sets = any(has_sets for has_sets, _ in by_rank)
        self.has_targets = any(has_targets for _, has_targets in by_rank)
