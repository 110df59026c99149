"""Both processes start once for all tests of this folder: importing torch twice is what costs."""

from typing import Any

import pytest

from tests.metrics import two_processes


@pytest.fixture(scope="session")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The answers of rank 0 and rank 1 to every case of `two_processes`."""
    return two_processes.run(tmp_path_factory.mktemp("two_processes"))
