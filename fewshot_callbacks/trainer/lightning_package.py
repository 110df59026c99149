"""Which of Lightning's two packages the user's process works with: `lightning` or `pytorch_lightning`.

Both hold classes of the same names, which Python takes for different ones: a Trainer takes modules of its own package alone.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import FrameType

# Name of a package -> the module of its Trainer; the package that is taken without any sign of the other one stands first.
MODULES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def package_in_sight() -> str | None:
    """Return the package that the user's process works with, as far as it can be seen; None if it cannot.

    The code that imports this module is the first sign: the file of a user often imports the callbacks a line before its
    Lightning. The second sign is that one of the packages is imported, or installed, and the other is not.
    """
    for frame in _callers():
        packages = _packages_named_in(frame)
        if len(packages) == 1:
            return packages.pop()
    imported = imported_packages()
    if len(imported) == 1:
        return imported[0]
    installed = [package for package in MODULES if find_spec(package) is not None]
    return installed[0] if len(installed) == 1 else None


def imported_packages() -> list[str]:
    """Return the packages that this process has imported."""
    return [package for package, module in MODULES.items() if sys.modules.get(module) is not None]


def _callers() -> Iterator[FrameType]:
    """Yield the frames of the callers of this module, from the inside out."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _packages_named_in(frame: FrameType) -> set[str]:
    """Return the installed packages that the code of a frame imports, now or later, or that it belongs to."""
    modules = [line.argval for line in dis.get_instructions(frame.f_code) if line.opname == "IMPORT_NAME"]
    modules.append(frame.f_globals.get("__name__", ""))
    named = {module.partition(".")[0] for module in modules}
    return {package for package in MODULES if package in named and find_spec(package) is not None}
