"""What `RetrievalMonitor` hands to the callbacks that draw pictures of an evaluated set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer

from fewshot_callbacks.callbacks._targets import TargetBook
from fewshot_callbacks.functional.retrieval import MultilabelReport, RetrievalReport
from fewshot_callbacks.metrics.embedding_store import Shard


@dataclass(frozen=True, eq=False)
class ItemSet:
    """Queries or gallery items, of which this process holds a part."""

    shard: Shard
    # index of the loader that they came from
    loader: int


@dataclass(frozen=True, eq=False)
class EvaluatedSet:
    """A set that was just evaluated; its embeddings are dropped once every viewer has seen it."""

    # the same in every process
    report: RetrievalReport | MultilabelReport
    # first part of the keys of its metrics
    prefix: str
    # end of these keys; empty for a single set
    suffix: str
    queries: ItemSet
    # None where each item is a query against all others
    gallery: ItemSet | None
    # what the labels of this process's items stand for, if they are multi-label targets
    targets: TargetBook | None

    @property
    def searched(self) -> ItemSet:
        """The items among which the queries were searched."""
        return self.queries if self.gallery is None else self.gallery

    def key(self, name: str) -> str:
        """Name a picture as the metrics of the set are named."""
        return f"{self.prefix}/{name}{self.suffix}"


class Viewer(Callback, ABC):
    """Is shown each set that a `RetrievalMonitor` has evaluated. All processes call its methods together."""

    @abstractmethod
    def wants(self, prefix: str) -> bool:
        """Decide whether the sets of this epoch whose keys begin with the prefix are to be shown."""

    def see_batch(self, prefix: str, loader: int, positions: range, batch: Any) -> None:
        """Look at a batch before it is gone; by default do nothing.

        Args:
            prefix: First part of the keys of the set.
            loader: Index of the loader.
            positions: Index of each embedding of the batch in this process's pass over the loader.
            batch: What the step was given.
        """

    @abstractmethod
    def see_set(self, trainer: Trainer, evaluated: EvaluatedSet) -> None:
        """Look at an evaluated set, in all processes together. No error leaves this method."""


def viewers_of(trainer: Trainer, prefix: str) -> list[Viewer]:
    """List the callbacks of a Trainer that want to see the sets of this epoch whose keys begin with the prefix."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
    return [callback for callback in callbacks if isinstance(callback, Viewer) and callback.wants(prefix)]
