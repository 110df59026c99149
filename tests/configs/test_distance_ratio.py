"""The files for table 2: complete, accepted by the command line, and what the name says is what the file says."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from torchvision import transforms

from fewshot_callbacks.cli.fit import command
from fewshot_callbacks.cli.main import main
from tests.data.trees import write_tree

FOLDER = Path(__file__).parents[2] / "configs" / "distance_ratio"
CELLS = list(itertools.product(("cub", "miniimagenet"), ("conv4", "resnet18"), (1, 5), ("softmax", "dr")))
SMALL = [
    *("--data.num_workers=0", "--data.evaluation.queries=1"),
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"),
]
CLASS = {"cub": "CUB200", "miniimagenet": "MiniImageNet"}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "_".join(map(str, cell)))
def test_the_command_line_takes_it_for_what_its_name_says(cell, capsys):
    data, backbone, shots, head = cell
    path = FOLDER / f"{data}_{backbone}_{shots}shot_{head}.yaml"
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(path), "--print_config"])
    assert stop.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    model, settings, trainer = config["model"], config["data"], config["trainer"]
    assert (model["head"], model["learning_rate"]) == (head, 1e-3)
    if backbone == "conv4":
        assert model["backbone"]["class_path"] == "fewshot_callbacks.protonet.Conv4"
        assert model["backbone"]["init_args"] == {"in_channels": 3, "width": 64, "init": "he_fan_out"}
    else:
        assert model["backbone"] == "resnet18"
    assert settings["class_path"] == "fewshot_callbacks.FewShotDataModule"
    assert settings["init_args"]["dataset"]["class_path"] == f"fewshot_callbacks.data.{CLASS[data]}"
    values = settings["init_args"]["dataset"]["init_args"]["transform"]
    assert values["image_size"] == {"conv4": 84, "resnet18": 224}[backbone]
    square = math.floor(1.15 * values["image_size"])
    assert values["resize"] == [square, square]  # whatever the shape of the image
    assert [values[key] for key in ("min_area", "flip", "jitter")] == [0.08, 0.5, 0.4]
    values = settings["init_args"]
    assert values["augment"]
    assert values["train"] == {"ways": 5, "shots": shots, "queries": 16, "episodes": 100, "episodes_per_batch": 1}
    assert values["evaluation"] == {"ways": 5, "shots": shots, "queries": 15, "episodes": 600, "seed": 0}
    assert values["val_episodes"] == 100
    assert trainer["max_epochs"] == {1: 600, 5: 400}[shots]
    checkpoint, last = [c["init_args"] for c in trainer["callbacks"] if c["class_path"].endswith("ModelCheckpoint")]
    assert (checkpoint["monitor"], checkpoint["mode"], checkpoint["filename"]) == ("val/accuracy", "max", "best")
    assert (last["monitor"], last["filename"]) == (None, "last")  # keeps the newest
    monitors = [c["class_path"].rpartition(".")[2].removesuffix("Monitor") for c in trainer["callbacks"]]
    assert monitors == ["DiscriminantRatio", "Retrieval", "TrainingDynamics", "ModelCheckpoint", "ModelCheckpoint"]
    assert len(list(FOLDER.glob("*.yaml"))) == len(CELLS)
    assert f"--config configs/distance_ratio/{path.name} --data.dataset.root ROOT" in path.read_text()


@pytest.mark.parametrize("backbone", ["conv4", "resnet18"])
def test_the_model_and_the_images_are_those_of_the_authors_program(backbone, tmp_path, monkeypatch):
    """What the file says reaches the network and the pixels; torchvision's default crop is the program's."""
    monkeypatch.chdir(tmp_path)
    path = FOLDER / f"cub_{backbone}_5shot_softmax.yaml"
    words = ["validate", "--config", str(path), "--data.dataset.root", str(write_tree(tmp_path / "birds"))]
    words += [*SMALL, "--data.evaluation.shots=1", "--trainer.limit_val_batches=0", "--ckpt_path=none"]
    cli = command(words)
    model, data = cli.model, cli.datamodule
    deviations = [
        (module.weight.std().item(), math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels)))
        for module in model.backbone.modules()
        if isinstance(module, nn.Conv2d)
    ]
    assert len(deviations) == {"conv4": 4, "resnet18": 20}[backbone]
    assert all(actual == pytest.approx(expected, rel=0.1) for actual, expected in deviations)
    if backbone == "conv4":
        assert deviations[1][0] == pytest.approx(0.059, abs=0.001)
    assert (model.validation.episodes, model.evaluation.episodes) == (100, 600)
    size, image = data.dataset.transform.image_size, Image.effect_noise((300, 250), 50).convert("RGB")
    crop = transforms.RandomResizedCrop(size)
    torch.manual_seed(0)
    expected = transforms.functional.to_tensor(crop(image))
    torch.manual_seed(0)
    plain = replace(data.dataset.transform, flip=0.0, jitter=0.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    assert torch.equal(plain([image], True)[0], expected)


def test_fit_then_test_of_a_cell_on_a_tiny_tree(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--config", str(FOLDER / "cub_conv4_1shot_dr.yaml"), "--data.dataset.root"]
    words += [str(write_tree(tmp_path / "birds")), *SMALL, "--data.dataset.transform.image_size=16"]
    words += [f"--data.{each}" for each in ("train.queries=1", "evaluation.episodes=5", "train.episodes=1")]
    words += ["--trainer.max_epochs=1", "--trainer.enable_model_summary=false"]
    assert main(["fit", *words]) == 0
    (best,) = tmp_path.glob("runs/**/best.ckpt")
    assert main(["test", *words, "--ckpt_path", str(best)]) == 0
    assert "test/accuracy_ci95" in capsys.readouterr().out
