"""The cost of a linear probe with nine regularisation strengths.

    python benchmarks/probe.py [--gallery 50000] [--queries 5000] [--dim 768] [--classes 1000]
    python benchmarks/probe.py --threads 1 --group-size 0

Points are drawn around centres that overlap. There is a row for each number of threads and each group size; the items of a
group are neighbours in a class and are left out together. The table shows wall-clock and processor seconds, the peak memory
minus the memory before, and the rate of float64 products on this machine. Each row runs in its own process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option
from retrieval import PeakMemory

from fewshot_callbacks import linear_probe

COLUMNS = (
    Column("threads", "d"),
    Column("left out together"),
    Column("seconds", ".1f"),
    Column("processor seconds", ".1f"),
    Column("MB beyond the vectors", ",.0f"),
    Column("float64 products, billion operations per second", ",.0f"),
)


def rate_of_products(dim: int, columns: int) -> float:
    """Return the billions of float64 operations per second in a product with the size of a block."""
    rows = torch.randn(4096, dim, dtype=torch.float64)
    coefficients = torch.randn(dim, columns, dtype=torch.float64)
    rows @ coefficients  # the first product starts the threads
    started = time.perf_counter()
    rows @ coefficients
    return 2e-9 * rows.numel() * columns / (time.perf_counter() - started)


def points(items: int, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return items around the centres, and the centre of each item."""
    labels = torch.arange(items) % len(centres)
    rows = torch.randn(items, centres.shape[1]).mul_(6)
    rows += centres[labels]
    return rows, labels


def measure(options: argparse.Namespace, group_size: int) -> dict[str, float | None]:
    """Return the cost of a probe, measured in this process."""
    torch.manual_seed(0)
    centres = torch.randn(options.classes, options.dim)
    gallery, gallery_labels = points(options.gallery, centres)
    queries, query_labels = points(options.queries, centres)
    groups = None
    if group_size:
        position = torch.arange(options.gallery) // options.classes  # index of an item in its class
        groups = gallery_labels * options.gallery + position // group_size
    linear_probe(queries[:20], query_labels[:20], gallery[:40], gallery_labels[:40] % 20)  # compiles
    rate = rate_of_products(options.dim, options.classes)
    with PeakMemory(torch.device("cpu")) as memory:
        clock = time.perf_counter()
        processor = time.process_time()
        linear_probe(queries, query_labels, gallery, gallery_labels, gallery_groups=groups)
        processor = time.process_time() - processor
        clock = time.perf_counter() - clock
    return {"seconds": clock, "processor": processor, "MB": memory.mb, "rate": rate}


def in_process_of_its_own(threads: int, group_size: int) -> dict[str, Any]:
    """Return the result of `measure` in another process with the given number of threads."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, *sys.argv, "--measure", str(group_size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    took: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return took


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("gallery", 50_000), ("queries", 5_000), ("dim", 768), ("classes", 1_000)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    parser.add_argument(
        "--group-size", type=int, nargs="+", default=[0, 10], help="items of a group; 0: no groups (default: 0 10)"
    )
    add_file_option(parser)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options, options.measure)))
        return
    with Results(COLUMNS, threads=max(options.threads), file=options.json) as results:
        for threads in options.threads:
            for group_size in options.group_size:
                took = in_process_of_its_own(threads, group_size)
                left_out = f"groups of {group_size} items" if group_size else "one item"
                results.add(threads, left_out, took["seconds"], took["processor"], took["MB"], took["rate"])


if __name__ == "__main__":
    main()
