"""`fewshot fit` and `fewshot test`: the configurations train, keep a run, and are tested from its checkpoint."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from fewshot_callbacks.cli.compare import TrainingRecord
from fewshot_callbacks.cli.fit import command
from fewshot_callbacks.cli.main import main
from tests.cli.words import CONFIGS, QUIET, TINY, TINY_BALANCED, write_images


@pytest.mark.parametrize("config", ["protonet_dr_glyphs", "protonet_softmax_glyphs"])
def test_fit_then_test_from_the_checkpoint(config, few_glyphs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(CONFIGS / f"{config}.yaml"), *TINY, *QUIET]
    assert main(["fit", *words]) == 0
    screen = capsys.readouterr().out
    assert "The run is kept in runs/version_0." in screen
    assert "checkpoints/best.ckpt (val/mAP 0." in screen
    assert "Test it: fewshot test --config runs/version_0/config.yaml --ckpt_path " in screen
    (best,) = tmp_path.glob("runs/**/best.ckpt")
    (saved,) = tmp_path.glob("runs/**/config.yaml")
    assert yaml.safe_load(saved.read_text())["model"]["head"] == config.split("_")[1]
    assert main(["validate", *words, "--ckpt_path", str(best)]) == 0
    assert main(["test", *words, "--ckpt_path", str(best)]) == 0
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["version_0"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_accepted_and_says_why(path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(path), "--print_config"])
    assert stop.value.code == 0
    assert "fewshot_callbacks" in capsys.readouterr().out
    assert path.read_text().startswith("#")


def test_several_episodes_in_a_batch_are_said_once(few_glyphs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ["--config", str(CONFIGS / "protonet_dr_glyphs.yaml"), *TINY, *QUIET]
    cli = command(["fit", *config, "--data.train.episodes_per_batch=2", "--trainer.logger=false"])
    assert cli.model.episodes_per_batch == 2
    assert cli.trainer.global_step == 1  # two episodes


def test_fit_on_two_processes_says_once_where_it_is_kept(tmp_path):
    """Lightning starts the second process by the words of the first."""
    write_images(tmp_path / "images")
    command_line = [str(Path(sys.executable).with_name("fewshot")), "fit", "--config", "protonet_dr_folder"]
    data = ["root=images", "transform.image_size=16"]
    sizes = [f"--data.{part}={n}" for part, n in {"train.shots": 1, "train.queries": 2, "evaluation.shots": 1,
                                                  "evaluation.queries": 2, "num_workers": 0}.items()]  # fmt: skip
    processes = ["--trainer.strategy=ddp", "--trainer.devices=2"]
    result = subprocess.run(
        [*command_line, *(f"--data.dataset.{word}" for word in data), *sizes, *TINY, *QUIET, *processes],
        cwd=tmp_path,
        env=os.environ | {"PL_TORCH_DISTRIBUTED_BACKEND": "gloo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("The run is kept in runs/version_0.") == 1
    assert TrainingRecord.of(tmp_path / "runs" / "version_0") == TrainingRecord(1, 1, 1, ended=True, head="dr")


def test_fit_on_average_precision_then_test_from_the_checkpoint(few_glyphs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(CONFIGS / "soft_ap_glyphs.yaml"), *TINY_BALANCED, *QUIET]
    words += ["--data.train.classes_per_batch=5"]
    cli = command(["fit", *words, "--model.init_args.micro_batch=13", "--model.init_args.ap_every_n_steps=1"])
    assert type(cli.model).__name__ == "EmbeddingModule"
    assert {"train/soft_AP", "train/batch_AP", "val/mAP", "train/J"} <= set(cli.trainer.callback_metrics)
    (best,) = tmp_path.glob("runs/**/best.ckpt")
    (saved,) = tmp_path.glob("runs/**/config.yaml")
    capsys.readouterr()
    for configuration in ([str(saved)], words[1:]):
        assert main(["test", "--config", *configuration, "--ckpt_path", str(best)]) == 0
        said = capsys.readouterr()
        assert "test/mAP" in said.out
        assert ("micro_batch = 13 (configured: None)" in said.err) == (configuration != [str(saved)])
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == ["version_0"]


def test_a_backbone_and_a_loss_by_their_class(few_glyphs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(CONFIGS / "soft_ap_glyphs.yaml"), *TINY_BALANCED, *QUIET, "--trainer.logger=false"]
    words += ["--model.init_args.loss=torch.nn.CrossEntropyLoss", "--model.init_args.scheduler=StepLR"]
    words += ["--data.train.classes_per_batch=5", "--model.init_args.scheduler.step_size=1"]
    words += ["--model.init_args.optimizer=SGD"]
    cli = command(["fit", *words, "--model.init_args.optimizer.lr=0.01"])
    assert type(cli.model.loss).__name__ == "CrossEntropyLoss"
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.001


@pytest.mark.filterwarnings("ignore:.*Grouped Recall is left out")
def test_a_folder_needs_no_episodes_for_average_precision(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", classes=3)
    words = ["fit", "--config", str(CONFIGS / "soft_ap_folder.yaml"), *TINY_BALANCED, *QUIET, "--trainer.logger=false"]
    words += ["--model.init_args.backbone=conv4", "--model.init_args.micro_batch=4"]
    words += ["--data.dataset.transform.image_size=16"]
    assert main([*words, "--data.train.classes_per_batch=3", "--data.train.items_per_class=5"]) == 1
    assert "items_per_class=5, but class 'train0' has 4 items, the smallest of 3" in capsys.readouterr().err
    assert main([*words, "--data.train.classes_per_batch=3", "--data.train.items_per_class=4"]) == 0


def test_a_configuration_of_the_package_is_found_by_its_name_anywhere(tmp_path, monkeypatch, capsys):
    """A file of that name comes first; a name that there is not names the nearest."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "protonet_dr_glyphs").write_text(
        "model: {head: softmax}\n"
        "data: {class_path: fewshot_callbacks.FewShotDataModule, init_args: {dataset: fewshot_callbacks.Glyphs}}"
    )
    for words, head in (
        (["--config", "protonet_softmax_folder"], "softmax"),
        (["--config=cub_conv4_1shot_dr"], "dr"),
        (["--config", "protonet_dr_glyphs"], "softmax"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["fit", *words, "--print_config"])
        assert stop.value.code == 0
        assert yaml.safe_load(capsys.readouterr().out)["model"]["head"] == head
    for name, hint in (
        ("protonet_dr_foldr", "Did you mean protonet_dr_folder?"),
        ("xyz", "Give a file, or one of cub_"),
    ):
        assert main(["fit", "--config", name]) == 1
        assert f"no configuration of this name. {hint}" in capsys.readouterr().err


def test_the_wheel_holds_the_configurations():
    project = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"configs": "fewshot_callbacks/configs"}
