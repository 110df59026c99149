"""`fewshot compare`: compares two runs of `fewshot fit` on the test set and by their optimiser steps, or saved reports."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich.console import Console

from fewshot_callbacks.cli.compare_saved import are_saved_reports, compare_saved
from fewshot_callbacks.cli.evaluate import differences_as_dict
from fewshot_callbacks.cli.options import Compare
from fewshot_callbacks.cli.run_files import CONFIGURATION, DYNAMICS, TrainingRecord, best_checkpoint
from fewshot_callbacks.cli.tables import comparison_table
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import (
    Location,
    as_location,
    folder_of,
    is_file,
    is_folder,
    join_location,
)
from fewshot_callbacks.functional.dynamics import without_nan
from fewshot_callbacks.functional.dynamics_comparison import DynamicsComparison, compare_dynamics
from fewshot_callbacks.functional.episode_accuracy import EpisodeAccuracy
from fewshot_callbacks.functional.retrieval import RetrievalReport, compare_reports
from fewshot_callbacks.functional.statistics import UNKNOWN, Difference
from fewshot_callbacks.system.terminal import as_text
from fewshot_callbacks.system.words import counted

OTHER_CLASSES = "accuracy, other classes"
SHOWN = ("mAP", "recall@1", "pair_f1", "grouped_recall@1")


def notes_on_lengths(names: Sequence[str], records: Sequence[TrainingRecord | None]) -> list[str]:
    """Return sentences about unfinished runs and different numbers of epochs or steps."""
    notes = []
    for name, record in zip(names, records, strict=True):
        if record is not None and not record.ended:
            # None and -1 mean no limit in Lightning.
            limit = "" if record.max_epochs in (None, -1) else f" of {record.max_epochs:,}"
            notes.append(
                f"{name} stopped after epoch {record.epochs:,}{limit}: its results are from an unfinished run."
            )
    first, second = records
    if first is not None and second is not None and (first.epochs, first.steps) != (second.epochs, second.steps):
        notes.append(
            f"{names[0]} was trained for {first.epochs:,} epochs ({first.steps:,} steps), {names[1]} for "
            f"{second.epochs:,} ({second.steps:,}): this alone may explain a difference."
        )
    return notes


@dataclass(frozen=True)
class NetworkResults:
    """The results of a network on the test set."""

    checkpoint: str
    accuracy: EpisodeAccuracy | None
    report: RetrievalReport | None
    j: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        names_of_accuracy = ("accuracy", "accuracy_ci95", "accuracy_ci95_open", "episodes", "episodes_hash")
        values: dict[str, Any] = {"checkpoint": self.checkpoint, **dict.fromkeys(names_of_accuracy)}
        if self.accuracy is not None:
            values["accuracy"] = self.accuracy.mean
            values["accuracy_ci95"] = self.accuracy.ci95
            values["accuracy_ci95_open"] = self.accuracy.open_interval.half_width
            values["episodes"] = self.accuracy.n
            values["episodes_hash"] = self.accuracy.episodes_hash
        values["J"] = self.j
        values["retrieval"] = None
        if self.report is not None:
            values["retrieval"] = self.report.to_dict()
        return values


def run(options: Compare) -> None:
    """Compare and print."""
    paths = [options.run, options.other_run, *options.others]
    if options.names is not None and len(options.names) != len(paths):
        raise InputError(f"--names has {len(options.names)} names for {len(paths)} runs or reports. Pass one for each.")
    if are_saved_reports(paths):
        compare_saved(paths, options)
        return
    if options.others or options.metric is not None or options.difference is not None:
        raise InputError(
            "--metric, --difference and more than two paths need saved reports, but these are runs. Pass two runs, or files "
            "that 'fewshot evaluate --save' has written."
        )
    runs = (as_location(options.run), as_location(options.other_run))
    comparison = compare_runs(runs, options.names, test=options.test)
    if options.json:
        print(json.dumps(without_nan(comparison.to_dict()), indent=2))
    else:
        comparison.show()


@dataclass(frozen=True)
class RunComparison:
    """Two runs, their results on the test set, and their steps."""

    folders: Sequence[Location]
    names: tuple[str, str]
    records: Sequence[TrainingRecord | None]
    # results on the test set; empty if nothing was tested
    tests: Sequence[NetworkResults]
    # why nothing was tested; empty if both runs were tested
    why_untested: str
    # None without measured steps of both runs
    dynamics: DynamicsComparison | None
    # the first missing file of measured steps; None if both exist
    missing_file: Location | None

    @property
    def notes(self) -> list[str]:
        """Sentences about the lengths of the runs."""
        return notes_on_lengths(self.names, self.records)

    @property
    def differences(self) -> dict[str, Difference]:
        """Metric -> the second run minus the first; empty if nothing was tested."""
        if not self.tests:
            return {}
        return differences_of(*self.tests)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        runs: list[dict[str, Any]] = [
            {"name": name, "folder": str(folder), "epochs": record and record.epochs, "steps": record and record.steps}
            for name, folder, record in zip(self.names, self.folders, self.records, strict=True)
        ]
        for description, results in zip(runs, self.tests, strict=False):  # no tests if nothing was tested
            description["test"] = results.to_dict()
        return {
            "runs": runs,
            "notes": self.notes,
            "differences": differences_as_dict(self.differences),
            "dynamics": None if self.dynamics is None else self.dynamics.to_dict(),
        }

    def show(self) -> None:
        """Print notes and tables."""
        console = Console()
        for sentence in self.notes:
            console.print(as_text(sentence), soft_wrap=True)
        if self.why_untested:
            console.print(as_text(f"Not tested: {self.why_untested}."), soft_wrap=True)
        else:
            first, second = self.names
            caption = f"difference: {second} minus {first}. Intervals and ± are 95 %. {_episodes(self.tests)}".rstrip()
            title = "best checkpoints on the test set"
            console.print(comparison_table(self.differences, (second, first), title, caption, earlier_first=True))
        if self.dynamics is not None:
            console.print(self.dynamics.table())
        else:
            console.print(as_text(f"No steps to compare: there is no {self.missing_file}."), soft_wrap=True)


def compare_runs(runs: tuple[Location, Location], names: Sequence[str] | None, *, test: bool) -> RunComparison:
    """Return the comparison of two runs.

    The default names are the heads or folders of the runs. `test` tests both checkpoints, which takes most of the time.
    """
    for run in runs:
        if not is_file(run) and not is_folder(run):
            raise FileNotFoundError(
                f"There is no {run}. Pass the folder of a run of 'fewshot fit', such as runs/version_0."
            )
    files = [join_location(run, DYNAMICS) if is_folder(run) else run for run in runs]
    missing_file = next((file for file in files if not is_file(file)), None)
    why_untested = _why_untested(runs) if test else "as requested"
    if why_untested and missing_file is not None:
        raise InputError(
            f"{folder_of(missing_file)} has no {PurePath(missing_file).name}, and nothing can be tested ({why_untested}). "
            "Pass the folder of a run of 'fewshot fit', such as runs/version_0. TrainingDynamicsMonitor writes "
            f"{DYNAMICS} after its first measured step."
        )
    folders = [folder_of(file) for file in files]
    records = [TrainingRecord.of(folder) for folder in folders]
    first, second = names or names_of(folders, records)
    dynamics = None
    if missing_file is None:
        dynamics = compare_dynamics(files[0], files[1], names=(first, second))
    tests = [] if why_untested else [results_of_run(run) for run in runs]
    return RunComparison(runs, (first, second), records, tests, why_untested, dynamics, missing_file)


def _why_untested(runs: Sequence[Location]) -> str:
    """Return why two runs cannot be tested; empty if they can."""
    for run in runs:
        if not is_file(join_location(run, CONFIGURATION)):
            return f"{run} has no {CONFIGURATION}"
    return ""


def names_of(folders: Sequence[Location], records: Sequence[TrainingRecord | None]) -> tuple[str, str]:
    """Return the names of two runs: their heads if the heads differ, or else their folders."""
    heads = [record.head for record in records if record is not None and record.head]
    if len(set(heads)) == 2:
        return heads[0], heads[1]
    first, second = (PurePath(folder).name for folder in folders)
    if first == second:
        return "A", "B"
    return first, second


def results_of_run(run: Location) -> NetworkResults:
    """Return the results of the best checkpoint of a run, with the data of its configuration."""
    checkpoint = best_checkpoint(run)
    if checkpoint is None:
        raise FileNotFoundError(
            f"{run} has no checkpoint, so it cannot be tested. Pass --test false to compare only the steps."
        )
    return results_of_test("--config", str(join_location(run, CONFIGURATION)), "--ckpt_path", str(checkpoint))


def results_of_test(*words: str, as_prototypes: bool = False) -> NetworkResults:
    """Return the results of `fewshot test` with these options.

    `as_prototypes` also tests the backbone of a module without episodes, by the angles to the prototypes.
    """
    # These modules import Lightning, which a comparison of steps does not need.
    from fewshot_callbacks.cli.fit import command, quiet_lightning  # noqa: PLC0415
    from fewshot_callbacks.protonet import ProtoNet, SoftmaxHead  # noqa: PLC0415

    with quiet_lightning():
        # One device: with several, Lightning repeats images to give each device the same number, and they count twice.
        cli = command(["test", *words, "--trainer.devices=1", "--trainer.enable_progress_bar=false", "--verbose=false"])
        trainer: Any = cli.trainer
        model = cli.model
        if as_prototypes:
            model = ProtoNet(model.backbone, SoftmaxHead("unit_euclidean"), evaluation=cli.datamodule.evaluation)
            trainer.test(model, cli.datamodule, verbose=False)
    reports = [getattr(callback, "report", None) for callback in trainer.callbacks]
    j = trainer.callback_metrics.get("test/J")
    return NetworkResults(
        checkpoint=words[words.index("--ckpt_path") + 1],
        accuracy=getattr(model, "evaluation_results", {}).get("test"),
        report=next((report for report in reports if isinstance(report, RetrievalReport)), None),
        j=None if j is None else float(j),
    )


def differences_of(first: NetworkResults, second: NetworkResults) -> dict[str, Difference]:
    """Return metric -> the second minus the first, for the metrics that both have and that are comparable."""
    differences: dict[str, Difference] = {}
    if first.accuracy is not None and second.accuracy is not None:
        differences["accuracy"] = second.accuracy.minus(first.accuracy)
        differences[OTHER_CLASSES] = second.accuracy.minus(first.accuracy, over_classes=True)
    if first.report is not None and second.report is not None:
        try:
            in_retrieval = compare_reports(second.report, first.report)
        except ValueError:  # the queries differ
            in_retrieval = {}
        differences |= {name: in_retrieval[name] for name in SHOWN if name in in_retrieval}
    if first.j is not None and second.j is not None:
        # J has no interval, so its difference has none either.
        differences["J"] = Difference(second.j, first.j, UNKNOWN)
    return differences


def _episodes(tests: Sequence[NetworkResults]) -> str:
    """Return a sentence about the episodes and the accuracy intervals of both runs; empty without accuracies."""
    accuracies = [results.accuracy for results in tests if results.accuracy]
    if not accuracies:
        return ""
    first, second = (_episodes_of(results.accuracy) for results in tests)
    closed = " and ".join(half_width(accuracy.ci95, "a single episode") for accuracy in accuracies)
    too_few = "too few episodes or classes"
    opened = " and ".join(half_width(accuracy.open_interval.half_width, too_few) for accuracy in accuracies)
    lists = f"{first}, the same for both" if first == second else f"{first}, and {second}"
    return f"Accuracy: {closed} over other episodes of these classes, {opened} over another set of classes; {lists}."


def _episodes_of(accuracy: EpisodeAccuracy | None) -> str:
    if not accuracy:
        return "none"
    return f"{accuracy.ways}-way {accuracy.shots}-shot, {counted(accuracy.n, 'episode')}, list {accuracy.episodes_hash}"


def half_width(value: float, reason: str) -> str:
    """Return the half-width of an interval after ±; for NaN, `unknown` and the reason.

    Examples:
        >>> half_width(0.0125, "a single episode"), half_width(float("nan"), "a single episode")
        ('±0.0125', 'unknown (a single episode)')
    """
    return f"unknown ({reason})" if math.isnan(value) else f"±{value:.4f}"
