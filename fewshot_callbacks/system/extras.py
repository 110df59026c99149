"""The extras of the package: if a package of an extra is missing, the error names the extra to install."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires
from typing import Any


@contextmanager
def required_extra(extra: str, needed_by: str) -> Iterator[None]:
    """Raise an error that names the extra to install if a package is missing inside the block.

    Args:
        extra: Name of the extra.
        needed_by: What needs it, in the words of the user.

    Raises:
        ModuleNotFoundError: A package is missing. The message has the package and the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        raise _explained(extra, needed_by, missing) from missing


def missing_extra(package: str, extra: str, missing: ModuleNotFoundError) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that could not import all of its public names.

    Args:
        package: Name of the package.
        extra: Name of the extra that these names need.
        missing: The error of the import. It is raised at once if the missing module belongs to this package.
    """
    error = _explained(extra, package, missing)
    if error is missing:
        raise missing
    name_of_missing = missing.name  # the error itself would keep all half-imported modules alive

    def refuse(name: str) -> Any:
        # `hasattr`, and Python itself as it looks for submodules, expect an AttributeError for any other name.
        if name not in sys.modules[package].__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        raise _explained(extra, f"{package}.{name}", ModuleNotFoundError(name=name_of_missing))

    return refuse


def _explained(extra: str, needed_by: str, missing: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error for the user; the given error if the missing module belongs to this package."""
    package = (missing.name or "").partition(".")[0]
    # A missing module of this package is a bug in the package, which no extra fixes.
    if package in ("", "fewshot_callbacks"):
        return missing
    words = f"{needed_by} needs {package}, which is not installed. {_command(extra)}"
    return ModuleNotFoundError(words, name=missing.name)


def _command(extra: str) -> str:
    """Return the command for an extra. It omits this package's name, since an index may have another package of it."""
    in_checkout = f"Run pip install '.[{extra}]' in the checkout of this package"
    try:
        requirements = requires("fewshot-callbacks") or []
    except PackageNotFoundError:  # this package is on the path without being installed
        return f"{in_checkout}."
    of_extra = [words for words in requirements if re.search(rf"extra == ['\"]{extra}['\"]", words)]
    packages = sorted({re.split(r"[^\w.-]", words, maxsplit=1)[0] for words in of_extra})
    return f"{in_checkout}, or pip install {' '.join(packages)}." if packages else f"{in_checkout}."
