"""Time what `RetrievalMonitor(compare=...)` adds to an evaluation: id digests, the gain, and the checkpoint entry.

    python benchmarks/gains.py                                  # 8,000 and 31,730 embeddings with 512 dimensions
    python benchmarks/gains.py --items 1000000 --dim 16 --queries 1000 --difficulty random   # ids of a million gallery items

Each row compares the evaluation with the added work, in processor seconds: the minimum over rounds in turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import DIFFICULTIES, make
from _results import Column, Results, add_file_option

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.gain_reference import GainReference

COLUMNS = (
    Column("items", ",d"),
    Column("queries", ",d"),
    Column("evaluation, seconds", ".2f"),
    Column("with ids, seconds", ".2f"),
    Column("gain, seconds", ".4f"),
    Column("gain, %", ".2f"),
    Column("checkpoint, kB", ",.0f"),
)


def seconds(call: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    started = time.process_time()
    call()
    return time.process_time() - started


def measure(results: Results, items: int, options: argparse.Namespace) -> None:
    """Add a row to the table."""
    embeddings, labels = make(items, options.dim, options.difficulty)
    moved = embeddings + 0.02 * torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(1))
    request = {"metrics": ("mAP", "recall@1"), "max_queries": options.queries}
    ids = torch.arange(items)
    before = evaluate_retrieval(embeddings, labels, query_ids=ids, **request)
    after = evaluate_retrieval(moved, labels, query_ids=ids, **request)

    def gain() -> None:
        reference = GainReference("mAP")
        reference.compare(before)
        reference.compare(after)

    calls = (
        lambda: evaluate_retrieval(moved, labels, **request),
        lambda: evaluate_retrieval(moved, labels, query_ids=ids, **request),
        gain,
    )
    times = [[seconds(call) for call in calls] for _ in range(options.rounds)]
    without, with_ids, of_gain = (min(column) for column in zip(*times, strict=True))
    reference = GainReference("mAP")
    reference.compare(after)
    kilobytes = len(reference.report.to_bytes()) / 1000
    results.add(items, after.queries, without, with_ids, of_gain, 100 * of_gain / without, kilobytes)


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[8_000, 31_730])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--difficulty", choices=DIFFICULTIES, default="middling", help="of the embeddings")
    parser.add_argument("--queries", type=int, default=None, help="queries drawn from the items (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    add_file_option(parser)
    options = parser.parse_args()
    evaluate_retrieval(torch.randn(3_000, 8), torch.arange(3_000) % 50)  # compiles
    with Results(COLUMNS, threads=torch.get_num_threads(), file=options.json) as results:
        for items in options.items:
            measure(results, items, options)


if __name__ == "__main__":
    main()
