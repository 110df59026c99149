"""The cost of kNN classification, compared with the bare product of all pairs.

    python benchmarks/knn.py                                                   # all rows
    python benchmarks/knn.py --gallery 20000 --queries 2000 --equal 0 --k 10   # one row, smaller

Points are drawn around centres that overlap; there is one row per gallery size. Two more rows have equal points, which all
tie, and points of two kinds; each of these points is classified by all others. The table shows the processor seconds of the
search; the same as a multiple of the product, which runs in blocks of 1,000 queries before and after the search; and the
peak memory minus the memory before.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option
from retrieval import PeakMemory

from fewshot_callbacks import knn_accuracy

COLUMNS = (
    Column("gallery"),
    Column("queries", ",d"),
    Column("x product", ".2f"),
    Column("processor seconds", ".1f"),
    Column("MB beyond the vectors", ",.0f"),
)


def product(queries: Tensor, gallery: Tensor) -> float:
    """Return the processor seconds of computing all scores."""
    started = time.process_time()
    for block in queries.split(1000):
        block @ gallery.T
    return time.process_time() - started


def measured(search: Callable[[], Any], queries: Tensor, gallery: Tensor) -> tuple[float, float, float | None]:
    """Return the search as a multiple of the product, its processor seconds, and its peak memory in MB."""
    before = product(queries, gallery)
    with PeakMemory(torch.device("cpu")) as memory:
        started = time.process_time()
        search()
        seconds = time.process_time() - started
    floor = min(before, product(queries, gallery))
    return seconds / floor, seconds, memory.mb


def of_classes(results: Results, items: int, options: argparse.Namespace) -> None:
    """Add the row of a gallery and queries around the same centres."""
    centres = torch.randn(options.classes, options.dim)
    gallery_labels = torch.arange(items) % options.classes
    query_labels = torch.arange(options.queries) % options.classes
    gallery = torch.randn(items, options.dim).mul_(4)
    gallery += centres[gallery_labels]
    queries = centres[query_labels] + 4 * torch.randn(options.queries, options.dim)
    # The first search compiles.
    few = 2 * options.classes
    knn_accuracy(queries[:50], query_labels[:50], gallery[:few], gallery_labels[:few])

    def search() -> object:
        return knn_accuracy(queries, query_labels, gallery, gallery_labels, k=options.k)

    results.add(f"{items:,} x {options.dim}", options.queries, *measured(search, queries, gallery))


def of_equal_rows(results: Results, items: int, kinds: int, options: argparse.Namespace) -> None:
    """Add the row of a set with all vectors equal, or with a few kinds of vectors."""
    rows = torch.randn(kinds, options.dim)[torch.arange(items) % kinds]
    labels = torch.arange(items) % options.classes
    knn_accuracy(rows[:600], labels[:600] % 50)
    name = f"{items:,} equal rows" if kinds == 1 else f"{items:,} rows of {kinds} kinds"
    results.add(name, items, *measured(lambda: knn_accuracy(rows, labels, k=options.k), rows, rows))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gallery", type=int, nargs="*", default=[128_000, 32_000], help="(default: 128000 32000)")
    parser.add_argument("--queries", type=int, default=5_000, help="(default: %(default)s)")
    parser.add_argument("--equal", type=int, default=31_730, help="equal rows; 0: none (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=768, help="(default: %(default)s)")
    parser.add_argument("--classes", type=int, default=1_000, help="(default: %(default)s)")
    parser.add_argument("--k", type=int, nargs="+", default=[10, 20, 100, 200], help="(default: 10 20 100 200)")
    add_file_option(parser)
    options = parser.parse_args()
    torch.manual_seed(0)
    with Results(COLUMNS, threads=torch.get_num_threads(), file=options.json) as results:
        for items in options.gallery:
            of_classes(results, items, options)
        if options.equal:
            for kinds in (1, 2):
                of_equal_rows(results, options.equal, kinds, options)


if __name__ == "__main__":
    main()
