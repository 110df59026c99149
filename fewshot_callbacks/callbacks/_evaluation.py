"""Base of the monitors of a validation or test set: reads the steps, agrees with the other ranks, logs."""

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
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional.retrieval.settings import several
from fewshot_callbacks.trainer.loaders import evaluation_loaders, unknown_order_reason, unpadded_length
from fewshot_callbacks.trainer.logs import log_synced_values, logged_names
from fewshot_callbacks.trainer.weights import weight_fingerprints

# Indices or names of loaders, or one of them.
Loaders = int | str | Sequence[int | str]


class EvaluationMonitor(Callback, ABC):
    """Reads the embeddings of each validation and test batch; subclasses measure them at the end of the epoch.

    Nothing of Lightning's sanity check is measured, but a step that returns no embeddings is an error there, too. An error
    while reading is kept until the end of the epoch, so that all ranks learn of it together and none waits for another.

    Args:
        source: See `EmbeddingReader`.
        labels: See `LabelSource`.
        strict: See `FailurePolicy`.
    """

    loaders: Loaders | None = None
    _weights: list[int]  # see `weight_fingerprints`
    _has_training_items: bool  # they were embedded in this validation, or could not be
    _training_error: Exception | None
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
        """Read a batch, and return the number of its items. `first`: index of the first in this rank's pass."""

    @abstractmethod
    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        """Measure the collected set and log the values. `failed`: the error of any rank, by loader."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop the collected set."""

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
        """Do what may fail on one rank alone, before all agree on what has failed: by default nothing."""

    def _needs_training_items(self, trainer: Trainer) -> bool:
        """Decide whether items of training are embedded beside the steps of this validation: by default none are."""
        return False

    def _embed_training_items(self, trainer: Trainer) -> None:
        """Embed this rank's share of the items of training."""

    def _wants(self, trainer: Trainer, loader: int) -> bool:
        """Decide whether the batches of a loader are read."""
        # a set that lacks a batch is not measured
        return loader not in self._failed and loader in self._read_loaders(trainer)

    def _read_loaders(self, trainer: Trainer) -> Collection[int]:
        """Return the indices of the loaders that are read."""
        return ends_of_loaders(trainer, self.loaders)

    def _check_loaders(self, trainer: Trainer) -> None:
        """See that there are the loaders that were asked for.

        Raises:
            UsageError: If not; with those that there are.
        """
        for loader in () if self.loaders is None else several(self.loaders):
            if loader_index(trainer, loader) is None:
                raise UsageError(no_such_loader(trainer, f"{self._policy.owner}(loaders={self.loaders!r}), {loader!r}"))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run.

        Raises:
            ValueError: If another monitor of this kind would log under the same keys: Lightning would log their mean.
        """
        for other in trainer.callbacks:  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
            if other is not self and isinstance(other, type(self)) and self._prefix("val") == other._prefix("val"):
                raise ValueError(
                    f"Two {self._policy.owner}s in one Trainer would log under the same keys, and Lightning would log "
                    f"their mean. {self._remedy_for_two}"
                )
        self._logged_in_sanity_check: set[str] | None = None
        self._has_looked_at_keys = False
        self._begin()
        self._policy.begin()
        self._reader.begin()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the submodule that embeddings come from, now that the module has made its layers.

        Raises:
            UsageError: If there is no such submodule.
        """
        self._reader.attach(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen to the submodule, also where there was no fit, or where it was replaced."""
        self.on_fit_start(trainer, pl_module)

    on_test_start = on_validation_start

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: Any) -> None:
        """Remove hooks and embeddings, also when the run was stopped."""
        self._reader.detach()
        self._begin()

    on_exception = teardown  # type: ignore[assignment] # Lightning passes the exception by its place

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new set."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._look_at_keys(trainer)  # where the loaders were not known before
        self._begin()
        if self._needs_training_items(trainer):
            self._weights = weight_fingerprints(pl_module)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Expect embeddings."""
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
            self._see_weights(trainer, is_first=first == 0)
        except Exception as error:  # a metric must not end a training
            self._failed[dataloader_idx] = error

    def _see_weights(self, trainer: Trainer, *, is_first: bool) -> None:
        """Embed the items of training at the first batch; compare the weights at the first batch of each other loader.

        At the end of the epoch the weights may be others again: a callback that averages them takes the averages for the
        steps alone, and may be asked before this one.

        Raises:
            UsageError: If the weights have changed.
        """
        if not is_first or not self._needs_training_items(trainer):
            return
        if not self._has_training_items:
            self._weights = weight_fingerprints(trainer.lightning_module)
            self._try_training_items(trainer)
        elif self._weights != weight_fingerprints(trainer.lightning_module):
            raise UsageError(self._changed_weights())

    def _try_training_items(self, trainer: Trainer) -> None:
        """Embed the items of training, once; an error is one of all loaders, and waits for the end of the epoch."""
        self._has_training_items = True
        try:
            self._embed_training_items(trainer)
        except Exception as error:  # a metric must not end a training
            self._training_error = error

    def _changed_weights(self) -> str:
        return (
            f"{self._policy.owner}: the weights have changed since the training items were embedded, which is at the first "
            f"batch of a validation. Both are compared, so that their weights must be the same. Exchange weights before the "
            f"first batch and after the last one alone.{self._remedy_for_weights}"
        )

    def _share_of_training_items(self, trainer: Trainer) -> None:
        """Embed the items of training where no step has had a batch of this rank; raise what went wrong before.

        Raises:
            UsageError: If the weights may not be those of the steps of other ranks.
        """
        if self._needs_training_items(trainer) and not self._has_training_items and not self._failed:
            if self._weights != weight_fingerprints(trainer.lightning_module):
                raise UsageError(self._changed_weights())
            self._try_training_items(trainer)
        if self._training_error is not None:
            raise self._training_error

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the set, before checkpoints and early stopping read the values."""
        try:
            self._check_loaders(trainer)
            self._prepare(trainer)
            self._share_of_training_items(trainer)
        except Exception as error:  # a metric must not end a training
            self._failed.update(dict.fromkeys(range(len(suffixes(trainer)) or 1), error) | self._failed)
        # Before anything is measured: a rank that has failed would not take part, and the others would wait for it.
        everywhere = gather_objects({loader: portable(error) for loader, error in self._failed.items()})
        # the lowest rank's error, the same one everywhere
        failed = {loader: error for errors in reversed(everywhere) for loader, error in errors.items()}
        if trainer.sanity_checking:
            for failure in failed.values():
                self._policy.handle(failure, "The sanity check shows that validation cannot be measured.")
        else:
            self._measure(trainer, pl_module, stage_of(trainer), failed)
            if self._seen and not failed:
                self._reader.successful_steps.add(step_of(trainer))
        self._begin()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what others have logged in the sanity check."""
        self._logged_in_sanity_check = set(trainer.callback_metrics)

    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
    on_test_batch_start, on_test_batch_end = on_validation_batch_start, on_validation_batch_end

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the keys that checkpoints, early stopping and schedulers monitor.

        Raises:
            UsageError: If one waits for a key that is a known one misspelt, and the sanity check showed that nobody logs it.
        """
        look_for_wrong_modes(trainer, self._keys_of_training(), None, self._policy)
        self._look_at_keys(trainer)

    def _look_at_keys(self, trainer: Trainer) -> None:
        """Check the keys of the validation, once in a fit, as soon as its loaders are known."""
        if self._has_looked_at_keys or not evaluation_loaders(trainer):
            return
        self._has_looked_at_keys = True
        own, logged = self._keys(trainer), self._logged_in_sanity_check
        self._tell_logged_twice(own.keys() & (logged or ()))
        look_for_wrong_modes(trainer, own, logged, self._policy)
        # One looks for all: a key that another monitor logs is no mistake.
        monitors = [each for each in trainer.callbacks if isinstance(each, EvaluationMonitor)]  # type: ignore[attr-defined]
        if monitors[0] is self:
            known = set().union(*(each._keys(trainer) for each in monitors))
            look_for_misspelt_keys(trainer, known, logged, self._policy)

    def _log(
        self, trainer: Trainer, module: LightningModule, values: Mapping[str, float], shown: str | None = None
    ) -> None:
        """Log the values of a set, which are equal on all ranks; warn if others have logged one of their keys."""
        self._tell_logged_twice(values.keys() & logged_names(trainer))
        log_synced_values(module, values, shown)

    def _tell_logged_twice(self, keys: Iterable[str]) -> None:
        for key in sorted(keys)[:1]:
            self._policy.warn(
                f"{self._policy.owner} logs {key!r}, and the module or another callback does so, too: one value replaces "
                f"the other. Log yours under another name{self._remedy_for_logged_twice}. (Shown once.)",
                kind="logged twice",
            )

    def _begin(self) -> None:
        self._failed: dict[int, Exception] = {}
        self._seen: Counter[int] = Counter()  # items, by loader
        self._batches: Counter[int] = Counter()
        self._weights = []
        self._has_training_items = False
        self._training_error = None
        self._forget()

    def _unpadded_length(self, trainer: Trainer, loader: int, *, ids: bool = False) -> int | None:
        """Count the items of a loader before a `DistributedSampler` repeats some; None where that is not known.

        Collective. Warns once if processes share the items in an unknown way and no ids identify repeated items.
        """
        if process_count() == 1:
            return None
        dataloader, items = list(evaluation_loaders(trainer).values())[loader], self._seen[loader]
        # All learn the reason of any: whether items are left out must be the same decision everywhere.
        everywhere = gather_objects((unknown_order_reason(dataloader, self._batches[loader], items), items))
        reason = next((reason for reason, _ in everywhere if reason is not None), None)
        if reason is None:
            return unpadded_length(dataloader)
        if not ids:
            self._policy.warn(
                f"Whether some of the {sum(number for _, number in everywhere)} items of loader {loader} came to several "
                f"processes is unknown, because {reason}. Such items would be counted more than once. "
                f"{self._remedy_for_repeats} (Shown once.)",
                kind="repeated items",
            )
        return None


class BatchMonitor(EvaluationMonitor):
    """Measures each loader by itself, and in training one batch in `every_n_steps`.

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

    prog_bar = False
    # of what is logged of a training batch, the first of which may be shown
    _training_keys: tuple[str, ...]
    # which values are better, by the name of what is logged; nothing where neither are
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
        self.every_n_steps, self.loaders = every_n_steps, loaders

    @abstractmethod
    def _measure_batch(self, embeddings: Tensor, labels: Labels) -> tuple[Tensor | float, ...]:
        """Measure a training batch."""

    @abstractmethod
    def _measure_loader(self, trainer: Trainer, loader: int, stage: str, suffix: str) -> dict[str, float]:
        """Measure the collected set of a loader. Collective."""

    @abstractmethod
    def _names(self, loader: int | None = None) -> list[str]:
        """Name what is logged of the set of a loader, which has been collected; without one of any. Collective."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """See that the submodules are there that embeddings come from."""
        super().on_fit_start(trainer, pl_module)
        if self.embed is not None:
            self.embed.check_name(pl_module)

    def _read(self, trainer: Trainer, outputs: Any, batch: Any, step: str) -> tuple[Tensor, Labels]:
        """Read the embeddings that a step gave, or make them, in evaluation mode; and the labels."""
        if self.embed is None:
            return self._reader.read(outputs, batch, step)
        self._reader.stop_capture()
        return self.embed.in_evaluation(trainer, trainer.lightning_module, batch)

    def _is_measured(self, trainer: Trainer) -> bool:
        # Counted from 1 over all epochs, as Lightning counts for `log_every_n_steps`: with the same number for both, what a
        # logger writes is the value of the batch it writes it for.
        batch = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        return self.every_n_steps is not None and batch % self.every_n_steps == 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Expect embeddings where this batch is to be measured."""
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
            # Lightning reads what is for a progress bar after each batch, also where there is no bar.
            shown = self.prog_bar and key == keys[0] and trainer.progress_bar_callback is not None
            pl_module.log(key, value, on_step=True, on_epoch=False, prog_bar=shown, batch_size=1)

    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        for loader, suffix in ends_of_loaders(trainer, self.loaders).items():
            values = dict.fromkeys(self._names(loader), math.nan)
            first = f"{stage}/{next(iter(values))}{suffix}"
            with self._policy.handling(f"{first} and the other values of this set are NaN."):
                if loader in failed:
                    raise failed[loader]
                values = self._measure_loader(trainer, loader, stage, suffix)
            self._log(trainer, pl_module, {f"{stage}/{name}{suffix}": value for name, value in values.items()})

    def _keys(self, trainer: Trainer) -> Mapping[str, Better]:
        ends = ends_of_loaders(trainer, self.loaders).values()
        return {f"val/{name}{suffix}": self._better.get(name) for suffix in ends for name in self._names()}

    def _keys_of_training(self) -> Mapping[str, Better]:
        return {key: self._better.get(key.removeprefix("train/")) for key in self._training_keys}


def stage_of(trainer: Trainer) -> str:
    """Return the stage that runs, as keys begin with it."""
    return "test" if trainer.testing else "val"


def step_of(trainer: Trainer) -> str:
    """Return the name of the step that runs."""
    return "test_step" if trainer.testing else "validation_step"


def suffixes(trainer: Trainer) -> list[str]:
    """List the ends of the keys of each loader: empty for a single one, else its name or index."""
    names = list(evaluation_loaders(trainer))
    return [f"/{name}" for name in names] if len(names) > 1 else [""] * len(names)


def portable(error: Exception) -> Exception:
    """Make an error that can be sent to another process; on one process return it as it is, with its traceback."""
    if process_count() == 1:
        return error
    # Other classes may take other arguments than a text, or hold what cannot be sent.
    if type(error) in (ValueError, UsageError):
        return type(error)(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def ends_of_loaders(trainer: Trainer, loaders: Loaders | None) -> dict[int, str]:
    """Return the end of the keys of each loader that is measured, by its index: empty where only one is.

    Args:
        trainer: The Trainer.
        loaders: Indices or names; None for all loaders. Those that there are not are passed over.
    """
    if loaders is None:
        return dict(enumerate(suffixes(trainer)))
    found = {loader_index(trainer, each) for each in several(loaders)} - {None}
    names = list(evaluation_loaders(trainer))
    return {index: f"/{names[index]}" if len(found) > 1 else "" for index in range(len(names)) if index in found}


def loader_index(trainer: Trainer, loader: Any) -> int | None:
    """Find a loader by its index or name; None if there is no such loader."""
    names = list(evaluation_loaders(trainer))
    if isinstance(loader, int):
        return loader if 0 <= loader < len(names) else None
    return names.index(loader) if loader in names else None


def names_of_loaders(trainer: Trainer) -> str:
    """List the names of the loaders, for messages."""
    return ", ".join(map(repr, evaluation_loaders(trainer)))


def no_such_loader(trainer: Trainer, call: str) -> str:
    """Say which loaders there are."""
    return (
        f"{call}: there is no such loader; there are {names_of_loaders(trainer)}. Pass one of these names or an index "
        f"below {len(evaluation_loaders(trainer))}."
    )
