"""Every test runs on one seed and leaves no cache behind. FEWSHOT_CHECK_SHAPES=1 checks the shapes in the signatures."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("MPLBACKEND", "Agg")

# Bytecode is kept also where an image of a container switches that off: else each process, and there are many, compiles all
# files of the package and of the tests anew.
sys.dont_write_bytecode = False

# What is not ours is imported before the hook: while the hook loads a module of ours, Python finds the bytecode of no other.
import lightning.pytorch  # noqa: E402, F401
import torchmetrics  # noqa: E402, F401
import torchvision.models  # noqa: E402, F401
from jaxtyping import install_import_hook  # noqa: E402

import tests.typechecker  # noqa: E402 - the hook looks it up by name

# the hook wraps every function of the modules that it is told of, and numba cannot compile a wrapper
ROOT = Path(__file__).parents[1]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in (ROOT / "fewshot_callbacks").rglob("*.py")
    if file.stem != "__init__" and not file.stem.endswith(("_kernel", "_kernels"))
]
if tests.typechecker.CHECKED:
    hook = install_import_hook(MODULES, "tests.typechecker.typechecked")

import jaxtyping  # noqa: E402 - after the hook
import torch  # noqa: E402

from tests import cases, gloo_processes  # noqa: E402

# Scripts for processes of their own: one imports the other package of Lightning, one a library of `test-integrations`.
collect_ignore = ["callbacks/pytorch_lightning_job.py", "integrations/process_jobs.py"]

torch.set_num_threads(1)  # on a busy machine, threads that wait for each other make small tensors ten times slower

# The same examples in every run, so that a failure is the change's own; `make test-all` draws new ones each time. How long
# an example takes depends on what else the machine does, and decides nothing.
of_any_load = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeatable", derandomize=True, max_examples=cases.examples(100), **of_any_load)
hypothesis.settings.register_profile("random", derandomize=False, max_examples=cases.examples(100), **of_any_load)
hypothesis.settings.load_profile("repeatable")


SLOW = (
    # the repository: its examples to add something, recipes, scripts, studies
    "benchmarks",
    "docs/test_contributing.py",
    "docs/test_recipes.py",
    "examples/test_notebook.py",
    "examples/test_sheets.py",
    "studies",
    "tools",
    # kernels compiled again, installations without an extra, whole training runs by the command line
    "cli/test_demo.py",
    "system/test_compiling.py",
    "system/test_extras.py",
    # libraries of test-integrations that take tens of seconds to import
    "integrations/test_sentence_transformers.py",
    "integrations/test_transformers.py",
)
"""Files and folders of tests that `make test` leaves to `make test-rest`; a single test has the mark `slow`."""

FIRST = (
    "cli/test_evaluate.py",
    "engine/test_processes.py",
    "callbacks/test_distributed.py",
    "functional/test_torch_mode.py",  # each of the first files begins with other loops, so that none is compiled twice
    "docs/test_contributing.py",
    "system/test_compiling.py",
    "docs/test_recipes.py",
    "cli/test_fit.py",
)
"""Files of tens of seconds: whoever began one of them last would let the other processes of pytest-xdist wait."""


def is_slow(path: Path) -> bool:
    """Whether all tests of a file are slow."""
    return any(path.is_relative_to(ROOT / "tests" / name) for name in SLOW)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Slow files are not even imported where no slow test is asked for: some import what takes seconds."""
    return True if "not slow" in config.option.markexpr and is_slow(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.path):
            item.add_marker("slow")
        if hasattr(getattr(item, "obj", None), "hypothesis"):
            item.add_marker("sampled")
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
    """What trains on the glyphs sees 14 images of 20 classes in each split, so that it takes seconds."""
    drawn = cases.first_classes(20, images=14)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fewshot_callbacks.data.glyphs.load_drawing", lambda *_: drawn)
        yield


@pytest.fixture(scope="session")
def gloo_folder(shared_folder: Path) -> Path:
    """Return the folder in which `tests.gloo_processes` keeps the answers of processes."""
    folder = shared_folder / "gloo"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session", params=[pytest.param("two", marks=pytest.mark.slow), "three", "two, no CPU"])
def on_ranks(request: pytest.FixtureRequest, gloo_folder: Path) -> list[dict[str, Any]]:
    """The answers of every rank to every case of the metrics; the last are of a backend that knows no CPU, as NCCL."""
    count, backend = {"two": (2, "gloo"), "three": (3, "gloo"), "two, no CPU": (2, "without CPU")}[request.param]
    return gloo_processes.answers(gloo_folder, "tests.metrics.process_jobs", count, backend)
