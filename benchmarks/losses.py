"""The cost of average precision as a loss: forward and backward pass, as a multiple of the bare product of a batch.

    python benchmarks/losses.py                                      # batches of 1,024 and 4,096
    python benchmarks/losses.py --batches 1024 4096 8192
    python benchmarks/losses.py --batches 256 512 --rows ours smooth_ap
    python benchmarks/losses.py --micro-batch                        # EmbeddingModule, memory and time

The floor is the forward and backward pass of `(E @ E.T).sum()`, in the same process right before and after each row, so
that a busy machine slows both. With one thread, the default, times are processor times; with several (`--threads 2`) they
are wall-clock times. Multiples are medians over rounds with minimum and maximum. Memory is the peak during one forward and
backward pass minus the memory before, in MB and in B x B float32 score matrices; the row of the floor shows the memory that
any loss over all pairs needs. Each row runs in its own process, with a limit of `--memory-gb`; a row that needs more is
marked. Peers are FastAPLoss and SmoothAPLoss of pytorch-metric-learning (`pip install -e ".[bench]"`).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).parent))

from _results import Column, Results, add_file_option
from retrieval import PeakMemory, spread

Loss = Callable[[Tensor, Tensor], Tensor]

COLUMNS = (
    Column("batch", ",d"),
    Column("loss"),
    Column("x product", ".2f"),
    Column("seconds", ".3f"),
    Column("MB per pass", ",.0f"),
    Column("in score matrices", ".2f"),
)
MICRO_BATCH_COLUMNS = (
    Column("`micro_batch`"),
    Column("processor seconds", ".2f"),
    Column("MB per pass", ",.0f"),
)


def floor(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The bare product."""
    return (embeddings @ embeddings.T).sum()


def ours(similarity: str, bins: int | None) -> Callable[[], Loss]:
    def make() -> Loss:
        from fewshot_callbacks import SoftAveragePrecisionLoss  # noqa: PLC0415 - a child imports what it measures

        return SoftAveragePrecisionLoss(bins, similarity=similarity)

    return make


def peer(name: str) -> Callable[[], Loss]:
    def make() -> Loss:
        from pytorch_metric_learning import losses  # noqa: PLC0415 - the same

        return getattr(losses, name)()

    return make


ROWS: dict[str, tuple[str, Callable[[], Loss]]] = {
    "floor": ("the bare product", lambda: floor),
    "ours": ("`SoftAveragePrecisionLoss`, 25 bins", ours("cosine", 25)),
    "ours_10": ("`SoftAveragePrecisionLoss`, 10 bins", ours("cosine", 10)),
    "ours_100": ("`SoftAveragePrecisionLoss`, 100 bins", ours("cosine", 100)),
    "ours_euclidean": ("`SoftAveragePrecisionLoss`, 25 bins, Euclidean", ours("euclidean", 25)),
    "ours_hamming": ("`SoftAveragePrecisionLoss`, Hamming, 513 bins", ours("hamming", None)),
    "fast_ap": ("`FastAPLoss`, 10 bins", peer("FastAPLoss")),
    "smooth_ap": ("`SmoothAPLoss`", peer("SmoothAPLoss")),
}


def batch(items: int, dim: int, per_class: int = 8) -> tuple[Tensor, Tensor]:
    """Return unit vectors around the centres of their classes, sorted by class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(items // per_class).repeat_interleave(per_class)
    centres = torch.randn(items // per_class, dim, generator=generator)
    embeddings = normalize(centres[labels] + torch.randn(items, dim, generator=generator), dim=1)
    return embeddings.requires_grad_(), labels


def step(loss: Loss, embeddings: Tensor, labels: Tensor) -> float:
    """Return the seconds of one forward and backward pass."""
    embeddings.grad = None
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    loss(embeddings, labels).backward()
    return clock() - started


def measure(row: str, items: int, dim: int, rounds: int) -> dict[str, Any]:
    """Return the cost of a loss, measured in this process."""
    loss = ROWS[row][1]()
    for size in (64, items):  # the second time nothing is new
        data = batch(size, dim)
        step(floor, *data)
        if size < items:
            step(loss, *data)
    data[0].grad = None
    with PeakMemory(torch.device("cpu")) as memory:
        step(loss, *data)
    ratios, seconds = [], []
    before = step(floor, *data)
    for _ in range(rounds):
        own, after = step(loss, *data), step(floor, *data)
        ratios.append(own / ((before + after) / 2))
        seconds.append(own)
        before = after
    mb = float("nan") if memory.mb is None else memory.mb
    return {"ratios": ratios, "seconds": statistics.median(seconds), "mb": mb}


def in_process_of_its_own(row: str, items: int, options: argparse.Namespace) -> dict[str, Any] | str:
    """Return what a loss takes in another process, or why it has no figures."""
    words = [sys.executable, __file__, "--child", row, "--batches", str(items), "--dim", str(options.dim)]
    words += ["--rounds", str(options.rounds), "--threads", str(options.threads), "--memory-gb", str(options.memory_gb)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=options.limit, check=False)
    except subprocess.TimeoutExpired:
        return f"over {options.limit:g} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip() or "killed").splitlines()[-1]
    if "allocate memory" in last or "MemoryError" in last or done.returncode < 0:
        return f"over {options.memory_gb:g} GB"
    return last[:60]


def micro_batches(results: Results, items: int, size: int) -> None:
    """Memory and processor time of Conv4 on glyph-sized images, the batch at once and in pieces."""
    from fewshot_callbacks import EmbeddingModule, SoftAveragePrecisionLoss  # noqa: PLC0415 - children do without

    images, labels = torch.rand(items, 1, 32, 32), torch.arange(items) // 8
    for micro_batch in (None, size):
        module = EmbeddingModule("conv4", SoftAveragePrecisionLoss(), in_channels=1, micro_batch=micro_batch).train()
        module.loss(module(images[: 2 * size]), labels[: 2 * size]).backward()  # the second time nothing is new
        module.zero_grad()
        started = time.process_time()
        with PeakMemory(torch.device("cpu")) as memory:
            module.loss(module(images), labels).backward()
        results.add(str(micro_batch), time.process_time() - started, memory.mb)


def limit_memory(gigabytes: float) -> None:
    """Let a row that needs more fail instead of slowing the machine."""
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + int(gigabytes * 1e9), resource.RLIM_INFINITY))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory-gb", type=float, default=8)
    parser.add_argument("--limit", type=float, default=600, help="seconds a row may take")
    parser.add_argument("--micro-batch", action="store_true", help="measure EmbeddingModule(micro_batch=64) instead")
    add_file_option(parser)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.micro_batch:
        torch.set_num_threads(options.threads)
        print("EmbeddingModule with Conv4 on 1,024 images of 32 x 32 pixels\n")
        with Results(MICRO_BATCH_COLUMNS, threads=options.threads, file=options.json) as results:
            micro_batches(results, 1024, 64)
        return
    if options.child:
        torch.set_num_threads(options.threads)
        limit_memory(options.memory_gb)
        print(json.dumps(measure(options.child, options.batches[0], options.dim, options.rounds)))
        return
    with Results(COLUMNS, threads=options.threads, file=options.json) as results:
        for items in options.batches:
            matrix = items**2 * 4 / 1e6
            for row in options.rows:
                found = in_process_of_its_own(row, items, options)
                if isinstance(found, str):
                    results.add(items, ROWS[row][0], found, None, None, None)
                    continue
                mb = found["mb"]
                results.add(items, ROWS[row][0], spread(found["ratios"]), found["seconds"], mb, mb / matrix)


if __name__ == "__main__":
    main()
