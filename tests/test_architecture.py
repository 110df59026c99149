"""Imports run one way between the layers of the package, and the engine is entered by its door."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fewshot_callbacks"

BELOW = {
    "distributed": set(),
    "engine": {"distributed"},
    "functional": {"engine", "distributed"},
    "losses": {"functional"},
    "metrics": {"functional", "distributed"},
    "data": {"functional"},
    "protonet": {"metrics", "losses", "functional", "distributed"},
    "callbacks": {"metrics", "functional", "distributed", "protonet"},
    "cli": {"callbacks", "protonet", "data", "losses", "metrics", "functional", "distributed"},
}
"""Layer -> the layers that it may import."""


def imports():
    """(file, layer of the file, imported module) of every import of the package in itself."""
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                if (
                    module
                    and module.startswith("fewshot_callbacks.")
                    and name in BELOW
                    and module.split(".")[1] in BELOW
                ):
                    yield file.relative_to(PACKAGE), name, module.removeprefix("fewshot_callbacks.")


def test_every_folder_is_a_layer():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(BELOW)


def test_imports_point_down():
    wrong = [
        f"{file} imports {module}"
        for file, layer, module in imports()
        if (target := module.split(".")[0]) != layer and target not in BELOW[layer]
    ]
    assert not wrong


@pytest.mark.parametrize("layer", ["distributed", "engine", "functional", "losses"])
def test_the_maths_knows_no_lightning(layer):
    for file in (PACKAGE / layer).rglob("*.py"):
        assert "lightning" not in {
            node.module.split(".")[0]
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }, file
