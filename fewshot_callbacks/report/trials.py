"""Writes verification of listed trials as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fewshot_callbacks.functional.verification import TrialReport
from fewshot_callbacks.report.page import WrittenReport, check_writable, figures, fill, write_whole

# Of each kind, so many are listed.
MISTAKES = 20


def trial_figures(report: TrialReport) -> dict[str, Any]:
    """Draw the detection error trade-off, `det`, and the `scores` of both kinds of trials, with all thresholds."""
    # matplotlib, which a report of embeddings does not need
    from fewshot_callbacks.plots import Mark, error_tradeoff_curve, score_histograms  # noqa: PLC0415

    counts, marks = report.pair_counts, []
    for name, threshold in report.thresholds.items():
        recall, _, match = counts.at(threshold)
        marks.append(Mark(name, threshold, match, 1 - recall))
    tradeoff = error_tradeoff_curve(counts.false_match_rate, counts.false_non_match_rate, marks)
    return {"det": tradeoff, "scores": score_histograms(counts, marks)}


def write_trials(
    path: str | Path,
    report: TrialReport,
    scores: Sequence[float],
    same: Sequence[bool],
    sides: tuple[Sequence[Any], Sequence[Any]] | None = None,
    *,
    title: str = "Verification report",
    name: str = "trials",
) -> WrittenReport:
    """Write an HTML file with the metrics of trials, their error rates at every threshold, and the worst mistakes.

    The file is self-contained, as that of `write_report`. A file of this name is replaced, whoever has
    written it, but only when the new one is complete.

    Args:
        path: Path of the file.
        report: The result of `evaluate_trials` for these trials.
        scores: (trials,) their scores.
        same: (trials,) whether both sides have one identity.
        sides: Names of the first and of the second side of each trial, such as items or identities.
        title: Title of the page.
        name: Name of the list.

    Returns:
        The path and the size of the file.

    Raises:
        ValueError: If the report is not of these trials.
        OSError: If the file cannot be written.
    """
    from fewshot_callbacks.plots import encode  # noqa: PLC0415 - as above

    check_writable(path)
    values, kinds = np.asarray(scores, np.float64), np.asarray(same, bool)
    lengths = {len(values), len(kinds), *(len(side) for side in sides or ())}
    if lengths != {report.trials}:
        raise ValueError(
            f"write_trials: the report is of {report.trials:,} trials, and scores, same and sides hold "
            f"{', '.join(map(str, sorted(lengths)))}. Pass those that were evaluated."
        )

    def rows(of: np.ndarray, worst: np.ndarray) -> list[tuple[str, Any, Any, int]]:
        trials = np.flatnonzero(of)[np.argsort(worst[of], kind="stable")[:MISTAKES]].tolist()
        return [
            (f"{values[n]:.4f}", *("" if sides is None else side[n] for side in sides or ("", "")), n) for n in trials
        ]

    drawn = trial_figures(report)
    about = {
        "Detection error trade-off: what each threshold accepts wrongly, and what it rejects wrongly": drawn["det"],
        "Scores of genuine and impostor trials": drawn["scores"],
    }
    page = fill(
        "trials.html.jinja",
        "",
        title=title,
        name=name,
        report=report,
        figures=figures(report),
        confidence=f"{100 * report.confidence:g} %",
        pictures={words: base64.b64encode(encode(figure, "png")).decode() for words, figure in about.items()},
        mistakes={
            "Impostor trials with the highest scores": rows(~kinds, -values),
            "Genuine trials with the lowest scores": rows(kinds, values),
        },
    )
    write_whole(path, page)
    return WrittenReport(Path(path), len(page), ())
