"""Every test runs with the shapes in the signatures checked, on one seed, and leaves no cache behind."""

import os

import pytest

os.environ.setdefault("MPLBACKEND", "Agg")

from jaxtyping import install_import_hook

import tests.typechecker  # noqa: F401 - the hook looks it up by name

hook = install_import_hook("fewshot_callbacks", "tests.typechecker.typechecked")

import torch  # noqa: E402 - after the hook

torch.set_num_threads(1)  # on a busy machine, threads that wait for each other make small tensors ten times slower


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEWSHOT_CALLBACKS_CACHE"] = str(tmp_path_factory.mktemp("cache"))
