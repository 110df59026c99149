"""How close the time that `fewshot plan --here` predicts is to the time of the evaluation.

    python benchmarks/plan.py                                                        # made embeddings
    python benchmarks/plan.py --items 8000 16000 --dim 128 --seconds 1               # in two minutes
    python benchmarks/plan.py --embeddings paragraphs files --items 8000 31730       # real ones

`_embeddings.py` makes synthetic embeddings with a given difficulty. `_real_embeddings.py` makes at most `--items` real ones;
its packages must be installed.

Each set is planned from its own embeddings and labels, as in `fewshot plan --files FILE --here`, and evaluated with the
default metrics. The last column divides the middle of the predicted range (its geometric mean) by the time of the
evaluation.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from _embeddings import DIFFICULTIES, make
from _real_embeddings import SOURCES, add_cache_option, load
from _results import Column, Results, add_file_option
from torch import Tensor

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.functional import measure_evaluation, plan_evaluation

COLUMNS = (
    Column("items", ",d"),
    Column("dim", ",d"),
    Column("embeddings"),
    Column("predicted, seconds"),
    Column("took, seconds", ".1f"),
    Column("predicted / took", ".2f"),
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
    parser.add_argument("--dim", type=int, default=256, help="of made embeddings (default: %(default)s)")
    parser.add_argument(
        "--embeddings",
        choices=[*DIFFICULTIES, *SOURCES],
        nargs="+",
        default=["well-trained", "hard", "heavy-tailed"],
        help="difficulties of made embeddings, or real sets (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="time for the samples (default: %(default)s)")
    add_cache_option(parser)
    add_file_option(parser)
    options = parser.parse_args()
    for name in options.embeddings:
        missing = SOURCES[name].missing() if name in SOURCES else []
        if missing:
            parser.error(f"{name}: {', '.join(missing)} is missing. Run: {SOURCES[name].install}")
    with Results(COLUMNS, threads=torch.get_num_threads(), file=options.json) as results:
        for most_items in options.items:
            for name in options.embeddings:
                if name in SOURCES:
                    embeddings, labels = load(name, most_items, options.cache)
                else:
                    embeddings, labels = make(most_items, options.dim, name)
                items, dim = embeddings.shape
                announced = measure_evaluation(
                    plan_evaluation(items, items, dim), embeddings, labels, seconds=options.seconds
                )
                low, high = announced.low_seconds, announced.high_seconds
                took = seconds(embeddings, labels)
                text = f"{low:.1f}" if low == high else f"{low:.1f} to {high:.1f}"
                results.add(items, dim, name, text, took, math.sqrt(low * high) / took)


if __name__ == "__main__":
    main()
