"""How a batch becomes embeddings outside any step; and the training classes that are embedded so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fewshot_callbacks.callbacks._conduct import UsageError, evaluation_progress
from fewshot_callbacks.callbacks.embeddings import EmbeddingReader, check_submodule, describe, follow, hooks_ignored
from fewshot_callbacks.distributed.torch_distributed import process_count
from fewshot_callbacks.functional._labels import Labels, as_labels, join, on_cpu, read_labels
from fewshot_callbacks.functional.class_subset import class_subset
from fewshot_callbacks.functional.retrieval import Similarity
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore
from fewshot_callbacks.trainer.loaders import move_batch
from fewshot_callbacks.trainer.side_effects import evaluation_mode

# How a batch becomes embeddings outside a step: the name of a submodule that is called with the batch's inputs, if need
# be with a path in its output (`"encoder:pooler_output"`), or a function of (module, batch) that returns embeddings, or
# (embeddings, labels).
Embed = str | Callable[[LightningModule, Any], Tensor | tuple[Tensor, Any]]

# Two embeddings of one item further apart than this, relative to their length, were not made in the same way.
MOVED = 0.01


class Embedder:
    """Makes embeddings of a batch that no step sees.

    Args:
        embed: See `Embed`; by default the submodule that the reader's source names, or else the module itself.
        reader: Finds the labels in a batch.
    """

    def __init__(self, embed: Embed | None, reader: EmbeddingReader) -> None:
        self.embed = reader.source if embed is None and isinstance(reader.source, str) else embed
        self.reader, self.owner = reader, reader.owner

    def __call__(self, trainer: Trainer, module: LightningModule, batch: Any) -> tuple[Tensor, Labels]:
        """Embed a batch that has arrived on the device, and read its labels."""
        # In the precision of a step, whose embeddings these are compared with.
        with trainer.precision_plugin.val_step_context():
            result: Any = self.embed(module, batch) if callable(self.embed) else self._called(module, batch)
        key = self.reader.keys[0]
        # A forward method or a function may return what the step returns.
        if isinstance(result, Mapping) and key in result:
            result = result[key]
        if isinstance(result, tuple) and len(result) == 2:
            return self.reader.check(*result, "embed")
        return self.reader.check(result, self.reader.find_labels(None, batch, "embed"), "embed")

    def in_evaluation(self, trainer: Trainer, module: LightningModule, batch: Any) -> tuple[Tensor, Labels]:
        """Embed a batch in evaluation mode, beside the step: callbacks that listen to a submodule do not hear it."""
        with hooks_ignored(), evaluation_mode(module):
            return self(trainer, module, batch)

    def _called(self, module: LightningModule, batch: Any) -> Any:
        inputs = _inputs(batch, self.owner)
        if self.embed is not None:
            name, _, path = str(self.embed).partition(":")
            output = self._output_of(module.get_submodule(name), name, inputs)
            return follow(output, path, f"{self.owner}(embed={self.embed!r})")
        try:
            return self._output_of(module, "", inputs)
        # PyTorch raises it where a module has no `forward`; one that a module raises itself says something else.
        except NotImplementedError as error:
            if "forward" not in str(error):
                raise
            raise UsageError(
                f"{self.owner}: {type(module).__name__} has no forward method, and embed is not given. Pass "
                "embed='name.of.a.submodule', or a function of (module, batch) that returns the embeddings."
            ) from error

    def _output_of(self, module: nn.Module, name: str, inputs: Any) -> Any:
        try:
            return module(inputs)
        except (AttributeError, TypeError) as error:
            if not isinstance(inputs, list | tuple):
                raise
            call = f"embed={name!r}" if name else f"{type(module).__name__}.forward"
            fix = f"lambda module, batch: module{'.' * bool(name)}{name}(batch[0][0])"
            raise UsageError(
                f"{self.owner}: {call} takes no list, and the inputs are {describe(inputs)}, such as views of each item. "
                f"Say which are meant: embed={fix}. ({type(error).__name__}: {error})"
            ) from error

    def check_name(self, module: LightningModule) -> None:
        """See that there is the submodule that is named.

        Raises:
            ValueError: If not; with the names that are near.
        """
        if isinstance(self.embed, str):
            check_submodule(module, self.embed.partition(":")[0], f"{self.owner}(embed={self.embed!r})")

    def check(
        self, trainer: Trainer, module: LightningModule, batch: Any, given: Tensor, similarity: Similarity
    ) -> None:
        """See that a validation step made the embeddings of a batch in the same way.

        Args:
            trainer: Runs the validation.
            module: The module.
            batch: What the step was given.
            given: The embeddings that the step gave.
            similarity: What is compared; cosine does not see the length of an embedding.

        Raises:
            ValueError: If they differ by more than rounding does.
        """
        own, _ = self.in_evaluation(trainer, module, batch)
        if similarity == "cosine":
            own, given = (torch.nn.functional.normalize(part.double(), dim=1) for part in (own, given))
        self.compare(own, given, module, "validation_step", "comparing the two would mean nothing")

    def compare(self, own: Tensor, given: Tensor, module: LightningModule, step: str, consequence: str) -> None:
        """See that two embeddings of the same items were made in the same way.

        Args:
            own: What this embedder made.
            given: What the step gave.
            module: The module, for messages.
            step: Name of the step.
            consequence: What follows if they were not.

        Raises:
            ValueError: If they differ by more than rounding does.
        """
        how = f"{type(module).__name__}.forward" if self.embed is None else f"The submodule {self.embed!r}"
        how = "The function given as embed" if callable(self.embed) else how
        fix = f"Pass embed=..., a function of (module, batch) that gives the embeddings of {step}."
        if own.shape != given.shape:
            raise UsageError(
                f"{self.owner}: {how} gives embeddings of shape {tuple(own.shape)} for a batch of which "
                f"{step} gave {tuple(given.shape)}. {fix}"
            )
        own, given = own.double(), given.double()
        # The bound keeps a row of zeros from dividing by zero.
        moved = float(((own - given).norm(dim=1) / given.norm(dim=1).clamp(min=1e-30)).max()) if len(own) else 0.0
        if moved > MOVED:
            raise UsageError(
                f"{self.owner}: {how} gives other embeddings than {step} for the same batch (they differ by up to "
                f"{moved:.2g} of their length), so {consequence}. {fix}"
            )


def _inputs(batch: Any, owner: str) -> Any:
    """Find the inputs of the model: the first part of a batch, or of a mapping its only entry besides the labels."""
    if isinstance(batch, Mapping):
        rest = [key for key in batch if key not in ("labels", "label", "targets", "target", "y")]
        if len(rest) == 1:
            return batch[rest[0]]
        raise UsageError(
            f"{owner}: the batch is a mapping with the keys {', '.join(map(repr, batch))}, and it is not known with "
            f"which of them the model is called. Pass embed=lambda module, batch: module(batch['...'])."
        )
    return batch[0] if isinstance(batch, Sequence) and not isinstance(batch, str) else batch


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


@dataclass(eq=False)
class TrainingClasses:
    """A fixed sample of the items of some training classes.

    Args:
        data: The training set with evaluation transforms; by default that of the Trainer's data module.
        classes: Number of classes.
        items_per_class: Number of items of each class.
        seed: Seed of the draw.
        owner: Name of the callback, for messages.
        argument: The one that gives `data`, for messages.
    """

    data: TrainingData | None
    classes: int | None
    items_per_class: int | None
    seed: int
    owner: str
    argument: str = "training_data"

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a run: there is no loader yet."""
        self._loader: DataLoader[Any] | None = None
        self.items = 0  # of all ranks; known once there is a loader

    def embedded(self, trainer: Trainer, embed: Embedder) -> EmbeddingStore:
        """Embed this rank's share of the items in evaluation mode; the sanity check only sees that they are there."""
        loader, store, module = self.loader(trainer), EmbeddingStore(), trainer.lightning_module
        if trainer.sanity_checking:
            return store
        words = "Embedding training classes"
        # Other monitors may wait for the embeddings of a step.
        with hooks_ignored(), evaluation_mode(module), evaluation_progress(trainer, words, unit="batch") as progress:
            for number, batch in enumerate(loader):
                store.append(*embed(trainer, module, move_batch(trainer, batch)))
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
        given = ("batch_size", "num_workers", "collate_fn", "pin_memory") if isinstance(data, DataLoader) else ()
        options = {name: getattr(data, name) for name in given}
        options["batch_size"] = options.get("batch_size") or 64
        dataset = data.dataset if given else data
        chosen = class_subset(self._labels_of(dataset), self.classes, self.items_per_class, self.seed)
        self.items = len(chosen)
        # A loader of its own: that which was given has all items, and may shuffle them. Lightning would not know it, so
        # that the items are dealt to the ranks here.
        self._loader = DataLoader(Subset(dataset, chosen[trainer.global_rank :: process_count()].tolist()), **options)
        return self._loader

    def _found(self, trainer: Trainer) -> Any:
        data = self.data
        if data is None:
            make = getattr(getattr(trainer, "datamodule", None), "training_data_for_evaluation", None)
            if make is None:
                raise UsageError(
                    f"{self.owner} has no training set: pass {self.argument}=..., your training set "
                    "with the transforms of an evaluation, or give your data module a method training_data_for_evaluation() "
                    "that returns it."
                )
            data = make()
        elif callable(data) and not isinstance(data, Dataset | DataLoader):
            data = data(trainer)
        if not isinstance(data, DataLoader) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise UsageError(
                f"{self.owner}: {self.argument} gave a {type(data).__name__}; expected a data set with a length and "
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
            return read_labels(labels, len(dataset), f"labels of {self.argument}", "items", self.owner)
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
        return join("labels_in", [on_cpu(as_labels(part, "labels", "labels_in")) for part in parts])
    if isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        return last if last.ndim == 1 and not (last.is_floating_point() or last.is_complex()) else None
    column = next((name for name in LABEL_COLUMNS if name in (getattr(dataset, "column_names", None) or ())), None)
    # The slice reads the column where the data set only returns a view of it, as `datasets` does from version 4 on.
    return None if column is None else dataset[column][:]
