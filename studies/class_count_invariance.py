"""Is my embedding overfitting, or does my validation set just have more classes? What Grouped Recall@K adds.

Run it as it is:    python studies/class_count_invariance.py
It trains six small networks in two or three minutes on two cores, and writes to runs/class_count_invariance:

1. Recall@1 and Grouped Recall@1 on an eighth, a quarter, half and all of the unseen classes.
2. The difference between two random halves of the unseen classes, and whether it stays inside its bound.
3. Both metrics of many checkpoints of one run, and how much their rankings agree.
4. The gap between training and unseen classes in both metrics, with more and more dropout.
5. With --model-size, the same gap of networks with 8 to 128 filters per layer, three training runs each: 15 more minutes.

The weights of each run are saved next to the tables, so that a later or interrupted call resumes from them.

--data icons does the same on the icon themes of this machine (examples/icons), in a separate folder.

It follows the experiments of Zhdanov and Karpukhin, who proposed the metric, on data that needs no download.
docs/metrics/grouped_recall.md shows the results.
"""

import argparse
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import torch
from icon_themes import IconThemes  # beside this file
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from scipy import stats
from study_figures import write  # beside this file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import spearman_corrcoef

from fewshot_callbacks import Conv4, GeneralizationGapMonitor, Glyphs, evaluate_retrieval
from fewshot_callbacks.functional import GeneralizationGap, GroupedRecall, Interval, class_subset

# ---------------------------------------------------------------------------------------------------------------------
# Settings: change them here, or some on the command line.
training_classes = 100  # few enough for a network to memorise
epochs = 30
dropouts = (0.0, 0.2, 0.5, 0.7, 0.9, 0.99)  # on the embedding that the classifier sees
width = 32  # filters of each layer of Conv4
widths, seeds = (8, 16, 32, 64, 128), (0, 1, 2)  # of --model-size
group_size = 10
halvings = 20
seed = 0
# ---------------------------------------------------------------------------------------------------------------------
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", choices=("glyphs", "icons"), default="glyphs")
parser.add_argument("--epochs", type=int, default=epochs)
parser.add_argument("--dropouts", type=float, nargs="+", default=dropouts)
parser.add_argument("--model-size", action="store_true", help="also the gap of small and of large networks")
parser.add_argument("--widths", type=int, nargs="+", default=widths, help="filters of each layer, for --model-size")
parser.add_argument(
    "--seeds", type=int, nargs="+", default=seeds, help="of the trainings for --model-size, two or more"
)
parser.add_argument("--output", type=Path, default=None, help="by default runs/class_count_invariance")
options = parser.parse_args()
channels = 3 if options.data == "icons" else 1
options.output = options.output or Path("runs/class_count_invariance" + ("_icons" if channels == 3 else ""))
if options.model_size and len(options.seeds) < 2:
    parser.error(f"--seeds {options.seeds[0]}: the spread over trainings needs at least two seeds.")
options.output.mkdir(parents=True, exist_ok=True)
console = Console()
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class Classifier(LightningModule):
    """An ordinary classifier of the training classes; the layer before the last one is the embedding."""

    def __init__(self, dropout: float, width: int) -> None:
        super().__init__()
        self.encoder = Conv4(in_channels=channels, width=width)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.LazyLinear(training_classes))
        self.head(self.encoder(torch.zeros(2, channels, 32, 32)))  # the number of features is known now

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.encoder(images)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.head(self(images)), labels)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        images, labels = batch
        return {"embeddings": self(images), "labels": labels}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Snapshots(Callback):
    """The embeddings of the unseen classes, every few steps of the first epochs."""

    def __init__(self, every_n_steps: int, epochs: int) -> None:
        self.every, self.epochs, self.taken = every_n_steps, epochs, []

    def on_train_batch_start(self, trainer: Trainer, module: Classifier, batch: object, batch_idx: int) -> None:
        if trainer.current_epoch < self.epochs and batch_idx % self.every == 0:
            self.taken.append(embed(module))


