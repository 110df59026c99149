"""Each test that docs/guarantees.md names is there."""

import re

from tests.docs.tables import ROOT, names_of_tests, rows

GUARANTEES = rows((ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8"))


def named(cell: str) -> tuple[str, str]:
    """The file and the name of the one test of a cell."""
    [found] = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cell)
    return found


def test_every_guarantee_names_one_test_that_is_there() -> None:
    assert GUARANTEES
    for _, _, cell in GUARANTEES:
        file, name = named(cell)
        assert name in names_of_tests(file), f"{file} has no {name}"


def test_every_situation_is_in_the_table() -> None:
    """A new test of a situation, of the traces or of degenerate embeddings is a promise, and belongs there."""
    known = {named(cell) for *_, cell in GUARANTEES}
    for file in ("test_situations", "test_no_trace", "test_degenerate"):
        path = f"tests/callbacks/{file}.py"
        missing = {name for name in names_of_tests(path) if (path, name) not in known}
        assert missing <= {"test_the_ap_of_random_order_is_the_mean_over_all_orders"}  # which is a test of a test
