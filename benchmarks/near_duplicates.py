"""The cost of `near_duplicates` and `nearest`, as multiples of the bare float32 product of all pairs.

    python benchmarks/near_duplicates.py --threads 1                 # 4,000 and 31,730 512-dimensional items
    python benchmarks/near_duplicates.py --items 8000 --difficulty random --near-collapsed 0 --memory-mb 64

Each call is timed between two runs of the floor in the same process. The floor is the product of all pairs in the tiles that
are fastest on this machine; it computes each pair of two items twice. Quotients are medians over rounds with minimum and
maximum; seconds are medians; memory is the peak beyond the embeddings. The embeddings are the same as in
`benchmarks/retrieval.py`, plus copies of every hundredth item with a little noise; in the last row all cosines are within
1e-7 of each other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from _embeddings import DIFFICULTIES, make
from _results import Cell, Column, Results, add_file_option
from retrieval import Floor, PeakMemory, best_tile, spread

from fewshot_callbacks import near_duplicates, nearest


def with_copies(items: int, dim: int, difficulty: str) -> Tensor:
    embeddings, _ = make(items, dim, difficulty)
    copied = torch.arange(0, items - 1, 100)
    noise = torch.randn(len(copied), dim, generator=torch.Generator().manual_seed(1))
    embeddings[copied + 1] = embeddings[copied] + 0.001 * noise
    return torch.nn.functional.normalize(embeddings, dim=1)


def columns(min_score: float, k: int) -> tuple[Column, ...]:
    """Return the columns of the table."""
    neighbours = f"`nearest`, k={k}"
    return (
        Column("items", ",d"),
        Column("embeddings"),
        Column(f"pairs with a cosine of {min_score:g} or more", ",d"),
        Column("`near_duplicates`, x product", ".2f"),
        Column("`near_duplicates`, seconds", ".2f"),
        Column("`near_duplicates`, MB beyond the embeddings", ",.0f"),
        Column(f"{neighbours}, x product", ".2f"),
        Column(f"{neighbours}, seconds", ".2f"),
        Column(f"{neighbours}, MB beyond the embeddings", ",.0f"),
    )


def cells(run: Callable[[], object], floor: Floor, rounds: int) -> tuple[Cell, ...]:
    """Return the multiple of the floor before and after, the seconds, and the peak memory in MB."""
    taken = []
    quotients = []
    peaks = []
    for _ in range(rounds):
        before = floor.best()
        with PeakMemory(torch.device("cpu")) as memory:
            started = time.perf_counter()
            run()
            seconds = time.perf_counter() - started
        taken.append(seconds)
        quotients.append(2 * seconds / (before + floor.best()))
        peaks.append(float("nan") if memory.mb is None else memory.mb)
    return spread(quotients), statistics.median(taken), max(peaks)


def add_line(results: Results, items: int, difficulty: str, options: argparse.Namespace) -> None:
    """Measure both calls on a set."""
    embeddings = with_copies(items, options.dim, difficulty)
    floor = Floor(embeddings, best_tile(embeddings))
    pairs: dict[str, Any] = {"min_score": options.min_score, "memory_mb": options.memory_mb}
    neighbours: dict[str, Any] = {"k": options.k, "memory_mb": options.memory_mb}
    near_duplicates(embeddings[:3000], **pairs)  # compiles kernels, here and in the library
    nearest(embeddings[:3000], **neighbours)
    total = near_duplicates(embeddings, **pairs).total
    found = cells(lambda: near_duplicates(embeddings, **pairs), floor, options.rounds)
    found += cells(lambda: nearest(embeddings, **neighbours), floor, options.rounds)
    results.add(items, difficulty, total, *found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, nargs="+", default=[4000, 31730], help="(default: 4000 31730)")
    parser.add_argument("--dim", type=int, default=512, help="dimension of the items (default: %(default)s)")
    parser.add_argument("--difficulty", nargs="+", choices=DIFFICULTIES, default=["well-trained", "hard"])
    parser.add_argument(
        "--near-collapsed", type=int, default=4000, help="items of the last row; 0 leaves it out (default: %(default)s)"
    )
    parser.add_argument("--min-score", type=float, default=0.98, help="lowest cosine of a pair (default: %(default)s)")
    parser.add_argument("--k", type=int, default=10, help="neighbours of each item (default: %(default)s)")
    parser.add_argument("--memory-mb", type=float, help="budget of a call (default: the library's default)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each call (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="of torch (default: all)")
    add_file_option(parser)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with Results(columns(options.min_score, options.k), threads=torch.get_num_threads(), file=options.json) as results:
        for items in options.items:
            for difficulty in options.difficulty:
                add_line(results, items, difficulty, options)
        if options.near_collapsed:
            add_line(results, options.near_collapsed, "near-collapsed", options)


if __name__ == "__main__":
    main()
