"""How a callback behaves inside somebody's training: an error need not end it; long work shows a bar, and takes a share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities import rank_zero_info
from tqdm.auto import tqdm

from fewshot_callbacks.distributed.processes import RemoteError
from fewshot_callbacks.distributed.torch_distributed import broadcast_object
from fewshot_callbacks.trainer.warning import warn


class UsageError(ValueError):
    """A mistake in the settings of a monitor or in what a step returns, which every later batch would repeat."""


def check_at_least(least: int, owner: str, **numbers: int | None) -> None:
    """Refuse a setting that is too small; None is none.

    Raises:
        ValueError: With its name and value.
    """
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ValueError(f"{owner}({name}={number}) must be at least {least}.")


class FailurePolicy:
    """Decides whether an error ends the run or becomes a warning.

    Args:
        owner: Name of the callback, for messages.
        strict: True raises every error and False none. None raises a `UsageError`, which no further training mends, and
            warns of all others, such as those of a diverged batch.
    """

    def __init__(self, owner: str, strict: bool | None) -> None:
        self.owner, self.strict = owner, strict
        self._shown: set[str] = set()

    def begin(self) -> None:
        """Forget the warnings of an earlier run."""
        self._shown = set()

    def handle(self, error: Exception, consequence: str) -> None:
        """Raise the error, or warn once of it and of what it means for the log."""
        if self.strict:
            raise error
        words = str(error) or type(error).__name__
        if self.strict is None and isinstance(error, UsageError):
            raise UsageError(f"{words} ({self.owner}(strict=False) warns instead, and logs NaN.)") from error
        # another count of bad rows, at another epoch, is the same error
        kind = type(error).__name__ + without_digits(words)[:60]
        cause = "" if isinstance(error, ValueError | RemoteError) else f"{type(error).__name__}: "
        self.warn(f"{consequence} {cause}{words} (Shown once; {self.owner}(strict=True) raises instead.)", kind)

    @contextmanager
    def handling(self, consequence: str) -> Iterator[None]:
        """Handle an error inside the block: a metric must not end a training."""
        try:
            yield
        except Exception as error:
            self.handle(error, consequence)

    @contextmanager
    def going_on(self, kind: str, fact: str, remedy: str = "The run goes on without it.") -> Iterator[None]:
        """Turn an error inside the block into a warning, once for each kind and type of error."""
        try:
            yield
        except Exception as error:  # a picture must not end a training
            name = type(error).__name__
            words = f"{self.owner}: {fact} ({name}: {error}). {remedy} (Shown once for such errors.)"
            self.warn(words, f"{kind}: {name}")

    def warn(self, words: str, kind: str | None = None) -> None:
        """Warn, on the first rank; with a `kind`, once for each kind in a run."""
        if kind is None or self.is_new(kind):
            warn(words)

    def is_new(self, kind: str) -> bool:
        """Whether this is the first time in a run that this kind is asked for."""
        if kind in self._shown:
            return False
        self._shown.add(kind)
        return True


def without_digits(words: str) -> str:
    """Remove the digits, so that messages that differ only in numbers are of one kind."""
    return "".join(character for character in words if not character.isdigit())


# An evaluation that is shorter than this shows no progress bar, which would be gone as soon as it is seen.
QUIET_SECONDS = 1.0


@contextmanager
def evaluation_progress(trainer: Trainer, words: str, unit: str = "pair") -> Iterator[Callable[[int, int], None]]:
    """A function of (units done, units in all) that shows them, if the evaluation is long and the Trainer shows bars."""
    trainer_bar = trainer.progress_bar_callback
    shown = trainer_bar is not None and not getattr(trainer_bar, "is_disabled", False) and trainer.is_global_zero
    started, bar, task = time.monotonic(), None, None
    rich = trainer_bar if isinstance(trainer_bar, RichProgressBar) else None
    progress = getattr(rich, "progress", None)

    def show(done: int, total: int) -> None:
        nonlocal bar, task
        if not shown or time.monotonic() - started < QUIET_SECONDS:
            return
        if progress is not None:
            task = progress.add_task(words, total=total) if task is None else task
            progress.update(task, completed=done, total=total)
        # tqdm and Rich would write into one another.
        elif rich is None:
            if bar is None:
                bar = tqdm(desc=words, total=total, unit=unit, unit_scale=True, leave=False, dynamic_ncols=True)
            bar.total = total
            bar.update(done - bar.n)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()
        if progress is not None and task is not None:
            progress.remove_task(task)


class Stopwatch:
    """Measures the share of a run's time that something takes, by the clock on the wall.

    Examples:
        >>> watch = Stopwatch()
        >>> with watch.running():
        ...     total = sum(range(1000))
        >>> 0 < watch.share < 1
        True
    """

    def __init__(self) -> None:
        self._began, self.seconds = time.perf_counter(), 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time that the block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start

    @property
    def share(self) -> float:
        """Time inside of the blocks, divided by the time since the run began."""
        # At the very beginning no time may have passed by the clock.
        return self.seconds / max(time.perf_counter() - self._began, 1e-9)


class Schedule:
    """Decides in which epochs a callback does its work; several validations of one epoch are all worked on.

    Args:
        every_n_epochs: Work at most in one of this number of epochs, beginning with the first.
        max_share: Wait until the work has taken at most this share of the run time; None never waits.
        owner: Name of the callback, for messages.

    Raises:
        ValueError: A setting is out of range.
    """

    def __init__(self, every_n_epochs: int, max_share: float | None, owner: str) -> None:
        check_at_least(1, owner, every_n_epochs=every_n_epochs)
        if max_share is not None and not 0 < max_share < 1:
            raise ValueError(
                f"{owner}(max_share={max_share}) is not a share between 0 and 1. Pass, for instance, 0.05, or None."
            )
        self.every_n_epochs, self.max_share, self.owner = every_n_epochs, max_share, owner
        self.begin()

    def begin(self, watch: Stopwatch | None = None) -> None:
        """Begin a run, on a clock of its own or on that of another callback, which has begun it."""
        self.watch = Stopwatch() if watch is None else watch
        self._last_epoch: int | None = None
        self._has_told = False

    def is_due(self, epoch: int) -> bool:
        """Decide, by the clock of the first process, and say once that epochs are skipped. Collective."""
        # Clocks differ a little: if each process asked its own, some would wait for others that do not come.
        due = bool(broadcast_object(self._decide(epoch)))
        if due:
            self._last_epoch = epoch
        return due

    def _decide(self, epoch: int) -> bool:
        # An equal epoch is another validation of the one that was due.
        if self._last_epoch is not None and 0 < epoch - self._last_epoch < self.every_n_epochs:
            return False
        if self.max_share is None or self.watch.share <= self.max_share:
            return True
        if not self._has_told:
            rank_zero_info(
                f"{self.owner}: this has taken {self.watch.seconds:.1f} s, {self.watch.share:.0%} of the time; epochs are "
                f"skipped until the share is below {self.max_share:.0%} (max_share). Ask for less, use a larger "
                "every_n_epochs, or max_share=None to skip none. (Shown once.)"
            )
        self._has_told = True
        return False
