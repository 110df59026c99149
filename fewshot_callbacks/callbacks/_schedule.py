"""When a callback measures or draws: not in every epoch, and not for more than a share of the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities import rank_zero_info

from fewshot_callbacks.distributed.torch_distributed import broadcast_object


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
        self.begin()

    def begin(self) -> None:
        """A run begins."""
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
        if every_n_epochs < 1:
            raise ValueError(f"{owner}(every_n_epochs={every_n_epochs}) must be at least 1.")
        if max_share is not None and not 0 < max_share < 1:
            raise ValueError(
                f"{owner}(max_share={max_share}) is not a share between 0 and 1. Pass, for instance, 0.05, or None."
            )
        self.every_n_epochs, self.max_share, self.owner = every_n_epochs, max_share, owner
        self.watch = Stopwatch()
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