def trained(dropout: float, width: int, seed: int, *callbacks: Callback) -> Classifier:
    """Return the trained network: from the file of an earlier call, or trained now."""
    module = untrained(dropout, width, seed)
    file = options.output / "weights" / f"width{width}_dropout{dropout:g}_seed{seed}_epochs{options.epochs}.pt"
    if file.exists() and not callbacks:
        module.load_state_dict(torch.load(file, weights_only=True))
        return module
    trainer = Trainer(
        max_epochs=options.epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=console.is_terminal,
        limit_val_batches=0,  # measured once, after the training
    )
    trainer.fit(
        module, DataLoader(known, batch_size=64, shuffle=True, drop_last=True), DataLoader(unseen, batch_size=256)
    )
    save(module.state_dict(), file)
    return module


def untrained(dropout: float, width: int, seed: int) -> Classifier:
    seed_everything(seed, verbose=False)
    return Classifier(dropout, width)


def gap_of(module: Classifier) -> GeneralizationGap:
    """The values of GeneralizationGapMonitor, here computed after training instead of at every epoch."""
    monitor = GeneralizationGapMonitor(bank=known, classes=None, label_groups=group_size)
    trainer = Trainer(callbacks=[monitor], logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.validate(module, DataLoader(unseen, batch_size=256), verbose=False)
    assert monitor.gap is not None
    return monitor.gap


def load(split: str) -> Glyphs | IconThemes:
    return IconThemes(split) if options.data == "icons" else Glyphs(split)


def labelled(*parts: tuple[Glyphs | IconThemes, torch.Tensor]) -> TensorDataset:
    """Chosen items of one set, or of several with different classes."""
    images, labels, classes = [], [], 0
    for part, chosen in parts:
        images.append(part.batch(chosen.tolist())[0])
        labels.append(part.labels[chosen].unique(return_inverse=True)[1] + classes)
        classes = int(labels[-1].max()) + 1
    data = TensorDataset(torch.cat(images), torch.cat(labels))
    data.labels = data.tensors[1]  # by which classes can be drawn
    return data


def embed(module: Classifier) -> torch.Tensor:
    was_training = module.training
    module.eval()
    with torch.no_grad():
        embeddings = torch.cat([module(images) for images, _ in DataLoader(unseen, batch_size=256)])
    module.train(was_training)
    return embeddings


def measure(embeddings: torch.Tensor, chosen: torch.Tensor):
    return evaluate_retrieval(
        embeddings[chosen], unseen.labels[chosen], metrics=("recall@1", "grouped_recall@1"), label_groups=group_size
    )


def halves(classes: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The items of two random halves of the classes, again and again."""
    for number in range(halvings):
        first = class_subset(classes, int(classes.max() + 1) // 2, seed=1000 + number)
        is_first = torch.zeros(len(classes), dtype=torch.bool)
        is_first[first] = True
        yield first, (~is_first).nonzero().flatten()


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def with_ends(value: float, interval: Interval) -> str:
    return f"{percent(value)} ({percent(interval.low)} to {percent(interval.high)})"


def normal_error(grouped: GroupedRecall) -> float:
    """Return the standard error over groups; the interval of the source is ± 1.96 standard errors (its section 3.2)."""
    of_groups = grouped.per_group[1][0].double()
    return float(of_groups.std() / len(of_groups) ** 0.5)


def over_seeds(values: list[float]) -> tuple[float, Interval]:
    """Return the mean over training runs, and its 95 % interval by Student's t."""
    values = torch.tensor(values, dtype=torch.float64)
    centre, error = float(values.mean()), float(values.std() / len(values) ** 0.5)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return centre, Interval(centre - half, centre + half)


def mean_interval(intervals: list[Interval]) -> Interval:
    """Return the mean interval of several training runs that are measured on the same classes."""
    return Interval(*(sum(ends) / len(intervals) for ends in zip(*intervals, strict=True)))


def save(content: object, file: Path) -> None:
    """Save a file as a whole, so that an interrupted run leaves no partial file."""
    file.parent.mkdir(exist_ok=True)
    incomplete = file.with_suffix(".incomplete")
    torch.save(content, incomplete)
    incomplete.replace(file)


# ------------------------------------------------------------------------------------------------------------- the data
seed_everything(seed, verbose=False)
to_train_on = load("train")
known = labelled((to_train_on, class_subset(to_train_on.labels, training_classes, seed=seed)))
# The unseen classes are other scripts for the glyphs, and other names for the icons.
unseen = labelled(*((part, torch.arange(len(part))) for part in (load("val"), load("test"))))
classes = int(unseen.labels.max()) + 1
console.print(
    f"{len(known):,} images of {training_classes} classes to train on, {len(unseen):,} of {classes} unseen classes"
)

# ------------------------------------------------------------------------------------------------------------ trainings
# Figure 2 needs the embeddings during the first run; they are also saved to a file.
checkpoint_file = options.output / "weights" / f"checkpoints_dropout{options.dropouts[0]:g}_epochs{options.epochs}.pt"
if checkpoint_file.exists():
    taken = torch.load(checkpoint_file, weights_only=True)
else:
    snapshots = Snapshots(every_n_steps=4, epochs=4)
    trained(options.dropouts[0], width, seed, snapshots)
    taken = snapshots.taken
    save(taken, checkpoint_file)
first_embeddings = embed(trained(options.dropouts[0], width, seed))
before_training = gap_of(untrained(options.dropouts[0], width, seed))  # a gap at this point is not overfitting
rows = []
for dropout in options.dropouts:
    rows.append((dropout, gap_of(trained(dropout, width, seed))))
    console.print(f"dropout {dropout:g}: {rows[-1][1].in_words()}")
of_width = {}  # filters of a layer -> the gap before and after the training, for each seed
for filters in options.widths if options.model_size else ():
    of_width[filters] = []
    for number in options.seeds:
        of_width[filters].append((gap_of(untrained(0.0, filters, number)), gap_of(trained(0.0, filters, number))))
        console.print(f"width {filters}, seed {number}: {of_width[filters][-1][1].in_words()}")

# ------------------------------------------------------------------------- figure 1: fewer classes, and the same network
fractions, draws = (8, 4, 2, 1), 20
by_fraction = {}
for fraction in fractions:
    subsets = [
        measure(first_embeddings, class_subset(unseen.labels, classes // fraction, seed=number))
        for number in range(draws if fraction > 1 else 1)
    ]
    by_fraction[fraction] = subsets
    console.print(
        f"{subsets[0].classes} classes, mean of {len(subsets)}: Recall@1 "
        f"{percent(mean(part['recall@1'] for part in subsets))}, "
        f"Grouped Recall@1 {percent(mean(part.grouped.at[1] for part in subsets))}"
    )
whole = by_fraction[1][0]
covered, covered_normal = [], []  # by our interval, and by the source's
for fraction in fractions[:-1]:
    parts = [part.grouped for part in by_fraction[fraction]]
    covered.append(sum(part.intervals[1].low <= whole.grouped.at[1] <= part.intervals[1].high for part in parts))
    covered_normal.append(sum(abs(part.at[1] - whole.grouped.at[1]) <= 1.96 * normal_error(part) for part in parts))

# ------------------------------------------------------------------------------ table 1: two halves of the unseen classes
differences = []
for halved in halves(unseen.labels):
    one, other = (measure(first_embeddings, part) for part in halved)
    assert isinstance(one.grouped, GroupedRecall)
    grouped = one.grouped.minus(other.grouped)[1]
    plain = one["recall@1"] - other["recall@1"]
    normal = 1.96 * math.hypot(normal_error(one.grouped), normal_error(other.grouped))  # the source's bound
    differences.append(
        (
            not grouped.is_beyond_chance,
            abs(grouped.value) <= normal,
            abs(grouped.value),
            grouped.interval.half_width,
            normal,
            abs(plain),
        )
    )
inside, inside_normal, *sums = (sum(column) for column in zip(*differences, strict=True))
mean_difference, mean_bound, mean_normal_bound, mean_plain = (total / halvings for total in sums)

# ----------------------------------------------------------------------------------- figure 2: checkpoints of one training
everything = torch.arange(len(unseen))
checkpoints = [measure(embeddings, everything) for embeddings in taken]
points = torch.tensor([(report["recall@1"], report.grouped.at[1]) for report in checkpoints], dtype=torch.float64)
correlation = float(spearman_corrcoef(*points.T))


# -------------------------------------------------------------------------------------------------------------- pictures
def ends(value: float, interval: Interval) -> dict[str, float]:
    return {"value": round(value, 6), "low": round(interval.low, 6), "high": round(interval.high, 6)}


def gap_ends(gap: GeneralizationGap) -> dict[str, dict[str, float]]:
    return {
        name: ends(one.value, one.interval) for name, one in (("recall", gap.recall[1]), ("grouped", gap.grouped[1]))
    }


def of_seeds(gaps: list[tuple[GeneralizationGap, GeneralizationGap]], metric: str) -> dict[str, object]:
    """The gap of one size of the network: its mean over seeds, each seed, and before the training."""
    before, after = ([getattr(gap, metric)[1] for gap in of_time] for of_time in zip(*gaps, strict=True))
    values = [one.value for one in after]
    return {
        "mean": ends(over_seeds(values)[0], mean_interval([one.interval for one in after])),
        "seeds": [round(value, 6) for value in values],
        "untrained": round(over_seeds([one.value for one in before])[0], 6),
    }


steps_of_epoch = len(known) // 64
data = {
    "draws": [
        {
            "classes": classes // fraction,
            "recall": [ends(r["recall@1"], r.intervals["recall@1"]) for r in by_fraction[fraction]],
            "grouped": [ends(r.grouped.at[1], r.grouped.intervals[1]) for r in by_fraction[fraction]],
        }
        for fraction in fractions
    ],
    "checkpoints": {
        "steps": [epoch * steps_of_epoch + step for epoch in range(4) for step in range(0, steps_of_epoch, 4)],
        **{
            name: [round(value, 6) for value in column]
            for name, column in zip(("recall", "grouped"), points.T.tolist(), strict=True)
        },
    },
    "rank_correlation": correlation,
    "untrained": gap_ends(before_training),
    "dropout": [{"dropout": dropout, **gap_ends(gap)} for dropout, gap in rows],
    "dots": f"each of {len(options.seeds)} seeds",
    "model_size": [
        {"filters": filters, **{metric: of_seeds(gaps, metric) for metric in ("recall", "grouped")}}
        for filters, gaps in of_width.items()
    ],
}
write(data, options.output, ["class_count", "dropout_gap", *(["model_size_gap"] if of_width else [])])

# ---------------------------------------------------------------------------------------------------------------- tables
lines = [
    f"| classes | Recall@1, mean of {draws} draws (lowest to highest) | Grouped Recall@1 | its interval, mean ends "
    "| draws whose interval contains the value of all classes | the same, mean ± 1.96 standard errors |",
    "| --- | --- | --- | --- | --- | --- |",
]
held_of = zip([*covered, None], [*covered_normal, None], strict=True)
for fraction, held in zip(fractions, held_of, strict=True):
    parts = by_fraction[fraction]
    cells = [str(parts[0].classes)]
    for values in ([part["recall@1"] for part in parts], [part.grouped.at[1] for part in parts]):
        around = f" ({percent(min(values))} to {percent(max(values))})" if len(values) > 1 else ""
        cells.append(percent(mean(values)) + around)
    ends_of = mean_interval([part.grouped.intervals[1] for part in parts])
    cells.append(f"{percent(ends_of.low)} to {percent(ends_of.high)}")
    cells += ["" if count is None else f"{count} of {draws}" for count in held]
    lines.append(f"| {' | '.join(cells)} |")
lines += [
    "",
    "| two halves | |",
    "| --- | --- |",
    f"| halvings whose difference in Grouped Recall@1 is inside our bound | {inside} of {halvings} |",
    f"| inside the source's, 1.96 √(s₁² / n₁ + s₂² / n₂) | {inside_normal} of {halvings} |",
    f"| mean difference (percentage points) | {percent(mean_difference)} |",
    f"| mean bound, ours and the source's | {percent(mean_bound)}, {percent(mean_normal_bound)} |",
    f"| mean difference in plain Recall@1 | {percent(mean_plain)} |",
    f"| rank correlation of both metrics over {len(points)} checkpoints | {correlation:.3f} |",
    "",
    "| dropout | training (grouped) | unseen (grouped) | training (plain) | unseen (plain) | gap (grouped) | gap (plain) |",
    "| --- | --- | --- | --- | --- | --- | --- |",
]
for name, gap in [("untrained", before_training), *((f"{dropout:g}", gap) for dropout, gap in rows)]:
    grouped, plain = gap.grouped[1], gap.recall[1]
    cells = [name, *(percent(v) for v in (grouped.first, grouped.second, plain.first, plain.second))]
    cells += [with_ends(d.value, d.interval) for d in (grouped, plain)]
    lines.append(f"| {' | '.join(cells)} |")
if of_width:
    lines += [
        "",
        "| filters | parameters | training (grouped) | unseen (grouped) | gap (grouped) | smallest to largest of the seeds "
        "| untrained | gap (plain) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
for filters, gaps in of_width.items():
    grouped, plain = ([getattr(gap, metric)[1] for _, gap in gaps] for metric in ("grouped", "recall"))
    values = [one.value for one in grouped]
    cells = [str(filters), f"{sum(p.numel() for p in Conv4(channels, filters).parameters()):,}"]
    cells += [percent(over_seeds([getattr(one, side) for one in grouped])[0]) for side in ("first", "second")]
    cells.append(with_ends(over_seeds(values)[0], mean_interval([one.interval for one in grouped])))
    cells.append(f"{percent(min(values))} to {percent(max(values))}")
    cells.append(percent(over_seeds([gap.grouped[1].value for gap, _ in gaps])[0]))
    cells.append(with_ends(over_seeds([one.value for one in plain])[0], mean_interval([one.interval for one in plain])))
    lines.append(f"| {' | '.join(cells)} |")
if len(of_width) > 1:
    first, last = min(of_width), max(of_width)
    lines += [
        "",
        f"| {last} filters minus {first}, mean over {len(options.seeds)} seeds and its 95 % interval | |",
        "| --- | --- |",
    ]
    for name, difference in (("grouped", lambda gap: gap.grouped[1]), ("plain", lambda gap: gap.recall[1])):
        changes = [
            difference(large).value - difference(small).value
            for (_, large), (_, small) in zip(of_width[last], of_width[first], strict=True)
        ]
        lines.append(f"| gap ({name}), percentage points | {with_ends(*over_seeds(changes))} |")
(options.output / "tables.md").write_text("\n".join(lines) + "\n")
(options.output / "results.json").write_text(
    json.dumps(
        {
            "inside": inside,
            "inside_normal": inside_normal,
            "halvings": halvings,
            "covered": {str(classes // fraction): held for fraction, held in zip(fractions[:-1], covered, strict=True)},
            "covered_normal": {
                str(classes // fraction): held for fraction, held in zip(fractions[:-1], covered_normal, strict=True)
            },
            "rank_correlation": None if math.isnan(correlation) else correlation,
            "gaps": {f"{dropout:g}": gap.metrics() for dropout, gap in rows},
            "gaps_of_widths": {filters: [gap.metrics() for _, gap in gaps] for filters, gaps in of_width.items()},
        },
        indent=2,
    )
    + "\n"
)
console.print("\n".join(lines), soft_wrap=True)
console.print(f"Figures, tables.md and results.json are in {options.output}.")
