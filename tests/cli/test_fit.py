"""`fewshot fit` and `fewshot test`: the configurations train, keep a run, and are tested from its checkpoint."""

import io
import json
import os
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import Logger

from fewshot_callbacks.cli.fit import command
from fewshot_callbacks.cli.main import main
from fewshot_callbacks.cli.run_files import TrainingRecord
from tests.cli.command_options import CONFIGS, QUIET, TINY, TINY_BALANCED, write_images
from tests.messages import missing_facts, refused


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory of one's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


WORDS = ["--config", str(CONFIGS / "protonet_dr_glyphs.yaml"), *TINY, *QUIET, "--data.train.episodes_per_batch=2"]
BEST = "runs/{}/checkpoints/best.ckpt"


@pytest.fixture(scope="module")
def first_run(few_glyphs, tmp_path_factory):
    """The folder in which `fit` was run, and what it has printed."""
    folder = tmp_path_factory.mktemp("fit")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as screen:
        patch.chdir(folder)
        assert main(["fit", *WORDS]) == 0
    return folder, screen.getvalue()


def test_a_fit_says_where_the_run_is_kept_and_how_to_test_it(first_run):
    folder, screen = first_run
    advice = "fewshot test --config runs/version_0/config.yaml --ckpt_path"
    assert missing_facts(screen, ("runs/version_0", advice)) == []
    assert (folder / BEST.format("version_0")).exists()
    run = folder / "runs" / "version_0"
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["head"] == "dr"
    assert TrainingRecord.of(run) == TrainingRecord(1, 1, 1, ended=True, head="dr")  # a step of two episodes


@pytest.mark.parametrize("name", ["validate", "test"])
def test_a_checkpoint_is_tested_without_a_run_of_its_own(name, first_run, monkeypatch):
    monkeypatch.chdir(first_run[0])
    runs = sorted(Path("runs").iterdir())
    assert main([name, *WORDS, "--ckpt_path", BEST.format("version_0")]) == 0
    assert sorted(Path("runs").iterdir()) == runs


def test_the_same_seed_gives_the_same_run(first_run, monkeypatch, capsys):
    folder, screen = first_run
    monkeypatch.chdir(folder)
    assert main(["fit", *WORDS]) == 0
    again = capsys.readouterr().out
    scores = [
        said.split(f"{BEST.format(version)} (val/mAP 0.")[1][:4]
        for said, version in ((screen, "version_0"), (again, "version_1"))
    ]
    assert scores[0] == scores[1]


def test_a_run_without_a_logger_has_no_folder_and_leaves_a_configuration_as_it_is(few_glyphs, elsewhere):
    (elsewhere / "config.yaml").write_text("# of the user")
    words = ["--config", str(CONFIGS / "protonet_dr_glyphs.yaml"), *TINY, *QUIET, "--trainer.logger=false"]
    assert main(["fit", *words]) == 0
    assert main(["test", *words, "--ckpt_path", "none"]) == 0
    assert (elsewhere / "config.yaml").read_text() == "# of the user"


