"""How close the time that `fewshot plan --here` announces comes to that of the evaluation.

    python benchmarks/plan.py [--items 31730 158652] [--dim 256] [--difficulty well-trained hard heavy-tailed]

Each set is planned from its own embeddings and labels, as `fewshot plan --files FILE --here` does, and evaluated with the
default metrics. In the last column the middle of the announced range, its geometric mean, stands beside the time that the
evaluation took.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from _embeddings import DIFFICULTIES, make
from _results import Column, Results, add_file_option
from torch import Tensor

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.functional import measure_evaluation, plan_evaluation

COLUMNS = (
    Column("items", ",d"),
    Column("dim", ",d"),
    Column("embeddings"),
    Column("announced, seconds"),
    Column("took, seconds", ".1f"),
    Column("announced / took", ".2f"),
)


def seconds(embeddings: Tensor, labels: Tensor) -> float:
    """Return the seconds of an evaluation."""
    started = time.perf_counter()
    evaluate_retrieval(embeddings, labels)
    return time.perf_counter() - started


def main() -> None:
    """Plan and evaluate each set, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[31730, 158652])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument(
        "--difficulty", choices=DIFFICULTIES, nargs="+", default=["well-trained", "hard", "heavy-tailed"]
    )
    add_file_option(parser)
    options = parser.parse_args()
    with Results(COLUMNS, threads=torch.get_num_threads(), file=options.json) as results:
        for items in options.items:
            plan = plan_evaluation(items, items, options.dim)
            for difficulty in options.difficulty:
                embeddings, labels = make(items, options.dim, difficulty)
                announced = measure_evaluation(plan, embeddings, labels)
                low, high = announced.low_seconds, announced.high_seconds
                took = seconds(embeddings, labels)
                text = f"{low:.1f}" if low == high else f"{low:.1f} to {high:.1f}"
                results.add(items, options.dim, difficulty, text, took, math.sqrt(low * high) / took)


if __name__ == "__main__":
    main()
