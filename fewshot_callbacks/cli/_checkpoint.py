"""Finds, reads and checks the checkpoint for `fewshot fit`, `validate` and `test`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fewshot_callbacks.cli.compare import best_checkpoint

# `--ckpt_path none` evaluates the initial weights.
UNTRAINED = "none"
WORDS_OF_LIGHTNING = ("best", "last", "hpc", "registry")


@dataclass(frozen=True)
class Checkpoint:
    """A file of `fewshot fit`."""

    path: Path
    weights: dict[str, Tensor]

    def check_weights(self, model: nn.Module) -> None:
        """See that the weights are those of this network.

        Raises:
            ValueError: They are of another one; names the first tensor that differs.
        """
        here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        there = {name: tuple(tensor.shape) for name, tensor in self.weights.items()}
        different = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if different:
            name = different[0]
            raise ValueError(
                f"{self.path} holds the weights of another network: {name} has shape {there.get(name, 'none')} in the "
                f"file and {here.get(name, 'none')} in the network ({len(different)} of {len(here | there)} tensors "
                f"differ). Give the "
                "config.yaml of its run with --config."
            )


def chosen_checkpoint(command: str, word: Any, configurations: Sequence[Path]) -> Checkpoint | None:
    """Find the file that `--ckpt_path` names; None for a new training, initial weights, and words of Lightning.

    Args:
        command: `fit`, `validate` or `test`.
        word: What was given; None if nothing was.
        configurations: The files of `--config`.

    Raises:
        ValueError: `validate` or `test` without a checkpoint, or there is no such file, or it is something else.
    """
    if word is None and command != "fit":
        raise ValueError(
            f"there are no weights to {command}. Give --ckpt_path {_suggested(configurations)}, or --ckpt_path {UNTRAINED} "
            "for the untrained network."
        )
    if word is None or (str(word) == UNTRAINED and command != "fit"):
        return None
    if str(word).partition(":")[0] in WORDS_OF_LIGHTNING or "://" in str(word):
        return None
    return read_checkpoint(Path(word))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        ValueError: There is no such file, or it is something else.
    """
    if not path.is_file():
        folder = path if path.is_dir() else path.parent
        others = sorted(file.name for file in folder.glob("*.ckpt"))
        there = (
            f"{folder} holds {', '.join(others)}" if others else f"Give a file, such as {_suggested([folder / '_'])}"
        )
        raise ValueError(f"There is no checkpoint {path}. {there}.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return Checkpoint(path, dict(content["state_dict"]))
    except PermissionError:
        raise
    except Exception as error:  # torch.load promises no class of error; of a file cut short it may be an OSError
        raise ValueError(
            f"{path} is not a checkpoint of 'fewshot fit', or it is damaged ({type(error).__name__}). Give another "
            f"one, such "
            "as best.ckpt or last.ckpt of the same run."
        ) from error


def _suggested(configurations: Sequence[Path]) -> str:
    """Suggest the checkpoint beside a configuration, or the usual name of one."""
    for file in configurations:
        try:
            return str(best_checkpoint(file.parent))
        except FileNotFoundError:
            continue
    return "runs/version_0/checkpoints/best.ckpt"
