"""Reads the labels of steps, and knows which forms they have had."""

from __future__ import annotations

from typing import Any

from fewshot_callbacks.callbacks._conduct import UsageError, describe, without_owner
from fewshot_callbacks.distributed.torch_distributed import gather_objects
from fewshot_callbacks.functional._labels import Labels, as_labels, as_targets


class LabelReader:
    """Reads labels, and keeps what a run has shown of their forms.

    Args:
        takes_sets: Whether an item may have several labels, given as zeros and ones.
    """

    def __init__(self, *, takes_sets: bool = False) -> None:
        self.takes_sets = takes_sets
        # whether any monitor takes the targets of a regression
        self.takes_targets = False
        # names of the monitors that take none, for messages
        self.owner_of_classes = ""
        # form of the labels so far, see `Labels.form`; empty before the first
        self.form = ""
        # whether items have several labels each
        self.has_sets = False
        # whether labels are floating-point numbers. Monitors that take targets read them as targets. All others read
        # them as label sets, if they are only zeros and ones.
        self.has_targets = False
        # error of the monitors that take no targets of a regression; None while all targets of this validation were zeros
        # and ones, which these monitors read as label sets
        self.target_error: Exception | None = None

    def read(self, labels: Any, step: str, owner: str) -> Labels:
        """Read the labels of a step, one or several for each item.

        Args:
            labels: As they were found.
            step: Name of the step, for messages.
            owner: Name of the callback, for messages.

        Raises:
            UsageError: If only some batches have several labels for each item.
            ValueError: If they are not labels.
        """
        targets = as_targets(labels, "labels", owner) if self.takes_targets else None
        if targets is not None:
            self._see_targets(labels, step)
            return targets
        item_labels = as_labels(labels, "labels", owner, sets=self.takes_sets)
        if not len(item_labels):
            return item_labels
        form = item_labels.form
        are_sets = item_labels.columns is not None
        # The store refuses all other forms that are mixed in one loader.
        if self.form not in ("", form) and (are_sets or self.has_sets):
            raise UsageError(
                f"{owner}: the labels of {step} are {form}, those before were {self.form}. Use the same form in all batches."
            )
        self.form = form
        self.has_sets = self.has_sets or are_sets
        return item_labels

    def _see_targets(self, labels: Any, step: str) -> None:
        """Store an error for monitors that take no targets, unless labels are zeros and ones in all batches."""
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

        Args:
            to_targets: Whether floating-point zeros and ones are targets to the one who asks.
        """
        are_zeros_and_ones = self.has_targets and self.target_error is None
        return self.has_sets or (are_zeros_and_ones and not to_targets)

    def agree(self) -> None:
        """Learn of labels from processes that had items. *Collective*."""
        by_rank = gather_objects((self.has_sets, self.has_targets))
        self.has_sets = any(has_sets for has_sets, _ in by_rank)
        self.has_targets = any(has_targets for _, has_targets in by_rank)
