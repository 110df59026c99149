"""The files of a run of `fewshot fit`: configuration, training record, measured steps and checkpoints."""

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
    """The progress of a run, written after each epoch and at the end.

    Args:
        ended: Whether the run completed all epochs, or was stopped by a callback.
        head: Head of a ProtoNet, the default name of a run in comparisons.
    """

    epochs: int
    steps: int
    max_epochs: int | None
    ended: bool
    head: str | None

    def save(self, folder: Location) -> None:
        """Write the record to the folder of the run."""
        write_file(join_location(folder, RECORD), (json.dumps(asdict(self)) + "\n").encode())

    @classmethod
    def of(cls, folder: Location) -> TrainingRecord | None:
        """Return the record of a run; None if it is missing or damaged."""
        try:
            return cls._read(read_file(join_location(folder, RECORD)))
        # A TypeError means that another version has written other fields.
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
    """Return the best checkpoint of a run; None without checkpoints.

    It is the newest file that begins with `best`, since a second run in the folder writes `best-v1.ckpt`, or else with
    `last`, or else the newest of all.
    """
    if isinstance(run, str):
        time_of: dict[Location, Any] = times_at_address(posixpath.join(run, "**/*.ckpt"))
    else:
        time_of = {file: file.stat().st_mtime for file in checkpoints_below(run)}
    for beginning in ("best", "last", ""):
        candidates = [file for file in time_of if PurePath(file).name.startswith(beginning)]
        if candidates:
            return max(candidates, key=lambda file: time_of[file])
    return None


def checkpoints_below(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder and its subfolders, sorted.

    Broken links and system files, such as `._best.ckpt` on a Mac, are skipped.
    """
    return [
        file
        for file in sorted(folder.rglob("*.ckpt"))
        if file.exists() and not any(map(is_system_name, file.relative_to(folder).parts))
    ]
