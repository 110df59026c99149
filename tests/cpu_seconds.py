"""A plugin of pytest that counts the CPU seconds of each test: `--ceiling 10` fails a test that takes more than ten.

CPU seconds tell what a test costs even on a busy machine. They include processes that the test has started and waited for,
but not the groups of `tests.gloo_processes`, which answer many tests. A fixture counts for the first test that asks for it.
The time in which numba compiles is left out: in a fresh clone it would count for whichever test comes first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from numba.core import event

NAME = "CPU seconds"
# Number of tests that the summary lists.
DEAREST = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ceiling", type=float, metavar="SECONDS", help="CPU seconds above which a test fails")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.ceiling is not None:
        config.pluginmanager.register(CPUSeconds(config.option.ceiling))


class Compiling(event.Listener):
    """Counts the CPU seconds that numba compiles in this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun: list[float] = []  # loops that call each other are compiled in each other

    def on_start(self, event: event.Event) -> None:
        self._begun.append(time.process_time())

    def on_end(self, event: event.Event) -> None:
        begun = self._begun.pop()
        if not self._begun:
            self.seconds += time.process_time() - begun


class CPUSeconds:
    """Shows the dearest tests, and fails those above the ceiling."""

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self._compiling = Compiling()
        event.register("numba:compile", self._compiling)
        self._begun = 0.0
        self._found: dict[str, float] = {}

    def _now(self) -> float:
        user, system, user_of_children, system_of_children, _ = os.times()
        return user + system + user_of_children + system_of_children - self._compiling.seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        self._begun = self._now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        if call.when == "teardown":
            taken = self._now() - self._begun
            report.user_properties = [(NAME, taken)]
            if report.passed and taken > self._ceiling:
                report.outcome = "failed"
                report.longrepr = (
                    f"This test took {taken:.1f} CPU seconds, and a test of `make test` may take {self._ceiling:g}. Divide "
                    "it, give it fewer cases, or mark it `slow` where a cheaper test of the same feature stays."
                )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what each process of pytest-xdist has counted."""
        if report.when == "teardown":
            self._found[report.nodeid] = float(dict(report.user_properties)[NAME])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        dearest = sorted(self._found, key=lambda name: -self._found[name])
        terminalreporter.section(f"CPU seconds: {sum(self._found.values()):.0f}; the dearest tests")
        for name in dearest[:DEAREST]:
            terminalreporter.write_line(f"{self._found[name]:6.1f}  {name}")
