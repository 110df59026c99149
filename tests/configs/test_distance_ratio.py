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
CLASS = {"cub": "CUB200", "miniimagenet": "MiniImageNet"}
CELLS = list(itertools.product(CLASS, ("conv4", "resnet18"), (1, 5), ("softmax", "dr")))


SIZE, EPOCHS = {"conv4": 84, "resnet18": 224}, {1: 600, 5: 400}


@pytest.mark.parametrize(("data", "backbone", "shots", "head"), CELLS)
def test_a_file_is_the_first_one_but_for_what_its_name_says(data, backbone, shots, head):
    path = FOLDER / f"{data}_{backbone}_{shots}shot_{head}.yaml"
    expected = yaml.safe_load((FOLDER / "cub_conv4_1shot_softmax.yaml").read_text())
    expected["model"]["head"], expected["trainer"]["max_epochs"] = head, EPOCHS[shots]
    if backbone == "resnet18":
        expected["model"]["backbone"] = "resnet18"
    settings = expected["data"]["init_args"]
    settings["dataset"]["class_path"] = f"fewshot_callbacks.data.{CLASS[data]}"
    square = [math.floor(1.15 * SIZE[backbone])] * 2  # whatever the shape of the image
    settings["dataset"]["init_args"]["transform"] |= {"image_size": SIZE[backbone], "resize": square}
    settings["train"]["shots"] = settings["evaluation"]["shots"] = shots
    assert yaml.safe_load(path.read_text()) == expected
    assert f"--config configs/distance_ratio/{path.name} --data.dataset.root ROOT" in path.read_text()
    assert len(list(FOLDER.glob("*.yaml"))) == len(CELLS)


@pytest.mark.parametrize("backbone", SIZE)
def test_the_command_line_takes_it_for_the_setting_of_the_paper(backbone, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["fit", "--config", str(FOLDER / f"miniimagenet_{backbone}_5shot_dr.yaml"), "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    model, values, trainer = config["model"], config["data"]["init_args"], config["trainer"]
    assert (model["head"], model["learning_rate"]) == ("dr", 1e-3)
    conv4 = {"in_channels": 3, "width": 64, "init": "he_fan_out"}
    assert (model["backbone"] if backbone == "resnet18" else model["backbone"]["init_args"]) in ("resnet18", conv4)
    transform = values["dataset"]["init_args"]["transform"]
    assert [transform[key] for key in ("min_area", "flip", "jitter")] == [0.08, 0.5, 0.4]
    assert values["augment"]
    assert values["train"] == {"ways": 5, "shots": 5, "queries": 16, "episodes": 100, "episodes_per_batch": 1}
    assert values["evaluation"] == {"ways": 5, "shots": 5, "queries": 15, "episodes": 600, "seed": 0}
    assert (values["val_episodes"], trainer["max_epochs"]) == (100, 400)
    assert len(trainer["callbacks"]) == 5
    best, last = (each["init_args"] for each in trainer["callbacks"][-2:])
    assert (best["monitor"], best["mode"], best["filename"]) == ("val/accuracy", "max", "best")
    assert (last["monitor"], last["filename"]) == (None, "last")  # keeps the newest


@pytest.mark.parametrize("backbone", SIZE)
def test_the_model_and_the_images_are_those_of_the_authors_program(backbone, tmp_path, monkeypatch):
    """What the file says reaches the network and the pixels; torchvision's default crop is the program's."""
    monkeypatch.chdir(tmp_path)
    path = FOLDER / f"cub_{backbone}_5shot_softmax.yaml"
    words = ["validate", "--config", str(path), "--data.dataset.root", str(write_tree(tmp_path / "birds"))]
    words += ["--data.num_workers=0", "--data.evaluation.queries=1", "--data.evaluation.shots=1", "--ckpt_path=none"]
    words += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.limit_val_batches=0"]
    cli = command(words)
    model, data = cli.model, cli.datamodule
    deviations = [
        (module.weight.std().item(), math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels)))
        for module in model.backbone.modules()
        if isinstance(module, nn.Conv2d)
    ]
    assert len(deviations) == {"conv4": 4, "resnet18": 20}[backbone]
    assert all(actual == pytest.approx(expected, rel=0.1) for actual, expected in deviations)
    assert (model.validation.episodes, model.evaluation.episodes) == (100, 600)
    size, image = data.dataset.transform.image_size, Image.effect_noise((300, 250), 50).convert("RGB")
    crop = transforms.RandomResizedCrop(size)
    torch.manual_seed(0)
    expected = transforms.functional.to_tensor(crop(image))
    torch.manual_seed(0)
    plain = replace(data.dataset.transform, flip=0.0, jitter=0.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    assert torch.equal(plain([image], True)[0], expected)
