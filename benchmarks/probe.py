"""What a linear probe takes, beside the bare products of its closed form.

    python benchmarks/probe.py [--gallery 50000] [--queries 5000] [--dim 768] [--classes 1000] [--group-size 0]

Points lie around centres that overlap. Printed are seconds by the clock and by the processor, the peak of memory beyond
what was there before, the rate of float64 products that this machine reaches, and its load before. With a group size,
neighbouring items of a class are left out together.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from retrieval import PeakMemory
from torch import Tensor

from fewshot_callbacks import linear_probe


def rate_of_products(dim: int, columns: int) -> float:
    """Billions of float64 operations a second in a product of the size of a block."""
    rows = torch.randn(4096, dim, dtype=torch.float64)
    coefficients = torch.randn(dim, columns, dtype=torch.float64)
    rows @ coefficients  # the first product starts the threads
    started = time.perf_counter()
    rows @ coefficients
    return 2e-9 * rows.numel() * columns / (time.perf_counter() - started)


def points(items: int, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Items around the centres, and the centre of each."""
    labels = torch.arange(items) % len(centres)
    rows = torch.randn(items, centres.shape[1]).mul_(6)
    rows += centres[labels]
    return rows, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("gallery", 50_000), ("queries", 5_000), ("dim", 768), ("classes", 1_000), ("group-size", 0))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(0)
    centres = torch.randn(options.classes, options.dim)
    gallery, gallery_labels = points(options.gallery, centres)
    queries, query_labels = points(options.queries, centres)
    groups = None
    if options.group_size:
        position = torch.arange(options.gallery) // options.classes  # of an item in its class
        groups = gallery_labels * options.gallery + position // options.group_size
    linear_probe(queries[:20], query_labels[:20], gallery[:40], gallery_labels[:40] % 20)  # compiles
    rate = rate_of_products(options.dim, options.classes)
    load = os.getloadavg()[0]
    with PeakMemory(torch.device("cpu")) as memory:
        clock, processor = time.perf_counter(), time.process_time()
        report = linear_probe(queries, query_labels, gallery, gallery_labels, gallery_groups=groups)
        clock, processor = time.perf_counter() - clock, time.process_time() - processor
    print(report)
    print(
        f"{clock:.1f} s, {processor:.1f} s of the processor in {torch.get_num_threads()} threads; peak beyond "
        f"{memory.mb:,.0f} MB; float64 products at {rate:.0f} billion operations a second; load {load:.1f}"
    )


if __name__ == "__main__":
    main()
