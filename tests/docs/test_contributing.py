"""The examples of docs/project, followed to the letter in a copy of the tree: the tests are green afterwards."""

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

FENCE = re.compile(r"^ *```(?:python|diff)", re.MULTILINE)
BLOCK = re.compile(r"`([\w./]+)`:\n\n```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A block, and the file that the line above it names."""
PAGES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/project").glob("*.md"))}
EXAMPLES = {path.stem: text for path, text in PAGES.items() if FENCE.search(text)}
HOUSE = (
    "tests/test_architecture.py",
    "tests/test_defaults.py",
    "tests/test_guarantees.py",
    "tests/docs/test_literature.py",
)


def follow(example: str, root: Path) -> list[str]:
    """Write what the blocks of an example say, and return the files that its command tests."""
    blocks = BLOCK.findall(example)
    assert len(blocks) == len(FENCE.findall(example)), "a block without a file"
    for name, kind, text in blocks:
        file, lines = root / name, text.splitlines()
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
    # .ruff.toml is kept: pages have shorter lines than code.
    ignored = shutil.ignore_patterns(".[!r]*", ".ruff_cache", "site", "runs", "*.png", "*.svg", "*.ipynb")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored, symlinks=True)
    return tmp_path / "tree"


def test_there_is_an_example_of_each_kind() -> None:
    kinds = ("metric", "setting", "similarity", "data_set", "head", "picture", "command")
    assert set(EXAMPLES) == {f"add_a_{kind}" for kind in kinds}
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(f"(docs/project/{example}.md)" in contributing for example in EXAMPLES)


# For a similarity every loop of the engine is compiled anew. The other two are like examples that always run.
ONLY_IN_TEST_ALL = {"add_a_similarity", "add_a_head", "add_a_data_set"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in ONLY_IN_TEST_ALL)) for name in EXAMPLES]
)
def test_an_example_leaves_the_tests_green(name: str, copy: Path) -> None:
    tests = follow(EXAMPLES[name], copy)
    run(copy, "ruff", "check", ".")
    run(copy, "ruff", "format", "--check", ".")
    run(copy, "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive", *HOUSE, *tests)
