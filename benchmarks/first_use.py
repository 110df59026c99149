"""Time the first evaluation on a machine, which compiles kernels, and the first one of a later process, which loads them.

    python benchmarks/first_use.py [--rounds 3]

Each evaluation of 600 64-dimensional items is the first in its own process. The process gets an empty kernel cache, or the
cache that the previous process has filled. The table shows wall-clock seconds without the imports: medians and ranges.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _results import Column, Results, add_file_option
from retrieval import spread

PROGRAM = """
import time
import torch
from fewshot_callbacks import evaluate_retrieval
embeddings, labels = torch.randn(600, 64), torch.arange(600) % 30
started = time.perf_counter()
evaluate_retrieval(embeddings, labels)
print(time.perf_counter() - started)
"""


def seconds(folder: Path, threads: int) -> float:
    """Return the seconds of the first evaluation in a new process, with the kernel cache of a folder."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def main() -> None:
    """Measure both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    add_file_option(parser)
    options = parser.parse_args()
    threads = os.cpu_count() or 1
    first = []
    later = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            first.append(seconds(Path(folder), threads))
            later.append(seconds(Path(folder), threads))
    with Results((Column("evaluation"), Column("seconds", ".1f")), threads=threads, file=options.json) as results:
        results.add("the first on a machine, which compiles the kernels", spread(first))
        results.add("the first in a later process, which reads the kernels", spread(later))


if __name__ == "__main__":
    main()
