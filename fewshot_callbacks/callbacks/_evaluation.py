"""Base class of all monitors of a validation or test: it checks and logs keys, and exchanges errors between ranks.

    EvaluationMonitor    the base class; `CollectingMonitor` (`_collecting.py`) adds the sets
    functions            loaders, stages and ends of keys

Every rank logs the same values, through `EvaluationMonitor._log`: `val/mAP` of a `RetrievalMonitor`, `val/J` of a
`DiscriminantRatioMonitor`. The loggers of rank 0 write them. An interrupted epoch logs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fewshot_callbacks.callbacks._conduct import FailurePolicy, UsageError
from fewshot_callbacks.callbacks._watched_keys import Better, look_for_misspelt_keys, look_for_wrong_modes
from fewshot_callbacks.distributed.torch_distributed import gather_objects, process_count
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.retrieval.settings import several
from fewshot_callbacks.trainer.lightning import Callback, LightningModule, Trainer
from fewshot_callbacks.trainer.loaders import evaluation_loaders
from fewshot_callbacks.trainer.logs import log_synced_values, logged_names

Loaders = int | str | Sequence[int | str]
Key = TypeVar("Key")


class EvaluationMonitor(Callback, ABC):
    """Logs values of each validation and test under keys that no other callback logs."""

    loaders: Loaders | None = None

    # ends of messages, which subclasses replace
    _remedy_for_two = "Keep one of them."
    _remedy_for_logged_twice = ""

    def __init__(self, strict: bool | None) -> None:
        self._policy = FailurePolicy(type(self).__name__, strict)

    @abstractmethod
    def _keys(self, trainer: Trainer) -> Mapping[str, Better]:
        """Return key -> which values are better, for a validation with known loaders."""

    def _keys_of_training(self) -> Mapping[str, Better]:
        """Return key -> which values are better, for training batches; by default empty."""
        return {}

    def _prefix(self, stage: str) -> str:
        """Return the first part of the keys of a stage."""
        return stage

    def _check_loaders(self, trainer: Trainer) -> None:
        """Check that the Trainer has the loaders that the user named."""
        if self.loaders is None:
            return
        for loader in several(self.loaders):
            if loader_index(trainer, loader) is None:
                raise UsageError(no_such_loader(trainer, f"{self._policy.owner}(loaders={self.loaders!r}), {loader!r}"))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run: forget the previous run."""
        for other in trainer.callbacks:  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
            if other is not self and type(other) is type(self) and self._prefix("val") == other._prefix("val"):
                raise InputError(
                    f"Two {self._policy.owner}s in one Trainer would log the same keys, and Lightning would log the mean "
                    f"of their values. {self._remedy_for_two}"
                )
        # keys that others logged in the sanity check; None without one
        self._logged_in_sanity_check: set[str] | None = None
        self._has_checked_keys = False
        self._policy.begin()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the keys that others logged in the sanity check, in which this monitor logs nothing."""
        self._logged_in_sanity_check = set(trainer.callback_metrics)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the keys that checkpoints, early stopping and schedulers monitor."""
        look_for_wrong_modes(trainer, self._keys_of_training(), None, self._policy)
        self._check_keys(trainer)

    def _check_keys(self, trainer: Trainer) -> None:
        """Check the validation keys once in a fit, as soon as its loaders are known."""
        if self._has_checked_keys or not evaluation_loaders(trainer):
            return
        self._has_checked_keys = True
        keys = self._keys(trainer)
        logged = self._logged_in_sanity_check
        self._warn_of_keys_logged_twice(keys.keys() & (logged or ()))
        look_for_wrong_modes(trainer, keys, logged, self._policy)
        # One monitor checks for all, because a key that another monitor logs is not misspelt.
        callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
        monitors = [callback for callback in callbacks if isinstance(callback, EvaluationMonitor)]
        strict_monitors = [monitor for monitor in monitors if monitor._policy.strict]
        if self is (strict_monitors or monitors)[0]:
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
        """Log the values of a set, equal on all ranks. Warn if others have logged one of the keys.

        Every rank calls this, because checkpoints and early stopping read the values on each rank.
        """
        self._warn_of_keys_logged_twice(values.keys() & logged_names(trainer))
        log_synced_values(module, values, progress_bar_key)

    def _warn_of_keys_logged_twice(self, keys: Iterable[str]) -> None:
        """Warn of the first of the keys that others log, too."""
        key = min(keys, default=None)
        if key is not None:
            self._policy.warn(
                f"{self._policy.owner} logs {key!r}, but the module or another callback also logs it, and one value "
                f"replaces the other. Log yours under another name{self._remedy_for_logged_twice}. (Shown once.)",
                kind="logged twice",
            )


def stage_of(trainer: Trainer) -> str:
    """Return the current stage, `val` or `test`, which is the first part of its keys."""
    return "test" if trainer.testing else "val"


def step_of(trainer: Trainer) -> str:
    """Return the name of the current step."""
    return "test_step" if trainer.testing else "validation_step"


def suffixes(trainer: Trainer) -> list[str]:
    """Return the end of each loader's keys: a slash and its name, or empty for a single loader."""
    names = list(evaluation_loaders(trainer))
    return [f"/{name}" for name in names] if len(names) > 1 else [""] * len(names)


def portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process."""
    if process_count() == 1:
        return error
    # Other classes may take other arguments, or contain objects that cannot be pickled.
    if type(error) is ValueError or isinstance(error, InputError):
        return type(error)(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def gather_errors(errors: Mapping[Key, Exception]) -> dict[Key, Exception]:
    """Return key -> error of the lowest rank that has one, the same on all ranks. *Collective*.

    All ranks must know of an error before anything is measured, because a failed rank would not take part.
    """
    by_rank = gather_objects({key: portable(error) for key, error in errors.items()})
    failed: dict[Key, Exception] = {}
    for errors_of_rank in reversed(by_rank):
        failed |= errors_of_rank
    return failed


def ends_of_loaders(trainer: Trainer, loaders: Loaders | None) -> dict[int, str]:
    """Return index -> end of the keys of each measured loader; empty if only one is measured.

    Unknown loaders are skipped.
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
    """Return the index of a loader; None if it does not exist."""
    names = list(evaluation_loaders(trainer))
    if isinstance(loader, int):
        return loader if 0 <= loader < len(names) else None
    return names.index(loader) if loader in names else None


def names_of_loaders(trainer: Trainer) -> str:
    """Return the names of the loaders, for messages."""
    return ", ".join(map(repr, evaluation_loaders(trainer)))


def no_such_loader(trainer: Trainer, call: str) -> str:
    """Return the message that a loader does not exist, with the existing loaders."""
    return (
        f"{call}: this loader does not exist. The loaders are {names_of_loaders(trainer)}. Pass a name or an index "
        f"below {len(evaluation_loaders(trainer))}."
    )
