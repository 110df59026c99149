"""The pages whose code blocks are run, what the blocks may use, and how a line of a shell is checked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
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
PAGES = sorted(
    [
        ROOT / "README.md",
        *(path for path in ROOT.glob("*.md") if path.name in ("CONTRIBUTING.md", "SECURITY.md")),
        ROOT / "benchmarks" / "README.md",
        ROOT / "examples" / "icons" / "README.md",
        ROOT / "fewshot_callbacks" / "engine" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
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
    """Return what a block may use without making it: the public names, some of Lightning and torch, and small data."""
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


def commands(block: str) -> Iterator[list[str]]:
    """Split a block of a shell into commands, without comments."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def check_command(words: list[str]) -> None:
    """Check that a command would run; run it where that takes seconds.

    Raises:
        AssertionError: with the command and what is wrong with it.
    """
    program, *rest = words
    if program.endswith("fewshot"):
        check_fewshot(rest)
    elif program == "torchrun":  # one process of it: what it runs is the same command
        check_fewshot(rest[rest.index("fewshot_callbacks") + 1 :])
    elif program.endswith(("python", "python3")) and rest[0] != "-m":
        script = ROOT / rest[0]
        assert script.is_file(), f"{shlex.join(words)}: there is no {rest[0]}"
        source = script.read_text(encoding="utf-8")
        for flag in re.findall(r"--[\w-]+", shlex.join(rest)):
            assert f'"{flag}"' in source, f"{shlex.join(words)}: {rest[0]} has no {flag}"
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M), shlex.join(words)
    else:
        known = ("pip", "git", "cd", "python", "python3", "pytest", "pre-commit", "ruff", "mypy", "typos")
        assert program.rpartition("/")[2] in known or (ROOT / program).is_file(), (
            f"{shlex.join(words)}: nobody checks {program}; teach `check_command` to"
        )


def check_fewshot(words: list[str]) -> None:
    """Run `fewshot evaluate`, `report` and `plan`; of the others, which train, check the arguments."""
    arguments = [str(ROOT / word) if word.startswith("configs/") else word for word in words]
    if words[0] in ("fit", "validate", "test"):
        if "--ckpt_path" in words:  # of a run that only its reader has
            return
        arguments.append("--print_config")
    elif words[0] in ("demo", "compare"):
        with redirect_stdout(StringIO()) as output:
            run([*words[:1], "--help"])
        for flag in re.findall(r"--[\w-]+", shlex.join(words)):
            assert flag in output.getvalue(), f"fewshot {shlex.join(words)}: there is no {flag}"
        return
    assert run(arguments) == 0, f"fewshot {shlex.join(words)}"


def run(arguments: list[str]) -> int:
    """Return the exit status of a command line."""
    try:
        return main(arguments)
    except SystemExit as stop:  # of --help and --print_config
        return int(stop.code or 0)
