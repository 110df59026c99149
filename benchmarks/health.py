"""The cost of embedding health after a validation and for a training batch.

    python benchmarks/health.py [--items 31730] [--dim 512] [--turns 3] [--json FILE]

The table shows processor seconds of one thread, as medians over turns with minimum and maximum, and as fractions of
`evaluate_retrieval` on the same items in the same process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option
from retrieval import spread

from fewshot_callbacks import embedding_health, evaluate_retrieval
from fewshot_callbacks.functional import Moments

COLUMNS = (
    Column("what"),
    Column("processor seconds", ".2f"),
    Column("fraction of `evaluate_retrieval`", ".1%"),
)


def seconds(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def main() -> None:
    """Measure in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=31_730)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    add_file_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)  # other threads spin while they wait, which counts as processor time
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(options.items) // 6
    centres = torch.randn(int(labels[-1]) + 1, options.dim, generator=generator)
    items = centres[labels] + torch.randn(options.items, options.dim, generator=generator)
    batch = items[:256]
    runs: dict[str, Callable[[], Any]] = {
        "`evaluate_retrieval`": lambda: evaluate_retrieval(items, labels, label_groups=None),
        "only the moments, `Moments`": lambda: Moments.of(items),
        "`embedding_health(k=None)` without labels: ranks, decay, uniformity": lambda: embedding_health(items, k=None),
        "the same with labels: NC1, CDNV and alignment, too": lambda: embedding_health(items, labels, k=None),
        "`embedding_health` without labels, with neighbours": lambda: embedding_health(items),
        "both ranks of a batch of 256": lambda: [(m := Moments.of(batch)).rankme(), m.effective_rank()],
    }
    embedding_health(items[:5000], labels[:5000])  # compiles
    evaluate_retrieval(items[:5000], labels[:5000])
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.turns):
        for name, run in runs.items():
            taken[name].append(seconds(run))
    print(f"{options.items:,} items of {options.dim} dimensions, {len(centres):,} classes\n")
    whole = statistics.median(taken["`evaluate_retrieval`"])
    with Results(COLUMNS, threads=1, file=options.json) as results:
        for name, times in taken.items():
            results.add(name, spread(times), statistics.median(times) / whole)


if __name__ == "__main__":
    main()
