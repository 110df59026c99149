"""Every recipe of the documentation runs from beginning to end, and has a page."""

import re
import runpy

import pytest

from tests.docs import pages
from tests.gloo_processes import answers
from tests.integration_packages import skipped_without_integrations

RECIPES = sorted((pages.ROOT / "examples" / "recipes").glob("*.py"))


@pytest.mark.filterwarnings("ignore")  # of Lightning, about tiny data; that a recipe works is what counts here
@pytest.mark.usefixtures("few_glyphs", "as_users_run_it")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_runs_and_has_a_page(recipe, tmp_path, gloo_folder, monkeypatch):
    page = (pages.ROOT / "docs" / "recipes" / f"{recipe.stem}.md").read_text(encoding="utf-8")
    assert f'--8<-- "examples/recipes/{recipe.name}"' in page
    assert f"(../../examples/recipes/{recipe.name})" in page  # in the repository, a page does not show the file itself
    if recipe.stem == "ddp":
        printed = answers(gloo_folder, "tests.docs.process_jobs", 2)
        assert {rank for said in printed for rank in re.findall(r"rank (\d): mAP 0\.\d+\n", said)} == {"0", "1"}
        assert len({said.rpartition("mAP ")[2] for said in printed}) == 1
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(recipe)])
    with skipped_without_integrations():
        runpy.run_path(str(recipe), run_name="__main__")
