"""When a monitor measures: not in every epoch, and not for more than a share of the time."""

from __future__ import annotations

import time

from lightning.pytorch.utilities import rank_zero_info


class Schedule:
    """Decides whether a measurement is due, from the epoch and from how long the last one took.

    Args:
        every_n_epochs: Measure at most once in this number of epochs, the first time included.
        max_share: Put a measurement off until measuring takes no more than this share of the time; None never does.
        owner: Name of the callback, for messages.

    Raises:
        ValueError: A setting is out of range.
    """

    def __init__(self, every_n_epochs: int, max_share: float | None, owner: str) -> None:
        if every_n_epochs < 1:
            raise ValueError(f"{owner}(every_n_epochs={every_n_epochs}) must be at least 1.")
        if max_share is not None and not 0 < max_share < 1:
            raise ValueError(
                f"{owner}(max_share={max_share}) is not a share between 0 and 1. Pass, for instance, 0.1, or None."
            )
        self.every_n_epochs, self.max_share, self.owner = every_n_epochs, max_share, owner
        self.begin()

    def begin(self) -> None:
        """Forget earlier measurements: a run begins."""
        self._last_epoch: int | None = None
        self._last_end, self._last_seconds = time.monotonic(), 0.0
        self._has_warned = False

    def is_due(self, epoch: int) -> bool:
        """Decide, and write once to the log that a measurement is put off."""
        if self._last_epoch is None:
            return True
        if epoch - self._last_epoch < self.every_n_epochs:
            return False
        if self.max_share is None:
            return True
        wait = self._last_seconds * (1 / self.max_share - 1)
        since = time.monotonic() - self._last_end
        if since < wait and not self._has_warned:
            self._has_warned = True
            rank_zero_info(
                f"{self.owner}: the measurement took {self._last_seconds:.1f} s; to keep it below "
                f"{self.max_share:.0%} of the time (max_share), the next one follows after {wait:.0f} s of training. "
                f"Fewer classes or items_per_class make it "
                "cheaper. (Shown once.)"
            )
        return since >= wait

    def note(self, started: float, epoch: int) -> float:
        """Note a measurement that ends now.

        Args:
            started: `time.monotonic()` at its start.
            epoch: In which it was made.

        Returns:
            Its share of the time since the last one ended.
        """
        now = time.monotonic()
        seconds, since = now - started, now - self._last_end
        self._last_end, self._last_seconds, self._last_epoch = now, seconds, epoch
        return seconds / max(since, 1e-9)
