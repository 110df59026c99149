"""J and the variance ratio of batches, episodes and whole sets; the cost of the ratio; the coverage of its interval.

    python benchmarks/variance_ratio.py [--draws 300]                two tables: simulated data and glyphs
    python benchmarks/variance_ratio.py --cost [--json FILE]         the cost of both for a batch
    python benchmarks/variance_ratio.py --coverage [--sets 200]

The simulated population has 1,000 normal classes of 50 items in 64 dimensions, with a known ratio of variances. The glyphs
are the training split, as pixels and as embeddings of an untrained Conv4. Each cell has the medians over draws of J and of
the ratio, and the standard deviation of the ratio. Both are undefined for a batch in which no class has two items; such
batches are left out and counted.

Costs are median milliseconds of both ratios for a batch on the CPU. The compiled kernel and PyTorch operations (as on a GPU)
take turns.

For the coverage, each set draws new classes: normal in 1 or 64 dimensions with equal or decreasing variance, of equal or
unequal size (log-normal, at least one item), with the same or a different scatter in each class. The table shows the lowest,
median and highest coverage over the regimes of each row. Sets without an interval (an estimate without one class is
undefined) are left out.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option

from fewshot_callbacks import Conv4, EpisodicBatchSampler, Glyphs, discriminant_ratio
from fewshot_callbacks.functional import variance_ratio_of_set
from fewshot_callbacks.functional.discriminant_ratio import EPS, BatchScatter, ClassScatter, batch_ratios

TRUTHS = (0.0, 0.3, 2.0)
CLASSES, ITEMS, DIM = 1000, 50, 64
COSTS = (
    Column("items per batch", ",d"),
    Column("dim", ",d"),
    Column("compiled, ms", ".3f"),
    Column("PyTorch, ms", ".3f"),
    Column("PyTorch, x compiled", ".1f"),
)


def shuffled(labels: Tensor, size: int, draws: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches of a loader with shuffle=True."""
    for _ in range(draws):
        yield torch.randperm(len(labels), generator=generator)[:size]


def episodes(labels: Tensor, ways: int, items: int, draws: int) -> Iterator[Tensor]:
    """Batches with a fixed number of classes and of items per class."""
    for batch in EpisodicBatchSampler(labels, ways=ways, shots=1, queries=items - 1, episodes=draws):
        yield torch.tensor(batch)


def measure(embeddings: Tensor, labels: Tensor, per_class: int, draws: int, generator: torch.Generator) -> list[str]:
    """Return one cell per way to draw: median J, median ratio (standard deviation)."""
    ways = {
        "shuffled 64": shuffled(labels, 64, draws, generator),
        "shuffled 256": shuffled(labels, 256, draws, generator),
        "20 x 4": episodes(labels, 20, 4, draws),
        f"5 x {per_class}": episodes(labels, 5, per_class, draws),
    }
    cells = []
    for batches in ways.values():
        pairs = torch.tensor([[float(x) for x in batch_ratios(embeddings[b], labels[b])] for b in batches])
        known = pairs[~pairs[:, 1].isnan()]
        j, ratio = known.median(dim=0).values.tolist()
        note = f", {len(pairs) - len(known)} undefined" if len(known) < len(pairs) else ""
        cells.append(f"{j:.2g}; {ratio:.3f} ({known[:, 1].std():.3f}{note})")
    whole = variance_ratio_of_set(embeddings, labels)
    low, high = whole.interval
    cells.append(f"{float(discriminant_ratio(embeddings, labels)):.2g}; {whole.value:.3f} [{low:.3f}, {high:.3f}]")
    return cells


def table(title: str, first: str, per_class: int, rows: dict[str, list[str]]) -> Table:
    made = Table(title=title)
    for name in (first, "shuffled 64", "shuffled 256", "20 x 4", f"5 x {per_class}", "whole set [95 %]"):
        made.add_column(name, no_wrap=True)
    for name, cells in rows.items():
        made.add_row(name, *cells)
    return made


def simulated(draws: int) -> Table:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat_interleave(ITEMS)
    rows = {}
    for truth in TRUTHS:
        centres = math.sqrt(truth) * torch.randn(CLASSES, DIM, generator=generator)
        embeddings = centres[labels] + torch.randn(len(labels), DIM, generator=generator)
        rows[f"{truth:g}"] = measure(embeddings, labels, 20, draws, generator)
    return table("simulated: J; variance ratio (standard deviation)", "true ratio", 20, rows)


def of_glyphs(draws: int) -> Table:
    glyphs = Glyphs("train")
    torch.manual_seed(0)
    network = Conv4(in_channels=1).eval()
    images = glyphs.images.float() / 255
    with torch.inference_mode():
        features = torch.cat([network(part) for part in images.split(1024)]).clone()
    generator = torch.Generator().manual_seed(0)
    of = {"pixels": images.flatten(1), "Conv4, untrained": features}
    rows = {name: measure(embeddings, glyphs.labels, 10, draws, generator) for name, embeddings in of.items()}
    return table("glyphs, training split: J; variance ratio (standard deviation)", "embedding", 10, rows)


