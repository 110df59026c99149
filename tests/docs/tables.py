"""Tables of pages, and the tests in a file."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables of a text, without their heads."""
    lines = re.sub(r"^\|.*\n\|[ :|-]+\|\n", "", text, flags=re.M).splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]


@cache
def names_of_tests(file: str) -> set[str]:
    """`test_name` and `TestClass::test_name` of a file below the repository, which is not imported."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for group in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        names |= {f"{group.name}::{node.name}" for node in group.body if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.split("::")[-1].startswith("test_")}
