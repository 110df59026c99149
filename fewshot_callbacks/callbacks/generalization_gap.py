"""Measures overfitting as a gap in recall that does not depend on the number of classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol, Unpack, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from fewshot_callbacks._trainer import evaluating, evaluation_loaders, log_of_all, on_device
from fewshot_callbacks.callbacks._conduct import Schedule, UsageError, evaluation_progress
from fewshot_callbacks.callbacks._embedder import Embed, Embedder
from fewshot_callbacks.callbacks._evaluation import EvaluationMonitor, loader_index, no_such_loader, step_of
from fewshot_callbacks.callbacks.embeddings import STEP_KEYS, EmbeddingSource, LabelSource, Source
from fewshot_callbacks.distributed.torch_distributed import all_processes, process_count
from fewshot_callbacks.functional._reading import Labels, as_labels, joined_labels, read_labels
from fewshot_callbacks.functional.class_subset import class_subset
from fewshot_callbacks.functional.retrieval import (
    GeneralizationGap,
    RetrievalSettings,
    Share,
    evaluate_retrieval,
    generalization_gap,
    shows_settings,
)
from fewshot_callbacks.functional.retrieval.settings import GroupedOptions
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
        argument: The one that gives `data`, for messages.
    """

    def __init__(
        self,
        data: TrainingData | None,
        classes: int | None,
        items_per_class: int | None,
        seed: int,
        owner: str,
        argument: str = "training_data",
    ) -> None:
        self.data, self.owner, self.argument = data, owner, argument
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
                    f"{self.owner} has no training set: pass {self.argument}=..., your training set "
                    "with the transforms of an evaluation, or give your data module a method training_data_for_evaluation() "
                    "that returns it."
                )
            data = data()
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
        return joined_labels([as_labels(part, "labels", "labels_in") for part in parts], "labels_in")
    if isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        return last if last.ndim == 1 and not (last.is_floating_point() or last.is_complex()) else None
    column = next((name for name in LABEL_COLUMNS if name in (getattr(dataset, "column_names", None) or ())), None)
    # The slice reads the column where the data set only returns a view of it, as `datasets` does from version 4 on.
    return None if column is None else dataset[column][:]


# Where the numbers of items of a class differ by more than this factor, recall cannot be compared.
UNEVEN = 1.5


# What is measured unless `metrics` say otherwise.
METRICS = ("grouped_recall@1", "recall@1")


class GapOptions(GroupedOptions, total=False):
    """The settings of a gap, with the types that a caller may pass."""

    metrics: str | Sequence[str]


