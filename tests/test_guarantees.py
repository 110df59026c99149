"""Each test that docs/guarantees.md names is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def rows() -> list[str]:
    """The rows of the tables, without their heads."""
    lines = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| situation", "| ---"))]


def names_in(file: str) -> set[str]:
    """The names of the test functions of a file, which is not imported."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_guarantee_names_one_test_that_is_there() -> None:
    assert len(rows()) > 50
    known = {file: names_in(file) for file in {file for row in rows() for file, _ in NAMED.findall(row)}}
    for row in rows():
        assert row.count(" | ") == 2, row
        [(file, name)] = NAMED.findall(row)
        assert name in known[file], f"{file} has no {name}"


def test_every_situation_is_in_the_table() -> None:
    """A new test of a situation, of the traces or of degenerate embeddings is a promise, and belongs there."""
    named = {pair for row in rows() for pair in NAMED.findall(row)}
    for file in ("test_situations", "test_no_trace", "test_degenerate"):
        path = f"tests/callbacks/{file}.py"
        missing = {name for name in names_in(path) if (path, name) not in named}
        assert missing <= {"test_the_ap_of_random_order_is_the_mean_over_all_orders"}  # which is a test of a test
