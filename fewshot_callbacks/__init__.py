"""PyTorch Lightning callbacks that measure how good your embeddings are, while you train.

Common names can be imported from here; the layers, such as `fewshot_callbacks.functional`, contain all names.
"""

# A name is imported when it is first used, so that the functions do not need Lightning, and only image models and folders
# import torchvision. `__init__.pyi` is the only list of names, for type checkers and for Python, as in lazy_loader.
from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from fewshot_callbacks.system import import_time as _import_time  # noqa: F401 - imported first, since it stores the time

__version__ = "0.2.0"

_IMPORTS = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
_MODULE_OF = {name.name: line.module for line in _IMPORTS if isinstance(line, ast.ImportFrom) for name in line.names}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - a list that is not written out


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(str(_MODULE_OF[name])), name)
    # Later uses do not call this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({name for name in globals() if name.startswith("__") or _is_submodule(name)} | {*__all__})


def _is_submodule(name: str) -> bool:
    return not name.startswith("_") and f"{__name__}.{name}" in sys.modules
