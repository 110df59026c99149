"""Base of the monitors of a validation or test set: reads the steps, agrees with the other ranks, logs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fewshot_callbacks._trainer import evaluation_loaders, unpadded_length, why_not_dealt
from fewshot_callbacks.callbacks._failures import FailurePolicy, UsageError
from fewshot_callbacks.callbacks._watched import look_for_misspelt_keys
from fewshot_callbacks.callbacks.embeddings import EmbeddingReader, EmbeddingSource, LabelSource, Source
from fewshot_callbacks.distributed.torch_distributed import gather_objects, process_count
from fewshot_callbacks.functional._labels import Labels


class EvaluationMonitor(Callback, ABC):
    """Reads the embeddings of each validation and test batch; subclasses measure them at the end of the epoch.

    Nothing of Lightning's sanity check is measured, but a step that returns no embeddings is an error there, too. An error
    while reading is kept until the end of the epoch, so that all ranks learn of it together and none waits for another.

    Args:
        source: See `EmbeddingReader`.
        labels: See `LabelSource`.
        strict: See `FailurePolicy`.
    """

    _remedy_for_two = "Keep one of them."
    _remedy_for_repeats = "Let Lightning make the sampler (Trainer(use_distributed_sampler=True))."

    def __init__(
        self, source: Source | EmbeddingSource, labels: LabelSource | tuple[str, str] | None, strict: bool | None
    ) -> None:
        owner = type(self).__name__
        self._reader = EmbeddingReader(source, labels, owner)
        self._policy = FailurePolicy(owner, strict)

    @abstractmethod
    def _collect(
        self, trainer: Trainer, loader: int, embeddings: Tensor, labels: Labels, first: int, outputs: Any, batch: Any
    ) -> None:
        """Add a batch. `first`: the index of its first item in this rank's pass over the loader."""

    @abstractmethod
    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        """Measure the collected set and log the values. `failed`: the error of any rank, by loader."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop the collected set."""

    @abstractmethod
    def _keys(self, trainer: Trainer) -> Collection[str]:
        """Return the keys of a validation whose loaders are known."""

    def _prefix(self, stage: str) -> str:
        """Return the first part of the keys in a stage."""
        return stage

    def _prepare(self, trainer: Trainer) -> None:
        """Do what may fail on one rank alone, before all agree on what has failed: by default nothing."""

    def _wants(self, trainer: Trainer, loader: int) -> bool:
        """Decide whether the batches of a loader are read."""
        return loader not in self._failed  # a set that lacks a batch is not measured

    def _embeddings(self, trainer: Trainer, outputs: Any, batch: Any, step: str) -> tuple[Tensor, Labels]:
        """Read the embeddings and labels of the step that has just ended."""
        return self._reader.read(outputs, batch, step)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hook the submodule, if embeddings come from one.

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
        self._begin()
        self._policy.begin()
        self._reader.attach(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove hooks and embeddings."""
        self._reader.detach()
        self._begin()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove hooks and embeddings, also when the run was stopped."""
        self.teardown(trainer, pl_module, "")

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new set."""
        self._begin()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Expect embeddings."""
        self._reader.expect()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        """Read the embeddings of this batch; an error waits for the end of the epoch."""
        self._batches[dataloader_idx] += 1
        if not self._wants(trainer, dataloader_idx):
            self._reader.dismiss()
            return
        try:
            embeddings, labels = self._embeddings(trainer, outputs, batch, _step(trainer))
            self._collect(trainer, dataloader_idx, embeddings, labels, self._seen[dataloader_idx], outputs, batch)
            self._seen[dataloader_idx] += len(labels)
        except Exception as error:  # a metric must not end a training
            self._failed[dataloader_idx] = error

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the set, before checkpoints and early stopping read the values."""
        try:
            self._prepare(trainer)
        except Exception as error:  # a metric must not end a training
            self._failed.setdefault(0, error)
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
                self._reader.note_success(_step(trainer))
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
        # One looks for all: a key that another monitor logs is no mistake.
        monitors = [each for each in trainer.callbacks if isinstance(each, EvaluationMonitor)]  # type: ignore[attr-defined]
        if monitors[0] is self:
            known = set().union(*(each._keys(trainer) for each in monitors))
            look_for_misspelt_keys(trainer, known, self._logged_in_sanity_check, self._policy)

    def _begin(self) -> None:
        self._failed: dict[int, Exception] = {}
        self._seen: Counter[int] = Counter()  # items, by loader
        self._batches: Counter[int] = Counter()
        self._forget()

    def _unpadded_length(self, trainer: Trainer, loader: int, *, ids: bool = False) -> int | None:
        """Count the items of a loader before a `DistributedSampler` repeats some; None where that is not known.

        Collective. Warns once if processes share the items in an unknown way and no ids identify repeated items.
        """
        length, doubt = _dealt(trainer, loader, self._batches[loader], self._seen[loader])
        if doubt is not None and not ids:
            words = f"{doubt} Such items would be counted more than once. {self._remedy_for_repeats} (Shown once.)"
            self._policy.warn(words, kind="repeated items")
        return length


def _dealt(trainer: Trainer, loader: int, batches: int, items: int) -> tuple[int | None, str | None]:
    """Count the items of a loader that were dealt to all processes, or say why that is not known. Collective."""
    if process_count() == 1:
        return None, None
    dataloader = list(evaluation_loaders(trainer).values())[loader]
    # All learn the reason of any: whether items are left out must be the same decision everywhere.
    everywhere = gather_objects((why_not_dealt(dataloader, batches, items), items))
    reason = next((reason for reason, _ in everywhere if reason is not None), None)
    if reason is None:
        return unpadded_length(dataloader), None
    total = sum(number for _, number in everywhere)
    return (
        None,
        f"Whether some of the {total} items of loader {loader} came to several processes is unknown, because {reason}.",
    )


def stage_of(trainer: Trainer) -> str:
    """Return the stage that runs, as keys begin with it."""
    return "test" if trainer.testing else "val"


def _step(trainer: Trainer) -> str:
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


def loader_index(trainer: Trainer, loader: int | str) -> int | None:
    """Find a loader by its index or name; None if there is no such loader."""
    names = list(evaluation_loaders(trainer))
    if isinstance(loader, int):
        return loader if 0 <= loader < len(names) else None
    return names.index(loader) if loader in names else None


def no_such_loader(trainer: Trainer, call: str) -> str:
    """Say which loaders there are."""
    names = list(evaluation_loaders(trainer))
    return (
        f"{call}: there is no such loader; there are {', '.join(map(repr, names))}. Pass one of these names or an index "
        f"below {len(names)}."
    )
