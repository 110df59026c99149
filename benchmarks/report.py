"""Time and size of `fewshot report`, started from the shell, for sets without images.

python benchmarks/report.py --items 2000 31000
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
from _embeddings import make
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[2000, 31_000])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    table = Table("items", "MB of the file", "seconds", "of processor time", title=f"fewshot report, d = {options.dim}")
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    command = [sys.executable, "-c", "from fewshot_callbacks.cli import main; raise SystemExit(main())", "report"]
    for items in options.items:
        embeddings, labels = make(items, options.dim, "middling")
        with tempfile.TemporaryDirectory() as folder:
            file, page = Path(folder, "set.npz"), Path(folder, "report.html")
            np.savez(file, embeddings=embeddings.numpy(), labels=labels.numpy())
            used, started = processor_seconds(), time.perf_counter()
            subprocess.run(
                [*command, str(file), "-o", str(page)], check=True, env=environment, stdout=subprocess.DEVNULL
            )
            seconds = time.perf_counter() - started
            size = page.stat().st_size / 1e6
            table.add_row(f"{items:,}", f"{size:.1f}", f"{seconds:.0f}", f"{processor_seconds() - used:.0f}")
    Console().print(table)


def processor_seconds() -> float:
    """Return the processor time of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
