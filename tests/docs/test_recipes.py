"""Every recipe of the documentation runs from beginning to end, and has a page."""

import re
import runpy

import pytest
import torch

from tests.docs import pages, process_jobs
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
        printed = [found["printed"] for found in in_processes("ddp", gloo_folder, 2)]
        assert {rank for said in printed for rank in re.findall(r"rank (\d): mAP 0\.\d+\n", said)} == {"0", "1"}
        assert len({said.rpartition("mAP ")[2] for said in printed}) == 1
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(recipe)])
    with skipped_without_integrations():
        runpy.run_path(str(recipe), run_name="__main__")


ALONE = {
    *("backbones", "binary_codes", "compare_models", "deployment_threshold", "open_set", "plain_pytorch", "trials"),
    *("lightning_cli", "optuna_search", "faiss_index", "usearch_index"),
}
"""Recipes without a validation; without a Trainer; or whose Trainers are made by others, as those of `classifier` are."""
IN_TWO = {
    *process_jobs.WITH_A_TRAINER,
    *("ddp", "fabric", "hugging_face_accelerate", "hugging_face_trainer"),
}
on_processes = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def test_every_recipe_is_tried_in_two_processes_or_said_to_need_one():
    assert {recipe.stem for recipe in RECIPES} == IN_TWO | ALONE
    assert not IN_TWO & ALONE


def in_processes(recipe, gloo_folder, count):
    """What a recipe gives in each of some processes."""
    found = [each[recipe] for each in answers(gloo_folder, process_jobs.__name__, count)]
    with skipped_without_integrations():
        for each in found:
            if isinstance(each, ModuleNotFoundError):
                raise each
    return found


@on_processes
@pytest.mark.parametrize("recipe", process_jobs.WITH_A_TRAINER)
def test_a_validation_of_an_uneven_set_in_two_processes_is_that_of_one(recipe, gloo_folder):
    (alone,) = in_processes(recipe, gloo_folder, 1)
    assert any(value > 0 for value in alone.values())
    for found in in_processes(recipe, gloo_folder, 2):
        assert found == pytest.approx(alone, rel=1e-5, abs=1e-6, nan_ok=True)


@on_processes
@pytest.mark.parametrize("recipe", ["fabric", "hugging_face_trainer"])
@pytest.mark.parametrize("count", [1, 2])
def test_several_processes_give_what_the_functions_give_of_the_whole_set(recipe, count, gloo_folder):
    for found in in_processes(recipe, gloo_folder, count):
        if recipe == "fabric":
            assert found.pop("repeated") == count - 1
        assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-6)


@on_processes
def test_accelerate_prints_in_two_processes_what_it_prints_in_one(gloo_folder):
    (alone,) = in_processes("hugging_face_accelerate", gloo_folder, 1)
    assert "233 queries, recall@1 0." in alone["printed"]
    assert in_processes("hugging_face_accelerate", gloo_folder, 2) == [alone, {"printed": ""}]
