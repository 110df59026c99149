"""Errors and warnings of the monitors: which of them end a run, and which are logged while it continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fewshot_callbacks._trainer import warn
from fewshot_callbacks.distributed.processes import RemoteError


class UsageError(ValueError):
    """A mistake in the settings of a monitor or in what a step returns, which every later batch would repeat."""


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
