"""`fewshot trials`: verification of listed pairs, from their scores or from stored embeddings."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fewshot_callbacks._extras import needs
from fewshot_callbacks._terminal import as_text, note
from fewshot_callbacks.cli.evaluate import load_arrays
from fewshot_callbacks.functional.retrieval import asked_metric
from fewshot_callbacks.functional.verification import (
    TRIAL_METRICS,
    TrialList,
    TrialReport,
    evaluate_trials,
    read_trials,
    trial_scores,
)


def run(options: Namespace) -> None:
    """Evaluate, print, and draw if that is wanted."""
    trials = read_trials(options.file)
    report = evaluate_trials(
        _scores(trials, options),
        trials.same,
        first=trials.first,
        second=trials.second,
        folds=trials.folds,
        metrics=None if options.metrics is None else [key for word in options.metrics for key in word],
        miss_cost=options.miss_cost,
        false_match_cost=options.false_match_cost,
    )
    if options.figures is not None:
        draw(report, options.figures)
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    console = Console()
    console.print(report_table(report, str(options.file)))
    for message in report.notes:
        console.print(note(message))


def _scores(trials: TrialList, options: Namespace) -> object:
    """Return the scores of a list, or make them from embeddings."""
    if trials.scores is not None:
        return trials.scores
    how = "numpy.savez(path, embeddings=..., ids=...), with the id of each item as the list has it"
    if options.embeddings is None:
        raise ValueError(f"{options.file} lists items, not scores. Pass --embeddings FILE, as written by {how}.")
    arrays = load_arrays(options.embeddings, ("embeddings", "ids"))
    if len(arrays["ids"]) != len(arrays["embeddings"]):
        raise ValueError(
            f"{options.embeddings} has {len(arrays['embeddings'])} embeddings and {len(arrays['ids'])} ids. Write it "
            f"with {how}."
        )
    return trial_scores(arrays["embeddings"], *trials.rows(arrays["ids"].tolist()), similarity=options.similarity)


def report_table(report: TrialReport, title: str) -> Table:
    """Make the table of a report for a screen."""
    people = f" of {report.identities:,} identities" if report.identities else ""
    caption = f"{report.trials:,} trials{people}: {report.same:,} of one identity, {report.different:,} of two"
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
        meaning = asked_metric(name, TRIAL_METRICS).meaning
        table.add_row(name, f"{value:.4f}{error}", span, threshold, meaning)
    return table


def draw(report: TrialReport, folder: Path) -> None:
    """Write the detection error trade-off and the scores of both kinds of trials as PNG files."""
    with needs("report", "fewshot trials --figures"):
        from fewshot_callbacks.plots import (  # noqa: PLC0415 - for those who want figures
            Mark,
            error_tradeoff_curve,
            save,
            score_histograms,
        )

    counts = report.pair_counts
    marks = []
    for name, threshold in report.thresholds.items():
        recall, _, match = counts.at(threshold)
        marks.append(Mark(name, threshold, match, 1 - recall))
    folder.mkdir(parents=True, exist_ok=True)
    tradeoff = error_tradeoff_curve(counts.false_match_rate, counts.false_non_match_rate, marks)
    save(tradeoff, folder / "det.png")
    save(score_histograms(counts, marks), folder / "scores.png")