@shows_settings(GapOptions, metrics=METRICS)
class GeneralizationGapMonitor(EvaluationMonitor):
    """Logs Grouped Recall@K of training classes minus that of validation classes, a measure of overfitting.

    Plain Recall@K falls with the number of classes, so its difference says little if the two sets have different
    numbers of classes. Grouped Recall@K searches a fixed number of classes at a time. At the end of a validation, a
    fixed, seeded subset of the training classes is embedded by a separate loader, with the module in evaluation mode,
    and compared with the embeddings of the validation steps. Afterwards the modes of the module and the random states
    are restored.

    It logs the gap `gap/grouped_recall@1`, in [-1, 1], with the ends of its interval, `gap/grouped_recall@1_low` and
    `..._high`; the two recalls as `gap/train_grouped_recall@1` and `gap/val_grouped_recall@1`; the same values of plain
    recall as `gap/recall@1` and so on; and `gap/share_of_time`. If the gap cannot be measured, a warning gives the
    reason and the values are NaN. When the interval of the gap moves above zero, or no longer lies above zero, a
    message is logged.

    Of the settings at the end, `metrics` are `grouped_recall@k` and `recall@k` of any k, `label_groups` is a number of
    classes, and `seed` is that of the training classes, too.

    Args:
        training_data: The training set with evaluation transforms: a data set; a loader of one, whose batch size,
            workers and collation are kept; or a function of the Trainer that returns either. By default the result of
            `training_data_for_evaluation()` of the Trainer's data module, which the data modules of this package have. The
            label of each item is found in its attribute `labels` or `targets`, also through `Subset` and
            `ConcatDataset`; in the last tensor of a `TensorDataset`; or in the column `label` of a Hugging Face data set.
        source: Where the embeddings of a validation step come from: two keys of the mapping that the step returns
            (default `("embeddings", "labels")`), the name of a submodule whose output is the embedding, or a function of
            (outputs, batch) that returns (embeddings, labels); or an `EmbeddingSource`, which several monitors can share.
        labels: Where the labels are in a batch, if the step does not return them: a key, a position, or a function of
            the batch.
        embed: How a training batch is embedded, outside any step: the name of a submodule, called with the inputs of
            the batch, or a function of (module, batch) that returns embeddings or (embeddings, labels). By default the
            submodule that `source` names, or else the module itself, called with the inputs. The first validation batch
            is also embedded in this way; if the result differs from the embeddings of the step, an error says so.
        val_loader: Index or name of the validation loader to compare with.
        classes: Number of training classes to measure, drawn with `seed`; None for all.
        items_per_class: Number of items of each class in both sets, drawn with `seed`; by default all. Recall rises
            with the number of items per class: if the two sets differ in it, set it to a number that both have.
        every_n_epochs: Measure at most in one of this number of epochs, beginning with the first validation.
        max_share: Postpone a measurement until measuring has taken at most this share of the run time, in (0, 1); None
            never postpones.
        prefix: First part of the keys.
        strict: Which errors end the run. None: a mistake in the settings or in what a step returns (no embeddings, no
            such loader) ends the run, at the sanity check if there is one; an error that may pass, such as a diverged
            batch, is a warning, once in a run, and the values are NaN. True: every error ends the run. False: no error
            does.
        **settings: See `RetrievalSettings`.

    Attributes:
        gap: The latest `GeneralizationGap`; None before the first measurement.

    Raises:
        ValueError: If a setting is unknown or out of range, or `classes` make fewer than two groups.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> monitor = GeneralizationGapMonitor(classes=100, every_n_epochs=5)  # the data module has the training set
        >>> trainer = Trainer(callbacks=[monitor], logger=False, accelerator="cpu")
    """

    gap: GeneralizationGap | None
    _remedy_for_two = "Give them different prefixes."

    def __init__(
        self,
        *,
        training_data: TrainingData | None = None,
        source: Source | EmbeddingSource = STEP_KEYS,
        labels: LabelSource | None = None,
        embed: Embed | None = None,
        val_loader: int | str = 0,
        classes: int | None = 100,
        items_per_class: int | None = None,
        every_n_epochs: int = 1,
        max_share: float | None = 0.1,
        prefix: str = "gap",
        strict: bool | None = None,
        **settings: Unpack[GapOptions],
    ) -> None:
        super().__init__(source, labels, strict)
        call = "GeneralizationGapMonitor"
        for name, number in {"classes": classes, "items_per_class": items_per_class}.items():
            if number is not None and number < 1:
                raise ValueError(f"{call}({name}={number}) must be at least 1.")
        if not prefix:
            raise ValueError(f"{call}(prefix={prefix!r}): the keys need a first part, such as 'gap'.")
        given = RetrievalSettings.checked(GeneralizationGapMonitor, {"metrics": METRICS} | settings, GapOptions)
        _check(given, classes)
        both = [f"{metric}@{rank}" for metric in ("grouped_recall", "recall") for rank in given.grouped_k]
        self._names, self._settings = given.metrics, replace(given, metrics=both)
        self.embed = Embedder(embed, self._reader, call)
        self.training = TrainingClasses(training_data, classes, items_per_class, given.seed, call)
        self.val_loader, self.prefix = val_loader, prefix
        self.schedule = Schedule(every_n_epochs, max_share, call)
        self.gap = None
        self._is_due = False
        self._was_overfitting: bool | None = None

    def _prefix(self, stage: str) -> str:
        return self.prefix

    # ----------------------------------------------------------------------------------------------------------------- when

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare for a run."""
        super().setup(trainer, pl_module, stage)
        self.training.begin()
        self.schedule.begin()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new set, if it is time to measure."""
        super().on_validation_epoch_start(trainer, pl_module)
        self._is_due = trainer.sanity_checking or self.schedule.is_due(trainer.current_epoch)

    # ----------------------------------------------------------------------------------------------------------- collecting

    def _wants(self, trainer: Trainer, loader: int) -> bool:
        is_measured = self._is_due and not trainer.testing and loader == loader_index(trainer, self.val_loader)
        return is_measured and super()._wants(trainer, loader)

    def _collect(self, trainer: Trainer, loader: int, first: int, outputs: Any, batch: Any) -> int:
        """Keep a batch; check by the first one that training batches will be embedded in the same way."""
        embeddings, labels = self._reader.read(outputs, batch, step_of(trainer))
        if not first:
            self.embed.check(trainer, trainer.lightning_module, batch, embeddings, self._settings.similarity)
        self._store.append(embeddings, labels)
        return len(labels)

    def _forget(self) -> None:
        self._store, self._seen_classes = EmbeddingStore(), EmbeddingStore()

    def _prepare(self, trainer: Trainer) -> None:
        """Find the training set, and embed it when it is time to measure."""
        if trainer.testing or not self._is_due:
            return
        if evaluation_loaders(trainer) and loader_index(trainer, self.val_loader) is None:
            raise UsageError(no_such_loader(trainer, f"GeneralizationGapMonitor(val_loader={self.val_loader!r})"))
        self.training.loader(trainer)
        if not trainer.sanity_checking and not self._failed:
            with self.schedule.watch.running():
                self._seen_classes = self.training.embedded(trainer, self.embed)

    # ------------------------------------------------------------------------------------------------------------ measuring

    def _keys(self, trainer: Trainer) -> Collection[str]:
        ends = [(name, f"{name}_low", f"{name}_high", f"train_{name}", f"val_{name}") for name in self._names]
        return [f"{self.prefix}/{name}" for names in (*ends, ("share_of_time",)) for name in names]

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        if trainer.testing or not self._is_due:  # a test is not compared with anything
            return
        values = dict.fromkeys(self._keys(trainer), math.nan)
        with (
            self.schedule.watch.running(),
            self._policy.handling(f"{next(iter(values))} and the other values of the gap are NaN."),
        ):
            if failed:
                raise failed[min(failed)]
            self.gap = self._gap(trainer)
            found = {f"{self.prefix}/{name}": value for name, value in self.gap.metrics().items()}
            values |= {key: found[key] for key in values if key in found}
            self._log_verdict(trainer, self.gap)
        log_of_all(pl_module, values | {f"{self.prefix}/share_of_time": self.schedule.watch.share})

    def _gap(self, trainer: Trainer) -> GeneralizationGap:
        """Compute the gap; it, or the error, is equal in every process. Collective."""
        processes = all_processes()
        # An error of one process becomes one of all, or the others would wait for it inside of the evaluation.
        with processes.together():
            training = self._seen_classes.shard(dataset_size=self.training.items)
            dealt = self._unpadded_length(trainer, loader_index(trainer, self.val_loader) or 0)
            validation = self._store.shard(dataset_size=dealt)
            if self.training.items_per_class is not None:
                validation = validation.some_of_each_class(self.training.items_per_class, self.training.seed)
            reports = [
                evaluate_retrieval(
                    part.embeddings,
                    part.named_labels,
                    share=Share(processes, part.places),
                    **self._settings.arguments(),
                )
                for part in (training, validation)
            ]
            return generalization_gap(*reports)

    def _log_verdict(self, trainer: Trainer, gap: GeneralizationGap) -> None:
        """Log a sentence when the verdict has changed, and warn of classes of uneven size."""
        # A run that begins without overfitting is nothing to tell of.
        if gap.is_overfitting != self._was_overfitting and (gap.is_overfitting or self._was_overfitting is not None):
            rank_zero_info(f"{self.prefix}, epoch {trainer.current_epoch}: {gap.in_words()}")
        self._was_overfitting = gap.is_overfitting
        one, other = gap.items_per_class
        if max(one, other) > UNEVEN * min(one, other):
            self._policy.warn(
                f"{self.prefix}: training classes hold {one:.1f} items each, validation classes {other:.1f}, and "
                f"recall rises with the number of items per class. Pass "
                f"items_per_class={max(2, math.floor(min(one, other)))} to make the sets comparable. (Shown once.)",
                kind="uneven classes",
            )


def _check(given: RetrievalSettings, classes: int | None) -> None:
    """Refuse settings of which no gap can be made."""
    call, ranks, groups = "GeneralizationGapMonitor", given.grouped_k, given.label_groups
    both = {f"{metric}@{rank}" for metric in ("grouped_recall", "recall") for rank in ranks}
    if not ranks or not set(given.metrics) <= both:
        raise ValueError(
            f"{call}(metrics={given.metrics!r}): a gap is one of Grouped Recall@k, with Recall@k of the same k beside "
            "it. Pass keys such as ('grouped_recall@1', 'recall@1')."
        )
    if not isinstance(groups, int):
        raise ValueError(
            f"{call}: label_groups={groups!r} cannot hold the classes of both sets, which differ. Pass the number of "
            "classes in a random group, such as 10."
        )
    if classes is not None and classes < 2 * groups:
        raise ValueError(
            f"{call}: classes={classes} make fewer than two groups of label_groups={groups}, so the gap has no "
            f"interval. Use classes >= {2 * groups} or a smaller label_groups."
        )
