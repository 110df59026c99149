"""What lies in the folder of a run of `fewshot fit`: its best checkpoint, and a record of how far it was trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RECORD = "training.json"


@dataclass(frozen=True)
class TrainingRecord:
    """How far a run was trained; written whenever an epoch ends, and at the end."""

    # epochs that have ended
    epochs: int
    # optimiser steps until then
    steps: int
    # epochs that were asked for
    max_epochs: int | None
    # whether the training came to its end: all epochs, or a callback that stopped it
    ended: bool
    # head of a ProtoNet, by which two runs are told apart
    head: str | None

    def save(self, folder: Path) -> None:
        """Write it into the folder of the run."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def of(cls, folder: Path) -> TrainingRecord | None:
        """Read the record of a run; None where there is none, or it is damaged."""
        try:
            return cls(**json.loads((folder / RECORD).read_text(encoding="utf-8")))
        # A TypeError where another version has written other fields.
        except (OSError, ValueError, TypeError):
            return None


def notes_on_lengths(names: Sequence[str], records: Sequence[TrainingRecord | None]) -> list[str]:
    """Say which of two runs did not end, and whether they were trained for different numbers of epochs or steps."""
    notes = []
    for name, record in zip(names, records, strict=True):
        if record is not None and not record.ended:
            # Lightning's words for no limit.
            most = "" if record.max_epochs in (None, -1) else f" of {record.max_epochs:,}"
            notes.append(
                f"{name} stopped after epoch {record.epochs:,}{most}: its numbers are those of an unfinished training."
            )
    first, second = records
    if first is not None and second is not None and (first.epochs, first.steps) != (second.epochs, second.steps):
        notes.append(
            f"{names[0]} was trained for {first.epochs:,} epochs ({first.steps:,} steps), {names[1]} for "
            f"{second.epochs:,} ({second.steps:,}): a difference between the two may come from that alone."
        )
    return notes


def best_checkpoint(run: Path) -> Path | None:
    """Find `best.ckpt` in the folder of a run; of several (`best-v1.ckpt`) the newest; else `last.ckpt`, else any."""
    for pattern in ("best*.ckpt", "last*.ckpt", "*.ckpt"):
        found = sorted(run.rglob(pattern), key=lambda file: file.stat().st_mtime)
        if found:
            return found[-1]
    return None
