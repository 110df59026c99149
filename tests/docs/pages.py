"""The pages with code blocks that are run, what the blocks may use, and how a shell line is checked."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from pyarrow import parquet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fewshot_callbacks
from fewshot_callbacks.cli.main import main

ROOT = Path(__file__).parents[2]
OF_THE_HOUSE = (
    *("CONTRIBUTING.md", "SECURITY.md", "examples/icons/README.md"),
    "AGENTS.md",
    "fewshot_callbacks/engine/README.md",
    "fewshot_callbacks/.agents/skills/fewshot-callbacks/SKILL.md",
)
PAGES = sorted(
    path
    for path in (*(ROOT / name for name in ("README.md", *OF_THE_HOUSE)), *(ROOT / "docs").rglob("*.md"))
    if path.exists() and re.search(r"^ *```(python|bash)|invisible-code", path.read_text(encoding="utf-8"), re.M)
)
CLASSES = 6


def images_and_labels() -> TensorDataset:
    """Draw 48 images of 6 classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(48) % CLASSES
    centres = torch.rand(CLASSES, 3, 32, 32, generator=generator)
    return TensorDataset((centres[labels] + 0.3 * torch.rand(48, 3, 32, 32, generator=generator)) / 1.3, labels)


class Module(LightningModule):
    """A reader's own module: a small network, whose validation step returns what it embeds."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 16))
        self.classifier = nn.Linear(16, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        embeddings = self.encoder(images)
        loss = nn.functional.cross_entropy(self.classifier(embeddings), labels)
        return {"loss": loss, "embeddings": embeddings, "labels": labels}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        images, labels = batch
        return {"embeddings": self.encoder(images), "labels": labels}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def names() -> dict[str, Any]:
    """What a block may use without making it: the public names, some of Lightning and torch, and small data."""
    data = images_and_labels()
    images, labels = data.tensors
    embeddings = images.flatten(1)[:, :64] - images.flatten(1)[:, :64].mean()
    half = len(labels) // 2
    public = {name: getattr(fewshot_callbacks, name) for name in fewshot_callbacks.__all__}
    return public | {
        "torch": torch, "np": np, "nn": nn, "Trainer": Trainer, "LightningModule": LightningModule,
        "ModelCheckpoint": ModelCheckpoint, "DataLoader": DataLoader,
        "embeddings": embeddings, "labels": labels, "images": images,
        "other_embeddings": embeddings + 0.1 * embeddings.roll(1, 0),
        "queries": embeddings[:half], "query_labels": labels[:half],
        "gallery": embeddings[half:], "gallery_labels": labels[half:],
        "train_embeddings": embeddings[:half], "test_embeddings": embeddings[half:],
        "train_set": data, "val_set": data,
        "train_loader": DataLoader(data, batch_size=16), "val_loader": DataLoader(data, batch_size=16),
        "model": Module(), "batch": (images[:16], labels[:16]),
    }  # fmt: skip


def write_files(folder: Path) -> None:
    """Write what commands name: embeddings.npz, other.npz, embeddings/*.parquet, photos/, ROOT/{train,val,test}/."""
    given = names()
    columns = {"embeddings": list(given["embeddings"].numpy()), "label": given["labels"].numpy()}
    (folder / "embeddings").mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), folder / "embeddings" / "part-0.parquet")
    for name, embeddings in (("embeddings", given["embeddings"]), ("other", given["other_embeddings"])):
        np.savez(folder / f"{name}.npz", embeddings=embeddings.numpy(), labels=given["labels"].numpy())
    pixels = (given["images"].permute(0, 2, 3, 1) * 255).byte().numpy()
    for index, (image, label) in enumerate(zip(pixels, given["labels"].tolist(), strict=True)):
        for path in (
            f"photos/{index:03}.png",
            *(f"ROOT/{part}/{part}{label}/{index:03}.png" for part in ("train", "val", "test")),
        ):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / path)


def commands(block: str) -> list[list[str]]:
    """Split a block of a shell into commands, without comments."""
    lines = (shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines())
    return [words for words in lines if words]


def indented_commands(text: str) -> list[list[str]]:
    """Return the commands of indented blocks, which stand outside of fences, as words."""
    without_fences = re.sub(r"^( *)```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    block = "\n".join(re.findall(r"^    (\S.*|  .*)$", without_fences, flags=re.MULTILINE))
    programs = r"(?:\w+=\S+ )*(?:python|fewshot|make|torchrun) "
    return commands("\n".join(re.findall(rf"^{programs}(?:.*\\\n)*.*$", block, flags=re.MULTILINE)))


def check_options(words: list[str]) -> None:
    """Check that a subcommand of `fewshot` has the options that it is given; its files need not be there."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([words[0], "--help"])
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    known = re.findall(r"--\w+", said.getvalue())
    assert known, f"fewshot {words[0]} --help"
    assert [option for option in options if option not in known] == [], f"fewshot {shlex.join(words)}"


def check_command(words: list[str], *, runs: bool = True) -> None:
    """Check that a command of this repository would run; run it where that takes seconds, unless `runs` is False."""
    words = list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), words))  # without variables
    program, *rest = words
    if program.endswith("fewshot") and not runs:
        check_options(rest)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert [word for word in rest if "=" not in word and word not in targets] == [], shlex.join(words)
    elif program.endswith("fewshot"):
        check_fewshot(rest)
    elif program == "torchrun":  # one process of it: what it runs is the same command
        check_fewshot(rest[rest.index("fewshot_callbacks") + 1 :])
    elif program.endswith(("python", "python3")) and rest[0] != "-m":
        script = ROOT / rest[0]
        assert script.is_file(), f"{shlex.join(words)}: there is no {rest[0]}"
        flags = re.findall(r"--[\w-]+", shlex.join(rest))
        assert [flag for flag in flags if f'"{flag}"' not in script.read_text(encoding="utf-8")] == [], words


def check_fewshot(words: list[str]) -> None:
    """Run `fewshot evaluate`, `report` and `plan`; of the others, which train, check the arguments."""
    arguments = [str(ROOT / word) if word.startswith("configs/") else word for word in words]
    if words[0] in ("fit", "validate", "test"):
        if "--ckpt_path" in words:  # of a run that only its reader has, and so is its configuration
            place = words.index("--ckpt_path")
            del arguments[place : place + 2]
            arguments = ["protonet_dr_glyphs" if word.startswith("runs/") else word for word in arguments]
        arguments.append("--print_config")
    elif words[0] in ("demo", "compare"):
        check_options(words)
        return
    try:
        status = main(arguments)
    except SystemExit as stop:  # of --help and --print_config
        status = stop.code or 0
    assert status == 0, f"fewshot {shlex.join(words)}"
