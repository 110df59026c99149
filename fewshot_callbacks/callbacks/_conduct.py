"""How a callback behaves in a user's run: which errors end it, progress bars, and its share of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from fewshot_callbacks.distributed.processes import RemoteError
from fewshot_callbacks.distributed.torch_distributed import broadcast_object
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import LabelFormsError
from fewshot_callbacks.functional._notes import without_digits
from fewshot_callbacks.system.compile_notice import compiling_seconds
from fewshot_callbacks.system.words import with_article
from fewshot_callbacks.trainer.lightning import Trainer, is_of_class, rank_zero_info
from fewshot_callbacks.trainer.warning import warn


class UsageError(InputError):
    """Raised for a mistake in settings or in a step's output that every later batch would repeat."""


def check_at_least(least: int, owner: str, **numbers: int | None) -> None:
    """Check that numbers are at least `least`; None is accepted."""
    for name, number in numbers.items():
        if number is not None and number < least:
            raise InputError(f"{owner}({name}={number}) must be at least {least}.")


def without_owner(error: Exception, owner: str) -> str:
    """Return the message of an error without the owner's name at its start."""
    message = str(error).removeprefix(f"{owner}: ")
    if message.startswith(f"{owner} "):
        return f"{'They' if ' and ' in owner else 'It'}{message.removeprefix(owner)}"
    return message


class FailurePolicy:
    """Decides whether an error ends the run or becomes a warning.

    Args:
        strict: True raises every error, False none. None raises a `UsageError` or `LabelFormsError`, which further
            training cannot mend, and warns of all others, such as errors in a diverged batch.
    """

    def __init__(self, owner: str, strict: bool | None) -> None:
        self.owner = owner
        self.strict = strict
        self._shown_kinds: set[str] = set()

    def begin(self) -> None:
        """Begin a run: forget the warnings of the previous run."""
        self._shown_kinds = set()

    def handle(self, error: Exception, consequence: str) -> None:
        """Raise the error, or warn of it and its consequence, once for each kind of error."""
        if self.strict:
            raise error
        message = str(error) or type(error).__name__
        if self.strict is None and isinstance(error, UsageError | LabelFormsError):
            hint = f" ({self.owner}(strict=False) warns instead, and logs NaN.)"
            # An error raised in a nested block passes through here twice.
            raise UsageError(message.removesuffix(hint) + hint) from error
        # Errors that differ only in numbers, such as a count of rows or an epoch, are one kind.
        kind = type(error).__name__ + without_digits(without_owner(error, self.owner))[:60]
        error_type = "" if isinstance(error, ValueError | RemoteError) else f"{type(error).__name__}: "
        self.warn(f"{consequence} {error_type}{message} (Shown once; {self.owner}(strict=True) raises instead.)", kind)

    @contextmanager
    def handling(self, consequence: str) -> Iterator[None]:
        """Handle an error inside the block as `handle` does; after a warning, execution continues after the block."""
        try:
            yield
        except Exception as error:
            self.handle(error, consequence)

    @contextmanager
    def going_on(self, kind: str, fact: str, remedy: str = "The run continues without it.") -> Iterator[None]:
        """Turn an error inside the block into one warning per kind and type, even if `strict` is True."""
        try:
            yield
        except Exception as error:  # a figure must not end the run
            error_type = type(error).__name__
            message = f"{self.owner}: {fact} ({error_type}: {error}). {remedy} (Shown once for such errors.)"
            self.warn(message, f"{kind}: {error_type}")

    def warn(self, message: str, kind: str | None = None) -> None:
        """Warn on the first rank; with a `kind`, only once in a run."""
        if kind is None or self.is_new(kind):
            warn(message)

    def is_new(self, kind: str) -> bool:
        """Return whether this is the first call for this kind in a run."""
        if kind in self._shown_kinds:
            return False
        self._shown_kinds.add(kind)
        return True


# A shorter evaluation shows no progress bar, because nobody could read it.
QUIET_SECONDS = 1.0


def print_beside_bar(trainer: Trainer, line: str) -> None:
    """Print a line above the progress bar, if there is one, on the first rank."""
    bar = trainer.progress_bar_callback
    if bar is not None and not getattr(bar, "is_disabled", False) and trainer.is_global_zero:
        bar.print(line)


