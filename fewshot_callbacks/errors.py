"""`InputError`, the error that this package raises where it cannot use what it was given."""

from __future__ import annotations

__all__ = ["InputError"]


class InputError(ValueError):
    """Raised where an argument, a batch, a file or a setting cannot be used.

    The message states the fact, the call and the fix.

    Every error that this package raises about the values of its input is an `InputError`. Errors of the disk and of
    addresses stay an `OSError`, a package that is not installed is a `ModuleNotFoundError`, and a value that a report does
    not have is a `LookupError`.

    An error is made from its message only, so that each of several processes can raise the same one.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import InputError, evaluate_retrieval
        >>> try:
        ...     evaluate_retrieval(torch.full((2, 3), torch.nan), [0, 0])
        ... except InputError as error:
        ...     print("left out:", "NaN" in str(error))
        left out: True
    """
