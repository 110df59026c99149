"""Which differences of the studies are significant after correction for their number? Uses only docs/figures/data.

    python studies/corrections.py

It trains nothing, takes seconds, and prints three parts:

    losses         the paired difference of each loss from soft AP over the seeds, with Bonferroni's correction
    heads          the paired difference of both heads over the seeds, of validation accuracy and of the norm ratio, with
                   Holm's correction over each of the two
    health         the rank correlation of each number with mAP and accuracy: the interval over runs with Bonferroni's
                   correction, and the interval over methods, of which there are few
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

DATA = Path(__file__).parents[1] / "docs" / "figures" / "data"
Array = NDArray[np.float64]
Rows = Sequence[dict[str, Any]]

# Differences of mAP and Recall@1 in the study of docs/research/average_precision_loss.md.
LOSS_COMPARISONS = 58
BETTER_LOW = ("spectral_decay", "uniformity", "nc1", "cdnv", "alignment", "hubness", "antihubs")
NUMBERS = ("rankme", "effective_rank", *BETTER_LOW, "intrinsic_dimension", "spread")
HEALTH_SETS = {"glyphs": "embedding_health", "icons": "embedding_health_icons"}
COLLAPSING = "attraction"
# Eleven draws are beyond each end of the corrected interval.
DRAWS = 40_000


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's corrected p-values, in the order of the given ones."""
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    corrected = np.minimum(1, np.maximum.accumulate(factors * np.asarray(p_values)[order]))
    return [float(corrected[place]) for place in np.argsort(order)]


def correlations(values: Array, outcomes: Array, weights: Array) -> Array:
    """Return Spearman's rank correlation of each row of weights.

    Args:
        values: (rows,) one number per checkpoint.
        outcomes: (rows,) the outcome of each checkpoint.
        weights: (draws, rows) how often each draw contains the checkpoint.
    """

    def centred_ranks(column: Array) -> Array:
        is_before = (column[:, None] < column) + 0.5 * (column[:, None] == column)
        ranks = weights @ is_before
        return ranks - ((weights * ranks).sum(axis=1) / weights.sum(axis=1))[:, None]

    one = centred_ranks(values)
    other = centred_ranks(outcomes)
    variances = (weights * one * one).sum(axis=1) * (weights * other * other).sum(axis=1)
    return np.asarray((weights * one * other).sum(axis=1) / np.sqrt(variances))


def over_runs(rows: Rows, number: str, outcome: str, alpha: float) -> tuple[float, float, float]:
    """Return the correlation, and both ends of its bootstrap interval over runs."""
    runs = [(row["method"], row["rate"], row["seed"]) for row in rows]
    places = {run: place for place, run in enumerate(dict.fromkeys(runs))}
    run_of_row = [places[run] for run in runs]
    generator = np.random.default_rng(0)
    multiplicities = generator.multinomial(len(places), np.full(len(places), 1 / len(places)), size=DRAWS)
    drawn = correlations(*_columns(rows, number, outcome), multiplicities[:, run_of_row].astype(float))
    low, high = np.nanquantile(drawn, [alpha / 2, 1 - alpha / 2])
    return _correlation(rows, number, outcome), float(low), float(high)


