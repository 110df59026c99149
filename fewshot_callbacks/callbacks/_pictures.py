"""Base of the callbacks that draw: when they draw, in what share of the time, and what a failure does (nothing)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fewshot_callbacks._trainer import evaluation_loaders
from fewshot_callbacks.callbacks._failures import FailurePolicy, UsageError
from fewshot_callbacks.callbacks._loggers import Drawing, Stopwatch, log_figures
from fewshot_callbacks.callbacks._retrieved import Label
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, ItemSet, Viewer
from fewshot_callbacks.callbacks.retrieval import RetrievalMonitor
from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.distributed.torch_distributed import all_processes, broadcast_object, process_count

# label -> the name of its class, or the names by number
Names = Mapping[Any, str] | Sequence[str]

SHARE_KEY = "pictures/share_of_time"


class PictureCallback(Viewer):
    """Draws figures of each set that a `RetrievalMonitor` has evaluated; subclasses say which.

    Args:
        every_n_epochs: Draw at most once in this number of epochs, beginning with the first.
        max_share: Skip epochs until all pictures together have taken at most this share of the run time, in (0, 1);
            None never skips an epoch.
        prefix: Draw the sets whose keys begin with it, such as `val` or `val/t2i`; None draws all.

    Raises:
        ValueError: A setting is out of range.
    """

    def __init__(self, every_n_epochs: int, max_share: float | None, prefix: str | None) -> None:
        owner = type(self).__name__
        if every_n_epochs < 1:
            raise ValueError(f"{owner}(every_n_epochs={every_n_epochs}) must be at least 1.")
        if max_share is not None and not 0 < max_share < 1:
            raise ValueError(
                f"{owner}(max_share={max_share}) is not a share between 0 and 1. Pass, for instance, 0.05, or None."
            )
        self.every_n_epochs, self.max_share, self.prefix = every_n_epochs, max_share, prefix
        self._policy = FailurePolicy(owner, strict=False)
        self._watch, self._has_first_place = Stopwatch(), True
        self._is_due, self._has_told, self._last_epoch = False, False, -1
        self._loaders: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        """Seconds that the pictures of all such callbacks of the Trainer have taken in this run."""
        return self._watch.seconds

    # ------------------------------------------------------------------------------------ to be implemented by subclasses

    @abstractmethod
    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet, processes: Processes) -> Mapping[str, Drawing]:
        """Find, with the other processes, what is drawn; return name -> a function that draws it. Collective.

        The functions run on the first process alone, where random states are put back afterwards.
        """

    # -------------------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run.

        Raises:
            UsageError: If there is no `RetrievalMonitor`, none of this prefix, or another callback draws the same.
        """
        owner = type(self).__name__
        callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
        monitors = [callback for callback in callbacks if isinstance(callback, RetrievalMonitor)]
        if not monitors:
            raise UsageError(
                f"{owner} draws what a RetrievalMonitor has evaluated, but this Trainer has none. Add one: "
                f"Trainer(callbacks=[RetrievalMonitor(), {owner}()])."
            )
        known = sorted({prefix for each in monitors for prefix in each._prefixes()})
        if not any(_begins(prefix, self.prefix) for prefix in known):
            raise UsageError(
                f"{owner}(prefix={self.prefix!r}): no RetrievalMonitor has this prefix; there are "
                f"{', '.join(map(repr, known))}. Pass one of these, or leave out prefix for all."
            )
        alike = [other for other in callbacks if type(other) is type(self) and other is not self]
        if any(_begins(self.prefix, other.prefix) or _begins(other.prefix, self.prefix) for other in alike):
            raise UsageError(
                f"Two {owner}s in one Trainer would draw under the same names. Give them different prefixes."
            )
        first = next(callback for callback in callbacks if isinstance(callback, PictureCallback))
        self._watch, self._has_first_place = first._watch, first is self
        if self._has_first_place:
            self._watch.begin()
        self._policy.begin()
        self._is_due, self._has_told, self._last_epoch = False, False, -1

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide whether this epoch is drawn."""
        self._begin(trainer)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide whether this epoch is drawn."""
        self._begin(trainer)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the share of the time that all pictures have taken."""
        self._log_share(trainer, pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the share of the time that all pictures have taken."""
        self._log_share(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget what was kept for the pictures."""
        self._end()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget what was kept for the pictures."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget what was kept for the pictures."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Forget what was kept for the pictures, also when the run was stopped."""
        self._end()

    # ------------------------------------------------------------------------------------------------------------- viewing

    def wants(self, prefix: str) -> bool:
        """Decide whether the sets of this epoch whose keys begin with the prefix are to be shown."""
        return self._is_due and _begins(prefix, self.prefix)

    def see_set(self, trainer: Trainer, evaluated: EvaluatedSet) -> None:
        """Draw the figures of a set and log them; turn an error into a warning, shown once."""
        processes = all_processes()
        with self._watch.running():
            try:
                with processes.together():
                    figures = self._figures(trainer, evaluated, processes)
            except Exception as error:  # a picture must not end a training
                self._warn_of(error, f"No pictures of {evaluated.prefix}{evaluated.suffix}")
                return
            log_figures(trainer, figures, self._policy)

    # ---------------------------------------------------------------------------------------------------- private helpers

    def _begin(self, trainer: Trainer) -> None:
        self._end()
        if trainer.sanity_checking:
            return
        self._is_due = bool(broadcast_object(self._decide(trainer)))
        if self._is_due:
            self._last_epoch = trainer.current_epoch
            self._loaders = evaluation_loaders(trainer)

    def _decide(self, trainer: Trainer) -> bool:
        """Decide by the epoch and the time; several validations in one epoch are all drawn."""
        epoch, last = trainer.current_epoch, self._last_epoch
        if trainer.state.fn == "fit" and last >= 0 and epoch != last and epoch - last < self.every_n_epochs:
            return False
        if self.max_share is None or self._watch.share <= self.max_share:
            return True
        if not self._has_told:
            rank_zero_info(
                f"{type(self).__name__}: pictures have taken {self._watch.seconds:.1f} s, {self._watch.share:.0%} of the "
                f"time; epochs are skipped until the share is below {self.max_share:.0%} (max_share). Use a larger "
                f"every_n_epochs or fewer pictures, or max_share=None to skip none. (Shown once.)"
            )
        self._has_told = True
        return False

    def _end(self) -> None:
        """Forget what was kept for the pictures; subclasses that keep more extend it."""
        self._is_due, self._loaders = False, {}

    def _log_share(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not self._has_first_place:
            return
        # that of the process that draws is the largest
        reduction: dict[str, Any] = {"sync_dist": True, "reduce_fx": "max"} if process_count() > 1 else {}
        pl_module.log(SHARE_KEY, self._watch.share, on_step=False, on_epoch=True, batch_size=1, **reduction)

    def _warn_of(self, error: Exception, fact: str) -> None:
        words = (
            f"{self._policy.owner}: {fact} ({type(error).__name__}: {error}). The run goes on without it. (Shown once.)"
        )
        self._policy.warn(words, kind=f"{fact}: {type(error).__name__}")

    def _loader_of(self, items: ItemSet) -> tuple[str, Any]:
        """Return the name of the loader of a set, and the loader."""
        return list(self._loaders.items())[items.loader]


def _begins(key: str | None, prefix: str | None) -> bool:
    """Check whether the parts of a key begin with those of a prefix; all do with None."""
    return prefix is None or (key is not None and f"{key}/".startswith(f"{prefix}/"))


def class_name(label: Label, names: Names | None, loader: Any) -> str:
    """Name a class: by the names that are given, those that the data set has as `classes`, or the label itself.

    Examples:
        >>> class_name(1, ["owl", "heron"], None), class_name((0, 7), {0: "red"}, None), class_name("owl", None, None)
        ('heron', 'red, 7', 'owl')
    """
    if isinstance(label, tuple):
        return ", ".join(class_name(column, names, loader) for column in label) or "none"
    if names is None and isinstance(label, int):
        dataset = getattr(loader, "dataset", None)
        classes = getattr(getattr(dataset, "dataset", dataset), "classes", None)
        names = classes if isinstance(classes, Sequence) and all(isinstance(name, str) for name in classes) else None
    if isinstance(names, Mapping):
        return str(names.get(label, label))
    if names is not None and isinstance(label, int) and 0 <= label < len(names):
        return str(names[label])
    return str(label)
