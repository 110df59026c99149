"""Each guarantee of docs/research/guarantees.md names tests, and they are there."""

import re

from tests.docs.tables import ROOT, names_of_tests, rows

GUARANTEES = rows((ROOT / "docs" / "research" / "guarantees.md").read_text(encoding="utf-8"))


TEST = r"`(tests/[\w/]+\.py)::(\w+)`"


def named(cell: str) -> list[tuple[str, str]]:
    """The files and the names of the tests of a cell, which holds at least one, and nothing else."""
    assert re.fullmatch(f"{TEST}(, {TEST})*", cell), cell
    return re.findall(TEST, cell)


def test_every_guarantee_names_tests_that_are_there() -> None:
    assert GUARANTEES
    for _, _, cell in GUARANTEES:
        for file, name in named(cell):
            assert name in names_of_tests(file), f"{file} has no {name}"


def test_every_situation_is_in_the_table() -> None:
    """A new test of a situation, of the traces or of degenerate embeddings is a promise, and belongs there."""
    known = {test for *_, cell in GUARANTEES for test in named(cell)}
    for file in ("test_situations", "test_no_trace", "test_degenerate"):
        path = f"tests/callbacks/{file}.py"
        missing = {name for name in names_of_tests(path) if (path, name) not in known}
        assert missing <= {"test_the_ap_of_random_order_is_the_mean_over_all_orders"}  # which is a test of a test