def by_pytorch(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ratios by PyTorch operations, as on a GPU."""
    with torch.no_grad():
        batch = BatchScatter.of(embeddings, labels, normalize=False)
        return batch.discriminant_ratio(eps=EPS, skip_singletons=False), batch.variance_ratio()


def cost(file: str | None) -> None:
    """Print the cost of both ratios for a batch, and write it to a file."""
    with Results(COSTS, threads=torch.get_num_threads(), file=file) as results:
        for items, dim in ((80, 256), (256, 512), (1024, 2048)):
            embeddings = torch.randn(items, dim)
            labels = torch.arange(items) % (items // 4)
            times: tuple[list[float], ...] = ([], [])
            for _ in range(max(20, 20_000_000 // (items * dim * 40))):
                for ratios, taken in zip((batch_ratios, by_pytorch), times, strict=True):
                    start = time.perf_counter()
                    ratios(embeddings, labels)
                    taken.append(1e3 * (time.perf_counter() - start))
            compiled, pytorch = map(statistics.median, times)
            results.add(items, dim, compiled, pytorch, pytorch / compiled)


def share_that_holds(regime: tuple[int, int, float, int, bool, bool, bool], sets: int) -> float:
    """Return the coverage over sets of this regime; NaN if too few sets have an interval."""
    classes, dim, truth, size, unequal, falling, different = regime
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape))

    variances = (1 / torch.arange(1, dim + 1) if falling else torch.ones(dim)).double()
    held = known = 0
    for _ in range(sets):
        sizes = torch.full((classes,), float(size), dtype=torch.float64)
        if unequal:
            sizes = (size * (0.8 * normal(classes) - 0.32).exp()).round().clamp(min=1)
        width = (0.5 * normal(classes) - 0.25).exp() if different else torch.ones(classes)  # of mean square 1
        # draws class means and scatters from their distributions, instead of all items
        means = (
            math.sqrt(truth) * normal(classes, dim) + normal(classes, dim) * (width / sizes.sqrt())[:, None]
        ) * variances.sqrt()
        squares = torch.from_numpy(rng.chisquare((sizes - 1).clamp(min=1e-9)[:, None].numpy(), size=(classes, dim)))
        scatter = (squares * variances).sum(dim=1) * width.square()
        centre = (sizes / sizes.sum()) @ means
        low, high = variance_ratio_of_set(ClassScatter(sizes, (means - centre).norm(dim=1), scatter.sqrt())).interval
        known += not math.isnan(low)
        held += low <= truth <= high
    return held / known if known >= sets / 2 else math.nan


def coverage(sets: int) -> Table:
    lists = ((3, 5, 10, 20, 50), (1, 64), TRUTHS, (2, 10), (False, True), (False, True), (False, True))
    regimes = list(itertools.product(*lists))
    shares = {regime: share_that_holds(regime, sets) for regime in track(regimes, "coverage", transient=True)}
    inside = sum(0.93 <= share <= 0.97 for share in shares.values())
    made = Table(
        title=f"share of {sets} sets whose 95 % interval holds the truth; {inside} of {len(regimes)} in 93 to 97 %"
    )
    for name in ("", "lowest", "median", "highest", "without an interval"):
        made.add_column(name, justify="left" if not name else "right")
    names = (
        "classes",
        "dimensions",
        "true ratio",
        "items of a class",
        "unequal sizes",
        "falling variances",
        "unequal scatter",
    )
    for position, name in enumerate(names):
        for value in lists[position]:
            every = [share for regime, share in shares.items() if regime[position] == value]
            known = torch.tensor([share for share in every if not math.isnan(share)], dtype=torch.float64)
            spread = (known.min(), known.median(), known.max())
            made.add_row(f"{name}: {value}", *(f"{float(x):.1%}" for x in spread), str(len(every) - len(known)))
    return made


def main() -> None:
    """Print the chosen tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300, help="batches of each kind")
    parser.add_argument("--cost", action="store_true", help="of a batch, instead of the tables")
    parser.add_argument("--coverage", action="store_true", help="of the interval, instead of the tables")
    parser.add_argument("--sets", type=int, default=200, help="of each regime, for --coverage")
    add_file_option(parser)
    options = parser.parse_args()
    if options.json and not options.cost:
        parser.error("--json writes the table of costs. Add --cost.")
    console = Console(width=160)
    if options.cost:
        cost(options.json)
    elif options.coverage:
        console.print(coverage(options.sets))
    else:
        for made in (simulated, of_glyphs):
            console.print(made(options.draws))


if __name__ == "__main__":
    main()
