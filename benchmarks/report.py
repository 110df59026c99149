"""Time and file size of `fewshot report`, started from the shell, for sets without images.

python benchmarks/report.py --items 2000 31000 100000
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import make
from _results import Column, Results, add_file_option

COLUMNS = (
    Column("items", ",d"),
    Column("file, MB", ".1f"),
    Column("seconds", ".0f"),
    Column("processor seconds", ".0f"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[2000, 31_000])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    add_file_option(parser)
    options = parser.parse_args()
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, "-c", "from fewshot_callbacks.cli import main; raise SystemExit(main())", "report"]
    with Results(COLUMNS, threads=options.threads, file=options.json) as results:
        for items in options.items:
            embeddings, labels = make(items, options.dim, "middling")
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "set.npz")
                page = Path(folder, "report.html")
                np.savez(file, embeddings=embeddings.numpy(), labels=labels.numpy())
                used = processor_seconds()
                started = time.perf_counter()
                words = [*command, str(file), "-o", str(page)]
                subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
                seconds = time.perf_counter() - started
                results.add(items, page.stat().st_size / 1e6, seconds, processor_seconds() - used)


def processor_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
