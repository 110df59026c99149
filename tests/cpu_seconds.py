"""A plugin of pytest that counts the CPU seconds of each test: `--ceiling 10` fails a test that takes more than ten.

CPU seconds tell what a test costs also while the machine does other things. They include processes that the test has waited
for, and fixtures count for the first test that asks for them. Loops that numba compiles are left out: in a fresh clone they
would count for whichever test comes first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from numba.core import event

NAME = "CPU seconds"
# Number of tests that the summary lists.
DEAREST = 20


class Compiling(event.Listener):
    """The seconds that numba has compiled in this process."""

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
    """Counts them, shows the dearest tests, and fails a test above the ceiling."""

    def __init__(self, ceiling: float) -> None:
        self._ceiling = ceiling
        self._compiling = Compiling()
        event.register("numba:compile", self._compiling)
        self._found: dict[str, float] = {}

    def _now(self) -> float:
        user, system, user_of_children, system_of_children, _ = os.times()
        return user + system + user_of_children + system_of_children - self._compiling.seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Keep when a test has begun, and count what it takes until the next one."""
        item.user_properties.append((NAME, self._now()))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            begun = dict(item.user_properties)[NAME]
            taken = self._now() - begun
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
            self._found.update({report.nodeid: taken for name, taken in report.user_properties if name == NAME})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        dearest = sorted(self._found, key=self._found.__getitem__, reverse=True)
        terminalreporter.section(f"CPU seconds: {sum(self._found.values()):.0f}; the dearest tests")
        for name in dearest[:DEAREST]:
            terminalreporter.write_line(f"{self._found[name]:6.1f}  {name}")
        if os.environ.get("CPU_JSON"):
            import json
            __import__("pathlib").Path(os.environ["CPU_JSON"]).write_text(json.dumps(self._found))
