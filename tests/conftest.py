"""Every test runs with the shapes in the signatures checked, on one seed, and leaves no cache behind."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("MPLBACKEND", "Agg")

from jaxtyping import install_import_hook

import tests.typechecker  # noqa: F401 - the hook looks it up by name

# the hook wraps every function of the modules that it is told of, and numba cannot compile a wrapper
ROOT = Path(__file__).parents[1]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in (ROOT / "fewshot_callbacks").rglob("*.py")
    if file.stem != "__init__" and not file.stem.endswith(("_kernel", "_kernels"))
]
hook = install_import_hook(MODULES, "tests.typechecker.typechecked")

import jaxtyping  # noqa: E402 - after the hook
import torch  # noqa: E402

from tests import cases, gloo_processes  # noqa: E402

# Scripts for processes of their own: one imports the other package of Lightning, one a library of `test-integrations`.
collect_ignore = ["callbacks/pytorch_lightning_job.py", "integrations/process_jobs.py"]

torch.set_num_threads(1)  # on a busy machine, threads that wait for each other make small tensors ten times slower

# the same examples in every run, so that a failure is the change's own; `make test-all` draws new ones each time
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.register_profile("random", derandomize=False)
hypothesis.settings.load_profile("repeatable")


FIRST = (
    "engine/test_processes.py",
    "plots/test_scores.py",  # compiles nothing, so that two processes do not begin with compiling the same
    "engine/test_budget.py",
    "system/test_extras.py",
    "docs/test_recipes.py",
    "cli/test_evaluate.py",
    "cli/test_fit.py",
    "callbacks/test_distributed.py",
    "cli/test_demo.py",
    "studies/test_train_on_average_precision.py",
)
"""Files of tens of seconds: whoever began one of them last would let the other processes of pytest-xdist wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {ROOT / "tests" / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """Switch the checks of types off, which tests have and users have not: for messages about wrong types."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of pytest-xdist have in common in this run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(shared_folder: Path) -> None:
    os.environ["FEWSHOT_CALLBACKS_CACHE"] = str(shared_folder / "cache")


@pytest.fixture(scope="module")
def few_glyphs() -> Iterator[None]:
    """What trains on the glyphs sees the first 30 classes of each split, so that it takes seconds."""
    drawn = cases.first_classes(30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fewshot_callbacks.data.glyphs.load_drawing", lambda *_: drawn)
        yield


@pytest.fixture(scope="session")
def gloo_folder(shared_folder: Path) -> Path:
    """Where `tests.gloo_processes` keeps the answers of processes."""
    folder = shared_folder / "gloo"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", params=["two", "three", "two, no CPU"])
def on_ranks(request: pytest.FixtureRequest, gloo_folder: Path) -> list[dict[str, Any]]:
    """The answers of every rank to every case of the metrics; the last are of a backend that knows no CPU, as NCCL."""
    count, backend = {"two": (2, "gloo"), "three": (3, "gloo"), "two, no CPU": (2, "without CPU")}[request.param]
    return gloo_processes.answers(gloo_folder, "tests.metrics.process_jobs", count, backend)
