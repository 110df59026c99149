"""The cost of evaluating a small set, metric by metric; most of it is fixed.

    python benchmarks/small_sets.py [--items 250 1000 2000 4000] [--dim 512] [--difficulty well-trained] [--rounds 15]

The table shows processor milliseconds of one thread, as medians over rounds in turns. Each row computes the metrics of the
row above and further metrics.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from _embeddings import DIFFICULTIES, make
from _results import Column, Results, add_file_option
from torch import Tensor

from fewshot_callbacks import DEFAULT_METRICS, evaluate_retrieval

OF_RANKS = ("mAP", "map@r", "r_precision", "mrr", "recall@1", "recall@5", "recall@10")
"""Metrics of the ranks of relevant items."""

METRICS = {
    "mAP": OF_RANKS[:1],
    "all rank metrics": OF_RANKS,
    "and Grouped Recall": (*OF_RANKS, "grouped_recall@1"),
    "and pair metrics: the default": DEFAULT_METRICS,
}


def runs(embeddings: Tensor, labels: Tensor) -> dict[str, Callable[[], object]]:
    """Return row -> the timed call."""
    timed: dict[str, Callable[[], object]] = {"the float32 product of all pairs": lambda: embeddings @ embeddings.T}
    for row, metrics in METRICS.items():
        timed[row] = partial(evaluate_retrieval, embeddings, labels, metrics=metrics)
    return timed


def milliseconds(timed: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median of each row over rounds, after a first round that compiles."""
    taken: dict[str, list[float]] = {row: [] for row in timed}
    for _ in range(rounds + 1):
        for row, run in timed.items():
            started = time.process_time()
            run()
            taken[row].append(1000 * (time.process_time() - started))
    return {row: statistics.median(times[1:]) for row, times in taken.items()}


def main() -> None:
    """Measure each size, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[250, 1000, 2000, 4000])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--difficulty", choices=DIFFICULTIES, default="well-trained")
    parser.add_argument("--rounds", type=int, default=15)
    add_file_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)  # idle threads spin, and `process_time` counts that
    of_size = [
        milliseconds(runs(*make(items, options.dim, options.difficulty)), options.rounds) for items in options.items
    ]
    columns = (
        Column(f"processor ms, {options.difficulty}"),
        *(Column(f"{items:,} items", ".1f") for items in options.items),
    )
    with Results(columns, threads=1, file=options.json) as results:
        for row in of_size[0]:
            results.add(row, *(times[row] for times in of_size))


if __name__ == "__main__":
    main()
