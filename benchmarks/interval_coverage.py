"""How often the 95 % intervals hold the truth, on sets that are drawn anew from a population of classes.

    python benchmarks/interval_coverage.py

Each set holds classes of its own: a centre, an amount of noise, and items around the centre, all drawn at random. The truth
is the expected value of the metric over such sets, taken from `--truth` further sets. Of the intervals of `--sets` sets it
prints the share that hold it, and the range in which such a share lies by chance, were the intervals right.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import binom

from fewshot_callbacks.functional import (
    Interval,
    clustered_mean_interval,
    evaluate_retrieval,
    grouped_recall,
    mean_interval,
)


@dataclass(frozen=True)
class Population:
    """Where the sets come from."""

    classes: int
    items: int
    """of each class"""
    dim: int
    noise: float
    """of the typical class; it varies by a factor of two or so from class to class"""

    def draw(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings and labels of one set."""
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(self.classes).repeat_interleave(self.items)
        centres = torch.randn(self.classes, self.dim, generator=generator)
        noise = self.noise * torch.randn(self.classes, 1, generator=generator).mul(0.4).exp()
        return centres[labels] + noise[labels] * torch.randn(len(labels), self.dim, generator=generator), labels


@dataclass
class Record:
    """One kind of interval over many sets."""

    name: str
    truth: float
    sets: int = 0
    held: int = 0
    width: float = 0.0

    def add(self, interval: Interval) -> None:
        self.sets += 1
        self.held += interval.low <= self.truth <= interval.high
        self.width += interval.half_width


def main() -> None:
    """Draw, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=200, help="sets whose intervals are looked at")
    parser.add_argument("--truth", type=int, default=2000, help="further sets, of which the truth is the mean")
    parser.add_argument("--classes", type=int, default=100, help="of each set")
    parser.add_argument("--items", type=int, default=8, help="of each class")
    parser.add_argument("--noise", type=float, default=1.3)
    parser.add_argument("--group-size", type=int, default=5, help="labels in a group of Grouped Recall")
    options = parser.parse_args()
    population = Population(options.classes, options.items, 16, options.noise)
    console = Console()

    means, grouped = [], []
    for seed in track(range(options.sets, options.sets + options.truth), "truth", console=console, transient=True):
        embeddings, labels = population.draw(seed)
        report = evaluate_retrieval(embeddings, labels, recall_k=(1,), group_size=options.group_size)
        means.append(report.mAP)
        grouped.append(report.grouped_recall_at[1])
    true_map, true_grouped = (sum(values) / len(values) for values in (means, grouped))

    records = [
        Record(f"Grouped Recall@1 among {options.group_size} classes, over groups", true_grouped),
        Record("mAP, robust to classes", true_map),
        Record("mAP, as if queries were independent", true_map),
    ]
    for seed in track(range(options.sets), "intervals", console=console, transient=True):
        embeddings, labels = population.draw(seed)
        report = evaluate_retrieval(embeddings, labels, recall_k=(1,), group_size=None)
        values = report.per_query["mAP"]
        records[0].add(grouped_recall(embeddings, labels, group_size=options.group_size).intervals[1])
        records[1].add(clustered_mean_interval(values, labels))
        records[2].add(mean_interval(values))

    table = Table(title=f"{options.sets} sets of {options.classes} classes of {options.items} items")
    for name in ("interval", "truth", "held the truth", "half width"):
        table.add_column(name, justify="left" if name == "interval" else "right")
    for record in records:
        table.add_row(
            record.name, f"{record.truth:.4f}", f"{record.held / record.sets:.1%}", f"{record.width / record.sets:.4f}"
        )
    console.print(table)
    low, high = (binom.ppf(end, options.sets, 0.95) / options.sets for end in (0.025, 0.975))
    console.print(f"By chance, right intervals hold it in {low:.1%} to {high:.1%} of {options.sets} sets.")


if __name__ == "__main__":
    main()
