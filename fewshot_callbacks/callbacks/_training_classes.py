"""Draws training classes for a monitor, and embeds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fewshot_callbacks._trainer import evaluating, on_device
from fewshot_callbacks.callbacks._embedder import Embedder
from fewshot_callbacks.callbacks._failures import UsageError
from fewshot_callbacks.callbacks._progress import evaluation_progress
from fewshot_callbacks.distributed.torch_distributed import process_count
from fewshot_callbacks.functional._labels import Labels, as_labels, joined_labels, read_labels
from fewshot_callbacks.functional.class_subset import class_subset
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore


@runtime_checkable
class Table(Protocol):
    """Rows that are mappings, and columns by name, as a data set of Hugging Face has them."""

    column_names: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...


# A data set, a loader of one, or a function of the Trainer that returns either.
TrainingData = Dataset[Any] | DataLoader[Any] | Table | Callable[[Trainer], Any]

# Names under which a table keeps the label of each row.
LABEL_COLUMNS = ("label", "labels", "target", "targets")


class TrainingClasses:
    """A fixed sample of the items of some training classes.

    Args:
        data: The training set with evaluation transforms; by default that of the Trainer's data module.
        classes: Number of classes.
        items_per_class: Number of items of each class.
        seed: Seed of the draw.
        owner: Name of the callback, for messages.
    """

    def __init__(
        self,
        data: TrainingData | None,
        classes: int | None,
        items_per_class: int | None,
        seed: int,
        owner: str,
    ) -> None:
        self.data, self.owner = data, owner
        self.classes, self.items_per_class, self.seed = classes, items_per_class, seed
        self.begin()

    def begin(self) -> None:
        """Begin a run: there is no loader yet."""
        self._loader: DataLoader[Any] | None = None
        self.items = 0  # of all ranks; known once there is a loader

    def embedded(self, trainer: Trainer, embed: Embedder) -> EmbeddingStore:
        """Embed this rank's share of the items in evaluation mode."""
        loader, store, module = self.loader(trainer), EmbeddingStore(), trainer.lightning_module
        words = "Embedding training classes"
        with evaluation_progress(trainer, words, unit="batch") as progress, evaluating(module):
            for number, batch in enumerate(loader):
                store.append(*embed(trainer, module, on_device(trainer, batch)))
                progress(number + 1, len(loader))
        return store

    def loader(self, trainer: Trainer) -> DataLoader[Any]:
        """Make the loader of this rank's share of the items once in a run: item i goes to rank i modulo their number.

        Raises:
            ValueError: If the training set or its labels are not known.
        """
        if self._loader is not None:
            return self._loader
        data = self._found(trainer)
        given = data if isinstance(data, DataLoader) else None
        dataset = data if given is None else given.dataset
        chosen = class_subset(self._labels_of(dataset), self.classes, self.items_per_class, self.seed)
        self.items = len(chosen)
        options: dict[str, Any] = {"batch_size": 64}
        if given is not None:
            options = {name: getattr(given, name) for name in ("num_workers", "collate_fn", "pin_memory")}
            options["batch_size"] = given.batch_size or 64
        # A loader of its own: that which was given has all items, and may shuffle them. Lightning would not know it, so
        # that the items are dealt to the ranks here.
        self._loader = DataLoader(Subset(dataset, chosen[trainer.global_rank :: process_count()].tolist()), **options)
        return self._loader

    def _found(self, trainer: Trainer) -> Any:
        data = self.data
        if data is None:
            data_module = getattr(trainer, "datamodule", None)
            data = getattr(data_module, "training_data_for_evaluation", None)
            if data is None:
                raise UsageError(
                    f"{self.owner} has no training set: pass training_data=..., your training set "
                    "with the transforms of an evaluation, or give your data module a method training_data_for_evaluation() "
                    "that returns it."
                )
            data = data()
        elif callable(data) and not isinstance(data, Dataset | DataLoader):
            data = data(trainer)
        if not isinstance(data, DataLoader) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise UsageError(
                f"{self.owner}: training_data gave a {type(data).__name__}; expected a data set with a length and "
                f"items, or a DataLoader of one."
            )
        return data

    def _labels_of(self, dataset: Any) -> Labels:
        labels = labels_in(dataset)
        if labels is None:
            raise UsageError(
                f"{self.owner}: {type(dataset).__name__} has neither labels nor targets, by which classes could be drawn "
                "without reading every item. Give it one, the label of each item: dataset.labels = [...]."
            )
        try:
            return read_labels(labels, len(dataset), "labels of training_data", "items", self.owner)
        except ValueError as error:
            raise UsageError(str(error)) from error


def labels_in(dataset: Any) -> Any:
    """Find the label of each item of a data set without reading an item; None where there are none.

    They are its attribute `labels` or `targets`; those of the data set that a `Subset` is of, or of the parts of a
    `ConcatDataset`; the last tensor of a `TensorDataset`, if it holds integers; or the column of such a name of a `Table`.
    """
    for name in ("labels", "targets"):
        if getattr(dataset, name, None) is not None:
            return getattr(dataset, name)
    if isinstance(dataset, Subset):
        whole = labels_in(dataset.dataset)
        return None if whole is None else as_labels(whole, "labels", "labels_in")[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [labels_in(part) for part in dataset.datasets]
        if any(part is None for part in parts):
            return None
        return joined_labels([as_labels(part, "labels", "labels_in") for part in parts], "labels_in")
    if isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        return last if last.ndim == 1 and not (last.is_floating_point() or last.is_complex()) else None
    column = next((name for name in LABEL_COLUMNS if name in (getattr(dataset, "column_names", None) or ())), None)
    # The slice reads the column where the data set only returns a view of it, as `datasets` does from version 4 on.
    return None if column is None else dataset[column][:]
