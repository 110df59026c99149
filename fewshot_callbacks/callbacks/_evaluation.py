"""Bases of the monitors that measure a validation or test set: they read the steps, agree with the other ranks, and log.

    EvaluationMonitor    reads every batch, and calls `_measure` at the end of the epoch
    BatchMonitor         measures each loader by itself, and single training batches
    functions            loaders, stages and ends of keys

A validation or a test runs in this order:

    setup                on every rank; forgets the run before
    on_*_start           adds the hook to the submodule that embeddings come from
    on_*_epoch_start     forgets the set before
    on_*_batch_start     starts to capture what the submodule returns
    on_*_batch_end       `_collect` reads the batch; an error is kept in `_failed`
    on_*_epoch_end       all ranks exchange their errors, then `_measure` measures and logs: collective
    teardown, or on_exception
                         removes the hook, and drops what was collected

Every rank logs the same values, through `EvaluationMonitor._log`: `val/mAP` of a `RetrievalMonitor`, `val/J` of a
`DiscriminantRatioMonitor`. The loggers of rank 0 write them. An interrupted epoch logs nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from fewshot_callbacks.callbacks._conduct import FailurePolicy, UsageError
from fewshot_callbacks.callbacks._embedder import Embed, Embedder
from fewshot_callbacks.callbacks._watched_keys import Better, look_for_misspelt_keys, look_for_wrong_modes
from fewshot_callbacks.callbacks.embeddings import TRAINING_STEP, EmbeddingReader, EmbeddingSource, LabelSources, Source
from fewshot_callbacks.distributed.torch_distributed import gather_objects, process_count
from fewshot_callbacks.functional._labels import LabelFormsError, Labels
from fewshot_callbacks.functional.retrieval.settings import several
from fewshot_callbacks.trainer.loaders import evaluation_loaders, unknown_order_reason, unpadded_length
from fewshot_callbacks.trainer.logs import log_synced_values, logged_names
from fewshot_callbacks.trainer.weights import weight_fingerprints

# Indices or names of loaders, or one of them.
Loaders = int | str | Sequence[int | str]


class EvaluationMonitor(Callback, ABC):
    """Reads the embeddings of each validation and test batch; subclasses measure them at the end of the epoch.

    Nothing is measured in Lightning's sanity check, but a step that returns no embeddings is an error there, too. An error
    of one rank is kept until the end of the epoch, so that all ranks learn of it together and none waits for another.

    A subclass implements `_collect`, `_measure`, `_forget` and `_keys`.

    Args:
        source: See `EmbeddingReader`.
        labels: See `LabelSource`.
        strict: See `FailurePolicy`.
    """

    loaders: Loaders | None = None

    # State of one epoch, which `_begin` resets.
    # error of each loader that could not be read on this rank
    _failed: dict[int, Exception]
    # numbers of items and of batches of each loader so far
    _seen: Counter[int]
    _batches: Counter[int]
    # weights with which training items are embedded, see `weight_fingerprints`
    _weights: list[int]
    # whether training items were embedded in this validation, or could not be
    _has_training_items: bool
    _training_error: Exception | None

    # Ends of messages, which subclasses replace.
    _remedy_for_two = "Keep one of them."
    _remedy_for_weights = ""
    _remedy_for_logged_twice = ""
    _remedy_for_repeats = "Let Lightning make the sampler (Trainer(use_distributed_sampler=True))."

    def __init__(self, source: Source | EmbeddingSource, labels: LabelSources | None, strict: bool | None) -> None:
        owner = type(self).__name__
        self._reader = EmbeddingReader(source, labels, owner)
        self._policy = FailurePolicy(owner, strict)

    @abstractmethod
    def _collect(self, trainer: Trainer, loader: int, first: int, outputs: Any, batch: Any) -> int:
        """Read a batch, and return the number of its items. `first` is the index of its first item in this rank's pass."""

    @abstractmethod
    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        """Measure the collected set and log the values. `failed` is equal on all ranks. *Collective*.

        Args:
            trainer: The Trainer.
            pl_module: The module.
            stage: `val` or `test`.
            failed: Loader -> the error of the lowest rank that could not read it.
        """

    @abstractmethod
    def _forget(self) -> None:
        """Drop the collected set. Called before each epoch, after it, and when the run ends or fails."""

    @abstractmethod
    def _keys(self, trainer: Trainer) -> Mapping[str, Better]:
        """Return the keys of a validation whose loaders are known, and which of their values are better."""

    def _keys_of_training(self) -> Mapping[str, Better]:
        """Return the keys of training batches, and which of their values are better: by default none."""
        return {}

    def _prefix(self, stage: str) -> str:
        """Return the first part of the keys in a stage."""
        return stage

    def _prepare(self, trainer: Trainer) -> None:
        """Make checks at the end of an epoch that may fail on one rank alone; not collective, by default none."""

    def _needs_training_items(self, trainer: Trainer) -> bool:
        """Return whether training items are embedded beside the steps of this validation: by default none are."""
        return False

    def _embed_training_items(self, trainer: Trainer) -> None:
        """Embed this rank's share of the training items. Not collective."""

    def _wants(self, trainer: Trainer, loader: int) -> bool:
        """Return whether the batches of a loader are read; not after an error, since a set that lacks a batch is no set."""
        return loader not in self._failed and loader in self._read_loaders(trainer)

    def _read_loaders(self, trainer: Trainer) -> Collection[int]:
        """Return the indices of the loaders that are read."""
        return ends_of_loaders(trainer, self.loaders)

    def _check_loaders(self, trainer: Trainer) -> None:
        """Check that the Trainer has the loaders that the user named.

        Raises:
            UsageError: If not; names those that it has.
        """
        if self.loaders is None:
            return
        for loader in several(self.loaders):
            if loader_index(trainer, loader) is None:
                raise UsageError(no_such_loader(trainer, f"{self._policy.owner}(loaders={self.loaders!r}), {loader!r}"))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run: forget the run before.

        Raises:
            ValueError: If another monitor of this kind would log under the same keys: Lightning would log their mean.
        """
        for other in trainer.callbacks:  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
            if other is not self and isinstance(other, type(self)) and self._prefix("val") == other._prefix("val"):
                raise ValueError(
                    f"Two {self._policy.owner}s in one Trainer would log under the same keys, and Lightning would log "
                    f"their mean. {self._remedy_for_two}"
                )
        # keys that others logged in the sanity check; None without one
        self._logged_in_sanity_check: set[str] | None = None
        self._has_checked_keys = False
        self._begin()
        self._policy.begin()
        self._reader.begin()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the hook to the submodule that embeddings come from, now that the module has made its layers.

        Raises:
            UsageError: If there is no such submodule.
        """
        self._reader.attach(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the hook without a fit, or to a layer that was replaced since its start."""
        self.on_fit_start(trainer, pl_module)

    on_test_start = on_validation_start

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: Any) -> None:
        """Remove the hook, and drop the embeddings; of an interrupted epoch nothing is measured or logged."""
        self._reader.detach()
        self._begin()

    on_exception = teardown  # type: ignore[assignment] # Lightning passes the exception by its place

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new set."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            # Without a sanity check the loaders were not known at the start of the training.
            self._check_keys(trainer)
        self._begin()
        if self._needs_training_items(trainer):
            self._weights = weight_fingerprints(pl_module)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Capture what the submodule returns from now on."""
        self._reader.start_capture()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Read the embeddings of this batch; an error waits for the end of the epoch."""
        self._batches[dataloader_idx] += 1
        if not self._wants(trainer, dataloader_idx):
            self._reader.stop_capture()
            return
        try:
            first = self._seen[dataloader_idx]
            self._seen[dataloader_idx] += self._collect(trainer, dataloader_idx, first, outputs, batch)
            if first == 0:
                self._after_first_batch(trainer)
        except Exception as error:  # a metric must not end a training
            self._failed[dataloader_idx] = error

    def _after_first_batch(self, trainer: Trainer) -> None:
        """Embed the training items after the first batch; after the first batch of each other loader, compare the weights.

        The end of the epoch would be too late: a callback that averages weights exchanges them for the steps alone, and may
        have changed them back by then.

        Raises:
            UsageError: If the weights have changed.
        """
        if not self._needs_training_items(trainer):
            return
        if not self._has_training_items:
            self._weights = weight_fingerprints(trainer.lightning_module)
            self._try_training_items(trainer)
        elif self._weights != weight_fingerprints(trainer.lightning_module):
            raise UsageError(self._changed_weights())

    def _try_training_items(self, trainer: Trainer) -> None:
        """Embed the training items, once; an error counts for all loaders, and waits for the end of the epoch."""
        self._has_training_items = True
        try:
            self._embed_training_items(trainer)
        except Exception as error:  # a metric must not end a training
            self._training_error = error

    def _changed_weights(self) -> str:
        """Say that weights have changed, and how to avoid it."""
        return (
            f"{self._policy.owner}: the weights have changed since the training items were embedded, which is at the first "
            f"batch of a validation. Both are compared, so that their weights must be the same. Exchange weights before the "
            f"first batch and after the last one alone.{self._remedy_for_weights}"
        )

    def _check_training_items(self, trainer: Trainer) -> None:
        """Embed the training items if this rank had no batch; raise an error that has waited for the end of the epoch.

        Raises:
            UsageError: If the weights may differ from those of the steps of other ranks.
        """
        if self._needs_training_items(trainer) and not self._has_training_items and not self._failed:
            if self._weights != weight_fingerprints(trainer.lightning_module):
                raise UsageError(self._changed_weights())
            self._try_training_items(trainer)
        if self._training_error is not None:
            raise self._training_error

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the set, before checkpoints and early stopping read the values. *Collective*."""
        try:
            self._check_loaders(trainer)
            self._prepare(trainer)
            self._check_training_items(trainer)
        except Exception as error:  # a metric must not end a training
            # It counts for all loaders that have no error of their own.
            for loader in range(len(suffixes(trainer)) or 1):
                self._failed.setdefault(loader, error)
        failed = self._gather_errors()
        if trainer.sanity_checking:
            for failure in failed.values():
                self._policy.handle(failure, "The sanity check shows that validation cannot be measured.")
        else:
            self._measure(trainer, pl_module, stage_of(trainer), failed)
            if self._seen and not failed:
                self._reader.successful_steps.add(step_of(trainer))
        self._begin()

    def _gather_errors(self) -> dict[int, Exception]:
        """Return loader -> the error of the lowest rank that has one, the same on all ranks. *Collective*.

        All ranks must know of an error before anything is measured: a rank that has failed would not take part, and the
        others would wait for it.
        """
        by_rank = gather_objects({loader: portable(error) for loader, error in self._failed.items()})
        failed: dict[int, Exception] = {}
        for errors in reversed(by_rank):
            failed |= errors
        return failed

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the keys that were logged in the sanity check, all of them by others: this monitor logs nothing there."""
        self._logged_in_sanity_check = set(trainer.callback_metrics)

    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
    on_test_batch_start, on_test_batch_end = on_validation_batch_start, on_validation_batch_end

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the keys that checkpoints, early stopping and schedulers monitor.

        Raises:
            UsageError: If a callback waits for a key that nobody logged in the sanity check, and that is a misspelt key of a
                monitor.
        """
        look_for_wrong_modes(trainer, self._keys_of_training(), None, self._policy)
        self._check_keys(trainer)

    def _check_keys(self, trainer: Trainer) -> None:
        """Check the keys of the validation, once in a fit, as soon as its loaders are known."""
        if self._has_checked_keys or not evaluation_loaders(trainer):
            return
        self._has_checked_keys = True
        keys = self._keys(trainer)
        logged = self._logged_in_sanity_check
        self._warn_of_keys_logged_twice(keys.keys() & (logged or ()))
        look_for_wrong_modes(trainer, keys, logged, self._policy)
        # The first monitor checks for all: a key that another monitor logs is not misspelt.
        callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
        monitors = [callback for callback in callbacks if isinstance(callback, EvaluationMonitor)]
        if monitors[0] is self:
            known: set[str] = set()
            for monitor in monitors:
                known.update(monitor._keys(trainer))
            look_for_misspelt_keys(trainer, known, logged, self._policy)

    def _log(
        self,
        trainer: Trainer,
        module: LightningModule,
        values: Mapping[str, float],
        progress_bar_key: str | None = None,
    ) -> None:
        """Log the values of a set, which are equal on all ranks; warn if others have logged one of their keys.

        Every rank calls it, since each rank's checkpoints and early stopping read the values; loggers of rank 0 write them.
        """
        self._warn_of_keys_logged_twice(values.keys() & logged_names(trainer))
        log_synced_values(module, values, progress_bar_key)

    def _warn_of_keys_logged_twice(self, keys: Iterable[str]) -> None:
        """Warn of the first of the keys that others log, too; do nothing without keys."""
        key = min(keys, default=None)
        if key is not None:
            self._policy.warn(
                f"{self._policy.owner} logs {key!r}, and the module or another callback does so, too: one value replaces "
                f"the other. Log yours under another name{self._remedy_for_logged_twice}. (Shown once.)",
                kind="logged twice",
            )

    def _begin(self) -> None:
        """Reset the state of an epoch; the collected embeddings are freed here."""
        self._failed = {}
        self._seen = Counter()
        self._batches = Counter()
        self._weights = []
        self._has_training_items = False
        self._training_error = None
        self._forget()

    def _unpadded_length(self, trainer: Trainer, loader: int, *, ids: bool = False) -> int | None:
        """Return the number of items of a loader without the repetitions of a `DistributedSampler`. *Collective*.

        Args:
            trainer: The Trainer.
            loader: Index of the loader.
            ids: Whether ids identify repeated items. Without them a warning is given if the number is not known.

        Returns:
            The number; None on a single process, and if the processes share the items in an unknown way.
        """
        if process_count() == 1:
            return None
        dataloader = list(evaluation_loaders(trainer).values())[loader]
        items = self._seen[loader]
        reason_here = unknown_order_reason(dataloader, self._batches[loader], items)
        # The decision whether items are dropped must be the same on all ranks: one rank with a reason is enough.
        by_rank = gather_objects((reason_here, items))
        reasons = [reason for reason, _ in by_rank if reason is not None]
        if not reasons:
            return unpadded_length(dataloader)
        if not ids:
            self._policy.warn(
                f"Whether some of the {sum(count for _, count in by_rank)} items of loader {loader} came to several "
                f"processes is unknown, because {reasons[0]}. Such items would be counted more than once. "
                f"{self._remedy_for_repeats} (Shown once.)",
                kind="repeated items",
            )
        return None


class BatchMonitor(EvaluationMonitor):
    """Measures each loader by itself, and in training one batch in `every_n_steps`.

    A subclass sets `_training_keys` and `_better`, and implements `_collect`, `_forget`, `_names`, `_measure_loader` and
    `_measure_batch`. `EmbeddingHealthMonitor` is one to learn from.

    Args:
        source: See `EmbeddingReader`.
        labels: See `LabelSource`.
        embed: See `Embed`; by default the steps give the embeddings.
        strict: See `FailurePolicy`.
        every_n_steps: Measure one training batch in this number; None measures none.
        loaders: Indices or names of the loaders that are measured; None for all.

    Raises:
        ValueError: If `every_n_steps` is below 1.
    """

    # whether the progress bar shows the first of the training keys
    prog_bar = False
    # keys of the values of a training batch
    _training_keys: tuple[str, ...]
    # name of a value, without stage and loader -> which values are better; without an entry neither are
    _better: Mapping[str, Better]

    def __init__(
        self,
        source: Source | EmbeddingSource,
        labels: LabelSources | None,
        embed: Embed | None,
        strict: bool | None,
        every_n_steps: int | None,
        loaders: Loaders | None,
    ) -> None:
        super().__init__(source, labels, strict)
        self._reader.can_embed = True
        self.embed = None if embed is None else Embedder(embed, self._reader)
        call = f"{self._policy.owner}(every_n_steps="
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"{call}{every_n_steps}) must be at least 1; None measures validation and test alone.")
        self._reader.without_training = f" If training gives none, {call}None) measures validation and test alone."
        self.every_n_steps = every_n_steps
        self.loaders = loaders

    @abstractmethod
    def _measure_batch(self, embeddings: Tensor, labels: Labels) -> tuple[Tensor | float, ...]:
        """Return the values of a training batch, in the order of `_training_keys`."""

    @abstractmethod
    def _measure_loader(self, trainer: Trainer, loader: int, stage: str, suffix: str) -> dict[str, float]:
        """Return name -> value of the collected set of a loader, with the names of `_names`. *Collective*."""

    @abstractmethod
    def _names(self, loader: int | None = None) -> list[str]:
        """Return the names of the values of a set, without stage and end of the key. *Collective*.

        Args:
            loader: Index of the loader whose set was collected; None for the names that any set may have.
        """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Add the hook to the submodule that embeddings come from; check that the module has the submodule of `embed`."""
        super().on_fit_start(trainer, pl_module)
        if self.embed is not None:
            self.embed.check_name(pl_module)

    def _read(self, trainer: Trainer, outputs: Any, batch: Any, step: str) -> tuple[Tensor, Labels]:
        """Return embeddings and labels: those of the step, or with `embed` those of the batch in evaluation mode."""
        if self.embed is None:
            return self._reader.read(outputs, batch, step)
        self._reader.stop_capture()
        return self.embed.in_evaluation(trainer, trainer.lightning_module, batch)

    def _is_measured(self, trainer: Trainer) -> bool:
        """Return whether the current training batch is measured."""
        # Counted from 1 over all epochs, as Lightning counts for `log_every_n_steps`: with the same number for both, each
        # value that a logger writes belongs to the batch that it is written for.
        batch_number = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        return self.every_n_steps is not None and batch_number % self.every_n_steps == 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Capture what the submodule returns, if this batch is measured."""
        if self._is_measured(trainer):
            self._reader.start_capture()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure this batch, and log the values."""
        if not self._is_measured(trainer):
            return
        keys = self._training_keys
        values: tuple[Tensor | float, ...] = (math.nan,) * len(keys)
        with self._policy.handling(f"{' and '.join(keys)} are NaN."):
            values = self._measure_batch(*self._read(trainer, outputs, batch, TRAINING_STEP))
        for key, value in zip(keys, values, strict=True):
            # Without a bar `prog_bar=True` would still make Lightning read the value, and so wait for the device.
            in_progress_bar = self.prog_bar and key == keys[0] and trainer.progress_bar_callback is not None
            pl_module.log(key, value, on_step=True, on_epoch=False, prog_bar=in_progress_bar, batch_size=1)

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        """Measure the set of each loader, and log its values, NaN after an error. *Collective*."""
        for loader, suffix in ends_of_loaders(trainer, self.loaders).items():
            values = dict.fromkeys(self._names(loader), math.nan)
            first_key = f"{stage}/{next(iter(values))}{suffix}"
            with self._policy.handling(f"{first_key} and the other values of this set are NaN."):
                if loader in failed:
                    raise failed[loader]
                values = self._measure_loader(trainer, loader, stage, suffix)
            self._log(trainer, pl_module, {f"{stage}/{name}{suffix}": value for name, value in values.items()})

    def _keys(self, trainer: Trainer) -> Mapping[str, Better]:
        suffixes_of_sets = ends_of_loaders(trainer, self.loaders).values()
        names = self._names()
        return {f"val/{name}{suffix}": self._better.get(name) for suffix in suffixes_of_sets for name in names}

    def _keys_of_training(self) -> Mapping[str, Better]:
        return {key: self._better.get(key.removeprefix("train/")) for key in self._training_keys}


def stage_of(trainer: Trainer) -> str:
    """Return the stage that runs, `val` or `test`: the first part of its keys."""
    return "test" if trainer.testing else "val"


def step_of(trainer: Trainer) -> str:
    """Return the name of the step that runs."""
    return "test_step" if trainer.testing else "validation_step"


def suffixes(trainer: Trainer) -> list[str]:
    """Return the end of the keys of each loader: empty for a single loader, otherwise its name."""
    names = list(evaluation_loaders(trainer))
    return [f"/{name}" for name in names] if len(names) > 1 else [""] * len(names)


def portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process; on one process the same error, with its traceback."""
    if process_count() == 1:
        return error
    # Other classes may take other arguments than a text, or hold objects that cannot be pickled.
    if type(error) in (ValueError, UsageError, LabelFormsError):
        return type(error)(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def ends_of_loaders(trainer: Trainer, loaders: Loaders | None) -> dict[int, str]:
    """Return index of a loader -> end of its keys, for each loader that is measured: empty if only one is.

    Args:
        trainer: The Trainer.
        loaders: Indices or names; None for all loaders. Unknown ones are skipped.
    """
    if loaders is None:
        return dict(enumerate(suffixes(trainer)))
    measured = {loader_index(trainer, loader) for loader in several(loaders)} - {None}
    ends: dict[int, str] = {}
    for index, name in enumerate(evaluation_loaders(trainer)):
        if index in measured:
            ends[index] = f"/{name}" if len(measured) > 1 else ""
    return ends


def loader_index(trainer: Trainer, loader: Any) -> int | None:
    """Return the index of a loader that is named by its index or name; None if there is no such loader."""
    names = list(evaluation_loaders(trainer))
    if isinstance(loader, int):
        return loader if 0 <= loader < len(names) else None
    return names.index(loader) if loader in names else None


def names_of_loaders(trainer: Trainer) -> str:
    """Return the names of the loaders, for messages."""
    return ", ".join(map(repr, evaluation_loaders(trainer)))


def no_such_loader(trainer: Trainer, call: str) -> str:
    """Return the message that a loader is not there, with the loaders that are."""
    return (
        f"{call}: there is no such loader; there are {names_of_loaders(trainer)}. Pass one of these names or an index "
        f"below {len(evaluation_loaders(trainer))}."
    )
