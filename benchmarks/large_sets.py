"""Measure the cost of each item per process: memory, and passes over the network.

    python benchmarks/large_sets.py nearest                                  # 4,000,000 8-dimensional items
    python benchmarks/large_sets.py evaluate --memory_mb 2000
    torchrun --nproc-per-node 4 benchmarks/large_sets.py evaluate            # prints one line per process
    torchrun --nproc-per-node 2 benchmarks/large_sets.py all_metrics --items 40000 --dim 64 --queries 200 --memory_mb 16

Vectors are short, so that most of the memory does not depend on the dimension. Memory is the peak anonymous memory of a
process minus its memory before the search. One pass sends all rows of the other processes to each process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).parent))

from scale import Peak

from fewshot_callbacks import Shards, Share, evaluate_retrieval, nearest
from fewshot_callbacks.metrics import all_processes

FILES = 4
RELEVANT = 64


class Traffic:
    """Counts the bytes that this process receives from others in the exchange of rows."""

    def __init__(self, processes: Any) -> None:
        self.bytes = 0
        self._exchange = processes.exchange
        processes.exchange = self._counted

    def _counted(self, sent: Any, destination: int, sender: int) -> Any:
        received = self._exchange(sent, destination, sender)
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in received or [])
        return received


def write(path: Path, items: int, dim: int, classes: int, seed: int) -> str:
    """Write embeddings of random classes, and return the path of the file."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, items)
    centres = np.random.default_rng(0).standard_normal((classes, dim), np.float32)
    rows = centres[labels] + 1.5 * random.standard_normal((items, dim), np.float32)
    np.savez(path, embeddings=rows.astype(np.float16), labels=labels)
    return str(path)


def search(what: str, files: list[str], processes: Any, queries: int, memory_mb: float) -> None:
    """Find the neighbours of the drawn queries, or evaluate the queries."""
    shards, share = Shards(files, labels="labels"), Share(processes)
    if what == "nearest":
        nearest(shards, query_indices=np.arange(queries // processes.count), k=10, memory_mb=memory_mb, share=share)
    else:
        metrics = {} if what == "all_metrics" else {"metrics": ("recall@1", "mAP")}
        evaluate_retrieval(shards, max_queries=queries, memory_mb=memory_mb, share=share, **metrics)


def main() -> None:
    """Write the files of this process, search, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("nearest", "evaluate", "all_metrics"))
    parser.add_argument("--items", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--memory_mb", type=float, default=8, help="budget of each process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    processes = all_processes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own_files = [file for file in range(FILES) if file * processes.count // FILES == processes.rank]
        rows, classes = options.items // FILES, max(2, options.items // RELEVANT)
        files = [write(folder / f"{file}.npz", rows, options.dim, classes, file) for file in own_files]
        warmed = write(folder / "warmed.npz", 3000, options.dim, 100, processes.rank)
        search(options.what, [warmed], processes, 100, options.memory_mb)
        peak, traffic = Peak(), Traffic(processes)
        search(options.what, files, processes, options.queries, options.memory_mb)
    memory = peak.largest - peak.before
    of_others = 4 * options.dim * rows * (FILES - len(own_files))
    passes = f", {traffic.bytes / of_others:.1f} passes over the network" if of_others else ""
    items = rows * FILES
    print(f"{memory:,.0f} MB, {memory * 2**20 / items:.0f} bytes for each of {items:,} items{passes}", flush=True)


if __name__ == "__main__":
    main()
