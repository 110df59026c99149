"""Every recipe of the documentation runs from beginning to end, and has a page."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.docs import pages

RECIPES = sorted((pages.ROOT / "examples" / "recipes").glob("*.py"))


@pytest.mark.filterwarnings("ignore")  # of Lightning, about tiny data; that a recipe works is what counts here
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_runs(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_users_run_it: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(recipe)])
    runpy.run_path(str(recipe), run_name="__main__")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_has_a_page(recipe: Path) -> None:
    page = pages.ROOT / "docs" / "recipes" / f"{recipe.stem}.md"
    assert f'--8<-- "examples/recipes/{recipe.name}"' in page.read_text(encoding="utf-8")
