"""The cost of `evaluate_trials`, and how often its intervals by identity cover the true value.

    python benchmarks/trials.py [--trials 8010270] [--identities 5000]      processor time, and memory beyond the scores
    python benchmarks/trials.py --coverage [--sets 400]                     coverage of the intervals
    python benchmarks/trials.py --slices [--sets 400]                       the same of `TrialReport.of_slices`
    python benchmarks/trials.py --identification [--sets 400]               the same of `evaluate_identification`

Costs are processor seconds, and multiples of one sort of the same scores (`numpy.argsort`); memory is the peak minus the
memory before the call. `--json` writes the table of costs.

For the coverage, each set draws new identities: normal in 16 dimensions, some of them similar to many others, with a
different scatter for each identity and four items per identity. Scores are cosines of all pairs of items, or of a list with
a fixed number of trials of each kind per identity. The true value comes from all pairs of 3,000 identities. A value that
rests on fewer than ten false matches has no interval; the fraction of sets with an interval is in brackets.

For slices, 60, 30 and 10 % of the identities are in three groups. The groups point in different directions, and smaller
groups scatter more. The true value is the rate of 20,000 other identities at the threshold of the set. A set counts if the
intervals of all three groups, and of trials across groups, cover it. The mean number of mistakes in the smallest group is in
brackets.

For identification, 100 of the identities have an item in the gallery and three queries; the other identities are unknown and
have four queries. The true value is the mean of 100 sets with 1,000 unknown identities.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option
from retrieval import PeakMemory

from fewshot_callbacks import evaluate_identification, evaluate_trials
from fewshot_callbacks.functional import Interval

KEYS = ("eer", "pair_auroc", "min_dcf@0.01", "min_dcf@0.5", "tar@far0.1", "tar@far0.01", "tar@far0.001")
DIM, ITEMS = 16, 4
DESIGNS = ((50, 0), (50, 10), (200, 0), (200, 1), (200, 10), (500, 1), (500, 10))
"""Number of identities, and trials of each kind per identity; 0: all pairs."""
COSTS = (
    Column("call"),
    Column("processor seconds", ".1f"),
    Column("x one sort", ".1f"),
    Column("MB beyond the scores", ",.0f"),
)
GROUPS = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 2])  # of ten identities
RATES = ("false_non_match_rate", "false_match_rate")
KNOWN, UNKNOWN, IDENTIFICATION = 100, (15, 50, 200), "tpir@fpir0.1"


def cost(run: Callable[[], Any]) -> tuple[float, float | None]:
    """Return the processor seconds of a call, and the peak MB of a second call, for which freed memory is returned first."""
    started = time.process_time()
    run()
    seconds = time.process_time() - started
    with PeakMemory(torch.device("cpu")) as memory:
        run()
    return seconds, memory.mb


def costs(trials: int, identities: int, file: str | None) -> None:
    """Print the table of costs, and write it to a file."""
    rng = np.random.default_rng(0)
    same = rng.random(trials) < 0.2
    scores = rng.normal(size=trials) + 2 * same
    first = rng.integers(0, identities, trials)
    second = np.where(same, first, (first + rng.integers(1, identities, trials)) % identities)
    sort, _ = cost(lambda: np.argsort(scores))
    calls: dict[str, Callable[[], Any]] = {
        "`evaluate_trials(scores, same)`": lambda: evaluate_trials(scores, same),
        "and ten folds": lambda: evaluate_trials(scores, same, folds=np.arange(trials) % 10),
        f"and {identities:,} identities, with intervals": lambda: evaluate_trials(
            scores, same, first=first, second=second
        ),
    }
    print(f"{trials:,} trials\n")
    with Results(COSTS, threads=1, file=file) as results:
        for name, run in calls.items():
            seconds, beyond = cost(run)
            results.add(name, seconds, seconds / sort, beyond)


def people(rng: np.random.Generator, identities: int, *, grouped: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return items as unit vectors, and the identity of each item."""
    centres = rng.normal(size=(identities, 1, DIM))
    centres[:, 0, 0] += 0.5 * rng.normal(size=identities).clip(0)
    scatter = 0.9 * np.exp(0.35 * rng.normal(size=(identities, 1, 1)) - 0.5)
    if grouped:
        groups = GROUPS[np.arange(identities) % len(GROUPS)]
        centres[:, 0, 1:4] += np.eye(3)[groups]
        scatter *= (1 + 0.15 * groups)[:, None, None]
    rows = (centres + scatter * rng.normal(size=(identities, ITEMS, DIM))).reshape(-1, DIM)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), np.arange(identities).repeat(ITEMS)


