"""How often are a gain, a slice, a rank and a plan right? Measured on embeddings of real training runs.

Run it as it is:    python studies/better_or_noise.py                 (half an hour on one core; it can be resumed)
On icons:           python studies/better_or_noise.py --data icons    (examples/icons lists what to install)
In short:           python studies/better_or_noise.py --validations 6 --steps 2 --seeds 0 --draws 4

The study trains five small networks and validates each of them 60 times on all classes that it has never seen. These classes
are the population: their mean is the true value. Test sets are drawn from them, class by class with replacement, and are
ranked against the gallery of all classes, so that the value of a query does not depend on the draw. The package then judges
each test set, and the population shows whether the judgement is right.

In a second population nothing changes from one validation to the next: each class of a test set goes through the last 40
validations in its own random order. Every validation then has the same true value, and every "better" is false.

It writes to runs/better_or_noise (--output):

    glyphs_seed0.npz     the values of each query at each validation; a run that has this file is not repeated
    tables.md            every number
    figures.json         the data of the figure

The tables of docs/research/intervals.md have the lowest and the highest value over both data sets, metrics and sizes:

    python studies/better_or_noise.py --summary docs/figures/data/better_or_noise*.json
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from icon_themes import IconThemes, on_white  # beside this file
from study_figures import write  # beside this file
from torch import Tensor, nn

from fewshot_callbacks import (
    Conv4,
    Glyphs,
    classes_needed,
    compare_slices,
    evaluate_retrieval,
    rank_reports,
)
from fewshot_callbacks.functional import RetrievalReport, class_subset, paired_difference_interval
from fewshot_callbacks.functional.retrieval.gain_reference import GainReference
from fewshot_callbacks.functional.retrieval.slices import Attribute, slices_of

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", choices=("glyphs", "icons"), default="glyphs")
parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
parser.add_argument("--validations", type=int, default=60, help="of each training run")
parser.add_argument("--steps", type=int, default=20, help="between two validations")
parser.add_argument("--draws", type=int, default=100, help="test sets drawn for each training run")
parser.add_argument("--output", type=Path, default=Path("runs/better_or_noise"))
parser.add_argument(
    "--summary", type=Path, nargs="+", metavar="FILE", help="print the tables of the page from figures.json"
)
options = parser.parse_args()
training_classes, width, batch_size, learning_rate = 200, 16, 64, 1e-3
SIZES = (30, 100)  # classes of a test set
METRICS = ("mAP", "recall@1")
READ_AT = (2, 5, 10, 20, 40, 60)  # validations with an interval in the tables
PLATEAU = 40  # validations at the end of a run that are put in random order
SLICES = 10
PILOTS = (20, 50, 100)  # classes of a pilot
RULES = ("first", "best by value", "best")

Runs = np.ndarray
"""Values of one metric: (trainings, validations, queries)."""


# ----------------------------------------------------------------------------------------------------------- trainings
def trained(seed: int, unseen: Tensor, labels: Tensor) -> dict[str, np.ndarray]:
    """Metric -> its value for each query at each validation of a training."""
    torch.manual_seed(seed)
    chosen = class_subset(train.labels, training_classes, seed=seed)
    images, targets = train.images[chosen], train.labels[chosen].unique(return_inverse=True)[1]
    network = Conv4(unseen.shape[1], width)
    head = nn.Linear(network(unseen[:2]).shape[1], training_classes)
    optimizer = torch.optim.Adam([*network.parameters(), *head.parameters()], lr=learning_rate)
    values: dict[str, list[np.ndarray]] = {metric: [] for metric in METRICS}
    for _ in range(options.validations):
        network.train()
        for _ in range(options.steps):
            batch = torch.randint(len(images), (batch_size,))
            loss = nn.functional.cross_entropy(head(network(look(images[batch].float() / 255))), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            embeddings = torch.cat([network(part) for part in unseen.split(512)])
        report = evaluate_retrieval(embeddings, labels, metrics=METRICS)
        for metric in METRICS:
            values[metric].append(report.per_query[metric].numpy())
    return {metric: np.stack(rows).astype(np.float32) for metric, rows in values.items()}


# --------------------------------------------------------------------------------------------------------- populations
class TestSet:
    """Classes drawn with replacement, and a report of any values of their queries."""

    def __init__(self, classes: int, generator: np.random.Generator) -> None:
        drawn = generator.integers(len(members), size=classes)
        sizes = [len(members[number]) for number in drawn]
        self.queries = np.concatenate([members[number] for number in drawn])
        self.units = np.repeat(np.arange(classes), sizes)
        self.labels = torch.from_numpy(self.units)
        self.weights = np.array(sizes) / len(self.queries)

    def report(self, metric: str, values: np.ndarray) -> RetrievalReport:
        per_query = torch.from_numpy(values).double()
        return replace(
            template,
            values={metric: float(per_query.mean())},
            per_query={metric: per_query},
            query_labels=self.labels,
            intervals={},
            queries=len(values),
        )


def in_order(runs: Runs, test_set: TestSet, training: int, _: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The validations of a run in their order: values of the queries of a test set, and the true value of each."""
    return runs[training][:, test_set.queries], runs[training].mean(axis=1, dtype=np.float64)


