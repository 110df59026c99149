"""Every test runs with the shapes in the signatures checked, on one seed, and leaves no cache behind."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("MPLBACKEND", "Agg")

from jaxtyping import install_import_hook

import tests.typechecker  # noqa: F401 - the hook looks it up by name

# the hook wraps every function, and numba cannot compile a wrapper: the kernels come in before it, and nothing with them
ENGINE = Path(__file__).parents[1] / "fewshot_callbacks/engine"
for path in ("cpu/exact_kernels", "cpu/count_kernels", "codes/hamming_kernel"):
    name = f"fewshot_callbacks.engine.{path.replace('/', '.')}"
    spec = importlib.util.spec_from_file_location(name, ENGINE / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
assert "fewshot_callbacks" not in sys.modules

hook = install_import_hook("fewshot_callbacks", "tests.typechecker.typechecked")

import jaxtyping  # noqa: E402 - after the hook
import torch  # noqa: E402

torch.set_num_threads(1)  # on a busy machine, threads that wait for each other make small tensors ten times slower

# the same examples in every run, so that a failure is the change's own; `make test-all` draws new ones each time
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.register_profile("random", derandomize=False)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """Switch the checks of types off, which tests have and users have not: for messages about wrong types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEWSHOT_CALLBACKS_CACHE"] = str(tmp_path_factory.mktemp("cache"))
