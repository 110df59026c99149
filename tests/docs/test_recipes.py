"""Every recipe of the documentation runs from beginning to end, and has a page."""

import contextlib
import os
import re
import runpy
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import yaml

from fewshot_callbacks import Shards, evaluate_retrieval
from fewshot_callbacks.functional import RetrievalReport
from tests.docs import pages, process_jobs
from tests.gloo_processes import answers
from tests.integration_packages import integration, skipped_without_integrations

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
    if recipe.stem in WITH_WORKERS:  # has a test of its own
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(recipe)])
    with skipped_without_integrations():
        runpy.run_path(str(recipe), run_name="__main__")


def test_the_gate_fails_with_a_line_for_each_requirement_that_is_not_met(tmp_path):
    script = pages.ROOT / "examples" / "recipes" / "gate.sh"
    page = (pages.ROOT / "docs" / "recipes" / "gate.md").read_text(encoding="utf-8")
    assert '--8<-- "examples/recipes/gate.sh"' in page

    def gate(checkpoint):
        """The exit status, and the lines on requirements."""
        words = ["sh", str(script), checkpoint, "reference.report.npz"]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return (
            ended.returncode,
            [line for line in ended.stderr.splitlines() if line.startswith("fewshot evaluate: ")],
            ended.stderr,
        )

    status, lines, said = gate("model.ckpt")
    assert (status, lines) == (0, []), said
    reference = (tmp_path / "reference.report.npz").read_bytes()
    checkpoint = torch.load(tmp_path / "model.ckpt", weights_only=False)
    weight = checkpoint["state_dict"]["encoder.weight"]
    weight += 0.25 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    torch.save(checkpoint, tmp_path / "worse.ckpt")
    status, [line], said = gate("worse.ckpt")
    assert status == 3, said
    [shown] = [printed for printed in page.splitlines() if printed.startswith("fewshot evaluate: ")]
    number = re.compile(r"-?[0-9.]+$")
    assert number.sub("", line.rstrip(".")) == number.sub("", shown.rstrip("."))
    assert (tmp_path / "reference.report.npz").read_bytes() == reference
    assert (
        RetrievalReport.load(tmp_path / "new.report.npz").mAP
        < RetrievalReport.load(tmp_path / "reference.report.npz").mAP
    )
    weight.fill_(0)
    torch.save(checkpoint, tmp_path / "collapsed.ckpt")
    status, lines, said = gate("collapsed.ckpt")
    assert (status, len(lines)) == (3, 3), said


def test_the_jobs_of_the_gate_run_the_script_and_keep_its_report():
    page = (pages.ROOT / "docs" / "recipes" / "gate.md").read_text(encoding="utf-8")
    script = (pages.ROOT / "examples" / "recipes" / "gate.sh").read_text(encoding="utf-8")
    github, gitlab = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    step, upload = github
    for command in (step["run"], *gitlab["gate"]["script"]):
        shell, path, *arguments = command.split()
        assert (shell, Path(path).name, len(arguments)) == ("sh", "gate.sh", 2)
    assert [upload["with"]["path"]] == gitlab["gate"]["artifacts"]["paths"]
    assert f"--save {upload['with']['path']} " in script


ALONE = {
    *("backbones", "binary_codes", "compare_models", "deployment_threshold", "open_set", "plain_pytorch", "trials"),
    *("gate", "lightning_cli", "optuna_search", "faiss_index", "usearch_index"),
}
"""Recipes without a validation; without a Trainer; or whose Trainers are made by others, as those of `classifier` are."""
IN_TWO = {
    *process_jobs.WITH_A_TRAINER,
    *("ddp", "fabric", "hugging_face_accelerate", "hugging_face_trainer"),
}
WITH_WORKERS = {"ray_train"}
"""Recipes that start two processes themselves."""
on_processes = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def test_every_recipe_is_tried_in_two_processes_or_said_to_need_one():
    assert {recipe.stem for recipe in RECIPES} == IN_TWO | ALONE | WITH_WORKERS
    assert len(RECIPES) == len(IN_TWO) + len(ALONE) + len(WITH_WORKERS)


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


def processes_with(variable: str, value: str) -> list[int]:
    """The processes of this machine that have an environment variable with this value."""
    entry = f"{variable}={value}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # processes that have ended, and those of other users
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


@pytest.mark.exhaustive  # Ray takes a minute to start two workers
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_workers_of_ray_give_the_report_of_one_process_and_leave_none(tmp_path):
    integration("ray")
    script = pages.ROOT / "examples" / "recipes" / "ray_train.py"
    with tempfile.TemporaryDirectory(
        prefix="ray", dir="/tmp"
    ) as folder:  # the path of a socket has at most 107 characters
        environment = {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment["PYTHONPATH"] = os.pathsep.join([str(pages.ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(script)]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert ended.returncode == 0, ended.stderr
        stop = time.monotonic() + 30
        while (left := processes_with("RAY_TMPDIR", folder)) and time.monotonic() < stop:
            time.sleep(0.5)
        assert left == []
    alone = evaluate_retrieval(Shards(f"{tmp_path}/part-*.npz", labels="labels"), metrics=("recall@1", "mAP"))
    report = RetrievalReport.load(tmp_path / "ray.report.npz")
    assert (report.values, report.per_query["mAP"].tolist()) == (alone.values, alone.per_query["mAP"].tolist())
    assert f"1,000 queries, recall@1 {alone.values['recall@1']:.6f}, mAP {alone.mAP:.6f}\n" == ended.stdout
