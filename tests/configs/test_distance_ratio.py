"""The commands of table 2: the command line accepts them, and their settings match the cells of the page."""

import itertools
import math
import re
import shlex
from dataclasses import replace

import pytest
import torch
import yaml
from PIL import Image
from torch import nn
from torchvision import transforms

from fewshot_callbacks.cli.fit import command
from fewshot_callbacks.cli.main import main
from tests.data.trees import write_tree
from tests.docs.pages import commands
from tests.messages import refused
from tests.scripts import ROOT

PAGE = (ROOT / "docs" / "research" / "distance_ratio_photographs.md").read_text(encoding="utf-8")
CHANGES = dict(re.findall(r"^\| ([\w-]+) \| (?:add )?`(--.+?)`", PAGE, re.M))
"""cells -> options that change the first command of the page, which is that of CUB, Conv4, 1-shot and DR"""
CLASS = {"CUB": "fewshot_callbacks.data.CUB200", "mini-ImageNet": "fewshot_callbacks.data.MiniImageNet"}
SIZE = {"Conv4": 84, "ResNet18": 224}
EPOCHS = {1: 600, 5: 400}
CELLS = list(itertools.product(CLASS, SIZE, EPOCHS, ("softmax", "DR")))
CONV4 = {"in_channels": 3, "width": 64, "init": "he_fan_out"}


def command_of(data, backbone, shots, head):
    """Return the first command of the page, with the changes for a cell of table 2."""
    words = ["fit", CHANGES["ResNet18"] if backbone == "ResNet18" else "--config distance_ratio_conv4"]
    if data == "mini-ImageNet":
        words.append(CHANGES["mini-ImageNet"])
    words.append("--data.dataset.root ROOT")
    if shots == 5:
        words.append(CHANGES["5-shot"])
    if head == "softmax":
        words.append(CHANGES["softmax"])
    return " ".join(words)


def settings_of(words, capsys):
    """Return what a command sets, as `--print_config` shows it."""
    with refused(SystemExit, 0):
        main([*shlex.split(words), "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_the_page_shows_the_first_command_and_the_one_with_all_changes():
    assert set(CHANGES) == {"mini-ImageNet", "ResNet18", "5-shot", "softmax"}
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
    shown = [" ".join(words) for block in blocks for words in commands(block)]
    assert f"fewshot {command_of('CUB', 'Conv4', 1, 'DR')}" in shown
    assert f"fewshot {command_of('mini-ImageNet', 'ResNet18', 5, 'softmax')}" in shown


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_a_command_sets_what_its_cell_says_and_nothing_else(cell, capsys):
    """Options in addition to the first command of the page."""
    data, backbone, shots, head = cell
    expected = settings_of("fit --config distance_ratio_conv4 --data.dataset.root ROOT", capsys)
    expected["model"]["head"] = head.lower()
    expected["trainer"]["max_epochs"] = EPOCHS[shots]
    if backbone == "ResNet18":
        expected["model"]["backbone"] = "resnet18"
    values = expected["data"]["init_args"]
    values["dataset"]["class_path"] = CLASS[data]
    square = [math.floor(1.15 * SIZE[backbone])] * 2  # whatever the shape of the image
    values["dataset"]["init_args"]["transform"] |= {"image_size": SIZE[backbone], "resize": square}
    values["train"]["shots"] = values["evaluation"]["shots"] = shots
    assert settings_of(command_of(*cell), capsys) == expected


@pytest.mark.parametrize("backbone", SIZE)
def test_the_command_line_takes_it_for_the_setting_of_the_paper(backbone, capsys):
    config = settings_of(command_of("mini-ImageNet", backbone, 5, "DR"), capsys)
    model, values, trainer = config["model"], config["data"]["init_args"], config["trainer"]
    assert (model["head"], model["learning_rate"]) == ("dr", 1e-3)
    if backbone == "ResNet18":
        assert model["backbone"] == "resnet18"
    else:
        assert model["backbone"]["init_args"] == CONV4
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
    words = [
        "validate",
        "--config",
        f"distance_ratio_{backbone.lower()}",
        "--model.head=softmax",
        "--data.dataset.root",
        str(write_tree(tmp_path / "birds")),
    ]
    words += ["--data.num_workers=0", "--data.evaluation.queries=1", "--data.evaluation.shots=1", "--ckpt_path=none"]
    words += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.limit_val_batches=0"]
    cli = command(words)
    model, data = cli.model, cli.datamodule
    deviations = [
        (module.weight.std().item(), math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels)))
        for module in model.backbone.modules()
        if isinstance(module, nn.Conv2d)
    ]
    assert len(deviations) == {"Conv4": 4, "ResNet18": 20}[backbone]
    assert all(actual == pytest.approx(expected, rel=0.1) for actual, expected in deviations)
    assert (model.validation.episodes, model.evaluation.episodes) == (100, 600)
    size, image = data.dataset.transform.image_size, Image.effect_noise((300, 250), 50).convert("RGB")
    crop = transforms.RandomResizedCrop(size)
    torch.manual_seed(0)
    expected = transforms.functional.to_tensor(crop(image))
    torch.manual_seed(0)
    plain = replace(data.dataset.transform, flip=0.0, jitter=0.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    assert torch.equal(plain([image], True)[0], expected)
