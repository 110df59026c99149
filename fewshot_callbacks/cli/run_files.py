"""The files of a run of `fewshot fit`: its configuration, how far it was trained, the steps it measured, its checkpoints."""

from __future__ import annotations

import json
import posixpath
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from fewshot_callbacks.files.addresses import Location, join_location, read_file, times_at_address, write_file
from fewshot_callbacks.files.names import is_system_name

CONFIGURATION = "config.yaml"
DYNAMICS = "training_dynamics.json"
RECORD = "training.json"


@dataclass(frozen=True)
class TrainingRecord:
    """How far a run was trained; written whenever an epoch ends, and at the end.

    Args:
        epochs: Number of epochs that have ended.
        steps: Number of optimiser steps in these epochs.
        max_epochs: Number of epochs that were requested.
        ended: Whether the training came to its end: all epochs, or a callback that stopped it.
        head: Head of a ProtoNet, which distinguishes two runs.
    """

    epochs: int
    steps: int
    max_epochs: int | None
    ended: bool
    head: str | None

    def save(self, folder: Location) -> None:
        """Write the record into the folder of the run."""
        write_file(join_location(folder, RECORD), (json.dumps(asdict(self)) + "\n").encode())

    @classmethod
    def of(cls, folder: Location) -> TrainingRecord | None:
        """Return the record of a run; None if there is none, or it is damaged."""
        try:
            return cls._read(read_file(join_location(folder, RECORD)))
        # Another version may have written other fields, which is a TypeError.
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    @classmethod
    def is_one(cls, content: bytes) -> bool:
        """Return whether the content of a file is a record."""
        try:
            return bool(cls._read(content))
        except (ValueError, TypeError, RecursionError):
            return False

    @classmethod
    def _read(cls, content: bytes) -> TrainingRecord:
        return cls(**json.loads(content))


def best_checkpoint(run: Location) -> Location | None:
    """Return the checkpoint that stands for a run; None without one.

    It is the newest file whose name begins with `best`: a second training into one folder writes `best-v1.ckpt`. If there
    is no such file, it is the newest that begins with `last`, or else the newest of all.
    """
    if isinstance(run, str):
        time_of: dict[Location, Any] = times_at_address(posixpath.join(run, "**/*.ckpt"))
    else:
        time_of = {file: file.stat().st_mtime for file in checkpoints_below(run)}
    for beginning in ("best", "last", ""):  # every name begins with the empty word
        candidates = [file for file in time_of if PurePath(file).name.startswith(beginning)]
        if candidates:
            return max(candidates, key=lambda file: time_of[file])
    return None


def checkpoints_below(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder and the folders in it, sorted.

    Left out are files that systems make, such as the `._best.ckpt` of a Mac, and links that lead nowhere.
    """
    return [
        file
        for file in sorted(folder.rglob("*.ckpt"))
        if file.exists() and not any(map(is_system_name, file.relative_to(folder).parts))
    ]
