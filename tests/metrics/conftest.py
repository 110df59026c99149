"""The processes start once for all tests of this folder: importing torch is what costs."""

from typing import Any

import pytest

from tests.metrics import ranks


@pytest.fixture(scope="session", params=["two", "three", "two, no CPU"])
def on_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The answers of every rank to every case of `ranks`; the last are of a backend that knows no CPU, as NCCL."""
    count, backend = {"two": (2, "gloo"), "three": (3, "gloo"), "two, no CPU": (2, "without CPU")}[request.param]
    return ranks.run(tmp_path_factory.mktemp("ranks"), count, backend)
