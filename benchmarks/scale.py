"""Time an evaluation of a file under a hard limit of memory beside the same one in memory.

    python benchmarks/scale.py                                         # 200,000 items, 2,000 queries
    python benchmarks/scale.py --items 2000000 --queries 20000         # 512 MB of float16
    python benchmarks/scale.py --processes 4                           # shared by processes that torchrun starts
    python benchmarks/scale.py --processes 4 --kill                    # which are killed at half, and go on

Each row is a process of its own. That which reads the file may hold no more than the limit, beside what is mapped from files
(RLIMIT_DATA; what libraries reserve and do not hold comes on top): a larger allocation fails. All rows must have the same
values, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewshot_callbacks import Shards, evaluate_retrieval
from fewshot_callbacks.cli.main import main as fewshot
from fewshot_callbacks.files import journal

METRICS = ("mAP", "recall@1", "pair_f1", "recall@precision0.95")
OF_A_CLASS = 50


def write(folder: Path, items: int, dim: int) -> None:
    """Write embeddings of classes as float16, some at a time, and their labels."""
    generator = np.random.default_rng(0)
    rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.float16, (items, dim))
    labels = generator.integers(items // OF_A_CLASS, size=items)
    np.save(folder / "labels.npy", labels)
    centres = generator.normal(size=(items // OF_A_CLASS, dim)).astype(np.float32)
    for start in range(0, items, 2**16):
        some = labels[start : start + 2**16]
        rows[start : start + 2**16] = centres[some] + generator.normal(size=(len(some), dim))


def held(key: str) -> float:
    """Return a line of the system's record of this process in MB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return float(line.split()[1]) / 1024
    return float("nan")


def evaluate(folder: Path, options: argparse.Namespace, *, loaded: bool) -> dict[str, Any]:
    """Evaluate in this process, and return what it took."""
    compiled = torch.randn(3_000, 8).half()
    evaluate_retrieval(compiled.float(), torch.arange(3_000) % 50, metrics=METRICS)
    labels: Any = np.load(folder / "labels.npy")
    if loaded:
        rows: Any = torch.from_numpy(np.load(folder / "rows.npy")).float()
    else:
        rows = Shards(folder / "rows.npy", labels=labels)
        reserved = held("VmData") - held("RssAnon")  # by libraries, who hold none of it
        resource.setrlimit(resource.RLIMIT_DATA, (int((reserved + options.limit_mb) * 2**20), resource.RLIM_INFINITY))
    started, used = time.perf_counter(), time.process_time()
    report = evaluate_retrieval(rows, labels, max_queries=options.queries, metrics=METRICS, memory_mb=options.memory_mb)
    return {
        "seconds": time.perf_counter() - started,
        "processor": time.process_time() - used,
        "MB": held("RssAnon"),
        "values": report.values,
    }


def share(name: str, options: argparse.Namespace, values: dict[str, float], state: str | None, stop: float) -> float:
    """Evaluate the file by processes that torchrun starts; kill them after some seconds; return how long that took."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.processes), __file__]
    words += ["--row", "share", "evaluate", f"{name}/rows.npy", "--labels", f"{name}/labels.npy", "--json"]
    words += ["--max_queries", str(options.queries), "--memory_mb", str(options.memory_mb)]
    words += ["--resume", state] if state else []
    started, environment = time.perf_counter(), os.environ | {"OMP_NUM_THREADS": "1"}
    begun = subprocess.Popen([*words, "--metrics", *METRICS], stdout=-1, stderr=-1, text=True, env=environment)
    try:
        printed, said = begun.communicate(timeout=stop)
    except subprocess.TimeoutExpired:
        subprocess.run(
            ["pkill", "-KILL", "-f", str(state)], check=False
        )  # torchrun's processes have groups of their own
        begun.communicate()
        return stop
    if begun.returncode:
        sys.exit(said)
    assert json.loads(printed)["metrics"] == values, printed
    return time.perf_counter() - started


def main() -> None:
    """Make the data, run each row, and print the table."""
    if sys.argv[1:3] == ["--row", "share"]:
        journal.INTERVAL = 1.0  # a minute is longer than most of these
        sys.exit(fewshot(sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=2_000)
    parser.add_argument("--memory_mb", type=float, default=512, help="budget of the evaluation")
    parser.add_argument("--limit_mb", type=float, default=1_000, help="of the whole process that reads the file")
    parser.add_argument("--processes", type=int, default=0, help="that share one more evaluation of the file")
    parser.add_argument("--kill", action="store_true", help="once more, killed at half and resumed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--row", choices=["memory", "file"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(evaluate(options.folder, options, loaded=options.row == "memory")))
        return
    print(f"{options.items:,} x {options.dim} float16 against {options.queries:,} queries, {options.memory_mb:g} MB")
    print("| row | s | processor s | MB held at the end |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), options.items, options.dim)
        found = {}
        for _ in range(options.rounds):
            for row in ("memory", "file"):
                words = [sys.executable, *sys.argv, "--row", row, "--folder", name]
                ran = subprocess.run(words, capture_output=True, text=True, check=False)
                if ran.returncode:
                    sys.exit(ran.stderr)
                found[row] = json.loads(ran.stdout)
                took = found[row]
                print(f"| {row} | {took['seconds']:.1f} | {took['processor']:.1f} | {took['MB']:.0f} |", flush=True)
        assert found["memory"]["values"] == found["file"]["values"], found
        if options.processes:
            values = found["file"]["values"]
            whole = share(name, options, values, None, 1e6)
            print(f"| {options.processes} processes | {whole:.1f} | | |")
        if options.kill:
            share(name, options, values, f"{name}/state", whole / 2)
            assert Path(f"{name}/state").is_dir(), "nothing had been written by then"
            rest = share(name, options, values, f"{name}/state", 1e6)
            print(f"| killed after {whole / 2:.1f} s, and resumed | {rest:.1f} | | |")


if __name__ == "__main__":
    main()
