"""`fewshot compare`: two runs of `fewshot fit` side by side, on the test set and in how their steps moved the embeddings."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fewshot_callbacks._file_names import is_made_by_system
from fewshot_callbacks._terminal import as_text
from fewshot_callbacks.cli.evaluate import comparison_table, differences_as_dict
from fewshot_callbacks.functional.dynamics import DynamicsHistory, compare_dynamics, without_nan
from fewshot_callbacks.functional.episodes import EpisodeAccuracy
from fewshot_callbacks.functional.retrieval import RetrievalReport, compare_reports
from fewshot_callbacks.functional.statistics import UNKNOWN, Difference

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
            return cls._read((folder / RECORD).read_bytes())
        # A TypeError where another version has written other fields.
        except (OSError, ValueError, TypeError):
            return None

    @classmethod
    def is_one(cls, content: bytes) -> bool:
        """Whether the content of a file is that of a record."""
        try:
            return bool(cls._read(content))
        except (ValueError, TypeError):
            return False

    @classmethod
    def _read(cls, content: bytes) -> TrainingRecord:
        return cls(**json.loads(content))


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
    found = checkpoints_below(run)
    for beginning in ("best", "last", ""):
        candidates = [file for file in found if file.name.startswith(beginning)]
        if candidates:
            return max(candidates, key=lambda file: file.stat().st_mtime)
    return None


def checkpoints_below(folder: Path) -> list[Path]:
    """List the checkpoints in a folder and the folders in it, sorted.

    Left out are files that systems make, such as the `._best.ckpt` of a Mac, and links that lead nowhere.
    """
    return [
        file
        for file in sorted(folder.rglob("*.ckpt"))
        if file.exists() and not any(map(is_made_by_system, file.relative_to(folder).parts))
    ]


DYNAMICS, CONFIGURATION = "training_dynamics.json", "config.yaml"
OTHER_CLASSES = "accuracy, other classes"
SHOWN = ("mAP", "recall@1", "f1", "grouped_recall@1")


@dataclass(frozen=True)
class Tested:
    """What a network gives on the test set."""

    checkpoint: str
    accuracy: EpisodeAccuracy | None
    report: RetrievalReport | None
    j: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        accuracy, report = self.accuracy, self.report
        return {
            "checkpoint": self.checkpoint,
            "accuracy": None if accuracy is None else accuracy.mean,
            "accuracy_ci95": None if accuracy is None else accuracy.ci95,
            "accuracy_ci95_open": None if accuracy is None else accuracy.open_interval.half_width,
            "episodes": None if accuracy is None else accuracy.n,
            "episodes_hash": None if accuracy is None else accuracy.episodes_hash,
            "J": self.j,
            "retrieval": None if report is None else report.to_dict(),
        }


def run(options: Namespace) -> None:
    """Compare and print."""
    runs: tuple[Path, Path] = options.run, options.other_run
    for each in runs:
        if not each.exists():
            raise FileNotFoundError(
                f"There is no {each}. Give the folder of a run of 'fewshot fit', such as runs/version_0."
            )
    files = [each / DYNAMICS if each.is_dir() else each for each in runs]
    untested = "" if options.test else "as requested"
    for each in runs:
        if not untested and not (each / CONFIGURATION).is_file():
            untested = f"{each} holds no {CONFIGURATION}"
    missing = next((file for file in files if not file.is_file()), None)
    if untested and missing is not None:
        raise ValueError(
            f"{missing.parent} holds no {missing.name}, and nothing can be tested ({untested}). Give the folder of a run of "
            f"'fewshot fit', such as runs/version_0; TrainingDynamicsMonitor writes {DYNAMICS} once it has measured a step."
        )
    records = [TrainingRecord.of(file.parent) for file in files]
    names = (*options.names,) if options.names else names_of([file.parent for file in files], records)
    notes = notes_on_lengths(names, records)
    histories = [DynamicsHistory.load(file) for file in files] if missing is None else []
    dynamics = compare_dynamics(*histories, names=names) if histories else None
    tests = [] if untested else [tested(each) for each in runs]  # takes longest
    differences = differences_of(*tests) if tests else {}
    if options.json:
        described: list[dict[str, Any]] = [
            {"name": name, "folder": str(each), "epochs": record and record.epochs, "steps": record and record.steps}
            for name, each, record in zip(names, runs, records, strict=True)
        ]
        for description, test in zip(described, tests, strict=False):  # none where nothing was tested
            description["test"] = test.to_dict()
        printed = {
            "runs": described,
            "notes": notes,
            "differences": differences_as_dict(differences),  # of the second run minus the first
            "dynamics": None if dynamics is None else dynamics.to_dict(),
        }
        print(json.dumps(without_nan(printed), indent=2))
        return
    console = Console()
    for sentence in notes:
        console.print(as_text(sentence), soft_wrap=True)
    if untested:
        console.print(as_text(f"Not tested: {untested}."), soft_wrap=True)
    else:
        caption = f"difference: {names[1]} minus {names[0]}. Intervals, and ±: 95 %. {_episodes(tests)}".rstrip()
        title = "best checkpoints on the test set"
        console.print(comparison_table(differences, (names[1], names[0]), title, caption, earlier_first=True))
    if dynamics is not None:
        console.print(dynamics.table())
    else:
        console.print(as_text(f"No steps to compare: there is no {missing}."), soft_wrap=True)


def names_of(folders: Sequence[Path], records: Sequence[TrainingRecord | None]) -> tuple[str, str]:
    """Name two runs by their heads where these differ, or else by their folders."""
    heads = [None if record is None else record.head for record in records]
    if heads[0] and heads[1] and heads[0] != heads[1]:
        return heads[0], heads[1]
    first, second = (folder.name for folder in folders)
    return (first, second) if first != second else ("A", "B")


def tested(run: Path) -> Tested:
    """Test the best checkpoint of a run, as its configuration says.

    Raises:
        FileNotFoundError: It has none.
    """
    checkpoint = best_checkpoint(run)
    if checkpoint is None:
        raise FileNotFoundError(
            f"{run} holds no checkpoint, so it cannot be tested. --test false compares only the steps."
        )
    return result_of("--config", str(run / CONFIGURATION), "--ckpt_path", str(checkpoint))


def result_of(*words: str, as_prototypes: bool = False) -> Tested:
    """Run `fewshot test` with these words, and keep what it finds.

    Args:
        words: Options of `fewshot test`.
        as_prototypes: Test the backbone of a module without episodes, too: by the angles to the prototypes.
    """
    # Lightning, which tables of steps do not need
    from fewshot_callbacks.cli.fit import command, quiet_lightning  # noqa: PLC0415
    from fewshot_callbacks.protonet import ProtoNet, SoftmaxHead  # noqa: PLC0415

    with quiet_lightning():
        # On one device, since several would count the images twice by which Lightning makes their shares equal.
        cli = command(["test", *words, "--trainer.devices=1", "--trainer.enable_progress_bar=false", "--verbose=false"])
        trainer: Any = cli.trainer
        model = cli.model
        if as_prototypes:
            model = ProtoNet(model.backbone, SoftmaxHead("unit_euclidean"), evaluation=cli.datamodule.evaluation)
            trainer.test(model, cli.datamodule, verbose=False)
    reports = [getattr(callback, "report", None) for callback in trainer.callbacks]
    j = trainer.callback_metrics.get("test/J")
    return Tested(
        checkpoint=words[words.index("--ckpt_path") + 1],
        accuracy=getattr(model, "evaluation_results", {}).get("test"),
        report=next((report for report in reports if isinstance(report, RetrievalReport)), None),
        j=None if j is None else float(j),
    )


def differences_of(first: Tested, second: Tested) -> dict[str, Difference]:
    """Compute what the second gains over the first; nothing where one lacks a metric, or the test sets differ."""
    found: dict[str, Difference] = {}
    if first.accuracy is not None and second.accuracy is not None:
        found["accuracy"] = second.accuracy.minus(first.accuracy)
        found[OTHER_CLASSES] = second.accuracy.minus(first.accuracy, over_classes=True)
    if first.report is not None and second.report is not None:
        try:
            of_reports = compare_reports(second.report, first.report)
        except ValueError:  # other queries
            of_reports = {}
        found |= {name: of_reports[name] for name in SHOWN if name in of_reports}
    if first.j is not None and second.j is not None:
        # J has no interval, so that its difference has none either.
        found["J"] = Difference(second.j, first.j, UNKNOWN)
    return found


def _episodes(tests: Sequence[Tested]) -> str:
    """Describe the episodes of both runs, and how far their accuracies are known; nothing where neither has one."""
    known = [test.accuracy for test in tests if test.accuracy]
    if not known:
        return ""
    one, other = (
        f"{each.ways}-way {each.shots}-shot, {each.n} episodes, list {each.episodes_hash}" if each else "none"
        for each in (test.accuracy for test in tests)
    )
    spans = " and ".join(half_width(each.ci95, "a single episode") for each in known)
    opened = " and ".join(half_width(each.open_interval.half_width, "too few episodes or classes") for each in known)
    same = "the same for both" if one == other else f"and {other}"
    return (
        f"Accuracy: {spans} over other episodes of these classes, {opened} over another set of classes; {one}, {same}."
    )


def half_width(value: float, why_not: str) -> str:
    """Write half of an interval after ±; where it is NaN, that it is unknown, and why.

    Examples:
        >>> half_width(0.0125, "a single episode"), half_width(float("nan"), "a single episode")
        ('±0.0125', 'unknown (a single episode)')
    """
    return f"unknown ({why_not})" if math.isnan(value) else f"±{value:.4f}"
