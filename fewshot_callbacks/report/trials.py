"""Functions that write the report of verification trials as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.outputs import write_whole
from fewshot_callbacks.functional.verification import TrialReport
from fewshot_callbacks.report.page import WrittenReport, check_writable, fill, metric_texts
from fewshot_callbacks.system.words import counted

# Number of listed mistakes of each kind.
MISTAKES = 20


def trial_figures(report: TrialReport) -> dict[str, Any]:
    """Return two figures with all thresholds: `det`, the detection error trade-off, and `scores`, the score histograms."""
    # Needs matplotlib, unlike a report of embeddings.
    from fewshot_callbacks.plots import Mark, error_tradeoff_curve, score_histograms  # noqa: PLC0415

    counts = report.pair_counts
    marks = []
    for name, threshold in report.thresholds.items():
        recall, _, false_match_rate = counts.at(threshold)
        marks.append(Mark(name, threshold, false_match_rate, 1 - recall))
    tradeoff = error_tradeoff_curve(counts.false_match_rate, counts.false_non_match_rate, marks)
    return {"det": tradeoff, "scores": score_histograms(counts, marks)}


def write_trials(
    path: str | Path,
    report: TrialReport,
    scores: Sequence[float],
    same: Sequence[bool],
    names: tuple[Sequence[Any], Sequence[Any]] | None = None,
    *,
    title: str = "Verification report",
    name: str = "trials",
) -> WrittenReport:
    """Write an HTML file with the metrics of trials, their error rates at every threshold, and the worst errors.

    The file is self-contained: a browser loads nothing else. An existing file is replaced once the new file is
    complete, even if another program wrote the existing file.

    Args:
        path: Path of the file.
        report: The result of `evaluate_trials` for these trials.
        scores: (trials,), the score of each trial.
        same: (trials,), whether both sides of a trial have the same identity.
        names: Names of the first and the second side of each trial, such as files or identities.
        title: Title of the page.
        name: Name of the list of trials.

    Returns:
        The path and the size of the file.

    Raises:
        ValueError: The numbers of trials in the report, `scores`, `same` and `names` differ.
        OSError: The file cannot be written.
    """
    from fewshot_callbacks.plots import encode  # noqa: PLC0415 - as above

    check_writable(path)
    score_array = np.asarray(scores, np.float64)
    is_same = np.asarray(same, bool)
    lengths = {len(score_array), len(is_same), *(len(side) for side in names or ())}
    if lengths != {report.trials}:
        raise InputError(
            f"write_trials: the report has {counted(report.trials, 'trial')}, but the lengths of scores, same and names are "
            f"{', '.join(map(str, sorted(lengths)))}. Pass the evaluated trials."
        )
    figure_of = trial_figures(report)
    pictures = {
        "Detection error trade-off (DET): false non-match rate against false match rate": figure_of["det"],
        "Score distributions of target and non-target trials": figure_of["scores"],
    }
    targets = np.flatnonzero(is_same)
    nontargets = np.flatnonzero(~is_same)
    lowest_targets = targets[np.argsort(score_array[targets], kind="stable")[:MISTAKES]]
    highest_nontargets = nontargets[np.argsort(-score_array[nontargets], kind="stable")[:MISTAKES]]
    page = fill(
        "trials.html.jinja",
        "",
        title=title,
        name=name,
        report=report,
        metrics=metric_texts(report),
        confidence=f"{100 * report.confidence:g} %",
        pictures={words: base64.b64encode(encode(figure, "png")).decode() for words, figure in pictures.items()},
        mistakes={
            "Non-target trials with the highest scores": _mistake_rows(highest_nontargets, score_array, names),
            "Target trials with the lowest scores": _mistake_rows(lowest_targets, score_array, names),
        },
    )
    write_whole(path, page)
    return WrittenReport(Path(path), len(page), ())


def _mistake_rows(
    trials: Int[np.ndarray, "mistakes"],
    scores: Float[np.ndarray, "trials"],
    names: tuple[Sequence[Any], Sequence[Any]] | None,
) -> list[tuple[str, Any, Any, int]]:
    """Return score, first side, second side and index of each trial; sides without a name are empty."""
    rows: list[tuple[str, Any, Any, int]] = []
    for trial in trials.tolist():
        first: Any = ""
        second: Any = ""
        if names is not None:
            first = names[0][trial]
            second = names[1][trial]
        rows.append((f"{scores[trial]:.4f}", first, second, trial))
    return rows
