"""Load the plugin with `--ceiling`, and skip the examples of an integration whose library is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration_packages import how_to_install, is_missing

pytest_plugins = ["tests.cpu_seconds"]

INTEGRATIONS = Path(__file__).parent / "fewshot_callbacks" / "integrations"


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> pytest.CollectReport | None:
    """Skip a module of an integration before it is imported; the module has the name of the library."""
    library = collector.path.stem
    if collector.path.parent != INTEGRATIONS or not is_missing(library):
        return None
    skipped = (str(collector.path), 0, f"Skipped: {how_to_install(library)}")
    return pytest.CollectReport(collector.nodeid, "skipped", skipped, [])
