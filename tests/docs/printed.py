"""What a page shows below its code is compared with what the code prints.

A block ```` ```text ```` that follows a block of Python shows all that the block prints. A block whose first line begins
with `$ fewshot` shows what this command prints. Three dots on a line of their own are any lines. Numbers may differ in
rounding, or by as much as a comment in front of the block says: `<!--- numbers within 0.03 -->`.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from itertools import zip_longest

import pytest
from sybil import Example
from sybil.evaluators.python import PythonEvaluator

from fewshot_callbacks.cli.main import main

NUMBER = re.compile(r"[+-]?\d+\.\d+(?:e[+-]?\d+)?")
# Digits that rounding may change.
ROUNDING = 2e-4
TOLERANCE = re.compile(r"<!--- numbers within (\S+) -->\s*\Z")
ANY_LINES = "..."


class Printed:
    """Runs the blocks of one page in their order, and compares each shown output with what was printed."""

    def __init__(self) -> None:
        self._python = PythonEvaluator()
        # What each block of Python printed, by the place where the block ends.
        self._printed: dict[int, str] = {}

    def run(self, example: Example) -> str | None:
        """Run a block of Python."""
        with contextlib.redirect_stdout(io.StringIO()) as screen:
            failure = self._python(example)
        self._printed[example.end] = screen.getvalue()
        return failure

    def compare(self, example: Example) -> None:
        """Compare an output that the page shows with what was printed."""
        text = example.document.text[: example.start]
        tolerance = TOLERANCE.search(text)
        before = text[: tolerance.start()] if tolerance else text
        shown = str(example.parsed)
        if shown.startswith("$ fewshot "):
            printed, shown = command_output(shown)
        else:
            printed = self._printed_above(example, before)
        allowed = float(tolerance[1]) if tolerance else ROUNDING
        found = differences(printed, shown, allowed)
        assert not found, "\n".join(f"printed: {line}\n  shown: {other}" for line, other in found)

    def _printed_above(self, example: Example, before: str) -> str:
        """What the block of Python printed that ends right above a shown output."""
        [ends] = [end for end in self._printed if not before[end:].strip()] or [None]
        assert ends is not None, f"line {example.line}: no block of Python is right above; skip it, and give the reason"
        return self._printed[ends]


def command_output(shown: str) -> tuple[str, str]:
    """What the command on the first line prints, and the lines that are shown below it."""
    command, _, lines = shown.partition("\n")
    with contextlib.redirect_stdout(io.StringIO()) as screen, contextlib.redirect_stderr(screen):
        main(shlex.split(command.removeprefix("$ fewshot ")))
    return screen.getvalue(), lines


def differences(printed: str, shown: str, allowed: float) -> list[tuple[str, str]]:
    """The pairs of lines that differ in a word, or in a number by more than is allowed."""
    lines = [line for line in printed.split("\n") if line.strip() and "\r" not in line]  # without progress bars
    expected = [line for line in shown.splitlines() if line.strip()]
    if ANY_LINES in expected:
        place = expected.index(ANY_LINES)
        below = len(expected) - place - 1
        lines = [*lines[:place], *lines[max(place, len(lines) - below) :]]
        del expected[place]
    pairs = zip_longest(lines, expected, fillvalue="")
    return [(line, other) for line, other in pairs if not alike(line, other, allowed)]


def alike(line: str, other: str, allowed: float) -> bool:
    """Whether two lines have the same words, and numbers that differ by what is allowed at most."""
    return form_of(line) == form_of(other) and numbers_in(line) == pytest.approx(
        numbers_in(other), abs=allowed, rel=allowed
    )


def form_of(line: str) -> str:
    """A line without its numbers, and with single spaces."""
    return " ".join(NUMBER.sub("#", line).split())


def numbers_in(line: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(line)]
