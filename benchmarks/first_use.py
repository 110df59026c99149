"""How long the first evaluation takes while its loops are compiled, and the first one of a later process, which reads them.

    python benchmarks/first_use.py [--rounds 3]

Each evaluation, of 600 items of 64 numbers, is the first of a process of its own. An empty folder of compiled loops is given
to it, or the folder that the process before has filled. Printed are seconds by the clock, without the imports: medians and
ranges.
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
    """Return what the first evaluation of a new process takes, with the compiled loops of a folder."""
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
