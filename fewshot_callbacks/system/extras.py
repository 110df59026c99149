"""The extras of the package: whoever uses what one of them brings is told which to install."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def _explained(extra: str, what: str, missing: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error that a user reads, or the same one where a module of this package is missing."""
    package = (missing.name or "").partition(".")[0]
    # A module of this package that is missing is a mistake in the package, which no extra mends.
    if package in ("", "fewshot_callbacks"):
        return missing
    words = f"{what} needs {package}, which is not installed. Run pip install 'fewshot-callbacks[{extra}]'."
    return ModuleNotFoundError(words, name=missing.name)


@contextmanager
def required_extra(extra: str, what: str) -> Iterator[None]:
    """Say which extra brings a package for which the block asks in vain.

    Args:
        extra: Name of the extra.
        what: The user's own words for what needs it.

    Raises:
        ModuleNotFoundError: With the package, and the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise _explained(extra, what, missing) from missing


def missing_extra(package: str, extra: str, missing: ModuleNotFoundError) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that could not import all of its public names.

    Args:
        package: Its name.
        extra: Brings what they need.
        missing: What the import ended with; raised at once where a module of this package is missing.
    """
    error = _explained(extra, package, missing)
    if error is missing:
        raise missing
    name_of_missing = missing.name  # the error itself would keep all that was being imported

    def refuse(name: str) -> Any:
        # `hasattr`, and Python itself as it looks for submodules, expect an AttributeError for any other name.
        if name not in sys.modules[package].__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        raise _explained(extra, f"{package}.{name}", ModuleNotFoundError(name=name_of_missing))

    return refuse
