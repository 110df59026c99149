"""How far a run of `fewshot fit` was trained, and whether that is as far as it was meant to be."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewshot_callbacks.cli._configuration import read_configuration


@dataclass(frozen=True)
class TrainingLength:
    """How far a run was trained, by its last checkpoint."""

    epochs: int
    """epochs that had begun"""
    steps: int
    """optimiser steps"""
    unfinished: str | None
    """where it stopped, such as `epoch 2 of 10`; None if it ended as configured, or if that cannot be known"""


def training_length(run: Path) -> TrainingLength | None:
    """Read how far a run was trained; None where its files do not tell.

    They do where a `ModelCheckpoint` without `monitor` keeps the newest weights: one with a monitor, `save_last` or not,
    writes no file after the best epoch.
    """
    configuration = run / "config.yaml"
    if not configuration.is_file():
        return None
    trainer = read_configuration(configuration).get("trainer") or {}
    checkpoints = _settings(trainer, "ModelCheckpoint") or [{}]  # Lightning adds one
    newest = [one for one in checkpoints if one.get("monitor") is None]
    found = [length for file in (run / "checkpoints").glob("*.ckpt") if (length := _length_of(file)) is not None]
    if not newest or not found:
        return None
    steps, epochs = max(found)
    interval = min(_epochs_between(one, trainer) for one in newest)
    return TrainingLength(epochs, steps, _unfinished(epochs, steps, trainer, interval))


def notes_on_lengths(names: Sequence[str], lengths: Sequence[TrainingLength | None]) -> list[str]:
    """Say which of two runs stopped early, and whether they were trained for different numbers of epochs or steps."""
    notes = [
        f"{name} stopped at {length.unfinished}, by its last checkpoint: its numbers are those of an unfinished training."
        for name, length in zip(names, lengths, strict=True)
        if length is not None and length.unfinished
    ]
    first, second = lengths
    if first is not None and second is not None and (first.epochs, first.steps) != (second.epochs, second.steps):
        notes.append(
            f"{names[0]} was trained for {first.epochs:,} epochs ({first.steps:,} steps), {names[1]} for "
            f"{second.epochs:,} ({second.steps:,}): a difference between the two may come from that alone."
        )
    return notes


def _length_of(file: Path) -> tuple[int, int] | None:
    """Read the steps and epochs of a checkpoint; None where it has none, or is none."""
    import torch  # noqa: PLC0415 - as in every command

    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        epochs = content["loops"]["fit_loop"]["epoch_progress"]["current"]["started"]
        return int(content["global_step"]), int(epochs)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, KeyError, TypeError, ValueError):
        return None


def _settings(trainer: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the settings of each callback of this class."""
    callbacks = trainer.get("callbacks") or []
    found = callbacks if isinstance(callbacks, list) else [callbacks]
    found = [one for one in found if isinstance(one, Mapping)]
    return [one.get("init_args") or {} for one in found if str(one.get("class_path")).endswith(name)]


def _epochs_between(checkpoint: Mapping[str, Any], trainer: Mapping[str, Any]) -> float:
    """Return the most epochs between two files of a checkpoint; infinity where that is unknown."""
    in_other_units = checkpoint.get("every_n_train_steps") or checkpoint.get("train_time_interval")
    validation = trainer.get("check_val_every_n_epoch", 1)
    if in_other_units or not validation:
        return math.inf
    return float(max(validation, checkpoint.get("every_n_epochs") or 1))


def _unfinished(epochs: int, steps: int, trainer: Mapping[str, Any], interval: float) -> str | None:
    """Name where a training stopped, if at least one more file was to follow after the newest."""
    limits = []
    if (most := trainer.get("max_epochs") or -1) > 0:
        limits.append((most - epochs, f"epoch {epochs:,} of {most:,}"))
    if steps and (most := trainer.get("max_steps") or -1) > 0:
        limits.append(((most - steps) * epochs / steps, f"step {steps:,} of {most:,}"))
    left, where = min(limits, default=(0, None))
    return where if left >= interval and not _settings(trainer, "EarlyStopping") else None
