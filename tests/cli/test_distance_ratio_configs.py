"""The files for table 2: complete, accepted by the command line, and what the name says is what the file says."""

import itertools
import re
from pathlib import Path

import pytest
import yaml

from fewshot_callbacks.cli.main import main
from tests.data.test_cub import write_tree

FOLDER = Path(__file__).parents[2] / "configs" / "distance_ratio"
CELLS = list(itertools.product(("cub", "miniimagenet"), ("conv4", "resnet18"), (1, 5), ("softmax", "dr")))
CLASS = {"cub": "CUBDataModule", "miniimagenet": "MiniImageNetDataModule"}


def test_there_is_one_file_for_each_cell():
    expected = {f"{data}_{backbone}_{shots}shot_{head}" for data, backbone, shots, head in CELLS}
    assert {path.stem for path in FOLDER.glob("*.yaml")} == expected
    assert len(expected) == 16


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "_".join(map(str, cell)))
def test_the_command_line_takes_it_for_what_its_name_says(cell, capsys):
    data, backbone, shots, head = cell
    path = FOLDER / f"{data}_{backbone}_{shots}shot_{head}.yaml"
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(path), "--print_config"])
    assert stop.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    model, settings, trainer = config["model"], config["data"], config["trainer"]
    assert (model["backbone"], model["head"], model["learning_rate"]) == (backbone, head, 1e-3)
    assert settings["class_path"] == f"fewshot_callbacks.data.{CLASS[data]}"
    values = settings["init_args"]
    assert values["image_size"] == {"conv4": 84, "resnet18": 224}[backbone]
    assert [values[key] for key in ("ways", "shots", "queries", "augment")] == [5, shots, 15, True]
    assert [values[f"test_{key}"] for key in ("ways", "shots", "queries", "episodes")] == [5, shots, 15, 600]
    assert values["episodes"] * trainer["max_epochs"] == {1: 60_000, 5: 50_000}[shots]
    assert values["episodes"] == 100
    (checkpoint,) = [c["init_args"] for c in trainer["callbacks"] if c["class_path"].endswith("ModelCheckpoint")]
    assert (checkpoint["monitor"], checkpoint["mode"], checkpoint["filename"]) == ("val/accuracy", "max", "best")
    monitors = [c["class_path"].rpartition(".")[2] for c in trainer["callbacks"]]
    assert monitors == ["DiscriminantRatioMonitor", "RetrievalMonitor", "TrainingDynamicsMonitor", "ModelCheckpoint"]
    assert f"--config configs/distance_ratio/{path.name} --data.root ROOT" in path.read_text()


def test_the_figures_of_the_paper_are_one_table_of_sixteen():
    table = re.findall(r"^\| (Conv4|ResNet18) \| (softmax|DR) \|(.*)\|$", (FOLDER / "README.md").read_text(), re.M)
    figures = [figure.strip() for _, _, row in table for figure in row.split("|")]
    assert len(figures) == 16
    assert all(re.fullmatch(r"\d\d\.\d\d ± 0\.\d\d", figure) for figure in figures)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # Lightning: of the checkpoint that is tested
def test_fit_then_test_of_a_cell_on_a_tiny_tree(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(FOLDER / "cub_conv4_1shot_dr.yaml"), "--data.root", str(write_tree(tmp_path / "birds"))]
    words += ["--data.image_size=16", "--data.queries=1", "--data.test_queries=1", "--data.test_episodes=5"]
    words += ["--data.episodes=1", "--data.num_workers=0", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    words += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    assert main(["fit", *words]) == 0
    (best,) = tmp_path.glob("runs/**/best.ckpt")
    assert main(["test", *words, "--ckpt_path", str(best)]) == 0
    assert "test/accuracy_ci95" in capsys.readouterr().out
