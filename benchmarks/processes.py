"""One evaluation by several processes: its time and memory, compared with one single-threaded process.

    python benchmarks/processes.py                                  # one and two processes, 16,000 items
    python benchmarks/processes.py --items 31730
    python benchmarks/processes.py --processes 1 2 4 --memory       # memory per process (times mean nothing on two cores)

Every process runs on one thread and stores its own part. One process and several processes take turns, so that a busy
machine slows both. The table shows the median seconds of the slowest process, and the multiple of one process, with minimum
and maximum over the rounds. Memory is the peak of a process minus its libraries: its part of the embeddings, the chunks that
it receives from other processes, and the part of the budget that the evaluation uses.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import DIFFICULTIES, make
from _results import Column, Results, add_file_option
from retrieval import spread

from fewshot_callbacks.functional import Share, evaluate_retrieval
from fewshot_callbacks.metrics import all_processes

COLUMNS = (
    Column("items", ",d"),
    Column("embeddings"),
    Column("processes", "d"),
    Column("seconds", ".2f"),
    Column("x one process", ".2f"),
    Column("MB per process", ",.0f"),
    Column("mAP", ".6f"),
)


def status_mb(key: str) -> float:
    """Return an entry of the system's record of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return float(line.split()[1]) / 1024
    return float("nan")


def work(rank: int, count: int, folder: str, options: argparse.Namespace) -> None:
    """Run one process: load its part, warm up, evaluate, and write the cost to a file."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rectangle{count}", rank=rank, world_size=count
    )
    settings: dict[str, Any] = {"share": Share(all_processes()), "memory_mb": options.memory_mb}
    small, labels = make(600, options.dim, "middling")
    evaluate_retrieval(small[rank::count], labels[rank::count], **settings)
    before = status_mb("VmRSS")
    embeddings = torch.from_numpy(np.load(f"{folder}/embeddings.npy", mmap_mode="r")[rank::count].copy())
    labels = torch.from_numpy(np.load(f"{folder}/labels.npy"))[rank::count].clone()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    torch.distributed.barrier()
    started = time.perf_counter()
    report = evaluate_retrieval(embeddings, labels, **settings)
    torch.distributed.barrier()
    seconds = time.perf_counter() - started
    peak = status_mb("VmHWM") - before
    np.save(f"{folder}/{count}_{rank}.npy", np.array([seconds, peak, report.mAP]))
    torch.distributed.destroy_process_group()


def once(count: int, folder: str, options: argparse.Namespace) -> np.ndarray:
    """Return the seconds, megabytes and mAP of each process."""
    torch.multiprocessing.spawn(work, args=(count, folder, options), nprocs=count)
    Path(f"{folder}/rectangle{count}").unlink(missing_ok=True)
    return np.stack([np.load(f"{folder}/{count}_{rank}.npy") for rank in range(count)])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=16_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--difficulty", nargs="+", default=["well-trained", "middling", "hard"], choices=DIFFICULTIES)
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2], help="numbers of processes that take turns (must include 1)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory_mb", type=float, default=512, help="budget of each process")
    parser.add_argument("--memory", action="store_true", help="one round only")
    add_file_option(parser)
    options = parser.parse_args()
    if 1 not in options.processes:
        parser.error("--processes must include 1, because the others are compared with it")
    return options


def main() -> None:
    options = parse()
    size = options.items * options.dim * 4 / 2**20
    print(f"{options.items:,} items, d = {options.dim}: {size:.0f} MB of embeddings\n")
    with Results(COLUMNS, threads=1, file=options.json) as results:
        for difficulty in options.difficulty:
            found = measured(difficulty, options)
            for count, rounds in found.items():
                seconds = [float(several[:, 0].max()) for several in rounds]
                alone = [float(one[:, 0].max()) for one in found[1]]
                ratios = [mine / base for mine, base in zip(seconds, alone, strict=True)]
                megabytes = max(float(several[:, 1].max()) for several in rounds)
                values = {float(value) for several in rounds for value in several[:, 2]}
                assert len(values) == 1, f"the processes disagree: {values}"
                ratio = 1.0 if count == 1 else spread(ratios)
                results.add(options.items, difficulty, count, spread(seconds), ratio, megabytes, values.pop())


def measured(difficulty: str, options: argparse.Namespace) -> dict[int, list[np.ndarray]]:
    """Return the result of `once` for each number of processes, in each round."""
    found: dict[int, list[np.ndarray]] = {count: [] for count in options.processes}
    with tempfile.TemporaryDirectory() as folder:
        embeddings, labels = make(options.items, options.dim, difficulty)
        np.save(f"{folder}/embeddings.npy", embeddings.numpy())
        np.save(f"{folder}/labels.npy", labels.numpy())
        del embeddings
        for _ in range(1 if options.memory else options.rounds):
            for count in options.processes:
                found[count].append(once(count, folder, options))
    return found


if __name__ == "__main__":
    main()
