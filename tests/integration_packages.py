"""The libraries of the extra `test-integrations`: without one of them, the tests that need it are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

EXTRA = "test-integrations"
MODULES = {
    "accelerate": ["accelerate"],
    "comet_ml": ["comet_ml"],
    "datasets": ["datasets"],
    "easyfsl": ["easyfsl"],
    "faiss-cpu": ["faiss"],
    "h5py": ["h5py"],
    "hydra-core": ["hydra", "omegaconf"],
    "ipykernel": ["ipykernel"],
    "jax": ["jax"],
    "ml-dtypes": ["ml_dtypes"],
    "mlflow-skinny": ["mlflow"],
    "moto": ["moto"],
    "nbclient": ["nbclient"],
    "nbformat": ["nbformat"],
    "optuna": ["optuna"],
    "pandas": ["pandas"],
    "polars": ["polars"],
    "pytorch-metric-learning": ["pytorch_metric_learning"],
    "pytrec-eval-terrier": ["pytrec_eval"],
    "ray": ["ray"],
    "resvg_py": ["resvg_py"],
    "s3fs": ["s3fs"],
    "sentence-transformers": ["sentence_transformers"],
    "tie-aware-retrieval-metrics": ["trm"],
    "timm": ["timm"],
    "transformers": ["transformers"],
    "usearch": ["usearch"],
    "wandb": ["wandb"],
    "zarr": ["zarr"],
}
"""Each package of the extra with the modules that it brings."""


def how_to_install(module: str) -> str:
    """Return the reason for which a test is skipped that needs this module."""
    return f"{module} is not installed: pip install -e '.[{EXTRA}]'"


def integration(module: str, minversion: str | None = None) -> Any:
    """Return a module of the extra; skip the test, or all tests of the file that is being imported, without it."""
    assert _is_of_extra(module), f"{module} is not in MODULES"
    return pytest.importorskip(module, minversion=minversion, reason=how_to_install(module))


@contextmanager
def skipped_without_integrations() -> Iterator[None]:
    """Skip the test if what runs inside the block imports a module of the extra that is not installed."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or not _is_of_extra(missing.name):
            raise
        pytest.skip(how_to_install(missing.name))


def is_missing(module: str) -> bool:
    """Return whether a module is one of the extra, and not installed."""
    return _is_of_extra(module) and find_spec(module) is None


def _is_of_extra(module: str) -> bool:
    package = module.partition(".")[0]
    return any(package in modules for modules in MODULES.values())