def drawn(
    rng: np.random.Generator, identities: int, each: int, *, grouped: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scores and both identities of the trials of a set."""
    rows, labels = people(rng, identities, grouped=grouped)
    if not each:
        i, j = np.triu_indices(len(rows), 1)
        return (rows @ rows.T)[i, j], labels[i], labels[j]
    who = np.arange(identities).repeat(each)
    one = rng.integers(0, ITEMS, len(who))
    own = who * ITEMS + (one + rng.integers(1, ITEMS, len(who))) % ITEMS
    other = (who + rng.integers(1, identities, len(who))) % identities * ITEMS + rng.integers(0, ITEMS, len(who))
    i, j = np.tile(who * ITEMS + one, 2), np.concatenate([own, other])
    return (rows[i] * rows[j]).sum(1), labels[i], labels[j]


def coverage(sets: int) -> Table:
    rng = np.random.default_rng(1)
    scores, first, second = drawn(rng, 3000, 0)
    truth = evaluate_trials(scores, first == second, metrics=KEYS)
    table = Table(title=f"share of {sets} sets whose 95 % interval holds the truth, % (of the sets that have one, %)")
    for name in ("identities, trials", *KEYS):
        table.add_column(name)
    for identities, each in DESIGNS:
        held: dict[str, list[bool]] = {key: [] for key in KEYS}
        for _ in range(sets):
            scores, first, second = drawn(rng, identities, each)
            found = evaluate_trials(scores, first == second, first=first, second=second, metrics=KEYS)
            for key, (low, high) in found.intervals.items():
                if low <= high:
                    held[key].append(low <= truth[key] <= high)
        cells = [f"{100 * np.mean(one):.0f} ({100 * len(one) / sets:.0f})" if one else "-" for one in held.values()]
        table.add_row(f"{identities}, {f'{each} of each kind each' if each else 'all pairs'}", *cells)
    return table


def sliced(
    rng: np.random.Generator, identities: int, each: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return the scores, kinds, identities and slices of the trials of a set with three groups."""
    scores, first, second = drawn(rng, identities, each, grouped=True)
    sides = GROUPS[first % len(GROUPS)], GROUPS[second % len(GROUPS)]
    return scores, first == second, first, second, {"group": sides}


def slice_coverage(sets: int) -> Table:
    rng = np.random.default_rng(1)
    scores, same, _, _, slices = sliced(rng, 20_000, 100)
    one, other = slices["group"]
    masks = {group: (one == group) & (other == group) for group in range(3)} | {"across": one != other}
    truths = {
        (rate, name): np.sort(scores[kind & mask])
        for rate, kind in zip(RATES, (same, ~same), strict=True)
        for name, mask in masks.items()
    }
    table = Table(
        title=f"share of {sets} sets whose 95 % intervals all hold the truth, % (mistakes of the smallest group)"
    )
    keys = ("tar@far0.1", "tar@far0.01")
    for heading in ("identities, trials", *(f"{rate} at {key}" for key in keys for rate in ("FNMR", "FMR"))):
        table.add_column(heading)
    for identities, each in DESIGNS:
        held: dict[tuple[str, str], list[bool]] = {(key, rate): [] for key in keys for rate in RATES}
        mistakes: dict[tuple[str, str], list[int]] = {column: [] for column in held}
        for _ in range(sets):
            scores, same, first, second, slices = sliced(rng, identities, each)
            report = evaluate_trials(scores, same, first=first, second=second, metrics=keys, slices=slices)
            for (key, rate), of_sets in held.items():
                found = report.of_slices("group", key)
                of_groups = getattr(found, rate)
                of_sets.append(
                    all(
                        covers(of_group.interval, truths[rate, name], found.threshold, rate)
                        for name, of_group in of_groups.items()
                    )
                )
                mistakes[key, rate].append(of_groups[2].mistakes)
        cells = [f"{100 * np.mean(held[column]):.0f} ({np.mean(mistakes[column]):.0f})" for column in held]
        table.add_row(f"{identities}, {f'{each} of each kind each' if each else 'all pairs'}", *cells)
    return table


def covers(interval: Interval, scores: np.ndarray, threshold: float, rate: str) -> bool:
    """Return whether an interval covers the fraction of ascending scores that a threshold gets wrong; NaN ends cover it."""
    rejected = float(np.searchsorted(scores, threshold)) / len(scores)
    truth = rejected if rate == "false_non_match_rate" else 1 - rejected
    return not (interval.low > truth or interval.high < truth)


def identified(rng: np.random.Generator, unknown: int) -> tuple[float, tuple[float, float]]:
    """Return the TPIR of a drawn set with a number of unknown identities, and its interval."""
    rows, labels = people(rng, KNOWN + unknown)
    enrolled = (labels < KNOWN) & (np.arange(len(labels)) % ITEMS == 0)
    found = evaluate_identification(
        rows[~enrolled], labels[~enrolled], rows[enrolled], labels[enrolled], metrics=(IDENTIFICATION,)
    )
    interval = found.intervals[IDENTIFICATION]
    return found[IDENTIFICATION], (interval.low, interval.high)


def identification_coverage(sets: int) -> Table:
    rng = np.random.default_rng(1)
    truth = np.mean([identified(rng, 1000)[0] for _ in range(100)])
    table = Table(title=f"share of {sets} sets whose 95 % interval of {IDENTIFICATION} holds {truth:.3f}, %")
    for name in ("unknown identities", "share"):
        table.add_column(name)
    for unknown in UNKNOWN:
        ends = np.array([identified(rng, unknown)[1] for _ in range(sets)])
        table.add_row(str(unknown), f"{100 * ((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean():.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8_010_270, help="(default: %(default)s)")
    parser.add_argument("--identities", type=int, default=5000, help="(default: %(default)s)")
    parser.add_argument("--coverage", action="store_true", help="of the intervals, in place of costs")
    parser.add_argument("--slices", action="store_true", help="of the intervals of slices, in place of costs")
    parser.add_argument("--identification", action="store_true", help="of the intervals of TPIR, in place of costs")
    parser.add_argument("--sets", type=int, default=400, help="of each design (default: %(default)s)")
    add_file_option(parser)
    options = parser.parse_args()
    tables = {"coverage": coverage, "slices": slice_coverage, "identification": identification_coverage}
    chosen = [table for name, table in tables.items() if getattr(options, name)]
    if not chosen:
        costs(options.trials, options.identities, options.json)
        return
    if options.json:
        parser.error("--json writes the table of costs. Leave --coverage, --slices and --identification out.")
    for table in chosen:
        Console(width=140).print(table(options.sets))


if __name__ == "__main__":
    main()
