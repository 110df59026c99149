"""The examples of CONTRIBUTING.md, followed to the letter in a copy of the tree: the tests are green afterwards."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, commands

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(r'^( *)```(python|diff) title="([^"]+)"\n(.*?)^ *```$', re.MULTILINE | re.DOTALL)
EXAMPLES = dict(re.findall(r"^## Example: (.*?)\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL))
HOUSE = (
    "tests/test_architecture.py",
    "tests/test_defaults.py",
    "tests/test_guarantees.py",
    "tests/docs/test_literature.py",
)


def follow(example: str, root: Path) -> list[str]:
    """Write what the blocks of an example say, and return the files that its command tests."""
    for indent, kind, name, text in BLOCK.findall(example):
        file, lines = root / name, [line.removeprefix(indent) for line in text.splitlines()]
        if kind == "python":
            before = file.read_text(encoding="utf-8") + "\n\n" if file.exists() else ""
            file.write_text(before + "\n".join(lines) + "\n", encoding="utf-8")
            continue
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] != other) for other in "+-")
        whole = file.read_text(encoding="utf-8")
        assert whole.count(old) == 1, f"{name} has {whole.count(old)} times:\n{old}"
        file.write_text(whole.replace(old, new), encoding="utf-8")
    [[_, *tests]] = [
        words for block in re.findall(r"^```bash\n(.*?)```", example, re.M | re.S) for words in commands(block)
    ]
    return tests


def run(root: Path, *words: str) -> None:
    """Run a Python module in a copy; it imports the package of the copy."""
    # An example has to work; that the package works is tested elsewhere, with all its cases.
    few = {"FEWSHOT_CHECK_SHAPES": "0", "FEWSHOT_EXAMPLES": "0.1"}
    environment = os.environ | {"PYTHONPATH": str(root)} | few
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The tree with its compiled loops, which would take minutes to compile again."""
    ignored = shutil.ignore_patterns(".*", "site", "runs", "*.png", "*.svg", "*.ipynb")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored, symlinks=True)
    return tmp_path / "tree"


def test_there_is_an_example_of_each_kind() -> None:
    kinds = ["a metric", "a setting", "a similarity", "a reader of a data set", "a head", "a picture", "a command"]
    assert list(EXAMPLES) == [f"add {kind}" for kind in kinds]


# For a similarity every loop of the engine is compiled anew. The other two are like examples that always run.
ONLY_IN_TEST_ALL = {"add a similarity", "add a head", "add a reader of a data set"}


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.exhaustive] * (title in ONLY_IN_TEST_ALL)) for title in EXAMPLES]
)
def test_an_example_leaves_the_tests_green(title: str, copy: Path) -> None:
    tests = follow(EXAMPLES[title], copy)
    run(copy, "ruff", "check", ".")
    run(copy, "ruff", "format", "--check", ".")
    run(copy, "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", *HOUSE, *tests)
