"""What kNN classification takes, beside the bare product of all pairs.

    python benchmarks/knn.py [--gallery 128000] [--queries 5000] [--dim 768] [--classes 1000] [--k 10 20 100 200]

Points lie around centres that overlap. Printed are processor seconds of the search and of the product, made in blocks of
1,000 queries before and after it, their ratio, and the peak of memory beyond what was there before.
"""

from __future__ import annotations

import argparse
import time

import torch
from retrieval import PeakMemory
from torch import Tensor

from fewshot_callbacks import knn_accuracy


def product(queries: Tensor, gallery: Tensor) -> float:
    """Processor seconds of all scores."""
    started = time.process_time()
    for block in queries.split(1000):
        block @ gallery.T
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("gallery", 128_000), ("queries", 5_000), ("dim", 768), ("classes", 1_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--k", type=int, nargs="+", default=[10, 20, 100, 200])
    options = parser.parse_args()
    torch.manual_seed(0)
    centres = torch.randn(options.classes, options.dim)
    gallery_labels, query_labels = (torch.arange(n) % options.classes for n in (options.gallery, options.queries))
    gallery = torch.randn(options.gallery, options.dim).mul_(4)
    gallery += centres[gallery_labels]
    queries = centres[query_labels] + 4 * torch.randn(options.queries, options.dim)
    knn_accuracy(
        queries[:50], query_labels[:50], gallery[: 2 * options.classes], gallery_labels[: 2 * options.classes]
    )  # compiles
    with PeakMemory(torch.device("cpu")) as memory:
        started = time.process_time()
        report = knn_accuracy(queries, query_labels, gallery, gallery_labels, k=options.k)
        search = time.process_time() - started
    floor = min(product(queries, gallery) for _ in range(2))
    print(report)
    print(f"search {search:.1f} s, product {floor:.1f} s: {search / floor:.2f} of it; peak beyond {memory.mb:,.0f} MB")


if __name__ == "__main__":
    main()
