"""`fewshot trials`: evaluates verification on listed pairs, from their scores or from stored embeddings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fewshot_callbacks.cli.options import Trials, in_shell
from fewshot_callbacks.cli.stored_sets import load_one_set
from fewshot_callbacks.cli.tables import trial_slices_tables
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.outputs import is_picture, refuse_input
from fewshot_callbacks.functional.retrieval import requested_metric
from fewshot_callbacks.functional.verification import (
    TRIAL_METRICS,
    TrialList,
    TrialReport,
    evaluate_trials,
    read_trials,
    trial_scores,
)
from fewshot_callbacks.system.extras import required_extra
from fewshot_callbacks.system.terminal import as_text, note
from fewshot_callbacks.system.words import counted

# The names of the figures of `trial_figures`, which must be known before they are drawn.
FIGURES = ("det", "scores")


def run(options: Trials) -> None:
    """Evaluate and print, and write the requested figures and report."""
    # The evaluation may take minutes, so a mistake is reported before it.
    if options.figures is not None:
        check_figures(options.figures)
    if options.report is not None:
        refuse_input(options.report, "--report", (options.file, options.embeddings))
    # A list of items has no other columns, so the slices come from the file of the embeddings.
    trials = read_trials(options.file, (options.slices or ()) if options.embeddings is None else ())
    if options.metrics is not None and "accuracy" in options.metrics and trials.folds is None:
        raise InputError(
            f"--metrics accuracy needs the fold of each trial, but {options.file} has no folds. Add a column fold to a "
            "table of scores, or leave out accuracy."
        )
    scores, slices = _scores(trials, options)
    report = evaluate_trials(
        scores,
        trials.same,
        first=trials.first,
        second=trials.second,
        folds=trials.folds,
        slices=slices,
        metrics=options.metrics,
        miss_cost=options.miss_cost,
        false_match_cost=options.false_match_cost,
    )
    written = []
    if options.figures is not None or options.report is not None:
        written = show(report, trials, scores, options)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    console = Console()
    console.print(report_table(report, str(options.file)))
    if report.thresholds:
        for attribute in report.slices:
            for table in trial_slices_tables(report.of_slices(attribute)):
                console.print(table)
    for message in report.notes:
        console.print(note(in_shell(message, "trials")))
    for path in written:
        console.print(as_text(f"Written: {path}"), soft_wrap=True)


def check_figures(folder: Path) -> None:
    """Check that figures can be written to a folder without replacing other files."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder. Pass the name of a folder to --figures.")
    for path in (folder / f"{name}.png" for name in FIGURES):
        if path.exists() and not is_picture(path):
            raise InputError(
                f"{path} was not written by fewshot trials and would be replaced. Pass another folder to --figures, or "
                "move the file."
            )


def _scores(trials: TrialList, options: Trials) -> tuple[Any, Mapping[str, Any] | None]:
    """Return the trials' scores, from the list or embeddings, and the slices."""
    if trials.scores is not None:
        if options.embeddings is not None:
            raise InputError(f"{options.file} contains scores. Leave out --embeddings, or pass a list of items.")
        return trials.scores, trials.slices
    how = "numpy.savez(path, embeddings=..., ids=...), with the ids that the list contains"
    if options.embeddings is None:
        raise InputError(f"{options.file} lists items, not scores. Pass --embeddings FILE, written by {how}.")
    sets = load_one_set(options.embeddings, ("ids",), options.slices or ())
    embeddings = sets.queries
    ids = sets.arrays["query_ids"]
    if len(ids) != len(embeddings):
        raise InputError(
            f"{options.embeddings} has {len(embeddings)} embeddings and {len(ids)} ids. Write it with {how}."
        )
    for name, values in sets.slices.items():
        if len(values) != len(ids):
            raise InputError(
                f"{options.embeddings} has {len(ids)} ids and {len(values)} values of {name!r}. Save one per item."
            )
    first, second = trials.rows(ids.tolist())
    slices = {name: (values[first], values[second]) for name, values in sets.slices.items()}
    return trial_scores(embeddings, first, second, similarity=options.similarity), slices


def report_table(report: TrialReport, title: str) -> Table:
    """Return the table of a report for a screen."""
    people = f" of {counted(report.identities, 'identity')}" if report.identities else ""
    caption = f"{counted(report.trials, 'trial')}{people}: {report.same:,} target, {report.different:,} non-target"
    table = Table(title=as_text(title), caption=caption, title_style="bold", caption_justify="left")
    table.add_column("metric", overflow="fold")
    for name in ("value", "95 % interval", "threshold"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("meaning", style="dim")
    for name, value in report.values.items():
        low, high = report.intervals.get(name, (math.nan, math.nan))
        span = "" if math.isnan(low) else f"{low:.4f} to {high:.4f}"
        threshold = f"{report.thresholds[name]:.4f}" if name in report.thresholds else ""
        error = f" ± {report.accuracy_error:.4f}" if name == "accuracy" else ""
        meaning = requested_metric(name, TRIAL_METRICS).meaning
        table.add_row(name, f"{value:.4f}{error}", span, threshold, meaning)
    return table


def show(report: TrialReport, trials: TrialList, scores: Any, options: Trials) -> list[Path]:
    """Write the PNG files of --figures and the HTML file of --report, and return their paths."""
    with required_extra("report", "fewshot trials --figures and --report"):
        from fewshot_callbacks.plots import save  # noqa: PLC0415 - needed only for figures
        from fewshot_callbacks.report import trial_figures, write_trials  # noqa: PLC0415

    written: list[Path] = []
    if options.figures is not None:
        options.figures.mkdir(parents=True, exist_ok=True)
        check_figures(options.figures)  # another program may have written files during the evaluation
        for name, figure in trial_figures(report).items():
            written.append(options.figures / f"{name}.png")
            save(figure, written[-1])
    if options.report is not None:
        people = None if trials.first is None or trials.second is None else (trials.first, trials.second)
        write_trials(options.report, report, scores, trials.same, trials.items or people, name=options.file.name)
        written.append(options.report)
    return written
