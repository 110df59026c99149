"""Time relevance judgements against the product of all pairs, lists against labels, and several labels against one.

    python benchmarks/judgements.py                    # 1 % of MS MARCO's documents, sets of 8,000 items
    python benchmarks/judgements.py --scale 0.01 0.1 --items 8000 31730
    python benchmarks/judgements.py --scale 1 --dtype float32 --rounds 1 --items 0 --labelled 0    # all documents: 14 GB

Each row compares an evaluation with its baseline, in turns: the minimum processor seconds over rounds, and the quotient.
Memory is the peak memory of the process during the evaluation, minus its memory before.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import make
from _results import Column, Results, add_file_option

from fewshot_callbacks import Relevance, evaluate_retrieval

# MS MARCO's development set: queries, documents, dimension of a small model, judged pairs.
QUERIES, DOCUMENTS, DIM, JUDGED = 6_980, 8_841_823, 384, 7_437
METRICS = ("ndcg@10", "mrr@10", "ir_recall@100", "mAP")
COLUMNS = (
    Column("set"),
    Column("compared with"),
    Column("its processor seconds", ".2f"),
    Column("evaluation of"),
    Column("processor seconds", ".2f"),
    Column("ratio", ".2f"),
    Column("MB beyond the data", ",.0f"),
)


def held() -> int:
    """Return the memory of this process in bytes (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def measured(into: dict[str, float]) -> Iterator[None]:
    """Record processor seconds, and the peak memory in MB minus the memory at the start."""
    done = threading.Event()
    before = most = held()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.01):
            most = max(most, held())

    watcher, started = threading.Thread(target=watch), time.process_time()
    watcher.start()
    try:
        yield
    finally:
        seconds = time.process_time() - started
        done.set()
        watcher.join()
        into["seconds"] = min(seconds, into.get("seconds", seconds))
        into["memory"] = max((most - before) / 1e6, into.get("memory", 0.0))


def compare(results: Results, title: str, rows: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Run the baseline and the evaluation in turns, baseline first, and add a row."""
    found: dict[str, dict[str, float]] = {name: {} for name in rows}
    for _ in range(rounds):
        for name, run in rows.items():
            with measured(found[name]):
                run()
    first, second = rows
    before = found[first]["seconds"]
    seconds = found[second]["seconds"]
    results.add(title, first, before, second, seconds, seconds / before, found[second]["memory"])


def product(queries: torch.Tensor, documents: torch.Tensor, rows: int = 8_192) -> None:
    """Multiply all pairs in float32, in tiles."""
    wide = queries.float()
    for part in documents.split(rows):
        torch.mm(wide, part.float().T)


def judgements(results: Results, scale: float, rounds: int, dtype: torch.dtype) -> None:
    """Evaluate random vectors with judgements."""
    generator, documents = torch.Generator().manual_seed(0), round(DOCUMENTS * scale)
    vectors = [torch.empty(n, DIM, dtype=dtype) for n in (QUERIES, documents)]
    for side in vectors:
        for part in side.split(65_536):
            part.copy_(torch.randn(part.shape, generator=generator))
    drawn = torch.randint(documents, (JUDGED,), generator=generator).tolist()
    pairs = [query % QUERIES for query in range(JUDGED)], drawn
    relevance = Relevance.from_judgements(pairs, range(QUERIES), range(documents))
    queries, gallery = vectors
    rows = {
        "float32 product": lambda: product(queries, gallery),
        "judgements": lambda: evaluate_retrieval(queries, gallery=gallery, relevance=relevance, metrics=METRICS),
    }
    compare(
        results,
        f"{QUERIES:,} queries, {documents:,} documents, d = {DIM}, {str(dtype).removeprefix('torch.')}",
        rows,
        rounds,
    )


def lists(results: Results, items: int, rounds: int) -> None:
    """Evaluate classes given as labels and as lists."""
    metrics = ("mAP", "recall@1", "pair_f1", "recall@precision0.95")
    for difficulty in ("well-trained", "hard"):
        embeddings, labels = make(items, 512, difficulty)
        numbers = labels.numpy()
        order = np.argsort(numbers, kind="stable")
        held = np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
        of_label = {int(numbers[rows[0]]): rows for rows in held}
        relevant = [rows[rows != i] for i, rows in enumerate(of_label[label] for label in numbers.tolist())]
        relevance = Relevance.from_lists(relevant)
        rows = {
            "labels": lambda e=embeddings, y=labels: evaluate_retrieval(e, y, metrics=metrics),
            "lists": lambda e=embeddings, r=relevance: evaluate_retrieval(e, relevance=r, metrics=metrics),
        }
        compare(results, f"{items:,} items, 53 per class, {difficulty}", rows, rounds)


def several_labels(results: Results, items: int, rounds: int) -> None:
    """Evaluate items with one label, and items with three of eighty labels."""
    embeddings, labels = make(items, 512, "middling")
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(items, 80, generator=generator).argsort(dim=1)[:, :3]
    targets = torch.zeros(items, 80, dtype=torch.int8).scatter_(1, chosen, 1)
    metrics = ("mAP", "recall@1", "ndcg@10")
    rows = {
        "one label each": lambda: evaluate_retrieval(embeddings, labels, metrics=metrics),
        "several labels": lambda: evaluate_retrieval(embeddings, targets, metrics=metrics),
    }
    compare(results, f"{items:,} items, 3 of 80 labels each", rows, rounds)


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--scale", type=float, nargs="*", default=[0.01], help="shares of MS MARCO's documents; 0 leaves this part out"
    )
    parser.add_argument(
        "--dtype", default="float16", help="of the judged vectors; for float16 the baseline is a float32 copy"
    )
    parser.add_argument("--items", type=int, nargs="*", default=[8_000], help="of the classes; 0 leaves this part out")
    parser.add_argument("--labelled", type=int, default=8_000, help="items with several labels; 0 leaves this part out")
    parser.add_argument("--rounds", type=int, default=2)
    add_file_option(parser)
    options = parser.parse_args()
    evaluate_retrieval(torch.randn(3_000, 8), torch.arange(3_000) % 50)  # compiles
    with Results(COLUMNS, threads=torch.get_num_threads(), file=options.json) as results:
        for scale in filter(None, options.scale):
            judgements(results, scale, options.rounds, getattr(torch, options.dtype))
        for items in filter(None, options.items):
            lists(results, items, options.rounds)
        if options.labelled:
            several_labels(results, options.labelled, options.rounds)


if __name__ == "__main__":
    main()
