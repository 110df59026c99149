"""Compare the time of evaluating a file under a hard memory limit and evaluating the same embeddings in memory.

    python benchmarks/scale.py                                         # 200,000 items, 2,000 queries
    python benchmarks/scale.py --items 2000000 --queries 20000         # 512 MB of float16
    python benchmarks/scale.py --processes 2 4                         # shared by processes that torchrun starts
    python benchmarks/scale.py --processes 4 --kill                    # killed half-way, and resumed

Each row is a separate process. The process that reads the file has a memory limit (RLIMIT_DATA, which does not count mapped
files; memory that libraries reserve but do not use is added to it): a larger allocation fails. The seconds of several
processes are from their start to their end. Memory is the memory of the process at the end. All rows must have the same
values, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option
from retrieval import spread

from fewshot_callbacks import Shards, evaluate_retrieval
from fewshot_callbacks.cli.main import main as fewshot
from fewshot_callbacks.files import journal

METRICS = ("mAP", "recall@1", "pair_f1", "recall@precision0.95")
OF_A_CLASS = 50
COLUMNS = (
    Column("evaluation of"),
    Column("seconds", ".1f"),
    Column("processor seconds", ".1f"),
    Column("MB at the end", ",.0f"),
)


def write(folder: Path, items: int, dim: int) -> None:
    """Write embeddings of classes as float16, in chunks, and their labels."""
    generator = np.random.default_rng(0)
    rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.float16, (items, dim))
    labels = generator.integers(items // OF_A_CLASS, size=items)
    np.save(folder / "labels.npy", labels)
    centres = generator.normal(size=(items // OF_A_CLASS, dim)).astype(np.float32)
    for start in range(0, items, 2**16):
        some = labels[start : start + 2**16]
        rows[start : start + 2**16] = centres[some] + generator.normal(size=(len(some), dim))


def held(key: str) -> float:
    """Return an entry of the system's record of this process, in MB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return float(line.split()[1]) / 1024
    return float("nan")


class Peak:
    """Records the peak anonymous memory of this process in MB, and its memory at the start."""

    def __init__(self) -> None:
        self.before = self.largest = held("RssAnon")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.largest = max(self.largest, held("RssAnon"))
            time.sleep(0.005)


def evaluate(folder: Path, options: argparse.Namespace, *, loaded: bool) -> dict[str, Any]:
    """Evaluate in this process, and return the cost."""
    compiled = torch.randn(3_000, 8).half()
    evaluate_retrieval(compiled.float(), torch.arange(3_000) % 50, metrics=METRICS)
    labels: Any = np.load(folder / "labels.npy")
    if loaded:
        rows: Any = torch.from_numpy(np.load(folder / "rows.npy")).float()
    else:
        rows = Shards(folder / "rows.npy", labels=labels)
        reserved = held("VmData") - held("RssAnon")  # by libraries that do not use it
        resource.setrlimit(resource.RLIMIT_DATA, (int((reserved + options.limit_mb) * 2**20), resource.RLIM_INFINITY))
    started, used = time.perf_counter(), time.process_time()
    report = evaluate_retrieval(rows, labels, max_queries=options.queries, metrics=METRICS, memory_mb=options.memory_mb)
    return {
        "seconds": time.perf_counter() - started,
        "processor": time.process_time() - used,
        "MB": held("RssAnon"),
        "values": report.values,
    }


def share(
    name: str,
    options: argparse.Namespace,
    count: int,
    values: dict[str, float],
    state: str | None = None,
    stop: float = 1e6,
) -> float:
    """Evaluate the file with processes that torchrun starts, kill them after `stop` seconds, and return the seconds."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), __file__]
    words += ["--row", "share", "evaluate", f"{name}/rows.npy", "--labels", f"{name}/labels.npy", "--json"]
    words += ["--max_queries", str(options.queries), "--memory_mb", str(options.memory_mb)]
    words += ["--resume", state] if state else []
    started, environment = time.perf_counter(), os.environ | {"OMP_NUM_THREADS": "1"}
    begun = subprocess.Popen([*words, "--metrics", *METRICS], stdout=-1, stderr=-1, text=True, env=environment)
    try:
        printed, said = begun.communicate(timeout=stop)
    except subprocess.TimeoutExpired:
        # Each process of torchrun has its own group, so that no signal to a group reaches them all.
        for process in [begun.pid, *descendants(begun.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        begun.communicate()
        return stop
    if begun.returncode:
        sys.exit(said)
    assert json.loads(printed)["metrics"] == values, printed
    return time.perf_counter() - started


def descendants(process: int) -> list[int]:
    """Return the descendants of a process (Linux)."""
    started = [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text(encoding="ascii").split()
    ]
    return started + [later for child in started for later in descendants(child)]


def main() -> None:
    """Make the data, run each row, and print the table."""
    if sys.argv[1:3] == ["--row", "share"]:
        journal.INTERVAL = 1.0  # most processes start and end in less than a minute
        sys.exit(fewshot(sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument("--memory_mb", type=float, default=512, help="budget of the evaluation")
    parser.add_argument("--limit_mb", type=float, default=1_000, help="of the whole process that reads the file")
    parser.add_argument(
        "--processes", type=int, nargs="*", default=[], help="numbers of processes that share more evaluations"
    )
    parser.add_argument("--kill", action="store_true", help="repeat the last of these, killed half-way and resumed")
    parser.add_argument("--rounds", type=int, default=1, help="of the first two rows")
    add_file_option(parser)
    parser.add_argument("--row", choices=["memory", "file"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(evaluate(options.folder, options, loaded=options.row == "memory")))
        return
    if options.kill and not options.processes:
        parser.error("--kill kills processes that share an evaluation. Give their number by --processes.")
    print(f"{options.items:,} x {options.dim} float16 against {options.queries:,} queries, {options.memory_mb:g} MB\n")
    with (
        tempfile.TemporaryDirectory() as name,
        Results(COLUMNS, threads=torch.get_num_threads(), file=options.json) as results,
    ):
        write(Path(name), options.items, options.dim)
        values = alone(name, options, results)
        for count in options.processes:
            seconds = share(name, options, count, values)
            results.add(f"the file, by {count} processes that torchrun starts", seconds, None, None)
        if options.kill:
            count = options.processes[-1]
            share(name, options, count, values, f"{name}/state", seconds / 2)
            assert Path(f"{name}/state").is_dir(), "nothing had been written by then"
            rest = share(name, options, count, values, f"{name}/state")
            results.add(f"the same, killed after {seconds / 2:.1f} s: what is left, by `--resume`", rest, None, None)


def alone(name: str, options: argparse.Namespace, results: Results) -> dict[str, float]:
    """Add the two rows of one process, and return the values of both."""
    titles = {
        "memory": "a float32 copy in memory",
        "file": f"the file, in a process that may hold no more than {options.limit_mb:,.0f} MB",
    }
    found: dict[str, list[dict[str, Any]]] = {row: [] for row in titles}
    for _ in range(options.rounds):
        for row in titles:
            words = [sys.executable, *sys.argv, "--row", row, "--folder", name]
            ran = subprocess.run(words, capture_output=True, text=True, check=False)
            if ran.returncode:
                sys.exit(ran.stderr)
            found[row].append(json.loads(ran.stdout))
    for row, title in titles.items():
        results.add(title, *(spread([took[key] for took in found[row]]) for key in ("seconds", "processor", "MB")))
    values: dict[str, float] = found["file"][0]["values"]
    assert all(took["values"] == values for rounds in found.values() for took in rounds), found
    return values


if __name__ == "__main__":
    main()
