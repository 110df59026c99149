import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from fewshot_callbacks.cli.fit import command
from fewshot_callbacks.cli.main import main

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = ["--trainer.max_epochs=1", "--trainer.accelerator=cpu", "--data.episodes=2", "--data.test_episodes=5"]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # Lightning: of the checkpoint that is tested
@pytest.mark.parametrize("config", ["protonet_dr_glyphs", "protonet_softmax_glyphs"])
def test_fit_then_test_from_the_checkpoint(config, few_glyphs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(CONFIGS / f"{config}.yaml"), *TINY, *QUIET]
    assert main(["fit", *words]) == 0
    (best,) = tmp_path.glob("runs/**/best.ckpt")
    (saved,) = tmp_path.glob("runs/**/config.yaml")
    assert yaml.safe_load(saved.read_text())["model"]["head"] == config.split("_")[1]
    assert main(["validate", *words, "--ckpt_path", str(best)]) == 0
    assert main(["test", *words, "--ckpt_path", str(best)]) == 0


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
    cli = command(["fit", *config, "--data.episodes_per_batch=2", "--trainer.logger=false"])
    assert cli.model.episodes_per_batch == 2
    assert cli.trainer.global_step == 1  # two episodes


def test_fit_on_two_processes_says_once_where_it_is_kept(tmp_path):
    """Lightning starts the second process by the words of the first."""
    command_line = [str(Path(sys.executable).with_name("fewshot")), "fit"]
    config = ["--config", str(CONFIGS / "protonet_dr_glyphs.yaml"), *TINY, *QUIET]
    processes = ["--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.limit_val_batches=1"]
    result = subprocess.run(
        [*command_line, *config, *processes],
        cwd=tmp_path,
        env=os.environ | {"PL_TORCH_DISTRIBUTED_BACKEND": "gloo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("The run is kept in runs/version_0.") == 1


def test_a_wrong_setting_is_named(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(CONFIGS / "protonet_dr_glyphs.yaml"), "--model.heat=dr"])
    assert stop.value.code == 2
    assert "heat" in capsys.readouterr().err


def test_a_test_class_that_is_too_small_ends_a_fit_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split, images in {"train": 20, "val": 20, "test": 19}.items():
        for number in range(5):
            folder = tmp_path / "images" / split / f"{split}{number}"
            folder.mkdir(parents=True)
            for i in range(images):
                Image.new("RGB", (20, 20), (i, number, 0)).save(folder / f"{i}.png")
    config = ["--config", str(CONFIGS / "protonet_dr_folder.yaml"), "--data.root", "images", *QUIET]
    words = r"The test classes do not make .*needs 20 images per class; class 'test0' has 19"
    with pytest.raises(ValueError, match=words):
        main(["fit", *config, "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.logger=false"])
