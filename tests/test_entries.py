"""Entries of arguments, attributes, results and errors are sentences: a capital letter first, a full stop last."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "fewshot_callbacks").rglob("*.py"))
SECTION = re.compile(r"^ *(Args|Attributes|Raises|Returns|Yields):\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
ENTRY = re.compile(r"\n(?=\*{0,2}\w[\w.*, ]*: )")


def entries(docstring: str) -> Iterator[str]:
    """Each entry without the name that it describes."""
    for kind, text in SECTION.findall(inspect.cleandoc(docstring) + "\n"):
        section = inspect.cleandoc("\n" + text)
        if kind in ("Returns", "Yields"):
            yield section
        else:
            yield from (re.sub(r"^[\w.*, ]+: ", "", entry) for entry in ENTRY.split(section))


def wrong(docstring: str) -> list[str]:
    return [entry for entry in entries(docstring) if re.match("[a-z]", entry) or not re.search(r"[.!?][`\")]?$", entry)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_entries_are_sentences(file):
    nodes = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.Module)
    ]
    assert not [entry for node in nodes for entry in wrong(ast.get_docstring(node) or "")]
