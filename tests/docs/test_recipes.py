"""Every recipe of the documentation runs from beginning to end, and has a page."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs import pages

RECIPES = sorted((pages.ROOT / "examples" / "recipes").glob("*.py"))


OF_SEVERAL_PROCESSES = "ddp"


@pytest.mark.filterwarnings("ignore")  # of Lightning, about tiny data; that a recipe works is what counts here
@pytest.mark.parametrize(
    "recipe", [recipe for recipe in RECIPES if recipe.stem != OF_SEVERAL_PROCESSES], ids=lambda recipe: recipe.stem
)
def test_runs(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_users_run_it: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(recipe)])
    runpy.run_path(str(recipe), run_name="__main__")


def test_several_processes_print_the_same(tmp_path: Path) -> None:
    [recipe] = [recipe for recipe in RECIPES if recipe.stem == OF_SEVERAL_PROCESSES]
    environment = os.environ | {"PYTHONPATH": str(pages.ROOT), "OMP_NUM_THREADS": "1"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, str(recipe)], **options, check=True)
    printed = dict(re.findall(r"rank (\d): mAP (0\.\d+)", done.stdout))
    assert set(printed) == {"0", "1"}
    assert len(set(printed.values())) == 1


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_has_a_page(recipe: Path) -> None:
    page = pages.ROOT / "docs" / "recipes" / f"{recipe.stem}.md"
    assert f'--8<-- "examples/recipes/{recipe.name}"' in page.read_text(encoding="utf-8")
