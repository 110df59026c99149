"""Embeds batches outside any step, and a sample of the training classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fewshot_callbacks.callbacks._conduct import UsageError, evaluation_progress
from fewshot_callbacks.callbacks.embeddings import (
    Embed,
    EmbeddingReader,
    Entry,
    check_submodule,
    describe,
    follow,
    hooks_ignored,
    read_names,
)
from fewshot_callbacks.distributed.torch_distributed import process_count
from fewshot_callbacks.functional._labels import Labels, as_labels, join, on_cpu, read_labels
from fewshot_callbacks.functional.class_subset import class_subset
from fewshot_callbacks.functional.retrieval import Similarity
from fewshot_callbacks.metrics.embedding_store import EmbeddingStore
from fewshot_callbacks.settings import NoFile
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer
from fewshot_callbacks.trainer.loaders import move_batch
from fewshot_callbacks.trainer.side_effects import evaluation_mode

# Distance of two embeddings of one item, relative to their length, above which they were not made in the same way.
LARGEST_DIFFERENCE = 0.01


class Embedder:
    """Embeds a batch outside any step.

    It does so as its source says in `embed`, or else by the submodule that the source names, or else by the module itself.

    Args:
        reader: Has the source, and finds the labels in a batch.
    """

    def __init__(self, reader: EmbeddingReader) -> None:
        source = reader.source.source
        self.embed: Embed | None = reader.source.embed
        if self.embed is None and isinstance(source, str):
            self.embed = source
        self.reader = reader

    @property
    def owner(self) -> str:
        """Name of the callback, for messages."""
        return self.reader.owner

    def __call__(self, trainer: Trainer, module: LightningModule, batch: Any) -> tuple[Tensor, Labels]:
        """Embed a batch that is on the device, and read its labels."""
        # In the precision of a step, whose embeddings these are compared with.
        with trainer.precision_plugin.val_step_context():
            result: Any = self.embed(module, batch) if callable(self.embed) else self._call_submodule(module, batch)
        key = self.reader.keys[0]
        # A forward method or a function may return the same mapping as the step.
        if isinstance(result, Mapping) and key in result:
            result = result[key]
        if isinstance(result, tuple) and len(result) == 2:
            return self.reader.check(*result, "embed")
        return self.reader.check(result, self.reader.find_labels(None, batch, "embed"), "embed")

    def in_evaluation(self, trainer: Trainer, module: LightningModule, batch: Any) -> tuple[Tensor, Labels]:
        """Embed a batch in evaluation mode. Hooks of `EmbeddingReader`s ignore these calls of submodules."""
        with hooks_ignored(), evaluation_mode(module):
            return self(trainer, module, batch)

    def _call_submodule(self, module: LightningModule, batch: Any) -> Any:
        """Return what the submodule that `embed` names, or the module itself, makes of the inputs of a batch."""
        inputs = _find_inputs(batch, self.owner)
        if self.embed is not None:
            name, _, path = str(self.embed).partition(":")
            output = self._call(module.get_submodule(name), name, inputs)
            return follow(output, path, f"{self.owner}, {self._call_of_source()}")
        try:
            return self._call(module, "", inputs)
        except NotImplementedError as error:
            # PyTorch's own error of a module without `forward` names it; others are raised by the module.
            if "forward" not in str(error):
                raise
            raise UsageError(
                f"{self.owner}: {type(module).__name__} has no forward method, and its source does not say how to embed. "
                f"Pass source={self.reader.source.but_for(embed='name.of.a.submodule')}, or as embed a function of (module, "
                "batch) that returns the embeddings."
            ) from error

    def _call(self, module: nn.Module, name: str, inputs: Any) -> Any:
        """Call a module; `name` is that of a submodule, or empty.

        Raises:
            UsageError: If the inputs are several, and the module takes no list.
        """
        try:
            return module(inputs)
        except (AttributeError, TypeError) as error:
            if not isinstance(inputs, list | tuple):
                raise
            call = f"embed={name!r}" if name else f"{type(module).__name__}.forward"
            fix = f"lambda module, batch: module{'.' * bool(name)}{name}(batch[0][0])"
            raise UsageError(
                f"{self.owner}: {call} takes no list, and the inputs are {describe(inputs)}, such as views of each item. "
                f"Say which are meant: EmbeddingSource(embed={fix}). ({type(error).__name__}: {error})"
            ) from error

    def check_name(self, module: LightningModule) -> None:
        """Check that the module has the submodule that `embed` names.

        Raises:
            UsageError: If not; lists similar names.
        """
        if isinstance(self.embed, str):
            check_submodule(module, self.embed.partition(":")[0], f"{self.owner}, {self._call_of_source()}")

    def _call_of_source(self) -> str:
        """Return the source as a call, for messages."""
        return self.reader.source.but_for()

    def check(
        self, trainer: Trainer, module: LightningModule, batch: Any, step_embeddings: Tensor, similarity: Similarity
    ) -> None:
        """Check that a validation step embeds a batch in the same way.

        Args:
            trainer: The Trainer.
            module: The module.
            batch: What the step was called with.
            step_embeddings: The embeddings of the step.
            similarity: What is compared; cosine does not see the length of an embedding.

        Raises:
            UsageError: If the embeddings differ by more than rounding.
        """
        embeddings, _ = self.in_evaluation(trainer, module, batch)
        if similarity == "cosine":
            embeddings = torch.nn.functional.normalize(embeddings.double(), dim=1)
            step_embeddings = torch.nn.functional.normalize(step_embeddings.double(), dim=1)
        self.compare(embeddings, step_embeddings, module, "validation_step", "comparing the two would mean nothing")

    def compare(
        self, embeddings: Tensor, step_embeddings: Tensor, module: LightningModule, step: str, consequence: str
    ) -> None:
        """Check that this embedder and a step have made the same embeddings of a batch.

        Args:
            embeddings: Those of this embedder.
            step_embeddings: Those of the step.
            module: The module, for messages.
            step: Name of the step, for messages.
            consequence: What follows if they differ, for messages.

        Raises:
            UsageError: If they differ by more than rounding.
        """
        if self.embed is None:
            subject = f"{type(module).__name__}.forward"
        elif callable(self.embed):
            subject = "The function given as embed"
        else:
            subject = f"The submodule {self.embed!r}"
        fix = (
            f"Pass embed=... in its EmbeddingSource, a function of (module, batch) that gives the embeddings of {step}."
        )
        if embeddings.shape != step_embeddings.shape:
            raise UsageError(
                f"{self.owner}: {subject} gives embeddings of shape {tuple(embeddings.shape)} for a batch of which "
                f"{step} gave {tuple(step_embeddings.shape)}. {fix}"
            )
        if not len(embeddings):
            return
        distances = (embeddings.double() - step_embeddings.double()).norm(dim=1)
        # The bound keeps a row of zeros from dividing by zero.
        lengths = step_embeddings.double().norm(dim=1).clamp(min=1e-30)
        difference = float((distances / lengths).max())
        if difference > LARGEST_DIFFERENCE:
            raise UsageError(
                f"{self.owner}: {subject} gives other embeddings than {step} for the same batch (they differ by up to "
                f"{difference:.2g} of their length), so {consequence}. {fix}"
            )


def _find_inputs(batch: Any, owner: str) -> Any:
    """Return the inputs of the model: the first part of a batch, or of a mapping its only entry besides the labels.

    Raises:
        UsageError: If a mapping has several such entries, or none.
    """
    if isinstance(batch, Mapping):
        input_keys = [key for key in batch if key not in ("labels", "label", "targets", "target", "y")]
        if len(input_keys) == 1:
            return batch[input_keys[0]]
        raise UsageError(
            f"{owner}: the batch is a mapping with the keys {', '.join(map(repr, batch))}, and it is not known with "
            "which of them the model is called. Pass source=EmbeddingSource(embed=lambda module, batch: "
            "module(batch['...']))."
        )
    return batch[0] if isinstance(batch, Sequence) and not isinstance(batch, str) else batch


@runtime_checkable
class Table(Protocol):
    """Rows that are mappings, and columns by name, as a data set of Hugging Face has them."""

    column_names: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...


# A data set, a loader of one, or a function of the Trainer that returns either.
# With a parameter, jsonargparse would take no class derived from Dataset; without Any, none that only fits a protocol.
TrainingData = Dataset | DataLoader | Table | Callable[[Trainer], Any] | NoFile | Any  # type: ignore[type-arg]
# The words in place of them.
BankWord = Literal["train", "gallery", "self"]

# Names under which a table keeps the label of each row.
LABEL_COLUMNS = ("label", "labels", "target", "targets")


@dataclass(eq=False)
class TrainingClasses:
    """Draws a fixed sample of training items, and embeds it. The loader of the sample lives as long as a run.

    Args:
        data: The training set with evaluation transforms; by default that of the Trainer's data module.
        classes: Number of classes.
        items_per_class: Number of items of each class.
        seed: Seed of the draw.
        owner: Name of the callback, for messages.
        argument: Name of the argument for `data`, for messages.
        by_class: Whether the labels of the data set are read before its items, to draw classes and to find mistakes early.
            Without, all items are taken, and their labels are those of the batches.
    """

    data: TrainingData | None
    classes: int | None
    items_per_class: int | None
    seed: int
    owner: str
    argument: str = "training_data"
    by_class: bool = True

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a run: the sample is not drawn yet."""
        self._loader: DataLoader[Any] | None = None
        # number of items of all ranks; 0 before the sample is drawn
        self.items = 0

    def is_same_sample(self, other: TrainingClasses) -> bool:
        """Return whether another object draws the same items of the same data."""
        draw = (self.classes, self.items_per_class, self.seed)
        return self.data is other.data and draw == (other.classes, other.items_per_class, other.seed)

    def embedded(
        self, trainer: Trainer, embed: Embedder, groups: Entry | Sequence[Entry] | None = None
    ) -> EmbeddingStore:
        """Return the embeddings of this rank's share of the sample, in evaluation mode.

        Args:
            trainer: The Trainer.
            embed: Embeds a batch.
            groups: Entry of a batch with the group of each item; None reads none.

        In the sanity check the sample is drawn, which may fail, but the store stays empty.
        """
        loader = self.loader(trainer)
        store = EmbeddingStore()
        if trainer.sanity_checking:
            return store
        module = trainer.lightning_module
        description = "Embedding training classes"
        # This happens inside an epoch of validation: other monitors must not take these outputs for those of a step.
        with (
            hooks_ignored(),
            evaluation_mode(module),
            evaluation_progress(trainer, description, unit="batch") as progress,
        ):
            for number, batch in enumerate(loader):
                moved = move_batch(trainer, batch)
                embeddings, labels = embed(trainer, module, moved)
                if len(labels) != len(embeddings):
                    raise embed.reader.no_labels(moved, "embed")
                item_groups = None
                if groups is not None:
                    views = embed.reader.source.views
                    item_groups = read_names("groups", groups, None, moved, len(embeddings), self.owner, views)
                store.append(embeddings, labels, groups=item_groups)
                progress(number + 1, len(loader))
        return store

    def loader(self, trainer: Trainer) -> DataLoader[Any]:
        """Return the loader of this rank's share of the sample, which is drawn at the first call of a run.

        Item i of the sample goes to rank i modulo the number of ranks.

        Raises:
            UsageError: If the training set or its labels are not known.
        """
        if self._loader is not None:
            return self._loader
        data = self._training_data(trainer)
        dataset = data
        options: dict[str, Any] = {"batch_size": None}
        if isinstance(data, DataLoader):
            dataset = data.dataset
            options = {name: getattr(data, name) for name in ("batch_size", "num_workers", "collate_fn", "pin_memory")}
        if options["batch_size"] is None:
            options["batch_size"] = 64
        if self.by_class:
            sample = class_subset(self._labels_of(dataset), self.classes, self.items_per_class, self.seed)
        else:
            sample = torch.arange(len(dataset))
        self.items = len(sample)
        # The user's loader has all items, and may shuffle them. Lightning does not know this one, and adds no sampler.
        share = sample[trainer.global_rank :: process_count()].tolist()
        self._loader = DataLoader(Subset(dataset, share), **options)
        return self._loader

    def _training_data(self, trainer: Trainer) -> Any:
        """Return the training set, or a loader of it.

        Raises:
            UsageError: If there is none, or it is neither a data set with a length nor a loader.
        """
        data = self.data
        if data is None:
            make_data = getattr(getattr(trainer, "datamodule", None), "training_data_for_evaluation", None)
            if make_data is None:
                raise UsageError(
                    f"{self.owner} has no training set: pass {self.argument}=..., your training set "
                    "with the transforms of an evaluation, or give your data module a method training_data_for_evaluation() "
                    "that returns it."
                )
            data = make_data()
        elif callable(data) and not isinstance(data, Dataset | DataLoader):
            data = data(trainer)
        if not isinstance(data, DataLoader) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise UsageError(
                f"{self.owner}: {self.argument} gave a {type(data).__name__}; expected a data set with a length and "
                f"items, or a DataLoader of one."
            )
        return data

    def _labels_of(self, dataset: Any) -> Labels:
        """Return the label of each item of a data set.

        Raises:
            UsageError: If the data set has none, or not one for each item.
        """
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
    """Return the label of each item of a data set without reading an item; None if it has no labels.

    Labels are its attribute `labels` or `targets`; those of the data set of a `Subset`, or of the parts of a
    `ConcatDataset`; the last tensor of a `TensorDataset`, if it holds integers; or the column of such a name of a `Table`.
    """
    for name in ("labels", "targets"):
        if getattr(dataset, name, None) is not None:
            return getattr(dataset, name)
    if isinstance(dataset, Subset):
        labels = labels_in(dataset.dataset)
        return None if labels is None else as_labels(labels, "labels", "labels_in")[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [labels_in(part) for part in dataset.datasets]
        if any(part is None for part in parts):
            return None
        return join("labels_in", [on_cpu(as_labels(part, "labels", "labels_in")) for part in parts])
    if isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        return last if last.ndim == 1 and not (last.is_floating_point() or last.is_complex()) else None
    column_names = getattr(dataset, "column_names", None) or ()
    column = next((name for name in LABEL_COLUMNS if name in column_names), None)
    # The slice reads the column: from version 4 on, `datasets` returns only a view of it.
    return None if column is None else dataset[column][:]
