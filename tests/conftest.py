"""Every test runs with the shapes in the signatures checked, on one seed, and leaves no cache behind."""

import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("MPLBACKEND", "Agg")

from jaxtyping import install_import_hook

import tests.typechecker  # noqa: F401 - the hook looks it up by name

# the hook wraps every function, and numba cannot compile a wrapper: the kernels come in before it
KERNELS = Path(__file__).parents[1] / "fewshot_callbacks/functional/kernels"
for name in ("compiled", "bits"):
    spec = importlib.util.spec_from_file_location(
        f"fewshot_callbacks.functional.kernels.{name}", KERNELS / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])

hook = install_import_hook("fewshot_callbacks", "tests.typechecker.typechecked")

import torch  # noqa: E402 - after the hook

torch.set_num_threads(1)  # on a busy machine, threads that wait for each other make small tensors ten times slower

# the same examples in every run, so that a failure is the change's own; `make test-all` draws new ones each time
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.register_profile("random", derandomize=False)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEWSHOT_CALLBACKS_CACHE"] = str(tmp_path_factory.mktemp("cache"))