def over_methods(rows: Rows, number: str, outcome: str) -> tuple[float, float]:
    """Return both ends of a 95 % jackknife interval over methods, on Fisher's scale."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    whole = math.atanh(_correlation(rows, number, outcome))
    without = [
        math.atanh(_correlation([row for row in rows if row["method"] != method], number, outcome))
        for method in methods
    ]
    pseudo_values = len(methods) * whole - (len(methods) - 1) * np.array(without)
    reach = stats.t.ppf(0.975, len(methods) - 1) * stats.sem(pseudo_values)
    return math.tanh(whole - reach), math.tanh(whole + reach)


def _correlation(rows: Rows, number: str, outcome: str) -> float:
    return float(correlations(*_columns(rows, number, outcome), np.ones((1, len(rows))))[0])


def _columns(rows: Rows, number: str, outcome: str) -> tuple[Array, Array]:
    """Return the number of each checkpoint, with a sign so that larger should be better, and its outcome."""
    sign = -1 if number in BETTER_LOW else 1
    return np.array([sign * row[number] for row in rows]), np.array([row[outcome] for row in rows])


def losses() -> Iterator[str]:
    """Yield a line for each difference of mAP, the smallest p-value first."""
    data = json.loads((DATA / "average_precision_loss.json").read_text(encoding="utf-8"))
    found = []
    for of, values in data["mAP"].items():
        for method, of_seeds in values.items():
            differences = np.subtract(of_seeds, values["ap"])
            if method != "ap":
                found.append((stats.ttest_1samp(differences, 0).pvalue, of, data["titles"][method], differences))
    for p_value, of, title, differences in sorted(found, key=lambda row: row[0]):
        corrected = min(1.0, LOSS_COMPARISONS * p_value)
        of_seeds = ", ".join(f"{difference:+.3f}" for difference in differences)
        yield f"{of}, {title}: {differences.mean():+.3f} ({of_seeds}), p = {p_value:.4f}, corrected {corrected:.3f}"


def heads() -> Iterator[str]:
    """Yield a line for each difference of the heads: DR minus softmax."""
    tasks = json.loads((DATA / "distance_ratio.json").read_text(encoding="utf-8"))["tasks"]
    measures: dict[str, Callable[[dict[str, Any]], float]] = {
        f"validation accuracy after {step} episodes": lambda run, step=step: 100 * dict(run["val"])[step]
        for step in (200, 1200, 2000)
    }
    accuracies = list(measures)
    measures["norm ratio"] = lambda run: float(stats.gmean(run["norm_ratio"]))
    for family in (accuracies, ["norm ratio"]):
        names = [(task, measure) for measure in family for task in tasks]
        differences = [
            np.array([measures[measure](dr) - measures[measure](softmax) for dr, softmax in _pairs(tasks[task])])
            for task, measure in names
        ]
        p_values = [float(stats.ttest_1samp(of_seeds, 0).pvalue) for of_seeds in differences]
        for (task, measure), of_seeds, p_value, corrected in zip(
            names, differences, p_values, holm(p_values), strict=True
        ):
            reach = stats.t.ppf(0.975, len(of_seeds) - 1) * stats.sem(of_seeds)
            yield f"{task}, {measure}: {of_seeds.mean():+.4f} ±{reach:.4f}, p = {p_value:.4f}, corrected {corrected:.3f}"


def _pairs(task: dict[str, Rows]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    return zip(task["dr"], task["softmax"], strict=True)


def health() -> Iterator[str]:
    """Yield a line for each number of an embedding, on each set."""
    comparisons = len(HEALTH_SETS) * len(NUMBERS) * 4
    for name, file in HEALTH_SETS.items():
        rows = json.loads((DATA / f"{file}.json").read_text(encoding="utf-8"))
        sound = [row for row in rows if row["method"] != COLLAPSING]
        last = [row for row in sound if row["step"] == max(row["step"] for row in sound)]
        columns = {
            "mAP, all": (rows, "mAP"),
            "accuracy, all": (rows, "accuracy"),
            f"mAP, without {COLLAPSING}": (sound, "mAP"),
            "mAP, last": (last, "mAP"),
        }
        for number in NUMBERS:
            cells = []
            for title, (of, outcome) in columns.items():
                value, low, high = over_runs(of, number, outcome, 0.05 / comparisons)
                mark = " *" if low > 0 or high < 0 else ""
                cells.append(f"{title} {value:+.2f} ({low:+.2f} to {high:+.2f}){mark}")
            low, high = over_methods(rows, number, "mAP")
            yield f"{name}, {number}: {'; '.join(cells)}; mAP, all, over methods ({low:+.2f} to {high:+.2f})"


if __name__ == "__main__":
    print(
        f"Losses, mAP minus that of soft AP, three seeds; corrected for {LOSS_COMPARISONS} differences",
        *losses(),
        sep="\n",
    )
    print(
        "\nHeads, DR minus softmax, three seeds; corrected over the nine accuracies, and over the three ratios",
        *heads(),
        sep="\n",
    )
    print("\nHealth, corrected intervals over runs; * where 0 is outside", *health(), sep="\n")
