"""Time `fewshot nearest` on files within a budget: one process, several, and several that are killed and resumed.

    python benchmarks/truth.py                                         # 200,000 items, 2,000 queries
    python benchmarks/truth.py --items 2000000 --queries 10000         # 256 MB of float16
    python benchmarks/truth.py --processes 2 --kill                    # two processes, also killed half-way and resumed

The items are in 20 files. Each row is a separate command that torchrun starts, and all must write the same file, byte for
byte. Seconds are from the start of the search to its end, in the slowest process. Memory is the peak anonymous memory of a
process, minus its memory before the search and its drawn queries. Mapped pages of files do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option
from scale import Peak, descendants

from fewshot_callbacks import Shards, nearest
from fewshot_callbacks.cli.main import main as fewshot
from fewshot_callbacks.files import journal
from fewshot_callbacks.functional import write_neighbours

FILES = 20
COLUMNS = (
    Column("search by"),
    Column("seconds", ".1f"),
    Column("processor seconds, all", ".1f"),
    Column("MB, most of a process", ",.0f"),
)


def write(folder: Path, items: int, dim: int) -> None:
    """Write float16 embeddings, one file at a time."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(1000, dim)).astype(np.float32)
    for number, part in enumerate(np.array_split(np.arange(items), FILES)):
        rows = centres[part % 1000] + 2 * generator.standard_normal((len(part), dim), np.float32)
        np.save(folder / f"{number:02}.npy", rows.astype(np.float16))


def search(words: list[str], measured: Path) -> int:
    """Run the command in one process of a row, and write its cost."""
    warmed = tempfile.mkdtemp()
    np.save(f"{warmed}/rows.npy", np.random.default_rng(0).normal(size=(3000, 64)).astype(np.float16))
    write_neighbours(f"{warmed}/truth.parquet", nearest(Shards(f"{warmed}/rows.npy"), k=100, memory_mb=1))
    peak = Peak()
    started = time.perf_counter()
    used = time.process_time()
    status = fewshot(words)
    took = {"seconds": time.perf_counter() - started, "processor": time.process_time() - used}
    took["MB"] = peak.largest - peak.before
    (measured / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(took))
    return status


def row(folder: Path, options: argparse.Namespace, count: int, name: str, stop: float | None = None) -> dict[str, Any]:
    """Search with several processes, kill them after `stop` seconds, and return the cost of the search.

    Args:
        folder: Folder of the files and of the result.
        options: The options of this script.
        count: Number of processes.
        name: Name of the result.
        stop: Seconds; None waits for the end.
    """
    measured = Path(tempfile.mkdtemp(dir=folder))
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), __file__]
    words += ["--row", str(measured), "nearest", f"{folder}/rows/*.npy", "-k", str(options.k)]
    words += ["-o", f"{folder}/{name}.parquet", "--queries", str(options.queries)]
    words += ["--memory_mb", str(options.memory_mb), "--resume", f"{folder}/state"]
    started = time.perf_counter()
    begun = subprocess.Popen(words, stdout=-1, stderr=-1, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        _, said = begun.communicate(timeout=stop)
    except subprocess.TimeoutExpired:
        # Each process of torchrun has its own group, so that no signal to a group reaches them all.
        for process in [begun.pid, *descendants(begun.pid)]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        begun.communicate()
        return {}
    if begun.returncode:
        sys.exit(said)
    elapsed = time.perf_counter() - started
    by_process = [json.loads(file.read_text()) for file in measured.glob("*.json")]
    own_queries = options.queries / count * options.dim * 4 / 2**20
    return {
        "start": elapsed - max(took["seconds"] for took in by_process),
        "seconds": max(took["seconds"] for took in by_process),
        "processor": sum(took["processor"] for took in by_process),
        "MB": max(took["MB"] for took in by_process) - own_queries,
    }


def main() -> None:
    """Make the data, run each row, and print the table."""
    if sys.argv[1:2] == ["--row"]:
        journal.INTERVAL = 1.0  # most processes start and end in less than a minute
        sys.exit(search(sys.argv[3:], Path(sys.argv[2])))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument("--k", type=int, default=100)
    parser.add_argument("--memory_mb", type=float, default=512, help="budget of each process")
    parser.add_argument("--processes", type=int, default=2, help="numbers of processes that share further searches")
    parser.add_argument("--kill", action="store_true", help="repeat these, killed half-way and resumed")
    add_file_option(parser)
    options = parser.parse_args()
    print(
        f"{options.items:,} x {options.dim} float16 in {FILES} files, {options.queries:,} queries, k = {options.k}, "
        f"{options.memory_mb:g} MB each\n"
    )
    with (
        tempfile.TemporaryDirectory() as name,
        Results(COLUMNS, threads=1, file=options.json) as results,
    ):
        folder = Path(name)
        (folder / "rows").mkdir()
        write(folder / "rows", options.items, options.dim)
        keys = ("seconds", "processor", "MB")
        one = row(folder, options, 1, "one")
        results.add("one process", *(one[key] for key in keys))
        several = row(folder, options, options.processes, "several")
        results.add(f"{options.processes} processes", *(several[key] for key in keys))
        if options.kill:
            row(folder, options, options.processes, "killed", several["start"] + several["seconds"] / 2)
            assert list((folder / "state").glob("*.npz")), "nothing had been written by then"
            rest = row(folder, options, options.processes, "killed")
            results.add("the same, killed at half: what is left, by `--resume`", *(rest[key] for key in keys))
        contents = {file.read_bytes() for file in folder.glob("*.parquet")}
        assert len(contents) == 1, "the files differ"
        print("\nAll files are equal, byte for byte.")


if __name__ == "__main__":
    main()
