"""Base of the monitors of a validation or test set: reads the steps, agrees with the other ranks, logs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DistributedSampler

from fewshot_callbacks._trainer import evaluation_loaders, items_of_batches, unpadded_length
from fewshot_callbacks.callbacks._failures import FailurePolicy, UsageError
from fewshot_callbacks.callbacks._watched import near, same_but_for_spelling, watched
from fewshot_callbacks.callbacks.embeddings import EmbeddingReader, EmbeddingSource, LabelSource, Source
from fewshot_callbacks.distributed.torch_distributed import gather_objects, process_count
from fewshot_callbacks.functional._labels import Labels

# Name of the step of each stage.
STEPS = {"val": "validation_step", "test": "test_step"}


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

    def __init__(self, source: Source | EmbeddingSource, labels: LabelSource | None, strict: bool | None) -> None:
        owner = type(self).__name__
        self._reader = EmbeddingReader(source, labels, owner)
        self._policy = FailurePolicy(owner, strict)
        self._failed: dict[int, Exception] = {}
        self._seen: dict[int, int] = {}
        self._batches: dict[int, int] = {}
        self._logged_in_sanity_check: set[str] | None = None

    # ------------------------------------------------------------------------------------ to be implemented by subclasses

    @abstractmethod
    def _collect(
        self, loader: int, embeddings: Tensor, labels: Labels, positions: range, outputs: Any, batch: Any
    ) -> None:
        """Add a batch. `positions`: the index of each item in this rank's pass over the loader."""

    @abstractmethod
    def _measure(self, trainer: Trainer, pl_module: LightningModule, stage: str, failed: dict[int, Exception]) -> None:
        """Measure the collected set and log the values. `failed`: the error of any rank, by loader."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop the collected set."""

    @abstractmethod
    def _keys(self, trainer: Trainer) -> set[str]:
        """Return the keys of a validation whose loaders are known."""

    # -------------------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hook the submodule, if embeddings come from one.

        Raises:
            ValueError: If another monitor of this kind would log under the same keys: Lightning would log their mean.
        """
        owner = type(self).__name__
        for other in trainer.callbacks:  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
            if other is not self and isinstance(other, type(self)) and self._prefixes() & other._prefixes():
                raise ValueError(
                    f"Two {owner}s in one Trainer would log under the same keys, and Lightning would log their mean. "
                    + self._remedy_for_two
                )
        self._logged_in_sanity_check = None
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

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a new set."""
        self._begin()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Expect embeddings."""
        self._reader.expect()

    on_test_batch_start = on_validation_batch_start

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Read the embeddings of this batch."""
        self._read(trainer, outputs, batch, dataloader_idx, STEPS["val"])

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Read the embeddings of this batch."""
        self._read(trainer, outputs, batch, dataloader_idx, STEPS["test"])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the set, before checkpoints and early stopping read the values."""
        self._end(trainer, pl_module, "val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what others have logged in the sanity check."""
        if trainer.sanity_checking:
            self._logged_in_sanity_check = set(trainer.callback_metrics)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the keys that checkpoints, early stopping and schedulers monitor.

        Raises:
            UsageError: If one waits for a key that is a known one misspelt, and the sanity check showed that nobody logs it.
        """
        monitors = [each for each in trainer.callbacks if isinstance(each, EvaluationMonitor)]  # type: ignore[attr-defined]
        if monitors[0] is not self:
            return
        known = set().union(*(each._keys(trainer) for each in monitors))
        logged = self._logged_in_sanity_check
        for key, who in watched(trainer).items():
            if key in known or key in (logged or ()):
                continue
            meant = same_but_for_spelling(key, sorted(known))
            other = meant or near(key, sorted(known))
            if other is None:
                continue
            fact = f"{who}(monitor={key!r}): no monitor here logs this value, and nothing else has so far"
            error = f"{fact}. Did you mean {other!r}?"
            if meant is not None and logged is not None:
                self._policy.handle(UsageError(error), "Lightning will find no value to monitor.")
            else:
                self._policy.warn(error)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure the set."""
        self._end(trainer, pl_module, "test")

    # ---------------------------------------------------------------------------------------------------- private helpers

    def _prefix(self, stage: str) -> str:
        """Return the first part of the keys in a stage."""
        return stage

    def _prefixes(self) -> set[str]:
        return {self._prefix(stage) for stage in STEPS}

    def _begin(self) -> None:
        self._failed, self._seen, self._batches = {}, {}, {}
        self._forget()

    def _read(self, trainer: Trainer, outputs: Any, batch: Any, loader: int, step: str) -> None:
        self._batches[loader] = self._batches.get(loader, 0) + 1
        if loader in self._failed:
            self._reader.dismiss()
            return
        try:
            embeddings, labels = self._embeddings(trainer, outputs, batch, step)
            start = self._seen.get(loader, 0)
            self._seen[loader] = start + len(labels)
            self._collect(loader, embeddings, labels, range(start, start + len(labels)), outputs, batch)
        except Exception as error:  # a metric must not end a training
            self._failed[loader] = error

    def _embeddings(self, trainer: Trainer, outputs: Any, batch: Any, step: str) -> tuple[Tensor, Labels]:
        """Read the embeddings and labels of the step that has just ended."""
        return self._reader.read(outputs, batch, step)

    def _end(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.sanity_checking:
            try:
                self._check_loaders(trainer)
            except ValueError as error:
                self._failed.setdefault(0, error)
        everywhere = gather_objects({loader: portable(error) for loader, error in self._failed.items()})
        # the lowest rank's error, the same one everywhere
        failed = {loader: error for errors in reversed(everywhere) for loader, error in errors.items()}
        try:
            if trainer.sanity_checking:
                for failure in failed.values():
                    self._policy.handle(failure, "The sanity check shows that validation cannot be measured.")
            else:
                self._measure(trainer, pl_module, stage, failed)
                if self._seen and not failed:
                    self._reader.note_success(STEPS[stage])
        finally:
            self._begin()

    def _check_loaders(self, trainer: Trainer) -> None:
        """Refuse loaders that the settings do not fit; a monitor with such settings says how."""

    def _unpadded_length(self, trainer: Trainer, loader: int, *, ids: bool = False) -> int | None:
        """Count the items of a loader before a `DistributedSampler` repeats some; None where that is not known.

        Collective. Warns once if processes share the items in an unknown way and no ids identify repeated items.
        """
        if process_count() == 1:
            return None
        dataloader = list(evaluation_loaders(trainer).values())[loader]
        dealt, seen = unpadded_length(dataloader), self._seen.get(loader, 0)
        expected = None if dealt is None else items_of_batches(dataloader, self._batches.get(loader, 0))
        known = gather_objects((expected, seen))
        others = [(wanted, given) for wanted, given in known if wanted != given]
        if not others:
            return dealt
        if not ids:
            wanted, given = others[0]  # perhaps those of another process
            sampler = getattr(dataloader, "sampler", None)
            why = f"the sampler ({type(sampler).__name__}) is not Lightning's DistributedSampler"
            if wanted is not None:
                why = f"the {type(self).__name__} was given {given} embeddings for {wanted} samples"
            elif isinstance(sampler, DistributedSampler):
                why = f"there are {process_count()} processes, and the sampler is set up for {sampler.num_replicas}"
            total = sum(items for _, items in known)
            self._policy.warn(
                f"Whether some of the {total} items of loader {loader} came to several processes is unknown, because "
                f"{why}. Such items would be counted more than once. {self._remedy_for_repeats} (Shown once.)",
                kind="repeated items",
            )
        return None

    def _log(self, pl_module: LightningModule, key: str, value: float, *, prog_bar: bool = False) -> None:
        """Log a value that is equal on all ranks."""
        # the largest of equal values, so that Lightning does not warn of values that it has not reduced
        reduction: dict[str, Any] = {"sync_dist": True, "reduce_fx": "max"} if process_count() > 1 else {}
        pl_module.log(
            key,
            value,
            on_step=False,
            on_epoch=True,
            prog_bar=prog_bar,
            add_dataloader_idx=False,
            batch_size=1,
            **reduction,
        )


def suffixes(trainer: Trainer) -> list[str]:
    """List the ends of the keys of each loader: empty for a single one, else its name or index."""
    names = list(evaluation_loaders(trainer))
    return [f"/{name}" for name in names] if len(names) > 1 else [""] * len(names)


def portable(error: Exception) -> Exception:
    """Make an error that can be sent to another process; on one process return it as it is, with its traceback."""
    if process_count() == 1:
        return error
    if type(error) in (ValueError, UsageError):
        return type(error)(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")