@contextmanager
def evaluation_progress(trainer: Trainer, description: str, unit: str = "pair") -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (units done, all units), which shows a progress bar for long work if the Trainer shows bars.

    The bar is part of the Rich display of the Trainer, or else a tqdm bar. Only the first rank shows it.
    """
    trainer_bar = trainer.progress_bar_callback
    is_enabled = trainer_bar is not None and not getattr(trainer_bar, "is_disabled", False) and trainer.is_global_zero
    uses_rich = is_of_class(trainer_bar, "RichProgressBar")
    # Rich's display; None before the Trainer creates it
    rich_display = getattr(trainer_bar, "progress", None) if uses_rich else None
    rich_task = None
    tqdm_bar = None
    started = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal tqdm_bar, rich_task
        if not is_enabled or time.monotonic() - started < QUIET_SECONDS:
            return
        if rich_display is not None:
            if rich_task is None:
                rich_task = rich_display.add_task(description, total=total)
            rich_display.update(rich_task, completed=done, total=total)
        # tqdm and Rich together would corrupt each other's lines.
        elif not uses_rich:
            if tqdm_bar is None:
                tqdm_bar = tqdm(
                    desc=description, total=total, unit=unit, unit_scale=True, leave=False, dynamic_ncols=True
                )
            tqdm_bar.total = total
            tqdm_bar.update(done - tqdm_bar.n)

    try:
        yield show
    finally:
        if tqdm_bar is not None:
            tqdm_bar.close()
        if rich_display is not None and rich_task is not None:
            rich_display.remove_task(rich_task)


class TimeShare:
    """Measures the fraction of wall-clock time, since this object was created, that is spent on some work.

    Time in which kernels compile does not count, because they compile only in the first measurement.

    Examples:
        >>> watch = TimeShare()
        >>> with watch.running():
        ...     total = sum(range(1000))
        >>> 0 < watch.share < 1
        True
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time that the block takes, without the time in which kernels compile."""
        start = time.perf_counter()
        compiled = compiling_seconds()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            # Another thread may compile while the block runs, and may have begun before it.
            self.seconds += max(0.0, elapsed - (compiling_seconds() - compiled))

    @property
    def share(self) -> float:
        """Time inside the blocks divided by the time since this object was created."""
        # At first the measured time may be zero.
        return self.seconds / max(time.perf_counter() - self._began, 1e-9)


# Nobody notices shorter work. Without this limit, the load of the machine decides whether a run of a few seconds skips
# an epoch.
LEAST_SECONDS = 1.0


class Schedule:
    """Decides in which epochs a callback works: there at each validation, as far as `max_share` allows.

    Args:
        every_n_epochs: Work in at most one of this number of epochs, beginning with the first.
        max_share: Wait until the work has taken at most this fraction of the run time; None never waits. The first
            second of work never waits.
        owner: Name of the callback, for messages.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(self, every_n_epochs: int, max_share: float | None, owner: str) -> None:
        check_at_least(1, owner, every_n_epochs=every_n_epochs)
        if max_share is not None and not 0 < max_share < 1:
            raise InputError(
                f"{owner}(max_share={max_share}) must be between 0 and 1. Pass, for instance, 0.05, or None."
            )
        self.every_n_epochs = every_n_epochs
        self.max_share = max_share
        self.owner = owner
        self.begin()

    def begin(self, watch: TimeShare | None = None) -> None:
        """Begin a run with a new stopwatch, or with another callback's stopwatch."""
        self.watch = TimeShare() if watch is None else watch
        # last epoch with work
        self._last_epoch: int | None = None
        self._has_told = False

    def is_due(self, epoch: int) -> bool:
        """Return whether to work in this epoch, by the clock of the first process. *Collective*.

        A message reports skipped epochs once.
        """
        # Clocks differ: if each process used its own, some would work and wait for the others.
        due = bool(broadcast_object(self._decide(epoch)))
        if due:
            self._last_epoch = epoch
        return due

    def _decide(self, epoch: int) -> bool:
        """Return whether to work in this epoch, by the clock of this process."""
        # The same epoch again is another of its validations.
        if self._last_epoch is not None and 0 < epoch - self._last_epoch < self.every_n_epochs:
            return False
        if self.max_share is None or self.watch.share <= self.max_share or self.watch.seconds < LEAST_SECONDS:
            return True
        if not self._has_told:
            rank_zero_info(
                f"{self.owner} has taken {self.watch.seconds:.1f} s, {self.watch.share:.0%} of the time. It skips epochs "
                f"until this is below {self.max_share:.0%} (max_share). Request less work, pass a larger every_n_epochs, "
                "or pass max_share=None to skip no epoch. (Shown once.)"
            )
        self._has_told = True
        return False


def describe(value: Any) -> str:
    """Return a description of a value in a few words, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    if isinstance(value, Mapping):
        return f"a mapping with the keys {', '.join(map(repr, value)) or 'none'}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{with_article(type(value).__name__)} of {len(value)}"
    return "None" if value is None else with_article(type(value).__name__)
