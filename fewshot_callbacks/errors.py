"""`InputError`, the error that this package raises for invalid input."""

from __future__ import annotations

__all__ = ["InputError"]


class InputError(ValueError):
    """Raised for an argument, a batch, a file or a setting that cannot be used.

    The message states what is wrong, in which call, and how to fix it.

    Every error about the values of the input is an `InputError`. There are three exceptions: errors of the disk or of
    addresses are an `OSError`, a missing package is a `ModuleNotFoundError`, and a value that a report does not contain is a
    `LookupError`.

    The only argument is the message, so that each of several processes can raise the same error.

    Examples:
        >>> from fewshot_callbacks import InputError, Shards
        >>> try:
        ...     Shards([])
        ... except InputError as error:
        ...     print(error)
        there are no files in an empty list. Pass a file, a folder or a glob.
    """
