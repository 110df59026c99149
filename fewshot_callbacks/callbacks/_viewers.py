"""Passes each evaluated set of a `RetrievalMonitor` to the callbacks that draw it, on the first process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.functional._labels import Labels, join
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.metrics.embedding_store import Shard
from fewshot_callbacks.trainer.lightning import Callback, Trainer
from fewshot_callbacks.trainer.loaders import evaluation_loaders

# The label of an item; a tuple of columns if its targets are multi-label.
Label: TypeAlias = int | str | tuple[int, ...]

# label -> name of its class, or a list of names for the labels 0, 1, 2, ...
Names = Mapping[Any, str] | Sequence[str]


@dataclass(frozen=True, eq=False)
class ItemSet:
    """Queries or gallery items, in the order of the data set.

    Attributes:
        embeddings: (items, dim), on the CPU, in the dtype of the model.
        labels: Label of each item; a tuple of columns if items have several labels. Empty without labels.
        positions: (items,) index of each item in the pass of all processes over the data; dropped items count, too.
        source: Name of the loader of these items.
        loader: The loader itself.
        groups: Group of each item; None without groups.
        ids: Id of each item; None without ids.
    """

    embeddings: Float[Tensor, "items dim"]
    labels: Sequence[Label]
    positions: Int[Tensor, "items"]
    source: str
    loader: Any
    groups: Sequence[int | str] | None = None
    ids: Sequence[int | str] | None = None

    def class_names(self, names: Names | None) -> dict[Label, str]:
        """Return label -> name of its class, from `names` or the data set's `classes`, or else the label itself.

        Examples:
            >>> items = ItemSet(torch.empty(3, 2), [1, 7, (0, 7)], torch.arange(3), "val", None)
            >>> list(items.class_names(["owl", "heron"]).values())
            ['heron', '7', 'owl, 7']
        """
        if names is None:
            names = _names_of_data_set(getattr(self.loader, "dataset", None))
        name_of: Any = names if isinstance(names, Mapping) else dict(enumerate(names))

        def name(label: Label) -> str:
            if isinstance(label, tuple):
                return ", ".join(map(name, label)) or "none"
            return str(name_of.get(label, label))

        return {label: name(label) for label in dict.fromkeys(self.labels)}


def _names_of_data_set(dataset: Any) -> Sequence[str]:
    """Return `classes` of a data set, or of the data set in a `Subset`; empty unless it is a list of strings."""
    classes = getattr(getattr(dataset, "dataset", dataset), "classes", None)
    if isinstance(classes, Sequence) and all(isinstance(name, str) for name in classes):
        return classes
    return ()


@dataclass(frozen=True)
class _Part:
    """The items of one process, as it sends them."""

    embeddings: Tensor
    labels: list[Label]
    positions: Tensor
    places: Tensor
    groups: Labels | None
    ids: Labels | None


def whole_set(shard: Shard, source: str, loader: Any, processes: Processes) -> ItemSet | None:
    """Return the items of all processes on the first process; None on the others. *Collective*."""
    labels: list[Label] = shard.labels.tolist()
    part = _Part(shard.embeddings, labels, shard.positions, shard.places, shard.groups, shard.ids)
    parts = processes.to_first(part)
    if parts is None:
        return None
    if len(parts) == 1:
        # The items are in order. This avoids a copy of the embeddings, which may be large.
        return ItemSet(
            shard.embeddings, labels, shard.positions, source, loader, _as_list(shard.groups), _as_list(shard.ids)
        )
    order = torch.cat([part.places for part in parts]).argsort()
    # A process without items has no dimension.
    embeddings = torch.cat([part.embeddings for part in parts if len(part.embeddings)] or [shard.embeddings])
    positions = torch.cat([part.positions for part in parts])
    all_labels = [label for part in parts for label in part.labels]
    groups = _joined_in_order("groups", [part.groups for part in parts], order)
    ids = _joined_in_order("ids", [part.ids for part in parts], order)
    return ItemSet(
        embeddings[order],
        [all_labels[index] for index in order.tolist()],
        positions[order],
        source,
        loader,
        groups,
        ids,
    )


def _joined_in_order(name: str, columns: Sequence[Labels | None], order: Tensor) -> Sequence[int | str] | None:
    """Return the groups or ids of all processes in the order of the data set; None without any."""
    filled = [column for column in columns if column is not None]
    return _as_list(join("RetrievalMonitor", filled, name)[order]) if filled else None


def _as_list(column: Labels | None) -> Sequence[int | str] | None:
    """Return groups or ids as integers or strings; None without any."""
    return None if column is None else column.tolist()


@dataclass(frozen=True, eq=False)
class EvaluatedSet:
    """An evaluated set. Do not keep it: its embeddings are freed after the last viewer."""

    report: RetrievalReport
    # first part of the keys of its metrics
    prefix: str
    # end of these keys; empty for a single set
    suffix: str
    epoch: int
    queries: ItemSet
    # None if each item is a query against all others
    gallery: ItemSet | None

    @property
    def title(self) -> str:
        """Name of the set, and the epoch, for titles of figures."""
        return f"{self.prefix}{self.suffix}, epoch {self.epoch}"

    def key(self, name: str) -> str:
        """Return the key of a picture of this set."""
        return f"{self.prefix}/{name}{self.suffix}"


class Viewer(Callback, ABC):
    """Sees each set that a `RetrievalMonitor` has evaluated. All processes call its methods together."""

    @abstractmethod
    def wants(self, prefix: str) -> bool:
        """Return whether to show the sets of this epoch whose keys begin with the prefix."""

    def see_batch(self, prefix: str, source: str, loader: Any, positions: range, batch: Any) -> None:
        """Look at a batch during the epoch. By default, do nothing.

        `positions` are the indices of the embeddings in this process's pass over the loader.
        """

    @abstractmethod
    def see_set(self, trainer: Trainer, key: str, evaluated: EvaluatedSet | None) -> None:
        """Look at an evaluated set. An implementation must not raise errors. *Collective*.

        `evaluated` is None on all processes but the first.
        """


def show_set(
    viewers: Sequence[Viewer],
    trainer: Trainer,
    prefix: str,
    suffix: str,
    report: RetrievalReport,
    parts: Sequence[tuple[Shard, int]],
) -> None:
    """Pass an evaluated set to the callbacks that draw it. *Collective*.

    `parts` are the queries of this process with the index of their loader, and the same for the gallery, if any.
    """
    loaders = list(evaluation_loaders(trainer).items())
    processes = all_processes()
    sides: list[ItemSet | None] = []
    for shard, loader_index in parts:
        source, loader = loaders[loader_index]
        sides.append(whole_set(shard, source, loader, processes))
    evaluated = None
    if sides[0] is not None:
        gallery = sides[1] if len(sides) > 1 else None
        evaluated = EvaluatedSet(report, prefix, suffix, trainer.current_epoch, sides[0], gallery)
    for viewer in viewers:
        viewer.see_set(trainer, f"{prefix}{suffix}", evaluated)