def print_of_config(config, capsys):
    """All settings, as `--print_config` shows them."""
    with refused(SystemExit, 0):
        main(["fit", *config, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_accepted_and_says_why(path, capsys):
    assert "fewshot_callbacks" in print_of_config(["--config", str(path)], capsys)["data"]["class_path"]
    assert path.read_text().startswith("#")


@pytest.mark.slow
def test_fit_on_two_processes_says_once_where_it_is_kept(tmp_path):
    """Lightning starts the second process by the words of the first."""
    write_images(tmp_path / "images")
    command_line = [str(Path(sys.executable).with_name("fewshot")), "fit", "--config", "protonet_dr_folder"]
    words = ["dataset.root=images", "dataset.transform.image_size=16", "train.shots=1", "train.queries=2"]
    words += ["evaluation.shots=1", "evaluation.queries=2", "num_workers=0"]
    processes = ["--trainer.strategy=ddp", "--trainer.devices=2"]
    command_line += [*(f"--data.{word}" for word in words), *TINY, *QUIET, *processes]
    environment = os.environ | {"PL_TORCH_DISTRIBUTED_BACKEND": "gloo", "OMP_NUM_THREADS": "1"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 200}
    result = subprocess.run(command_line, check=False, **options)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("fewshot test --config runs/version_0/config.yaml") == 1
    assert TrainingRecord.of(tmp_path / "runs" / "version_0") == TrainingRecord(1, 1, 1, ended=True, head="dr")


def test_fit_on_average_precision_then_test_from_the_checkpoint(few_glyphs, elsewhere, capsys):
    words = ["--config", str(CONFIGS / "soft_ap_glyphs.yaml"), *TINY_BALANCED, *QUIET]
    words += ["--data.train.classes_per_batch=5"]
    settings = ["micro_batch=13", "ap_every_n_steps=1", "optimizer=SGD", "scheduler=StepLR", "scheduler.step_size=1"]
    settings += ["optimizer.lr=0.01"]
    cli = command(["fit", *words, *(f"--model.init_args.{setting}" for setting in settings)])
    assert type(cli.model).__name__ == "EmbeddingModule"
    assert {"train/soft_AP", "train/batch_AP", "val/mAP", "train/J"} <= set(cli.trainer.callback_metrics)
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.001  # SGD's 0.01 after a step of the scheduler
    (best,) = elsewhere.glob("runs/**/best.ckpt")
    (saved,) = elsewhere.glob("runs/**/config.yaml")
    capsys.readouterr()
    for configuration in ([str(saved)], words[1:]):
        assert main(["test", "--config", *configuration, "--ckpt_path", str(best)]) == 0
        said = capsys.readouterr()
        assert "test/mAP" in said.out
        assert ("micro_batch = 13 (configured: None)" in said.err) == (configuration != [str(saved)])
    assert [folder.name for folder in (elsewhere / "runs").iterdir()] == ["version_0"]


def test_a_configuration_of_the_package_is_found_by_its_name_anywhere(elsewhere, capsys):
    """A file of that name comes first; a name that there is not names the nearest; a wheel holds them, too."""
    (elsewhere / "protonet_dr_glyphs").write_text(
        "model: {head: softmax}\n"
        "data: {class_path: fewshot_callbacks.FewShotDataModule, init_args: {dataset: fewshot_callbacks.Glyphs}}"
    )
    heads = {"protonet_softmax_folder": "softmax", "distance_ratio_conv4": "dr", "protonet_dr_glyphs": "softmax"}
    for name, head in heads.items():
        assert print_of_config([f"--config={name}"], capsys)["model"]["head"] == head
    hints = {"protonet_dr_foldr": ["protonet_dr_folder"], "xyz": [path.stem for path in CONFIGS.glob("*.yaml")]}
    for name, hint in hints.items():
        assert main(["fit", "--config", name]) == 1
        assert missing_facts(capsys.readouterr().err, (name, "file", "configuration", *hint)) == []
    project = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"configs": "fewshot_callbacks/configs"}


# ------------------------------------------------------------------------------------- what lies in the folder of a run

GLYPHS = ["--config", str(CONFIGS / "protonet_dr_glyphs.yaml"), *TINY, *QUIET]


class OfOneFolder(Logger):
    """Somebody else's logger, whose runs share a folder, such as the working directory."""

    name, version, save_dir = "mine", 3, "."

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, *args, **kwargs): ...


def logging_to(kind, **settings):
    """The words of a logger whose folder is `logs/run` whenever it runs."""
    return f"--trainer.logger={json.dumps({'class_path': kind, 'init_args': settings})}"


TENSORBOARD = logging_to("TensorBoardLogger", save_dir="logs", name="run", version="")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".yaml", ".json")}


