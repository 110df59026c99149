"""`fewshot compare`: two runs of `fewshot fit` side by side, on the test set and in how their steps moved the embeddings."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fewshot_callbacks._terminal import as_text
from fewshot_callbacks.cli._configuration import read_configuration
from fewshot_callbacks.cli._options import OneLineErrors
from fewshot_callbacks.cli.training_length import TrainingLength, notes_on_lengths, training_length
from fewshot_callbacks.functional.dynamics import DynamicsComparison, DynamicsHistory, compare_dynamics, without_nan
from fewshot_callbacks.functional.episodes import EpisodeAccuracy
from fewshot_callbacks.functional.retrieval import RetrievalReport, compare_reports
from fewshot_callbacks.functional.statistics import Difference

DYNAMICS, CONFIGURATION = "training_dynamics.json", "config.yaml"
DIFFERENCES = ("mAP", "recall@1", "f1", "grouped_recall@1")


@dataclass(frozen=True)
class Tested:
    """What the best checkpoint of a run gives on the test set."""

    checkpoint: Path
    accuracy: EpisodeAccuracy | None
    report: RetrievalReport | None
    j: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        accuracy, report = self.accuracy, self.report
        return {
            "checkpoint": str(self.checkpoint),
            "accuracy": None if accuracy is None else accuracy.mean,
            "accuracy_ci95": None if accuracy is None else accuracy.ci95,
            "episodes_hash": None if accuracy is None else accuracy.episodes_hash,
            "J": self.j,
            "retrieval": None if report is None else report.to_dict(),
        }


def parser() -> ArgumentParser:
    """Make the options of `fewshot compare`."""
    options = OneLineErrors(
        prog="fewshot compare",
        description=(
            "Test the best checkpoints of two runs of 'fewshot fit' on the same episodes, and compare how their "
            "optimiser steps moved the embeddings (TrainingDynamicsMonitor), with the tests of the distance-ratio paper."
        ),
    )
    options.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help=f"folder of a run, or its {DYNAMICS}: two of them"
    )
    options.add_argument(
        "--names",
        type=str,
        nargs=2,
        default=None,
        metavar="NAME",
        help="names of the two runs in the tables; by default those of their heads",
    )
    options.add_argument("--test", type=bool, default=True, help="test both checkpoints; false compares only the steps")
    options.add_argument("--json", action="store_true", help="print the comparison as JSON")
    return options


def run(arguments: Sequence[str]) -> None:
    """Compare and print."""
    options = parser().parse_args(list(arguments))
    if len(options.runs) != 2:
        raise ValueError(
            f"two runs are needed; got {len(options.runs)}. Name two folders, such as runs/version_0 runs/version_1."
        )
    names: tuple[str, str] = tuple(options.names or names_of(options.runs))
    histories = [history_of(folder) for folder in options.runs]
    testable = [folder.is_dir() and (folder / CONFIGURATION).is_file() for folder in options.runs]
    if not (options.test and all(testable)) and None in histories:
        why = f"no {CONFIGURATION} to test it by" if options.test else "--test is false"
        lacking = options.runs[testable.index(False) if options.test else histories.index(None)]
        raise ValueError(
            f"{lacking} holds no {DYNAMICS}, and {why}. Give the folder of a run of 'fewshot "
            f"fit', such as runs/version_0; TrainingDynamicsMonitor writes {DYNAMICS} once it has measured a step."
        )
    lengths = [training_length(run if run.is_dir() else run.parent) for run in options.runs]
    notes = notes_on_lengths(names, lengths)
    dynamics = None
    if None not in histories:
        dynamics = compare_dynamics(histories[0], histories[1], names=names)  # type: ignore[arg-type]
    tests = [tested(folder) for folder in options.runs] if options.test and all(testable) else []  # takes longest
    if options.json:
        runs = _runs_as_dicts(names, options.runs, lengths, tests)
        print(json.dumps(without_nan({"runs": runs, "notes": notes} | as_dict(tests, dynamics)), indent=2))
        return
    console = Console()
    for sentence in notes:
        console.print(as_text(sentence), soft_wrap=True)
    if tests:
        console.print(test_table(names, tests))
    else:
        console.print("Not tested: " + ("as requested." if not options.test else f"a run has no {CONFIGURATION}."))
    if dynamics is None:
        console.print(
            as_text(f"No steps to compare: {options.runs[histories.index(None)]} holds no {DYNAMICS}."), soft_wrap=True
        )
    else:
        console.print(dynamics.table())


def names_of(runs: Sequence[Path]) -> list[str]:
    """Name two runs by their heads where these differ, or else by their folders."""
    heads = [_head(folder / CONFIGURATION) for folder in runs]
    if None not in heads and heads[0] != heads[1]:
        return [str(head) for head in heads]
    folders = [folder.name if folder.suffix != ".json" else folder.parent.name for folder in runs]
    return folders if folders[0] != folders[1] else ["A", "B"]


def _head(configuration: Path) -> str | None:
    if not configuration.is_file():
        return None
    head = (read_configuration(configuration).get("model") or {}).get("head")
    return head if isinstance(head, str) else None


def history_of(run: Path) -> DynamicsHistory | None:
    """Read the measured steps of a run; None where there are none.

    Raises:
        FileNotFoundError: There is no such folder or file.
        ValueError: The file is something else.
    """
    if not run.exists():
        raise FileNotFoundError(
            f"There is no {run}. Give the folder of a run of 'fewshot fit', such as runs/version_0."
        )
    file = run / DYNAMICS if run.is_dir() else run
    return DynamicsHistory.load(file) if file.is_file() else None


def tested(run: Path) -> Tested:
    """Test the best checkpoint of a run, as its configuration says.

    Raises:
        FileNotFoundError: It has none.
    """
    from fewshot_callbacks.callbacks import RetrievalMonitor  # noqa: PLC0415 - Lightning, which tables of steps do not need
    from fewshot_callbacks.cli.demo import quiet_lightning  # noqa: PLC0415
    from fewshot_callbacks.cli.fit import command  # noqa: PLC0415

    checkpoint = best_checkpoint(run)
    with quiet_lightning():
        warnings.filterwarnings("ignore", "The dirpath has changed")  # of the checkpoint that is tested
        configuration = ["--config", str(run / CONFIGURATION), "--ckpt_path", str(checkpoint)]
        quiet = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--verbose", "false"]
        cli = command(["test", *configuration, "--trainer.devices", "1", *quiet], keep_configuration=False)
    monitors = [monitor for monitor in cli.trainer.callbacks if isinstance(monitor, RetrievalMonitor)]  # type: ignore[attr-defined]
    report = monitors[0].report if monitors else None
    j = cli.trainer.callback_metrics.get("test/J")
    return Tested(
        checkpoint=checkpoint,
        accuracy=cli.model.evaluation_results.get("test"),
        report=report if isinstance(report, RetrievalReport) else None,
        j=None if j is None else float(j),
    )


def best_checkpoint(run: Path) -> Path:
    """Find `checkpoints/best.ckpt`; of several (`best-v1.ckpt`) the newest, without any `last.ckpt`.

    Raises:
        FileNotFoundError: There is none.
    """
    folder = run / "checkpoints"
    for pattern in ("best*.ckpt", "last*.ckpt", "*.ckpt"):
        found = sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime)
        if found:
            return found[-1]
    raise FileNotFoundError(
        f"{run} holds no checkpoint in {folder}, so it cannot be tested. --test false compares only the steps."
    )


def differences_of(tests: Sequence[Tested]) -> dict[str, Difference]:
    """Compute the differences of the retrieval metrics; empty where the test sets differ."""
    first, second = (test.report for test in tests)
    if first is None or second is None:
        return {}
    try:
        differences = compare_reports(second, first)  # what the second gains over the first
    except ValueError:  # other queries
        return {}
    return {name: differences[name] for name in DIFFERENCES if name in differences}


def test_table(names: Sequence[str], tests: Sequence[Tested]) -> Table:
    """Make the table of both runs on the test set, with the difference where it is beyond chance."""
    first, second = tests
    same = first.accuracy is not None and second.accuracy is not None
    same = same and first.accuracy.episodes_hash == second.accuracy.episodes_hash  # type: ignore[union-attr]
    table = Table(
        title="best checkpoints on the test set",
        box=SIMPLE_HEAD,
        pad_edge=False,
        caption=(
            f"± and in brackets: 95 % intervals. Accuracy: {_protocol(first.accuracy)}"
            + (", the same for both." if same else f"; of the second: {_protocol(second.accuracy)}.")
        ),
        title_style="bold",
        collapse_padding=True,
    )
    for name in ("", *names, f"{names[1]} - {names[0]}"):
        table.add_column(as_text(name), justify="right" if name else "left", overflow="fold")
    table.add_column("beyond\nchance", overflow="fold")
    if first.accuracy is not None and second.accuracy is not None:
        cells = [f"{100 * a.mean:.2f} ±{100 * a.ci95:.2f}" for a in (first.accuracy, second.accuracy)]
        table.add_row("accuracy %", *cells, *_difference_cells(second.accuracy.minus(first.accuracy), 100, 2))
    differences = differences_of(tests)
    for metric in DIFFERENCES:
        values = [None if test.report is None else test.report.metrics().get(metric) for test in tests]
        if None in values:
            continue
        table.add_row(metric, *(f"{value:.4f}" for value in values), *_difference_cells(differences.get(metric), 1, 4))
    if first.j is not None and second.j is not None:
        table.add_row("J", f"{first.j:.3f}", f"{second.j:.3f}", f"{second.j - first.j:+.3f}", "")
    return table


def _difference_cells(difference: Difference | None, scale: float, digits: int) -> tuple[str, str]:
    """Format a difference with its interval, and whether that excludes zero; a pooled value has no interval."""
    if difference is None:
        return "", ""
    value, low, high = (scale * number for number in (difference.value, *difference.interval))
    if math.isnan(low):
        return f"{value:+.{digits}f}", ""
    ends = f"({low:+.{digits}f} to {high:+.{digits}f})"
    return f"{value:+.{digits}f} {ends}", "yes" if difference.is_beyond_chance else "no"


def _protocol(accuracy: EpisodeAccuracy | None) -> str:
    if accuracy is None:
        return "none, as the warning above says"
    return f"{accuracy.ways}-way {accuracy.shots}-shot, {accuracy.n} episodes, list {accuracy.episodes_hash}"


def _runs_as_dicts(
    names: Sequence[str], runs: Sequence[Path], lengths: Sequence[TrainingLength | None], tests: Sequence[Tested]
) -> list[dict[str, Any]]:
    """Both runs, for JSON: how far each was trained, null where that is unknown, and its tests if there are any."""
    return [
        {
            "name": name,
            "folder": str(folder),
            "epochs": None if length is None else length.epochs,
            "steps": None if length is None else length.steps,
        }
        | ({"test": tests[i].to_dict()} if tests else {})
        for i, (name, folder, length) in enumerate(zip(names, runs, lengths, strict=True))
    ]


def as_dict(tests: Sequence[Tested], dynamics: DynamicsComparison | None) -> dict[str, Any]:
    """What was compared, for JSON; a number that is none is null."""
    found = differences_of(tests) if tests else {}
    if tests and tests[0].accuracy is not None and tests[1].accuracy is not None:
        found = {"accuracy": tests[1].accuracy.minus(tests[0].accuracy), **found}
    differences = {
        name: {
            "value": one.value,
            "low": one.interval.low,
            "high": one.interval.high,
            "beyond_chance": one.is_beyond_chance,
        }
        for name, one in found.items()
    }
    return {
        "differences": differences,  # of the second run minus the first
        "dynamics": None if dynamics is None else dynamics.to_dict(),
    }
