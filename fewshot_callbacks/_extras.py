"""The extras of the package: whoever uses what one of them brings is told which to install."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Say which extra brings a package for which the block asks in vain.

    Args:
        extra: Name of the extra.
        what: The user's own words for what needs it.

    Raises:
        ModuleNotFoundError: With the package, and the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "fewshot_callbacks"):
            raise
        words = f"{what} needs {package}, which is not installed. Run pip install 'fewshot-callbacks[{extra}]'."
        raise ModuleNotFoundError(words, name=error.name) from error


def loads(package: str, extra: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package, which loads some of its names when they are first used.

    Args:
        package: Its name.
        extra: Brings what these need.
        home: Name -> module of the package.
    """

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with needs(extra, f"{package}.{name}"):
            return getattr(import_module(f"{package}.{home[name]}"), name)

    return load