@pytest.mark.parametrize("kind", ["TensorBoardLogger", "CSVLogger"])
def test_a_second_training_in_one_folder_is_refused_before_it_begins(kind, few_glyphs, elsewhere, capsys):
    words = [*GLYPHS, logging_to(kind, save_dir="logs", name="run", version="")]
    assert main(["fit", *words]) == 0
    before = contents(elsewhere / "logs/run")
    assert {"config.yaml", "training.json", "hparams.yaml"} <= set(before)
    capsys.readouterr()
    assert main(["fit", *words, "--model.head=softmax"]) == 1
    said = capsys.readouterr().err
    facts = ("logs/run", "config.yaml", "training.json", "folder", "name", "version", "logger", "--ckpt_path")
    assert missing_facts(said, facts) == []
    assert {name: contents(elsewhere / "logs/run")[name] for name in ("config.yaml", "training.json")} == {
        name: before[name] for name in ("config.yaml", "training.json")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.yaml", "training.json"])
@pytest.mark.parametrize("continued", [False, True])
def test_files_of_the_user_in_the_folder_of_a_run_are_left_as_they_are(name, continued, few_glyphs, elsewhere, capsys):
    words = [*GLYPHS, TENSORBOARD]
    (elsewhere / "logs/run").mkdir(parents=True)
    if continued:
        assert main(["fit", *words]) == 0
        words += ["--ckpt_path", "logs/run/checkpoints/last.ckpt", "--trainer.max_epochs=2"]
    (elsewhere / "logs/run" / name).write_text("mine: 1")
    assert main(["fit", *words]) == 1
    other = {"config.yaml": "training.json", "training.json": "config.yaml"}[name]
    assert missing_facts(capsys.readouterr().err, ("logs/run", name, other, "--ckpt_path")) == [other]
    assert (elsewhere / "logs/run" / name).read_text() == "mine: 1"


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_a_training_that_goes_on_in_its_folder_keeps_the_earlier_configuration(few_glyphs, elsewhere, capsys):
    """The same settings again change nothing, as when a queue starts a job anew; the record is that of the whole."""
    folder = elsewhere / "logs/run"
    words = [*GLYPHS, TENSORBOARD]
    assert main(["fit", *words]) == 0
    first = (folder / "config.yaml").read_bytes()
    checkpoint = ["--ckpt_path", "logs/run/checkpoints/last.ckpt"]
    assert main(["fit", *words, *checkpoint, "--trainer.max_epochs=2"]) == 0
    assert (folder / "config-1.yaml").read_bytes() == first
    assert missing_facts(capsys.readouterr().out, ("configuration", "config-1.yaml")) == []
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
    assert TrainingRecord.of(folder).epochs == 2
    assert main(["fit", *words, *checkpoint, "--trainer.max_epochs=2"]) == 0
    assert sorted(path.name for path in folder.glob("config*")) == ["config-1.yaml", "config.yaml"]


@pytest.mark.slow
def test_a_test_that_is_logged_to_the_folder_of_a_training_leaves_its_configuration(few_glyphs, elsewhere):
    words = [*GLYPHS, TENSORBOARD]
    assert main(["fit", *words]) == 0
    before = contents(elsewhere / "logs/run")["config.yaml"]
    assert main(["test", *words, "--ckpt_path", "logs/run/checkpoints/best.ckpt", "--trainer.max_epochs=7"]) == 0
    assert contents(elsewhere / "logs/run")["config.yaml"] == before


@pytest.mark.slow
def test_a_logger_of_one_folder_for_all_runs_has_a_folder_for_each(few_glyphs, elsewhere, capsys):
    (elsewhere / "config.yaml").write_text("mine: 1")
    (elsewhere / "training.json").write_text("[]")
    assert main(["fit", *GLYPHS, logging_to("tests.cli.test_fit.OfOneFolder")]) == 0
    assert (elsewhere / "config.yaml").read_text() == "mine: 1"
    assert (elsewhere / "training.json").read_text() == "[]"
    assert TrainingRecord.of(elsewhere / "mine/3") == TrainingRecord(1, 2, 1, ended=True, head="dr")
    said = capsys.readouterr().out
    assert missing_facts(said, ("./mine/3", "--config mine/3/config.yaml")) == []


def test_a_checkpoint_of_another_network_is_named(first_run, monkeypatch, capsys):
    monkeypatch.chdir(first_run[0])
    words = ["test", *WORDS, "--model.head=softmax", "--model.backbone=resnet18"]
    state = torch.load(BEST.format("version_0"), weights_only=True)
    state["state_dict"] = {f"other.{name}": values for name, values in state["state_dict"].items()}
    torch.save(state, "other.ckpt")
    assert main([*words, "--ckpt_path", "other.ckpt"]) == 1
    assert missing_facts(capsys.readouterr().err, ("other.ckpt", "network", "--config")) == []
