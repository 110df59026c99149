"""What `RetrievalMonitor` hands to the callbacks that draw pictures: the whole set, on the first process alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.functional._labels import Labels, join
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.metrics.embedding_store import Shard
from fewshot_callbacks.trainer.loaders import evaluation_loaders

# A label as it was given, or the columns of an item's multi-label targets.
Label: TypeAlias = int | str | tuple[int, ...]

# label -> the name of its class, or the names by number
Names = Mapping[Any, str] | Sequence[str]


@dataclass(frozen=True, eq=False)
class ItemSet:
    """Queries or gallery items, in the order of the data set."""

    embeddings: Float[Tensor, "items dim"]
    labels: Sequence[Label]
    # index of each item in the pass of all processes over their data
    positions: Int[Tensor, "items"]
    # name of the loader that they came from, and the loader
    source: str
    loader: Any

    # of each item: those of one group are no candidates for each other; None if none were given
    groups: Labels | None = None

    def class_names(self, names: Names | None) -> dict[Label, str]:
        """Name each label: by the names that are given, those that the data set has as `classes`, or the label itself.

        Examples:
            >>> items = ItemSet(torch.empty(3, 2), [1, 7, (0, 7)], torch.arange(3), "val", None)
            >>> list(items.class_names(["owl", "heron"]).values())
            ['heron', '7', 'owl, 7']
        """
        if names is None:
            dataset = getattr(self.loader, "dataset", None)
            # Through a `Subset`, which has no names of its own.
            classes = getattr(getattr(dataset, "dataset", dataset), "classes", None)
            names = classes if isinstance(classes, Sequence) and all(isinstance(one, str) for one in classes) else ()
        known: Any = names if isinstance(names, Mapping) else dict(enumerate(names))

        def name(label: Label) -> str:
            if isinstance(label, tuple):
                return ", ".join(map(name, label)) or "none"
            return str(known.get(label, label))

        return {label: name(label) for label in dict.fromkeys(self.labels)}


def whole_set(shard: Shard, source: str, loader: Any, processes: Processes) -> ItemSet | None:
    """Bring the items of all processes to the first one; None on the others. Collective.

    Args:
        shard: The items of this process.
        source: Name of the loader.
        loader: The loader.
        processes: All that hold a part.
    """
    labels: list[Label] = shard.labels.tolist()
    parts = processes.to_first((shard.embeddings, labels, shard.positions, shard.places, shard.groups))
    if parts is None:
        return None
    if len(parts) == 1:  # in order already: no copy of what may be large
        return ItemSet(shard.embeddings, labels, shard.positions, source, loader, shard.groups)
    embeddings, of_parts, positions, places, groups = zip(*parts, strict=True)
    order = torch.cat(places).argsort()
    every = [label for part in of_parts for label in part]
    # Without those of a process that had no item: it does not know the dimension.
    rows = torch.cat([part for part in embeddings if len(part)] or [shard.embeddings])
    ordered = [every[place] for place in order.tolist()]
    grouped = [part for part in groups if part is not None]  # a process that had no item has none
    in_order = join("RetrievalMonitor", grouped, "groups")[order] if grouped else None
    return ItemSet(rows[order], ordered, torch.cat(positions)[order], source, loader, in_order)


@dataclass(frozen=True, eq=False)
class EvaluatedSet:
    """A set that was just evaluated; its embeddings are dropped once every viewer has seen it."""

    report: RetrievalReport
    # first part of the keys of its metrics
    prefix: str
    # end of these keys; empty for a single set
    suffix: str
    epoch: int
    queries: ItemSet
    # None where each item is a query against all others
    gallery: ItemSet | None

    @property
    def where(self) -> str:
        """Name the set and the epoch, for titles."""
        return f"{self.prefix}{self.suffix}, epoch {self.epoch}"

    def key(self, name: str) -> str:
        """Name a picture as the metrics of the set are named."""
        return f"{self.prefix}/{name}{self.suffix}"


class Viewer(Callback, ABC):
    """Is shown each set that a `RetrievalMonitor` has evaluated. All processes call its methods together."""

    @abstractmethod
    def wants(self, prefix: str) -> bool:
        """Decide whether the sets of this epoch whose keys begin with the prefix are to be shown."""

    def see_batch(self, prefix: str, source: str, loader: Any, positions: range, batch: Any) -> None:
        """Look at a batch before it is gone; by default do nothing.

        Args:
            prefix: First part of the keys of the set.
            source: Name of the loader.
            loader: The loader.
            positions: Index of each embedding of the batch in this process's pass over the loader.
            batch: What the step was given.
        """

    @abstractmethod
    def see_set(self, trainer: Trainer, key: str, evaluated: EvaluatedSet | None) -> None:
        """Look at an evaluated set, which the first process alone has. Collective; no error leaves this method."""


def show_set(
    viewers: Sequence[Viewer],
    trainer: Trainer,
    prefix: str,
    suffix: str,
    report: RetrievalReport,
    parts: Sequence[tuple[Shard, int]],
) -> None:
    """Hand an evaluated set to the callbacks that want to see it. Collective.

    Args:
        viewers: The callbacks.
        trainer: The Trainer.
        prefix: First part of the keys of the set.
        suffix: End of these keys.
        report: Of the set.
        parts: The queries of this process and the index of their loader; the same of the gallery, if there is one.
    """
    loaders, processes = list(evaluation_loaders(trainer).items()), all_processes()
    sets = [whole_set(shard, *loaders[loader], processes) for shard, loader in parts]
    evaluated = None
    if sets[0] is not None:
        gallery = sets[1] if len(sets) > 1 else None
        evaluated = EvaluatedSet(report, prefix, suffix, trainer.current_epoch, sets[0], gallery)
    for viewer in viewers:
        viewer.see_set(trainer, f"{prefix}{suffix}", evaluated)