def unchanging(
    runs: Runs, test_set: TestSet, training: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The last validations of a run, in a separate random order for each class: all have the same true value."""
    last = runs[training][-PLATEAU:]
    orders = np.argsort(generator.random((test_set.labels[-1] + 1, len(last))), axis=1)
    return last[orders[test_set.units].T, test_set.queries], np.full(len(last), last.mean(dtype=np.float64))


def exchanged(models: np.ndarray, test_set: TestSet, generator: np.random.Generator) -> np.ndarray:
    """Values of models, with the models permuted in each class: all have the same true value."""
    orders = np.argsort(generator.random((test_set.labels[-1] + 1, len(models))), axis=1)
    return models[orders[test_set.units].T, test_set.queries]


# --------------------------------------------------------------------------------------------------------------- gains
def gains(
    metric: str, test_set: TestSet, values: np.ndarray, truth: np.ndarray, rule: str
) -> Iterator[tuple[float, ...]]:
    """The interval of the gain of each validation after the first, and the true gain."""
    reports = [test_set.report(metric, row) for row in values]
    if rule == "best by value":
        for number in range(1, len(reports)):
            best = max(range(number), key=lambda earlier: reports[earlier][metric])
            differences = reports[number].per_query[metric] - reports[best].per_query[metric]
            yield *paired_difference_interval(differences, test_set.labels), truth[number] - truth[best]
        return
    reference = GainReference(metric, rule)
    reference.compare(reports[0])
    place = 0
    for number in range(1, len(reports)):
        gain = reference.compare(reports[number])
        yield *gain.interval, truth[number] - truth[place]
        if gain.is_better and rule == "best":
            place = number


def coverage_of_gains(runs: Runs, metric: str, classes: int, population: Callable, rule: str) -> dict[str, object]:
    """Shares of test sets in which the interval of a validation contains the true gain, and with a false verdict."""
    covered: dict[int, list[bool]] = {}
    false_better, false_worse, better = [], [], []
    for training in range(len(runs)):
        generator = np.random.default_rng([training, classes])
        for _ in range(options.draws):
            test_set = TestSet(classes, generator)
            values, truth = population(runs, test_set, training, generator)
            low, high, gain = np.array(list(gains(metric, test_set, values, truth, rule))).T
            for number, is_covered in enumerate((low <= gain) & (gain <= high), start=2):
                covered.setdefault(number, []).append(bool(is_covered))
            better.append(bool((low > 0).any()))
            false_better.append(bool(((low > 0) & (gain <= 0)).any()))
            false_worse.append(bool(((high < 0) & (gain >= 0)).any()))
    return {
        "covered": {number: float(np.mean(sets)) for number, sets in covered.items()},
        "better": float(np.mean(better)),
        "false_better": float(np.mean(false_better)),
        "false_worse": float(np.mean(false_worse)),
    }


def over_seeds(runs: Runs) -> tuple[float, float]:
    """The smallest and the largest difference of two seeds in the true value of the last validation."""
    last = runs[:, -1].mean(axis=1, dtype=np.float64)
    differences = [abs(first - second) for number, first in enumerate(last) for second in last[:number]]
    return (min(differences), max(differences)) if differences else (math.nan, math.nan)


# ------------------------------------------------------------------------------------------------ ranks, slices, a plan
def coverage_of_ranks(runs: Runs, metric: str, classes: int, *, are_equal: bool) -> float:
    """The share of test sets in which the rank intervals of ten networks contain all true ranks."""
    models = np.concatenate([runs[:, -1], runs[:, runs.shape[1] // 2]])
    truth = np.zeros(len(models)) if are_equal else models.mean(axis=1, dtype=np.float64)
    generator = np.random.default_rng(classes)
    right = []
    for _ in range(sets):
        test_set = TestSet(classes, generator)
        values = exchanged(models, test_set, generator) if are_equal else models[:, test_set.queries]
        ranking = rank_reports({str(name): test_set.report(metric, row) for name, row in enumerate(values)}, metric)
        # Equal models share all of their ranks, and an interval has to contain each of them.
        ranks = [
            (interval, 1 + int((truth > truth[int(name)]).sum()), int((truth >= truth[int(name)]).sum()))
            for name, interval in ranking.ranks.items()
        ]
        right.append(all(interval.best <= first and last <= interval.worst for interval, first, last in ranks))
    return float(np.mean(right))


def coverage_of_slices(runs: Runs, metric: str, classes: int, *, of_classes: bool) -> dict[str, float]:
    """Shares of test sets: all intervals of ten slices contain their true values, the worst does, and a false alarm."""
    generator = np.random.default_rng([classes, of_classes])
    shares = np.arange(1, SLICES + 1) / (SLICES * (SLICES + 1) / 2)  # the smallest slice is a tenth of the largest
    slice_of_class = generator.choice(SLICES, size=len(members), p=shares)
    slice_of_query = slice_of_class[class_of_query] if of_classes else generator.choice(SLICES, len(labels), p=shares)
    model, pair = runs[0, -1], runs[:2, -1] if len(runs) > 1 else runs[0, -2:]
    truth = [model[slice_of_query == number].mean(dtype=np.float64) for number in range(SLICES)]
    requested = template.requested(metric)
    alone, together, worst, alarms = [], [], [], []
    for _ in range(sets):
        test_set = TestSet(classes, generator)
        attribute = Attribute.of_codes(torch.from_numpy(slice_of_query[test_set.queries]), None)
        values = torch.from_numpy(model[test_set.queries]).double()
        for missed, level in ((alone, 1 - 0.05 * len(attribute.names)), (together, 0.95)):
            slices = slices_of("slice", attribute, requested, values, test_set.labels, level)
            missed.append(
                # A slice of one class has no interval, so it makes no claim.
                [
                    name
                    for name, one in slices.items()
                    if one.interval.low > truth[name] or one.interval.high < truth[name]
                ]
            )
        worst.append(slices.worst not in together[-1])
        equal = [test_set.report(metric, row) for row in exchanged(pair, test_set, generator)]
        gains_of_slices = compare_slices(*(replace(one, slices={"slice": attribute}) for one in equal), "slice", metric)
        alarms.append(any(gain.p_value < 0.05 for gain in gains_of_slices.values()))
    return {
        "alone": float(np.mean([not names for names in alone])),
        "together": float(np.mean([not names for names in together])),
        "worst": float(np.mean(worst)),
        "false_alarm": float(np.mean(alarms)),
    }


def planned(runs: Runs, metric: str, pilot: int) -> list[tuple[int, int, float, float]]:
    """The classes, the careful number, and the power of each, at the 10th, 50th and 90th percentile over pilots."""
    pair = runs[:2, -1] if len(runs) > 1 else runs[0, [0, -1]]
    difference = abs(float(np.diff(pair.mean(axis=1, dtype=np.float64))[0]))
    generator = np.random.default_rng(pilot)
    plans = []
    for _ in range(sets):
        test_set = TestSet(pilot, generator)
        plan = classes_needed(*(test_set.report(metric, row[test_set.queries]) for row in pair), difference, metric)
        plans.append((plan.classes, plan.careful))
    percentiles = np.percentile(plans, (10, 50, 90), axis=0).round().astype(int)
    return [
        (int(classes), int(careful), power_of(pair, int(classes)), power_of(pair, int(careful)))
        for classes, careful in percentiles
    ]


def power_of(pair: np.ndarray, classes: int) -> float:
    """Return the fraction of test sets with this number of classes whose interval excludes 0 on the true side."""
    generator = np.random.default_rng(classes)
    side = np.sign(pair[0].mean(dtype=np.float64) - pair[1].mean(dtype=np.float64))
    shown = []
    for _ in range(sets):
        test_set = TestSet(classes, generator)
        differences = torch.from_numpy((pair[0] - pair[1])[test_set.queries]).double()
        low, high = paired_difference_interval(differences, test_set.labels)
        shown.append(low > 0 if side > 0 else high < 0)
    return float(np.mean(shown))


# ---------------------------------------------------------------------------------------------------------------- main
def percent(share: float) -> str:
    return f"{100 * share:.0f}"


def ends(shares: Iterable[float]) -> str:
    """The lowest and the highest of some shares, in percent."""
    low, *_, high = sorted([percent(share) for share in shares], key=int) * 2
    return low if low == high else f"{low}-{high}"


def summary(runs: list[dict]) -> list[str]:
    """The lines of the tables of docs/research/intervals.md, from the figures.json of several data sets."""
    titles = ["population", "compared with", *map(str, READ_AT), "a false better", "a false worse"]
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join(['---'] * len(titles))} |"]
    for population in ("as trained", "unchanging"):
        for rule in RULES:
            rows = [
                row for run in runs for row in run["gains"] if (row["population"], row["rule"]) == (population, rule)
            ]
            cells = [
                ends(row["covered"][str(at)] for row in rows) if str(at) in rows[0]["covered"] else "" for at in READ_AT
            ]
            cells += [ends(row[key] for row in rows) for key in ("false_better", "false_worse")]
            lines.append(f"| {population} | {rule} | {' | '.join(cells)} |")
    lines += ["", "| ten networks | 30 classes | 100 classes |", "| --- | --- | --- |"]
    for kind in ("as trained", "equal"):
        shares = zip(*(row["shares"] for run in runs for row in run["ranks"] if row["kind"] == kind), strict=True)
        lines.append(f"| {kind} | {' | '.join(map(ends, shares))} |")
    lines += ["", "| ten slices | classes | all at 95 % each | all together | the worst | a false alarm |"]
    lines += [f"| {' | '.join(['---'] * 6)} |"]
    for kind in ("across classes", "of whole classes"):
        for classes in SIZES:
            rows = [row for run in runs for row in run["slices"] if (row["kind"], row["classes"]) == (kind, classes)]
            cells = [ends(row[key] for row in rows) for key in ("alone", "together", "worst", "false_alarm")]
            lines.append(f"| {kind} | {classes} | {' | '.join(cells)} |")
    lines += ["", "| pilot | power of the estimate: 10th, 50th, 90th percentile of pilots | of the safe number |"]
    lines += ["| --- | --- | --- |"]
    for pilot in PILOTS:
        plans = [row["plans"] for run in runs for row in run["plans"] if row["pilot"] == pilot]
        cells = [", ".join(ends(plan[at][place] for plan in plans) for at in range(3)) for place in (2, 3)]
        lines.append(f"| {pilot} classes | {' | '.join(cells)} |")
    return lines


if options.summary:
    print("\n".join(summary([json.loads(file.read_text()) for file in options.summary])))
    sys.exit()


options.output.mkdir(parents=True, exist_ok=True)
data, look = (Glyphs, nn.Identity()) if options.data == "glyphs" else (IconThemes, on_white)
train, *others = (data(split) for split in ("train", "val", "test"))
unseen = look(torch.cat([one.images for one in others]).float() / 255)
labels = torch.cat([one.labels + 10_000 * number for number, one in enumerate(others)])
class_of_query = labels.unique(return_inverse=True)[1].numpy()
members = [np.flatnonzero(class_of_query == number) for number in range(class_of_query.max() + 1)]
template = evaluate_retrieval(torch.eye(4)[[0, 0, 1, 1]], [0, 0, 1, 1], metrics=METRICS)

sets = options.draws * len(options.seeds)
of_seeds = []
for seed in options.seeds:
    file = options.output / f"{options.data}_seed{seed}.npz"
    if not file.exists():
        incomplete = file.with_suffix(".incomplete.npz")
        np.savez(incomplete, **trained(seed, unseen, labels))
        incomplete.replace(file)
    with np.load(file) as values:
        of_seeds.append({metric: values[metric] for metric in METRICS})
    curve = of_seeds[-1]["mAP"].mean(axis=1)
    print(
        f"seed {seed}: mAP {curve[0]:.3f}, at half {curve[len(curve) // 2]:.3f}, at the end {curve[-1]:.3f}", flush=True
    )
runs_of = {metric: np.stack([one[metric] for one in of_seeds]) for metric in METRICS}

lines = [
    f"{len(members)} classes, {len(labels):,} queries, {len(options.seeds)} trainings of {options.validations} validations."
]
read_at = [number for number in READ_AT if number <= options.validations]
titles = [
    "population",
    "metric",
    "classes",
    "reference",
    *map(str, read_at),
    "a better",
    "a false better",
    "a false worse",
]
lines += ["", f"| {' | '.join(titles)} |", f"| {' | '.join(['---'] * len(titles))} |"]
curves = []
for name, population in (("as trained", in_order), ("unchanging", unchanging)):
    for metric in METRICS:
        for classes in SIZES:
            for rule in RULES:
                found = coverage_of_gains(runs_of[metric], metric, classes, population, rule)
                curves.append({"population": name, "metric": metric, "classes": classes, "rule": rule, **found})
                cells = [percent(found["covered"][number]) if number in found["covered"] else "" for number in read_at]
                cells += [percent(found[key]) for key in ("better", "false_better", "false_worse")]
                lines.append(f"| {name} | {metric} | {classes} | {rule} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
for metric in METRICS:
    low, high = over_seeds(runs_of[metric])
    lines += ["", f"Two seeds differ by {100 * low:.1f} to {100 * high:.1f} points of {metric} in the end."]

lines += ["", "| ten networks | metric | 30 classes | 100 classes |", "| --- | --- | --- | --- |"]
ranks = []
for kind, are_equal in (("as trained", False), ("equal", True)):
    for metric in METRICS:
        shares = [coverage_of_ranks(runs_of[metric], metric, classes, are_equal=are_equal) for classes in SIZES]
        ranks.append({"kind": kind, "metric": metric, "shares": shares})
        lines.append(f"| {kind} | {metric} | {' | '.join(map(percent, shares))} |")
        print(lines[-1], flush=True)

lines += [
    "",
    f"| {SLICES} slices | metric | classes | all at 95 % each | all together | the worst | a false alarm |",
    "| --- | --- | --- | --- | --- | --- | --- |",
]
slices_found = []
for kind, of_classes in (("across classes", False), ("of whole classes", True)):
    for metric in METRICS:
        for classes in SIZES:
            found = coverage_of_slices(runs_of[metric], metric, classes, of_classes=of_classes)
            slices_found.append({"kind": kind, "metric": metric, "classes": classes, **found})
            lines.append(f"| {kind} | {metric} | {classes} | {' | '.join(map(percent, found.values()))} |")
            print(lines[-1], flush=True)

lines += [
    "",
    "| pilot | metric | classes needed, and their power | to be safe, and their power |",
    "| --- | --- | --- | --- |",
]
plans_found = []
for metric in METRICS:
    for pilot in PILOTS:
        found = planned(runs_of[metric], metric, pilot)
        plans_found.append({"metric": metric, "pilot": pilot, "plans": found})
        cells = [
            f"{', '.join(f'{plan[place]:,}' for plan in found)}: {', '.join(percent(plan[place + 2]) for plan in found)}"
            for place in (0, 1)
        ]
        lines.append(f"| {pilot} classes | {metric} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)

(options.output / "tables.md").write_text("\n".join(lines) + "\n")
content = {"data": options.data, "gains": curves, "ranks": ranks, "slices": slices_found, "plans": plans_found}
write(content, options.output, ["better_or_noise"])
print(f"tables.md and the figure are in {options.output}.")
