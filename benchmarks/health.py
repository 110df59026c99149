"""What the health of an embedding costs beside a validation, and a batch in training.

    python benchmarks/health.py [--items 31730] [--dim 512] [--turns 3]

Processor seconds of one thread, median of some turns, and shares of `evaluate_retrieval` of the same items in the same
process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fewshot_callbacks import embedding_health, evaluate_retrieval
from fewshot_callbacks.functional import Moments


def seconds(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    """Measure in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=31_730)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)  # others wait in loops, which counts as work
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(options.items) // 6
    centres = torch.randn(int(labels[-1]) + 1, options.dim, generator=generator)
    items = centres[labels] + torch.randn(options.items, options.dim, generator=generator)
    batch = items[:256]
    runs: dict[str, Callable[[], Any]] = {
        "`evaluate_retrieval`": lambda: evaluate_retrieval(items, labels, label_groups=None),
        "the moments alone, `Moments`": lambda: Moments.of(items),
        "`embedding_health(k=None)`, no labels": lambda: embedding_health(items, k=None),
        "the same with labels": lambda: embedding_health(items, labels, k=None),
        "`embedding_health`, no labels": lambda: embedding_health(items),
        "both ranks of a batch of 256": lambda: [(m := Moments.of(batch)).rankme(), m.effective_rank()],
    }
    embedding_health(items[:5000], labels[:5000])  # compiles
    evaluate_retrieval(items[:5000], labels[:5000])
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.turns):
        for name, run in runs.items():
            taken[name].append(seconds(run))
    table = Table(title=f"{options.items:,} items of {options.dim} dimensions, {len(centres):,} classes")
    for name in ("", "seconds of a processor", "of the validation"):
        table.add_column(name, justify="left" if not name else "right")
    whole = statistics.median(next(iter(taken.values())))
    for name, times in taken.items():
        median = statistics.median(times)
        table.add_row(name, f"{median:.2f} ({min(times):.2f} to {max(times):.2f})", f"{median / whole:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
