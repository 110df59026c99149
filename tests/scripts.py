"""Scripts that belong to no package, such as benchmarks and tools, as modules."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@contextmanager
def imported_script(path: str) -> Iterator[ModuleType]:
    """Yield the script at a path below the repository as a module; it can import the scripts of its folder."""
    name = f"script_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str((ROOT / path).parent), *sys.path])
        patch.setitem(sys.modules, name, module)  # where dataclasses look their types up
        spec.loader.exec_module(module)
        yield module
